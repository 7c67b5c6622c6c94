"""The layers alone, over a cache: what scores, activations and embeddings are made of."""

import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from bonsai_jax.config import ModelConfig
from bonsai_jax.decoding import jitted
from bonsai_jax.decoding.steps import hidden_states
from bonsai_jax.engine.programs import Call, Programs
from bonsai_jax.engine.prompts import check_room, encode, is_vectors
from bonsai_jax.model import Model
from bonsai_jax.network import kinds, parallel
from bonsai_jax.network.cache import KVCache, page_count
from bonsai_jax.network.kinds.state import map_states
from bonsai_jax.network.parallel import over_mesh
from bonsai_jax.network.params import Params
from bonsai_jax.network.taps import Taps
from bonsai_jax.research.batches import ROWS, Shapes, Sizes
from bonsai_jax.weights import placement
from pallas_kernels.device import platform


@over_mesh(("rows", "cache", "layers"))
def read_rows(
    params: Params,
    cache: KVCache,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    places: Int[Array, "B 5"],
    table: Int[Array, "B pages_per_row"],
    config: ModelConfig,
    *,
    taps: Taps | None = None,
    stop_at_layer: int | None = None,
) -> tuple[Float[Array, "B T H"], KVCache, dict[str, Float[Array, "L B ..."]]]:
    """hidden_states of a few sequences, whose pages of the cache are those of `table`. What the program is
    compiled for does not depend on where they are.

    places  of each: the cache's row that gets its recurrent state, and the row whose state it begins with
            (beyond the last: none); how many tokens its pages hold before; a page and the one that becomes
            a copy of it first (beyond the last: none)
    Returns the cache with its own block table and lengths, which mean nothing.
    """
    # With one row a column is a contiguous slice: see engine.rows.unpacked.
    row, begins, first, source, copy = jax.lax.optimization_barrier(tuple(places.T))
    states = map_states(lambda state: state.with_page_copies(source, copy), cache.states)
    taken = map_states(lambda state: state.taken(row, begins), states)
    own = cache.replace(block_table=table, lengths=first, states=taken)
    hidden, own, activations = hidden_states(
        params, own, tokens, lengths, config, taps=taps, stop_at_layer=stop_at_layer
    )
    states = map_states(lambda state, new: state.put(new, row), states, own.states)
    return hidden, cache.replace(states=states), activations


reading_program = jitted.donating(read_rows, "cache")


def batch_tokens() -> int:
    """Tokens of a batch on each device: enough to fill it. On a CPU they are few for each processor, whose
    caches hold their activations: on two of them 512 tokens take 12 % less time each than 2,048."""
    return min(2048, max(512, 256 * (os.cpu_count() or 1))) if platform() == "cpu" else 8192


def whole_ids(model: Model, texts: Iterable[Any], what: str) -> list[list[int]]:
    """Token ids of each text. Raises TypeError or ValueError for one that cannot be read as a whole."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise TypeError(f"{what} are a {type(texts).__name__}; give a list of texts")
    every = []
    for text in texts:
        if is_vectors(text):
            raise TypeError(f"{what}: one is an array of vectors; give texts or token ids")
        ids = cast(list[int], encode(model, text))
        check_room(model, len(ids), 0)
        every.append(ids)
    return every


def widths() -> Sizes:
    """The widths of batches: on a GPU a program takes seconds to compile, and a few tokens no time."""
    return Sizes(4, 4) if platform() == "cpu" else Sizes(8, 2)


def is_recurrent(config: ModelConfig) -> bool:
    """Whether layers keep a state that no token can be taken back from."""
    return any(kinds.get(mixer.kind).State.recurrent for layer in config.layers for mixer in layer.mixers)


class Reader:
    """Reads batches of sequences through the first layers of a model.

        reader.prepare([(8, 64), (16, 32)])               programs are compiled in other threads
        hidden, activations = reader.read(tokens, lengths)            sequences from their first token
        hidden = reader.read_behind(prompts, parents, tokens, lengths)    what continues some of them

    shapes  of the batches that its callers make

    All batches share one cache. A sequence that continues another reads that one's pages where they are; only
    the page in which it goes on is copied.
    """

    def __init__(
        self,
        model: Model,
        taps: Taps | None = None,
        stop_at_layer: int | None = None,
        *,
        shapes: Shapes | None = None,
    ):
        self.model, self.options = model, {"taps": taps, "stop_at_layer": stop_at_layer}
        self.shapes = Shapes(ROWS, widths()) if shapes is None else shapes
        config, stop = model.config, stop_at_layer or model.config.num_layers
        # A cache has the layers that run, and one with attention at least, whose pages give its size.
        stop = max(stop, min(group.layers[0] for group in config.attention_groups) + 1)
        self._config = dataclasses.replace(config, layers=config.layers[:stop], draft=None, draft_model=None)
        self._room = _Room(0, 0, 0)
        self._cache: KVCache | None = None
        self._programs: Programs | None = None
        self._width = 0  # of the batch that was read last

    def use(self, model: Model) -> None:
        """Read with the weights of this model from now on, whose structure is the same."""
        self.model = model
        if self._programs is not None:
            self._programs.model = model

    def prepare(self, shapes: Iterable[tuple[int, int]], branches: Iterable[tuple[int, int]] = ()) -> None:
        """Allocate a cache that holds batches of these shapes, (rows, width), followed by any of `branches`,
        the shapes given to `read_behind`, and start compiling the programs in background threads."""
        data = placement.size(self.model.mesh, placement.DATA)
        shapes, branches = (
            [(self._rows(rows), width) for rows, width in some] for some in (shapes, branches)
        )
        each, last = ([(rows // data, width) for rows, width in some] for some in (shapes, branches))
        size = self.model.run.page_size
        pages = max((rows * page_count(width, size) for rows, width in each), default=0)
        pages += max((rows * self._behind_pages(width) for rows, width in last), default=0)
        longest = max((w for _, w in each), default=0) + max((w for _, w in last), default=0)
        room = _Room(max((rows for rows, _ in each), default=0), pages, page_count(longest, size))
        programs = self._make(room)
        for rows, width in dict.fromkeys([*each, *last]):
            tokens, lengths = self.padded([], rows * data, width)
            programs.compile(self._call(tokens, lengths, *self._whole(*tokens.shape)))

    def close(self) -> None:
        """Free the cache, and compile no more."""
        if self._programs is not None:
            self._programs.close()
        self._cache, self._programs, self._room = None, None, _Room(0, 0, 0)

    def padded(
        self, ids: Sequence[Sequence[int]], rows: int, width: int
    ) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B"]]:
        """Token ids as int32 [rows, width], padded at the end, and their lengths; rows without a sequence
        have length 0. Over a mesh there are rows for every device."""
        rows = self._rows(rows)
        tokens, lengths = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
        for row, own in enumerate(ids):
            tokens[row, : len(own)], lengths[row] = own, len(own)
        return tokens, lengths

    def read(
        self, tokens: Int[np.ndarray, "B T"], lengths: Int[np.ndarray, "B"]
    ) -> tuple[Float[Array, "B T H"], dict[str, Float[Array, "L B ..."]]]:
        """hidden_states of whole sequences, and what taps read."""
        if not self._fits(*tokens.shape):
            self.prepare([tokens.shape])
        self._width = tokens.shape[1]
        return self._run(tokens, lengths, *self._whole(*tokens.shape))

    def read_behind(
        self,
        prompts: Int[np.ndarray, "B"],
        parents: Int[np.ndarray, "B"],
        tokens: Int[np.ndarray, "B T"],
        lengths: Int[np.ndarray, "B"],
    ) -> Float[Array, "B T H"]:
        """hidden_states of tokens that continue the first `prompts` tokens of rows `parents` of the batch
        that was read last, whose pages stay as they are. On one device along "data"."""
        size, room = self.model.run.page_size, self._room
        own_pages, each = self._behind_pages(tokens.shape[1]), page_count(self._width, size)
        number, page = np.arange(len(tokens))[:, None], np.arange(room.table)
        full = (prompts // size)[:, None]  # pages that are the parent's from beginning to end
        table = np.where(page < each, parents[:, None] * each + page, 0)
        source = np.take_along_axis(table, full, 1)[:, 0]
        first = room.pages - (number + 1) * own_pages  # from the end, where no batch has pages
        own = (page >= full) & (page < full + own_pages)
        copy = np.where(prompts % size > 0, first[:, 0], room.pages)
        no_row = np.full(len(tokens), room.rows)
        places = np.stack([no_row, parents, prompts, source, copy], 1).astype(np.int32)
        table = np.where(own, first + page - full, table).astype(np.int32)
        return self._run(tokens, lengths, places, table)[0]

    def tokens_behind(self, width: int) -> int:
        """Tokens of the cache that a row of this width takes behind another."""
        return self._behind_pages(width) * self.model.run.page_size

    def _rows(self, rows: int) -> int:
        return placement.padded_rows(rows, self.model.mesh)

    def _behind_pages(self, width: int) -> int:
        """The most pages that `width` tokens take, if the first may lie anywhere in a page."""
        return page_count(width + self.model.run.page_size - 1, self.model.run.page_size)

    def _fits(self, rows: int, width: int) -> bool:
        each = page_count(width, self.model.run.page_size)
        own = rows // placement.size(self.model.mesh, placement.DATA)
        return own <= self._room.rows and own * each <= self._room.pages and each <= self._room.table

    def _make(self, needed: "_Room") -> Programs:
        """A cache that has what is needed, in powers of two: calls share few sizes, and so their programs."""
        both = zip(self._room, needed, strict=True)
        room = _Room(*(max(have, 1 << (need - 1).bit_length()) for have, need in both))
        if room == self._room and self._programs is not None:
            return self._programs
        self.close()  # the old cache's memory is free before there is a new one
        self._room = room
        model, data = self.model, placement.size(self.model.mesh, placement.DATA)
        self._cache = parallel.empty_cache(
            self._config, model.run, room.rows * data, room.table * model.run.page_size, model.mesh,
            room.pages * data, rewinds=True,
        )  # fmt: skip
        self._programs = Programs(model, self._cache)
        return self._programs

    def _whole(self, rows: int, width: int) -> tuple[Int[np.ndarray, "B 5"], Int[np.ndarray, "B P"]]:
        """Places and pages of sequences that begin with their first token: row after row, on each device."""
        number = np.arange(rows) % (rows // placement.size(self.model.mesh, placement.DATA))
        each, page = page_count(width, self.model.run.page_size), np.arange(self._room.table)
        table = np.where(page < each, number[:, None] * each + page, 0)
        nothing, none = np.zeros_like(number), np.full_like(number, self._room.pages)
        places = np.stack([number, number, nothing, nothing, none], 1)
        return places.astype(np.int32), table.astype(np.int32)

    def _call(self, *arrays: np.ndarray) -> Call:
        rows, width = arrays[0].shape
        name = f"the reading of {rows} x {width} tokens"
        return Call(name, reading_program, arrays, (self.model.config,), self.options)

    def _run(self, *arrays: np.ndarray) -> tuple[jax.Array, dict[str, jax.Array]]:
        assert self._programs is not None  # `read` has prepared
        call = self._call(*arrays)
        program, placed = self._programs.get(call), call.placed(self.model.mesh)
        hidden, self._cache, activations = program(self.model.params, self._cache, *placed)
        return hidden, activations


class _Room(NamedTuple):
    """Of a cache, on each device: rows, pages in all, pages of a row."""

    rows: int
    pages: int
    table: int
