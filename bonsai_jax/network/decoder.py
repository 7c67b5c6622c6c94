"""A decoder-only transformer: its layers one after another, in a loop, in straight code or in few launches.

tokens -> embed -> decoder: both halves of each layer (kinds/) -> logits
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bonsai_jax import arguments
from bonsai_jax.choices import Remat
from bonsai_jax.config import ModelConfig, Run
from bonsai_jax.network import cache as kv
from bonsai_jax.network import inputs, kinds, rope, workspaces
from bonsai_jax.network.adapter import beside, refuse_split
from bonsai_jax.network.cache import KVCache
from bonsai_jax.network.kinds.place import NO_TAPS, STEP_TOKENS, Place, Tap
from bonsai_jax.network.layer_vectors import layer_vectors
from bonsai_jax.network.parallel import over_mesh
from bonsai_jax.network.params import Params
from bonsai_jax.network.remat import recomputed
from bonsai_jax.network.taps import STREAM, Taps
from pallas_kernels import matmul


@over_mesh("whole", arrays="whole")
def embed(params: Params, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch H"]:
    """The embedding's rows of these tokens, decoded to float32; not scaled."""
    tokens = arguments.integers("tokens", tokens)
    if params.axis is None:
        return params.embed.rows(tokens)
    count = params.embed.shape[0]  # tokens of the vocabulary that this device has
    own = tokens - jax.lax.axis_index(params.axis) * count
    inside = (own >= 0) & (own < count)
    rows = params.embed.rows(jnp.where(inside, own, 0))
    return jax.lax.psum(jnp.where(inside[..., None], rows, 0.0), params.axis)


def decoder(
    params: Params,
    tokens: Int[Array, "B T"] | Float[Array, "B T H"],
    positions: Int[Array, "B T"],
    cache: KVCache,
    config: ModelConfig,
    num_keys: int | Int[Array, ""] | None,
    taps: Taps | None = None,
    keep_updates: bool = False,
    num_layers: int | None = None,
    remat: Remat = False,
    together: int = 1,
) -> tuple[Float[Array, "B T H"], KVCache, dict[str, Float[Array, "L B ..."]]]:
    """Run T tokens of each sequence through every layer, after those that the cache holds.

    x_0 = embedding_scale embed(tokens);  x <- mixer(x);  x <- channels(x);  x <- output(x), as far as
    ModelConfig.layers has them.
    Returns x, not yet normed (`unembed` does), the cache, and what taps.read names, by layer.

    Tokens that are floating point stand for the embedding's rows. With keep_updates, recurrent state is not
    updated; the pending updates of each layer are returned by layer too, for `replay`. With num_layers, only
    the first so many layers run. With remat, a backward pass computes each layer again, and the cache is
    returned as it was given, but for its lengths. num_keys: as for `attend`.

    Positions of -1 mark padding: nothing of it is stored, and its output means nothing. A sequence's tokens
    have positions one after another, with padding behind them. The layers are
    scanned with the cache as carry, so that its pages are updated in place: a loop for each run of layers
    whose settings repeat (ModelConfig.runs); weights stay stacked and are indexed by layer. A decode step on
    kernels is one launch, or a few a layer, where that is its schedule, else unrolled: a GPU captures
    straight code as one graph, but a loop not. So is a step of a few tokens of each sequence (speculation):
    its B T tokens are as many rows of one token, of which `together` neighbours are one sequence's.
    """
    taps = Taps() if taps is None else taps
    if not isinstance(taps, Taps):
        raise TypeError(f'taps is a {type(taps).__name__}; give bj.Taps, such as bj.Taps("output")')
    count = config.num_layers if num_layers is None else num_layers
    taps.check_layers(count)
    whole = not taps.used and count == config.num_layers
    if whole and _as_rows(params, tokens, cache, config):
        (B, T), each = tokens.shape[:2], lambda x: x.reshape(-1, 1, *x.shape[2:])
        x, rows, read = decoder(
            params, each(tokens), each(positions), cache.with_tokens_as_rows(T), config, num_keys,
            keep_updates=keep_updates, together=T,
        )  # fmt: skip
        return x.reshape(B, T, -1), kv.advance(cache.replace(states=rows.states), positions), read
    if params.axis is not None and (inner := sorted(taps.used - set(STREAM))):
        raise NotImplementedError(
            f"Taps: {', '.join(inner)}: each device has some of the heads and of the hidden vector; over a "
            f'mesh with an axis "{params.axis}" {", ".join(STREAM)} can be tapped, the rest without it'
        )
    if params.adapter is not None:
        refuse_split(params.axis)
    rotations = rope.rotations(config, params.rope_frequencies, positions)
    x = tokens
    if not jnp.issubdtype(tokens.dtype, jnp.floating):
        x = embed(params, tokens)
    x = x if config.embedding_scale == 1 else x * config.embedding_scale
    vectors = None
    if params.layer_vectors is not None:
        vectors = layer_vectors(params.layer_vectors, tokens, x, config)

    def place_of(
        number: int,
        half: Any,
        turn: Any = 0,
        period: int = 1,
        tap: Mapping[str, Tap] = NO_TAPS,
        updates: Any = None,
        start: Any = None,
    ) -> Place:
        """Where a half of a layer runs: the one that comes `turn` periods after this one; turn may be
        traced."""
        group = config.position(number, half).group
        return Place(
            settings=half,
            weights=params.layers[half.kind][group],
            group=group,
            index=_index(config, number, half, turn, period),
            eps=config.rms_norm_eps,
            residual_scale=config.residual_scale,
            positions=positions,
            rotations=rotations,
            num_keys=num_keys,
            block_table=cache.block_table,
            axis=params.axis,
            peers=params.peers,
            taps=tap,
            updates=updates,
            layer_norm=config.layer_norm,
            start=start,
            layer_vectors=vectors,
            tokens=together,
        )

    def layer_step(carry, number, tapped, turn=0, period=1):
        """The layer that comes `turn` periods after this one; tapped: whether taps have a place there."""
        layer, read = config.layers[number], {}
        later = turn if (number, period) == (0, 1) else number + period * turn
        tap = taps.for_layer(later, read) if tapped else NO_TAPS

        def through(site: str, x: jax.Array) -> jax.Array:
            return tap[site](x) if site in tap else x

        def half_step(half, start, carry):
            x, cache, spaces = carry
            updates: dict[str, Any] = {}
            place = place_of(number, half, turn, period, tap, updates if keep_updates else None, start)
            place = dataclasses.replace(place, source=cache.source(config, half))
            if tapped and taps.inputs:
                weights = inputs.watched(place.weights, half, place.group, positions, read)
                place = dataclasses.replace(place, weights=weights)
            if params.adapter is not None:
                weights = beside(place.weights, half.kind, place.group, params.adapter)
                place = dataclasses.replace(place, weights=weights)
            states = cache.states.get(half.kind)
            state = states and states[place.group]
            at = half.kind, place.group
            x, state, workspace = kinds.get(half.kind).block(x, place, state, spaces.get(at))
            spaces = spaces if workspace is None else {**spaces, at: workspace}
            cache = cache.with_state(half.kind, place.group, state) if states else cache
            read.update({_update_name(half.kind, place.group) + name: u for name, u in updates.items()})
            return x, cache, spaces

        x, *rest = carry
        start = carry = through("input", x), *rest
        for half in layer.mixers:
            carry = half_step(half, start[0], carry)
        x, *rest = carry
        carry = through("middle", x), *rest
        if layer.channels is not None:
            carry = half_step(layer.channels, start[0] if layer.parallel else None, carry)
        if layer.output is not None:
            carry = half_step(layer.output, None, carry)
        x, *rest = carry
        return (through("output", x), *rest), read

    def straight(carry, numbers: Iterable[int]):
        """Layers one after another, and what taps read of each."""
        parts = []
        for number in numbers:
            carry, read = layer_step(carry, number, taps.taps_layer(number))
            parts.append({site: value[None] for site, value in read.items()})
        return carry, parts

    def looped(carry, run: Run):
        """A run in one loop where all its turns are tapped alike; where taps name layers, a loop for each
        part that is."""
        places, parts = range(run.start, run.start + run.period), []

        def tapped(turn):
            return tuple(taps.taps_layer(number + run.period * turn) for number in places)

        def body(carry, turn, tapped):
            turn, each = turn.astype(jnp.int32), []
            for number, is_tapped in zip(places, tapped, strict=True):
                carry, read = layer_step(carry, number, is_tapped, turn, run.period)
                each.append(read)
            return carry, each

        for alike, some in itertools.groupby(range(run.turns), tapped):
            turns = list(some)
            # Of 16 bits, and widened in the loop: XLA would copy the int32 of a turn asynchronously, and no
            # loop with such a copy is captured in a CUDA graph.
            numbers = jnp.arange(turns[0], turns[-1] + 1, dtype=jnp.int16)
            some_body = functools.partial(body, tapped=alike)
            if remat:  # x alone goes from turn to turn: a backward pass has one cache, not one for each
                alone = lambda x, turn, own=some_body: _first(own((x, cache, {}), turn))  # noqa: E731
                x, each = jax.lax.scan(recomputed(alone, remat), carry[0], numbers)
                carry = x, *carry[1:]
            else:
                carry, each = jax.lax.scan(some_body, carry, numbers)
            parts.append(_of_turns(each))
        return carry, parts

    rows, one_token = tokens.shape[0], tokens.shape[1] == 1
    schedule = params.step.schedule(rows) if whole and one_token else "launches"
    if schedule != "launches" and params.adapter is not None:
        from bonsai_jax.network.fused import beside_adapter  # only GPUs need it

        schedule = beside_adapter(schedule, params, rows, config)
    if schedule != "launches":
        from bonsai_jax.network.fused import SCHEDULES  # only GPUs need it

        updates: list[dict[str, Any]] = [{} for _ in config.layers]

        def fused_place_of(number: int, half: Any) -> Place:
            return place_of(number, half, updates=updates[number] if keep_updates else None)

        x, cache = SCHEDULES[schedule](params, x, cache, fused_place_of, config)
        read = _by_layer([_of_layer(config, number, own) for number, own in enumerate(updates)])
    elif one_token and params.step.unrolled:
        carry, parts = straight((x, cache, workspaces.empty(config, cache, rows)), range(count))
        (x, cache, _), read = carry, _by_layer(parts)
    else:
        carry, parts = (x, cache, {}), []
        for run in _first_layers(config.runs, count):
            if run.turns == 1:
                carry, more = straight(carry, range(run.start, run.start + run.period))
            else:
                carry, more = looped(carry, run)
            parts += more
        (x, cache, _), read = carry, _by_layer(parts)
    return x, kv.advance(cache, positions), read


def read(
    params: Params,
    tokens: Int[Array, "B T"] | Float[Array, "B T H"],
    positions: Int[Array, "B T"],
    cache: KVCache,
    config: ModelConfig,
    taps: Taps | None = None,
) -> tuple[Float[Array, "B T H"], KVCache]:
    """`decoder` for any number of tokens: where windows are rings of pages, as many at once as these take.
    Returns the hidden vectors after them, and the cache that has read them."""
    size, width = cache.chunk, tokens.shape[1]
    if size is None or width <= size:
        num_keys = positions.max() + 1
        hidden, cache, _ = decoder(params, tokens, positions, cache, config, num_keys, taps)
        return hidden, cache
    pieces = []
    for first in range(0, width, size):
        part = slice(first, first + size)
        hidden, cache = read(params, tokens[:, part], positions[:, part], cache, config, taps)
        pieces.append(hidden)
    return jnp.concatenate(pieces, axis=1), cache


def _as_rows(params: Params, tokens: jax.Array, cache: KVCache, config: ModelConfig) -> bool:
    """Whether a decode step of several tokens of each sequence is one of as many rows of one token. Kernels
    for one token attend to keys of rows that are read in the same launch (attention/decode_token.py), and
    the delta net's reads a sequence's rows one after the other, but none knows rings of pages of these rows,
    or other recurrent states. A GEMM of sections of 8 rows has all of a sequence's in one, as attention in
    one launch with it wants."""
    B, T = tokens.shape[:2]
    if T == 1 or STEP_TOKENS % T or not params.step.unrolled or params.adapter is not None:
        return False
    recurrent = [state for states in cache.states.values() for state in states if state.recurrent]
    if any(s.impl != "decode" for s in cache.paged) or any(s.impl != "delta_step" for s in recurrent):
        return False
    if cache.chunk is not None:
        return False
    schedule = params.step.schedule(B * T)
    if schedule == "launches" or recurrent:
        return B * T <= STEP_TOKENS
    from bonsai_jax.network.fused import reads_together  # only GPUs need it

    return reads_together(schedule, params, B * T, T, config)


def _first(carry_and_read: tuple[tuple, Any]) -> tuple[jax.Array, Any]:
    """x of the carry of a turn, and what taps read."""
    (x, *_), read = carry_and_read
    return x, read


def _first_layers(runs: Iterable[Run], count: int) -> Iterator[Run]:
    """The runs of the first `count` layers."""
    for run in runs:
        layers = min(run.period * run.turns, count - run.start)
        turns, rest = divmod(max(0, layers), run.period)
        if turns:
            yield run._replace(turns=turns)
        if rest:
            yield Run(run.start + turns * run.period, rest, 1)


def _index(config: ModelConfig, number: int, half: Any, turn: Any, period: int) -> Any:
    """Index, in its group, of a half of the layer that comes `turn` periods after this one."""
    start = config.position(number, half).index
    step = sum(half in layer.halves for layer in config.layers[number : number + period])
    # As it is where it is the turn: models of one kind of layer have no arithmetic here.
    return turn if (start, step) == (0, 1) else start + step * turn


def _of_turns(places: list[dict[str, jax.Array]]) -> dict[str, jax.Array]:
    """What taps read in a loop, by site and by layer: of each place of a period for all turns. Raises
    ValueError where shapes differ."""
    sites = {}
    for site in dict.fromkeys(name for read in places for name in read):
        each = [read[site] for read in places if site in read]
        _check_alike(site, each)
        if len(each) == 1:
            sites[site] = each[0]
        else:
            stacked = jnp.stack(each, axis=1)
            sites[site] = stacked.reshape(-1, *stacked.shape[2:])
    return sites


def _by_layer(parts: list[dict[str, jax.Array]]) -> dict[str, jax.Array]:
    """What taps read, by site and stacked over the layers that have it. Raises ValueError where shapes
    differ."""
    sites: dict[str, list[jax.Array]] = {}
    for part in parts:
        for site, values in part.items():
            sites.setdefault(site, []).append(values)
    for site, each in sites.items():
        _check_alike(site, each)
    return {site: each[0] if len(each) == 1 else jnp.concatenate(each) for site, each in sites.items()}


def _check_alike(site: str, parts: list[jax.Array]) -> None:
    if len(shapes := sorted({part.shape[1:] for part in parts})) > 1:
        raise ValueError(
            f"Taps: {site} is {' and '.join(str(list(shape)) for shape in shapes)} in different layers; read "
            "layers of one shape (Taps(layers=...))"
        )


def replay(
    params: Params,
    cache: KVCache,
    updates: Mapping[str, Float[Array, "L B T ..."]],
    positions: Int[Array, "B T"],
    config: ModelConfig,
) -> KVCache:
    """The cache with the tokens at these positions in its recurrent states, -1 for those to leave out, which
    come after a sequence's others: tokens that `decoder` read with keep_updates. Not having read a token
    stands for rewinding."""
    for kind, states in cache.states.items():
        for group, state in enumerate(states):
            prefix = _update_name(kind, group)
            own = {name.removeprefix(prefix): u for name, u in updates.items() if name.startswith(prefix)}
            if not own:  # rejected tokens are written over
                continue
            settings, weights = config.groups(kind)[group].settings, params.layers[kind][group]
            eps, layer_norm = config.rms_norm_eps, config.layer_norm
            place = Place(settings, weights, group, 0, eps, positions, {}, 0, layer_norm=layer_norm)
            cache = cache.with_state(kind, group, kinds.get(kind).replay(own, place, state))
    return cache


def _of_layer(config: ModelConfig, number: int, updates: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The updates of a layer's mixer, with an axis of layers and by their names among all."""
    mixer = config.layers[number].mixer
    prefix = _update_name(mixer.kind, config.position(number, mixer).group)
    return {prefix + name: update[None] for name, update in updates.items()}


def _update_name(kind: str, group: int) -> str:
    """How the names of a group's updates begin."""
    return f"{kind}.{group}."


@over_mesh("whole", arrays="whole")
def unembed(
    params: Params, hidden: Float[Array, "*batch H"], config: ModelConfig
) -> Float[Array, "*batch V"]:
    """Scores of every token of the vocabulary, from the residual stream.

    logits = logit_scale W_head norm(hidden);  with a softcap c, c tanh(logits / c)

    hidden  float32 [..., hidden], not normed: the last layer's "output", or that of any layer (a logit lens)
    Returns float32 [..., vocabulary]. Tied models use the embedding as W_head. Differentiable in hidden.
    Raises ValueError for vectors of another width.
    """
    if hidden.shape[-1:] != (config.hidden,):
        raise ValueError(f"unembed: hidden is {list(hidden.shape)}; expected [..., {config.hidden}]")
    head = params.embed if params.head is None else params.head
    eps, layer_norm = config.rms_norm_eps, config.layer_norm
    scores = matmul(hidden, head, gamma=params.final_norm, eps=eps, layer_norm=layer_norm)
    scores = scores if config.logit_scale == 1 else scores * config.logit_scale
    if params.axis is not None:
        # The last device's share of the vocabulary may be padded.
        scores = jax.lax.all_gather(scores, params.axis, axis=-1, tiled=True)[..., : config.vocab_size]
    cap = config.logit_softcap
    return scores if cap is None else cap * jnp.tanh(scores / cap)
