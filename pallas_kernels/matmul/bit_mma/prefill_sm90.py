"""Products of many rows with weights of 1 bit (Q1_0) and ternary ones on Hopper's integer tensor cores,
weights dequantized in registers.

    y[m, n] = sum over groups of 128 columns:  d[n] s[m] sum(w[n] q[m]),   w = +-1, or -1, 0, 1

weight_bytes.py says how a lane makes operands of its words, and group_sums.py how the sums of groups become
y: exactly for activations of 16 bits and for tiles of up to 32 tokens, both for 1 bit only; else with d
rounded to 7 bits of the largest of four groups.

Activations of 16 bits are two planes of 8, each a product of its own with the same weights.

Blocks of threads are persistent, a tile of theirs is outputs x tokens. Of three or four warpgroups all but
one multiply, each 64 rows with all the tile's tokens: 64 of one matrix, or 32 of the gate and the same 32 of
the up projection, in the same lanes, so that SwiGLU is a lane's own. The last brings what they need for a
step. The residual comes, and results leave, by TMA through shared memory, while the next tile is worked on:
in parts of fewer tokens where there is no room for a tile's beside two steps.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device, formats
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.activation_math import FAST
from pallas_kernels.gpu.values import index, integer
from pallas_kernels.gpu.wgmma import REGISTERS, fragment, lane, swizzled
from pallas_kernels.matmul import stacks
from pallas_kernels.matmul.activations_rotated import activations_rotated
from pallas_kernels.matmul.bit_mma.activations import GROUP, ROTATED_INTEGERS, activations_int8
from pallas_kernels.matmul.bit_mma.group_sums import (
    COEFFICIENTS,
    Slot,
    add_groups,
    add_groups_together,
    store_coefficients,
    together,
    unit_of,
)
from pallas_kernels.matmul.bit_mma.prefill_plan import STEP, Steps, planned
from pallas_kernels.matmul.bit_mma.weight_bytes import Encoding, Ternary, encoding_of, words_and_scales
from pallas_kernels.matmul.prefill import in_order, in_two_phases

RESULT_COLUMNS = 32  # float32 of a swizzled row of results: 128 bytes
OF_ROWS = plgpu.Layout.WGMMA.reduce(1)  # one number for each row of sums


@functools.partial(jax.jit, static_argnames=("n", "activation", "summed"))
def bit_prefill_sm90(
    q: jax.Array,
    scale: jax.Array,
    weights: tuple[tuple[jax.Array, jax.Array], ...],
    layer: jax.Array | None,
    n: int,
    residual: jax.Array | None = None,
    *,
    activation: Activation = SILU,
    summed: bool = True,
) -> jax.Array:
    """y = x W.T + residual for one matrix, or activation(x G.T, x U.T) for two, x = sum of s q.

    q         int8 [bits / 8, G, M, 128] and
    scale     float32 [bits / 8, G, M], s / 64: of groups padded to 4 and rows to 16 or 64, as
              activations_int8 has them
    weights   ((words, scales),) of W, or of G and U: tiled stacks (formats/q1_0.py, q2_0_g128.py) of a
              multiple of 64 rows
    layer     int32 [], the index into them; None for stacks of one
    n         outputs
    residual  float32 [at most M, n]
    summed    else what each split of the columns has is returned as it is, [splits, M, n], no residual added
    Returns float32 [M, n], of which rows behind those of x mean nothing.
    """
    planes, groups, m, _ = q.shape
    steps, pairs, matrices = groups * planes // STEP, STEP // planes // 2, len(weights)  # pairs of groups
    encoding, all_pairs = encoding_of(*weights[0]), weights[0][0].shape[2]
    words_of_pair, d_of_pair = (math.prod(v.shape[2:]) // all_pairs for v in weights[0])
    plan = planned(m, n, steps, matrices, planes, summed, (words_of_pair, d_of_pair))
    warpgroups, tokens, splits, slots, stored = plan
    wide = 64 // matrices  # outputs of a warpgroup
    grid = (-(-m // tokens), -(-n // (warpgroups * wide)), splits)
    blocks = min(device.multiprocessors(), math.prod(grid))
    operands = [q, scale, *([] if layer is None else [jnp.asarray(layer, jnp.int32).reshape(1)])]
    for words, scales in weights:
        operands += [v.reshape(*words.shape[:3], -1) for v in (words, scales)]
    whole = n + -n % RESULT_COLUMNS  # as TMA counts results
    added, after = (residual, None) if splits == 1 else (None, residual)
    if added is not None:
        operands.append(jnp.pad(added, ((0, m - len(added)), (0, whole - n))))
    tiles = 4 * warpgroups // matrices  # of 16 rows, of a matrix
    scratch = {
        "q_smem": plgpu.SMEM((slots, 2 * pairs, planes, tokens, GROUP), jnp.int8, transforms=swizzled(1)),
        "out_smem": plgpu.SMEM((warpgroups * plan.stages, stored, wide), jnp.float32, transforms=swizzled(4)),
        "scale_smem": plgpu.SMEM((slots, 2 * pairs, planes, tokens), jnp.float32),
        "words_smem": plgpu.SMEM((slots, matrices, tiles, pairs, words_of_pair), jnp.uint32),
        "d_smem": plgpu.SMEM((slots, matrices, tiles, pairs, d_of_pair), jnp.uint32),
        "full_smem": plgpu.SMEM((slots, 2), jnp.int32),  # mbarriers, of activations
        "weights_full": plgpu.Barrier(num_arrivals=2 * matrices, num_barriers=slots),
        "free": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=slots),
        "residual_full": plgpu.Barrier(num_arrivals=1, num_barriers=warpgroups * plan.stages),
    }  # fmt: skip
    if together(tokens, planes, isinstance(encoding, Ternary)):
        scratch["coefficients_smem"] = plgpu.SMEM((slots, COEFFICIENTS, tokens), jnp.float32)
        scratch["coefficients_full"] = plgpu.Barrier(num_arrivals=1, num_barriers=slots)
    kernel = plgpu.kernel(
        functools.partial(
            _body,
            encoding=encoding, plan=plan, matrices=matrices, planes=planes, steps=steps, pairs=pairs,
            grid=grid, blocks=blocks, indexed=layer is not None, added=added is not None,
            activation=activation if matrices == 2 else None,
        ),
        out_type=jax.ShapeDtypeStruct((splits, m, whole), jnp.float32),
        grid=(blocks,),
        grid_names=("sm",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="bit_prefill_sm90",  # as profilers show it
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )  # fmt: skip
    parts = kernel(*operands)[:, :, :n]
    return in_order(parts, after) if summed else parts


def _body(
    q_gmem, scale_gmem, *refs,
    q_smem, out_smem, scale_smem, words_smem, d_smem, full_smem, weights_full, free, residual_full,
    coefficients_smem=None, coefficients_full=None,
    encoding, plan, matrices, planes, steps, pairs, grid, blocks, indexed, added, activation,
):  # fmt: skip
    layer_gmem, *refs = refs if indexed else (None, *refs)
    weights = [(refs[2 * i], refs[2 * i + 1]) for i in range(matrices)]
    residual_gmem = refs[2 * matrices] if added else None
    out_gmem = refs[-1]
    rows, columns, splits = grid
    warpgroups, tokens, _, slots, stored = plan
    for_products, for_copies = REGISTERS[warpgroups]
    sm, warpgroup = lax.axis_index("sm"), lax.axis_index("warpgroup")
    count = lax.div(rows * columns * splits - sm + blocks - 1, blocks)  # tiles of the product for this block
    tile_steps = Steps(steps, splits, rows * columns, blocks)
    wide = out_smem.shape[-1]
    _init_barriers(full_smem)

    def token_of(i):
        """The first of tile i. Where rows are no whole tiles, the last two share some, and make the same."""
        return jnp.minimum(lax.rem(sm + i * blocks, rows) * tokens, out_gmem.shape[1] - tokens)

    def column_of(i):
        return lax.rem(lax.div(sm + i * blocks, rows), columns)

    @pl.when(warpgroup < warpgroups)
    def _multiply():
        plgpu.set_max_registers(for_products, action="increase")
        stages, firsts = plan.stages, range(0, tokens, stored)  # of the parts of a tile that leave together

        def stage_of(part):
            return warpgroup * stages + part % stages

        def one_tile(i, carry):
            def place(part):
                column = (column_of(i) * warpgroups + warpgroup) * wide
                return pl.ds(token_of(i) + firsts[part], stored), pl.ds(column, wide)

            def bring_residual(part):
                stage = stage_of(part)
                source = residual_gmem.at[place(part)]  # pyrefly: ignore[missing-attribute]
                plgpu.copy_gmem_to_smem(source, out_smem.at[stage], residual_full.at[stage])

            def one_step(step, sums):
                at = tile_steps.before_tile(sm, i) + step
                slot = lax.rem(at, slots)
                if added:

                    @pl.when(step == min(1, tile_steps.each - 1))  # by now the tile before has left
                    def _residual():
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        for part in range(stages):
                            bring_residual(part)

                q = tuple(q_smem.at[slot, *divmod(product, planes)] for product in range(STEP))
                plgpu.barrier_wait(weights_full.at[slot])
                slot_refs = [ref.at[slot] for ref in (words_smem, d_smem, scale_smem, full_smem)]
                coefficients = []
                if coefficients_smem is not None and coefficients_full is not None:
                    plgpu.barrier_wait(coefficients_full.at[slot])
                    coefficients = [coefficients_smem.at[slot]]
                turn = lax.rem(lax.div(at, slots), 2)
                sums = _add_step(sums, turn, encoding, q, *slot_refs, *coefficients)
                plgpu.barrier_arrive(free.at[slot])
                return sums

            start = _start(tokens, coefficients_smem is not None)
            sums = lax.fori_loop(0, tile_steps.in_tile(sm, i), one_step, start)
            for part, first in enumerate(firsts):
                stage = stage_of(part)
                if added:
                    plgpu.barrier_wait(residual_full.at[stage])
                else:
                    plgpu.wait_smem_to_gmem(stages - 1, wait_read_only=True)
                _store(sums, out_smem.at[stage], first, activation, added)
                plgpu.commit_smem()
                where = out_gmem.at[tile_steps.split(sm, i), *place(part)]
                plgpu.copy_smem_to_gmem(out_smem.at[stage], where)
                if added and part + stages < len(firsts):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    bring_residual(part + stages)
            return carry

        lax.fori_loop(0, count, one_tile, 0)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(warpgroup == warpgroups)
    def _bring():
        plgpu.set_max_registers(for_copies, action="decrease")
        layer = 0 if layer_gmem is None else layer_gmem[0]
        lag = max(slots - 2, 0)  # steps: coefficients are needed when the products before them are done

        def make_coefficients(at):
            slot, turn = lax.rem(at, slots), lax.rem(lax.div(at, slots), 2)
            # pyrefly: ignore[missing-attribute]
            _make_coefficients(turn, *(ref.at[slot] for ref in (full_smem, scale_smem, coefficients_smem)))
            # pyrefly: ignore[missing-attribute]
            plgpu.barrier_arrive(coefficients_full.at[slot])

        @pl.loop(0, count)
        def _tile(i):
            token = token_of(i)
            tiles = words_smem.shape[2]
            tile_range = pl.ds(column_of(i) * tiles, tiles)
            first = tile_steps.split(sm, i) * tile_steps.each

            @pl.loop(0, tile_steps.in_tile(sm, i))
            def _step(step):
                at = tile_steps.before_tile(sm, i) + step
                slot = lax.rem(at, slots)

                @pl.when(at >= slots)
                def _wait():
                    plgpu.barrier_wait(free.at[slot])

                _bring_step(first + step, token, slot, q_gmem, scale_gmem, q_smem, scale_smem, full_smem)
                for w, refs in enumerate(weights):
                    for source, target in zip(refs, (words_smem, d_smem), strict=True):
                        source = source.at[layer, tile_range, pl.ds((first + step) * pairs, pairs)]
                        plgpu.copy_gmem_to_smem(source, target.at[slot, w], weights_full.at[slot])
                if coefficients_smem is not None:
                    pl.when(at >= lag)(lambda: make_coefficients(at - lag))

        if coefficients_smem is not None:
            total = tile_steps.before_tile(sm, count)
            pl.loop(jnp.maximum(total - lag, 0), total)(make_coefficients)


def _init_barriers(full_smem):
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def init(ctx, full_smem):
        with lanes.when(integer(lanes.thread()) == 0):
            for slot in range(full_smem.type.shape[0]):
                memory.mbarrier_init(memory.shared_address(full_smem) + 8 * slot)
        lanes.block_barrier()

    init(full_smem)


def _bring_step(step, token, slot, q_gmem, scale_gmem, q_smem, scale_smem, full_smem):
    """Ask for a step of a tile's activations, for a slot: of each group and plane one block of memory, and
    one of scales, each by a lane of one warp."""
    _, step_groups, planes, tokens, _ = q_smem.shape
    numbers, plain = (plgpu.Layout.WG_SPLAT,) * 3, plgpu.RefType()

    @plgpu.inline_mgpu(arg_types=(numbers, plain, plain, plgpu.RefType(swizzled(1)), plain, plain))
    def bring(ctx, numbers, q_gmem, scale_gmem, *in_shared):
        step, token, slot = (integer(v.registers.item()) for v in numbers)
        q_smem, scale_smem, full = map(memory.shared_address, in_shared)
        lane = integer(lanes.thread()) % 128
        full = full + slot * 8
        _, groups, m, _ = q_gmem.type.shape
        with lanes.when(lane < 32):
            with lanes.when(lane == 0):
                memory.mbarrier_expect(full, STEP * tokens * (GROUP + 4))
            lanes.warp_barrier()
            with lanes.when(lane < STEP):
                h, plane = lane // planes, lane % planes
                group = plane * groups + step * step_groups + h
                part = slot * STEP + lane
                first = index(group) * m + index(token)
                words = first * (GROUP // 4)
                size = tokens * GROUP
                memory.copy_to_shared(q_smem + part * size, q_gmem, words, size, full)
                size = tokens * 4
                memory.copy_to_shared(scale_smem + part * size, scale_gmem, first, size, full)

    bring((step, token, slot), q_gmem, scale_gmem, q_smem, scale_smem, full_smem)


def _make_coefficients(turn, full_smem, scale_smem, coefficients_smem):
    """When the scales of a step are there, by the warpgroup that has asked for them."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT, *(plgpu.RefType(),) * 3))
    def make(ctx, turn, full_smem, scale_smem, coefficients_smem):
        memory.mbarrier_wait(memory.shared_address(full_smem), turn.registers.item())
        store_coefficients(scale_smem, coefficients_smem)

    make(turn, full_smem, scale_smem, coefficients_smem)


def _start(tokens: int, together: bool) -> tuple:
    """What a tile begins with: its sums, and by `add_groups_together` what its rows count them in."""
    start = plgpu.layout_cast(jnp.zeros((64, tokens), jnp.float32), plgpu.Layout.WGMMA)
    return (start, plgpu.layout_cast(jnp.ones(64, jnp.float32), OF_ROWS)) if together else (start,)


def _add_step(
    carry, turn, encoding: Encoding, q_smem, words_smem, d_smem, scale_smem, full_smem, *coefficients_smem
):
    """The carry of `_start`, and the products of a step, when its activations are there.

    turn  0 or 1, of the slot's barrier full_smem
    The others are a slot's, as group_sums.Slot and `add_groups_together` have them.
    """
    tokens, layouts = carry[0].shape[1], (plgpu.Layout.WGMMA, OF_ROWS)[: len(carry)]
    refs = (words_smem, d_smem, scale_smem, full_smem, *coefficients_smem)
    q_types = (plgpu.RefType(swizzled(1)),) * len(q_smem)

    @plgpu.inline_mgpu(
        arg_types=(layouts, plgpu.Layout.WG_SPLAT, q_types, (plgpu.RefType(),) * len(refs)),
        return_type=tuple(
            plgpu.ShapeDtypeStruct(v.shape, jnp.float32, layout=layout)
            for v, layout in zip(carry, layouts, strict=True)
        ),
    )
    def add(ctx, carry, turn, q_smem, refs):
        words_smem, d_smem, scale_smem, full_smem, *coefficients_smem = refs
        slot = Slot(encoding, words_smem, d_smem, scale_smem, q_smem)
        sums = [lanes.element(v, e) for v in carry[0].registers.flat for e in (0, 1)]
        memory.mbarrier_wait(memory.shared_address(full_smem), turn.registers.item())
        if not coefficients_smem:
            return (_sums(add_groups(slot, sums), tokens),)
        largest = [lanes.element(v, 0) for v in carry[1].registers.flat]
        sums, largest = add_groups_together(slot, coefficients_smem[0], sums, largest)
        largest = [lanes.real_vector([v]) for v in largest]
        return _sums(sums, tokens), fragment(largest, (64,), carry[1].layout)

    return add(carry, turn, q_smem, refs)


def _sums(y: list, tokens: int):
    """This lane's sums as an array of Mosaic's."""
    pairs = [lanes.real_vector(y[i : i + 2]) for i in range(0, len(y), 2)]
    return fragment(pairs, (64, tokens), fragments.WGMMA_LAYOUT)


def _store(carry, out_smem, first: int, activation: Activation | None, added: bool):
    """The sums of a tile's tokens from `first` on, or they + what is there, or the activation of a lane's
    rows g and g + 8, transposed to out_smem, float32 [tokens, outputs], swizzled."""

    matrices = 1 if activation is None else 2
    layouts = (plgpu.Layout.WGMMA, OF_ROWS)[: len(carry)]

    @plgpu.inline_mgpu(arg_types=(layouts, plgpu.RefType(swizzled(4))))
    def store(ctx, carry, out_smem):
        warp, _, g, t = map(integer, lane())
        sums, *largest = (array.registers.flat for array in carry)
        values = [[lanes.element(v, e) for e in (0, 1)] for v in sums]
        if largest:
            units = [unit_of(lanes.element(v, 0)) for v in largest[0]]
            values = [[v * units[i % 2] for v in pair] for i, pair in enumerate(values)]
        values = values[first // 4 :][: 2 * out_smem.type.shape[0]]
        # Element (token, output) lies at [token / 8, output / 32, token % 8, (output % 32) ^ 4 (token % 8)].
        for e in (0, 1):
            row = t * 2 + e
            swizzle = row << 2
            for r in range(2 // matrices):
                output = warp * (16 // matrices) + g + 8 * r
                at = [index(i) for i in (output // RESULT_COLUMNS, row, output % RESULT_COLUMNS ^ swizzle)]
                places = [[j, *at] for j in range(len(values) // 2)]
                residual = [memory.load(out_smem, *place) for place in places] if added else []
                for j, place in enumerate(places):
                    if activation is not None:
                        y = activation(values[2 * j][e], values[2 * j + 1][e], math=FAST)
                    else:
                        y = values[2 * j + r][e]
                    memory.store(y + residual[j] if added else y, out_smem, *place)

    store(carry, out_smem)


def prologue(x, weights, layer, gamma, eps: float, rows: int | None = None) -> tuple[jax.Array, ...]:
    """Activations as integers (prefill.py)."""
    w = weights[0]
    gamma, index = stacks.narrowed(*stacks.gamma_stack(gamma, layer))
    if w.rotation is not None:
        return activations_rotated(x, w.rotation, gamma, index, eps, form=ROTATED_INTEGERS)
    return activations_int8(
        x, gamma, index, eps, bits=w.products.activation_bits, rows=rows,
        encoding=encoding_of(*words_and_scales(w)),
    )  # fmt: skip


def rotates(format: str) -> bool:
    """What rounds activations of ternary weights rotates them, too."""
    return formats.is_ternary(format)


def gemm(
    a, scale, weights, part_layer, residual, activation: Activation = SILU, summed: bool = True
) -> jax.Array:
    """The kernel on matrices with or without a layer axis (prefill.py)."""
    pairs, layer = stacks.narrowed(tuple(map(words_and_scales, weights)), part_layer)
    n = weights[0].shape[0]
    return bit_prefill_sm90(a, scale, pairs, layer, n, residual, activation=activation, summed=summed)


run = in_two_phases(prologue, gemm)
