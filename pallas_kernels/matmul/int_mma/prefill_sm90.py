"""Products of many rows with weights of 2 to 8 bits on Hopper's tensor cores, dequantized in registers.

wgmma takes its first operand from registers, 64 rows x 16 columns at a time, and lane 4 g + t of warp w holds
of it rows 16 w + g and 16 w + g + 8 and the columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9. In the layout of
int_decode (pallas_kernels/tiles.py) the same lane has of each group the columns (group / 4) t .. of the same
rows. The order of columns within a group is free, as long as the activations follow it, so every lane
dequantizes its own words for itself, bytes 0 and 2 of each and then 1 and 3 (float16.py), and nothing but
scales is exchanged:

    position 16 s + 8 h + 2 t + e of a group of 32  <-  column 8 t + 4 s + h + 2 e,   s, h, e = 0, 1
    position        8 h + 2 t + e of a group of 16  <-  column 4 t       + h + 2 e

Weights are the first operand because they come from registers, so a tile of the product is outputs x tokens.
Blocks of threads are persistent. Of three or four warpgroups one brings activations (float16, 64 columns at a
time) and weights as they are packed (256 columns) by TMA; the others multiply, each `blocks` x 64 rows of
weights with `tokens` tokens. While the tensor cores have one block of weights, the next is dequantized. Two
blocks of threads, a pair, have the same tokens and neighbouring outputs: each brings half of the activations
for both, because the L2 cache does not give all of them twice in the time. For SwiGLU 32 of 64 rows are the
gate's, and 32 the same of the up projection: rows g and g + 8 of a lane, so that it has both of an output.
What a tile gives leaves by TMA too, transposed on its way through shared memory, where the residual has been
put before.

In a mixture of experts (experts/grouped.py) tiles of tokens come from a list, each with the matrix that it is
multiplied with, and their number is not known before the kernel runs. Neighbouring blocks then have the same
tokens, not the same weights: an expert's weights are read once for each of its tiles.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device, formats
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.gpu.wgmma import REGISTERS, STEP, stage_results, swizzled
from pallas_kernels.matmul import stacks
from pallas_kernels.matmul.activations_rotated import activations_rotated
from pallas_kernels.matmul.int_mma import float16 as int_float16
from pallas_kernels.matmul.int_mma.activations_float16 import activations_float16, rotated_form
from pallas_kernels.matmul.int_mma.prefill_plan import PAIR, STAGES, STEPS, WEIGHT_SLOTS, Tiles, planned
from pallas_kernels.matmul.prefill import in_order, in_two_phases
from pallas_kernels.tiles import TILE_COLUMNS, TILE_ROWS


@functools.partial(
    jax.jit,
    static_argnames=(
        "format", "n", "activation", "tiles_of", "summed"
    ),
)  # fmt: skip
def int_prefill_sm90(
    a: jax.Array,
    scale: jax.Array,
    weights: tuple[dict[str, jax.Array], ...],
    layer: jax.Array | None,
    n: int,
    residual: jax.Array | None = None,
    listed: tuple[jax.Array, jax.Array] | None = None,
    *,
    format: str,
    activation: Activation = SILU,
    tiles_of: Tiles | None = None,
    summed: bool = True,
) -> jax.Array:
    """y = x W.T + residual for one matrix, or activation(x G.T, x U.T) for two, x = s a.

    a         float16 [M, K] in the order of columns above, with zeros behind K up to a multiple of 256, as
              activations_float16 makes it; M a multiple of 8
    scale     float32 [M], s
    weights   of W, or of G and U: the fields that the format's `tile` makes, stacked by layer
    layer     int32 [], the index into them; None for stacks of one
    n         outputs
    residual  float32 [M or fewer, n]
    listed    (int32 [tiles, 3], int32 [1]), with tiles_of: of each tile of tokens its matrix among the
              layer's, its first row of a, a multiple of tiles_of.stored, and the end of its matrix's rows;
              and how many there are. In y, rows of no tile are undefined
    format    of the weights, of the family "int"
    tiles_of  what `listed` has
    summed    else what each split of the columns has is returned as it is, [splits, M, n], no residual added
    Returns float32 [M, n].
    """
    m = a.shape[0]
    names = tuple(sorted(weights[0]))
    shapes = tuple(weights[0][name].shape[3:] for name in names)
    tiles = weights[0]["words"].shape[1]
    scale_bytes = int_float16.bytes_of_scales(formats.get(format).LANES)
    words = tuple(map(math.prod, shapes))
    items = weights[0]["words"].shape[2]
    plan = planned(m, tiles, items, len(weights), words, scale_bytes, tiles_of, summed)
    warpgroups, blocks, tokens, slots, stored, splits = plan
    outputs = 64 // len(weights)  # of a block
    rows = -(-m // tokens) if listed is None else len(listed[0])
    columns = -(-tiles * TILE_ROWS // (PAIR * warpgroups * blocks * outputs))
    pairs = min(device.multiprocessors() // PAIR, rows * columns * splits)

    # TMA takes and leaves out what is behind an array's end, but counts rows by 8 and results by 32.
    assert m % 8 == 0, f"int_prefill_sm90: {m} rows are no multiple of 8"
    whole = n + -n % 32
    operands = [a, scale, *([] if layer is None else [jnp.asarray(layer, jnp.int32).reshape(1)])]
    operands += listed or ()
    operands += [_by_lanes(fields[name]) for fields in weights for name in names]
    added, after = (residual, None) if splits == 1 else (None, residual)
    if added is not None:
        operands.append(jnp.pad(added, ((0, m - len(added)), (0, whole - n))))
    body = functools.partial(
        _body,
        format_lanes=formats.get(format).LANES, names=names, shapes=shapes, plan=plan, grid=(rows, columns),
        pairs=pairs, matrices=len(weights), indexed=layer is not None, added=added is not None,
        tiles_of=tiles_of,
        activation=activation if len(weights) == 2 else None,
    )  # fmt: skip
    scratch = {
        "a_smem": plgpu.SMEM((slots, tokens, STEP), jnp.float16, transforms=swizzled(2)),
        "weights_smem": {
            name: plgpu.SMEM((WEIGHT_SLOTS, 4 * warpgroups * blocks, *_shape_by_lanes(shape)), jnp.uint32)
            for name, shape in zip(names, shapes, strict=True)
        },
        "decoded_smem": plgpu.SMEM((len(weights), warpgroups * blocks, 4, scale_bytes // 4), jnp.float32),
        "stage_smem": plgpu.SMEM((warpgroups * STAGES, stored, outputs), jnp.float32, transforms=swizzled(4)),
        "scale_smem": plgpu.SMEM((WEIGHT_SLOTS + 1, tokens + -tokens % 32), jnp.float32),
        "a_full": plgpu.Barrier(num_arrivals=1, num_barriers=slots),
        "a_free": plgpu.ClusterBarrier(
            collective_axes=("member",), num_arrivals=warpgroups, num_barriers=slots
        ),
        "weights_full": plgpu.Barrier(num_arrivals=len(weights) * len(names), num_barriers=WEIGHT_SLOTS),
        "weights_free": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=WEIGHT_SLOTS),
        "scale_full": plgpu.Barrier(num_arrivals=1, num_barriers=WEIGHT_SLOTS + 1),
        "stage_full": plgpu.Barrier(num_arrivals=1, num_barriers=warpgroups * STAGES),
    }
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((splits, m, whole), jnp.float32),
        grid=(pairs,),
        grid_names=("pair",),
        cluster=(PAIR,),
        cluster_names=("member",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="int_prefill_sm90",  # as profilers show it
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    parts = kernel(*operands)[:, :, :n]
    return in_order(parts, after) if summed else parts


def _shape_by_lanes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a field's words of one tile, as they stand: vectors apart, lanes and their words together."""
    return (*shape[:-2], math.prod(shape[-2:]))


def _by_lanes(field: jax.Array) -> jax.Array:
    return field.reshape(*field.shape[:3], *_shape_by_lanes(field.shape[3:]))


def _body(
    a_gmem, scale_gmem, *refs,
    a_smem, weights_smem, decoded_smem, stage_smem, scale_smem,
    a_full, a_free, weights_full, weights_free, scale_full, stage_full,
    format_lanes, names, shapes, plan, grid, pairs, matrices, indexed, added, tiles_of, activation,
):  # fmt: skip
    refs = list(refs)
    layer_gmem = refs.pop(0) if indexed else [0]
    list_gmem, count_gmem = (refs.pop(0), refs.pop(0)) if tiles_of else (None, None)
    weights = [{name: refs.pop(0) for name in names} for _ in range(matrices)]
    residual_gmem = refs.pop(0) if added else None
    (out_gmem,) = refs
    warpgroups, blocks, tokens, slots, stored, splits = plan
    rows, columns = grid
    if tiles_of:
        rows = count_gmem[0]  # pyrefly: ignore[unsupported-operation]
    for_products, for_copies = REGISTERS[warpgroups]
    items = weights[0]["words"].shape[2] // splits
    steps = STEPS * items
    tiles = 4 * warpgroups * blocks // matrices  # of a matrix in a tile of the product
    outputs = 64 // matrices  # of a block
    pair, member = lax.axis_index("pair"), lax.axis_index("member")
    warpgroup = lax.axis_index("warpgroup")
    count = lax.div(rows * columns * splits - pair + pairs - 1, pairs)  # tiles of the product for this block

    def rows_of(i):
        """Of a tile its matrix, its first row and, from a list, the end of its rows."""
        if not tiles_of:
            return layer_gmem[0], lax.rem(pair + i * pairs, rows) * tokens, None
        row = lax.div(pair + i * pairs, columns)
        # pyrefly: ignore[unsupported-operation]
        matrix = layer_gmem[0] * tiles_of.matrices + list_gmem[row, 0]
        return matrix, list_gmem[row, 1], list_gmem[row, 2]  # pyrefly: ignore[unsupported-operation]

    def column_of(i):
        number = pair + i * pairs if tiles_of else lax.div(pair + i * pairs, rows)
        return PAIR * lax.rem(number, columns) + member

    def split_of(i):
        return 0 if tiles_of else lax.div(pair + i * pairs, rows * columns)

    @pl.when(warpgroup < warpgroups)
    def _multiply():
        plgpu.set_max_registers(for_products, action="increase")
        # What of a tile's results leaves together: (block, first token).
        parts = [(block, first) for block in range(blocks) for first in range(0, tokens, stored)]

        def place(i, token, part):
            block, first = parts[part]
            output = ((column_of(i) * warpgroups + warpgroup) * blocks + block) * outputs
            return pl.ds(token + first, stored), pl.ds(output, outputs)

        def bring_residual(i, token, part):
            stage = warpgroup * STAGES + part % STAGES
            source = residual_gmem.at[place(i, token, part)]  # pyrefly: ignore[missing-attribute]
            plgpu.copy_gmem_to_smem(source, stage_smem.at[stage], stage_full.at[stage])

        def words_of(slot, block, name):
            """Of each matrix its tiles of a block."""
            own = 4 // matrices
            first = (warpgroup * blocks + block) * own
            return [weights_smem[name].at[slot, pl.ds(m * tiles + first, own)] for m in range(matrices)]

        def scales_of(at_weights, block):
            """With two matrices a warp's are for another too, which may still want those of the item
            before."""
            return decoded_smem.at[lax.rem(at_weights, matrices), warpgroup * blocks + block]

        def products(i, token):
            """The products of a tile, without their scales."""

            def multiply(*sums):
                @pl.loop(0, items)
                def _item(item):
                    at_weights = i * items + item
                    slot = lax.rem(at_weights, WEIGHT_SLOTS)
                    plgpu.barrier_wait(weights_full.at[slot])
                    for block in range(blocks):
                        refs_by_name = zip(*(words_of(slot, block, name) for name in names), strict=True)
                        fields = [dict(zip(names, refs, strict=True)) for refs in refs_by_name]
                        int_float16.put_scales(format_lanes, shapes, fields, scales_of(at_weights, block))
                    if matrices == 2:
                        int_float16.seen()
                    for step in range(STEPS):
                        at = i * steps + item * STEPS + step
                        a_slot = step if slots == STEPS else lax.rem(at, slots)
                        for block in range(blocks):
                            w = int_float16.operand(
                                format_lanes,
                                step,
                                words_of(slot, block, "words"),
                                scales_of(at_weights, block),
                            )
                            if block == 0:
                                plgpu.barrier_wait(a_full.at[a_slot])
                            plgpu.wgmma(sums[block], w, a_smem.at[a_slot].transpose((1, 0)))
                            plgpu.wgmma_wait(1)  # the one before: its registers and its slot are free
                            if block == 0:
                                before = (
                                    (step - 1) % STEPS if slots == STEPS else lax.rem(at + slots - 1, slots)
                                )
                                if step:
                                    plgpu.barrier_arrive(a_free.at[before])
                                else:
                                    pl.when(item > 0)(
                                        lambda before=before: plgpu.barrier_arrive(a_free.at[before])
                                    )
                    plgpu.barrier_arrive(weights_free.at[slot])

                    @pl.when(item == 0)
                    def _stages():  # by now the results of the tile before have left
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        if added:
                            for part in range(min(STAGES, len(parts))):
                                bring_residual(i, token, part)

                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(a_free.at[lax.rem(i * steps + steps - 1, slots)])
                return [total[...] for total in sums]

            return pl.run_scoped(multiply, *[plgpu.ACC((64, tokens), jnp.float32)] * blocks)

        @pl.loop(0, count)
        def _tile(i):
            _, token, end = rows_of(i)
            sums = products(i, token)
            scale_slot = lax.rem(i, WEIGHT_SLOTS + 1)
            plgpu.barrier_wait(scale_full.at[scale_slot])

            def put(part):
                block, first = parts[part]
                stage = warpgroup * STAGES + part % STAGES
                if added:
                    plgpu.barrier_wait(stage_full.at[stage])
                else:
                    plgpu.wait_smem_to_gmem(STAGES - 1, wait_read_only=True)
                stage_results(
                    sums[block], scale_smem.at[scale_slot, pl.ds(first, stored)], stage_smem.at[stage],
                    first, activation, added,
                )  # fmt: skip
                plgpu.commit_smem()
                where = out_gmem.at[split_of(i), *place(i, token, part)]
                plgpu.copy_smem_to_gmem(stage_smem.at[stage], where)
                if added and part + STAGES < len(parts):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    bring_residual(i, token, part + STAGES)

            for part, (_, first) in enumerate(parts):
                if tiles_of:  # what follows is another tile's
                    pl.when(token + first < end)(functools.partial(put, part))
                else:
                    put(part)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(warpgroup == warpgroups)
    def _bring():
        plgpu.set_max_registers(for_copies, action="decrease")
        # Warps issue from four schedulers, whose time counts: each brings one step of four, where slots are
        # the steps. Otherwise one warp has to see all of a slot's turns.
        workers = STEPS if slots == STEPS else 1

        def bring_weights(i, matrix, item):
            at_weights = i * items + item
            slot = lax.rem(at_weights, WEIGHT_SLOTS)

            @pl.when(at_weights >= WEIGHT_SLOTS)
            def _wait():
                plgpu.barrier_wait(weights_free.at[slot])

            for number, fields in enumerate(weights):
                for name, field in fields.items():
                    own_tiles = pl.ds(column_of(i) * tiles, tiles)
                    plgpu.copy_gmem_to_smem(
                        field.at[matrix, own_tiles, split_of(i) * items + item],
                        weights_smem[name].at[slot, pl.ds(number * tiles, tiles)],
                        weights_full.at[slot],
                    )

        def bring_scale(i, token):
            # Nobody reads what it overwrites: the tile after that one has been multiplied.
            slot = lax.rem(i, WEIGHT_SLOTS + 1)
            where = pl.ds(token, scale_smem.shape[1])  # TMA brings whole 128 bytes
            plgpu.copy_gmem_to_smem(scale_gmem.at[where], scale_smem.at[slot], scale_full.at[slot])

        def bring_step(i, token, item, step):
            at = i * steps + item * STEPS + step
            slot = step if slots == STEPS else lax.rem(at, slots)

            @pl.when(at >= slots)
            def _wait():
                plgpu.barrier_wait(a_free.at[slot])

            column = (split_of(i) * items + item) * TILE_COLUMNS + step * STEP
            where = (pl.ds(token, tokens), pl.ds(column, STEP))
            plgpu.copy_gmem_to_smem(
                a_gmem.at[where], a_smem.at[slot], a_full.at[slot], collective_axes="member"
            )

        @plgpu.warp_map
        def _warps(warp):
            # One code for all warps: of a code for each, ptxas (12.9 to 13.4) let some warps' first copies
            # take their coordinates from registers that only other warps had set.
            @pl.when(warp < workers)
            def _work():
                @pl.loop(0, count)
                def _tile(i):
                    matrix, token, _ = rows_of(i)
                    pl.when(warp == 0)(lambda: bring_scale(i, token))

                    @pl.loop(0, items)
                    def _item(item):
                        pl.when(warp == workers - 1)(lambda: bring_weights(i, matrix, item))
                        for step in range(0, STEPS, workers):
                            bring_step(i, token, item, warp + step)

                @pl.when(count > 0)  # a list may leave a block none
                def _end():
                    # A block that ended would take away the barriers at which the other still arrives.
                    for k in range(0, slots, workers):
                        plgpu.barrier_wait(a_free.at[lax.rem(count * steps + warp + k, slots)])


def prologue(x, weights, layer, gamma, eps: float, rows: int | None = None) -> tuple[jax.Array, ...]:
    """Activations as float16 in the order of columns above (prefill.py); for weights with groups of 32 and
    with groups of 16 in the one order and in the other (`order_of`)."""
    group, *others = sorted({_group(w) for w in weights}, reverse=True)
    gamma, index = stacks.narrowed(*stacks.gamma_stack(gamma, layer))
    if (rotation := weights[0].rotation) is not None:
        assert not others
        return activations_rotated(x, rotation, gamma, index, eps, form=rotated_form(group))
    group = (group, *others) if others else group
    return activations_float16(x, gamma, index, eps, group=group, rows=rows)


def order_of(activations: Sequence[jax.Array], w) -> tuple[jax.Array, jax.Array]:
    """(a, scale) for one of several weights, of what `prologue` made for all."""
    *orders, scale = activations
    return orders[-1 if _group(w) == 16 else 0], scale


def _group(w) -> int:
    return formats.get(w.format).LANES.group


def rotates(format: str) -> bool:
    """The kernel that rounds activations rotates them too."""
    return True


def gemm(
    a, scale, weights, part_layer, residual, activation: Activation = SILU, summed: bool = True
) -> jax.Array:
    """The kernel on matrices with or without a layer axis (prefill.py)."""
    fields, layer = stacks.narrowed(tuple(w.fields for w in weights), part_layer)
    (n, _), format = weights[0].shape, weights[0].format
    return int_prefill_sm90(
        a, scale, fields, layer, n, residual, format=format, activation=activation, summed=summed
    )


run = in_two_phases(prologue, gemm)
