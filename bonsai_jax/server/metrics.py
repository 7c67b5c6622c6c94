"""What /metrics shows, in Prometheus' text format."""

from collections.abc import Iterator

import jax
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from bonsai_jax.engine import Engine
from bonsai_jax.engine.answers import Piece

WAITS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
TOTAL_S = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 600)


class Metrics:
    """Counters of one server, and its engine's state when they are read."""

    def __init__(self, engine: Engine):
        self.registry = own = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"bonsai_{name}", text, labels, registry=own)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"bonsai_{name}_seconds", text, labels, buckets=buckets, registry=own)

        self.requests = counter("requests", "Requests by path and status", "path", "status")
        self.request_s = histogram("request", "Seconds of a request", TOTAL_S, "path")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts")
        self._cached = counter("cached_tokens", "Tokens of prompts that were in the cache")
        self._new = counter("new_tokens", "Tokens of answers")
        self._accepted = counter("accepted_tokens", "Proposed tokens that were accepted")
        self._first_s = histogram("time_to_first_token", "From the queue to the first token", WAITS_S)
        between = "Between tokens of an answer; the mean, for those that come together"
        self._between_s = histogram("time_between_tokens", between, BETWEEN_S)
        own.register(_EngineState(engine))

    def first_token(self, seconds: float) -> None:
        self._first_s.observe(seconds)

    def more_tokens(self, seconds: float, tokens: int) -> None:
        self._between_s.observe(seconds / tokens)

    def count(self, piece: Piece) -> None:
        """Called for each piece; a counter that grows by nothing is left alone, as each takes a lock."""
        tokens = len(piece.tokens)
        if tokens:
            self._new.inc(tokens)
        if piece.cached_tokens:
            self._cached.inc(piece.cached_tokens)
        if 0 < piece.steps < tokens:  # a step draws one token without speculation
            self._accepted.inc(tokens - piece.steps)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _EngineState(Collector):
    def __init__(self, engine: Engine):
        self._engine = engine

    def collect(self) -> Iterator[GaugeMetricFamily]:
        load = self._engine.load()
        rows = {
            "running": ("Answers that have a row", load.running),
            "waiting": ("Answers that wait for a row", load.waiting),
            "pages": ("Pages of the cache", load.pages),
            "free_pages": ("Pages that hold nothing", load.free_pages),
            "cached_pages": ("Pages of earlier prompts that no answer uses", load.cached_pages),
            "preemptions": ("How often an answer has lost its pages to others", load.preempted),
            "up": ("1 until the engine has failed", int(self._engine.broken is None)),
        }
        for name, (text, value) in rows.items():
            yield GaugeMetricFamily(f"bonsai_{name}", text, value)
        memory = GaugeMetricFamily(
            "bonsai_device_memory_bytes", "Memory in use on a device", labels=["device"]
        )
        for device in jax.local_devices():
            stats = device.memory_stats() or {}  # a CPU has none
            if "bytes_in_use" in stats:
                memory.add_metric([str(device.id)], stats["bytes_in_use"])
        yield memory
