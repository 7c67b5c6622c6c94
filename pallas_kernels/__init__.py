"""Quantized weights on the device and the ops on them. Arrays in, arrays out: no files, no models."""

from pallas_kernels.activations import (
    GELU,
    GELU_TANH,
    RELU_SQUARED,
    SILU,
    XIELU,
    Activation,
    clamped_swiglu,
    swiglu_oai,
)
from pallas_kernels.attention import apply_rope, attend, attention
from pallas_kernels.causal_conv import causal_conv
from pallas_kernels.delta import delta_net
from pallas_kernels.experts import each_matmul, experts_ffn, experts_gated, experts_matmul, route
from pallas_kernels.latent import attend_latent
from pallas_kernels.low_rank import Adapted, LowRank
from pallas_kernels.mamba2 import mamba2
from pallas_kernels.matmul import gated, matmul
from pallas_kernels.norm import layer_norm, rms_norm
from pallas_kernels.pytree import serializable
from pallas_kernels.qtensor import LayerStack, Products, QTensor, Rows, dequantize, from_blocks, quantize
from pallas_kernels.rotation import Rotation
from pallas_kernels.selection import for_device
from pallas_kernels.straight_through import absmean, packed, straight_through

__all__ = [
    "GELU",
    "GELU_TANH",
    "RELU_SQUARED",
    "SILU",
    "XIELU",
    "Activation",
    "Adapted",
    "LayerStack",
    "LowRank",
    "Products",
    "QTensor",
    "Rotation",
    "Rows",
    "absmean",
    "apply_rope",
    "attend",
    "attend_latent",
    "attention",
    "causal_conv",
    "clamped_swiglu",
    "delta_net",
    "dequantize",
    "each_matmul",
    "experts_ffn",
    "experts_gated",
    "experts_matmul",
    "for_device",
    "from_blocks",
    "gated",
    "layer_norm",
    "mamba2",
    "matmul",
    "packed",
    "quantize",
    "rms_norm",
    "route",
    "serializable",
    "straight_through",
    "swiglu_oai",
]
