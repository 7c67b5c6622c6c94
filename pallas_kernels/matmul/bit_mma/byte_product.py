"""A group of 1-bit weights (Q1_0) times integers, on the integer tensor cores: the bits of a word become
bytes once, for 8 rows of activations (decode_s8.py, rows_of_bytes.py)."""

from pallas_kernels.gpu import tensor_cores
from pallas_kernels.gpu.values import as_real, integer, real
from pallas_kernels.matmul.quantize_activations import MAGIC, MAGIC_WORD

UNIT = 128  # times sums of products is what `multiply_group` returns


def multiply_group(bits: list, q: list) -> list:
    """16 rows of bits, as bytes, times 8 rows of x: 128 sum_k b_k q_k as float32, which hold them exactly,
    where tensor_cores.multiply_bytes has its sums.

    bits  of rows g and g + 8 eight words
    q     per 8 bits of the integers, the lowest first, eight words
    """

    def product(sums: list, first: int) -> list:
        """Of the even bits, or the odd ones."""
        for digit in reversed(range(len(q))):
            highest = digit == len(q) - 1
            sums = sums if highest else [v << 8 for v in sums]
            for i in (first, first + 4):
                a = [bits[r][k] for k in (i, i + 2) for r in (0, 1)]
                sums = tensor_cores.multiply_bytes(a, [q[digit][i], q[digit][i + 2]], sums, False, highest)
        return sums

    even = product([integer(0)] * 4, 0)
    if len(q) > 1:
        return [real(e * 2 + o) for e, o in zip(even, product([integer(0)] * 4, 1), strict=True)]
    # Sums below 2^22 are the last bits of a float: no conversion, which would run at a quarter of the speed.
    return [as_real(v) - MAGIC for v in product([v * 2 + MAGIC_WORD for v in even], 1)]


def bits_as_bytes(word) -> list:
    """Bits i, 8 + i, 16 + i and 24 + i of a word as bytes, for i = 0 .. 7: a 1 is 64 where i is even, else
    128. So two masks share a shift, to the left, for which there are more units than to the right."""
    return [(word << 6 - i // 2 * 2 if i < 6 else word) & (0x40404040 << i % 2) for i in range(8)]
