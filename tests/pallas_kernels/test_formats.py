"""Every format: layout, decoding and encoding, against the gguf package or the files of oracles/."""

import functools

import gguf
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.geometry import GEOMETRY
from pallas_kernels import formats
from tests.pallas_kernels import expected_blocks, oracles

pytestmark = pytest.mark.usefixtures("optimized")

GGUF_TYPES = {t.name.lower(): t for t in gguf.GGMLQuantizationType}
WITH_F16 = [name for name in formats.names() if name not in ("f32", "bf16")]
every_format = pytest.mark.parametrize("name", formats.names())
LEAD = (2, 3)  # every shape is compiled for every format
few = hypothesis.settings(max_examples=8, deadline=None, derandomize=True)


def block_bytes(name):
    return formats.get(name).BLOCK.itemsize


def random_bytes(name, seed, lead, blocks=3):
    return np.random.default_rng(seed).integers(0, 256, (*lead, blocks * block_bytes(name)), np.uint8)


# Outside of jit each operation is compiled alone.
unpack, pack = (jax.jit(f, static_argnums=0) for f in (formats.unpack, formats.pack))


@functools.partial(jax.jit, static_argnums=0)
def decode(name, raw):
    w = formats.get(name).dequantize(formats.unpack(name, jnp.asarray(raw)))
    return w.reshape(*w.shape[:-2], -1)


def encode(name, x):
    module = formats.get(name)
    x = jnp.asarray(x)
    return formats.pack(name, module.quantize(x.reshape(*x.shape[:-1], -1, module.WEIGHTS)))


def assert_same_bits(actual, expected):
    """Equal to the last bit, the sign of zero included; a NaN equals any NaN."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype == np.float32
    assert actual.shape == expected.shape
    same = (actual.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(actual) & np.isnan(expected))
    assert same.all(), f"first of {(~same).sum()}: {actual[~same][0]!r}, expected {expected[~same][0]!r}"


def assert_decodes(name, raw):
    assert_same_bits(decode(name, raw), oracles.dequantize(name, raw))


def f16_field_bytes(name):
    """Offsets, in a block, of its float16 fields."""
    block = formats.get(name).BLOCK
    return [block.fields[f][1] for f in block.names if block.fields[f][0] == np.float16]


# Layout


@every_format
def test_the_reader_of_files_sizes_blocks_the_same(name):
    sizes = formats.get(name).WEIGHTS, block_bytes(name)
    assert name in GEOMETRY, (
        f"checkpoints/geometry.py does not have {name}: add a line with its id in GGUF files and, per block, "
        f"its weights and bytes ({sizes[0]}, {sizes[1]})"
    )
    assert (GEOMETRY[name].weights, GEOMETRY[name].bytes) == sizes


@every_format
@few
@hypothesis.given(seed=st.integers(0, 2**32))
def test_pack_is_the_inverse_of_unpack(name, seed):
    raw = random_bytes(name, seed, LEAD, 4)
    fields = unpack(name, raw)
    block = formats.get(name).BLOCK
    for field in block.names:
        assert fields[field].dtype == block.fields[field][0].base
        assert fields[field].shape == (*LEAD, 4, *block.fields[field][0].shape)
    np.testing.assert_array_equal(pack(name, fields), raw)


@every_format
def test_unpack_reads_the_fields_of_the_struct(name):
    raw = random_bytes(name, 1, LEAD, 4)
    struct = raw.view(formats.get(name).BLOCK)
    fields = unpack(name, raw)
    np.testing.assert_array_equal(pack(name, fields), raw)
    for field, value in fields.items():
        assert np.asarray(value).tobytes() == np.ascontiguousarray(struct[field]).tobytes()


def test_unknown_format_names_the_supported():
    with pytest.raises(NotImplementedError, match=r"'q9_9' is not supported.*q1_0.*q4_k"):
        formats.get("q9_9")


@every_format
def test_a_broken_row_raises(name):
    with pytest.raises(ValueError, match=name):
        formats.unpack(name, np.zeros((2, block_bytes(name) + 1), np.uint8))


# Decoding


@every_format
@few
@hypothesis.given(seed=st.integers(0, 2**32))
def test_decode_equals_the_oracle(name, seed):
    assert_decodes(name, random_bytes(name, seed, LEAD))


@every_format
def test_decode_equals_the_oracle_under_vmap(name):
    """XLA may contract a product and a sum into one rounding: the products have to be exact."""
    raw = random_bytes(name, 0, (4, 8), 16)
    assert_same_bits(jax.vmap(functools.partial(decode, name))(raw), oracles.dequantize(name, raw))


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*WITH_F16, "bf16"])
def test_every_scale_decodes(name, step):
    """All 65536 float16 patterns as scales (denormals, infinities and NaN among them), or as the weights;
    every day a seventh of them, another one for the next format."""
    raw = random_bytes(name, 3, (65536,), 1)
    for i, offset in enumerate(f16_field_bytes(name) or [0]):
        patterns = np.random.default_rng(i).permutation(65536) if i else np.arange(65536)
        raw[:, offset : offset + 2] = patterns.astype("<u2")[:, None].view(np.uint8)
    if name in oracles.names():  # written as scalar loops, which are slow: denormals, the ends of the range
        raw = raw[np.r_[1:1024:37, 0x8001:0x8400:37, 0, 0x3FF, 0x400, 0x7BFF, 0x7C00, 0x7E00, 0x8000, 0xFC00]]
    else:
        raw = raw[formats.names().index(name) % step :: step]
    assert_decodes(name, raw)


def test_f32_is_untouched():
    x = np.random.default_rng(0).integers(0, 2**32, 4096, np.uint32)
    x[:3] = [1, 0x007FFFFF, 0x80000001]  # denormals, which XLA's arithmetic would flush
    w = decode("f32", x.view(np.uint8))
    np.testing.assert_array_equal(np.asarray(w).view(np.uint32), x)


def test_decode_under_strict_dtype_promotion():
    with jax.numpy_dtype_promotion("strict"):
        for name in formats.names():
            raw = jax.ShapeDtypeStruct((2, 3 * block_bytes(name)), jnp.uint8)
            fields = jax.eval_shape(lambda raw, name=name: formats.unpack(name, raw), raw)
            assert jax.eval_shape(formats.get(name).dequantize, fields).dtype == jnp.float32


def test_base_3_digits_survive():
    """What ggml encodes by its rule (v * 256 + 242) // 243 the decoder gives back, for all 243 values."""
    v = np.arange(243)
    raw = np.zeros((243, 28), np.uint8)
    raw[:, 0] = (v * 256 + 242) // 243
    raw[:, 26:] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    digits = np.stack([v // 81, v // 27 % 3, v // 9 % 3, v // 3 % 3, v % 3], axis=1)
    np.testing.assert_array_equal(decode("ptq1_0", raw)[:, 0:80:16], digits - 1)


# Encoding


def finite_float32(rng, n):
    """Float32 of every magnitude: random bits without infinities and NaN."""
    x = rng.integers(0, 2**32, 2 * n, np.uint32).view(np.float32)
    return x[np.isfinite(x)][:n]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_encode_floats_equals_gguf(name, jit):
    rng = np.random.default_rng(0)
    x = np.concatenate([
        finite_float32(rng, 100_000),
        np.float32([0, -0.0, np.inf, -np.inf, 65504, 65519.996, 65520, 1e-40, -1e-45, 3.4028235e38]),
        rng.normal(size=10_000).astype(np.float32) * np.float32(1e-6),  # float16 denormals
        (np.arange(65536, dtype=np.uint32) << 16 | 0x8000).view(np.float32),  # bfloat16 ties, NaN
        np.arange(0x33000000, 0x48000000, 0x1000, dtype=np.uint32).view(np.float32),  # float16 ties
    ])  # fmt: skip
    if name != "bf16":  # where numpy and XLA quiet different NaN
        x = x[~np.isnan(x)]
    call = jax.jit(encode, static_argnums=0) if jit else encode
    with np.errstate(over="ignore"):
        expected = gguf.quantize(x, GGUF_TYPES[name]).view(np.uint8)
    np.testing.assert_array_equal(call(name, x), expected)


def test_encode_f16_keeps_nan():
    assert np.isnan(decode("f16", encode("f16", np.float32([np.nan, -np.nan])))).all()


@few
@hypothesis.given(seed=st.integers(0, 2**32), jit=st.booleans())
def test_encode_q8_0_equals_gguf(seed, jit):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(3, 5, 64)).astype(np.float32) * np.float32(2.0) ** rng.integers(-60, 100, (3, 5, 1))
    x[0, 0] = 0
    x[0, 1, 7] = -0.0
    x[0, 2, :32] = rng.integers(-254, 255, 32) / 2  # halves
    x[0, 2, 31] = 127
    call = jax.jit(encode, static_argnums=0) if jit else encode
    with np.errstate(over="ignore", divide="ignore"):
        expected = gguf.quantize(x, GGUF_TYPES["q8_0"])
    np.testing.assert_array_equal(call("q8_0", x), expected)


def test_encode_q8_0_of_almost_nothing_is_zero():
    """The scale is no float16, and gguf multiplies infinities: codes may differ, the weights are zero."""
    x = np.full((1, 32), 1e-38, np.float32)
    np.testing.assert_array_equal(decode("q8_0", encode("q8_0", x)), np.zeros_like(x))


@few
@hypothesis.given(seed=st.integers(0, 2**32), jit=st.booleans())
def test_encode_q1_0_equals_its_rule(seed, jit):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(3, 256)).astype(np.float32) * np.float32(2.0) ** rng.integers(-20, 12, (3, 1))
    x[0, :6] = [0.0, -0.0, 1e-40, -1e-40, 1e-30, -1e-30]
    call = jax.jit(encode, static_argnums=0) if jit else encode
    blocks = np.asarray(call("q1_0", x)).reshape(3, 2, 18)
    for row in range(3):
        for b in range(2):
            part = x[row, 128 * b : 128 * b + 128]
            qs = np.zeros(16, np.uint8)
            for j in range(128):
                if part[j] >= 0:
                    qs[j // 8] += 1 << (j % 8)
            np.testing.assert_array_equal(blocks[row, b, 2:], qs)
            d = np.float16(sum(abs(float(v)) for v in part) / 128)
            # this sum is exact, the encoder's is of float32: rounded to float16 it may be the neighbour
            assert abs(int(blocks[row, b, :2].view("<u2")[0]) - int(d.view(np.uint16))) <= 1


# The error of a round trip over the block's largest weight: half a step, and the scale's rounding. What other
# encoders lose is compared with what ggml's lose (test_encoders.py).
ROUND_TRIP = {"f32": 0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 0.5 / 127 + 2**-11, "q1_0": None}


@pytest.mark.parametrize("name", ROUND_TRIP)
def test_round_trip(name):
    x = np.random.default_rng(0).normal(size=(4, 512)).astype(np.float32)
    w = np.asarray(decode(name, encode(name, x)))
    if name == "q1_0":  # the best +-d leaves the deviation of |x| from its mean: sqrt(1 - 2 / pi) of a normal
        assert 0.58 < np.sqrt(np.mean((w - x) ** 2)) < 0.62
    else:
        blocks = x.reshape(4, -1, formats.get(name).WEIGHTS)
        bound = ROUND_TRIP[name] * np.abs(blocks).max(axis=-1, keepdims=True)
        assert (np.abs(w.reshape(blocks.shape) - blocks) <= bound).all()
    np.testing.assert_array_equal(decode(name, encode(name, w)), w)  # a decoded weight stays what it is


# Expected blocks


@every_format
def test_the_expected_weights_are_what_the_oracle_says(name):
    expected = expected_blocks.load(name)
    weights = oracles.dequantize(name, expected.raw)
    np.testing.assert_array_equal(expected.weights.view(np.uint8), weights.view(np.uint8))


@pytest.mark.slow
@every_format
def test_the_expected_blocks_are_what_is_drawn_today(name):
    for stored, made in zip(expected_blocks.load(name), expected_blocks.make(name), strict=True):
        np.testing.assert_array_equal(stored.view(np.uint8), made.view(np.uint8))
