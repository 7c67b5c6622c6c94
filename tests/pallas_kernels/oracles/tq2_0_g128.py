"""As Q2_0 of 128 weights, with d at the end of the block."""

from tests.pallas_kernels.oracles import float16
from tests.pallas_kernels.oracles.q2_0_g64 import ternary


def dequantize(block):
    return ternary(float16(block[32:]), block[:32])
