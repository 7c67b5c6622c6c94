"""A layer with experts in one launch, in numpy (lockstep): against float64, and attention's definition."""

import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest

from pallas_kernels import attend, device
from pallas_kernels.attention import empty_workspace
from pallas_kernels.step import experts_layer
from tests.pallas_kernels.lockstep import lockstep
from tests.pallas_kernels.stacks import drawn, numbers_of, pages_of

attend_jit = jax.jit(attend, static_argnames=("interleaved", "eps"))
EPS, D, PAGE_SIZE, LAYERS = 1e-6, 64, 16, 3

CASES = [
    # hidden, heads, KV heads, experts, used, ffn, normalized; formats of o, gate and up, down; parts of next
    # q, k, v; blocks, keys before, bits; rows of the router: all random, each twice, or all zeros
    (512, 8, 2, 8, 2, 256, True, "q4_k", "q4_k", "q6_k", [("q4_k", 640), ("q6_k", 128)], 6, 5, 16, "random"),
    (256, 4, 2, 70, 4, 512, False, "q8_0", "q4_k", "q4_k", [("q4_k", 512)], 40, 300, 16, "random"),
    (512, 4, 4, 40, 3, 256, True, "q6_k", "q5_0", "q8_0", None, 7, 17, 16, "twins"),
    (512, 8, 2, 16, 4, 768, True, "q4_k", "q4_k", "q6_k", [("q4_k", 768)], 33, 40, 8, "zeros"),
]


def expected(case, inputs):
    """float64; (x, next q, k and v, chosen, keys, values)."""
    used, normalized = case[4], case[6]
    qkv, x, dense, router, norms, head_norms, pages, table, positions, rotation, layer = inputs
    out, k_pages, v_pages, _ = attend_jit(
        qkv[:, None], *pages, table, positions[:, None], layer, rotation=rotation, eps=EPS,
        interleaved=False, norms=head_norms, num_keys=int(positions.max()) + 1,
    )  # fmt: skip
    o, (gate, up), down, following = dense
    x = x.astype(np.float64) + np.asarray(out, np.float64)[:, 0] @ o.T
    norm = lambda x, gamma: gamma * x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)  # noqa: E731
    n = norm(x, norms[0])
    logits = (n @ router[layer].astype(np.float64).T)[0]
    p = np.exp(logits - logits.max())
    p /= p.sum()
    chosen = np.argsort(-p, kind="stable")[:used]
    w = p[chosen] / (p[chosen].sum() if normalized else 1)
    for e, weight in zip(chosen, w, strict=True):
        g, u = gate[e] @ n[0], up[e] @ n[0]
        x = x + weight * (down[e] @ (g / (1 + np.exp(-g)) * u))
    qkv = None if following is None else norm(x, norms[1]) @ following.T
    return x, qkv, k_pages, v_pages


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_in_one_launch_is_float64_s(case):
    hidden, H, Hkv, E, used, ffn, normalized, *formats, next_parts, blocks, keys, bits, rows = case
    rng = np.random.default_rng(hidden + blocks)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    made = [drawn(formats[0], (1, hidden, H * D), 0, (H * D) ** -0.5)]
    made += [drawn(formats[1], (E, ffn, hidden), seed, hidden**-0.5) for seed in (1, 2)]
    made += [drawn(formats[2], (E, hidden, ffn), 3, ffn**-0.5)]
    following = [drawn(f, (1, n, hidden), 4 + i) for i, (f, n) in enumerate(next_parts or [])]
    o, gate, up, down = (w.tiled.fields for w in made)
    weights = [((o,),), ((gate, up),), ((down,),)]
    formats_of = [(f,) for f in formats]
    if next_parts:
        weights.append(tuple((w.tiled.fields,) for w in following))
        formats_of.append(tuple(f for f, _ in next_parts))
    dense = [np.asarray(w.dense, np.float64) for w in (*made, *following)]
    dense = (
        dense[0][0], dense[1:3], dense[3], np.concatenate([w[0] for w in dense[4:]]) if next_parts else None,
    )  # fmt: skip
    router = draw(LAYERS, E, hidden) * hidden**-0.5 * 2
    if rows == "twins":
        router[:, 1::2] = router[:, ::2]  # one of a pair is the last that is used: the lower index
    router *= rows != "zeros"
    norms = (1 + 0.1 * draw(1, hidden), 1 + 0.1 * draw(1, hidden) if next_parts else None)
    head_norms = tuple(1 + 0.1 * draw(LAYERS, D) for _ in range(2))
    count = keys // PAGE_SIZE + 2
    table = rng.permutation(count).reshape(1, count).astype(np.int32)
    pages = tuple(pages_of("float16", draw(LAYERS, count, PAGE_SIZE, Hkv, D)) for _ in range(2))
    positions, layer = np.asarray([keys], np.int32), 1
    angle = np.float32(positions[:, None, None] * 10000.0 ** (-np.arange(D // 2) / (D // 2)))
    rotation = np.cos(angle), np.sin(angle)
    qkv, x = draw(1, (H + 2 * Hkv) * D), draw(1, hidden)
    experts = experts_layer.Experts(E, used, normalized)
    gpu = dataclasses.replace(device.GPUS["sm_90"], multiprocessors=blocks)
    with mock.patch.object(device, "default", lambda: gpu):
        words = experts_layer.workspace_words(hidden, H * D, ffn, experts)
        words += empty_workspace(1, H, pages[0]).size
        with lockstep():
            got = experts_layer.experts_layer(
                qkv, x, tuple(weights), router[layer], norms, head_norms, *pages, table, positions,
                tuple(r[:, 0] for r in rotation), np.array([layer], np.int32), np.zeros(words, np.int32),
                formats_of=tuple(formats_of), experts=experts, eps=EPS, interleaved=False, bits=bits,
            )  # fmt: skip
    inputs = qkv, x, dense, router, norms, head_norms, pages, table, positions, rotation, layer
    want = expected(case, inputs)
    limit = 2e-2 if bits == 8 else 2e-4
    for a, b in zip(got[:2], want[:2], strict=True):
        if b is not None:
            a = np.asarray(a)[:, : b.shape[1]]
            assert np.linalg.norm(a - b) < limit * np.linalg.norm(b)
    for a, b in zip(got[2:4], want[2:4], strict=True):
        np.testing.assert_allclose(numbers_of(a), numbers_of(b), atol=2e-3)
