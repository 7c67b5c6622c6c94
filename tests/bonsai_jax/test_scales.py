"""Scales of matrices (NAME.scale), as NVFP4 files have them: against llama.cpp, which multiplies the product
by them. The GPU and CPU kernels of the format that NVFP4 with a scale becomes are tested with all formats.
"""

import dataclasses
import zlib

import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.network import architectures
from bonsai_jax.weights.read import blocks
from bonsai_jax.weights.scales import Scaled
from checkpoints import Checkpoint, CheckpointError, Tensor, open_checkpoint, write_gguf
from pallas_kernels import formats
from tests.agreement import agreement
from tests.bonsai_jax.llama_cpp import write_float32
from tests.bonsai_jax.test_oracle import answers
from tests.bonsai_jax.test_oracle_tiny import prompts

EMBEDDING = ("token_embd", "output")  # which llama.cpp scales in some files only


def vector(name: str, values) -> Tensor:
    values = np.asarray(values, np.float32)
    return Tensor(name, "f32", values.shape, values.view(np.uint8))


def with_scales(source: str) -> Checkpoint:
    """The file with scales from 0.5 to 2 for the matrices in its layers, experts' too, and for their inputs.
    All are float16, in which a block's own float has them exactly."""
    checkpoint = open_checkpoint(source)
    tensors = {}
    for name, t in checkpoint.tensors.items():
        tensors[name] = Tensor(name, t.format, t.shape, np.array(blocks(t)))
        base = name.removesuffix(".weight")
        if len(t.shape) > 1 and base not in EMBEDDING and not base.endswith("ffn_gate_inp"):
            count = t.shape[0] if len(t.shape) == 3 else 1
            draw = np.random.default_rng(zlib.crc32(name.encode()))
            tensors[f"{base}.scale"] = vector(f"{base}.scale", draw.uniform(0.5, 2, count).astype(np.float16))
            tensors[f"{base}.input_scale"] = vector(f"{base}.input_scale", draw.uniform(0.5, 2, count))
    return dataclasses.replace(checkpoint, tensors=tensors)


def written(checkpoint: Checkpoint, path) -> str:
    write_gguf(path, checkpoint.metadata, checkpoint.tensors.values())
    return str(path)


@pytest.mark.parametrize(
    ("source", "becomes"),
    [
        ("synth:tiny-llama:nvfp4", "nvfp4_scaled"),
        ("synth:tiny-qwen3moe:nvfp4", "nvfp4_scaled"),
        pytest.param("synth:tiny-llama:f32", "f32", marks=pytest.mark.slow),
        pytest.param("synth:tiny-llama:tq2_0", "tq2_0", marks=pytest.mark.slow),
    ],
)
def test_scales_multiply_as_llama_cpp_multiplies_products(source, becomes, tmp_path):
    """llama.cpp reads the same weights as F32 with the scales beside them, and does not round activations."""
    checkpoint = with_scales(source)
    path = written(checkpoint, tmp_path / "scaled.gguf")
    write_float32(checkpoint, tmp_path / "exact.gguf")
    model = bj.load(path, bj.RunConfig(activation_bits=16, weights="packed"))
    found = agreement(model, answers(tmp_path / "exact.gguf", model.tokenizer, prompts(), 24))
    print(f"{source}: KL {found.kl:.2e}, same top token {found.same_top:.2%}")
    assert found.kl < 1e-6 and found.same_top == 1
    described = architectures.describe(open_checkpoint(path))
    assert {t.format for _, t in described.sources if isinstance(t, Scaled)} == {becomes}


def test_llama_cpp_gives_the_same_text_of_an_nvfp4_file_with_scales(tmp_path):
    """It rounds activations to 8 bits, as kernels do here. So a token that is nearly as likely as the
    likeliest one may take its place: with 16 bits two of 48 do."""
    path = written(with_scales("synth:tiny-llama:nvfp4"), tmp_path / "scaled.gguf")
    model = bj.load(path)
    rows = answers(path, model.tokenizer, prompts(), 24)
    found = agreement(model, rows)
    print(f"KL {found.kl:.2e}, same top token {found.same_top:.2%}")
    assert found.kl < 2e-3 and found.same_top > 0.9
    for row in rows:
        scores = bj.logits(model, row["prompt"] + row["tokens"][:-1])[-len(row["tokens"]) :]
        first, second = np.array(row["top_logprobs"])[:, :2].T
        other = scores.argmax(-1) != np.array(row["top_ids"])[:, 0]
        assert (first - second)[other].max(initial=0) < 0.1


@pytest.mark.parametrize("name", [n for n in formats.names() if n not in ("iq1_m", "mxfp4", "nvfp4_scaled")])
@pytest.mark.parametrize("scale", [1.0, -0.37])
def test_blocks_are_scaled_within_the_rounding_of_their_floats(name, scale):
    raw = open_checkpoint("synth:tiny-llama:q8_0").tensors["blk.0.ffn_down.weight"]
    raw = dataclasses.replace(raw, format=name, shape=(8, 512), std=1.0)
    whole = Tensor("w", name, raw.shape, np.array(blocks(raw)))
    scaled = Scaled("m.gguf", whole, vector("w.scale", [scale]))
    exact = scale * formats.values(name, whole.data).astype(np.float64)
    got = formats.values(scaled.format, scaled.data)
    assert scaled.nbytes == scaled.data.nbytes
    # Of formats with minimums both parts are rounded, each by less than the block's largest weight tells.
    np.testing.assert_allclose(got, exact, atol=2**-8 * np.abs(exact).max() if scale != 1 else 0, rtol=0)


def refused(match: str, error=CheckpointError, **changes):
    """The error for tiny-llama in this format with another tensor."""
    checkpoint = open_checkpoint("synth:tiny-llama:" + changes.pop("format", "nvfp4"))
    name = "blk.1.attn_q.scale"
    checkpoint = dataclasses.replace(
        checkpoint, tensors=dict(checkpoint.tensors) | {name: vector(name, changes.pop("values", [1.0]))}
    )
    with pytest.raises(error, match=match):
        bj.from_checkpoint(checkpoint)


def test_scales_that_cannot_be_applied_are_refused_in_a_line():
    refused(r"blk.1.attn_q.scale is f32 \(2,\).*must be f32 \(1,\)", values=[1.0, 2.0])
    refused(r"blk.1.attn_q.scale.*mxfp4.*no float", NotImplementedError, format="mxfp4")
    refused(
        r"blk.1.attn_q.weight cannot be multiplied by blk.1.attn_q.scale: it is not finite", values=[np.nan]
    )
    refused(r"its largest m would be 1.28e.08, which a float16", values=[1e6])
    refused(r"its largest m would be 1.28e-06, which a float16", values=[1e-8])


def test_a_scale_without_its_matrix_has_no_place():
    checkpoint = open_checkpoint("synth:tiny-llama:nvfp4")
    tensors = dict(checkpoint.tensors) | {"blk.0.ffn_other.scale": vector("blk.0.ffn_other.scale", [1.0])}
    with pytest.raises(CheckpointError, match=r"no place for tensor blk.0.ffn_other.scale"):
        bj.from_checkpoint(dataclasses.replace(checkpoint, tensors=tensors))
