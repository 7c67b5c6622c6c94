"""The view of a model as a Flax NNX module: the same arrays, the same logits, and gradients of what is
around it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import bonsai_jax as bj
from bonsai_jax.nnx import LanguageModel, Weight

IDS = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 9)))
FLAT = {"graph_updates": False}  # nnx.jit's default returns all variables, and so copies them


@pytest.fixture(scope="module")
def model():
    return bj.load("synth:tiny-llama:q1_0", bj.RunConfig(page_size=16, weights="packed"))


def same_arrays(one, other) -> bool:
    """No copies: the buffers are the same ones."""
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(a.unsafe_buffer_pointer() == b.unsafe_buffer_pointer() for a, b in leaves)


@pytest.mark.parametrize("source", ["tiny-qwen3:q4_k_m", "tiny-qwen2:q8_0"])  # mixed formats; tied, biases
def test_split_and_merge_share_the_models_arrays(source):
    model = bj.load(f"synth:{source}", bj.RunConfig(weights="packed"))
    module = LanguageModel(model)
    graphdef, state = nnx.split(module)
    back = nnx.merge(graphdef, state)
    for view in (module, back):
        assert jax.tree.structure(view.params) == jax.tree.structure(model.params)
        assert same_arrays(view.params, model.params)
    variables = dict(nnx.to_flat_state(state))
    assert len(variables) == len(jax.tree.leaves(model.params))
    assert all(isinstance(variable, Weight) for variable in variables.values())
    codes = module.weights["layers"]["attention"]["0"]["o"]["parts"]["0"]["fields"]["qs"]
    assert codes[...] is model.params.layers["attention"][0].o.parts[0].fields["qs"]
    _, weights, rest = nnx.split(module, Weight, ...)
    assert len(nnx.to_flat_state(weights)) == len(variables) and not nnx.to_flat_state(rest)


def test_a_graph_of_equal_models_is_equal(model):
    """So that nnx.jit compiles once for both."""
    one, other = (nnx.graphdef(LanguageModel(model)) for _ in range(2))
    assert one == other and hash(one) == hash(other)


def test_logits_are_the_models_and_jit_copies_nothing(model):
    module = LanguageModel(model)
    want, _ = jax.jit(bj.forward, static_argnames="config")(model.params, IDS, jnp.full(2, 9), model.config)
    got, read = nnx.jit(lambda module, ids: module(ids, taps=bj.Taps({"output"})), **FLAT)(module, IDS)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert read["output"].shape == (model.config.num_layers, *IDS.shape, model.config.hidden)
    assert same_arrays(module.params, model.params)
    vectors = bj.embed(module.params, IDS)
    graphdef, state = nnx.split(module)
    pure = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x, jnp.array([9, 4]))[0])
    short = pure(state, vectors)
    np.testing.assert_allclose(short[0], want[0], atol=1e-5)
    np.testing.assert_allclose(short[1, :4], want[1, :4], atol=1e-5)


class Pushed(nnx.Module):
    """An adapter: a trained vector for each layer, added to the residual stream."""

    def __init__(self, base: LanguageModel):
        self.base = base
        self.push = nnx.Param(jnp.zeros((base.config.num_layers, base.config.hidden)))

    def __call__(self, ids):
        taps = bj.Taps(edit=lambda name, layer, x: x + self.push[layer] if name == "output" else x)
        return self.base(ids, taps=taps)[0]


def surprise(logits):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), IDS[:, 1:, None], axis=-1).mean()


def test_an_adapter_is_trained_and_the_weights_are_not(model):
    adapted = Pushed(LanguageModel(model))

    @nnx.jit(**FLAT)
    def step(adapted):
        loss, gradient = nnx.value_and_grad(lambda adapted: surprise(adapted(IDS)))(adapted)
        adapted.push[...] -= 0.1 * gradient.push[...] / jnp.linalg.norm(gradient.push[...])
        return loss, gradient

    def by_hand(push):
        taps = bj.Taps(edit=lambda name, layer, x: x + push[layer] if name == "output" else x)
        return surprise(bj.forward(model.params, IDS, jnp.full(2, 9), model.config, taps=taps)[0])

    want, want_gradient = jax.jit(jax.value_and_grad(by_hand))(adapted.push[...])
    first, gradient = step(adapted)
    assert [path for path, _ in nnx.to_flat_state(gradient)] == [("push",)]  # of nnx.Param alone
    np.testing.assert_allclose(first, want, rtol=1e-5)
    np.testing.assert_allclose(gradient.push[...], want_gradient, atol=1e-5)
    step(adapted)
    assert step(adapted)[0] < first
    assert same_arrays(adapted.base.params, model.params)
