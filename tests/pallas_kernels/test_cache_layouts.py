"""Every layout of the cache there is a file for: what its pages hold, against numpy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import cache_layouts
from pallas_kernels.attention import attention, write_pages

pytestmark = pytest.mark.usefixtures("optimized")


def of_bytes(x):
    """Head by head: a byte a number, the largest as 127."""
    out = np.empty(x.shape, np.float64)
    for at in np.ndindex(x.shape[:-1]):
        scale = (np.abs(x[at]).max() / np.float32(127)).astype(ml_dtypes.bfloat16).astype(np.float32)
        out[at] = np.float64(np.rint(x[at] / scale) * scale) if scale else 0
    return out


# What float32 is read as behind a cache, and how far that is from a normal number at most, relatively: to the
# number, or to the largest of its head.
ORACLES = {
    "bfloat16": lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float64),
    "float16": lambda x: np.clip(x, -65504, 65504).astype(np.float16).astype(np.float64),
    "float32": lambda x: x.astype(np.float64),
    "int8": of_bytes,
}
ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 0.0, "int8": (1 + 2**-8) / 254}
# By dtype: numbers that were computed in another order lie at most one unit of their last place apart.
UNITS = {
    "int8": {"atol": 1, "rtol": 0},
    "float16": {"atol": 1e-6, "rtol": 2**-10},
    "bfloat16": {"atol": 1e-6, "rtol": 2**-7},
}
BYTES = {"bfloat16": 2 * 128, "float16": 2 * 128, "float32": 4 * 128, "int8": 128 + 2}  # of a head of 128


def room(name, x):
    """How far numbers [..., head_dim] may be from what is stored of them."""
    return ROUNDING[name] * (np.abs(x).max(-1, keepdims=True) if name == "int8" else np.abs(x))


layouts = pytest.mark.parametrize("name", cache_layouts.names())


@layouts
def test_numbers_are_rounded_as_numpy_rounds_them(name):
    rng = np.random.default_rng(0)
    exponents = rng.integers(-140, 40, (4000, 64))
    x = np.ldexp(rng.standard_normal(exponents.shape), exponents).astype(np.float32)
    x[0, :8] = [0.0, -0.0, 65504, 65519.99, 65520, -1e6, 1e30, -(2.0**-149)]
    x[1] = np.float32(1) + np.arange(64, dtype=np.float32) * np.float32(2**-13)  # ties, of every kind
    layout = cache_layouts.get(name)
    got = np.asarray(layout.dequantize(jax.jit(layout.quantize)(jnp.asarray(x))), np.float64)
    subnormal = np.abs(x) < 2.0**-126  # which XLA may flush
    np.testing.assert_array_equal(got[~subnormal], ORACLES[name](x)[~subnormal])
    normal = (np.abs(x) >= 2.0**-14) & (np.abs(x) < 65504)
    assert (np.abs(got - x) <= room(name, x))[normal].all()


@layouts
@pytest.mark.parametrize("D", [64, 96, 128])
def test_scores_are_those_of_what_is_rotated(name, D):
    rng = np.random.default_rng(D)
    q, k = rng.standard_normal((2, 5, D)).astype(np.float32)
    rotate = jax.jit(cache_layouts.get(name).rotate)
    got = np.asarray(rotate(q), np.float64) @ np.asarray(rotate(k), np.float64).T
    np.testing.assert_allclose(got, np.float64(q) @ np.float64(k).T, atol=1e-4)


def test_keys_of_bytes_keep_what_stands_beside_a_large_dimension():
    """One dimension that is 100 times the others takes all bits of a scale, unless keys are rotated."""
    layout = cache_layouts.get("int8")
    x = np.random.default_rng(3).standard_normal((200, 64)).astype(np.float32)
    x[:, 5] *= 100

    def error(numbers):
        return np.abs(np.asarray(layout.dequantize(layout.quantize(numbers))) - numbers).mean()

    assert error(np.asarray(layout.rotate(x))) < 0.3 * error(x)


def test_a_cache_of_bytes_refuses_derivatives():
    layout = cache_layouts.get("int8")
    with pytest.raises(NotImplementedError, match=r"int8 have no derivative.* cache of float32"):
        jax.grad(lambda x: layout.dequantize(layout.quantize(x)).sum())(jnp.ones(64))


@layouts
def test_pages_say_what_they_are(name):
    shape = (3, 5, 7, 2, 128)
    pages = cache_layouts.empty(name, shape)
    assert cache_layouts.recognize(pages) is cache_layouts.get(name)
    assert cache_layouts.shape(pages) == shape
    assert not np.asarray(cache_layouts.read(pages, (0, 0))).any()
    assert all(a.shape[:4] == shape[:4] for a in jax.tree.leaves(pages))
    assert sum(a.nbytes for a in jax.tree.leaves(pages)) == 3 * 5 * 7 * 2 * BYTES[name]
    assert cache_layouts.bytes_per_head(name, 128) == BYTES[name]


def test_what_is_no_layout_is_refused():
    with pytest.raises(NotImplementedError, match=r"no layout of the cache has pages of int16; .*float32"):
        cache_layouts.recognize(jnp.zeros((1, 1, 1, 1, 64), jnp.int16))
    with pytest.raises(
        NotImplementedError, match=r"cache layout 'q3' is not supported; supported: .*float32"
    ):
        cache_layouts.get("q3")


@layouts
@pytest.mark.parametrize("page_size", [3, 16])
def test_tokens_are_written_where_the_table_says(name, page_size):
    rng = np.random.default_rng(1)
    L, B, T, Hkv, D, pages_per_row = 2, 2, 5, 3, 64, 4
    table = rng.permutation(B * pages_per_row).reshape(B, -1)
    start = np.array([page_size - 2, 2 * page_size + 1])
    positions = start[:, None] + np.arange(T)
    positions[1, -2:] = -1  # padding
    old_values, new = (
        rng.standard_normal((*lead, Hkv, D)) for lead in ((L, B * pages_per_row, page_size), (B, T))
    )
    pages = cache_layouts.write(
        cache_layouts.empty(name, old_values.shape), jnp.asarray(old_values, jnp.float32), (slice(None),)
    )
    pages = jax.jit(write_pages)(
        pages, jnp.asarray(new, jnp.float32), jnp.asarray(table), jnp.asarray(positions), jnp.int32(1)
    )
    for b, t in np.ndindex(B, T):
        if (at := positions[b, t]) >= 0:
            old_values[1, table[b, at // page_size], at % page_size] = new[b, t]
    want = ORACLES[name](old_values.astype(np.float32))
    np.testing.assert_array_equal(cache_layouts.read(pages, (slice(None),)), want)


@layouts
def test_attention_reads_what_is_stored(name):
    """The reference in float64 has the numbers as the layout rounds them."""
    rng = np.random.default_rng(2)
    H, Hkv, D, page_size, pages, T = 4, 2, 64, 5, 7, 33
    q, k, v = (rng.standard_normal((T, heads, D)).astype(np.float32) for heads in (H, Hkv, Hkv))
    table, positions = jnp.asarray(rng.permutation(pages)[None]), jnp.arange(T)[None]

    @jax.jit  # outside of jit each operation would be compiled alone
    def attended(q, k, v):
        empty = cache_layouts.empty(name, (1, pages, page_size, Hkv, D))
        stored = (write_pages(empty, x[None], table, positions, 0) for x in (k, v))
        return attention(q[None], *stored, table, positions, 0, num_keys=T)[0]

    got = attended(q, k, v)
    keys, values = (np.repeat(ORACLES[name](x), H // Hkv, axis=1) for x in (k, v))
    scores = np.einsum("thd,shd->hts", q.astype(np.float64), keys) / np.sqrt(D)
    weights = np.where(np.tri(T, dtype=bool), np.exp(scores), 0)
    want = np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), values)
    np.testing.assert_allclose(got, want, atol=2e-6)
