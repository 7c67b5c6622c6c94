"""The gated delta net in jnp: the definition, and the path of every device without a kernel."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.causal_conv import inputs as convolved
from pallas_kernels.norm import rms_norm

CHUNK = 64  # tokens between which nothing waits for the token before
EXACT = jax.lax.Precision.HIGHEST


class Gates(NamedTuple):
    """Gates that are still to be made: alpha, beta = rms_norm(x; gamma) weights^T. The kernel of one token
    makes them on its way.

    x        of the layer, not normed
    gamma    of each layer
    weights  float32, float16 or bfloat16: rows of alpha, then of beta
    """

    x: Float[Array, "B T H"]
    gamma: Float[Array, "L H"]
    weights: Float[Array, "L 2*Hv H"]


class GateSums(NamedTuple):
    """Gates that are half made: alpha, beta = sum_g products[g] / sqrt(sum_g squares[g] / (128 G) + eps),
    over G groups of 128 columns (matmul/bit_mma/quantize_rows.py). Token t of row b is row b T + t of both.

    products  of gamma x with the rows of alpha, then of beta
    squares   of x; rows behind B T mean nothing
    """

    products: Float[Array, "G B*T 2*Hv"]
    squares: Float[Array, "G rows"]

    def made(self, eps: float, tokens: int = 1) -> Float[Array, "B T 2*Hv"]:
        groups, rows, width = self.products.shape
        mean = self.squares.sum(0)[:rows, None] / (128 * groups)
        gates = self.products.sum(0) * jax.lax.rsqrt(mean + eps)
        return gates.reshape(rows // tokens, tokens, width)


def run(
    qkv_z, gates, states, tails, positions, layer, weights, eps, grouped, stores=True, inputs=None, recur=None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """delta.delta_net's definition: arguments and results are described there.

    weights  conv, decay, dt and norm by name
    inputs   in place of `_inputs` (inputs.delta_inputs)
    recur    in place of the recurrence of many tokens (chunks.delta_chunks)
    """
    if isinstance(gates, GateSums):
        gates = gates.made(eps, qkv_z.shape[1])
    if isinstance(gates, Gates):
        x = rms_norm(gates.x, gates.gamma[layer], eps)
        dense = gates.weights[layer].astype(jnp.float32)
        gates = jnp.einsum("...k,nk->...n", x, dense, precision=EXACT)
    B, T, _ = qkv_z.shape
    Hv, K, V = states.shape[2:]
    qkv, z = jnp.split(qkv_z, (tails.shape[-1],), axis=-1)
    alpha, beta = jnp.split(gates, 2, axis=-1)
    Hk = (qkv.shape[-1] - Hv * V) // (2 * K)
    valid = positions >= 0
    fresh = positions[:, 0] == 0
    seen, tail = convolved(qkv.astype(jnp.float32), tails[layer], positions)
    if inputs is None:
        qk, v = _inputs(seen, weights["conv"][layer], Hk, K, eps)
    else:
        qk, v = inputs(qkv_z, tails, positions, layer, weights["conv"], k_heads=Hk, k_dim=K, eps=eps)
    v = v.reshape(B, T, Hv, V)
    b = jnp.where(valid[..., None], jax.nn.sigmoid(beta), 0.0)
    g = weights["decay"][layer] * jax.nn.softplus(alpha + weights["dt"][layer])
    g = jnp.where(valid[..., None], g, 0.0)
    if recur is None:
        times = Hv // Hk  # v heads of a k head
        qk = jnp.repeat(qk, times, axis=3) if grouped else jnp.tile(qk, (1, 1, 1, times, 1))
        within = _one_token if T == 1 else _chunks
        before = states[layer].astype(jnp.float32)
        o, S = within(qk[:, :, 0], qk[:, :, 1], v, b, g, before, fresh[:, None, None, None])
        if states.dtype != S.dtype:
            most = jnp.finfo(states.dtype).max
            S = jnp.clip(S, -most, most).astype(states.dtype)
        after = states.at[layer].set(S)
    else:
        o, after = recur(qk, v, b, g, states, layer, fresh)
    y = rms_norm(o, weights["norm"][layer], eps) * jax.nn.silu(z.reshape(B, T, Hv, V))
    y = y.reshape(B, T, Hv * V)
    return (y, after, tails.at[layer].set(tail)) if stores else (y, states, tails)


def _inputs(seen, conv, Hk: int, K: int, eps: float) -> tuple[jax.Array, jax.Array]:
    """Queries, times 1 / sqrt(K), and keys, [B, T, 2, Hk, K], and values, [B, T, Hv V], from what the
    convolution sees."""
    # Apart, so that XLA makes each as it reads it, and not first both.
    qk, v = (
        jax.nn.silu(sum(x[..., part] * conv[part, i] for i, x in enumerate(seen)))
        for part in (slice(2 * Hk * K), slice(2 * Hk * K, None))
    )
    qk = qk.reshape(*qk.shape[:2], 2, Hk, K)
    qk = qk / jnp.maximum(jnp.sqrt(jnp.sum(qk * qk, -1, keepdims=True)), eps)
    return qk * jnp.array([K**-0.5, 1.0])[:, None, None], v


def _one_token(q, k, v, b, g, S, fresh):
    """The recurrence of one token; q, k [B, 1, H, K], v [B, 1, H, V], b, g [B, 1, H], S [B, H, K, V], which
    counts as 0 for rows that are fresh [B, 1, 1, 1].

    d = b (v - exp(g) S^T k);   o = exp(g) S^T q + (k . q) d

    so that the old S is read for both products at once, and the new one is only written.
    """
    q, k, v, b, g = (x[:, 0] for x in (q, k, v, b, g))
    decay = jnp.exp(g)[..., None]  # [B, H, 1]
    old = jnp.where(fresh, 0.0, decay[..., None] * S)
    k_product, q_product = (jnp.where(fresh[..., 0], 0.0, jnp.sum(S * x[..., None], axis=-2)) for x in (k, q))
    d = b[..., None] * (v - decay * k_product)
    o = decay * q_product + jnp.sum(k * q, axis=-1, keepdims=True) * d
    return o[:, None], old + k[..., None] * d[..., None, :]


def _chunks(q, k, v, b, g, S, fresh):
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
    right_sides = jnp.concatenate([b[..., None] * v, (b * jnp.exp(G))[..., None] * k], axis=-1)
    solved = jax.lax.linalg.triangular_solve(A, right_sides, left_side=True, lower=True, unit_diagonal=True)
    U, W = jnp.split(solved, (v.shape[-1],), axis=-1)
    M = between * product(q, k)
    end = G[..., -1:]

    def chunk(S, parts):
        U, W, M, from_S, to_S, end_decay = parts
        D = U - jnp.matmul(W, S, precision=EXACT)
        o = jnp.matmul(from_S, S, precision=EXACT) + jnp.matmul(M, D, precision=EXACT)
        return end_decay[..., None] * S + jnp.einsum("bhik,bhiv->bhkv", to_S, D, precision=EXACT), o

    each = U, W, M, jnp.exp(G)[..., None] * q, jnp.exp(end - G)[..., None] * k, jnp.exp(end)
    S, o = jax.lax.scan(chunk, jnp.where(fresh, 0.0, S), each)
    o = jnp.moveaxis(o, (0, 2), (1, 3)).reshape(B, many * CHUNK, H, -1)
    return o[:, :T], S
