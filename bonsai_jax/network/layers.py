"""The layers of a decoder-only transformer: pure functions of arrays and flax dataclasses."""

import math
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bonsai_jax.config import ModelConfig, RopeConfig
from bonsai_jax.network import taps as tapping
from bonsai_jax.network.cache import DeltaState, KVCache
from bonsai_jax.network.taps import Tap, tapped
from bonsai_jax.weights.params import Params
from pallas_kernels import (
    LayerStack,
    QTensor,
    attend,
    delta_net,
    experts_ffn,
    experts_gated,
    experts_matmul,
    gated,
    matmul,
    rms_norm,
    route,
)
from pallas_kernels.delta import Gates
from pallas_kernels.matmul import sent_product
from pallas_kernels.qtensor import leaves

PREFILL_SUMS = jnp.bfloat16  # over GPUs, behind GEMMs that round anyway: half of what goes between them
STEP_TOKENS = 8  # most tokens of a row in a decode step (speculation.py): more are prefill
NO_TAPS: Mapping[str, Tap] = types.MappingProxyType({})


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position of each rotated pair, float32 [head_dim / 2].

    none    theta_i = base^(-2 i / head_dim)
    linear  theta_i / factor
    yarn    theta_i where a pair turns more than beta_fast times within the original context, theta_i / factor
            where it turns less than beta_slow times, and a ramp over i between the two (Peng et al. 2023, as
            in llama.cpp)
    llama3  the same idea with borders in wavelengths and a ramp over frequency (Llama 3.1)
    """
    i = np.arange(head_dim // 2)
    theta = rope.base ** (-2.0 * i / head_dim)
    if rope.scaling == "none":
        return theta.astype(np.float32)
    if rope.scaling == "linear":
        return (theta / rope.factor).astype(np.float32)
    turns = rope.original_context * theta / (2 * math.pi)  # within the original context
    if rope.scaling == "llama3":
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    else:

        def pair_that_turns(times):
            return (
                head_dim * math.log(rope.original_context / (times * 2 * math.pi)) / (2 * math.log(rope.base))
            )

        low = max(0, math.floor(pair_that_turns(rope.beta_fast)))
        high = min(head_dim - 1, math.ceil(pair_that_turns(rope.beta_slow)))
        keep = 1 - (i - low) / max(0.001, high - low)
    keep = np.clip(keep, 0.0, 1.0)
    return (theta * keep + theta / rope.factor * (1 - keep)).astype(np.float32)


def rotations(
    params: Params, positions: Int[Array, "B T"], config: ModelConfig
) -> tuple[Float[Array, "B T R"], Float[Array, "B T R"]]:
    """Cosine and sine of each rotated pair's angle at these positions, times mscale."""
    angle = positions[..., None].astype(jnp.float32) * params.rope_frequencies  # [B, T, D/2]
    return config.rope.mscale * jnp.cos(angle), config.rope.mscale * jnp.sin(angle)


def attention_block(
    x: Float[Array, "B T H"],
    params: Params,
    index: int | Int[Array, ""],
    cache: KVCache,
    positions: Int[Array, "B T"],
    rotation: tuple[Float[Array, "B T R"], Float[Array, "B T R"]],
    config: ModelConfig,
    num_keys: int | Int[Array, ""],
    workspace: Int[Array, "words"] | None = None,
    taps: Mapping[str, Tap] = NO_TAPS,
) -> tuple[Float[Array, "B T H"], KVCache, Int[Array, "words"] | None]:
    """Self-attention of one layer and its residual: x, the cache and the workspace (pallas_kernels.attend).

    x + W_o attention(...): norm, q k v, (QK-norm,) rope, cache write, attention, (gate,) output projection

    index  the layer's among those with attention (ModelConfig.places)
    taps   what edits or notes values on their way (taps.SITES)
    """
    if taps:
        tapping.check(taps, cache.impl if x.shape[-2] == 1 else cache.prefill_impl, params.axis)
    w = params.layers
    qkv = joined(x, w.wqkv, index, w.attn_norm, config.rms_norm_eps)
    rest = (params, index, cache, positions, rotation, config, num_keys, workspace, taps)
    out, cache, workspace = attended(qkv, *rest)
    return _add_product(x, out, w.wo, index, params, taps.get("attention")), cache, workspace


def attended(
    qkv, params: Params, index, cache: KVCache, positions, rotation, config: ModelConfig, num_keys, workspace,
    taps: Mapping[str, Tap] = NO_TAPS,
):  # fmt: skip
    """Attention's output before its projection, [B, T, Q], the cache and the workspace; qkv has no bias
    yet."""
    w = params.layers
    qkv = qkv if w.bqkv is None else qkv + w.bqkv[index]
    out, k_pages, v_pages, workspace = attend(
        qkv, cache.k, cache.v, cache.block_table, positions, index,
        rotation=rotation, interleaved=config.rope.interleaved, norms=(w.q_norm, w.k_norm),
        eps=config.rms_norm_eps, num_keys=num_keys, impl=cache.impl, prefill_impl=cache.prefill_impl,
        window=config.window, scale=config.attention_scale, gated=config.attention_gate,
        workspace=workspace, taps=taps,
    )  # fmt: skip
    return out, cache.replace(k=k_pages, v=v_pages), workspace


def delta_block(
    x: Float[Array, "B T H"],
    params: Params,
    index: int | Int[Array, ""],
    cache: KVCache,
    positions: Int[Array, "B T"],
    config: ModelConfig,
    taps: Mapping[str, Tap] = NO_TAPS,
    held: dict[str, Any] | None = None,
) -> tuple[Float[Array, "B T H"], KVCache]:
    """Gated delta net of one layer and its residual.

    x + W_out delta_net(W_qkv n, W_z n, W_alpha n, W_beta n),  n = rms_norm(x)

    index  the layer's among those with a delta net (ModelConfig.places)
    taps   of its own it has none: "attention" is what it adds to x
    held   where given, the state stays, and what was to change it is put here (`replay`)
    """
    w = params.layers
    assert w.delta_norm is not None and w.delta_out is not None
    qkv_z = joined(x, w.delta_in, index, w.delta_norm, config.rms_norm_eps)
    y, cache = delta_mixed(qkv_z, x, params, index, cache, positions, config, held)
    return _add_product(x, y, w.delta_out, index, params, taps.get("attention")), cache


def delta_mixed(
    qkv_z, x, params: Params, index, cache: KVCache, positions, config: ModelConfig,
    held: dict[str, Any] | None = None,
) -> tuple[Float[Array, "B T V"], KVCache]:  # fmt: skip
    """What a delta net gives before its output projection, and the cache; x is the layer's input, of which
    gates are made."""
    w, state = params.layers, cache.delta
    assert w.delta_norm is not None and state is not None
    alone = x.shape[-2] == 1 and state.impl != "reference" and held is None
    dense = _dense(w.delta_gates) if alone else None
    if dense is None:
        gates = joined(x, w.delta_gates, index, w.delta_norm, config.rms_norm_eps)
    else:
        gates = Gates(x, w.delta_norm, dense)
    y, state = delta_of(qkv_z, gates, params, index, cache, positions, config)
    if held is None:
        cache = cache.replace(delta=state)
    else:
        held |= {"held qkv z": qkv_z, "held gates": gates}
    return y, cache


def delta_of(
    qkv_z, gates, params: Params, index, cache: KVCache, positions, config: ModelConfig
) -> tuple[Float[Array, "B T V"], DeltaState]:
    """What a delta net gives of its projections, and its layer's new state."""
    w, state, sizes = params.layers, cache.delta, config.delta
    assert state is not None and sizes is not None
    assert w.delta_conv is not None and w.delta_a is not None and w.delta_dt is not None
    assert w.delta_head_norm is not None
    y, s, tail = delta_net(
        qkv_z, gates, state.s, state.tail, positions, index,
        conv=w.delta_conv, decay=w.delta_a, dt=w.delta_dt, norm=w.delta_head_norm,
        eps=config.rms_norm_eps, grouped=sizes.grouped, impl=state.impl, prefill_impl=state.prefill_impl,
    )  # fmt: skip
    return y, state.replace(s=s, tail=tail)


def gated_mlp(
    x: Float[Array, "B T H"],
    params: Params,
    index: int | Int[Array, ""],
    config: ModelConfig,
    taps: Mapping[str, Tap] = NO_TAPS,
) -> Float[Array, "B T H"]:
    """SwiGLU feed-forward of one layer (Shazeer 2020) and its residual.

    x + W_down (silu(W_gate n) * W_up n),  n = rms_norm(x)

    index  the layer's among those with such a feed-forward (ModelConfig.places)
    taps   what edits or notes values on their way (taps.SITES)
    """
    w = params.layers
    assert w.w_gate is not None and w.w_up is not None and w.w_down is not None
    norm = {"gamma": w.ffn_norm, "eps": config.rms_norm_eps}
    if config.activation == "silu":
        hidden = gated(x, w.w_gate, w.w_up, index, **norm)
    else:
        hidden = jax.nn.gelu(matmul(x, w.w_gate, index, **norm)) * matmul(x, w.w_up, index, **norm)
    hidden = tapped(taps, "hidden", hidden)
    return _add_product(x, hidden, w.w_down, index, params, taps.get("mlp"))


def experts_block(
    x: Float[Array, "B T H"],
    params: Params,
    index: int | Int[Array, ""],
    positions: Int[Array, "B T"],
    config: ModelConfig,
    taps: Mapping[str, Tap] = NO_TAPS,
) -> Float[Array, "B T H"]:
    """Mixture of experts of one layer (Shazeer et al. 2017) and its residual.

    x + sum of w_e W_down,e (silu(W_gate,e n) * W_up,e n) over the chosen experts e,  n = rms_norm(x)
    w, chosen = route(softmax(W_router n))

    Over a mesh each device has some experts, whose part of the sum it adds. Tokens of padding have none.

    index  the layer's among those with experts (ModelConfig.places)
    taps   what edits or notes values on their way (taps.SITES)
    """
    w, sizes = params.layers, config.experts
    assert sizes is not None and w.experts_norm is not None and w.router is not None
    assert w.expert_gate is not None and w.expert_up is not None and w.expert_down is not None
    n = rms_norm(x, w.experts_norm[index], config.rms_norm_eps)
    router = tapped(taps, "router", jax.nn.softmax(matmul(n, w.router, index), axis=-1))
    weights, chosen = route(router, sizes.used, normalized=sizes.normalized)
    chosen = tapped(taps, "experts", chosen)
    weights = tapped(taps, "expert_weights", weights)
    here = positions[..., None] >= 0
    if params.axis is not None:
        held = sizes.count // jax.lax.axis_size(params.axis)
        chosen = chosen - jax.lax.axis_index(params.axis) * held
        here &= (chosen >= 0) & (chosen < held)
    chosen = jnp.where(here, chosen, -1)
    if "hidden" in taps:
        hidden = tapped(taps, "hidden", experts_gated(n, w.expert_gate, w.expert_up, chosen, index))
        y = experts_matmul(hidden, w.expert_down, chosen, weights, index)
    else:
        y = experts_ffn(n, w.expert_gate, w.expert_up, w.expert_down, chosen, weights, index)
    return _added(x, y, _rounds(x, w.expert_down), params, taps.get("mlp"))


def joined(x: jax.Array, weights: tuple[LayerStack, ...], index, gamma, eps: float) -> jax.Array:
    """Products of the same normed input, side by side."""
    y = [matmul(x, weight, index, gamma=gamma, eps=eps) for weight in weights]
    return y[0] if len(y) == 1 else jnp.concatenate(y, axis=-1)


def _dense(weights: tuple[LayerStack, ...]) -> jax.Array | None:
    """[layers, N, K] of a matrix that every layer has as plain numbers; None where it is quantized."""
    (first, *more), *rest = (stack.parts for stack in weights)
    if more or rest or not isinstance(first, QTensor) or first.format not in ("f32", "f16", "bf16"):
        return None
    return None if first.rotation is not None else first.fields["w"].reshape(-1, *first.shape)


def _add_product(
    x: jax.Array,
    h: jax.Array,
    weight: LayerStack,
    layer,
    params: Params,
    tap: Tap | None,
) -> jax.Array:
    """x + tap(h W.T). Where inputs of W are split over devices (params.axis), each has a part of the product,
    and x is added to their sum once."""
    if params.axis is None and tap is None:
        return matmul(h, weight, layer, residual=x)
    if params.peers is not None and tap is None and x.shape[-2] == 1:  # a decode step: latency is all
        from pallas_kernels import all_reduce  # only GPUs need it

        if all_reduce.refuses(x.size) is None:
            peers = params.peers[0, 0]
            return all_reduce.receive(x, sent_product(h, weight, layer, peers), peers)
    return _added(x, matmul(h, weight, layer), _rounds(x, weight), params, tap)


def _rounds(x: jax.Array, weight: LayerStack) -> bool:
    """Whether these are many tokens whose product with a weight was rounded anyway."""
    return x.shape[-2] > STEP_TOKENS and all(
        w.products.kernel(x.size // x.shape[-1]) not in ("reference", "cpu") for w in leaves(weight)
    )


def _added(x: jax.Array, y: jax.Array, rounds: bool, params: Params, tap: Tap | None) -> jax.Array:
    """x + tap(y); where each device has a part of y (params.axis), x is added to their sum once."""
    if params.axis is None:
        return x + (y if tap is None else tap(y))
    y = jax.lax.psum(y.astype(PREFILL_SUMS) if rounds else y, params.axis).astype(jnp.float32)
    # Without the barrier, XLA adds all layers' sums anew in every layer.
    return jax.lax.optimization_barrier(x + (y if tap is None else tap(y)))
