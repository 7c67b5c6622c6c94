"""grad, vmap, scan and shard_map of the public ops, against dense float64 and against one call a row."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    GELU,
    GELU_TANH,
    SILU,
    LayerStack,
    Products,
    QTensor,
    Rows,
    clamped_swiglu,
    dequantize,
    device,
    for_device,
    formats,
    gated,
    matmul,
    selection,
)
from pallas_kernels.matmul import reference
from pallas_kernels.problems import Matmul

EPS, K, N, LAYERS = 1e-5, 256, 32, 3


def some(names, every_day=("q1_0", "q4_k", "mxfp4", "bf16")):
    """Transformations know no format, only how one is dequantized: everyday tests have one of each family."""
    return [name if name in every_day else pytest.param(name, marks=pytest.mark.slow) for name in names]


EVERY_FORMAT = some(formats.names())
KERNELS = some(formats.names("bit") + formats.names("int"))


@functools.partial(jax.jit, static_argnums=(0, 2, 3))  # outside of jit each operation would be compiled alone
def weight(format, seed, n=N, layers=LAYERS):
    """Random blocks of n x K, stacked by layer."""
    lead = (layers, n, K // formats.get(format).WEIGHTS)
    fields = formats.random_fields(format, jax.random.key(seed), lead, 0.0, K**-0.5)
    return QTensor(fields, format, (n, K))


dense_of = jax.jit(dequantize)


def stack(w):
    return LayerStack((w,), tuple((0, layer) for layer in range(LAYERS)))


def numbers(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def dense_norm(x, gamma):
    return gamma * x / jnp.sqrt((x * x).mean(-1, keepdims=True) + EPS)


def ffn(x, gate, up, down, layer, *, gamma=None, residual=None, activation=SILU):
    hidden = gated(x, gate, up, layer, activation=activation, gamma=gamma, eps=EPS)
    return matmul(hidden, down, layer, residual=residual)


def dense_swiglu(g, u):
    return g / (1 + jnp.exp(-g)) * u


def dense_ffn(x, gate, up, down, gamma, residual, hidden=dense_swiglu):
    n = dense_norm(x, gamma)
    return hidden(n @ gate.T, n @ up.T) @ down.T + residual


def in_float64(f, *arguments):
    with jax.enable_x64(True):
        out = f(*(None if a is None else jnp.asarray(np.asarray(a), jnp.float64) for a in arguments))
        return jax.tree.map(np.asarray, out)


def assert_near(got, want, limit=2e-6):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) < limit * np.linalg.norm(want)


# ---- the backward pass ----


def check_gradients(op, dense_op, *arguments):
    """op(x, gamma, residual, layer), a scalar, and its equal on dense weights: value and gradients."""
    x, gamma, residual = numbers(6, 2, K), 1 + numbers(7, LAYERS, K), numbers(8, 2, K)
    layer, of = 1, (0, 1, 2)
    got = jax.jit(jax.value_and_grad(op, of))(x, gamma, residual, jnp.int32(layer))
    want = in_float64(jax.jit(jax.value_and_grad(dense_op, of)), x, gamma[layer], residual, *arguments)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-4)
    assert_near(got[1][0], want[1][0])
    assert_near(got[1][1][layer], want[1][1])
    assert not got[1][1][0].any()  # another layer's norm
    assert_near(got[1][2], want[1][2])


@pytest.mark.parametrize("format", EVERY_FORMAT)
def test_gradients_of_a_product_are_the_dense_ones(format):
    """To x, to the norm's gamma and to the residual; the layer is traced, as in a scan over layers."""
    w, c = weight(format, 1, K), numbers(9, 2, K)
    check_gradients(
        lambda x, gamma, r, i: (matmul(x, w, i, gamma=gamma, eps=EPS, residual=r) * c).sum(),
        lambda x, gamma, r, w, c: ((dense_norm(x, gamma) @ w.T + r) * c).sum(),
        dense_of(w)[1], c,
    )  # fmt: skip


@pytest.mark.parametrize("format", ["q1_0", "q4_k", "f32"])
def test_gradients_of_a_feed_forward_are_the_dense_ones(format):
    gate, up, down = (weight(format, seed, K) for seed in (1, 2, 3))
    c = numbers(9, 2, K)
    check_gradients(
        lambda x, gamma, r, i: (ffn(x, gate, up, down, i, gamma=gamma, residual=r) * c).sum(),
        lambda x, gamma, r, g, u, d, c: (dense_ffn(x, g, u, d, gamma, r) * c).sum(),
        *(dense_of(w)[1] for w in (gate, up, down)), c,
    )  # fmt: skip


OTHERS = {
    GELU_TANH: lambda g, u: g / 2 * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * u,
    GELU: lambda g, u: g / 2 * (1 + jax.lax.erf(g / np.sqrt(2))) * u,
    clamped_swiglu(0.5): lambda g, u: dense_swiglu(jnp.minimum(g, 0.5), jnp.clip(u, -0.5, 0.5)),
}


@pytest.mark.parametrize("activation", OTHERS, ids=str)
def test_gradients_through_other_activations(activation):
    gate, up, down = weight("q8_0", 3, K), weight("q4_k", 1, K), weight("q1_0", 2, K)
    c = numbers(9, 2, K)
    check_gradients(
        lambda x, gamma, r, i: (
            ffn(x, *map(stack, (gate, up, down)), i, gamma=gamma, residual=r, activation=activation) * c
        ).sum(),
        lambda x, gamma, r, g, u, d, c: (dense_ffn(x, g, u, d, gamma, r, OTHERS[activation]) * c).sum(),
        *(dense_of(w)[1] for w in (gate, up, down)), c,
    )  # fmt: skip


def mixed(seed, n=N):
    """Layers of different formats, one of them two formats below each other."""
    above, below = weight("q8_0", seed + 2, n // 2, 1), weight("q5_0", seed + 3, n - n // 2, 1)
    parts = (weight("q4_k", seed, n, 1), weight("q6_k", seed + 1, n, 1), Rows((above, below)))
    return LayerStack(parts, ((2, 0), (0, 0), (1, 0)))


def as_on_a_gpu(format, seed, n=N):
    """`weight` as kernels read it, and dense."""

    @jax.jit
    def made():
        w = weight(format, seed, n)
        return for_device(w), dequantize(w)

    return made()


@jax.jit
def dense_layers(stack):
    found = []
    for part, i in stack.where:
        w = stack.parts[part]
        found.append(jnp.concatenate([dense_of(p[i]) for p in (w.pieces if isinstance(w, Rows) else (w,))]))
    return found


@pytest.mark.parametrize("transform", ["unrolled", "scan"])
def test_gradient_through_layers_of_mixed_formats(transform):
    gate, up, down = mixed(1, K), mixed(11, K), mixed(21, K)
    x, gamma, c = numbers(2, 2, K), 1 + numbers(3, LAYERS, K), numbers(4, 2, K)

    def one(x, layer):
        return ffn(x, gate, up, down, layer, gamma=gamma, residual=x), None

    def loss(x):
        if transform == "scan":
            x, _ = jax.lax.scan(one, x, jnp.arange(LAYERS))
        else:
            for layer in range(LAYERS):
                x, _ = one(x, layer)
        return (x * c).sum()

    def dense_loss(x, gamma, c, *weights):
        for layer in range(LAYERS):
            x = dense_ffn(x, *weights[3 * layer : 3 * layer + 3], gamma[layer], x)
        return (x * c).sum()

    weights = [w for of_layer in zip(*map(dense_layers, (gate, up, down)), strict=True) for w in of_layer]
    assert_near(jax.jit(jax.grad(loss))(x), in_float64(jax.jit(jax.grad(dense_loss)), x, gamma, c, *weights))


def test_the_backward_pass_of_a_scan_keeps_no_decoded_weights():
    """What it needs beside its arguments is a few dense layers, not all of them."""
    layers, n = 32, 1024
    w = jax.eval_shape(lambda: weight("q8_0", 1, K, layers))
    w, x = LayerStack((w,), tuple((0, i) for i in range(layers))), jax.ShapeDtypeStruct((n, K), jnp.float32)

    def loss(x, w):
        return jax.lax.scan(lambda x, i: (matmul(x, w, i), None), x, jnp.arange(layers))[0].sum()

    memory = jax.jit(jax.grad(loss)).lower(x, w).compile().memory_analysis()
    kept = layers * n * K * 4  # x of every layer would do; a product of known weights needs not even that
    assert memory.temp_size_in_bytes < kept / 4


def test_forward_mode_and_second_derivatives():
    up, down = weight("q4_k", 1, K), weight("q1_0", 2, K)
    f = lambda x: ffn(x, up, up, down, 0).sum()  # noqa: E731

    @jax.jit
    def derivatives(x, v):
        slope = jax.jvp(f, (x,), (v,))[1], jax.grad(f)(x) @ v
        return slope, (jax.jvp(jax.grad(f), (x,), (v,))[1], jax.grad(lambda x: jax.grad(f)(x) @ v)(x))

    slope, curvature = derivatives(numbers(3, K), numbers(4, K))
    np.testing.assert_allclose(*slope, rtol=1e-4)
    np.testing.assert_allclose(*curvature, rtol=1e-3, atol=1e-4)


# ---- vmap ----


def ops(w, gamma):
    return {
        "matmul": lambda x: matmul(x, w, 1, gamma=gamma, eps=EPS),
        "matmul and residual": lambda x: matmul(x, w, 1, residual=x),
        "gated": lambda x: gated(x, w, w, 1, gamma=gamma, eps=EPS),
        "feed-forward": lambda x: ffn(x, w, w, w, 1, gamma=gamma, residual=x),
    }


OPS = list(ops(None, None))


# The feed-forward has the norm, the residual and the product of two matrices too.
SLOW = [pytest.param(op, marks=pytest.mark.slow) for op in ("matmul and residual", "gated")]


@pytest.mark.parametrize("op", ["matmul", "feed-forward", *SLOW])
def test_vmap_is_one_call_a_row(op):
    f = ops(weight("q4_k", 1, K), 1 + numbers(2, LAYERS, K))[op]
    x = numbers(3, 4, 2, K)
    of_row = jax.jit(f)
    want = np.stack([of_row(row) for row in x])
    np.testing.assert_allclose(jax.vmap(f)(x), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.vmap(jax.vmap(f)))(x), want, rtol=1e-5, atol=1e-5)
    gradient = jax.jit(jax.grad(lambda x: f(x).sum()))
    want = np.stack([gradient(row) for row in x])
    np.testing.assert_allclose(jax.vmap(gradient)(x), want, rtol=1e-4, atol=1e-5)


@pytest.fixture
def kernel(monkeypatch):
    """Stands in for kernels, which need a GPU: the definition from the tiles that they read. Keeps the shape
    of each x that it is called with."""
    called, by_definition = [], jax.jit(reference.run, static_argnums=(5, 7))

    def run(x, weights, part_layer, layer, gamma, eps, residual, activation):
        assert all(w.tiled for w in weights)
        called.append(x.shape)
        return by_definition(x, weights, part_layer, layer, gamma, eps, residual, activation)

    def replaced(candidate):
        if candidate.op is not Matmul or candidate.name == "reference":
            return candidate
        return dataclasses.replace(candidate, run=run if candidate.tiled else reference.run, offers=())

    monkeypatch.setattr(device, "default", lambda: device.GPUS["sm_90"])
    monkeypatch.setattr(selection, "_CANDIDATES", [replaced(c) for c in selection._CANDIDATES])
    return called


@pytest.mark.parametrize("format", KERNELS)
def test_kernels_get_the_rows_of_vmap_in_one_call(format, kernel):
    (w, dense), x = as_on_a_gpu(format, 1, K), numbers(3, 4, K)
    want = dense[1]
    got = jax.vmap(lambda row: matmul(row, w, 1))(x)
    assert_near(got, x @ want.T, 1e-5)
    assert kernel.pop() == (4, K)
    jax.vmap(jax.vmap(lambda row: gated(row, w, w, 1)), in_axes=1)(numbers(4, 2, 3, K))
    assert kernel.pop() == (3, 2, K)
    # The residual alone, or x alone.
    residual = numbers(5, 4, K)
    got = jax.vmap(lambda r: matmul(x[0], w, 1, residual=r))(residual)
    assert_near(got, x[0] @ want.T + residual, 1e-5)
    assert kernel.pop() == (K,)
    got = jax.vmap(lambda row: matmul(row, w, 1, residual=residual[0]))(x)
    assert_near(got, x @ want.T + residual[0], 1e-5)
    assert kernel.pop() == (4, K)


def test_more_rows_of_vmap_than_a_kernel_takes_go_where_many_rows_go(kernel):
    w, x = for_device(weight("q1_0", 1)), numbers(3, 9, K)  # too few outputs for a kernel of prefill
    assert w.products.kernel(9) == "cublas"
    assert_near(jax.vmap(lambda row: matmul(row, w, 1))(x), x @ dense_of(w)[1].T, 1e-5)
    assert all(shape == (K,) for shape in kernel)  # of tracing one row, before vmap makes nine of it


def test_vmap_over_layers_and_weights_is_one_launch_each(kernel):
    w, x, gamma = for_device(weight("q4_k", 1, K)), numbers(3, LAYERS, K), 1 + numbers(4, LAYERS, K)
    want = jnp.einsum("lk,lnk->ln", x, dense_of(w))
    assert_near(jax.vmap(lambda row, i: matmul(row, w, i))(x, jnp.arange(LAYERS)), want, 1e-5)
    assert_near(jax.vmap(lambda row, one: matmul(row, one))(x, w), want, 1e-5)
    got = jax.vmap(lambda g: matmul(x[0], w, 1, gamma=g, eps=EPS))(gamma)
    assert_near(got, dense_norm(x[0], gamma) @ dense_of(w)[1].T, 1e-5)
    assert set(kernel) == {(K,)}


@pytest.mark.parametrize("format", KERNELS)
def test_the_gradient_through_a_kernel_is_the_definitions(format, kernel):
    (w, _), blocks = as_on_a_gpu(format, 1, K), weight(format, 1, K)
    x, gamma = numbers(2, 2, K), 1 + numbers(3, LAYERS, K)

    @jax.jit
    def gradient(w):
        return jax.grad(lambda x: (ffn(x, w, w, w, 2, gamma=gamma, residual=x) ** 2).sum())(x)

    assert_near(gradient(w), gradient(blocks), 1e-5)
    assert kernel  # the forward pass was the kernel's


def test_gradients_with_respect_to_dense_weights_are_finite_differences():
    """Whatever they are stored in: float32, and where a matrix is a QTensor of a stack."""
    w, x = stack(weight("f32", 1)), numbers(2, 2, K)
    field = next(iter(w.parts[0].fields))

    def loss(values):
        with_values = w.replace(parts=(w.parts[0].replace(fields={field: values}),))
        return (matmul(x, with_values, 1) ** 2).sum()

    values = w.parts[0].fields[field]
    got = jax.grad(loss)(values)
    dense = dense_of(w.parts[0])[1]
    want = 2 * jnp.einsum("rn,rk->nk", x @ dense.T, x)
    assert_near(got[1].reshape(want.shape), want, 1e-5)
    assert not got[0].any() and not got[2].any()


@pytest.mark.parametrize("format", ["q4_k", "q1_0", "q8_0"])
def test_a_gradient_with_respect_to_integers_is_refused(format):
    w, x = weight(format, 1)[0], numbers(2, 2, K)

    def loss(scales):
        return matmul(x, w.replace(fields={**w.fields, "d": scales})).sum()

    with pytest.raises(TypeError, match=f"no gradient with respect to {format} weights, which are integers"):
        jax.grad(loss)(w.fields["d"].astype(jnp.float16))


# ---- shard_map: on_eight_devices.py ----


def check_shard_map(names, split, drawn):
    """Rows over eight devices; outputs of `split`, a matrix, over devices."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    gamma, x = 1 + numbers(2, LAYERS, K), numbers(3, 8 * 16, K)
    for kernel in ("reference", "cublas"):
        w = drawn.replace(products=Products(((None, kernel),)))
        for name in names if kernel == "reference" else ("feed-forward",):
            f = ops(w, gamma)[name]
            shared = functools.partial(jax.shard_map, mesh=mesh, in_specs=spec("d"), out_specs=spec("d"))
            limit = {"rtol": 1e-5, "atol": 1e-5, "err_msg": name}

            def loss(f, x):
                y = f(x)
                return (y**2).sum(), y

            both = [jax.jit(jax.grad(functools.partial(loss, g), has_aux=True))(x) for g in (shared(f), f)]
            (got, values), (want, of_one) = both
            assert_near(got, want, 1e-5)
            np.testing.assert_allclose(values, of_one, **limit)
            if kernel == "reference":  # and without derivatives
                np.testing.assert_allclose(jax.jit(shared(jax.vmap(f)))(x), of_one, **limit)
    # Outputs over devices: each has its rows of the weights.
    product = jax.shard_map(
        lambda x, fields: matmul(x, split.replace(fields=fields, shape=(K // 8, K))),
        mesh=mesh, in_specs=(spec(), spec("d")), out_specs=spec(None, "d"),
    )  # fmt: skip
    want = jax.jit(matmul)(x, split)
    np.testing.assert_allclose(jax.jit(product)(x, split.fields), want, rtol=1e-5, atol=1e-5)
