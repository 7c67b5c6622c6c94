"""Products of many rows with 1-bit weights (Q1_0) on Hopper's integer tensor cores, weights dequantized
in registers.

    y[m, n] = sum over groups of 128 columns:  d[n] s[m] sum(+-q[m]) = d s / 64 S,   S = sum(+-64 q), exact

wgmma takes its first operand from registers, 64 rows x 32 columns of bytes at a time, and lane 4 g + t of
warp w holds of it rows 16 w + g and 16 w + g + 8 and columns 4 t .. 4 t + 3 and 16 + 4 t .. 16 + 4 t + 3. In
the tiles of formats/q1_0.py the same lane has word t, 32 columns of a group, of the same rows. The order of
columns within a group is free, as long as the activations follow it (activations_int8.py). So every lane
dequantizes its own words, four weights by two instructions, and nothing is exchanged:

    -64 or 64 in each byte  <-  ((word << 7 - j) & 0x80808080) ^ 0xC0C0C0C0,   j = 0 .. 7
    position 16 j + 4 t + b of a group  <-  column 32 t + 8 b + j

What takes as long as the tensor cores is S to float32 and its scales, once for a group, output and token:

    M + S as float32  <-  S + 0x4B400000, the bits of M = 1.5 * 2^23; a conversion takes four times as long
    y  <-  y + s / 64 (d (M + S) - d M)     two fma; d has 11 bits, so d M is exact

Activations of 16 bits are two planes of 8, each a product of its own with the same weights.

Blocks of threads are persistent, a tile of theirs is outputs x tokens. Of three or four warpgroups all but
one multiply, each 64 rows with all the tile's tokens: 64 of one matrix, or 32 of the gate and the same 32 of
the up projection, in the same lanes, so that SwiGLU is a lane's own. The last brings what they need for a
step. The residual comes, and results leave, by TMA through shared memory, while the next tile is worked on.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jax.experimental.mosaic.gpu import mma_utils
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.activation_math import FAST
from pallas_kernels.gpu.values import as_real, fma, i32, index, integer, select
from pallas_kernels.gpu.wgmma import REGISTERS, fragment, lane, swizzled
from pallas_kernels.matmul import stacks
from pallas_kernels.matmul.bit_mma.activations import GROUP, activations_int8
from pallas_kernels.matmul.bit_mma.prefill_plan import STEP, Steps, planned
from pallas_kernels.matmul.prefill import in_order, in_two_phases
from pallas_kernels.matmul.quantize_activations import MAGIC, MAGIC_WORD

RESULT_COLUMNS = 32  # float32 of a swizzled row of results: 128 bytes
MOST_OVERLAPPED = 32  # tokens of a tile of which two products have room in registers


@functools.partial(jax.jit, static_argnames=("n", "activation", "summed"))
def bit_prefill_sm90(
    q: jax.Array,
    scale: jax.Array,
    weights: tuple[tuple[jax.Array, jax.Array], ...],
    layer: jax.Array,
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
    weights   ((words, scales),) of W, or of G and U: tiled stacks (formats/q1_0.py) of a multiple of 64 rows
    layer     int32 [], the index into them
    n         outputs
    residual  float32 [at most M, n]
    summed    else what each split of the columns has is returned as it is, [splits, M, n], no residual added
    Returns float32 [M, n], of which rows behind those of x mean nothing.
    """
    planes, groups, m, _ = q.shape
    steps, pairs, matrices = groups * planes // STEP, STEP // planes // 2, len(weights)  # pairs of groups
    plan = planned(m, n, steps, matrices, planes, summed)
    warpgroups, tokens, splits, slots = plan
    wide = 64 // matrices  # outputs of a warpgroup
    grid = (-(-m // tokens), -(-n // (warpgroups * wide)), splits)
    blocks = min(device.multiprocessors(), math.prod(grid))
    operands = [q, scale, jnp.asarray(layer, jnp.int32).reshape(1)]
    for words, scales in weights:
        operands += [words.reshape(*words.shape[:3], 128), scales.reshape(*words.shape[:3], 16)]
    whole = n + -n % RESULT_COLUMNS  # as TMA counts results
    added, after = (residual, None) if splits == 1 else (None, residual)
    if added is not None:
        operands.append(jnp.pad(added, ((0, m - len(added)), (0, whole - n))))
    tiles = 4 * warpgroups // matrices  # of 16 rows, of a matrix
    scratch = {
        "q_smem": plgpu.SMEM((slots, 2 * pairs, planes, tokens, GROUP), jnp.int8, transforms=swizzled(1)),
        "out_smem": plgpu.SMEM((warpgroups, tokens, wide), jnp.float32, transforms=swizzled(4)),
        "scale_smem": plgpu.SMEM((slots, 2 * pairs, planes, tokens), jnp.float32),
        "words_smem": plgpu.SMEM((slots, matrices, tiles, pairs, 128), jnp.uint32),
        "d_smem": plgpu.SMEM((slots, matrices, tiles, pairs, 16), jnp.uint32),
        "full_smem": plgpu.SMEM((slots, 2), jnp.int32),  # mbarriers, of activations
        "weights_full": plgpu.Barrier(num_arrivals=2 * matrices, num_barriers=slots),
        "free": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=slots),
        "residual_full": plgpu.Barrier(num_arrivals=1, num_barriers=warpgroups),
    }  # fmt: skip
    kernel = plgpu.kernel(
        functools.partial(
            _body,
            plan=plan, matrices=matrices, planes=planes, steps=steps, pairs=pairs, grid=grid,
            blocks=blocks, added=added is not None, activation=activation if matrices == 2 else None,
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
    q_gmem, scale_gmem, layer_gmem, *refs,
    q_smem, out_smem, scale_smem, words_smem, d_smem, full_smem, weights_full, free, residual_full,
    plan, matrices, planes, steps, pairs, added, grid, blocks, activation,
):  # fmt: skip
    weights = [(refs[2 * i], refs[2 * i + 1]) for i in range(matrices)]
    residual_gmem = refs[2 * matrices] if added else None
    out_gmem = refs[-1]
    rows, columns, splits = grid
    warpgroups, tokens, _, slots = plan
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

        def one_tile(i, carry):
            place = (
                pl.ds(token_of(i), tokens),
                pl.ds((column_of(i) * warpgroups + warpgroup) * wide, wide),
            )

            def one_step(step, sums):
                at = tile_steps.before_tile(sm, i) + step
                slot = lax.rem(at, slots)
                if (residual := residual_gmem) is not None:

                    @pl.when(step == min(1, tile_steps.each - 1))  # by now the tile before has left
                    def _residual():
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        barrier = residual_full.at[warpgroup]
                        plgpu.copy_gmem_to_smem(residual.at[place], out_smem.at[warpgroup], barrier)

                q = tuple(q_smem.at[slot, *divmod(product, planes)] for product in range(STEP))
                plgpu.barrier_wait(weights_full.at[slot])
                slot_refs = [ref.at[slot] for ref in (words_smem, d_smem, scale_smem, full_smem)]
                # pyrefly: ignore[bad-argument-count]
                sums = _add_step(sums, lax.rem(lax.div(at, slots), 2), *slot_refs, q)
                plgpu.barrier_arrive(free.at[slot])
                return sums

            start = plgpu.layout_cast(jnp.zeros((64, tokens), jnp.float32), plgpu.Layout.WGMMA)
            sums = lax.fori_loop(0, tile_steps.in_tile(sm, i), one_step, start)
            if added:
                plgpu.barrier_wait(residual_full.at[warpgroup])
            else:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            _store(sums, out_smem.at[warpgroup], activation, added)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem.at[warpgroup], out_gmem.at[tile_steps.split(sm, i), *place])
            return carry

        lax.fori_loop(0, count, one_tile, 0)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == warpgroups)
    def _bring():
        plgpu.set_max_registers(for_copies, action="decrease")
        layer = layer_gmem[0]

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


def _add_step(sums, turn, words_smem, d_smem, scale_smem, full_smem, q_smem):
    """sums, float32 [64, tokens] + the products of a step, when its activations are there.

    turn        0 or 1, of the slot's barrier full_smem
    words_smem  uint32 [matrices, tiles, pairs, 128] and
    d_smem      uint32 [matrices, tiles, pairs, 16]: the weights of both warpgroups
    scale_smem  float32 [groups, planes, tokens], in the order of activations_int8
    q_smem      int8 [tokens, 128], swizzled: of the first group each plane, of the second each plane, ..
    """
    tokens, matrices, planes = sums.shape[1], words_smem.shape[0], scale_smem.shape[1]
    types = (plgpu.Layout.WGMMA, plgpu.Layout.WG_SPLAT, *(plgpu.RefType(),) * 4)

    @plgpu.inline_mgpu(
        arg_types=(*types, (plgpu.RefType(swizzled(1)),) * len(q_smem)),
        return_type=plgpu.ShapeDtypeStruct((64, tokens), jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def add(ctx, sums, turn, words_smem, d_smem, scale_smem, full_smem, q_smem):
        warp, number, g, t = map(integer, lane())
        warpgroup = integer(lanes.thread()) // 128
        tile = index(warpgroup * (4 // matrices) + warp // matrices)
        half = warp % 2  # of two matrices: whether rows g + 8
        second, halves = half == 1, half * 0x2222 + 0x5410

        def load(pair):
            """Of each of a pair of groups the words and d of this lane's rows: g and g + 8 of a tile, or one
            of them of both matrices."""
            at = [(w, tile, pair) for w in range(matrices)]
            four = [memory.load_words(4, words_smem, [*place, number * 4]) for place in at]
            d = [[memory.load(d_smem, *place, index(g) + 8 * h) for place in at] for h in (0, 1)]
            if matrices == 1:
                return [(four[0][2 * h :][:2], lanes.halves(d[h][0])) for h in (0, 1)]
            words = [[select(second, v[2 * h + 1], v[2 * h]) for v in four] for h in (0, 1)]
            # pyrefly: ignore[bad-argument-count]
            return [(words[h], lanes.halves(lanes.chosen_bytes(*d[h], halves))) for h in (0, 1)]

        four_t = index(t * 4)
        y = [lanes.element(v, e) for v in sums.registers.flat for e in (0, 1)]

        def scale(i, d, product):
            group, plane = divmod(i, planes)
            less = [x * -MAGIC for x in d]
            s = [
                memory.load_reals(4, scale_smem, [group, plane, four_t + first])
                for first in range(0, tokens, 16)
            ]
            # Row by row, so that an instruction finds the row's d where the one before had it.
            for r, j, e in itertools.product((0, 1), range(tokens // 8), (0, 1)):
                at = 4 * j + 2 * r + e
                whole = as_real(product[at] + MAGIC_WORD)
                y[at] = fma(fma(whole, d[r], less[r]), s[j // 2][2 * (j % 2) + e], y[at])

        memory.mbarrier_wait(memory.shared_address(full_smem), turn.registers.item())
        pending = []  # products on their way: where registers have room, one is scaled while the next is made
        for i, q in enumerate(q_smem):
            group, plane = divmod(i, planes)
            if i % (2 * planes) == 0:
                weights = load(group // 2)
            if plane == 0:
                words, d = weights[group % 2]
                bytes_ = _weights(words)
            pending.append((i, d, _multiply(bytes_, q, tokens, unsigned=plane > 0)))
            if len(pending) > (tokens <= MOST_OVERLAPPED):
                i, d_then, product = pending.pop(0)
                scale(i, d_then, _arrived(product, len(pending)))
        for i, d_then, product in pending:
            scale(i, d_then, _arrived(product, 0))
        pairs = [lanes.real_vector(y[i : i + 2]) for i in range(0, len(y), 2)]
        return fragment(pairs, (64, tokens), fragments.WGMMA_LAYOUT)

    return add(sums, turn, words_smem, d_smem, scale_smem, full_smem, q_smem)


def _weights(words) -> list:
    """This lane's words of rows g and g + 8 -> 16 registers of 4 weights, for 4 wgmma of 32 columns."""
    mask = lanes.opaque(integer(0x80808080))  # in a register: an instruction has room for one constant
    registers = []
    for j in range(8):
        for word in words:
            word = word << 7 - j if j < 7 else word
            text = "lop3.b32 $0, $1, $2, 0xC0C0C0C0, 0x6A;"  # (word & mask) ^ 0xC0C0C0C0
            registers.append(lanes.ptx(i32(), [word, mask], text, "=r,r,r"))
    return registers


def _multiply(weights, q_smem, tokens: int, unsigned: bool) -> list:
    """Begin int32 [64, tokens] = weights * activations over 128 columns: the registers that `_arrived` must
    see before anything reads them.

    The chain begins with scale-d = 0, which Mosaic's own wgmma does not offer: nothing has to be cleared.
    """
    (base, (_, (k_stride, *_))), _, _ = mma_utils.create_descriptor(
        mosaic.memref_transpose(q_smem, (1, 0, 3, 2)),
        swizzle=GROUP,
        large_tile=(GROUP, GROUP),
        group_size=(GROUP, tokens),
        logical_k_major=True,
    )
    count = tokens // 2
    # Operands: outputs, the 16 weights, the descriptor. Each wgmma has 4 of the weights.
    accumulators = "{" + ",".join(f"${i}" for i in range(count)) + "}"
    kind = "u8" if unsigned else "s8"
    text = "{ .reg .pred p; .reg .b64 b; wgmma.fence.sync.aligned; "
    for k in range(4):
        a = "{" + ",".join(f"${count + 4 * k + i}" for i in range(4)) + "}"
        offset = k * k_stride >> 4
        text += f"setp.ne.b32 p, {min(k, 1)}, 0; add.s64 b, ${count + 16}, {offset}; "
        text += f"wgmma.mma_async.sync.aligned.m64n{tokens}k32.s32.s8.{kind} {accumulators}, {a}, b, p; "
    text += "wgmma.commit_group.sync.aligned; }"
    constraints = ",".join(["=r"] * count + ["r"] * 16 + ["l"])
    return lanes.ptx([i32()] * count, [*weights, base], text, constraints, effects=True)


def _arrived(product: list, later: int) -> list:
    """The registers of a product, when it is done and at most so many later ones are not: what uses them is
    not computed before."""
    lanes.ptx(None, [], f"wgmma.wait_group.sync.aligned {later};", "~{memory}", effects=True)
    count = len(product)
    constraints = ",".join(["=r"] * count + [str(i) for i in range(count)])
    return lanes.ptx([i32()] * count, product, "", constraints, effects=True)


def _store(sums, out_smem, activation: Activation | None, added: bool):
    """sums, or sums + what is there, or the activation of a lane's rows g and g + 8, transposed to out_smem,
    float32 [tokens, outputs], swizzled."""

    matrices = 1 if activation is None else 2

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(swizzled(4))))
    def store(ctx, sums, out_smem):
        warp, _, g, t = map(integer, lane())
        values = [[lanes.element(v, e) for e in (0, 1)] for v in sums.registers.flat]
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

    store(sums, out_smem)


def prologue(x, weights, layer, gamma, eps: float, rows: int | None = None) -> tuple[jax.Array, ...]:
    """Activations as integers (prefill.py)."""
    gamma, index = stacks.narrowed(*stacks.gamma_stack(gamma, layer))
    return activations_int8(x, gamma, index, eps, bits=weights[0].products.activation_bits, rows=rows)


def gemm(
    a, scale, weights, part_layer, residual, activation: Activation = SILU, summed: bool = True
) -> jax.Array:
    """The kernel on matrices with or without a layer axis (prefill.py)."""
    pairs = tuple((w.fields["words"], w.fields["scales"]) for w in weights)
    pairs, layer = stacks.whole(pairs, part_layer)
    n = weights[0].shape[0]
    return bit_prefill_sm90(a, scale, pairs, layer, n, residual, activation=activation, summed=summed)


run = in_two_phases(prologue, gemm)
