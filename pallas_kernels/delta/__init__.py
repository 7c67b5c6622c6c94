"""Gated delta net: a mixer of tokens that keeps one matrix of each head, and no keys (Yang et al. 2024)."""

from pallas_kernels.delta.api import delta_net
from pallas_kernels.delta.reference import Gates

__all__ = ["Gates", "delta_net"]
