"""The integer kernel in numpy (lockstep.py) against float64: what a GPU's run of tests/gpu/test_gpu_int.py
checks, on any machine."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import SILU, QTensor, Rotation, dequantize, formats
from pallas_kernels.matmul import activations_rotated
from pallas_kernels.matmul.activations_rotated import REALS
from pallas_kernels.matmul.int_mma import decode as int_decode
from pallas_kernels.matmul.int_mma.activations_shared import ROTATED_WORDS
from pallas_kernels.qtensor import Products, tile
from tests.pallas_kernels.lockstep import lockstep
from tests.pallas_kernels.stacks import drawn, sylvester

INTEGER = formats.names("int")
WHOLE = [format for format in INTEGER if formats.get(format).LANES.whole_scales]

CASES = [
    *(([(format, 48)], 512, 1, "normed", 8) for format in INTEGER),
    *(([(format, 32)], 1024, 8, "added", 8) for format in INTEGER),
    ([("q4_k", 32)], 768, 3, "gated", 16),
    ([("q6_k", 32)], 512, 2, "gated", 8),
    ([("q8_0", 16)], 4352, 1, "normed", 8),
    ([("q4_k", 2144)], 256, 1, "normed", 8),  # 134 tiles: blocks of two
    ([("q5_k", 16)], 512, 11, "added", 8),
    ([("q6_k", 16)], 512, 4, "plain", 16),
    ([("pq2_0", 32)], 640, 2, "gated", 8),  # half a tile of columns
    ([("q2_0_g64", 16)], 4288, 4, "normed", 16),
    ([("tq1_0", 16)], 768, 16, "added", 8),
    ([("ptq1_0", 32)], 384, 1, "gated", 16),
    ([("q4_k", 64), ("q6_k", 32), ("q4_1", 16)], 512, 1, "normed", 8),
    ([("tq2_0", 32), ("q4_k", 16)], 512, 3, "normed", 8),
    ([("q4_k", 32), ("q6_k", 16)], 512, 6, "normed", 8),
    *(([(format, 16)], 512, rows, "normed", 16) for format in WHOLE for rows in (1, 2, 4, 8)),
    ([("q2_k", 32), ("q3_k", 16)], 512, 16, "gated", 8),
    ([("q2_k", 16), ("q3_k", 16)], 4352, 1, "normed", 8),  # two steps of a warp
    ([("q4_k", 32)], 4096, 2, "gated", 8),  # 16 warps
    *(
        ([("q4_k", 16), ("q6_k", n)], 512, rows, "added", 8) for n, rows in ((40, 2), (17, 1))
    ),  # not whole tiles
]


# Eight rows of formats whose lanes decode as another's do.
SLOW = [
    ([(format, 32)], 1024, 8, "added", 8)
    for format in set(INTEGER) - set({formats.get(format).LANES: format for format in INTEGER}.values())
]


# Each format and each kind both with an index and without.
@pytest.mark.parametrize(
    ("parts", "K", "rows", "kind", "bits", "index"),
    [
        pytest.param(
            *case,
            (None, 1)[(i % len(INTEGER) + i // len(INTEGER)) % 2],
            marks=pytest.mark.slow if case in SLOW else [],
        )
        for i, case in enumerate(CASES)
    ],
)
def test_the_kernel_in_lockstep_is_the_product(parts, K, rows, kind, bits, index):
    rng = np.random.default_rng(K + rows)
    top = 127 if bits == 8 else 127 * 257
    x = rng.integers(
        -top, top + 1, (rows, K // 16, 16)
    )  # exact for groups of 16, and of 32 that share a scale
    x[..., 5] = top
    x = (x * 2.0 ** np.repeat(rng.integers(-12, -8, (rows, K // 32, 1)), 2, axis=1)).reshape(rows, K)
    x, normed = x.astype(np.float32), kind in ("normed", "gated")
    gamma = np.repeat(2.0 ** rng.integers(-1, 2, (2, K // 32)), 32, axis=1).astype(np.float32)
    N, layer = sum(n for _, n in parts), index or 0
    residual = rng.standard_normal((rows, N)).astype(np.float32)
    seeds = range(1 + (kind == "gated"))
    stacks = [[drawn(f, (2, n, K), 7 * i + m) for m in seeds] for i, (f, n) in enumerate(parts)]
    codes, norm = (x * gamma[layer] if normed else x).astype(np.float64), 1.0
    if normed:
        norm = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
    matrices = [
        np.concatenate([w.dense[layer] for w in m], dtype=np.float64) for m in zip(*stacks, strict=True)
    ]
    want = [norm * codes @ w.T for w in matrices]
    want = want[0] / (1 + np.exp(-want[0])) * want[1] if kind == "gated" else want[0]
    want = want + residual if kind == "added" else want
    fields = tuple(tuple(w.tiled.fields for w in of) for of in stacks)
    if index is None:
        fields = tuple(tuple({k: v[:1] for k, v in w.items()} for w in of) for of in fields)
    with lockstep(at_a_time=8):
        got = int_decode.int_decode(
            x, fields, None if index is None else np.array([index, index], np.int32),
            formats_of=tuple(f for f, _ in parts), gamma=gamma if normed else None, eps=1e-6,
            residual=np.pad(residual, ((0, 0), (0, -N % 16))) if kind == "added" else None, n=N,
            activation_bits=bits,
        )  # fmt: skip
    assert got.shape == want.shape and np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)


# By blocks, each for itself; by a launch that also rounds; by one that does not.
@pytest.mark.parametrize(
    ("K", "rows", "heads", "kind", "bits", "by", "format"),
    [(5120, 1, None, "gated", 8, "blocks", "ptq1_0"), (6144, 2, (3, 16), "added", 8, "blocks", "ptq1_0"),
     (17408, 1, None, "added", 8, "blocks", "ptq1_0"), (5120, 3, None, "normed", 16, "blocks", "ptq1_0"),
     (768, 2, None, "normed", 8, "blocks", "ptq1_0"), (5120, 8, None, "gated", 8, "words", "ptq1_0"),
     (6144, 7, (3, 16), "added", 8, "words", "ptq1_0"), (17408, 2, None, "added", 8, "words", "ptq1_0"),
     (384, 3, None, "normed", 8, "words", "ptq1_0"), (2304, 16, None, "normed", 8, "words", "ptq1_0"),
     (17408, 9, None, "added", 8, "words", "ptq1_0"),  # two products, of 8 rows and of one
     (5120, 8, None, "normed", 16, "rows", "ptq1_0"), (512, 3, None, "gated", 8, "rows", "q6_k")],
)  # fmt: skip
def test_the_kernel_in_lockstep_rotates_its_inputs(K, rows, heads, kind, bits, by, format):
    """Inputs whose rotation is whole numbers times a group's scale, but for the rounding of both ways."""
    rng, top = np.random.default_rng(K + rows), 127 if bits == 8 else 127 * 257
    n = rng.integers(-top, top + 1, (rows, K // 32, 32))
    n[..., (5, 21)] = top  # of groups of 16 too
    n = (n * 2.0 ** rng.integers(-10, -8, (rows, K // 32, 1))).reshape(rows, K)
    signs, normed = rng.choice([-1.0, 1.0], K).astype(np.float32), kind in ("normed", "gated")
    gamma = 2.0 ** rng.integers(-1, 2, (2, K)).astype(np.float32)
    block = next(size for size in (1024, 256, 128) if K % size == 0)
    x = signs * (n.reshape(rows, -1, block) @ sylvester(block)).reshape(rows, K)
    if heads:
        x = x.reshape(rows, *heads[::-1], -1).swapaxes(1, 2).reshape(rows, K)
    x = np.float32(x / gamma[1] if normed else x)
    norm = 1 / np.sqrt((np.float64(x) ** 2).mean(-1, keepdims=True) + 1e-6) if normed else 1.0
    weights = [drawn(format, (2, 32, K), seed) for seed in range(1 + (kind == "gated"))]
    want = [norm * n @ np.float64(w.dense[1]).T for w in weights]
    want = want[0] / (1 + np.exp(-want[0])) * want[1] if kind == "gated" else want[0]
    residual = rng.standard_normal((rows, 32)).astype(np.float32) if kind == "added" else None
    how = {"rotation": Rotation.from_signs(signs, block, heads), "products": Products(activation_bits=bits)}
    launches = mock.Mock(side_effect=activations_rotated.activations_rotated.__wrapped__)
    with lockstep(), mock.patch.object(activations_rotated, "activations_rotated", launches):
        weights = tuple(w.tiled.replace(**how) for w in weights)
        results = [  # of a layer whose number is known, and of one whose number is not
            int_decode.run(x, weights, layer, layer, gamma if normed else None, 1e-6, residual, SILU)
            for layer in (1, np.int32(1))
        ]
    forms = [call.kwargs.get("form", REALS) for call in launches.call_args_list]
    assert forms == {"blocks": [], "words": [ROTATED_WORDS] * 2, "rows": [REALS] * 2}[by]
    want = want if residual is None else want + residual
    for got in results:
        assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("format", WHOLE)
def test_the_largest_whole_numbers_are_exact(format, rows, bits):
    """All bits of codes and scales 0, or all 1, and the largest activations: sums of 16 and 32 bits hold
    them."""
    K, module = 256, formats.get(format)
    blocks = {
        name: np.ones((16, 1), dtype) if dtype.kind == "f" else np.zeros((16, 1, *dtype.shape), dtype.base)
        for name, (dtype, *_) in module.BLOCK.fields.items()
    }
    for value in blocks.values():
        if value.dtype.kind != "f":
            value[8:] = np.array(255, np.uint8).view(value.dtype)
    w = QTensor({name: jnp.asarray(value) for name, value in blocks.items()}, format, (16, K))
    x = np.full((rows, K), 127 if bits == 8 else 127 * 257, np.float32)
    want = x.astype(np.float64) @ np.asarray(dequantize(w), np.float64).T
    fields = {name: value[None] for name, value in jax.device_get(tile(w).fields).items()}
    with lockstep():
        got = int_decode.int_decode(x, ((fields,),), None, formats_of=(format,), activation_bits=bits)
    np.testing.assert_allclose(got, want, rtol=1e-6)
