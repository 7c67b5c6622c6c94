"""Random blocks of every format: their weights' mean and deviation, and codes that are valid."""

import jax
import numpy as np
import pytest

from pallas_kernels import formats

TERNARY = [name for name in formats.names() if callable(formats.get(name).RANDOM.get("qs"))]


@pytest.mark.parametrize("name", formats.names())
def test_random_fields(name):
    module = formats.get(name)
    lead = (64, 2**19 // 64 // module.WEIGHTS)
    draw = jax.jit(formats.random_fields, static_argnums=(0, 2))
    fields = draw(name, jax.random.key(1), lead, 0.0, 0.02)
    for field in module.BLOCK.names:
        dtype = module.BLOCK.fields[field][0]
        assert fields[field].dtype == dtype.base
        assert fields[field].shape == (*lead, *dtype.shape)
    w = np.asarray(jax.jit(module.dequantize)(fields), np.float64)
    assert w.shape == (*lead, module.WEIGHTS)
    assert np.isfinite(w).all()
    blocks = w.mean(axis=-1)  # weights of one block share scales, blocks are independent
    standard_error = blocks.std() / np.sqrt(blocks.size)
    assert abs(w.mean()) < 0.01 * 0.02 + 4 * standard_error
    assert 0.97 * 0.02 < w.std() < 1.1 * 0.02  # scales from 0.5 to 1.5 add 4 %
    again, other = (draw(name, jax.random.key(k), lead, 0.0, 0.02) for k in (1, 2))
    for field in module.BLOCK.names:
        assert (np.asarray(again[field]) == np.asarray(fields[field])).all()
        assert (np.asarray(other[field]) != np.asarray(fields[field])).any()


@pytest.mark.parametrize("name", TERNARY)
def test_random_codes_are_valid(name):
    """-d, 0 and d in equal parts; and, where bytes are base 3, only bytes that ggml's encoder writes."""
    fields = jax.jit(formats.random_fields, static_argnums=(0, 2))(name, jax.random.key(2), (1024,), 0.0, 1.0)
    w = np.asarray(jax.jit(formats.get(name).dequantize)(fields))
    signs, counts = np.unique(w / np.asarray(fields["d"], np.float32)[:, None], return_counts=True)
    np.testing.assert_array_equal(signs, [-1, 0, 1])
    np.testing.assert_allclose(counts / w.size, 1 / 3, atol=0.01)
    if "qh" in fields:
        v = np.arange(243)
        assert set(np.unique(fields["qs"])) == set((v * 256 + 242) // 243)
        assert set(np.unique(fields["qh"])) == set((v[::3] * 256 + 242) // 243)


def test_f32_random_mean():
    w = formats.random_fields("f32", jax.random.key(0), (4096,), 1.0, 0.1)["w"]
    assert abs(float(w.mean()) - 1) < 0.01
