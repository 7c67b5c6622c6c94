"""Random quantized matrices for tests, drawn, tiled and dequantized by few programs, and pages of a cache.
Outside of jit, jax would compile each of their operations alone."""

import functools
from typing import NamedTuple

import jax
import numpy as np

from pallas_kernels import QTensor, cache_layouts, dequantize, formats
from pallas_kernels.qtensor import tile


class Drawn(NamedTuple):
    """A matrix, or a stack of them, in three forms. Their arrays are numpy's."""

    blocks: QTensor
    tiled: QTensor
    dense: np.ndarray  # float32 [*lead, N, K], as the reference dequantizes the blocks


TILES = 64  # different ones in a matrix


def drawn(format: str, shape: tuple[int, ...], seed: int = 0, std: float = 0.05) -> Drawn:
    """Weights of mean 0 and this standard deviation; shape [*lead, N, K]. Laid of random tiles of 16 rows and
    256 columns, and of narrower ones at the edges: one program draws a format's matrices of many sizes."""
    *lead, N, K = shape
    rng = np.random.default_rng(seed)
    bands = [
        [
            _laid(_tiles(format, (n, k), seed, std), rng.integers(TILES, size=(*lead, down, across)))
            for k, across in ((256, K // 256), (K % 256, 1))
            if k * across
        ]
        for n, down in ((16, N // 16), (N % 16, 1))
        if n * down
    ]
    joined = lambda parts, axis: jax.tree.map(lambda *of: np.concatenate(of, axis), *parts)  # noqa: E731
    blocks, tiled, dense = joined([joined(band, len(lead) + 1) for band in bands], len(lead))
    return Drawn(QTensor(blocks, format, (N, K)), QTensor(tiled, format, (N, K), tiled=True), dense)


def _tiles(format, shape, seed, std):
    """Fields of blocks, fields of tiles, and weights, of matrices of one tile."""
    blocks, tiled, dense = jax.device_get(drawn_whole(format, (TILES, *shape), seed, std))
    return blocks.fields, tiled.fields, dense


def _laid(tiles, chosen: np.ndarray):
    """Matrices [*lead, down, across] of tiles: blocks, tiles and weights alike."""
    *lead, down, across = chosen.shape

    def lay(x):  # [TILES, rows, columns, ...]
        rows = np.swapaxes(x[chosen], len(lead) + 1, len(lead) + 2)
        return rows.reshape(*lead, down * x.shape[1], across * x.shape[2], *x.shape[3:])

    return jax.tree.map(lay, tiles)


@functools.partial(jax.jit, static_argnums=(0, 1))
def drawn_whole(format, shape, seed=0, std=0.05) -> Drawn:
    """As `drawn`, but tiled as a whole, by a program of its own. Arrays are jax's."""
    *lead, N, K = shape
    blocks = (*lead, N, K // formats.get(format).WEIGHTS)
    w = QTensor(formats.random_fields(format, jax.random.key(seed), blocks, 0.0, std), format, (N, K))
    return Drawn(w, tile(w), dequantize(w))


@functools.partial(jax.jit, static_argnums=0)
def pages_of(layout: str, x):
    """Keys or values as a cache of that layout stores them."""
    return cache_layouts.write(cache_layouts.empty(layout, x.shape), x, ())


@jax.jit
def numbers_of(pages):
    """What is stored in all pages, float32."""
    return cache_layouts.read(pages, ())


def sylvester(size: int) -> np.ndarray:
    """The normalized Walsh-Hadamard matrix, by Sylvester's construction: [[H, H], [H, -H]]."""
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(size)
