"""Quantized weights on the device and the ops on them. Arrays in, arrays out: no files, no models."""

from pallas_kernels.attention import apply_rope, attend, attention
from pallas_kernels.delta import delta_net
from pallas_kernels.experts import experts_ffn, experts_gated, experts_matmul, route
from pallas_kernels.matmul import ffn, gated, matmul
from pallas_kernels.norm import rms_norm
from pallas_kernels.pytree import serializable
from pallas_kernels.qtensor import LayerStack, Products, QTensor, Rows, dequantize, from_blocks, quantize
from pallas_kernels.rotation import Rotation
from pallas_kernels.selection import for_device

__all__ = [
    "LayerStack",
    "Products",
    "QTensor",
    "Rotation",
    "Rows",
    "apply_rope",
    "attend",
    "attention",
    "delta_net",
    "dequantize",
    "experts_ffn",
    "experts_gated",
    "experts_matmul",
    "ffn",
    "for_device",
    "from_blocks",
    "gated",
    "matmul",
    "quantize",
    "rms_norm",
    "route",
    "serializable",
]
