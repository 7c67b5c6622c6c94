"""Windows, scales, softcaps and sinks of scores: every kernel of attention against numpy in float64, on a
cache that stores a window's pages as a ring. What lies outside of a row's window is large, and would be
seen."""

import functools
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import attend, cache_layouts, device, problems
from pallas_kernels.attention import prefill_pages, prefill_sm80, prefill_sm90
from pallas_kernels.attention.reference import attention_within
from tests.pallas_kernels.interpreted import interpreted
from tests.pallas_kernels.lockstep import lockstep
from tests.pallas_kernels.naive_attention import naive_attention
from tests.pallas_kernels.stacks import numbers_of, pages_of
from tests.pallas_kernels.test_cache_layouts import ROUNDING
from tests.refused_cases import unless_refused

OUTSIDE = 1e4  # stored where no query may look
KERNELS = {"prefill_sm80": prefill_sm80.run_stored, "prefill_sm90": prefill_sm90.run_stored}


def ring(rng, layout, positions, window, page_size, heads, head_dim):
    """Pages of keys and of values of two layers, the block table, and what the second layer stores of each
    row, float64 [rows, tokens, heads, head_dim], as keys and as values.

    positions  [B, T]; -1: padding. With a window, a row's table repeats as many pages as its queries see.
    """
    rows, last = len(positions), int(positions.max())
    width = used = last // page_size + 2
    if window is not None:
        used = min(width, -(-(window + positions.shape[1] - 2) // page_size) + 1)
    table = rng.permutation(rows * used).reshape(rows, used)[:, np.arange(width) % used]
    stored, tokens = [], np.arange(last + 1)
    for _ in "kv":
        numbers = rng.standard_normal((rows, last + 1, heads, head_dim)).astype(np.float32)
        pages = np.full((2, rows * used, page_size, heads, head_dim), OUTSIDE, np.float32)
        for row, own in enumerate(positions):
            seen = own[own >= 0]
            if seen.size:
                first = 0 if window is None else max(0, seen.min() - window + 1)
                at = tokens[first : seen.max() + 1]
                pages[1, table[row, at // page_size], at % page_size] = numbers[row, at]
        pages = pages_of(layout, pages)
        exact = np.float64(numbers_of(pages))[1]
        stored.append((pages, exact[table][:, tokens // page_size, tokens % page_size]))
    (k_pages, keys), (v_pages, values) = stored
    return k_pages, v_pages, table.astype(np.int32), keys, values


# Windows of one key, of less than a page, of whole pages, of a block's keys, of several splits, and of more
# than a row has; rows of up to three windows, without keys and without a query.
DECODE = [
    (1, None, None, (4, 2, 64), [0, 3, 32, -1], 16, 8),
    (5, 0.3, None, (4, 1, 128), [3, 4, 5, 15], 16, 12),
    (16, None, 3.0, (4, 2, 64), [15, 16, 47, -1], 16, 8),
    (17, 0.2, 2.0, (6, 1, 256), [51, 16, 17], 16, 8),
    (64, None, None, (4, 1, 128), [191, 63, 64, 130], 64, 12),
    (100, 0.1, 5.0, (7, 1, 64), [300, 99, 100], 24, 9),
    (128, None, 1.0, (8, 1, 64), [383, 127], 64, 12),
    (129, None, None, (2, 2, 64), [386, 0, 128], 16, 12),
    (300, 0.2, None, (4, 1, 128), [900, 299], 16, 8),
    (300, None, 4.0, (6, 1, 256), [450, -1], 64, 4),
    (1000, None, 2.0, (4, 2, 64), [250, 17], 64, 12),
    (None, 0.05, 0.5, (4, 1, 128), [257, 5], 64, 6),
    # More rows than blocks at once: teams of a warp, and of four.
    (20, None, 2.0, (4, 1, 128), [59, 0, -1, 33, 16, 300, 7], 16, 1),
    (70, 0.3, None, (4, 1, 64), [209, 300, -1], 64, 2),
]
LAYOUTS = cache_layouts.names()


def check_decode(
    layout, window, scale, softcap, sizes, lengths, page_size, compiled=lambda f: f, sinks=None
):  # fmt: skip
    """The kernel, `compiled`, against numpy; heads of 256 have gates."""
    (H, Hkv, D), gated = sizes, sizes[2] == 256
    rng, B, positions = np.random.default_rng(H + D + page_size), len(lengths), np.array(lengths)[:, None]
    k_pages, v_pages, table, keys, values = ring(rng, layout, positions, window, page_size, Hkv, D)
    qkv = rng.standard_normal((B, 1, (1 + gated) * H + 2 * Hkv, D)).astype(np.float32)
    op = functools.partial(
        attend, rotation=(np.ones((B, 1, D // 2), np.float32), np.zeros((B, 1, D // 2), np.float32)),
        interleaved=False, norms=(None, None), eps=1e-6, num_keys=table.shape[1] * page_size, impl="decode",
        window=window, scale=scale, softcap=softcap, gated=gated, sinks=sinks,
    )  # fmt: skip
    out, *_ = compiled(op)(qkv.reshape(B, 1, -1), k_pages, v_pages, table, positions.astype(np.int32), 1)
    as_stored = lambda x: np.float64(numbers_of(pages_of(layout, x[None])))[0]  # noqa: E731
    rotate, new = cache_layouts.get(layout).rotate, qkv[:, 0, -2 * Hkv :]
    q = qkv[:, :, : (1 + gated) * H].reshape(B, 1, H, 1 + gated, D)
    for row, length in enumerate(lengths):
        if length >= 0:
            keys[row, length] = as_stored(np.asarray(rotate(new[row, :Hkv])))
            values[row, length] = as_stored(new[row, Hkv:])
        query, own = np.float64(rotate(q[row, :, :, 0])), None if sinks is None else sinks[1]
        want = naive_attention(query, keys[row], values[row], positions[row], window, scale, softcap, own)
        want = want / (1 + np.exp(-np.float64(q[row, :, :, 1]))) if gated else want
        np.testing.assert_allclose(
            out[row, 0], want.reshape(-1), atol=max(5e-5, 1.28 * ROUNDING[layout]), rtol=1e-5
        )


@pytest.mark.parametrize(
    ("layout", "window", "scale", "softcap", "sizes", "lengths", "page_size", "most"),
    [(layout, *case) for i, layout in enumerate(LAYOUTS) for j, case in enumerate(DECODE) if (i + j) % 2],
)
def test_decode_sees_its_window(layout, window, scale, softcap, sizes, lengths, page_size, most):
    with lockstep(), mock.patch.object(device, "multiprocessors", lambda: most):
        check_decode(layout, window, scale, softcap, sizes, lengths, page_size)


def sinks_for(heads):
    """Of two layers, the first not a number: beside every size of scores, and far above and below them."""
    sinks = np.resize(np.array([0.5, 3.0, -2.0, 9.0, -40.0, 60.0], np.float32), heads)
    return np.stack([np.full_like(sinks, np.nan), sinks])


# One split and several, a ring, teams of a warp and of four, gates, heads in two columns and in one.
SINKS = [
    (None, None, None, (4, 1, 64), [300, 5, 0, -1], 16, 8),
    (20, None, None, (8, 1, 64), [59, 0, -1, 300], 16, 12),
    (300, 0.2, 3.0, (6, 1, 256), [900, 299], 16, 8),
    (70, 0.3, None, (4, 1, 64), [209, 300, -1], 64, 2),
    (20, None, 2.0, (4, 1, 128), [59, 0, -1, 33, 16, 300, 7], 16, 1),
]


@pytest.mark.parametrize(
    ("layout", "window", "scale", "softcap", "sizes", "lengths", "page_size", "most"),
    [(LAYOUTS[i % len(LAYOUTS)], *case) for i, case in enumerate(SINKS)],
)
def test_decode_has_sinks(layout, window, scale, softcap, sizes, lengths, page_size, most):
    with lockstep(), mock.patch.object(device, "multiprocessors", lambda: most):
        check_decode(
            layout, window, scale, softcap, sizes, lengths, page_size, sinks=sinks_for(sizes[0])
        )  # fmt: skip


PREFILL = [
    (1, None, None, (2, 1, 64), 150, 64),
    (40, None, None, (2, 2, 64), 150, 64),
    (64, 0.3, 2.0, (2, 1, 128), 200, 128),
    (100, None, 3.0, (3, 1, 64), 310, 64),
    (128, None, None, (2, 1, 64), 400, 64),
    (200, 0.2, None, (2, 1, 256), 300, 64),
    (1000, None, 2.0, (2, 1, 64), 140, 64),
    (None, 0.3, 2.0, (2, 1, 64), 140, 64),
]


def check_prefill(
    impl, window, scale, softcap, sizes, depth, page_size, T, layout="bfloat16", sinks=None
):  # fmt: skip
    """A prompt's chunk of T tokens after `depth`, a shorter one, and padding, against numpy."""
    (H, Hkv, D), rng = sizes, np.random.default_rng(depth)
    positions = np.where(np.arange(T) < np.array([[T], [37]]), np.array([[depth], [5]]) + np.arange(T), -1)
    k_pages, v_pages, table, keys, values = ring(rng, layout, positions, window, page_size, Hkv, D)
    q = rng.standard_normal((2, T, H, D)).astype(ml_dtypes.bfloat16).astype(np.float32)
    arguments = q, k_pages, v_pages, table, positions.astype(np.int32), 1
    rest = {"num_keys": depth + T, "window": window, "scale": scale, "softcap": softcap}
    got = np.float64(KERNELS[impl](*arguments, **rest, sinks=sinks))
    own = None if sinks is None else sinks[1]
    rounding = ROUNDING["float16" if layout == "int8" else layout]
    for row in (0, 1):
        want = naive_attention(q[row], keys[row], values[row], positions[row], window, scale, softcap, own)
        assert np.linalg.norm(got[row] - want) < 1.024 * rounding * np.linalg.norm(want)
        assert not got[row][positions[row] < 0].any()


def prefill_layout(window):
    return "float16" if window in (40, 100) else "bfloat16"


@unless_refused(
    lambda impl, sizes, page_size, window: (
        impl,
        problems.Attention("sm_90", "prefill", *sizes, page_size, prefill_layout(window), window),
    )
)
@pytest.mark.parametrize("impl", ["prefill_sm90", "prefill_sm80"])
@pytest.mark.parametrize(("window", "scale", "softcap", "sizes", "depth", "page_size"), PREFILL)
def test_prefill_sees_its_windows(impl, window, scale, softcap, sizes, depth, page_size):
    with interpreted():
        layout = prefill_layout(window)
        check_prefill(impl, window, scale, softcap, sizes, depth, page_size, 140, layout)


@pytest.mark.parametrize("impl", ["prefill_sm90", "prefill_sm80"])
@pytest.mark.parametrize(
    ("window", "softcap", "heads", "depth"), [(None, 3.0, (2, 1), 90), (128, None, (3, 1), 150)]
)
def test_prefill_has_sinks(impl, window, softcap, heads, depth):
    with interpreted():
        sinks = sinks_for(heads[0])
        check_prefill(impl, window, None, softcap, (*heads, 64), depth, 64, 140, "float16", sinks)


def without_pages(pages, table, row, count):
    """Pages of which the first `count` of a row are not numbers."""
    pages = np.array(pages)
    pages[:, table[row, :count]] = np.nan
    return pages


@pytest.mark.parametrize("most", [1, 8])
def test_decode_does_not_read_pages_before_the_window(most):
    H, Hkv, D, page_size, window, length = 4, 2, 64, 16, 50, 300
    rng, positions = np.random.default_rng(0), np.array([[length]], np.int32)
    k_pages, v_pages, table, *_ = ring(rng, "float32", positions, None, page_size, Hkv, D)
    op = functools.partial(
        attend, rng.standard_normal((1, 1, (H + 2 * Hkv) * D)).astype(np.float32),
        rotation=(np.ones((1, 1, D // 2), np.float32), np.zeros((1, 1, D // 2), np.float32)),
        interleaved=False, norms=(None, None), eps=1e-6, num_keys=320, impl="decode", window=window,
    )  # fmt: skip
    cut = [without_pages(pages, table, 0, (length - window + 1) // page_size) for pages in (k_pages, v_pages)]
    with lockstep(), mock.patch.object(device, "multiprocessors", lambda: most):
        want, got = (op(*pages, table, positions, 1)[0] for pages in ((k_pages, v_pages), cut))
    np.testing.assert_array_equal(got, want)
    assert np.isfinite(got).all()


@pytest.mark.parametrize("impl", ["prefill_sm90", "prefill_sm80"])
def test_prefill_does_not_read_pages_before_the_windows(impl):
    T, depth, window = 140, 500, 100
    rng, positions = np.random.default_rng(1), np.arange(depth, depth + T, dtype=np.int32)[None]
    k_pages, v_pages, table, *_ = ring(rng, "float16", positions, None, 64, 1, 64)
    q = rng.standard_normal((1, T, 2, 64)).astype(np.float32)
    first = (depth - window + 1) // 128 * 2  # steps have 128 keys at most
    cut = [without_pages(pages, table, 0, first) for pages in (k_pages, v_pages)]
    rest = {"num_keys": depth + T, "window": window, "scale": None, "softcap": None}
    with interpreted():
        want, got = (
            np.asarray(KERNELS[impl](q, *pages, table, positions, 1, **rest))
            for pages in ((k_pages, v_pages), cut)
        )
    np.testing.assert_array_equal(got, want)
    assert np.isfinite(got).all()


@pytest.mark.parametrize(("window", "page_size"), [(1, 64), (70, 24), (200, 256), (1000, 64)])
def test_prefill_gets_the_pages_of_its_windows_as_float16(window, page_size):
    rng, T = np.random.default_rng(window), 30
    positions = np.where(
        np.arange(T) < np.array([[T], [9], [0]]), np.array([[400], [3], [0]]) + np.arange(T), -1
    )
    k_pages, v_pages, table, *stored = ring(rng, "int8", positions, window, page_size, 2, 64)
    with lockstep():
        *got, table, layer = prefill_pages.as_float16(
            k_pages, v_pages, table, positions.astype(np.int32), 1, window
        )
    for pages, exact in zip(got, stored, strict=True):
        for row, own in enumerate(positions):
            # From the first that a kernel visits, steps of 128 keys.
            start, stop = max(0, own[0] - window + 1) // 128 * 128, own.max() + 1
            tokens = np.arange(start, stop)
            lies = np.float64(pages)[layer, table[row, tokens // page_size], tokens % page_size]
            np.testing.assert_allclose(lies, exact[row][start:stop], rtol=2**-11, atol=2**-25)
            before = np.arange(start // page_size)
            assert np.isnan(np.asarray(pages)[layer, table[row, before]]).all()  # not even written


@pytest.mark.parametrize(
    "scores", [{}, {"window": 3, "scale": 0.3, "softcap": 2.0, "sinks": True}], ids=["plain", "all"]
)
def test_whole_sequences_need_no_pages(scores):
    B, T, H, Hkv, D = 2, 9, 4, 2, 64
    rng = np.random.default_rng(0)
    positions = np.where(np.arange(T) < np.array([[T], [5]]), np.arange(T), -1).astype(np.int32)
    q, k, v = (rng.standard_normal((B, T, heads, D)).astype(np.float32) for heads in (H, Hkv, Hkv))
    sinks = rng.standard_normal((2, H)).astype(np.float32) if scores.get("sinks") else None
    got = attention_within(q, k, v, positions, 1, **scores | {"sinks": sinks})
    own = scores | {"sinks": None if sinks is None else sinks[1]}
    for row in range(B):
        want = naive_attention(*(np.float64(x[row]) for x in (q, k, v)), positions[row], **own)
        np.testing.assert_allclose(got[row], want, atol=1e-5)
