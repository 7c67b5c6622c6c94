"""The state of all rows on the device (the pool), and the dispatches that change it.

    plan --columns of numbers, one int32 array--> Call: prefill or decode of some rows --> Dispatch

On one GPU a dispatch returns at once: its loop of steps is inside a CUDA graph (LOOP_IN_GRAPH). Over a
mesh it returns when its steps are nearly over, because the host decides after each step whether to go on. So
`Engine` has one thread that dispatches plan after plan, while another plans and reads results. `generate` and
`stream` dispatch in the thread of their caller.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import UInt32

from bonsai_jax import machine
from bonsai_jax.decoding import chain, sampling, speculation
from bonsai_jax.decoding import steps as decoding
from bonsai_jax.decoding.state import State
from bonsai_jax.decoding.steps import LogitsProcessor
from bonsai_jax.engine import prefix_rows, split_guesses, split_rows
from bonsai_jax.engine import rows as on_device
from bonsai_jax.engine.caller import Caller
from bonsai_jax.engine.plans import Limits, Read, Request, Save
from bonsai_jax.engine.programs import Call, Programs
from bonsai_jax.model import Model, start_state
from bonsai_jax.network import cache as kv
from bonsai_jax.network import parallel
from bonsai_jax.network.kinds.attention import PREFILL_BATCH, PREFILL_CHUNK
from bonsai_jax.network.taps import Taps
from bonsai_jax.sampling_params import SamplingParams
from bonsai_jax.weights import memory, placement
from pallas_kernels.device import for_threads, in_use, platform

# XLA's default and WHILE: the loop of steps is inside the CUDA graph, and a dispatch returns at once. Without
# WHILE the host fetches from the device before each step whether to go on, and the device waits for the host
# in each dispatch: 2 to 5 ms where a step is hundreds of launches. Over a mesh: not measured.
LOOP_IN_GRAPH = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,"
    "DYNAMIC_SLICE_FUSION,WHILE"
}
# Of a request: how it draws, as in its chunks, and the samplers that it uses beside that (None: none).
Rules = Callable[[Request], np.ndarray]
Chains = Callable[[Request], np.ndarray | None]
PARTS = ("hidden", "chain")  # of a pool, each for programs of its own
# For Limits.for_engine on a CPU, where prefill is about as fast with few tokens as with many. SmolLM2 reads
# 32 tokens in 12 ms and 512 in 155, and of the decode step after each prefill 2 ms are the same for every
# number of rows: the cost of about 16 tokens.
ON_CPU: dict[str, Any] = {"prefill_rows": 8, "prefill_cost": 16, "between": (12, 24)}


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """A call on its way to the device.

    drawn    Result.drawn, Result.logprobs and Result.mu, on the device
    started  set when the thread that dispatches begins it
    """

    drawn: concurrent.futures.Future[list[Any]]
    started: threading.Event


class Allowed(NamedTuple):
    """What a request may draw. drafts: tokens that were read after its newest; masks: of the next token, and
    of that after each of them."""

    drafts: list[int]
    masks: UInt32[np.ndarray, "drafts+1 words"]


@dataclasses.dataclass(frozen=True)
class Options:
    """Fixed when an engine is made: see Engine. biases: room for a request's logit biases; adapters: their
    names (adapters.py)."""

    max_batch_size: int
    pages: int
    context: int
    logprobs: int | None = None
    sampled_logprobs: bool = False
    speculate: str | None = None
    taps: Taps | None = None
    logits_processor: LogitsProcessor | None = None
    biases: int = 1
    max_wait_s: float | None = None
    prefill_tokens: int = 0
    reproducible: bool = False
    checkpoints: int = 0
    adapters: tuple[str, ...] = ()


class Runner:
    """Dispatches for one engine, and the pool that they change.

    threaded   dispatch in another thread; else in the caller's, where its contexts (jax.default_device) hold
    """

    def __init__(self, model: Model, options: Options, *, threaded: bool):
        self.model, self.options = model, options
        self.data = placement.size(model.mesh, placement.DATA)
        threaded = threaded and jax.process_count() == 1  # all processes must dispatch in the same order
        self._thread = (
            concurrent.futures.ThreadPoolExecutor(1, "bonsai-jax dispatch") if threaded else Caller()
        )
        self._last: concurrent.futures.Future[list[Any]] | None = None  # dispatch in that thread
        # A CPU's results are in the host's memory. If Python ends while steps run, their copy would end the
        # process by SIGABRT, as jaxlib's callback wants the GIL.
        self._copies = jax.process_count() == 1 and platform() != "cpu"
        self._has_graphs = model.mesh is None and platform() != "cpu"
        self._places: dict[Hashable, list[jax.Array]] = {}  # by program: where its arrays are (_given)
        self._returns_at_once = threaded and model.mesh is None and platform() != "cpu"
        self._no_row = options.max_batch_size + options.checkpoints  # the row number of padding
        if model.loaded and model.mesh is None:  # pages may be more than `load` has planned for
            machine.reserve(pool_bytes(model, options), [in_use()])
        self._pool = self._empty_pool() if model.loaded else jax.eval_shape(self._empty_pool)
        self.limits = limits(model, options, self._pool.cache.recurrent)
        self.programs = Programs(model, self._pool)
        self._others: dict[tuple[str, ...], Programs] = {}  # by Call.parts
        self._parts: dict[str, Any] = {}  # fields of the pool, once a request needs them
        pages = self._pool.cache.block_table.shape[1]
        self._tables = np.zeros((self.data, options.max_batch_size, pages), np.int32)
        # By device and row: the table that self._tables has a copy of, and how many of its pages.
        self._copied: dict[tuple[int, int | None], tuple[list[int], int]] = {}
        self._layout = functools.cache(functools.partial(on_device.layout, self._pool))
        self._padding = self.rules(SamplingParams(0.0, seed=0), [])  # the rules of rows without a request

    def rules(self, params: SamplingParams, stop_ids: Sequence[int], adapter: int = 0) -> np.ndarray:
        """How a request draws, in the layout of its chunks (rows.rules_layout). adapter: its number."""
        rules = np.zeros((), self._layout(0, False)["rules"])
        columns = sampling.columns([params], self.model.config.vocab_size, self.options.biases)
        for name, column in columns.items():
            rules[name] = column[0]
        rules["stop_ids"] = decoding.NO_TOKEN
        rules["stop_ids"][: len(stop_ids)] = stop_ids
        if self.options.adapters:
            rules["adapter"] = adapter
        return rules

    def chain(self, params: SamplingParams, mu: float | None = None) -> np.ndarray:
        """The samplers of a request, in the layout of its chunks (chain.layout). mu: Mirostat's limit; None:
        before the first token. Raises ValueError for too many sequence breakers."""
        row = chain.columns(params, self.model.tokenizer, self.model.config.vocab_size)
        if mu is not None:
            row["mu"] = mu
        return row

    @property
    def shares(self) -> bool:
        """Whether requests can share the beginnings of their prompts."""
        return not self.options.reproducible and (self._pool.cache.rewinds or self.options.checkpoints > 0)

    @property
    def saves(self) -> bool:
        """Whether states are saved, also at the ends of answers."""
        return self.shares and self.options.checkpoints > 0

    def need(self, part: str) -> None:
        """Make ready for programs whose pool has "hidden", those of split steps, or "chain". Call it before
        the first of them."""
        if part in self._parts:
            return
        empty = lambda: self._empty_part(part)  # noqa: E731
        self._parts[part] = empty() if self.model.loaded else jax.eval_shape(empty)
        for parts in [(part,), *([PARTS] if len(self._parts) == len(PARTS) else [])]:
            own = {name: self._parts[name] for name in parts}
            self._others[parts] = Programs(self.model, self._pool.replace(**own))

    def note(self, reads: Sequence[Sequence[Read]], rules: Rules, chains: Chains | None = None) -> Call:
        """rows.note: give rows the tokens that they will not read. At most one read on each device."""
        layout = self._layout(self._pool.cache.capacity, chains is not None)
        rows = self._columns(reads, 1, layout, rules, chains)
        for i, read in numbered(reads, 1):
            request = read.request
            known = [*request.prompt, *request.said][: read.first]
            rows[i]["first"], rows[i]["count"], rows[i]["starts"] = 0, len(known), 1
            rows[i]["tokens"][: len(known)] = known
        arrays, parts = [on_device.packed(rows)], _parts(chains is not None)
        return Call("notes of prompts", on_device.note_rows, arrays, (), {}, parts=parts)

    def save(self, one: Save | None) -> Call:
        """rows.save of one state; None: of none. One at a time, so that it takes the memory of one."""
        columns = np.full((self.data, 2), self._no_row, np.int32)
        if one is not None:
            columns[one.device] = one.row, self.options.max_batch_size + one.checkpoint
        return Call("copies of states", on_device.save_rows, [columns], (), {})

    @functools.cached_property
    def stored_layout(self) -> tuple[str, int, int]:
        """prefix_rows.layout of the pool: what is stored in files."""
        return prefix_rows.layout(self._pool)

    def read_pages(self, pages: Sequence[int]) -> Call:
        """prefix_rows.read_pages of PAGES_AT_ONCE pages at most."""
        return Call("copies of pages", prefix_rows.read_pages_rows, [self._few(pages)], (), {})

    def write_pages(self, pages: Sequence[int], words: Sequence[np.ndarray]) -> Call:
        """prefix_rows.write_pages of as many, with the words of each."""
        all_words = np.zeros((prefix_rows.PAGES_AT_ONCE, self.stored_layout[1]), np.int32)
        for row, one in zip(all_words, words, strict=False):
            row[:] = one
        return Call("restored pages", prefix_rows.write_pages_rows, [self._few(pages), all_words], (), {})

    def read_state(self, checkpoint: int) -> Call:
        """prefix_rows.read_state of a checkpoint."""
        row = np.array([self.options.max_batch_size + checkpoint], np.int32)
        return Call("a copy of a state", prefix_rows.read_state_rows, [row], (), {})

    def write_state(self, checkpoint: int, words: np.ndarray) -> Call:
        """prefix_rows.write_state of a checkpoint."""
        row = np.array([self.options.max_batch_size + checkpoint], np.int32)
        return Call("a restored state", prefix_rows.write_state_rows, [row, words[None]], (), {})

    def _few(self, pages: Sequence[int]) -> np.ndarray:
        """Pages with padding beyond all."""
        few = np.full(prefix_rows.PAGES_AT_ONCE, self.options.pages, np.int32)
        few[: len(pages)] = pages
        return few

    def prefill(
        self,
        reads: Sequence[Sequence[Read]],
        shape: tuple[int, int],
        rules: Rules,
        logprobs: int | None,
        split: bool = False,
        chains: Chains | None = None,
    ) -> Call:
        """rows.prefill of these reads, or split_rows.read_chunk. shape: rows on each device, tokens a row."""
        rows, width = shape
        has_vectors = any(_reads_vectors(read) for read in itertools.chain(*reads))
        layout = self._layout(0 if has_vectors else width, chains is not None)
        columns = self._columns(reads, rows, layout, rules, chains)
        vectors = np.zeros((len(columns), width, self.model.config.hidden), "f4") if has_vectors else None
        for i, read in numbered(reads, rows):
            (columns["tokens"] if vectors is None else vectors)[i, : read.count] = _chunk(read)
        arrays = [on_device.packed(columns), vectors]
        name = f"the prefill of {rows} x {width} tokens"
        if split:
            options = self._options(None)
            del options["logprobs"]
            static, parts = (self.model.config,), _parts(chains is not None, True)
            return Call(name, split_rows.read_chunk_rows, arrays, static, options, parts=parts)
        static, parts = (self.model.config,), _parts(chains is not None)
        return Call(name, on_device.prefill_rows, arrays, static, self._options(logprobs), parts=parts)

    def decode(
        self,
        writes: Sequence[Sequence[Request]],
        rows: int,
        steps: int,
        logprobs: int | None,
        chained: bool = False,
    ) -> Call:
        """rows.decode of these requests, padded to `rows` rows on each device."""
        columns = self._with_tables(writes, rows, 2 + chained)
        columns[:, 1] = steps
        if chained:
            for i, request in numbered(writes, rows):
                columns[i, 2] = request.chained
        options = self._options(logprobs) | {"size": on_device.DECODE_SIZE}
        name, flags = f"decode steps of batch size {rows}", LOOP_IN_GRAPH if self.model.mesh is None else {}
        static, parts = (self.model.config,), _parts(chained)
        return Call(name, on_device.decode_rows, [columns], static, options, flags, parts)

    def read_newest(self, writes: Sequence[Sequence[Request]], rows: int) -> Call:
        """split_rows.read_newest of these requests, padded to `rows` rows on each device."""
        columns = self._with_tables(writes, rows, 1)
        name, options = f"the reading of {rows} new tokens", {"taps": self.options.taps}
        static, guesses = (self.model.config,), self.limits.guess_width > 1
        function = split_guesses.read_newest_rows if guesses else split_rows.read_newest_rows
        return Call(name, function, [columns], static, options, parts=_parts(False, True), stays=True)

    def draw(
        self,
        draws: Sequence[Sequence[tuple[Request, int]]],
        rows: int,
        allowed: Callable[[Request], Allowed | None],
        logprobs: int | None,
        chained: bool = False,
    ) -> Call:
        """split_rows.draw, or split_guesses.draw, for these requests and their rows, padded likewise.
        allowed: None: a request may draw any token."""
        width, words = self.limits.guess_width, split_rows.mask_words(self.model.config.vocab_size)
        first = width + chained  # engines that guess have no chain
        columns = np.full((rows * self.data, first + width * words), -1, "i4")
        columns[:, 0] = self._no_row
        for i, (request, row) in numbered(draws, rows):
            columns[i, 0] = row
            if chained:
                columns[i, 1] = request.chained
            if (own := allowed(request)) is not None:
                if own.drafts:
                    columns[i, 1 : 1 + len(own.drafts)] = own.drafts
                masks = own.masks.view(np.int32).ravel()
                columns[i, first : first + len(masks)] = masks
        options = self._options(logprobs)
        del options["taps"]
        name, static = f"the draw of {rows} tokens", (self.model.config,)
        function = split_guesses.draw_rows if width > 1 else split_rows.draw_rows
        return Call(name, function, [columns], static, options, parts=_parts(chained, True), stays=True)

    def padding(
        self, size: int | tuple[int, int] | None, logprobs: int | None, chained: bool = False
    ) -> Call:
        """A call of a program without any request: decode of a number of rows, prefill of a shape, or None:
        `note`."""
        none, rules, chains = self._nothing(chained)
        if size is None:
            return self.note(none, rules, chains)
        if isinstance(size, int):
            return self.decode(none, size, 0, logprobs, chained)
        return self.prefill(none, size, rules, logprobs, chains=chains)

    def split_padding(
        self, size: int | tuple[int, int], logprobs: int | None, chained: bool = False
    ) -> list[Call]:
        """`padding` for the programs of split steps."""
        none, rules, chains = self._nothing(chained)
        if isinstance(size, int):
            draw = self.draw(none, size, lambda request: None, logprobs, chained)
            return [draw, self.read_newest(none, size)]
        return [self.prefill(none, size, rules, logprobs, split=True, chains=chains)]

    def _nothing(self, chained: bool) -> tuple[list[list[Any]], Rules, Chains | None]:
        """No requests on each device, and the rules of none."""
        chains = (lambda request: None) if chained else None
        return [[] for _ in range(self.data)], lambda request: self._padding, chains

    def compile(self, call: Call) -> concurrent.futures.Future[None]:
        """Start to load or compile the program of a call in another thread."""
        return self._programs(call).compile(call)

    def compile_split(self, calls: Sequence[Call]) -> concurrent.futures.Future[None]:
        """Load or compile these programs of split steps in another thread, one after another."""
        self.need("hidden")
        return self._others[("hidden",)].compile_in_turn(calls)

    def finish_alone(self) -> None:
        """Take no more calls; threads finish the programs that they have begun."""
        for programs in (self.programs, *self._others.values()):
            programs.finish_alone()

    def _programs(self, call: Call) -> Programs:
        return self._others[call.parts] if call.parts else self.programs

    def warmup(self, calls: Sequence[Call], progress: Callable[[int, int], None]) -> None:
        """Compile the programs of these calls side by side, and run each once."""
        progress(0, len(calls))
        each = [self.compile(call) for call in calls]
        for done, one in enumerate(concurrent.futures.as_completed(each), 1):
            one.result()
            progress(done, len(calls))
        for call in calls:
            self.dispatch(call).drawn.result()
        jax.block_until_ready(self._pool)
        machine.release_memory()

    def dispatch(self, call: Call, *, at_once: bool = False) -> Dispatch:
        """Run the call, after all calls before.

        at_once   in this thread, which else does its own work first, as threads share the GIL; only where a
                  dispatch does not wait for the device, or for a program to be compiled
        """
        started, params = threading.Event(), self.model.params

        def run():
            started.set()
            program = self._programs(call).get(call)
            pool = self._pool.replace(**{part: self._parts[part] for part in call.parts})
            pool, *drawn = program(params, pool, *self._given(call))
            self._parts |= {part: getattr(pool, part) for part in call.parts}
            self._pool = pool.replace(**dict.fromkeys(call.parts))
            if self._copies:
                for array in jax.tree.leaves(drawn):
                    array.copy_to_host_async()
            return drawn

        if at_once and self._returns_at_once and self._programs(call).has(call):
            if self._last is not None:
                concurrent.futures.wait([self._last])
            thread = Caller()
            drawn = thread.submit(run)
            thread.catch_up()
            return Dispatch(drawn, started)
        self._last = self._thread.submit(for_threads(run))
        return Dispatch(self._last, started)

    def _given(self, call: Call) -> Sequence[Any]:
        """A call's arrays on their way to its program. Where one has moved since the program's last call, XLA
        writes all of the program's CUDA graph anew, 5 ms for a step of 36 layers. So in steps of one token
        they stay where they are."""
        arrays = call.placed(self.model.mesh)
        if not call.stays or not self._has_graphs:
            return arrays
        if call.program not in self._places:
            self._places[call.program] = [jax.device_put(array) for array in arrays]
        places = zip(self._places[call.program], arrays, strict=True)
        self._places[call.program] = [_written(place, array) for place, array in places]
        return self._places[call.program]

    def catch_up(self) -> None:
        """Finish all dispatches, where there is no thread that does."""
        if isinstance(self._thread, Caller):
            self._thread.catch_up()

    def wait_until_started(self, dispatch: Dispatch) -> None:
        """Let the thread that dispatches go first, where there is one: both threads compete for the GIL, and
        a late dispatch leaves the device idle."""
        if not isinstance(self._thread, Caller):
            dispatch.started.wait()

    def use(self, model: Model) -> None:
        """Run calls that are dispatched from now on with the weights of this model, whose structure is the
        same. Waits for the calls before, so that none needs the weights before."""
        self.model = model
        for programs in (self.programs, *self._others.values()):
            programs.model = model
        self._thread.submit(lambda: None).result()

    def reset(self) -> None:
        """Make an empty pool, after all dispatches. Raises what making one raises."""
        self._thread.submit(lambda: None).result()
        self._free()
        self._pool = self._empty_pool()
        self._parts = {part: self._empty_part(part) for part in self._parts}

    def close(self) -> None:
        """Free the pool's memory and end the thread."""
        self._thread.shutdown()
        self.programs.close()
        for programs in self._others.values():
            programs.close()
        self._free()

    def _columns(self, reads, rows: int, layout: np.dtype, rules: Rules, chains: Chains | None) -> np.ndarray:
        """Rows of this layout without their tokens, `rows` on each device."""
        columns = np.zeros(rows * self.data, layout)
        columns["row"] = columns["begins"] = columns["saves"] = self._no_row
        columns["copy_to"] = self.options.pages
        columns["rules"] = self._padding
        for i, read in numbered(reads, rows):
            row, request = columns[i], read.request
            row["row"], row["first"], row["count"] = read.row, read.first, read.count
            row["starts"], row["draws"] = read.starts, read.draws
            row["remaining"] = request.max_new_tokens - len(request.said)
            row["answer"] = len(request.prompt)
            row["begins"] = read.row if read.begins is None else self.options.max_batch_size + read.begins
            if read.saves is not None:
                row["saves"] = self.options.max_batch_size + read.saves
            if read.copy:
                row["copy_from"], row["copy_to"] = read.copy
            row["rules"] = rules(request)
            if chains is not None and (own := chains(request)) is not None:
                row["chain"] = own
            row["table"][: len(read.table)] = read.table
        return columns

    def _with_tables(self, writes: Sequence[Sequence[Request]], rows: int, first: int) -> np.ndarray:
        """For each request its row, in column 0, and its pages from column `first` on; `rows` on each device,
        with padding."""
        columns = np.zeros((rows * self.data, first + self._tables.shape[2]), np.int32)
        columns[:, 0] = self._no_row
        for device, requests in enumerate(writes):
            part = columns[device * rows : device * rows + len(requests)]
            at: list[Any] = [request.row for request in requests]
            self._copy_tables(device, requests)
            part[:, 0], part[:, first:] = at, self._tables[device, at]
        return columns

    def _options(self, logprobs: int | None) -> dict[str, Any]:
        o = self.options
        return {"taps": o.taps, "logits_processor": o.logits_processor, "logprobs": logprobs}

    def _copy_tables(self, device: int, requests: Sequence[Request]) -> None:
        """Bring self._tables up to date for these rows; most have no new page."""
        for request in requests:
            place = device, request.row
            table, known = self._copied.get(place, (None, 0))
            if table is not request.table:  # the row was another request's
                self._tables[place], known = 0, 0
            if known < len(request.table):
                self._tables[device, request.row, known : len(request.table)] = request.table[known:]
                self._copied[place] = request.table, len(request.table)

    def _empty_pool(self) -> State:
        model, o = self.model, self.options
        rows, pages = o.max_batch_size * self.data, o.pages * self.data
        cache = parallel.empty_cache(
            model.config, model.run, rows, o.context, model.mesh, pages,
            checkpoints=o.checkpoints * self.data,  # on each device its rows, then its checkpoints
        )  # fmt: skip
        biases = range(min(o.biases, model.config.vocab_size))  # o.biases is the next power of two
        room = SamplingParams(0.0, seed=0, logit_bias=dict.fromkeys(biases, 0.0))
        state = start_state(model, cache, room, 0, speculate=o.speculate)
        if o.adapters:
            state = state.replace(adapter=parallel.place_rows(np.zeros(rows, np.int32), model.mesh))
        return state.replace(sampler=state.sampler.replace(scored=o.sampled_logprobs))

    def _empty_part(self, part: str) -> Any:
        if part == "hidden":
            return split_rows.empty(self._pool, self.model, self.limits.guess_width)
        shape = len(self._pool.tokens), self.model.config.vocab_size, self._pool.cache.capacity
        return parallel.place_state(chain.empty(*shape), self.model.mesh)

    def _free(self) -> None:
        for array in jax.tree.leaves((self._pool, self._parts)):
            if not array.is_deleted():  # a call that failed may have been given it
                array.delete()


@functools.partial(jax.jit, donate_argnums=0)
def _written(place: jax.Array, array: jax.Array) -> jax.Array:
    """The array, in the memory of another."""
    return place.at[...].set(array)


def _parts(chained: bool, split: bool = False) -> tuple[str, ...]:
    """Call.parts."""
    return tuple(part for part, has in zip(PARTS, (split, chained), strict=True) if has)


def pool_bytes(model: Model, o: Options) -> int:
    """Bytes of the pool on each device, also of the samplers that it has once a request uses one."""
    page, chained = model.run.page_size, 0
    if o.speculate is None:
        chained = chain.row_bytes(model.config.vocab_size, kv.page_count(o.context, page) * page)
    how = {"checkpoints": o.checkpoints, "beside": chained}
    return memory.pool_bytes(model.config, model.run, o.max_batch_size, o.pages * page, **how)


def limits(model: Model, o: Options, recurrent: bool) -> Limits:
    """What the engine's programs can do. recurrent: its cache has recurrent states."""
    on_cpu = platform() == "cpu"
    return Limits.for_engine(
        o.max_batch_size,
        o.pages,
        page_size=model.run.page_size,
        prefill_tokens=o.prefill_tokens or (PREFILL_CHUNK if on_cpu else PREFILL_BATCH),
        steps=on_device.DECODE_SIZE,
        width=1 if o.speculate is None else speculation.width(1),
        guess_width=split_guesses.guess_width(o.speculate, recurrent, o.max_batch_size),
        checkpoints=o.checkpoints or None,
        reproducible=o.reproducible,
        **(ON_CPU if on_cpu else {}),
    )


def numbered[T](devices: Sequence[Sequence[T]], rows: int) -> Iterator[tuple[int, T]]:
    """Each device's items with their place in an array of `rows` rows a device."""
    for device, items in enumerate(devices):
        for i, item in enumerate(items):
            yield device * rows + i, item


def _reads_vectors(read: Read) -> bool:
    return read.request.vectors and read.first < len(read.request.prompt)


def _chunk(read: Read) -> Any:
    """The tokens or vectors that it reads."""
    request, at, end = read.request, read.first, read.first + read.count
    if end <= len(request.prompt):
        return request.prompt[at:end]
    beyond = max(0, at - len(request.prompt)), end - len(request.prompt)
    return [*request.prompt[at:], *request.said[slice(*beyond)]]
