"""LFM2: short convolutions in most layers, attention in the others."""

import dataclasses
import functools

import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.network import architectures
from checkpoints import CheckpointError
from tests.agreement import agreement
from tests.bonsai_jax.test_oracle import GREEDY, answers, as_file
from tests.bonsai_jax.tiny_files import as_huggingface, logits, tiny_gguf

SETTINGS = {
    "block_count": 4,
    "context_length": 2048,
    "embedding_length": 128,
    "feed_forward_length": 256,
    "attention.head_count": 4,
    "attention.head_count_kv": np.array([0, 0, 2, 0], np.int32),
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 1e6,
    "shortconv.l_cache": 3,
    "vocab_size": 512,
}
HUGGING_FACE = {
    "model_type": "lfm2",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "intermediate_size": 384,
    "block_auto_adjust_ff_dim": True,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "conv_L_cache": 3,
    "conv_bias": False,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
}


@functools.cache
def file(format: str = "f32"):
    return tiny_gguf("lfm2", SETTINGS, format, without=("head",), drawn={"embed": (0.0, 0.2)})


@functools.cache
def model() -> bj.Model:
    return bj.from_checkpoint(file(), bj.RunConfig(impl="reference", page_size=16))


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 256, length).tolist()


def test_llama_cpp_gives_the_same_text_and_probabilities(tmp_path):
    path = as_file(file(), tmp_path / "tiny.gguf")
    rows = answers(path, model().tokenizer, [prompt(n) for n in (1, 63, 65, 300)], 12)
    found = agreement(model(), rows, padded=True)
    assert found.kl < 1e-6 and found.same_top == 1


@pytest.mark.parametrize("format", ["q8_0", pytest.param("q4_0", marks=pytest.mark.slow)])
def test_kernels_of_cpus_are_the_reference(format):
    exact, kernels = (
        bj.from_checkpoint(file(format), bj.RunConfig(page_size=16, **how))
        for how in ({"impl": "reference"}, {"activation_bits": 16})
    )
    np.testing.assert_allclose(bj.logits(kernels, prompt(70)), bj.logits(exact, prompt(70)), atol=5e-3)


def test_a_hugging_face_folder_is_the_same_model():
    folder, ids = as_huggingface(file(), HUGGING_FACE), prompt(50)
    np.testing.assert_allclose(logits(folder, ids), logits(file(), ids), atol=1e-5)
    old = {key: value for key, value in HUGGING_FACE.items() if key != "layer_types"} | {
        "full_attn_idxs": [2]
    }
    assert architectures.config_of(as_huggingface(file(), old)) == architectures.config_of(folder)


def test_tokens_one_by_one_in_an_engine_and_speculated_are_the_same_text():
    ids, options = prompt(40) * 2, {"max_new_tokens": 12, "ignore_eos": True}
    (guessed,) = bj.generate(model(), [ids], sampling=GREEDY, speculate="ngram", **options)
    whole = bj.logits(model(), [*ids, *guessed.tokens])
    assert whole[len(ids) - 1 : -1].argmax(-1).tolist() == guessed.tokens
    with bj.Engine(model(), max_batch_size=2, context=256) as engine:
        for _ in range(2):  # the second continues from a saved state
            assert engine.submit(ids, sampling=GREEDY, **options).result().tokens == guessed.tokens


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("attention.head_count_kv", [0, 0, 2], "head_count_kv is .*a list of 4 whole numbers"),
        ("attention.head_count_kv", [0, 1, 2, 0], "head_count_kv has 2 and 1"),
        ("shortconv.l_cache", 1, "the convolution sees 1 tokens"),
    ],
)
def test_a_wrong_key_is_named(key, value, message):
    changed = dataclasses.replace(file(), metadata={**file().metadata, f"lfm2.{key}": value})
    with pytest.raises((CheckpointError, NotImplementedError), match=message):
        architectures.config_of(changed)
