"""A decoder-only transformer: its layers one after another, in a loop, in straight code or in few launches.

tokens -> embed -> decoder: mixer and channels of each layer (layers.py) -> logits
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bonsai_jax.config import ModelConfig
from bonsai_jax.network import cache as kv
from bonsai_jax.network.cache import KVCache
from bonsai_jax.network.layers import (
    attended,
    attention_block,
    delta_block,
    delta_mixed,
    delta_of,
    experts_block,
    gated_mlp,
    joined,
    rotations,
)
from bonsai_jax.network.parallel import over_mesh
from bonsai_jax.network.taps import Taps, tapped
from bonsai_jax.weights.params import Params
from pallas_kernels import QTensor, device, matmul
from pallas_kernels.attention import empty_workspace

UNROLL = 4  # layers of a turn of prefill's loop on kernels: between turns a GPU waits for the host


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
    or two a layer, or eight, where that is its schedule, else unrolled: a GPU captures straight code as one
    graph, but a loop not.
    """
    taps = Taps() if taps is None else taps
    if not isinstance(taps, Taps):
        raise TypeError(f'taps is a {type(taps).__name__}; give bj.Taps, such as bj.Taps("output")')

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
    whole = one_token and not taps.used and not hold
    schedule = params.step.schedule(rows) if whole else "launches"
    if schedule == "one_launch":
        x, cache = _one_launch(x, cache, params, positions, rotation, config)
    elif schedule == "layer_products":
        x, cache = _by_layer_products(x, cache, params, positions, rotation, config, num_keys)
    elif schedule == "layer_gemms":
        x, cache = _by_layer_gemms(x, cache, params, positions, rotation, config)
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
        _, state = delta_of(qkv_z, gates, params, index, cache, positions, config)
        return cache.replace(delta=state), None

    each = jnp.arange(len(config.layers_of("delta"))), held["held qkv z"], held["held gates"]
    return jax.lax.scan(layer, cache, each, unroll=UNROLL if params.step.unrolled else 1)[0]


def _step_inputs(cache: KVCache, params: Params, positions, rotation):
    """`StepInputs` of one token a row: positions [B, 1], rotation [B, 1, pairs] each."""
    from pallas_kernels.step.inputs import StepInputs  # only GPUs need it

    w = params.layers
    ffn_norm = w.ffn_norm if w.experts_norm is None else w.experts_norm
    assert w.attn_norm is not None and ffn_norm is not None  # see problems.Step
    return StepInputs(
        attn_norm=w.attn_norm,
        ffn_norm=ffn_norm,
        bias=w.bqkv,
        head_norms=None if w.q_norm is None or w.k_norm is None else (w.q_norm, w.k_norm),
        rotation=(rotation[0][:, 0], rotation[1][:, 0]),
        k_pages=cache.k,
        v_pages=cache.v,
        block_table=cache.block_table,
        positions=positions[:, 0],
    )


def _one_launch(x, cache: KVCache, params: Params, positions, rotation, config: ModelConfig):
    """All layers of a decode step, by one kernel."""
    if config.experts is not None:
        return _one_launch_of_experts(x, cache, params, positions, rotation, config)
    from pallas_kernels.step.decode_layers import Shapes, decode_layers  # only GPUs need it

    w = params.layers
    assert w.w_gate is not None and w.w_up is not None and w.w_down is not None
    parts = [stack.parts[0] for stack in (*w.wqkv, w.wo, w.w_gate, w.w_up, w.w_down)]
    stacks = [part for part in parts if isinstance(part, QTensor)]  # all: see problems.Step
    shape = (x.shape[0], config.hidden, config.ffn, config.num_heads, config.num_kv_heads, config.head_dim)
    kernel = functools.partial(
        decode_layers,
        shapes=Shapes(
            *shape,
            blocks=device.multiprocessors(),
            bits=stacks[0].products.activation_bits,
            eps=config.rms_norm_eps,
            activation=config.activation,
        ),
        interleaved=config.rope.interleaved,
    )
    y, k_pages, v_pages = jax.custom_batching.sequential_vmap(kernel)(
        x[:, 0],
        tuple((part.fields["words"], part.fields["scales"]) for part in stacks),
        _step_inputs(cache, params, positions, rotation),
    )
    return y[:, None], cache.replace(k=k_pages, v=v_pages)


def _one_launch_of_experts(x, cache: KVCache, params: Params, positions, rotation, config: ModelConfig):
    from pallas_kernels.step import experts_layers  # only GPUs need it

    w, sizes = params.layers, config.experts
    assert sizes is not None and w.router is not None
    assert w.expert_gate is not None and w.expert_up is not None and w.expert_down is not None
    y, k_pages, v_pages = experts_layers.run(
        joined(x, w.wqkv, 0, w.attn_norm, config.rms_norm_eps)[:, 0],
        x[:, 0],
        (*w.wqkv, w.wo, w.expert_gate, w.expert_up, w.expert_down),  # five: see problems.Step
        w.router,
        _step_inputs(cache, params, positions, rotation),
        experts=experts_layers.Experts(sizes.count, sizes.used, sizes.normalized),
        eps=config.rms_norm_eps,
        interleaved=config.rope.interleaved,
        activation=config.activation,
    )
    return y[:, None], cache.replace(k=k_pages, v=v_pages)


def _by_layer_products(x, cache: KVCache, params: Params, positions, rotation, config: ModelConfig, num_keys):
    """All layers of a decode step, by two kernels each: what mixes tokens, and all products up to the next
    one's."""
    from pallas_kernels.step import layer_products  # only GPUs need it
    from pallas_kernels.step.layer_products import OfLayer

    w, rows = params.layers, x.shape[0]
    assert w.w_gate is not None and w.w_up is not None and w.w_down is not None
    words = layer_products.workspace_words(rows, config.hidden, config.ffn)
    of_attention = empty_workspace(rows, config.num_heads, cache.k)
    of_products = jnp.zeros(words, jnp.int32)

    of_kind = {"attention": (w.attn_norm, *w.wqkv, w.wo), "delta": (w.delta_norm, *w.delta_in, w.delta_out)}
    used = [of_kind[mixer] for mixer in dict.fromkeys(mixer for mixer, _ in config.kinds)]
    _, inputs, outputs = zip(*used, strict=True)  # joined: see problems.Step
    rounded = layer_products.rounded_vectors(outputs, (w.w_gate, w.w_up, w.w_down), inputs, rows)

    def of_mixer(layer: int) -> tuple[OfLayer, OfLayer, OfLayer]:
        """Its norm, what makes its inputs, and its output."""
        (mixer, _), (index, _) = config.kinds[layer], config.places(layer)
        norm, inputs, output = of_kind[mixer]
        return OfLayer(norm, index), OfLayer(inputs, index), OfLayer(output, index)

    norm, inputs, _ = of_mixer(0)
    made = joined(x, (inputs.stack,), inputs.index, norm.stack, config.rms_norm_eps)
    for layer in range(config.num_layers):
        (mixer, _), (index, of_channels) = config.kinds[layer], config.places(layer)
        if mixer == "attention":
            out, cache, of_attention = attended(
                made, params, index, cache, positions, rotation, config, num_keys, of_attention
            )
        else:
            out, cache = delta_mixed(made, x, params, index, cache, positions, config)
        norm, gate, up, down = (OfLayer(of, of_channels) for of in (w.ffn_norm, w.w_gate, w.w_up, w.w_down))
        following = of_mixer(layer + 1)[:2] if layer + 1 < config.num_layers else None
        y, made, of_products = layer_products.run(
            out[:, 0], x[:, 0], of_mixer(layer)[2], (norm, gate, up, down), following, layer, of_products,
            config.rms_norm_eps, rounded, config.activation,
        )  # fmt: skip
        x, made = y[:, None], None if made is None else made[:, None]
    return x, cache


def _by_layer_gemms(x, cache: KVCache, params: Params, positions, rotation, config: ModelConfig):
    """All layers of a decode step of many rows, by eight kernels each, or a few more."""
    from pallas_kernels.step import layer_gemms  # only GPUs need it

    w = params.layers
    assert w.w_gate is not None and w.w_up is not None and w.w_down is not None
    stacks = (*w.wqkv, w.wo, w.w_gate, w.w_up, w.w_down)  # five: see problems.Step
    inputs, total = _step_inputs(cache, params, positions, rotation), layer_gemms.Parts(x[None, :, 0])
    workspace = empty_workspace(x.shape[0], config.num_heads, cache.k)
    for layer in range(config.num_layers):
        kernels = functools.partial(
            layer_gemms.run, layer=layer, eps=config.rms_norm_eps, interleaved=config.rope.interleaved,
            activation=config.activation,
        )  # fmt: skip
        total, k_pages, v_pages, workspace = jax.custom_batching.sequential_vmap(kernels)(
            total, stacks, inputs, workspace
        )
        inputs = inputs._replace(k_pages=k_pages, v_pages=v_pages)
    return layer_gemms.summed(total)[:, None], cache.replace(k=inputs.k_pages, v=inputs.v_pages)


def logits(params: Params, x: Float[Array, "*batch H"], config: ModelConfig) -> Float[Array, "*batch V"]:
    """Scores of every token, from the decoder's output, which is normed here; tied models use the embedding
    as the output matrix."""
    head = params.embed if params.head is None else params.head
    scores = matmul(x, head, gamma=params.final_norm, eps=config.rms_norm_eps)
    if params.axis is None:
        return scores
    # The last device's share of the vocabulary may be padded.
    return jax.lax.all_gather(scores, params.axis, axis=-1, tiled=True)[..., : config.vocab_size]
