"""Layers by int_launches in numpy (lockstep), with attention by definition: each product gets integers
that another has made where it can, and the layer is what it is with float32 in between."""

from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from pallas_kernels import GELU_TANH, device
from pallas_kernels.qtensor import LayerStack, Rows
from pallas_kernels.step import int_launches
from pallas_kernels.step.inputs import StepInputs
from tests.pallas_kernels.lockstep import lockstep
from tests.pallas_kernels.stacks import Drawn, drawn
from tests.pallas_kernels.test_activations import DEFINITIONS

LAYERS, HIDDEN, EPS = 2, 512, 1e-6
BOUND = 0.02  # of the result: what activations of 8 bits leave after two layers

CASES = [
    # blocks of a launch, rows, width of attention, ffn; formats of q, k and v (rows below rows), of o, gate
    # and up, and down
    (8, 5, 256, 768, [("q4_k", 384)], "q4_k", "q4_k", "q4_k"),
    (8, 8, 256, 1024, [("q4_k", 256), ("q5_k", 128)], "q6_k", "q4_k", "q6_k"),
    (8, 7, 320, 544, [("q8_0", 416)], "q5_0", "iq4_nl", "q4_1"),
    (8, 6, 256, 768, [("q2_k", 384)], "q3_k", "q2_k", "q3_k"),
    # q and k want scales for 32 columns, v for 16
    (8, 8, 256, 768, [("q4_k", 256), ("q6_k", 128)], "q4_k", "q4_k", "q4_k"),
    # 3 and 5 tiles of a block are no whole groups of 32
    (11, 5, 256, 768, [("q4_k", 384)], "q4_k", "q4_k", "q4_k"),
]


def stacked(pieces: list[Drawn]) -> LayerStack:
    tiled = tuple(piece.tiled for piece in pieces)
    part = tiled[0] if len(tiled) == 1 else Rows(tiled)
    return LayerStack((part,), tuple((0, layer) for layer in range(LAYERS)))


def dense(pieces: list[Drawn]) -> np.ndarray:
    return np.concatenate([np.asarray(piece.dense, np.float64) for piece in pieces], axis=1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("blocks", "rows", "width", "ffn", "qkv", "o", "gate", "down"), CASES, ids=str)
def test_layers_in_lockstep_are_their_definition(blocks, rows, width, ffn, qkv, o, gate, down, bias):
    rng, seed = np.random.default_rng(rows), iter(range(9))
    draw: Any = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    shapes = [(qkv, HIDDEN), ([(o, HIDDEN)], width), *[([(gate, ffn)], HIDDEN)] * 2, ([(down, HIDDEN)], ffn)]
    pieces = [[drawn(f, (LAYERS, n, k), next(seed)) for f, n in parts] for parts, k in shapes]
    x, attended = draw(rows, HIDDEN), draw(LAYERS, rows, width)
    attn_norm, ffn_norm = (1 + draw(LAYERS, HIDDEN) / 9 for _ in range(2))
    bias = draw(LAYERS, sum(n for _, n in qkv)) if bias else None
    unused: Any = None  # by this attention
    inputs = StepInputs(attn_norm, ffn_norm, bias, None, (unused, unused), unused, unused, unused, unused)
    given, rounded = [], []

    def attention(qkv, *rest, **_):
        given.append(np.asarray(qkv))
        return attended[rest[4]], None, None, None

    def product(x, *rest, **options):
        rounded.append(isinstance(x, dict))
        return int_decode(x, *rest, **options)

    def all_layers():
        state = int_launches.Vector(x)
        for layer in range(LAYERS):
            state, *_ = int_launches.run(
                state, list(map(stacked, pieces)), inputs, unused, layer=layer, eps=EPS, interleaved=False,
                activation=GELU_TANH,
            )  # fmt: skip
        return np.asarray(int_launches.summed(state))

    int_decode = int_launches.int_decode
    with (
        lockstep(),
        jax.disable_jit(),
        mock.patch.object(device, "multiprocessors", lambda: blocks),
        mock.patch.object(int_launches, "int_decode", product),
        mock.patch.object(int_launches, "decode_attention", attention),
    ):
        after = all_layers()
        with mock.patch.object(int_launches.decode_plan, "makes_groups", lambda plan: False):
            by_readers = all_layers()

    hidden, x_is = (-(-n // 16 // blocks) % 2 == 0 and n % 32 == 0 for n in (ffn, HIDDEN))
    assert rounded[:8] == [False, False, x_is, hidden, x_is, False, x_is, hidden]
    assert not any(rounded[8:])
    # The integers are the same; of the sum of squares two bits are missing.
    assert np.linalg.norm(after - by_readers) < 1e-4 * np.linalg.norm(after)

    def norm(x, gamma):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * gamma

    w_qkv, w_o, w_gate, w_up, w_down = map(dense, pieces)
    x = np.float64(x)
    for layer in range(LAYERS):
        want = norm(x, attn_norm[layer]) @ w_qkv[layer].T + (0 if bias is None else bias[layer])
        assert np.linalg.norm(given[layer] - want) < BOUND * np.linalg.norm(want)
        x = x + attended[layer] @ w_o[layer].T
        n = norm(x, ffn_norm[layer])
        x = x + DEFINITIONS[GELU_TANH](n @ w_gate[layer].T, n @ w_up[layer].T) @ w_down[layer].T
    assert np.linalg.norm(after - x) < BOUND * np.linalg.norm(x)
