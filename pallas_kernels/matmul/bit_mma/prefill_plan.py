"""How prefill_sm90.py shares out a product: tiles, splits of the columns and slots in shared memory, from
its sizes and the GPU's."""

import itertools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels import device
from pallas_kernels.gpu import shared_memory
from pallas_kernels.matmul.bit_mma.group_sums import COEFFICIENTS, together
from pallas_kernels.matmul.bit_mma.product import GROUP
from pallas_kernels.matmul.prefill import clocks_of_sums

STEP = 4  # products of a step: of as many groups with 8 bits, of half as many with 16
# What a plan takes, as measured on an H200: a step, for each token and warpgroup of it, a tile.
STEP_CLOCKS, TOKEN_CLOCKS, TILE_CLOCKS = 700, 14, 500
STORED = 32  # tokens of a tile whose results leave by parts
BIT_WORDS = 128, 16  # of codes and of scales, in 16 rows and a pair of groups of Q1_0


class Plan(NamedTuple):
    """What a block of threads does at a time.

    warpgroups  that multiply, each 64 rows of weights
    tokens      of a tile
    splits      of the columns: each makes a part of the sums, the last of fewer steps if they do not divide
    slots       steps in shared memory
    stored      tokens of a warpgroup's results that leave at a time
    """

    warpgroups: int
    tokens: int
    splits: int
    slots: int
    stored: int

    @property
    def stages(self) -> int:
        """Of a warpgroup's results on their way out, of `stored` tokens each."""
        return min(2, self.tokens // self.stored)


class Steps(NamedTuple):
    """The steps of a block's tiles, where the columns' splits may not all have as many.

    count   of all columns
    splits, tiles  parts of the columns, and tiles of one split
    blocks  a block has every so many of all tiles, split after split, from its own number on
    """

    count: int
    splits: int
    tiles: int
    blocks: int

    @property
    def each(self) -> int:
        """Of a tile, but for the last split."""
        return -(-self.count // self.splits)

    @property
    def fewer(self) -> int:
        """Of a tile of the last split."""
        return self.count - (self.splits - 1) * self.each

    def split(self, block, i):
        """Of the block's tile i."""
        return lax.div(block + i * self.blocks, self.tiles)

    def in_tile(self, block, i):
        """Steps of the block's tile i."""
        if self.fewer == self.each:
            return self.each
        return jnp.where(self.split(block, i) == self.splits - 1, self.fewer, self.each)

    def before_tile(self, block, i):
        """Steps of the block's tiles before tile i: those of the last split come last."""
        if self.fewer == self.each:
            return i * self.each
        past = (self.splits - 1) * self.tiles - block  # the last split's first tile, from the block's on
        whole = lax.div(jnp.maximum(past + self.blocks - 1, 0), self.blocks)
        return i * self.each - jnp.maximum(i - whole, 0) * (self.each - self.fewer)


def planned(
    m: int,
    n: int,
    steps: int,
    matrices: int,
    planes: int,
    summed: bool = True,
    pair_words: tuple[int, int] = BIT_WORDS,
) -> Plan:
    """What is done soonest on the default device. The sums of a product whose columns are split are added by
    XLA; of SwiGLU they would have to be added before it.

    m           rows, padded as activations_int8 does
    steps       of STEP products along the columns
    matrices    2 for SwiGLU
    planes      of 8 bits that activations have
    summed      as for bit_prefill_sm90
    pair_words  of codes and of scales, uint32, in 16 rows and a pair of groups
    """
    few, multiprocessors, shared = min(m, 64), device.multiprocessors(), device.shared_bytes()
    tile_shapes = ((3, few), (2, few)) + ((2, 128),) * (m >= 128)
    # The last has some steps, too.
    split_counts = (
        [1] if matrices == 2 else [s for s in range(1, steps + 1) if (s - 1) * -(-steps // s) < steps]
    )
    best = []
    for (warpgroups, tokens), splits in itertools.product(tile_shapes, split_counts):
        tiles = -(-m // tokens) * -(-n // (warpgroups * 64 // matrices)) * splits
        step = STEP_CLOCKS + warpgroups * TOKEN_CLOCKS * tokens
        clocks = -(-tiles // multiprocessors) * (-(-steps // splits) * step + TILE_CLOCKS)
        # A reader has a block for each row; fewer rows than multiprocessors are not read faster.
        clocks += clocks_of_sums((m if summed else max(m, multiprocessors)) * n, splits, summed)
        # Two steps must fit, so that one arrives while the other is multiplied. If a whole tile's results do
        # not fit beside them, they leave in parts.
        plans = (
            Plan(warpgroups, tokens, splits, slots, stored)
            for stored in (tokens, min(tokens, STORED))
            for slots in range(8, 1, -1)
        )
        fits = (plan for plan in plans if shared_bytes(plan, matrices, planes, pair_words) <= shared)
        best.append((clocks, next(fits)))
    return min(best)[1]


def shared_bytes(plan: Plan, matrices: int, planes: int, pair_words: tuple[int, int]) -> int:
    """Shared memory that a block of threads takes: the scratch of `bit_prefill_sm90`."""
    warpgroups, tokens, _, slots, stored = plan
    pairs = STEP // planes // 2
    activations, results = slots * STEP * tokens, warpgroups * plan.stages * stored * 64 // matrices
    words = [slots * 4 * warpgroups * pairs * each for each in pair_words]
    buffers = [activations * GROUP, 4 * results, 4 * activations, *(4 * each for each in words), 8 * slots]
    barriers = 2 * slots + warpgroups * plan.stages
    if together(tokens, planes, ternary=pair_words != BIT_WORDS):
        buffers.append(4 * slots * COEFFICIENTS * tokens)
        barriers += slots
    return shared_memory.bytes_taken(*buffers, barriers=barriers)
