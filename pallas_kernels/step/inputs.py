"""What the kernels of a decode step of one token a row are given, but for matrices and activations."""

from typing import NamedTuple

import jax

from pallas_kernels import cache_layouts
from pallas_kernels.low_rank import LowRank
from pallas_kernels.step.low_rank_plan import Change, Changes


class StepInputs(NamedTuple):
    """The small weights of all layers, the cache, and where each row's token is.

    attn_norm, ffn_norm  float32 [L, hidden], gammas before attention and before the feed-forward
    bias         float32 [L, width of qkv], or None
    head_norms   float32 [L, head_dim] of queries and of keys, or None
    rotation     cos and sin, float32 [rows, pairs that rope turns]
    k_pages, v_pages, block_table, positions   as for pallas_kernels.attend; positions int32 [rows]
    """

    attn_norm: jax.Array
    ffn_norm: jax.Array
    bias: jax.Array | None
    head_norms: tuple[jax.Array, jax.Array] | None
    rotation: tuple[jax.Array, jax.Array]
    k_pages: cache_layouts.Pages
    v_pages: cache_layouts.Pages
    block_table: jax.Array
    positions: jax.Array


class StepChanges(NamedTuple):
    """Low-rank changes beside the matrices of all layers.

    matrices  those beside qkv, o, gate, up and down, by their first rows; () beside a matrix that has none
    chosen    int32 [rows]: of several adapters that of each row; None: the first
    """

    matrices: tuple[tuple[LowRank, ...], ...]
    chosen: jax.Array | None = None

    @property
    def sizes(self) -> Changes:
        """For Shapes."""
        size = lambda c: Change(c.start, c.shape[0], c.rank, c.scale, str(c.a.dtype))  # noqa: E731
        return Changes(tuple(tuple(map(size, changes)) for changes in self.matrices))
