"""Where a decode step's time goes: each phase alone, over all layers, beside what memory allows.

What it is, and what it is not: a phase is a jitted call of its own, chained from layer to layer so that each
waits for the one before, and weights of all layers pass through the caches as they do in a step. In a step
phases meet, and what one leaves behind hides or hurts the next: phases timed apart do not sum to the step,
which is timed whole in a row of its own. Where a step is one launch, phases are still launched one by one.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from bonsai_jax import bench, card, layers
from bonsai_jax import cache as kv
from bonsai_jax.cache import KVCache
from bonsai_jax.model import Model
from bonsai_jax.params import Params
from pallas_kernels import attend, gated, matmul

WARMUP = 3  # calls: on a GPU the first makes no graph, the second makes it
CALLS = 10  # dispatched at once on a GPU, so that the host's part of a call does not count


@dataclasses.dataclass(frozen=True)
class Phase:
    """One phase of a decode step of one row, over all layers, as it is kept for the record.

    test        "tg@d2048": one token behind 2,048
    us          median of the repetitions, microseconds
    bytes       of weights and cache that it must move; activations are left out
    operations  two for each weight, or for each element of keys and values and query of theirs
    tflops      10^12 operations a second
    ceiling_share  gb_s over the memory's bandwidth
    """

    date: str
    commit: str | None
    device: str
    driver: str | None
    jax: str
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


def measure(model: Model, depth: int = 0, repetitions: int = 5) -> Iterator[Phase]:
    """A row for each phase of a decode step behind `depth` tokens, one for their sum, one for the whole
    step."""
    config, run, params = model.config, model.run, model.params
    w, L = params.layers, config.num_layers
    H, ffn_width, q_width = config.hidden, config.ffn, config.q_width
    qkv_width = q_width + 2 * config.kv_width
    cache = kv.empty(config, run, 1, depth + 1)
    vector = lambda width: jnp.full((1, 1, width), 0.5, jnp.float32)  # noqa: E731
    head = params.embed if params.head is None else params.head
    of_depth = depth + 1
    cache_bytes = of_depth * kv.bytes_per_token(config, run.cache_dtype)
    weight_bytes = lambda *stacks: sum(stack.nbytes for stack in stacks)  # noqa: E731
    plan = {  # phase: one layer of it, what it begins with, bytes, operations
        "qkv": (_qkv, vector(H), weight_bytes(*w.wqkv), 2 * L * qkv_width * H),
        "attention": (_attention, (vector(qkv_width), cache), cache_bytes, 4 * L * q_width * of_depth),
        "attention output": (_output, (vector(q_width), vector(H)), weight_bytes(w.wo), 2 * L * H * q_width),
        "gate and up": (_gate_up, vector(H), weight_bytes(w.w_gate, w.w_up), 4 * L * H * ffn_width),
        "down": (_down, (vector(ffn_width), vector(H)), weight_bytes(w.w_down), 2 * L * H * ffn_width),
        "head": (None, vector(H), head.nbytes, 2 * config.vocab_size * H),
    }
    shared = {
        "commit": bench.commit(),
        "device": card.device_name(),
        "driver": card.driver(),
        "jax": jax.__version__,
        "model": bench.model_name(model.source),
        "test": f"tg@d{depth}",
    }

    def row(phase: str, seconds: float, moved: int, operations: int, impl: str) -> Phase:
        return Phase(
            date=bench.now(), phase=phase, us=1e6 * seconds, bytes=moved, gb_s=moved / seconds / 1e9,
            operations=operations, tflops=operations / seconds / 1e12, impl=impl,
            ceiling_share=moved / seconds / card.bandwidth(), **shared,
        )  # fmt: skip

    by_phase = card.impl_names(params.replace(schedule="launches"))
    total = (0.0, 0, 0)
    for phase, (one, start, moved, operations) in plan.items():
        call = _all_layers(one, model, depth) if one else _head(model)
        seconds = _seconds(lambda state, call=call: call(params, state), start, repetitions)
        total = (total[0] + seconds, total[1] + moved, total[2] + operations)
        yield row(phase, seconds, moved, operations, cache.impl if phase == "attention" else by_phase)
    yield row("sum of these", *total, by_phase)
    step = bench.Test(model, "tg", 8 if jax.default_backend() == "cpu" else 64, depth)
    seconds = statistics.median(1 / step.run() for _ in range(repetitions))
    yield row("whole step", seconds, total[1], total[2], card.impl_names(params))


def _all_layers(one: Callable, model: Model, depth: int) -> Callable[[Params, Any], Any]:
    """One phase over all layers, as `layers.decoder` goes over them: unrolled on kernels, else scanned."""
    L, unrolled = model.config.num_layers, model.params.layers.wqkv[0].parts[0].impl != "xla"

    def call(params: Params, state):
        if unrolled:
            for layer in range(L):
                state = one(params, state, layer, model.config, depth)
            return state
        step = lambda layer, state: one(params, state, layer, model.config, depth)  # noqa: E731
        return jax.lax.fori_loop(0, L, step, state)

    return jax.jit(call, donate_argnums=1)


def _head(model: Model) -> Callable[[Params, jax.Array], jax.Array]:
    return jax.jit(lambda params, x: _as_next(layers.logits(params, x, model.config), x), donate_argnums=1)


def _as_next(y: jax.Array, x: jax.Array) -> jax.Array:
    """What came out as what goes in next, as wide as that: so the next product waits for this one."""
    return jnp.pad(y[..., : x.shape[-1]], ((0, 0), (0, 0), (0, max(0, x.shape[-1] - y.shape[-1]))))


def _qkv(params: Params, x, layer, config, depth):
    w = params.layers
    y = [matmul(x, weight, layer, gamma=w.attn_norm, eps=config.rms_norm_eps) for weight in w.wqkv]
    return _as_next(y[0] if len(y) == 1 else jnp.concatenate(y, axis=-1), x)


def _attention(params: Params, state: tuple[jax.Array, KVCache], layer, config, depth):
    qkv, cache = state
    w, positions = params.layers, jnp.full((1, 1), depth, jnp.int32)
    angle = positions[..., None].astype(jnp.float32) * params.rope_frequencies
    out, k_pages, v_pages = attend(
        qkv, cache.k, cache.v, cache.block_table, positions, layer,
        rotation=(jnp.cos(angle), jnp.sin(angle)), interleaved=config.rope.interleaved,
        norms=(w.q_norm, w.k_norm), eps=config.rms_norm_eps, num_keys=jnp.int32(depth + 1), impl=cache.impl,
    )  # fmt: skip
    return qkv.at[..., : out.shape[-1]].set(out), cache.replace(k=k_pages, v=v_pages)


def _output(params: Params, state: tuple[jax.Array, jax.Array], layer, config, depth):
    attended, y = state
    return attended, matmul(attended, params.layers.wo, layer, residual=y)


def _gate_up(params: Params, x, layer, config, depth):
    w = params.layers
    return _as_next(gated(x, w.w_gate, w.w_up, layer, gamma=w.ffn_norm, eps=config.rms_norm_eps), x)


def _down(params: Params, state: tuple[jax.Array, jax.Array], layer, config, depth):
    hidden, y = state
    return hidden, matmul(hidden, params.layers.w_down, layer, residual=y)


def _seconds(step: Callable[[Any], Any], state: Any, repetitions: int) -> float:
    """Median seconds of a call of step: state -> state."""
    calls = 1 if jax.default_backend() == "cpu" else CALLS
    for _ in range(WARMUP):
        state = step(state)
    times = []
    for _ in range(repetitions):
        jax.block_until_ready(state)
        began = time.perf_counter()
        for _ in range(calls):
            state = step(state)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - began) / calls)
    return statistics.median(times)


COLUMNS = ("model", "impl", "test", "phase", "us", "MB", "GB/s", "MFLOP", "TFLOP/s", "ceiling")


def markdown_header() -> str:
    rule = ["---" if name in COLUMNS[:4] else "---:" for name in COLUMNS]
    return f"| {' | '.join(COLUMNS)} |\n| {' | '.join(rule)} |"


def markdown(row: Phase) -> str:
    cells = (
        *(row.model, row.impl, row.test, row.phase, f"{row.us:,.1f}", f"{row.bytes / 1e6:,.1f}"),
        *(
            f"{row.gb_s:,.1f}",
            f"{row.operations / 1e6:,.1f}",
            f"{row.tflops:.3f}",
            f"{row.ceiling_share:.0%}",
        ),
    )
    return f"| {' | '.join(cells)} |"
