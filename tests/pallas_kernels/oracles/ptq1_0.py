"""24 bytes of five base-3 digits, 2 bytes of four | d f16.

A byte v is the fraction v / 256; three times the fraction has the next digit before its point. Digits 0, 1
and 2 are -d, 0 and d. Digit t of byte i is weight 16 t + i of the first 80, of the next 40 (8 bytes), weight
80 + 8 t + i - 16, and of the last 8 (2 bytes), weight 120 + 2 t + i - 24.
"""

from tests.pallas_kernels.oracles import float16


def dequantize(block):
    d, weights = float16(block[26:]), {}
    for first_byte, count, digits, first_weight in ((0, 16, 5, 0), (16, 8, 5, 80), (24, 2, 4, 120)):
        for i in range(count):
            fraction = block[first_byte + i]
            for t in range(digits):
                digit, fraction = divmod(3 * fraction, 256)
                weights[first_weight + count * t + i] = (digit - 1) * d
    return [weights[j] for j in range(128)]
