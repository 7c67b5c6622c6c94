"""Synthetic models: their sizes, mixes, weights' spread, and a vocabulary that tokenizers accept."""

import dataclasses
import math
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from checkpoints import CheckpointError, Tensor, folding, open_checkpoint, write_gguf


def nbytes(source: str) -> int:
    return sum(t.nbytes for t in open_checkpoint(source).tensors.values())


@pytest.mark.parametrize(
    ("model", "tensor_bytes"), [("8b", 1_152_704_128), ("4b", 566_320_264), ("1.7b", 242_357_152)]
)
def test_bonsai_has_the_bytes_of_the_real_files(model, tensor_bytes):
    assert nbytes(f"synth:bonsai-{model}:q1_0") == tensor_bytes


@pytest.mark.parametrize(
    "source, tensor_bytes",
    [
        ("bonsai-27b:q1_0", 3_836_327_936),
        # The files less the same 11,120,992 bytes, which are metadata.
        ("bonsai-2-27b:ptq1_0", 5_946_648_928 - 11_120_992),
        ("bonsai-2-27b:pq2_0", 7_206_168_928 - 11_120_992),
    ],
)
def test_the_27b_has_the_tensors_of_the_real_files(source, tensor_bytes):
    tensors = open_checkpoint(f"synth:{source}").tensors
    counts = Counter(t.format for t in tensors.values())
    assert counts == {source.split(":")[1]: 402, "f32": 353, "bf16": 96}
    assert nbytes(f"synth:{source}") == tensor_bytes


def test_the_folded_27b_says_what_its_inputs_are_rotated_by():
    assert folding(open_checkpoint("synth:bonsai-27b:q1_0")) is None
    folds = folding(open_checkpoint("synth:bonsai-2-27b:pq2_0"))
    assert len(folds.weights) == 401 and folds.tables == {"token_embd.weight"} and folds.block == 1024
    assert sorted(folds.signs) == [5120, 6144, 17408] and folds.v_grouped


def test_shapes_of_the_4b_whose_query_width_is_not_its_hidden_size():
    tensors = open_checkpoint("synth:bonsai-4b:q1_0").tensors
    shapes = {
        name.removeprefix("blk.35."): t.shape for name, t in tensors.items() if name.startswith("blk.35.")
    }
    assert shapes == {
        "attn_norm.weight": (2560,),
        "attn_q.weight": (4096, 2560),
        "attn_k.weight": (1024, 2560),
        "attn_v.weight": (1024, 2560),
        "attn_q_norm.weight": (128,),
        "attn_k_norm.weight": (128,),
        "attn_output.weight": (2560, 4096),
        "ffn_norm.weight": (2560,),
        "ffn_gate.weight": (9728, 2560),
        "ffn_up.weight": (9728, 2560),
        "ffn_down.weight": (2560, 9728),
    }
    assert "output.weight" not in tensors and tensors["token_embd.weight"].shape == (151669, 2560)


def layers_in(source: str, field: str, format: str) -> list[int]:
    tensors = open_checkpoint(source).tensors
    name = re.compile(rf"blk\.(\d+)\.{field}\.weight")
    return [int(m[1]) for n, t in tensors.items() if (m := name.fullmatch(n)) and t.format == format]


def test_qwen2_5_has_the_real_model_s_parameters_and_its_matrix_of_tokens_twice():
    tensors = open_checkpoint("synth:qwen2.5-1.5b:q4_k_m").tensors
    again = tensors["token_embd.weight"].shape
    assert sum(np.prod(t.shape) for t in tensors.values()) == 1_543_714_304 + np.prod(again)
    assert (tensors["output.weight"].format, tensors["token_embd.weight"].format) == ("q6_k", "q4_k")
    assert tensors["blk.27.attn_k.bias"].shape == (256,)


def test_q4_k_m_is_llama_cpps_recipe():
    # As in real Q4_K_M files of 36-layer models.
    more = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 31, 32, 33, 34, 35]
    for field in "attn_v", "ffn_down":
        assert layers_in("synth:bonsai-8b:q4_k_m", field, "q6_k") == more
        assert layers_in("synth:bonsai-8b:q5_k_m", field, "q6_k") == more
    assert len(layers_in("synth:llama-70b:q4_k_m", "attn_v", "q5_k")) == 40  # 70B's attn_v is never q4_k
    tensors = open_checkpoint("synth:bonsai-8b:q4_k_m").tensors
    assert Counter(t.format for t in tensors.values()) == {"f32": 145, "q4_k": 36 * 7 + 1 - 36, "q6_k": 37}
    assert (tensors["output.weight"].format, tensors["token_embd.weight"].format) == ("q6_k", "q4_k")
    assert open_checkpoint("synth:bonsai-4b:q4_k_m").tensors["token_embd.weight"].format == "q6_k"
    assert open_checkpoint("synth:bonsai-4b:q5_k_m").tensors["blk.5.ffn_up.weight"].format == "q5_k"


@pytest.mark.parametrize("model", ["tiny-qwen3", "tiny-qwen2", "tiny-llama", "tiny-qwen35", "tiny-qwen3moe"])
@pytest.mark.parametrize("format", ["q6_k", "q4_k_m", "q5_k_m", "q1_0", "q2_0_g64", "bf16", "iq2_xxs"])
def test_every_block_divides_the_tiny_models(model, format):
    tensors = open_checkpoint(f"synth:{model}:{format}").tensors
    biases = [n for n in tensors if n.endswith(".bias")]
    assert len(biases) == {"tiny-qwen2": 9, "tiny-qwen35": 3}.get(model, 0)
    assert {t.format for n, t in tensors.items() if "norm" in n or n in biases} == {"f32"}
    assert ("output.weight" in tensors) == (model in ("tiny-llama", "tiny-qwen35", "tiny-qwen3moe"))


def test_the_mixture_of_experts_has_the_tensors_of_the_real_files():
    """Qwen3-30B-A3B: 30.5 billion weights, and what llama.cpp writes of a layer."""
    tensors = open_checkpoint("synth:qwen3-30b-a3b:q4_k_m").tensors
    assert len(tensors) == 579 and sum(math.prod(t.shape) for t in tensors.values()) == 30_532_122_624
    shapes = {name.removeprefix("blk.7."): t.shape for name, t in tensors.items() if ".7.ffn" in name}
    assert shapes == {
        "ffn_norm.weight": (2048,),
        "ffn_gate_inp.weight": (128, 2048),
        "ffn_gate_exps.weight": (128, 768, 2048),
        "ffn_up_exps.weight": (128, 768, 2048),
        "ffn_down_exps.weight": (128, 2048, 768),
    }
    formats = {name: t.format for name, t in tensors.items()}
    assert formats["blk.7.ffn_gate_inp.weight"] == "f32" and formats["blk.7.ffn_up_exps.weight"] == "q4_k"
    assert (formats["blk.0.ffn_down_exps.weight"], formats["blk.7.ffn_down_exps.weight"]) == ("q6_k", "q4_k")


def test_seeds_depend_on_the_tensor_the_seed_and_nothing_else():
    def seeds(source):
        return {name: t.seed for name, t in open_checkpoint(source).tensors.items()}

    first = seeds("synth:tiny-llama:q4_k")
    assert len(set(first.values())) == len(first)
    assert first == seeds("synth:tiny-llama:q4_k:0") == seeds("synth:tiny-llama:f32")
    assert not set(first.values()) & set(seeds("synth:tiny-llama:q4_k:1").values())
    code = (
        "from checkpoints import open_checkpoint\n"
        "print(open_checkpoint('synth:tiny-llama:q4_k').tensors['output.weight'].seed)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONHASHSEED": "7"}
    )
    assert int(done.stdout) == first["output.weight"], done.stderr


def drawn(source: str) -> dict[str, np.ndarray]:
    """An f32 synthetic model's weights."""
    return {
        t.name: np.random.default_rng(t.seed).normal(t.mean, t.std, t.shape).astype(np.float32)
        for t in open_checkpoint(source).tensors.values()
    }


def test_logits_of_a_forward_pass_are_not_flat():
    """One token through tiny-llama in numpy: attention to itself alone is its own value."""
    w = drawn("synth:tiny-llama:f32")

    def norm(x, name):
        return x / np.sqrt((x * x).mean() + 1e-5) * w[name]

    deviations = []
    for token in range(8):
        x = w["token_embd.weight"][token]
        for i in range(3):
            h = norm(x, f"blk.{i}.attn_norm.weight")
            v = (w[f"blk.{i}.attn_v.weight"] @ h).reshape(2, 64).repeat(2, axis=0).reshape(-1)
            x = x + w[f"blk.{i}.attn_output.weight"] @ v
            h = norm(x, f"blk.{i}.ffn_norm.weight")
            gate = w[f"blk.{i}.ffn_gate.weight"] @ h
            x = x + w[f"blk.{i}.ffn_down.weight"] @ (
                gate / (1 + np.exp(-gate)) * (w[f"blk.{i}.ffn_up.weight"] @ h)
            )
        assert 0.5 < x.std() < 3
        deviations.append((w["output.weight"] @ norm(x, "output_norm.weight")).std())
    assert 2 <= np.mean(deviations) < 3.5


@pytest.mark.parametrize(
    "model", ["tiny-qwen3", "tiny-qwen2", "tiny-llama", "bonsai-1.7b", "bonsai-8b", "llama-70b"]
)
def test_the_vocabulary_is_consistent(model):
    c = open_checkpoint(f"synth:{model}:q8_0")
    meta = c.metadata
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == c.tensors["token_embd.weight"].shape[0] == len(set(tokens))
    assert types.dtype == np.int32
    known = set(tokens[:256])
    assert len(known) == 256 and tokens[:2] == ["!", '"'] and tokens[220] == "Ġ" and tokens[198] == "Ċ"
    for i, merge in enumerate(meta["tokenizer.ggml.merges"]):
        left, right = merge.split(" ")
        assert left in known and right in known, merge  # each part is there before it is merged
        known.add(left + right)
        assert tokens[256 + i] == left + right
    assert tokens[meta["tokenizer.ggml.eos_token_id"]] == "<|im_end|>"
    assert tokens[meta["tokenizer.ggml.padding_token_id"]] == "<|endoftext|>"
    if model.startswith("bonsai"):
        assert (meta["tokenizer.ggml.eos_token_id"], meta["tokenizer.ggml.padding_token_id"]) == (
            151645,
            151643,
        )
    assert types[meta["tokenizer.ggml.eos_token_id"]] == 3 and types[0] == 1
    # Other ids are words, so that what the model says has text.
    assert types[-1] == 1 and tokens[-1] == f"Ġword{len(tokens) - 1}"


@pytest.mark.parametrize("model", ["tiny-qwen3", "tiny-qwen2", "tiny-llama"])
def test_llama_cpp_runs_the_written_file(tmp_path, model):
    import xllamacpp

    source = f"synth:{model}:f32"
    tensors = [Tensor(n, "f32", w.shape, w.view(np.uint8)) for n, w in drawn(source).items()]
    write_gguf(tmp_path / "m.gguf", open_checkpoint(source).metadata, tensors)
    params = xllamacpp.CommonParams()
    params.model.path = str(tmp_path / "m.gguf")
    params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 64, 1, False, 0
    server = xllamacpp.Server(params)
    request = {
        "prompt": "in the",
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": 20,
        "logit_bias": [[64, 1e3]],
    }
    reply = server.handle_completions(request)
    assert reply["usage"]["prompt_tokens"] == 2  # "in" and "Ġthe": its tokenizer merges as the file says
    (token,) = reply["choices"][0]["logprobs"]["content"]
    logprobs = [t["logprob"] for t in token["top_logprobs"][:20]]
    # A flat distribution over 512 would put every token at -6.2.
    assert np.isfinite(logprobs).all() and max(logprobs) > -4


def test_metadata_of_yarn_goes_through_a_file(tmp_path):
    meta = open_checkpoint("synth:bonsai-8b:q1_0").metadata
    assert meta["qwen3.rope.scaling.type"] == "yarn" and meta["qwen3.rope.scaling.factor"] == 4.0
    assert (
        meta["qwen3.rope.scaling.original_context_length"] == 16384 and meta["qwen3.context_length"] == 65536
    )
    write_gguf(tmp_path / "m.gguf", meta, [])
    read = open_checkpoint(tmp_path / "m.gguf").metadata
    assert list(read) == list(meta)
    assert {k: v for k, v in read.items() if isinstance(v, str | list | int)} == {
        k: v for k, v in meta.items() if isinstance(v, str | list | int)
    }


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("synth:bonsai-9b:q1_0", "model is 'bonsai-9b'; there are bonsai-8b, bonsai-4b"),
        ("synth:bonsai-8b:q9_9", "format is 'q9_9'; there are q4_k_m, q5_k_m, f32"),
        ("synth:bonsai-8b:i32", "format is 'i32'"),
        ("synth:bonsai-8b", "write synth:<model>:<format>"),
        ("synth:bonsai-8b:q1_0:1:2", "write synth:<model>:<format>"),
        ("synth:bonsai-8b:q1_0:-1", "seed is '-1'"),
        ("synth:bonsai-8b:q1_0:" + "9" * 9999, "seed is"),
        ("synth:", "write synth:<model>:<format>"),
    ],
)
def test_what_does_not_exist_is_listed(source, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(source)


def test_a_description_is_a_value():
    tensor = open_checkpoint("synth:tiny-llama:q8_0").tensors["output.weight"]
    assert dataclasses.astuple(tensor)[1:3] == ("q8_0", (512, 256)) and tensor.nbytes == 512 * 8 * 34
