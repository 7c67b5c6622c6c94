"""Pairs of 16-bit numbers in a word (i32), the first in the low half: what tensor cores multiply. Called
while a kernel is traced, as lanes.py is."""

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import lanes
from pallas_kernels.gpu.values import as_real, i32


def bfloat16_pair(x, y):
    """Two float32 as a pair of bfloat16, to nearest."""
    return lanes.ptx(i32(), [y, x], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f")


def split_bfloat16(x, y):
    """Two float32 as two pairs of bfloat16: their sum has 16 bits of mantissa."""
    high = bfloat16_pair(x, y)
    first, second = high << 16, high & 0xFFFF0000
    return [high, bfloat16_pair(x - as_real(first), y - as_real(second))]


def rounded_to_bfloat16(values):
    """A list of float32 as a vector of bfloat16, to nearest."""
    return arith.truncf(ir.VectorType.get((len(values),), ir.BF16Type.get()), lanes.real_vector(values))


def across(a, b) -> list:
    """Lists of pairs -> pairs of what stands in the same place: a's in the low half."""
    both = zip(a, b, strict=True)
    return [lanes.bytes_of(x, y, which) for x, y in both for which in (0x5410, 0x7632)]
