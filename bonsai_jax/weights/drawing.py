"""Random weights (`checkpoints.RandomTensor`) as a file would hold them."""

import functools
import math

import jax
import numpy as np

from bonsai_jax.weights.specs import Source
from checkpoints import Gathered, RandomTensor, Tensor
from pallas_kernels import formats

VECTOR, LEAST, MOST = 2**12, 2**16, 2**22  # weights


def read(t: Source) -> Tensor | Gathered:
    """A tensor with its blocks; those of a random one are drawn."""
    if not isinstance(t, RandomTensor):
        return t
    module = formats.get(t.format)
    count = math.prod(t.shape) // module.WEIGHTS
    with jax.ensure_compile_time_eval():  # within jax.eval_shape too
        fields = _fields(
            t.format, _rounded(count, module.WEIGHTS, len(t.shape)), np.uint32(t.seed), t.mean, t.std
        )
    blocks = np.empty(count, module.BLOCK)
    for name, field in fields.items():
        blocks[name] = np.asarray(field)[:count]
    return Tensor(t.name, t.format, t.shape, blocks.view(np.uint8).reshape(*t.shape[:-1], -1))


def _rounded(count: int, weights: int, axes: int) -> int:
    """How many blocks to draw: rounded up, so that matrices of many shapes share one program, and vectors
    another. A block depends on its position alone, not on how many follow it."""
    if count * weights > MOST:
        return count
    least = VECTOR if axes == 1 else LEAST
    return max(least // weights, 1 << (count - 1).bit_length())


@functools.partial(jax.jit, static_argnames=("format", "count"))
def _fields(format: str, count: int, seed, mean, std) -> dict[str, jax.Array]:
    return formats.random_fields(format, jax.random.key(seed), (count,), mean, std)
