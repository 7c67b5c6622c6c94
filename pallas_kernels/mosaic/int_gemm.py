"""Products of many rows with weights of 4 to 8 bits on Hopper's tensor cores: weights are decoded in registers.

wgmma takes its first operand from registers, 64 rows x 16 columns at a time, and lane 4 g + t of warp w holds
of it rows 16 w + g and 16 w + g + 8 and the columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9. In the layout of int_gemv
(pallas_kernels/tiles.py) the same lane has of each group the columns (group / 4) t .. of the same rows. The
order of columns within a group is free, as long as the activations follow it, so every lane decodes its own
words for itself, to the float16 that dense.py writes, and nothing but scales is exchanged:

    position 16 s + 8 h + 2 t + e of a group of 32  <-  column 8 t + 4 s + 2 h + e,   s, h, e = 0, 1
    position        8 h + 2 t + e of a group of 16  <-  column 4 t       + 2 h + e

Weights are the first operand because they come from registers, so a tile of the product is outputs x tokens.
Blocks of threads are persistent. Of three warpgroups one brings activations (float16, 64 columns at a time)
and weights as they are packed (256 columns) by TMA; two multiply, each `blocks` x 64 outputs (for SwiGLU 64
of the gate and the same 64 of the up projection) with `tokens` tokens. While the tensor cores have one block
of weights, the next is decoded. What a tile gives leaves by TMA too, transposed on its way through shared
memory, where the residual has been put before.
"""
# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false, reportCallIssue=false

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import formats
from pallas_kernels.mosaic import half_weights, lanes, memory
from pallas_kernels.mosaic.wgmma import SMS, STEP_BYTES, WARPGROUPS, fragment, lane, silu
from pallas_kernels.tiles import COLUMNS, ROWS

STEP = STEP_BYTES // 2  # columns of a step
STEPS = COLUMNS // STEP  # of what weights are brought at a time
WEIGHT_SLOTS = 2  # 256 columns of a tile's weights each
MOST_SLOTS = 6  # steps of activations in shared memory
STAGES = 2  # of a warpgroup's results on their way out


class Plan(NamedTuple):
    """What a block of threads does at a time.

    blocks   of 64 outputs that a warpgroup has; for SwiGLU the first of the gate, the second of up
    tokens   of a tile
    slots    steps of activations in shared memory
    stored   tokens of a block that go out at a time
    """

    blocks: int
    tokens: int
    slots: int
    stored: int


@functools.partial(jax.jit, static_argnames=("format", "n", "shared", "plan"))
def int_gemm(
    a: jax.Array,
    scale: jax.Array,
    weights: tuple[dict[str, jax.Array], ...],
    layer: jax.Array,
    n: int,
    residual: jax.Array | None = None,
    *,
    format: str,
    shared: int,
    plan: Plan | None = None,
) -> jax.Array:
    """y = x W.T + residual for one matrix, or silu(x G.T) * (x U.T) for two, x = s a.

    a         float16 [M, K] in the order of columns above, with zeros behind K up to a multiple of 256, as
              half_rows makes it
    scale     float32 [M], s
    weights   of W, or of G and U: the fields that the format's `tile` makes, stacked by layer
    layer     int32 [], the index into them
    n         outputs
    residual  float32 [M, n]
    format    of the weights, one of int_gemv's
    shared    bytes of shared memory that a block may take
    plan      instead of the one chosen for these sizes
    Returns float32 [M, n].
    """
    m = a.shape[0]
    names = tuple(sorted(weights[0]))
    shapes = tuple(weights[0][name].shape[3:] for name in names)
    tiles = weights[0]["words"].shape[1]
    item_bytes = 4 * WEIGHT_SLOTS * sum(map(math.prod, shapes)) + bytes_of_scales(formats.get(format))
    plan = plan or planned(m, tiles, len(weights), item_bytes, shared)
    blocks, tokens, slots, stored = plan
    wide = blocks // len(weights)  # blocks of neighbouring outputs
    rows, columns = -(-m // tokens), -(-tiles * ROWS // (WARPGROUPS * 64 * wide))

    # TMA takes and leaves out what is behind an array's end, but counts rows by 8 and results by 32.
    whole = (m + -m % 8, n + -n % 32)
    operands = [jnp.pad(a, ((0, -m % 8), (0, 0))), jnp.pad(scale, (0, -m % 8))]
    operands.append(jnp.asarray(layer, jnp.int32).reshape(1))
    operands += [_by_lanes(fields[name]) for fields in weights for name in names]
    if residual is not None:
        operands.append(jnp.pad(residual, ((0, whole[0] - m), (0, whole[1] - n))))
    body = functools.partial(
        _body,
        format=format, names=names, shapes=shapes, plan=plan, grid=(rows, columns), matrices=len(weights),
        added=residual is not None,
    )  # fmt: skip
    swizzled = lambda width: (  # noqa: E731
        plgpu.TilingTransform((8, width)),
        plgpu.SwizzleTransform(STEP_BYTES),
    )
    scratch = {
        "a_smem": plgpu.SMEM((slots, tokens, STEP), jnp.float16, transforms=swizzled(STEP)),
        "weights_smem": {
            name: plgpu.SMEM((WEIGHT_SLOTS, 8 * blocks, *_shape_by_lanes(shape)), jnp.uint32)
            for name, shape in zip(names, shapes, strict=True)
        },
        "decoded_smem": plgpu.SMEM(
            (WARPGROUPS * blocks, 4, bytes_of_scales(formats.get(format)) // 4), jnp.float32
        ),
        "stage_smem": plgpu.SMEM(
            (WARPGROUPS * STAGES, stored, 64), jnp.float32, transforms=swizzled(STEP_BYTES // 4)
        ),
        "scale_smem": plgpu.SMEM((WEIGHT_SLOTS + 1, tokens), jnp.float32),
        "a_full": plgpu.Barrier(num_arrivals=1, num_barriers=slots),
        "a_free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=slots),
        "weights_full": plgpu.Barrier(num_arrivals=len(weights) * len(names), num_barriers=WEIGHT_SLOTS),
        "weights_free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=WEIGHT_SLOTS),
        "scale_full": plgpu.Barrier(num_arrivals=1, num_barriers=WEIGHT_SLOTS + 1),
        "stage_full": plgpu.Barrier(num_arrivals=1, num_barriers=WARPGROUPS * STAGES),
    }
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


def planned(m: int, tiles: int, matrices: int, item_bytes: int, shared: int) -> Plan:
    """The largest tile that leaves few blocks of threads idle in the last round, and what shared memory has
    room for.

    tiles       of 16 rows of a matrix
    item_bytes  of shared memory that each tile of a block of threads takes
    """

    def waste(blocks):
        outputs = WARPGROUPS * 64 * blocks // matrices
        count = -(-m // tokens) * -(-tiles * ROWS // outputs)
        return -(-count // SMS) * SMS * tokens * outputs / (m * tiles * ROWS)

    tokens = 128
    choices = {2: 1.0} if matrices == 2 else {2: 1.0, 1: 1.1}
    blocks = min(choices, key=lambda blocks: waste(blocks) * choices[blocks])
    room = shared - 2048 - 8 * blocks * item_bytes  # 2048: scales, barriers
    for stored in (64, 32, 16):
        slots = (room - WARPGROUPS * STAGES * stored * 64 * 4) // (tokens * STEP_BYTES)
        if slots >= 4 or stored == 16:
            return Plan(blocks, tokens, min(slots, MOST_SLOTS), stored)
    raise AssertionError


def _shape_by_lanes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a field's words of one tile, as they stand: vectors apart, lanes and their words together."""
    return (*shape[:-2], math.prod(shape[-2:]))


def _by_lanes(field: jax.Array) -> jax.Array:
    return field.reshape(*field.shape[:3], *_shape_by_lanes(field.shape[3:]))


def _body(
    a_gmem, scale_gmem, layer_gmem, *refs,
    a_smem, weights_smem, decoded_smem, stage_smem, scale_smem,
    a_full, a_free, weights_full, weights_free, scale_full, stage_full,
    format, names, shapes, plan, grid, matrices, added,
):  # fmt: skip
    refs = list(refs)
    weights = [{name: refs.pop(0) for name in names} for _ in range(matrices)]
    residual_gmem = refs.pop(0) if added else None
    (out_gmem,) = refs
    blocks, tokens, slots, stored = plan
    rows, columns = grid
    items = weights[0]["words"].shape[2]
    steps = STEPS * items
    wide = blocks // matrices
    tiles = 8 * wide  # of a matrix in a tile of the product
    sm, warpgroup = lax.axis_index("sm"), lax.axis_index("warpgroup")
    sms = min(SMS, rows * columns)
    count = lax.div(rows * columns - sm + sms - 1, sms)  # tiles of the product for this block

    def token_of(i):
        return lax.rem(sm + i * sms, rows) * tokens

    def column_of(i):
        return lax.div(sm + i * sms, rows)

    @pl.when(warpgroup < WARPGROUPS)
    def _multiply():
        plgpu.set_max_registers(232, action="increase")  # 2 x 232 + 40 <= 512: more would wait forever
        # What of a tile's results leaves together: (block, first token).
        parts = [(block, first) for block in range(wide) for first in range(0, tokens, stored)]

        def place(i, part):
            block, first = parts[part]
            output = (column_of(i) * WARPGROUPS + warpgroup) * wide * 64 + block * 64
            return pl.ds(token_of(i) + first, stored), pl.ds(output, 64)

        def bring_residual(i, part):
            stage = warpgroup * STAGES + part % STAGES
            plgpu.copy_gmem_to_smem(
                residual_gmem.at[place(i, part)], stage_smem.at[stage], stage_full.at[stage]
            )

        def words_of(slot, block, name):
            first = (block * tiles if matrices == 2 else block * 4) + warpgroup * 4 * wide
            return weights_smem[name].at[slot, pl.ds(first, 4)]

        def scales_of(block):
            return decoded_smem.at[warpgroup * blocks + block]

        def products(i):
            """The products of a tile, without their scales."""

            def multiply(*sums):
                @pl.loop(0, items)
                def _item(item):
                    at_weights = i * items + item
                    slot = lax.rem(at_weights, WEIGHT_SLOTS)
                    plgpu.barrier_wait(weights_full.at[slot])
                    for block in range(blocks):
                        fields = {name: words_of(slot, block, name) for name in names}
                        _scales(format, shapes, fields, scales_of(block))
                    for step in range(STEPS):
                        at = i * steps + item * STEPS + step
                        a_slot = lax.rem(at, slots)
                        for block in range(blocks):
                            w = _decode(format, step, words_of(slot, block, "words"), scales_of(block))
                            if block == 0:
                                plgpu.barrier_wait(a_full.at[a_slot])
                            plgpu.wgmma(sums[block], w, a_smem.at[a_slot].transpose((1, 0)))
                            plgpu.wgmma_wait(1)  # the one before: its registers and its slot are free
                            if block == 0:
                                before = lax.rem(at + slots - 1, slots)
                                if step:
                                    plgpu.barrier_arrive(a_free.at[before])
                                else:
                                    pl.when(item > 0)(
                                        lambda before=before: plgpu.barrier_arrive(a_free.at[before])
                                    )
                    plgpu.barrier_arrive(weights_free.at[slot])
                    if added:

                        @pl.when(item == 0)
                        def _bring():  # by now the results of the tile before have left
                            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                            for part in range(min(STAGES, len(parts))):
                                bring_residual(i, part)

                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(a_free.at[lax.rem(i * steps + steps - 1, slots)])
                return [total[...] for total in sums]

            return pl.run_scoped(multiply, *[plgpu.ACC((64, tokens), jnp.float32)] * blocks)

        @pl.loop(0, count)
        def _tile(i):
            sums = products(i)
            scale_slot = lax.rem(i, WEIGHT_SLOTS + 1)
            plgpu.barrier_wait(scale_full.at[scale_slot])
            for part, (block, first) in enumerate(parts):
                stage = warpgroup * STAGES + part % STAGES
                if added:
                    plgpu.barrier_wait(stage_full.at[stage])
                else:
                    plgpu.wait_smem_to_gmem(STAGES - 1, wait_read_only=True)
                _stage(
                    sums if matrices == 2 else [sums[block]],
                    scale_smem.at[scale_slot, pl.ds(first, stored)], stage_smem.at[stage], first, added,
                )  # fmt: skip
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(stage_smem.at[stage], out_gmem.at[place(i, part)])
                if added and part + STAGES < len(parts):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    bring_residual(i, part + STAGES)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(warpgroup == WARPGROUPS)
    def _bring():
        plgpu.set_max_registers(40, action="decrease")
        layer = layer_gmem[0]

        @pl.loop(0, count)
        def _tile(i):
            token, tile = token_of(i), column_of(i) * tiles
            # Nobody reads the scales that this overwrites: of the tile that they are of all weights were used,
            # or there were no slot for this tile's.

            @pl.loop(0, items)
            def _item(item):
                at_weights = i * items + item
                slot = lax.rem(at_weights, WEIGHT_SLOTS)

                @pl.when(at_weights >= WEIGHT_SLOTS)
                def _wait():
                    plgpu.barrier_wait(weights_free.at[slot])

                for matrix, fields in enumerate(weights):
                    for name, field in fields.items():
                        plgpu.copy_gmem_to_smem(
                            field.at[layer, pl.ds(tile, tiles), item],
                            weights_smem[name].at[slot, pl.ds(matrix * tiles, tiles)],
                            weights_full.at[slot],
                        )

                @pl.when(item == 0)
                def _scale():
                    scale_slot = lax.rem(i, WEIGHT_SLOTS + 1)
                    plgpu.copy_gmem_to_smem(
                        scale_gmem.at[pl.ds(token, tokens)],
                        scale_smem.at[scale_slot],
                        scale_full.at[scale_slot],
                    )

                for step in range(STEPS):
                    at = i * steps + item * STEPS + step
                    a_slot = lax.rem(at, slots)

                    @pl.when(at >= slots)
                    def _wait(a_slot=a_slot):
                        plgpu.barrier_wait(a_free.at[a_slot])

                    where = (pl.ds(token, tokens), pl.ds((item * STEPS + step) * STEP, STEP))
                    plgpu.copy_gmem_to_smem(a_gmem.at[where], a_smem.at[a_slot], a_full.at[a_slot])


def _scales(format: str, shapes, fields, target):
    """Of one block's 256 columns all scales and minimums (int_phase.Unit), float32, to shared memory: `target`
    [4 warps, bytes_of_scales / 4] has of each group, for each g, those of row g and those of row g + 8. Only
    lanes of the warp that writes them read them."""
    module = formats.get(format)
    names = sorted(fields)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * (1 + len(names)))
    def scales(ctx, target, *refs):
        warp, number, g, t = lane()
        words = {
            name: _words(ref, shape, warp, number)
            for name, ref, shape in zip(names, refs, shapes, strict=True)
        }
        per_row = 4 * _kinds(module)  # bytes
        at = _scales_of_warp(target, warp, module, g)
        at = lanes.plus(at, lanes.scaled(lanes.to_integer(t), 2 * 16 * per_row))
        for u, unit in enumerate(module.fragments(words, lanes.to_integer(number))):
            kinds = [unit.scale] if unit.minimum is None else [unit.scale, unit.minimum]
            for h in (0, 1):
                values = [lanes.as_word(kind[r][h]) for r in (0, 1) for kind in kinds]
                memory.store_shared(values, at, (8 * u + h) * 16 * per_row)
        lanes.warp_barrier()

    scales(target, *(fields[name] for name in names))


def bytes_of_scales(module) -> int:
    """Of 16 rows x 256 columns, as `_scales` puts them."""
    return COLUMNS // module.GROUP * 16 * 4 * _kinds(module)


def _kinds(module) -> int:
    """Numbers of a group: 2 where something is subtracted from every weight, because codes are not signed."""
    return 1 if module.SIGNED else 2


def _scales_of_warp(scales, warp, module, g):
    """Where a warp's begin, as i32, for rows g and g + 8."""
    at = lanes.plus(memory.shared_address(scales), lanes.scaled(lanes.to_integer(warp), bytes_of_scales(module)))
    return lanes.plus(at, lanes.scaled(lanes.to_integer(g), 2 * 4 * _kinds(module)))


def _decode(format: str, step: int, words, scales):
    """float16 [64, 64]: the weights of a step, as wgmma wants them."""
    module = formats.get(format)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((64, 64), jnp.float16, layout=plgpu.Layout.WGMMA),
    )
    def decode(ctx, words, scales):
        warp, number, g, _ = lane()
        vectors = [
            memory.load_words(4, words, [warp, lanes.index(v), arith.muli(number, lanes.index(4))])
            for v in range(words.type.shape[1])
        ]
        pairs = step_pairs(module, step, vectors, _scales_of_warp(scales, warp, module, g))
        halves = ir.VectorType.get((2,), ir.F16Type.get())
        pairs = [llvm.bitcast(halves, pair) for pair in pairs]
        return fragment(pairs, (64, 64), fragments.WGMMA_LAYOUT)

    return decode(words, scales)


def step_pairs(module, step: int, vectors: list, scales) -> list:
    """A lane's pairs of float16 for the 64 columns of a step, in wgmma's order: for 8 positions at a time row
    g, and row g + 8.

    vectors  its words of the codes of 256 columns; of those of other steps nothing remains
    scales   address of those of its rows
    """
    kinds = _kinds(module)
    codes = module.codes(vectors)
    out = []
    for group in range(step * STEP // module.GROUP, (step + 1) * STEP // module.GROUP):
        values = [lanes.as_real(v) for v in memory.load_shared(2 * kinds, scales, group * 16 * 4 * kinds)]
        minimum = values[1::2] if kinds == 2 else None
        decoded = half_weights.pairs(codes[group], module.SIGNED, values[::kinds], minimum)
        out += [pair for rows in zip(*decoded, strict=True) for pair in rows]
    return out


def _words(ref, shape: tuple[int, ...], warp, number) -> list:
    """What a lane has of a field of one tile: words, or vectors of four."""
    if len(shape) == 1:  # a word for 32 / n neighbouring lanes
        return [memory.load(ref, warp, arith.divui(number, lanes.index(32 // shape[0])))]
    at = arith.muli(number, lanes.index(shape[-1]))
    if len(shape) == 2:
        return memory.load_words(shape[-1], ref, [warp, at])
    return [memory.load_words(4, ref, [warp, lanes.index(v), at]) for v in range(shape[0])]


def _stage(sums, scale, stage, first: int, added: bool):
    """sums * scale (+ what is there), or the SwiGLU of two, transposed to `stage`, [tokens, 64], from token
    `first` of the sums on. Swizzled, so that the lanes of a warp write to different banks."""
    tokens = scale.shape[0]

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            plgpu.RefType((plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(STEP_BYTES))),
            (plgpu.Layout.WGMMA,) * len(sums),
        )
    )
    def store(ctx, scale, stage, sums):
        warp, _, g, t = map(lanes.to_integer, lane())
        # Token 8 j + 2 t + e, output 16 warp + 8 r + g: tile (j, warp / 2) of 8 x 32, row 2 t + e of it, and
        # of that row, in the swizzle, the 16 bytes whose number is xored with the row's.
        base = lanes.plus(memory.shared_address(stage), lanes.scaled(lanes.quotient(warp, 2), 1024))
        base = lanes.plus(base, lanes.scaled(lanes.remainder(g, 4), 4))
        chunk = lanes.plus(lanes.scaled(lanes.remainder(warp, 2), 4), lanes.quotient(g, 4))
        places = {}
        for e in (0, 1):
            row = lanes.plus(lanes.scaled(t, 2), e)
            for r in (0, 1):
                swizzled = arith.xori(lanes.plus(chunk, 2 * r), row)
                places[e, r] = lanes.plus(base, lanes.scaled(row, 128), lanes.scaled(swizzled, 16))
        values = [list(total.registers.flat) for total in sums]
        at = lanes.to_index(lanes.scaled(t, 2))
        for j in range(tokens // 8):
            scales = memory.load_reals(2, scale, [lanes.behind(at, 8 * j)])
            for e, s in enumerate(scales):
                for r in (0, 1):
                    y = [arith.mulf(lanes.element(v[2 * (first // 8 + j) + r], e), s) for v in values]
                    out = y[0] if len(y) == 1 else arith.mulf(silu(y[0]), y[1])
                    if added:
                        (there,) = memory.load_shared(1, places[e, r], 2048 * j)
                        out = arith.addf(out, lanes.as_real(there))
                    memory.store_shared([lanes.as_word(out)], places[e, r], 2048 * j)

    store(scale, stage, tuple(sums))
