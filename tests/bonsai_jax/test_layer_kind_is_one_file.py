"""A layer kind that only this test has: CONTRIBUTING's recipe "Add a layer kind", carried out with a mixer
that has a state (new_kinds/decaying_mean.py). Whatever stores, copies or replays states runs it."""

import dataclasses
import importlib
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.decoding import jitted
from bonsai_jax.measure import profile
from bonsai_jax.network import architectures, kinds
from bonsai_jax.weights.read import blocks
from checkpoints import Checkpoint, Tensor, open_checkpoint, write_gguf
from tests.bonsai_jax.command_line import run
from tests.bonsai_jax.tokens import assert_same

FOLDER = Path(__file__).parent / "new_kinds"
NEW = ("bonsai_jax.network.kinds.decaying_mean", "bonsai_jax.network.architectures.meanllama")
GREEDY, SIZE, WIDTH = bj.SamplingParams(temperature=0.0), 12, 64
PROMPTS = [np.random.default_rng(n).integers(0, 256, n).tolist() for n in (5, 21)]
HOW = {"max_new_tokens": SIZE, "ignore_eos": True}


def checkpoint() -> Checkpoint:
    """tiny-llama with a mean in layers 0 and 2, in float32."""
    llama, rng = open_checkpoint("synth:tiny-llama:f32"), np.random.default_rng(0)
    arrays = {
        name: np.asarray(blocks(t)).view(np.float32).reshape(t.shape) for name, t in llama.tensors.items()
    }
    hidden = len(arrays["output_norm.weight"])
    for layer in (0, 2):
        for name in ("q", "k", "v", "output"):
            del arrays[f"blk.{layer}.attn_{name}.weight"]
        arrays[f"blk.{layer}.mean_in.weight"] = rng.normal(size=(WIDTH, hidden)) / 16
        arrays[f"blk.{layer}.mean_out.weight"] = rng.normal(size=(hidden, WIDTH)) / 8
    tensors = {}
    for name, array in arrays.items():
        data = np.ascontiguousarray(array, np.float32)
        raw = data.view(np.uint8).reshape(*data.shape[:-1], -1)
        tensors[name] = Tensor(name, "f32", data.shape, raw)
    metadata = {key.replace("llama.", "meanllama.", 1): value for key, value in llama.metadata.items()}
    return dataclasses.replace(
        llama, tensors=tensors, metadata=metadata | {"general.architecture": "meanllama"}
    )


@pytest.fixture(scope="module")
def new_kinds():
    """The file, its name in NAMES, and an architecture that uses it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinds, "__path__", [*kinds.__path__, str(FOLDER)])
        patch.setattr(kinds, "NAMES", (*kinds.NAMES, "decaying_mean"))
        patch.setattr(architectures, "__path__", [*architectures.__path__, str(FOLDER / "architectures")])
        importlib.invalidate_caches()
        yield
    for name in NEW:
        package, _, module = name.rpartition(".")
        sys.modules.pop(name, None)
        vars(sys.modules[package]).pop(module, None)


@pytest.fixture(scope="module")
def model(new_kinds, tmp_path_factory) -> bj.Model:
    drawn, path = checkpoint(), tmp_path_factory.mktemp("model") / "model.gguf"
    write_gguf(path, drawn.metadata, list(drawn.tensors.values()))
    run = bj.RunConfig(page_size=8, context=64, batch_size=2, impl="reference")
    return bj.load(str(path), run)


def answers(model: bj.Model, **options) -> list[list[int]]:
    return [output.tokens for output in bj.generate(model, PROMPTS, sampling=GREEDY, **HOW, **options)]


def test_everything_that_keeps_states_keeps_its(model, tmp_path):
    ids = jnp.array([PROMPTS[1]])
    (whole,), read = jitted.forward(
        model.params, ids, jnp.array([21]), model.config, taps=bj.Taps(("input", "attention"))
    )
    arrays = {
        name: np.asarray(blocks(t)).view(np.float32).reshape(t.shape)
        for name, t in checkpoint().tensors.items()
    }
    for layer in (0, 2):  # float64
        x, s = np.float64(read["input"][layer, 0]), 0.0
        n = x / np.sqrt((x**2).mean(-1, keepdims=True) + model.config.rms_norm_eps)
        values = n * arrays[f"blk.{layer}.attn_norm.weight"] @ arrays[f"blk.{layer}.mean_in.weight"].T
        for value, added in zip(values, np.asarray(read["attention"][layer, 0]), strict=True):
            s = s / 2 + value
            np.testing.assert_allclose(added, arrays[f"blk.{layer}.mean_out.weight"] @ s, atol=1e-4)

    plain = answers(model)
    assert_same(answers(model, speculate="ngram"), plain)  # replay
    tokens, cache = ids[:, :9], bj.new_cache(model, 1, 64)  # copies of rows, and a file
    _, cache = jitted.extend(model.params, cache, tokens, jnp.array([9]), model.config)
    with pytest.raises(NotImplementedError, match="rewind"):
        cache.rewind(jnp.array([3]))
    bj.save_state(tmp_path / "prefix", cache.take(jnp.array([0, 0])))
    cache = bj.load_state(tmp_path / "prefix", model)
    rest, lengths = jnp.tile(ids[:, 9:], (2, 1)), jnp.array([12, 12])
    logits, _ = jitted.extend(model.params, cache, rest, lengths, model.config)
    for row in np.asarray(logits):
        np.testing.assert_allclose(row, whole[9:], atol=1e-4)


def test_requests_of_an_engine_share_its_checkpoints(model):
    prompts = [[*PROMPTS[1], n] for n in (3, 4, 5)]
    alone = [bj.generate(model, [p], sampling=GREEDY, **HOW)[0].tokens for p in prompts]
    with bj.Engine(model, max_batch_size=2, context=64, checkpoints=4) as engine:
        outputs = [engine.submit(prompt, GREEDY, **HOW).result() for prompt in prompts]
    assert_same([output.tokens for output in outputs], alone)
    assert outputs[2].cached_tokens > 0


def test_its_phases_and_its_matrices_are_shown(model):
    names = [row.phase for row in profile.measure(model, 0, 1)]
    assert names[:3] == ["mean input", "mean", "mean output"]
    shown = run("inspect", model.source).stdout
    assert "input" in shown and "output" in shown
