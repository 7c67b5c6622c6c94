"""Tiny models of every architecture, written as GGUF files and run by llama.cpp and here.

Without XLA's optimizations, which round no worse; a slow test has them (test_as_users_have_it.py).
"""

import dataclasses

import numpy as np
import pytest

import bonsai_jax as bj
from checkpoints import Checkpoint, open_checkpoint
from tests.agreement import agreement
from tests.bonsai_jax.llama_cpp import write_float32
from tests.bonsai_jax.test_oracle import answers, as_file

EVERY_DAY = {  # each architecture exactly, and one format of each family
    "tiny-qwen3": ("f32", "q1_0", "q4_k_m"),
    "tiny-llama": ("f32",),
    "tiny-qwen2": ("f32", "q8_0"),
    "tiny-qwen35": (),  # test_oracle_lengths.py, in F32
}


def prompts() -> list[list[int]]:
    """With 23 tokens more both are read by one program, of 64."""
    return [np.random.default_rng(seed).integers(0, 256, 10 + 30 * seed).tolist() for seed in range(2)]


@pytest.mark.parametrize(
    ("name", "format"),
    [
        pytest.param(name, format, marks=[] if format in every_day else pytest.mark.slow)
        for name, every_day in EVERY_DAY.items()
        for format in ("f32", "q8_0", "q4_k_m", "q1_0")
    ],
)
def test_tiny_models_of_every_architecture_run_in_llama_cpp_and_here(name, format, tmp_path):
    """F32 weights compare exactly. On quantized ones llama.cpp rounds activations to 8 bits."""
    path = as_file(f"synth:{name}:{format}", tmp_path / "tiny.gguf")
    model = bj.load(str(path))
    ids = prompts()
    found = agreement(model, answers(path, model.tokenizer, ids, 24))
    print(f"{name} {format}: KL {found.kl:.2e}, same top token {found.same_top:.2%}")
    assert found.kl < (1e-6 if format == "f32" else 2e-3)
    assert found.same_top > (0.999 if format == "f32" else 0.95)


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("tiny-qwen3moe", "q4_k_m"),
        ("tiny-arcee", "f32"),
        ("tiny-arcee", "q4_k_m"),
        *(
            pytest.param(name, format, marks=pytest.mark.slow)
            for name in ("tiny-qwen3moe", "tiny-arcee")
            for format in ("q8_0", "q1_0")
        ),
    ],
)
def test_where_rounding_shows_answers_are_llama_cpp_s_on_the_same_weights(name, format, tmp_path):
    """Decoded to F32 for llama.cpp, and not rounded here. Between two experts that are nearly as likely what
    rounds activations chooses another, and the tiny model's text is another; squares of activations (arcee)
    spread over more than 8 bits."""
    path = as_file(f"synth:{name}:{format}", tmp_path / "tiny.gguf")
    write_float32(open_checkpoint(str(path)), tmp_path / "exact.gguf")
    model = bj.load(str(path), bj.RunConfig(activation_bits=16))
    ids = prompts()
    found = agreement(model, answers(tmp_path / "exact.gguf", model.tokenizer, ids, 24))
    print(f"{name} {format}: KL {found.kl:.2e}, same top token {found.same_top:.2%}")
    assert found.kl < 1e-6 and found.same_top == 1


def test_a_changed_tensor_changes_the_text(tmp_path):
    """The comparison would notice: the same check with one matrix of one layer replaced fails."""
    path = as_file("synth:tiny-llama:f32", tmp_path / "tiny.gguf")
    ids = [list(range(20))]
    checkpoint = open_checkpoint(str(path))
    rows = answers(path, bj.Tokenizer.from_checkpoint(checkpoint), ids, 16)
    other = dict(checkpoint.tensors)
    other["blk.1.attn_k.weight"] = dataclasses.replace(
        other["blk.2.attn_k.weight"], name="blk.1.attn_k.weight"
    )
    broken = bj.from_checkpoint(Checkpoint(str(path), "gguf", checkpoint.metadata, other))
    assert agreement(broken, rows).kl > 1e-3
