"""What stands before and behind a GEMM, in numpy (lockstep), against the definition: rows to float16 and to
whole numbers, 1-bit weights to bytes, results to where TMA finds them."""

import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import SILU
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.matmul import activations_rotated, prefill, prologue
from pallas_kernels.matmul.bit_mma import activations as activations_int8
from pallas_kernels.matmul.bit_mma import prefill_sm90 as bit_prefill_sm90
from pallas_kernels.matmul.bit_mma.activations import ROTATED_INTEGERS
from pallas_kernels.matmul.bit_mma.weight_bytes import SIGNS, Ternary
from pallas_kernels.matmul.int_mma import activations_float16
from pallas_kernels.matmul.int_mma.activations_float16 import rotated_form
from pallas_kernels.matmul.int_mma.activations_shared import ROTATED_WORDS
from pallas_kernels.norm import rms_norm
from pallas_kernels.rotation import Rotation
from tests.pallas_kernels.lockstep import lockstep
from tests.pallas_kernels.stacks import sylvester
from tests.pallas_kernels.test_gemm import in_group_order

TERNARY = Ternary(2)
SIZES = np.float32([[1e-6], [3.0], [1e8], [0]])  # of rows


def orders(*widths):
    """Int_gemm's where there are whole groups."""
    return [(width, group) for width in widths for group in (None, 16, 32) if not group or width % group == 0]


def first_rows(count: int, arrays) -> list[np.ndarray]:
    """Of arrays that in a GEMM's order have whole eights of rows, and else as many rows as x."""
    assert {len(a) for a in arrays} <= {count, count + -count % 8}
    return [np.asarray(a)[:count] for a in arrays]


# 4 to 32 warps; whole 256 columns, and not.
@pytest.mark.parametrize(("columns", "group"), orders(128, 576, 896, 2560, 4096, 12288, 28672))
def test_rows_in_lockstep_are_scaled_rounded_and_ordered_as_defined(columns, group):
    x = np.random.default_rng(columns).standard_normal((4, columns)).astype(np.float32) * SIZES
    want, scale = map(np.asarray, prefill.scaled_to_half(jnp.asarray(x)))
    with lockstep():
        got, got_scale = first_rows(4, activations_float16.activations_float16(x, group=group))
    np.testing.assert_array_equal(got_scale, scale[:, 0])
    want = in_group_order(want, group) if group else want
    np.testing.assert_array_equal(np.asarray(got).view(np.uint16), want.view(np.uint16))


@pytest.mark.parametrize("columns", [544, 4096])
def test_rows_in_lockstep_are_rounded_once_for_both_orders(columns):
    rng = np.random.default_rng(columns)
    x, gamma = rng.standard_normal((3, columns)), rng.uniform(0.5, 2, (1, columns))
    x, gamma = (v.astype(np.float32) for v in (x, gamma))
    with lockstep():
        of = lambda group: first_rows(  # noqa: E731
            3, activations_float16.activations_float16(x, gamma, None, 1e-6, group=group)
        )
        by_32, by_16, scale = of((32, 16))
        for got, (want, alone) in zip((by_32, by_16), (of(32), of(16)), strict=True):
            np.testing.assert_array_equal(np.asarray(got).view(np.uint16), np.asarray(want).view(np.uint16))
            np.testing.assert_array_equal(scale, alone)


@pytest.mark.parametrize("layer", [None, 1])
@pytest.mark.parametrize(("columns", "group"), orders(256, 576, 896, 2048, 12320, 12416))
def test_rows_in_lockstep_are_normed_as_defined(columns, layer, group):
    rng = np.random.default_rng(columns)
    x = rng.standard_normal((4, columns)).astype(np.float32) * SIZES
    gamma = rng.uniform(0.5, 2, (2, columns)).astype(np.float32)
    want, scale = map(np.asarray, prefill.scaled_to_half(rms_norm(jnp.asarray(x), gamma[layer or 0], 1e-6)))
    index = None if layer is None else np.int32(layer)
    with lockstep():
        made = activations_float16.activations_float16(x, gamma, index, 1e-6, group=group)
    got, got_scale = first_rows(4, made)
    np.testing.assert_array_equal(got_scale, scale[:, 0])
    want = in_group_order(want, group) if group else want
    # The sum of squares is in another order: a few numbers are rounded to the neighbour.
    np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=2e-3, atol=1e-7)
    assert np.mean(np.asarray(got) != want) < 0.01


def by_column(places: np.ndarray, encoding=SIGNS) -> np.ndarray:
    """[.., 128] in the order of activations_int8 -> by columns: place h, p, t, b is column t, h, b, p; for
    ternary weights place h, p, u, t, c, f is column f, p, t, h, u, c."""
    sizes, axes = ((2, 4, 4, 4), (-3, -1, -4, -2))
    if encoding != SIGNS:
        sizes, axes = (2, 2, 2, 4, 2, 2), (-3, -5, -2, -4, -1, -6)
    cut = places.reshape(*places.shape[:-1], *sizes)
    return np.moveaxis(cut, range(-len(sizes), 0), axes).reshape(places.shape)


def in_order(q, scale, rows: int, columns: int, encoding=SIGNS) -> tuple[np.ndarray, np.ndarray]:
    """What activations_int8 makes, as (whole numbers [rows, columns], scales of them [rows, groups])."""
    q, scale = np.asarray(q)[:, :, :rows], np.asarray(scale)
    digits, groups = q.shape[:2]
    m, lane = np.arange(rows), np.arange(8)
    places = q.reshape(digits, groups, rows, 8, 16)[:, :, m[:, None], lane ^ m[:, None] % 8]
    q = by_column(places.reshape(digits, groups, rows, 128), encoding)
    q = q.swapaxes(1, 2).reshape(digits, rows, -1).astype(np.int64)
    assert (q[:, :, columns:] == 0).all()
    place = m & ~14 | (m & 6) << 1 | (m & 8) >> 2
    scale = scale[:, :, place].swapaxes(1, 2)[:, :, : columns // 128]
    if digits == 2:
        np.testing.assert_array_equal(scale[0], 256 * scale[1])
        q = 256 * q[:1] + q[1:] % 256
    return q[0, :, :columns], 64 * scale[-1]


@pytest.mark.parametrize(("bits", "encoding"), [(8, SIGNS), (16, SIGNS), (8, TERNARY)])
@pytest.mark.parametrize("layer", ["no norm", None, 1])
@pytest.mark.parametrize("columns", [128, 896, 4096, 4736, 12288])  # whole fours of groups, and not
def test_rows_in_lockstep_are_whole_numbers_as_in_a_decode_step(columns, layer, bits, encoding):
    rng = np.random.default_rng(columns)
    x = rng.standard_normal((20, columns)).astype(np.float32) * np.resize(SIZES, (20, 1))
    gamma = rng.uniform(0.5, 2, (2, columns)).astype(np.float32)
    normed = layer != "no norm"
    index = np.int32(layer) if layer == 1 else None
    with lockstep():
        norm = (gamma, index, 1e-6) if normed else ()
        made = activations_int8.activations_int8(x, *norm, bits=bits, encoding=encoding)
    assert (
        made[0].shape == (bits // 8, -(-columns // 512) * 4, 32, 128) and made[1].shape == made[0].shape[:3]
    )
    q, scale = in_order(*made, 20, columns, encoding)
    groups = (x * gamma[layer or 0] if normed else x).reshape(20, -1, 128)
    largest, top = np.maximum(np.abs(groups).max(-1), np.float32(1e-20)), np.float32(2 ** (bits - 1) - 1)
    np.testing.assert_array_equal(q, np.rint(groups * (top / largest)[..., None]).reshape(20, columns))
    assert np.abs(q).max() == top
    norm = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6) if normed else 1
    np.testing.assert_allclose(scale, largest.astype(np.float64) / top * norm, rtol=1e-6)


INT8, FLOAT16 = (activations_int8, "activations_int8"), (activations_float16, "activations_float16")
ROUNDINGS = [(*INT8, {}), *((*FLOAT16, {"group": group}) for group in (None, 16, 32))]


@pytest.mark.parametrize(("columns", "residual"), [(4096, True), (896, True), (896, False)])
@pytest.mark.parametrize(("module", "name", "options"), ROUNDINGS, ids=["int8", "float16", "by 16", "by 32"])
def test_parts_are_added_in_order_and_rounded_as_their_sum(module, name, options, columns, residual):
    rng = np.random.default_rng(columns)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    parts, gamma, rows = draw(3, 16, columns), draw(1, columns), 5
    before = draw(rows, columns) if residual else None
    x = parts[0, :rows] if before is None else before + parts[0, :rows]
    for part in parts[1:]:
        x = x + part[:rows]
    with lockstep():
        run = getattr(module, name)
        want = run(x, gamma, None, 1e-6, **options)
        *got, total = run(prologue.Parts(parts, before), gamma, None, 1e-6, rows=rows, **options)
    np.testing.assert_array_equal(total, x)
    of_rows = (slice(None),) * 2 * (not options)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[*of_rows, :rows], np.asarray(b)[*of_rows, :rows])


def test_rows_are_the_same_among_more_than_a_step_has():
    """Whose blocks have fewer warps."""
    x = np.random.default_rng(0).standard_normal((prologue.FEW_ROWS + 1, 2560)).astype(np.float32)
    for module, name in (INT8, FLOAT16):
        with lockstep():
            made = getattr(module, name)
            (many, scales), (few, few_scales) = made(x), made(x[:16])
        np.testing.assert_array_equal(np.asarray(many)[..., :16, :], few)
        np.testing.assert_array_equal(np.asarray(scales)[..., :16], few_scales)


@pytest.mark.parametrize("first", [0, 32])
@pytest.mark.parametrize(("matrices", "added"), [(1, False), (1, True), (2, False)])
def test_results_in_lockstep_lie_transposed_and_swizzled(matrices, added, first):
    """All of them, or the last half. Of a warpgroup: lane 4 g + t of warp w has rows 16 w + g + 8 r and
    tokens 8 j + 2 t + e of its sums. With two matrices r = 0 is row 8 w + g of the gate, r = 1 the same of
    the up projection."""
    tokens, outputs, stored = 64, 64 // matrices, 64 - first
    rng = np.random.default_rng(0)
    sums = rng.standard_normal((64, tokens)).astype(np.float32)
    there = rng.standard_normal((stored, outputs)).astype(np.float32)
    w, g, t = np.ogrid[:4, :8, :4]
    row, column = 16 * w + g + 0 * t, 2 * t + 0 * w + 0 * g
    by_lane = np.stack(
        [sums[row + 8 * r, column + 8 * j + e] for j in range(tokens // 8) for r in (0, 1) for e in (0, 1)],
        -1,
    ).reshape(128, -1)
    # Chunk c of 4 outputs of token m lies in place c ^ (m % 8) of the 8 of 32 outputs.
    m, output = np.ogrid[:stored, :outputs]
    place = (m // 8, output // 32, m % 8, output % 32 // 4 ^ m % 8, output % 4)
    start = np.zeros((stored // 8, outputs // 32, 8, 8, 4), np.float32)
    start[place] = there

    def body(sums_gmem, out_gmem):
        thread = lanes.thread()
        loaded = [memory.load_stored(2, sums_gmem, [thread, i]) for i in range(0, 32, 2)]
        fragment = types.SimpleNamespace(registers=types.SimpleNamespace(flat=loaded))
        bit_prefill_sm90._store((fragment,), out_gmem, first, SILU if matrices == 2 else None, added)

    with lockstep():
        out = jax.new_ref(start.reshape(*start.shape[:3], 32))
        bit_prefill_sm90.plgpu.kernel(body, out_type=(), grid=(1,), num_threads=1, scratch_types=[])(
            by_lane, out
        )
        got = jax.freeze(out)
    got = np.asarray(got).reshape(start.shape)[place]
    want = sums.T
    if matrices == 2:
        gate, up = (want.reshape(tokens, 4, 2, 8)[:, :, r].reshape(tokens, 32) for r in (0, 1))
        want = gate / (1 + np.exp(-gate)) * up
    want = want[first:]
    np.testing.assert_allclose(got, want + (there if added else 0), rtol=1e-5, atol=1e-6)


def unpacked(words):
    """int32 [rows, K / 2], as int_decode reads them -> (q [rows, groups, 32], scales of 32 columns, sums of
    squares of rows)."""
    rows = len(words)
    low, high, scale, squares = np.moveaxis(words.reshape(rows, -1, 4), -1, 0)
    q = np.stack([low, high], axis=-1).view(np.int8).reshape(rows, -1, 32)
    scale = np.ascontiguousarray(scale).view(np.float32).reshape(rows, -1, 4)
    assert (scale == scale[..., :1]).all()
    return q, np.float64(scale[..., 0]), np.float64((squares & ~3).view(np.float32)).sum(-1)


# The widths of Bonsai 2 27B, and one that ends within a warp's columns; heads are regrouped.
@pytest.mark.parametrize(
    ("columns", "block", "heads"),
    [(5120, 1024, None), (6144, 1024, (3, 16)), (17408, 1024, None), (384, 128, None)],
)
@pytest.mark.parametrize("normed", [False, True])
def test_rows_in_lockstep_are_normed_rotated_and_rounded(columns, block, heads, normed):
    """Of few rows and of many, as float32, as float16 in both orders and as whole numbers."""
    rng = np.random.default_rng(columns)
    x = rng.standard_normal((3, columns)).astype(np.float32) * np.float32([[1e-3], [3.0], [1e4]])
    gamma, signs = rng.uniform(0.5, 2, (2, columns)), rng.choice([-1.0, 1.0], columns)
    n, rms = np.float64(x), np.ones((3, 1))
    if normed:
        rms = np.sqrt((n**2).mean(-1, keepdims=True) + 1e-6)
        n = n / rms * gamma[1]
    if heads:
        n = n.reshape(3, *heads, -1).swapaxes(1, 2).reshape(n.shape)
    n = ((signs * n).reshape(3, -1, block) @ sylvester(block)).reshape(n.shape)
    rotation = Rotation.from_signs(signs, block, heads)
    norm = (jnp.asarray(gamma, jnp.float32), np.int32(1), 1e-6) if normed else ()
    with lockstep():
        got = activations_rotated.activations_rotated(x, rotation, *norm)
        words = activations_rotated.activations_rotated(x, rotation, *norm, form=ROTATED_WORDS)
        with mock.patch.object(prologue, "FEW_ROWS", 0):
            many = activations_rotated.activations_rotated(x, rotation, *norm)
            words_of_many = activations_rotated.activations_rotated(x, rotation, *norm, form=ROTATED_WORDS)
        rounded = [
            first_rows(
                3, activations_rotated.activations_rotated(x, rotation, *norm, form=rotated_form(group))
            )
            for group in (None, 16, 32)
        ]
        integers = activations_rotated.activations_rotated(x, rotation, *norm, form=ROTATED_INTEGERS)
    size = np.linalg.norm(n, axis=-1, keepdims=True) / columns**0.5
    np.testing.assert_allclose(got / size, n / size, atol=2e-6)
    np.testing.assert_array_equal(many, got) if not normed else np.testing.assert_allclose(
        many, got, rtol=1e-6
    )
    for (a, scale), group in zip(rounded, (None, 16, 32), strict=True):
        want = in_group_order(n, group) if group else n
        largest = np.abs(n).max(-1)
        assert (scale <= largest * (1 + 1e-5)).all() and (scale > largest / 2.00001).all()
        np.testing.assert_array_equal(np.log2(scale) % 1, 0)
        np.testing.assert_allclose(
            np.float64(a) * np.float64(scale)[:, None] / size, want / size, rtol=2**-10.9, atol=2e-6
        )
    np.testing.assert_array_equal(words, words_of_many)
    q, scale, squares = unpacked(np.asarray(words))
    groups = (n * rms).reshape(3, -1, 32)
    np.testing.assert_allclose(scale, np.abs(groups).max(-1) / 127, rtol=2e-5)
    np.testing.assert_array_less(np.abs(q - groups / scale[..., None]), 0.501)
    if normed:
        np.testing.assert_allclose(squares, (np.float64(x) ** 2).sum(-1), rtol=1e-6)
    q, scale = in_order(*integers, 3, columns, TERNARY)
    groups = n.reshape(3, -1, 128)
    np.testing.assert_allclose(scale, np.abs(groups).max(-1) / 127, rtol=2e-5)
    # Rounded to the nearest, but where two are as near.
    np.testing.assert_array_less(np.abs(q.reshape(groups.shape) - groups / scale[..., None]), 0.501)
    assert (np.abs(q.reshape(groups.shape)).max(-1) == 127).all()
