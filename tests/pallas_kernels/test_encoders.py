"""Encoders against ggml's own: to the bit where a format has one rule, nearly where it has a search."""

import functools
import itertools

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import open_checkpoint
from checkpoints.demo import demo_path
from pallas_kernels import codebooks, dequantize, formats, quantize
from tests.pallas_kernels import ggml_quantize

ONE_RULE = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q1_0", "q2_0_g64", "tq1_0", "tq2_0", "mxfp4")
SEARCHED = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "nvfp4")
CODEBOOKS = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")
NEED_IMPORTANCE = ("iq1_s", "iq2_xxs", "iq2_xs")
WEIGHTED = ("q4_0", "q4_1", "q5_0", "q5_1", *(name for name in SEARCHED if name != "nvfp4"))
TERNARY = ("q2_0_g64", "q2_0_g128", "tq2_0_g128", "pq2_0", "ptq1_0", "tq1_0", "tq2_0")
ROWS, COLUMNS = 64, 512


def weights(seed: int) -> np.ndarray:
    """float32 [ROWS, COLUMNS], as matrices have them, and rows that encoders may stumble over."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, COLUMNS)) * 2.0 ** rng.integers(-12, 12, (ROWS, 1))
    x[0] = 0
    x[1, :256] = 0
    x[2] = np.sign(x[2]) * 0.125
    x[3, ::2] = 0
    x[4] = np.abs(x[4])
    x[5] = -np.abs(x[5])
    x[6] = rng.integers(-15, 16, COLUMNS) / 2  # halves
    x[7, 1:] = 0  # one weight alone
    x[8] = 0.25
    x[9] *= rng.random(COLUMNS) < 0.02  # outliers
    return x.astype(np.float32)


@functools.partial(jax.jit, static_argnums=1)
def encoded(x, format):
    return formats.pack(format, quantize(x, format).fields)


@functools.partial(jax.jit, static_argnums=1)
def encoded_by(x, format, importance):
    return formats.pack(format, quantize(x, format, importance).fields)


def decoded(raw: np.ndarray, format: str) -> np.ndarray:
    return formats.values(format, raw).reshape(len(raw), -1)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("format", ONE_RULE)
def test_blocks_are_ggml_s_to_the_bit(format, seed):
    x = weights(seed)
    expected, found = ggml_quantize.quantize(x, format), np.asarray(encoded(x, format))
    rows = np.flatnonzero((expected != found).any(axis=1))
    assert rows.size == 0, f"rows {rows}"


def borders(levels: int) -> np.ndarray:
    """float32 [ROWS, COLUMNS]: groups of 32 whose numbers lie within an ulp or two of the borders between two
    codes, if the step between codes is a `levels`th of the first number, or of the range (in odd rows)."""
    rng = np.random.default_rng(levels)
    x = rng.uniform(0.5, 1, (ROWS, COLUMNS // 32, 1)) * rng.choice([-1, 1], (ROWS, COLUMNS // 32, 1))
    x = x.astype(np.float32)
    code = rng.integers(-levels, levels, (ROWS, COLUMNS // 32, 32)) + 0.5
    code[1::2] = abs(code[1::2])
    near = (x / np.float32(levels) * code).astype(np.float32)
    near = np.nextafter(near, rng.choice([-2, 0, 2], near.shape).astype(np.float32))
    near[..., :1], near[1::2, :, 1] = x, 0
    return near.reshape(ROWS, COLUMNS)


@pytest.mark.parametrize("levels", [7, 8, 15, 16, 31, 127])
@pytest.mark.parametrize("format", ONE_RULE)
def test_a_product_is_rounded_before_the_sum(format, levels):
    """As in C; compilers like to make one operation of both, which rounds once (602 of the weights of SmolLM2
    in Q4_0)."""
    x = borders(levels)
    np.testing.assert_array_equal(encoded(x, format), ggml_quantize.quantize(x, format))


@pytest.mark.parametrize("format", ["q8_0", "q4_1", "q1_0", "mxfp4"])
def test_without_jit_too(format):
    x = weights(3)[:12]
    found = formats.pack(format, quantize(jnp.asarray(x), format).fields)
    np.testing.assert_array_equal(found, ggml_quantize.quantize(x, format))


@pytest.mark.parametrize("format", SEARCHED)
def test_searches_find_what_ggml_s_find(format):
    """The sums of a search have another order here, so that a near-tie may go the other way: in few blocks,
    and without loss. IQ4_XS takes its codes by the scale that is stored, ggml by the one before it is
    rounded."""
    x = weights(1)
    expected = decoded(ggml_quantize.quantize(x, format), format)
    found = decoded(np.asarray(encoded(x, format)), format)
    same = (expected == found).reshape(-1, 32).all(axis=1).mean()
    error, least = (
        float((((w - x) / np.abs(x).max(axis=1, keepdims=True).clip(1e-9)) ** 2).sum())
        for w in (found, expected)
    )
    print(f"{format}: {same:.3f} of groups are the same, error {error / least:.5f} times ggml's")
    assert same > (0.8 if format == "iq4_xs" else 0.97)
    assert error < 1.001 * least


def column_importance(seed: int) -> np.ndarray:
    """float32 [COLUMNS], as activations have it: a few columns stand out, and some are never used."""
    importance = np.random.default_rng(seed).lognormal(sigma=2, size=COLUMNS)
    importance[64:72] = importance[480:] = 0
    return importance.astype(np.float32)


def test_formats_with_a_weighted_rule_are_all_compared():
    assert {*WEIGHTED, *CODEBOOKS} == {
        name for name in formats.names() if hasattr(formats.get(name), "quantize_weighted")
    }


@pytest.mark.parametrize("format", WEIGHTED)
def test_importance_weights_errors_as_ggml_s_does(format):
    """Scales that differ only in codes of columns without importance are equally good, and the last bit of a
    sum decides between them."""
    x, importance = weights(1), column_importance(2)
    expected = decoded(ggml_quantize.quantize(x, format, importance), format)
    found = decoded(np.asarray(encoded_by(x, format, importance)), format)
    same = (expected == found).reshape(-1, 32).all(axis=1).mean()
    plain = decoded(ggml_quantize.quantize(x, format), format)
    error, least, without = (
        float((importance * ((w - x) / np.abs(x).max(axis=1, keepdims=True).clip(1e-9)) ** 2).sum())
        for w in (found, expected, plain)
    )
    print(f"{format}: {same:.3f} are the same, error {error / least:.5f}, {without / least:.3f} without")
    assert same > (0.8 if format == "iq4_xs" else 0.94)
    assert error < 1.001 * least
    assert error < without


# `relative` of ggml's blocks of FEW rows of weights(1), with importance and without, because ggml's tables of
# neighbours take seconds to make.
GGML_S_ERRORS = {
    "iq1_s": (1124.8, None),
    "iq1_m": (727.2, 3073.51),
    "iq2_xxs": (641.305, None),
    "iq2_xs": (280.629, None),
    "iq2_s": (219.17, 77.6873),
    "iq3_xxs": (127.947, 110.293),
    "iq3_s": (128.731, 59.2934),
}
FEW = 24


def relative(w: np.ndarray, x: np.ndarray, importance: np.ndarray | float) -> float:
    """The weighted square error of rows, each of them as if its greatest weight were 1."""
    away = (w - x) / np.abs(x).max(axis=1, keepdims=True).clip(1e-9)
    return float((importance * away**2).sum())


@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
@pytest.mark.parametrize("format", CODEBOOKS)
def test_points_of_codebooks_are_as_near_as_ggml_s(format, weighted):
    x, importance = weights(1)[:FEW], column_importance(2) if weighted else None
    if not weighted and format in NEED_IMPORTANCE:
        with pytest.raises(NotImplementedError, match=f"{format} has no encoder without the importance"):
            quantize(x, format)
        return
    found = decoded(np.asarray(encoded_by(x, format, importance)), format)
    error = relative(found, x, 1 if importance is None else importance)
    assert error < 1.01 * GGML_S_ERRORS[format][not weighted]


def real_weights() -> np.ndarray:
    """float32 [ROWS, COLUMNS], of a matrix of SmolLM2."""
    tensor = open_checkpoint(demo_path()).tensors["blk.7.ffn_down.weight"]
    return decoded(np.asarray(tensor.data)[:ROWS], tensor.format)[:, :COLUMNS]


@pytest.mark.slow
@pytest.mark.parametrize("format", CODEBOOKS)
def test_codebooks_against_ggml_itself(format):
    """All points are compared here, and some in ggml."""
    importance, one = column_importance(2), np.ones(COLUMNS, np.float32)
    for x, columns in itertools.product((weights(1), real_weights()), (importance, one, None)):
        if columns is None and format in NEED_IMPORTANCE:
            continue
        expected = decoded(ggml_quantize.quantize(x, format, columns), format)
        found = decoded(np.asarray(encoded_by(x, format, columns)), format)
        same = (expected == found).reshape(-1, 16).all(axis=1).mean()
        error, least = (relative(w, x, 1 if columns is None else columns) for w in (found, expected))
        print(f"{format}: {same:.3f} of groups are the same, error {error / least:.5f} times ggml's")
        assert error < 1.001 * least
    x = weights(1)[:FEW]
    for columns, stored in zip((importance, None), GGML_S_ERRORS[format], strict=True):
        if stored is not None:
            expected = decoded(ggml_quantize.quantize(x, format, columns), format)
            assert relative(expected, x, 1 if columns is None else columns) == pytest.approx(stored, rel=1e-4)


@pytest.mark.parametrize("parts", [1, 2])
def test_ternary_fits_are_the_best_ones(parts):
    """Of all ways to give eight numbers -1, 0 or 1, and shifts of either sign to their parts. With several
    parts only of those ways that keep the order of the numbers."""
    rng = np.random.default_rng(11)
    x, w = rng.normal(size=(6, 8)).astype(np.float32), rng.lognormal(size=(6, 8)).astype(np.float32)
    scale, signs = (np.asarray(a) for a in codebooks.shifted_ternary(x, w, parts, 0.125))
    every = np.array(list(itertools.product((-1, 0, 1), repeat=8)), np.float64)
    for row in range(len(x)):
        v = every
        if parts > 1:
            v = v[(np.diff(v[:, np.argsort(x[row])]) >= 0).all(axis=1)]
        best, own = np.inf, np.inf
        for choice in itertools.product((-1, 1), repeat=parts):
            q = v + 0.125 * np.repeat(choice, 8 // parts)
            fit = (w[row] * q * x[row]).sum(axis=1) / (w[row] * q * q).sum(axis=1)
            best = min(best, (w[row] * (fit[:, None] * q - x[row]) ** 2).sum(axis=1).min())
            if (signs[row] == choice).all():
                own = (w[row] * (scale[row] * q - x[row]) ** 2).sum(axis=1).min()
        assert scale[row] > 0 and own == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("format", ["q8_0", "q1_0", "nvfp4"])
def test_other_formats_ignore_it_as_ggml_does(format):
    x, importance = weights(3)[:12], column_importance(4)
    np.testing.assert_array_equal(
        ggml_quantize.quantize(x, format, importance), ggml_quantize.quantize(x, format)
    )
    packed = quantize(jnp.asarray(x), format, jnp.asarray(importance))
    np.testing.assert_array_equal(
        formats.pack(format, packed.fields), formats.pack(format, quantize(jnp.asarray(x), format).fields)
    )


def test_matrices_of_a_stack_have_an_importance_each():
    x = weights(7)[10:18].reshape(2, 4, COLUMNS)
    importance = np.stack([column_importance(8), column_importance(9)])
    both = dequantize(quantize(jnp.asarray(x), "q4_0", jnp.asarray(importance)))
    for one, matrix, columns in zip(both, x, importance, strict=True):
        expected, plain = (dequantize(quantize(jnp.asarray(matrix), "q4_0", c)) for c in (columns, None))
        assert (one == expected).mean() > 0.99 > 0.5 > (one == plain).mean()
    with pytest.raises(ValueError, match=r"importance has shape \(4,\).*one number per column, \(512,\)"):
        quantize(jnp.asarray(x), "q4_0", jnp.ones(4))


@pytest.mark.parametrize("format", TERNARY)
def test_ternary_weights_are_kept_as_they_are(format):
    rng = np.random.default_rng(4)
    d = rng.normal(size=(8, 2, 1)).astype(np.float16).astype(np.float32)
    x = (rng.integers(-1, 2, (8, 2, 256)) * np.abs(d)).reshape(8, 512)
    np.testing.assert_array_equal(decoded(np.asarray(encoded(x, format)), format), x)


def test_weights_of_one_bit_are_kept_as_they_are():
    rng = np.random.default_rng(5)
    d = np.abs(rng.normal(size=(8, 4, 1))).astype(np.float16).astype(np.float32)
    x = (rng.choice([-1, 1], (8, 4, 128)) * d).reshape(8, 512)
    np.testing.assert_array_equal(decoded(np.asarray(encoded(x, "q1_0")), "q1_0"), x)


# Formats that the gguf package decodes, too.
KNOWN = [
    format
    for format in (*ONE_RULE, *SEARCHED)
    if getattr(gguf.GGMLQuantizationType, format.upper(), None) in gguf.quants._type_traits
]


@pytest.mark.parametrize("format", KNOWN)
def test_our_blocks_are_what_others_read(format):
    """The gguf package decodes them to what we decode them to."""
    kind = gguf.GGMLQuantizationType[format.upper()]
    raw = np.asarray(encoded(weights(6), format))
    np.testing.assert_array_equal(decoded(raw, format), gguf.quants.dequantize(raw, kind))


@pytest.mark.parametrize("format", [*ONE_RULE, *SEARCHED, *TERNARY, "iq3_s"])
def test_any_leading_axes(format):
    x = weights(7)[:8].reshape(2, 4, COLUMNS)
    whole, rows = quantize(jnp.asarray(x), format), quantize(jnp.asarray(x.reshape(8, -1)), format)
    np.testing.assert_array_equal(dequantize(whole).reshape(8, -1), dequantize(rows))
