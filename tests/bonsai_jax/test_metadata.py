"""Hyperparameters as strangers write them: every value either loads or ends in one clear error."""

import dataclasses

import numpy as np
import pytest

from bonsai_jax.model import RunConfig, Tokenizer
from bonsai_jax.network import architectures, rope
from bonsai_jax.weights import plan as load_plans
from checkpoints import Checkpoint, CheckpointError, open_checkpoint

ODD = ["x", {}, [], None, True, -1, 0, float("inf"), 1.5, 10**400, [1, 2]]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 32.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def plan(checkpoint: Checkpoint) -> None:
    description = architectures.describe(checkpoint)
    rope.frequencies(description.config.attention.rope)
    load_plans.plan(description, RunConfig())


def said_of(read, checkpoint: Checkpoint, change: dict) -> str | None:
    """What `read` says of the checkpoint with its metadata changed; None where it has nothing to say."""
    try:
        read(dataclasses.replace(checkpoint, metadata={**checkpoint.metadata, **change}))
    except (CheckpointError, NotImplementedError, ValueError) as error:
        assert str(error) and "Error" not in str(error) and len(str(error)) < 1000
        return str(error)
    return None


def huggingface() -> Checkpoint:
    """A synthetic model under the names of a Hugging Face folder."""
    gguf = open_checkpoint("synth:tiny-qwen2:f32")
    config = architectures.config_of(gguf)
    tensors = {
        spec.huggingface.format(layer): gguf.tensors[spec.gguf.format(layer)]
        for spec in architectures.get("qwen2").TENSORS
        for layer in range(config.num_layers if "{}" in spec.gguf else 1)
        if spec.gguf.format(layer) in gguf.tensors
    }
    metadata = {
        "model_type": "qwen2",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden,
        "intermediate_size": config.mlp.ffn,
        "num_attention_heads": config.attention.num_heads,
        "num_key_value_heads": config.attention.num_kv_heads,
        "head_dim": config.attention.head_dim,
        "max_position_embeddings": config.context_length,
        "sliding_window": 4096,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "rope_theta": config.attention.rope.base,
    }
    return Checkpoint("folder", "huggingface", metadata, tensors)


@pytest.mark.parametrize("scaling", [{}, YARN, LLAMA3], ids=["default", "yarn", "llama3"])
def test_any_value_of_config_json_loads_or_is_named(scaling):
    checkpoint = huggingface()
    good = {**checkpoint.metadata, "rope_scaling": scaling}
    assert said_of(plan, checkpoint, good) is None
    changes = [{key: odd} for key in good for odd in ODD]
    changes += [{"rope_scaling": scaling | {key: odd}} for key in scaling for odd in ODD]
    said = [said_of(plan, checkpoint, good | change) for change in changes]
    assert sum(text is not None for text in said) > 100


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama"])
def test_any_value_of_gguf_metadata_loads_or_is_named(name):
    checkpoint = open_checkpoint(f"synth:{name}:q8_0")
    said = []
    for key in checkpoint.metadata:
        read = Tokenizer.from_checkpoint if key.startswith("tokenizer.") else plan
        assert said_of(read, checkpoint, {}) is None
        odd = [*ODD, np.array([1, 2]), np.uint32(0), np.float32("nan")]
        said += [said_of(read, checkpoint, {key: value}) for value in odd]
    assert sum(text is not None for text in said) > 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_position_embeddings": "x"}, "max_position_embeddings is 'x'; a number is expected"),
        ({"num_hidden_layers": {}}, "num_hidden_layers is {}; a number is expected"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True; a number"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers is 1.5; a whole number from 1 to 2147483647"),
        ({"hidden_size": -1}, "hidden_size is -1; a whole number"),
        ({"rope_theta": [1]}, r"rope_theta is \[1\]; a number"),
        ({"rope_theta": 1}, "base is 1.0; it must be above 1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; a number"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; an object is expected"),
        ({"rope_scaling": YARN | {"factor": "4"}}, "rope_scaling.factor is '4'; a number"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor is 4.0; it must be below"),
    ],
)
def test_what_is_wrong_is_named(change, message):
    checkpoint = huggingface()
    odd = dataclasses.replace(checkpoint, metadata={**checkpoint.metadata, **change})
    with pytest.raises(CheckpointError, match=f"folder: metadata of this qwen2 model: .*{message}"):
        architectures.config_of(odd)


def test_null_is_the_default():
    checkpoint = huggingface()
    nulls = dict.fromkeys(("head_dim", "rope_theta", "rope_scaling", "sliding_window", "num_key_value_heads"))
    config = architectures.config_of(
        dataclasses.replace(checkpoint, metadata={**checkpoint.metadata, **nulls})
    )
    attention = config.attention
    assert (attention.head_dim, attention.num_kv_heads, attention.rope.base) == (64, 4, 10000.0)


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({}, [512, 512, 512]),
        ({"max_window_layers": 1}, [None, 512, 512]),  # Qwen2's: the layers before it see all keys
        ({"use_sliding_window": False}, [None, None, None]),
    ],
)
def test_a_sliding_window_is_that_of_its_layers_and_leaves_the_context_as_it_is(change, windows):
    checkpoint = huggingface()
    metadata = {**checkpoint.metadata, "sliding_window": 512, **change}
    config = architectures.config_of(dataclasses.replace(checkpoint, metadata=metadata))
    assert [layer.mixer.window for layer in config.layers] == windows
    assert config.context_length == checkpoint.metadata["max_position_embeddings"] > 512
