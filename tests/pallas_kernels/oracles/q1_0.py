"""d f16 | 16 bytes: bit j % 8 of byte j / 8 is 1 where weight j is d, and 0 where it is -d."""

from tests.pallas_kernels.oracles import float16


def dequantize(block):
    d, bits = float16(block[:2]), block[2:]
    return [d if bits[j // 8] >> j % 8 & 1 else -d for j in range(128)]
