"""Products of many rows with 1-bit weights (Q1_0) on Hopper's tensor cores: weights are decoded in registers.

wgmma takes its first operand from registers, 64 rows x 16 columns at a time, and lane 4 g + t of warp w holds
of it rows 16 w + g and 16 w + g + 8 and the columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9. In the layout of bit_gemv
the same lane has word t, 32 columns, of the same rows. The order of columns within a group is free, as long
as the activations follow it, so every lane decodes its own words for itself, in two instructions for two
weights, and nothing is exchanged:

    -d or d as float16 in both halves  <-  ((word << 15 - j) & 0x80008000) ^ (-d, -d),   j = 0 .. 15
    position 8 j + 2 t + e of a group  <-  column 32 t + 16 e + j

Weights are the first operand because they come from registers; so a tile of the product is outputs x tokens,
and lanes store it transposed, 32 bytes at a time. Blocks of threads are persistent. Of three warpgroups one
brings activations (float16) by TMA, two multiply: each `blocks` x 64 outputs (for SwiGLU 64 of the gate and
the same 64 of the up projection) with `tokens` tokens. Their weights come straight from memory, one pair of
groups (256 columns) ahead.
"""
# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false, reportCallIssue=false

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, llvm, vector
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import lanes, memory
from pallas_kernels.mosaic.wgmma import SMS, STEP_BYTES, WARPGROUPS
from pallas_kernels.mosaic.wgmma import fragment as _fragment
from pallas_kernels.mosaic.wgmma import lane as _lane
from pallas_kernels.mosaic.wgmma import silu as _silu

GROUP = 128
SLOTS = 8  # steps of activations in shared memory
STORED_AT_ONCE = 8  # of a tile's 8 tokens: what is added to them is loaded together


@functools.partial(jax.jit, static_argnames=("n",))
def bit_gemm(
    a: jax.Array,
    scale: jax.Array,
    weights: tuple[tuple[jax.Array, jax.Array], ...],
    layer: jax.Array,
    n: int,
    residual: jax.Array | None = None,
) -> jax.Array:
    """y = x W.T + residual for one matrix, or silu(x G.T) * (x U.T) for two, x = s a.

    a         float16 [M, K] in the order of columns above, with zeros behind K up to whole pairs of groups,
              as half_rows makes it
    scale     float32 [M], s
    weights   ((words, scales),) of W, or of G and U: tiled stacks (formats/q1_0.py) of a multiple of 64 rows
    layer     int32 [], the index into them
    n         outputs
    residual  float32 [M, n]
    Returns float32 [M, n].
    """
    m = a.shape[0]
    tiles = weights[0][0].shape[1]
    blocks, tokens = plan(m, tiles, len(weights))
    outputs = WARPGROUPS * 64 * (1 if len(weights) == 2 else blocks)  # of a tile
    rows, columns = -(-m // tokens), -(-tiles * 16 // outputs)
    a = jnp.pad(a, ((0, -m % tokens), (0, 0)))
    scale = jnp.pad(scale, (0, -m % tokens))
    operands = [a, scale, jnp.asarray(layer, jnp.int32).reshape(1)]
    operands += [array for pair in weights for array in pair]
    whole = (rows * tokens, columns * outputs)
    if residual is not None:
        operands.append(jnp.pad(residual, ((0, whole[0] - m), (0, whole[1] - n))))
    body = functools.partial(
        _body,
        matrices=len(weights), blocks=blocks, tokens=tokens, grid=(rows, columns), added=residual is not None,
    )  # fmt: skip
    step = STEP_BYTES // a.dtype.itemsize
    scratch = {
        "a_smem": plgpu.SMEM(
            (SLOTS, tokens, step), a.dtype,
            transforms=(plgpu.TilingTransform((8, step)), plgpu.SwizzleTransform(STEP_BYTES)),
        ),
        "full": plgpu.Barrier(num_arrivals=1, num_barriers=SLOTS),
        "free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=SLOTS),
    }  # fmt: skip
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(whole, jnp.float32),
        grid=(min(SMS, rows * columns),),
        grid_names=("sm",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(*operands)[:m, :n]


def plan(m: int, tiles: int, matrices: int) -> tuple[int, int]:
    """(blocks of 64 outputs of a warpgroup, tokens of a tile): the largest tile that leaves few blocks of
    threads idle in the last round."""

    def waste(blocks, tokens):
        outputs = WARPGROUPS * 64 * (1 if matrices == 2 else blocks)
        count = -(-m // tokens) * -(-tiles * 16 // outputs)
        return -(-count // SMS) * SMS * tokens * outputs / (m * tiles * 16)

    choices = [(2, 128), (2, 64)] + ([(1, 128)] if matrices == 1 else [])
    return min(choices, key=lambda c: waste(*c) * (1 if c == (2, 128) else 1.1))


def _body(
    a_gmem, scale_gmem, layer_gmem, *refs,
    a_smem, full, free, matrices, blocks, tokens, grid, added,
):  # fmt: skip
    weights = [(refs[2 * i], refs[2 * i + 1]) for i in range(matrices)]
    residual_gmem = refs[2 * matrices] if added else None
    out_gmem = refs[-1]
    pairs, tile_rows = weights[0][0].shape[2], weights[0][0].shape[1]
    rows, columns = grid
    sm, warpgroup = lax.axis_index("sm"), lax.axis_index("warpgroup")
    sms = min(SMS, rows * columns)
    count = lax.div(rows * columns - sm + sms - 1, sms)  # tiles of the product for this block
    step_columns = a_smem.shape[-1]
    steps_of_pair = 2 * GROUP // step_columns
    steps = steps_of_pair * pairs
    wide = 1 if matrices == 2 else blocks  # blocks of 64 neighbouring outputs of a warpgroup

    def token_of(i):
        return lax.rem(sm + i * sms, rows) * tokens

    def output_of(i, block):
        column = lax.div(sm + i * sms, rows)
        return (column * WARPGROUPS + warpgroup) * wide * 64 + (0 if matrices == 2 else block * 64)

    @pl.when(warpgroup < WARPGROUPS)
    def _multiply():
        plgpu.set_max_registers(232, action="increase")  # 2 x 232 + 40 <= 512: more would wait forever
        layer = layer_gmem[0]

        def load(i, pair):
            """Of every block: this lane's words and scales for a pair of groups."""
            loaded = []
            for block in range(blocks):
                words, scales = weights[block if matrices == 2 else 0]
                tile = jnp.minimum(lax.div(output_of(i, block), 16), tile_rows - 4)
                loaded.append(
                    _load(
                        words.at[layer, pl.ds(tile, 4), pair],
                        scales.at[layer, pl.ds(tile, 4), pl.ds(2 * pair, 2)],
                    )
                )
            return tuple(loaded)

        def load_next(i, pair):
            last = pair == pairs - 1
            return load(jnp.where(last, jnp.minimum(i + 1, count - 1), i), jnp.where(last, 0, pair + 1))

        def products(i, packed):
            """The products of a tile, without their scales; and the words of the next tile's first pair."""

            def multiply(*sums):
                def one_pair(pair, packed):
                    following = load_next(i, pair)
                    for step in range(steps_of_pair):
                        at = i * steps + pair * steps_of_pair + step
                        slot = lax.rem(at, SLOTS)
                        plgpu.barrier_wait(full.at[slot])
                        for block in range(blocks):
                            w = _decode(packed[block], step)
                            plgpu.wgmma(sums[block], w, a_smem.at[slot].transpose((1, 0)))
                            plgpu.wgmma_wait(1)  # the one before: its registers and its slot are free

                            if block == 0:
                                before = lax.rem(at + SLOTS - 1, SLOTS)
                                if step:
                                    plgpu.barrier_arrive(free.at[before])
                                else:
                                    pl.when(pair > 0)(
                                        lambda before=before: plgpu.barrier_arrive(free.at[before])
                                    )
                    return following

                packed_after = lax.fori_loop(0, pairs, one_pair, packed)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(free.at[lax.rem(i * steps + steps - 1, SLOTS)])
                return packed_after, [total[...] for total in sums]

            return pl.run_scoped(multiply, *[plgpu.ACC((64, tokens), jnp.float32)] * blocks)

        def one_tile(i, packed):
            packed, sums = products(i, packed)
            token = token_of(i)
            scale = scale_gmem.at[pl.ds(token, tokens)]
            if matrices == 2:
                target = out_gmem.at[pl.ds(token, tokens), pl.ds(output_of(i, 0), 64)]
                _store(scale, target, None, sums)
            else:
                for block in range(blocks):
                    where = (pl.ds(token, tokens), pl.ds(output_of(i, block), 64))
                    _store(
                        scale,
                        out_gmem.at[where],
                        residual_gmem.at[where] if residual_gmem is not None else None,
                        [sums[block]],
                    )
            return packed

        lax.fori_loop(0, count, one_tile, load(0, 0))

    @pl.when(warpgroup == WARPGROUPS)
    def _bring():
        plgpu.set_max_registers(40, action="decrease")

        @pl.loop(0, count)
        def _tile(i):
            token = token_of(i)

            @pl.loop(0, steps)
            def _step(step):
                at = i * steps + step
                slot = lax.rem(at, SLOTS)

                @pl.when(at >= SLOTS)
                def _wait():
                    plgpu.barrier_wait(free.at[slot])

                columns = pl.ds(step * step_columns, step_columns)
                plgpu.copy_gmem_to_smem(
                    a_gmem.at[pl.ds(token, tokens), columns], a_smem.at[slot], full.at[slot]
                )


def _load(words, scales):
    """uint32 [64, 16] that stands for 4 words of columns and 2 of scales in every lane."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((64, 16), jnp.uint32, layout=plgpu.Layout.WGMMA),
    )
    def load(ctx, words, scales):
        warp, lane, g, _ = _lane()
        four = memory.load_vector(4, words, [warp, lane, lanes.index(0)])
        d = [memory.load(scales, warp, h, g) for h in (0, 1)]
        pair = ir.VectorType.get((2,), lanes.i32())
        two = lambda a, b: vector.from_elements(pair, [a, b])  # noqa: E731
        held = [two(*(lanes.element(four, 2 * h + r) for r in (0, 1))) for h in (0, 1)]
        held += [two(*d), two(lanes.integer(0), lanes.integer(0))]
        return _fragment(held, (64, 16), fragments.WGMMA_LAYOUT, False)

    return load(*(words, scales))


def _decode(packed, step: int):
    """float16 [64, 64]: the weights of a step, as wgmma wants them."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct((64, 64), jnp.float16, layout=plgpu.Layout.WGMMA),
    )
    def decode(ctx, packed):
        held = list(packed.registers.flat)
        h, first = divmod(step, 2)
        d = lanes.element(held[2], h)
        low = arith.andi(d, lanes.integer(0xFFFF))
        high = arith.shrui(d, lanes.integer(16))
        minus = [
            arith.xori(arith.muli(x, lanes.integer(0x10001)), lanes.integer(0x80008000)) for x in (low, high)
        ]
        halves = ir.VectorType.get((2,), ir.F16Type.get())
        out = []
        for j in range(8 * first, 8 * first + 8):
            for r in (0, 1):
                signs = arith.shli(lanes.element(held[h], r), lanes.integer(15 - j))
                signs = arith.andi(signs, lanes.integer(0x80008000))
                out.append(llvm.bitcast(halves, arith.xori(signs, minus[r])))
        return _fragment(out, (64, 64), fragments.WGMMA_LAYOUT)

    return decode(*(packed,))


def _store(scale, target, residual, sums):
    """sums * scale (+ residual), or the SwiGLU of two, transposed to target, [tokens, 64]."""
    refs = (target, scale) + (() if residual is None else (residual,))
    types = ((plgpu.RefType(),) * len(refs), (plgpu.Layout.WGMMA,) * len(sums))

    @plgpu.inline_mgpu(arg_types=types)
    def store(ctx, refs, sums):
        target, scale, *residual = refs
        warp, _, g, t = _lane()
        first = arith.addi(arith.muli(warp, lanes.index(16)), g)
        two_t = arith.muli(t, lanes.index(2))
        values = [list(total.registers.flat) for total in sums]
        for begin in range(0, len(values[0]) // 2, STORED_AT_ONCE):
            # All that is loaded, before the first store: behind a store that might change it, each load would
            # wait for memory on its own.
            places, scales, added = [], [], []
            for j in range(begin, min(begin + STORED_AT_ONCE, len(values[0]) // 2)):
                pair = arith.addi(two_t, lanes.index(8 * j))
                for e, s in enumerate(memory.load_reals(2, scale, [pair])):
                    token = lanes.behind(pair, e)
                    for r in (0, 1):
                        output = lanes.behind(first, 8 * r)
                        places.append((j, e, r, token, output))
                        scales.append(s)
                        added.append(memory.load(residual[0], token, output) if residual else None)
            for (j, e, r, token, output), s, more in zip(places, scales, added, strict=True):
                y = [arith.mulf(lanes.element(v[2 * j + r], e), s) for v in values]
                out = y[0] if len(y) == 1 else arith.mulf(_silu(y[0]), y[1])
                memory.store(out if more is None else arith.addf(out, more), target, token, output)

    store(refs, tuple(sums))
