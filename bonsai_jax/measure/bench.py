"""Speed as llama-bench measures it: prompt processing (pp) and token generation (tg), without tokenizing or
sampling; and generation as users run it (gen).

ppN         N prompt tokens at once, and the logits of the last one
tgN         N tokens one after another, each through embedding, layers and head; ids come from a fixed random
            table
genN        N tokens as `generate` and `stream` make them: `steps.decode` with the default SamplingParams,
            each token drawn from the logits of the one before; gen128+ngram: with proposals by ngram
...@dD      the same after D tokens that are already in the cache
batchB      tg for B sequences of 128 tokens that produce 128 more; speed counts the tokens of all sequences
gen-batchB  gen for such a batch

Over a mesh with data parallelism every device runs the whole test, B sequences each, and speed counts the
tokens of all devices.
"""

import csv
import dataclasses
import datetime
import functools
import io
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bonsai_jax import card, machine
from bonsai_jax.config import ModelConfig
from bonsai_jax.decoding import jitted, proposers, speculation
from bonsai_jax.decoding import steps as core
from bonsai_jax.engine.calls import LOOP_IN_GRAPH
from bonsai_jax.model import Model, chosen_proposer, start_state
from bonsai_jax.network import decoder, parallel
from bonsai_jax.network import params as weights
from bonsai_jax.network.cache import KVCache
from bonsai_jax.network.parallel import over_mesh
from bonsai_jax.network.params import Params
from bonsai_jax.sampling_params import SamplingParams
from bonsai_jax.weights import placement

BATCH_TOKENS = 128  # tokens of each sequence of a batch before the test, and as many are produced
WARMUP_STEPS = 8  # decode loops of any length are one program, so a short one warms it up
# How an engine compiles its dispatch. XLA makes no graph of few operations, as which it counts a loop.
ONE_GRAPH = LOOP_IN_GRAPH | {"xla_gpu_graph_min_graph_size": "1"}
ONE_BY_ONE = "--xla_gpu_enable_command_buffer="  # in XLA_FLAGS: no CUDA graphs, and no ONE_GRAPH
WARMUP_CALLS = 4  # on a GPU the second call creates the CUDA graph


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where and when a row was measured: the first fields of every row."""

    date: str
    commit: str | None
    device: str
    driver: str | None
    jax: str


@dataclasses.dataclass(frozen=True)
class Row(Origin):
    """The result of one test.

    tok_s, tok_s_std  mean and standard deviation over the repetitions
    gb_s              10^9 bytes per second, of all devices: for tg the weights and the cache (at its mean
                      depth) in each step, for pp the weights once
    ceiling_share     gb_s over the memory bandwidth of all devices; None for pp, which memory does not bound
    data_parallel, tensor_parallel  devices along the axes of the mesh
    tokens_per_step   tokens per step of a sequence, if steps speculate
    """

    impl: str
    model: str
    test: str
    tok_s: float
    tok_s_std: float
    gb_s: float
    ceiling_share: float | None
    data_parallel: int = 1
    tensor_parallel: int = 1
    tokens_per_step: float | None = None


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
@over_mesh(("rows", "cache"))
def last_logits(
    params: Params, cache: KVCache, tokens: Int[Array, "B T"], config: ModelConfig
) -> tuple[Float[Array, "B V"], KVCache]:
    """Read prompts after what is in the cache. Returns the logits of their last tokens, and the cache."""
    lengths = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
    hidden, cache = core.read(params, cache, tokens, lengths, config)
    return decoder.unembed(params, hidden, config), cache


@over_mesh(("rows", "cache"))
def read_one_by_one(
    params: Params,
    cache: KVCache,
    tokens: Int[Array, "B N"],
    steps: int | Int[Array, ""],
    config: ModelConfig,
) -> tuple[Float[Array, "B"], KVCache]:
    """Read the first `steps` tokens of every sequence, one decode step each, in a loop on the device.

    Returns for each sequence the sum of every step's largest logit, which needs all logits, so that XLA can
    leave out none.
    """

    def step(i, carry):
        total, cache = carry
        logits, cache = last_logits(params, cache, tokens[:, i][:, None], config)
        return total + logits.max(axis=-1), cache

    return jax.lax.fori_loop(0, steps, step, (jnp.zeros(tokens.shape[0]), cache))


@functools.cache
def as_dispatched(function: Callable[..., Any], donated: str, on_mesh: bool) -> Callable[..., Any]:
    """A loop of steps, jitted as an engine's dispatch is: on one GPU no step waits for the host."""
    one_by_one = ONE_BY_ONE in os.environ.get("XLA_FLAGS", "").split()
    return jitted.donating(function, donated, compiler_options=None if on_mesh or one_by_one else ONE_GRAPH)


@dataclasses.dataclass
class Test:
    """One test of one model, prepared and compiled once; run() is one timed repetition.

    rows       sequences on each device along the mesh's axis "data"
    speculate  the proposer of a gen test; None: steps do not speculate
    """

    model: Model
    kind: str  # "pp", "tg" or "gen"
    tokens: int
    depth: int = 0
    rows: int = 1
    speculate: str | None = None

    def __post_init__(self):
        model = self.model
        self.data, self.parts = (
            placement.size(model.mesh, axis) for axis in (placement.DATA, placement.MODEL)
        )
        shape = (self.rows * self.data, self.depth + self.tokens)
        ids = np.random.default_rng(0).integers(0, model.config.vocab_size, shape).astype(np.int32)
        self.ids = parallel.place_rows(ids[:, self.depth :], model.mesh)
        self.cache = parallel.empty_cache(model.config, model.run, *shape, model.mesh)
        if self.depth:
            self._call(last_logits, parallel.place_rows(ids[:, : self.depth], model.mesh))
        if self.kind == "gen":
            self.speculate = chosen_proposer(model, self.speculate)
            how = {"ignore_eos": True, "speculate": self.speculate}
            self.state = start_state(model, self.cache, SamplingParams(seed=0), self.tokens, **how)
            if self.state.speculation is not None:
                self._tell_proposer(parallel.place_rows(ids[:, : self.depth + 1], model.mesh))
            self.state = self.state.replace(tokens=self.ids[:, 0])
        on_gpu = jax.default_backend() != "cpu"
        on_mesh = model.mesh is not None
        self.decode = as_dispatched(core.decode, "state", on_mesh)
        self.read = as_dispatched(read_one_by_one, "cache", on_mesh)
        for _ in range(3 if on_gpu else 1):  # on a GPU the second run creates the CUDA graph
            self.run(warm=True)

    def _tell_proposer(self, known: jax.Array) -> None:
        """Give steps that speculate the tokens in the cache, and the newest. A draft layer or a draft model
        reads them, with the model once more."""
        state: Any = self.state
        model = self.model
        if state.speculation.draft is not None and self.depth:
            lengths = jnp.full_like(state.cache.lengths, self.depth)
            state = state.replace(cache=state.cache.reset())
            state, *_ = jitted.prefill(model.params, state, known[:, :-1], lengths, model.config)
        first, valid = jnp.zeros(len(known), jnp.int32), jnp.ones(known.shape, bool)
        noted = speculation.note(state.speculation, known, first, valid)
        self.state = state.replace(speculation=noted)

    def _call(self, function, *arrays) -> jax.Array:
        """Run a function that updates the cache; returns its other result."""
        out, self.cache = function(self.model.params, self.cache, *arrays, self.model.config)
        return out

    @property
    def name(self) -> str:
        how = f"+{self.speculate}" if self.speculate else ""
        if self.rows > 1:
            return (f"gen-batch{self.rows}" if self.kind == "gen" else f"batch{self.rows}") + how
        return f"{self.kind}{self.tokens}{how}" + (f"@d{self.depth}" if self.depth else "")

    def run(self, warm: bool = False) -> float:
        """Tokens per second of one repetition."""
        rows = self.rows * self.data
        steps = np.int32(min(self.tokens, WARMUP_STEPS) if warm else self.tokens)
        self._rewind()
        began = time.perf_counter()
        if self.kind == "pp":
            out = self._call(last_logits, self.ids)
        elif self.kind == "gen":
            model = self.model
            self.state, *out = self.decode(
                model.params, self.state, model.config, limit=steps, size=self.tokens
            )
        else:
            out = self._call(self.read, self.ids, steps)
        jax.block_until_ready(out)
        seconds = time.perf_counter() - began
        if self.kind == "gen" and not warm:
            self._check_drawn(out[0])
        return rows * self.tokens / seconds

    def _check_drawn(self, tokens: jax.Array) -> None:
        """Raise RuntimeError if a row ended before its last token: its time would be that of fewer steps."""
        drawn = (parallel.fetch(tokens) != core.NO_TOKEN).sum(axis=1)
        if (drawn < self.tokens).any():
            raise RuntimeError(
                f"{self.name}: a row drew {drawn.min()} of {self.tokens} tokens, as where logits are not "
                "finite; no speed is reported"
            )

    def _rewind(self) -> None:
        """Reset every sequence to `depth` tokens."""
        rows = self.rows * self.data
        lengths, remaining = (
            parallel.place_rows(np.full(rows, n, np.int32), self.model.mesh)
            for n in (self.depth, self.tokens)
        )
        if self.kind == "gen":
            if (s := self.state.speculation) is not None:
                trust = jnp.full_like(s.trust, proposers.get(s.proposer).TRUST)
                reset = s.replace(steps=jnp.zeros_like(s.steps), trust=trust)
                self.state = self.state.replace(speculation=reset)
            cache = self.state.cache.replace(lengths=lengths)
            self.state = jax.block_until_ready(self.state.replace(cache=cache, remaining=remaining))
        else:
            self.cache = jax.block_until_ready(self.cache.replace(lengths=lengths))

    def bytes_moved(self) -> int:
        """Bytes that all devices read, per run for pp, per step for tg and gen: see Row."""
        tokens = self.rows * (self.tokens if self.kind == "pp" else 1)
        weight_bytes = weights.decode_bytes(self.model.params, self.model.config, tokens) * self.data
        if self.kind == "pp":
            return weight_bytes
        lengths = [self.depth + self.tokens // 2] * self.rows * self.data
        return card.decode_bytes(weight_bytes, self.model.config, self.model.run, lengths)

    def tokens_per_step(self) -> float | None:
        """Tokens per step of a sequence in the last run; None if steps do not speculate."""
        if self.kind != "gen" or (s := self.state.speculation) is None:
            return None
        return self.tokens / float(parallel.fetch(s.steps).mean())

    def row(self, speeds: Sequence[float]) -> Row:
        params, mean = self.model.params, statistics.fmean(speeds)
        per_step = self.tokens_per_step()
        tokens = self.rows * self.data * (self.tokens if self.kind == "pp" else per_step or 1)
        moved = self.bytes_moved() * mean / tokens
        return Row(
            **origin(),
            impl=card.kernel_names(params.replace(draft_model=None), self.rows * self.tokens)
            if self.kind == "pp"
            else card.step_names(params, self.model.config, self.rows),
            model=self.model.name,
            test=self.name,
            tok_s=mean,
            tok_s_std=statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
            gb_s=moved / 1e9,
            ceiling_share=None
            if self.kind == "pp"
            else moved / machine.bandwidth() / (self.data * self.parts),
            data_parallel=self.data,
            tensor_parallel=self.parts,
            tokens_per_step=per_step,
        )


def measure(
    model: Model,
    prompts: Sequence[int] = (512,),
    new_tokens: Sequence[int] = (128,),
    depths: Sequence[int] = (0,),
    repetitions: int = 5,
    *,
    sampled: Sequence[int] = (),
    batches: Sequence[int] = (),
    speculate: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Row]:
    """A row for every depth and test size, in llama-bench's order, then the rows of every batch. Sizes of 0
    are skipped, as llama-bench does.

    prompts, new_tokens, sampled  sizes of the pp, tg and gen tests; if there are gen tests, batches are
                                  measured with sampling too
    speculate                     the proposer of gen tests
    """
    sizes = {"pp": prompts, "tg": new_tokens, "gen": sampled}
    plan = [(kind, n, depth, 1) for depth in depths for kind, counts in sizes.items() for n in counts if n]
    kinds = ("tg", "gen") if any(sampled) else ("tg",)
    plan += [(kind, BATCH_TOKENS, BATCH_TOKENS, rows) for rows in batches if rows for kind in kinds]
    for i, sizes in enumerate(plan):
        test, speeds = Test(model, *sizes, speculate if sizes[0] == "gen" else None), []
        for repetition in range(repetitions):
            speeds.append(test.run())
            progress(i * repetitions + repetition + 1, len(plan) * repetitions)
        yield test.row(speeds)


def seconds_per_call(step: Callable[[Any], Any], state: Any, *, repetitions: int, calls: int) -> list[float]:
    """Seconds per call of step: state -> state, for each repetition of `calls` calls, which are dispatched
    without waiting. Warm-up calls before them do not count."""
    for _ in range(WARMUP_CALLS):
        state = step(state)
    times = []
    for _ in range(repetitions):
        jax.block_until_ready(state)
        began = time.perf_counter()
        for _ in range(calls):
            state = step(state)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - began) / calls)
    return times


def origin(named: str | None = None) -> dict[str, Any]:
    """The fields of an Origin for this moment and machine.

    named  the commit, for a checkout without history
    """
    return {
        "date": now(),
        "commit": named or commit(),
        "device": machine.device_name(),
        "driver": machine.driver(),
        "jax": jax.__version__,
    }


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@functools.cache
def commit() -> str | None:
    """The checkout's commit, with "-dirty" if tracked files differ from it; None outside a checkout."""
    root = Path(__file__).parents[2]
    if not (root / "pyproject.toml").exists():
        return None

    def git(*arguments):
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + (
            "-dirty" if git("status", "--porcelain", "-uno") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return None


COLUMNS = ("model", "size", "params", "device", "impl", "test", "t/s", "GB/s", "ceiling")


def markdown_header() -> str:
    rule = ["---" if name in COLUMNS[:6] else "---:" for name in COLUMNS]
    return f"| {' | '.join(COLUMNS)} |\n| {' | '.join(rule)} |"


def markdown(row: Row, size_bytes: int, parameters: int) -> str:
    share = "-" if row.ceiling_share is None else f"{row.ceiling_share:.0%}"
    test = row.test + ("" if row.tokens_per_step is None else f", {row.tokens_per_step:.2f} a step")
    cells = (
        *(row.model, binary_size(size_bytes), short_count(parameters), row.device, row.impl, test),
        *(f"{row.tok_s:.2f} ± {row.tok_s_std:.2f}", f"{row.gb_s:.1f}", share),
    )
    return f"| {' | '.join(cells)} |"


def json_line(row: Any) -> str:
    """A dataclass as one line of JSON."""
    return json.dumps(dataclasses.asdict(row))


def csv_header(row: type = Row) -> str:
    return ",".join(field.name for field in dataclasses.fields(row))


def csv_line(row: Any) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow(dataclasses.asdict(row).values())
    return out.getvalue()


def binary_size(count: float) -> str:
    """Bytes in MiB or GiB, as llama-bench prints them."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def short_count(count: float) -> str:
    """Parameters in millions or billions."""
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"
