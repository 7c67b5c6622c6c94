"""Random weights (`checkpoints.RandomTensor`) as a file would have them."""

import dataclasses
import functools
import math

import jax
import numpy as np

from checkpoints import RandomTensor
from pallas_kernels import formats

VECTOR, LEAST, MOST = 2**12, 2**16, 2**22  # weights


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A random tensor with the attributes of a file's tensor (checkpoints.Tensor). Each access to `data`
    draws its blocks."""

    random: RandomTensor

    @property
    def name(self) -> str:
        return self.random.name

    @property
    def format(self) -> str:
        return self.random.format

    @property
    def shape(self) -> tuple[int, ...]:
        return self.random.shape

    @property
    def nbytes(self) -> int:
        return self.random.nbytes

    @property
    def moments(self) -> tuple[np.uint32, np.float32, np.float32]:
        """Seed, mean and standard deviation: all that a device needs to draw it."""
        return np.uint32(self.random.seed), np.float32(self.random.mean), np.float32(self.random.std)

    @property
    def data(self) -> np.ndarray:
        """uint8 [*shape[:-1], bytes of a row]"""
        module = formats.get(self.format)
        count = math.prod(self.shape) // module.WEIGHTS
        drawn = _rounded(count, module.WEIGHTS, len(self.shape))
        with jax.ensure_compile_time_eval():  # within jax.eval_shape too
            fields = _fields(
                self.format, drawn, np.uint32(self.random.seed), self.random.mean, self.random.std
            )
        blocks = np.empty(count, module.BLOCK)
        for name, field in fields.items():
            blocks[name] = np.asarray(field)[:count]
        return blocks.view(np.uint8).reshape(*self.shape[:-1], -1)

    def forget(self) -> None:
        """Nothing: no file has it."""


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
