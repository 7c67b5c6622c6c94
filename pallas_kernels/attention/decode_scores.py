"""Scores of a warp's 16 keys in decode attention (decode_warp.py has the picture)."""

import functools

from pallas_kernels.attention.decode_plan import Plan
from pallas_kernels.attention.decode_sources import Source
from pallas_kernels.attention.decode_splits import LOWEST
from pallas_kernels.gpu import lanes, tensor_cores
from pallas_kernels.gpu.values import greatest, index, maximum, real, select


def scored(source: Source) -> tuple:
    """(scores [head][key] of this lane's two keys, scales of their values). All keys of the visit have been
    read then."""
    warp, token, layout = source.warp, source.token, source.warp.cache.layout
    keys, key_scales, value_scales = source.keys()
    sums = _multiplied(layout, token.queries(index(warp.g), index(warp.t)), keys)
    scores = [head_columns(warp.plan, sums[i : i + 2]) for i in (0, 2)]  # [key][head]
    scores = [
        scaled([s if unit is None else s * unit for s in head], key_scales)
        for head, unit in zip(zip(*scores, strict=True), token.units(warp.heads), strict=True)
    ]
    capped = functools.partial(warp.plan.scores.capped, exp2=lanes.exp2, reciprocal=lanes.reciprocal)
    return [[capped(s) for s in head] for head in scores], value_scales


def seen(source: Source, scores, value_scales) -> tuple:
    """(scores, sees, largest): scores are LOWEST of keys that the row does not see. The largest of each head
    is what weights are relative to, so that with the scales of their values they stay in range."""
    sees = [source.warp.sees(j) for j in source.key_js]
    scores = [[select(ok, s, LOWEST) for ok, s in zip(sees, head, strict=True)] for head in scores]
    exponent = source.warp.cache.layout.WEIGHT_EXPONENT
    return scores, sees, [greatest(_with_exponents(head, value_scales)) - exponent for head in scores]


def weights(scores, sees, maxima) -> list:
    """2^(score - maximum) of the keys that the row sees, [head][key]."""
    return [
        [select(ok, lanes.exp2(s - m), real(0)) for ok, s in zip(sees, head, strict=True)]
        for head, m in zip(scores, maxima, strict=True)
    ]


def head_columns(plan: Plan, two) -> list:
    """A row of results for each of this lane's heads: the sum of the lane's two columns, or one of them."""
    return [two[0] + two[1]] if plan.columns == 2 else two


def scaled(numbers, scales) -> list:
    """Scores by the scales of their keys, or weights by those of their values."""
    return [x if scale is None else x * scale for x, scale in zip(numbers, scales, strict=True)]


def _with_exponents(scores, scales) -> list:
    """log2 of 2^score times the scale of its value. A scale below 2^-60 counts as that."""
    pairs = zip(scores, scales, strict=True)
    return [s if scale is None else s + lanes.log2(maximum(scale, 2.0**-60)) for s, scale in pairs]


def _multiplied(layout, queries, keys) -> list:
    """Products of keys g and g + 8 with columns 2 t and 2 t + 1 of the queries, [key, column]."""
    c = [[real(0)] * 4 for _ in range(2)]  # a chain each for half of the dimensions
    first, second = ([pair for part in key for pair in layout.pairs(part)] for key in keys)
    for i in range(0, len(first), 2):
        for a in zip(first[i], second[i], first[i + 1], second[i + 1], strict=True):
            for b in queries:
                c[i // 2 % 2] = tensor_cores.add_product(c[i // 2 % 2], a, b[i : i + 2], layout.OPERAND)
    return [x + y for x, y in zip(*c, strict=True)]
