"""The format of test_format_is_one_file.py: d f16 | 32 bytes of low nibbles | 16 bytes of high bits.

Weight j is d * (q - 32). Bits 0-3 of q are a nibble of byte j % 32 of the first array: the low one for the
first 32 weights, the high one for the others. Bits 4-5 of q are bits 2 (j / 16) and 2 (j / 16) + 1 of byte
j % 16 of the second array.
"""

from tests.pallas_kernels.oracles import float16


def dequantize(block):
    d, low, high = float16(block[:2]), block[2:34], block[34:]
    weights = []
    for j in range(64):
        nibble = low[j % 32] >> 4 * (j // 32) & 15
        weights.append(d * ((nibble | (high[j % 16] >> 2 * (j // 16) & 3) << 4) - 32))
    return weights
