"""The rotation of inputs that folded weights need, and its inverse (checkpoints/folding.py)."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from pallas_kernels.pytree import serializable


@serializable
class Rotation(struct.PyTreeNode):
    """x -> H(s * P(x)), of each `block` values by themselves.

    signs  float32 +-1 [K]; None: all 1
    flips  int32, the same as kernels read it: bit j of word 32 c + l is set where column 1024 c + 32 j + l
           has -1. None: no kernel rotates (`from_signs` makes both)
    block  values that H, the normalized Walsh-Hadamard transform in Sylvester's order, is of; a power of two
    heads  (repeats, k heads): P brings x, [repeats, k heads, width] as it lies, to [k heads, repeats, width];
           None: it stays
    axis   the mesh axis over whose devices P(x) is split into equal parts, side by side: each calls with its
           own x and gets its own part of H(s * P(x)). What a block's borders cut is gathered first; None: x
           is whole
    """

    signs: Float[Array, "K"] | None
    block: int = struct.field(pytree_node=False)
    heads: tuple[int, int] | None = struct.field(pytree_node=False, default=None)
    axis: str | None = struct.field(pytree_node=False, default=None)
    flips: Int[Array, "words"] | None = None

    @classmethod
    def from_signs(cls, signs: np.ndarray, block: int, heads: tuple[int, int] | None = None) -> "Rotation":
        """With flips."""
        return cls(jnp.asarray(signs, jnp.float32), block, heads, flips=jnp.asarray(flips_of(signs)))

    def __call__(self, x: Float[Array, "*batch K"]) -> Float[Array, "*batch K"]:
        """H(s * P(x))"""
        if self.heads is not None:
            x = x.reshape(*x.shape[:-1], *self.heads, -1).swapaxes(-3, -2).reshape(x.shape)
        if self.axis is None:
            return hadamard(x if self.signs is None else self.signs * x, self.block)
        width, whole = x.shape[-1], self.replace(heads=None, axis=None)
        at = jax.lax.axis_index(self.axis) * width
        if width % self.block:
            x = jax.lax.all_gather(x, self.axis, axis=x.ndim - 1, tiled=True)
            return jax.lax.dynamic_slice_in_dim(whole(x), at, width, axis=x.ndim - 1)
        if self.signs is not None:
            whole = whole.replace(signs=jax.lax.dynamic_slice_in_dim(self.signs, at, width))
        return whole(x)

    def back(self, z: Float[Array, "*batch K"]) -> Float[Array, "*batch K"]:
        """s * H(z): the inverse where P is the identity."""
        x = hadamard(z, self.block)
        return x if self.signs is None else self.signs * x


def flips_of(signs: np.ndarray) -> np.ndarray:
    """Rotation.flips of signs."""
    negative = np.pad(signs < 0, (0, -len(signs) % 1024)).reshape(-1, 32, 32)  # chunk, j, l
    packed = np.packbits(negative.swapaxes(1, 2), axis=-1, bitorder="little")  # [chunks, l, 4 bytes]
    return np.ascontiguousarray(packed).view("<i4").reshape(-1)


def hadamard(x: Float[Array, "*batch K"], block: int) -> Float[Array, "*batch K"]:
    """The normalized Walsh-Hadamard transform of each `block` values, float32.

    y[r] = sum_c (-1)^popcount(r & c) x[c] / sqrt(block)

    As two products with matrices of about sqrt(block), along the high and the low bits of the index.
    """
    bits = block.bit_length() - 1
    high, low = _matrix(bits // 2), _matrix(bits - bits // 2)
    cut = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, len(high), len(low))
    exact = jax.lax.Precision.HIGHEST
    y = jnp.einsum("...hl,lm->...hm", cut, low, precision=exact)
    return jnp.einsum("...hm,hg->...gm", y, high, precision=exact).reshape(x.shape)


def _matrix(bits: int) -> np.ndarray:
    """H of 2^bits values, float32."""
    index = np.arange(1 << bits)
    odd = np.bitwise_count(index[:, None] & index) & 1
    return ((1 - 2.0 * odd) / np.sqrt(1 << bits)).astype(np.float32)
