"""PQ2_0 (PrismML): 128 weights in 34 bytes, 2.125 bits a weight.   w = d * (q - 1),  q in 0..2

    d f16 | qs 32 bytes: bits 2(j % 4) of byte j / 4 are weight j

Q2_0 with groups of 128, under an id of its own.
"""

from pallas_kernels.formats.q2_0_g128 import (
    BLOCK,
    CPU,
    LANES,
    LEVELS,
    RANDOM,
    WEIGHTS,
    dequantize,
    quantize,
    tile,
    untile,
)
