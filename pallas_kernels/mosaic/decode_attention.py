"""One token's attention for every row: QK-norm, rope, cache write and flash decoding over pages, in one
launch.

A block of 256 threads has one row, one KV head with its G query heads, and one split of the row's keys.
Sixteen neighbouring lanes are a worker, which holds D / 16 elements a lane of each query head; the 16 workers
of a block take keys in turn:

    first keys and values of its split -> registers         (on their way while q is made)
    q, k, v of the new token -> norm, rope -> registers     (split 0 also stores k and v, and attends to the
                                                            new key)
    worker: keys of its split -> online softmax (m, l, o)
    block:  16 workers -> shared memory -> (m, l, o) of the split
    last block of a row and KV head to finish: splits -> out

Splits depend on a row's own length only, and are combined in order: a row's bits do not depend on other rows,
nor on which block finishes last. `decode_attention` is this phase as a kernel of its own; decode_layers.py
has it in one launch with the products.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith
from jax._src.lib.mlir.dialects import math as mlir_math
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import lanes

THREADS, WORKERS, SHARE = 256, 16, 16  # SHARE lanes are a worker
WARPS = THREADS // 32
AT_ONCE = 5  # keys that a worker has on their way together
LOWEST = -1e30  # stands for minus infinity, of which differences are not numbers
KEYS_PER_SPLIT = AT_ONCE * WORKERS  # that much is on its way before q is there
KEYS_ALONE = 2 * KEYS_PER_SPLIT  # so few are not worth combining
BLOCKS = 128  # about as many as an H200 has multiprocessors


@functools.partial(jax.jit, static_argnames=("eps", "interleaved"))
def decode_attention(
    qkv, k_pages, v_pages, block_table, positions, layer, cos, sin, norms, eps, interleaved
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The kernel behind pallas_kernels.attention.decode_attention; arguments and results are described
    there."""
    page_size, kv_heads, head_dim = k_pages.shape[2:]
    batch, width = qkv.shape[0], qkv.shape[1] - 2 * kv_heads * head_dim
    phase = Attention(
        rows=batch, kv_heads=kv_heads, heads=width // (kv_heads * head_dim), head_dim=head_dim,
        page_size=page_size, pages=block_table.shape[1], most_blocks=BLOCKS,
        normed=norms is not None, eps=eps, interleaved=interleaved,
    )  # fmt: skip
    keys, values = jax.new_ref(k_pages), jax.new_ref(v_pages)
    finished = jax.new_ref(jnp.zeros(batch * kv_heads, jnp.int32))
    kernel = plgpu.kernel(
        functools.partial(_body, phase=phase),
        out_type=(jax.ShapeDtypeStruct((batch, width), jnp.float32), *phase.partials()),
        grid=(phase.blocks,),
        grid_names=("block",),
        num_threads=THREADS // 128,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((phase.scratch,), jnp.float32)],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    operands = [qkv, cos, sin, positions, block_table, jnp.asarray(layer, jnp.int32).reshape(1)]
    out, _, _ = kernel(*operands, *(norms or ()), keys, values, finished)
    return out, jax.freeze(keys), jax.freeze(values)


def _body(*refs, phase: "Attention"):
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
    def kernel(ctx, *refs):
        qkv, cos, sin, positions, table, layer_gmem, *refs = refs
        q_gamma, k_gamma, *refs = refs if phase.normed else (None, None, *refs)
        keys, values, finished, out, partial, max_sum, scratch_smem = refs
        layer = lanes.to_index(lanes.load(layer_gmem, 0))
        phase.run(
            Arrays(
                qkv, cos, sin, positions, table, q_gamma, k_gamma, keys, values, finished, out, partial, max_sum
            ),
            scratch_smem,
            layer,
            wait=lambda: None,
        )

    kernel(*refs)


@dataclasses.dataclass(frozen=True)
class Arrays:
    """What the phase reads and writes, in global memory."""

    qkv: object
    cos: object
    sin: object
    positions: object
    table: object
    q_gamma: object
    k_gamma: object
    keys: object
    values: object
    finished: object  # int32 [rows * kv_heads], zero before the first launch
    out: object
    partial: object
    max_sum: object


@dataclasses.dataclass(frozen=True)
class Attention:
    """The phase: `heads` query heads to each of `kv_heads`. Called while a kernel is traced."""

    rows: int
    kv_heads: int
    heads: int
    head_dim: int
    page_size: int
    pages: int
    most_blocks: int
    normed: bool
    eps: float
    interleaved: bool

    @property
    def splits(self) -> int:
        """Most splits of a row's keys; a shorter row has fewer."""
        wanted = -(-self.pages * self.page_size // KEYS_PER_SPLIT)
        return max(1, min(wanted, self.most_blocks // (self.rows * self.kv_heads)))

    @property
    def blocks(self) -> int:
        return self.rows * self.kv_heads * self.splits

    @property
    def scratch(self) -> int:
        """float32 of shared memory: sums [warps, heads, head_dim], maxima [heads, workers], totals [heads,
        warps], a flag."""
        return WARPS * self.heads * self.head_dim + self.heads * (WORKERS + WARPS) + 4

    def partials(self):
        """Shapes of a split's unweighted outputs and of its (maximum, sum of weights)."""
        lead = (self.rows, self.kv_heads, self.splits)
        return (
            jax.ShapeDtypeStruct((*lead, self.heads * self.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((*lead, self.heads * 2), jnp.float32),
        )

    def run(self, a: Arrays, scratch_smem, layer, wait: Callable, qkv_width: int = 0):
        """The share of this block. `wait` returns when qkv is there; it is called by all threads."""
        heads, head_dim, share = self.heads, self.head_dim, self.head_dim // SHARE
        thread, split = lanes.thread(), arith.remui(lanes.block(), lanes.index(self.splits))
        owner = arith.divui(lanes.block(), lanes.index(self.splits))  # row and KV head
        row = arith.divui(owner, lanes.index(self.kv_heads))
        kv_head = arith.remui(owner, lanes.index(self.kv_heads))
        worker, part = arith.divui(thread, lanes.index(SHARE)), arith.remui(thread, lanes.index(SHARE))
        warp = arith.divui(thread, lanes.index(32))
        mine = arith.muli(part, lanes.index(share))  # first of this lane's elements of a head
        position = lanes.load(a.positions, row)
        active = arith.cmpi(arith.CmpIPredicate.sge, position, lanes.integer(0))
        length = lanes.to_index(arith.maxsi(position, lanes.integer(0)))  # keys before the new one
        splits = arith.minui(
            arith.ceildivui(length, lanes.index(KEYS_PER_SPLIT)), lanes.index(self.splits)
        )
        few = lanes.is_below(length, lanes.index(KEYS_ALONE + 1))
        splits = arith.select(few, lanes.index(1), splits)
        chunk = arith.ceildivui(length, splits)
        start = arith.minui(length, arith.muli(split, chunk))
        stop = arith.minui(length, arith.addi(start, chunk))

        def place(j):
            page = lanes.to_index(lanes.load(a.table, row, arith.divui(j, lanes.index(self.page_size))))
            return [layer, page, arith.remui(j, lanes.index(self.page_size)), kv_head, mine]

        def fetch(first):
            """AT_ONCE keys and values a worker, as they are stored, and which of them are there."""
            wanted = [arith.addi(first, arith.addi(lanes.index(i * WORKERS), worker)) for i in range(AT_ONCE)]
            valid = [lanes.is_below(j, stop) for j in wanted]
            at = [place(arith.select(ok, j, start)) for ok, j in zip(valid, wanted, strict=True)]
            keys = [lanes.load_stored(share, a.keys, place_) for place_ in at]
            values = [lanes.load_stored(share, a.values, place_) for place_ in at]
            return valid, keys, values

        fetched = fetch(start)
        half = head_dim // 2
        if self.interleaved:
            first_angle, angles = arith.divui(mine, lanes.index(2)), share // 2
        else:
            first_angle, angles = arith.remui(mine, lanes.index(half)), share
        cos, sin = (lanes.load_reals(angles, ref, [row, first_angle]) for ref in (a.cos, a.sin))
        in_first_half = lanes.is_below(mine, lanes.index(half))
        gammas = [
            lanes.load_reals(share, gamma, [layer, mine]) if self.normed else None
            for gamma in (a.q_gamma, a.k_gamma)
        ]
        wait()

        def rotated(x, gamma):
            if gamma is not None:
                squares = functools.reduce(lambda total, v: mlir_math.fma(v, v, total), x, lanes.real(0))
                mean = arith.mulf(lanes.warp_sum_real(squares, SHARE), lanes.real(1 / head_dim))
                norm = mlir_math.rsqrt(arith.addf(mean, lanes.real(self.eps)))
                x = [arith.mulf(arith.mulf(v, norm), g) for v, g in zip(x, gamma, strict=True)]
            if self.interleaved:
                turned = []
                for i, (u, v) in enumerate(zip(x[::2], x[1::2], strict=True)):
                    turned.append(arith.subf(arith.mulf(u, cos[i]), arith.mulf(v, sin[i])))
                    turned.append(arith.addf(arith.mulf(v, cos[i]), arith.mulf(u, sin[i])))
                return turned
            # Element i of the first half and of the second are half a worker apart.
            other = [lanes.swapped(v, SHARE // 2) for v in x]
            other = [arith.select(in_first_half, arith.negf(o), o) for o in other]
            return [
                arith.addf(arith.mulf(v, c), arith.mulf(o, s))
                for v, o, c, s in zip(x, other, cos, sin, strict=True)
            ]

        width = qkv_width or (heads + 2) * self.kv_heads * head_dim

        def head_of(first, head):
            """This lane's elements of head `first + head` of qkv."""
            at = arith.addi(arith.muli(arith.addi(head, lanes.index(first)), lanes.index(head_dim)), mine)
            at = arith.addi(arith.muli(row, lanes.index(width)), at)
            return lanes.load_reals_written_by_others(share, a.qkv, at)

        def attend():
            raw = [head_of(g, arith.muli(kv_head, lanes.index(heads))) for g in range(heads)]
            new_key = head_of(heads * self.kv_heads, kv_head)
            new_value = head_of((heads + 1) * self.kv_heads, kv_head)
            q = [[arith.mulf(v, lanes.real(head_dim**-0.5)) for v in rotated(x, gammas[0])] for x in raw]
            new_key = lanes.as_stored(rotated(new_key, gammas[1]), a.keys)
            new_value = lanes.as_stored(new_value, a.values)

            def score(g, key):
                dot = functools.reduce(
                    lambda total, pair: mlir_math.fma(*pair, total),
                    zip(q[g], key, strict=True),
                    lanes.real(0),
                )
                return lanes.warp_sum_real(dot, SHARE)

            first_split = lanes.is_equal(split, lanes.index(0))
            has_new = arith.andi(arith.andi(first_split, lanes.is_equal(worker, lanes.index(0))), active)
            with lanes.when(has_new):
                lanes.store_reals(new_key, a.keys, place(length))
                lanes.store_reals(new_value, a.values, place(length))

            # The state of a worker: per query head its largest score, the sum of weights, weighted values.
            state = []
            for g in range(heads):
                state.append(arith.select(has_new, score(g, new_key), lanes.real(LOWEST)))
                state.append(arith.select(has_new, lanes.real(1), lanes.real(0)))
                state += [arith.select(has_new, v, lanes.real(0)) for v in new_value]

            def visit(fetched, state):
                valid, keys, values = fetched
                keys, values = ([lanes.reals(x) for x in stored] for stored in (keys, values))
                out = []
                for g in range(heads):
                    maximum, total, *o = state[g * (share + 2) : (g + 1) * (share + 2)]
                    scores = [
                        arith.select(ok, score(g, key), lanes.real(LOWEST))
                        for ok, key in zip(valid, keys, strict=True)
                    ]
                    new_maximum = functools.reduce(arith.maximumf, scores, maximum)
                    keep = mlir_math.exp(arith.subf(maximum, new_maximum))
                    total, o = arith.mulf(total, keep), [arith.mulf(v, keep) for v in o]
                    for ok, s, value in zip(valid, scores, values, strict=True):
                        weight = mlir_math.exp(arith.subf(s, new_maximum))
                        weight = arith.select(ok, weight, lanes.real(0))
                        total = arith.addf(total, weight)
                        o = [mlir_math.fma(weight, v, o_) for v, o_ in zip(value, o, strict=True)]
                    out += [new_maximum, total, *o]
                return out

            at_once = lanes.index(AT_ONCE * WORKERS)
            state = visit(fetched, state)
            state = lanes.loop(
                arith.addi(start, at_once), stop, at_once, state, lambda i, state: visit(fetch(i), state)
            )
            self._combine(a, scratch_smem, state, row, kv_head, split, splits, owner, active)

        with lanes.when(lanes.is_below(split, splits)):  # all threads of a block alike
            attend()

    def _combine(self, a: Arrays, smem, state, row, kv_head, split, splits, owner, active):
        """16 workers' (m, l, o) -> the split's -> with those of the other splits, the output."""
        heads, head_dim, share = self.heads, self.head_dim, self.head_dim // SHARE
        thread = lanes.thread()
        worker, part = arith.divui(thread, lanes.index(SHARE)), arith.remui(thread, lanes.index(SHARE))
        warp, lane = arith.divui(thread, lanes.index(32)), arith.remui(thread, lanes.index(32))
        sums, maxima = 0, WARPS * heads * head_dim  # where each begins in shared memory
        totals = maxima + heads * WORKERS
        flag = totals + heads * WARPS

        def at(base, *terms):
            """base + sum of index * stride."""
            return functools.reduce(
                lambda i, term: arith.addi(i, arith.muli(term[0], lanes.index(term[1]))),
                terms,
                lanes.index(base),
            )

        parts = [state[g * (share + 2) : (g + 1) * (share + 2)] for g in range(heads)]
        with lanes.when(lanes.is_equal(part, lanes.index(0))):
            for g, (maximum, _, *_) in enumerate(parts):
                lanes.store(maximum, smem, at(maxima + g * WORKERS, (worker, 1)))
        lanes.block_barrier()
        largest = []
        for g, (maximum, total, *o) in enumerate(parts):
            other = lanes.load(smem, at(maxima + g * WORKERS, (part, 1)))
            largest.append(lanes.largest_of_warp(other, WORKERS))
            weight = mlir_math.exp(arith.subf(maximum, largest[g]))
            # The two workers of a warp hold the same elements, 16 lanes apart.
            total, *o = (arith.mulf(v, weight) for v in (total, *o))
            total, *o = (arith.addf(v, lanes.swapped(v, SHARE)) for v in (total, *o))
            with lanes.when(lanes.is_below(lane, lanes.index(SHARE))):
                lanes.store_reals(o, smem, [at(sums + g * head_dim, (warp, heads * head_dim), (part, share))])
                with lanes.when(lanes.is_equal(lane, lanes.index(0))):
                    lanes.store(total, smem, at(totals + g * WARPS, (warp, 1)))
        lanes.block_barrier()

        def over_warps(base, stride):
            return functools.reduce(
                arith.addf, [lanes.load(smem, at(w * stride, (base, 1))) for w in range(WARPS)]
            )

        def outputs(use):
            """use(element, query head) for this thread's elements of the G heads' outputs."""
            for first in range(0, heads * head_dim, THREADS):
                element = arith.addi(thread, lanes.index(first))
                with lanes.when(lanes.is_below(element, lanes.index(heads * head_dim))):
                    use(element, arith.divui(element, lanes.index(head_dim)))

        def store_out(element, numerator, denominator):
            denominator = arith.select(active, denominator, lanes.real(1))
            value = arith.select(active, arith.divf(numerator, denominator), lanes.real(0))
            n = at(0, (kv_head, heads * head_dim), (element, 1))
            lanes.store(value, a.out, row, n)

        def store_whole(element, g):
            total = over_warps(at(totals, (g, WARPS)), 1)
            store_out(element, over_warps(at(sums, (element, 1)), heads * head_dim), total)

        def store_split(element, g):
            value = over_warps(at(sums, (element, 1)), heads * head_dim)
            lanes.store(value, a.partial, row, kv_head, split, element)

        alone = lanes.is_equal(splits, lanes.index(1))
        with lanes.when(alone):
            outputs(store_whole)
        if self.splits == 1:
            return

        def combine_splits(element, g):
            def of_split(s):
                there = lanes.is_below(lanes.index(s), splits)
                s = arith.select(there, lanes.index(s), lanes.index(0))
                base = at(0, (owner, self.splits), (s, 1))
                two = at(0, (base, 2 * heads), (g, 2))
                o = lanes.load_written_by_others(a.partial, at(0, (base, heads * head_dim), (element, 1)))
                maximum = lanes.load_written_by_others(a.max_sum, two)
                total = lanes.load_written_by_others(a.max_sum, at(1, (two, 1)))
                return arith.select(there, maximum, lanes.real(LOWEST)), total, o

            parts = [of_split(s) for s in range(self.splits)]
            largest = functools.reduce(arith.maximumf, [m for m, _, _ in parts])
            numerator, denominator = lanes.real(0), lanes.real(0)
            for maximum, total, o in parts:
                weight = mlir_math.exp(arith.subf(maximum, largest))
                numerator = mlir_math.fma(weight, o, numerator)
                denominator = mlir_math.fma(weight, total, denominator)
            store_out(element, numerator, denominator)

        with lanes.when(arith.xori(alone, lanes.true())):
            outputs(store_split)
            with lanes.when(lanes.is_equal(thread, lanes.index(0))):
                for g in range(heads):
                    total = over_warps(lanes.index(totals + g * WARPS), 1)
                    lanes.store(largest[g], a.max_sum, row, kv_head, split, lanes.index(2 * g))
                    lanes.store(total, a.max_sum, row, kv_head, split, lanes.index(2 * g + 1))
            lanes.block_barrier()
            with lanes.when(lanes.is_equal(thread, lanes.index(0))):
                old = lanes.add_to_counter(a.finished, owner)
                # The counter is never set back: a launch of many layers counts on.
                last = arith.remui(arith.addi(old, lanes.integer(1)), lanes.to_integer(splits))
                is_last = lanes.is_equal(last, lanes.integer(0))
                lanes.store(arith.select(is_last, lanes.real(1), lanes.real(0)), smem, lanes.index(flag))
            lanes.block_barrier()
            with lanes.when(lanes.is_above_zero(lanes.load(smem, lanes.index(flag)))):
                outputs(combine_splits)
