"""d f16 | 2 bits a weight, from the lowest bits of the first byte up: 0, 1 and 2 are -d, 0 and d."""

from tests.pallas_kernels.oracles import float16


def dequantize(block):
    return ternary(float16(block[:2]), block[2:])


def ternary(d, codes):
    return [((codes[j // 4] >> 2 * (j % 4) & 3) - 1) * d for j in range(4 * len(codes))]
