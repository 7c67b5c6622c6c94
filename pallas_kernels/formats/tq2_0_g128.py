"""TQ2_0_g128 (OxiBonsai): 128 weights in 34 bytes, 2.125 bits a weight.   w = d * (q - 1),  q in 0..2

    qs 32 bytes: bits 2(j % 4) of byte j / 4 are weight j | d f16

The codes of Q2_0 with groups of 128 and, in files, its id; but d comes last.
"""

import numpy as np

from pallas_kernels.formats.q2_0_g128 import (
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

BLOCK = np.dtype([("qs", "u1", 32), ("d", "<f2")])
