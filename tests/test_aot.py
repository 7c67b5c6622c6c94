"""The decode step and prefill compile for GPUs, in place and without a second copy of anything large."""

import functools

import jax
import jax.numpy as jnp
import pytest

import bonsai_jax as bj
from bonsai_jax import architectures, model
from bonsai_jax import decoding as core
from checkpoints import open_checkpoint
from tests.aot import compile_for_gpu

pytestmark = pytest.mark.aot


@functools.cache
def shapes(source, rows=1, context=2048):
    """Shapes of a model's weights and of a generation state, as a GPU would hold them; nothing is
    allocated."""
    checkpoint = open_checkpoint(source)
    config = architectures.config_of(checkpoint)
    run = model.resolve(bj.RunConfig(weights="packed", cache_dtype="bfloat16"), config)
    params = jax.eval_shape(lambda: model.load_params(checkpoint, config, run))

    def state():
        cache = bj.cache.empty(config, run, rows, context)
        sampler = bj.sampling.sampler(bj.SamplingParams(seed=0), rows, config.vocab_size)
        return core.start(cache, sampler, jnp.zeros((rows, 2), jnp.int32), jnp.ones(rows, jnp.int32))

    return params, jax.eval_shape(state), config


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)], ids=str)
@pytest.mark.parametrize(
    "source", ["synth:tiny-llama:q4_k_m", "synth:tiny-qwen2:q8_0", "synth:tiny-qwen3:q1_0"]
)
def test_decode_compiles_with_its_cache_aliased(source, capability):
    params, state, config = shapes(source)
    step = functools.partial(core.decode, config=config, size=8)
    compiled = compile_for_gpu(
        lambda params, state: step(params, state, limit=8),
        params,
        state,
        compute_capability=capability,
        donate_argnums=1,
    )
    cache_bytes = 2 * state.cache.k.size * state.cache.k.dtype.itemsize
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes


@pytest.mark.parametrize("format", ["q1_0", "q4_k_m"])
def test_decode_of_the_8b_model_copies_neither_cache_nor_stack(format):
    """Its largest temporary is what the definitions make: one matrix decoded to float32, the output
    matrix."""
    params, state, config = shapes(f"synth:bonsai-8b:{format}", rows=2)
    compiled = compile_for_gpu(
        lambda params, state: core.step(params, state, config), params, state, donate_argnums=1
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * state.cache.k.size * 2
    decoded_head = 4 * config.vocab_size * config.hidden
    assert memory.temp_size_in_bytes < 1.3 * decoded_head


def test_prefill_of_the_8b_model_compiles_in_bounded_memory():
    params, state, config = shapes("synth:bonsai-8b:q1_0", context=8192)
    tokens = jax.ShapeDtypeStruct((1, 4096), jnp.int32)
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
    compiled = compile_for_gpu(
        lambda p, s, t, n: core.prefill(p, s, t, n, config), params, state, tokens, lengths, donate_argnums=1
    )
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * 4 * config.vocab_size * config.hidden
