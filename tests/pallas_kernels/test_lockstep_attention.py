"""Decode attention in numpy (lockstep) against the reference; what prefill's attention by mma brings."""

import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import attend, cache_layouts, device
from pallas_kernels.attention import attention, decode, empty_workspace, prefill, prefill_pages, prefill_sm80
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import index, integer
from pallas_kernels.matmul.bit_mma import activations as activations_int8
from tests.pallas_kernels.lockstep import lockstep
from tests.pallas_kernels.stacks import numbers_of, pages_of
from tests.pallas_kernels.test_cache_layouts import ROUNDING, UNITS, room

attend_jit = jax.jit(
    attend, static_argnames=("interleaved", "eps", "gated", "scale", "norms_after_rope", "softcap", "window")
)


def problem(H, Hkv, D, lengths, page_size, layout, interleaved, normed, tokens=1):
    """Arguments of `attend` for one token a row.

    lengths  keys that each row has stored; -1: the row has ended
    tokens   neighbouring rows that belong to one sequence
    """
    rng = np.random.default_rng(D + H + page_size)
    L, B, pages = 2, len(lengths), -(-(max(lengths) + 1) // page_size) + 1
    sequences = B // tokens
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    qkv = draw(B, 1, (H + 2 * Hkv) * D)
    table = rng.permutation(sequences * pages).reshape(sequences, pages)
    k_pages, v_pages = (
        np.array(rng.standard_normal((L, sequences * pages, page_size, Hkv, D)), np.float32) for _ in range(2)
    )
    for row, length in enumerate(lengths[::tokens]):  # behind its keys lies what would be seen in its output
        for j in range(max(length, 0), pages * page_size):
            for cache in (k_pages, v_pages):
                cache[:, table[row, j // page_size], j % page_size] = 1e4
    table, positions = np.repeat(table, tokens, axis=0), np.asarray(lengths)
    pairs = 32 if D == 256 else D // 2  # the widest heads are those of which only a part is turned
    angle = np.float32(positions[:, None, None] * 10000.0 ** (-np.arange(pairs) / pairs))
    rest = {
        "rotation": (np.cos(angle), np.sin(angle)),
        "interleaved": interleaved,
        "norms": (1 + 0.1 * draw(L, D), 1 + 0.1 * draw(L, D)) if normed else (None, None),
        "eps": 1e-6,
        "num_keys": pages * page_size,
    }
    pages = [pages_of(layout, cache) for cache in (k_pages, v_pages)]
    if D == 256:  # and which have gates
        qkv = np.concatenate([draw(B, 1, H * D), qkv], axis=-1)
        rest["gated"] = True
    return (qkv, *pages, table.astype(np.int32), positions[:, None].astype(np.int32), 1), rest


# Blocks of 8 warps, of four, of teams of a warp, and those that do not make whole groups.
@pytest.mark.parametrize(
    ("H", "Hkv", "D", "most"), [(4, 1, 128, 4), (8, 2, 64, 3), (4, 1, 128, 1), (8, 8, 64, 16)]
)
def test_attention_in_lockstep_adds_parts_and_rounds_what_it_makes(H, Hkv, D, most):
    args, rest = problem(H, Hkv, D, [129, 0, -1, 33, 7], 16, "float16", False, True)
    qkv, *pages, table, positions, layer = args
    rng = np.random.default_rng(0)
    parts = np.zeros((3, 16, qkv.shape[-1]), np.float32)
    parts[:, :5] = rng.standard_normal((3, 5, qkv.shape[-1]))
    qkv = parts[0, :5] + parts[1, :5] + parts[2, :5]
    angles = tuple(r[:, 0] for r in rest["rotation"])
    with lockstep(), mock.patch.object(device, "multiprocessors", lambda: most):
        behind = (*pages, table, positions[:, 0], layer, *angles, rest["norms"], None, 1e-6, False)
        want, *want_pages, _ = decode.decode_attention(qkv, *behind)
        got, *got_pages, _ = decode.decode_attention(parts, *behind, integers=True)
        begins = np.cumsum([0, H * D, Hkv * D, Hkv * D])
        beside = [parts[..., i:j] for i, j in itertools.pairwise(begins)]
        beside[2] = np.concatenate([beside[2], 0 * beside[2]])  # of more splits than the others
        apart, *_ = decode.decode_attention(beside, *behind)
        np.testing.assert_array_equal(apart, want)
        want = activations_int8.activations_int8(want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[:, :, :5], np.asarray(b)[:, :, :5])
    for a, b in zip(got_pages, want_pages, strict=True):
        np.testing.assert_array_equal(numbers_of(a), numbers_of(b))


@pytest.mark.parametrize("most", [1, 2, 4, 40])  # teams of one warp and of four; blocks of 8 warps; splits
def test_nothing_is_read_that_no_token_has_stored(most):
    """A page is used again as the sequence before left it, perhaps with NaN, and 0 * NaN is NaN. Lengths are
    whole pages, too, whose new key is the first of a page."""
    args, rest = problem(4, 1, 128, [16, 32, 129, 64, 1, 15, 300], 16, "float16", False, True)
    qkv, *pages, table, positions, layer = args
    unset = [jnp.where(page == 1e4, jnp.nan, page) for page in pages]
    assert all(np.isnan(page).any() for page in unset)
    angles = tuple(r[:, 0] for r in rest["rotation"])
    behind = table, positions[:, 0], layer, *angles, rest["norms"], None, 1e-6, False
    with lockstep(), mock.patch.object(device, "multiprocessors", lambda: most):
        want, got = (decode.decode_attention(qkv[:, 0], *own, *behind)[0] for own in (pages, unset))
    np.testing.assert_array_equal(got, want)


SHAPES = [
    (2, 2, 64, [0, 1, 15, 16, 17, -1, 127, 128], 16, False, True, 8),
    (4, 2, 64, [300, 5], 64, True, False, 12),
    (4, 2, 64, [255], 24, False, False, 5),  # so few keys have one split
    (4, 1, 128, [129, 257], 16, False, True, 6),
    (7, 1, 64, [300, -1], 24, True, True, 6),
    (7, 1, 128, [257], 64, True, True, 3),
    (8, 1, 64, [300, 16], 64, False, True, 12),  # two blocks for a KV head
    (8, 1, 128, [256], 24, False, False, 4),
    (6, 1, 256, [129, -1], 64, False, True, 3),  # values behind the scores
    (6, 1, 256, [257], 24, False, False, 4),
    # Splits of which warps visit more keys than are on their way at once.
    (4, 1, 128, [1100, 330], 16, False, True, 4),
    (2, 1, 64, [1100], 24, True, False, 2),
    # More rows than blocks at once: teams of a warp, of which the last block lacks some, and of four.
    (4, 1, 128, [129, 0, -1, 33, 16, 300, 7], 16, False, True, 1),
    (2, 1, 64, [129, 0, -1, 33, 16, 300, 7], 24, True, False, 1),
    (4, 1, 64, [129, 300, -1], 64, False, True, 2),
    # The same, an odd number of heads to a warp, as SmolLM2 and models without grouped heads have.
    (3, 1, 64, [129, 0, -1, 33, 16, 300, 7], 16, False, True, 1),
    (2, 2, 64, [129, 0, -1, 33, 300], 16, True, False, 1),
]
# Each layout has every second shape.
CASES = [(n, *s) for i, n in enumerate(cache_layouts.names()) for j, s in enumerate(SHAPES) if (i + j) % 2]
# Splits of at most 128 keys, whose warps share out a head's dimensions (decode_values.py).
FEW_KEYS = [
    (4, 1, 128, [200, 100, 5, -1], 16, False, True, 12),
    (7, 1, 128, [250, 17], 64, True, True, 8),
]
CASES += [(n, *s) for n in ("bfloat16", "float16", "int8") for s in FEW_KEYS]
CASES += [("float16", 2, 1, 64, [3300], 64, False, False, 70)]  # 35 splits: a lane has two of them


@pytest.mark.parametrize(
    ("layout", "H", "Hkv", "D", "lengths", "page_size", "interleaved", "normed", "most"), CASES
)
def test_attention_in_lockstep_is_the_reference(
    layout, H, Hkv, D, lengths, page_size, interleaved, normed, most
):
    sizes = H, Hkv, D, lengths, page_size, layout, interleaved, normed
    check(most, layout, lengths, page_size, *problem(*sizes))


def test_a_row_has_the_same_bits_whatever_its_context():
    """A row has as many splits as its keys need, not as many as its context has room for."""
    args, rest = problem(4, 1, 128, [200], 16, "float16", False, True)
    qkv, *pages, table, positions, layer = args
    angles = tuple(r[:, 0] for r in rest["rotation"])
    behind = positions[:, 0], layer, *angles, rest["norms"], None, 1e-6, False
    short, long = table, np.pad(table, ((0, 0), (0, 100)))
    with lockstep(), mock.patch.object(device, "multiprocessors", lambda: 40):
        want, got = (decode.decode_attention(qkv[:, 0], *pages, t, *behind)[0] for t in (short, long))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    # Multiprocessors for two blocks with one split each; keys with the new one; whether splits meet.
    ("most", "keys", "meet"),
    [(5, 256, False), (5, 257, True), (6, 129, True), (6, 128, False), (3, 300, False)],
)
def test_splits_meet_sooner_where_a_row_has_three_blocks(most, keys, meet):
    """What they exchange goes through the workspace. In a short context two of the three have keys."""
    args, rest = problem(4, 2, 64, [keys - 1], 32, "float16", False, True)
    qkv, *pages, table, positions, layer = args
    angles = tuple(r[:, 0] for r in rest["rotation"])
    with lockstep(), mock.patch.object(device, "multiprocessors", lambda: most):
        for more in (0, 8):  # pages
            wider = np.pad(table, ((0, 0), (0, more)))
            behind = (*pages, wider, positions[:, 0], layer, *angles, rest["norms"], None, 1e-6, False)
            *_, workspace = decode.decode_attention(qkv[:, 0], *behind)
            assert np.any(np.asarray(workspace)) == meet


def check(most, layout, lengths, page_size, args, rest, tokens=1):
    """The kernel in lockstep, on a GPU with this number of multiprocessors, against the reference."""
    want = attend_jit(*args, **rest)
    with lockstep(), mock.patch.object(device, "multiprocessors", lambda: most):
        got = attend(*args, **rest, tokens=tokens, impl="decode")
    # Products of operands of 16 bits of mantissa. What is stored of a new key may be the neighbour of the
    # reference's, where it is near the middle of two.
    rounding, table = ROUNDING[layout], np.asarray(args[3])
    np.testing.assert_allclose(got[0], want[0], atol=max(3e-5, 1.28 * rounding), rtol=1e-5)
    for pages_got, pages_want in zip(got[1:3], want[1:3], strict=True):
        a, b = (np.array(numbers_of(pages)) for pages in (pages_got, pages_want))
        for row, j in enumerate(lengths):
            if j >= 0:
                new = 1, table[row, j // page_size], j % page_size
                assert (
                    np.abs(a[new] - b[new]) <= 1e-6 + 1e-5 * np.abs(b[new]) + 2 * room(layout, b[new])
                ).all()
                a[new] = b[new]
        np.testing.assert_array_equal(a, b)


TOGETHER = [
    # H, Hkv, D, tokens of each sequence, its first positions, tokens that are read, page size, ..., blocks
    (4, 2, 64, 2, [0], [2], 16, False, True, 8),
    (4, 1, 128, 4, [0, 14], [4, 3], 16, True, True, 5),  # from 14 on: the pages' and the visits' border
    (4, 2, 64, 8, [0], [8], 16, True, False, 9),  # more keys and values than a round of warps makes
    (4, 2, 64, 8, [124], [8], 64, False, True, 33),  # from one split to several; the split's border
    (4, 2, 64, 4, [509, 30], [4, 2], 16, False, True, 30),
    (4, 1, 64, 8, [250], [5], 24, False, False, 20),  # pages without whole 16
    (8, 1, 64, 2, [300, 15, 0, 1], [2, 1, 0, 2], 64, False, True, 24),
    (6, 1, 256, 4, [127], [4], 64, False, True, 6),  # from memory
    (6, 1, 256, 2, [130, 22], [2, 2], 24, False, False, 4),
    # Teams of a warp, and of four.
    (4, 1, 128, 4, [129, 14], [4, 3], 16, False, True, 1),
    (2, 1, 64, 8, [13], [8], 24, True, False, 1),
    (4, 1, 64, 2, [127, 300, 0], [2, 2, 0], 64, False, True, 3),
]


@pytest.mark.parametrize("case", [(n, *s) for s in TOGETHER for n in cache_layouts.names()], ids=str)
def test_rows_of_one_sequence_see_the_keys_of_those_before(case):
    """Which other blocks store in the same launch."""
    layout, H, Hkv, D, tokens, firsts, counts, page_size, interleaved, normed, most = case
    lengths = [
        first + t if t < count else -1
        for first, count in zip(firsts, counts, strict=True)
        for t in range(tokens)
    ]
    sizes = H, Hkv, D, lengths, page_size, layout, interleaved, normed
    check(most, layout, lengths, page_size, *problem(*sizes, tokens), tokens)


@pytest.mark.parametrize("D", [64, 256])
@pytest.mark.parametrize("normed", [True, False])
def test_without_a_rope_nothing_is_rotated(D, normed):
    """Angles of 0, in the reference; and the kernel, which is given no cosines and sines."""
    args, rest = problem(4, 2, D, [129, -1, 7], 16, "float32", False, normed)
    cos, sin = rest["rotation"]
    want = attend_jit(*args, **rest | {"rotation": (np.ones_like(cos), np.zeros_like(sin))})
    rest["rotation"] = None
    for name, array in enumerate(attend_jit(*args, **rest)[:3]):
        np.testing.assert_array_equal(array, want[name])
    with lockstep(), mock.patch.object(device, "multiprocessors", lambda: 2):
        out, *pages, _ = attend(*args, **rest, impl="decode")
    np.testing.assert_allclose(out, want[0], atol=3e-5, rtol=1e-5)
    np.testing.assert_allclose(pages, want[1:3], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("H, change", [(4, {"norms_after_rope": True}), (2, {"temperature": 1.7})])
def test_the_kernel_is_given_queries_and_keys_that_it_would_not_prepare_itself(H, change):
    """Beside numpy: QK-norm after the rope, and a temperature, which is a factor on scores."""
    D, lengths = 64, [40, -1, 7]
    args, rest = problem(H, 2, D, lengths, 16, "float32", False, True)
    qkv, positions, (cos, sin) = args[0], args[4], rest["rotation"]
    if "temperature" in change:
        change = {"temperature": np.full(positions.shape, change["temperature"], np.float32)}
        want = attend_jit(*args, **rest, scale=1.7 * D**-0.5)
    else:
        x = np.float64(qkv).reshape(3, 1, H + 4, D)
        a, b = np.split(x[:, :, : H + 2], 2, axis=-1)
        cos, sin = cos[:, :, None], sin[:, :, None]
        x[:, :, : H + 2] = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        plain = {"rotation": None, "norms": rest["norms"]}
        want = attend_jit(np.float32(x).reshape(qkv.shape), *args[1:], **rest | plain)
    reference = attend_jit(*args, **rest, **change)
    np.testing.assert_allclose(reference[0], want[0], atol=1e-5, rtol=1e-5)
    with lockstep(), mock.patch.object(device, "multiprocessors", lambda: 2):
        out, *pages, _ = attend(*args, **rest, **change, impl="decode")
    np.testing.assert_allclose(out, want[0], atol=3e-5, rtol=1e-5)
    np.testing.assert_allclose(pages, want[1:3], atol=1e-5, rtol=1e-5)


def softmax_of_exact(qkv, k_pages, v_pages, table, length, H, Hkv, D):
    """One row's attention in float64, of numbers that no cache has rounded; without rope."""
    q, k, v = np.split(np.float64(qkv).reshape(-1, D), (H, H + Hkv))
    k_pages, v_pages = (
        np.float64(pages)[1, table].reshape(-1, Hkv, D)[:length] for pages in (k_pages, v_pages)
    )
    keys, values = (np.concatenate([old, new[None]]) for old, new in ((k_pages, k), (v_pages, v)))
    scores = np.einsum("hd,shd->hs", q, np.repeat(keys, H // Hkv, axis=1)) / np.sqrt(D)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hs,shd->hd", weights, np.repeat(values, H // Hkv, axis=1)).reshape(-1)


@pytest.mark.parametrize("layout", cache_layouts.names())
def test_only_the_rounding_of_the_layout_is_lost(layout):
    """Against attention of numbers that are not rounded: errors of so many independent roundings."""
    H, Hkv, D, length = 4, 2, 64, 300
    (qkv, *pages, table, positions, layer), rest = problem(H, Hkv, D, [length], 16, "float32", False, False)
    rest["rotation"] = (np.ones((1, 1, D // 2), np.float32), np.zeros((1, 1, D // 2), np.float32))
    want = softmax_of_exact(qkv[0, 0], *pages, np.asarray(table)[0], length, H, Hkv, D)
    rotate = cache_layouts.get(layout).rotate
    cached = [pages_of(layout, x) for x in (rotate(pages[0]), pages[1])]
    with lockstep(), mock.patch.object(device, "multiprocessors", lambda: 6):
        got = attend(qkv, *cached, table, positions, layer, **rest, impl="decode")[0][0, 0]
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    print(f"{layout}: {error:.2e}")
    # The steps of floats grow with the number; of bytes they are those of a head's largest, about 2.5.
    rounding = ROUNDING[layout] * (2.5 * 1.4 if layout == "int8" else 1)
    assert 0.3 * rounding < error < max(1e-5, 0.6 * rounding)


@pytest.mark.parametrize("layout", cache_layouts.names())
@pytest.mark.parametrize("size", [1e-5, 1e6])
def test_queries_may_be_of_any_size(layout, size):
    """Operands have as many bits of them as of others; keys are such that scores are as ever."""
    H, Hkv, D = 4, 2, 64
    (qkv, k_pages, v_pages, *args), rest = problem(H, Hkv, D, [40, 300], 16, "float32", False, False)
    factors = np.repeat([size, 1 / size, 1], [H * D, Hkv * D, Hkv * D]).astype(np.float32)
    pages = [pages_of(layout, x) for x in (np.asarray(k_pages) / np.float32(size), v_pages)]
    want = attend_jit(qkv * factors, *pages, *args, **rest)
    with lockstep(), mock.patch.object(device, "multiprocessors", lambda: 6):
        got = attend(qkv * factors, *pages, *args, **rest, impl="decode")
    np.testing.assert_allclose(got[0], want[0], atol=max(3e-5, 0.1 * ROUNDING[layout]), rtol=1e-5)


@pytest.mark.parametrize("layout", cache_layouts.names())
def test_a_kernel_stores_what_is_too_large_as_the_reference_does(layout):
    H, Hkv, D = 4, 2, 64
    (qkv, *pages, table, positions, layer), rest = problem(H, Hkv, D, [17, 5], 16, layout, False, False)
    factors = np.repeat([0, 1e6, 1e6], [H * D, Hkv * D, Hkv * D]).astype(np.float32)
    want = attend_jit(qkv * factors, *pages, table, positions, layer, **rest)
    with lockstep(), mock.patch.object(device, "multiprocessors", lambda: 6):
        got = attend(qkv * factors, *pages, table, positions, layer, **rest, impl="decode")
    for row, j in enumerate((17, 5)):
        new = layer, np.asarray(table)[row, j // 16], j % 16
        for a, b in zip(got[1:3], want[1:3], strict=True):
            a, b = (np.asarray(numbers_of(x))[new] for x in (a, b))
            assert np.isfinite(b).all() and np.abs(b).max() > 6e4
            assert (np.abs(a - b) <= 1e-5 * np.abs(b) + 2 * room(layout, b)).all()


def test_layers_of_a_step_share_one_workspace():
    """What the layer before sent is still there, and is not taken for this layer's."""
    args, rest = problem(4, 2, 64, [300, 5], 64, "float32", True, False)
    qkv, *pages, table, positions, _ = args
    want = pages
    with lockstep(), mock.patch.object(device, "multiprocessors", lambda: 12):
        workspace = empty_workspace(2, 4, args[1])
        for layer in (0, 1):
            out, *pages, workspace = attend(
                qkv * (1 + layer), *pages, table, positions, layer, **rest, impl="decode", workspace=workspace
            )
            assert set(np.unique(np.asarray(workspace) & 3)) == {0, layer + 1}  # 0: of splits that no row has
            expected, *want, _ = attend_jit(qkv * (1 + layer), *want, table, positions, layer, **rest)
            np.testing.assert_allclose(out, expected, atol=3e-5, rtol=1e-5)


def test_a_workspace_that_is_too_small_is_refused():
    args, rest = problem(4, 2, 64, [300, 5], 64, "float32", True, False)
    refused = pytest.raises(ValueError, match="workspace has 100 words, but 1584 are exchanged")
    with lockstep(), mock.patch.object(device, "multiprocessors", lambda: 12), refused:
        attend(*args, **rest, impl="decode", workspace=empty_workspace(2, 4, args[1])[:100])


@pytest.mark.parametrize(("D", "Hkv", "page_size"), [(128, 2, 64), (64, 3, 24), (64, 1, 256)])
def test_prefill_gets_what_rows_see_of_bytes_as_float16(D, Hkv, page_size):
    rng = np.random.default_rng(D + Hkv)
    width, lengths = -(-300 // page_size), np.array([300, 130, 0])
    numbers = rng.standard_normal((2, 2, 3 * width, page_size, Hkv, D)).astype(np.float32)
    numbers[0, 1, :, 0] *= 1e6
    pages = [pages_of("int8", x) for x in numbers]
    table = rng.permutation(3 * width).reshape(3, width).astype(np.int32)
    positions = np.where(np.arange(7) < 5, lengths[:, None] - 5 + np.arange(7), -1).clip(-1)
    with lockstep():
        got = jax.device_get(prefill_pages.as_float16(*pages, table, positions.astype(np.int32), 1))
    assert got[3] == 0
    for made, stored in zip(got[:2], pages, strict=True):
        want = np.asarray(jax.jit(cache_layouts.get("float16").quantize)(np.asarray(numbers_of(stored))[1]))
        for row, length in enumerate(lengths):
            seen = [(p, t) for p, t in enumerate(table[row]) if p * page_size < length]
            for p, there in seen:
                np.testing.assert_array_equal(made[0, got[2][row, p]], want[there])
            assert row == 2 or seen
    # What is masked in the last step is multiplied by 0: it must be a number.
    assert np.isfinite(np.asarray(got[0][0, got[2][1]], np.float32).reshape(-1, Hkv, D)[:256]).all()


PROMPTS = {  # H, Hkv, D, layout: changes to the model
    "plain": (4, 2, 64, "int8", {}),
    "normed": (9, 3, 64, "float16", {"normed": True}),
    "neighbours": (8, 2, 128, "bfloat16", {"interleaved": True, "normed": True}),
    "many heads": (40, 8, 128, "int8", {"normed": True}),
    "a part of a head, gated": (3, 1, 256, "float16", {"normed": True, "gated": True, "pairs": 32}),
    "no rope": (2, 1, 128, "bfloat16", {"pairs": 0}),
    "gated, a part by neighbours": (2, 2, 64, "float16", {"gated": True, "interleaved": True, "pairs": 16}),
    "normed behind the rope": (4, 1, 64, "float16", {"normed": True, "norms_after_rope": True}),
    "softcap": (4, 2, 128, "float16", {"softcap": 20.0, "scale": 0.3}),
    "window and sinks": (4, 2, 64, "float16", {"window": 7, "sinks": True}),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_heads_of_prompts_are_the_reference_s(case):
    """What prefill_heads stores and what reaches the kernel of prefill, which its definition replaces here.
    Stored numbers have the same bits, unless one lies halfway between two."""
    H, Hkv, D, layout, change = PROMPTS[case]
    T, page_size = 21, 16
    normed, gated, interleaved = (change.get(name, False) for name in ("normed", "gated", "interleaved"))
    pairs = change.get("pairs", D // 2)
    rng = np.random.default_rng(len(case))
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    pages = [pages_of(layout, draw(2, 8, page_size, Hkv, D)) for _ in range(2)]
    table, lengths = rng.permutation(8).reshape(2, 4).astype(np.int32), np.array([[T], [3]])
    positions = np.where(np.arange(T) < lengths, 10 + np.arange(T), -1).astype(np.int32)
    angle = np.float32(positions[..., None] * 10000.0 ** (-np.arange(pairs) / max(pairs, 1)))
    args = (draw(2, T, ((1 + gated) * H + 2 * Hkv) * D), *pages, table, positions, 1)
    rest = {"rotation": (np.cos(angle), np.sin(angle)) if pairs else None, "interleaved": interleaved}
    rest["norms"] = (1 + 0.1 * draw(2, D), 1 + 0.1 * draw(2, D)) if normed else (None, None)
    rest |= {"eps": 1e-6, "num_keys": 64, "gated": gated}
    rest |= {
        name: change[name] for name in ("norms_after_rope", "softcap", "scale", "window") if name in change
    }
    if change.get("sinks"):
        rest["sinks"] = draw(2, H)
    given = []

    def kernel(q, k_pages, *args):
        *args, scores, sinks = args  # sinks of this layer
        given.append((q.dtype, k_pages.dtype))
        q = q.astype(jnp.float32) / scores.query_factor(D)
        own = {"scale": scores.scale, "softcap": scores.softcap, "window": scores.window}
        own["sinks"] = None if sinks is None else jnp.stack([sinks, sinks])
        return jax.jit(functools.partial(attention, num_keys=64, **own))(q, k_pages, *args)

    want = attend_jit(*args, **rest)
    run = prefill.run_by(prefill.run_stored_by(kernel))
    with lockstep(), mock.patch.object(prefill_sm80, "run", run):
        got = attend(*args, **rest, prefill_impl="prefill_sm80")
    operand = cache_layouts.get(cache_layouts.get(layout).PREFILL)
    assert given == [(operand.DTYPE, operand.DTYPE)]
    seen = positions >= 0
    # The reference does not round queries, and reads a cache of bytes without rounding it to float16.
    out, expected = (np.asarray(x[0])[seen] for x in (got, want))
    lost = np.linalg.norm(out - expected) / np.linalg.norm(expected)
    assert lost < ROUNDING["bfloat16" if layout == "bfloat16" else "float16"]
    for a, b in zip(jax.tree.leaves(got[1:3]), jax.tree.leaves(want[1:3]), strict=True):
        unit, same = UNITS[str(a.dtype)], np.asarray(a) == np.asarray(b)
        assert same.size - same.sum() <= 2, f"{same.size - same.sum()} of {same.size} differ"
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, **unit)
    for a, before in zip(got[1:3], pages, strict=True):
        new = np.any(numbers_of(a) != numbers_of(before), axis=(-2, -1))
        assert new.sum() == T + 3  # the tokens' places of one layer, and no others


@pytest.mark.parametrize(
    ("D", "page_size", "step"),
    [(128, 64, 1), (64, 16, 0), (128, 128, 1), (64, 96, 3), (64, 192, 1), (128, 24, 0)],
)
def test_mma_attention_brings_keys_to_where_it_reads_them(D, page_size, step):
    """64 keys of a head out of their pages, into tiles of 8 keys x 64 dimensions, whose rows' pieces of 16
    bytes are xored with the row. Behind the table's end anything may come."""
    keys, layers, pages, kv_heads, table_pages = prefill_sm80.KEYS, 2, 9, 3, 3
    row, layer, kv_head = 1, 1, 2
    rng = np.random.default_rng(D + step)
    cached = rng.standard_normal((layers, pages, page_size, kv_heads, D)).astype(ml_dtypes.bfloat16)
    table = rng.permutation(pages)[: 2 * table_pages].reshape(2, table_pages).astype(np.int32)

    def body(source, table, out, target):
        numbers = map(integer, (step, row, layer, kv_head))
        prefill_sm80.bring_by_lane(list(numbers), source, table, target)
        memory.commit_copies()
        memory.wait_copies(0)
        lanes.block_barrier()
        words = keys * D // prefill_sm80.THREADS
        first = integer(lanes.thread()) * words
        for i in range(words):
            at = index(first + i)
            memory.store(memory.load(target, at), out, at)

    with lockstep():
        size = (keys * D,)
        kernel = prefill_sm80.plgpu.kernel(
            body, out_type=jax.ShapeDtypeStruct(size, jnp.bfloat16), grid=(1,), num_threads=1,
            scratch_types=[plgpu.SMEM(size, jnp.bfloat16)],
        )  # fmt: skip
        got = np.asarray(kernel(cached, table))
    tokens = step * keys + np.arange(keys)
    there = tokens < table_pages * page_size
    page = table[row, np.minimum(tokens // page_size, table_pages - 1)]
    want = cached[layer, page, tokens % page_size, kv_head].reshape(
        keys // 8, 8, D // 64, 8, 8
    )  # tile, r, half, piece
    r, piece = np.ogrid[:8, :8]
    want = want.transpose(0, 2, 1, 3, 4)[:, :, r, piece ^ r]
    want, got = (x.reshape(keys // 8, D // 64, 8, 64) for x in (want, got))
    there = np.broadcast_to(there.reshape(keys // 8, 1, 8, 1), want.shape)
    np.testing.assert_array_equal(got[there], want[there])
    assert there.any()
