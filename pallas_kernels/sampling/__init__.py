"""The draw of a token from logits: the op, its reference, and the kernels."""

from pallas_kernels.sampling.api import draw
from pallas_kernels.sampling.rules import NO_TOKEN, Rules

__all__ = ["NO_TOKEN", "Rules", "draw"]
