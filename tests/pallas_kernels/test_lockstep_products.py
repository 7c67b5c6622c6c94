"""All products between two layers' attention in one launch, in numpy (lockstep): bit for bit those of
int_decode launched one by one, when what goes from block to block is rounded as on its way
(memory.tagged). Integers are not, but the sum of squares for the norm is."""

import dataclasses
from unittest import mock

import numpy as np
import pytest

from pallas_kernels import GELU_TANH, SILU, QTensor, Rotation, device
from pallas_kernels.matmul.bit_mma import decode as bit_decode
from pallas_kernels.matmul.bit_mma.decode_b1 import RowByRow
from pallas_kernels.matmul.int_mma import decode as int_decode
from pallas_kernels.matmul.int_mma import decode_plan as int_decode_plan
from pallas_kernels.qtensor import LayerStack, Products, Rows
from pallas_kernels.step import layer_products, layer_products_stacks
from tests.pallas_kernels.lockstep import lockstep
from tests.pallas_kernels.stacks import drawn

EPS = 1e-6
CASES = [
    # rows, hidden, ffn, width of q; formats of o, gate and up, down; parts of the next q, k, v; blocks, bits,
    # and of folded weights heads that are regrouped ahead of o
    (1, 512, 1024, 256, "q4_k", "q2_k", "q6_k", [("q4_k", 256), ("iq4_xs", 64)], 8, 8),  # all as integers
    (1, 512, 1024, 512, "q4_k", "q4_k", "q6_k", [("q4_k", 320), ("q6_k", 64)], 7, 8),
    (1, 512, 768, 256, "q2_k", "q2_k", "q2_k", [("q2_k", 256)], 5, 8),
    (2, 256, 512, 512, "q3_k", "iq4_xs", "q5_0", None, 40, 8),  # blocks without a tile, the last layer
    (1, 256, 4608, 256, "q8_0", "q4_k", "q3_k", [("q8_0", 64)], 33, 8),  # two steps of a warp
    (3, 512, 512, 256, "q6_k", "q2_k", "q4_k", [("q4_k", 96)], 4, 16),
    (1, 1024, 2304, 768, "pq2_0", "ptq1_0", "pq2_0", [("pq2_0", 320), ("q8_0", 64)], 7, 8, (3, 2)),
    (2, 512, 1024, 512, "pq2_0", "pq2_0", "ptq1_0", None, 5, 8, None),
    (1, 512, 1024, 256, "q1_0", "q1_0", "q1_0", [("q1_0", 320)], 7, 8),
    (1, 512, 768, 512, "q4_k", "q1_0", "q6_k", [("q1_0", 256), ("q8_0", 64)], 9, 8),
    (1, 576, 1536, 576, "q4_1", "q4_1", "q4_1", [("q4_1", 960)], 36, 8),  # SmolLM2
    (1, 320, 640, 96, "q5_0", "q4_1", "q8_0", [("q4_0", 64), ("iq4_nl", 32)], 5, 8),  # all as integers
    (2, 288, 1056, 544, "q8_0", "mxfp4", "q4_0", [("q5_1", 96)], 6, 16),
    (2, 384, 640, 128, "q1_0", "q1_0", "q1_0", [("q1_0", 192)], 4, 8),
]  # fmt: skip


def stack(parts, rotation, bits):
    """A layer's matrices, rows below rows, without weights."""
    products = Products(activation_bits=bits)
    pieces = tuple(QTensor({}, f, (n, k), products=products, rotation=rotation) for f, n, k in parts)
    return LayerStack(pieces if len(pieces) == 1 else (Rows(pieces),), ((0, 0),))


def sent_word(x):
    """float32 as a block passes it on (memory.tagged)."""
    return ((np.asarray(x, np.float32).view(np.int32) + 2) & ~3).view(np.float32)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_in_one_launch_are_those_of_launches(case):
    rows, hidden, ffn, width, o, gate_up, down, qkv, blocks, bits, *of_folded = case
    rng = np.random.default_rng(hidden + ffn)
    activation = SILU if case is CASES[0] else GELU_TANH
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
    rotations: list = [None] * len(weights)
    if of_folded:
        of_widths = ((width, of_folded[0]), (hidden, None), (ffn, None), (hidden, None))
        rotations = [
            Rotation.from_signs(rng.choice([-1, 1], columns), 256, heads)
            for columns, heads in of_widths[: len(weights)]
        ]
    attended, x = draw(rows, width), draw(rows, hidden)
    gpu = dataclasses.replace(device.GPUS["sm_90"], multiprocessors=blocks)
    words = layer_products.workspace_words(rows, hidden, ffn)
    parts = [*shapes, [(f, n, hidden) for f, n in qkv or [("q8_0", 64)]]]
    o_, gate_, down_, qkv_ = (
        stack(of, rotation, bits)
        for of, rotation in zip((parts[0], parts[1][:1], *parts[2:]), (*rotations, None), strict=False)
    )
    with mock.patch.object(device, "default", lambda: gpu), lockstep():
        phases = layer_products.phases_of(weights, formats, width, hidden, (bits,) * 4)
        planned = layer_products.plan(phases, rows, EPS, bool(of_folded))
        assert planned is not None
        integers = layer_products_stacks.rounded_vectors([o_], (gate_, gate_, down_), [qkv_])
        assert all(integers) == (case in (CASES[0], CASES[11]))
        got = layer_products.layer_products(
            attended, x, tuple(weights), tuple(norms), np.array([4], np.int32), np.zeros(words, np.int32),
            tuple(rotations), formats_of=tuple(formats), eps=EPS, bits=(bits,) * 4,
            rounded=integers,
            activation=activation,
        )  # fmt: skip

        warps = (planned.products[0].plan.warps,)

        @mock.patch.object(int_decode_plan, "BLOCK_WARPS", warps)
        def alone(number, x, residual=None):
            return np.asarray(
                int_decode.int_decode(
                    x,
                    tuple(weights[number]),
                    None,
                    formats_of=formats[number],
                    gamma=norms[number],
                    eps=EPS,
                    residual=residual,
                    rotation=rotations[number],
                    activation=activation,
                    activation_bits=bits,
                )
            )

        sent = [(lambda x: x) if as_integers else sent_word for as_integers in integers]
        x = alone(0, attended, x)
        x = alone(2, sent[1](alone(1, sent[0](x))), x)
        normed = integers[0] or integers[2]
        same = near if normed else np.testing.assert_array_equal
        same(got[0], x)
        if qkv:
            same(got[1], alone(3, sent[2](x)))


# rows, hidden, ffn, width of q; rows of the next q, k, v; blocks; bits, and those of what down reads
OF_1_BIT = [
    (1, 512, 1024, 256, 320, 7, 8, 8),
    (1, 256, 4608, 512, 96, 33, 8, 8),  # two steps of a warp
    (1, 256, 512, 768, None, 40, 8, 8),  # blocks without a tile, the last layer
    (2, 512, 1024, 512, 256, 8, 8, 8),
    (3, 512, 768, 256, 64, 5, 8, 8),  # of four columns one is nobody's
    (1, 512, 512, 256, 64, 6, 16, 16),
    (2, 512, 1024, 512, 256, 8, 8, 16),
    (2, 256, 4608, 512, None, 33, 8, 16),
]


@pytest.mark.parametrize("case", OF_1_BIT, ids=str)
def test_products_of_1_bit_are_those_of_their_own_launches(case):
    """Of bit_decode_b1, whose sums have another order, so that their last bits differ. A number that were
    rounded to its neighbour for that would be seen, as 1e-4; these inputs have none."""
    rows, hidden, ffn, width, qkv, blocks, bits, down_bits = case
    bits_of = (bits, bits, down_bits, bits)
    rng = np.random.default_rng(hidden + ffn + rows)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    shapes = [[(hidden, width)], [(ffn, hidden)] * 2, [(hidden, ffn)], [(qkv, hidden)]][: 4 if qkv else 3]
    weights = [
        tuple(drawn("q1_0", (1, *shape), seed=i + 10 * m).tiled.fields for m, shape in enumerate(matrices))
        for i, matrices in enumerate(shapes)
    ]
    norms = [None, 1 + 0.1 * draw(1, hidden), None, 1 + 0.1 * draw(1, hidden)][: len(weights)]
    attended, x = draw(rows, width), draw(rows, hidden)
    gpu = dataclasses.replace(device.GPUS["sm_90"], multiprocessors=blocks)
    words = np.zeros(layer_products.workspace_words(rows, hidden, ffn), np.int32)
    with mock.patch.object(device, "default", lambda: gpu), lockstep():
        got = layer_products.layer_products(
            attended, x, tuple((matrices,) for matrices in weights), tuple(norms), np.array([4], np.int32),
            words, formats_of=(("q1_0",),) * len(weights), eps=EPS, bits=bits_of,
        )  # fmt: skip

        def alone(number, x, residual=None):
            matrices = tuple((fields["words"], fields["scales"]) for fields in weights[number])
            return np.asarray(
                bit_decode.bit_decode(
                    x, matrices, np.zeros(2, np.int32), norms[number], residual, kernel=RowByRow,
                    n=16 * matrices[0][0].shape[1], eps=EPS, bits=bits_of[number],
                )
            )  # fmt: skip

        x = alone(0, attended, x)
        x = alone(2, sent_word(alone(1, sent_word(x))), x)
        near(got[0], x, 1e-5)
        if qkv:
            near(got[1], alone(3, sent_word(x)), 1e-5)


# rows, hidden, ffn, width of q; formats of o, gate and up, down; parts of the next q, k, v; blocks, bits, and
# whether norms come before products too, and layers' outputs are scaled
NORMED_AFTER = [
    (1, 512, 1024, 256, "q4_k", "q4_k", "q6_k", [("q4_k", 256), ("q6_k", 64)], 8, 8, True, True),
    (1, 512, 768, 512, "q2_k", "q2_k", "q2_k", None, 5, 8, True, True),  # the last layer
    (2, 512, 256, 256, "q4_k", "q4_k", "q4_k", [("q4_k", 768)], 40, 8, True, False),  # blocks without gate
    (1, 4352, 256, 256, "q2_k", "q4_k", "q2_k", [("q2_k", 64)], 40, 8, True, False),  # two steps of a warp
    (3, 512, 512, 256, "q6_k", "q3_k", "q5_0", [("q8_0", 96)], 4, 16, True, False),
    (1, 512, 512, 256, "q4_k", "iq4_xs", "q8_0", [("q4_k", 128)], 7, 8, False, False),
    (2, 256, 512, 512, "q3_k", "q4_k", "q4_k", None, 6, 8, False, False),
    (1, 512, 512, 256, "q1_0", "q1_0", "q1_0", [("q1_0", 64)], 5, 8, True, False),
    (1, 288, 352, 96, "q8_0", "q4_1", "q5_0", [("q8_0", 64)], 5, 8, True, True),  # no multiples of 256
    (2, 160, 192, 64, "q4_0", "q8_0", "q4_1", None, 4, 8, False, True),
]  # fmt: skip


@pytest.mark.parametrize("case", NORMED_AFTER, ids=str)
def test_a_norm_of_what_is_added_is_in_the_launch(case):
    """Against int_decode launched one by one, and norms and sums in float64. A sum may differ in its last
    bit, and then be rounded to the neighbouring code: with 16 bits some are, by 1 / 32639 of the largest."""
    rows, hidden, ffn, width, o, gate_up, down, qkv, blocks, bits, normed, scaled = case
    rng = np.random.default_rng(hidden + ffn)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    shapes = [[[(o, hidden, width)]], [[(gate_up, ffn, hidden)] * 2], [[(down, hidden, ffn)]]]
    shapes += [[[(f, n, hidden)] for f, n in qkv]] if qkv else []
    weights = tuple(
        tuple(
            tuple(
                drawn(f, (1, n, k), seed=i + 10 * m + n).tiled.fields for m, (f, n, k) in enumerate(matrices)
            )
            for matrices in parts
        )
        for i, parts in enumerate(shapes)
    )
    formats = tuple(tuple(matrices[0][0] for matrices in parts) for parts in shapes)
    gammas = [1 + 0.1 * draw(1, hidden) if normed and number % 2 else None for number in range(len(weights))]
    after = tuple(0.1 + np.abs(draw(1, hidden)) for _ in range(2))
    scale = np.full((1, 1), 0.75, np.float32) if scaled else None
    attended, x = draw(rows, width), draw(rows, hidden)
    gpu = dataclasses.replace(device.GPUS["sm_90"], multiprocessors=blocks)
    words = layer_products.workspace_words(rows, hidden, ffn)
    with mock.patch.object(device, "default", lambda: gpu), lockstep():
        phases = layer_products.phases_of(weights, formats, width, hidden, (bits,) * 4)
        planned = layer_products.plan(phases, rows, EPS, post_norms=True)
        assert planned is not None
        got = layer_products.layer_products(
            attended, x, weights, tuple(gammas), np.array([4], np.int32), np.zeros(words, np.int32), None,
            after, scale, formats_of=formats, eps=EPS, bits=(bits,) * 4, activation=GELU_TANH,
        )  # fmt: skip

        @mock.patch.object(int_decode_plan, "BLOCK_WARPS", (planned.products[0].plan.warps,))
        def alone(number, x):
            y = int_decode.int_decode(
                x, weights[number], None, formats_of=formats[number], gamma=gammas[number], eps=EPS,
                activation=GELU_TANH, activation_bits=bits,
            )  # fmt: skip
            return sent_word(y)

        def summed(x, y, gamma):
            y = np.asarray(y, np.float64)
            return (x + gamma * y / np.sqrt(np.mean(y**2, -1, keepdims=True) + EPS)).astype(np.float32)

        x = summed(x, alone(0, attended), after[0])
        x = summed(x, alone(2, alone(1, x)), after[1]) * (0.75 if scaled else 1)
        near(got[0], x, 1e-6 if bits == 8 else 1e-5)
        if qkv:
            near(sent_word(got[1]), alone(3, got[0]))


def near(got, want, limit=1e-6):
    assert np.linalg.norm(got - want) < limit * np.linalg.norm(want)


def test_a_vector_is_passed_on_alike_in_all_layers():
    """A tag tells a layer from the two before only, so the words of one lie where those of the others do."""
    attention, delta, apart = (
        stack([(format, 256, 512) for format in of], None, 8) for of in (["q4_k"], ["q2_k"], ["q4_k", "q6_k"])
    )
    gpu = dataclasses.replace(device.GPUS["sm_90"], multiprocessors=8)
    with mock.patch.object(device, "default", lambda: gpu):

        def of_kinds(outputs, inputs):
            return layer_products_stacks.rounded_vectors(outputs, (attention,) * 3, inputs)

        assert of_kinds([attention, delta], [delta, attention]) == (True, True, True)
        assert of_kinds([attention, apart], [delta, attention]) == (False, True, True)
        assert of_kinds([attention, delta], [delta, apart]) == (True, True, False)
        of_1_bit = stack([("q1_0", 256, 512)], None, 8)
        assert of_kinds([attention, of_1_bit], [delta, of_1_bit]) == (True, True, False)
