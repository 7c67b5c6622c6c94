"""What encoders of formats share: arithmetic as C does it, and searches for the scale of a group.

Encoders are ggml's (llama.cpp, ggml-quants.c), so that a file made here is the file made there: to the bit in
formats with one rule, and nearly where sums of a search are taken in another order. A group is the last axis
of an array.

An importance matrix weights the errors of a search by column: a column's importance is the mean square of the
activations that it is multiplied with.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

EPSILON = 1e-15  # numbers that are all nearer to 0 are stored as 0 by the searches
TRIALS = -0.9, 0.05, 36  # first, step and tries of `affine_fit` with an importance matrix


def inverse(d):
    """1 / d, and 0 for 0."""
    return jnp.where(d == 0, 0, 1 / jnp.where(d == 0, 1, d))


def divided(x, by: float):
    """x / by, rounded as a division is. XLA takes a division by a constant for a product with its inverse,
    which may differ in the last bit; this divisor is none to it."""
    return x / jnp.where(x == x, by, x)


def product(x, by):
    """x by, rounded before anything is added. Compilers make one operation of a product and a sum, which
    rounds once; a choice between the two, whose other side is only taken for NaN, stops that."""
    return jnp.where(x == x, x * by, x)


def sum_in_order(x):
    """The sum of a group, from its first number to its last. XLA chooses an order of its own. A turn adds
    several numbers, because a GPU launches each turn's kernels by themselves."""
    columns = jnp.moveaxis(x, -1, 0)
    add = lambda total, column: (total + column, None)  # noqa: E731
    return jax.lax.scan(add, jnp.zeros_like(columns[0]), columns, unroll=8)[0]


def signed_absmax(x):
    """The first of the numbers furthest from 0; 0 where all are 0 or -0."""
    value = jnp.take_along_axis(x, jnp.abs(x).argmax(axis=-1, keepdims=True), axis=-1)[..., 0]
    return jnp.where(value == 0, 0, value)


def round_half_away(x):
    """Rounded, halves away from 0."""
    return jax.lax.round(x, jax.lax.RoundingMethod.AWAY_FROM_ZERO)


def not_negative(x):
    """x >= 0, which -0.0 is. Compared as integers, because XLA takes a negative denormal for zero."""
    integer = jax.lax.bitcast_convert_type(x, jnp.int32)
    return (integer >= 0) | (integer == jnp.iinfo(jnp.int32).min)


def affine_codes(x, steps: int):
    """d, m (float16) and codes 0..steps (uint8) of numbers between the least, m, and the greatest, m + steps
    d."""
    least = jnp.take_along_axis(x, x.argmin(axis=-1, keepdims=True), axis=-1)[..., 0]  # the first: 0 or -0
    span = x.max(axis=-1) - least
    d = divided(jnp.where(span == 0, 0, span), steps)  # not -0
    q = jnp.trunc(product(x - least[..., None], inverse(d)[..., None]) + 0.5)
    return d.astype(jnp.float16), least.astype(jnp.float16), jnp.minimum(q, steps).astype(jnp.uint8)


def column_weights(x, importance, factor: float, axes: int = 1):
    """importance sqrt(factor s + x^2), where s is the mean square of x along its last `axes` axes: weights of
    errors."""
    square = x * x
    mean = square.mean(axis=tuple(range(-axes, 0)), keepdims=True)
    return importance * jnp.sqrt(factor * mean + square)


def scale_and_minimum(x, weights, levels: int, first: float, step: float, tries: int, *, absolute=False):
    """scale and minimum of `affine_fit`."""
    return affine_fit(x, weights, levels, first, step, tries, absolute=absolute)[:2]


def affine_fit(x, weights, levels: int, first: float, step: float, tries: int, *, absolute=False):
    """scale, minimum >= 0 and codes of groups, so that x is about scale q - minimum, q in 0..levels.

    Begins with the range from the least number, or 0, to the greatest, divided by levels. Then, for i in
    0..tries, the numbers above the minimum that is the best so far are divided by a (levels + first + step
    i)th of the range above it, and the weighted least squares fit to the codes that this gives is kept if its
    error is smaller: the sum of weights (scale q - minimum - x)^2, or of absolute values (ggml's
    make_qkx2_quants and make_qkx3_quants). Codes, uint8, are those that were fitted.
    """
    least, most = jnp.minimum(x.min(axis=-1), 0), x.max(axis=-1)
    flat = most <= least
    most = jnp.where(flat, 1 + least, most)
    w, wx = weights.sum(axis=-1), (weights * x).sum(axis=-1)

    def codes(over, below):
        return jnp.clip(jnp.round(over[..., None] * (x - below[..., None])), 0, levels)

    def error(q, scale, below):
        away = scale[..., None] * q + below[..., None] - x
        return (weights * (jnp.abs(away) if absolute else away * away)).sum(axis=-1)

    def attempt(i, best):
        lowest, scale, below, *fitted = best
        over = (first + step * i.astype(jnp.float32) + levels) / (most - below)
        q = codes(over, below)
        wq = weights * q
        sum_q, sum_qq, sum_qx = wq.sum(axis=-1), (wq * q).sum(axis=-1), (wq * x).sum(axis=-1)
        determinant = w * sum_qq - sum_q * sum_q
        some = determinant > 0
        fit = inverse(jnp.where(some, determinant, 0))
        at = (sum_qq * wx - sum_q * sum_qx) * fit
        tried = jnp.where(at > 0, sum_qx * inverse(sum_qq), (w * sum_qx - wx * sum_q) * fit)
        at = jnp.minimum(at, 0)
        err = error(q, tried, at)
        better = some & (err < lowest)
        new = (err, tried, at, over, below)
        return tuple(
            jnp.where(better, *pair) for pair in zip(new, (lowest, scale, below, *fitted), strict=True)
        )

    scale, over = (most - least) / levels, levels / (most - least)
    best = (error(codes(over, least), scale, least), scale, least, over, least)
    _, scale, below, *fitted = jax.lax.fori_loop(0, tries + 1, attempt, best)
    q = jnp.where(flat[..., None], 0, codes(*fitted)).astype(jnp.uint8)
    return jnp.where(flat, 0, scale), jnp.abs(jnp.where(flat, least, below)), q


def signed_scale(x, codes: Callable, factors, weights=None) -> jax.Array:
    """The scale of `signed_fit`; weights are x^2 unless given."""
    return signed_fit(x, x * x if weights is None else weights, codes, factors)[0]


def signed_fit(x, weights, codes: Callable, factors) -> tuple[jax.Array, jax.Array]:
    """The scale of groups, and the values of their codes, so that x is about scale times these.

    codes    the values of codes, for numbers that were divided by a scale
    factors  inverse scales to try, times the number furthest from 0; the first is the first choice
    Of these the one whose weighted least squares fit explains most of x: the greatest (sum of w c x)^2 / sum
    of w c^2.
    """
    most = signed_absmax(x)
    nothing = jnp.abs(most) < EPSILON
    most = jnp.where(nothing, 1, most)

    def fit(factor):
        c = codes((factor / most)[..., None] * x)
        wc = weights * c
        return (wc * x).sum(axis=-1), (wc * c).sum(axis=-1)

    def attempt(i, best):
        scale, explained, factor = best
        cx, cc = fit(factors[i])
        better = (cc > 0) & (cx * cx > explained * cc)
        tried = cx * inverse(cc)
        new = (tried, tried * cx, factors[i])
        return tuple(jnp.where(better, *pair) for pair in zip(new, (scale, explained, factor), strict=True))

    factors = jnp.asarray(factors, jnp.float32)
    cx, cc = fit(factors[0])
    scale = cx * inverse(cc)
    best = (scale, scale * cx, jnp.full_like(scale, factors[0]))
    scale, _, factor = jax.lax.fori_loop(1, len(factors), attempt, best)
    c = codes((factor / most)[..., None] * x)
    return jnp.where(nothing, 0, scale), jnp.where(nothing[..., None], 0, c)


def tenths(high: int) -> list[float]:
    """Factors of `signed_fit` for codes -high..high - 1: -high, then up to 0.9 more and less (ggml's
    make_qx_quants)."""
    return [-high, *(-high - 0.1 * i for i in range(-9, 10) if i)]


def weighted_affine_codes(x, importance, steps: int):
    """`affine_codes` by `affine_fit`, with errors weighted by column."""
    d, minimum, q = affine_fit(x, column_weights(x, importance, 1, axes=2), steps, *TRIALS)
    return d.astype(jnp.float16), -minimum.astype(jnp.float16), q


def quantized_scales(scales, steps: int):
    """d, float16 [...], and codes 0..steps, uint8, of a block's scales [..., groups], which are not negative:
    d times a code is about the scale."""
    most = scales.max(axis=-1)
    codes = jnp.minimum(jnp.round(steps * inverse(most)[..., None] * scales), steps)
    return divided(most, steps).astype(jnp.float16), codes.astype(jnp.uint8)


def weighted_scales(scales, weights, steps: int):
    """The scale and the codes that `quantized_scales` returns, chosen for the least weighted error."""
    d, q = positive_fit(scales, weights, steps)
    return d.astype(jnp.float16), q.astype(jnp.uint8)


def positive_fit(x, weights, steps: int) -> tuple[jax.Array, jax.Array]:
    """The scale and codes 0..steps, both float32, of groups of numbers that are not negative, with the least
    weighted error: of nine inverse scales around steps / the greatest the best, and then code by code (ggml's
    make_qp_quants)."""
    most = x.max(axis=-1)
    nothing = most < EPSILON
    most = jnp.where(nothing, 1, most)

    def codes(factor):
        return jnp.minimum(jnp.round((factor / most)[..., None] * x), steps)

    def error(factor):
        away = x - codes(factor) * (most / factor)[..., None]
        return (weights * away * away).sum(axis=-1)

    factors = jnp.asarray([steps, *(steps + 0.1 * i for i in range(-4, 5) if i)], jnp.float32)
    best = factors[jnp.stack([error(factor) for factor in factors]).argmin(axis=0)]
    d, q = _refined(x, weights, codes(best), 0, steps, turns=5)
    return jnp.where(nothing, 0, d), jnp.where(nothing[..., None], 0, q)


def weighted_signed_scales(scales, weights, low: int, high: int):
    """`quantized_signed_scales`, of which the weighted error is least: `signed_fit` of the scales."""
    d, codes = signed_fit(scales, weights, rounded_between(low, high), tenths(-low))
    return d.astype(jnp.float16), codes.astype(jnp.int32)


def codes_of(x, d, sc, dmin, m, levels: int):
    """uint8 [..., groups, n]: the codes 0..levels that d sc q - dmin m brings nearest to x, 0 where d sc is
    0."""
    scale, minimum = d.astype(jnp.float32)[..., None] * sc, dmin.astype(jnp.float32)[..., None] * m
    q = jnp.round((x + minimum[..., None]) / jnp.where(scale == 0, jnp.inf, scale)[..., None])
    return jnp.clip(q, 0, levels).astype(jnp.uint8)


def quantized_signed_scales(scales, low: int, high: int):
    """d, float16 [...], and codes low..high, int32, of a block's scales [..., groups] of either sign: d times
    a code is about the scale, and that of the scale furthest from 0 is `low`."""
    over = low * inverse(signed_absmax(scales))
    codes = jnp.clip(jnp.round(over[..., None] * scales), low, high)
    return inverse(over).astype(jnp.float16), codes.astype(jnp.int32)


def signed_codes_of(x, d, sc, low: int, high: int):
    """float32 [..., groups, n]: the codes low..high that d sc q brings nearest to x, 0 where d sc is 0."""
    scale = d.astype(jnp.float32)[..., None] * sc
    return jnp.clip(jnp.round(x / jnp.where(scale == 0, jnp.inf, scale)[..., None]), low, high)


def refined_scale(x, low: int, high: int, turns: int = 5) -> jax.Array:
    """The scale of groups, so that x is about scale times its code, low..high (ggml's make_q3_quants).

    Begins with codes that give the number furthest from 0 the code `low`, and refines them with weights x^2.
    """
    most = signed_absmax(x)
    nothing = jnp.abs(most) < EPSILON
    q = jnp.clip(jnp.round((low / jnp.where(nothing, 1, most))[..., None] * x), low, high)
    return jnp.where(nothing, 0, _refined(x, x * x, q, low, high, turns)[0])


def _refined(x, w, q, low: int, high: int, turns: int) -> tuple[jax.Array, jax.Array]:
    """Scale and codes of groups, from codes q. `turns` times, each code in its turn is the nearest to x by
    the least squares fit of all others, with weights w, if the fit of all is better for it."""
    columns = tuple(jnp.moveaxis(a, -1, 0) for a in (x, w, q))
    qx, qq = (w * q * x).sum(axis=-1), (w * q * q).sum(axis=-1)

    def one(sums, column):
        (qx, qq), (x, w, q) = sums, column
        other_qx, other_qq = qx - w * x * q, qq - w * q * q
        new = jnp.clip(jnp.round(x * other_qq * inverse(jnp.where(other_qx > 0, other_qx, 0))), low, high)
        new_qx, new_qq = other_qx + w * x * new, other_qq + w * new * new
        better = (other_qx > 0) & (new != q) & (new_qq > 0) & (new_qx * new_qx * qq > qx * qx * new_qq)
        sums = jnp.where(better, new_qx, qx), jnp.where(better, new_qq, qq)
        return sums, jnp.where(better, new, q)

    def turn(_, state):
        sums, q = state
        return jax.lax.scan(one, sums, (columns[0], columns[1], q))

    (qx, qq), q = jax.lax.fori_loop(0, turns, turn, ((qx, qq), columns[2]))
    return qx * inverse(qq), jnp.moveaxis(q, 0, -1)


def rounded_between(low: int, high: int) -> Callable:
    """Rounds to whole numbers from low to high."""
    return lambda x: jnp.clip(jnp.round(x), low, high)
