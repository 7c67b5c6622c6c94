"""What precedes the recurrence of many tokens, in one launch: the convolution over tokens, silu, and the norm
of queries and keys.

    u = silu(causal convolution of qkv) -> queries and keys: u / max(|u|, eps) per head, queries / sqrt(K)
                                        -> values: u

A warp has 128 neighbouring channels, 4 of each lane, and RUN tokens one after another: the last tokens that
the convolution sees stay in registers, so each token is read once, and a few once more where a run begins.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.activation_math import silu
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import (
    index,
    larger_signed,
    maximum,
    minimum,
    rsqrt,
    select,
    sum_of_squares,
    total,
)

CHANNELS = 128  # of a warp
EACH = 4  # of a lane
WARPS = 4  # of a block
RUN = 16  # tokens of a warp
AT_ONCE = 8  # of them on their way together


@functools.partial(jax.jit, static_argnames=("k_heads", "k_dim", "eps"))
def delta_inputs(
    qkv_z: Float[Array, "B T C+Hv*V"],
    tails: Float[Array, "L B W C"],
    positions: Int[Array, "B T"],
    layer: Int[Array, ""],
    conv: Float[Array, "L C W"],
    *,
    k_heads: int,
    k_dim: int,
    eps: float,
) -> tuple[Float[Array, "B T 2 Hk K"], Float[Array, "B T Hv*V"]]:
    """(qk, v) as `delta_chunks` takes them; of padding they mean nothing.

    Arguments as for `delta_net`, for k_dim of 64 or 128, and C a multiple of 4.
    """
    (rows, tokens, _), (*_, W, C) = qkv_z.shape, tails.shape
    qk_width, lanes_of_head = 2 * k_heads * k_dim, k_dim // EACH
    runs, groups = -(-tokens // RUN), -(-C // (CHANNELS * WARPS))

    def body(qkv_z, tails, positions, layer, conv, qk_out, v_out):
        block = lanes.block()
        row, run, group = block // (runs * groups), block // groups % runs, block % groups
        channel = (group * WARPS + lanes.thread() // 32) * CHANNELS + lanes.thread() % 32 * EACH
        own = minimum(channel, C - EACH)  # those behind the last load it again
        layer, first = index(memory.load(layer, 0)), run * RUN
        weights = [memory.load_reals(W, conv, [layer, own + i, 0]) for i in range(EACH)]
        start = index(larger_signed(memory.load(positions, row, 0), 0))

        def from_tail():
            """The tokens before the first of these, oldest first; 0 before a row's first."""
            loaded = []
            for back in range(W - 1, 0, -1):
                x = memory.load_reals(EACH, tails, [layer, row, (start + (W - back)) % W, own])
                loaded += [select(start >= back, v, 0.0) for v in x]
            return loaded

        def from_tokens():
            return [
                v
                for back in range(W - 1, 0, -1)
                for v in memory.load_reals(EACH, qkv_z, [row, maximum(first, back) - back, own])
            ]

        def some(begin, seen):
            news = [
                memory.load_reals(EACH, qkv_z, [row, minimum(begin + i, tokens - 1), own])
                for i in range(AT_ONCE)
            ]
            for i, new in enumerate(news):
                seen = [*seen, *new]
                u = [
                    silu(total([seen[EACH * tap + e] * weights[e][tap] for tap in range(W)]))
                    for e in range(EACH)
                ]
                store(begin + i, u)
                seen = seen[EACH:]
            return seen

        def store(token, u):
            is_token = token < tokens
            with lanes.when(is_token & (channel < qk_width)):  # all channels of a warp, or none
                squares = lanes.warp_sum_real(sum_of_squares(u), lanes_of_head)
                scale = rsqrt(maximum(squares, eps * eps))
                scale = scale * select(channel < k_heads * k_dim, k_dim**-0.5, 1.0)
                memory.store_reals([v * scale for v in u], qk_out, [row, token, channel])
            with lanes.when(is_token & (channel >= qk_width) & (channel < C)):
                memory.store_reals(u, v_out, [row, token, channel - qk_width])

        seen = lanes.choose(run == 0, from_tail, from_tokens())
        lanes.loop(first, minimum(first + RUN, tokens), AT_ONCE, seen, some)

    qk, v = launch(
        body,
        {
            "qkv_z": qkv_z,
            "tails": tails,
            "positions": positions,
            "layer": jnp.asarray(layer, jnp.int32).reshape(1),
            "conv": conv,
        },
        {
            "qk_out": jax.ShapeDtypeStruct((rows, tokens, qk_width), jnp.float32),
            "v_out": jax.ShapeDtypeStruct((rows, tokens, C - qk_width), jnp.float32),
        },
        name="delta_inputs",
        blocks=rows * runs * groups,
        threads=32 * WARPS,
    )
    return qk.reshape(rows, tokens, 2, k_heads, k_dim), v
