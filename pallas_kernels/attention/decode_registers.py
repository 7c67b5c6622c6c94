"""Weighted values of a warp of decode attention that has its keys' values in registers: all dimensions, of
its own keys. What warps have is joined in the end (decode_splits.Block).

A lane has of the values what decode_warp.py's picture says. State, of this lane's heads: the largest scores;
its shares of the sums of weights; of the weighted values for each (c, i) two columns of dimension
64 c + 8 g + i.
"""

import functools
import operator

from pallas_kernels.attention.decode_plan import Plan
from pallas_kernels.attention.decode_scores import head_columns, scaled, scored, seen, weights
from pallas_kernels.attention.decode_sources import Source, chosen
from pallas_kernels.attention.decode_splits import LOWEST, Block
from pallas_kernels.gpu import lanes, tensor_cores
from pallas_kernels.gpu.values import maximum, real, select


def begun(plan: Plan, heads: list) -> tuple:
    """The state before the first visit."""
    return [real(LOWEST)] * len(heads), [real(0)] * len(heads), [real(0)] * (plan.head_dim // 4)


def visit(source: Source, state) -> tuple:
    """16 keys and values."""
    layout = source.warp.cache.layout
    scores, value_scales = scored(source)
    source.request_keys()
    scores, sees, largest = seen(source, scores, value_scales)
    maxima, totals, o = _raised(state, largest)
    weight = weights(scores, sees, maxima)
    totals = [functools.reduce(operator.add, w, total) for w, total in zip(weight, totals, strict=True)]
    across = _across_keys(layout, [scaled(head, value_scales) for head in weight])
    state = maxima, totals, _weighted(layout, across, source.values(), o)
    source.request_values()
    return state


def joined(plan: Plan, smem, heads: list, state) -> Block:
    """What the warps of a team have, put together."""
    maxima, totals, o = state
    totals = [lanes.warp_sum_real(total, 32, first=4) for total in totals]
    # Of results two columns of each row: of one head what is to be added, or of two heads.
    rows = [head_columns(plan, o[i : i + 2]) for i in range(0, len(o), 2)]
    values = [[head[i : i + 8] for i in range(0, len(head), 8)] for head in zip(*rows, strict=True)]
    return Block.store(plan, smem, list(zip(heads, maxima, totals, values, strict=True)))


def _raised(state, largest):
    """The state with the largest scores of the warp; where none grows, as it mostly is, nothing is done."""
    maxima, _, _ = state
    grows = functools.reduce(operator.or_, [new > m for new, m in zip(largest, maxima, strict=True)])

    def scaled_to_new():
        maxima, totals, o = state
        new = [
            maximum(m, lanes.largest_of_warp(s, 32, first=4)) for m, s in zip(maxima, largest, strict=True)
        ]
        keep = [lanes.exp2(old - m) for old, m in zip(maxima, new, strict=True)]
        totals = [total * k for total, k in zip(totals, keep, strict=True)]
        return new, totals, [v * keep[i % len(keep)] for i, v in enumerate(o)]

    return chosen(lanes.any_lane(select(grows, 1, 0)), scaled_to_new, state)


def _across_keys(layout, weight) -> list:
    """Weights [head][key] of keys g and g + 8 -> pairs of column g, of keys 2 t and 2 t + 1 and of those + 8,
    for each product that values are to be weighted by."""
    if len(weight) == 1:
        high, low = layout.split(*weight[0])
        products = [[lanes.bytes_of(high, low, selector) for selector in (0x5410, 0x7632)]]
    else:
        products = zip(*(layout.split(*key) for key in zip(*weight, strict=True)), strict=True)
    return [[lanes.transposed_pairs(word) for word in words] for words in products]


def _weighted(layout, across, values, o) -> list:
    """The sums o, and the values weighted by pairs of weights added."""
    out = []
    for c in range(len(values[0])):
        lower, upper = (layout.pairs_across(values[k][c], values[k + 1][c]) for k in (0, 2))
        for i in range(0, 8, 2):
            at = 2 * (8 * c + i)
            acc = o[at : at + 4]
            for a in zip(lower[i], lower[i + 1], upper[i], upper[i + 1], strict=True):
                for b in across:
                    acc = tensor_cores.add_product(acc, a, b, layout.OPERAND)
            out += acc
    return out
