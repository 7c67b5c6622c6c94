"""Matrix-vector products with weights of 2 to 8 bits, on the integer tensor cores. No branch on the format:
its file brings the layout (`tile`) and says how a lane reads it (`LANES`).

A weight is w = d q - m with d and m per row and scale group of 32 (or 16) columns. An activation is an
integer q of 8 (or 16) bits times the scale s of its group, the same group. So

    sum_k w_k x_k = sum over groups of   d s (sum_k q_k q'_k)  -  m s (sum_k q'_k)

Where groups of 16 have scales that are whole numbers times d of a row's 256 columns (tiles.WholeScales), two
groups share s, and the sum over both of scale times sum is a whole number too, exact.

One mma has 16 rows of weights, the columns of one group, and 8 columns of activations. Where x has fewer than
8 rows, columns are groups instead: the fragment of group i meets zeros but in the columns of its own slot, so
that a chain of mma leaves the products of 8 / rows groups side by side and no lane scales in vain. (There one
mma has two groups of 16, in a slot each.)

    columns of the tensor core    0    1    2    3    4    5    6    7
    1 row of x, set 0             g0   g1   g2   g3   g4   g5   g6   g7
    2 rows, set j of 2            g j  g j  g 2+j     g 4+j     g 6+j        (each: row 0, row 1)
    4 rows, set j of 4            g j (rows 0..3)     g 4+j (rows 0..3)
    8 rows, set j of 8            g j (rows 0..7)

A block of threads has `tiles` tiles of 16 rows, one behind the other, and its warps share the columns:

    copies of a warp's first weights into its own ring in shared memory begin
    its columns' activations -> norm, absmax, q -> shared memory   (each warp those that it multiplies)
    for each tile, for each 256 columns of the warp: wait, ring -> registers -> mma -> scaled sums; copy ahead
    every few tiles: sums of the warps -> 1 / rms, activation or residual -> out

A lane reads from the ring what it copied there itself: nobody waits for another warp, and loads run on
across tiles.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import all_reduce, device, formats
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import integer
from pallas_kernels.matmul import activations_rotated, epilogue, rotated_columns, stacks
from pallas_kernels.matmul.int_mma import decode_block as int_decode_block
from pallas_kernels.matmul.int_mma import decode_plan as int_decode_plan
from pallas_kernels.matmul.int_mma.activations_shared import (
    ROTATED_WORDS,
    eights,
    rounded_eights,
    rounded_words,
)
from pallas_kernels.matmul.int_mma.decode_ring import Share
from pallas_kernels.rotation import Rotation
from pallas_kernels.tiles import TILE_COLUMNS, TILE_ROWS

# Activations that another launch has rounded to 8 bits, by how many columns share a scale: int32
# [rows, K / 2], of each 8 columns two words of signed bytes q, their scale s, and a part of the row's sum of
# x^2; x, or x gamma, or the rotation of it, is s q.
Rounded = dict[int, jax.Array]
# How many chunks of 1,024 columns, in all rows together, each block rotates for itself. With 25 it was faster
# to rotate them once, in a launch before (LOG.md, 2026-12-01).
MOST_CHUNKS = 24


def rotates(format: str) -> bool:
    """Blocks rotate inputs, or a launch before them that this module makes."""
    return True


def blocks_rotate(format: str, columns: int, rows: int) -> bool:
    """Whether blocks rotate so many columns themselves: of few rows, while their weights are on their way."""
    few = rows * -(-columns // rotated_columns.CHUNK) <= MOST_CHUNKS
    return few and columns % TILE_COLUMNS == 0 and _lanes_have_groups(format)


def _lanes_have_groups(format: str) -> bool:
    """Whether the 32 neighbours that a lane has when they are rotated share a scale."""
    if formats.family(format) != "int":
        return False
    format_lanes = formats.get(format).LANES
    return format_lanes.activation_group == rotated_columns.LANES and not format_lanes.whole_scales


def run(x, weights, part_layer, layer, gamma, eps, residual, activation: Activation) -> jax.Array:
    """Products of few rows, of which a launch takes up to 16 (execute.py)."""
    return _run(x, [weights], part_layer, layer, gamma, eps, residual, activation)


def run_below(x, pieces, part_layer, layer, gamma, eps) -> jax.Array:
    """Matrices rows below rows (qtensor.Rows), each of a format of this kernel and of whole tiles, in one
    launch."""
    return _run(x, [(piece,) for piece in pieces], part_layer, layer, gamma, eps, None, SILU)


def run_and_send(x, weight, part_layer, peers) -> list[jax.Array]:
    """The product into mailboxes (all_reduce.py), a launch for at most 16 rows; what `receive` wants."""
    return _launches(x, [(weight,)], part_layer, part_layer, None, 0.0, None, SILU, peers)


def _run(x, weights, part_layer, layer, gamma, eps, residual, activation: Activation) -> jax.Array:
    """Products with parts, rows below rows; each part is one matrix or, with an activation, two."""
    y = _launches(x, weights, part_layer, layer, gamma, eps, residual, activation, None)
    y = y[0] if len(y) == 1 else jnp.concatenate(y)
    return y.reshape(*x.shape[:-1], -1)


def _launches(
    x, weights, part_layer, layer, gamma, eps, residual, activation: Activation, peers
) -> list[jax.Array]:
    """Of each launch, with as many rows as there is room for, its result."""
    any_weight, n = weights[0][0], sum(part[0].shape[0] for part in weights)
    parts, index = stacks.narrowed(tuple(tuple(w.fields for w in part) for part in weights), part_layer)
    gamma, norm_index = stacks.narrowed(*stacks.gamma_stack(gamma, layer))
    x = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    if residual is not None:
        residual = jnp.pad(residual.reshape(-1, n), ((0, 0), (0, -n % TILE_ROWS)))
    settings = {
        "formats_of": tuple(part[0].format for part in weights),
        "activation_bits": any_weight.products.activation_bits,
    }
    rows, plan = len(x), functools.partial(int_decode_plan.plan, parts, **settings)
    rotation = any_weight.rotation
    if rotation is not None:
        by_blocks = all(blocks_rotate(format, x.shape[1], rows) for format in settings["formats_of"])
        if not (by_blocks and plan(rows=rows, rotated=True)):
            x, gamma, norm_index = _rotated(x, rotation, gamma, norm_index, eps, **settings)
            rotation = None
    plan = functools.partial(plan, rotated=rotation is not None)
    layers = None
    if index is not None or norm_index is not None:
        layers = jnp.stack([jnp.int32(0) if i is None else i for i in (index, norm_index)])
    at_once = next(most for most in (16, 8, 4, 2, 1) if most == 1 or plan(rows=most))
    return [
        int_decode(
            jax.tree.map(operator.itemgetter(slice(first, first + at_once)), x),
            parts,
            layers,
            n=n,
            gamma=gamma,
            eps=eps,
            residual=None if residual is None else residual[first : first + at_once],
            peers=peers,
            sent_before=first * any_weight.shape[0],
            rotation=rotation,
            activation=activation,
            **settings,
        )
        for first in range(0, rows, at_once)
    ]


def _rotated(
    x: jax.Array, rotation: Rotation, gamma, norm_index, eps: float, formats_of, activation_bits
) -> tuple[jax.Array | Rounded, jax.Array | None, jax.Array | None]:
    """(x, gamma, its index) for the product, by a launch that also rounds where a lane has a whole group."""
    make = functools.partial(activations_rotated.activations_rotated, x, rotation, gamma, norm_index, eps)
    if activation_bits == 8 and all(map(_lanes_have_groups, formats_of)):
        return {rotated_columns.LANES: make(form=ROTATED_WORDS)}, gamma, None
    return make(), None, None


@functools.partial(
    jax.jit,
    static_argnames=("formats_of", "n", "eps", "next_groups", "activation", "activation_bits", "sent_before"),
)
def int_decode(
    x: jax.Array | Rounded,
    weights: tuple[tuple[dict[str, jax.Array], ...], ...],
    layers: jax.Array | None,
    *,
    formats_of: tuple[str, ...],
    n: int | None = None,
    gamma: jax.Array | None = None,
    eps: float = 0.0,
    residual: jax.Array | None = None,
    peers: jax.Array | None = None,
    sent_before: int = 0,
    rotation: Rotation | None = None,
    next_groups: tuple[int, ...] = (),
    next_gamma: jax.Array | None = None,
    activation: Activation = SILU,
    activation_bits: int = 8,
) -> Any:
    """y = x W.T for parts of one matrix, or activation(x G.T, x U.T) for parts of two; parts are rows
    below rows.

    x         float32 [rows, K], 1 to 16 rows; with gamma, float32 [L, K], x is rms_norm(x; gamma[i], eps).
              Or `Rounded`, for this product's formats and gamma
    weights   of each part fields of W, or of G and U, as its format's `tile` makes them, each a stack
    layers    int32 [2], the index into the weights' stacks and the one into gamma's; None for stacks of one
    formats_of  of each part
    n         N, the sum of the parts' rows; all parts but the last have whole tiles. None: so has the last
    residual  float32 [rows, N padded to 16], added to y
    peers     all_reduce.addresses: y is sent to mailboxes, behind so many words of the same call, and the
              number of the call is returned
    rotation  of x, behind the norm, where `blocks_rotate` and not rotated_columns.refuses
    next_groups  of the product that reads y: y is rounded to 8 bits for its parts, with a scale for so many
              columns. For a plan that `makes_groups`
    next_gamma  float32 [1, N], of the norm before that product
    activation_bits  8 or 16
    Returns float32 [rows, N]; with next_groups (y, Rounded). Activations that are not rounded yet are
    quantized here, symmetric per scale group.
    """
    is_rounded = isinstance(x, dict)
    if is_rounded:
        rows, columns = (2 * n if i else n for i, n in enumerate(next(iter(x.values())).shape))
    else:
        rows, columns = x.shape
    matrices = len(weights[0])
    planned = int_decode_plan.plan(weights, rows, formats_of, activation_bits, rotated=rotation is not None)
    if planned is None:
        raise NotImplementedError(
            f"{formats_of[0]}: {rows} rows of {columns} activations of {activation_bits} bits do not fit "
            f"{device.shared_bytes()} bytes of shared memory; split the rows"
        )
    product = int_decode_plan.IntegerProduct(
        planned, rows, columns, matrices, eps, activation_bits, activation
    )
    width = product.n_tiles * TILE_ROWS if n is None else n
    devices, out = 0, jax.ShapeDtypeStruct((rows, width), jnp.float32)
    if peers is not None:
        devices, out = all_reduce.devices_of(peers), jax.ShapeDtypeStruct((1,), jnp.int32)
    results = {"out_gmem": out}
    assert not next_groups or (int_decode_plan.makes_groups(planned) and peers is None)
    for group in next_groups:
        results[f"by_{group}_gmem"] = jax.ShapeDtypeStruct((rows, width // 2), jnp.int32)
    warps = planned.warps
    ring = max(warps * part.depth * part.item_bytes(matrices) for part in planned.parts)
    scratch = {"ring_smem": plgpu.SMEM((ring // 4,), jnp.int32), **int_decode_block.scratch([product])}
    rotating = None
    if rotation is not None:
        scratch["rotated_smem"] = plgpu.SMEM((rotated_columns.words(rows, columns, warps),), jnp.float32)
        rotating = {"block": rotation.block, "heads": rotation.heads}
    if devices:
        scratch["sender_smem"] = plgpu.SMEM((all_reduce.Sender.words(devices),), jnp.int32)
    made = launch(
        functools.partial(_body, product, devices, sent_before, rotating, next_groups, is_rounded),
        {
            "weight_gmem": weights,
            "x_gmem": x,
            "layers_gmem": layers,
            "gamma_gmem": gamma,
            "flips_gmem": None if rotation is None else rotation.flips,
            "residual_gmem": residual,
            "next_gamma_gmem": next_gamma,
            "peers_gmem": None if peers is None else all_reduce.as_operand(peers),
        },
        results,
        name="int_decode",
        blocks=sum(part.blocks for part in planned.parts),
        threads=32 * warps,
        scratch=scratch,
    )
    if not next_groups:
        return made
    y, *rounded = made
    return y, dict(zip(next_groups, rounded, strict=True))


def _body(
    product: int_decode_plan.IntegerProduct, devices: int, sent_before: int, rotating: dict | None,
    next_groups: tuple[int, ...], is_rounded: bool,
    *, weight_gmem, x_gmem, flips_gmem, layers_gmem, residual_gmem, next_gamma_gmem, peers_gmem, out_gmem,
    ring_smem, by_16_gmem=None, by_32_gmem=None, rotated_smem=None, sender_smem=None, **refs,
):  # fmt: skip
    """Of a block, whose part its number says."""
    prefetch = None
    if devices:
        sender = all_reduce.Sender(sender_smem, devices)
        sender.prepare(peers_gmem, out_gmem)
        width = product.n_tiles * TILE_ROWS

        def store(y, row, n, _):
            sender.send(y, n + sent_before + row * width)
    elif next_groups:
        if next_gamma_gmem is not None:

            def prefetch(_, n):
                return memory.load(next_gamma_gmem, 0, n)

        def store(y, row, n, gamma):
            memory.store(y, out_gmem, row, n)
            for group in next_groups:
                *words, squares = rounded_words(y, gamma, group)
                with lanes.when(lanes.thread() % 8 == 0):
                    words += [memory.tagged(squares, 0)]  # as Block reads it
                    memory.store_words(words, {16: by_16_gmem, 32: by_32_gmem}[group], [row, n // 2])
    else:

        def store(y, row, n, _):
            epilogue.store(y, out_gmem, row, n)

    for part, weights in zip(product.plan.parts, weight_gmem, strict=True):
        share = Share.for_block(part, product.steps, product.plan.warps)
        with lanes.when(share.has_tiles):
            layer, norm_layer = (
                integer(0) if layers_gmem is None else memory.load(layers_gmem, at) for at in (0, 1)
            )
            residual = None
            if residual_gmem is not None:
                residual = functools.partial(memory.load, residual_gmem)
            load_x, rotation = functools.partial(eights, x_gmem), None
            if is_rounded:
                group = formats.get(part.format).LANES.activation_group
                load_x = functools.partial(rounded_eights, x_gmem[group])
            if rotating is not None:
                load_x = functools.partial(memory.load_each, x_gmem)
                rotation = {"flips_gmem": flips_gmem, "rotated_smem": rotated_smem, **rotating}
            block = int_decode_block.Block(
                product, share, store, residual, load_x, norm_layer=norm_layer, rotation=rotation,
                prefetch=prefetch, rounded=is_rounded, in_groups=bool(next_groups), **refs,
            )  # fmt: skip
            block.run_alone(weights, layer, ring_smem)
