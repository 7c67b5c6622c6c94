"""What encoders of codebook formats (IQ1, IQ2, IQ3) share: weights are points of a codebook times a scale.

The rules are ggml's (llama.cpp, ggml-quants.c) with one difference. ggml rounds each weight alone, and if
that gives no point of the codebook it compares the points nearest to the rounded one; these encoders compare
all points. They find the same one or one with a smaller error. Loops over points and over a few blocks at a
time suit a CPU; on a GPU they are right, and slow.

A group is weights with one scale, the last axis of an array [m, n]. A point has `width` weights of a group.
"""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.encoding import EPSILON, divided, inverse

CHUNK = 32  # blocks that are encoded together: a search holds two numbers for each point and `width` weights
TIE = 1e-5  # the least weight of a choice, of the greatest: it decides where columns have no importance
# The same in `fit`, so that a point does not neglect small weights of a row: with an importance matrix and
# without, where ggml weights errors by squares. ggml's choice among near points has this effect.
WEIGHTED, PLAIN = 0.01, 0.1


def in_chunks(encode: Callable, *arrays: jax.Array) -> dict[str, jax.Array]:
    """encode(*arrays) of blocks [..., 256], CHUNK blocks at a time, so that memory does not grow with them.

    encode  float32 [m, 256], ... -> {field: [m, *field shape]}
    """
    lead = arrays[0].shape[:-1]
    blocks = [jnp.broadcast_to(a, arrays[0].shape).reshape(-1, a.shape[-1]) for a in arrays]
    count, size = len(blocks[0]), min(CHUNK, len(blocks[0]))
    chunks = [jnp.pad(a, [(0, -count % size), (0, 0)]).reshape(-1, size, a.shape[-1]) for a in blocks]
    fields = jax.lax.map(lambda chunk: encode(*chunk), chunks)
    return {
        name: field.reshape(-1, *field.shape[2:])[:count].reshape(*lead, *field.shape[2:])
        for name, field in fields.items()
    }


def odd(grid: np.ndarray) -> np.ndarray:
    """The points of a codebook with 1, 3, 5, ... in place of its values: searches take these as equally
    spaced."""
    return (2 * np.searchsorted(np.unique(grid), grid) + 1).astype(np.float32)


def joined(integers, bits: int) -> jax.Array:
    """Pack integers [..., n], `bits` bits each, into one uint32 [...]. The first gets the lowest bits."""
    shifts = np.arange(integers.shape[-1], dtype=np.uint32) * np.uint32(bits)
    return (integers.astype(jnp.uint32) << shifts).sum(axis=-1, dtype=jnp.uint32)


def nearest_points(x, weights, scales, points: np.ndarray) -> jax.Array:
    """int32 [t, n]: the numbers of the points v with the least sum of weights (scale v - x)^2.

    x, weights  float32 [n, width]
    scales      float32 [t, n], positive: t for each x
    points      float32 [P, width]
    The sum is scale (scale sum w v^2 - 2 sum w v x), and a number that is the same for all points.
    """
    weights = weights + TIE * weights.max(axis=-1, keepdims=True) + jnp.finfo(jnp.float32).tiny
    squares = jnp.matmul(points**2, weights.T, precision="highest")  # [P, n]
    products = jnp.matmul(2 * points, (weights * x).T, precision="highest")

    def attempt(i, best):
        least, number = best
        error = scales * squares[i] - products[i]
        better = error < least
        return jnp.where(better, error, least), jnp.where(better, i, number)

    first = jnp.full(scales.shape, jnp.inf), jnp.zeros(scales.shape, jnp.int32)
    return jax.lax.fori_loop(0, len(points), attempt, first)[1]


def fit(
    x, weights, points: np.ndarray, most, factors: Sequence[float], floor: float
) -> tuple[jax.Array, jax.Array]:
    """The scale of groups, and the numbers of their points, so that x is about scale times these.

    x, weights  float32 [m, n]
    points      float32 [P, width], odd numbers
    most        float32 [m]: the scales to try are most / factor; where it is 0, so is the scale
    factors     the numbers to try as the greatest of the points'
    floor       the least weight of a choice, of the greatest
    Of these the one whose weighted least squares fit explains most of x; then the points nearest by the scale
    of that fit, and the scale that fits these. Points are chosen with the square roots of the weights.
    Returns float32 [m] and int32 [m, n / width].
    """
    (m, n), width = x.shape, points.shape[-1]
    nothing = most < EPSILON
    most = jnp.where(nothing, 1, most)
    parts, roots = x.reshape(-1, width), jnp.sqrt(weights).reshape(-1, width)
    roots = roots + floor * roots.max(axis=-1, keepdims=True)

    def fitted(scales):
        numbers = nearest_points(parts, roots, jnp.repeat(scales, n // width, axis=-1), points)
        q = jnp.asarray(points)[numbers].reshape(-1, m, n)
        return (weights * q * x).sum(axis=-1), (weights * q * q).sum(axis=-1), numbers

    qx, qq, _ = fitted(most / jnp.asarray(factors, jnp.float32)[:, None])
    best = (qx * qx * inverse(qq)).argmax(axis=0)[None]
    qx, qq = (jnp.take_along_axis(a, best, axis=0)[0] for a in (qx, qq))
    scale = jnp.where(qx * qq > 0, qx * inverse(qq), most / points.max())
    qx, qq, numbers = fitted(scale[None])
    scale = jnp.where(qx[0] * qq[0] > 0, qx[0] * inverse(qq[0]), scale)
    return jnp.where(nothing, 0, scale), jnp.where(nothing[:, None], 0, numbers.reshape(m, -1))


def largest(x, weights) -> jax.Array:
    """The greatest number of groups [m, n]."""
    return x.max(axis=-1)


def signed_points(
    x,
    weights,
    points: np.ndarray,
    size: int,
    factors: Sequence[float],
    floor: float = WEIGHTED,
    *,
    even: bool = False,
    most: Callable = largest,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Blocks [m, 256] as signs, points and scales of groups of `size`, by `fit`.

    even  of eight weights the number that is stored as negative is even: where it is odd, the weight whose
          error weighs least gets the other sign
    most  (x, weights) of groups -> `most` of `fit`
    Returns negative, bool [m, 32, 8]; numbers, int32 [m, 256 / width]; scales, float32 [m, 256 / size].
    """
    m = len(x)
    x, weights = x.reshape(m, 32, 8), weights.reshape(m, 32, 8)
    negative = x < 0
    if even:
        least = jax.nn.one_hot((weights * x * x).argmin(axis=-1), 8, dtype=bool)
        negative ^= least & (negative.sum(axis=-1, keepdims=True) % 2 == 1)
    x = jnp.where(negative, -x, x).reshape(-1, size)
    weights = weights.reshape(-1, size)
    scales, numbers = fit(x, weights, points, most(x, weights), factors, floor)
    return negative, numbers.reshape(m, -1), scales.reshape(m, -1)


def odd_scales(scales, steps: int) -> tuple[jax.Array, jax.Array]:
    """d, float32 [m], and codes 0..steps, uint8 [m, groups], of scales: d (2 code + 1) is about the scale."""
    d = divided(scales.max(axis=-1), 2 * steps + 1)
    codes = jnp.round(0.5 * (inverse(d)[:, None] * scales - 1))
    return d, jnp.clip(codes, 0, steps).astype(jnp.uint8)


def shifted_ternary(x, weights, parts: int, shift: float) -> tuple[jax.Array, jax.Array]:
    """The scale of groups, and the sign of `shift` in each of their parts, so that x is about scale times
    (v + shift) or (v - shift), v one of -1, 0, 1.

    x, weights  float32 [m, n]
    The weighted least squares fit that explains most of x, among all ways to give the first numbers in order
    of size -1, the last ones 1 and those between 0, and to choose the signs.
    Returns float32 [m], and float32 [m, parts] of -1 and 1.
    """
    m, n = x.shape
    ordered, weights_ordered, places = jax.lax.sort(
        (x, weights, jnp.broadcast_to(jnp.arange(n), x.shape)), num_keys=1
    )
    member = places // (n // parts) == np.arange(parts)[:, None, None]  # [parts, m, n]

    def running(values):  # [n + 1, parts, m]: the sum of the first i of a part
        sums = jnp.cumsum(jnp.where(member, values, 0), axis=-1)
        return jnp.moveaxis(jnp.pad(sums, [(0, 0), (0, 0), (1, 0)]), -1, 0)

    sums, masses = running(weights_ordered * ordered), running(weights_ordered)
    signs = np.array(list(itertools.product((1, -1), repeat=parts)), np.float32)  # [choices, parts]
    r = shift * signs[..., None]
    splits = jnp.asarray([(i, j) for i in range(n + 1) for j in range(i, n + 1)])

    def explained(i, j):  # [choices, m]: sum w q x and sum w q^2 of q = -1 + r, r, 1 + r
        qx = (1 + r) * sums[-1] - sums[i] - sums[j]
        qq = (1 + r) ** 2 * masses[-1] + (1 - 2 * r) * masses[i] - (1 + 2 * r) * masses[j]
        return qx.sum(axis=-2), qq.sum(axis=-2)

    def attempt(i, best):
        most, scale = best
        qx, qq = explained(*splits[i])
        fit = qx * inverse(jnp.where(qq > 0, qq, 0))
        better = fit * qx > most
        return jnp.where(better, fit * qx, most), jnp.where(better, fit, scale)

    nothing = jnp.zeros((len(signs), m))
    most, scale = jax.lax.fori_loop(0, len(splits), attempt, (nothing, nothing))
    choice = most.argmax(axis=0)
    scale = jnp.take_along_axis(scale, choice[None], axis=0)[0]
    # A negative scale is the same fit with every number's sign changed.
    return jnp.abs(scale), jnp.asarray(signs)[choice] * jnp.where(scale < 0, -1, 1)[:, None]


def ternary_points(
    x, weights, points: np.ndarray, size: int, parts: int, shift: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Blocks [m, 256] as points, shifts and scales of groups of `size`, by `shifted_ternary`; then points are
    the nearest, and scales fit these.

    points  float32 [P, 8], of -1, 0 and 1
    Returns numbers, int32 [m, 32]; shifts, float32 [m, 256 / size, parts]; scales, float32 [m, 256 / size].
    """
    m = len(x)
    x, weights = x.reshape(-1, size), weights.reshape(-1, size)
    scale, signs = shifted_ternary(x, weights, parts, shift)
    shifts = shift * signs
    each = jnp.repeat(shifts, size // parts, axis=-1)  # of every weight
    used = jnp.where(scale > 0, scale, 1)[:, None]
    numbers = nearest_points(
        (x - used * each).reshape(-1, 8), weights.reshape(-1, 8),
        jnp.repeat(used, size // 8, axis=-1).reshape(1, -1), points,
    )  # fmt: skip
    q = jnp.asarray(points)[numbers].reshape(x.shape) + each
    qx, qq = (weights * q * x).sum(axis=-1), (weights * q * q).sum(axis=-1)
    scale = jnp.where((scale > 0) & (qx > 0), qx * inverse(qq), scale)
    return numbers.reshape(m, 32), shifts.reshape(m, -1, parts), scale.reshape(m, -1)
