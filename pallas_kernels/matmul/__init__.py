"""Products of activations with quantized weights: the ops, their reference, and a kernel a file."""

from pallas_kernels.matmul.api import gated, matmul, sent_product

__all__ = ["gated", "matmul", "sent_product"]
