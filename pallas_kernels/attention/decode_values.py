"""Weighted values of a block of 8 warps of decode attention that has at most 16 keys a warp, and these in
shared memory. Each warp weighs its own keys, then makes 16 of a head's dimensions, of the keys of all warps:

    warp w   keys 16 w ..        -> scores -> m, their largest; weights 2^(score - m); their sum
                                                                 (all to shared memory)
    warp w   dimensions 16 w ..  of all values, by the weights of each warp, times 2^(its m - the largest m)

So no sums of warps are to be put together. Dimensions are the 16 rows of a tensor core; of its 8 columns
heads have theirs as for scores. Its 16 keys come in the order 0, 8, 2, 10, .., 1, 9, ..: of two neighbours of
this order one lane has the weights, which makes a word of them.
"""

import dataclasses
import functools
from typing import Any

from pallas_kernels.attention.decode_cache import team_barrier, team_warp
from pallas_kernels.attention.decode_keys import Warp
from pallas_kernels.attention.decode_plan import KEYS, TILE, WARPS, Plan
from pallas_kernels.attention.decode_scores import head_columns, scaled, scored, seen, weights
from pallas_kernels.attention.decode_sources import Slots, turned
from pallas_kernels.attention.decode_splits import LOWEST, quotient, with_sink
from pallas_kernels.gpu import lanes, memory, tensor_cores
from pallas_kernels.gpu.values import as_real, as_word, fma, greatest, integer, minimum, real


@dataclasses.dataclass(frozen=True)
class Dimensions:
    """(m, l, o) of a split, as its warps have them: of this lane's heads the largest score, the sum of
    weights, and sums of weighted values o [half][head] of two of the warp's 16 dimensions."""

    warp: Warp
    smem: Any
    maxima: list
    totals: list
    o: list

    def outputs(self, use, sink=None):
        """use(element of [heads, head_dim], [output], m, l) for each that this lane has, 0 without keys; with
        `sink` as `decode_splits.Splits` has it."""
        plan, g, dimensions = self.warp.plan, lanes.thread() % 32 // 4, team_warp(self.warp.plan) * TILE
        for k, head in enumerate(self.warp.heads):
            largest, total = self.maxima[k], self.totals[k]
            divisor = with_sink(total, largest, sink, minimum(head, plan.heads - 1))
            exists = head < plan.heads
            if plan.head_dim < TILE * WARPS:
                exists = exists & (dimensions < plan.head_dim)
            with lanes.when(exists):
                for half, sums in enumerate(self.o):
                    at = g + 8 * half if self.warp.itemsize == 2 else g * 2 + half
                    element = head * plan.head_dim + dimensions + at
                    use(element, [quotient(sums[k], divisor)], largest, total)

    def loader(self, sink=None):
        """element -> output, of all warps' elements. When it returns, all have read keys and values."""
        self.outputs(lambda element, output, *_: memory.store(*output, self.smem, element), sink)
        team_barrier(self.warp.plan)()
        return lambda element: memory.load(self.smem, element)


@dataclasses.dataclass(frozen=True)
class Between:
    """What the warps tell each other, in shared memory from an address on: weights [product,
    warp, column, 8 words], a word of two keys; maxima and totals [head, warp]. Plan.between are the words of
    it."""

    plan: Plan
    address: Any

    def store(self, warp: Warp, words: list, maxima: list, totals: list):
        """This warp's: words [product][column of this lane's], maxima and totals of its heads."""
        columns = self.plan.columns
        for product, own in enumerate(words):
            for i, word in enumerate(own):
                at = self._weights(product, warp.number, integer(warp.t) * 2 + i) + integer(warp.g) * 4
                memory.store_shared([word], self.address + at)
        with lanes.when(warp.g == 0):
            for which, values in enumerate((maxima, totals)):
                for i, value in enumerate(values):
                    head = integer(warp.t) * (2 // columns) + i
                    at = self._head_begin(which, head) + warp.number * 4
                    memory.store_shared([as_word(value)], self.address + at)

    def by_warp(self, which: int, head) -> list:
        """Maxima (0) or totals (1) of a head, by warps."""
        address = self.address + self._head_begin(which, integer(head))
        words = [word for w in range(0, WARPS, 4) for word in memory.load_shared(4, address, 4 * w)]
        return list(map(as_real, words))

    def pairs(self, g, t) -> list:
        """[warp][product]: of column g what this lane multiplies."""
        address = self.address + g * 32 + t * 8
        return [
            [memory.load_shared(2, address, self._weights(p, w, 0)) for p in range(self.plan.products)]
            for w in range(WARPS)
        ]

    def _weights(self, product: int, warp, column):
        return ((warp + product * WARPS) * 8 + column) * 32

    def _head_begin(self, which: int, head):
        plan = self.plan
        return head * (4 * WARPS) + (plan.products * 64 + which * plan.heads_at_once) * WARPS * 4


def visited(source: Slots, slots, smem) -> Dimensions:
    """A block's only visit. slots as for `decode.Attention.run`."""
    warp, plan = source.warp, source.warp.plan
    between = Between(plan, memory.shared_address(smem) + plan.new_token * 4)
    busy = source.base < warp.share.stop
    with lanes.when(busy):
        between.store(warp, *_weighed(source))
        source.bring_values()
    with lanes.when(~busy):
        words, heads = [[integer(0)] * 2] * plan.products, len(warp.heads)
        between.store(warp, words, [real(LOWEST)] * heads, [real(0)] * heads)
    team_barrier(plan)()
    return _all_values(source, slots, between, smem)


def _weighed(source: Slots) -> tuple:
    """(words, maxima, totals), as Between.store has them, of a warp's keys."""
    plan, layout = source.warp.plan, source.warp.cache.layout
    scores, value_scales = scored(source)
    scores, sees, largest = seen(source, scores, value_scales)
    maxima = [lanes.largest_of_warp(m, 32, first=4) for m in largest]
    weight = weights(scores, sees, maxima)
    totals = [lanes.warp_sum_real(first + second, 32, first=4) for first, second in weight]
    pairs = [layout.split(*scaled(head, value_scales)) for head in weight]  # [head][high or low]
    # Columns of high and low parts side by side, or products one after the other.
    return pairs if plan.columns == 2 else list(zip(*pairs, strict=True)), maxima, totals


def _all_values(source: Slots, slots, between: Between, smem) -> Dimensions:
    """The values of all warps, by their weights."""
    warp, plan, layout = source.warp, source.warp.plan, source.warp.cache.layout
    pairs = between.pairs(warp.g, warp.t)
    known = [[between.by_warp(which, head) for head in warp.heads] for which in (0, 1)]
    maxima = [greatest(each) for each in known[0]]
    factors = [[lanes.exp2(m - most) for m in each] for each, most in zip(known[0], maxima, strict=True)]
    weighted = functools.partial(functools.reduce, lambda total, each: fma(each[0], each[1], total))
    totals = [weighted(zip(f, each, strict=True), real(0)) for f, each in zip(factors, known[1], strict=True)]
    at, o = _offset(warp), [[real(0)] * len(warp.heads)] * 2
    for w in range(WARPS):
        place, _ = slots(integer(w))
        words = memory.load_transposed(2 * warp.itemsize, place + at)
        a, c = [pair for word in words for pair in layout.pairs_transposed(word)], [real(0)] * 4
        for b in pairs[w]:
            c = tensor_cores.add_product(c, a, b, layout.OPERAND)
        o = [
            [fma(factors[k][w], v, total) for k, (v, total) in enumerate(zip(new, half, strict=True))]
            for new, half in zip((head_columns(plan, c[j : j + 2]) for j in (0, 2)), o, strict=True)
        ]
    return Dimensions(warp, smem, maxima, totals, o)


def _offset(warp: Warp):
    """Behind the beginning of a warp's place the row of values whose address this lane has for
    memory.load_transposed: of this warp's dimensions."""
    plan, lane, tile = warp.plan, integer(lanes.thread() % 32), warp.number
    if plan.head_dim < TILE * WARPS:
        tile = minimum(tile, plan.head_dim // TILE - 1)
    row, matrix = lane % 8, lane // 8
    # Two pieces of 16 bytes, each of the even and of the odd keys; or one.
    piece, odd = (tile * 2 + matrix % 2, matrix // 2) if warp.itemsize == 2 else (tile, matrix % 2)
    key = (row - row % 2) + odd + row % 2 * 8
    return (key + KEYS) * warp.row_bytes + (piece ^ turned(plan, key)) * 16
