"""What layer_gemms puts between its GEMMs, in numpy (lockstep), with products by numpy: each GEMM gets what
it wants, of formats with groups of 32 and of 16 columns, and attention q, k and v, whatever their formats."""

import dataclasses
import itertools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.network import cache as kv
from bonsai_jax.network import decoder
from checkpoints import synth
from pallas_kernels import GELU_TANH, SILU, QTensor
from pallas_kernels.delta import Gates, delta_net
from pallas_kernels.matmul import execute
from pallas_kernels.matmul.int_mma import prefill_sm90 as int_prefill_sm90
from pallas_kernels.matmul.prologue import Parts
from pallas_kernels.qtensor import LayerStack, Rows
from pallas_kernels.step import layer_gemms
from pallas_kernels.step.inputs import StepInputs
from tests.pallas_kernels.aot import as_on_a_gpu
from tests.pallas_kernels.lockstep import lockstep
from tests.pallas_kernels.stacks import drawn
from tests.pallas_kernels.test_activations import DEFINITIONS
from tests.pallas_kernels.test_gemm import in_group_order
from tests.pallas_kernels.test_lockstep_delta import of_float64, problem

ROWS, HIDDEN, WIDTH, FFN, EPS = 9, 512, 256, 768, 1e-6


def gemm(a, scale, weights, at, residual, activation, summed):
    """As int_prefill_sm90's: columns in two splits, or the activation."""
    assert residual is None and not summed
    a = np.float64(a) * np.asarray(scale, np.float64)[:, None]
    of_each = [
        in_group_order(w.fields["dense"][at], int_prefill_sm90.formats.get(w.format).LANES.group)
        for w in weights
    ]
    if len(of_each) == 2:
        gate, up = (a @ w.T for w in of_each)
        return np.float32(DEFINITIONS[activation](gate, up))[None]
    halves = np.split(np.arange(a.shape[1]), 2)
    return np.stack([np.float32(a[:, half] @ of_each[0][:, half].T) for half in halves])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "qkv",
    [
        [("q4_k", 320)],
        [("q4_k", 256), ("q6_k", 64)],
        [("q6_k", 128), ("q4_k", 128), ("q3_k", 64)],
        [("q4_k", 256), ("q5_k", 64)],
    ],
    ids=str,
)
def test_a_layer_of_mixed_formats_is_its_definition(qkv, bias):
    rng = np.random.default_rng(len(qkv))
    draw: Any = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731

    def stack(*parts, k):
        pieces = tuple(QTensor({"dense": draw(1, n, k) / k**0.5}, f, (n, k)) for f, n in parts)
        return LayerStack(pieces if len(pieces) == 1 else (Rows(pieces),), ((0, 0),))

    def dense(stack):
        return np.concatenate([w.fields["dense"][0] for w, _ in layer_gemms._pieces(stack, 0)])

    weights = [
        *(stack(*qkv, k=HIDDEN), stack(("q4_k", HIDDEN), k=WIDTH)),
        *(stack(("q4_k", FFN), k=HIDDEN) for _ in range(2)),
        stack(("q6_k", HIDDEN), k=FFN),
    ]
    x, attended, gammas, of_bias = (
        draw(3, 16, HIDDEN),
        draw(ROWS, WIDTH),
        1 + draw(2, 1, HIDDEN) / 9,
        draw(1, 320),
    )
    given = []

    def attention(qkv, *_, **__):
        given.extend(qkv)
        return attended, None, None, None

    with (
        lockstep(),
        jax.disable_jit(),
        mock.patch.object(int_prefill_sm90, "gemm", gemm),
        mock.patch.object(layer_gemms, "decode_attention", attention),
    ):
        unused: Any = None  # by this attention
        parts, *_ = layer_gemms.run(
            Parts(x), weights,
            StepInputs(
                *gammas, of_bias if bias else None, None, (unused, unused), unused, unused, unused,
                jnp.zeros(ROWS),
            ),
            unused, layer=0, eps=EPS, interleaved=False, activation=GELU_TANH,
        )  # fmt: skip
        after: Any = np.array(layer_gemms.summed(parts))

    def norm(x, gamma):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * gamma

    x = np.asarray(x, np.float64).sum(0)[:ROWS]
    want = norm(x, gammas[0]) @ dense(weights[0]).T + (of_bias if bias else 0)
    got = np.concatenate([np.sum(y, axis=0)[:ROWS] if y.ndim == 3 else y for y in given], axis=-1)
    np.testing.assert_allclose(got, want, atol=5e-3)
    x = x + attended @ dense(weights[1]).T
    gate, up = (norm(x, gammas[1]) @ dense(w).T for w in weights[2:4])
    hidden = DEFINITIONS[GELU_TANH](gate, up)
    np.testing.assert_allclose(after[:ROWS, :], x + hidden @ dense(weights[4]).T, atol=5e-3)


@pytest.mark.parametrize("state_dtype", [np.float32, np.float16])
@pytest.mark.parametrize("rows", [3, 8])
def test_a_layer_with_a_delta_net_of_few_rows_passes_integers_on(rows, state_dtype):
    """Of 1-bit weights: what begins the net's gates, the net itself, which rounds its outputs, and the
    feed-forward behind it, against kernels that do so for themselves and against float64."""
    layers, heads, ffn, layer = 2, 4, 768, 1
    lengths = [0, 77, -1, *[5] * 5][:rows]
    (_, _, states, tails, positions, _), own = problem(1, heads, 128, 128, lengths, 1, 8, dtype=state_dtype)
    shapes = [(2 * 128 + 2 * heads * 128, HIDDEN), (HIDDEN, heads * 128), *[(ffn, HIDDEN)] * 2, (HIDDEN, ffn)]
    pieces = [drawn("q1_0", (layers, *shape), seed) for seed, shape in enumerate(shapes)]
    stacks = [LayerStack((piece.tiled,), tuple((0, i) for i in range(layers))) for piece in pieces]
    rng = np.random.default_rng(rows)
    draw: Any = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    x, gates = draw(2, 8, HIDDEN), draw(layers, 2 * heads, HIDDEN) / 16
    attn_norm, ffn_norm = (1 + draw(layers, HIDDEN) / 9 for _ in range(2))
    settings = {"eps": EPS, "grouped": False, "impl": "delta_step"}
    assert layer_gemms.rounds_for(stacks[1], layer, rows) == "few"

    def run(passes: bool):
        made, before, sums = layer_gemms.mixer_inputs(
            Parts(x), stacks[0], attn_norm, gates if passes else None, layer=layer, eps=EPS, rows=rows
        )
        own_gates = sums if passes else Gates(before[:, None], attn_norm, gates)
        y, S, tail = delta_net(
            layer_gemms.joined(made, rows)[:, None], own_gates, states, tails, positions, layer,
            integers="few" if passes else None, **own, **settings,
        )  # fmt: skip
        after = layer_gemms.after_mixer(
            y if passes else y[:, 0], before, (stacks[1], layer), ffn_norm, stacks[2:], layer, eps=EPS
        )
        return np.asarray(layer_gemms.summed(after)), S, tail, np.asarray(before)

    with lockstep(), jax.disable_jit():
        passed, alone = run(True), run(False)
        *_, sums = layer_gemms.mixer_inputs(
            Parts(x), stacks[0], attn_norm, gates, layer=layer, eps=EPS, rows=rows
        )
    there = positions[:, 0] >= 0
    for a, b in zip(passed, alone, strict=True):
        a, b = (np.float64(v)[:, there] if v.ndim > 2 else np.float64(v)[there] for v in (a, b))
        a, b = np.nan_to_num(a), np.nan_to_num(b)
        # A gate's sums are in another order, and a state of 16 bits may be rounded the other way.
        limit = 2.0**-11 if state_dtype == np.float16 else 3e-5
        assert np.linalg.norm(a - b) < limit * np.linalg.norm(b)

    w_in, w_o, w_gate, w_up, w_down = (np.float64(piece.dense[layer]) for piece in pieces)
    norm = lambda x, gamma: x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * gamma  # noqa: E731
    x = np.float64(x).sum(0)[:rows]
    np.testing.assert_allclose(passed[3], x, atol=1e-5)
    begun = np.asarray(sums.made(EPS))[:, 0]  # as the reference finishes them
    np.testing.assert_allclose(begun, norm(x, attn_norm[layer]) @ gates[layer].T, atol=2e-5)
    qkv_z = norm(x, attn_norm[layer]) @ w_in.T
    args = qkv_z[:, None], Gates(x[:, None], attn_norm, gates), states, tails, positions, layer
    y, *_ = of_float64(args, own, False)
    x = x + y[:, 0] @ w_o.T
    n = norm(x, ffn_norm[layer])
    x = x + DEFINITIONS[SILU](n @ w_gate.T, n @ w_up.T) @ w_down.T
    assert np.linalg.norm((passed[0] - x)[there]) < 0.02 * np.linalg.norm(x[there])


@pytest.mark.parametrize(
    ("name", "rows", "tokens", "state_dtype", "schedule"),
    [
        ("tiny-qwen35", 3, 1, "float32", "layer_gemms"),
        ("tiny-qwen35", 4, 4, "float32", "layer_gemms"),
        ("tiny-qwen35", 8, 4, "float16", "layer_gemms"),
        ("tiny-qwen35", 2, 2, "float32", "layer_products"),
        ("tiny-smollm3", 5, 1, "float32", "layer_gemms"),  # layers with rope and without
        ("tiny-mistral3", 8, 4, "float32", "layer_gemms"),  # queries with a temperature
    ],
)
def test_a_whole_step_of_few_rows_is_that_of_launches(name, rows, tokens, state_dtype, schedule, monkeypatch):
    """Of models in Q1_0 with delta nets, or with attention that is not the same in all layers, in lockstep:
    several sequences; and several tokens of each sequence, which are as many rows, and of which all but one
    are accepted."""
    tiny = synth.MODELS["tiny-qwen35"]
    delta = dataclasses.replace(tiny.delta, k_heads=2, v_heads=4, head_dim=128)
    monkeypatch.setitem(synth.MODELS, "tiny-qwen35", dataclasses.replace(tiny, delta=delta))
    # What vmap and derivatives would make of a product traces it.
    monkeypatch.setattr(execute, "_with_rows_of_vmap", lambda f: f)
    monkeypatch.setattr(execute, "differentiated", lambda op, exactly: op)
    ids, outputs, caches = np.random.default_rng(5).integers(0, 256, (rows, 8)), [], {}
    for own_schedule in ("launches", schedule):
        with as_on_a_gpu((9, 0)):
            run = bj.RunConfig(
                cache_dtype="float32", state_dtype=state_dtype, schedule=own_schedule, weights="packed",
                batch_size=rows, context=64,
            )  # fmt: skip
            model = bj.load(f"synth:{name}:q1_0", run)
            assert model.params.step.schedule(rows) == own_schedule and not model.params.step.plain
            with lockstep(), jax.disable_jit():
                steps = _one_by_one(model, ids[:, :4], caches), _several_at_once(model, ids, tokens, caches)
                outputs.append(list(itertools.chain(*steps)))
    errors = []
    for before, after in zip(*outputs, strict=True):
        assert np.isfinite(before).all()
        errors += list(np.linalg.norm(after - before, axis=(1, 2)) / np.linalg.norm(before, axis=(1, 2)))
    # An activation that lies close to the middle of two integers may go to the other. Which does depends on
    # the CPU's order of sums, since a product of bytes rounds what it subtracts to 3e-6 of the product
    # (byte_product.py). On an EPYC a ninth of the results differ for that reason, at most.
    assert np.median(errors) < 1e-5 and np.mean(np.array(errors) >= 1e-5) <= 0.25 and max(errors) < 1e-2


def _one_by_one(model, ids, caches):
    """Hidden vectors after steps of one token of each sequence.

    caches  before each step, of the first schedule that is run. The second one begins its steps with them, so
            that later tokens do not follow what it has rounded in another way
    """
    cache = kv.empty(model.config, model.run, len(ids), 64)
    for i in range(ids.shape[1]):
        cache = caches.setdefault(("one", i), cache)
        tokens, at = jnp.asarray(ids[:, i : i + 1], jnp.int32), jnp.full((len(ids), 1), i, jnp.int32)
        x, cache, _ = decoder.decoder(model.params, tokens, at, cache, model.config, i + 1)
        yield np.asarray(x)


def _several_at_once(model, ids, tokens, caches):
    """Hidden vectors after two steps of several tokens of each of fewer sequences, as speculation has."""
    sequences = len(ids) // tokens
    cache, first = kv.empty(model.config, model.run, sequences, 64), 0
    for i in range(2 if tokens > 1 else 0):
        cache = caches.setdefault(("several", i), cache)
        at = jnp.arange(first, first + tokens, dtype=jnp.int32) + jnp.zeros((sequences, 1), jnp.int32)
        x, cache, updates = decoder.decoder(
            model.params, jnp.asarray(ids[:sequences, first : first + tokens], jnp.int32), at, cache,
            model.config, first + tokens, keep_updates=True,
        )  # fmt: skip
        assert bool(updates) == cache.recurrent
        first += tokens - 1
        cache = decoder.replay(model.params, cache, updates, jnp.where(at < first, at, -1), model.config)
        yield np.asarray(x)
