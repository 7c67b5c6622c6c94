"""Quantized weights on the device and the ops on them. Arrays in, arrays out: no files, no models."""

from pallas_kernels.attention import apply_rope, attend, attention
from pallas_kernels.dispatch import Problem, Verdict, choose, explain
from pallas_kernels.matmul import ffn, gated, matmul
from pallas_kernels.norm import rms_norm
from pallas_kernels.qtensor import LayerStack, QTensor, dequantize, from_blocks, quantize

__all__ = [
    "LayerStack",
    "Problem",
    "QTensor",
    "Verdict",
    "apply_rope",
    "attend",
    "attention",
    "choose",
    "dequantize",
    "explain",
    "ffn",
    "from_blocks",
    "gated",
    "matmul",
    "quantize",
    "rms_norm",
]
