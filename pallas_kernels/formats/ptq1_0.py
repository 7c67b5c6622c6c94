"""PTQ1_0 (PrismML): 128 weights in 28 bytes, 1.75 bits a weight.   w = d * (q - 1),  q in 0..2

Five weights to a byte in base 3:

    qs 24 bytes: digit t of byte b is weight 16t + b (b < 16), of byte 16 + b weight 80 + 8t + b
    qh 2 bytes: digit t < 4 of byte b is weight 120 + 2t + b
    d f16

Bytes and tiles are those of TQ1_0.
"""

import numpy as np

from pallas_kernels.cpu.vectors import NATURAL, Vectors
from pallas_kernels.formats.tq1_0 import (
    LANES,
    LEVELS,
    RANDOM,
    dequantize,
    quantize,
    tile,
    untile,
    vector_digits,
)

WEIGHTS = 128
BLOCK = np.dtype([("qs", "u1", 24), ("qh", "u1", 2), ("d", "<f2")])


def _vector_codes(load):
    """The codes of two blocks."""
    runs = [[(24 * i, 16, 5), (24 * i + 16, 8, 5), (48 + 2 * i, 2, 4)] for i in (0, 1)]
    return vector_digits(load("qs").then(load("qh")), [*runs[0], *runs[1]])


CPU = Vectors(
    NATURAL, group=128, codes=_vector_codes, scales=lambda load: load("d").float(), zero=1, shares=4
)
