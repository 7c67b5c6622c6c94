"""Architectures with experts, a tiny model each: routers, shared experts, dense layers beside those with
experts.

Against llama.cpp in F32, and from a Hugging Face folder against the GGUF file. Qwen3-MoE: test_qwen3moe.py.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.network import architectures
from bonsai_jax.network import params as network_params
from bonsai_jax.network.kinds import experts as kinds_experts
from bonsai_jax.weights import plan as load_plans
from bonsai_jax.weights.read import blocks
from checkpoints import Checkpoint, CheckpointError, Tensor, open_checkpoint
from pallas_kernels.experts import routed
from tests.agreement import agreement, padded_logits
from tests.bonsai_jax.test_oracle import answers, as_file
from tests.bonsai_jax.tiny_files import comparable

LENGTHS, WRITTEN = (1, 63, 65, 300), 8
QWEN = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 256}
DELTA = {
    "shared_expert_intermediate_size": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "full_attention_interval": 2,
}  # fmt: skip
# Model -> what config.json says beside the sizes that all have.
FOLDERS: dict[str, dict[str, Any]] = {
    "tiny-qwen2moe": QWEN | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 512},
    "tiny-qwen35moe": QWEN
    | DELTA
    | {
        "model_type": "qwen3_5_moe_text",
        "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
    "tiny-maple": QWEN
    | {
        "model_type": "maple",
        "nope_on_global_attention": True,
        "sliding_window": 48,
        "rope_theta": 1e4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "tiny-ernie4_5-moe": {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_intermediate_size": 256,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "rope_theta": 1e4,
    },
    "tiny-glm4moe": {
        "model_type": "glm4_moe",
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 256,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "rope_theta": 1e4,
    },
    "tiny-minimax-m2": {
        "model_type": "minimax_m2",
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 256,
        "rotary_dim": 32,
        "rope_theta": 1e4,
    },
    "tiny-qwen3next": QWEN | DELTA | {"model_type": "qwen3_next", "partial_rotary_factor": 0.25},
}


@functools.cache
def checkpoint(name: str) -> Checkpoint:
    """With the arrays of tensors instead of their description."""
    file = open_checkpoint(f"synth:{name}:f32")
    return dataclasses.replace(file, tensors={n: stored(n, array(t)) for n, t in file.tensors.items()})


def array(t) -> np.ndarray:
    return np.asarray(blocks(t)).view(np.float32).reshape(t.shape)


def stored(name: str, w: np.ndarray) -> Tensor:
    raw = np.ascontiguousarray(w, np.float32).view(np.uint8)
    return Tensor(name, "f32", w.shape, raw.reshape(*w.shape[:-1], -1))


@functools.cache
def tiny(name: str) -> bj.Model:
    return bj.from_checkpoint(checkpoint(name), bj.RunConfig(impl="reference", page_size=16))


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 256, length).tolist()


@pytest.mark.parametrize("name", FOLDERS)
def test_llama_cpp_gives_the_same_text_and_probabilities(name, tmp_path):
    """The text is greedy: of each token read after llama.cpp's own the likeliest follows."""
    path = as_file(checkpoint(name), tmp_path / "tiny.gguf")
    rows = answers(path, tiny(name).tokenizer, [prompt(length) for length in LENGTHS], WRITTEN)
    found = agreement(tiny(name), rows, padded=True)
    print(f"{name}: {found}")
    assert found.kl < 1e-6 and found.same_top == 1


def folder(name: str, *, stacked: bool, **changes) -> Checkpoint:
    """The model as transformers writes it, its experts one by one or stacked, gate and up in one."""
    file = checkpoint(name)
    specs = {spec.gguf: spec for spec in architectures.get(file.metadata["general.architecture"]).TENSORS}
    specs |= {spec.fused.gguf: dataclasses.replace(spec, huggingface=spec.fused.huggingface)
              for spec in specs.values() if spec.fused and spec.fused.gguf}  # fmt: skip
    tensors: dict[str, np.ndarray] = {}
    for gguf, t in file.tensors.items():
        layer, pattern = re.search(r"\.(\d+)\.", gguf), re.sub(r"\.\d+\.", ".{}.", gguf)
        spec, w = specs[pattern], array(t)
        number = layer.groups() if layer else ()
        if name == "tiny-qwen35moe":
            w = with_grouped_heads(pattern, w)
        if spec.from_huggingface is not None:
            w = np.log(-w) if spec.field == "decay" else w - 1
        w = (
            w[:, None]
            if spec.field == "conv_weights"
            else w[None]
            if spec.field in ("shared_router", "choice_bias")
            else w
        )
        if spec.huggingface.count("{}") < 2:
            tensors[spec.huggingface.format(*number)] = w
        elif stacked and ".mlp.experts." in spec.huggingface:
            tensors[re.sub(r"\{\}\.(\w+)\.weight", r"\1", spec.huggingface.format(*number, "{}"))] = w
        else:
            tensors |= {spec.huggingface.format(*number, e): one for e, one in enumerate(w)}
    for gate in [n for n in tensors if n.endswith("experts.gate_proj")]:
        up = tensors.pop(gate.replace("gate", "up"))
        tensors[gate.replace("gate", "gate_up")] = np.concatenate([tensors.pop(gate), up], axis=1)
    if name == "tiny-qwen3next":
        tensors = with_fused_inputs(tensors)
    config = tiny(name).config
    metadata = {
        "num_hidden_layers": config.num_layers, "hidden_size": config.hidden, "intermediate_size": 512,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rope_theta": 1e6,
        "max_position_embeddings": config.context_length, "rms_norm_eps": config.rms_norm_eps,
    }  # fmt: skip
    tensors = {key: stored(key, w) for key, w in tensors.items()}
    return Checkpoint("folder", "huggingface", metadata | FOLDERS[name] | changes, tensors)


def with_grouped_heads(pattern: str, w: np.ndarray) -> np.ndarray:
    """v heads by k heads: that of number h uses k head h % 2 in the GGUF file, h // 2 in the folder."""
    grouped = [0, 2, 1, 3]
    if pattern.endswith(("ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias")):
        return w[grouped]
    if pattern.endswith("attn_gate.weight"):
        return w.reshape(4, 64, -1)[grouped].reshape(w.shape)
    if pattern.endswith("ssm_out.weight"):
        return w.reshape(-1, 4, 64)[:, grouped].reshape(w.shape)
    if pattern.endswith(("attn_qkv.weight", "ssm_conv1d.weight")):
        return np.concatenate([w[:256], w[256:].reshape(4, 64, -1)[grouped].reshape(256, -1)])
    return w


def with_fused_inputs(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Queries, keys, values and gates of each k head below each other."""
    for qkv in [n for n in tensors if n.endswith("in_proj_qkv.weight")]:
        w, z = tensors.pop(qkv), tensors.pop(qkv.replace("qkv", "z")).reshape(2, 128, -1)
        q, k, v = w[:128].reshape(2, 64, -1), w[128:256].reshape(2, 64, -1), w[256:].reshape(2, 128, -1)
        each = np.concatenate([q, k, v, z], axis=1)
        tensors[qkv.replace("qkv", "qkvz")] = each.reshape(-1, w.shape[1])
    return tensors


def loaded(file: Checkpoint) -> bj.Model:
    description = architectures.describe(file)
    run = load_plans.resolve(description, bj.RunConfig(impl="reference", page_size=16))
    plan = load_plans.planned(description, run)
    return dataclasses.replace(tiny("tiny-qwen2moe"), params=network_params.load(plan), config=plan.config)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_hugging_face_folder_is_the_same_model(name, monkeypatch):
    """Its settings and arrays, or its logits; experts that are stacked there become the same arrays."""
    monkeypatch.setattr(architectures.get("maple"), "LIMIT", 0.5)  # the tiny model's
    model, stacked = (loaded(folder(name, stacked=stacked)) for stacked in (False, True))
    for one, other in zip(jax.tree.leaves(model.params), jax.tree.leaves(stacked.params), strict=True):
        np.testing.assert_array_equal(one, other)
    if name == "tiny-qwen35moe":  # its v heads are in another order: other arrays, the same logits
        texts = [prompt(length + WRITTEN - 1) for length in LENGTHS]  # as long as above: one program
        for got, want in zip(padded_logits(model, texts), padded_logits(tiny(name), texts), strict=True):
            np.testing.assert_allclose(got, want, atol=2e-4)
        return
    assert comparable(model.config) == comparable(tiny(name).config)
    for got, want in zip(jax.tree.leaves(model.params), jax.tree.leaves(tiny(name).params), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


def with_tensors(file: Checkpoint, arrays: dict[str, np.ndarray], *without: str) -> Checkpoint:
    tensors = {name: t for name, t in file.tensors.items() if name not in without}
    return dataclasses.replace(file, tensors=tensors | {name: stored(name, w) for name, w in arrays.items()})


def test_a_gguf_file_may_have_gate_and_up_in_one_tensor():
    """Of experts, in some layers; rows that do not add up are an error."""
    file, gate, up = checkpoint("tiny-qwen2moe"), "blk.1.ffn_gate_exps.weight", "blk.1.ffn_up_exps.weight"
    both = np.concatenate([array(file.tensors[name]) for name in (gate, up)], axis=1)
    merged = loaded(with_tensors(file, {"blk.1.ffn_gate_up_exps.weight": both}, gate, up))
    want = loaded(file).params
    for one, other in zip(jax.tree.leaves(merged.params), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one, other)
    short = {"blk.1.ffn_gate_up_exps.weight": both[:, :500]}
    with pytest.raises(CheckpointError, match=r"gate_up_exps.weight has shape \(8, 500, 256\); .* 512 rows"):
        architectures.describe(with_tensors(file, short, gate, up))
    with pytest.raises(CheckpointError, match=r"no place for tensor blk\.1\.ffn_gate_up_exps\.weight"):
        architectures.describe(with_tensors(file, short))


def test_a_shared_expert_is_there_where_the_metadata_says_so():
    file, name = checkpoint("tiny-ernie4_5-moe"), "blk.1.ffn_up_shexp.weight"
    with pytest.raises(CheckpointError, match=rf"tensor {name} is missing"):
        architectures.describe(with_tensors(file, {}, name))
    without = {key: v for key, v in file.metadata.items() if "expert_shared_feed" not in key}
    with pytest.raises(CheckpointError, match=r"no place for tensor blk\.1\.ffn_gate_shexp\.weight"):
        architectures.describe(dataclasses.replace(file, metadata=without))


def test_a_draft_layer_of_glm_is_left_aside():
    file = checkpoint("tiny-glm4moe")
    more = {"blk.2.nextn.eh_proj.weight": np.zeros((256, 512))}
    keys = {"glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": 1}
    drafted = dataclasses.replace(with_tensors(file, more), metadata=dict(file.metadata) | keys)
    description = architectures.describe(drafted)
    assert description.config.num_layers == 2 and description.skipped == ("blk.2.",)
    with pytest.raises(NotImplementedError, match=r"the draft layer of glm4moe is not supported"):
        architectures.describe(drafted, draft=True)


@pytest.mark.parametrize(("name", "key", "value", "says"), [
    ("tiny-maple", "maple.swiglu_clamp_exp", [1.0, 7.0, 7.0], "swiglu_clamp_exp is .*; supported: one value"),
    ("tiny-maple", "maple.attention.sliding_window_pattern", [True], "a list of 3 values"),
    ("tiny-minimax-m2", "minimax-m2.expert_gating_func", 4, r"expert_gating_func is 4; supported: 1"),
    ("tiny-glm4moe", "glm4moe.expert_shared_count", -1, "expert_shared_count is -1; a whole number"),
])  # fmt: skip
def test_what_the_metadata_says_wrong_is_named(name, key, value, says):
    file = checkpoint(name)
    with pytest.raises((CheckpointError, NotImplementedError), match=says):
        architectures.config_of(dataclasses.replace(file, metadata=dict(file.metadata) | {key: value}))


@pytest.mark.parametrize("name", ["tiny-qwen35moe", "tiny-glm4moe", "tiny-deepseek2", "tiny-maple"])
def test_two_launches_are_given_what_the_layer_is(name, monkeypatch):
    """Rules, biases, the shared expert and padding: what `routed_ffn` is to compute, by its reference."""
    model = bj.load(f"synth:{name}:f16", bj.RunConfig(impl="reference"))
    tokens, lengths = np.arange(20).reshape(2, 10) + 7, np.array([10, 4])
    forward = lambda: bj.forward(model.params, tokens, lengths, model.config)[0]  # noqa: E731
    want, calls = jax.jit(lambda: forward())(), []

    def by_reference(op, exactly):
        calls.append(exactly)
        return exactly

    monkeypatch.setattr(kinds_experts, "can_route", lambda *_: True)
    monkeypatch.setattr(routed, "differentiated", by_reference)
    got = jax.jit(lambda: forward())()
    assert calls
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(got[row, :length], want[row, :length], rtol=1e-4, atol=1e-4)
