"""Gated delta net: a mixer of tokens that keeps one matrix of each head, and no keys (Yang et al. 2024)."""

from pallas_kernels.delta.api import STEP_TOKENS, delta_net, replay
from pallas_kernels.delta.reference import Gates, GateSums

__all__ = ["STEP_TOKENS", "GateSums", "Gates", "delta_net", "replay"]
