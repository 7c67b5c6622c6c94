"""x86's matrix unit (AMX): int32 [16, 16] += int8 [16, K] x unsigned bytes [K, 16], K up to 64, of registers
that are called tiles.

    1st operand    16 rows of K bytes
    2nd operand    K / 4 rows of 16 dwords: dword n of row i has columns 4 i .. 4 i + 3 of output n
    sums           16 rows of 16 int32

A part of a handler's work is between `configure` and `release`, with one K.
"""

import numpy as np
from llvmlite import ir

from pallas_kernels.cpu import compiled
from pallas_kernels.cpu.values import I8, I64, Builder, Value, address_of, constant, intrinsic
from pallas_kernels.cpu.vectors import PIECE

ROWS = 16  # of the first operand
MOST_DWORDS = 16  # of a row of it
SUMS, FIRST, SECOND = (0, 1), 2, (3, 4)  # numbers of tiles: two products with one first operand
NOTHING = ir.VoidType()


def usable() -> bool:
    return compiled.has("amx-int8")


def configure(b: Builder, dwords: int) -> None:
    """K = 4 dwords."""
    palette = np.zeros(PIECE, np.uint8)
    palette[0] = 1
    row_bytes, rows = palette[16:48].view(np.uint16), palette[48:]
    for tile, (bytes_of_row, count) in {
        **dict.fromkeys(SUMS, (PIECE, ROWS)), FIRST: (4 * dwords, ROWS),
        **dict.fromkeys(SECOND, (PIECE, dwords)),
    }.items():  # fmt: skip
        row_bytes[tile], rows[tile] = bytes_of_row, count
    intrinsic("llvm.x86.ldtilecfg", NOTHING, address_of(b, palette))


def release(b: Builder) -> None:
    kind = ir.FunctionType(NOTHING, [])
    name = "llvm.x86.tilerelease"
    b.call(b.module.globals.get(name) or ir.Function(b.module, kind, name), [])


def clear(b: Builder) -> None:
    """Both sums."""
    for tile in SUMS:
        intrinsic("llvm.x86.tilezero", NOTHING, _number(b, tile))


def multiply(x: Value, stride: int, weights: tuple[Value, Value], weights_stride: int) -> None:
    """Add products to both sums: of the first operand at an address, whose rows are `stride` bytes apart,
    with two second ones."""
    b = x.b
    _load(FIRST, x, stride)
    for sums, tile, place in zip(SUMS, SECOND, weights, strict=True):
        _load(tile, place, weights_stride)
        intrinsic("llvm.x86.tdpbsud", NOTHING, *(_number(b, t) for t in (sums, FIRST, tile)))


def store(place: Value) -> None:
    """Both sums, one behind the other."""
    for i, tile in enumerate(SUMS):
        at = place.at(i * ROWS * PIECE)
        intrinsic("llvm.x86.tilestored64", NOTHING, _number(at.b, tile), at, constant(at.b, I64, PIECE))


def _load(tile: int, place: Value, stride: int) -> None:
    arguments = _number(place.b, tile), place, constant(place.b, I64, stride)
    intrinsic("llvm.x86.tileloadd64", NOTHING, *arguments)


def _number(b: Builder, tile: int) -> Value:
    return constant(b, I8, tile)
