"""Norms and rotary embeddings against numpy in float64; configurations against what files say."""

import dataclasses
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from bonsai_jax.network import architectures
from bonsai_jax.network.architectures import llama
from bonsai_jax.network.kinds.attention import Attention
from bonsai_jax.network.rope import Rope, frequencies, model_frequencies, yarn_mscale
from bonsai_jax.network.rope_metadata import rope_from_huggingface
from checkpoints import Checkpoint, CheckpointError, open_checkpoint
from pallas_kernels import apply_rope, rms_norm

pytestmark = pytest.mark.usefixtures("optimized")


def test_rms_norm():
    x, gamma = (
        np.random.default_rng(0).standard_normal((2, 3, 64))[:2],
        np.random.default_rng(1).standard_normal(64),
    )
    want = gamma * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(rms_norm(jnp.asarray(x), jnp.asarray(gamma), 1e-5), want, rtol=2e-6)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_turns_pairs_as_complex_numbers(interleaved):
    rng = np.random.default_rng(2)
    x, positions = rng.standard_normal((2, 5, 3, 16)), rng.integers(0, 5000, (2, 5))
    theta = 10000.0 ** (-np.arange(8) / 8)
    z = x[..., 0::2] + 1j * x[..., 1::2] if interleaved else x[..., :8] + 1j * x[..., 8:]
    z = 1.25 * z * np.exp(1j * positions[..., None, None] * theta)
    want = (
        np.stack([z.real, z.imag], -1).reshape(x.shape)
        if interleaved
        else np.concatenate([z.real, z.imag], -1)
    )
    angle = jnp.asarray(positions)[..., None] * jnp.asarray(frequencies(Rope(10000.0, 16)))
    got = apply_rope(jnp.asarray(x), 1.25 * jnp.cos(angle), 1.25 * jnp.sin(angle), interleaved)
    np.testing.assert_allclose(got, want, atol=2e-3)  # angles of 5,000 radians in float32 are good to 3e-4


def test_linear_scaling_divides_every_frequency():
    plain, scaled = frequencies(Rope(1e4, 64)), frequencies(Rope(1e4, 64, scaling="linear", factor=4.0))
    np.testing.assert_allclose(scaled, plain / 4, rtol=1e-6)


def test_yarn_without_whole_borders_ramps_between_the_pairs_that_turn_32_times_and_once():
    """gpt-oss: its own config.json says truncate: false."""
    rope = Rope(1.5e5, 64, scaling="yarn", factor=32.0, original_context=4096, truncate=False)
    low, high = (32 * np.log(4096 / (times * 2 * np.pi)) / np.log(1.5e5) for times in (32, 1))
    i = np.arange(32)
    theta, stretched = 1.5e5 ** (-i / 32), np.clip((i - low) / (high - low), 0, 1)
    want = theta * (1 - stretched) + theta / 32 * stretched
    np.testing.assert_allclose(frequencies(rope), want, rtol=1e-6)
    assert abs(frequencies(dataclasses.replace(rope, truncate=True)) / want - 1).max() > 1e-2


def test_yarn_keeps_fast_pairs_stretches_slow_ones_and_scales_all_positions():
    rope = Rope(1e6, 128, scaling="yarn", factor=4.0, original_context=16384, mscale=yarn_mscale(4.0))
    plain, scaled = frequencies(Rope(1e6, 128)), frequencies(rope)
    turns = 16384 * plain / (2 * math.pi)
    np.testing.assert_allclose(scaled[turns > 40], plain[turns > 40], rtol=1e-6)
    np.testing.assert_allclose(scaled[turns < 0.8], plain[turns < 0.8] / 4, rtol=1e-6)
    between = (turns < 25) & (turns > 1.3)
    assert ((plain / scaled)[between] > 1).all() and ((plain / scaled)[between] < 4).all()
    assert abs(rope.mscale - 1.1386) < 1e-4


def test_longrope_divides_by_the_factors_of_its_context():
    """From config.json, and from the tensors of a GGUF file."""
    short, long = tuple(1.0 + np.arange(8) / 8), tuple(np.arange(2.0, 10.0))
    rope = Rope(1e4, 16, scaling="longrope", original_context=4096, short_factors=short, long_factors=long)
    plain = frequencies(Rope(1e4, 16))
    as_tensors = {"rope_short": np.float32(short), "rope_long": np.float32(long)}
    for context, factors in ((512, short), (4096, short), (4097, long)):
        np.testing.assert_allclose(frequencies(rope, context), plain / factors, rtol=1e-6)
        config = architectures.config_of(open_checkpoint("synth:tiny-llama:f32"))
        config = llama.with_attention(config, rope=Rope(1e4, 16, original_context=4096))
        (found,) = model_frequencies(config, context, as_tensors)
        np.testing.assert_allclose(found, plain / factors, rtol=1e-6)
    with pytest.raises(ValueError, match="7 long_factors; expected one for each of 8 pairs"):
        Rope(1e4, 16, scaling="longrope", long_factors=long[1:])


@pytest.mark.parametrize(
    "said, mscale",
    [
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),  # Ministral 3
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(16) + 1) / (0.05 * math.log(16) + 1)),
        ({"attention_factor": 1.5}, 1.5),
        ({}, 0.1 * math.log(16) + 1),
    ],
)
def test_what_multiplies_yarn_s_cosines(said, mscale):
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256, "rope_theta": 1e6}
    metadata = {"max_position_embeddings": 4096, "rope_parameters": yarn | said}
    assert rope_from_huggingface(metadata, 64).mscale == pytest.approx(mscale)


def test_a_part_of_a_head_turns_as_the_config_says():
    metadata = {"max_position_embeddings": 4096, "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    assert rope_from_huggingface(metadata, 128).dim == 96
    with pytest.raises(ValueError, match=r"partial_rotary_factor is 1\.5; at most 1 is expected"):
        rope_from_huggingface(metadata | {"partial_rotary_factor": 1.5}, 128)


def test_llama3_scaling_against_its_published_form():
    rope = Rope(
        5e5,
        128,
        scaling="llama3",
        factor=8.0,
        original_context=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    got, plain = frequencies(rope), 5e5 ** (-np.arange(64) / 64)
    for freq, scaled in zip(plain, got, strict=True):
        wavelength = 2 * math.pi / freq
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        want = (
            freq
            if wavelength < 8192 / 4
            else freq / 8
            if wavelength > 8192
            else (1 - smooth) * freq / 8 + smooth * freq
        )
        assert abs(scaled - want) < 1e-6 * want


def test_bonsai_configs_come_from_metadata():
    for name, want in {
        "bonsai-8b": (36, 4096, 12288, 32, 8, 128, 151669),
        "bonsai-4b": (36, 2560, 9728, 32, 8, 128, 151669),
        "bonsai-1.7b": (28, 2048, 6144, 16, 8, 128, 151669),
    }.items():
        c = architectures.config_of(open_checkpoint(f"synth:{name}:q1_0"))
        a = c.attention
        heads = a.num_heads, a.num_kv_heads, a.head_dim
        assert (c.num_layers, c.hidden, c.mlp.ffn, *heads, c.vocab_size) == want
        assert a.rope.scaling == "yarn" and a.rope.factor == 4.0 and abs(a.rope.mscale - 1.1386) < 1e-4
        assert not a.rope.interleaved


def test_a_hugging_face_config_of_llama_3():
    metadata = {
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
    embedding = open_checkpoint("synth:llama-70b:f16").tensors["token_embd.weight"]
    checkpoint = Checkpoint("hf", "huggingface", metadata, {"model.embed_tokens.weight": embedding})
    c = architectures.config_of(checkpoint)
    a = c.attention
    assert (a.head_dim, a.num_kv_heads, c.vocab_size) == (128, 8, 128256)
    assert (a.rope.scaling, a.rope.base) == ("llama3", 5e5)
    with pytest.raises(CheckpointError, match="hf: metadata of this llama model: rms_norm_eps is missing"):
        architectures.config_of(
            Checkpoint(
                "hf",
                "huggingface",
                {k: v for k, v in metadata.items() if k != "rms_norm_eps"},
                checkpoint.tensors,
            )
        )
    files = Path(architectures.__file__).parent.glob("[a-z]*.py")
    listed = "supported: " + ", ".join(sorted(file.stem for file in files))
    with pytest.raises(NotImplementedError, match=f"architecture 'rwkv' is not supported; {listed}"):
        architectures.config_of(Checkpoint("hf", "huggingface", {"model_type": "rwkv"}, {}))


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="5 query heads do not divide into 2 KV heads"):
        Attention(5, 2, 16, Rope(1e4, 16))
