"""Layers in one launch, with experts and without, in numpy (lockstep): against float64, and attention's
definition."""

import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest

from pallas_kernels import GELU_TANH, SILU, attend, device
from pallas_kernels.step import experts_layers, int_layers
from pallas_kernels.step.inputs import StepInputs
from tests.pallas_kernels.lockstep import lockstep
from tests.pallas_kernels.stacks import drawn, numbers_of, pages_of
from tests.pallas_kernels.test_activations import DEFINITIONS

attend_jit = jax.jit(attend, static_argnames=("interleaved", "eps"))
EPS, D, PAGE_SIZE = 1e-6, 64, 16

CASES = [
    # hidden, heads, KV heads, experts (0: there are none), used, ffn, normalized; of each layer formats of o,
    # gate and up, down; parts of q, k, v; blocks, keys before, bits; rows of the router: all random, each
    # twice, or all zeros. Keys of several rows, each its own; a list: of tokens of one sequence, for each
    # sequence one
    (
        512, 8, 2, 8, 2, 256, True,
        [("q4_k", "q4_k", down) for down in ("q6_k", "q4_k", "q6_k")],
        [[("q4_k", 640), ("q6_k", 128)], [("q4_k", 768)], [("q4_k", 640), ("q6_k", 128)]],
        6, 5, 16, "random",
    ),
    (
        256, 4, 2, 70, 4, 512, False, [("q8_0", "q4_k", "q4_k")] * 2, [[("q4_k", 512)]] * 2,
        40, 300, 16, "random",
    ),
    (512, 4, 4, 40, 3, 256, True, [("q6_k", "q5_0", "q8_0")], [[("q6_k", 768)]], 7, 17, 16, "twins"),
    (512, 8, 2, 16, 4, 768, True, [("q4_k", "q4_k", "q6_k")], [[("q4_k", 768)]], 33, 40, 8, "zeros"),
    (
        512, 8, 2, 0, 0, 768, None,
        [("q4_k", gate, down) for gate, down in (("q4_k", "q6_k"), ("q5_k", "q4_k"), ("q4_k", "q4_k"))],
        [[("q4_k", 640), ("q6_k", 128)], [("q4_k", 768)], [("q4_k", 640), ("q6_k", 128)]],
        6, 5, 16, None,
    ),
    (
        512, 4, 1, 0, 0, 1024, None,
        [("q4_k", "q4_k", down) for down in ("q6_k", "q4_k")],  # scales of 16 columns and of 32
        [[("q4_k", 384)]] * 2, 8, 70, 8, None,
    ),
    # 3 tiles of a block are no whole groups of 32
    (512, 4, 1, 0, 0, 1024, None, [("q4_k",) * 3] * 2, [[("q4_k", 384)]] * 2, 11, 70, 8, None),
    (4096, 4, 1, 0, 0, 1024, None, [("q2_k", "q2_k", "q3_k")] * 2, [[("q2_k", 384)]] * 2, 32, 300, 8, None),
    (192, 3, 1, 0, 0, 352, None, [("q4_1", "q4_1", "q4_1")] * 2, [[("q4_1", 320)]] * 2, 12, 40, 16, None),
    (3072, 2, 2, 0, 0, 288, None, [("q8_0", "mxfp4", "q5_0")] * 2, [[("q4_0", 384)]] * 2, 40, 140, 16, None),
    # several rows; of the second scales of 16 columns and of 32, of the third blocks without whole groups
    (
        512, 8, 2, 0, 0, 768, None,
        [("q4_k", gate, down) for gate, down in (("q4_k", "q6_k"), ("q5_k", "q4_k"), ("q4_k", "q4_k"))],
        [[("q4_k", 640), ("q6_k", 128)], [("q4_k", 768)], [("q4_k", 640), ("q6_k", 128)]],
        6, (5, 40, 0), 16, None,
    ),
    (
        512, 4, 1, 0, 0, 1024, None, [("q4_k", "q4_k", down) for down in ("q6_k", "q4_k")],
        [[("q4_k", 384)]] * 2, 8, (70, 3, 15, 31, 200, 0, 16, 90), 8, None,
    ),
    (512, 4, 1, 0, 0, 1024, None, [("q4_k",) * 3] * 2, [[("q4_k", 384)]] * 2, 11, (70, 9), 8, None),
    (192, 3, 1, 0, 0, 352, None, [("q4_1",) * 3] * 2, [[("q4_1", 320)]] * 2, 12, (40, 1, 2, 3, 17), 16, None),
    (512, 4, 1, 0, 0, 1024, None, [("q4_k",) * 3] * 2, [[("q4_k", 384)]] * 2, 8, [70, 70, 70, 70], 8, None),
    (512, 4, 2, 0, 0, 1024, None, [("q5_0",) * 3] * 2, [[("q8_0", 512)]] * 2, 8, [9, 9, 140, 140], 16, None),
    # several rows with experts: three of 7 blocks each and one that only has a logit; more blocks than
    # experts; blocks of a row that have nothing but down; tokens of one sequence
    (
        512, 8, 2, 22, 2, 256, True,
        [("q4_k", "q4_k", down) for down in ("q6_k", "q4_k", "q6_k")],
        [[("q4_k", 640), ("q6_k", 128)], [("q4_k", 768)], [("q4_k", 640), ("q6_k", 128)]],
        22, (5, 40, 0), 16, "random",
    ),
    (
        256, 4, 2, 30, 4, 512, False, [("q8_0", "q4_k", "q4_k")] * 2, [[("q4_k", 512)]] * 2,
        40, (300, 2, 17, 0, 60, 9, 31, 100), 16, "random",
    ),
    (
        512, 8, 2, 16, 3, 256, True, [("q4_k", "q4_k", "q6_k")] * 4, [[("q4_k", 768)]] * 4,
        33, (40, -1, 7), 8, "random",
    ),
    (
        512, 4, 2, 70, 3, 256, True, [("q6_k", "q5_0", "q8_0")] * 2, [[("q6_k", 512)]] * 2,
        16, [17] * 4, 16, "twins",
    ),
]  # fmt: skip


def activation_of(case):
    return GELU_TANH if case is CASES[1] else SILU


def composed(
    case, qkv, x, layers, router, norms, head_norms, bias, pages, table, positions, rotation, tokens
):
    """float64: x and the pages."""
    each = lambda a: np.asarray(a).reshape(-1, tokens, *a.shape[1:])  # noqa: E731
    angles = tuple(each(r[:, 0]) for r in rotation)
    used, normalized = case[4], case[6]
    norm = lambda x, gamma: gamma * x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)  # noqa: E731
    x = x.astype(np.float64)
    for layer, (o, gate, up, down, _) in enumerate(layers):
        qkv = qkv if bias is None else qkv + bias[layer]
        out, *pages, _ = attend_jit(
            each(np.float32(qkv)), *pages, table[::tokens], each(positions), layer, rotation=angles, eps=EPS,
            interleaved=False, norms=head_norms, num_keys=int(positions.max()) + 1,
        )  # fmt: skip
        x = x + np.asarray(out, np.float64).reshape(len(x), -1) @ o.T
        n = norm(x, norms[0][layer])
        feed_forward = DEFINITIONS[activation_of(case)]
        if router is None:
            x = x + feed_forward(n @ gate.T, n @ up.T) @ down.T
        else:
            for row, logits in enumerate(n @ router[layer].astype(np.float64).T):
                p = np.exp(logits - logits.max())
                p /= p.sum()
                chosen = np.argsort(-p, kind="stable")[:used]
                w = p[chosen] / (p[chosen].sum() if normalized else 1)
                for e, weight in zip(chosen, w, strict=True):
                    x[row] += weight * (down[e] @ feed_forward(gate[e] @ n[row], up[e] @ n[row]))
        if layer + 1 < len(layers):
            qkv = norm(x, norms[1][layer + 1]) @ layers[layer + 1][4].T
    return x, pages


def stacked(parts_of_layers):
    """Combinations of formats, and of each layer (combination, index)."""
    kinds, where = {}, []
    for parts in parts_of_layers:
        of = kinds.setdefault(tuple(parts), len(kinds))
        where.append((of, sum(1 for kind, _ in where if kind == of)))
    return list(kinds), where


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[:7]))
def test_layers_in_one_launch_are_float64_s(case):
    hidden, H, Hkv, E, used, ffn, normalized, formats, qkv_parts, blocks, keys, bits, rows = case
    L, rng = len(formats), np.random.default_rng(hidden + blocks)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    weights, where, formats_of = [], [], []
    layers: list[list] = [[None] * 5 for _ in range(L)]
    products = (
        ([[(f[0], hidden)] for f in formats], H * D, 1, 0, (0,)),
        ([[(f[1], ffn)] for f in formats], hidden, 2, E, (1, 2)),
        ([[(f[2], hidden)] for f in formats], ffn, 1, E, (3,)),
        (qkv_parts, hidden, 1, 0, (4,)),
    )
    for parts_of_layers, k, matrices, of_experts, places in products:
        kinds, at = stacked(parts_of_layers)
        combinations = []
        for kind, parts in enumerate(kinds):
            count = sum(of == kind for of, _ in at)
            made = [
                [
                    drawn(f, (count * max(1, of_experts), n, k), 7 * i + m + 31 * kind + k, k**-0.5)
                    for m in range(matrices)
                ]
                for i, (f, n) in enumerate(parts)
            ]
            combinations.append(tuple(tuple(w.tiled.fields for w in part) for part in made))
            for layer, (of, index) in enumerate(at):
                for m, place in enumerate(places):
                    if of == kind:
                        dense = [part[m].dense.reshape(count, -1, *part[m].dense.shape[1:]) for part in made]
                        each = np.concatenate([w[index].astype(np.float64) for w in dense], axis=-2)
                        layers[layer][place] = each if of_experts else each[0]
        weights.append(tuple(combinations))
        where.append(at)
        formats_of.append(tuple(tuple(f for f, _ in parts) for parts in kinds))
    router = draw(L, E, hidden) * hidden**-0.5 * 2 if E else None
    if rows == "twins":
        router[:, 1::2] = router[:, ::2]  # one of a pair is the last that is used: the lower index
    elif rows == "zeros":
        router *= 0
    norms = tuple(1 + 0.1 * draw(L, hidden) for _ in range(2))
    head_norms = tuple(1 + 0.1 * draw(L, D) for _ in range(2))
    width = (H + 2 * Hkv) * D
    bias = 0.3 * draw(L, width) if case in (CASES[0], CASES[4]) else None
    positions, tokens = np.atleast_1d(np.asarray(keys, np.int32)), 1
    if isinstance(keys, list):
        tokens = keys.count(keys[0])
        positions = positions + np.arange(len(keys), dtype=np.int32) % tokens
    R, count = len(positions), int(positions.max()) // PAGE_SIZE + 2
    table = rng.permutation(R // tokens * count).reshape(-1, count).astype(np.int32).repeat(tokens, axis=0)
    pages = tuple(pages_of("float16", draw(L, table.size, PAGE_SIZE, Hkv, D)) for _ in range(2))
    angle = np.float32(positions[:, None, None] * 10000.0 ** (-np.arange(D // 2) / (D // 2)))
    rotation = np.cos(angle), np.sin(angle)
    qkv, x = draw(R, width), draw(R, hidden)
    gpu = dataclasses.replace(device.GPUS["sm_90"], multiprocessors=blocks)
    with mock.patch.object(device, "default", lambda: gpu), lockstep():
        ffn_norm, attn_norm = norms
        inputs = StepInputs(
            attn_norm, ffn_norm, bias, head_norms, tuple(r[:, 0] for r in rotation), *pages, table, positions
        )
        settings = {"formats_of": tuple(formats_of), "eps": EPS, "interleaved": False, "bits": bits}
        settings["activation"] = activation_of(case)
        operands = qkv, x, tuple(weights), np.asarray(where, np.int32)
        if router is None:
            rounded = (bits == 8,) * 3  # what follows has groups of one size in each layer
            got = int_layers.int_layers(*operands, inputs, rounded=rounded, tokens=tokens, **settings)
        else:
            experts = experts_layers.Experts(E, used, normalized)
            settings |= {"experts": experts, "tokens": tokens}
            got = experts_layers.experts_layers(*operands, router, inputs, **settings)
    weights = layers, router, norms, head_norms, bias
    want = composed(case, qkv, x, *weights, pages, table, positions, rotation, tokens)
    limit = 2e-2 if bits == 8 else 3e-4
    for row, row_want, position in zip(got[0], want[0], positions, strict=True):
        assert position < 0 or np.linalg.norm(row - row_want) < limit * np.linalg.norm(row_want)
    for a, b in zip(got[1:], want[1], strict=True):
        np.testing.assert_allclose(numbers_of(a), numbers_of(b), atol=5e-3 if bits == 16 else 0.1)
