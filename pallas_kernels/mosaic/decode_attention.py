"""One token's attention for every row: QK-norm, rope, cache write and flash decoding over pages, in one
launch.

A block of 256 threads has one row, one KV head with its G query heads, and one split of the row's keys. Its
warps take 16 keys at a time:

    first keys and values of its split -> registers         (on their way while q is made)
    q, k, v of the new token -> norm, rope -> registers     (split 0 also stores k and v, and attends to the
                                                            new key)
    warp:   scores, online softmax, weighted values         (tensor cores: heads x keys, keys x head_dim)
    block:  8 warps -> shared memory -> (m, l, o) of the split
    last block of a row and KV head to finish: splits -> out

Queries and weights are split into two bfloat16 each, whose sum has 16 bits of mantissa: rows 0 to 7 of a
tensor core's 16 are the high parts of the heads, rows 8 to 15 the low parts. A float32 cache is split the
same way. Which of a head's dimensions a lane has is free, as long as q and k agree: with lane = 4 g + t,
dimensions 32 c + 8 t + 0..7 of key g, which are 16-byte loads, and 64 c + 8 g + 0..7 of values.

Splits depend on a row's own length only, and are combined in order: a row's bits do not depend on other rows,
nor on which block finishes last. `decode_attention` is this phase as a kernel of its own; decode_layers.py
has it in one launch with the products.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith
from jax._src.lib.mlir.dialects import math as mlir_math
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import lanes

THREADS, WARPS = 256, 8
KEYS = 16  # of a warp at a time
LOWEST = -1e30  # stands for minus infinity, of which differences are not numbers
KEYS_PER_SPLIT = KEYS * WARPS  # that much is on its way before q is there
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

        def load_qkv(row, columns):
            return [v for n in columns for v in lanes.load_reals(4, qkv, [row, lanes.plus(*n)])]

        store_out = lambda value, row, n: lanes.store(value, out, row, n)  # noqa: E731
        arrays = Arrays(
            load_qkv, store_out, cos, sin, positions, table, q_gamma, k_gamma, keys, values, finished,
            partial, max_sum,
        )  # fmt: skip
        phase.run(arrays, scratch_smem, layer)

    kernel(*refs)


@dataclasses.dataclass(frozen=True)
class Arrays:
    """What the phase reads and writes, in global memory: refs, but for

    load_qkv   (row, columns) -> list of float32, 4 from each column on
    store_out  (value, row, column)
    finished   ref of int32 [rows * kv_heads], zero before the first launch
    """

    load_qkv: Callable
    store_out: Callable
    cos: Any
    sin: Any
    positions: Any
    table: Any
    q_gamma: Any
    k_gamma: Any
    keys: Any
    values: Any
    finished: Any
    partial: Any
    max_sum: Any


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
        """float32 of shared memory: sums [warps, heads, head_dim], maxima and totals [heads, warps], a
        flag."""
        return WARPS * self.heads * self.head_dim + 2 * self.heads * WARPS + 4

    def partials(self):
        """Shapes of a split's unweighted outputs and of its (maximum, sum of weights)."""
        lead = (self.rows, self.kv_heads, self.splits)
        return (
            jax.ShapeDtypeStruct((*lead, self.heads * self.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((*lead, self.heads * 2), jnp.float32),
        )

    def run(self, a: Arrays, scratch_smem, layer, next_layer=None):
        """The share of this block. With `next_layer`, that layer's keys and values are asked for in the end, into
        the L2 cache."""
        heads, head_dim = self.heads, self.head_dim
        thread, split = lanes.thread(), arith.remui(lanes.block(), lanes.index(self.splits))
        owner = arith.divui(lanes.block(), lanes.index(self.splits))  # row and KV head
        row = arith.divui(owner, lanes.index(self.kv_heads))
        kv_head = arith.remui(owner, lanes.index(self.kv_heads))
        warp, lane = arith.divui(thread, lanes.index(32)), arith.remui(thread, lanes.index(32))
        g, t = arith.divui(lane, lanes.index(4)), arith.remui(lane, lanes.index(4))
        position = lanes.load(a.positions, row)
        active = arith.cmpi(arith.CmpIPredicate.sge, position, lanes.integer(0))
        length = lanes.to_index(arith.maxsi(position, lanes.integer(0)))  # keys before the new one
        splits = arith.minui(arith.ceildivui(length, lanes.index(KEYS_PER_SPLIT)), lanes.index(self.splits))
        few = lanes.is_below(length, lanes.index(KEYS_ALONE + 1))
        splits = arith.select(few, lanes.index(1), splits)
        chunk = arith.ceildivui(length, splits)
        start = arith.minui(length, arith.muli(split, chunk))
        stop = arith.minui(length, arith.addi(start, chunk))

        def plus(base, *terms):
            """base + sum of index * stride."""
            for term, stride in terms:
                base = arith.addi(base, arith.muli(term, lanes.index(stride)) if stride > 1 else term)
            return base

        chunks, halves = range(head_dim // 32), range(head_dim // 64)
        key_part = [plus(lanes.index(32 * c), (t, 8)) for c in chunks]  # 8 dimensions each
        value_part = [plus(lanes.index(64 * c), (g, 8)) for c in halves]

        def place(j, part):
            page = lanes.to_index(lanes.load(a.table, row, arith.divui(j, lanes.index(self.page_size))))
            return [layer, page, arith.remui(j, lanes.index(self.page_size)), kv_head, part]

        def fetch(first):
            """This warp's 16 keys and values behind `first`, as they are stored, and whether they are there.
            Keys of lane g: g and g + 8; values and scores of lane t: 2 t, 2 t + 1, 2 t + 8, 2 t + 9."""
            base = plus(first, (warp, KEYS))
            inside = lambda j: arith.select(lanes.is_below(j, stop), j, start)  # noqa: E731
            key_of = [inside(plus(base, (g, 1), (lanes.index(u), 8))) for u in (0, 1)]
            wanted = [plus(base, (t, 2), (lanes.index(1), i)) for i in (0, 1, 8, 9)]
            keys = [[lanes.load_stored(8, a.keys, place(j, part)) for part in key_part] for j in key_of]
            values = [
                [lanes.load_stored(8, a.values, place(inside(j), part)) for part in value_part]
                for j in wanted
            ]
            return [lanes.is_below(j, stop) for j in wanted], keys, values

        fetched = fetch(start)  # before q is asked for, which other blocks may still be making
        angle_of = key_part[: len(chunks) // 2]
        if self.interleaved:
            angle_of = [arith.divui(part, lanes.index(2)) for part in key_part]
        angles = 4 if self.interleaved else 8
        angles_of = lambda ref: [lanes.load_reals(angles, ref, [row, at]) for at in angle_of]  # noqa: E731
        angle = (angles_of(a.cos), angles_of(a.sin))
        gamma_of = lambda ref: [lanes.load_reals(8, ref, [layer, part]) for part in key_part]  # noqa: E731
        q_gamma = gamma_of(a.q_gamma) if self.normed else None

        def rotated(x, gamma, angle, factor):
            """x [chunks][8] normed, rotated and times a factor."""
            cos, sin = angle
            if gamma is not None:
                squares = functools.reduce(
                    lambda sum_, v: mlir_math.fma(v, v, sum_), [v for part in x for v in part], lanes.real(0)
                )
                mean = arith.mulf(lanes.warp_sum_real(squares, 4), lanes.real(1 / head_dim))
                norm = mlir_math.rsqrt(arith.addf(mean, lanes.real(self.eps)))
                x = [
                    [arith.mulf(arith.mulf(v, norm), w) for v, w in zip(*part, strict=True)]
                    for part in zip(x, gamma, strict=True)
                ]
            out = [[*part] for part in x]
            # Both of a pair are this lane's.
            for c in chunks:
                for i in range(8):
                    if self.interleaved and i % 2 == 0:
                        u, v, at = (c, i), (c, i + 1), (c, i // 2)
                    elif not self.interleaved and c < len(chunks) // 2:
                        u, v, at = (c, i), (c + len(chunks) // 2, i), (c, i)
                    else:
                        continue
                    p, q, cosine, sine = x[u[0]][u[1]], x[v[0]][v[1]], cos[at[0]][at[1]], sin[at[0]][at[1]]
                    out[u[0]][u[1]] = arith.subf(arith.mulf(p, cosine), arith.mulf(q, sine))
                    out[v[0]][v[1]] = arith.addf(arith.mulf(q, cosine), arith.mulf(p, sine))
            return [[arith.mulf(v, lanes.real(factor)) for v in part] for part in out] if factor != 1 else out

        def attend():
            def load_new(head, stride, count):
                """This lane's parts of a head of qkv, `stride` apart."""
                first = plus(lanes.index(0), (t, count), (head, head_dim))
                columns = [(first, c + i) for c in range(0, head_dim, stride) for i in range(0, count, 4)]
                loaded = a.load_qkv(row, columns)
                return [loaded[i : i + count] for i in range(0, len(loaded), count)]

            # Lanes g of heads that are not there repeat the last one, and are not stored.
            head = plus(arith.minui(g, lanes.index(heads - 1)), (kv_head, heads))
            # Weights are powers of two: softmax over s log2(e).
            q = rotated(load_new(head, 32, 8), q_gamma, angle, head_dim**-0.5 * math.log2(math.e))
            # Tensor core operands: a0 and a2 from the high parts, a1 and a3 from the low ones.
            operands = []
            for part in q:
                for i in (0, 4):
                    (high0, low0), (high2, low2) = (lanes.split_pair(*part[k : k + 2]) for k in (i, i + 2))
                    operands.append([high0, low0, high2, low2])

            zero = lanes.real(0)

            def visit(fetched, state):
                valid, keys, values = fetched
                maximum, total, *o = state
                scores = []
                for u in (0, 1):
                    c = [zero] * 4
                    words = [pair for part in keys[u] for pair in lanes.pairs(part)]
                    for step, operand in enumerate(operands):
                        for b in zip(words[2 * step], words[2 * step + 1], strict=True):
                            c = lanes.add_product(c, operand, b)
                    for i in (0, 1):
                        s = arith.addf(c[i], c[i + 2])
                        scores.append(arith.select(valid[2 * u + i], s, lanes.real(LOWEST)))
                largest = functools.reduce(arith.maximumf, scores)
                new_maximum = arith.maximumf(maximum, lanes.largest_of_warp(largest, 4))
                keep = lanes.exp2(arith.subf(maximum, new_maximum))
                weights = [
                    arith.select(ok, lanes.exp2(arith.subf(s, new_maximum)), zero)
                    for ok, s in zip(valid, scores, strict=True)
                ]
                total = functools.reduce(arith.addf, weights, arith.mulf(total, keep))
                (high0, low0), (high2, low2) = (lanes.split_pair(*weights[k : k + 2]) for k in (0, 2))
                operand = [high0, low0, high2, low2]
                out = [new_maximum, total]
                for c in halves:
                    first, second = (lanes.pairs_across(values[k][c], values[k + 1][c]) for k in (0, 2))
                    for i in range(8):
                        at = 4 * (8 * c + i)
                        acc = [arith.mulf(v, keep) for v in o[at : at + 4]]
                        for b in zip(first[i], second[i], strict=True):
                            acc = lanes.add_product(acc, operand, b)
                        out += acc
                return out

            def new_token(state):
                """The state with the new key as well, which is stored."""
                key_head, value_head = (
                    plus(lanes.index(n * self.kv_heads), (kv_head, 1)) for n in (heads, heads + 1)
                )
                k_gamma = gamma_of(a.k_gamma) if self.normed else None
                key, value = load_new(key_head, 32, 8), load_new(value_head, 64, 16)
                key = [
                    lanes.as_stored(part, a.keys)
                    for part in rotated(key, k_gamma, (angles_of(a.cos), angles_of(a.sin)), 1)
                ]
                value = [lanes.as_stored(part, a.values) for part in value]
                with lanes.when(lanes.is_equal(g, lanes.index(0))):
                    for part, numbers in zip(key_part, key, strict=True):
                        lanes.store_reals(numbers, a.keys, place(length, part))
                    for c, numbers in enumerate(value):
                        for i in (0, 8):
                            part = plus(lanes.index(64 * c + i), (t, 16))
                            lanes.store_reals(numbers[i : i + 8], a.values, place(length, part))
                score = zero
                for two in zip(q, key, strict=True):
                    for u, v in zip(*two, strict=True):
                        score = mlir_math.fma(u, v, score)
                score = lanes.warp_sum_real(score, 4)
                maximum, total, *o = state
                new_maximum = arith.maximumf(maximum, score)
                keep, weight = (lanes.exp2(arith.subf(s, new_maximum)) for s in (maximum, score))
                once = arith.select(lanes.is_equal(t, lanes.index(0)), weight, zero)
                out = [new_maximum, mlir_math.fma(total, keep, once)]
                for c, numbers in enumerate(value):
                    for i in range(8):
                        o0, o1, *low = (arith.mulf(v, keep) for v in o[4 * (8 * c + i) : 4 * (8 * c + i) + 4])
                        out += [mlir_math.fma(weight, numbers[i + k], v) for k, v in ((0, o0), (8, o1))] + low
                return out

            # The state of a warp: of head g its largest score, this lane's share of the sum of weights, and
            # of the weighted values for each (c, i) those at 64 c + 16 t + i and + 8, high and low.
            state = [lanes.real(LOWEST)] + [zero] * (1 + head_dim // 2)
            has_keys = lanes.is_below(plus(start, (warp, KEYS)), stop)
            state = lanes.choose(has_keys, lambda: visit(fetched, state), state)
            step = lanes.index(KEYS_PER_SPLIT)
            state = lanes.loop(
                arith.addi(start, step), stop, step, state, lambda i, state: visit(fetch(i), state)
            )
            # The last warp has the fewest keys of its own.
            last = lanes.is_equal(warp, lanes.index(WARPS - 1))
            has_new = arith.andi(arith.andi(lanes.is_equal(split, lanes.index(0)), last), active)
            state = lanes.choose(has_new, lambda: new_token(state), state)
            maximum, total, *o = state
            o = [
                [
                    arith.addf(o[4 * (8 * c + i) + k], o[4 * (8 * c + i) + k + 2])
                    for k in (0, 1)
                    for i in range(8)
                ]
                for c in halves
            ]
            total = lanes.warp_sum_real(total, 4)
            self._combine(a, scratch_smem, maximum, total, o, row, kv_head, split, splits, owner, active)

        def ask_for_next():
            """A lane half a row: 16 keys a warp."""
            half = arith.remui(lane, lanes.index(2))
            part = arith.muli(half, lanes.index(head_dim // 2))

            def one(first, carry):
                j = plus(first, (warp, KEYS), (arith.divui(lane, lanes.index(2)), 1))
                with lanes.when(lanes.is_below(j, stop)):
                    _, page, slot, head, _ = place(j, part)
                    for ref in (a.keys, a.values):
                        lanes.prefetch(ref, [next_layer, page, slot, head, part])
                return carry

            lanes.loop(start, stop, lanes.index(KEYS_PER_SPLIT), [], one)

        with lanes.when(lanes.is_below(split, splits)):  # all threads of a block alike
            attend()
            if next_layer is not None:
                ask_for_next()

    def _combine(self, a: Arrays, smem, maximum, total, o, row, kv_head, split, splits, owner, active):
        """8 warps' (m, l, o) -> the split's -> with those of the other splits, the output."""
        heads, head_dim = self.heads, self.head_dim
        thread = lanes.thread()
        warp, lane = arith.divui(thread, lanes.index(32)), arith.remui(thread, lanes.index(32))
        g, t = arith.divui(lane, lanes.index(4)), arith.remui(lane, lanes.index(4))
        present = lanes.is_below(g, lanes.index(heads))
        sums, maxima = 0, WARPS * heads * head_dim  # where each begins in shared memory
        totals = maxima + heads * WARPS
        flag = totals + heads * WARPS

        def at(base, *terms):
            """base + sum of index * stride."""
            return functools.reduce(
                lambda i, term: arith.addi(i, arith.muli(term[0], lanes.index(term[1]))),
                terms,
                lanes.index(base),
            )

        first_lane = arith.andi(present, lanes.is_equal(t, lanes.index(0)))
        with lanes.when(first_lane):
            lanes.store(maximum, smem, at(maxima, (g, WARPS), (warp, 1)))
        lanes.block_barrier()
        head = arith.minui(g, lanes.index(heads - 1))
        largest = functools.reduce(
            arith.maximumf, [lanes.load(smem, at(maxima + w, (head, WARPS))) for w in range(WARPS)]
        )
        weight = lanes.exp2(arith.subf(maximum, largest))
        with lanes.when(present):
            for c, values in enumerate(o):
                for i in range(0, 16, 4):
                    scaled = [arith.mulf(v, weight) for v in values[i : i + 4]]
                    first = at(sums + 64 * c + i, (warp, heads * head_dim), (g, head_dim), (t, 16))
                    lanes.store_reals(scaled, smem, [first])
            with lanes.when(lanes.is_equal(t, lanes.index(0))):
                lanes.store(arith.mulf(total, weight), smem, at(totals, (g, WARPS), (warp, 1)))
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
            a.store_out(value, row, n)

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
                weight = lanes.exp2(arith.subf(maximum, largest))
                numerator = mlir_math.fma(weight, o, numerator)
                denominator = mlir_math.fma(weight, total, denominator)
            store_out(element, numerator, denominator)

        with lanes.when(arith.xori(alone, lanes.true())):
            outputs(store_split)
            with lanes.when(arith.andi(first_lane, lanes.is_equal(warp, lanes.index(0)))):
                two = arith.muli(g, lanes.index(2))
                lanes.store(largest, a.max_sum, row, kv_head, split, two)
                sum_ = over_warps(at(totals, (g, WARPS)), 1)
                lanes.store(sum_, a.max_sum, row, kv_head, split, arith.addi(two, lanes.index(1)))
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
