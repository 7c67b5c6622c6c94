"""What a block of decode.py does with a visit's rows: scores, softmax, weighted sums. The picture is
there."""

import dataclasses
from typing import Any

import jax

from pallas_kernels.attention.decode_sources import chosen
from pallas_kernels.attention.decode_splits import LOWEST
from pallas_kernels.gpu import lanes, memory, pairs, tensor_cores
from pallas_kernels.gpu.values import (
    as_real,
    as_word,
    ceil_divided,
    greatest,
    integer,
    maximum,
    minimum,
    real,
    select,
    total,
)
from pallas_kernels.latent.plan import CHUNK, KEYS, LANE_KEYS, UNIT, WARPS
from pallas_kernels.latent.rows import Rows, swizzle


@dataclasses.dataclass(frozen=True)
class Block:
    """A lane of the block, and its queries.

    queries  [eight of heads][unit][high, low] -> 4 pairs of dimensions
    units    [eight of heads] -> what scores of this lane's two heads are to be multiplied by, or None
    scratch  address
    """

    step: Any
    share: Any
    queries: list
    units: list
    warp: Any
    g: Any
    t: Any
    scratch: Any

    @classmethod
    def locate(cls, step, share, loaded) -> "Block":
        thread = integer(lanes.thread())
        queries, units = loaded
        g, t = thread % 32 // 4, thread % 4
        scratch = memory.shared_address(step.scratch_smem)
        return cls(step, share, queries, units, thread // 32, g, t, scratch)

    @property
    def _together(self) -> int:
        """Lanes that have all keys of a head."""
        return self.step.plan.scratch.keys // LANE_KEYS

    @property
    def own_heads(self) -> list:
        """The heads of the block whose softmax this lane computes, and whether there are such heads."""
        heads, at_once = self.step.plan.scratch.heads, 32 * WARPS // self._together
        first = integer(lanes.thread()) // self._together
        numbers = [first + n for n in range(0, heads, at_once)]
        return [(minimum(number, heads - 1), number < heads) for number in numbers]

    def start(self) -> list:
        own = len(self.own_heads)
        return [real(LOWEST)] * own + [real(0)] * (own + 16 * self.step.plan.columns)

    def unpacked(self, state: list) -> tuple[list, list, list]:
        """Maxima and shares of totals of this lane's own heads, and its sums: [pair of dimensions][eight of
        heads] -> 4."""
        own, columns = len(self.own_heads), self.step.plan.columns
        rest = state[2 * own :]
        fours = [rest[i : i + 4] for i in range(0, len(rest), 4)]
        sums = [fours[i : i + columns] for i in range(0, 4 * columns, columns)]
        return state[:own], state[own : 2 * own], sums

    def visit(self, rows: Rows, visit, state: list) -> list:
        """Some tiles of keys."""
        plan, share = self.step.plan, self.share
        first, address = rows.first_key(visit), rows.slot(visit)
        memory.wait_copies(0)
        lanes.block_barrier()  # they are there, and nobody reads those of the visit before any more
        rows.request(visit + 1)
        with lanes.when(share.has_new & (share.length - first < plan.tiles * KEYS)):  # below 0 is large
            rows.place_new(visit)
            lanes.block_barrier()
        tiles = minimum(ceil_divided(share.stop - first, KEYS), plan.tiles)

        def score(tile, carry):
            tile = integer(tile)
            self._store_scores(self._scores(address + tile * plan.tile_bytes), tile)
            return carry

        def weigh(tile, carry):
            tile = integer(tile)
            sums = jax.tree.unflatten(structure, carry)
            return jax.tree.leaves(self._weighted(address + tile * plan.tile_bytes, tile, sums))

        # Loops: a step's kernels take turns in the cache of instructions.
        lanes.loop(0, tiles, 1, [], score)
        lanes.block_barrier()
        maxima, totals, sums = self.unpacked(state)
        maxima, totals = self._softmax(first, maxima, totals)
        lanes.block_barrier()
        sums, structure = jax.tree.flatten(self._kept(sums))
        has_dimensions = self.warp < plan.rank // CHUNK
        return [*maxima, *totals, *lanes.loop(0, select(has_dimensions, tiles, 0), 1, sums, weigh)]

    def _scores(self, tile) -> list:
        """This warp's dimensions' part of the scores: [eight of heads] -> of keys g and g + 8 two heads."""
        plan = self.step.plan
        # Piece 4 c + t of unit c = warp + 8 k; rows 8 apart have swizzles that differ in 4.
        piece = self.warp * 4 + self.t ^ swizzle(self.g)
        row = tile + self.g * plan.pitch
        places = row + piece * 16, row + (piece ^ 4) * 16 + 8 * plan.pitch

        def added(k: int, sums: list) -> list:
            low, high = (memory.load_shared(4, place, k * 8 * 4 * 16) for place in places)
            for i in (0, 2):
                a = [low[i], high[i], low[i + 1], high[i + 1]]
                for part in (0, 1):
                    b = [units[k][part][i : i + 2] for units in self.queries]
                    sums = [self._add_product(c, a, pair) for c, pair in zip(sums, b, strict=True)]
            return sums

        sums = [[real(0)] * 4 for _ in range(plan.columns)]
        last = plan.rank // (8 * UNIT)
        for k in range(last):
            sums = added(k, sums)
        return chosen(self.warp < plan.turned // UNIT, lambda: added(last, sums), sums)

    def _add_product(self, c: list, a: list, b: list) -> list:
        return tensor_cores.add_product(c, a, b, self.step.layout.OPERAND)

    def _store_scores(self, scores: list, tile):
        scratch = self.step.plan.scratch
        for n, four in enumerate(scores):
            if self.units[n] is not None:
                four = [x * self.units[n][i % 2] for i, x in enumerate(four)]
            head = self.warp * scratch.heads + self.t * 2 + 8 * n
            at = self.scratch + (head * scratch.scores_pitch + self.g + tile * KEYS) * 4
            for i, x in enumerate(four):  # head + i % 2, key g + 8 (i // 2)
                memory.store_shared([as_word(x)], at, 4 * (i % 2 * scratch.scores_pitch + i // 2 * 8))

    def _softmax(self, first, maxima: list, totals: list) -> tuple[list, list]:
        """Of this lane's own heads and keys: weights, and what sums are to be multiplied by, to shared
        memory."""
        scratch, layout, together = self.step.plan.scratch, self.step.layout, self._together
        lane = integer(lanes.thread()) % together
        visible = [first + lane * LANE_KEYS + i < self.share.stop for i in range(LANE_KEYS)]
        new_maxima, new_totals = [], []
        for (head, exists), old, so_far in zip(self.own_heads, maxima, totals, strict=True):
            at = self.scratch + (head * scratch.scores_pitch + lane * LANE_KEYS) * 4
            each = scratch.heads * scratch.scores_pitch * 4
            parts = [memory.load_shared(LANE_KEYS, at, w * each) for w in range(WARPS)]
            scores = [total(list(map(as_real, each))) for each in zip(*parts, strict=True)]
            scores = [select(ok, score, LOWEST) for ok, score in zip(visible, scores, strict=True)]
            largest = lanes.largest_of_warp(greatest(scores), together) - layout.WEIGHT_EXPONENT
            new = maximum(old, largest)
            keep = lanes.exp2(old - new)
            weights = [
                select(ok, lanes.exp2(score - new), 0.0) for ok, score in zip(visible, scores, strict=True)
            ]
            new_maxima.append(new)
            new_totals.append(total([so_far * keep, *weights]))
            pairs_of_lane = [layout.split(*weights[i : i + 2]) for i in range(0, LANE_KEYS, 2)]
            place = head * scratch.weights_pitch + lane * (LANE_KEYS // 2) + scratch.weights_at
            with lanes.when(exists):
                for part, words in enumerate(zip(*pairs_of_lane, strict=True)):
                    more = part * scratch.heads * scratch.weights_pitch
                    memory.store_shared(list(words), self.scratch + place * 4, 4 * more)
                with lanes.when(lane == 0):
                    memory.store_shared([as_word(keep)], self.scratch + (head + scratch.keeps_at) * 4)
        return new_maxima, new_totals

    def _kept(self, sums: list) -> list:
        """The sums, for the new maxima."""
        keeps = []
        for n in range(self.step.plan.columns):
            at = self.scratch + (self.t * 2 + (8 * n + self.step.plan.scratch.keeps_at)) * 4
            keeps.append(list(map(as_real, memory.load_shared(2, at))))
        return [
            [[x * keeps[n][j % 2] for j, x in enumerate(four)] for n, four in enumerate(eights)]
            for eights in sums
        ]

    def _weighted(self, address, tile, sums: list) -> list:
        """The sums of this warp's 64 dimensions, with those of a tile."""
        scratch, (first, second) = self.step.plan.scratch, self._across(address)
        head = self.scratch + (self.g * scratch.weights_pitch + self.t * 2 + tile * (KEYS // 2)) * 4
        for part in (0, 1):
            weights = []
            for n in range(self.step.plan.columns):
                at = scratch.weights_at + (8 * n + part * scratch.heads) * scratch.weights_pitch
                weights.append(memory.load_shared(2, head, 4 * at))
            sums = [
                [
                    self._add_product(c, [*first[i : i + 2], *second[i : i + 2]], b)
                    for c, b in zip(eights, weights, strict=True)
                ]
                for i, eights in zip(range(0, 8, 2), sums, strict=True)
            ]
        return sums

    def _across(self, tile) -> tuple[list, list]:
        """Pairs of keys 4 t and 4 t + 1, and of the two after them, of this lane's dimensions."""
        row, piece, words = self.t * 4, self.warp * 8 + self.g, []
        for i in range(4):
            place = piece ^ swizzle(row + i)
            words.append(memory.load_shared(4, tile + (row + i) * self.step.plan.pitch + place * 16))
        return pairs.across(*words[:2]), pairs.across(*words[2:])

    def store_totals(self, maxima: list, totals: list):
        """Of all heads to shared memory: totals, and behind them maxima."""
        scratch, together = self.step.plan.scratch, self._together
        is_first = integer(lanes.thread()) % together == 0
        for (head, exists), largest, share in zip(self.own_heads, maxima, totals, strict=True):
            summed = lanes.warp_sum_real(share, together)
            with lanes.when(exists & is_first):
                at = self.scratch + (head + scratch.keeps_at) * 4
                memory.store_shared([as_word(summed)], at, 4 * scratch.heads)
                memory.store_shared([as_word(largest)], at, 8 * scratch.heads)

    def totals(self, head):
        """(total, maximum) of a head of the block."""
        scratch = self.step.plan.scratch
        at = self.scratch + (head + scratch.keeps_at) * 4
        return [as_real(memory.load_shared(1, at, n * 4 * scratch.heads)[0]) for n in (1, 2)]
