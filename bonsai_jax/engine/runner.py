"""What an engine runs: the state of all rows on the device, and plans as dispatches that change it.

    plan --columns of numbers, one int32 array--> Call: prefill or decode of some rows --> Dispatch

On one GPU a dispatch returns at once: its loop of steps is inside a CUDA graph (rows.decode_rows). Over a
mesh it returns when its steps are nearly over, as the host is asked after each of them whether to go on. So
`Engine` has a thread that dispatches, one plan behind the other, and another that plans and reads meanwhile.
`generate` and `stream` dispatch in the thread of their caller.
"""

import concurrent.futures
import dataclasses
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from bonsai_jax.config import SamplingParams
from bonsai_jax.decoding import sampling, speculation
from bonsai_jax.decoding import steps as decoding
from bonsai_jax.decoding.state import State
from bonsai_jax.decoding.steps import LogitsProcessor
from bonsai_jax.engine import rows as on_device
from bonsai_jax.engine.plans import Limits, Read, Request
from bonsai_jax.model import Model, start_state
from bonsai_jax.network import parallel
from bonsai_jax.network.kinds.attention import PREFILL_BATCH, PREFILL_CHUNK
from bonsai_jax.network.taps import Taps
from bonsai_jax.weights import placement

PREFILL_COST = 100  # tokens, on a GPU: 8B Q4_K_M reads 512 in 15.4 ms and 2,048 in 53.8


@dataclasses.dataclass(frozen=True)
class Call:
    """A program of rows.py, which returns a rows.Result, and its arguments after the model's parameters and
    the pool."""

    function: Any
    arrays: Sequence[np.ndarray | None]
    static: Sequence[Any]
    options: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """A call on its way to the device.

    drawn    Result.drawn and Result.logprobs, on the device
    begun    set when the thread that dispatches begins it
    """

    drawn: concurrent.futures.Future[list[Any]]
    begun: threading.Event


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
    checkpoints: int = 0


class Caller:
    """An executor in the thread of its caller: it works when a result is needed, or on `catch_up`. So a first
    token can be read before the steps behind it are compiled."""

    class Result(concurrent.futures.Future):
        def __init__(self, caller: "Caller"):
            super().__init__()
            self.caller = caller

        def result(self, timeout: float | None = None) -> Any:
            self.caller.catch_up(until=self)
            return super().result(timeout)

    def __init__(self):
        self._work: deque[tuple[Caller.Result, Callable]] = deque()

    def submit(self, run: Callable) -> "Caller.Result":
        result = self.Result(self)
        self._work.append((result, run))
        return result

    def catch_up(self, until: "Caller.Result | None" = None) -> None:
        while self._work and not (until is not None and until.done()):
            result, run = self._work.popleft()
            try:
                result.set_result(run())
            except Exception as error:
                result.set_exception(error)

    def shutdown(self) -> None:
        self._work.clear()


class Runner:
    """Dispatches for one engine, and the pool that they work on.

    threaded   dispatch in a thread of its own; else contexts of the caller (jax.default_device) hold
    """

    def __init__(self, model: Model, options: Options, *, threaded: bool):
        self.model, self.options = model, options
        self.data = placement.size(model.mesh, placement.DATA)
        self.limits = limits(model, options)
        threaded = threaded and jax.process_count() == 1  # several processes must dispatch in the same order
        self._thread = (
            concurrent.futures.ThreadPoolExecutor(1, "bonsai-jax dispatch") if threaded else Caller()
        )
        self._nowhere = options.max_rows + options.checkpoints  # a row that there is not
        self._pool = self._empty_pool()
        pages = self._pool.cache.block_table.shape[1]
        self._tables = np.zeros((self.data, options.max_rows, pages), np.int32)
        self._noted: dict[tuple[int, int | None], tuple[list[int], int]] = {}  # the list, and how much of it
        self._layout = functools.cache(functools.partial(on_device.layout, self._pool))
        self._nobody = self.rules(SamplingParams(0.0, seed=0), [])

    def rules(self, params: SamplingParams, stop_ids: Sequence[int]) -> np.ndarray:
        """How a request draws, as the rows of its chunks have it (rows.rules_layout)."""
        made = np.zeros((), self._layout(0)["rules"])
        columns = sampling.columns([params], self.model.config.vocab_size, self.options.biases)
        for name, column in columns.items():
            made[name] = column[0]
        made["stop_ids"] = decoding.NO_TOKEN
        made["stop_ids"][: len(stop_ids)] = stop_ids
        return made

    @property
    def shares(self) -> bool:
        """Whether requests can share what they have read: pages, and checkpoints of what is not in them."""
        return not self.options.reproducible and (self._pool.cache.rewinds or self.options.checkpoints > 0)

    def note(self, reads: Sequence[Sequence[Read]], rules: Callable[[Request], np.ndarray]) -> Call:
        """Have the rows of these know the tokens that they will not read. One of each device."""
        rows = self._columns(reads, 1, self._layout(self._pool.cache.capacity), rules)
        for i, read in numbered(reads, 1):
            request = read.request
            known = [*request.prompt, *request.said][: read.first]
            rows[i]["first"], rows[i]["count"], rows[i]["starts"] = 0, len(known), 1
            rows[i]["tokens"][: len(known)] = known
        return Call(on_device.note_rows, [on_device.packed(rows)], (), {})

    def prefill(
        self,
        reads: Sequence[Sequence[Read]],
        shape: tuple[int, int],
        rules: Callable[[Request], np.ndarray],
        logprobs: int | None,
    ) -> Call:
        """rows.prefill, with as many rows a device as shape has, of so many tokens."""
        rows, width = shape
        of_vectors = any(_of_vectors(read) for of in reads for read in of)
        columns = self._columns(reads, rows, self._layout(0 if of_vectors else width), rules)
        vectors = np.zeros((len(columns), width, self.model.config.hidden), "f4") if of_vectors else None
        for i, read in numbered(reads, rows):
            (columns["tokens"] if vectors is None else vectors)[i, : read.count] = _slice(read)
        arrays = [on_device.packed(columns), vectors]
        return Call(on_device.prefill_rows, arrays, (self.model.config,), self._options(logprobs))

    def decode(
        self, writes: Sequence[Sequence[Request]], rows: int, steps: int, logprobs: int | None
    ) -> Call:
        """rows.decode of these and as many more as make `rows` of each device."""
        columns = np.zeros((rows * self.data, 2 + self._tables.shape[2]), np.int32)
        columns[:, :2] = self._nowhere, steps
        for device, of in enumerate(writes):
            there = columns[device * rows : device * rows + len(of)]
            at: list[Any] = [request.row for request in of]
            self._note_tables(device, of)
            there[:, 0], there[:, 2:] = at, self._tables[device, at]
        options = self._options(logprobs) | {"size": on_device.DECODE_SIZE}
        alone = self.model.mesh is None
        function = on_device.decode_rows if alone else on_device.decode_rows_over_mesh
        return Call(function, [columns], (self.model.config,), options)

    def nobodys(self, size: int | tuple[int, int] | None, logprobs: int | None) -> Call:
        """A program's, without a row: decode of so many, a shape of prefill, or None: `note`."""
        nobody: list[list[Any]] = [[] for _ in range(self.data)]
        no_rules = lambda request: self._nobody  # noqa: E731
        if size is None:
            return self.note(nobody, no_rules)
        if isinstance(size, int):
            return self.decode(nobody, size, 0, logprobs)
        return self.prefill(nobody, size, no_rules, logprobs)

    def compile(self, calls: Sequence[Call], progress: Callable[[int, int], None]) -> None:
        """Compile the programs of these, side by side: XLA works outside of Python's lock. Each runs once."""

        def compiled(call: Call) -> None:  # jit finds it when it is called like this
            arguments = self.model.params, self._pool, *self._placed(call), *call.static
            call.function.lower(*arguments, **call.options).compile()

        threads = os.cpu_count() if jax.process_count() == 1 else 1  # several processes: in the same order
        progress(0, len(calls))
        with concurrent.futures.ThreadPoolExecutor(threads, "bonsai-jax compile") as pool:
            each = [pool.submit(compiled, call) for call in calls]
            for done, one in enumerate(concurrent.futures.as_completed(each), 1):
                one.result()
                progress(done, len(calls))
        for call in calls:
            self.dispatch(call).drawn.result()
        jax.block_until_ready(self._pool)

    def dispatch(self, call: Call) -> Dispatch:
        """Call it, behind all others."""
        begun = threading.Event()

        def run():
            begun.set()
            arguments = self.model.params, self._pool, *self._placed(call), *call.static
            self._pool, *drawn = call.function(*arguments, **call.options)
            if jax.process_count() == 1:
                for array in jax.tree.leaves(drawn):
                    array.copy_to_host_async()
            return drawn

        return Dispatch(self._thread.submit(run), begun)

    def catch_up(self) -> None:
        """Dispatch all that was asked for. A thread of its own does so by itself."""
        if isinstance(self._thread, Caller):
            self._thread.catch_up()

    def make_way(self, dispatch: Dispatch) -> None:
        """Let the thread that dispatches go first, where there is one: it shares Python's lock with this one,
        and the device waits for it."""
        if not isinstance(self._thread, Caller):
            dispatch.begun.wait()

    def reset(self) -> None:
        """An empty pool, behind all that was asked for. Raises what making one raises."""
        self._thread.submit(lambda: None).result()
        self._free()
        self._pool = self._empty_pool()

    def close(self) -> None:
        """Free the pool's memory, and end the thread."""
        self._thread.shutdown()
        self._free()

    def _columns(self, reads, rows: int, layout: np.dtype, rules) -> np.ndarray:
        """Rows of layout without their tokens, so many of each device."""
        columns = np.zeros(rows * self.data, layout)
        columns["row"] = columns["begins"] = columns["saves"] = self._nowhere
        columns["copy_to"] = self.options.pages
        columns["rules"] = self._nobody
        for i, read in numbered(reads, rows):
            row, request = columns[i], read.request
            row["row"], row["first"], row["count"] = read.row, read.first, read.count
            row["starts"], row["draws"] = read.starts, read.draws
            row["remaining"] = request.max_new_tokens - len(request.said)
            row["answer"] = len(request.prompt)
            row["begins"] = read.row if read.begins is None else self.options.max_rows + read.begins
            if read.saves is not None:
                row["saves"] = self.options.max_rows + read.saves
            if read.copy:
                row["copy_from"], row["copy_to"] = read.copy
            row["rules"] = rules(request)
            row["table"][: len(read.table)] = read.table
        return columns

    def _options(self, logprobs: int | None) -> dict[str, Any]:
        o = self.options
        return {"taps": o.taps, "logits_processor": o.logits_processor, "logprobs": logprobs}

    def _placed(self, call: Call) -> Sequence[Any]:
        mesh = self.model.mesh
        if mesh is None:
            return call.arrays
        return [a if a is None else parallel.place_rows(a, mesh) for a in call.arrays]

    def _note_tables(self, device: int, of: Sequence[Request]) -> None:
        """Tables of these rows as numpy has them: of most, nothing is new."""
        for request in of:
            place = device, request.row
            table, known = self._noted.get(place, (None, 0))
            if table is not request.table:  # the row is another's; the rest of it is of nobody
                self._tables[place], known = 0, 0
            if known < len(request.table):
                self._tables[device, request.row, known : len(request.table)] = request.table[known:]
                self._noted[place] = request.table, len(request.table)

    def _empty_pool(self) -> State:
        model, o = self.model, self.options
        rows, pages = o.max_rows * self.data, o.pages * self.data
        cache = parallel.empty_cache(model.config, model.run, rows, o.context, model.mesh, pages)
        if o.checkpoints:
            rows, pages = (
                self._nowhere * self.data,
                self.data,
            )  # of each device its rows, then its checkpoints
            more = parallel.empty_cache(model.config, model.run, rows, o.context, model.mesh, pages)
            rings = (
                own if own.ring is None else larger
                for own, larger in zip(cache.attention, more.attention, strict=True)
            )
            cache = cache.replace(delta_net=more.delta_net, attention=tuple(rings))
        room = SamplingParams(0.0, seed=0, logit_bias=dict.fromkeys(range(o.biases), 0.0))
        return start_state(model, cache, room, 0, speculate=o.speculate)

    def _free(self) -> None:
        for array in jax.tree.leaves(self._pool):
            if not array.is_deleted():  # what failed may have taken it already
                array.delete()


def limits(model: Model, o: Options) -> Limits:
    """What is compiled, or may be."""
    on_cpu = jax.default_backend() == "cpu"
    return Limits.of_engine(
        o.max_rows,
        o.pages,
        page_size=model.run.page_size,
        prefill_tokens=o.prefill_tokens or (PREFILL_CHUNK if on_cpu else PREFILL_BATCH),
        prefill_cost=1 if on_cpu else PREFILL_COST,
        steps=on_device.DECODE_SIZE,
        width=1 if o.speculate is None else speculation.width(1),
        checkpoints=o.checkpoints or None,
        reproducible=o.reproducible,
    )


def numbered[T](of_devices: Sequence[Sequence[T]], rows: int) -> Iterator[tuple[int, T]]:
    """Of each device the first few of `rows` places."""
    for device, of in enumerate(of_devices):
        for i, one in enumerate(of):
            yield device * rows + i, one


def _of_vectors(read: Read) -> bool:
    return read.request.vectors and read.first < len(read.request.prompt)


def _slice(read: Read) -> Any:
    """What it reads."""
    request, at, end = read.request, read.first, read.first + read.count
    if end <= len(request.prompt):
        return request.prompt[at:end]
    beyond = max(0, at - len(request.prompt)), end - len(request.prompt)
    return [*request.prompt[at:], *request.said[slice(*beyond)]]
