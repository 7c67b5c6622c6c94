"""The draw of a token for every row in two launches, without a sort and without a decision of the host.

    scan   a warp for every 128 neighbouring tokens (a group): their largest logit, and the sum of exp; of
           rows that truncate nothing the winner of the draw among them
    draw   a block for every row:
           largest logits of groups -> t, the k-th largest of them (128 where no top-k asks for fewer)
           groups that reach t -> tokens that do: the candidates, in order of id
           how many candidates are likelier, and how likely they are together -> what truncation keeps
           noise, argmax

At least k tokens reach t, one in each of k groups: so the candidates hold the k likeliest tokens, and all
that are as likely. A mask may leave fewer groups: then t is the lowest finite number, and every token that
can be drawn is a candidate. Where truncation may leave others too, or candidates are more than CANDIDATES,
the block looks at the whole row, as the definition does: thresholds bit by bit, in up to 65 passes, of which
groups below the threshold are spared.

Penalties and biases are applied wherever a logit is read: nothing of a row's length is written, and the
tables of tokens seen are read for rows with penalties only. Sums are made in another order than the
definition's, and exp and log may differ in the last place: tokens at a boundary of top-p may fall on its
other side, by parts in a million.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import (
    from_ordered,
    greatest,
    index,
    integer,
    maximum,
    minimum,
    real,
    select,
    total,
    true,
)
from pallas_kernels.sampling.block import THREADS, WARPS, Block, best_of_lane, best_of_warp, listed
from pallas_kernels.sampling.row import EACH, GROUP, Row, sortable
from pallas_kernels.sampling.rules import NO_TOKEN, Rules

SCAN_WARPS = 8  # of a block of the first launch
MOST_NEEDED = 320  # of top-k: so many groups, with two tokens of some, are likely to fit
NEEDED = 128  # groups that are looked for where there is no top-k, or a larger one
CANDIDATES = THREADS  # one for each thread of a row's block
AT_A_TIME = 4  # groups that a warp reads at a time
NEGATIVE_INFINITY, INFINITY = 0x007FFFFF, 0xFF800000  # as `sortable` writes them
LOWEST_FINITE = NEGATIVE_INFINITY + 1
LOWEST = -3e38  # instead of -inf, of which differences are no numbers


def run(logits, rules: Rules, keys, positions):
    """pallas_kernels.sampling.draw, with a launch for each entry of vmap."""
    return jax.custom_batching.sequential_vmap(draw)(logits.astype(jnp.float32), rules, keys, positions)


@jax.jit
def draw(
    logits: jax.Array, rules: Rules, keys: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The kernels behind pallas_kernels.sampling.draw; arguments and results are described there."""
    rows, vocabulary = logits.shape
    groups = -(-vocabulary // GROUP)
    seen, counts = map(jax.new_ref, (rules.seen, rules.counts))
    words = lambda x: jax.lax.bitcast_convert_type(x, jnp.int32)  # noqa: E731
    allowed = None if rules.allowed is None else words(rules.allowed)
    operands = {
        "logits": logits,
        # pyrefly: ignore[bad-argument-type]
        "rules": rules._replace(seen=seen, counts=counts, allowed=allowed),
        "keys": words(keys),
        "positions": positions,
    }
    shape = lambda dtype: jax.ShapeDtypeStruct((rows, groups), dtype)  # noqa: E731
    run = max(1, min(4, rows * groups // 8192))  # groups of a warp: several where there are many
    warps = rows * -(-groups // run)
    scanned = launch(
        functools.partial(_scan, run=run),
        operands,
        {
            "maxima": shape(jnp.float32),
            "sums": shape(jnp.float32),
            "winners": shape(jnp.int32),
            "scores": shape(jnp.int32),
        },
        name="sampling_scan",
        blocks=-(-warps // SCAN_WARPS),
        threads=32 * SCAN_WARPS,
    )
    names = ("maxima", "sums", "winners", "scores")
    tokens = launch(
        _draw,
        {**operands, **dict(zip(names, scanned, strict=True))},
        {"tokens": jax.ShapeDtypeStruct((rows,), jnp.int32)},
        name="sampling_draw",
        blocks=rows,
        threads=THREADS,
        scratch={
            "partial_smem": plgpu.SMEM((Block.SLOTS * WARPS,), jnp.int32),
            "counts_smem": plgpu.SMEM((max(AT_A_TIME, -(-groups // THREADS)) * WARPS,), jnp.int32),
            "groups_smem": plgpu.SMEM((groups,), jnp.int32),
            "ids_smem": plgpu.SMEM((CANDIDATES,), jnp.int32),
            "values_smem": plgpu.SMEM((CANDIDATES,), jnp.float32),
            "weights_smem": plgpu.SMEM((CANDIDATES,), jnp.float32),
        },
    )
    return tokens, jax.freeze(seen), jax.freeze(counts)


def _scan(logits, rules, keys, positions, maxima, sums, winners, scores, *, run: int):
    rows, groups = maxima.type.shape
    warp = lanes.thread() // 32 + lanes.block() * SCAN_WARPS
    runs = -(-groups // run)
    number = warp // runs
    with lanes.when(number < rows):
        row = Row(logits, rules, keys, positions, number)
        own = [minimum(warp % runs * run + i, groups - 1) for i in range(run)]
        read = [row.read(group) for group in own]
        for group, values in zip(own, read, strict=True):
            values = row.changed(group, values)
            largest = lanes.largest_of_warp(greatest(values))
            from_here = maximum(largest, LOWEST)
            weight = lanes.warp_sum_real(total([row.weight(x, from_here) for x in values]))
            with lanes.when(lanes.thread() % 32 == 0):
                memory.store(largest, maxima, row.row, group)
                memory.store(weight, sums, row.row, group)
            with lanes.when(row.truncates_nothing):
                key, ids = row.at_its_position(), row.ids(group)
                scores_here = [row.score(x, i, key) for x, i in zip(values, ids, strict=True)]
                score, token = best_of_warp(*best_of_lane(list(zip(scores_here, ids, strict=True))))
                with lanes.when(lanes.thread() % 32 == 0):
                    memory.store(score, scores, row.row, group)
                    memory.store(token, winners, row.row, group)


def _draw(
    logits, rules, keys, positions, maxima, sums, winners, scores, tokens,
    partial_smem, counts_smem, groups_smem, ids_smem, values_smem, weights_smem,
):  # fmt: skip
    row, block = Row(logits, rules, keys, positions, lanes.block()), Block(partial_smem)
    groups = maxima.type.shape[1]
    per_thread = -(-groups // THREADS)
    own = [lanes.thread() + i * THREADS for i in range(per_thread)]

    def store(score, token):
        drawable = (score > NEGATIVE_INFINITY) & (score < INFINITY)
        with lanes.when(lanes.thread() == 0):
            memory.store(select(drawable, token, NO_TOKEN), tokens, row.row)
        with lanes.when((lanes.thread() == 0) & drawable & row.counted):
            memory.store(true(), rules.seen, row.table, token)
            memory.store(memory.load(rules.counts, row.table, token) + 1, rules.counts, row.table, token)

    def group_words(ref, otherwise):
        """A word of each of this thread's groups."""
        return [select(g < groups, memory.load(ref, row.row, minimum(g, groups - 1)), otherwise) for g in own]

    largest = group_words(maxima, -float("inf"))
    with lanes.when(row.truncates_nothing):
        best = best_of_lane(list(zip(group_words(scores, 0), group_words(winners, 0), strict=True)))
        store(*block.best(*best))
    with lanes.when(~row.truncates_nothing):
        keys = [select(g < groups, sortable(x), 0) for g, x in zip(own, largest, strict=True)]
        (per_warp,) = block.gathered([lanes.warp_max(greatest(keys))], block.place())
        peak_key = greatest(per_warp)  # the largest word of all where it is NaN
        peak = from_ordered(peak_key)
        needed = select(row.k <= MOST_NEEDED, row.k, NEEDED)
        count = lambda t, place: block.sum(total([select(key >= t, 1, 0) for key in keys]), place)  # noqa: E731
        t = block.threshold(count, needed, needed + needed // 4)  # a few more are as good
        t = maximum(t, LOWEST_FINITE)
        all_listed = t == LOWEST_FINITE  # every group that has a token to draw
        reaching = [(key >= t) & (g < groups) for g, key in zip(own, keys, strict=True)]
        store_group = lambda r, _, place: memory.store(integer(own[r]), groups_smem, place)  # noqa: E731
        count = listed([[reaches] for reaches in reaching], counts_smem, store_group)
        # Also a barrier, behind which the list is read.
        lanes.block_barrier()
        few = count <= CANDIDATES
        n = lanes.choose(
            few,
            lambda: [_candidates(row, t, count, counts_smem, groups_smem, ids_smem, values_smem)],
            [integer(CANDIDATES + 1)],
        )[0]

        # Threads have a candidate each, the others one that counts for nothing.
        i, slot = integer(lanes.thread()), lanes.thread()
        present = (i < n) & (n <= CANDIDATES)
        value = select(present, memory.load(values_smem, slot), -float("inf"))
        weight = select(present, row.weight(value, peak), 0.0)
        token = memory.load(ids_smem, slot)
        memory.store(value, values_smem, slot)
        memory.store(weight, weights_smem, slot)
        lanes.block_barrier()

        def likelier(j, carry):
            above, mass = carry
            values, weights = (memory.load_reals(4, smem, [j]) for smem in (values_smem, weights_smem))
            for v, w in zip(values, weights, strict=True):
                above = above + select(v > value, 1, 0)
                mass = mass + select(v > value, w, 0.0)
            return [above, mass]

        first_of_warp = i & 0xFFFFFFE0
        stop = select((first_of_warp < n) & (n <= CANDIDATES), n, 0)
        above, mass = lanes.loop(0, stop, 4, [integer(0), real(0)], likelier)
        in_top_k = present & (above < row.k)
        no_top_k = row.k == row.vocabulary

        def whole_row():
            weights = group_words(sums, 0.0)
            return [total([w * row.weight(m, peak) for w, m in zip(weights, largest, strict=True)])]

        share = lanes.choose(no_top_k, whole_row, [select(in_top_k, weight, 0.0)])[0]
        everything, candidates_sum = block.sums([share, weight])
        target = row.top_p * everything
        keep = (
            in_top_k
            & ((row.top_p >= 1) | (mass < target) | (mass == 0))  # the likeliest stays, whatever top_p
            & (weight >= row.min_p)
        )
        by_top_k = row.k <= n
        by_top_p = no_top_k & (row.top_p < 1) & (candidates_sum >= target)
        by_min_p = (no_top_k | (row.top_p >= 1)) & (row.weight(from_ordered(t), peak) < row.min_p)
        enough = (n <= CANDIDATES) & (by_top_k | by_top_p | by_min_p | all_listed)
        with lanes.when(enough):
            score = select(keep, row.score(value, token, row.at_its_position()), 0)
            store(*block.best(select(peak_key < INFINITY, score, 0), token))
        with lanes.when(~enough):
            with lanes.when(~all_listed):
                for g in own:
                    with lanes.when(g < groups):
                        memory.store(integer(g), groups_smem, g)
            lanes.block_barrier()
            look_at = groups_smem, select(all_listed, count, groups)
            score, token = _among_all(row, block, maxima, peak, *look_at)
            store(select(peak_key < INFINITY, score, 0), token)


def _candidates(row: Row, t, count, counts_smem, groups_smem, ids_smem, values_smem):
    """Tokens that reach t, of the listed groups, into shared memory in the order of ids: how many they are,
    of which the first CANDIDATES are there. Ends with a barrier."""
    warp = integer(lanes.thread() // 32)

    def some(first, carry):
        (base,) = carry
        entries = [integer(first) + (warp + WARPS * r) for r in range(AT_A_TIME)]
        groups = [memory.load(groups_smem, minimum(entry, count - 1)) for entry in entries]
        read = [row.read(group) for group in groups]
        values = [row.changed(group, x) for group, x in zip(groups, read, strict=True)]
        reaching = [
            [
                (entry < count) & (sortable(x) >= t) & (i < row.vocabulary)
                for x, i in zip(group_values, row.ids(group), strict=True)
            ]
            for entry, group_values, group in zip(entries, values, groups, strict=True)
        ]

        def store(r, i, place):
            memory.store(values[r][i], values_smem, place)
            memory.store(row.ids(groups[r])[i], ids_smem, place)

        added = listed(reaching, counts_smem, store, base, CANDIDATES)
        lanes.block_barrier()
        return [base + added]

    return lanes.loop(0, count, WARPS * AT_A_TIME, [integer(0)], some)[0]


def _among_all(row: Row, block: Block, maxima, peak, groups_smem, count):
    """The score and the token drawn among all that truncation leaves of the first `count` groups that are
    listed, as the definition finds it."""
    zero = integer(0)

    def over_tokens(t, carry: list, body, at_a_time: int = AT_A_TIME) -> list:
        """carry = body(values, ids, carry) for every group that reaches t, shared out over warps."""

        def some(first, carry):
            numbers = [integer(first + WARPS * r) for r in range(at_a_time)]
            present = [memory.load(groups_smem, minimum(number, count - 1)) for number in numbers]
            keys = [sortable(memory.load(maxima, row.row, group)) for group in present]
            reaches = [(number < count) & (key >= t) for number, key in zip(numbers, keys, strict=True)]
            read = [
                lanes.choose(ok, lambda group=group: row.read(group), [real(0)] * EACH)
                for ok, group in zip(reaches, present, strict=True)
            ]
            for ok, group, logits in zip(reaches, present, read, strict=True):
                one = lambda group=group, logits=logits, carry=carry: body(  # noqa: E731
                    row.changed(group, logits), row.ids(group), carry
                )
                carry = lanes.choose(ok, one, carry)
            return carry

        return lanes.loop(lanes.thread() // 32, count, WARPS * at_a_time, carry, some)

    places = block.place(5)  # two in turn for each threshold, as steps may be left out between them

    def tried(step, t, floor, least):
        """One of 65 steps: 32 bits of top-k's threshold, by counting; the sum of what reaches it; and 32 bits
        of top-p's, by sums."""
        counts, sums = step < 32, step == 32
        bit = integer(1) << 31 - (step - select(counts, 0, 33) & 31)
        candidate = select(sums, t, t | bit)
        within = maximum(candidate, floor)

        def body(values, _, so_far):
            weights = [select(counts, 1.0, row.weight(x, peak)) for x in values]
            reach = [select(sortable(x) >= within, w, 0.0) for x, w in zip(values, weights, strict=True)]
            return [so_far[0] + total(reach)]

        partial = over_tokens(within, [real(0)], body)
        place = select(sums, 4, step % 2 + select(counts, 0, 2))
        amount = block.sums(partial, places + index(place) * WARPS)[0]
        reached = amount >= least
        going_on = [select(reached, candidate, t), floor, least, select(reached & (amount == least), 0, 1)]
        # The likeliest stays, whatever top_p.
        turned = [zero, t, maximum(row.top_p * amount, 1e-30), integer(1)]
        return [select(sums, *pair) for pair in zip(turned, going_on, strict=True)]

    def one(step, carry):
        step, looking = integer(step), carry.pop() != 0
        runs = looking & (step != 32) | (step == 32) & (row.top_p < 1)
        none = integer(0)
        return lanes.choose(runs, lambda: tried(step, *carry), [*carry, none])

    k = real(minimum(row.k, row.vocabulary))
    begin = [zero, zero, k, select(row.k < row.vocabulary, 1, 0)]
    t, floor, *_ = lanes.loop(0, 65, 1, begin, one)
    t, key = maximum(t, floor), row.at_its_position()

    def race(values, ids, carry):
        pairs = [tuple(carry)]
        for x, i in zip(values, ids, strict=True):
            keep = (sortable(x) >= t) & (row.weight(x, peak) >= row.min_p) & (i < row.vocabulary)
            pairs.append((select(keep, row.score(x, i, key), 0), i))
        return list(best_of_lane(pairs))

    return block.best(*over_tokens(t, [zero, zero], race, 1))
