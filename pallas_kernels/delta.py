"""Gated delta net: a mixer of tokens that keeps one matrix of each head, and no keys (Yang et al. 2024)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.norm import rms_norm

CHUNK = 64  # tokens between which nothing waits for the token before
EXACT = jax.lax.Precision.HIGHEST


def delta_net(
    qkv: Float[Array, "B T C"],
    z: Float[Array, "B T Hv*V"],
    alpha: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"],
    states: Float[Array, "L B Hv K V"],
    tails: Float[Array, "L B W-1 C"],
    positions: Int[Array, "B T"],
    layer: int | Int[Array, ""],
    *,
    conv: Float[Array, "L C W"],
    decay: Float[Array, "L Hv"],
    dt: Float[Array, "L Hv"],
    norm: Float[Array, "L V"],
    eps: float,
    grouped: bool,
) -> tuple[Float[Array, "B T Hv*V"], Float[Array, "L B Hv K V"], Float[Array, "L B W-1 C"]]:
    """What a layer does between its projections: convolution, norms, the recurrence, the gated norm.

    q, k, v = silu(causal depthwise convolution over W tokens of qkv);   q, k <- x / max(|x|, eps) per head
    g = decay softplus(alpha + dt);   b = sigmoid(beta)
    S <- exp(g) S;   d = b (v - S^T k);   S <- S + k d^T;   o = S^T q / sqrt(K)
    y = rms_norm(o; norm) silu(z)

    qkv        as projected: Hk heads of K queries, as many of keys, Hv heads of V values; C = 2 Hk K + Hv V
    states     S of every layer and row, float32
    tails      the last W - 1 tokens of qkv of every layer and row, float32
    positions  int32, of each token within its row; -1 for padding, behind a row's tokens: nothing of it is
               kept. A row whose first token is at 0 begins with zeros, whatever the state held
    layer      picks the layer of states, tails and weights
    decay      -exp(A_log): below 0
    grouped    v head h uses k head h // (Hv / Hk); else h % Hk
    Returns y, and states and tails with the layer's own replaced (in place, where they are donated).

    One token a row is the recurrence as it is written; more go in chunks of 64, by products of matrices and
    a triangular solve (the WY form), at HIGHEST: the same numbers but for rounding.
    """
    B, T, C = qkv.shape
    Hv, K, V = states.shape[2:]
    Hk, W = (C - Hv * V) // (2 * K), conv.shape[-1]
    valid = positions >= 0
    fresh = (positions[:, 0] == 0)[:, None, None]
    S = jnp.where(fresh[..., None], 0.0, states[layer])
    seen = jnp.concatenate([jnp.where(fresh, 0.0, tails[layer]), qkv.astype(jnp.float32)], axis=1)
    if T == 1:  # a row that has ended keeps its own
        tail = jnp.where(valid[:, :, None], seen[:, 1:], seen[:, :-1])
    else:
        last = valid.sum(1)[:, None] + jnp.arange(W - 1)
        tail = jnp.take_along_axis(seen, last[..., None], axis=1)
    weights = conv[layer]
    u = jax.nn.silu(sum(seen[:, i : i + T] * weights[:, i] for i in range(W)))
    q, k, v = jnp.split(u, (Hk * K, 2 * Hk * K), axis=-1)
    q, k = (_heads(x.reshape(B, T, Hk, K), Hv, eps, grouped) for x in (q, k))
    b = jnp.where(valid[..., None], jax.nn.sigmoid(beta), 0.0)
    g = jnp.where(valid[..., None], decay[layer] * jax.nn.softplus(alpha + dt[layer]), 0.0)
    recur = _one_token if T == 1 else _chunks
    o, S = recur(q * K**-0.5, k, v.reshape(B, T, Hv, V), b, g, S)
    y = rms_norm(o, norm[layer], eps).reshape(B, T, Hv * V) * jax.nn.silu(z)
    return y, states.at[layer].set(S), tails.at[layer].set(tail)


def _heads(x: Float[Array, "B T Hk K"], Hv: int, eps: float, grouped: bool) -> Float[Array, "B T Hv K"]:
    """Normed queries or keys, those of each v head."""
    x = x / jnp.maximum(jnp.sqrt(jnp.sum(x * x, -1, keepdims=True)), eps)
    times = Hv // x.shape[2]
    return jnp.repeat(x, times, axis=2) if grouped else jnp.tile(x, (1, 1, times, 1))


def _one_token(q, k, v, b, g, S):
    """The recurrence of one token; q, k [B, 1, H, K], v [B, 1, H, V], b, g [B, 1, H], S [B, H, K, V]."""
    q, k, v, b, g = (x[:, 0] for x in (q, k, v, b, g))
    S = jnp.exp(g)[..., None, None] * S
    d = b[..., None] * (v - jnp.sum(S * k[..., None], axis=-2))  # [B, H, V]
    S = S + k[..., None] * d[..., None, :]
    return jnp.sum(S * q[..., None], axis=-2)[:, None], S


def _chunks(q, k, v, b, g, S):
    """The recurrence of many tokens. With G the sum of g within a chunk, up to and with a token,

    A[t, i] = b_t exp(G_t - G_i) k_t . k_i, i < t;   [U W] = (I + A)^-1 [b v, b exp(G) k]

    are known for all chunks at once, and D = U - W S are a chunk's d's; then

    o = exp(G) q S + M D,   M[t, i] = exp(G_t - G_i) q_t . k_i, i <= t
    S <- exp(G_end) S + sum_i exp(G_end - G_i) k_i d_i^T
    """
    B, T, H, _ = q.shape
    many = -(-T // CHUNK)

    def cut(x):
        """[B, T, H, ...] -> [chunks, B, H, CHUNK, ...], padded with tokens that change nothing."""
        x = jnp.pad(x, ((0, 0), (0, many * CHUNK - T), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(B, many, CHUNK, *x.shape[2:]), (1, 3), (0, 2))

    q, k, v, b, g = map(cut, (q, k, v, b, g))
    G = jnp.cumsum(g, axis=-1)
    later = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
    between = jnp.exp(jnp.where(later, G[..., :, None] - G[..., None, :], -jnp.inf))  # [chunks, B, H, t, i]
    product = lambda a, b: jnp.einsum("nbhtk,nbhik->nbhti", a, b, precision=EXACT)  # noqa: E731
    A = jnp.tril(b[..., None] * between * product(k, k), -1)
    wanted = jnp.concatenate([b[..., None] * v, (b * jnp.exp(G))[..., None] * k], axis=-1)
    solved = jax.lax.linalg.triangular_solve(A, wanted, left_side=True, lower=True, unit_diagonal=True)
    U, W = jnp.split(solved, (v.shape[-1],), axis=-1)
    M = between * product(q, k)
    end = G[..., -1:]

    def chunk(S, of):
        U, W, M, from_S, to_S, kept = of
        D = U - jnp.matmul(W, S, precision=EXACT)
        o = jnp.matmul(from_S, S, precision=EXACT) + jnp.matmul(M, D, precision=EXACT)
        return kept[..., None] * S + jnp.einsum("bhik,bhiv->bhkv", to_S, D, precision=EXACT), o

    each = U, W, M, jnp.exp(G)[..., None] * q, jnp.exp(end - G)[..., None] * k, jnp.exp(end)
    S, o = jax.lax.scan(chunk, S, each)
    o = jnp.moveaxis(o, (0, 2), (1, 3)).reshape(B, many * CHUNK, H, -1)
    return o[:, :T], S
