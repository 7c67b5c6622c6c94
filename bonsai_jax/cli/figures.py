"""The figures of one answer: speeds beside their ceiling, not counting the time spent compiling."""

import dataclasses
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bonsai_jax import Model, Piece


# How the names of jax's events begin: it has traced or compiled something, a stored program was loaded
# (engine/stored.py), a program has waited for a CPU kernel's code (pallas_kernels/cpu/later.py).
COMPILING = "/jax/core/compile/", "/bonsai_jax/load_program", "/pallas_kernels/wait_for_kernel"


class CompileClock:
    """Records what is compiled and when, so that speeds of the first answer do not include it."""

    def __init__(self):
        import jax

        self.spans: list[tuple[float, float]] = []
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, duration_secs: float, **_) -> None:
        if event.startswith(COMPILING):
            ended = time.perf_counter()
            self.spans.append((ended - duration_secs, ended))

    def seconds(self, began: float, ended: float) -> float:
        """Seconds of this interval spent compiling. Spans nest: jitted functions trace one another."""
        total, reached = 0.0, began
        for first, last in sorted(self.spans):
            first, last = max(first, reached), min(last, ended)
            if last > first:
                total += last - first
                reached = last
        return total


@dataclasses.dataclass
class Figures:
    """The figures of one answer, updated while its pieces pass through `watch`.

    ttft_s      wall seconds from the prompt to the first token, including compiling
    prefill_s   seconds to the first token, without compiling
    decode_s    seconds from the first token to the last, without compiling
    steps       decode steps so far
    speculates  whether a step may draw several tokens
    """

    prompt_tokens: int
    clock: CompileClock
    speculates: bool = False
    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    ttft_s: float | None = None
    prefill_s: float = 0.0
    decode_s: float = 0.0
    steps: int = 0

    def watch(self, pieces: Iterable["Piece"]) -> Iterator["Piece"]:
        began = time.perf_counter()
        first = None
        for piece in pieces:
            now = time.perf_counter()
            if first is None:
                first, self.ttft_s = now, now - began
                self.prefill_s = self.ttft_s - self.clock.seconds(began, now)
            self.decode_s = now - first - self.clock.seconds(first, now)
            self.text += piece.text
            self.tokens += piece.tokens
            self.steps += piece.steps
            self.finish_reason = piece.finish_reason
            yield piece

    @property
    def prefill_tok_s(self) -> float | None:
        return self.prompt_tokens / self.prefill_s if self.prefill_s > 0 else None

    @property
    def decoded(self) -> int:
        """Tokens after the first, including the one that ended the answer."""
        return len(self.tokens) - 1 + (self.finish_reason == "stop")

    @property
    def decode_tok_s(self) -> float | None:
        return self.decoded / self.decode_s if self.decoded > 0 and self.decode_s > 0 else None

    @property
    def tokens_per_step(self) -> float | None:
        return self.decoded / self.steps if self.speculates and self.steps else None


def summary(model: "Model", figures: Figures, depth: int | None = None) -> str:
    """One line: prefill and decode tok/s, share of the memory ceiling, peak memory.

    depth  tokens before the answer, if some of them were in the cache; None: those of the prompt
    """
    from bonsai_jax import card, machine
    from bonsai_jax.network import params as weights

    peak = machine.peak_memory()  # before anything below allocates
    depth = figures.prompt_tokens if depth is None else depth
    parts = [f"prefill {_speed(figures.prefill_tok_s)} ({figures.prompt_tokens} tokens)"]
    if figures.decode_tok_s is not None:
        middle = depth + len(figures.tokens) // 2
        weight_bytes = weights.decode_bytes(model.params, model.config)
        step_bytes = card.decode_bytes(weight_bytes, model.config, model.run, [middle])
        per_step = figures.tokens_per_step
        ceiling = machine.bandwidth() / step_bytes * (per_step or 1)
        share = f"{figures.decode_tok_s / ceiling:.0%} of the {ceiling:.1f} that memory allows"
        tokens = f"{len(figures.tokens)} tokens" + (f", {per_step:.2f} a step" if per_step else "")
        parts.append(f"decode {_speed(figures.decode_tok_s)} ({tokens}, {share})")
    if figures.ttft_s is not None:
        parts.append(f"first token after {figures.ttft_s:.2f} s")
    parts.append(f"peak memory {peak / 1e9:.2f} GB")
    return ", ".join(parts)


def _speed(tok_s: float | None) -> str:
    return "-" if tok_s is None else f"{tok_s:.1f} tok/s"
