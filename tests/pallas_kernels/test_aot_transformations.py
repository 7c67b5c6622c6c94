"""Kernels compile under vmap and where derivatives are taken."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest

import bonsai_jax as bj
from bonsai_jax import training
from bonsai_jax.decoding import steps as core
from checkpoints import synth
from pallas_kernels import Products, QTensor, experts_ffn, for_device, formats, gated, matmul
from tests.pallas_kernels.aot import as_on_a_gpu, compile_for_gpu, shapes
from tests.pallas_kernels.aot_kernels import stack_of_experts

pytestmark = pytest.mark.aot

VALUE_AND_GRADIENT = lambda f: jax.value_and_grad(lambda x: f(x).sum())  # noqa: E731
PRODUCTS = {  # what is done with a feed-forward, and the shape of x
    "vmap over 4 rows": (jax.vmap, (4, 256)),
    "vmap over 4 of 2 rows": (jax.vmap, (4, 2, 256)),
    "vmap over 40 rows": (jax.vmap, (40, 256)),
    "gradient": (VALUE_AND_GRADIENT, (2, 256)),
    "gradient of each row": (lambda f: jax.vmap(VALUE_AND_GRADIENT(f)), (4, 256)),
}


# Every transformation for one format of each family, and every format under one, which is slow: what is done
# with a launch does not depend on the format.
ONE_OF_EACH = ("q1_0", "q4_k")
OF_PRODUCTS = [
    pytest.param(format, transform, marks=[] if format in ONE_OF_EACH else pytest.mark.slow)
    for format in formats.names("bit") + formats.names("int")
    for transform in PRODUCTS
    if format in ONE_OF_EACH or transform == "vmap over 4 rows"
]


@pytest.mark.parametrize(("format", "transform"), OF_PRODUCTS)
def test_a_feed_forward_compiles_under_vmap_and_grad(format, transform):
    """Kernels have neither a derivative nor a rule for vmap: as many launches as without."""
    draw = lambda: formats.random_fields(format, jax.random.key(0), blocks, 0.0, 1.0)  # noqa: E731
    blocks = (3, 256, 256 // formats.get(format).WEIGHTS)
    with as_on_a_gpu((9, 0)):
        w = jax.eval_shape(lambda: for_device(QTensor(draw(), format, (256, 256)), matrices=2))
        change, shape = PRODUCTS[transform]
        gamma = jax.ShapeDtypeStruct((3, 256), jnp.float32)

        def f(x, w, gamma, layer):
            def feed_forward(x):
                return matmul(gated(x, w, w, layer, gamma=gamma, eps=1e-6), w, layer, residual=x)

            return change(feed_forward)(x)

        x, layer = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
        compiled = compile_for_gpu(f, x, w, gamma, layer)
    launches = compiled.as_text().count('custom_call_target="mosaic_gpu')
    rows = math.prod(shape[:-1])
    # Of each product activations are rounded by a launch of their own; or around cuBLAS's GEMM there are the
    # norm's, and one for the weights of each product.
    launches_of = {"bit_decode_b1": 2, "int_decode": 2, "cublas": 3}
    expected = launches_of.get(w.products.kernel(rows), 4)
    assert launches == expected
    assert " while(" not in compiled.as_text()


@pytest.mark.parametrize(
    ("source", "rows", "schedule"),
    [
        ("tiny-qwen3:q1_0", 1, "one_launch"),
        ("bonsai-27b:q1_0", 4, "layer_gemms"),
        ("bonsai-27b:q1_0", 12, "layer_gemms"),
    ],
)
def test_steps_of_several_caches_compile_under_vmap(source, rows, schedule, monkeypatch):
    """As for seeds, each with a state of its own; of the 27B four layers, one of them with attention."""
    four = dataclasses.replace(synth.MODELS["bonsai-27b"], layers=4)
    monkeypatch.setitem(synth.MODELS, "bonsai-27b", four)
    with as_on_a_gpu((9, 0)):
        params, state, config = shapes(f"synth:{source}", rows=rows)
        assert params.step.schedule(rows) == schedule
        states = jax.tree.map(lambda a: jax.ShapeDtypeStruct((3, *a.shape), a.dtype), state)
        step = jax.vmap(lambda params, state: core.step(params, state, config), in_axes=(None, 0))
        compile_for_gpu(step, params, states)


def test_offloaded_streams_leave_the_device():
    """remat="offload": the host has the streams of all layers, and the device that much less."""
    plan = training.plan("synth:tiny-llama:f32", "f32", bj.RunConfig())
    texts = jax.ShapeDtypeStruct((8, 256), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.int32)

    def memory(remat):
        def loss(weights, tokens, lengths):
            params = plan.rounded(weights)
            out, _ = bj.forward(params, tokens, lengths, plan.config, remat=remat, logits=False)
            return jnp.square(out).sum()

        compiled = compile_for_gpu(jax.grad(loss), jax.eval_shape(plan.weights), *texts)
        return compiled.memory_analysis()

    again, offloaded = memory(True), memory("offload")
    streams = plan.config.num_layers * 8 * 256 * plan.config.hidden * 4
    assert (again.host_temp_size_in_bytes, offloaded.host_temp_size_in_bytes) == (0, streams)
    assert offloaded.temp_size_in_bytes < again.temp_size_in_bytes - 0.9 * streams


@pytest.mark.slow
def test_gradients_of_rows_of_sorted_experts_compile():
    """Under vmap, a row after the other; derivatives by the reference."""
    stack = functools.partial(stack_of_experts, lead=(2, 2), products=Products(((None, "int_decode"),)))
    stacks = stack("q4_k", 256, 512), stack("q4_k", 256, 512), stack("q6_k", 512, 256)

    def loss(x, weights, chosen, layer, stacks):
        return experts_ffn(x, *stacks, chosen, weights, layer).sum()

    f = jax.vmap(jax.value_and_grad(loss, argnums=(0, 1)), in_axes=(0, 0, 0, None, None))
    of_pair, f32 = functools.partial(jax.ShapeDtypeStruct, (3, 17, 1)), jnp.float32
    arguments = jax.ShapeDtypeStruct((3, 17, 512), f32), of_pair(f32), of_pair(jnp.int32)
    with as_on_a_gpu((9, 0)):
        compiled = compile_for_gpu(f, *arguments, jax.ShapeDtypeStruct((), jnp.int32), stacks)
    assert "expert_places" in compiled.as_text()
