"""Latent attention over pages of rows, by the reference and the kernel of CPUs, against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attend_latent, attention, cache_layouts
from pallas_kernels.attention import latent_gemms
from tests.pallas_kernels.naive_attention import naive_attention

HEADS, WIDTH, VALUES, PAGE = 3, 80, 64, 8


def case(dtype: str, tokens: int):
    """Queries, new rows, pages of which those of rows that came before are full, and where they lie."""
    rng = np.random.default_rng(3)
    q = rng.standard_normal((2, tokens, HEADS, WIDTH)).astype(np.float32)
    rows = rng.standard_normal((2, tokens, WIDTH)).astype(np.float32)
    before = rng.standard_normal((2, 7, PAGE, 1, WIDTH)).astype(np.float32)
    layout = cache_layouts.get(dtype)
    pages = layout.quantize(layout.rotate(jnp.asarray(before)))
    table = rng.permutation(6).reshape(2, 3)
    positions = np.full((2, tokens), -1)
    positions[0] = 9 + np.arange(tokens)
    positions[1, : max(1, tokens - 2)] = np.arange(max(1, tokens - 2))  # padding at the end
    return q, rows, before, pages, table, positions


ERRORS = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2, "int8": 0.06}
KERNELS = [(dtype, kernel) for dtype in ERRORS for kernel in ("reference", "cpu")]
KERNELS += [("float16", "latent_gemms"), ("bfloat16", "latent_gemms")]


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("dtype, kernel", KERNELS)
def test_all_heads_attend_to_one_row_a_token(dtype, kernel, tokens):
    q, rows, before, pages, table, positions = case(dtype, tokens)
    out, pages = attend_latent(
        jnp.asarray(q), jnp.asarray(rows), pages, jnp.asarray(table), jnp.asarray(positions), 1,
        values=VALUES, scale=0.2, num_keys=3 * PAGE, impl=kernel, prefill_impl=kernel,
    )  # fmt: skip
    for row in range(2):
        keys = np.float64(before[1, table[row], :, 0].reshape(-1, WIDTH))
        for token, position in enumerate(positions[row]):
            if position >= 0:
                keys[position] = rows[row, token]
        expected = naive_attention(
            np.float64(q[row]), keys[:, None], keys[:, None, :VALUES], positions[row], scale=0.2
        )
        real = positions[row] >= 0
        np.testing.assert_allclose(out[row][real], expected[real], atol=ERRORS[dtype])
    assert cache_layouts.shape(pages) == before.shape


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("tokens", [1, 5])
def test_gemms_of_16_bits_round_nothing_that_the_cache_has_not(tokens, blocks, monkeypatch):
    """Of numbers as large as float16 cannot hold, and of all keys at once or a page at a time."""
    if blocks > 1:
        monkeypatch.setattr(latent_gemms, "LEAST_KEYS", PAGE)
        monkeypatch.setattr(latent_gemms, "GATHERED", 1)
    q, _, _, pages, table, positions = case("float16", tokens)
    arguments = jnp.asarray(q) * 1e5, pages, pages, jnp.asarray(table), jnp.asarray(positions), 1
    how = {"num_keys": 3 * PAGE, "scale": 2e-6}
    got, expected = (jax.jit(lambda *a, f=f: f(*a, **how))(*arguments) for f in (latent_gemms.run, attention))
    np.testing.assert_allclose(got, expected, atol=2e-6)


def test_what_does_not_fit_is_named():
    q, rows, _, pages, table, positions = case("float32", 1)
    rest = jnp.asarray(table), jnp.asarray(positions), 1
    how = {"scale": 1.0, "num_keys": 8}
    with pytest.raises(ValueError, match=r"rows are \[2, 1, 79\], .*with rows of 80 in the cache"):
        attend_latent(jnp.asarray(q), jnp.asarray(rows[..., 1:]), pages, *rest, values=VALUES, **how)
    with pytest.raises(ValueError, match="values up to 80"):
        attend_latent(jnp.asarray(q), jnp.asarray(rows), pages, *rest, values=81, **how)
    taps = {"pattern": lambda x: x}
    with pytest.raises(NotImplementedError, match="taps on pattern with the kernel 'triton'"):
        attend_latent(
            jnp.asarray(q), jnp.asarray(rows), pages, *rest, values=VALUES, **how, impl="triton", taps=taps
        )


def test_it_has_derivatives():
    q, rows, _, pages, table, positions = case("float32", 5)
    direction = np.random.default_rng(4).standard_normal(rows.shape).astype(np.float32)

    @jax.jit
    def total(rows):
        out, _ = attend_latent(
            jnp.asarray(q), rows, pages, jnp.asarray(table), jnp.asarray(positions), 1,
            values=VALUES, scale=0.2, num_keys=3 * PAGE,
        )  # fmt: skip
        return jnp.where((positions >= 0)[..., None, None], jnp.sin(out), 0).sum()

    slope = float((jax.jit(jax.grad(total))(jnp.asarray(rows)) * direction).sum())
    step = 1e-2
    change = total(rows + step * direction) - total(rows - step * direction)
    assert float(change) / (2 * step) == pytest.approx(slope, rel=5e-3)
