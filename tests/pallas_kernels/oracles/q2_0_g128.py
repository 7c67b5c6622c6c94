"""As Q2_0 of 64 weights, with 128 weights in a block."""

from tests.pallas_kernels.oracles.q2_0_g64 import dequantize

__all__ = ["dequantize"]
