"""The decode step and prefill compile for GPUs, in place and without a second copy of anything large."""

import dataclasses
import functools
import math
import os
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax import architectures, model
from bonsai_jax import decoding as core
from checkpoints import open_checkpoint, synth
from pallas_kernels import (
    Products,
    QTensor,
    cache_layouts,
    delta,
    device,
    experts_ffn,
    ffn,
    for_device,
    formats,
)
from pallas_kernels.attention import prefill_pages
from pallas_kernels.attention.decode import decode_attention
from pallas_kernels.attention.prefill_sm80 import mma_attention
from pallas_kernels.attention.prefill_sm90 import prefill_attention
from pallas_kernels.delta.chunks import delta_chunks
from pallas_kernels.delta.step import delta_step
from pallas_kernels.experts import grouped, kq_experts
from pallas_kernels.matmul import q1_decode_b1, q1_decode_s8
from pallas_kernels.matmul.activations_float16 import activations_float16
from pallas_kernels.matmul.activations_int8 import activations_int8
from pallas_kernels.matmul.activations_rotated import activations_rotated
from pallas_kernels.matmul.kq_decode import kq_decode
from pallas_kernels.matmul.kq_dequantize import kq_dequantize
from pallas_kernels.matmul.kq_prefill_sm90 import kq_prefill_sm90
from pallas_kernels.matmul.q1_prefill_sm90 import q1_prefill_sm90
from pallas_kernels.problems import Matmul
from pallas_kernels.qtensor import tile
from pallas_kernels.rotation import Rotation
from pallas_kernels.sampling import Rules
from pallas_kernels.sampling.kernel import draw
from pallas_kernels.selection import choose
from pallas_kernels.step import experts_layers, layer_products
from pallas_kernels.step.decode_layers import Shapes, decode_layers
from tests.pallas_kernels.aot import OTHERS, TARGETS, Compilers, compile_for_gpu, for_target

pytestmark = pytest.mark.aot


@pytest.fixture(scope="session")
def compilers(tmp_path_factory):
    made = Compilers(tmp_path_factory.mktemp("compilers"))
    yield made
    made.close()


def test_a_process_that_dies_fails_its_own_test_with_what_it_said(compilers):
    """As LLVM ends one."""
    target = "none"
    with pytest.raises(pytest.fail.Exception, match="for none died:\nLLVM ERROR"):
        compilers.printed(target, os.system, "echo LLVM ERROR; kill -ABRT $PPID")
    assert compilers.printed(target, os.system, "echo alive") == "alive\n"


def as_on_a_gpu(capability):
    """Choose implementations as a GPU of this compute capability would."""
    return mock.patch.object(device, "default", lambda: device.GPUS["sm_{}{}".format(*capability)])


def shapes(source, rows=1, context=2048, cache_dtype="bfloat16"):
    """Shapes of a model's weights and of a generation state, as a GPU would hold them; nothing is
    allocated."""
    checkpoint = open_checkpoint(source)
    config = architectures.config_of(checkpoint)
    run = model.resolve(bj.RunConfig(weights="packed", cache_dtype=cache_dtype), checkpoint, config)
    params = jax.eval_shape(lambda: model.load_params(checkpoint, config, run))

    def state():
        cache = bj.cache.empty(config, run, rows, context)
        sampler = bj.sampling.sampler(bj.SamplingParams(seed=0), rows, config.vocab_size)
        return core.start(cache, sampler, jnp.zeros((rows, 2), jnp.int32), jnp.ones(rows, jnp.int32))

    return params, jax.eval_shape(state), config


# Whole models for the oldest and the newest every day: of the kernels one of each kind is compiled for all.
NOT_HOPPER = [
    for_target(target, slow=target not in [(8, 0), (12, 0)])
    for target in TARGETS + OTHERS
    if target != (9, 0)
]


def check_decode(source, capability, cache_dtype="bfloat16"):
    """The decode loop compiles, its cache is aliased, and no copy of the cache is among its temporaries."""
    with as_on_a_gpu(capability):
        params, state, config = shapes(source, cache_dtype=cache_dtype)
    assert params.layers.w_down.parts[0].tiled and state.cache.impl == "decode"
    step = functools.partial(core.decode, config=config, size=8)
    compiled = compile_for_gpu(
        lambda params, state: step(params, state, limit=8),
        params,
        state,
        compute_capability=capability,
        donate_argnums=1,
    )
    cache_bytes = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((state.cache.k, state.cache.v)))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes


@pytest.mark.parametrize(
    "source",
    [
        *("synth:tiny-llama:q4_k_m", "synth:tiny-qwen3:q1_0"),
        pytest.param("synth:tiny-qwen2:q8_0", marks=pytest.mark.slow),
    ],
)
def test_decode_compiles_with_its_cache_aliased(source):
    check_decode(source, (9, 0))


@pytest.mark.parametrize(("format", "most"), [("q1_0", 8), ("q4_k", 9)])
def test_a_layer_of_a_step_of_many_rows_is_a_few_launches_and_nothing_between(format, most):
    """K-quants' activations have one scale a row, which no block of attention knows."""
    with as_on_a_gpu((9, 0)):
        params, state, config = shapes(f"synth:tiny-qwen3:{format}", rows=64, context=256)
        assert params.step.schedule(64) == "layer_gemms"
        step = functools.partial(core.read, config=config)
        tokens, ones = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((64, 1), (64,)))
        compiled = compile_for_gpu(step, params, state.cache, tokens, ones, donate_argnums=1)
    text = compiled.as_text()
    assert text.count('custom_call_target="mosaic_gpu') == most * config.num_layers
    assert "add_fusion" not in text.split("ENTRY")[1]


def test_a_model_with_a_cache_of_bytes_compiles():
    check_decode("synth:tiny-qwen3:q1_0", (9, 0), "int8")
    check_prefill("synth:tiny-qwen3:q1_0", (9, 0), "int8")


@pytest.mark.parametrize("capability", NOT_HOPPER, ids=str)
def test_decode_compiles_for_other_gpus(capability, compilers):
    compilers.printed(capability, check_decode, "synth:tiny-qwen3:q1_0", capability)


def bytes_of(step: str, memory) -> str:
    return (
        f"{step}: a decode step has {memory.temp_size_in_bytes:,} bytes of temporaries and updates "
        f"{memory.alias_size_in_bytes:,} in place"
    )


def test_the_8b_step_reads_its_weights_in_place():
    """Through kernels no weight is copied or decoded to memory: the temporaries are a few vectors."""
    with as_on_a_gpu((9, 0)):
        params, state, config = shapes("synth:bonsai-8b:q1_0")
    compiled = compile_for_gpu(
        lambda params, state: core.step(params, state, config), params, state, donate_argnums=1
    )
    memory = compiled.memory_analysis()
    print(bytes_of("8B, Q1_0", memory))
    assert memory.alias_size_in_bytes >= 2 * state.cache.k.size * 2
    assert memory.temp_size_in_bytes < 8e6  # the logits and what sampling makes of them


def test_decode_of_a_mixed_8b_model_copies_neither_cache_nor_stack():
    """Through kernels no weight is copied or decoded to memory: the temporaries are a few vectors."""
    with as_on_a_gpu((9, 0)):
        params, state, config = shapes("synth:bonsai-8b:q4_k_m", rows=2)
    compiled = compile_for_gpu(
        lambda params, state: core.step(params, state, config), params, state, donate_argnums=1
    )
    memory = compiled.memory_analysis()
    print(bytes_of("8B, Q4_K_M, 2 rows", memory))
    assert memory.alias_size_in_bytes >= 2 * state.cache.k.size * 2
    assert memory.temp_size_in_bytes < 16e6


def test_a_folded_step_is_two_launches_a_layer_and_copies_nothing(monkeypatch):
    """Bonsai 2 27B's first four layers, three with a delta net: what rotates is within products."""
    four = dataclasses.replace(synth._MODELS["bonsai-2-27b"], layers=4)
    monkeypatch.setitem(synth._MODELS, "bonsai-2-27b", four)
    with as_on_a_gpu((9, 0)):
        params, state, config = shapes("synth:bonsai-2-27b:ptq1_0")
        compiled = compile_for_gpu(lambda p, s: core.step(p, s, config), params, state, donate_argnums=1)
    launches = compiled.as_text().count('custom_call_target="mosaic_gpu')
    assert launches == 2 * 4 + 1 + 1 + 2  # and the first layer's inputs, the output matrix, a draw
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 2e6
    assert memory.alias_size_in_bytes >= 4 * state.cache.delta.s.size + 2 * 2 * state.cache.k.size


def test_experts_are_read_in_place(monkeypatch):
    """Of a step in one launch, of one of two rows and of 512 tokens: no stack is copied, and no
    layer's experts are dequantized. Layers of Qwen3-30B-A3B, but four."""
    few = dataclasses.replace(synth._MODELS["qwen3-30b-a3b"], layers=4, vocab=2048, specials=2000)
    monkeypatch.setitem(synth._MODELS, "few-a3b", few)
    with as_on_a_gpu((9, 0)):
        params, state, config = shapes("synth:few-a3b:q4_k_m")
        tokens = jax.ShapeDtypeStruct((1, 512), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
        two, _ = shapes("synth:few-a3b:q4_k_m", rows=2)[1:]
        step, of_two = (
            compile_for_gpu(lambda p, s: core.step(p, s, config), params, state, donate_argnums=1)
            for state in (state, two)
        )
        prefill = compile_for_gpu(
            lambda p, s, t, n: core.prefill(p, s, t, n, config), params, state, *tokens, donate_argnums=1
        )
    one_layer = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params.layers.expert_up)) // 4
    print(bytes_of("A3B", step.memory_analysis()), prefill.memory_analysis().temp_size_in_bytes, one_layer)
    assert step.as_text().count("experts_layers") and "kq_experts" not in step.as_text()
    assert of_two.as_text().count("kq_experts") >= 2 * 4
    assert "expert_places" in prefill.as_text() and "kq_experts" not in prefill.as_text()
    assert step.memory_analysis().temp_size_in_bytes < 1e6
    assert of_two.memory_analysis().temp_size_in_bytes < 4e6
    assert prefill.memory_analysis().temp_size_in_bytes < 2 * one_layer


@pytest.mark.slow
def test_gradients_of_rows_of_sorted_experts_compile():
    """Under vmap, a row after the other; derivatives by the reference."""
    stack = functools.partial(_stack_of_experts, lead=(2, 2), products=Products(((None, "kq_decode"),)))
    stacks = stack("q4_k", 256, 512), stack("q4_k", 256, 512), stack("q6_k", 512, 256)

    def loss(x, weights, chosen, layer, stacks):
        return experts_ffn(x, *stacks, chosen, weights, layer).sum()

    f = jax.vmap(jax.value_and_grad(loss, argnums=(0, 1)), in_axes=(0, 0, 0, None, None))
    of_pair, f32 = functools.partial(jax.ShapeDtypeStruct, (3, 17, 1)), jnp.float32
    arguments = jax.ShapeDtypeStruct((3, 17, 512), f32), of_pair(f32), of_pair(jnp.int32)
    with as_on_a_gpu((9, 0)):
        compiled = compile_for_gpu(f, *arguments, jax.ShapeDtypeStruct((), jnp.int32), stacks)
    assert "expert_places" in compiled.as_text()


def test_prefill_of_the_8b_model_compiles_in_bounded_memory():
    with as_on_a_gpu((9, 0)):
        params, state, config = shapes("synth:bonsai-8b:q1_0", context=8192)
    tokens = jax.ShapeDtypeStruct((1, 4096), jnp.int32)
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
    compiled = compile_for_gpu(
        lambda p, s, t, n: core.prefill(p, s, t, n, config), params, state, tokens, lengths, donate_argnums=1
    )
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * 4 * config.vocab_size * config.hidden


@pytest.mark.parametrize("source", ["synth:bonsai-8b:q1_0", "synth:bonsai-8b:q4_k_m"])
def test_logits_after_every_token_compile(source):
    """The output matrix as a product of many rows: 151,669 outputs, which TMA does not take as they are."""
    with as_on_a_gpu((9, 0)):
        params, state, config = shapes(source, context=512)
        tokens, lengths = jax.ShapeDtypeStruct((1, 512), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
        compile_for_gpu(
            lambda p, cache, t, n: core.extend(p, cache, t, n, config),
            params, state.cache, tokens, lengths,
        )  # fmt: skip


def check_prefill(source, capability, cache_dtype="bfloat16"):
    """Prefill of a model compiles for GPUs that have no wgmma; its attention is a kernel there too."""
    with as_on_a_gpu(capability):
        params, state, config = shapes(source, cache_dtype=cache_dtype)
        assert state.cache.prefill_impl == ("prefill_sm90" if capability == (9, 0) else "prefill_sm80")
        tokens, lengths = jax.ShapeDtypeStruct((1, 300), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
        compile_for_gpu(
            lambda p, s, t, n: core.prefill(p, s, t, n, config), params, state, tokens, lengths,
            compute_capability=capability,
        )  # fmt: skip


@pytest.mark.parametrize("capability", NOT_HOPPER, ids=str)
@pytest.mark.parametrize(
    "source", ["synth:tiny-llama:q4_k_m", pytest.param("synth:tiny-llama:q1_0", marks=pytest.mark.slow)]
)
def test_prefill_compiles_for_other_gpus(source, capability, compilers):
    compilers.printed(capability, check_prefill, source, capability)


def test_32k_tokens_of_the_8b_model_prefill_in_little_memory():
    """By kernels: nothing of the weights or the cache is copied; what is left is a chunk's activations."""
    with as_on_a_gpu((9, 0)):
        params, state, config = shapes("synth:bonsai-8b:q1_0", context=32768)
    assert params.layers.w_down.parts[0].products.of(512) == "q1_prefill_sm90"
    assert state.cache.prefill_impl == "prefill_sm90"
    tokens = jax.ShapeDtypeStruct((1, 32768), jnp.int32)
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
    compiled = compile_for_gpu(
        lambda p, s, t, n: core.prefill(p, s, t, n, config), params, state, tokens, lengths, donate_argnums=1
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * state.cache.k.size * 2
    assert memory.temp_size_in_bytes < 0.3e9


def test_prefill_of_a_mixed_8b_model_decodes_one_layer_at_a_time():
    with as_on_a_gpu((9, 0)):
        params, state, config = shapes("synth:bonsai-8b:q4_k_m", context=4096)
    assert {part.products.of(512) for part in params.layers.w_down.parts} == {"cublas"}
    tokens, lengths = jax.ShapeDtypeStruct((1, 4096), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)

    def read(params, cache, tokens, lengths):
        return core.read(params, cache, tokens, lengths, config)

    with as_on_a_gpu((9, 0)):
        compiled = compile_for_gpu(read, params, state.cache, tokens, lengths, donate_argnums=1)
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5e9


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
    for format in formats.names("q1") + formats.names("kq")
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
            return change(lambda x: ffn(x, w, w, w, layer, gamma=gamma, eps=1e-6, residual=x))(x)

        x, layer = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
        compiled = compile_for_gpu(f, x, w, gamma, layer)
    launches = compiled.as_text().count('custom_call_target="mosaic_gpu')
    rows = math.prod(shape[:-1])
    # Of each product activations are rounded by a launch of their own; or around cuBLAS's GEMM there are the
    # norm's, and one for the weights of each product.
    launches_of = {"q1_decode_b1": 2, "kq_decode": 2, "cublas": 3}
    expected = launches_of.get(w.products.of(rows), 4)
    assert launches == expected
    assert " while(" not in compiled.as_text()


def test_steps_of_several_caches_compile_under_vmap():
    """As for seeds, each with a state of its own."""
    with as_on_a_gpu((9, 0)):
        params, state, config = shapes("synth:tiny-qwen3:q1_0")
        states = jax.tree.map(lambda a: jax.ShapeDtypeStruct((3, *a.shape), a.dtype), state)
        step = jax.vmap(lambda params, state: core.step(params, state, config), in_axes=(None, 0))
        compile_for_gpu(step, params, states)


def _tiles(n, k, layers=36):
    """Words and scales of 1-bit matrices."""
    words = jax.ShapeDtypeStruct((layers, n // 16, k // 256, 32, 4), jnp.uint32)
    return words, jax.ShapeDtypeStruct((layers, n // 16, k // 128, 8), jnp.uint32)


def _product(n, k, matrices, rows, layers=36):
    gamma = jax.ShapeDtypeStruct((layers, k), jnp.float32) if matrices == 2 else None
    chosen = choose(Matmul(device.platform(), "q1_0", n, k, matrices=matrices), rows)
    kernel = {"q1_decode_b1": q1_decode_b1.q1_decode_b1, "q1_decode_s8": q1_decode_s8.q1_decode_s8}[chosen]
    f = lambda x, weights, index, gamma: kernel(x, weights, index, gamma=gamma, eps=1e-6)  # noqa: E731
    x, index = jax.ShapeDtypeStruct((rows, k), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
    return f, (x, (_tiles(n, k, layers),) * matrices, index, gamma)


def _pages(layout, *shape):
    return jax.eval_shape(lambda: cache_layouts.empty(layout, shape))


def _attention(heads, kv_heads, head_dim, normed, layout="bfloat16", rows=1, pairs=None, gated=False):
    f32, i32, pages = jnp.float32, jnp.int32, 40
    cache = _pages(layout, 4, pages, 64, kv_heads, head_dim)
    angle = jax.ShapeDtypeStruct((rows, pairs or head_dim // 2), f32)
    gamma = jax.ShapeDtypeStruct((4, head_dim), f32)
    return functools.partial(decode_attention, eps=1e-6, interleaved=not normed, gated=gated), (
        jax.ShapeDtypeStruct((rows, ((1 + gated) * heads + 2 * kv_heads) * head_dim), f32), cache, cache,
        jax.ShapeDtypeStruct((rows, pages), i32), jax.ShapeDtypeStruct((rows,), i32),
        jax.ShapeDtypeStruct((), i32), angle, angle, (gamma, gamma) if normed else None, None,
    )  # fmt: skip


def _delta_step(rows, gates_made=False):
    """As Bonsai 27B has it."""
    heads, dim, channels, hidden = 48, 128, 10240, 5120
    shape = lambda *sizes, dtype=jnp.float32: jax.ShapeDtypeStruct(sizes, dtype)  # noqa: E731
    gates = delta.Gates(
        shape(rows, hidden), shape(3, hidden), shape(3, 2 * heads, hidden, dtype=jnp.bfloat16)
    )
    gates = shape(rows, 2 * heads) if gates_made else gates
    weights = {"conv": shape(3, channels, 4), "norm": shape(3, dim)}
    weights |= dict.fromkeys(("decay", "dt"), shape(3, heads))
    return functools.partial(delta_step, eps=1e-6, grouped=False), (
        shape(rows, channels + heads * dim), gates, shape(3, rows, heads, dim, dim),
        shape(3, rows, 4, channels), shape(rows, dtype=jnp.int32), shape(dtype=jnp.int32), weights,
    )  # fmt: skip


def _delta_chunks(tokens, rows=1):
    """As Bonsai 27B has it."""
    shape = lambda *sizes, dtype=jnp.float32: jax.ShapeDtypeStruct(sizes, dtype)  # noqa: E731
    gate = shape(rows, tokens, 48)
    return functools.partial(delta_chunks, grouped=False), (
        shape(rows, tokens, 2, 16, 128), shape(rows, tokens, 48, 128), gate, gate,
        shape(3, rows, 48, 128, 128), shape(dtype=jnp.int32), shape(rows, dtype=bool),
    )  # fmt: skip


def _many_rows(n, k, matrices, rows, bits=8):
    weights = (_tiles(n, k),) * matrices
    shape = (bits // 8, 4 * -(-k // 512), rows + -rows % (64 if rows > 64 else 16))
    q, scale = jax.ShapeDtypeStruct((*shape, 128), jnp.int8), jax.ShapeDtypeStruct(shape, jnp.float32)
    residual = jax.ShapeDtypeStruct((rows, n), jnp.float32) if matrices == 1 else None

    def f(q, scale, weights, layer, residual):
        gpu = {"multiprocessors": device.multiprocessors(), "shared": device.shared_bytes()}
        return q1_prefill_sm90(q, scale, weights, layer, n, residual, **gpu)

    return f, (q, scale, weights, jax.ShapeDtypeStruct((), jnp.int32), residual)


def _many_rows_of_integers(format, n, k, matrices, rows):
    blocks = (3, n, k // formats.get(format).WEIGHTS)
    draw = lambda: formats.random_fields(format, jax.random.key(0), blocks, 0.0, 1.0)  # noqa: E731
    fields = jax.eval_shape(lambda: tile(QTensor(draw(), format, (n, k))).fields)
    residual = jax.ShapeDtypeStruct((rows, n), jnp.float32) if matrices == 1 and n == 4096 else None

    def f(a, scale, weights, layer, residual):
        gpu = {"multiprocessors": device.multiprocessors(), "shared": device.shared_bytes()}
        return kq_prefill_sm90(a, scale, weights, layer, n, residual, format=format, **gpu)

    a, scale = jax.ShapeDtypeStruct((rows, k), jnp.float16), jax.ShapeDtypeStruct((rows,), jnp.float32)
    return f, (a, scale, (fields,) * matrices, jax.ShapeDtypeStruct((), jnp.int32), residual)


def _seen_pages(layout):
    cache, i32 = _pages(layout, 4, 40, 64, 8, 128), jnp.int32
    rows = jax.ShapeDtypeStruct((2, 20), i32), jax.ShapeDtypeStruct((2, 128), i32)
    return prefill_pages.as_float16, (cache, cache, *rows, jax.ShapeDtypeStruct((), i32))


def _many_queries(kernel, heads, kv_heads, head_dim, tokens, layout="bfloat16"):
    i32, pages = jnp.int32, 40
    cache = _pages(layout, 4, pages, 64, kv_heads, head_dim)
    return kernel, (
        jax.ShapeDtypeStruct((1, tokens, heads, head_dim), jnp.float32), cache, cache,
        jax.ShapeDtypeStruct((1, pages), i32), jax.ShapeDtypeStruct((1, tokens), i32),
        jax.ShapeDtypeStruct((), i32),
    )  # fmt: skip


def _integers(format, n, k, matrices, rows, bits=8, folded=False, heads=None):
    """As `_product`, for formats of the integer kernel; without an index, as in a decode step."""
    rotation = _rotation(k, heads) if folded else None
    blocks = (1, n, k // formats.get(format).WEIGHTS)
    draw = lambda: formats.random_fields(format, jax.random.key(0), blocks, 0.0, 1.0)  # noqa: E731
    fields = jax.eval_shape(lambda: tile(QTensor(draw(), format, (n, k))).fields)
    gamma = jax.ShapeDtypeStruct((1, k), jnp.float32) if matrices == 2 else None
    residual = jax.ShapeDtypeStruct((rows, n + -n % 16), jnp.float32) if matrices == 1 else None

    def f(x, weights, gamma, residual, rotation):
        return kq_decode(
            x, (weights,), None, formats_of=(format,), gamma=gamma, eps=1e-6, residual=residual,
            rotation=rotation, activation_bits=bits, shared=device.shared_bytes(),
        )  # fmt: skip

    return f, (jax.ShapeDtypeStruct((rows, k), jnp.float32), (fields,) * matrices, gamma, residual, rotation)


def _decoded(formats_of, n, k):
    """Matrices of one layer to float16, rows below rows; the layer is traced."""

    def fields(format):
        blocks = (3, n, k // formats.get(format).WEIGHTS)
        draw = lambda: formats.random_fields(format, jax.random.key(0), blocks, 0.0, 1.0)  # noqa: E731
        return jax.eval_shape(lambda: tile(QTensor(draw(), format, (n, k))).fields)

    kinds = tuple((((format, n),),) for format in formats_of)
    f = lambda weights, places: kq_dequantize(weights, places, kinds=kinds, columns=k)  # noqa: E731
    places = jax.ShapeDtypeStruct((len(formats_of), 2), jnp.int32)
    return f, (tuple(((fields(format),),) for format in formats_of), places)


def _draw(rows, vocabulary):
    """The next token of each row."""
    columns = {name: jax.ShapeDtypeStruct((rows,), jnp.float32) for name in Rules._fields[:8]}
    columns |= {
        name: jax.ShapeDtypeStruct((rows,), dtype)
        for name, dtype in (("top_k", jnp.int32), ("temperature_first", bool))
    }
    tables = [jax.ShapeDtypeStruct((rows, vocabulary), dtype) for dtype in (jnp.float32, bool, jnp.int32)]
    biases = [jax.ShapeDtypeStruct((rows, 1), dtype) for dtype in (jnp.int32, jnp.float32)]
    keys, positions = jax.ShapeDtypeStruct((rows, 2), jnp.uint32), jax.ShapeDtypeStruct((rows,), jnp.int32)
    logits, seen, counts = tables
    return draw, (logits, Rules(**columns, bias_ids=biases[0], bias=biases[1], seen=seen, counts=counts),
                  keys, positions)  # fmt: skip


def _rows(f, rows, k, normed=True, **options):
    x, layer = jax.ShapeDtypeStruct((rows, k), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    arguments = (x, jax.ShapeDtypeStruct((36, k), jnp.float32), layer) if normed else (x,)
    return functools.partial(f, eps=1e-6, **options), arguments


def _rotated(rows, k, normed=True, heads=None, **options):
    """A row as Bonsai 2 27B has it."""
    f, (x, *norm) = _rows(activations_rotated, rows, k, normed, **options)
    return f, (x, _rotation(k, heads), *norm)


def _rotation(k, heads=None):
    return jax.eval_shape(lambda: Rotation.of(np.ones(k), 1024, heads))


def one_launch(layers, hidden, ffn, heads, kv_heads, head_dim, rows=1, bits=8, layout="bfloat16"):
    """All layers of a step, as a Bonsai model has them."""
    f32, i32, pages = jnp.float32, jnp.int32, 34

    def matrix(n, k):
        shape = (layers, -(-n // 16), -(-k // 256))
        scales = (layers, -(-n // 16), 2 * -(-k // 256), 8)
        return jax.ShapeDtypeStruct((*shape, 32, 4), jnp.uint32), jax.ShapeDtypeStruct(scales, jnp.uint32)

    width, kv_width = heads * head_dim, kv_heads * head_dim
    sizes = [(width + 2 * kv_width, hidden), (hidden, width), (ffn, hidden), (ffn, hidden), (hidden, ffn)]
    vector = lambda *shape, dtype=f32: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    cache = _pages(layout, layers, rows * pages, 64, kv_heads, head_dim)
    shapes = Shapes(
        rows, hidden, ffn, heads, kv_heads, head_dim, blocks=device.multiprocessors(), bits=bits, eps=1e-6
    )
    return functools.partial(decode_layers, shapes=shapes, interleaved=False), (
        vector(rows, hidden), tuple(matrix(*size) for size in sizes), (vector(layers, hidden),) * 2,
        (vector(layers, head_dim),) * 2, None, cache, cache, vector(rows, pages, dtype=i32),
        vector(rows, dtype=i32), (vector(rows, head_dim // 2),) * 2,
    )  # fmt: skip


def products_between(o, gate_up, down, qkv, rows=1, bits=8, width=4096, hidden=4096, ffn=12288, folded=False):
    """The products between two layers' attention, as a Bonsai 8B has them: formats, and (format, rows) of the
    parts of the next q, k and v. What o, and gate and up make is passed on as integers, where it may be."""
    sizes = [([(o, hidden)], width, 1), ([(gate_up, ffn)], hidden, 2), ([(down, hidden)], ffn, 1)]
    sizes += [(qkv, hidden, 1)] * bool(qkv)
    weights = tuple(
        tuple((layer_products.tiles_of(format, n, k),) * matrices for format, n in parts)
        for parts, k, matrices in sizes
    )
    formats_of = tuple(tuple(format for format, _ in parts) for parts, _, _ in sizes)
    vector = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    norms = (None, vector(1, hidden), None, vector(1, hidden))[: len(weights)]
    workspace = vector(layer_products.workspace_words(rows, hidden, ffn), dtype=jnp.int32)
    rounded = (rows == 1 and bits == 8 and not folded,) * 2 + (False,)
    f = functools.partial(
        layer_products.layer_products, formats_of=formats_of, eps=1e-6, bits=bits, rounded=rounded
    )
    number, heads = vector(1, dtype=jnp.int32), ((3, 16), None, None, None)
    rotations = tuple(
        _rotation(k, of) if folded else None for (_, k, _), of in zip(sizes, heads, strict=False)
    )
    return f, (vector(rows, width), vector(rows, hidden), weights, norms, number, workspace, rotations)


def one_launch_of_experts(layers, down, qkv, layout="bfloat16"):
    """All layers of a step of Qwen3-30B-A3B: for each combination of formats that layers have, that of down,
    and the parts of q, k and v."""
    hidden, q, ffn, pages, experts = 2048, 4096, 768, 34, experts_layers.Experts(128, 8, True)

    def product(combinations, k, matrices=1, of=1):
        def stack(format, n):
            fields = layer_products.tiles_of(format, n, k).items()
            lead = layers // len(combinations) * of
            return {name: jax.ShapeDtypeStruct((lead, *f.shape[1:]), f.dtype) for name, f in fields}

        return tuple(tuple((stack(*part),) * matrices for part in parts) for parts in combinations)

    combinations = [[[("q4_k", hidden)]], [[("q4_k", ffn)]], [[(format, hidden)] for format in down], qkv]
    weights = tuple(
        product(of, *sizes)
        for of, sizes in zip(combinations, [(q,), (hidden, 2, 128), (ffn, 1, 128), (hidden,)], strict=True)
    )
    vector = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    integers = functools.partial(vector, dtype=jnp.int32)
    cache = _pages(layout, layers, pages, 64, 4, 128)
    f = functools.partial(
        experts_layers.experts_layers, experts=experts, eps=1e-6, interleaved=False,
        formats_of=tuple(tuple(tuple(f for f, _ in parts) for parts in each) for each in combinations),
    )  # fmt: skip
    return f, (
        vector(1, q + 1024), vector(1, hidden), weights, integers(4, layers, 2),
        vector(layers, 128, hidden), (vector(layers, hidden),) * 2, (vector(layers, 128),) * 2, None,
        cache, cache, integers(1, pages), integers(1), (vector(1, 64),) * 2,
    )  # fmt: skip


def _experts(format, n, k, matrices, tiles, rows):
    """Products by expert as Qwen3-30B-A3B has them, of so many tiles."""
    fields = {
        name: jax.ShapeDtypeStruct((48 * 128, *field.shape[1:]), field.dtype)
        for name, field in layer_products.tiles_of(format, n, k).items()
    }
    arguments = (
        jax.ShapeDtypeStruct((tiles * rows, k), jnp.float32),
        (fields,) * matrices,
        jax.ShapeDtypeStruct((tiles,), jnp.int32),
        jax.ShapeDtypeStruct((tiles, rows), jnp.int32),
    )
    return functools.partial(kq_experts.kq_experts, format=format, shared=device.shared_bytes()), arguments


def _stack_of_experts(format, n, k, lead=(48, 128), products=None):
    fields = {
        name: jax.ShapeDtypeStruct((*lead, *field.shape[1:]), field.dtype)
        for name, field in layer_products.tiles_of(format, n, k).items()
    }
    return QTensor(fields, format, (n, k), tiled=True, products=products or Products())


def _experts_of_prefill(format, tokens):
    """A layer's, of Qwen3-30B-A3B: down is in this format."""
    stack, of_token = _stack_of_experts, functools.partial(jax.ShapeDtypeStruct, (tokens, 8))
    return grouped.feed_forward, (
        jax.ShapeDtypeStruct((tokens, 2048), jnp.float32),
        (stack("q4_k", 768, 2048), stack("q4_k", 768, 2048), stack(format, 2048, 768)),
        *(of_token(jnp.int32), of_token(jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)),
    )


MIXED = ("q4_k", "q4_k", "q6_k", [("q4_k", 5120), ("q6_k", 1024)])
# One format of each layout.
LAYOUTS = list({formats.get(name).LANES: name for name in reversed(formats.names("kq"))}.values())
HOT = {
    **{f"{format} down": functools.partial(_integers, format, 4096, 12288, 1, 1) for format in LAYOUTS},
    "many queries, by mma": lambda: _many_queries(mma_attention, 32, 8, 128, 2048),
    "many queries of 64, by mma": lambda: _many_queries(mma_attention, 14, 2, 64, 2048),
    "q4_k gate and up": lambda: _integers("q4_k", 12288, 4096, 2, 1),
    "q4_k gate and up, 8 rows": lambda: _integers("q4_k", 12288, 4096, 2, 8),
    "q4_k down, 16 bits": lambda: _integers("q4_k", 4096, 12288, 1, 1, 16),
    "q6_k output matrix, 8 rows": lambda: _integers("q6_k", 151669, 4096, 1, 8),
    "pq2_0 gate and up": lambda: _integers("pq2_0", 12288, 4096, 2, 1),
    "pq2_0 gate and up, 8 rows": lambda: _integers("pq2_0", 12288, 4096, 2, 8),
    "pq2_0 down, 16 bits": lambda: _integers("pq2_0", 4096, 12288, 1, 1, 16),
    "pq2_0 o, 8 rows": lambda: _integers("pq2_0", 4096, 4096, 1, 8),
    "q2_0_g64 o, 4 rows": lambda: _integers("q2_0_g64", 4096, 4096, 1, 4),
    "tq1_0 down": lambda: _integers("tq1_0", 4096, 12288, 1, 1),
    "decoded: q4_k gate and up": lambda: _decoded(("q4_k", "q4_k"), 12288, 4096),
    "experts: q4_k gate and up": lambda: _experts("q4_k", 768, 2048, 2, 8, 1),
    "experts: q6_k down": lambda: _experts("q6_k", 2048, 768, 1, 8, 1),
    "experts: q4_k gate and up, 512 tokens": lambda: _experts("q4_k", 768, 2048, 2, 384, 16),
    "experts: q6_k down, 512 tokens": lambda: _experts("q6_k", 2048, 768, 1, 384, 16),
    "decoded: q5_k": lambda: _decoded(("q5_k",), 4096, 12288),
    "decoded: q6_k": lambda: _decoded(("q6_k",), 4096, 12288),
    "decoded: q8_0": lambda: _decoded(("q8_0",), 4096, 12288),
    "decoded: q4_0 and q4_1, no whole tiles": lambda: _decoded(("q4_0", "q4_1"), 904, 576),
    "draw of a token, 8 rows": lambda: _draw(8, 151669),
    "norm": lambda: _rows(activations_float16, 2048, 4096),
    "norm, 8192 wide": lambda: _rows(activations_float16, 512, 8192),
    "folded gate and up": lambda: _integers("pq2_0", 17408, 5120, 2, 1, folded=True),
    "folded down": lambda: _integers("pq2_0", 5120, 17408, 1, 1, folded=True),
    "folded, heads regrouped": lambda: _integers("pq2_0", 5120, 6144, 1, 1, folded=True, heads=(3, 16)),
    "rotated": lambda: _rotated(16, 5120),
    "rotated, heads regrouped": lambda: _rotated(16, 6144, normed=False, heads=(3, 16)),
    "delta step": lambda: _delta_step(1),
    "delta step, 16 rows, gates made": lambda: _delta_step(16, gates_made=True),
    "attention, 256 wide": lambda: _attention(24, 4, 256, True, "float16", pairs=32, gated=True),
    "gate and up": lambda: _product(12288, 4096, 2, 1),
    "down": lambda: _product(4096, 12288, 1, 1),
    "down, 17408 wide": lambda: _product(5120, 17408, 1, 1, layers=64),
    "gate and up, 8 rows": lambda: _product(12288, 4096, 2, 8),
    "down, 8 rows": lambda: _product(4096, 12288, 1, 8),
    "attention": lambda: _attention(32, 8, 128, True),
    "attention, 64 wide": lambda: _attention(14, 2, 64, False),
}
# By instructions that only Hopper has.
HOT_ON_HOPPER = {
    **{
        f"many: {format} gate and up": functools.partial(_many_rows_of_integers, format, 12288, 4096, 2, 2048)
        for format in LAYOUTS
    },
    "many: gate and up": lambda: _many_rows(12288, 4096, 2, 2048),
    "many: down": lambda: _many_rows(4096, 12288, 1, 2048),
    "many: out": lambda: _many_rows(4096, 4096, 1, 512),
    "many: gate and up, 16 rows": lambda: _many_rows(12288, 4096, 2, 16),
    "many: down, 32 rows": lambda: _many_rows(4096, 12288, 1, 32),
    "many: qkv, 48 rows": lambda: _many_rows(6144, 4096, 1, 48),
    "many: out, 64 rows": lambda: _many_rows(4096, 4096, 1, 64),
    "many: out, 16 rows of 16 bits": lambda: _many_rows(4096, 4096, 1, 16, bits=16),
    "many: q4_k down": lambda: _many_rows_of_integers("q4_k", 4096, 12288, 1, 2048),
    "many: q4_k qkv": lambda: _many_rows_of_integers("q4_k", 6144, 4096, 1, 2048),
    "many: q4_k out, 512 rows": lambda: _many_rows_of_integers("q4_k", 4096, 4096, 1, 512),
    "many: q6_k down": lambda: _many_rows_of_integers("q6_k", 4096, 12288, 1, 2048),
    "many: q4_k gate and up, 16 rows": lambda: _many_rows_of_integers("q4_k", 12288, 4096, 2, 16),
    "many: q4_k down, 64 rows": lambda: _many_rows_of_integers("q4_k", 4096, 12288, 1, 64),
    "many: q6_k down, 32 rows": lambda: _many_rows_of_integers("q6_k", 4096, 12288, 1, 32),
    "many: q8_0 down": lambda: _many_rows_of_integers("q8_0", 4096, 12288, 1, 2048),
    "many: q5_k down": lambda: _many_rows_of_integers("q5_k", 4096, 12288, 1, 2048),
    "many: q4_1 down": lambda: _many_rows_of_integers("q4_1", 4096, 12288, 1, 2048),
    "rounding": lambda: _rows(activations_float16, 2048, 12288, normed=False),
    "norm, in groups of 32": lambda: _rows(activations_float16, 2048, 4096, group=32),
    "norm, in groups of 16": lambda: _rows(activations_float16, 2048, 4096, group=16),
    "norm, in groups of 32, no whole 256 columns": lambda: _rows(activations_float16, 2048, 896, group=32),
    "rounding, in groups of 32": lambda: _rows(activations_float16, 2048, 12288, normed=False, group=32),
    "rounding, in groups of 32, 28672 wide": lambda: _rows(
        activations_float16, 512, 28672, normed=False, group=32
    ),
    "rotated and rounded": lambda: _rotated(2048, 5120, rounded=True, group=32),
    "rotated and rounded, 17408 wide": lambda: _rotated(2048, 17408, normed=False, rounded=True, group=32),
    "many: output matrix": lambda: _many_rows(151669, 4096, 1, 256),
    "many: q6_k output matrix": lambda: _many_rows_of_integers("q6_k", 151669, 4096, 1, 256),
    "many: out, 16 bits": lambda: _many_rows(4096, 4096, 1, 2048, bits=16),
    "codes behind a norm": lambda: _rows(activations_int8, 2048, 4096),
    "codes behind a norm, no fours of groups": lambda: _rows(activations_int8, 2048, 896),
    "codes": lambda: _rows(activations_int8, 2048, 12288, normed=False),
    "codes, 16 bits, 28672 wide": lambda: _rows(activations_int8, 512, 28672, normed=False, bits=16),
    "attention, 48 rows": lambda: _attention(32, 8, 128, True, "float16", rows=48),
    "attention, 256 rows": lambda: _attention(32, 8, 128, True, "float16", rows=256),
    "many queries": lambda: _many_queries(prefill_attention, 32, 8, 128, 2048),
    "delta chunks": lambda: _delta_chunks(2048),
    "experts of 512 tokens": lambda: _experts_of_prefill("q4_k", 512),
    "experts of 2048 tokens, q6_k": lambda: _experts_of_prefill("q6_k", 2048),
    "experts of 8192 tokens": lambda: _experts_of_prefill("q4_k", 8192),
    "many queries of 256": lambda: _many_queries(prefill_attention, 24, 4, 256, 2048),
    # The 8B's activations leave no room for weights in 99 KB, and this is quicker than three targets.
    "products between, mixed": lambda: products_between(*MIXED),
    "products between, folded, 27B": lambda: products_between(
        *["pq2_0"] * 3, [("pq2_0", 16384)], width=6144, hidden=5120, ffn=17408, folded=True
    ),
    "products between, the last": lambda: products_between(*MIXED[:3], None),
    "products between, 2 rows": lambda: products_between(*["q4_k"] * 3, [("q4_k", 6144)], rows=2),
    "products between, 16 bits": lambda: products_between(*["q4_k"] * 3, [("q4_k", 6144)], bits=16),
    **{
        f"products between, {format}": functools.partial(products_between, *[format] * 3, [(format, 6144)])
        for format in ("q2_k", "q3_k", "iq4_xs", "q5_0")
    },
    "one launch, A3B": lambda: one_launch_of_experts(
        48, ["q6_k", "q4_k"], [[("q4_k", 4608), ("q6_k", 512)], [("q4_k", 5120)]]
    ),
    "one launch, A3B, float16": lambda: one_launch_of_experts(
        48, ["q4_k"], [[("q4_k", 5120)]], layout="float16"
    ),
    "one launch, 8B": lambda: one_launch(36, 4096, 12288, 32, 8, 128),
    "one launch, 4B": lambda: one_launch(36, 2560, 9728, 32, 8, 128),
    "one launch, 1.7B": lambda: one_launch(28, 2048, 6144, 16, 8, 128),
    "one launch, 8B, 4 rows": lambda: one_launch(36, 4096, 12288, 32, 8, 128, rows=4),
    "one launch, 8B, 8 rows": lambda: one_launch(36, 4096, 12288, 32, 8, 128, rows=8),
    "one launch, 4B, 9 rows": lambda: one_launch(36, 2560, 9728, 32, 8, 128, rows=9),
    "one launch, 8B, 16 rows": lambda: one_launch(36, 4096, 12288, 32, 8, 128, rows=16),
    "one launch, 1.7B, 16 bits": lambda: one_launch(28, 2048, 6144, 16, 8, 128, bits=16),
}
for layout in cache_layouts.names():
    if layout == "bfloat16":  # above
        continue
    HOT[f"attention, {layout}"] = functools.partial(_attention, 32, 8, 128, True, layout)
    HOT[f"attention, 64 wide, {layout}"] = functools.partial(_attention, 14, 2, 64, False, layout)
    HOT_ON_HOPPER[f"one launch, 1.7B, {layout}"] = functools.partial(
        one_launch, 28, 2048, 6144, 16, 8, 128, layout=layout
    )
    if cache_layouts.get(layout).PREFILL not in (layout, None):
        HOT[f"pages to float16, {layout}"] = functools.partial(_seen_pages, layout)
    if layout == cache_layouts.get(layout).PREFILL:
        queries = functools.partial(
            _many_queries, heads=32, kv_heads=8, head_dim=128, tokens=2048, layout=layout
        )
        HOT[f"many queries, by mma, {layout}"] = functools.partial(queries, mma_attention)
        HOT_ON_HOPPER[f"many queries, {layout}"] = functools.partial(queries, prefill_attention)
# Bytes that are known to be spilled: a value that is read once a tile.
SPILLED = {
    ("many: down", (9, 0)): 4,
    ("many: out", (9, 0)): 4,
    ("many: out, 16 bits", (9, 0)): 12,
    # 8 dimensions of float32 are twice the registers.
    ("attention, float32", (9, 0)): 24,
    ("one launch, 1.7B, float32", (9, 0)): 92,
    ("one launch, A3B", (9, 0)): 8,
    # Where values lie beside queries and sums, and a new value comes between.
    ("attention, 256 wide", (8, 9)): 12,
    ("attention, 256 wide", (9, 0)): 28,
}
OF_EACH_KIND = [
    "many queries, by mma", "q4_k gate and up", "q4_k gate and up, 8 rows", "decoded: q4_k gate and up",
    "norm", "gate and up", "gate and up, 8 rows", "attention", "experts: q4_k gate and up",
]  # fmt: skip
# Every day each kernel for one target, one of each kind for every target. What is slow differs from those in
# a size, or is of a format that another kernel is compiled with, while this kernel is with another format.
SLOW = [
    "one launch, 4B", "many: output matrix", "many: q4_k qkv", "many: q4_k out, 512 rows",
    *(f"many: {format} down" for format in ("q6_k", "q8_0", "q5_k", "q4_1")),
    *(f"products between, {format}" for format in ("q3_k", "iq4_xs", "q5_0")),
    "norm, 8192 wide", "rounding, in groups of 32", "codes behind a norm, no fours of groups",
    "experts of 8192 tokens",
]  # fmt: skip
KERNELS = [
    for_target(
        capability, kernel, slow=kernel in SLOW or (capability != (9, 0) and kernel not in OF_EACH_KIND)
    )
    for kernel in HOT
    for capability in TARGETS
]
KERNELS += [for_target((9, 0), kernel, slow=kernel in SLOW) for kernel in HOT_ON_HOPPER]
KERNELS += [for_target(capability, kernel) for kernel in OF_EACH_KIND for capability in OTHERS]
KERNELS += [for_target(capability, "one launch, 1.7B") for capability in [(10, 0), (12, 0)]]
KERNELS += [for_target((10, 0), "one launch, 8B"), for_target((8, 0), "products between, q2_k")]


def compile_kernel(kernel, capability):
    with as_on_a_gpu(capability):
        f, arguments = (HOT | HOT_ON_HOPPER)[kernel]()
        compile_for_gpu(f, *arguments, compute_capability=capability)


@pytest.mark.parametrize(("kernel", "capability"), KERNELS, ids=str)
def test_hot_kernels_do_not_spill(kernel, capability, compilers):
    """Registers as ptxas counts them, of an 8B step's kernels and a 0.5B one's attention; -rP prints them."""
    printed = compilers.printed(capability, compile_kernel, kernel, capability)
    registers = re.findall(r"Used (\d+) registers", printed)
    assert registers, "no ptxas on the PATH, or it printed nothing"
    stores = [int(count) for count in re.findall(r"(\d+) bytes spill stores", printed)]
    print(f"{kernel}, {capability}: {registers} registers, {stores} bytes spilled")
    assert max(stores, default=0) <= SPILLED.get((kernel, capability), 0)
    assert "Registers are spilled" not in printed or (kernel, capability) in SPILLED
    assert "wgmma" not in printed  # ptxas warns where it has one wait for the other
