"""Weights for training that have the values of a quantization format, with gradients that pass through the
rounding.

              float32 weights w  --straight_through-->  y, the values that the format stores  -->  the model
    gradient            dw = dy  <---------------------  dy

A straight-through estimator (Bengio, Leonard and Courville 2013, arXiv:1308.3432): rounding has derivative 0
almost everywhere, so its derivative is taken to be 1. `packed` are the same values as blocks, so that a model
computes with the weights that it was trained with.

A group is a block of the format along K: 128 columns for Q1_0, 256 for TQ2_0.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import formats
from pallas_kernels.encoding import not_negative, sum_in_order
from pallas_kernels.qtensor import QTensor, dequantize, quantize


def straight_through(
    w: Float[Array, "*lead N K"],
    format: str,
    scale: Float[Array, "*lead N groups"] | None = None,
    *,
    clip: float | None = None,
) -> Float[Array, "*lead N K"]:
    """The values that a format stores for w, differentiable.

    binary (Q1_0)               y = d sign(w),                      sign(0) = 1
    ternary (Q2_0, TQ2_0, ...)  y = d sign(w) where |w| > d / 2, else 0
    other formats               y = dequantize(quantize(w, format))

    Of each group d = mean |w| (binary: XNOR-Net, Rastegari et al. 2016, arXiv:1603.05279; ternary: BitNet
    b1.58, Ma et al. 2024, arXiv:2402.17764, where it is the mean of a matrix), or |scale|. It is rounded to
    float16, as the format stores it. y is float32 and equals dequantize(packed(w, format, scale)) to the bit.

    w       float32 [*lead, N, K]
    scale   the d of each group, to be learnt, float32 [*lead, N, K / group]; binary and ternary formats only.
            For one d for a whole matrix, as in BitNet, give jax.lax.stop_gradient of mean |w|, broadcast
    clip    None: all gradients pass. Otherwise only those of weights with |w| <= clip d; binary and ternary
            formats only

    Derivatives, where q = y / d is -1, 0 or 1:

    dw = dy (Bengio et al.),  or dy [|w| <= clip d] (Hubara et al. 2016, arXiv:1602.02830)
    dscale = sign(scale) sum over the group of q dy (Zhu et al. 2017, arXiv:1612.01064)

    mean |w| is a constant to them. Raises ValueError where K is not a multiple of the group, for a scale of
    another shape, and for a scale or clip with a format that is neither binary nor ternary, and
    NotImplementedError for a format that has no encoder.
    """
    levels = getattr(formats.get(format), "LEVELS", None)
    if levels is None:
        for name, value in (("scale", scale), ("clip", clip)):
            if value is not None:
                able = ", ".join(name for name in formats.names() if hasattr(formats.get(name), "LEVELS"))
                raise ValueError(f"{name} is for formats of two or three values ({able}), not for {format}")
        return _as_stored(w, format)
    group = formats.get(format).WEIGHTS
    _check_columns(w, format, group)
    d = jax.lax.stop_gradient(absmean(w, group)) if scale is None else jnp.abs(scale)
    if d.shape != (expected := (*w.shape[:-1], w.shape[-1] // group)):
        raise ValueError(
            f"{format}: scale is {list(d.shape)} for weights {list(w.shape)}; expected {list(expected)}, one "
            f"number per group of {group} columns"
        )
    blocks = w.reshape(*w.shape[:-1], -1, group)
    return _scaled(blocks, d, levels, clip).reshape(w.shape)


def packed(
    w: Float[Array, "*lead N K"], format: str, scale: Float[Array, "*lead N groups"] | None = None
) -> QTensor:
    """The blocks of a format whose values are `straight_through(w, format, scale)`, to the bit.

    Without a scale, Q1_0 and formats that are neither binary nor ternary give quantize(w, format), as in a
    file. Ternary formats give quantize(y, format): their own rule takes the greatest |w| of a group for d,
    which rounds most weights to 0. Arguments and errors are those of `straight_through`.
    """
    if scale is None and getattr(formats.get(format), "LEVELS", None) != 3:
        return quantize(w, format)
    return quantize(straight_through(w, format, scale), format)


def absmean(w: Float[Array, "*lead N K"], group: int) -> Float[Array, "*lead N groups"]:
    """mean |w| of each `group` columns, summed from the first to the last, as encoders do: a scale to begin
    with."""
    return sum_in_order(jnp.abs(w.reshape(*w.shape[:-1], -1, group))) / group


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _as_stored(w, format):
    return dequantize(quantize(w, format))


@_as_stored.defjvp
def _as_stored_derivative(format, primals, tangents):
    return _as_stored(*primals, format), tangents[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _scaled(blocks, d, levels, clip):
    """y of groups [..., group] with scales d [...]."""
    d = _stored(d)
    return d * _codes(blocks, d, levels)


@_scaled.defjvp
def _scaled_derivative(levels, clip, primals, tangents):
    (blocks, d), (dw, dd) = primals, tangents
    d = _stored(d)
    codes = _codes(blocks, d, levels)
    passed = dw if clip is None else jnp.where(jnp.abs(blocks) <= clip * d, dw, 0)
    return d * codes, passed + codes * dd[..., None]


def _codes(blocks, d, levels: int):
    """q: -1, 0 or 1."""
    signs = jnp.where(not_negative(blocks), 1.0, -1.0)
    return signs if levels == 2 else jnp.where(jnp.abs(blocks) > d / 2, signs, 0.0)


def _stored(d):
    """d [..., 1] as a format stores it."""
    return d.astype(jnp.float16).astype(jnp.float32)[..., None]


def _check_columns(w, format: str, group: int) -> None:
    if w.ndim < 2 or w.shape[-1] % group:
        raise ValueError(
            f"{format}: weights are {list(w.shape)}; expected matrices [..., N, K] with K a multiple of "
            f"{group}, the format's group"
        )
