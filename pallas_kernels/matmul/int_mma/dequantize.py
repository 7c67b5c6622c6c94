"""Weights of 2 to 8 bits from int_decode's layout to float16, for a GEMM of many rows to read.

A warp takes 16 rows x 256 columns at a time: of a row of a group, a lane has 8 neighbouring columns (4 where
groups have 16), four neighbouring lanes have the group, and one of the four has its d and m. float16.py
has what a lane does.

Memory bounds it: it writes 2 bytes a weight and reads 0.5 to 1. No branch on the format: as in int_decode its
file says how a lane reads it (`LANES`). The kernel indexes stacks of layers itself, and also picks the one,
of several formats, that a layer's weights are in: an XLA branch would wait for the host.
"""

import functools
import operator
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import formats
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import index, integer
from pallas_kernels.matmul import stacks
from pallas_kernels.matmul.int_mma import bytes as int_bytes
from pallas_kernels.matmul.int_mma import float16 as int_float16
from pallas_kernels.qtensor import LayerStack, QTensor, Rows
from pallas_kernels.tiles import TILE_COLUMNS, TILE_ROWS

WARPS = 4  # of a block, each with one item: 16 rows x 256 columns


class Piece(NamedTuple):
    """Rows of the output that are of one format.

    format       of the weight
    rows, at     rows that it has, and the output's row that is its first
    tile, tiles  its first tile of 16 rows, of the weight's, and how many it has
    """

    format: str
    rows: int
    at: int
    tile: int
    tiles: int


def run(weights: Sequence[QTensor | Rows | LayerStack], layer) -> jax.Array:
    """float16 [N of all the weights, K]: matrices of the same K, rows below rows, in the kernel's layout.

    layer   index into their stacks, which may be traced; None for matrices without a layer axis
    """
    choices, places = [], []
    for w in weights:
        stacked = isinstance(w, LayerStack)
        parts = w.parts if stacked else (w,)
        if layer is None or isinstance(layer, int):
            part, at = w.where[layer] if stacked and layer is not None else (0, layer)
            parts = (stacks.narrowed(parts[part], at)[0],)
        elif stacked:
            places.append(jnp.array(w.where, jnp.int32)[layer])
        else:
            places.append(jnp.stack([jnp.int32(0), jnp.int32(layer)]))
        choices.append([part.pieces if isinstance(part, Rows) else (part,) for part in parts])
    return int_dequantize(
        tuple(tuple(tuple(piece.fields for piece in pieces) for pieces in choice) for choice in choices),
        jnp.stack(places) if places else None,
        kinds=tuple(
            tuple(tuple((piece.format, piece.shape[0]) for piece in pieces) for pieces in choice)
            for choice in choices
        ),
        columns=weights[0].shape[1],
    )


@functools.partial(jax.jit, static_argnames=("kinds", "columns"))
def int_dequantize(
    weights: tuple[tuple[tuple[dict[str, jax.Array], ...], ...], ...],
    places: jax.Array | None,
    *,
    kinds: tuple[tuple[tuple[tuple[str, int], ...], ...], ...],
    columns: int,
) -> jax.Array:
    """float16 [N, K], the weights' rows below each other.

    weights  of each weight, of each choice that a layer has for it, of each piece (rows below rows), the
             fields that its format's `tile` makes, stacked by layer
    places   int32 [weights, 2]: the choice and the index into its stack; None for the first of one choice
    kinds    the same nest of (format, rows)
    columns  K
    """
    steps = weights[0][0][0]["words"].shape[2]
    plans, row, first_block = [], 0, 0
    for choice_kinds in kinds:
        choices, most = [], 0
        for formats_and_rows in choice_kinds:
            pieces, at, tile = [], row, 0
            for format, rows in formats_and_rows:
                tiles = -(-rows // TILE_ROWS)
                pieces.append(Piece(format, rows, at, tile, tiles))
                at, tile = at + rows, tile + tiles
            choices.append(tuple(pieces))
            most = max(most, tile)
        plans.append((tuple(choices), first_block, most * steps))
        row, first_block = at, first_block + -(-most * steps // WARPS)
    return launch(
        functools.partial(_body, plans=tuple(plans), steps=steps, columns=columns),
        {"weight_gmem": weights, "places_gmem": places},
        {"out_gmem": jax.ShapeDtypeStruct((row, columns), jnp.float16)},
        name="int_dequantize",
        blocks=first_block,
        threads=32 * WARPS,
    )


def _body(weight_gmem, places_gmem, out_gmem, *, plans, steps, columns):
    lane = integer(lanes.thread()) % 32
    warp = integer(lanes.thread()) // 32
    for w, ((choices, first_block, items), choice_gmem) in enumerate(zip(plans, weight_gmem, strict=True)):
        block = integer(lanes.block()) - first_block
        item = block * WARPS + warp
        # Items of the weights before are below 0, which is large here, those of others behind the last.
        with lanes.when(item < items):
            which = layer = integer(0)
            if places_gmem is not None:
                which, layer = (memory.load(places_gmem, w, i) for i in range(2))
            tile, step = item // steps, item % steps
            for c, (pieces, pieces_gmem) in enumerate(zip(choices, choice_gmem, strict=True)):
                for piece, fields in zip(pieces, pieces_gmem, strict=True):
                    own = tile - piece.tile
                    with lanes.when((own < piece.tiles) & (which == c)):
                        _dequantize(piece, fields, layer, own, step, lane, out_gmem, columns)


def read(fields, layer, tile, step, lane) -> dict[str, list]:
    """A lane's words of one item, by name, or vectors of four."""
    at = [layer, tile, step]
    words = {}
    for name, ref in fields.items():
        shape = ref.type.shape[3:]
        if len(shape) == 1:
            # A word for 32 / n neighbouring lanes.
            words[name] = [memory.load(ref, *at, lane // (32 // shape[0]))]
        elif len(shape) == 2:
            words[name] = memory.load_words(shape[1], ref, [*at, lane // (32 // shape[0]), 0])
        else:
            words[name] = [memory.load_words(4, ref, [*at, v, lane, 0]) for v in range(shape[0])]
    return words


def _dequantize(piece: Piece, fields, layer, tile, step, lane, out_gmem, columns: int):
    """One item: 16 rows x 256 columns of a piece."""
    format_lanes = formats.get(piece.format).LANES
    group = format_lanes.group
    g, t = lane // 4, lane % 4
    words = read(fields, layer, tile, step, lane)
    rows = [tile * TILE_ROWS + g + 8 * r for r in (0, 1)]
    column = step * TILE_COLUMNS + t * (group // 4)
    for u, unit in enumerate(int_bytes.units(format_lanes, words, lane)):
        for j in range(8):
            before = (8 * u + j) * group  # columns of the item before this group
            scales = [int_float16.group_values(values, j, lane) for values in unit.scales]
            halves = int_float16.pairs(unit.a[j], format_lanes.signed, *scales)
            for r, packed in enumerate(halves):
                exists = []  # where the last tiles are not whole
                if piece.rows % TILE_ROWS:
                    exists.append(rows[r] < piece.rows)
                if columns % TILE_COLUMNS:
                    exists.append(column + before < columns)
                place = [index(rows[r] + piece.at), index(column + before)]
                with lanes.when(functools.reduce(operator.and_, exists)) if exists else nullcontext():
                    memory.store_halves(packed, out_gmem, place)
