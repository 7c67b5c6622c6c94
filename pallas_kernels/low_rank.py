"""Low-rank changes beside packed matrices (LoRA, Hu et al. 2021): y = W x + scale B (A x)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from pallas_kernels.pytree import serializable
from pallas_kernels.qtensor import LayerStack


@serializable
class LowRank(struct.PyTreeNode):
    """A change of a matrix of N rows and K columns, of every layer: scale B A.

    a      floating point [layers, rank, K]; of several adapters [layers, adapters, rank, K]
    b      floating point [layers, N, rank]; of several [layers, adapters, N, rank]
    scale  alpha / rank, or whatever the adapter's file says
    start  the first of the N rows in the matrix that it stands beside, which may have others above and below
           (queries, keys and values in one)
    """

    a: Float[Array, "L *adapters r K"]
    b: Float[Array, "L *adapters N r"]
    scale: float = struct.field(pytree_node=False, default=1.0)
    start: int = struct.field(pytree_node=False, default=0)

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)"""
        return self.b.shape[-2], self.a.shape[-1]

    def __call__(
        self, x: Float[Array, "*batch K"], layer: int | Int[Array, ""], chosen: Int[Array, "B"] | None = None
    ) -> Float[Array, "*batch N"]:
        """scale B (A x), float32. HIGHEST, as the reference's products.

        chosen  of several adapters that of each sequence, where x is [B, T, K]; None: the first
        """
        exact: dict[str, Any] = {
            "precision": jax.lax.Precision.HIGHEST,
            "preferred_element_type": jnp.float32,
        }
        a, b = self.a[layer], self.b[layer]
        if chosen is None:
            a, b = (a[0], b[0]) if a.ndim == 3 else (a, b)
            inner = jnp.einsum("...k,rk->...r", x, a, **exact)
            return self.scale * jnp.einsum("...r,nr->...n", inner, b, **exact)
        if len(a) > len(chosen):  # gathered: a copy of A and B for each sequence
            inner = jnp.einsum("btk,brk->btr", x, a[chosen], **exact)
            return self.scale * jnp.einsum("btr,bnr->btn", inner, b[chosen], **exact)
        # Of many sequences it is cheaper to read each adapter once, and to leave out what is not theirs.
        inner = jnp.einsum("btk,srk->btsr", x, a, **exact)
        own = chosen[:, None] == jnp.arange(len(a))
        inner = jnp.where(own[:, None, :, None], inner, 0.0)
        return self.scale * jnp.einsum("btsr,snr->btn", inner, b, **exact)

    def dense(self, layer: int | Int[Array, ""]) -> Float[Array, "N K"]:
        """scale B A of a layer, float32."""
        a, b = self.a[layer].astype(jnp.float32), self.b[layer].astype(jnp.float32)
        return self.scale * jnp.matmul(b, a, precision=jax.lax.Precision.HIGHEST)


@serializable
class Adapted(struct.PyTreeNode):
    """A weight of every layer with low-rank changes beside it; `matmul` and `gated` take it as they take the
    weight.

    base     the weight, whose kernels multiply as they would without the changes
    changes  by their first rows, of which none has rows of another
    chosen   where changes are those of several adapters, which of them each sequence has
    """

    base: LayerStack
    changes: tuple[LowRank, ...]
    chosen: Int[Array, "B"] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.base.shape

    def change(self, x: Float[Array, "*batch K"], layer: int | Int[Array, ""]) -> Float[Array, "*batch N"]:
        """What the changes add to the product, of the input that the product has: normed, not rotated."""
        parts, end = [], 0
        for change in self.changes:
            parts += [_zeros(x, change.start - end)] if change.start > end else []
            parts.append(change(x, layer, self.chosen))
            end = change.start + change.shape[0]
        parts += [_zeros(x, self.shape[0] - end)] if end < self.shape[0] else []
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def _zeros(x: jax.Array, width: int) -> jax.Array:
    return jnp.zeros((*x.shape[:-1], width), jnp.float32)
