"""Activations to integers, as the lanes that hold a group of them do it.

    q = round(x top / m),  m the largest |x| of the group;  x = s q but for rounding,  s = m / top

top is the largest integer: 127 for 8 bits, for 16 bits 32767, or 127 * 257 where both bytes are signed.
"""

from collections.abc import Callable

from pallas_kernels.gpu import lanes
from pallas_kernels.gpu.values import as_word, fma, greatest, maximum

MAGIC = 1.5 * 2**23  # plus q has q as its last bits, rounded to nearest
MAGIC_WORD = 0x4B400000  # the bits of MAGIC


def largest_of_group(x: list, over_lanes: Callable):
    """m, from the lane's own values and what over_lanes(largest of a lane) makes of them; not 0.

    With a NaN or an infinity among the values, m is that. Integers have neither, but the scale m / top is not
    finite, so neither are the products of the row.
    """
    return maximum(over_lanes(greatest([abs(v) for v in x])), 1e-20)


def magic_words(x: list, top: int, largest, fused: bool = False) -> list:
    """MAGIC_WORD + q of each value. fused: x top / m is not rounded before it is rounded to q; one
    instruction in place of two, but other integers where it is nearly half of an odd number."""
    inverse = lanes.ratio(top, largest)
    return [as_word(fma(v, inverse, MAGIC) if fused else v * inverse + MAGIC) for v in x]


def packed_digits(words: list, digit: int) -> list:
    """Byte `digit` of each four of the words, as one."""
    pick = 0x0040 + 0x11 * digit
    pairs = [lanes.bytes_of(words[k], words[k + 1], pick) for k in range(0, len(words), 2)]
    return [lanes.bytes_of(pairs[k], pairs[k + 1], 0x5410) for k in range(0, len(pairs), 2)]
