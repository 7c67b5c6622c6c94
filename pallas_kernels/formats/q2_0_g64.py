"""Q2_0 of 64 (llama.cpp): 64 weights in 18 bytes, 2.25 bits a weight.   w = d * (q - 1),  q in 0..2

d f16 | qs 16 bytes: bits 2(j % 4) of byte j / 4 are weight j
"""

import numpy as np

from pallas_kernels.cpu.vectors import Vectors
from pallas_kernels.formats.q2_0_g128 import (
    CPU_COLUMNS,
    LANES,
    LEVELS,
    RANDOM,
    dequantize,
    quantize,
    tile,
    two_bits,
    untile,
)

WEIGHTS = 64
BLOCK = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
CPU = Vectors(CPU_COLUMNS, group=64, codes=two_bits, scales=lambda load: load("d").float(), zero=1, shares=2)
