"""Other lengths compile nothing, and change no bit of logits and state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.decoding import jitted, steps
from bonsai_jax.decoding.rounding import rounded

pytest.importorskip("llvmlite")  # attention's CPU kernel, whose bits do not depend on padding
IDS = np.random.default_rng(0).integers(0, 256, (2, 40)).astype(np.int32)
SOURCES = ["tiny-llama:q4_k_m", "tiny-qwen35:q8_0"]


@functools.cache
def tiny(source="tiny-llama:q4_k_m") -> bj.Model:
    return bj.load(f"synth:{source}", bj.RunConfig(page_size=16, weights="packed"))


def exact(function, donated):
    """Compiled for each length."""
    return jitted.donating(function, donated)


def test_four_lengths_for_each_power_of_two():
    few = [*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64]
    assert sorted({rounded(n) for n in range(1, 65)}) == few
    assert all(n <= rounded(n) <= max(n, 1.25 * n) for n in range(1, 5000))


@pytest.mark.parametrize("source", SOURCES)
def test_extend_is_that_of_the_exact_length(source):
    model = tiny(source)
    lengths = jnp.array([17, 3])
    results = []
    for extend in (jitted.extend, exact(steps.extend, "cache")):
        cache = bj.new_cache(model, batch_size=2, context=64)
        first, cache = extend(model.params, cache, jnp.array(IDS[:, :17]), lengths, model.config)
        more, cache = extend(model.params, cache, IDS[:, 17:28], jnp.array([11, 0]), model.config)
        assert (first.shape[:2], more.shape[:2]) == ((2, 17), (2, 11))
        shown = [first[0], first[1, :3], more[0], cache.lengths, *jax.tree.leaves(cache.states)]
        results.append([np.asarray(x) for x in shown])
    for got, want in zip(*results, strict=True):
        np.testing.assert_array_equal(got, want)


def test_draws_are_those_of_the_exact_length():
    model, lengths, results = tiny(), jnp.array([13, 5]), []
    for generate in (jitted.generate_tokens, exact(steps.generate_tokens, "state")):
        params = bj.SamplingParams(seed=3, repetition_penalty=1.3)
        state = bj.new_state(model, 2, 64, params, 6, ignore_eos=True, speculate="ngram")
        drawn = generate(model.params, state, jnp.array(IDS[:, :13]), lengths, model.config, size=6)
        results.append((drawn.tokens, drawn.state.remaining, drawn.state.speculation.ids))
    for got, want in zip(*results, strict=True):
        np.testing.assert_array_equal(got, want)


def test_other_lengths_compile_nothing():
    model = tiny()
    traced = []

    def counted(logits, state):
        traced.append(logits.shape)  # when the function is traced
        return logits

    for length in (*range(33, 41), 17, 20, 19):
        state = bj.new_state(model, 1, 64, bj.SamplingParams(), 4, ignore_eos=True)
        arguments = jnp.array(IDS[:1, :length]), jnp.array([length]), model.config
        state = jitted.prefill(model.params, state, *arguments, logits_processor=counted).state
        assert state.cache.lengths.tolist() == [length]
    assert len(traced) == 2


def test_in_a_program_of_ones_own_shapes_stay():
    model, arguments = tiny(), (jnp.array(IDS[:1, :9]), jnp.array([9]), tiny().config)
    cache = bj.new_cache(model, batch_size=1, context=16)
    with pytest.raises(ValueError, match="lengths: 10 to 10 are not within 0 to 9"):
        bj.checked(jitted.extend)(model.params, cache, arguments[0], jnp.array([10]), model.config)
    shapes = jitted.extend.eval_shape(model.params, jax.eval_shape(lambda: cache), *arguments)
    assert shapes[0].shape[1] == 9
    run = jax.jit(jitted.extend, static_argnums=4)
    logits, _ = run(model.params, cache, *arguments)
    want, _ = jitted.extend(model.params, cache, *arguments)
    np.testing.assert_array_equal(logits, want)
