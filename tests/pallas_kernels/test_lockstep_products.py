"""All products between two layers' attention in one launch, in numpy (lockstep): bit for bit those of
kq_decode launched one by one, when what goes from block to block is rounded as on its way
(memory.store_tagged). Integers are not, but the sum of squares for the norm is."""

import dataclasses
from unittest import mock

import numpy as np
import pytest

from pallas_kernels import QTensor, device
from pallas_kernels.matmul import kq_decode
from pallas_kernels.qtensor import LayerStack, Rows
from pallas_kernels.step import layer_products
from tests.pallas_kernels.lockstep import lockstep
from tests.pallas_kernels.stacks import drawn

EPS = 1e-6
CASES = [
    # rows, hidden, ffn, width of q; formats of o, gate and up, down; parts of the next q, k, v; blocks, bits
    (1, 512, 1024, 256, "q4_k", "q2_k", "q6_k", [("q4_k", 256), ("iq4_xs", 64)], 8, 8),  # all as integers
    (1, 512, 1024, 512, "q4_k", "q4_k", "q6_k", [("q4_k", 320), ("q6_k", 64)], 7, 8),
    (1, 512, 768, 256, "q2_k", "q2_k", "q2_k", [("q2_k", 256)], 5, 8),
    (2, 256, 512, 512, "q3_k", "iq4_xs", "q5_0", None, 40, 8),  # blocks without a tile, the last layer
    (1, 256, 4608, 256, "q8_0", "q4_k", "q3_k", [("q8_0", 64)], 33, 8),  # two steps of a warp
    (3, 512, 512, 256, "q6_k", "q2_k", "q4_k", [("q4_k", 96)], 4, 16),
]  # fmt: skip


def stack(*parts):
    """A layer's matrices, rows below rows, without weights."""
    pieces = tuple(QTensor({}, format, (n, k)) for format, n, k in parts)
    return LayerStack(pieces if len(pieces) == 1 else (Rows(pieces),), ((0, 0),))


def rounded(x):
    return ((np.asarray(x, np.float32).view(np.int32) + 2) & ~3).view(np.float32)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_in_one_launch_are_those_of_launches(case):
    rows, hidden, ffn, width, o, gate_up, down, qkv, blocks, bits = case
    rng = np.random.default_rng(hidden + ffn)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    shapes = [[(o, hidden, width)], [(gate_up, ffn, hidden)] * 2, [(down, hidden, ffn)]]
    made = [
        tuple(drawn(f, (1, n, k), seed=i + 10 * m).tiled.fields for m, (f, n, k) in enumerate(of))
        for i, of in enumerate(shapes)
    ]
    weights: list[tuple] = [(of,) for of in made]
    formats: list[tuple[str, ...]] = [(o,), (gate_up,), (down,)]
    if qkv:
        weights.append(tuple((drawn(f, (1, n, hidden), seed=n).tiled.fields,) for f, n in qkv))
        formats.append(tuple(f for f, _ in qkv))
    norms = [None, 1 + 0.1 * draw(1, hidden), None, 1 + 0.1 * draw(1, hidden)][: len(weights)]
    attended, x = draw(rows, width), draw(rows, hidden)
    gpu = dataclasses.replace(device.GPUS["sm_90"], multiprocessors=blocks)
    words = layer_products.workspace_words(rows, hidden, ffn)
    parts = [*shapes, [(f, n, hidden) for f, n in qkv or [("q8_0", 64)]]]
    makers = [stack(parts[0][0]), stack(parts[1][0]), stack(parts[2][0])]
    users = [[stack(of) for of in parts[1]], [stack(*parts[2])], [stack(*parts[3])]]
    with mock.patch.object(device, "default", lambda: gpu), lockstep():
        phases = [layer_products.Phase(parts, of) for parts, of in zip(weights, formats, strict=True)]
        planned = layer_products.plan(phases, rows, bits, EPS)
        assert planned is not None
        integers = tuple(
            layer_products._is_rounded(maker, of, bits, rows) for maker, of in zip(makers, users, strict=True)
        )
        assert all(integers) == (case is CASES[0])
        got = layer_products.layer_products(
            attended, x, tuple(weights), tuple(norms), np.array([4], np.int32), np.zeros(words, np.int32),
            formats_of=tuple(formats), eps=EPS, bits=bits, rounded=integers,
        )  # fmt: skip

        def alone(number, x, residual=None):
            return np.asarray(
                kq_decode.kq_decode(
                    x,
                    tuple(weights[number]),
                    None,
                    formats_of=formats[number],
                    gamma=norms[number],
                    eps=EPS,
                    residual=residual,
                    activation_bits=bits,
                    shared=227 * 1024,
                    blocks=blocks,
                    warps=planned.products[0].plan.warps,
                )
            )

        sent = [(lambda x: x) if as_integers else rounded for as_integers in integers]
        x = alone(0, attended, x)
        x = alone(2, sent[1](alone(1, sent[0](x))), x)
        normed = integers[0] or integers[2]
        same = near if normed else np.testing.assert_array_equal
        same(got[0], x)
        if qkv:
            same(got[1], alone(3, sent[2](x)))


def near(got, want):
    assert np.linalg.norm(got - want) < 1e-6 * np.linalg.norm(want)
