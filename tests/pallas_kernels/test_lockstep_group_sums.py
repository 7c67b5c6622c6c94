"""What a lane of bit_prefill_sm90 makes of its weights, scales and sums (lockstep), against the definition in
float64. The multiplication itself, wgmma, is numpy's here; its operands and sums lie as the PTX ISA says."""

import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import QTensor, dequantize, formats
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import real
from pallas_kernels.matmul.bit_mma import activations, group_sums, prefill_sm90, weight_bytes
from pallas_kernels.qtensor import tile
from tests.pallas_kernels.lockstep import launched, lockstep
from tests.pallas_kernels.lockstep.values import i32
from tests.pallas_kernels.test_lockstep_rows import in_order

GROUPS, TOKENS, WARPGROUP = 4, 48, 128


def multiplied(q: np.ndarray):
    """In place of `multiply`. q int [groups, planes, tokens, 128], in the order of activations_int8.

    Lane 4 g + t of warp w has, of the first operand, in byte b of register 2 j + r, row 16 w + g + 8 r and
    place 16 j + 4 t + b; of the sums, in register 4 j + 2 r + e, the same row and token 8 j + 2 t + e.
    """

    def multiply(weights, place, tokens, sums=None, *, unsigned=False):
        words = np.stack([v.of_threads(WARPGROUP) for v in weights], -1).astype(np.uint32)
        bytes_ = words.view(np.int8).reshape(4, 8, 4, 8, 2, 4).astype(np.int64)  # w, g, t, j, r, b
        operand = bytes_.transpose(0, 4, 1, 3, 2, 5).reshape(64, 128)
        assert unsigned == (place[1] > 0)
        product = (operand @ q[place].T).reshape(4, 2, 8, tokens // 8, 4, 2)  # w, r, g, j, t, e
        lane_values = product.transpose(0, 2, 4, 3, 1, 5).reshape(WARPGROUP, -1)
        before = [0] * (tokens // 2) if sums is None else [v.of_threads(WARPGROUP) for v in sums]
        return [i32(lane_values[:, i] + before[i]) for i in range(tokens // 2)]

    return mock.patch.multiple(group_sums, multiply=multiply, arrived=lambda product, later: product)


def drawn(rng, format: str, matrices: int, steps: int):
    """Weights of as many rows as a warpgroup has of each matrix, and their (d, numbers -1, 0 and 1), float64
    [rows, scales] and [rows, columns]."""
    rows, columns, each = 64 // matrices, 128 * GROUPS * steps, formats.get(format).WEIGHTS
    made = []
    for _ in range(matrices):
        d = (
            rng.uniform(0.001, 1, (rows, columns // each))
            * rng.choice([-1, 1], (rows, columns // each))
            * 2.0 ** rng.integers(-8, 3, (rows, 1))
        )
        # Rows and steps without scales, and with the smallest.
        d[3], d[5, : 512 // each], d[7, ::2] = 0, 0, 1e-7
        d = d.astype(np.float16)
        raw = formats.random_fields(format, jax.random.key(rng.integers(1000)), d.shape, 0.0, 1.0)
        signs = np.asarray(
            dequantize(QTensor({**raw, "d": jnp.ones_like(raw["d"])}, format, (rows, columns)))
        )
        w = tile(QTensor({**raw, "d": jnp.asarray(d)}, format, (rows, columns)))
        made.append((w, d.astype(np.float64), signs.astype(np.float64)))
    return made


def in_lane_order(made: list[np.ndarray]) -> np.ndarray:
    """[rows of each matrix, ..] -> [64, ..] as a warpgroup has them: of two matrices row 8 w + g of the first
    as row 16 w + g, and of the second as row 16 w + g + 8."""
    if len(made) == 1:
        return made[0]
    return np.stack([a.reshape(4, 8, *a.shape[1:]) for a in made], 1).reshape(64, *made[0].shape[1:])


def rounded(d: np.ndarray, each: int) -> np.ndarray:
    """Scales as the kernel rounds them: to 7 bits of the largest in 512 columns of a row."""
    steps_of_rows = d.reshape(len(d), -1, 128 * GROUPS // each)
    largest = np.maximum(np.abs(steps_of_rows).max(-1, keepdims=True), group_sums.SMALLEST)
    factor = (np.float32(127) / largest.astype(np.float32)).astype(np.float64)
    return (np.rint(steps_of_rows * factor) * largest / 127).reshape(d.shape)


def sums_of_steps(made, q, scales, steps: int, together: bool) -> np.ndarray:
    """[64, tokens] by the kernel's functions; q as `multiplied` has it, of all steps."""
    planes = q.shape[1]
    pairs, fields = GROUPS // 2, [weight_bytes.words_and_scales(w) for w, *_ in made]
    encoding = weight_bytes.encoding_of(*fields[0])
    words, d = (
        np.stack([np.asarray(v).reshape(v.shape[0], pairs * steps, -1) for v in field])
        for field in zip(*fields, strict=True)
    )

    def body(*refs):
        *inputs, out_gmem, coefficients_smem = refs
        carry, y = [real(1)] * 2, [real(0)] * (TOKENS // 2)
        for step in range(steps):
            places = [(GROUPS * step + group, plane) for group in range(GROUPS) for plane in range(planes)]
            slot = group_sums.Slot(encoding, *inputs[3 * step :][:3], places)
            if together:
                group_sums.store_coefficients(slot.scales, coefficients_smem)
                lanes.block_barrier()
                y, carry = group_sums.add_groups_together(slot, coefficients_smem, y, carry)
                lanes.block_barrier()
            else:
                y = group_sums.add_groups(slot, y)
        units = [group_sums.unit_of(v) if together else real(1) for v in carry]
        for i, value in enumerate(y):
            memory.store(value * units[i // 2 % 2], out_gmem, lanes.thread(), i)

    cut = lambda a, step, size: a[:, :, size * step :][:, :, :size]  # noqa: E731
    inputs = []
    for step in range(steps):
        scales_of_step = scales[:, GROUPS * step :][:, :GROUPS].swapaxes(0, 1)
        inputs += [cut(words, step, pairs), cut(d, step, pairs), scales_of_step]
    shape = jax.ShapeDtypeStruct((WARPGROUP, TOKENS // 2), jnp.float32)
    coefficients = prefill_sm90.plgpu.SMEM((group_sums.COEFFICIENTS, TOKENS), jnp.float32)
    with lockstep(), multiplied(q):
        lane_values = np.asarray(launched(body, shape, [coefficients], *inputs))
    return lane_values.reshape(4, 8, 4, TOKENS // 8, 2, 2).transpose(0, 4, 1, 3, 2, 5).reshape(64, TOKENS)


KINDS = [("q1_0", 8, True), ("q1_0", 8, False), ("q1_0", 16, False)]
# Ternary ones with a scale for 128, 64 and 256 columns.
KINDS += [(format, 8, True) for format in ("pq2_0", "q2_0_g64", "tq1_0")]


@pytest.mark.parametrize("matrices", [1, 2])
@pytest.mark.parametrize(("format", "bits", "together"), KINDS)
def test_sums_of_steps_are_those_of_the_definition(format, bits, together, matrices):
    rng, steps = np.random.default_rng(bits + matrices), 3
    made, columns = drawn(rng, format, matrices, steps), 128 * GROUPS * steps
    encoding = weight_bytes.encoding_of(*weight_bytes.words_and_scales(made[0][0]))
    sizes = np.repeat(10.0 ** rng.uniform(-4, 4, (TOKENS, GROUPS * steps)), 128, axis=1)
    sizes *= 10.0 ** rng.uniform(-10, 10, (TOKENS, 1))
    x = (rng.standard_normal((TOKENS, columns)) * sizes).astype(np.float32)
    with lockstep():
        q, scales = activations.activations_int8(x, bits=bits, encoding=encoding)
    integers, s = in_order(q, scales, TOKENS, columns, encoding)
    m, lane = np.arange(TOKENS), np.arange(8)
    q = np.asarray(q)[:, :, :TOKENS].reshape(bits // 8, -1, TOKENS, 8, 16)[
        :, :, m[:, None], lane ^ m[:, None] % 8
    ]
    q = q.reshape(bits // 8, -1, TOKENS, 128).swapaxes(0, 1).astype(np.int64)
    q[:, 1:] %= 256  # the lower 8 bits are unsigned
    got = sums_of_steps(made, q, np.asarray(scales)[:, :, :TOKENS], steps, together)
    each = formats.get(format).WEIGHTS
    d = in_lane_order([rounded(d, each) if together else d for _, d, _ in made])
    weights = np.repeat(d, each, axis=1) * in_lane_order([signs for *_, signs in made])
    taken = (integers.reshape(TOKENS, -1, 128) * s[:, :, None].astype(np.float64)).reshape(TOKENS, columns)
    want = weights @ taken.T
    # What float32 may lose: a part of the largest that is summed on the way, which is F_0 s.
    largest = np.maximum(np.abs(d).reshape(64, steps, -1).max(-1), group_sums.SMALLEST)
    unit = largest / 127 @ np.abs(s).reshape(TOKENS, -1, GROUPS).max(-1).T
    bound = 2.0**23 * unit * 2.0**-22 if together else 0
    np.testing.assert_array_less(np.abs(got - want), bound + 2e-6 * np.abs(weights) @ np.abs(taken).T + 1e-30)


def test_whatever_bytes_a_group_has_sums_stay_positive_integers_of_24_bits():
    """Also of activations that are no numbers, whose bytes are any. The bits of such an integer are a float32
    2^-149 as large."""
    most = group_sums.FIRST + GROUPS * 128 * 128 * 127
    assert most < 2**24 and group_sums.FIRST - GROUPS * 128 * 128 * 127 > 0
    bits = np.array([1, 2**23 - 1, 2**23, 2**24 - 1], np.uint32)
    np.testing.assert_array_equal(bits.view(np.float32).astype(np.float64), bits * 2.0**group_sums.UNIT)


def bytes_of(encoding, words: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """int8 [lanes, registers of a row, 4] of words [lanes, words of a row] and numbers [lanes, scales]."""

    def body(words_gmem, numbers_gmem, out_gmem):
        thread = lanes.thread()
        word, number = (
            [memory.load(ref, thread, i) for i in range(ref.type.shape[1])]
            for ref in (words_gmem, numbers_gmem)
        )
        for i, register in enumerate(encoding.registers(word, encoding.tables(number))):
            memory.store(register, out_gmem, thread, i)

    with lockstep():
        out = launched(body, jax.ShapeDtypeStruct((WARPGROUP, 8), jnp.int32), [], words, numbers)
    return np.asarray(out).view(np.int8).reshape(WARPGROUP, 8, 4)


def test_signs_are_bytes_where_activations_expect_them():
    """Byte b of register 4 h + p is the row's number or less by bit 16 h + 4 b + p of its word."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (WARPGROUP, 1), np.uint32)
    numbers = rng.integers(-127, 128, (WARPGROUP, 1), np.int32)
    got = bytes_of(weight_bytes.SIGNS, words, numbers).reshape(WARPGROUP, 2, 4, 4)
    h, p, b = np.ogrid[:2, :4, :4]
    bits = words[:, :, None, None] >> (16 * h + 4 * b + p).astype(np.uint32) & 1
    np.testing.assert_array_equal(got, np.where(bits, 1, -1) * numbers[:, :, None, None])


@pytest.mark.parametrize("scales", [1, 2, 4])
def test_ternary_weights_are_bytes_where_activations_expect_them(scales):
    """Byte 2 c + f of register 4 h + 2 p + u has bits 4 f + 2 p of byte 2 u + c of word h: 0, 1 and 2 for -1,
    0 and 1 times the number of its 64 columns, f. 3 is taken for 0."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (WARPGROUP, 2), np.uint32)
    numbers = rng.integers(-127, 128, (WARPGROUP, max(1, scales // 2)), np.int32)
    got = bytes_of(weight_bytes.Ternary(scales), words, numbers).reshape(WARPGROUP, 2, 2, 2, 2, 2)
    h, p, u, c, f = np.ogrid[:2, :2, :2, :2, :2]
    code = words[:, h] >> (8 * (2 * u + c) + 4 * f + 2 * p).astype(np.uint32) & 3
    number = numbers[:, f * (scales // 4)]
    np.testing.assert_array_equal(got, np.array([-1, 0, 1, 0])[code] * number)


def test_results_are_stored_in_units_of_one():
    """Not in what each row counts its sums in."""
    rng = np.random.default_rng(0)
    sums, largest = rng.standard_normal((WARPGROUP, 32)) * 2.0**-64, rng.uniform(1e-3, 1, (WARPGROUP, 2))
    sums, largest = sums.astype(np.float32), largest.astype(np.float32)
    unit = largest * np.float32(64 / 127 * 2.0**69)  # s / 64, D / 127, F 2^-149, coefficients 2^80

    def body(sums_gmem, largest_gmem, out_gmem):
        thread = lanes.thread()
        arrays = [
            [memory.load_stored(2, sums_gmem, [thread, i]) for i in range(0, 32, 2)],
            [memory.load_stored(1, largest_gmem, [thread, r]) for r in (0, 1)],
        ]
        lane_values = [types.SimpleNamespace(registers=types.SimpleNamespace(flat=v)) for v in arrays]
        prefill_sm90._store(lane_values if with_units else lane_values[:1], out_gmem, 0, None, False)

    stored, in_units = [], np.repeat(unit, 2, 1)[:, np.arange(32) % 4]
    for with_units in (True, False):
        with lockstep():
            out = jax.new_ref(np.zeros((8, 2, 8, 32), np.float32))
            launched(body, (), [], sums if with_units else sums * in_units, largest, out)
            stored.append(np.asarray(jax.freeze(out)))
    np.testing.assert_allclose(stored[0], stored[1], rtol=3e-7)
    assert np.abs(stored[0]).max() > 1
