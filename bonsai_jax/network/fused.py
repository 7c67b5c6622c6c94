"""A decode step in few launches: the kernels of pallas_kernels/step, on the weights and the state of a model.

Which of them runs is decided in schedules.py, where the problem that kernels refuse or take guarantees what
is assumed here: one group of what mixes channels, and stacks of one format where a kernel wants it.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from bonsai_jax.config import ModelConfig
from bonsai_jax.network import kinds, workspaces
from bonsai_jax.network.adapter import beside
from bonsai_jax.network.cache import KVCache
from bonsai_jax.network.kinds.place import Place, joined_product
from bonsai_jax.network.params import Params
from pallas_kernels import Adapted, QTensor, device, formats
from pallas_kernels.attention import empty_workspace
from pallas_kernels.qtensor import leaves
from pallas_kernels.step.inputs import StepChanges, StepInputs
from pallas_kernels.step.low_rank_plan import NO_CHANGES

if TYPE_CHECKING:
    from pallas_kernels.step.shapes import Shapes

# (layer, half) -> where this half runs
PlaceOf = Callable[[int, Any], Place]


def one_launch(
    params: Params, x: Float[Array, "B 1 H"], cache: KVCache, place_of: PlaceOf, config: ModelConfig
) -> tuple[Float[Array, "B 1 H"], KVCache]:
    """x after all layers of a decode step, by one kernel, and the cache."""
    inputs = _step_inputs(cache, place_of, config)
    (mixer,), sizes = params.layers["attention"], config.attention
    interleaved = sizes.rope.interleaved
    if not _is_1_bit(params):
        (w,) = params.layers["mlp" if config.experts is None else "experts"]
        qkv = joined_product(x, mixer.qkv, place_of(0, sizes), mixer.norm)[:, 0]
        stacks = (*mixer.qkv, mixer.o, w.gate, w.up, w.down)  # five: see problems.Step
        tokens = place_of(0, sizes).tokens
        rest = {"eps": config.rms_norm_eps, "interleaved": interleaved, "tokens": tokens}
        if (e := config.experts) is None:
            from pallas_kernels.step import int_layers  # only GPUs need it

            out = int_layers.run(qkv, x[:, 0], stacks, inputs, activation=config.mlp.activation, **rest)
        else:
            from pallas_kernels.step import experts_layers  # only GPUs need it

            experts = experts_layers.Experts(e.count, e.used, e.normalized)
            out = experts_layers.run(
                qkv, x[:, 0], stacks, w.router, inputs, experts=experts, activation=e.activation, **rest
            )
        y, k_pages, v_pages = out
        return y[:, None], _with_pages(cache, k_pages, v_pages)
    from pallas_kernels.step.decode_layers import decode_layers  # only GPUs need it

    changes = _changes(params)
    shapes = _shapes(params, x.shape[0], config, changes, place_of(0, sizes).tokens)
    kernel = functools.partial(decode_layers, shapes=shapes, interleaved=interleaved)
    fields = tuple((part.fields["words"], part.fields["scales"]) for part in _bit_stacks(params))
    y, k_pages, v_pages = jax.custom_batching.sequential_vmap(kernel)(x[:, 0], fields, inputs, changes)
    return y[:, None], _with_pages(cache, k_pages, v_pages)


def beside_adapter(schedule: str, params: Params, rows: int, config: ModelConfig) -> str:
    """The schedule in place of one that was planned without the adapter that params have."""
    if schedule != "one_launch" or not _is_1_bit(params):
        return "launches"
    return "launches" if _shapes(params, rows, config, _changes(params)).refuses() else schedule


def reads_together(schedule: str, params: Params, rows: int, tokens: int, config: ModelConfig) -> bool:
    """Whether a schedule still has room for its rows if each `tokens` neighbours belong to one sequence."""
    if schedule != "one_launch" or not _is_1_bit(params):
        return True
    return _shapes(params, rows, config, None, tokens).refuses() is None


def _is_1_bit(params: Params) -> bool:
    """Whether one launch is that of 1-bit weights: those of all products are (problems.Step)."""
    (mixer,) = params.layers["attention"]
    return all(formats.family(piece.format) == "bit" for piece in leaves(mixer.o))


def _bit_stacks(params: Params) -> list[QTensor]:
    """Weights of qkv, o, gate, up and down."""
    (mixer,), (w,) = params.layers["attention"], params.layers["mlp"]
    parts = [stack.parts[0] for stack in (*mixer.qkv, mixer.o, w.gate, w.up, w.down)]
    return [part for part in parts if isinstance(part, QTensor)]  # all: see problems.Step


def _changes(params: Params) -> StepChanges | None:
    """An adapter's, beside qkv, o, gate, up and down; None where there are none."""
    if params.adapter is None:
        return None
    mixer, w = (beside(params.layers[kind][0], kind, 0, params.adapter) for kind in ("attention", "mlp"))
    stacks = (*mixer.qkv, mixer.o, w.gate, w.up, w.down)
    matrices = tuple(stack.changes if isinstance(stack, Adapted) else () for stack in stacks)
    return StepChanges(matrices, params.adapter.chosen) if any(matrices) else None


def _shapes(
    params: Params, rows: int, config: ModelConfig, changes: StepChanges | None, tokens: int = 1
) -> "Shapes":
    """Of `one_launch` without experts."""
    from pallas_kernels.step.shapes import Shapes  # only GPUs need it

    heads = config.attention.num_heads, config.attention.num_kv_heads, config.attention.head_dim
    qkv, *_, down = _bit_stacks(params)
    return Shapes(
        rows, config.hidden, config.mlp.ffn, *heads, blocks=device.multiprocessors(),
        bits=qkv.products.bits(rows), down_bits=down.products.bits(rows), eps=config.rms_norm_eps,
        activation=config.mlp.activation, changes=NO_CHANGES if changes is None else changes.sizes,
        tokens=tokens,
    )  # fmt: skip


def layer_products(
    params: Params, x: Float[Array, "B 1 H"], cache: KVCache, place_of: PlaceOf, config: ModelConfig
) -> tuple[Float[Array, "B 1 H"], KVCache]:
    """x after all layers of a decode step, by two kernels each: what mixes tokens, and all products up to the
    next layer's; and the cache."""
    from pallas_kernels.step import layer_products_stacks as kernels  # only GPUs need it
    from pallas_kernels.step.layer_products import workspace_words
    from pallas_kernels.step.layer_products_stacks import OfLayer

    rows, (channels,) = x.shape[0], params.layers["mlp"]
    feed_forward, normed_after = (channels.gate, channels.up, channels.down), channels.post_norm is not None
    spaces = workspaces.empty(config, cache, rows)
    words = jnp.zeros(workspace_words(rows, config.hidden, config.mlp.ffn), jnp.int32)

    def parts(place: Place) -> tuple[OfLayer, OfLayer, OfLayer]:
        """A mixer's norm, what makes its inputs, and its output."""
        kind = kinds.get(place.settings.kind)
        (stack,), output = (getattr(place.weights, name) for name in kind.PRODUCTS)  # joined: problems.Step
        index = place_index(place)
        return OfLayer(place.weights.norm, index), OfLayer(stack, index), OfLayer(output, index)

    places = [place_of(number, layer.mixer) for number, layer in enumerate(config.layers)]
    groups = {(place.settings.kind, place.group): place for place in places}
    _, inputs, outputs = zip(*(parts(place) for place in groups.values()), strict=True)
    rounded = kernels.rounded_vectors(
        [part.stack for part in outputs], feed_forward, [part.stack for part in inputs], normed_after
    )
    norm, first, _ = parts(places[0])
    made = joined_product(x, (first.stack,), places[0], norm.stack)
    for number, place in enumerate(places):
        at = kind, group = place.settings.kind, place.group
        y, state, workspace = kinds.get(kind).mix(made, x, place, cache.states[kind][group], spaces.get(at))
        cache = cache.with_state(kind, group, state)
        spaces = spaces if workspace is None else {**spaces, at: workspace}
        index, post_norms, scale = place_index(place_of(number, config.mlp)), None, None
        if (output := config.layers[number].output) is not None:
            after = place_of(number, output)
            scale = OfLayer(after.weights.scale, place_index(after))
        if normed_after:  # both: problems.Step
            after_mixer = OfLayer(place.weights.post_norm, place_index(place))
            post_norms = after_mixer, OfLayer(channels.post_norm, index)
        following = parts(places[number + 1])[:2] if number + 1 < len(places) else None
        x, made, words = kernels.run(
            y[:, 0],
            x[:, 0],
            parts(place)[2],
            (
                OfLayer(channels.norm, index),
                OfLayer(channels.gate, index),
                OfLayer(channels.up, index),
                OfLayer(channels.down, index),
            ),
            following,
            number,
            words,
            config.rms_norm_eps,
            rounded,
            config.mlp.activation,
            post_norms,
            scale,
        )
        x, made = x[:, None], None if made is None else made[:, None]
    return x, cache


def int_launches(
    params: Params, x: Float[Array, "B 1 H"], cache: KVCache, place_of: PlaceOf, config: ModelConfig
) -> tuple[Float[Array, "B 1 H"], KVCache]:
    """x after all layers of a decode step of several rows, by five kernels each; and the cache."""
    from pallas_kernels.step import int_launches as kernels  # only GPUs need it

    return _layer_by_layer(kernels, kernels.Vector(x[:, 0]), params, cache, place_of, config)


def layer_gemms(
    params: Params, x: Float[Array, "B 1 H"], cache: KVCache, place_of: PlaceOf, config: ModelConfig
) -> tuple[Float[Array, "B 1 H"], KVCache]:
    """x after all layers of a decode step of many rows, by eight kernels each, or a few more; and the
    cache."""
    from pallas_kernels.step import layer_gemms as kernels  # only GPUs need it

    parts, rows, eps = kernels.Parts(x[None, :, 0]), x.shape[0], config.rms_norm_eps
    if params.step.plain:
        return _layer_by_layer(kernels, parts, params, cache, place_of, config)
    spaces, (channels,) = workspaces.empty(config, cache, rows), params.layers["mlp"]
    ffn = channels.gate, channels.up, channels.down

    def after_mixer(output, norm, ffn, y, x, at, index):
        """What comes after a mixer; indices of the layer in the groups of both halves."""
        o, activation = (output, at), config.mlp.activation
        return kernels.after_mixer(y, x, o, norm, ffn, index, eps=eps, activation=activation)

    for number, layer in enumerate(config.layers):
        place, channels_place = place_of(number, layer.mixer), place_of(number, config.mlp)
        kind, w, index = kinds.get(layer.mixer.kind), place.weights, place_index(place)
        (stack,), output = (getattr(w, name) for name in kind.PRODUCTS)  # joined: problems.Step
        at = layer.mixer.kind, place.group
        state, gates, options = cache.states[at[0]][at[1]], None, {}
        if rounds := layer.mixer.kind == "delta_net" and kind.rounds(place, state):
            gates = kind.dense_gates(w.gates)
        before = functools.partial(kernels.mixer_inputs, layer=index, eps=eps, rows=rows)
        made, x, sums = jax.custom_batching.sequential_vmap(before)(parts, stack, w.norm, gates)
        if rounds:
            options = {"gates": sums, "integers": kernels.rounds_for(output, index, rows)}
        made = kernels.joined(made, rows)[:, None]
        y, state, workspace = kind.mix(made, x[:, None], place, state, spaces.get(at), **options)
        cache = cache.with_state(*at, state)
        spaces = spaces if workspace is None else {**spaces, at: workspace}
        after = functools.partial(after_mixer, at=index, index=place_index(channels_place))
        y = y[:, 0] if isinstance(y, jax.Array) else y
        parts = jax.custom_batching.sequential_vmap(after)(output, channels.norm, ffn, y, x)
    return kernels.summed(parts)[:rows, None], cache


def _layer_by_layer(
    kernels: Any, x: Any, params: Params, cache: KVCache, place_of: PlaceOf, config: ModelConfig
) -> tuple[Float[Array, "B 1 H"], KVCache]:
    """x after all layers, by a module whose `run` takes x, in a form of its own, through a layer, and whose
    `summed` makes float32 of that form; and the cache."""
    (mixer,), (w,), sizes = params.layers["attention"], params.layers["mlp"], config.attention
    stacks = (*mixer.qkv, mixer.o, w.gate, w.up, w.down)  # five: see problems.Step
    inputs = _step_inputs(cache, place_of, config)
    workspace = empty_workspace(len(inputs.positions), sizes.num_heads, inputs.k_pages)
    for layer in range(config.num_layers):
        run = functools.partial(
            kernels.run, layer=layer, eps=config.rms_norm_eps, interleaved=sizes.rope.interleaved,
            activation=config.mlp.activation, tokens=place_of(0, sizes).tokens,
        )  # fmt: skip
        x, k_pages, v_pages, workspace = jax.custom_batching.sequential_vmap(run)(
            x, stacks, inputs, workspace
        )
        inputs = inputs._replace(k_pages=k_pages, v_pages=v_pages)
    return kernels.summed(x)[:, None], _with_pages(cache, inputs.k_pages, inputs.v_pages)


SCHEDULES = {
    "one_launch": one_launch,
    "layer_products": layer_products,
    "int_launches": int_launches,
    "layer_gemms": layer_gemms,
}


def _step_inputs(cache: KVCache, place_of: PlaceOf, config: ModelConfig) -> StepInputs:
    """What fused kernels are given of one token of each row, but for matrices and activations."""
    first = config.layers[0]
    mixer, channels = place_of(0, first.mixer), place_of(0, first.channels)
    (state,), w = cache.states["attention"], mixer.weights
    cos, sin = mixer.rotations[mixer.settings.rope]
    return StepInputs(
        attn_norm=w.norm,
        ffn_norm=channels.weights.norm,
        bias=w.qkv_bias,
        head_norms=None if w.q_norm is None else w.head_norms,
        rotation=(cos[:, 0], sin[:, 0]),
        k_pages=state.k,
        v_pages=state.v,
        block_table=cache.block_table,
        positions=mixer.positions[:, 0],
    )


def place_index(place: Place) -> int:
    """The layer's index, which is known where layers are straight code."""
    assert isinstance(place.index, int)
    return place.index


def _with_pages(cache: KVCache, k_pages: Any, v_pages: Any) -> KVCache:
    (state,) = cache.states["attention"]
    return cache.with_state("attention", 0, state.replace(k=k_pages, v=v_pages))
