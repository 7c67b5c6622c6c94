"""Keys of metadata that change the result and that no architecture reads are refused; real files are not."""

import dataclasses
import types

import numpy as np
import pytest

from bonsai_jax.network import architectures
from bonsai_jax.weights import keys
from checkpoints import Checkpoint, CheckpointError, open_checkpoint
from checkpoints.synth import MODELS
from tests.bonsai_jax.real_configs import GGUF, HUGGING_FACE

TINY = [name for name in MODELS if name.startswith("tiny-")]


def changed(checkpoint: Checkpoint, change: dict) -> Checkpoint:
    return dataclasses.replace(checkpoint, metadata={**checkpoint.metadata, **change})


def config_of(naming: str, metadata: dict):
    """Of metadata alone: of the tensors, only sizes of the vocabulary and of a feed-forward are read."""
    names = ("token_embd.weight", "model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
    names += ("model.layers.0.feed_forward.w1.weight", "transformer.embedding.word_embeddings.weight")
    names += ("backbone.embeddings.weight", "model.tok_embeddings.weight", "model.word_embeddings.weight")
    names += ("transformer.wte.weight",)
    tensors = dict.fromkeys(names, types.SimpleNamespace(shape=(1000, 64)))
    return architectures.config_of(Checkpoint("file", naming, metadata, tensors))


@pytest.mark.parametrize("name", TINY)
def test_a_key_that_changes_the_result_is_read_or_refused(name):
    checkpoint = open_checkpoint(f"synth:{name}:f32")
    arch = checkpoint.metadata["general.architecture"]
    config = architectures.config_of(checkpoint)
    refused = 0
    for key, value in {
        "logit_scale": 0.0625,
        "residual_scale": 0.25,
        "embedding_scale": 12.0,
        "attention.scale": 0.015625,
        "attention.sliding_window": 7,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 25.0,
        "attention.temperature_scale": 0.3,
        "attention.causal": False,
        "rope.scaling.factor": 7.5,
        "nextn_predict_layers": 1 + checkpoint.metadata.get(f"{arch}.nextn_predict_layers", 0),
        "swiglu_clamp_exp": np.array([0.0, 7.0, 0.0], np.float32),
        "a_key_of_tomorrow": "x",
    }.items():
        try:
            assert architectures.config_of(changed(checkpoint, {f"{arch}.{key}": value})) != config, key
        except (NotImplementedError, CheckpointError) as error:
            assert f"{arch}.{key}" in str(error)
            refused += "does not read" in str(error)
    assert refused >= 3
    with pytest.raises(NotImplementedError, match=rf"{arch}.a_key_of_tomorrow \('x'\)"):
        architectures.config_of(changed(checkpoint, {f"{arch}.a_key_of_tomorrow": "x"}))


@pytest.mark.parametrize("name", TINY)
def test_keys_that_change_nothing_are_not_asked_for(name):
    checkpoint = open_checkpoint(f"synth:{name}:f32")
    arch = checkpoint.metadata["general.architecture"]
    neutral = {"logit_scale": 1.0, "attention.causal": True, "expert_group_count": np.uint32(1)}
    neutral |= {"embedding_scale": 0.0, "attention.temperature_scale": np.float32(0), "use_it": False}
    neutral |= {"swiglu_clamp_exp": np.zeros(3, np.float32), "rope.scale_linear": 1.0, "residual_scale": 1}
    neutral |= dict.fromkeys(keys.HARMLESS, 5)
    if f"{arch}.attention.sliding_window" not in checkpoint.metadata:
        neutral["rope.freq_base_swa"] = 3.0
    neutral = {f"{arch}.{key}": value for key, value in neutral.items()}
    neutral |= {"general.logit_scale": 3.0, "tokenizer.ggml.x": 3.0, "other.logit_scale": 3.0}
    ours = {key: value for key, value in neutral.items() if key not in checkpoint.metadata}
    try:
        architectures.config_of(changed(checkpoint, ours))
    except (NotImplementedError, CheckpointError) as error:
        assert "does not read" not in str(error)  # a size that this architecture does read


@pytest.mark.parametrize("name", GGUF)
def test_the_keys_of_real_gguf_files_are_accepted(name):
    architecture, metadata = GGUF[name]
    rest = {"general.architecture": architecture, "general.file_type": 15, "general.name": name}
    rest |= {"tokenizer.ggml.model": "gpt2", "quantize.imatrix.chunks_count": 128, "split.count": 0}
    config_of("gguf", rest | {f"{architecture}.{key}": value for key, value in metadata.items()})


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_the_keys_of_real_hugging_face_folders_are_accepted(name):
    config_of("huggingface", HUGGING_FACE[name])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("Llama 3.1 8B", {"logit_scale": 0.5}, r"llama does not read the key logit_scale \(0.5\)"),
        ("Qwen3 8B", {"layer_types": ["sliding_attention"] * 36}, "layer_types"),
        ("Gemma 3 4B", {"text_config": {"use_bidirectional_attention": True}}, "use_bidirectional_attention"),
        ("AFM 4.5B", {"residual_multiplier": 0.22, "logits_scaling": 8}, "residual_multiplier .*, logits_sc"),
    ],
)
def test_a_key_of_config_json_that_changes_the_result_is_refused(name, change, message):
    metadata = dict(HUGGING_FACE[name])
    if "text_config" in change:
        change = {"text_config": metadata["text_config"] | change["text_config"]}
    with pytest.raises(NotImplementedError, match=message):
        config_of("huggingface", metadata | change)


def test_copies_of_metadata_note_what_is_read():
    metadata, read = keys.recorded({"a": 1, "b": {"c": 2, "d": 3}, "e": 4, "f": 5, "g": 6})
    assert read == set()
    copies = {**metadata}, dict(metadata) | {"z": 0}, {k: v for k, v in metadata.items() if k != "g"}
    assert read == set()
    assert copies[0]["a"] == 1 and copies[1].get("e") == 4 and "f" in copies[2]
    assert copies[1]["b"]["d"] == 3 and copies[2].get("nothing") is None
    assert read == {"a", "b", "d", "e", "f"}


def test_layers_with_a_window_are_those_of_layer_types():
    metadata = HUGGING_FACE["Qwen2.5 7B"] | {"use_sliding_window": True, "max_window_layers": 20}
    by_number = config_of("huggingface", metadata)
    assert [bool(layer.mixer.window) for layer in by_number.layers] == [False] * 20 + [True] * 8
    kinds = ["full_attention", "sliding_attention"] * 14
    by_type = config_of("huggingface", metadata | {"layer_types": kinds})
    assert [bool(layer.mixer.window) for layer in by_type.layers] == [False, True] * 14
    with pytest.raises(CheckpointError, match="layer_types: 28 are expected"):
        config_of("huggingface", metadata | {"layer_types": kinds[1:]})


def test_a_factor_without_a_type_scales_linearly():
    """As in llama.cpp, for old files."""
    architecture, metadata = GGUF["Llama 2 7B, of 2023"]
    metadata = {f"{architecture}.{key}": value for key, value in metadata.items()}
    metadata |= {"general.architecture": architecture, "llama.rope.scale_linear": 4.0}
    rope = config_of("gguf", metadata).attention.rope
    assert (rope.scaling, rope.factor) == ("linear", 4.0)


# As transformers 5 writes the same models: keys that are gone, and keys in their place.
REWRITTEN = {
    "Qwen3 30B-A3B": (("num_experts",), {"num_local_experts": 128}),
    "DeepSeek V2 Lite": ((), {"n_group": 4, "topk_group": 2}),  # greedy, so groups are not looked at
}


@pytest.mark.parametrize("model", REWRITTEN)
def test_a_config_of_transformers_5_is_the_same_model(model):
    gone, new = REWRITTEN[model]
    metadata = {key: value for key, value in HUGGING_FACE[model].items() if key not in gone}
    assert config_of("huggingface", metadata | new) == config_of("huggingface", HUGGING_FACE[model])


def test_layer_types_of_transformers_5_are_the_same_model():
    names = {"mamba": "linear_attention", "attention": "full_attention"}
    metadata = HUGGING_FACE["Granite 4.0-H Tiny"]
    types = [names[kind] for kind in metadata["layer_types"]]
    assert config_of("huggingface", metadata | {"layer_types": types}) == config_of("huggingface", metadata)


def test_layers_without_windows_may_have_an_object_each():
    metadata = HUGGING_FACE["Gemma 4 31B"]
    text = dict(metadata["text_config"])
    moved = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    own = {name: text.pop(old) for name, old in moved.items() if old in text}
    layers = [n for n, kind in enumerate(text["layer_types"]) if kind == "full_attention"]
    text["per_layer_config"] = {str(n): own for n in layers}
    assert config_of("huggingface", metadata | {"text_config": text}) == config_of("huggingface", metadata)
    text["per_layer_config"] = {"0": own}
    with pytest.raises(NotImplementedError, match="per_layer_config"):
        config_of("huggingface", metadata | {"text_config": text})
