"""Latent attention over pages of rows against numpy in float64, which has keys and values of every head."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attend_latent, attention, cache_layouts
from pallas_kernels.attention import prefill_sm90
from pallas_kernels.attention.scores import LOG2_E
from pallas_kernels.latent import api, gemms, prefill
from tests.pallas_kernels.latent_cases import latent_case

PAGE = 8


def positions_of(tokens: int) -> np.ndarray:
    """Of a row behind 9 tokens, and of one that is new and has padding at the end."""
    positions = np.full((2, tokens), -1)
    positions[0] = 9 + np.arange(tokens)
    positions[1, : max(1, tokens - 2)] = np.arange(max(1, tokens - 2))
    return positions


ERRORS = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2, "int8": 0.06}
KERNELS = [(dtype, kernel) for dtype in ERRORS for kernel in ("reference", "cpu")]
KERNELS += [("float16", "latent_gemms"), ("bfloat16", "latent_gemms")]


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("dtype, kernel", KERNELS)
def test_all_heads_attend_to_one_row_a_token(dtype, kernel, tokens):
    case = latent_case(positions_of(tokens), dtype=dtype, interleaved=tokens == 1)
    out, pages, _ = attend_latent(*case.arguments, **case.keywords, impl=kernel, prefill_impl=kernel)
    np.testing.assert_allclose(out[case.is_real], case.expected[case.is_real], atol=ERRORS[dtype])
    np.testing.assert_allclose(case.stored(pages), case.rows[case.is_real], atol=2 * ERRORS[dtype])
    assert cache_layouts.shape(pages) == cache_layouts.shape(case.pages)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("tokens", [1, 5])
def test_gemms_of_16_bits_round_nothing_that_the_cache_has_not(tokens, blocks, monkeypatch):
    """Of numbers as large as float16 cannot hold, and of all keys at once or a page at a time."""
    if blocks > 1:
        monkeypatch.setattr(gemms, "LEAST_KEYS", PAGE)
        monkeypatch.setattr(gemms, "GATHERED", 1)
    _, _, _, _, pages, table, positions, layer = latent_case(positions_of(tokens), dtype="float16").arguments
    q = np.random.default_rng(0).standard_normal((2, tokens, 3, 80)).astype(np.float32)
    arguments = jnp.asarray(q) * 1e5, pages, pages, table, positions, layer
    how = {"num_keys": 3 * PAGE, "scale": 2e-6}
    got, expected = (jax.jit(lambda *a, f=f: f(*a, **how))(*arguments) for f in (gemms.run, attention))
    np.testing.assert_allclose(got, expected, atol=2e-6)


def exact_part(q, k_pages, v_pages, block_table, positions, layer, scores):
    """What prefill_sm90.prefill_part computes, in float32; nothing of pages that the table does not name."""
    (B, _, H, D), V = q.shape, v_pages.shape[-1]
    keys = k_pages[layer, block_table].reshape(B, -1, H, D).astype(jnp.float32)
    values = v_pages[layer, block_table].reshape(B, -1, H, V).astype(jnp.float32)
    products = LOG2_E * scores.scale * jnp.einsum("bthd,bshd->bths", q, keys)
    visible = jnp.arange(keys.shape[1]) <= positions[..., None, None]
    weights = jnp.where(visible, jnp.exp2(products), 0.0)
    total = weights.sum(-1)
    out = jnp.einsum("bths,bshv->bthv", weights, values) / jnp.where(total == 0, 1.0, total)[..., None]
    return out, jnp.log2(total)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("most, page_size", [(2**27, 8), (1, 8), (1, 96), (3 * 64 * 2 * 3 * 72, 32)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_prefill_makes_keys_and_values_of_rows(dtype, most, page_size, known):
    """Of all rows at once, or of a few pages at a time, whose results are joined; prefill_sm90 itself runs on
    GPUs."""
    positions = np.full((2, 80), -1)
    positions[0], positions[1, :70] = 220 + np.arange(80), np.arange(70)
    case = latent_case(positions, dtype=dtype, page_size=page_size, pages=-(-400 // page_size))
    parts = mock.patch.object(prefill_sm90, "prefill_part", exact_part)
    some = mock.patch.object(prefill, "EXPANDED", most)

    @jax.jit
    def run(arguments, layer, num_keys):
        at = arguments[-1] if known else layer
        rest = case.keywords | {"num_keys": num_keys}
        return attend_latent(*arguments[:-1], at, **rest, prefill_impl="latent_prefill")[:2]

    with parts, some:
        out, pages = run(case.arguments, case.arguments[-1], 300)
    np.testing.assert_allclose(out[case.is_real], case.expected[case.is_real], atol=ERRORS[dtype])
    np.testing.assert_allclose(case.stored(pages), case.rows[case.is_real], atol=2 * ERRORS[dtype])


def test_of_few_queries_nothing_is_expanded():
    case = latent_case(positions_of(5), dtype="float16")
    with mock.patch.object(prefill, "run", None):
        out, *_ = attend_latent(*case.arguments, **case.keywords, prefill_impl="latent_prefill")
    assert api.EXPANDED_TOKENS > 8  # the most tokens of a step
    np.testing.assert_allclose(out[case.is_real], case.expected[case.is_real], atol=ERRORS["float16"])


def test_what_does_not_fit_is_named():
    case = latent_case(positions_of(1))
    q, latents, *rest = case.arguments
    with pytest.raises(ValueError, match=r"latents are \[2, 1, 79\]; with rows of 80 .*\[B, T, 80 or more\]"):
        attend_latent(q, latents[..., 6:], *rest, **case.keywords)
    with pytest.raises(ValueError, match=r"K of 64 x 32 give q as \[B, T, H, 48\]"):
        attend_latent(q[..., 1:], latents, *rest, **case.keywords)
    taps = {"pattern": lambda x: x}
    with pytest.raises(NotImplementedError, match="taps on pattern with the kernel 'triton'"):
        attend_latent(*case.arguments, **case.keywords, impl="triton", taps=taps)


def test_it_has_derivatives():
    case = latent_case(positions_of(5))
    q, latents, *rest = case.arguments
    direction = np.random.default_rng(4).standard_normal(latents.shape).astype(np.float32)

    @jax.jit
    def total(latents):
        out, *_ = attend_latent(q, latents, *rest, **case.keywords)
        return jnp.where(case.is_real[..., None, None], jnp.sin(out), 0).sum()

    slope = float((jax.jit(jax.grad(total))(latents) * direction).sum())
    step = 1e-2
    change = total(latents + step * direction) - total(latents - step * direction)
    assert float(change) / (2 * step) == pytest.approx(slope, rel=5e-3)


def test_taps_see_scores_and_the_pattern_of_all_heads():
    case, seen = latent_case(positions_of(5)), {}

    def tap(site):
        return lambda x: seen.setdefault(site, x)

    out, *_ = attend_latent(
        *case.arguments, **case.keywords, taps={site: tap(site) for site in ("scores", "pattern")}
    )
    np.testing.assert_allclose(out[case.is_real], case.expected[case.is_real], atol=2e-6)
    sums = np.asarray(seen["pattern"]).sum(-1).swapaxes(1, 2)[case.is_real]
    np.testing.assert_allclose(sums, 1, atol=1e-6)
    assert seen["scores"].shape == (2, 3, 5, 3 * PAGE)
