"""Architectures that are a relative of another with other names, other scales or without something: each
beside llama.cpp in F32, and from a Hugging Face folder."""

import dataclasses
import functools

import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.network import architectures
from bonsai_jax.weights.read import blocks
from checkpoints import Checkpoint, Tensor
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
    "vocab_size": 512,
}
EXPERTS = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 64}
DENSE_FIRST = EXPERTS | {"leading_dense_block_count": 1, "expert_shared_count": 2}
SECTIONS = {"rope.dimension_sections": np.array([6, 5, 5, 0], np.int32)}
SETTINGS = {
    "minicpm": COMMON | {"embedding_scale": 3.0, "residual_scale": 0.8, "logit_scale": 0.5},
    "gemma": COMMON | {"attention.key_length": 64, "attention.value_length": 64},
    "olmoe": COMMON | EXPERTS | {"feed_forward_length": 64, "attention.head_count_kv": 4},
    "dots1": COMMON
    | DENSE_FIRST
    | {
        "attention.head_count_kv": 4,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
    },
    "deepseek": COMMON | DENSE_FIRST,
    "exaone": COMMON,
    "internlm2": COMMON,
    "chatglm": COMMON | {"rope.dimension_count": 16},
    "qwen2vl": COMMON | SECTIONS,
    "qwen3vl": COMMON | SECTIONS | {"n_deepstack_layers": 2},
    "qwen3vlmoe": COMMON | SECTIONS | EXPERTS | {"n_deepstack_layers": 2},
    "bailingmoe2": COMMON
    | DENSE_FIRST
    | {
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
        "expert_shared_feed_forward_length": 64,
        "rope.dimension_count": 16,
    },
}
DRAWN = {"embed": (0.0, 0.3), "choice_bias": (0.0, 0.1)}
WITHOUT = ("rope_divisors", "rope_short", "rope_long")
FUSED = ("attn_qkv.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight")


@functools.cache
def file(name: str) -> Checkpoint:
    checkpoint = unfused(name)
    return below_each_other(checkpoint, *FUSED) if name == "bailingmoe2" else checkpoint


def unfused(name: str) -> Checkpoint:
    tied = ("head",) if name == "gemma" else ()
    return tiny_gguf(name, SETTINGS[name], drawn=DRAWN, without=(*WITHOUT, *tied))


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 256, length).tolist()


@pytest.mark.parametrize("name", SETTINGS)
def test_llama_cpp_gives_the_same_text_and_probabilities(name, tmp_path):
    path = as_file(file(name), tmp_path / "tiny.gguf")
    model = bj.from_checkpoint(file(name), bj.RunConfig(impl="reference", page_size=16))
    rows = answers(path, model.tokenizer, [prompt(n) for n in (1, 63, 65, 300)], 6)
    found = agreement(model, rows, padded=True)
    print(f"{name}: {found}")
    assert found.kl < 1e-6 and found.same_top == 1


SIZES = {
    "num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
}  # fmt: skip
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
DEEPSEEK = MIXTURE | {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1}
SIGMOID = DEEPSEEK | {"routed_scaling_factor": 2.5, "norm_topk_prob": True}
MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [6, 5, 5]}}
# config.json of each, and which of the file's tensors lie in one below each other.
QKV = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
FOLDERS: dict[str, tuple[dict, list[tuple[str, ...]]]] = {
    "minicpm": (
        {"scale_emb": 3.0, "scale_depth": 0.8 * 3**0.5, "dim_model_base": 256, "model_type": "minicpm"},
        [],
    ),
    "gemma": ({"head_dim": 64, "hidden_act": "gelu"}, []),
    "olmoe": (
        {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 64, "num_key_value_heads": 4},
        [],
    ),
    "dots1": (SIGMOID | {"num_key_value_heads": 4}, []),
    "deepseek": (DEEPSEEK, []),
    "exaone": ({"num_layers": 3, "layer_norm_epsilon": 1e-5, "activation_function": "silu"}, []),
    "internlm2": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, []),
    "chatglm": (
        {
            "num_layers": 3, "multi_query_attention": True, "multi_query_group_num": 2, "seq_length": 2048,
            "ffn_hidden_size": 192, "layernorm_epsilon": 1e-5, "add_qkv_bias": True,
        },
        [
            ("self_attention.query_key_value.weight", *QKV),
            ("self_attention.query_key_value.bias", *(name.replace("weight", "bias") for name in QKV)),
        ],
    ),
    "qwen2vl": (MROPE | {"model_type": "qwen2_vl"}, []),
    "qwen3vl": ({"model_type": "qwen3_vl", "text_config": SIZES | MROPE}, []),
    "bailingmoe2": (
        MIXTURE
        | {
            "model_type": "bailing_moe_v2", "num_shared_experts": 2, "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 4, "topk_group": 2,
        },
        [("attention.query_key_value.weight", *QKV)],
    ),
}  # fmt: skip


def folder(name: str, **changes) -> Checkpoint:
    """As it was published."""
    metadata, fused = FOLDERS[name]
    original = {"norm": lambda w: w - 1, "final_norm": lambda w: w - 1} if name == "gemma" else {}
    made = as_huggingface(unfused(name), {}, turned=name != "chatglm", **original)
    for names in fused:
        made = below_each_other(made, *names)
    if name == "internlm2":
        made = with_grouped_rows(made)
    return dataclasses.replace(made, metadata={"model_type": name, **SIZES, **metadata, **changes})


def with_grouped_rows(checkpoint: Checkpoint) -> Checkpoint:
    """Of each of the 2 KV heads two queries, a key and a value."""
    tensors = dict(checkpoint.tensors)
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        own = [tensors.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        heads = [t.data.view(np.float32).reshape(2, -1, 32, 128) for t in own]
        w = np.concatenate(heads, axis=1).reshape(-1, 128)
        fused = name.replace("self_attn.q_proj", "attention.wqkv")
        tensors[fused] = Tensor(fused, "f32", w.shape, w.view(np.uint8))
    return dataclasses.replace(checkpoint, tensors=tensors)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_the_same_model_as_the_gguf_file(name):
    ids = prompt(40)
    np.testing.assert_allclose(logits(folder(name), ids), logits(file(name), ids), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("minicpm", {"num_experts": 8}, "MiniCPM-MoE is not supported"),
        ("deepseek", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; supported: softmax"),
        ("exaone", {"activation_function": "gelu"}, "hidden_act is 'gelu'; supported: silu"),
        ("internlm2", {"bias": True}, "bias is true; supported: false"),
        ("chatglm", {"rmsnorm": False}, "rmsnorm is False; supported: True"),
        ("bailingmoe2", {"score_function": "softmax"}, "score_function is 'softmax'; supported: sigmoid"),
        ("bailingmoe2", {"moe_shared_expert_intermediate_size": 64}, r"num_shared_experts \(128\)"),
    ],
)
def test_what_a_folder_says_otherwise_is_refused(name, change, message):
    with pytest.raises(NotImplementedError, match=message):
        architectures.config_of(folder(name, **change))


def test_transposed_experts_of_a_folder_are_refused():
    with pytest.raises(NotImplementedError, match="use a GGUF file of it"):
        architectures.get("qwen3_vl_moe").config_from_huggingface({}, {})


def test_weights_of_a_bitnet_folder_become_three_values():
    """Those that llama.cpp's converter writes."""
    raw = tiny_gguf("bitnet", COMMON, drawn=DRAWN)
    folder = as_huggingface(raw, SIZES | {"model_type": "bitnet", "hidden_act": "silu"})
    tensors = dict(raw.tensors)
    for name in [name for name in tensors if name.startswith("blk.") and "norm" not in name]:
        w = np.asarray(blocks(tensors[name])).view(np.float32).reshape(tensors[name].shape)
        scale = np.abs(w).mean(dtype=np.float64)
        w = np.float32(np.clip(np.rint(w / scale), -1, 1) * scale)
        assert len(np.unique(w)) == 3
        tensors[name] = Tensor(name, "f32", w.shape, w.view(np.uint8))
    gguf = dataclasses.replace(raw, tensors=tensors)
    np.testing.assert_allclose(logits(folder, prompt(40)), logits(gguf, prompt(40)), atol=1e-5)
    packed = {"quantization_config": {"quantization_mode": "offline"}}
    with pytest.raises(NotImplementedError, match="quantization_mode is 'offline': packed weights are not"):
        architectures.config_of(dataclasses.replace(folder, metadata={**folder.metadata, **packed}))
