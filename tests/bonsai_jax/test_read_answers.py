"""generate(read=): activations at the tokens of an answer, against bj.forward on prompt and answer."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj

GREEDY = bj.SamplingParams(temperature=0.0)
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12, 13]]


@functools.cache
def tiny(source="tiny-qwen3:q8_0") -> bj.Model:
    return bj.load(f"synth:{source}", bj.RunConfig(page_size=16, activation_bits=16))


def generate(model, **options):
    return bj.generate(model, PROMPTS, max_new_tokens=6, sampling=GREEDY, ignore_eos=True, **options)


def compare(model, outputs, taps, layers=slice(None)):
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        whole = [*prompt, *output.tokens]
        tokens = jnp.array([whole + [0] * (16 - len(whole))])
        _, kept = bj.jitted.forward(model.params, tokens, jnp.array([len(whole)]), model.config, taps=taps)
        assert output.activations.keys() == taps.read
        for site, want in kept.items():
            want = np.asarray(want)[layers, 0, len(prompt) - 1 : len(whole) - 1]
            np.testing.assert_allclose(output.activations[site], want, atol=1e-4, err_msg=site)


def test_what_is_read_is_at_the_position_that_drew_each_token():
    model, taps = tiny(), bj.Taps({"output", "z"}, layers=1)
    plain, outputs = generate(model), generate(model, read=taps)
    assert [o.tokens for o in plain] == [o.tokens for o in outputs]
    assert all(o.activations is None for o in plain)
    assert outputs[0].activations["output"].shape == (1, 6, model.config.hidden)
    compare(model, outputs, taps)
    whole = generate(model, read=bj.Taps("output"))
    for output in whole:  # the last layer's output makes the token
        logits = bj.unembed(model.params, output.activations["output"][-1], model.config)
        assert logits.argmax(-1).tolist() == output.tokens


def push(name, layer, x):
    return x + 0.5


@pytest.mark.parametrize(("edited", "layers"), [(None, [1]), ([0], [1]), ([0], None)])
def test_what_is_read_is_steered_as_the_answer_was(edited, layers):
    model = tiny()
    steering, read = bj.Taps(edit=push, at="mlp", layers=edited), bj.Taps("output", layers=layers)
    outputs = generate(model, taps=steering, read=read)

    def in_edited_layers(name, layer, x):
        return x + 0.5 * (edited is None or layer == edited[0])

    taps = bj.Taps("output", edit=in_edited_layers, at="mlp")
    compare(model, outputs, taps, slice(None) if layers is None else layers)


@pytest.mark.parametrize(
    ("read", "error", "message"),
    [
        ("output", TypeError, "read is a str"),
        (bj.Taps(), ValueError, "it names sites"),
        (bj.Taps("output", edit=push), ValueError, "edits are taps="),
        (bj.Taps("pattern"), ValueError, "pattern: of all keys"),
        (bj.Taps("output", layers=99), ValueError, "layers has 99"),
    ],
)
def test_what_cannot_be_read_is_refused(read, error, message):
    with pytest.raises(error, match=message):
        generate(tiny(), read=read)


def test_a_prompt_of_vectors_cannot_be_read():
    model = tiny()
    vectors = bj.embed(model.params, jnp.array(PROMPTS[0]))
    with pytest.raises(ValueError, match="a prompt is vectors"):
        bj.generate(model, vectors, max_new_tokens=2, read=bj.Taps("output"))
