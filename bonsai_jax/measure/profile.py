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

from bonsai_jax import card
from bonsai_jax.config import Channels, Mixer
from bonsai_jax.decoding import steps as core
from bonsai_jax.measure import bench
from bonsai_jax.model import Model
from bonsai_jax.network import cache as kv
from bonsai_jax.network import decoder
from bonsai_jax.network.cache import KVCache
from bonsai_jax.network.params import Params
from pallas_kernels import QTensor, Rows, attend, delta_net, experts_gated, experts_matmul, gated, matmul
from pallas_kernels.attention import empty_workspace


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
    bound       the ceiling that it meets first: "memory" (bytes over card.bandwidth) or "compute" (operations
                over card.arithmetic: of the tensor cores, by what they multiply)
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
    """A row for each phase of a step behind `depth` tokens, one for their sum, one for the whole step.

    rows    of a decode step, as one of the test batchB
    tokens  of each row: 1 is a decode step, more a prefill, of which one chunk at most (decoding.chunk_size)
    """
    if tokens > 1 and rows > 1:
        raise NotImplementedError("profile: a prefill of more than one row is not measured; take rows=1")
    config, run, params = model.config, model.run, model.params
    w, d = params.layers, config.delta
    H, ffn_width, q_width = config.hidden, config.ffn, config.q_width
    qkv_width = q_width + 2 * config.kv_width
    cache = kv.empty(config, run, rows, depth + tokens)
    tokens = min(tokens, core.chunk_size(cache, rows))
    vectors = lambda width: jnp.full((rows, tokens, width), 0.5, jnp.float32)  # noqa: E731
    last = jnp.full((rows, 1, H), 0.5, jnp.float32)  # the tokens of which logits are wanted
    head = params.embed if params.head is None else params.head
    cache_bytes = rows * (depth + tokens) * kv.bytes_per_token(config, run.cache_dtype)
    seen = rows * sum(range(depth + 1, depth + tokens + 1))  # keys, by all queries
    weight_bytes = lambda *stacks: sum(stack.nbytes for stack in stacks)  # noqa: E731
    L = len(config.layers_of("attention"))
    each = 2 * L * rows * tokens  # operations for a weight that every layer with attention has
    of_mlp = 2 * len(config.layers_of("mlp")) * rows * tokens
    plan = {  # phase: one layer of it, what it begins with, bytes, operations
        "qkv": (_qkv, vectors(H), weight_bytes(*w.wqkv), each * (config.q_rows + 2 * config.kv_width) * H),
        "attention": (_attention, (vectors(qkv_width), cache), cache_bytes, 4 * L * q_width * seen),
        "attention output": (_output, (vectors(q_width), vectors(H)), weight_bytes(w.wo), each * H * q_width),
    }
    if w.w_gate is not None and w.w_up is not None and w.w_down is not None:
        work = of_mlp * H * ffn_width
        plan |= {
            "gate and up": (_gate_up, vectors(H), weight_bytes(w.w_gate, w.w_up), 2 * work),
            "down": (_down, (vectors(ffn_width), vectors(H)), weight_bytes(w.w_down), work),
        }
    if (e := config.experts) is not None and w.router is not None:
        each_expert = 2 * len(config.layers_of("experts")) * rows * tokens
        read = e.share_read(rows * tokens)
        of_experts = round(read * weight_bytes(w.expert_gate, w.expert_up, w.expert_down))
        plan |= {
            "router": (_router, vectors(H), w.router.nbytes, each_expert * H * e.count),
            "experts": (_experts, vectors(H), of_experts, each_expert * 3 * H * e.ffn * e.used),
        }
    plan["head"] = _head, last, head.nbytes, 2 * rows * config.vocab_size * H
    if d is not None and w.delta_out is not None:
        each = 2 * len(config.layers_of("delta")) * rows * tokens
        made, states = vectors(d.qkv_width + d.v_width), 2 * rows * kv.bytes_per_row(config)
        own = kv.empty(config, run, rows, 1)  # each phase's cache is donated
        plan = {
            "delta inputs": (_delta_in, vectors(H), weight_bytes(*w.delta_in, *w.delta_gates),
                             each * (d.qkv_width + d.v_width + 2 * d.v_heads) * H),
            "delta net": (_delta_net, (made, own), states, 4 * each * d.v_width * d.k_dim),
            "delta output": (_delta_out, (vectors(d.v_width), vectors(H)), w.delta_out.nbytes,
                             each * d.v_width * H),
        } | plan  # fmt: skip
    name = f"pp{tokens}" if tokens > 1 else "tg" if rows == 1 else f"batch{rows}"
    of_what = {"model": bench.model_name(model.source), "test": f"{name}@d{depth}"}

    def row(phase: str, seconds: float, moved: int, operations: int, least: tuple, impl: str) -> Phase:
        return Phase(
            **bench.origin(), **of_what, phase=phase, us=1e6 * seconds, bytes=moved,
            gb_s=moved / seconds / 1e9, operations=operations, tflops=operations / seconds / 1e12, impl=impl,
            ceiling_share=max(least) / seconds, bound="memory" if least[0] >= least[1] else "compute",
        )  # fmt: skip

    many = tokens > 1
    attends = cache.prefill_impl if many else cache.impl
    of_products = card.kernel_names(params.layers, rows * tokens)
    total, total_least = (0.0, 0, 0), (0.0, 0.0)
    for phase, (one, start, moved, operations) in plan.items():
        call = _once(one, model) if phase == "head" else _all_layers(one, model, depth, tokens)
        seconds = _seconds(lambda state, call=call: call(params, state), start, repetitions, tokens)
        if phase in ("attention", "delta net"):
            of_delta = cache.delta and (cache.delta.prefill_impl if many else cache.delta.impl)
            impl, rate = attends if phase == "attention" else str(of_delta), card.arithmetic()
        elif phase == "head":
            impl, rate = card.kernel_names(head, rows), _rate(head, rows)
        else:
            impl, rate = of_products, _rate((w.wo if w.w_down is None else w.w_down).parts[0], rows * tokens)
        least = (moved / card.bandwidth(), operations / rate)
        total = (total[0] + seconds, total[1] + moved, total[2] + operations)
        total_least = (total_least[0] + least[0], total_least[1] + least[1])
        yield row(phase, seconds, moved, operations, least, impl)
    yield row("sum of these", *total, total_least, of_products)
    length = tokens if many else 8 if jax.default_backend() == "cpu" else 64
    step = bench.Test(model, "pp" if many else "tg", length, depth, rows)
    seconds = statistics.median(rows * tokens / step.run() for _ in range(repetitions))
    whole = card.kernel_names(params, tokens) if many else card.step_names(params, rows)
    yield row("whole step", seconds, total[1], total[2], total_least, whole)


def _rate(weight: QTensor | Rows, rows: int) -> float:
    """Operations per second that the device allows for products of so many rows with this weight, by what
    multiplies them."""
    piece = weight.pieces[0] if isinstance(weight, Rows) else weight
    kernel = piece.products.of(rows)
    if kernel in ("reference", "cublas", "int_prefill_sm90"):
        return card.arithmetic("half")
    by_planes = kernel == "bit_decode_b1" or (kernel == "bit_decode_ring" and rows <= 4)
    kind = "planes" if by_planes else "int8"
    return card.arithmetic(kind) * 8 / piece.products.activation_bits


def _all_layers(one: Callable, model: Model, depth: int, tokens: int) -> Callable[[Params, Any], Any]:
    """One phase over all layers: unrolled on kernels, else scanned."""
    L, unrolled = len(model.config.layers_of(OF_KIND.get(one, "attention"))), model.params.step.unrolled

    def step(layer, params: Params, state):
        if one not in (_attention, _delta_net):
            return handed_on(one(params, state, layer, model.config), state)
        positions = jnp.broadcast_to(depth + jnp.arange(tokens, dtype=jnp.int32), state[0].shape[:2])
        return one(params, state, layer, model.config, positions)

    def call(params: Params, state):
        if one is _attention:
            rows, heads = state[0].shape[0], model.config.num_heads
            state = *state, empty_workspace(rows, heads, state[1].k) if unrolled else None
        if unrolled:
            for layer in range(L):
                state = step(layer, params, state)
        else:
            state = jax.lax.fori_loop(0, L, lambda layer, state: step(layer, params, state), state)
        return state[:2] if one is _attention else state

    return jax.jit(call, donate_argnums=1)


def _once(one: Callable, model: Model) -> Callable[[Params, jax.Array], jax.Array]:
    """A phase that no layer has."""
    call = lambda params, x: handed_on(one(params, x, None, model.config), x)  # noqa: E731
    return jax.jit(call, donate_argnums=1)


def handed_on(y: jax.Array, state: Any) -> Any:
    """What the next product of a chain begins with, so that it waits for this one's y: y as wide as x, or,
    where there is a residual, x as it was and y in its place."""
    if isinstance(state, tuple):
        return state[0], y
    width = state.shape[-1]
    return jnp.pad(y[..., :width], ((0, 0), (0, 0), (0, max(0, width - y.shape[-1]))))


def _attention(params: Params, state: tuple[jax.Array, KVCache, jax.Array | None], layer, config, positions):
    qkv, cache, workspace = state
    w = params.layers
    angle = positions[..., None].astype(jnp.float32) * params.rope_frequencies
    out, k_pages, v_pages, workspace = attend(
        qkv, cache.k, cache.v, cache.block_table, positions, layer,
        rotation=(jnp.cos(angle), jnp.sin(angle)), interleaved=config.rope.interleaved,
        norms=(w.q_norm, w.k_norm), eps=config.rms_norm_eps, num_keys=positions.max() + 1, impl=cache.impl,
        prefill_impl=cache.prefill_impl, workspace=workspace,
    )  # fmt: skip
    return qkv.at[..., : out.shape[-1]].set(out), cache.replace(k=k_pages, v=v_pages), workspace


def _delta_net(params: Params, state: tuple[jax.Array, KVCache], layer, config, positions):
    made, cache = state
    w, held, d = params.layers, cache.delta, config.delta
    assert held is not None and w.delta_conv is not None and w.delta_a is not None
    assert w.delta_dt is not None and w.delta_head_norm is not None
    y, s, tail = delta_net(
        made, made[..., : 2 * d.v_heads], held.s, held.tail, positions, layer,
        conv=w.delta_conv, decay=w.delta_a, dt=w.delta_dt, norm=w.delta_head_norm,
        eps=config.rms_norm_eps, grouped=d.grouped, impl=held.impl, prefill_impl=held.prefill_impl,
    )  # fmt: skip
    return made.at[..., : d.v_width].set(y), cache.replace(delta=held.replace(s=s, tail=tail))


def _delta_in(params: Params, x, layer, config):
    w = params.layers
    y = [
        matmul(x, weight, layer, gamma=w.delta_norm, eps=config.rms_norm_eps)
        for weight in (*w.delta_in, *w.delta_gates)
    ]
    return jnp.concatenate(y, axis=-1)


def _delta_out(params: Params, state: tuple[jax.Array, jax.Array], layer, config):
    mixed, y = state
    assert params.layers.delta_out is not None
    return matmul(mixed, params.layers.delta_out, layer, residual=y)


def _qkv(params: Params, x, layer, config):
    w = params.layers
    y = [matmul(x, weight, layer, gamma=w.attn_norm, eps=config.rms_norm_eps) for weight in w.wqkv]
    return y[0] if len(y) == 1 else jnp.concatenate(y, axis=-1)


def _output(params: Params, state: tuple[jax.Array, jax.Array], layer, config):
    attended, y = state
    return matmul(attended, params.layers.wo, layer, residual=y)


def _gate_up(params: Params, x, layer, config):
    w = params.layers
    assert w.w_gate is not None and w.w_up is not None
    return gated(x, w.w_gate, w.w_up, layer, gamma=w.ffn_norm, eps=config.rms_norm_eps)


def _down(params: Params, state: tuple[jax.Array, jax.Array], layer, config):
    hidden, y = state
    assert params.layers.w_down is not None
    return matmul(hidden, params.layers.w_down, layer, residual=y)


def _router(params: Params, x, layer, config):
    assert params.layers.router is not None
    return matmul(x, params.layers.router, layer)


def _experts(params: Params, x, layer, config):
    """Each token's experts are others than its neighbours', and than the layer's before."""
    w, e = params.layers, config.experts
    assert w.expert_gate is not None and w.expert_up is not None and w.expert_down is not None
    token = jnp.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], 1)
    stride = max(1, e.count // e.used)
    chosen = (layer + token + stride * jnp.arange(e.used)) % e.count
    weights = jnp.full(chosen.shape, 1 / e.used)
    hidden = experts_gated(x, w.expert_gate, w.expert_up, chosen, layer)
    return experts_matmul(hidden, w.expert_down, chosen, weights, layer)


def _head(params: Params, x, layer, config):
    return decoder.logits(params, x, config)


# Phases of layers that are not attention's, by what has them.
OF_KIND: dict[Callable, Mixer | Channels] = {  # pyrefly: ignore[bad-assignment]
    **dict.fromkeys((_delta_in, _delta_net, _delta_out), "delta"),
    **dict.fromkeys((_gate_up, _down), "mlp"),
    **dict.fromkeys((_router, _experts), "experts"),
}

# Products by phase: (params, state, layer, config) -> y, in the order in which a step has them.
PRODUCTS = {
    "qkv": _qkv,
    "attention output": _output,
    "gate and up": _gate_up,
    "down": _down,
    "delta inputs": _delta_in,
    "delta output": _delta_out,
    "head": _head,
}


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
