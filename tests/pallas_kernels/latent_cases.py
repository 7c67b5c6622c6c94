"""Problems of latent attention, and their answers in float64: numpy alone, as GPU machines have it."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels import cache_layouts
from pallas_kernels.qtensor import LayerStack, quantize
from tests.pallas_kernels.naive_attention import naive_attention

LAYERS, EPS = 2, 1e-6


@dataclasses.dataclass(frozen=True)
class Case:
    """arguments  of `attend_latent`, for the last layer
    keywords   of it
    expected   float64 [B, T, H, V]
    rows       float64 [B, T, C + R]: what is stored of the new tokens
    """

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    expected: np.ndarray
    rows: np.ndarray

    @property
    def pages(self):
        return self.arguments[4]

    @property
    def is_real(self) -> np.ndarray:
        return np.asarray(self.arguments[6]) >= 0

    def stored(self, pages) -> np.ndarray:
        """What `pages` have at the places of the new tokens, as many as are real."""
        layout, table, positions = cache_layouts.recognize(pages), *map(np.asarray, self.arguments[5:7])
        numbers, size = np.asarray(layout.rotate(cache_layouts.read(pages, ()))), self.page_size
        row, token = np.nonzero(positions >= 0)
        at = positions[row, token]
        return numbers[LAYERS - 1, table[row, at // size], at % size, 0]

    @property
    def page_size(self) -> int:
        return cache_layouts.shape(self.pages)[2]


def dense(w: np.ndarray) -> LayerStack:
    """A stack of all layers' matrices in float32, which no kernel rounds."""
    return LayerStack((quantize(jnp.asarray(w), "f32"),), ((0, 0), (0, 1)))


def latent_case(
    positions, *, heads=3, rank=64, nope=32, rope=16, value=24, page_size=8, pages=3, dtype="float32",
    interleaved=True, beside=5, size=1.0, stack=dense, seed=3,
) -> Case:  # fmt: skip
    """Of rows at these positions [B, T], -1 for padding, behind as many tokens as the first is after.

    beside  numbers of the latents before c
    size    of queries; scores are as ever
    stack   float32 [layers, heads, N, K] -> weights
    """
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    positions = np.asarray(positions)
    B, T = positions.shape
    q, latents = draw(B, T, heads, nope + rope), draw(B, T, beside + rank + rope)
    k_b, v_b = draw(LAYERS, heads, rank, nope) / rank**0.5, draw(LAYERS, heads, value, rank) / rank**0.5
    gamma, table = 1 + 0.1 * draw(LAYERS, rank), rng.permutation(B * pages).reshape(B, pages)
    layout = cache_layouts.get(dtype)
    stored = layout.quantize(layout.rotate(jnp.asarray(draw(LAYERS, B * pages, page_size, 1, rank + rope))))
    before = np.float64(layout.rotate(cache_layouts.read(stored, ())))[-1, :, :, 0]
    angles = np.maximum(positions, 0)[..., None] * 100.0 ** (-np.arange(rope // 2) / (rope // 2))
    cos, sin = np.cos(angles), np.sin(angles)

    def turned(x: np.ndarray) -> np.ndarray:  # [B, T, heads, rope]
        pairs = x.reshape(*x.shape[:-1], -1, 2) if interleaved else x.reshape(*x.shape[:-1], 2, -1)
        a, b = np.moveaxis(pairs, -1 if interleaved else -2, 0)
        m, n = cos[:, :, None], sin[:, :, None]
        return np.stack([a * m - b * n, b * m + a * n], -1 if interleaved else -2).reshape(x.shape)

    q64, new = np.float64(q), np.float64(latents[..., beside:])
    c = new[..., :rank] / np.sqrt((new[..., :rank] ** 2).mean(-1, keepdims=True) + EPS) * gamma[-1]
    rows = np.concatenate([c, turned(new[..., None, rank:])[..., 0, :]], -1)
    queries = np.concatenate([q64[..., :nope], turned(q64[..., nope:])], -1)
    scale, expected = 0.2, np.zeros((B, T, heads, value))
    for b in range(B):
        known = before[table[b]].reshape(-1, rank + rope).copy()
        for t in np.flatnonzero(positions[b] >= 0):
            known[positions[b, t]] = rows[b, t]
        keys = np.einsum("hcn,sc->shn", np.float64(k_b[-1]), known[:, :rank])
        shared = np.broadcast_to(known[:, None, rank:], (len(known), heads, rope))
        values = np.einsum("hvc,sc->shv", np.float64(v_b[-1]), known[:, :rank])
        keys = np.concatenate([keys, shared], -1)
        expected[b] = naive_attention(queries[b], keys, values, positions[b], scale=scale)
    arguments = (
        jnp.asarray(q * np.float32(size)), jnp.asarray(latents), stack(k_b), stack(v_b), stored,
        jnp.asarray(table, jnp.int32), jnp.asarray(positions, jnp.int32), LAYERS - 1,
    )  # fmt: skip
    keywords = {
        "rotation": (jnp.asarray(cos, jnp.float32), jnp.asarray(sin, jnp.float32)), "eps": EPS,
        "interleaved": interleaved, "norm": jnp.asarray(gamma), "scale": scale / size,
        "num_keys": pages * page_size,
    }  # fmt: skip
    return Case(arguments, keywords, expected, rows)
