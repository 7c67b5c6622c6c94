"""matmul and attention against numpy in float64, which shares no code with them."""

import functools
import re

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    LayerStack,
    attend,
    attention,
    formats,
    from_blocks,
    gated,
    layer_norm,
    matmul,
    quantize,
    rms_norm,
)
from tests.pallas_kernels import expected_blocks
from tests.pallas_kernels.naive_attention import naive_attention

pytestmark = pytest.mark.usefixtures("optimized")

DECODED_BY_GGUF = [
    "f32",
    "f16",
    "bf16",
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q8_0",
    "q2_k",
    "q3_k",
    "q4_k",
    "q5_k",
    "q6_k",
]


# Outside of jit each operation would be compiled alone.
made = jax.jit(from_blocks, static_argnums=1)
product = jax.jit(matmul)


def random_weight(format, seed, *shape):
    """A QTensor of expected blocks in random order, [*lead, N, K], and the same weights, as the gguf package
    dequantizes them, in float64."""
    module = formats.get(format)
    blocks = expected_blocks.load(format).raw.reshape(-1, module.BLOCK.itemsize)
    of_rows = (*shape[:-1], shape[-1] // module.WEIGHTS)
    raw = blocks[np.random.default_rng(seed).integers(0, len(blocks), of_rows)].reshape(*shape[:-1], -1)
    type_ = gguf.GGMLQuantizationType[format.upper()]
    return made(raw, format), gguf.dequantize(raw, type_).astype(np.float64)


@functools.cache
def fitting(*shape):
    """A weight of q8_0, the same each time."""
    return random_weight("q8_0", 11, *shape)[0]


def relative_error(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


@pytest.mark.parametrize("format", DECODED_BY_GGUF)
def test_matmul_is_the_product_with_the_weights_that_gguf_decodes(format):
    w, dense = random_weight(format, 1, 24, 512)
    x = np.random.default_rng(2).standard_normal((3, 512)).astype(np.float32)
    assert relative_error(product(x, w), x.astype(np.float64) @ dense.T) < 1e-6


def test_matmul_by_the_identity_prints_the_weights():
    w, dense = random_weight("q4_k", 3, 16, 256)
    np.testing.assert_array_equal(
        np.asarray(product(np.eye(256, dtype=np.float32), w)).T, dense.astype(np.float32)
    )


def test_matmul_takes_the_layer_it_is_told_even_when_traced():
    w, dense = random_weight("q5_1", 4, 3, 8, 64)
    x = np.random.default_rng(5).standard_normal((2, 64)).astype(np.float32)
    traced = jax.jit(lambda layer: matmul(jnp.asarray(x), w, layer))
    for layer in range(3):
        assert relative_error(traced(layer), x.astype(np.float64) @ dense[layer].T) < 1e-6


def test_a_stack_of_mixed_formats_finds_each_layer():
    a, dense_a = random_weight("q4_k", 6, 2, 8, 256)
    b, dense_b = random_weight("q6_k", 7, 1, 8, 256)
    stack = LayerStack((a, b), ((0, 0), (1, 0), (0, 1)))
    x = np.random.default_rng(8).standard_normal((2, 256)).astype(np.float32)
    traced = jax.jit(lambda layer: matmul(jnp.asarray(x), stack, layer))
    known = jax.jit(lambda layer: matmul(jnp.asarray(x), stack, layer), static_argnums=0)
    for layer, dense in enumerate([dense_a[0], dense_b[0], dense_a[1]]):
        assert relative_error(traced(layer), x.astype(np.float64) @ dense.T) < 1e-6
        assert relative_error(known(layer), x.astype(np.float64) @ dense.T) < 1e-6


def test_matmul_under_vmap_and_grad():
    w, dense = random_weight("q8_0", 9, 8, 64)
    x = np.random.default_rng(10).standard_normal((5, 64)).astype(np.float32)
    np.testing.assert_allclose(
        jax.vmap(lambda row: matmul(row, w))(x), matmul(jnp.asarray(x), w), rtol=2e-5, atol=1e-6
    )
    gradient = jax.grad(lambda x: matmul(x, w).sum())(jnp.asarray(x))
    assert relative_error(gradient, np.broadcast_to(dense.sum(0), x.shape)) < 1e-6


def refused(op, message, error=ValueError, **changes):
    """Call an op with arguments that fit but for the changes."""
    w = fitting
    x, pages, positions = jnp.zeros((1, 64)), jnp.zeros((1, 2, 8, 2, 16)), jnp.zeros((1, 3), jnp.int32)
    fits = {
        matmul: {"x": x, "w": w(8, 64)},
        gated: {"x": x, "gate": w(8, 64), "up": w(8, 64)},
        attention: {"q": jnp.zeros((1, 3, 4, 16)), "num_keys": 3},
        attend: {
            "qkv": jnp.zeros((1, 3, 8 * 16)), "rotation": (jnp.zeros((1, 3, 8)),) * 2, "interleaved": False,
            "norms": (None, None), "eps": 0.0, "num_keys": 3,
        },
    }  # fmt: skip
    arguments = fits[op]
    if op in (attention, attend):
        cache = {"k_pages": pages, "v_pages": pages, "block_table": jnp.zeros((1, 2), jnp.int32)}
        arguments |= cache | {"positions": positions, "layer": 0}
    op(**arguments)
    with pytest.raises(error, match="^" + re.escape(f"{op.__name__}: ") + message):
        op(**arguments | changes)


@pytest.mark.parametrize("op", [matmul, gated])
def test_products_refuse_what_does_not_fit(op):
    refused(op, r"x ends in 63 but the weight is 8 x 64 \(N x K\); give x as", x=jnp.zeros((1, 63)))
    refused(op, "x is a scalar but", x=jnp.float32(1))
    refused(op, r"x is int32; .*astype\(jnp.float32\)", TypeError, x=jnp.zeros((1, 64), jnp.int32))
    refused(op, r"gamma is \[63\]; the norm of x needs \[64\] or", gamma=jnp.ones(63))
    refused(op, r"gamma has 3 layers; say which by layer", gamma=jnp.ones((3, 64)))
    refused(op, "(w|gate) is one matrix, so there is no layer 1 of it", layer=1)
    name = "w" if op is matmul else "gate"
    padded = fitting(8, 64).replace(shape=(8, 80))
    stack = LayerStack((fitting(3, 8, 64),), ((0, 0), (0, 1), (0, 2)))
    refused(
        op, f"{name} has 80 columns, no multiple of the 32 in a block of q8_0; pad K to 96", **{name: padded}
    )
    refused(op, f"{name} is a stack of 3 layers; say which by layer", **{name: stack})
    refused(op, f"{name} is a stack of 3 layers; say which by layer", **{name: stack.parts[0]})
    refused(op, f"layer is 3, but {name} has 3 layers", **{name: stack}, layer=3)
    if op is matmul:
        refused(op, r"residual is \[8\], but the product is \[1, \d+\]", residual=jnp.zeros(8))
    else:
        refused(op, r"gate 8 x 64 and up 16 x 64 .*must have the same shape",
                gate=fitting(8, 64), up=fitting(16, 64))  # fmt: skip


@pytest.mark.parametrize("op", [attention, attend])
def test_attention_refuses_what_does_not_fit(op):
    wide, ints = jnp.zeros((1, 2, 8, 3, 16)), jnp.zeros((1, 3), jnp.int32)
    refused(op, r"k_pages are .*and v_pages .*both are one cache's", v_pages=wide)
    refused(op, r"positions are \[1, 2\], but .* 1 rows of 3 tokens; give \[1, 3\]", positions=ints[:, :2])
    refused(op, r"block_table is \[2, 2\]; 1 rows need", block_table=jnp.zeros((2, 2), jnp.int32))
    refused(op, "positions is float32; it holds integers", TypeError, positions=ints.astype(jnp.float32))
    if op is attention:
        refused(op, "4 query heads do not divide into 3 KV heads", k_pages=wide, v_pages=wide)
        refused(op, r"q is \[1, 3, 4, 8\]; .*the D of the cache, 16", q=jnp.zeros((1, 3, 4, 8)))
        refused(op, "window is 0; a query sees at least itself", window=0)
        refused(op, "softcap is -1.0; it is positive", softcap=-1.0)
        refused(op, "queries are int32", TypeError, q=jnp.zeros((1, 3, 4, 16), jnp.int32))
    else:
        refused(
            op, "qkv is 120 wide; .*it must be 64 for them and a multiple of 32", qkv=jnp.zeros((1, 3, 120))
        )
        refused(op, r"qkv is \[1, 128\]; give it as \[B, T,", qkv=jnp.zeros((1, 128)))


def test_quantize_then_multiply_is_near_the_exact_product():
    rng = np.random.default_rng(12)
    dense, x = (
        rng.standard_normal((16, 256)).astype(np.float32),
        rng.standard_normal((4, 256)).astype(np.float32),
    )
    near = jax.jit(lambda x, dense, format: matmul(x, quantize(dense, format)), static_argnums=2)
    for format, error in {"f16": 1e-3, "bf16": 8e-3, "q8_0": 1e-2, "q1_0": 0.7}.items():
        assert relative_error(near(x, dense, format), x @ dense.T) < error
    with pytest.raises(
        NotImplementedError, match=r"iq2_xs has no encoder without the .*; formats that have one: .*q1_0"
    ):
        quantize(jnp.asarray(dense), "iq2_xs")
    with pytest.raises(ValueError, match="100 columns are not a multiple of its block of 32"):
        quantize(jnp.zeros((4, 100)), "q8_0")


@pytest.mark.parametrize(
    ("H", "Hkv", "D", "page_size", "pages", "seed"),
    [(4, 2, 64, 16, 3, 0), (6, 1, 128, 64, 9, 1), (3, 3, 32, 7, 50, 2)],
)
@pytest.mark.parametrize(
    ("window", "scale", "softcap", "sink"),
    [
        (None, None, None, None),
        (1, None, 0.5, None),
        (20, 0.3, None, 1.0),
        (300, None, 2.0, None),
        (10_000, 0.25, None, -1.0),
    ],
)
def test_attention_reads_shuffled_pages_like_a_contiguous_cache(
    H, Hkv, D, page_size, pages, seed, window, scale, softcap, sink
):
    rng = np.random.default_rng(seed)
    B, T, L, capacity = 2, 5, 2, pages * page_size
    q = rng.standard_normal((B, T, H, D))
    k, v = rng.standard_normal((2, B, capacity, Hkv, D))
    table = rng.permutation(B * pages).reshape(B, pages)
    k_pages, v_pages = np.zeros((2, L, B * pages, page_size, Hkv, D))
    k_pages[1, table.ravel()] = k.reshape(B * pages, page_size, Hkv, D)
    v_pages[1, table.ravel()] = v.reshape(B * pages, page_size, Hkv, D)
    start = rng.integers(0, capacity - T, B)
    positions = start[:, None] + np.arange(T)
    positions[0, -2:] = -1  # padding
    f32 = [jnp.asarray(a, jnp.float32) for a in (q, k_pages, v_pages)]
    ints = [jnp.asarray(a, jnp.int32) for a in (table, positions)]
    sinks = None if sink is None else np.float32(sink * np.arange(2 * H).reshape(2, H))
    own, given = (None, None) if sinks is None else (sinks[1], jnp.asarray(sinks))
    op = functools.partial(attention, window=window, scale=scale, softcap=softcap, sinks=given)
    num_keys = int(positions.max()) + 1  # known while it is traced, and not
    # Errors of float32 are in proportion to the scores, and depend on the CPU's order of sums.
    bound = 2e-6 * max(1, (scale or 0) * D**0.5)
    for keys in (
        jax.jit(functools.partial(op, num_keys=num_keys)),
        functools.partial(jax.jit(op), num_keys=num_keys),
    ):
        got = keys(*f32, *ints, jnp.int32(1))
        for b in range(B):
            want = naive_attention(q[b], k[b], v[b], positions[b], window, scale, softcap, own)
            np.testing.assert_allclose(got[b], want, atol=bound)


def test_attend_hands_on_window_scale_softcap_and_sinks():
    rng = np.random.default_rng(3)
    B, T, H, Hkv, D, page_size, pages = 1, 9, 4, 2, 16, 4, 3
    qkv = rng.standard_normal((B, T, H + 2 * Hkv, D))
    cache = jnp.zeros((2, pages, page_size, Hkv, D))
    table, positions = np.array([[2, 0, 1]]), np.arange(T)[None]
    op = functools.partial(
        attend, jnp.asarray(qkv, jnp.float32).reshape(B, T, -1), cache, cache, jnp.asarray(table),
        jnp.asarray(positions), 1, rotation=(jnp.ones((B, T, D // 2)), jnp.zeros((B, T, D // 2))),
        interleaved=False, norms=(None, None), eps=0.0, num_keys=T, window=3, scale=0.7, softcap=1.5,
        sinks=jnp.arange(2 * H, dtype=jnp.float32).reshape(2, H) - 4,
    )  # fmt: skip
    q, k, v = np.split(qkv[0], (H, H + Hkv), axis=1)
    want = naive_attention(q, k, v, positions[0], 3, 0.7, 1.5, np.arange(H))
    np.testing.assert_allclose(op()[0][0].reshape(T, H, D), want, atol=2e-6)
    keep = {"scores": lambda x: x, "pattern": lambda x: x}  # which computes all keys at once
    np.testing.assert_allclose(op(taps=keep)[0][0].reshape(T, H, D), want, atol=2e-6)


def test_attention_of_known_length_can_be_differentiated():
    q, k, v = (jax.random.normal(key, (1, 4, 2, 8)) for key in jax.random.split(jax.random.key(0), 3))
    table, positions = jnp.zeros((1, 1), jnp.int32), jnp.arange(4)[None]

    @jax.jit
    def loss(v):
        return attention(q, k[None], v[None], table, positions, 0, num_keys=4).sum()

    numeric = (loss(v.at[0, 1, 0, 0].add(1e-2)) - loss(v.at[0, 1, 0, 0].add(-1e-2))) / 2e-2
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(v)[0, 1, 0, 0], numeric, rtol=1e-3)


def test_the_derivative_of_windows_and_softcaps_is_that_of_the_formula():
    q, k, v = (jax.random.normal(key, (6, 2, 8)) for key in jax.random.split(jax.random.key(1), 3))
    table, positions = jnp.arange(3)[None], jnp.arange(6)

    def paged(q, k, v):
        pages = (x.reshape(1, 3, 2, 2, 8) for x in (k, v))
        rest = {"num_keys": 6, "window": 3, "scale": 0.9, "softcap": 1.5}
        return (attention(q[None], *pages, table, positions[None], 0, **rest) ** 2).sum()

    def formula(q, k, v):
        scores = 1.5 * jnp.tanh(0.9 / 1.5 * jnp.einsum("thd,shd->hts", q, k, precision="highest"))
        distance = positions[:, None] - positions
        weights = jax.nn.softmax(jnp.where((distance >= 0) & (distance < 3), scores, -jnp.inf))
        return (jnp.einsum("hts,shd->thd", weights, v, precision="highest") ** 2).sum()

    got, want = (jax.jit(jax.grad(f, argnums=(0, 1, 2)))(q, k, v) for f in (paged, formula))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("width", [64, 100, 576, 2304])
@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_norms_on_a_cpu_have_the_same_bits_in_every_number_of_rows(norm, width):
    """And are float64's, with their derivative."""
    rng = np.random.default_rng(width)
    x, gamma = rng.standard_normal((66, width)).astype(np.float32) + 0.5, rng.uniform(0.5, 2, width)
    gamma = gamma.astype(np.float32)
    run = jax.jit(lambda x: norm(x, gamma, 1e-6))
    whole = np.asarray(run(x))
    for rows in (1, 2, 7, 33):
        np.testing.assert_array_equal(run(x[:rows]), whole[:rows])
    exact = x - x.mean(-1, keepdims=True, dtype=np.float64) if norm is layer_norm else np.float64(x)
    exact = gamma * exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(whole, exact, rtol=1e-5, atol=1e-6)
    v = rng.standard_normal(x[:1].shape).astype(np.float32)
    _, slope = jax.jit(lambda x: jax.jvp(run, (x,), (v,)))(x[:1])
    gradient = jax.jit(jax.grad(lambda x: (run(x) * v).sum()))(x[:1])
    step = 1e-2
    near = (np.asarray(run(x[:1] + step * v)) - np.asarray(run(x[:1] - step * v))) / (2 * step)
    np.testing.assert_allclose(slope, near, atol=2e-3)
    np.testing.assert_allclose((gradient * v).sum(), (slope * v).sum(), rtol=1e-3)
