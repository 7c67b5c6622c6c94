"""Weights of 4 to 8 bits in int_gemv's layout to float16, as one lane does it: for whoever multiplies them
with many rows.

    w = q d - m in float32, rounded to float16

The codes become float32 by their place in 2^23 + q, without a conversion. Products are exact (at most 23
bits) wherever something is subtracted from them, so the values are those of the format's `dequantize`, bit
for bit.
"""

from jax._src.lib.mlir.dialects import arith
from jax._src.lib.mlir.dialects import math as mlir_math

from pallas_kernels.mosaic import lanes


def pairs(words: list, signed: bool, scale: list, minimum: list | None) -> list[list]:
    """A lane's part of one group -> pairs of float16, [rows g, g + 8][pairs of neighbouring columns].

    words           int_phase.Unit's `a` of the group
    scale, minimum  float32 of rows g and g + 8 (`of_group`)
    """
    out = []
    for r in (0, 1):
        packed = []
        for word in words[r::2]:
            q = lanes.bytes_as_reals(word, signed)
            if minimum is None:
                w = [arith.mulf(v, scale[r]) for v in q]
            else:
                w = [mlir_math.fma(v, scale[r], arith.negf(minimum[r])) for v in q]
            packed += [lanes.half_pair(*w[i : i + 2]) for i in (0, 2)]
        out.append(packed)
    return out


def of_group(values: list, j: int, lane) -> list:
    """Of a unit's values, [rows g, g + 8][groups 2 t, 2 t + 1], those of group j, from the lane of the quad
    that has them."""
    return [lanes.as_real(lanes.from_quad(lanes.as_word(row[j % 2]), lane, j // 2)) for row in values]
