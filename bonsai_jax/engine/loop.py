"""The loop of an engine: plans become dispatches, and what they drew becomes text.

    plan t + 1, dispatch it    while the device works on t
    read t                     tokens to text; who has ended gives back row and pages

One thread turns it (engine.py), or whoever waits for the answers (text.generate).
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from bonsai_jax import decoding, parallel, placement, sampling, speculation
from bonsai_jax.answers import Piece, Reader
from bonsai_jax.config import SamplingParams
from bonsai_jax.decoding import LogitsProcessor, State
from bonsai_jax.engine import rows as on_device
from bonsai_jax.engine.scheduler import Limits, Plan, Read, Request, Scheduler
from bonsai_jax.model import Model, start_state
from bonsai_jax.prompts import Ids
from bonsai_jax.taps import Taps

FREE_TOKENS = 256  # on a GPU a prefill of fewer costs as much: it reads the weights, too


@dataclasses.dataclass(eq=False)
class Answer:
    """One answer to a request, and who is told of it.

    request   what the scheduler knows of it
    params    its seed is set
    logprobs  alternatives that are asked for
    told      called with each Piece, or with the exception that ends it
    """

    request: Request
    reader: Reader
    params: SamplingParams
    stop_ids: list[int]
    logprobs: int | None
    index: int
    told: Callable[[Piece | Exception], None]


@dataclasses.dataclass(frozen=True)
class Options:
    """What is decided when an engine is made: see Engine."""

    max_rows: int
    pages: int
    context: int
    logprobs: int | None = None
    speculate: str | None = None
    taps: Taps | None = None
    logits_processor: LogitsProcessor | None = None
    biases: int = 1
    max_wait_s: float | None = None
    prefill_tokens: int = 0
    reproducible: bool = False


class Loop:
    """Requests of one engine on their way. Not for several threads at once."""

    def __init__(self, model: Model, options: Options):
        self.model, self.options = model, options
        self.data = placement.size(model.mesh, placement.DATA)
        self.answers: dict[Request, Answer] = {}
        self.scheduler = Scheduler(self._limits(), self.data)
        self.failures = 0  # since anything was drawn
        self._flying: deque[tuple[Plan, list[Any], Any]] = deque()
        self._read_at: float | None = None
        self._pool = self._empty_pool()

    def ask(
        self,
        ids: Ids,
        params: SamplingParams,
        *,
        max_new_tokens: int,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        priority: int = 0,
        logprobs: int | None = None,
        index: int = 0,
        told: Callable[[Piece | Exception], None],
    ) -> Answer:
        """A request of one answer, as it waits to be added."""
        o, vectors = self.options, isinstance(ids, np.ndarray)
        whole = not self._pool.cache.rewinds  # a recurrent state is not in the pages (prefix.py)
        whole |= o.logits_processor is not None or params.repetition_penalty != 1  # which see the prompt
        if vectors or whole or o.reproducible:
            reusable = 0
        elif params.presence_penalty or params.frequency_penalty:
            reusable = len(ids)
        else:
            reusable = None
        eos = [] if ignore_eos else sorted(self.model.tokenizer.eos_ids)
        request = Request(ids, max_new_tokens, reusable, vectors, priority)
        reader = Reader(self.model.tokenizer, frozenset(eos), stop)
        return Answer(request, reader, params, eos, logprobs, index, told)

    def add(self, answer: Answer) -> None:
        self.answers[answer.request] = answer
        self.scheduler.add(answer.request)

    def cancel(self, answer: Answer) -> None:
        """Its row and pages are free for the next plan."""
        self.scheduler.end(answer.request)
        self.answers.pop(answer.request, None)

    def turn(self) -> bool:
        """Dispatch a plan, if there is one, and read the one before. False: nothing is left to do."""
        plan = self.scheduler.plan()
        if plan is not None:
            self._flying.append((plan, *self._dispatched(plan)))
        else:
            self._read_at = None
        if self._flying and (plan is None or len(self._flying) > 1):
            self._read(*self._flying.popleft())
            self.failures = 0
        return plan is not None or bool(self._flying) or bool(self.scheduler.waiting)

    def fail(self, error: Exception) -> None:
        """Something that was dispatched failed: whoever runs ends with the error, whoever waits goes on.
        Raises what making a new pool raises."""
        self.failures += 1
        self._flying.clear()
        waiting = self.scheduler.waiting
        lost = [
            answer for request, answer in self.answers.items() if request not in waiting or request.flights
        ]
        self.answers = {r: a for r, a in self.answers.items() if a not in lost}
        for answer in lost:
            answer.told(error)
        compiled = self.scheduler.compiled
        self.scheduler = Scheduler(self._limits(), self.data)
        self.scheduler.compiled = compiled
        for request in waiting:
            if request in self.answers:
                self.scheduler.add(request)
        self.release()
        self._pool = self._empty_pool()

    def release(self) -> None:
        """The pool's memory. What was dispatched may have taken it already."""
        for array in jax.tree.leaves(self._pool):
            if not array.is_deleted():
                array.delete()

    def warmup(self, progress: Callable[[int, int], None]) -> None:
        """Compile every executable, by running it without a row."""
        limits = self.scheduler.limits
        variants = [None] if self.options.logprobs is None else [None, self.options.logprobs]
        work: list[tuple[int | tuple[int, int], int | None]] = [
            (size, n) for size in (*limits.row_sizes, *limits.shapes) for n in variants
        ]
        nobody: list[list[Any]] = [[] for _ in range(self.data)]
        for done, (size, logprobs) in enumerate(work):
            progress(done, len(work))
            if isinstance(size, int):
                out = self._decode(nobody, size, 0, logprobs)
            else:
                out = self._prefill(nobody, size, logprobs)
            jax.block_until_ready(out)
            self.scheduler.compiled.add(size)
        progress(len(work), len(work))

    # What is compiled.

    def _limits(self) -> Limits:
        o, on_cpu = self.options, jax.default_backend() == "cpu"
        most = o.prefill_tokens or (decoding.PREFILL_CHUNK if on_cpu else decoding.PREFILL_BATCH)
        powers = [n for n in (2**i for i in range(32)) if n < o.max_rows]
        # One long chunk of one row, or short chunks of several: more shapes gain little (LOG.md, "Engine").
        short = max(32, most // 16)
        long = [n for n in (4 * short, 16 * short) if n < most]
        several = sorted({min(n, o.max_rows) for n in (4, 16)} - {1})
        shapes = [(1, n) for n in (short, *long, most)]
        shapes = [*dict.fromkeys(shapes), *((n, short) for n in several if n * short <= most)]
        return Limits(
            max_rows=o.max_rows,
            pages=o.pages,
            page_size=self.model.run.page_size,
            row_sizes=[o.max_rows] if o.reproducible else [*powers, o.max_rows],
            shapes=[(1, most)] if o.reproducible else shapes,
            free_tokens=1 if on_cpu else FREE_TOKENS,
            steps=on_device.DECODE_SIZE,
            width=1 if o.speculate is None else speculation.width(1),
            reserve=o.reproducible,
        )

    def _empty_pool(self) -> State:
        model, o = self.model, self.options
        rows = o.max_rows * self.data
        cache = parallel.empty_cache(
            model.config, model.run, rows, o.context, model.mesh, o.pages * self.data
        )
        room = SamplingParams(0.0, seed=0, logit_bias=dict.fromkeys(range(o.biases), 0.0))
        return start_state(model, cache, room, 0, speculate=o.speculate)

    # To the device.

    def _dispatched(self, plan: Plan) -> tuple[list[Any], Any]:
        """Arrays that hold what prefill drew, and those of decode."""
        drawn, wrote = [], None
        if any(plan.reads):
            asked = self._asked(read.request for of in plan.reads for read in of)
            drawn = self._prefill(plan.reads, plan.shape, asked)
        if any(plan.writes):
            asked = self._asked(request for of in plan.writes for request in of)
            wrote = self._decode(plan.writes, plan.rows, plan.steps, asked)
        if jax.process_count() == 1:
            for array in jax.tree.leaves((drawn, wrote)):
                array.copy_to_host_async()
        return drawn, wrote

    def _asked(self, requests: Iterator[Request]) -> int | None:
        wanted = any(r in self.answers and self.answers[r].logprobs is not None for r in requests)
        return self.options.logprobs if wanted else None

    def _prefill(self, reads: list[list[Read]], shape: tuple[int, int], logprobs: int | None) -> list[Any]:
        (rows, width), o, config = shape, self.options, self.model.config
        places: list[Read | None] = [r for of in reads for r in [*of, *[None] * (rows - len(of))]]
        vectors = any(r is not None and _vectors(r) for r in places)
        tokens = np.zeros(
            (len(places), width, *([config.hidden] if vectors else [])), "f4" if vectors else "i4"
        )
        nobody = SamplingParams(0.0, seed=0)
        of_row = [None if r is None else self.answers.get(r.request) for r in places]
        rules = sampling.columns([a.params if a else nobody for a in of_row], config.vocab_size, o.biases)
        seeds = rules.pop("seeds")

        def column(of: Callable[[Read], Any], otherwise: Any, dtype: Any = np.int32) -> np.ndarray:
            return np.array([otherwise if r is None else of(r) for r in places], dtype)

        for row, read in zip(tokens, places, strict=True):
            if read is not None:
                row[: read.count] = _slice(read)
        stop_ids = np.full((len(places), self._pool.stop_ids.shape[1]), decoding.NO_TOKEN, np.int32)
        for row, answer in zip(stop_ids, of_row, strict=True):
            if answer:
                row[: len(answer.stop_ids)] = answer.stop_ids
        chunk = on_device.Chunk(
            rows=column(lambda r: r.row, o.max_rows),
            table=self._tables([[] if r is None else r.table for r in places]),
            first=column(lambda r: r.first, 0),
            starts=column(lambda r: r.starts, False, bool),
            draws=column(lambda r: r.draws, False, bool),
            remaining=column(lambda r: r.request.max_new_tokens - len(r.request.said), 0),
            answer=column(lambda r: len(r.request.prompt), 0),
            stop_ids=stop_ids,
            copy_from=column(lambda r: r.copy[0] if r.copy else 0, 0),
            copy_to=column(lambda r: r.copy[1] if r.copy else o.pages, o.pages),
            seeds=seeds,
            rules=rules,
        )
        lengths = column(lambda r: r.count, 0)
        self._pool, *out = on_device.prefill_rows(
            self.model.params, self._pool, *self._placed((chunk, tokens, lengths)), config,
            taps=o.taps, logits_processor=o.logits_processor, logprobs=logprobs,
        )  # fmt: skip
        return out

    def _decode(self, writes: list[list[Request]], rows: int, steps: int, logprobs: int | None) -> list[Any]:
        o = self.options
        places = [r for of in writes for r in [*of, *[None] * (rows - len(of))]]
        numbers = np.array([o.max_rows if r is None else r.row for r in places], np.int32)
        tables = self._tables([[] if r is None else r.table for r in places])
        self._pool, *out = on_device.decode_rows(
            self.model.params, self._pool, *self._placed((numbers, tables)), np.int32(steps),
            self.model.config, size=on_device.DECODE_SIZE,
            taps=o.taps, logits_processor=o.logits_processor, logprobs=logprobs,
        )  # fmt: skip
        return out

    def _tables(self, pages: list[list[int]]) -> np.ndarray:
        tables = np.zeros((len(pages), self._pool.cache.block_table.shape[1]), np.int32)
        for row, of_row in zip(tables, pages, strict=True):
            row[: len(of_row)] = of_row
        return tables

    def _placed(self, arrays):
        mesh = self.model.mesh
        return arrays if mesh is None else jax.tree.map(lambda x: parallel.place_rows(x, mesh), arrays)

    # From the device.

    def _read(self, plan: Plan, drawn: list[Any], wrote: Any) -> None:
        if drawn:
            tokens, *scores = jax.tree.map(parallel.fetch, drawn)
            for i, read in _numbered(plan.reads, plan.shape[0]):
                if read.draws:
                    self._tell(read.request, tokens[i], 0, _of_row(scores, i))
        if wrote is None:
            return
        tokens, steps, *scores = jax.tree.map(parallel.fetch, wrote)
        for i, request in _numbered(plan.writes, plan.rows):
            self._tell(request, tokens[i], int(steps[i]), _of_row(scores, i))
        self._time(plan)

    def _tell(self, request: Request, drawn: np.ndarray, steps: int, scores: list[Any]) -> None:
        request.flights.popleft()
        answer = self.answers.get(request)
        if request.ended or answer is None:
            return
        new = drawn[drawn != decoding.NO_TOKEN].tolist()
        request.said += new
        n = answer.logprobs
        scores = [] if n is None else [s.replace(ids=s.ids[:, :n], top=s.top[:, :n]) for s in scores]
        piece = answer.reader.read(new, len(request.said) >= request.max_new_tokens, scores)
        if piece.finish_reason is not None:
            self.cancel(answer)
        if new or piece.finish_reason is not None:
            answer.told(dataclasses.replace(piece, steps=steps, index=answer.index))

    def _time(self, plan: Plan) -> None:
        """As many steps a plan as take half of what a request may wait: the other half is on its way."""
        before, self._read_at = self._read_at, time.perf_counter()
        if self.options.max_wait_s is None or jax.process_count() > 1:
            return  # nobody waits, or clocks of several processes would differ
        if any(plan.reads) or before is None or not plan.steps:
            return
        most = int(plan.steps * self.options.max_wait_s / 2 / max(self._read_at - before, 1e-6))
        self.scheduler.unhurried = max(1, min(most, 2 * plan.steps, on_device.DECODE_SIZE))


def _vectors(read: Read) -> bool:
    return read.request.vectors and read.first < len(read.request.prompt)


def _slice(read: Read) -> Ids:
    """What it reads."""
    request, at, end = read.request, read.first, read.first + read.count
    if end <= len(request.prompt):
        return request.prompt[at:end]  # pyright: ignore[reportReturnType]
    beyond = max(0, at - len(request.prompt)), end - len(request.prompt)
    return [*request.prompt[at:], *request.said[slice(*beyond)]]


def _numbered(of_devices: Sequence[Sequence[Any]], rows: int) -> Iterator[tuple[int, Any]]:
    """Of each device the first few of `rows` places."""
    for device, of in enumerate(of_devices):
        for i, one in enumerate(of):
            yield device * rows + i, one


def _of_row(scores: list[Any], row: int) -> list[Any]:
    return [jax.tree.map(lambda x: x[row], of) for of in scores]
