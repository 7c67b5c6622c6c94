"""What an engine dispatches, made of plans: calls of the programs of rows.py and split_rows.py.

    plan --columns of numbers, one int32 array--> Call

Arrays have as many rows as their program, with padding. Over a mesh the rows of one device come after those
of the device before.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt32

from bonsai_jax.decoding import chain, sampling
from bonsai_jax.decoding import steps as decoding
from bonsai_jax.decoding.state import State
from bonsai_jax.engine import prefix_rows, split_guesses, split_rows
from bonsai_jax.engine import rows as on_device
from bonsai_jax.engine.options import Options
from bonsai_jax.engine.plans import Limits, Read, Request, Save
from bonsai_jax.engine.programs import Call, shapes_of
from bonsai_jax.model import Model
from bonsai_jax.sampling_params import SamplingParams
from bonsai_jax.weights import placement

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


class Allowed(NamedTuple):
    """What a request may draw. drafts: tokens that were read after its newest; masks: of the next token, and
    of that after each of them."""

    drafts: list[int]
    masks: UInt32[np.ndarray, "drafts+1 words"]


class Calls:
    """Makes the calls of one engine.

    pool   of which they take shapes alone
    mailbox  its address, where draws wait for their masks
    """

    def __init__(self, model: Model, options: Options, limits: Limits, pool: State):
        self._model, self._options, self._limits = model, options, limits
        self._data = placement.size(model.mesh, placement.DATA)
        self._no_row = options.max_batch_size + options.checkpoints  # the row number of padding
        pages = pool.cache.block_table.shape[1]
        self._tables = np.zeros((self._data, options.max_batch_size, pages), np.int32)
        # By device and row: the table that self._tables has a copy of, and how many of its pages.
        self._copied: dict[tuple[int, int | None], tuple[list[int], int]] = {}
        self._pool = shapes_of(pool)
        self._layout = functools.cache(functools.partial(on_device.layout, self._pool))
        self.mailbox = 0, 0
        self._padding = self.rules(SamplingParams(0.0, seed=0), [])  # the rules of rows without a request

    def rules(self, params: SamplingParams, stop_ids: Sequence[int], adapter: int = 0) -> np.ndarray:
        """How a request draws, in the layout of its chunks (rows.rules_layout). adapter: its number."""
        rules = np.zeros((), self._layout(0, False)["rules"])
        columns = sampling.columns([params], self._model.config.vocab_size, self._options.biases)
        for name, column in columns.items():
            rules[name] = column[0]
        rules["stop_ids"] = decoding.NO_TOKEN
        rules["stop_ids"][: len(stop_ids)] = stop_ids
        if self._options.adapters:
            rules["adapter"] = adapter
        return rules

    def chain(self, params: SamplingParams, mu: float | None = None) -> np.ndarray:
        """The samplers of a request, in the layout of its chunks (chain.layout). mu: Mirostat's limit; None:
        before the first token. Raises ValueError for too many sequence breakers."""
        row = chain.columns(params, self._model.tokenizer, self._model.config.vocab_size)
        if mu is not None:
            row["mu"] = mu
        return row

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
        columns = np.full((self._data, 2), self._no_row, np.int32)
        if one is not None:
            columns[one.device] = one.row, self._options.max_batch_size + one.checkpoint
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
        row = np.array([self._options.max_batch_size + checkpoint], np.int32)
        return Call("a copy of a state", prefix_rows.read_state_rows, [row], (), {})

    def write_state(self, checkpoint: int, words: np.ndarray) -> Call:
        """prefix_rows.write_state of a checkpoint."""
        row = np.array([self._options.max_batch_size + checkpoint], np.int32)
        return Call("a restored state", prefix_rows.write_state_rows, [row, words[None]], (), {})

    def _few(self, pages: Sequence[int]) -> np.ndarray:
        """Pages with padding beyond all."""
        few = np.full(prefix_rows.PAGES_AT_ONCE, self._options.pages, np.int32)
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
        vectors = np.zeros((len(columns), width, self._model.config.hidden), "f4") if has_vectors else None
        for i, read in numbered(reads, rows):
            (columns["tokens"] if vectors is None else vectors)[i, : read.count] = _chunk(read)
        arrays = [on_device.packed(columns), vectors]
        name = f"the prefill of {rows} x {width} tokens"
        if split:
            options = self._static(None)
            del options["logprobs"]
            static, parts = (self._model.config,), _parts(chains is not None, True)
            return Call(name, split_rows.read_chunk_rows, arrays, static, options, parts=parts)
        static, parts = (self._model.config,), _parts(chains is not None)
        return Call(name, on_device.prefill_rows, arrays, static, self._static(logprobs), parts=parts)

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
        options = self._static(logprobs) | {"size": on_device.DECODE_SIZE}
        name, flags = f"decode steps of batch size {rows}", LOOP_IN_GRAPH if self._model.mesh is None else {}
        static, parts = (self._model.config,), _parts(chained)
        return Call(name, on_device.decode_rows, [columns], static, options, flags, parts)

    def read_newest(
        self, writes: Sequence[Sequence[Request]], rows: int, drawn: Collection[Request] = ()
    ) -> Call:
        """split_rows.read_newest of these requests, padded to `rows` rows on each device. drawn: those of a
        draw before it."""
        columns = self._with_tables(writes, rows, 2)
        for i, request in numbered(writes, rows):
            columns[i, 1] = request in drawn
        name, options = f"the reading of {rows} new tokens", {"taps": self._options.taps}
        static, guesses = (self._model.config,), self._limits.guess_width > 1
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
        allowed: None: a request may draw any token. With a mailbox masks are not asked for."""
        if self._limits.mailbox:
            return self._waiting_draw(draws, rows, logprobs, chained)
        width, words = self._limits.guess_width, split_rows.mask_words(self._model.config.vocab_size)
        first = width + chained  # engines that guess have no chain
        columns = np.full((rows * self._data, first + width * words), -1, "i4")
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
        options = self._static(logprobs)
        del options["taps"]
        name, static = f"the draw of {rows} tokens", (self._model.config,)
        function = split_guesses.draw_rows if width > 1 else split_rows.draw_rows
        return Call(name, function, [columns], static, options, parts=_parts(chained, True))

    def _waiting_draw(
        self,
        draws: Sequence[Sequence[tuple[Request, int]]],
        rows: int,
        logprobs: int | None,
        chained: bool,
    ) -> Call:
        """`draw` of an engine with a mailbox."""
        first = 1 + chained
        columns = np.zeros((rows, first + 3), np.int32)
        columns[:, 0], columns[:, first + 1 :] = self._no_row, self.mailbox
        for i, (request, row) in numbered(draws, rows):
            columns[i, 0], columns[i, first] = row, request.constrained
            if chained:
                columns[i, 1] = request.chained
        options = self._static(logprobs)
        del options["taps"]
        name, static = f"the draw of {rows} tokens", (self._model.config,)
        parts = _parts(chained, True)
        function = split_rows.draw_from_mailbox_rows
        return Call(name, function, [columns], static, options, parts=parts, stays=True)

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
        return [[] for _ in range(self._data)], lambda request: self._padding, chains

    def _columns(self, reads, rows: int, layout: np.dtype, rules: Rules, chains: Chains | None) -> np.ndarray:
        """Rows of this layout without their tokens, `rows` on each device."""
        columns = np.zeros(rows * self._data, layout)
        columns["row"] = columns["begins"] = columns["saves"] = self._no_row
        columns["copy_to"] = self._options.pages
        columns["rules"] = self._padding
        for i, read in numbered(reads, rows):
            row, request = columns[i], read.request
            row["row"], row["first"], row["count"] = read.row, read.first, read.count
            row["starts"], row["draws"] = read.starts, read.draws
            row["remaining"] = request.max_new_tokens - len(request.said)
            row["answer"] = len(request.prompt)
            row["begins"] = read.row if read.begins is None else self._options.max_batch_size + read.begins
            if read.saves is not None:
                row["saves"] = self._options.max_batch_size + read.saves
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
        columns = np.zeros((rows * self._data, first + self._tables.shape[2]), np.int32)
        columns[:, 0] = self._no_row
        for device, requests in enumerate(writes):
            part = columns[device * rows : device * rows + len(requests)]
            at: list[Any] = [request.row for request in requests]
            self._copy_tables(device, requests)
            part[:, 0], part[:, first:] = at, self._tables[device, at]
        return columns

    def _static(self, logprobs: int | None) -> dict[str, Any]:
        o = self._options
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


def _parts(chained: bool, split: bool = False) -> tuple[str, ...]:
    """Call.parts."""
    return tuple(part for part, has in zip(PARTS, (split, chained), strict=True) if has)


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
