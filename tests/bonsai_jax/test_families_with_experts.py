"""Members with experts of families whose dense models run: Granite (also with Mamba 2), Hunyuan, LFM2."""

import functools

import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.network import architectures
from checkpoints import Checkpoint, CheckpointError
from tests.agreement import agreement
from tests.bonsai_jax.test_oracle import answers, as_file
from tests.bonsai_jax.tiny_files import as_huggingface, below_each_other, logits, tiny_gguf

COMMON = {
    "block_count": 3,
    "context_length": 2048,
    "embedding_length": 128,
    "feed_forward_length": 192,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 1e4,
    "expert_count": 8,
    "expert_used_count": 3,
    "vocab_size": 512,
}
GRANITE = {"embedding_scale": 3.0, "residual_scale": 0.5, "attention.scale": 0.1, "logit_scale": 2.0}
MAMBA2 = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 1,
    "ssm.time_step_rank": 8,
    "ssm.inner_size": 256,
}
SETTINGS = {
    "granitemoe": COMMON | GRANITE | {"expert_shared_feed_forward_length": 64},
    "granitehybrid": COMMON
    | GRANITE
    | MAMBA2
    | {
        "attention.head_count_kv": np.array([0, 2, 0], np.int32),
        "expert_shared_feed_forward_length": 64,
        "rope.scaling.finetuned": False,
    },
    "hunyuan-moe": COMMON | {"expert_feed_forward_length": 192, "expert_shared_feed_forward_length": 192},
    "lfm2moe": COMMON
    | {
        "attention.head_count_kv": np.array([0, 2, 0], np.int32),
        "expert_feed_forward_length": 64,
        "expert_gating_func": 2,
        "leading_dense_block_count": 1,
        "shortconv.l_cache": 3,
    },
}
DRAWN = {"decay": (-0.15, 0.03), "dt": (0.0, 0.5), "skip": (0.0, 0.5), "conv_bias": (0.0, 0.1)}
DRAWN |= {"choice_bias": (0.0, 0.1), "embed": (0.0, 0.3)}
SHAPES = {"decay": (8, 1), "skip": (8, 1), "group_norm": (1, 256)}


@functools.cache
def file(name: str):
    return tiny_gguf(name, SETTINGS[name], drawn=DRAWN, shapes=SHAPES, without=("rope_divisors",))


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 256, length).tolist()


@pytest.mark.parametrize("name", SETTINGS)
def test_llama_cpp_gives_the_same_text_and_probabilities(name, tmp_path):
    path = as_file(file(name), tmp_path / "tiny.gguf")
    model = bj.from_checkpoint(file(name), bj.RunConfig(impl="reference", page_size=16))
    found = agreement(model, answers(path, model.tokenizer, [prompt(n) for n in (1, 63, 65, 300)], 8))
    print(f"{name}: {found}")
    assert found.kl < 1e-6 and found.same_top == 1


def test_granite_hybrid_may_be_dense(tmp_path):
    dense = {key: value for key, value in SETTINGS["granitehybrid"].items() if "expert" not in key}
    checkpoint = tiny_gguf("granitehybrid", dense, drawn=DRAWN, shapes=SHAPES, without=("rope_divisors",))
    model = bj.from_checkpoint(checkpoint, bj.RunConfig(impl="reference", page_size=16))
    rows = answers(as_file(checkpoint, tmp_path / "tiny.gguf"), model.tokenizer, [prompt(65)], 8)
    assert agreement(model, rows).kl < 1e-6


def test_an_lfm2_folder_is_the_same_model():
    metadata = {
        "model_type": "lfm2_moe",
        "num_hidden_layers": 3,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "norm_eps": 1e-5,
        "rope_theta": 1e4,
        "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "num_dense_layers": 1,
    }
    folder = as_huggingface(file("lfm2moe"), metadata)
    np.testing.assert_allclose(logits(folder, prompt(50)), logits(file("lfm2moe"), prompt(50)), atol=1e-5)


SIZES = {
    "num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
}  # fmt: skip
GRANITE_FOLDER = SIZES | {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1,
    "logits_scaling": 2.0, "num_local_experts": 8, "num_experts_per_tok": 3, "shared_intermediate_size": 64,
}  # fmt: skip
HYBRID_FOLDER = GRANITE_FOLDER | {
    "model_type": "granitemoehybrid", "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 8,
    "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4,
    "position_embedding_type": "nope",
}  # fmt: skip
FOLDERS = {
    "granitemoe": GRANITE_FOLDER | {"model_type": "granitemoeshared"},
    "granitehybrid": HYBRID_FOLDER,
    "hunyuan-moe": SIZES
    | {
        "model_type": "hunyuan_v1_moe", "num_experts": 8, "moe_topk": [3, 3, 3],
        "moe_intermediate_size": [192] * 3, "num_shared_expert": [1] * 3,
    },
}  # fmt: skip


def granite_folder(gguf: Checkpoint, metadata) -> Checkpoint:
    """As transformers writes it."""
    folder = as_huggingface(gguf, metadata, decay=lambda a: np.log(-a))
    for experts in ("block_sparse_moe", "shared_mlp"):
        parts = (f"{experts}.gate.weight", f"{experts}.up.weight")
        folder = below_each_other(folder, f"{experts}.input_linear.weight", *parts)
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_the_same_model_as_the_gguf_file(name):
    make = as_huggingface if name == "hunyuan-moe" else granite_folder
    folder = make(file(name), FOLDERS[name])
    np.testing.assert_allclose(logits(folder, prompt(50)), logits(file(name), prompt(50)), atol=1e-5)


def test_a_folder_of_a_dense_granite_hybrid_calls_its_feed_forward_a_shared_expert():
    dense = {key: value for key, value in SETTINGS["granitehybrid"].items() if "expert" not in key}
    gguf = tiny_gguf("granitehybrid", dense, drawn=DRAWN, shapes=SHAPES, without=("rope_divisors",))
    folder = granite_folder(gguf, HYBRID_FOLDER | {"num_local_experts": 0, "shared_intermediate_size": 192})
    assert not any("block_sparse_moe" in name for name in folder.tensors)
    np.testing.assert_allclose(logits(folder, prompt(50)), logits(gguf, prompt(50)), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("granitehybrid", {"model_type": "bamba"}, "folders of Bamba are not supported; use a GGUF file"),
        ("granitehybrid", {"layer_types": ["mamba"]}, "layer_types: 3 are expected, each one of mamba, att"),
        ("hunyuan-moe", {"use_cla": True}, "use_cla is true"),
        ("hunyuan-moe", {"moe_topk": [3, 2, 3]}, r"moe_topk is \[3, 2, 3\]; a number is expected"),
    ],
)
def test_what_a_folder_says_wrong_is_named(name, change, message):
    folder = as_huggingface(file(name), FOLDERS[name] | change)
    with pytest.raises((CheckpointError, NotImplementedError), match=message):
        architectures.config_of(folder)
