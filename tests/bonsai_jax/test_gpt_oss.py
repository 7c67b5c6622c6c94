"""gpt-oss: attention sinks, a window in every second layer, YaRN, biases, and experts with a softmax over
those used and a clamped SwiGLU.

Held against llama.cpp, and against ourselves in other formats and by other ways through the model.
"""

import dataclasses
import functools

import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.network import architectures, schedules
from bonsai_jax.weights import plan as load_plans
from checkpoints import Checkpoint, open_checkpoint
from pallas_kernels import device
from pallas_kernels.activations import swiglu_oai
from tests.agreement import agreement
from tests.bonsai_jax.llama_cpp import write_float32
from tests.bonsai_jax.test_oracle import GREEDY, answers, as_file

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


def test_a_hugging_face_folder_is_refused_with_the_remedy():
    folder = Checkpoint("folder", "huggingface", {"model_type": "gpt_oss"}, {})
    with pytest.raises(NotImplementedError, match="load a GGUF file of the same weights"):
        architectures.describe(folder)
