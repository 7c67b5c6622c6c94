"""What decode.py makes of a new token's projections: the row that is stored, and the queries as tensor
cores take them."""

import dataclasses
from typing import Any

from pallas_kernels.attention.scores import LOG2_E
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import (
    as_real,
    as_word,
    index,
    integer,
    minimum,
    real,
    rsqrt,
    select,
    sum_of_squares,
)
from pallas_kernels.latent.plan import UNIT

PART = 8  # neighbouring numbers of a lane


def store_new_row(step, share, page):
    """By one warp: [norm(c), rope(k)] as it will be stored, to the cache (its page) and to shared memory."""
    plan, lane = step.plan, integer(lanes.thread()) % 32
    begin = step.latents.type.shape[1] - plan.width
    columns = [lane * PART + first for first in range(0, plan.rank, 32 * PART)]

    def eight(ref, row, column):
        return [v for i in (0, 4) for v in memory.load_reals(4, ref, [row, column + i])]

    c = [eight(step.latents, share.row, column + begin) for column in columns]
    gamma = [eight(step.norm, share.layer, column) for column in columns]
    at = (
        lane % (plan.turned // PART) * PART
    )  # by all lanes, of which the first have it: no way to memory more
    turned = Turned.locate(step, share, at)
    key = turned.load(lambda column: eight(step.latents, share.row, column + (begin + plan.rank)))
    squares = real(0)
    for part in c:
        squares = sum_of_squares(part, squares)
    norm = rsqrt(lanes.warp_sum_real(squares) * (1 / plan.rank) + step.eps)
    for column, part, weights in zip(columns, c, gamma, strict=True):
        _store(step, share, page, column, [v * norm * w for v, w in zip(part, weights, strict=True)])
    with lanes.when(lane < plan.turned // PART):
        _store(step, share, page, at + plan.rank, turned.rotated(*key))


def _store(step, share, page, column, part: list):
    plan, layout = step.plan, step.layout
    (stored,), _ = layout.narrow([part], ())
    at = memory.shared_address(step.scratch_smem) + column * 2
    words = [word for vector in stored for word in lanes.words(vector)]
    memory.store_shared(words, at, 4 * plan.scratch.row_at)
    with lanes.when(share.heads == 0):  # of several blocks of heads one
        place = [share.layer, page, share.length % plan.page_size, 0, column]
        layout.store(stored, step.pages, list(map(index, place)))


@dataclasses.dataclass(frozen=True)
class Turned:
    """Eight numbers from `at` on of those that rope turns.

    cos, sin  of their angles, 4 of neighbouring pairs or 8
    """

    step: Any
    at: Any
    cos: list
    sin: list

    @classmethod
    def locate(cls, step, share, at) -> "Turned":
        half = step.plan.turned // 2
        places = [at // 2] if step.interleaved else [at % half, at % half + 4]
        angles = [
            [v for i in places for v in memory.load_reals(4, ref, [share.row, i])] for ref in step.rotation
        ]
        return cls(step, at, *angles)

    def load(self, eight) -> list:
        """What `rotated` takes; eight(column) gives eight numbers as they are."""
        if self.step.interleaved:
            return [eight(self.at)]
        return [eight(self.at), eight((self.at + self.step.plan.turned // 2) % self.step.plan.turned)]

    def rotated(self, x: list, other: list | None = None) -> list:
        if other is None:
            out = []
            for i, (m, n) in enumerate(zip(self.cos, self.sin, strict=True)):
                a, b = x[2 * i : 2 * i + 2]
                out += [a * m - b * n, b * m + a * n]
            return out
        is_first = self.at < self.step.plan.turned // 2
        sin = [select(is_first, -v, v) for v in self.sin]
        return [v * m + w * n for v, w, m, n in zip(x, other, self.cos, sin, strict=True)]


@dataclasses.dataclass(frozen=True)
class Queries:
    """A lane's queries as they are loaded: unit k of warp w is dimensions 32 (w + 8 k) .. of a row; the last
    are those that rope turns, of the first warps.

    absorbed  [eight of heads][unit] -> 8 numbers
    turning   [eight of heads] -> what `Turned.rotated` takes
    """

    step: Any
    warp: Any
    t: Any
    absorbed: list
    turned: Turned
    turning: list

    @classmethod
    def load(cls, step, share) -> "Queries":
        plan, lane, warp = step.plan, integer(lanes.thread()) % 32, integer(lanes.thread() // 32)
        g, t = lane // 4, lane % 4

        def eight(ref, head, column):
            return [v for i in (0, 4) for v in memory.load_reals(4, ref, [share.row, head, column + i])]

        heads = [share.heads + minimum(g + 8 * n, plan.group - 1) for n in range(plan.columns)]
        turned = Turned.locate(step, share, (warp * UNIT + t * PART) % plan.turned)
        turning = [
            turned.load(lambda column, h=head: eight(step.q, h, column + plan.still)) for head in heads
        ]
        absorbed = [
            [
                eight(step.absorbed, head, (warp + 8 * k) * UNIT + t * PART)
                for k in range(plan.rank // (8 * UNIT))
            ]
            for head in heads
        ]
        return cls(step, warp, t, absorbed, turned, turning)

    def pairs(self) -> tuple[list, list]:
        """Queries times their factor, [eight of heads][unit][high, low] -> 4 pairs of dimensions; and what
        this lane's two columns of scores are to be multiplied by, or None, [eight of heads]."""
        layout, factor, queries, units = self.step.layout, self.step.scale * LOG2_E, [], []
        turns = self.warp < self.step.plan.turned // UNIT
        for parts, turning in zip(self.absorbed, self.turning, strict=True):
            last = [select(turns, v, 0.0) for v in self.turned.rotated(*turning)]
            parts, unit = layout.in_range([[v * factor for v in part] for part in (*parts, last)], 4)
            words = []
            for part in parts:
                halves = [layout.split(*part[i : i + 2]) for i in range(0, PART, 2)]
                words.append([list(half) for half in zip(*halves, strict=True)])
            queries.append(words)
            if unit is not None:  # of column g: to the lanes that have its scores
                unit = [as_real(lanes.from_lane(as_word(unit), self.t * 8 + 4 * i)) for i in (0, 1)]
            units.append(unit)
        return queries, units
