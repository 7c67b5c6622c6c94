"""The layers of a decoder-only transformer: pure functions of arrays and flax dataclasses."""

import functools
import math
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bonsai_jax import cache as kv
from bonsai_jax import taps as tapping
from bonsai_jax.cache import DeltaState, KVCache
from bonsai_jax.config import ModelConfig, RopeConfig
from bonsai_jax.parallel import over_mesh
from bonsai_jax.params import Params
from bonsai_jax.taps import Tap, Taps, tapped
from pallas_kernels import (
    LayerStack,
    QTensor,
    attend,
    delta_net,
    device,
    experts_gated,
    experts_matmul,
    gated,
    matmul,
    rms_norm,
    route,
)
from pallas_kernels.attention import empty_workspace
from pallas_kernels.delta import Gates
from pallas_kernels.matmul import sent_product
from pallas_kernels.qtensor import leaves

PREFILL_SUMS = jnp.bfloat16  # over GPUs, behind GEMMs that round anyway: half of what goes between them
STEP_TOKENS = 8  # most tokens of a row in a decode step (speculation.py): more are prefill
NO_TAPS: Mapping[str, Tap] = types.MappingProxyType({})
UNROLL = 4  # layers of a turn of prefill's loop on kernels: between turns a GPU waits for the host


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
    qkv = _joined(x, w.wqkv, index, w.attn_norm, config.rms_norm_eps)
    rest = (params, index, cache, positions, rotation, config, num_keys, workspace, taps)
    out, cache, workspace = _attended(qkv, *rest)
    return _add_product(x, out, w.wo, index, params, taps.get("attention")), cache, workspace


def _attended(
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
    w, state = params.layers, cache.delta
    assert w.delta_norm is not None and w.delta_out is not None and state is not None
    qkv_z = _joined(x, w.delta_in, index, w.delta_norm, config.rms_norm_eps)
    alone = x.shape[-2] == 1 and state.impl != "reference" and held is None
    dense = _dense(w.delta_gates) if alone else None
    if dense is None:
        gates = _joined(x, w.delta_gates, index, w.delta_norm, config.rms_norm_eps)
    else:
        gates = Gates(x, w.delta_norm, dense)
    y, state = _delta_net(qkv_z, gates, params, index, cache, positions, config)
    if held is None:
        cache = cache.replace(delta=state)
    else:
        held |= {"held qkv z": qkv_z, "held gates": gates}
    return _add_product(x, y, w.delta_out, index, params, taps.get("attention")), cache


def _delta_net(
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


def replay(
    params: Params,
    cache: KVCache,
    held: Mapping[str, Float[Array, "L B T ..."]],
    positions: Int[Array, "B T"],
    config: ModelConfig,
) -> KVCache:
    """The cache with the tokens at these positions in its recurrent states, -1 for those to leave out, which
    lie behind a row's others: of tokens that `decoder` read with hold=True. Rewinding is not having read."""
    if cache.delta is None:
        return cache

    def layer(cache, of):
        index, qkv_z, gates = of
        _, state = _delta_net(qkv_z, gates, params, index, cache, positions, config)
        return cache.replace(delta=state), None

    each = jnp.arange(len(config.layers_of("delta"))), held["held qkv z"], held["held gates"]
    return jax.lax.scan(layer, cache, each, unroll=UNROLL if params.step.unrolled else 1)[0]


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
    hidden = tapped(taps, "hidden", experts_gated(n, w.expert_gate, w.expert_up, chosen, index))
    y = experts_matmul(hidden, w.expert_down, chosen, weights, index)
    return _added(x, y, _rounds(x, w.expert_down), params, taps.get("mlp"))


@over_mesh("whole", arrays="whole")
def embed(params: Params, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch H"]:
    """The embedding's rows of these tokens, decoded to float32."""
    if params.axis is None:
        return params.embed.rows(tokens)
    held = params.embed.shape[0]  # tokens of the vocabulary that this device has
    mine = tokens - jax.lax.axis_index(params.axis) * held
    here = (mine >= 0) & (mine < held)
    rows = params.embed.rows(jnp.where(here, mine, 0))
    return jax.lax.psum(jnp.where(here[..., None], rows, 0.0), params.axis)


def decoder(
    params: Params,
    tokens: Int[Array, "B T"] | Float[Array, "B T H"],
    positions: Int[Array, "B T"],
    cache: KVCache,
    config: ModelConfig,
    num_keys: int | Int[Array, ""],
    taps: Taps | None = None,
    hold: bool = False,
) -> tuple[Float[Array, "B T H"], KVCache, dict[str, Float[Array, "L B ..."]]]:
    """Run T tokens a row through every layer, against what the cache holds before them.

    x_0 = embed(tokens);  x <- mixer(x);  x <- channels(x), of each layer those that ModelConfig.kinds names.
                          Returns x, not yet normed (`logits` does), the cache, and what taps.read names, by
                          layer.

    tokens that are floating point stand for themselves: x_0 = tokens. With hold recurrent states stay as they
    were, and what would have changed them is among what is returned by layer: `replay` wants it.

    positions of -1 mark padding: nothing of it is stored, and its output means nothing. The layers are
    scanned with the cache as carry, so that its pages are updated in place, a turn for each period in which
    their kinds repeat; weights stay stacked and are indexed by layer. A decode step on kernels is one launch,
    or two a layer, where that is its schedule, else unrolled: a GPU captures straight code as one graph, but
    a loop not.
    """
    taps = Taps() if taps is None else taps

    def layer_step(carry, place, turn=0):
        """The layer at a place of the turn-th period; turn may be traced."""
        x, cache, workspace = carry
        layer, of_mixer, of_channels = _indices(config, place, turn)
        mixer, channels = config.kinds[place]
        kept: dict[str, jax.Array] = {}
        here = taps.of_layer(layer, kept)
        x = tapped(here, "input", x)
        match mixer:
            case "attention":
                x, cache, workspace = attention_block(
                    x, params, of_mixer, cache, positions, rotation, config, num_keys, workspace, here
                )
            case "delta":
                x, cache = delta_block(
                    x, params, of_mixer, cache, positions, config, here, kept if hold else None
                )
        x = tapped(here, "middle", x)
        match channels:
            case "mlp":
                x = gated_mlp(x, params, of_channels, config, here)
            case "experts":
                x = experts_block(x, params, of_channels, positions, config, here)
        return (tapped(here, "output", x), cache, workspace), kept

    def period(carry, turn):
        each = []
        for place in range(config.period):
            carry, of_layer = layer_step(carry, place, turn)
            each.append(of_layer)
        return carry, each

    rotation = rotations(params, positions, config)
    x = tokens if jnp.issubdtype(tokens.dtype, jnp.floating) else embed(params, tokens)
    kept = {}
    rows = tokens.shape[0]
    one_token = tokens.shape[1] == 1
    schedule = params.step.schedule(rows) if one_token and not taps.used else "launches"
    if schedule == "one_launch":
        x, cache = _one_launch(x, cache, params, positions, rotation, config)
    elif schedule == "layer_products":
        x, cache = _by_layer_products(x, cache, params, positions, rotation, config, num_keys)
    elif one_token and params.step.unrolled:
        carry = x, cache, empty_workspace(rows, config.num_heads, cache.k)
        each = []
        for layer in range(config.num_layers):
            carry, of_layer = layer_step(carry, layer)
            each.append(of_layer)
        x, cache, _ = carry
        kept = _by_layer([], each)
    else:
        turns, rest = divmod(config.num_layers, config.period)
        unroll = max(1, UNROLL // config.period) if params.step.unrolled else 1
        carry, of_turns = jax.lax.scan(period, (x, cache, None), jnp.arange(turns), unroll=unroll)
        each = []
        for layer in range(config.num_layers - rest, config.num_layers):
            carry, of_layer = layer_step(carry, layer)
            each.append(of_layer)
        (x, cache, _), kept = carry, _by_layer(of_turns, each)
    return x, kv.advance(cache, positions), kept


def _indices(config: ModelConfig, place: int, turn) -> tuple[Any, Any, Any]:
    """The layer at a place of the turn-th period: its number, and its indices among those of its mixer and of
    its channels."""
    first, one_period = config.kinds[place], config.kinds[: config.period]
    steps = len(one_period), *(sum(kind in of for of in one_period) for kind in first)
    starts = place, *config.places(place)
    # As it is where it is the turn: models of one kind of layer have no arithmetic here.
    return tuple(turn if (a, b) == (0, 1) else a + b * turn for a, b in zip(starts, steps, strict=True))


def _by_layer(of_turns: list[dict[str, jax.Array]], rest: list[dict[str, jax.Array]]) -> dict[str, jax.Array]:
    """What taps read, by site and stacked over the layers that have it: of each place of a period for all
    turns, and of the layers behind them."""
    found = {}
    for site in dict.fromkeys(name for of in (*of_turns, *rest) for name in of):
        places = [of[site] for of in of_turns if site in of]
        behind = [of[site][None] for of in rest if site in of]
        if len(places) == 1:
            behind = [places[0], *behind]
        elif places:
            stacked = jnp.stack(places, axis=1)
            behind = [stacked.reshape(-1, *stacked.shape[2:]), *behind]
        found[site] = behind[0] if len(behind) == 1 else jnp.concatenate(behind)
    return found


def _joined(x: jax.Array, weights: tuple[LayerStack, ...], index, gamma, eps: float) -> jax.Array:
    """Products of the same normed input, side by side."""
    y = [matmul(x, weight, index, gamma=gamma, eps=eps) for weight in weights]
    return y[0] if len(y) == 1 else jnp.concatenate(y, axis=-1)


def _dense(weights: tuple[LayerStack, ...]) -> jax.Array | None:
    """[layers, N, K] of a matrix that every layer has as plain numbers; None where it is quantized."""
    (first, *more), *rest = (stack.parts for stack in weights)
    if more or rest or not isinstance(first, QTensor) or first.format not in ("f32", "f16", "bf16"):
        return None
    return None if first.rotation is not None else first.fields["w"].reshape(-1, *first.shape)


def _one_launch(x, cache: KVCache, params: Params, positions, rotation, config: ModelConfig):
    """All layers of a decode step, by one kernel."""
    from pallas_kernels.step.decode_layers import Shapes, decode_layers  # only GPUs need it

    w = params.layers
    assert w.w_gate is not None and w.w_up is not None and w.w_down is not None
    parts = [stack.parts[0] for stack in (*w.wqkv, w.wo, w.w_gate, w.w_up, w.w_down)]
    stacks = [part for part in parts if isinstance(part, QTensor)]  # all: see selection.Step
    shape = (x.shape[0], config.hidden, config.ffn, config.num_heads, config.num_kv_heads, config.head_dim)
    kernel = functools.partial(
        decode_layers,
        shapes=Shapes(
            *shape,
            blocks=device.multiprocessors(),
            bits=stacks[0].products.activation_bits,
            eps=config.rms_norm_eps,
        ),
        interleaved=config.rope.interleaved,
    )
    y, k_pages, v_pages = jax.custom_batching.sequential_vmap(kernel)(
        x[:, 0],
        tuple((part.fields["words"], part.fields["scales"]) for part in stacks),
        (w.attn_norm, w.ffn_norm),
        None if w.q_norm is None or w.k_norm is None else (w.q_norm, w.k_norm),
        w.bqkv,
        cache.k,
        cache.v,
        cache.block_table,
        positions[:, 0],
        (rotation[0][:, 0], rotation[1][:, 0]),
    )
    return y[:, None], cache.replace(k=k_pages, v=v_pages)


def _by_layer_products(x, cache: KVCache, params: Params, positions, rotation, config: ModelConfig, num_keys):
    """All layers of a decode step, by two kernels each: attention, and all products up to the next one's."""
    from pallas_kernels.step import layer_products  # only GPUs need it

    w, rows = params.layers, x.shape[0]
    assert w.w_gate is not None and w.w_up is not None and w.w_down is not None and w.ffn_norm is not None
    stacks = (*w.wqkv, w.wo, w.w_gate, w.w_up, w.w_down)  # five: see selection.Step
    words = layer_products.workspace_words(rows, config.hidden, config.ffn)
    of_attention = empty_workspace(rows, config.num_heads, cache.k)
    of_products = jnp.zeros(words, jnp.int32)
    qkv = _joined(x, w.wqkv, 0, w.attn_norm, config.rms_norm_eps)
    x = x[:, 0]
    for layer in range(config.num_layers):
        out, cache, of_attention = _attended(
            qkv, params, layer, cache, positions, rotation, config, num_keys, of_attention
        )
        norms = (w.attn_norm, w.ffn_norm)
        x, qkv, of_products = layer_products.run(
            out[:, 0], x, stacks, norms, layer, of_products, config.rms_norm_eps
        )
        qkv = None if qkv is None else qkv[:, None]
    return x[:, None], cache


def logits(params: Params, x: Float[Array, "*batch H"], config: ModelConfig) -> Float[Array, "*batch V"]:
    """Scores of every token, from the decoder's output, which is normed here; tied models use the embedding
    as the output matrix."""
    head = params.embed if params.head is None else params.head
    scores = matmul(x, head, gamma=params.final_norm, eps=config.rms_norm_eps)
    if params.axis is None:
        return scores
    # The last device's share of the vocabulary may be padded.
    return jax.lax.all_gather(scores, params.axis, axis=-1, tiled=True)[..., : config.vocab_size]


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
        from pallas_kernels.step import all_reduce  # only GPUs need it

        if all_reduce.refuses(x.size) is None:
            peers = params.peers[0, 0]
            return all_reduce.receive(x, sent_product(h, weight, layer, peers), peers)
    return _added(x, matmul(h, weight, layer), _rounds(x, weight), params, tap)


def _rounds(x: jax.Array, weight: LayerStack) -> bool:
    """Whether these are many tokens whose product with a weight was rounded anyway."""
    return x.shape[-2] > STEP_TOKENS and all(
        w.products.of(x.size // x.shape[-1]) not in ("reference", "cpu") for w in leaves(weight)
    )


def _added(x: jax.Array, y: jax.Array, rounds: bool, params: Params, tap: Tap | None) -> jax.Array:
    """x + tap(y); where each device has a part of y (params.axis), x is added to their sum once."""
    if params.axis is None:
        return x + (y if tap is None else tap(y))
    y = jax.lax.psum(y.astype(PREFILL_SUMS) if rounds else y, params.axis).astype(jnp.float32)
    # Without the barrier, XLA adds all layers' sums anew in every layer.
    return jax.lax.optimization_barrier(x + (y if tap is None else tap(y)))
