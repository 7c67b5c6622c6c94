"""A feed-forward without a gate, everywhere a model runs; its answers beside llama.cpp's:
test_oracle_tiny.py."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.measure import profile
from bonsai_jax.network import architectures
from bonsai_jax.network import params as network_params
from bonsai_jax.weights import plan as load_plans
from checkpoints import open_checkpoint
from pallas_kernels import dequantize, device
from tests.bonsai_jax.command_line import run
from tests.bonsai_jax.tokens import assert_same

TINY = "synth:tiny-arcee:q8_0"
GREEDY = bj.SamplingParams(temperature=0.0)


@functools.cache
def tiny() -> bj.Model:
    return bj.load(TINY, bj.RunConfig(context=128, batch_size=2))


def prompts() -> list[list[int]]:
    return [np.random.default_rng(seed).integers(0, 256, 10 + 30 * seed).tolist() for seed in range(2)]


def test_hidden_vectors_are_squares():
    """Read by a tap, beside a float64 product of the normed stream."""
    model, ids = bj.load(TINY, bj.RunConfig(impl="reference", weights="packed")), prompts()[0]
    tokens, lengths = jnp.array([ids]), jnp.array([len(ids)])
    _, read = bj.jitted.forward(
        model.params, tokens, lengths, model.config, taps=bj.Taps(("middle", "hidden", "mlp"))
    )
    (w,) = model.params.layers["plain_mlp"]
    for layer in range(model.config.num_layers):
        x = np.float64(read["middle"][layer, 0])
        n = (
            x
            / np.sqrt((x**2).mean(-1, keepdims=True) + model.config.rms_norm_eps)
            * np.float64(w.norm[layer])
        )
        up, down = (np.float64(dequantize(stack.parts[0])[layer]) for stack in (w.up, w.down))
        hidden = np.maximum(n @ up.T, 0) ** 2
        np.testing.assert_allclose(read["hidden"][layer, 0], hidden, atol=1e-4 * hidden.max())
        np.testing.assert_allclose(read["mlp"][layer, 0], hidden @ down.T, atol=1e-4)


def test_tokens_one_by_one_are_those_of_a_text_at_once():
    (ids, *_), count = prompts(), 12
    (drawn,) = bj.generate(tiny(), [ids], max_new_tokens=count, sampling=GREEDY, ignore_eos=True)
    assert bj.logits(tiny(), [*ids, *drawn.tokens[:-1]])[-count:].argmax(-1).tolist() == drawn.tokens


@pytest.mark.slow
def test_the_engine_a_stream_and_speculation_draw_what_generate_does():
    model = tiny()
    how = {"max_new_tokens": 12, "ignore_eos": True}
    plain = [output.tokens for output in bj.generate(model, prompts(), sampling=GREEDY, **how)]
    speculated = bj.generate(model, prompts(), sampling=GREEDY, speculate="ngram", **how)
    assert_same([output.tokens for output in speculated], plain)
    with bj.Engine(model, max_batch_size=2, context=128) as engine:
        handles = [engine.submit(prompt, GREEDY, **how) for prompt in prompts()]
        assert_same([handle.result().tokens for handle in handles], plain)
    state = bj.new_state(model, 1, 64, GREEDY, 12, ignore_eos=True)
    tokens, lengths = jnp.array([prompts()[0]]), jnp.array([10])
    drawn = bj.jitted.generate_tokens(model.params, state, tokens, lengths, model.config, size=12)
    assert_same(np.asarray(drawn.tokens).tolist(), plain[:1])


def test_its_phases_read_all_weights():
    rows = list(profile.measure(tiny(), 0, 1))
    names = ["qkv", "attention", "attention output", "up", "down", "head"]
    assert [row.phase for row in rows[:6]] == names
    read = sum(row.bytes for row in rows[:6] if row.phase != "attention")
    assert 0.98 < read / network_params.decode_bytes(tiny().params, tiny().config) <= 1


def test_inspect_shows_its_matrices():
    entries = json.loads(run("inspect", TINY, "--json").stdout)["kernels"]
    times = {entry["what"]: entry["times"] for entry in entries}
    assert times["up"] == times["down"] == 3 and "gate" not in times


@pytest.mark.parametrize("format", ["q1_0", "q4_k_m", "q8_0"])
def test_on_a_gpu_its_steps_run_operation_by_operation(format, monkeypatch):
    """With kernels for its products; no fused launch computes it."""
    monkeypatch.setattr(device, "default", lambda: device.GPUS["sm_90"])
    checkpoint = open_checkpoint(f"synth:tiny-arcee:{format}")
    plan = load_plans.plan(architectures.describe(checkpoint), bj.RunConfig())
    params = jax.eval_shape(lambda: network_params.load(plan))
    assert {params.step.schedule(rows) for rows in (1, 2, 8, 64)} == {"launches"} and params.step.unrolled
    (w,) = params.layers["plain_mlp"]
    assert all(part.tiled for stack in (w.up, w.down) for part in stack.parts)


def test_other_activations_are_refused():
    metadata = {"hidden_act": "silu"}
    with pytest.raises(NotImplementedError, match="hidden_act is 'silu'; supported: relu2"):
        architectures.get("arcee").config_from_huggingface(metadata, {})
