"""Straight-through estimators: values are those of the packed blocks and of the file's quantizer, to the bit,
and gradients are the definition, in numpy."""

import functools

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.geometry import GEOMETRY
from pallas_kernels import absmean, dequantize, formats, packed, quantize, straight_through

LEVELS = {name: formats.get(name).LEVELS for name in formats.names() if hasattr(formats.get(name), "LEVELS")}
IN_GGUF = {"q1_0": None, "tq1_0": "TQ1_0", "tq2_0": "TQ2_0"}


def weights(format: str, rows: int = 6) -> np.ndarray:
    """Two groups a row; zeros of both signs, denormals, a group of zeros, and numbers of half the scale."""
    rng, group = np.random.default_rng(0), formats.get(format).WEIGHTS
    w = rng.standard_normal((rows, 2 * group)).astype(np.float32) * 0.05
    w[0, :4] = 0.0, -0.0, 1e-42, -1e-42
    w[1, :group] = 0
    w[2, :group], w[2, : group // 2] = 0.5, -1.5  # d is 1
    return w


@functools.cache
def compiled(format: str):
    return jax.jit(lambda w: (straight_through(w, format), packed(w, format)))


def test_binary_and_ternary_formats_are_known():
    assert [name for name, levels in LEVELS.items() if levels == 2] == ["q1_0"]
    assert {"q2_0_g64", "q2_0_g128", "tq1_0", "tq2_0", "pq2_0", "ptq1_0"} <= set(LEVELS)


@pytest.mark.parametrize("format", [*LEVELS, "q4_0", "q8_0"])
def test_values_are_those_of_the_blocks(format):
    w = weights(format)
    y, blocks = compiled(format)(w)
    assert np.asarray(y).tobytes() == np.asarray(dequantize(blocks)).tobytes()
    again = quantize(y, format)  # the quantizer of files, outside of jit, keeps them
    np.testing.assert_array_equal(dequantize(again), y)
    for name, field in again.fields.items():
        if LEVELS.get(format) == 3:
            np.testing.assert_array_equal(field, blocks.fields[name])


@pytest.mark.parametrize("format", LEVELS)
def test_values_are_the_formula(format):
    w, group = weights(format), formats.get(format).WEIGHTS
    blocks = w.reshape(len(w), -1, group)
    total = np.zeros(blocks.shape[:-1], np.float32)
    for column in np.moveaxis(abs(blocks), -1, 0):
        total += column
    d = (total / group).astype(np.float16).astype(np.float32)[..., None]
    sign = np.where(blocks >= 0, 1, -1)
    q = sign if LEVELS[format] == 2 else sign * (abs(blocks) > d / 2)
    np.testing.assert_array_equal(straight_through(w, format), (d * q).reshape(w.shape))
    assert LEVELS[format] == 2 or not straight_through(w, format)[2, group // 2 : group].any()


@pytest.mark.parametrize("format", [name for name in IN_GGUF if name in LEVELS])
def test_blocks_are_those_of_the_files_quantizer(format):
    """Q1_0 of the weights themselves; ternary ones of y, which gguf's own quantizer stores as it is."""
    w = weights(format)
    y, blocks = compiled(format)(w)
    raw = np.asarray(formats.pack(format, blocks.fields))
    if format == "q1_0":
        np.testing.assert_array_equal(raw, formats.pack(format, quantize(jnp.array(w), format).fields))
        return
    kind = gguf.GGMLQuantizationType[IN_GGUF[format]]
    np.testing.assert_array_equal(raw, gguf.quantize(np.array(y), kind))
    assert raw.shape[-1] == 2 * GEOMETRY[format].bytes


@pytest.mark.parametrize("clip", [None, 1.5])
@pytest.mark.parametrize("format", ["q1_0", "q2_0_g128", "tq2_0"])
def test_gradients_are_the_definition(format, clip):
    w, group = weights(format), formats.get(format).WEIGHTS
    rng = np.random.default_rng(1)
    dy = rng.standard_normal(w.shape, np.float32)
    scale = (rng.choice([-1, 1], (len(w), 2)) * rng.uniform(0.02, 0.1, (len(w), 2))).astype(np.float32)
    d = np.repeat(abs(scale).astype(np.float16).astype(np.float32), group, axis=1)

    def value(w, scale):
        return (straight_through(w, format, scale, clip=clip) * dy).sum()

    dw, dscale = jax.jit(jax.grad(value, argnums=(0, 1)))(w, scale)
    sign = np.where(w >= 0, 1, -1)
    q = sign if format == "q1_0" else sign * (abs(w) > d / 2)
    np.testing.assert_array_equal(dw, dy if clip is None else np.where(abs(w) <= clip * d, dy, 0))
    want = np.sign(scale) * (q * dy.astype(np.float64)).reshape(len(w), 2, group).sum(-1)
    np.testing.assert_allclose(dscale, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(straight_through(w, format, scale), d * q)
    np.testing.assert_array_equal(dequantize(packed(w, format, scale)), d * q)
    if clip is None:
        np.testing.assert_array_equal(jax.grad(lambda w: (straight_through(w, format) * dy).sum())(w), dy)


def test_a_scale_of_a_whole_matrix():
    """BitNet's: a constant, given as the scale of each group."""
    w = jax.random.normal(jax.random.key(0), (4, 512))

    def bitnet(w):
        gamma = jax.lax.stop_gradient(jnp.abs(w).mean())
        return straight_through(w, "tq2_0", jnp.broadcast_to(gamma, (4, 2)))

    values = np.unique(bitnet(w))
    assert len(values) == 3 and values[1] == 0 and values[2] == -values[0] == np.float16(jnp.abs(w).mean())
    np.testing.assert_array_equal(jax.grad(lambda w: bitnet(w).sum())(w), 1)


def test_any_format_and_any_axes():
    w = jax.random.normal(jax.random.key(0), (2, 3, 4, 256))
    np.testing.assert_array_equal(straight_through(w, "q4_0"), dequantize(quantize(w, "q4_0")))
    np.testing.assert_array_equal(jax.grad(lambda w: straight_through(w, "q5_0").sum())(w), 1)
    np.testing.assert_array_equal(straight_through(w, "q1_0")[1, 2], straight_through(w[1, 2], "q1_0"))
    assert absmean(w, 128).shape == (2, 3, 4, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.ones((2, 100)), "q1_0"), r"q1_0: weights are \[2, 100\]; .* K a multiple of 128"),
        ((np.ones(128), "q1_0"), r"\[128\]; expected matrices"),
        ((np.ones((2, 256)), "q1_0", np.ones((2, 1))), r"scale is \[2, 1\] .* \[2, 2\]"),
        ((np.ones((2, 256)), "q4_0", np.ones((2, 8))), r"scale is for .*q1_0.*, not for q4_0"),
    ],
)
def test_what_does_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        straight_through(*arguments)
    with pytest.raises(ValueError, match="clip is for"):
        straight_through(jnp.ones((2, 256)), "q8_0", clip=1.0)
    with pytest.raises(NotImplementedError, match="no encoder"):
        straight_through(jnp.ones((2, 256)), "iq2_xs")
