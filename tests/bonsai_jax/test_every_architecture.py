"""What works for every architecture without a line of its own. A new one is in these tests once it has a
file.

Other tests compare each architecture with llama.cpp. every_architecture_on_two_devices.py, which
test_parallel.py runs, splits each over two devices.
"""

import dataclasses
import functools
import json

import gguf.quants
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.network import architectures
from bonsai_jax.weights.read import blocks
from checkpoints import Checkpoint, CheckpointError, Tensor
from tests.agreement import padded_logits
from tests.bonsai_jax.any_architecture import LAYERS, NAMES, tiny
from tests.bonsai_jax.command_line import run
from tests.bonsai_jax.test_oracle import GREEDY, as_file

REFERENCE = bj.RunConfig(impl="reference", page_size=16)
KERNELS = bj.RunConfig(page_size=16, activation_bits=16)
PROMPTS = [np.random.default_rng(n).integers(0, 256, n).tolist() for n in (5, 33, 70)]
PROMPT = PROMPTS[-1]
NEW = 12


def every(daily: str):
    """All architectures, of which one runs daily. Those of the five tests have together every kind of layer:
    granitehybrid Mamba 2 and experts, falcon_h1 two mixers side by side, lfm2 a short convolution, nemotron_h
    a feed-forward without a gate, qwen35 a delta net."""
    params = [name if name == daily else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
    return pytest.mark.parametrize("name", params)


@functools.cache
def model(name: str) -> bj.Model:
    return bj.from_checkpoint(tiny(name), REFERENCE)


def expanded(checkpoint: Checkpoint) -> Checkpoint:
    """The same weights as F32, by the gguf package."""

    def values(t) -> Tensor:
        kind = gguf.GGMLQuantizationType[t.format.upper()]
        w = gguf.quants.dequantize(np.asarray(blocks(t)), kind).astype(np.float32).reshape(t.shape)
        return Tensor(t.name, "f32", t.shape, w.view(np.uint8))

    tensors = {name: values(t) for name, t in checkpoint.tensors.items()}
    return dataclasses.replace(checkpoint, tensors=tensors)


@every("granitehybrid")
@pytest.mark.parametrize("format", ["q8_0", pytest.param("q4_0", marks=pytest.mark.slow)])
def test_quantized_weights_are_their_f32_expansion(name, format):
    """CPU kernels with 16-bit activations."""
    file = tiny(name, format)
    assert sum(t.format == format for t in file.tensors.values()) > len(file.tensors) / 4
    quantized, exact = bj.from_checkpoint(file, KERNELS), bj.from_checkpoint(expanded(file), REFERENCE)
    got, want = bj.logits(quantized, PROMPT), bj.logits(exact, PROMPT)
    assert want.std() > 0.3
    np.testing.assert_allclose(got, want, atol=5e-3)


@every("lfm2")
def test_generate_the_engine_and_single_steps_write_the_same_text(name):
    """That of whole texts read at once. The engine's second answers continue from the first ones' cache."""
    own, options = model(name), {"sampling": GREEDY, "max_new_tokens": NEW, "ignore_eos": True}
    outputs = [output.tokens for output in bj.generate(own, PROMPTS, **options)]
    assert len({token for tokens in outputs for token in tokens}) > 5
    texts = [prompt + tokens for prompt, tokens in zip(PROMPTS, outputs, strict=True)]
    whole = [
        logits[len(prompt) - 1 : -1]
        for prompt, logits in zip(PROMPTS, padded_logits(own, texts), strict=True)
    ]
    assert [logits.argmax(-1).tolist() for logits in whole] == outputs

    lengths = np.array([len(prompt) for prompt in PROMPTS])
    tokens = np.zeros((len(PROMPTS), max(lengths)), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    cache = bj.new_cache(own, len(PROMPTS), 128)
    for step in range(NEW):
        logits, cache = bj.jitted.extend(own.params, cache, tokens, lengths, own.config)
        last = np.asarray(logits)[np.arange(len(PROMPTS)), lengths - 1]
        np.testing.assert_allclose(last, [each[step] for each in whole], atol=1e-3)
        tokens, lengths = np.array(outputs)[:, step : step + 1], np.ones(len(PROMPTS), np.int32)

    # Places for all states of the three, whatever the order in which they are read.
    with bj.Engine(own, max_batch_size=len(PROMPTS), context=128, checkpoints=8) as engine:
        for cached in (0, 16):
            answers = [engine.submit(prompt, **options) for prompt in PROMPTS]
            answers = [answer.result() for answer in answers]
            assert [answer.tokens for answer in answers] == outputs
            assert answers[-1].cached_tokens >= cached


@every("falcon_h1")
def test_scores_are_those_of_each_text_alone(name):
    """Also of continuations that differ after a token or two: a recurrent state has read those by then."""
    own, prompt = model(name), PROMPTS[1]
    endings = [[7, 8, 9, 10], [7, 8, 11], [7, 12, 13, 14, 15], [16, 17]]
    for ending, scored in zip(endings, bj.score(own, [prompt], [endings])[0], strict=True):
        logits = bj.logits(own, prompt + ending)[len(prompt) - 1 : -1]
        want = jax.nn.log_softmax(logits, axis=-1)[np.arange(len(ending)), ending]
        np.testing.assert_allclose(scored.token_logprobs, want, atol=1e-3)


@every("nemotron_h")
def test_taps_are_the_outputs_of_layers(name):
    """Those of a model that ends after the layer, and the last one's make the logits."""
    own, ids, length = model(name), jnp.array([PROMPT[:24]]), jnp.array([24])
    taps = bj.Taps(("input", "output"))
    logits, read = bj.jitted.forward(own.params, ids, length, own.config, taps=taps)
    assert read["output"].shape == (LAYERS, 1, 24, own.config.hidden)
    np.testing.assert_array_equal(read["input"][1:], read["output"][:-1])
    stop = {"stop_at_layer": LAYERS // 2, "logits": False}
    half, _ = bj.jitted.forward(own.params, ids, length, own.config, **stop)
    np.testing.assert_allclose(read["output"][LAYERS // 2 - 1], half, atol=1e-5)
    np.testing.assert_allclose(bj.unembed(own.params, read["output"][-1], own.config), logits, atol=1e-5)


@every("qwen35")
def test_the_gradient_is_a_finite_difference(name):
    """Of a log-probability by the vectors in place of tokens, in the gradient's direction. The step is small,
    so that no token chooses other experts within it."""
    own, ids, lengths = model(name), jnp.array([PROMPT[:12]]), jnp.array([12])

    @jax.jit
    def score(vectors):
        logits, _ = bj.forward(own.params, vectors, lengths, own.config)
        return jax.nn.log_softmax(logits[0, -1])[7]

    vectors = bj.embed(own.params, ids)
    slopes = jax.jit(jax.grad(score))(vectors)
    assert np.isfinite(slopes).all()
    way = slopes / jnp.linalg.norm(slopes)
    step = 3e-5 * float(jnp.linalg.norm(vectors))
    difference = (score(vectors + step * way) - score(vectors - step * way)) / (2 * step)
    np.testing.assert_allclose(jnp.vdot(slopes, way), difference, rtol=2e-2)


@every("nemotron_h_moe")
def test_inspect_names_a_kernel_for_every_matrix(name, tmp_path):
    """Also of experts without a gate."""
    file, path = tiny(name, "q8_0"), as_file(tiny(name, "q8_0"), tmp_path / "tiny.gguf")
    entries = json.loads(run("inspect", path, "--json").stdout)["kernels"]
    assert sum(entry["times"] for entry in entries) >= sum(t.format == "q8_0" for t in file.tensors.values())
    assert all(kernel for entry in entries for kernel in entry["kernels"].values())


@pytest.mark.parametrize("name", NAMES)
def test_wrong_tensors_and_keys_are_named(name):
    file = tiny(name)
    architectures.describe(file)

    def refusal(what, **changes) -> str:
        with pytest.raises((CheckpointError, NotImplementedError)) as error:
            architectures.describe(dataclasses.replace(file, **changes))
        message = str(error.value)
        assert message.startswith(file.source) and "\n" not in message and len(message) < 1000, message
        assert what in message, message
        return message

    optional = {spec.gguf.format(n) for spec in _optional(name) for n in range(LAYERS)}
    for own, tensor in file.tensors.items():
        rest = {other: t for other, t in file.tensors.items() if other != own}
        if own not in optional:
            assert "missing" in refusal(own, tensors=rest)
        twice = f"{own}.1"
        assert "no place" in refusal(twice, tensors={**file.tensors, twice: tensor})
    tomorrow = f"{name}.a_key_of_tomorrow"
    assert "does not read" in refusal(tomorrow, metadata={**file.metadata, tomorrow: "x"})
    for key in ("block_count", "embedding_length", "attention.head_count", "context_length"):
        rest = {other: value for other, value in file.metadata.items() if other != f"{name}.{key}"}
        assert "missing" in refusal(f"{name}.{key}", metadata=rest)


def _optional(name: str):
    return [spec for spec in architectures.get(name).TENSORS if spec.optional]
