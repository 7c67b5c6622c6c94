"""How vector instructions read formats whose weights are points of a codebook (IQ1 to IQ3): what their files
share. A chunk is one block of 256 weights.

A point is a row of a table of bytes, and lies in memory. Signs are bits, one for each weight.
"""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # files of formats are read where llvmlite is not installed, too
    from pallas_kernels.cpu.values import Value

ZERO = 64  # the code of 0 where points have signs: code = ZERO + s v, v below 64


def signed_codes(magnitudes: "Value", signs: "Value") -> "list[Value]":
    """Pieces of codes.

    magnitudes  256 bytes
    signs       32 bytes: bit j of byte i is 1 where weight 8 i + j is negative
    """
    pieces = [magnitudes[first : first + 64] for first in range(0, 256, 64)]
    return [
        signs[8 * p : 8 * p + 8].bits().select(-piece + ZERO, piece + ZERO) for p, piece in enumerate(pieces)
    ]


def even_signs(seven: "Value") -> "Value":
    """Integers of seven bits -> bytes, whose eighth bit makes the number of ones even."""
    odd = seven ^ seven >> 4
    odd = odd ^ odd >> 2
    odd = (odd ^ odd >> 1) & 1
    return (seven | odd << 7).low_bytes()


def signs_of_words(words: "Value") -> "Value":
    """32-bit integers with four times seven signs -> four bytes of each, as `even_signs` makes them."""
    return even_signs(each_part(words, [0, 7, 14, 21]) & 127)


def each_part(integers: "Value", shifts: list[int]) -> "Value":
    """Each integer shifted to the right by each of these, one after the other."""
    count = integers.count
    return integers.take(np.repeat(np.arange(count), len(shifts))) >> np.tile(shifts, count)


def nibbles(scales: "Value") -> "Value":
    """The lower and the higher four bits of each byte, one after the other, as float32."""
    return (each_part(scales, [0, 4]) & 15).float(signed=False)
