"""Attention's kernels on a GPU, of one query a row and of many, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    attend,
    cache_layouts,
    device,
    problems,
)
from tests.pallas_kernels.test_attention_windows import (
    DECODE,
    PREFILL,
    SINKS,
    check_decode,
    check_prefill,
    sinks_for,
)
from tests.pallas_kernels.test_cache_layouts import ROUNDING, UNITS
from tests.refused_cases import unless_refused

pytestmark = pytest.mark.gpu

# Layouts whose pages tensor cores multiply as they lie.
AS_THEY_LIE = [n for n in cache_layouts.names() if n == cache_layouts.get(n).PREFILL]


@pytest.mark.parametrize(
    ("H", "Hkv", "D", "B", "pages", "interleaved", "normed"),
    [
        (32, 8, 128, 1, 3, False, True),
        (32, 8, 128, 1, 40, False, True),
        (16, 8, 128, 8, 5, False, True),
        (9, 3, 64, 2, 20, True, False),
        (14, 2, 64, 3, 9, False, False),
        (32, 8, 128, 33, 5, False, True),  # more rows than blocks at once: teams of four warps
        (16, 8, 128, 131, 3, False, True),  # and of one
        (9, 3, 64, 240, 2, False, True),  # with an odd number of heads to a warp
        (32, 32, 64, 24, 3, True, False),
        (24, 4, 256, 1, 40, False, True),  # the widest heads have gates, and only a part of them is turned
        (6, 1, 256, 3, 5, False, True),
    ],
)
@pytest.mark.parametrize("layout", cache_layouts.names())
def test_the_attention_kernel_is_the_reference(layout, H, Hkv, D, B, pages, interleaved, normed):
    rng = np.random.default_rng(D + H + pages)
    L, page_size, layer, gated = 2, 64, 1, D == 256
    pairs = 32 if gated else D // 2
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    qkv = draw(B, 1, ((1 + gated) * H + 2 * Hkv) * D)
    empty = cache_layouts.empty(layout, (L, B * pages, page_size, Hkv, D))
    k_pages, v_pages = (cache_layouts.write(empty, draw(*cache_layouts.shape(empty)), ()) for _ in range(2))
    table = jnp.asarray(rng.permutation(B * pages).reshape(B, pages), jnp.int32)
    positions = rng.integers(0, pages * page_size, B)
    positions[0] = pages * page_size - 1
    if B > 1:
        positions[1] = 0  # the first token of all
    if B > 2:
        positions[2] = -1  # a row that has ended
    angle = jnp.asarray(positions[:, None, None] * 10000.0 ** (-np.arange(pairs) / pairs), jnp.float32)
    rest = {
        "rotation": (jnp.cos(angle), jnp.sin(angle)),
        "interleaved": interleaved,
        "norms": (1 + 0.1 * draw(L, D), 1 + 0.1 * draw(L, D)) if normed else (None, None),
        "eps": 1e-6,
        "num_keys": pages * page_size,
        "gated": gated,
    }
    positions = jnp.asarray(positions[:, None], jnp.int32)
    args = (qkv, k_pages, v_pages, table, positions)
    want = jax.jit(lambda *a: attend(*a, layer, **rest))(*args)
    runs = [jax.jit(lambda *a: attend(*a, layer, **rest, impl="decode"))(*args) for _ in range(2)]
    for got in runs:
        np.testing.assert_allclose(got[0], want[0], atol=max(3e-5, 1.28 * ROUNDING[layout]), rtol=1e-5)
        for pages_got, pages_want in zip(got[1:3], want[1:3], strict=True):
            a, b = (cache_layouts.read(pages, ()) for pages in (pages_got, pages_want))
            # By one ulp, of numbers below 4; of bytes by one step of a head's largest, below 8.
            assert jnp.abs(a - b).max() <= max(1e-5, (16 if layout == "int8" else 4) * ROUNDING[layout])
            assert (a != b).mean() < 1e-3
    np.testing.assert_array_equal(runs[0][0], runs[1][0])


def prefill_problem(*sizes, window=None, sinks=False):
    return problems.Attention(device.platform(), "prefill", *sizes, window=window, sinks=sinks)


@unless_refused(lambda impl, H, Hkv, D, layout, more: (impl, prefill_problem(H, Hkv, D, 64, layout)))
@pytest.mark.parametrize(
    ("H", "Hkv", "D", "layout", "more"),
    [
        (32, 8, 128, "int8", {}),
        (32, 8, 128, "float16", {"normed": True}),
        (40, 8, 128, "int8", {"normed": True, "interleaved": True}),
        (9, 3, 64, "bfloat16", {}),
        (24, 4, 256, "float16", {"normed": True, "gated": True, "pairs": 32}),
        (24, 4, 256, "int8", {"normed": True, "gated": True, "pairs": 32}),
    ],
)
@pytest.mark.parametrize("impl", ["prefill_sm90", "prefill_sm80"])
def test_prompts_are_normed_rotated_stored_and_read(impl, H, Hkv, D, layout, more):
    normed, gated, interleaved = (more.get(name, False) for name in ("normed", "gated", "interleaved"))
    rng, B, T, depth, pairs = np.random.default_rng(6), 2, 300, 100, more.get("pairs", D // 2)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    empty = cache_layouts.empty(layout, (2, 16, 64, Hkv, D))
    pages = [cache_layouts.write(empty, draw(2, 16, 64, Hkv, D), ()) for _ in range(2)]
    table = jnp.asarray(rng.permutation(16).reshape(B, 8), jnp.int32)
    positions = np.where(np.arange(T) < np.array([[T], [7]]), depth + np.arange(T), -1)
    angle = jnp.asarray(positions[..., None] * 10000.0 ** (-np.arange(pairs) / pairs), jnp.float32)
    rest = {"rotation": (jnp.cos(angle), jnp.sin(angle)), "interleaved": interleaved, "gated": gated}
    rest["norms"] = (1 + 0.1 * draw(2, D), 1 + 0.1 * draw(2, D)) if normed else (None, None)
    rest |= {"eps": 1e-6, "num_keys": T + depth}
    args = (draw(B, T, ((1 + gated) * H + 2 * Hkv) * D), *pages, table, jnp.asarray(positions, jnp.int32))
    want, got = (
        jax.jit(lambda *a, impl=impl: attend(*a, 1, **rest, prefill_impl=impl))(*args)
        for impl in ("reference", impl)
    )
    # What lies between two numbers may go to either.
    for a, b in zip(jax.tree.leaves(got[1:3]), jax.tree.leaves(want[1:3]), strict=True):
        unit, a, b = UNITS[str(a.dtype)], np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert (a == b).mean() > 0.9999, f"{(a != b).sum()} of {a.size} differ"
        np.testing.assert_allclose(a, b, **unit)
    seen = positions >= 0
    got, want = (np.asarray(x[0])[seen] for x in (got, want))
    operand = "bfloat16" if layout == "bfloat16" else "float16"
    lost = np.linalg.norm(got - want) / np.linalg.norm(want) / ROUNDING[operand]
    print(f"{impl}, {H} x {Hkv} x {D}, {layout}: {lost:.3f} of what rounding to {operand} loses")
    assert lost < 1.024


@unless_refused(
    lambda impl, H, Hkv, D, page_size, layout: (impl, prefill_problem(H, Hkv, D, page_size, layout))
)
@pytest.mark.parametrize(
    ("H", "Hkv", "D", "B", "T", "depth", "page_size"),
    [
        (32, 8, 128, 1, 512, 0, 64),
        (32, 8, 128, 3, 100, 300, 64),  # ragged, and behind what the cache holds
        (9, 3, 64, 1, 200, 64, 64),
        (14, 2, 64, 2, 129, 1, 128),
        (16, 8, 128, 2, 2, 0, 64),
        (8, 8, 64, 1, 300, 77, 16),
        (24, 4, 256, 2, 300, 77, 64),
        (6, 1, 256, 1, 129, 0, 128),
    ],
)
@pytest.mark.parametrize("impl", ["prefill_sm90", "prefill_sm80"])
@pytest.mark.parametrize("layout", AS_THEY_LIE)
def test_many_queries_attend_as_the_reference_does(layout, H, Hkv, D, B, T, depth, page_size, impl):
    from pallas_kernels import attention
    from pallas_kernels.attention.prefill_sm80 import mma_attention
    from pallas_kernels.attention.prefill_sm90 import prefill_attention

    kernel = {"prefill_sm90": prefill_attention, "prefill_sm80": mma_attention}[impl]
    rng = np.random.default_rng(H + T)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    pages = -(-(T + depth) // page_size) + 1
    dtype = cache_layouts.get(layout).DTYPE
    q = draw(B, T, H, D).astype(dtype).astype(jnp.float32)
    k_pages, v_pages = (draw(2, B * pages, page_size, Hkv, D).astype(dtype) for _ in range(2))
    table = jnp.asarray(rng.permutation(B * pages).reshape(B, pages), jnp.int32)
    lengths = np.array([T, 1, 0][:B])
    positions = np.where(np.arange(T) < lengths[:, None], depth + np.arange(T), -1)
    args = (q, k_pages, v_pages, table, jnp.asarray(positions, jnp.int32), 1)
    want = np.asarray(attention(*args, num_keys=T + depth))
    got = [np.asarray(kernel(*args)) for _ in range(2)]
    np.testing.assert_allclose(got[0], want, atol=5.12 * ROUNDING[layout], rtol=0)
    assert np.linalg.norm(got[0] - want) < 1.024 * ROUNDING[layout] * np.linalg.norm(want)
    assert (got[0][positions < 0] == 0).all()
    np.testing.assert_array_equal(got[0], got[1])


@pytest.mark.parametrize(
    ("window", "scale", "softcap", "sizes", "lengths", "page_size"),
    [
        *(case[:6] for case in DECODE),
        (1024, None, None, (8, 4, 256), [3000, 1023, 1024, 500], 64),  # Gemma 3 4B
        (4096, 144**-0.5, 50.0, (32, 16, 128), [12000, 4096, -1, 100], 64),  # Gemma 2 27B
        (512, None, 30.0, (16, 8, 128), [3 * i for i in range(140)], 64),  # teams of a warp
    ],
)
@pytest.mark.parametrize("layout", cache_layouts.names())
def test_decode_sees_its_window(layout, window, scale, softcap, sizes, lengths, page_size):
    check_decode(layout, window, scale, softcap, sizes, lengths, page_size, jax.jit)


@unless_refused(
    lambda impl, sizes, page_size, window: (
        impl,
        prefill_problem(*sizes, page_size, "bfloat16", window=window),
    )
)
@pytest.mark.parametrize(
    ("window", "scale", "softcap", "sizes", "depth", "page_size"),
    [
        *PREFILL,
        (1024, None, None, (8, 4, 256), 2500, 64),
        (4096, 144**-0.5, 50.0, (4, 2, 128), 9000, 64),  # with 32 heads numpy would take minutes
    ],
)
@pytest.mark.parametrize("impl", ["prefill_sm90", "prefill_sm80"])
@pytest.mark.parametrize("tokens", [140, 600])
def test_prefill_sees_its_windows(impl, window, scale, softcap, sizes, depth, page_size, tokens):
    check_prefill(impl, window, scale, softcap, sizes, depth, page_size, tokens)


@pytest.mark.parametrize("case", SINKS)
@pytest.mark.parametrize("layout", cache_layouts.names())
def test_decode_has_sinks(layout, case):
    *case, _ = case
    check_decode(layout, *case, compiled=jax.jit, sinks=jnp.asarray(sinks_for(case[3][0])))


@unless_refused(
    lambda impl, layout, window, heads: (
        impl,
        prefill_problem(*heads, 64, 64, layout, window=window, sinks=True),
    )
)
@pytest.mark.parametrize("impl", ["prefill_sm90", "prefill_sm80"])
@pytest.mark.parametrize("layout", ["float16", "int8"])
@pytest.mark.parametrize(("window", "heads"), [(None, (8, 1)), (128, (64, 8)), (40, (3, 1))])
def test_prompts_have_sinks(impl, layout, window, heads):
    sinks = jnp.asarray(sinks_for(heads[0]))
    check_prefill(impl, window, None, None, (*heads, 64), 300, 64, 300, layout, sinks)


@unless_refused(lambda impl: (impl, prefill_problem(4, 2, 128, 64, "int8", window=100)))
@pytest.mark.parametrize("impl", ["prefill_sm90", "prefill_sm80"])
def test_prompts_read_the_windows_of_a_cache_of_bytes(impl):
    check_prefill(impl, 100, 0.1, 5.0, (4, 2, 128), 400, 64, 300, layout="int8")
