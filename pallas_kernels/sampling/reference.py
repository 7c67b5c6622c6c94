"""The draw of a token in jnp: the reference, which runs where no kernel does."""

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels.sampling.rules import NO_TOKEN, Rules

CANDIDATES = 128  # a draw looks at so many of the likeliest tokens, and rarely at more
SORTED = 1024  # a vocabulary of so many is sorted whole: a way for the rest would be half of what is compiled
WIDTH = 128  # a CPU goes over 151,680 numbers ten times as fast as over 151,669


def draw(
    logits: Float[Array, "B V"], rules: Rules, keys: UInt32[Array, "B 2"], positions: Int[Array, "B"]
) -> tuple[Int[Array, "B"], Bool[Array, "tables V"], Int[Array, "tables V"]]:
    """As pallas_kernels.sampling.draw says. A batch of greedy rows skips all but the argmax."""
    logits = penalize(rules, logits.astype(jnp.float32))
    # NaN counts as +inf, because XLA's maximum on a CPU may pass over it.
    peak = jnp.where(logits < jnp.inf, logits, jnp.inf).max(-1)
    tokens = jax.lax.cond(
        jnp.any(rules.temperature > 0),
        _draw,
        lambda logits, *_: first(logits == peak[:, None]),
        logits,
        rules,
        jax.vmap(at_position)(keys, positions),
    )
    drawable = jnp.isfinite(peak)
    at = rules.table, jnp.where(drawable, tokens, rules.seen.shape[1])
    tables = rules.seen.at[at].set(True, mode="drop"), rules.counts.at[at].add(1, mode="drop")
    return jnp.where(drawable, tokens, NO_TOKEN), *tables


def penalize(rules: Rules, logits: Float[Array, "B V"]) -> Float[Array, "B width"]:
    """Logits after penalties and biases; -inf where it is not allowed, and up to a multiple of WIDTH."""
    penalty = rules.repetition_penalty[:, None]
    seen, counts = (x.at[rules.table].get(mode="clip") for x in (rules.seen, rules.counts))
    logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    logits -= rules.frequency_penalty[:, None] * counts + rules.presence_penalty[:, None] * (counts > 0)
    logits = jnp.pad(logits, ((0, 0), (0, -logits.shape[1] % WIDTH)), constant_values=-jnp.inf)
    row, tokens = jnp.arange(logits.shape[0])[:, None], jnp.arange(logits.shape[1])
    logits = logits.at[row, rules.bias_ids].add(rules.bias, mode="drop")
    if rules.allowed is not None:
        words = jnp.repeat(rules.allowed, 32, axis=1, total_repeat_length=logits.shape[1])
        logits = jnp.where(words >> (tokens % 32).astype(jnp.uint32) & 1 != 0, logits, -jnp.inf)
    return logits


def _draw(logits: jax.Array, rules: Rules, keys: jax.Array) -> jax.Array:
    """Among the likeliest tokens, where they hold all that truncation keeps in every row; else among all.
    Noise is a token's own, so that both draw the same."""
    vocabulary = logits.shape[1]
    candidates = vocabulary if vocabulary <= SORTED else CANDIDATES
    # Without barriers XLA sees slices of a sort, and sorts the vocabulary. One for both outputs would be a
    # reader of their tuple, at which jaxlib 0.11.2 aborts.
    best = jax.lax.top_k(logits, candidates)
    top, ids = (jax.lax.optimization_barrier(array) for array in best)
    keep, all_kept_are_here = truncate_sorted(rules, top, logits)
    greedy = rules.temperature == 0
    temperature = jnp.where(greedy, 1.0, rules.temperature)[:, None]

    def race(logits, keep, ids):
        noise = jax.vmap(gumbel)(keys, ids)
        scores = jnp.where(keep, logits / temperature + noise, -jnp.inf)
        return first(scores == scores.max(-1, keepdims=True))

    def among_candidates():
        return jnp.take_along_axis(ids, race(top, keep, ids)[:, None], 1)[:, 0]

    def among_all():
        every = jnp.broadcast_to(jnp.arange(vocabulary), logits.shape)
        return race(logits, truncate(rules, logits), every).astype(ids.dtype)

    if candidates == vocabulary:
        drawn = among_candidates()
    else:
        drawn = jax.lax.cond(jnp.all(all_kept_are_here | greedy), among_candidates, among_all)
    return jnp.where(greedy, ids[:, 0], drawn)


def first(holds: Bool[Array, "B n"]) -> Int[Array, "B"]:
    """The first place in each row that holds, else the last. After a maximum this is an argmax in two passes
    that a CPU makes many numbers at a time; not so jnp.argmax."""
    ids, last = jnp.arange(holds.shape[1], dtype=jnp.int32), holds.shape[1] - 1
    return jnp.where(holds, ids, last).min(-1)


def at_position(key: UInt32[Array, "2"], position: Int[Array, ""]) -> UInt32[Array, "2"]:
    """jax.random.fold_in of a Threefry key: the key of the noise at a position."""
    return threefry_2x32((key[0], key[1]), jnp.stack([jnp.uint32(0), position.astype(jnp.uint32)]))


def gumbel(key: UInt32[Array, "2"], ids: Int[Array, "n"]) -> Float[Array, "n"]:
    """Noise -log(-log u) of tokens, by their ids alone (Threefry counts them)."""
    counts = ids.astype(jnp.uint32)
    bits = threefry_2x32((key[0], key[1]), jnp.concatenate([counts, jnp.zeros_like(counts)]))[: len(ids)]
    u = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23  # neither 0 nor 1
    return -jnp.log(-jnp.log(u))


def weights(rules: Rules, x: Float[Array, "B n"], peak: Float[Array, "B 1"]) -> Float[Array, "B n"]:
    """How likely tokens of these logits are for the truncations, over the likeliest."""
    scale = jnp.where(rules.temperature_first & (rules.temperature > 0), 1 / rules.temperature, 1.0)
    return jnp.exp((x - peak) * scale[:, None])


def truncate_sorted(
    rules: Rules, top: Float[Array, "B n"], logits: Float[Array, "B V"]
) -> tuple[Bool[Array, "B n"], Bool[Array, "B"]]:
    """What `truncate` leaves of a row's likeliest tokens, whose logits are `top`, the likeliest first; and
    whether in that row it leaves none but them."""
    n, vocabulary = top.shape[1], logits.shape[1]
    peak, last = top[:, :1], top[:, -1:]
    k = jnp.where(rules.top_k > 0, jnp.minimum(rules.top_k, vocabulary), vocabulary)[:, None]
    kth = jnp.where(k <= n, jnp.take_along_axis(top, jnp.minimum(k, n) - 1, 1), -jnp.inf)
    weight = jnp.where(top >= kth, weights(rules, top, peak), 0.0)
    # The sum over what top-k keeps is known where it keeps candidates only, or all tokens.
    ends_here = (kth > last) | (n == vocabulary)
    total = weight.sum(-1, keepdims=True)
    if n < vocabulary:
        everything = weights(rules, logits, peak).sum(-1, keepdims=True)
        total = jnp.where(ends_here, total, everything)
    reached = jnp.cumsum(weight, 1) >= rules.top_p[:, None] * total
    at = jnp.where(reached.any(1), reached.argmax(1), n - 1)[:, None]
    whole = (rules.top_p >= 1)[:, None]
    nucleus = jnp.where(reached.any(1, keepdims=True) & ~whole, jnp.take_along_axis(top, at, 1), -jnp.inf)
    keep = (top >= kth) & (top >= nucleus) & (weights(rules, top, peak) >= rules.min_p[:, None])
    cut = ends_here | (nucleus > last) | (weights(rules, last, peak) < rules.min_p[:, None])
    known = ends_here | (k == vocabulary) | whole
    return keep, (cut & known)[:, 0]


def truncate(rules: Rules, logits: Float[Array, "B V"]) -> Bool[Array, "B V"]:
    """What top-k, then top-p, then min-p leave. Thresholds are found bit by bit, without sorting the
    vocabulary, and only where a row asks for them."""
    p = weights(rules, logits, logits.max(-1, keepdims=True))

    def by_thresholds():
        order = sortable(logits)
        k = jnp.where(rules.top_k > 0, rules.top_k, logits.shape[1])
        keep = order >= threshold(order, jnp.ones_like(logits), k.astype(jnp.float32))[:, None]
        weight = jnp.where(keep, p, 0.0)
        least = jnp.maximum(rules.top_p * weight.sum(-1), 1e-30)  # the likeliest stays, whatever top_p
        nucleus = order >= threshold(order, weight, least)[:, None]
        return keep & (nucleus | (rules.top_p >= 1)[:, None])

    cut = jnp.any((rules.top_k > 0) | (rules.top_p < 1))
    keep = jax.lax.cond(cut, by_thresholds, lambda: jnp.ones(logits.shape, bool))
    return keep & (p >= rules.min_p[:, None])


def sortable(x: Float[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Words in the order of float32: sign bit set for positives, all bits turned for negatives."""
    x = jnp.where(x == 0, 0.0, x)  # -0 becomes +0; XLA takes x + 0.0 for x
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def threshold(order: jax.Array, weight: jax.Array, target: jax.Array) -> jax.Array:
    """uint32 [B]: the largest t for which the weights of {order >= t} sum to target or more; 0 if none does.

    Found from the highest bit down, in 32 passes over the row.
    """

    def try_bit(i, t):
        candidate = t | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        reached = jnp.sum(jnp.where(order >= candidate[:, None], weight, 0.0), axis=-1)
        return jnp.where(reached >= target, candidate, t)

    return jax.lax.fori_loop(0, 32, try_bit, jnp.zeros(order.shape[0], jnp.uint32))
