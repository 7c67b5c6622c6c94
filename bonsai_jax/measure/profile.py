"""Where a step's time goes: each phase alone, over all layers, beside what memory and tensor cores allow.

What it is, and what it is not: a phase is a jitted call of its own, chained from layer to layer so that each
waits for the one before, and weights of all layers pass through the caches as they do in a step. In a step
phases meet, and what one leaves behind hides or hurts the next: phases timed apart do not sum to the step,
which is timed whole in a row of its own. Where a step is one launch, phases are still launched one by one;
where layers are a loop (prefill), phases on a GPU are not: its turns, 20 us each, would count in each of
them.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from bonsai_jax import card, machine
from bonsai_jax.config import Group
from bonsai_jax.decoding import steps as core
from bonsai_jax.measure import bench
from bonsai_jax.model import Model
from bonsai_jax.network import cache as kv
from bonsai_jax.network import decoder, kinds, rope, workspaces
from bonsai_jax.network.kinds.phases import Mixing, Product
from bonsai_jax.network.kinds.place import Place
from bonsai_jax.network.params import Params
from pallas_kernels import LayerStack, QTensor, Rows


@dataclasses.dataclass(frozen=True)
class Phase(bench.Origin):
    """One phase of a step over all layers, as it is kept for the record.

    test        "tg@d2048": one token behind 2,048; "batch8@d256": one for each of 8 rows; "pp512@d0": 512 of
                one row
    us          median of the repetitions, microseconds
    bytes       of weights and cache that it must move; activations are left out
    operations  two for each weight and token, or for each element of a query and a key or value that it sees
    tflops      10^12 operations a second
    ceiling_share  the time that the ceiling allows over the time taken
    bound       the ceiling that it meets first: "memory" (bytes over machine.bandwidth) or "compute"
                (operations over machine.arithmetic: of the tensor cores, by what they multiply)
    """

    impl: str
    model: str
    test: str
    phase: str
    us: float
    bytes: int
    gb_s: float
    operations: int
    tflops: float
    ceiling_share: float
    bound: str


def measure(
    model: Model, depth: int = 0, repetitions: int = 5, *, rows: int = 1, tokens: int = 1
) -> Iterator[Phase]:
    """A row for each phase of a step after `depth` tokens, one for their sum, one for the whole step.

    rows    of a decode step, as one of the test batchB
    tokens  of each row: 1 is a decode step, more a prefill, of which one chunk at most (decoding.chunk_size)
    """
    if tokens > 1 and rows > 1:
        raise NotImplementedError("profile: a prefill of more than one row is not measured; take rows=1")
    config, run, params = model.config, model.run, model.params
    cache = kv.empty(config, run, rows, depth + tokens)
    tokens = min(tokens, core.chunk_size(cache, rows))
    name = f"pp{tokens}" if tokens > 1 else "tg" if rows == 1 else f"batch{rows}"
    test = {"model": model.name, "test": f"{name}@d{depth}"}

    def row(phase: str, seconds: float, moved: int, operations: int, least: tuple, impl: str) -> Phase:
        return Phase(
            **bench.origin(), **test, phase=phase, us=1e6 * seconds, bytes=moved,
            gb_s=moved / seconds / 1e9, operations=operations, tflops=operations / seconds / 1e12, impl=impl,
            ceiling_share=max(least) / seconds, bound="memory" if least[0] >= least[1] else "compute",
        )  # fmt: skip

    total, total_least = (0.0, 0, 0), (0.0, 0.0)
    for work in _phases(model, depth, rows, tokens):
        call = _once(work) if work.kind is None else _all_layers(work, model, depth, tokens)
        start = work.start()  # each phase's state is donated
        seconds = _seconds(lambda state, call=call: call(params, state), start, repetitions, tokens)
        least = (work.bytes / machine.bandwidth(), work.operations / work.rate)
        total = (total[0] + seconds, total[1] + work.bytes, total[2] + work.operations)
        total_least = (total_least[0] + least[0], total_least[1] + least[1])
        yield row(work.name, seconds, work.bytes, work.operations, least, work.impl)
    yield row("sum of these", *total, total_least, card.kernel_names(params.layers, rows * tokens))
    length = tokens if tokens > 1 else 8 if jax.default_backend() == "cpu" else 64
    step = bench.Test(model, "pp" if tokens > 1 else "tg", length, depth, rows)
    seconds = statistics.median(rows * tokens / step.run() for _ in range(repetitions))
    whole = card.kernel_names(params, tokens) if tokens > 1 else card.step_names(params, config, rows)
    yield row("whole step", seconds, total[1], total[2], total_least, whole)


def _rate(weight: QTensor | Rows, rows: int) -> float:
    """Operations per second that the device allows for products of so many rows with this weight, by what
    multiplies them."""
    piece = weight.pieces[0] if isinstance(weight, Rows) else weight
    kernel = piece.products.kernel(rows)
    if kernel in ("reference", "cublas", "int_prefill_sm90"):
        return machine.arithmetic("half")
    by_planes = kernel == "bit_decode_b1" or (kernel == "bit_decode_ring" and rows <= 4)
    kind = "planes" if by_planes else "int8"
    return machine.arithmetic(kind) * 8 / piece.products.bits(rows)


@dataclasses.dataclass(frozen=True)
class Work:
    """A phase of a step, over all layers of a group.

    name        of the phase
    kind, group   whose layers have it; None: the model's own
    run         (params, place, state) -> what it computes of a layer, or the next state (`chained`)
    start       makes the state that it begins with
    bytes, operations   as Phase has them
    impl, rate  the kernels, and the operations per second that the device allows them
    chained     whether run returns the next state
    """

    name: str
    kind: str | None
    group: int
    run: Callable[[Params, Any, Any], Any]
    start: Callable[[], Any]
    bytes: int
    operations: int
    impl: str
    rate: float
    chained: bool = False


def _phases(model: Model, depth: int, rows: int, tokens: int) -> Iterator[Work]:
    """The phases of a step, in the order in which a layer has them: those that mix tokens first."""
    config, params = model.config, model.params
    mixers = [mixer.kind for layer in config.layers for mixer in layer.mixers]
    for kind in dict.fromkeys([*mixers, *config.kinds]):
        for number, group in enumerate(config.groups(kind)):
            several = len(config.groups(kind)) > 1
            for phase in kinds.get(kind).phases(group.settings):
                own = model, group, number
                if isinstance(phase, Product):
                    work = _product(*own, rows, tokens, phase)
                else:
                    work = _mixing(*own, depth, rows, tokens, phase)
                yield dataclasses.replace(work, name=f"{work.name} {number + 1}" if several else work.name)
    head, last = params.embed if params.head is None else params.head, (rows, 1, config.hidden)
    yield Work(
        "head", None, 0, lambda params, _, x: decoder.unembed(params, x, config), lambda: _vectors(*last),
        head.nbytes, 2 * rows * config.vocab_size * config.hidden, card.kernel_names(head, rows),
        _rate(head, rows),
    )  # fmt: skip


def _product(model: Model, group: Group, number: int, rows: int, tokens: int, phase: Product) -> Work:
    """A phase that multiplies with some of a layer's weights."""
    weights = model.params.layers[group.settings.kind][number]
    fields = [getattr(weights, name) for name in phase.weights]
    stacks = jax.tree.leaves(fields, is_leaf=lambda leaf: isinstance(leaf, LayerStack))
    hidden, count = model.config.hidden, rows * tokens
    each = sum(stack.shape[0] * stack.shape[1] for stack in stacks) * phase.each
    start = lambda: _vectors(rows, tokens, hidden)  # noqa: E731
    if phase.inputs is not None:
        start = lambda: (_vectors(rows, tokens, phase.inputs), _vectors(rows, tokens, hidden))  # noqa: E731
    return Work(
        phase.name, group.settings.kind, number, lambda params, place, x: phase.run(place, x), start,
        round(phase.share_read(count) * sum(stack.nbytes for stack in stacks)),
        2 * len(group.layers) * count * each, card.kernel_names(stacks, count),
        _rate(stacks[0].parts[0], count),
    )  # fmt: skip


def _mixing(
    model: Model, group: Group, number: int, depth: int, rows: int, tokens: int, phase: Mixing
) -> Work:
    """What a mixer does between its projections."""
    config, settings, layers = model.config, group.settings, rows * len(group.layers)

    def mix(params: Params, place: Place, state):
        x, cache, workspace = state
        own = cache.states[settings.kind][number]
        source = cache.source(config, settings)
        place = dataclasses.replace(place, block_table=cache.block_table, source=source)
        y, own, workspace = phase.run(x, place, own, workspace)
        x = x.at[..., : y.shape[-1]].set(y)
        return x, cache.with_state(settings.kind, number, own), workspace

    def start():
        cache = kv.empty(config, model.run, rows, depth + tokens)
        spaces = workspaces.empty(config, cache, rows) if model.params.step.unrolled else {}
        return _vectors(rows, tokens, phase.width), cache, spaces.get((settings.kind, number))

    state = kv.empty(config, model.run, 1, 1).states[settings.kind][number]
    return Work(
        phase.name, settings.kind, number, mix, start,
        layers * settings.bytes_read(model.run, depth + tokens), layers * settings.operations(depth, tokens),
        state.prefill_impl if tokens > 1 else state.impl, machine.arithmetic(), chained=True,
    )  # fmt: skip


def _vectors(*shape: int) -> jax.Array:
    return jnp.full(shape, 0.5, jnp.float32)


def _all_layers(work: Work, model: Model, depth: int, tokens: int) -> Callable[[Params, Any], Any]:
    """One phase over all layers of its group: unrolled on kernels, else scanned."""
    config, kind = model.config, str(work.kind)
    group = config.groups(kind)[work.group]

    def step(index, params: Params, state):
        x = jax.tree.leaves(state)[0]
        positions = jnp.broadcast_to(depth + jnp.arange(tokens, dtype=jnp.int32), x.shape[:2])
        place = Place(
            settings=group.settings,
            weights=params.layers[kind][work.group],
            group=work.group,
            index=index,
            eps=config.rms_norm_eps,
            positions=positions,
            rotations=rope.rotations(config, params.rope_frequencies, positions),
            num_keys=depth + tokens,
            layer_norm=config.layer_norm,
        )
        y = work.run(params, place, state)
        return y if work.chained else chained(y, state)

    def call(params: Params, state):
        layers = len(group.layers)
        if params.step.unrolled:
            for index in range(layers):
                state = step(index, params, state)
            return state
        return jax.lax.fori_loop(0, layers, lambda index, state: step(index, params, state), state)

    return jax.jit(call, donate_argnums=1)


def _once(work: Work) -> Callable[[Params, jax.Array], jax.Array]:
    """A phase that belongs to no layer."""
    return jax.jit(lambda params, x: chained(work.run(params, None, x), x), donate_argnums=1)


def chained(y: jax.Array, state: Any) -> Any:
    """What the next product of a chain begins with, so that it waits for this one's y: y as wide as x, or,
    where there is a residual, x as it was and y in its place."""
    if isinstance(state, tuple):
        return state[0], y
    width = state.shape[-1]
    return jnp.pad(y[..., :width], ((0, 0), (0, 0), (0, max(0, width - y.shape[-1]))))


def _seconds(step: Callable[[Any], Any], state: Any, repetitions: int, tokens: int) -> float:
    """Median seconds of a call of step: state -> state."""
    # Several at once on a GPU, so that the host's part of a call does not count.
    calls = 1 if jax.default_backend() == "cpu" else 10 if tokens == 1 else 3
    return statistics.median(bench.seconds_per_call(step, state, repetitions=repetitions, calls=calls))


COLUMNS = ("model", "impl", "test", "phase", "us", "MB", "GB/s", "MFLOP", "TFLOP/s", "ceiling", "bound by")


def markdown_header() -> str:
    rule = ["---" if name in (*COLUMNS[:4], COLUMNS[-1]) else "---:" for name in COLUMNS]
    return f"| {' | '.join(COLUMNS)} |\n| {' | '.join(rule)} |"


def markdown(row: Phase) -> str:
    cells = (
        *(row.model, row.impl, row.test, row.phase, f"{row.us:,.1f}", f"{row.bytes / 1e6:,.1f}"),
        *(f"{row.gb_s:,.1f}", f"{row.operations / 1e6:,.1f}", f"{row.tflops:.3f}"),
        *(f"{row.ceiling_share:.0%}", row.bound),
    )
    return f"| {' | '.join(cells)} |"
