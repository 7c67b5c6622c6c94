"""gpt-oss: attention sinks, a window in every second layer, YaRN, biases, and experts with a softmax over
those used and a clamped SwiGLU.

Held against llama.cpp, and against ourselves in other formats and by other ways through the model.
"""

import dataclasses
import functools
import re

import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.network import architectures, schedules
from bonsai_jax.weights import plan as load_plans
from bonsai_jax.weights.read import blocks
from checkpoints import Checkpoint, Tensor, open_checkpoint
from checkpoints.safetensors import microscaled
from pallas_kernels import device
from pallas_kernels.activations import swiglu_oai
from tests.agreement import agreement
from tests.bonsai_jax.llama_cpp import write_float32
from tests.bonsai_jax.test_oracle import GREEDY, answers, as_file
from tests.bonsai_jax.tiny_files import logits

LENGTHS = (1, 63, 65, 300)  # more than three windows of 48 keys


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 256, length).tolist()


@functools.cache
def tiny(format: str = "f32", **how) -> bj.Model:
    options = {"impl": "reference", "page_size": 16} | how
    return bj.load(f"synth:tiny-gpt-oss:{format}", bj.RunConfig(**options))


def test_llama_cpp_gives_the_same_text_and_probabilities(tmp_path):
    path = as_file("synth:tiny-gpt-oss:f32", tmp_path / "tiny.gguf")
    rows = answers(path, tiny().tokenizer, [prompt(length) for length in LENGTHS], 12)
    found = agreement(tiny(), rows)
    assert found.kl < 1e-6 and found.same_top == 1


@pytest.mark.parametrize("format", ["mxfp4", pytest.param("q8_0", marks=pytest.mark.slow)])
def test_llama_cpp_agrees_on_the_weights_of_a_quantized_file(format, tmp_path):
    path = as_file(f"synth:tiny-gpt-oss:{format}", tmp_path / "tiny.gguf")
    write_float32(open_checkpoint(str(path)), tmp_path / "exact.gguf")
    model = tiny(format)  # the same weights
    found = agreement(model, answers(tmp_path / "exact.gguf", model.tokenizer, [prompt(65)], 12))
    assert found.kl < 1e-6 and found.same_top == 1


@pytest.mark.parametrize("format", ["mxfp4", pytest.param("q8_0", marks=pytest.mark.slow)])
def test_kernels_of_cpus_are_the_reference(format):
    """With 16-bit activations: prefill, and decode steps after it."""
    kernels, ids = tiny(format, impl="auto", activation_bits=16), prompt(65)
    np.testing.assert_allclose(bj.logits(kernels, ids), bj.logits(tiny(format), ids), atol=5e-3)
    texts = [
        bj.generate(model, [ids], max_new_tokens=12, sampling=GREEDY, ignore_eos=True)[0].tokens
        for model in (kernels, tiny(format))
    ]
    assert texts[0] == texts[1]


def test_each_layer_has_what_the_file_says():
    config = tiny().config
    assert [layer.mixer.window for layer in config.layers] == [48, None, 48, None]
    assert all(layer.mixer.sinks for layer in config.layers)
    experts = config.experts
    assert experts is not None and experts.activation == swiglu_oai(7.0, 1.702)
    assert (experts.count, experts.used, experts.gating, experts.normalized) == (8, 3, "softmax", True)


@pytest.mark.parametrize(
    "pattern, windows",
    [
        (None, [48, None, 48, None]),
        (3, [48, 48, None, 48]),
        ([False, True, True, False], [None, 48, 48, None]),
    ],
)
def test_which_layers_have_a_window_is_a_number_a_list_or_every_second(pattern, windows):
    checkpoint = open_checkpoint("synth:tiny-gpt-oss:f32")
    metadata = checkpoint.metadata | {"gpt-oss.attention.sliding_window_pattern": pattern}
    config = architectures.config_of(dataclasses.replace(checkpoint, metadata=metadata))
    assert [layer.mixer.window for layer in config.layers] == windows


def test_on_a_gpu_kernels_attend_and_multiply_experts(monkeypatch):
    """No launch of a whole step knows sinks and biases."""
    monkeypatch.setattr(device, "default", lambda: device.GPUS["sm_90"])
    description = architectures.describe(open_checkpoint("synth:gpt-oss-20b:mxfp4"))
    run = load_plans.resolve(description, bj.RunConfig(weights="packed", cache_dtype="float16"))
    plan = load_plans.planned(description, run)
    assert {schedules.step_plan(plan).schedule(rows) for rows in (1, 2, 8, 16)} == {"launches"}
    for group in description.config.groups("attention"):
        assert group.settings.kernels(run) == ("decode", "prefill_sm90")
    stacks = {stack.array: stack for stack in plan.stacks}
    for name in ("gate", "up", "down"):
        (piece,) = stacks[name].pieces
        assert (piece.matrix.problem.format, piece.matrix.products.kernel(1)) == ("mxfp4", "int_decode")


def test_weights_of_a_query_sum_to_less_than_one():
    """The rest is the sink's."""
    model, ids = tiny(), np.array([prompt(60)])
    _, values = bj.forward(model.params, ids, np.array([60]), model.config, taps=bj.Taps({"pattern"}))
    sums = np.asarray(values["pattern"]).sum(-1)
    assert sums.min() > 0 and 0.5 < sums.max() < 1


def test_tokens_one_by_one_and_in_an_engine_are_the_same_text():
    ids, options = prompt(65), {"max_new_tokens": 10, "ignore_eos": True}
    (alone,) = bj.generate(tiny(), [ids], sampling=GREEDY, **options)
    with bj.Engine(tiny(), max_batch_size=1, context=128) as engine:
        for _ in range(2):  # the second begins with pages of the first
            assert engine.submit(ids, sampling=GREEDY, **options).result().tokens == alone.tokens
    assert bj.logits(tiny(), [*ids, *alone.tokens])[len(ids) - 1 : -1].argmax(-1).tolist() == alone.tokens


@pytest.mark.slow
def test_speculation_draws_the_same_text():
    ids, options = prompt(20) * 8, {"max_new_tokens": 24, "sampling": GREEDY, "ignore_eos": True}
    (alone,), (guessed,) = (bj.generate(tiny(), [ids], speculate=by, **options) for by in (None, "ngram"))
    assert guessed.tokens == alone.tokens


def folder() -> Checkpoint:
    """The tiny model as a Hugging Face folder, its experts in blocks and scales."""
    source = open_checkpoint("synth:tiny-gpt-oss:f32").tensors
    experts = open_checkpoint("synth:tiny-gpt-oss:mxfp4").tensors
    out: dict[str, Tensor] = {}

    def add(name: str, values: np.ndarray, format: str):
        data = np.ascontiguousarray(values).view(np.uint8)
        out[name] = Tensor(name, format, values.shape, data.reshape(*values.shape[:-1], -1))

    def values(name: str) -> np.ndarray:
        return np.asarray(blocks(source[name])).view(np.float32).reshape(source[name].shape)

    for gguf in source:
        layer, short = re.fullmatch(r"(?:blk\.(\d+)\.)?(.*)", gguf).groups()
        if not short.startswith(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")):
            add(f"model.layers.{layer}.{NAMES[short]}" if layer else NAMES[short], values(gguf), "f32")
    for layer in range(4):
        parts, biases = {}, {}
        for name in ("gate", "up", "down"):
            raw = np.asarray(blocks(experts[f"blk.{layer}.ffn_{name}_exps.weight"]))
            raw = raw.reshape(*raw.shape[:-1], -1, 17)
            codes = np.concatenate([raw[..., 1:] & 15, raw[..., 1:] >> 4], axis=-1)
            parts[name] = codes[..., 0::2] | codes[..., 1::2] << 4, raw[..., 0]
            biases[name] = values(f"blk.{layer}.ffn_{name}_exps.bias")
        both = [np.stack(pair, axis=2) for pair in zip(parts["gate"], parts["up"], strict=True)]
        both = [x.reshape(x.shape[0], -1, *x.shape[3:]) for x in both]
        start = f"model.layers.{layer}.mlp.experts."
        for name, (packed, scales) in {"gate_up_proj": both, "down_proj": parts["down"]}.items():
            add(f"{start}{name}_blocks", packed, "u8")
            add(f"{start}{name}_scales", scales, "u8")
        add(f"{start}gate_up_proj_bias", np.stack([biases["gate"], biases["up"]], -1).reshape(8, -1), "f32")
        add(f"{start}down_proj_bias", biases["down"], "f32")
    return Checkpoint("folder", "huggingface", CONFIG, microscaled(out))


NAMES = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight", "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight", "attn_sinks.weight": "self_attn.sinks",
    **{f"attn_{a}.{part}": f"self_attn.{b}_proj.{part}" for part in ("weight", "bias")
       for a, b in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o"))},
    **{f"ffn_gate_inp.{part}": f"mlp.router.{part}" for part in ("weight", "bias")},
}  # fmt: skip
CONFIG = {
    "model_type": "gpt_oss", "num_hidden_layers": 4, "hidden_size": 288, "intermediate_size": 160,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048, "sliding_window": 48, "num_local_experts": 8, "num_experts_per_tok": 3,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "attention_bias": True, "swiglu_limit": 7.0,
    "rope_theta": 1.5e5, "tie_word_embeddings": False,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 512,
    },
}  # fmt: skip


def test_a_hugging_face_folder_is_the_same_model():
    """Experts bit for bit; matrices beside them are float32 here, as in the other file."""
    exact = open_checkpoint("synth:tiny-gpt-oss:f32")
    experts = {
        name: t for name, t in open_checkpoint("synth:tiny-gpt-oss:mxfp4").tensors.items()
        if name.endswith("_exps.weight")
    }  # fmt: skip
    gguf, ids = dataclasses.replace(exact, tensors={**exact.tensors, **experts}), prompt(60)
    np.testing.assert_allclose(logits(folder(), ids), logits(gguf, ids), atol=1e-4)
    untruncated = CONFIG | {"rope_scaling": CONFIG["rope_scaling"] | {"truncate": False}}
    config = architectures.config_of(dataclasses.replace(folder(), metadata=untruncated))
    assert not config.attention.rope.truncate and architectures.config_of(gguf).attention.rope.truncate
