"""Mamba 2 (Dao and Gu 2024): a state of fixed size for each head, which decays, and to which each token adds
an outer product. In jnp, for every device.

    S <- exp(t A) S + t x B^T;   y = S C + D x
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.causal_conv import causal_conv
from pallas_kernels.norm import rms_norm

CHUNK = 64  # tokens between which nothing waits for the token before
EXACT = jax.lax.Precision.HIGHEST


def mamba2(
    projected: Float[Array, "B T H*P+C+H"],
    states: Float[Array, "L B H P N"],
    tails: Float[Array, "L B W C"],
    positions: Int[Array, "B T"],
    layer: int | Int[Array, ""],
    *,
    groups: int,
    conv: Float[Array, "L C W"],
    conv_bias: Float[Array, "L C"] | None,
    decay: Float[Array, "L H"],
    dt: Float[Array, "L H"],
    skip: Float[Array, "L H"],
    norm: Float[Array, "L H*P"] | None,
    eps: float,
) -> tuple[Float[Array, "B T H*P"], Float[Array, "L B H P N"], Float[Array, "L B W C"]]:
    """What a layer does between its projections: convolution, the recurrence, the gated norm.

    x, B, C = silu(causal depthwise convolution over W tokens of [x; B; C])
    dt = softplus(dt + dt_bias);   S <- exp(dt A) S + dt x B^T;   y = S C + D x    for each head
    y = rms_norm(silu(z) y; norm)    over each group's heads

    projected  z (H heads of P values), x (as many), B and C (for each group of heads N values), t (H)
    states     S of every layer and row, float32
    tails      the last tokens of [x; B; C] of every layer and row, as `causal_conv` keeps them
    positions  int32, of each token within its row; -1 for padding, behind a row's tokens: nothing of it is
               kept. A row whose first token is at 0 begins with zeros, whatever the state held
    layer      picks the layer of states, tails and weights
    groups     of heads that share B and C: head h uses those of group h // (H / groups)
    conv, conv_bias  of the channels of x, B and C
    decay      A = -exp(A_log), below 0
    dt         added to the time steps t
    skip       D
    norm       of y; None: it is not normed
    Returns y, and states and tails with the layer's own replaced.

    One token a row is the recurrence as it is written; more go in chunks of 64 by products of matrices: the
    same numbers but for rounding.
    """
    B, T, _ = projected.shape
    H, P, N = states.shape[2:]
    z, xbc, step = jnp.split(projected.astype(jnp.float32), (H * P, 2 * H * P + 2 * groups * N), axis=-1)
    xbc, tails = causal_conv(xbc, tails, positions, layer, weights=conv, bias=conv_bias)
    x, b, c = jnp.split(jax.nn.silu(xbc), (H * P, H * P + groups * N), axis=-1)
    x, b, c = x.reshape(B, T, H, P), b.reshape(B, T, groups, N), c.reshape(B, T, groups, N)
    step = jax.nn.softplus(step + dt[layer])
    step = jnp.where(positions[..., None] >= 0, step, 0.0)  # of padding: S stays as it is
    S = jnp.where((positions[:, 0] == 0)[:, None, None, None], 0.0, states[layer])
    within = _one_token if T == 1 else _chunks
    y, S = within(x * step[..., None], b, c, step * decay[layer], S)
    y = y + skip[layer][:, None] * x
    y = y.reshape(B, T, H * P) * jax.nn.silu(z)
    if norm is not None:
        gamma = norm[layer].reshape(groups, -1)
        y = rms_norm(y.reshape(B, T, groups, -1), gamma, eps).reshape(B, T, H * P)
    return y, states.at[layer].set(S), tails


def _one_token(x, b, c, g, S):
    """The recurrence of one token: t x [B, 1, H, P], b and c [B, 1, G, N], g = t A [B, 1, H] and
    S [B, H, P, N]."""
    times = x.shape[2] // b.shape[2]
    b, c = (jnp.repeat(each[:, 0], times, axis=1) for each in (b, c))
    S = jnp.exp(g[:, 0])[..., None, None] * S + x[:, 0, ..., None] * b[:, :, None]
    return jnp.sum(S * c[:, :, None], axis=-1)[:, None], S


def _chunks(x, b, c, g, S):
    """The recurrence of many tokens. With G the sum of g within a chunk, up to and with a token,

    y = exp(G) S C + M x,   M[t, i] = exp(G_t - G_i) C_t . B_i, i <= t
    S <- exp(G_end) S + sum_i exp(G_end - G_i) x_i B_i^T
    """
    B, T, H, _ = x.shape
    groups = b.shape[2]
    many = -(-T // CHUNK)

    def cut(values):
        """[B, T, heads, ...] -> [chunks, B, groups, heads of a group, CHUNK, ...], padded with tokens that
        change nothing."""
        padded = jnp.pad(values, ((0, 0), (0, many * CHUNK - T), *[(0, 0)] * (values.ndim - 2)))
        heads = values.shape[2] // groups
        parts = padded.reshape(B, many, CHUNK, groups, heads, *values.shape[3:])
        return jnp.moveaxis(parts, (1, 2), (0, 4))

    x, b, c, g = cut(x), cut(b)[:, :, :, 0], cut(c)[:, :, :, 0], cut(g)
    G = jnp.cumsum(g, axis=-1)  # [chunks, B, groups, heads, t]
    earlier = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
    between = jnp.exp(jnp.where(earlier, G[..., :, None] - G[..., None, :], -jnp.inf))
    M = between * jnp.einsum("cbgtn,cbgin->cbgti", c, b, precision=EXACT)[:, :, :, None]
    within = jnp.einsum("cbghti,cbghip->cbghtp", M, x, precision=EXACT)
    end = G[..., -1:]
    added = jnp.einsum("cbghip,cbgin->cbghpn", jnp.exp(end - G)[..., None] * x, b, precision=EXACT)

    def chunk(S, parts):
        c, G, end, added = parts
        y = jnp.exp(G)[..., None] * jnp.einsum("bghpn,bgtn->bghtp", S, c, precision=EXACT)
        return jnp.exp(end)[..., None] * S + added, y

    S, before = jax.lax.scan(chunk, S.reshape(B, groups, H // groups, *S.shape[2:]), (c, G, end, added))
    y = jnp.moveaxis(before + within, (0, 4), (1, 2)).reshape(B, many * CHUNK, H, -1)
    return y[:, :T], S.reshape(B, H, *S.shape[3:])
