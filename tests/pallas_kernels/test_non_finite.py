"""NaN and infinity among a row's activations: all outputs of the row are NaN or infinite, and other rows have
the bits that they have without. Integers have neither, so the scale of a group of activations brings them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    RELU_SQUARED,
    SILU,
    Products,
    Rotation,
    clamped_swiglu,
    device,
    gated,
    matmul,
    swiglu_oai,
)
from pallas_kernels.matmul import activations_rotated
from pallas_kernels.matmul.bit_mma import activations as activations_int8
from pallas_kernels.matmul.bit_mma import decode_b1, decode_ring, decode_s8
from pallas_kernels.matmul.bit_mma.activations import ROTATED_INTEGERS
from pallas_kernels.matmul.int_mma import activations_float16
from pallas_kernels.matmul.int_mma import decode as int_decode
from pallas_kernels.matmul.int_mma.activations_float16 import rotated_form
from tests.pallas_kernels import test_cpu, test_lockstep_layers
from tests.pallas_kernels.lockstep import lockstep
from tests.pallas_kernels.stacks import drawn
from tests.pallas_kernels.test_lockstep_rows import TERNARY, in_order

BAD = (np.nan, np.inf, -np.inf)
WARNINGS = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of such numbers in lockstep


def check(product, rows: int, columns: int, bad: float):
    """product: float32 [rows, columns] -> [rows, N]."""
    x = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)
    clean = np.asarray(product(x))
    assert np.isfinite(clean).all()
    x[rows // 2, columns - 3] = bad
    got = np.asarray(product(x))
    assert not np.isfinite(got[rows // 2]).any()
    others = np.arange(rows) != rows // 2
    np.testing.assert_array_equal(got[others], clean[others])


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize(("format", "bits"), [*((f, 8) for f in test_cpu.KINDS_OF), ("q4_k", 16)])
def test_cpu_products(format, bits, rows):
    """NaN was taken for 1e-20 where activations have 8 bits."""
    w, _ = test_cpu.weights(format, 0, 2, 32, 512, bits=bits)
    for bad in BAD:
        check(lambda x: matmul(jnp.asarray(x), w, 1), rows, 512, bad)


@pytest.mark.parametrize("activation", [SILU, RELU_SQUARED, clamped_swiglu(7.0), swiglu_oai()], ids=str)
def test_cpu_activations(activation):
    """Bounds turned NaN into themselves."""
    gate, up = (test_cpu.weights("q4_0", seed, 1, 32, 512)[0] for seed in (0, 1))
    check(lambda x: gated(jnp.asarray(x), gate, up, 0, activation=activation), 3, 512, np.nan)


BIT_KERNELS = [
    (decode_b1, 1, 8),
    (decode_b1, 1, 16),
    (decode_b1, 3, 8),
    (decode_s8, 5, 8),
    (decode_s8, 5, 16),
]
BIT_KERNELS += [(decode_ring, 1, 8), (decode_ring, 3, 8), (decode_ring, 6, 8)]


@WARNINGS
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("kernel", "rows", "bits"), BIT_KERNELS)
def test_1_bit_products_on_a_gpu(kernel, rows, bits, normed, monkeypatch):
    two = dataclasses.replace(device.GPUS["sm_90"], multiprocessors=2)
    monkeypatch.setattr(device, "default", lambda: two)
    w = drawn("q1_0", (1, 32, 384)).tiled.replace(products=Products(activation_bits=bits))
    gamma = jnp.ones((1, 384)) if normed else None

    def product(x):
        with lockstep(at_a_time=16):
            return kernel.run(jnp.asarray(x), [w], 0, 0, gamma, 1e-6, None, SILU)

    for bad in BAD:
        check(product, rows, 384, bad)


INT_KERNELS = [("q4_k", 1), ("q6_k", 3), ("q2_k", 9), ("q8_0", 2)]
INT_KERNELS += [("q1_0", 1), ("q1_0", 3)]  # as in layer_products


@WARNINGS
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(("format", "rows"), INT_KERNELS)
def test_integer_products_on_a_gpu(format, rows, bits, normed):
    fields = (drawn(format, (1, 32, 512)).tiled.fields,)
    gamma = np.ones((1, 512), np.float32) if normed else None

    def product(x):
        with lockstep(at_a_time=8):
            return int_decode.int_decode(
                x, (fields,), None, formats_of=(format,), gamma=gamma, eps=1e-6, activation_bits=bits
            )

    for bad in BAD:
        check(product, rows, 512, bad)


@WARNINGS
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("normed", [False, True])
def test_activations_of_a_gpu_s_gemms(normed, bad):
    """Dequantized, as the GEMM behind them has them."""
    norm = (np.ones((1, 512), np.float32), None, 1e-6) if normed else ()
    rotation = Rotation.from_signs(np.ones(512), 256, None)

    def bytes_of_8(x):
        q, scale = activations_int8.activations_int8(x, *norm)
        q, scale = in_order(q, scale, len(x), 512)
        return (q.reshape(len(x), -1, 128) * scale[:, :, None]).reshape(x.shape)

    def rotated_bytes(x):
        made = activations_rotated.activations_rotated(x, rotation, *norm, form=ROTATED_INTEGERS)
        q, scale = in_order(*made, len(x), 512, TERNARY)
        return (q.reshape(len(x), -1, 128) * scale[:, :, None]).reshape(x.shape)

    def halves(x):
        a, scale = activations_float16.activations_float16(x, *norm)
        return np.asarray(a, np.float32) * np.asarray(scale)[:, None]

    def rotated(x):
        a, scale = activations_rotated.activations_rotated(x, rotation, *norm, form=rotated_form(None))
        return np.asarray(a, np.float32) * np.asarray(scale)[:, None]

    for product in (bytes_of_8, rotated_bytes, halves, rotated):
        x = np.random.default_rng(0).standard_normal((3, 512)).astype(np.float32)
        x[1, 509] = bad
        with lockstep():
            finite = np.isfinite(product(x))
        assert finite[[0, 2]].all() and not finite[1].all(), product.__name__


@WARNINGS
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("number", [0, 6, 9])  # 1, 4 and 11 rows
def test_all_layers_in_one_launch(number, bad):
    """NaN was -0 behind the first block that received it: 2 more than its bits are those of -0."""
    case = test_lockstep_layers.CASES[number]
    got, _, _ = test_lockstep_layers.both(case, bad)
    clean, _, _ = test_lockstep_layers.both(case)
    assert not np.isfinite(got[0][0]).any()
    np.testing.assert_array_equal(got[0][1:], clean[0][1:])
