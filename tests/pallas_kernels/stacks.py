"""Random quantized matrices for tests, drawn, tiled and dequantized by one program, and pages of a cache.
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


def drawn(format: str, shape: tuple[int, ...], seed: int = 0, std: float = 0.05) -> Drawn:
    """Weights of mean 0 and this standard deviation; shape [*lead, N, K]."""
    return jax.device_get(_drawn(format, shape, seed, std))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _drawn(format, shape, seed, std):
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
