"""What a block of int_prefill_sm90 does at a time: for a product's sizes what is done soonest on an H200."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from pallas_kernels import device
from pallas_kernels.gpu import shared_memory
from pallas_kernels.gpu.wgmma import STEP, STEP_BYTES
from pallas_kernels.matmul.prefill import clocks_of_sums
from pallas_kernels.tiles import TILE_COLUMNS, TILE_ROWS

STEPS = TILE_COLUMNS // STEP  # of what weights are brought at a time
WEIGHT_SLOTS = 2  # 256 columns of a tile's weights each
STAGES = 2  # of a warpgroup's results on their way out
PAIR = 2  # blocks of threads that share activations
COPY_BYTES = 128  # Mosaic copies multiples of them
MOST_TOKENS = {4: 64, 3: 160, 2: 256}  # for whose sums so many warpgroups, of one block, have registers


class Clocks(NamedTuple):
    """How long a plan takes, as measured on an H200.

    item       256 columns of a tile: so many clocks,
    item_each  for each warpgroup, which dequantizes 64 rows of weights there, so many more,
    token      and for each of its tokens
    tile       what a tile takes besides,
    tile_each  and for each warpgroup
    brought    an item's factor where there are slots for the activations of two
    """

    item: float
    item_each: float
    token: float
    tile: float
    tile_each: float
    brought: float


FEW = Clocks(540, 650, 8.6, 0, 400, brought=0.93)  # up to 64 tokens
MANY = Clocks(1400, 0, 9, 500, 0, brought=1)  # more, and those of a list


class Plan(NamedTuple):
    """What a block of threads does at a time.

    warpgroups  that multiply
    blocks      of 64 rows of weights that a warpgroup has
    tokens      of a tile
    slots       steps of activations in shared memory
    stored      tokens of a block that go out at a time
    splits      of the columns: each makes a part of the sums
    """

    warpgroups: int
    blocks: int
    tokens: int
    slots: int
    stored: int
    splits: int = 1


class Tiles(NamedTuple):
    """Tiles of tokens that come from a list.

    matrices  of a layer
    count     about how many tiles there will be
    tokens    of each, at most: a multiple of `stored`
    stored    of which so many go out at a time, a multiple of 16
    """

    matrices: int
    count: int
    tokens: int
    stored: int


def planned(
    m: int,
    tiles: int,
    items: int,
    matrices: int,
    words: Sequence[int],
    scale_bytes: int,
    listed: Tiles | None = None,
    summed: bool = True,
) -> Plan:
    """What is done soonest on the default device, of what shared memory has room for. The sums of a product
    whose columns are split are added by XLA; of SwiGLU they would have to be added before it.

    tiles               of 16 rows of a matrix
    items               of 256 columns
    words, scale_bytes  of 16 rows x 256 columns: of each field, and of their scales as float32
    listed              tiles of tokens that come from a list, whatever m is
    """
    few, gpu, clocks = m + -m % 16, device.default(), MANY
    tilings = ((2, 1, 256), (2, 2, 128), (2, 1, 128))
    if listed is not None:
        tilings = [(w, 1, listed.tokens) for w, most in MOST_TOKENS.items() if listed.tokens <= most]
    elif m <= 64:
        tilings, clocks = ((4, 1, few), (3, 1, few), (2, 1, few)), FEW
    splits_to_try = [s for s in range(1, items + 1) if items % s == 0]
    if matrices == 2 or listed is not None:
        splits_to_try = [1]
    shapes = ((64, 2 * STEPS), (64, STEPS), (32, STEPS), (32, 3), (16, 3), (16, 2))
    if listed is not None:
        shapes = tuple((listed.stored, slots) for slots in (2 * STEPS, STEPS, 3, 2))
    best = []
    for (warpgroups, blocks, tokens), splits in itertools.product(tilings, splits_to_try):
        copied = 4 * warpgroups * blocks // matrices  # tiles of a matrix
        if any(4 * size * copied % COPY_BYTES for size in words):
            continue  # such as six tiles with scales of 32 bytes each
        if warpgroups == 4 and splits > 1:
            continue  # it would take more splits, whose sums are read by what follows (LOG.md)
        outputs = PAIR * warpgroups * 64 * blocks // matrices
        rows = -(-m // tokens) if listed is None else listed.count
        count, pairs = rows * -(-tiles * TILE_ROWS // outputs) * splits, gpu.multiprocessors // PAIR
        each = clocks.item + warpgroups * (clocks.item_each + clocks.token * tokens)
        for stored, slots in shapes:
            plan = Plan(warpgroups, blocks, tokens, slots, min(stored, tokens), splits)
            if slots > STEPS and (tokens > 64 or slots > STEPS * items // splits):
                continue  # the block that brings activations waits in the end until each slot is free again
            if shared_bytes(plan, matrices, words, scale_bytes) <= gpu.shared_bytes:
                factor = clocks.brought if slots > STEPS else 1 if slots == STEPS else 1.2
                tile = items / splits * blocks * each * factor
                tile += clocks.tile + clocks.tile_each * warpgroups
                sums = clocks_of_sums(m * tiles * TILE_ROWS, splits, summed)
                best.append((-(-count // pairs) * tile + sums, plan))
                break
    return min(best)[1]


def shared_bytes(plan: Plan, matrices: int, words: Sequence[int], scale_bytes: int) -> int:
    """Shared memory that a block of threads takes."""
    buffers = [
        plan.slots * plan.tokens * STEP_BYTES,
        *(4 * WEIGHT_SLOTS * 4 * plan.warpgroups * plan.blocks * each for each in words),
        matrices * plan.warpgroups * plan.blocks * 4 * scale_bytes,
        plan.warpgroups * STAGES * plan.stored * 64 // matrices * 4,
        (WEIGHT_SLOTS + 1) * (plan.tokens + -plan.tokens % 32) * 4,
    ]
    barriers = 2 * plan.slots + 3 * WEIGHT_SLOTS + 1 + plan.warpgroups * STAGES
    return shared_memory.bytes_taken(*buffers, barriers=barriers)
