"""Mixtures of experts: which experts a token goes to, and products with the matrices of those alone."""

from pallas_kernels.experts.api import (
    each_matmul,
    experts_ffn,
    experts_gated,
    experts_matmul,
    route,
    route_logits,
)

__all__ = ["each_matmul", "experts_ffn", "experts_gated", "experts_matmul", "route", "route_logits"]
