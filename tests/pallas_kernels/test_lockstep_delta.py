"""Kernels of the gated delta net in numpy (lockstep), against its lines written out in numpy's float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.network.kinds import delta_net as kind
from bonsai_jax.network.kinds.place import Place
from pallas_kernels.delta import STEP_TOKENS, Gates, GateSums, delta_net, replay, step
from pallas_kernels.matmul.bit_mma import quantize_rows
from pallas_kernels.matmul.bit_mma.activations import activations_int8
from tests.pallas_kernels.lockstep import lockstep

EPS = 1e-6
TF32 = 2.0**-11  # half a unit of its last place
FLOAT16 = 2.0**-11  # the same


def problem(k_heads, v_heads, K, V, lengths, tokens, hidden, seed=0, dtype=np.float32):
    """Arguments of `delta_net` for rows behind so many tokens, and so many tokens of each; length -1: the row
    has ended. Of what a row's state held before its first token nothing may be seen. dtype: of states."""
    rng = np.random.default_rng(seed)

    def draw(*shape) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    L, B, C = 2, len(lengths), 2 * k_heads * K + v_heads * V
    states, tails = draw(L, B, v_heads, K, V).astype(dtype), draw(L, B, 4, C)
    positions = np.zeros((B, tokens), np.int32) - 1
    for row, (length, count) in enumerate(zip(lengths, [tokens] * B, strict=True)):
        if length >= 0:
            positions[row, :count] = length + np.arange(count)
        if length == 0:
            states[:, row], tails[:, row] = np.nan, np.nan
        for slot in range(4):  # nor of tokens before it
            if 0 <= length <= slot:
                tails[:, row, slot] = np.nan
    gates = Gates(draw(B, tokens, hidden), 1 + 0.1 * draw(L, hidden), draw(L, 2 * v_heads, hidden) / 16)
    rest = {
        "conv": draw(L, C, 4),
        "decay": -np.exp(draw(L, v_heads)),
        "dt": draw(L, v_heads),
        "norm": 1 + 0.1 * draw(L, V),
    }
    return (draw(B, tokens, C + v_heads * V), gates, states, tails, positions, 1), rest


def of_float64(args, weights, grouped, rounded=False):
    """A token at a time. rounded: S to its stored dtype behind each."""
    qkv_z, gates, states, tails, positions, layer = args
    x, gamma, matrix = (np.float64(a) for a in gates)
    w: dict[str, Any] = {name: np.float64(a[layer]) for name, a in weights.items()}
    B, T, _ = qkv_z.shape
    Hv, K, V = states.shape[2:]
    C = tails.shape[-1]
    Hk = (C - Hv * V) // (2 * K)
    S_all, tails, y = np.float64(states[layer]), np.array(tails), np.zeros((B, T, Hv * V))
    S_all = np.where((positions[:, 0] == 0)[:, None, None, None], 0, S_all)
    silu = lambda a: a / (1 + np.exp(-a))  # noqa: E731
    for row, t in np.argwhere(positions >= 0):
        p = positions[row, t]
        tails[layer, row, p % 4] = qkv_z[row, t, :C]
        u = sum(
            w["conv"][:, 3 - back] * np.float64(tails[layer, row, (p - back) % 4])
            for back in range(min(p, 3) + 1)
        )
        q, k, v = np.split(silu(u), [Hk * K, 2 * Hk * K])
        n = x[row, t] / np.sqrt((x[row, t] ** 2).mean() + EPS) * gamma[layer]
        alpha, beta = np.split(matrix[layer] @ n, 2)
        decay = np.exp(w["decay"] * np.log1p(np.exp(alpha + w["dt"])))
        z = silu(np.float64(qkv_z[row, t, C:])).reshape(Hv, V)
        for h in range(Hv):
            kh = h // (Hv // Hk) if grouped else h % Hk
            qh, keys = (a[kh * K : (kh + 1) * K] / np.linalg.norm(a[kh * K : (kh + 1) * K]) for a in (q, k))
            S = S_all[row, h] * decay[h]
            d = (v[h * V : (h + 1) * V] - S.T @ keys) / (1 + np.exp(-beta[h]))
            S_all[row, h] = S = S + np.outer(keys, d)
            if rounded:
                S_all[row, h] = S.astype(states.dtype)
            o = S.T @ qh / np.sqrt(K)
            y[row, t, h * V : (h + 1) * V] = o / np.sqrt((o**2).mean() + EPS) * w["norm"] * z[h]
    return y, S_all, tails


def check(got, args, want, limit):
    """Errors' norms, of outputs and of states, relative to theirs. States of 16 bits may have their own error
    beside the limit."""
    y, states, tails = (np.asarray(a) for a in got)
    states_before, _, positions, layer = args[2:]
    there = positions >= 0
    wanted_y, wanted_S, wanted_tails = want
    assert np.isfinite(y).all()
    rows = there.any(axis=1)
    assert states.dtype == states_before.dtype
    state_limit = limit + FLOAT16 * (states.dtype == np.float16)
    for result, expected, most in (
        (y[there], wanted_y[there], limit), (states[layer][rows], wanted_S[rows], state_limit),
    ):  # fmt: skip
        error = np.linalg.norm(np.float64(result) - expected) / np.linalg.norm(expected)
        print(f"{error:.1e}")
        assert error < most
    # Of no token zeros may be kept.
    np.testing.assert_array_equal(np.nan_to_num(tails), np.nan_to_num(wanted_tails))
    np.testing.assert_array_equal(states[layer][~rows], states_before[layer][~rows])
    np.testing.assert_array_equal(states[1 - layer], states_before[1 - layer])


@pytest.mark.parametrize(
    ("k_heads", "v_heads", "K", "V", "grouped", "dtype"),
    [(2, 6, 128, 128, False, jnp.bfloat16), (2, 4, 64, 64, True, jnp.float32), (1, 2, 128, 64, True, None)],
)
@pytest.mark.parametrize(
    ("impl", "most_in_registers"), [("delta_step", 1), ("delta_step", 0), ("reference", 1)]
)
@pytest.mark.parametrize("state_dtype", [np.float32, np.float16])
def test_a_step_is_float64_s(
    k_heads, v_heads, K, V, grouped, dtype, impl, most_in_registers, state_dtype, monkeypatch
):
    """Rows at their first token, with part of a convolution behind them, with all of it, and ended; gates
    made in the kernel, of weights of 16 and 32 bits, and before it; S in registers and in shared memory."""
    monkeypatch.setattr(step, "MOST_IN_REGISTERS", most_in_registers)
    args, weights = problem(k_heads, v_heads, K, V, [0, 2, 77, -1], 1, hidden=1280, dtype=state_dtype)
    qkv_z, gates, states, tails, positions, layer = args
    if dtype is not None:
        gates = gates._replace(weights=np.asarray(jnp.asarray(gates.weights, dtype)))
    args = qkv_z, gates, states, tails, positions, layer
    want = of_float64(args, weights, grouped)
    if dtype is None:
        n = gates.x / np.sqrt((gates.x**2).mean(-1, keepdims=True) + EPS) * gates.gamma[layer]
        gates = (n @ gates.weights[layer].T).astype(np.float32)
    arrays = jax.tree.map(jnp.asarray, (qkv_z, gates, *args[2:]))
    f = functools.partial(delta_net, eps=EPS, grouped=grouped, impl=impl)
    with lockstep():
        got = (jax.jit(f) if impl == "reference" else f)(*arrays, **weights)
    check(got, args, want, 1e-6)


@pytest.mark.parametrize(
    ("k_heads", "v_heads", "K", "V", "grouped", "tokens", "dense"),
    [(1, 3, 128, 128, False, 4, True), (2, 4, 64, 64, True, 8, True), (1, 2, 128, 64, True, 2, False)],
)
@pytest.mark.parametrize("impl", ["delta_step", "reference"])
def test_a_step_of_several_tokens_is_float64_s(k_heads, v_heads, K, V, grouped, tokens, dense, impl):
    """Rows at their first token and behind some, a row with fewer tokens, and one with none. Read without
    storing, outputs are the same and states as they were; what all layers store of some of the tokens
    afterwards is what they would have stored of these alone."""
    args, weights = problem(k_heads, v_heads, K, V, [0, 77, 2, -1], tokens, hidden=1280, seed=tokens)
    args[4][2, 1:] = -1
    rng = np.random.default_rng(tokens)
    qkv_z, gates, states, tails, positions, layer = args

    def made(x, layer):
        n = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * gates.gamma[layer]
        return (n @ gates.weights[layer].T).astype(np.float32)

    own = gates if dense else made(gates.x, layer)
    f = functools.partial(delta_net, eps=EPS, grouped=grouped, impl=impl)
    run = jax.jit(f, static_argnames="stores") if impl == "reference" else f
    given = jax.tree.map(jnp.asarray, (qkv_z, own, *args[2:]))
    with lockstep():
        got = run(*given, **weights)
        y, *same = run(*given, **weights, stores=False)
    check(got, args, of_float64(args, weights, grouped), 1e-6)
    there = positions >= 0
    np.testing.assert_array_equal(y[there], got[0][there])
    for after, before in zip(same, (states, tails), strict=True):
        np.testing.assert_array_equal(after, before)

    states, tails = np.nan_to_num(states, nan=7.0), np.nan_to_num(tails)
    fewer = np.where(np.arange(tokens) < rng.integers(0, tokens + 1, (4, 1)), positions, -1)
    each_qkv_z = np.stack([rng.standard_normal(qkv_z.shape).astype(np.float32), qkv_z])
    each_x = np.stack([rng.standard_normal(gates.x.shape).astype(np.float32), gates.x])
    each = gates._replace(x=each_x) if dense else np.stack([made(x, i) for i, x in enumerate(each_x)])
    f = functools.partial(replay, eps=EPS, grouped=grouped, impl=impl)
    given = jax.tree.map(jnp.asarray, (each_qkv_z, each, states, tails, fewer))
    with lockstep():
        after = (jax.jit(f) if impl == "reference" else f)(*given, **weights)
    rows = (fewer >= 0).any(1)
    for layer in (0, 1):
        one = each_qkv_z[layer], gates._replace(x=each_x[layer]), states, tails, fewer, layer
        _, S, tail = of_float64(one, weights, grouped)
        error = np.linalg.norm(after[0][layer][rows] - S[rows]) / np.linalg.norm(S[rows])
        assert error < 1e-6
        np.testing.assert_array_equal(after[0][layer][~rows], states[layer][~rows])
        np.testing.assert_array_equal(np.nan_to_num(after[1][layer]), np.nan_to_num(tail[layer]))


@pytest.mark.parametrize(("integers", "tokens"), [("few", 2), ("many", 4)])
def test_several_tokens_take_begun_gates_and_are_rounded_as_rows(integers, tokens):
    """Token t of row b is row b T + t: of gates that were begun by groups of columns, and of outputs that are
    rounded for a product, whose bits are those of a launch that rounds."""
    (qkv_z, gates, *rest), weights = problem(1, 4, 128, 128, [0, 77, -1, 3], tokens, hidden=256)
    rest[2][1, 1:] = -1  # positions
    rows = rest[2].size
    cut = lambda a: np.swapaxes(a.reshape(-1, 2, 128), 0, 1)  # noqa: E731  [groups, rows, 128]
    products = np.einsum("grk,gnk->grn", cut(gates.x * gates.gamma[1]), cut(gates.weights[1]))
    sums = GateSums(jnp.asarray(products), jnp.asarray((cut(gates.x) ** 2).sum(-1)))
    f = functools.partial(delta_net, eps=EPS, grouped=False, impl="delta_step", **weights)
    qkv_z, gates, there, *rest = jax.tree.map(jnp.asarray, (qkv_z, gates, rest[2] >= 0, *rest))
    with lockstep(), jax.disable_jit():
        (made, *_), (y, *after) = (f(qkv_z, own, *rest) for own in (gates, sums))
        rounded, *same = f(qkv_z, sums, *rest, integers=integers)
        flat = jnp.asarray(y).reshape(rows, -1)
        if integers == "few":
            want, *_ = quantize_rows.quantize_rows(flat, jnp.zeros(2, jnp.int32), None)
        else:
            want = activations_int8(flat)
    assert np.linalg.norm((made - y)[there]) < 1e-6 * np.linalg.norm(y[there])
    for got, expected in zip((*same, *rounded[:2]), (*after, *want[:2]), strict=True):
        np.testing.assert_array_equal(np.nan_to_num(got), np.nan_to_num(expected))


@pytest.mark.parametrize("most_in_registers", [1, 0])
def test_float16_states_are_stored_as_token_by_token(most_in_registers, monkeypatch):
    """Several tokens of a step leave the bits that they leave in as many steps, and numbers beyond the
    largest float16 are that."""
    monkeypatch.setattr(step, "MOST_IN_REGISTERS", most_in_registers)
    args, weights = problem(1, 2, 128, 128, [5, 0], 4, hidden=256, dtype=np.float16)
    qkv_z, gates, states, tails, positions, layer = args
    states[:, 0, 1] = np.clip(states[:, 0, 1] * np.float32(2**14), -65504, 65504)
    f = functools.partial(delta_net, eps=EPS, grouped=False, impl="delta_step", **weights)

    def step_of(one, states, tails):
        own = qkv_z[:, one], gates._replace(x=gates.x[:, one])
        return f(*jax.tree.map(jnp.asarray, (*own, states, tails, positions[:, one], layer)))

    with lockstep():
        y, *together = step_of(slice(0, 4), states, tails)
        ys = []
        for token in range(4):
            one, *given = step_of(slice(token, token + 1), *([states, tails] if token == 0 else given))
            ys.append(one)
    np.testing.assert_array_equal(np.concatenate(ys, axis=1), y)
    for a, b in zip(together, given, strict=True):
        np.testing.assert_array_equal(np.nan_to_num(a), np.nan_to_num(b))
    assert (np.abs(together[0][layer, 0, 1]) <= 65504).all()


@pytest.mark.parametrize(
    ("k_heads", "v_heads", "K", "V", "grouped", "tokens"),
    [(1, 2, 128, 128, False, 70), (2, 4, 64, 64, True, 64), (2, 2, 128, 64, False, 9)],
)
@pytest.mark.parametrize("impl", ["delta_chunks", "reference"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_chunks_are_float64_s(k_heads, v_heads, K, V, grouped, tokens, impl, dtype):
    """Rows at their first token and behind some, a row with fewer tokens, and one with none."""
    args, weights = problem(k_heads, v_heads, K, V, [0, 77, 3, -1], tokens, hidden=64, dtype=dtype)
    args[4][2, 3:] = -1
    want = of_float64(args, weights, grouped)
    arrays = jax.tree.map(jnp.asarray, args)
    f = functools.partial(delta_net, eps=EPS, grouped=grouped, prefill_impl=impl)
    with lockstep(at_a_time=4):
        got = (jax.jit(f) if impl == "reference" else f)(*arrays, **weights)
    check(got, args, want, TF32 if impl == "delta_chunks" else 2e-6)


@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_a_layer_is_the_same_by_kernels(tokens):
    """A layer's block with a model's own weights: a step's gates are made in the kernel, of its input."""
    model = bj.load("synth:tiny-qwen35:f32", bj.RunConfig(page_size=16, impl="reference"))
    config, rng = model.config, np.random.default_rng(0)
    cache = bj.new_cache(model, 2, 32)
    (state,) = jax.tree.map(lambda a: rng.standard_normal(a.shape, np.float32), cache.states["delta_net"])
    x = jnp.asarray(rng.standard_normal((2, tokens, config.hidden)), jnp.float32)
    positions = jnp.array([[9], [0]], jnp.int32) + jnp.arange(tokens, dtype=jnp.int32)

    def run(x, params, state, positions):
        weights = params.layers["delta_net"][0]
        place = Place(config.delta_net, weights, 0, 2, config.rms_norm_eps, positions, {}, 16)
        y, state, _ = kind.block(x, place, state, None)
        return y, state

    results = []
    for impl, prefill_impl in (("reference", "reference"), ("delta_step", "delta_chunks")):
        before = jax.tree.map(jnp.asarray, state).replace(impl=impl, prefill_impl=prefill_impl)
        with lockstep():
            y, after = (jax.jit(run) if impl == "reference" else run)(x, model.params, before, positions)
        assert after.impl == impl
        results.append((y, after.s))
    for got, want in zip(*results[::-1], strict=True):
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert error < (1e-6 if tokens <= STEP_TOKENS else TF32)
