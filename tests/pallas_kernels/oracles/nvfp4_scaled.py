"""f16 m, 128 times a scale | four scales s of 16 weights each, eight-bit floats | 32 bytes of nibbles.

A weight is m / 128 * s / 2 * v. v of a nibble is 0, 1, 2, 3, 4, 6, 8 or 12 by its three low bits, negative if
the top bit is set. In the 8 bytes of 16 weights the low nibbles come first. The top bit of s is not read; the
others are four bits of exponent, bias 7, and three of mantissa. 127 is 0 and 255 is 480.
"""

from tests.pallas_kernels.oracles import float16


def dequantize(block):
    scale, weights = float16(block[:2]) / 128, []
    for number in range(4):
        codes = block[6 + 8 * number : 14 + 8 * number]
        s = _float8(block[2 + number]) / 2
        for code in [*(byte & 15 for byte in codes), *(byte >> 4 for byte in codes)]:
            v = (0, 1, 2, 3, 4, 6, 8, 12)[code & 7] * (-1 if code & 8 else 1)
            weights.append(scale * (s * v))
    return weights


def _float8(byte):
    if byte == 127:
        return 0.0
    exponent, mantissa = byte >> 3 & 15, byte & 7
    return mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
