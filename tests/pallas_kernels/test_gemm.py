"""Products of many rows, as far as a CPU can tell: scales, the library's candidate, the order of columns."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Products, QTensor, formats, matmul
from pallas_kernels.matmul import prefill
from pallas_kernels.matmul.bit_mma import prefill_sm90 as bit_prefill_sm90
from pallas_kernels.matmul.bit_mma.weight_bytes import words_and_scales
from pallas_kernels.matmul.int_mma import float16 as int_float16
from pallas_kernels.matmul.int_mma import prefill_plan as int_prefill_plan
from pallas_kernels.qtensor import tile


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # outside of jit each operation would be compiled alone
def random_weights(format, n, k, seed=0):
    fields = formats.random_fields(
        format, jax.random.key(seed), (n, k // formats.get(format).WEIGHTS), 0.0, 0.02
    )
    return QTensor(fields, format, (n, k))


def has_float16_scales(format) -> bool:
    """Whether d, and m, of a group are in the file, and not integers or eight-bit floats times another."""
    module = formats.get(format)
    made = any(field.startswith("scales") for field in module.BLOCK.names) or hasattr(module, "UNSCALED")
    return not made


def in_group_order(a: np.ndarray, group: int) -> np.ndarray:
    """[M, K] -> the order of columns that int_prefill_sm90's docstring gives, behind K zeros up to 256
    columns."""
    a = np.pad(a, [(0, 0), (0, -a.shape[1] % 256)])
    s, h, t, e = np.ogrid[: group // 16, :2, :4, :2]
    source = np.zeros(group, int)
    source[16 * s + 8 * h + 2 * t + e] = group // 4 * t + 4 * s + h + 2 * e
    return a[:, (np.arange(0, a.shape[1], group)[:, None] + source).reshape(-1)]


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e6, 1e28])
def test_a_row_of_any_size_keeps_11_bits(size):
    x = size * np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    x[3] = 0
    a, scale = prefill.scaled_to_half(jnp.asarray(x))
    assert a.dtype == jnp.float16 and jnp.abs(a).max() <= 2
    np.testing.assert_array_equal(np.frexp(scale)[0], 0.5)  # powers of two
    back = np.asarray(a, np.float32) * np.asarray(scale)
    largest = np.abs(x).max(axis=-1, keepdims=True)
    assert (np.abs(back - x) <= np.maximum(2.0**-11 * np.abs(x), 2.0**-24 * largest)).all()


@pytest.mark.parametrize("format", ["q1_0", "q4_k", "q6_k", "bf16"])
def test_the_library_is_near_the_definition(format):
    w = random_weights(format, 48, 512)
    x = jax.random.normal(jax.random.key(1), (20, 512))
    residual = jax.random.normal(jax.random.key(2), (20, 48))
    product = jax.jit(matmul)
    want = np.asarray(product(x, w, residual=residual))
    by_cublas = w.replace(products=Products(((8, "reference"), (None, "cublas"))))
    got = np.asarray(product(x, by_cublas, residual=residual))
    assert 0 < np.linalg.norm(got - want) < 1e-3 * np.linalg.norm(want)
    few = x[:8]  # matrix-vector products are not its business
    np.testing.assert_array_equal(product(few, by_cublas), product(few, w))


@pytest.mark.parametrize("group", [16, 32])
def test_lanes_have_the_columns_that_their_activations_follow(group):
    """wgmma gives lane 4 g + t the positions 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of 16; int_decode's layout the
    columns (group / 4) t .. of a group."""
    columns = in_group_order(np.arange(256)[None], group)[0]
    for position, column in enumerate(columns):
        assert position // group == column // group
        assert position % 8 // 2 == column % group // (group // 4)
    assert sorted(columns) == list(range(256))


@functools.cache
def tile_words(format):
    """Of each field, in a tile."""
    fields = jax.eval_shape(lambda: tile(random_weights(format, 16, 256))).fields
    return [math.prod(field.shape[2:]) for field in fields.values()]


@pytest.mark.parametrize("format", formats.names("int"))
@pytest.mark.parametrize("matrices", [1, 2])
@pytest.mark.parametrize(("m", "n"), [(9, 64), (17, 64), (33, 4096), (64, 4096), (512, 4096), (2048, 12288)])
def test_every_plan_fits_into_shared_memory(format, matrices, m, n):
    format_lanes, shared, words = formats.get(format).LANES, 227 * 1024, tile_words(format)
    scales = int_float16.bytes_of_scales(format_lanes)
    plan = int_prefill_plan.planned(m, n // 16, 16, matrices, words, scales)
    warpgroups, blocks, tokens, slots, stored, splits = plan
    of_tile = 4 * int_prefill_plan.WEIGHT_SLOTS * sum(words) + matrices * scales
    stages = warpgroups * int_prefill_plan.STAGES * stored * 64 // matrices * 4
    assert 4 * warpgroups * blocks * of_tile + slots * tokens * 128 + stages + 3 * tokens * 4 + 256 <= shared
    assert slots >= 2 and tokens % stored == 0 and 16 % splits == 0
    assert slots <= int_prefill_plan.STEPS * 16 // splits  # a block waits in the end until all were used
    assert matrices == 1 or splits == 1


def test_tiles_of_the_8b_shape_keep_the_multiprocessors_busy():
    """Of prefill, and of steps of 16 to 256 rows, whose columns are split where there are few tiles."""
    for m, n, k, matrices, least in [
        (2048, 6144, 4096, 1, 0.95),
        (2048, 12288, 4096, 2, 0.95),
        (512, 4096, 4096, 1, 0.95),
        *((m, n, k, 1, 0.7) for m in (16, 64, 256) for n, k in ((6144, 4096), (4096, 4096), (4096, 12288))),
    ]:
        warpgroups, tokens, splits, *_ = bit_prefill_sm90.planned(m, n, k // 512, matrices, planes=1)
        count = -(-m // tokens) * -(-n // (64 * warpgroups // matrices)) * splits
        assert count / (-(-count // 132) * 132) > least, (m, n, k)


@pytest.mark.parametrize("format", ["q1_0", "pq2_0", "q2_0_g64", "tq1_0"])
@pytest.mark.parametrize("matrices", [1, 2])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(16, 64, 256), (48, 5120, 17408), (64, 12288, 4096), (2048, 5120, 5120)]
)
def test_every_plan_of_bytes_fits_into_shared_memory(format, matrices, m, n, k):
    """Each buffer begins at a multiple of 1,024 bytes. Results of a tile leave by parts of one size."""
    fields = jax.eval_shape(lambda: tile(random_weights(format, 16, 256))).fields
    words, scales = (math.prod(v.shape) for v in words_and_scales(QTensor(fields, format, (16, 256))))
    plan = bit_prefill_sm90.planned(m, n, -(-k // 512), matrices, planes=1, pair_words=(words, scales))
    warpgroups, tokens, splits, slots, stored = plan
    rows, stages = 64 * warpgroups, min(2, tokens // stored)
    buffers = [
        *(
            slots * 4 * tokens * 128,
            slots * 4 * tokens * 4,
            warpgroups * stages * stored * 64 // matrices * 4,
        ),
        *(slots * rows // 16 * 2 * each * 4 for each in (words, scales)),
        *(slots * 8, slots * 5 * tokens * 4 * (format != "q1_0" or tokens > 32)),
    ]
    assert sum(-(-each // 1024) * 1024 for each in buffers) + 256 <= 227 * 1024
    assert slots >= 2 and tokens % stored == 0 and (matrices == 1 or splits == 1)
