"""bj.harvest and bj.embed_texts, against bj.forward, text by text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.research import harvest as harvesting


@functools.cache
def tiny(source="tiny-qwen3:q8_0") -> bj.Model:
    return bj.load(f"synth:{source}", bj.RunConfig(page_size=16, activation_bits=16))


def random_texts(count, longest=31, seed=0):
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 256, n).tolist() for n in draw.integers(1, longest + 1, count)]


def forward(model, ids, taps, width=32):
    """What forward reads of one text, [layers, tokens, ...]."""
    tokens = jnp.array([ids + [0] * (width - len(ids))])
    _, kept = bj.jitted.forward(model.params, tokens, jnp.array([len(ids)]), model.config, taps=taps)
    return {site: np.asarray(x)[:, 0, : len(ids)] for site, x in kept.items()}


# The second has states of fixed size before its first layer with pages.
@pytest.mark.parametrize(
    ("source", "layers"), [("tiny-qwen3:q8_0", [1]), ("tiny-qwen35:q8_0", [0, 2]), ("tiny-gemma3:q8_0", None)]
)
def test_what_is_read_is_what_forward_reads(source, layers):
    model, texts = tiny(source), random_texts(11)
    taps, seen = bj.Taps({"output", "mlp"}, layers=layers), []
    for activations, tokens, mask, numbers in bj.harvest(model, texts, taps):
        assert activations["output"].shape[1:3] == tokens.shape == mask.shape
        for row, number in enumerate(numbers):
            assert tokens[row][mask[row]].tolist() == ([] if number < 0 else texts[number])
            if number >= 0:
                seen.append(number)
                for site, want in forward(model, texts[number], taps).items():
                    got = np.asarray(activations[site])[:, row, mask[row]]
                    np.testing.assert_allclose(got, want, atol=1e-4, err_msg=site)
    assert sorted(seen) == list(range(11))


def test_layers_behind_the_deepest_are_not_run():
    """Nor do they have a cache."""
    model = tiny()
    reader = harvesting.Reader(model, bj.Taps("output", layers=0), 1)
    reader.read(*reader.padded([[1, 2, 3]], 1, 4))
    assert {leaf.shape[0] for leaf in jax.tree.leaves(reader._cache) if leaf.ndim > 3} == {1}
    assert model.config.num_layers > 1


def test_a_steered_harvest_and_sites_inside_attention():
    model, texts = tiny(), random_texts(3)

    def double(name, layer, x):
        return 2 * x

    taps = bj.Taps({"output", "pattern"}, edit=double, at="mlp", layers=[0, 1])
    (batch,) = bj.harvest(model, texts, taps)
    for row, number in enumerate(batch.texts):
        if number >= 0:
            n = len(texts[number])
            want = forward(model, texts[number], taps)
            np.testing.assert_allclose(batch.activations["output"][:, row, :n], want["output"], atol=1e-4)
            pattern = np.asarray(batch.activations["pattern"])[:, row, :, :n, :n]
            np.testing.assert_allclose(pattern.sum(-1), 1, atol=1e-5)  # forward's own: by heads, tokens, keys


def test_texts_come_from_an_iterator_as_they_are_needed(monkeypatch):
    monkeypatch.setattr(harvesting, "SORTED_TEXTS", 4)
    model, texts, taken, asked = tiny(), random_texts(9), [], []

    def given():
        for text in texts:
            taken.append(text)
            yield text

    batches = bj.harvest(
        model, given(), bj.Taps("output", layers=0), batch_size=2, progress=lambda *at: asked.append(at)
    )
    assert not taken  # nothing runs before the first batch is asked for
    first = next(batches)
    assert len(taken) == 4 and first.tokens.shape[0] == 2
    numbers = [*first.texts, *(number for batch in batches for number in batch.texts)]
    assert sorted(n for n in numbers if n >= 0) == list(range(9))
    assert asked[0] == (0, 0) and asked[-1] == (9, 0)


def test_texts_and_wrong_arguments():
    model, taps = tiny(), bj.Taps("output", layers=0)
    (batch,) = bj.harvest(model, ["A bonsai is a small tree."], taps)
    assert batch.tokens[0][batch.mask[0]].tolist() == model.tokenizer.encode("A bonsai is a small tree.")
    assert list(bj.harvest(model, [], taps)) == []
    for arguments, error, message in (
        (("demo", ["a"], taps), TypeError, "model is a str"),
        ((model, "a", taps), TypeError, "texts are a str"),
        ((model, 3, taps), TypeError, "texts are a int"),
        ((model, ["a"], "output"), TypeError, "taps is a str"),
        ((model, ["a"], bj.Taps()), ValueError, "they read nothing"),
        ((model, ["a"], bj.Taps("output", layers=99)), ValueError, "layers has 99"),
    ):
        with pytest.raises(error, match=message):
            bj.harvest(*arguments)
    for wrong in (0, -1, 1.5, "8"):
        with pytest.raises(ValueError, match="batch_size is"):
            bj.harvest(model, ["a"], taps, batch_size=wrong)
    with pytest.raises(ValueError, match="a prompt is empty"):
        list(bj.harvest(model, ["a", []], taps))


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_pooled_hidden_states_behind_the_final_norm(pooling):
    model, texts = tiny(), random_texts(11, seed=1)
    got = bj.embed_texts(model, texts, pooling=pooling)
    assert got.dtype == np.float32 and got.shape == (11, model.config.hidden)
    gamma = np.asarray(model.params.final_norm, np.float64)
    last = model.config.num_layers - 1
    for ids, vector in zip(texts, got, strict=True):
        x = forward(model, ids, bj.Taps("output"))["output"][last].astype(np.float64)
        h = x / np.sqrt((x**2).mean(-1, keepdims=True) + model.config.rms_norm_eps) * gamma
        want = h.mean(0) if pooling == "mean" else h[-1]
        np.testing.assert_allclose(vector, want / np.linalg.norm(want), atol=1e-5)


def test_embeddings_of_nothing_and_of_what_is_no_text():
    model, asked = tiny(), []
    assert bj.embed_texts(model, []).shape == (0, model.config.hidden)
    bj.embed_texts(model, ["a", "b"], progress=lambda *at: asked.append(at))
    assert asked[-1] == (2, 2)
    with pytest.raises(ValueError, match="pooling is 'max'; it must be 'mean' or 'last'"):
        bj.embed_texts(model, ["a"], pooling="max")
    with pytest.raises(TypeError, match="texts are a str"):
        bj.embed_texts(model, "a")
