"""What a warp of decode attention does: 16 keys at a time.

    lane = 4 g + t    of the scores                    of the weighted values
    keys, values      keys g and g + 8,                keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9,
                      dimensions 32 c + 8 t + i        dimensions 64 c + 8 g + i
    queries, weights  column g, the same dimensions    column g, the same keys
    results           the same keys,                   the same dimensions,
                      columns 2 t and 2 t + 1          columns 2 t and 2 t + 1

(i from 0 to 7: loads of 16 bytes, if numbers have two. Which of a head's dimensions a lane has is free, as
long as q and k agree.) Tensor cores multiply pairs of 16-bit numbers, the cache layout's OPERAND; queries and
weights are split into two of them, whose sum has 16 bits of mantissa in bfloat16 and 22 in float16. Keys, or
dimensions of values, are the 16 rows of a tensor core. Of its 8 columns a head has 2, of the high and of the
low parts, and lane 4 g + t head t; of 5 to 7 heads each has one, the parts are multiplied one after the
other, and the lane has heads 2 t and 2 t + 1.

Keys and values of a warp's first visit are on their way before q arrives; those of later visits are requested
as soon as their place has been read (decode_sources.py).
"""

import dataclasses
import functools
import operator

import jax

from pallas_kernels.attention import decode_sources
from pallas_kernels.attention.decode_cache import LayerShare, team_barrier, team_begin, team_owner
from pallas_kernels.attention.decode_keys import Warp
from pallas_kernels.attention.decode_plan import KEYS, Plan
from pallas_kernels.attention.decode_sources import Source, chosen
from pallas_kernels.attention.decode_splits import LOWEST
from pallas_kernels.attention.decode_token import NewToken
from pallas_kernels.gpu import lanes, tensor_cores
from pallas_kernels.gpu.values import greatest, index, integer, maximum, real, select


def attend(work: LayerShare, smem, slot, load_qkv, next_layer=None, asked=None, loaded=None):
    """(head, maximum, sum of weights, weighted values) of a warp's keys, for each of a lane's heads: of these
    values [c][i].

    slot        address of this warp's `visit_bytes` of shared memory, and the same xor that of its second, 0
                if it has none, None if no warp has; None: keys and values go to registers
    load_qkv    as for `decode.Attention.run`
    next_layer  (a layer, whether its first keys and values are asked for, into the L2 cache), or None
    asked       whether this warp's first keys are on their way to the slot (`copy_first`); None: they are not
    loaded      as for `decode.Attention.run`
    """
    plan, share, warp = work.plan, work.share, Warp.locate(work)
    first, step = share.start + warp.number * KEYS, KEYS * plan.team
    # Before q is asked for, which other blocks may still be making.
    source, carry = decode_sources.begin(warp, first, step, slot, asked)
    if next_layer is not None:
        layer, few = next_layer
        with lanes.when(few):
            decode_sources.prefetch(dataclasses.replace(work, layer=layer))
    token = NewToken(plan, work.cache, share, work.layer, smem, team_begin(plan))
    token.make(load_qkv, loaded)
    team_barrier(plan)()

    def work_of_visit():
        """`work`. A warp that is alone with its row has few registers, so it computes row and heads again."""
        if plan.team > 1:
            return work
        _, row, heads, _ = team_owner(plan)
        return dataclasses.replace(work, share=dataclasses.replace(share, row=row, heads=heads))

    def next_visit(base, carry):
        warp = Warp.locate(work_of_visit(), index(lanes.opaque(integer(work.layer))))  # few registers
        state, carry = jax.tree.unflatten(structure, carry)
        keys = source(warp, token, lanes.opaque(integer(base)), carry=carry)
        return jax.tree.leaves((visit(keys, state), keys.carry))

    heads = warp.heads
    state = [real(LOWEST)] * len(heads), [real(0)] * len(heads), [real(0)] * (plan.head_dim // 4)
    carry, structure = jax.tree.flatten((state, carry))
    carry = lanes.loop(first, share.stop, step, carry, next_visit)
    maxima, totals, o = jax.tree.unflatten(structure, carry)[0]
    totals = [lanes.warp_sum_real(total, 32, first=4) for total in totals]
    # Of results two columns of each row: of one head what is to be added, or of two heads.
    rows = [head_columns(plan, o[i : i + 2]) for i in range(0, len(o), 2)]
    values = [[head[i : i + 8] for i in range(0, len(head), 8)] for head in zip(*rows, strict=True)]
    return list(zip(heads, maxima, totals, values, strict=True))


def head_columns(plan: Plan, two) -> list:
    """What this lane's heads have of a row of results, of which it has two columns."""
    return [two[0] + two[1]] if plan.columns == 2 else two


def visit(source: Source, state) -> tuple:
    """16 keys and values. State, of this lane's heads: the largest scores; its shares of the sums of weights;
    of the weighted values for each (c, i) two columns of dimension 64 c + 8 g + i."""
    warp, token, layout = source.warp, source.token, source.warp.cache.layout
    keys, key_scales, value_scales = source.keys()
    sums = multiplied(layout, token.queries(index(warp.g), index(warp.t)), keys)
    scores = [head_columns(warp.plan, sums[i : i + 2]) for i in (0, 2)]  # [key][head]
    scores = [
        scaled([s if unit is None else s * unit for s in head], key_scales)
        for head, unit in zip(zip(*scores, strict=True), token.units(warp.heads), strict=True)
    ]
    capped = functools.partial(warp.plan.scores.capped, exp2=lanes.exp2, reciprocal=lanes.reciprocal)
    scores = [[capped(s) for s in head] for head in scores]
    source.request_keys()
    valid = [warp.sees(j) for j in source.key_js]
    scores = [[select(ok, s, LOWEST) for ok, s in zip(valid, head, strict=True)] for head in scores]
    largest = [greatest(with_exponents(head, value_scales)) - layout.WEIGHT_EXPONENT for head in scores]
    maxima, totals, o = raised(state, largest)
    weights = [
        [select(ok, lanes.exp2(s - m), real(0)) for ok, s in zip(valid, head, strict=True)]
        for head, m in zip(scores, maxima, strict=True)
    ]
    totals = [functools.reduce(operator.add, w, total) for w, total in zip(weights, totals, strict=True)]
    weights = across_keys(layout, [scaled(head, value_scales) for head in weights])
    state = maxima, totals, weighted(layout, weights, source.values(), o)
    source.request_values()
    return state


def scaled(numbers, scales) -> list:
    """Scores by the scales of their keys, or weights by those of their values."""
    return [x if scale is None else x * scale for x, scale in zip(numbers, scales, strict=True)]


def with_exponents(scores, scales) -> list:
    """log2 of 2^score times the scale of its value: weights are relative to the largest of them, so that with
    their scales they stay in range. A scale below 2^-60 counts as that."""
    pairs = zip(scores, scales, strict=True)
    return [s if scale is None else s + lanes.log2(maximum(scale, 2.0**-60)) for s, scale in pairs]


def multiplied(layout, queries, keys) -> list:
    """Products of keys g and g + 8 with columns 2 t and 2 t + 1 of the queries, [key, column]."""
    c = [[real(0)] * 4 for _ in range(2)]  # a chain each for half of the dimensions
    first, second = ([pair for part in key for pair in layout.pairs(part)] for key in keys)
    for i in range(0, len(first), 2):
        for a in zip(first[i], second[i], first[i + 1], second[i + 1], strict=True):
            for b in queries:
                c[i // 2 % 2] = tensor_cores.add_product(c[i // 2 % 2], a, b[i : i + 2], layout.OPERAND)
    return [x + y for x, y in zip(*c, strict=True)]


def raised(state, largest):
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


def across_keys(layout, weights) -> list:
    """Weights [head][key] of keys g and g + 8 -> pairs of column g, of keys 2 t and 2 t + 1 and of those + 8,
    for each product that values are to be weighted by."""
    if len(weights) == 1:
        high, low = layout.split(*weights[0])
        products = [[lanes.bytes_of(high, low, selector) for selector in (0x5410, 0x7632)]]
    else:
        products = zip(*(layout.split(*key) for key in zip(*weights, strict=True)), strict=True)
    return [[lanes.transposed_pairs(word) for word in words] for words in products]


def weighted(layout, weights, values, o) -> list:
    """The sums o, and the values weighted by pairs of weights added."""
    out = []
    for c in range(len(values[0])):
        lower, upper = (layout.pairs_across(values[k][c], values[k + 1][c]) for k in (0, 2))
        for i in range(0, 8, 2):
            at = 2 * (8 * c + i)
            acc = o[at : at + 4]
            for a in zip(lower[i], lower[i + 1], upper[i], upper[i + 1], strict=True):
                for b in weights:
                    acc = tensor_cores.add_product(acc, a, b, layout.OPERAND)
            out += acc
    return out
