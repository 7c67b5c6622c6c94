"""One token's attention for every row: QK-norm, rope, cache write and flash decoding over pages, in one
launch.

A block of 256 threads has one row, one KV head with its G query heads, and one split of the row's keys.
Sixteen neighbouring lanes are a worker, which holds D / 16 elements a lane of each query head; the 16 workers
of a block take keys in turn:

    q, k, v of the new token -> norm, rope -> registers     (split 0 also stores k and v, and attends to the
                                                            new key)
    worker: keys of its split -> online softmax (m, l, o)
    block:  16 workers -> shared memory -> (m, l, o) of the split
    last block of a row and KV head to finish: splits -> out

Splits depend on a row's own length only, and are combined in order: a row's bits do not depend on other rows,
nor on which block finishes last.
"""

import functools

import jax
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith
from jax._src.lib.mlir.dialects import math as mlir_math
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import lanes

THREADS, WORKERS, SHARE = 256, 16, 16  # SHARE lanes are a worker
AT_ONCE = 5  # keys that a worker has on their way together
LOWEST = -1e30  # stands for minus infinity, of which differences are not numbers
KEYS_PER_SPLIT = 128
BLOCKS = 128  # about as many as an H200 has multiprocessors


@functools.partial(jax.jit, static_argnames=("eps", "interleaved"))
def decode_attention(
    qkv, k_pages, v_pages, block_table, positions, layer, cos, sin, norms, eps, interleaved
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The kernel behind pallas_kernels.attention.decode_attention; arguments and results are described
    there."""
    page_size, kv_heads, head_dim = k_pages.shape[2:]
    batch, width = qkv.shape[0], qkv.shape[1] - 2 * kv_heads * head_dim
    heads, capacity = width // (kv_heads * head_dim), block_table.shape[1] * page_size
    splits = max(1, min(-(-capacity // KEYS_PER_SPLIT), BLOCKS // (batch * kv_heads)))
    keys, values = jax.new_ref(k_pages), jax.new_ref(v_pages)
    finished = jax.new_ref(jnp.zeros(batch * kv_heads, jnp.int32))
    body = functools.partial(
        _body,
        kv_heads=kv_heads, heads=heads, head_dim=head_dim, page_size=page_size, splits=splits,
        normed=norms is not None, eps=eps, interleaved=interleaved,
    )  # fmt: skip
    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((batch, width), jnp.float32),
            jax.ShapeDtypeStruct((batch, kv_heads, splits, heads * head_dim), jnp.float32),
            jax.ShapeDtypeStruct((batch, kv_heads, splits, heads * 2), jnp.float32),
        ),
        grid=(batch * kv_heads * splits,),
        grid_names=("block",),
        num_threads=THREADS // 128,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((WORKERS, heads * head_dim), jnp.float32),
            plgpu.SMEM((heads, WORKERS), jnp.float32),
            plgpu.SMEM((heads, WORKERS), jnp.float32),
            plgpu.SMEM((8,), jnp.int32),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    operands = [qkv, cos, sin, positions, block_table, jnp.asarray(layer, jnp.int32).reshape(1)]
    out, _, _ = kernel(*operands, *(norms or ()), keys, values, finished)
    return out, jax.freeze(keys), jax.freeze(values)


def _body(*refs, kv_heads, heads, head_dim, page_size, splits, normed, eps, interleaved):
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
    def phase(ctx, *refs):
        qkv_gmem, cos_gmem, sin_gmem, positions_gmem, table_gmem, layer_gmem, *refs = refs
        q_gamma_gmem, k_gamma_gmem, *refs = refs if normed else (None, None, *refs)
        keys_gmem, values_gmem, finished_gmem, out_gmem, partial_gmem, max_sum_gmem, *refs = refs
        sums_smem, weights_smem, totals_smem, flag_smem = refs

        thread, split = lanes.thread(), arith.remui(lanes.block(), lanes.index(splits))
        owner = arith.divui(lanes.block(), lanes.index(splits))  # row and KV head
        row, kv_head = arith.divui(owner, lanes.index(kv_heads)), arith.remui(owner, lanes.index(kv_heads))
        worker, part = arith.divui(thread, lanes.index(SHARE)), arith.remui(thread, lanes.index(SHARE))
        share = head_dim // SHARE
        mine = arith.muli(part, lanes.index(share))  # first of this lane's elements of a head
        layer = lanes.to_index(lanes.load(layer_gmem, 0))
        position = lanes.load(positions_gmem, row)
        active = arith.cmpi(arith.CmpIPredicate.sge, position, lanes.integer(0))
        length = lanes.to_index(arith.maxsi(position, lanes.integer(0)))  # keys before the new one

        half = head_dim // 2
        if interleaved:
            first_angle, angles = arith.divui(mine, lanes.index(2)), share // 2
        else:
            first_angle, angles = arith.remui(mine, lanes.index(half)), share
        cos, sin = (lanes.load_reals(angles, ref, [row, first_angle]) for ref in (cos_gmem, sin_gmem))
        in_first_half = lanes.is_below(mine, lanes.index(half))

        def rotated(x, gamma_gmem):
            if normed:
                squares = functools.reduce(lambda total, v: mlir_math.fma(v, v, total), x, lanes.real(0))
                mean = arith.mulf(lanes.warp_sum_real(squares, SHARE), lanes.real(1 / head_dim))
                norm = mlir_math.rsqrt(arith.addf(mean, lanes.real(eps)))
                gamma = lanes.load_reals(share, gamma_gmem, [layer, mine])
                x = [arith.mulf(arith.mulf(v, norm), g) for v, g in zip(x, gamma, strict=True)]
            if interleaved:
                turned = []
                for i, (a, b) in enumerate(zip(x[::2], x[1::2], strict=True)):
                    turned.append(arith.subf(arith.mulf(a, cos[i]), arith.mulf(b, sin[i])))
                    turned.append(arith.addf(arith.mulf(b, cos[i]), arith.mulf(a, sin[i])))
                return turned
            # Element i of the first half and of the second are half a worker apart.
            other = [lanes.swapped(v, SHARE // 2) for v in x]
            other = [arith.select(in_first_half, arith.negf(o), o) for o in other]
            return [
                arith.addf(arith.mulf(v, c), arith.mulf(o, s))
                for v, o, c, s in zip(x, other, cos, sin, strict=True)
            ]

        def head_of(first, head):
            """This lane's elements of head `first + head` of qkv."""
            head = arith.addi(head, lanes.index(first))
            return lanes.load_reals(
                share, qkv_gmem, [row, arith.addi(arith.muli(head, lanes.index(head_dim)), mine)]
            )

        q = []
        for g in range(heads):
            query = rotated(head_of(g, arith.muli(kv_head, lanes.index(heads))), q_gamma_gmem)
            q.append([arith.mulf(v, lanes.real(head_dim**-0.5)) for v in query])
        new_key = rotated(head_of(heads * kv_heads, kv_head), k_gamma_gmem)
        new_key = lanes.as_stored(new_key, keys_gmem)
        new_value = lanes.as_stored(head_of((heads + 1) * kv_heads, kv_head), values_gmem)

        def place(j):
            page = lanes.to_index(lanes.load(table_gmem, row, arith.divui(j, lanes.index(page_size))))
            return [layer, page, arith.remui(j, lanes.index(page_size)), kv_head, mine]

        def score(g, key):
            dot = functools.reduce(
                lambda total, pair: mlir_math.fma(*pair, total), zip(q[g], key, strict=True), lanes.real(0)
            )
            return lanes.warp_sum_real(dot, SHARE)

        first_split = lanes.is_equal(split, lanes.index(0))
        has_new = arith.andi(arith.andi(first_split, lanes.is_equal(worker, lanes.index(0))), active)
        with lanes.when(has_new):
            lanes.store_reals(new_key, keys_gmem, place(length))
            lanes.store_reals(new_value, values_gmem, place(length))

        # The state of a worker: per query head its largest score, the sum of weights, and weighted values.
        state = []
        for g in range(heads):
            state.append(arith.select(has_new, score(g, new_key), lanes.real(LOWEST)))
            state.append(arith.select(has_new, lanes.real(1), lanes.real(0)))
            state += [arith.select(has_new, v, lanes.real(0)) for v in new_value]

        chunk = arith.ceildivui(length, lanes.index(splits))
        start = arith.muli(split, chunk)
        stop = arith.minui(length, arith.addi(start, chunk))

        def visit(first, state):
            """AT_ONCE keys a worker; every lane of a warp comes here as often."""
            wanted = [arith.addi(first, arith.addi(lanes.index(i * WORKERS), worker)) for i in range(AT_ONCE)]
            valid = [lanes.is_below(j, stop) for j in wanted]
            at = [place(arith.select(ok, j, first)) for ok, j in zip(valid, wanted, strict=True)]
            keys = [lanes.load_reals(share, keys_gmem, place_) for place_ in at]
            values = [lanes.load_reals(share, values_gmem, place_) for place_ in at]
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

        state = lanes.loop(start, stop, lanes.index(AT_ONCE * WORKERS), state, visit)

        for g in range(heads):
            maximum, total, *o = state[g * (share + 2) : (g + 1) * (share + 2)]
            lanes.store_reals(o, sums_smem, [worker, arith.addi(lanes.index(g * head_dim), mine)])
            with lanes.when(lanes.is_equal(part, lanes.index(0))):
                lanes.store(maximum, weights_smem, g, worker)
                lanes.store(total, totals_smem, g, worker)
        lanes.block_barrier()

        # Warp g weighs the workers of head g against each other.
        warp, lane = arith.divui(thread, lanes.index(32)), arith.remui(thread, lanes.index(32))
        with lanes.when(lanes.is_below(warp, lanes.index(heads))):
            one = arith.remui(lane, lanes.index(WORKERS))
            maximum = lanes.load(weights_smem, warp, one)
            largest = lanes.largest_of_warp(maximum, WORKERS)
            weight = mlir_math.exp(arith.subf(maximum, largest))
            total = arith.mulf(lanes.load(totals_smem, warp, one), weight)
            total = lanes.warp_sum_real(total, WORKERS)
            lanes.store(weight, weights_smem, warp, one)
            with lanes.when(lanes.is_equal(lane, lanes.index(0))):
                lanes.store(total, totals_smem, warp, 0)
                two = arith.muli(warp, lanes.index(2))
                lanes.store(largest, max_sum_gmem, row, kv_head, split, two)
                lanes.store(total, max_sum_gmem, row, kv_head, split, arith.addi(two, lanes.index(1)))
        lanes.block_barrier()

        def outputs(use):
            """use(element, query head) for this thread's elements of the G heads' outputs."""
            for first in range(0, heads * head_dim, THREADS):
                at = arith.addi(thread, lanes.index(first))
                with lanes.when(lanes.is_below(at, lanes.index(heads * head_dim))):
                    use(at, arith.divui(at, lanes.index(head_dim)))

        def store_out(at, numerator, denominator):
            denominator = arith.select(active, denominator, lanes.real(1))
            value = arith.select(active, arith.divf(numerator, denominator), lanes.real(0))
            lanes.store(
                value, out_gmem, row, arith.addi(arith.muli(kv_head, lanes.index(heads * head_dim)), at)
            )

        def combine_workers(at, g):
            total = lanes.real(0)
            for w in range(WORKERS):
                total = mlir_math.fma(lanes.load(weights_smem, g, w), lanes.load(sums_smem, w, at), total)
            if splits == 1:
                store_out(at, total, lanes.load(totals_smem, g, 0))
            else:
                lanes.store(total, partial_gmem, row, kv_head, split, at)

        outputs(combine_workers)
        if splits == 1:
            return

        lanes.block_barrier()
        with lanes.when(lanes.is_equal(thread, lanes.index(0))):
            lanes.store(lanes.add_to_counter(finished_gmem, owner), flag_smem, 0)
        lanes.block_barrier()

        def combine_splits(at, g):
            def of_split(s):
                base = arith.addi(arith.muli(owner, lanes.index(splits)), lanes.index(s))
                two = arith.addi(arith.muli(base, lanes.index(2 * heads)), arith.muli(g, lanes.index(2)))
                o = lanes.load_written_by_others(
                    partial_gmem, arith.addi(arith.muli(base, lanes.index(heads * head_dim)), at)
                )
                maximum = lanes.load_written_by_others(max_sum_gmem, two)
                return maximum, lanes.load_written_by_others(max_sum_gmem, arith.addi(two, lanes.index(1))), o

            parts = [of_split(s) for s in range(splits)]
            largest = functools.reduce(arith.maximumf, [m for m, _, _ in parts])
            numerator, denominator = lanes.real(0), lanes.real(0)
            for maximum, total, o in parts:
                weight = mlir_math.exp(arith.subf(maximum, largest))
                numerator = mlir_math.fma(weight, o, numerator)
                denominator = mlir_math.fma(weight, total, denominator)
            store_out(at, numerator, denominator)

        with lanes.when(lanes.is_equal(lanes.load(flag_smem, 0), lanes.integer(splits - 1))):
            outputs(combine_splits)

    phase(*refs)
