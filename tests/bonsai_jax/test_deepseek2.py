"""DeepSeek 2 and its like: latent attention, with experts or without."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.network import architectures
from bonsai_jax.weights import memory
from checkpoints import CheckpointError, Tensor
from tests.agreement import agreement
from tests.bonsai_jax.test_oracle import GREEDY, answers, as_file
from tests.bonsai_jax.tiny_files import as_huggingface, logits, tiny_gguf

HEADS, NOPE, ROPE, VALUE, RANK = 4, 32, 16, 24, 64
DENSE = {
    "block_count": 2,
    "context_length": 2048,
    "embedding_length": 128,
    "feed_forward_length": 192,
    "attention.head_count": HEADS,
    "attention.head_count_kv": 1,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.q_lora_rank": 96,
    "attention.kv_lora_rank": RANK,
    "attention.key_length": RANK + ROPE,
    "attention.value_length": RANK,
    "attention.key_length_mla": NOPE + ROPE,
    "attention.value_length_mla": VALUE,
    "rope.freq_base": 1e4,
    "rope.dimension_count": ROPE,
    "leading_dense_block_count": 2,
    "expert_shared_count": 0,
    "expert_feed_forward_length": 64,
    "vocab_size": 512,
}
EXPERTS = DENSE | {
    "leading_dense_block_count": 1,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_shared_count": 1,
    "expert_weights_scale": 1.8,
}
V3 = EXPERTS | {
    "expert_gating_func": 2,
    "expert_weights_norm": True,
    "expert_group_count": 2,
    "expert_group_used_count": 1,
}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 40.0,
    "rope.scaling.original_context_length": 64,
}
TEMPERATURE = {"attention.temperature_scale": 0.1, "attention.temperature_length": 64}
LITE = {key: value for key, value in EXPERTS.items() if key != "attention.q_lora_rank"}
SMALL = LITE | YARN | {"rope.scaling.yarn_log_multiplier": 0.0707}
SETTINGS = {
    "V3": ("deepseek2", V3),
    # llama.cpp takes files of 26 layers for those without q_lora_rank. All layers are alike: one program.
    "V2 Lite": ("deepseek2", SMALL | {"block_count": 26, "leading_dense_block_count": 0}),
    "V2 Lite, two layers": ("deepseek2", SMALL | {"leading_dense_block_count": 0}),
    "V3 with YaRN": ("deepseek2", V3 | YARN | {"rope.scaling.yarn_log_multiplier": 0.1}),
    "YaRN without a multiplier": ("deepseek2", DENSE | YARN | {"expert_count": 0}),
    "Mistral": ("mistral4", EXPERTS | TEMPERATURE),
}  # fmt: skip
DRAWN = {"choice_bias": (0.0, 0.1), "embed": (0.0, 0.3)}


@functools.cache
def file(name: str = "V3", format: str = "f32"):
    architecture, settings = SETTINGS[name]
    without = () if "expert_gating_func" in settings else ("choice_bias",)
    return tiny_gguf(architecture, settings, format, drawn=DRAWN, without=without)


@functools.cache
def model(name: str = "V3") -> bj.Model:
    return bj.from_checkpoint(file(name), bj.RunConfig(impl="reference", page_size=16))


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 256, length).tolist()


@pytest.mark.parametrize(
    "name",
    [
        "V3",
        pytest.param("V2 Lite", marks=pytest.mark.slow),  # its layers take llama.cpp a while
        "V3 with YaRN",
        pytest.param("YaRN without a multiplier", marks=pytest.mark.slow),
        "Mistral",
    ],
)
def test_llama_cpp_gives_the_same_text_and_probabilities(name, tmp_path):
    path = as_file(file(name), tmp_path / "tiny.gguf")
    rows = answers(path, model(name).tokenizer, [prompt(n) for n in (1, 63, 65, 300)], 8)
    found = agreement(model(name), rows, padded=True)
    print(f"{name}: {found}")
    assert found.kl < 1e-6 and found.same_top == 1


FOLDERS = {
    "V3": {
        "model_type": "deepseek_v3",
        "q_lora_rank": 96,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    },
    "V2 Lite, two layers": {
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "first_k_dense_replace": 0,
        "topk_method": "greedy",
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 64,
        },
    },
}
FOLDER = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "routed_scaling_factor": 1.8,
}


def folder(name: str):
    """The Hugging Face folder of a file: keys and values by head are rows of one matrix."""
    original = as_huggingface(file(name), FOLDER | FOLDERS[name])
    tensors = dict(original.tensors)
    for key in [key for key in tensors if key.endswith("k_b_proj.weight")]:
        k, v = (tensors.pop(one).data.view(np.float32) for one in (key, key.replace("k_b_proj", "v_b_proj")))
        both = np.concatenate([k.swapaxes(1, 2), v], axis=1).reshape(-1, RANK)
        whole = key.replace("k_b_proj", "kv_b_proj")
        tensors[whole] = Tensor(whole, "f32", both.shape, np.ascontiguousarray(both).view(np.uint8))
    return dataclasses.replace(original, tensors=tensors)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_hugging_face_folder_is_the_same_model(name):
    ids = prompt(50)
    np.testing.assert_allclose(logits(folder(name), ids), logits(file(name), ids), atol=1e-4)


def test_tokens_one_by_one_in_an_engine_are_the_same_text():
    ids, options = prompt(40) * 2, {"max_new_tokens": 8, "ignore_eos": True}
    with bj.Engine(model(), max_batch_size=2, context=128) as engine:
        first, again = (engine.submit(ids, sampling=GREEDY, **options).result().tokens for _ in range(2))
    assert again == first  # it continues from pages of the first
    whole = bj.logits(model(), [*ids, *first])
    assert whole[len(ids) - 1 : -1].argmax(-1).tolist() == first


@pytest.mark.slow
def test_generated_and_speculated_tokens_are_the_same_text():
    ids, options = prompt(40) * 2, {"max_new_tokens": 12, "ignore_eos": True, "sampling": GREEDY}
    (plain,), (guessed,) = (bj.generate(model(), [ids], speculate=how, **options) for how in (None, "ngram"))
    assert guessed.tokens == plain.tokens
    whole = bj.logits(model(), [*ids, *plain.tokens])
    assert whole[len(ids) - 1 : -1].argmax(-1).tolist() == plain.tokens


@pytest.mark.parametrize("format", ["q8_0", pytest.param("q4_0", marks=pytest.mark.slow)])
def test_kernels_of_cpus_are_the_reference(format):
    exact, kernels = (
        bj.from_checkpoint(file("V3", format), bj.RunConfig(page_size=16, **how))
        for how in ({"impl": "reference"}, {"activation_bits": 16})
    )
    np.testing.assert_allclose(bj.logits(kernels, prompt(70)), bj.logits(exact, prompt(70)), atol=5e-3)


def test_a_cache_of_8_bits_is_nearly_the_same_model():
    small = bj.from_checkpoint(file(), bj.RunConfig(impl="reference", page_size=16, cache_dtype="int8"))
    ids = prompt(70)
    exact, rounded = (np.asarray(bj.logits(one, ids)) for one in (model(), small))
    assert 1e-5 < np.abs(exact - rounded).max() < 0.1
    row, scale, layers = RANK + ROPE, 2, 2
    assert memory.bytes_per_token(small.config, small.run) == layers * (row + scale)


def test_taps_see_queries_patterns_and_outputs():
    tokens, lengths = jnp.array([prompt(20)]), jnp.array([20])
    taps = bj.Taps(("q", "pattern", "z", "attention"))
    _, read = bj.jitted.forward(model().params, tokens, lengths, model().config, taps=taps)
    assert read["q"].shape == (2, 1, 20, HEADS, NOPE + ROPE) and read["z"].shape == (2, 1, 20, HEADS, VALUE)
    np.testing.assert_allclose(read["pattern"].sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("attention.key_length_mla", None, "attn_kv_b is one matrix; use a GGUF file that"),
        ("attention.kv_lora_rank", 0, "kv_lora_rank is 0; a whole number from 1"),
        ("attention.key_length_mla", ROPE, "keys of 0, values of 24; each must be positive"),
        ("rope.scaling.factor", 4.0, "rope.scaling.factor is 4.0, of type 'linear'; with latent"),
    ],
)  # fmt: skip
def test_a_wrong_key_is_named(key, value, message):
    metadata = {**file().metadata, f"deepseek2.{key}": value}
    changed = dataclasses.replace(file(), metadata=metadata)
    with pytest.raises((CheckpointError, NotImplementedError), match=message):
        architectures.config_of(changed)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"topk_method": "group_limited_greedy"}, "groups by their best expert are not supported"),
        ({"scoring_func": "sqrtsoftplus"}, "scoring_func is 'sqrtsoftplus'; supported: softmax, sigmoid"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types: 2 are expected"),
        ({"model_type": "mistral4"}, "folders of mistral4 are not read; use a GGUF file"),
    ],
)
def test_a_folder_with_a_wrong_key_is_refused(changes, message):
    changed = folder("V3")
    changed = dataclasses.replace(changed, metadata={**changed.metadata, **changes})
    with pytest.raises((CheckpointError, NotImplementedError), match=message):
        architectures.config_of(changed)


def test_a_folder_of_quantized_keys_is_refused():
    whole = "model.layers.0.self_attn.kv_b_proj.weight"
    changed = folder("V3")
    blocks = Tensor(whole, "q8_0", changed.tensors[whole].shape, np.zeros((224, 68), np.uint8))
    changed = dataclasses.replace(changed, tensors={**changed.tensors, whole: blocks})
    with pytest.raises(
        NotImplementedError, match=r"kv_b_proj\.weight is q8_0, and .*k_b_proj\.weight is its"
    ):
        architectures.describe(changed)
