"""Models with Mamba 2: beside attention in every layer (Falcon-H1), and in layers of its own (Nemotron-H)."""

import functools

import jax
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.network import architectures
from bonsai_jax.network import cache as kv
from bonsai_jax.network.kinds.state import Room
from checkpoints import CheckpointError
from tests.agreement import agreement
from tests.bonsai_jax.test_oracle import GREEDY, answers, as_file
from tests.bonsai_jax.tiny_files import as_huggingface, logits, tiny_gguf

COMMON = {
    "context_length": 2048,
    "embedding_length": 128,
    "attention.head_count": 4,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 8,
    "ssm.inner_size": 256,
    "vocab_size": 512,
}
SETTINGS = {
    "falcon-h1": {
        **COMMON,
        "block_count": 3,
        "attention.head_count_kv": 2,
        "feed_forward_length": 256,
        "rope.freq_base": 1e6,
    },
    "nemotron_h": {
        **COMMON,
        "block_count": 6,
        "attention.head_count_kv": np.array([0, 0, 2, 0, 0, 0], np.int32),
        "feed_forward_length": np.array([0, 256, 0, 384, 0, 256], np.int32),
        "attention.layer_norm_epsilon": 1e-5,
        "rope.dimension_count": 32,
    },
}
SETTINGS["nemotron_h_moe"] = SETTINGS["nemotron_h"] | {
    "feed_forward_length": np.array([0, 64, 0, 64, 0, 64], np.int32),
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 64,
    "expert_shared_feed_forward_length": 128,
    "expert_shared_count": 1,
    "expert_weights_norm": True,
    "expert_weights_scale": 2.5,
    "expert_group_count": 1,
}
# States that decay by about a tenth for each token, and time steps near 1.
DRAWN = {
    "decay": (-0.15, 0.03),
    "dt": (0.0, 0.5),
    "skip": (0.0, 0.5),
    "conv_bias": (0.0, 0.1),
    "choice_bias": (0.0, 0.1),
    "embed": (0.0, 0.5),
}
SHAPES = {"decay": (8, 1), "skip": (8, 1), "group_norm": (2, 128)}
LENGTHS = (1, 63, 65, 300)
both_mixers_every_day = pytest.mark.parametrize(
    "name",
    ["falcon-h1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("nemotron_h", "nemotron_h_moe"))],
)


@functools.cache
def file(name: str, format: str = "f32"):
    return tiny_gguf(name, SETTINGS[name], format, drawn=DRAWN, shapes=SHAPES)


@functools.cache
def model(name: str) -> bj.Model:
    return bj.from_checkpoint(file(name), bj.RunConfig(impl="reference", page_size=16))


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 256, length).tolist()


@pytest.mark.parametrize("name", SETTINGS)
def test_llama_cpp_gives_the_same_text_and_probabilities(name, tmp_path):
    path = as_file(file(name), tmp_path / "tiny.gguf")
    rows = answers(path, model(name).tokenizer, [prompt(length) for length in LENGTHS], 12)
    found = agreement(model(name), rows, padded=True)
    print(f"{name}: {found}")
    assert found.kl < 1e-6 and found.same_top == 1


@both_mixers_every_day
def test_kernels_of_cpus_are_the_reference(name):
    exact, kernels = (
        bj.from_checkpoint(file(name, "q8_0"), bj.RunConfig(page_size=16, **how))
        for how in ({"impl": "reference"}, {"activation_bits": 16})
    )
    np.testing.assert_allclose(bj.logits(kernels, prompt(70)), bj.logits(exact, prompt(70)), atol=5e-3)


@pytest.mark.parametrize("name", SETTINGS)
def test_states_stay_float32(name):
    """RunConfig.state_dtype is for delta nets."""
    config, half = (
        architectures.config_of(file(name)),
        bj.RunConfig(cache_dtype="float32", state_dtype="float16"),
    )
    (state,) = jax.eval_shape(lambda: kv.empty_states(config, half, Room(1, 64)))["mamba2"]
    assert state.s.dtype == state.tail.dtype == np.float32
    mixer = next(mixer for layer in config.layers for mixer in layer.mixers if mixer.kind == "mamba2")
    assert mixer.bytes_per_row(half) == mixer.bytes_per_row(bj.RunConfig())


@both_mixers_every_day
def test_tokens_one_by_one_in_an_engine_and_speculated_are_the_same_text(name):
    ids, options = prompt(40) * 2, {"max_new_tokens": 12, "ignore_eos": True}
    (guessed,) = bj.generate(model(name), [ids], sampling=GREEDY, speculate="ngram", **options)
    whole = bj.logits(model(name), [*ids, *guessed.tokens])
    assert whole[len(ids) - 1 : -1].argmax(-1).tolist() == guessed.tokens
    with bj.Engine(model(name), max_batch_size=2, context=256) as engine:
        for _ in range(2):  # the second continues from a saved state
            assert engine.submit(ids, sampling=GREEDY, **options).result().tokens == guessed.tokens


NEMOTRON_FOLDER = {
    "model_type": "nemotron_h",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_head_dim": 32,
    "intermediate_size": 256,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "max_position_embeddings": 2048,
    "layer_norm_epsilon": 1e-5,
    "hybrid_override_pattern": "M-*-M-",
}
WORDS = ["mamba", "moe", "attention", "moe", "mamba", "moe"]
EXPERTS_FOLDER = NEMOTRON_FOLDER | {
    "hybrid_override_pattern": "ME*EME",
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 128,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


@pytest.mark.parametrize(
    ("name", "changes", "metadata"),
    [
        ("nemotron_h", {"feed_forward_length": np.array([0, 256] * 3, np.int32)}, NEMOTRON_FOLDER),
        ("nemotron_h_moe", {}, EXPERTS_FOLDER),
        ("nemotron_h_moe", {}, EXPERTS_FOLDER | {"layers_block_type": WORDS}),
    ],
)
def test_a_nemotron_folder_is_the_same_model(name, changes, metadata):
    gguf = tiny_gguf(name, SETTINGS[name] | changes, drawn=DRAWN, shapes=SHAPES)
    folder = as_huggingface(gguf, metadata, decay=lambda a: np.log(-a))
    np.testing.assert_allclose(logits(folder, prompt(50)), logits(gguf, prompt(50)), atol=1e-5)


FALCON_FOLDER = {
    "model_type": "falcon_h1",
    "num_hidden_layers": 3,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "mamba_d_ssm": 256,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
    "attention_in_multiplier": 1.25,
    "attention_out_multiplier": 0.9,
    "key_multiplier": 0.4,
    "ssm_in_multiplier": 1.5,
    "ssm_out_multiplier": 0.3,
    "ssm_multipliers": [0.35, 0.25, 0.2, 0.5, 0.7],
    "mlp_multipliers": [0.9, 0.4],
    "embedding_multiplier": 5.5,
    "lm_head_multiplier": 0.2,
}


def falcon_folder(**changes):
    """Whose multipliers make the GGUF file of it. Rows of `inputs`: z, x, B, C and the time steps."""
    parts = np.repeat(FALCON_FOLDER["ssm_multipliers"], (256, 256, 32, 32, 8))[:, None] * 1.5
    factors = {"q": 1.25, "k": 1.25 * 0.4, "v": 1.25, "o": 0.9, "inputs": parts, "out": 0.3}
    factors |= {"gate": 0.9, "down": 0.4, "embed": 5.5, "head": 0.2}
    original = {field: lambda w, f=f: (w / f).astype(np.float32) for field, f in factors.items()}
    return as_huggingface(file("falcon-h1"), FALCON_FOLDER | changes, decay=lambda a: np.log(-a), **original)


def test_a_falcon_folder_s_weights_are_multiplied_while_they_are_loaded():
    np.testing.assert_allclose(
        logits(falcon_folder(), prompt(50)), logits(file("falcon-h1"), prompt(50)), atol=1e-5
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mamba_d_ssm": 512},
            "falcon_h1 model: mamba_d_ssm is 512; mamba_n_heads times mamba_d_head is 256",
        ),
        ({"mamba_norm_before_gate": True}, "mamba_norm_before_gate is true; supported: false"),
        ({"mlp_multipliers": [1, 2, 3]}, r"mlp_multipliers is \[1, 2, 3\]; one number or a list of 2"),
    ],
)
def test_what_a_falcon_folder_says_wrong_is_named(changes, message):
    with pytest.raises((CheckpointError, NotImplementedError), match=f"^a tiny falcon-h1: .*{message}"):
        architectures.describe(falcon_folder(**changes))


def test_what_is_not_supported_is_named():
    nemotron = architectures.get("nemotron_h")
    with pytest.raises(NotImplementedError, match="moe_latent_size is 1024; experts in a latent space"):
        nemotron.config_from_huggingface(EXPERTS_FOLDER | {"moe_latent_size": 1024}, {})
    with pytest.raises(NotImplementedError, match="hybrid_override_pattern has 'E' in it; supported: "):
        nemotron.config_from_huggingface(NEMOTRON_FOLDER | {"hybrid_override_pattern": "ME"}, {})
