"""Mixtures of experts: which experts a token goes to, and products with the matrices of those alone."""

from pallas_kernels.experts.api import each_matmul, experts_ffn, experts_gated, experts_matmul
from pallas_kernels.experts.routed import can_route, routed_ffn
from pallas_kernels.experts.routing import Normed, normed_logits, route, route_logits

__all__ = [
    "Normed",
    "can_route",
    "each_matmul",
    "experts_ffn",
    "experts_gated",
    "experts_matmul",
    "normed_logits",
    "route",
    "route_logits",
    "routed_ffn",
]
