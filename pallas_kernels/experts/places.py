"""Where the pairs of a token and an expert of its lie, sorted by expert, and tiles of them: one launch of one
block of threads, in place of a sort.

    chosen   2 0 | 0 1 | 0 2     of three tokens two experts each
    places   4 0 | 1 3 | 2 5     without room between experts (`step` 1)

A warp has neighbouring pairs and counts them by expert in shared memory, 32 at a time: what a lane has before
it are the lanes below it with the same expert (a ballot for each bit of the number) and what the warp counted
before. Then the warps' counts are added up, expert by expert, and each pair adds what lies before its warp's.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import index, integer, minimum, select

WARPS = 32
AT_ONCE = 8  # numbers of experts that a lane asks for before it looks at the first


def rows_of(pairs: int, experts: int, step: int) -> int:
    """Rows that pairs take at most, where each expert's begin at a multiple of `step`."""
    return pairs + min(pairs, experts) * (step - 1) + -(pairs + min(pairs, experts) * (step - 1)) % step


def tiles_of(pairs: int, experts: int, tokens: int) -> int:
    """Tiles of so many rows that they make at most."""
    return min(pairs, pairs // tokens + experts)


@functools.partial(jax.jit, static_argnames=("experts", "tokens", "step", "used"))
def expert_places(
    chosen: jax.Array, *, experts: int, tokens: int, step: int, used: int | None = None
) -> tuple[jax.Array, ...]:
    """int32 [pairs] -> (places int32 [pairs], tiles int32 [tiles_of(..), 3], count int32 [1]), and with
    `used` rows int32 [rows_of(..)].

    chosen   number of each pair's expert; what is none of so many `experts` (at most 1024) stands for none
    places   row of each pair, in ascending order of pairs among those of an expert; -1 where there is none.
             An expert's rows begin at a multiple of `step`
    tiles    of each tile of up to `tokens` rows its expert, its first row, and the end of the expert's rows;
             of count[0] of them. Others have expert -1, and are else undefined
    used     how many neighbouring pairs are of one token
    rows     of each row its token, 0 where it has no pair; undefined behind the last tile
    """
    (pairs,) = chosen.shape
    if experts > 32 * WARPS:
        raise NotImplementedError(
            f"{experts} experts; the kernel has a thread for each of up to {32 * WARPS}"
        )
    tiles = tiles_of(pairs, experts, tokens)
    rows = {}
    if used is not None:
        rows["rows_gmem"] = jax.ShapeDtypeStruct((rows_of(pairs, experts, step),), jnp.int32)
    return launch(
        functools.partial(_body, experts=experts, tokens=tokens, step=step, used=used),
        {"chosen_gmem": chosen},
        {
            "places_gmem": jax.ShapeDtypeStruct((pairs,), jnp.int32),
            "tiles_gmem": jax.ShapeDtypeStruct((tiles, 3), jnp.int32),
            "count_gmem": jax.ShapeDtypeStruct((1,), jnp.int32),
            **rows,
        },
        name="expert_places",
        blocks=1,
        threads=32 * WARPS,
        scratch={
            "counts_smem": plgpu.SMEM((WARPS, experts + 1), jnp.int32),  # the last for threads without one
            "first_smem": plgpu.SMEM((experts,), jnp.int32),
            "sums_smem": plgpu.SMEM((2, WARPS), jnp.int32),
        },
    )


def _body(
    chosen_gmem, places_gmem, tiles_gmem, count_gmem, rows_gmem=None, *, counts_smem, first_smem, sums_smem,
    experts, tokens, step, used,
):  # fmt: skip
    (pairs,) = chosen_gmem.type.shape
    thread = integer(lanes.thread(reuse=True))
    warp, lane = thread // 32, thread % 32
    turns = -(-pairs // (32 * WARPS))  # of 32 pairs, which a warp has
    at_once = min(AT_ONCE, turns)

    def each(turn):
        """(pair, whether there is one) of a lane in some turn of its warp."""
        pair = warp * (32 * turns) + turn * 32 + lane
        return minimum(pair, pairs - 1), (turn < turns) & (pair < pairs)

    def turns_of(body):
        """body(list of (pair, whether there is one, whether it has an expert, the expert or 0)) for a lane's
        pairs, some at once."""

        @functools.partial(lanes.loop, 0, turns, at_once, [])
        def _turn(first, _):
            turn_pairs = [each(integer(first) + i) for i in range(at_once)]
            experts_of = [memory.load(chosen_gmem, pair) for pair, _ in turn_pairs]
            valid = [exists & (e < experts) for (_, exists), e in zip(turn_pairs, experts_of, strict=True)]
            known = [select(v, e, 0) for v, e in zip(valid, experts_of, strict=True)]
            body([(*f, v, e) for f, v, e in zip(turn_pairs, valid, known, strict=True)])
            return []

    counts = [(lane + i, index(lane + i)) for i in range(0, experts, 32)]
    for expert, at in counts:
        with lanes.when(expert < experts):
            memory.store(integer(0), counts_smem, warp, at)
    lanes.warp_barrier()

    def no_tile(tile, _):
        memory.store(integer(-1), tiles_gmem, integer(tile), 0)
        return []

    lanes.loop(thread, tiles_gmem.type.shape[0], 32 * WARPS, [], no_tile)

    def count(turn_pairs):
        for pair, _, valid, expert in turn_pairs:
            same = lanes.ballot(valid)
            for bit in range((experts - 1).bit_length()):
                has_bit = (expert >> bit & 1) == 1
                with_it = lanes.ballot(has_bit)
                same = same & select(has_bit, with_it, with_it ^ 0xFFFFFFFF)
            below = lanes.ones(same & (integer(1) << lane) - 1)
            before = memory.load(counts_smem, warp, expert)
            with lanes.when(valid):
                memory.store(before + below, places_gmem, pair)
            lanes.warp_barrier()
            with lanes.when(valid & (below == 0)):
                memory.store(before + lanes.ones(same), counts_smem, warp, expert)
            lanes.warp_barrier()

    turns_of(count)
    lanes.block_barrier()
    own = minimum(thread, experts)
    is_expert = thread < experts
    total = integer(0)
    for w in range(WARPS):
        warp_count = memory.load(counts_smem, w, own)
        with lanes.when(is_expert):
            memory.store(total, counts_smem, w, own)
        total = total + warp_count
    total = select(is_expert, total, 0)
    rows, tiles = (total + (step - 1)) // step * step, (total + (tokens - 1)) // tokens
    first, first_tile = _before([rows, tiles], warp, lane, sums_smem)
    with lanes.when(is_expert):
        memory.store(first, first_smem, own)

        def tile(i, _):
            row = first + integer(i) * tokens
            for column, value in enumerate((own, row, first + total)):
                memory.store(value, tiles_gmem, first_tile + integer(i), column)
            return []

        lanes.loop(0, tiles, 1, [], tile)
        if rows_gmem is not None:
            for row in range(step - 1):
                with lanes.when(total + row < rows):
                    memory.store(integer(0), rows_gmem, first + total + row)
    with lanes.when(thread == experts - 1):
        memory.store(first_tile + tiles, count_gmem, 0)
    lanes.block_barrier()

    def place(turn_pairs):
        for pair, exists, valid, expert in turn_pairs:
            before = memory.load(first_smem, expert) + memory.load(counts_smem, warp, expert)
            with lanes.when(exists):
                row = select(valid, before + memory.load(places_gmem, pair), -1)
                memory.store(row, places_gmem, pair)
                if rows_gmem is not None:
                    with lanes.when(valid):
                        memory.store(pair // used, rows_gmem, row)

    turns_of(place)


def _before(values: list, warp, lane, sums_smem) -> list:
    """Of each value (i32) the sum of those of all threads before; a barrier of the block."""
    inclusive = []
    for slot, value in enumerate(values):
        own = value
        for distance in (1, 2, 4, 8, 16):
            below = lanes.from_lane(value, lane - distance & 31)
            value = value + select(lane >= distance, below, 0)
        with lanes.when(lane == 31):
            memory.store(value, sums_smem, slot, warp)
        inclusive.append(value - own)
    lanes.block_barrier()
    out = []
    for slot, value in enumerate(inclusive):
        warp_count = memory.load(sums_smem, slot, lane)
        out.append(value + lanes.warp_sum(select(lane < warp, warp_count, 0)))
    return out
