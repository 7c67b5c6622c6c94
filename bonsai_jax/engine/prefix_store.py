"""Between an engine's prefix cache and its files: what answers leave is written, what prompts begin with is
read.

    an answer ends -> its pages and states are held -> dispatches copy a few to the host -> a thread writes
    a request comes -> a thread reads what memory does not know -> dispatches fill pages -> it is scheduled

The rest of the engine sees only a prefix cache that knows more. Files: prefix_folder.py; dispatches:
prefix_rows.py.
"""

import concurrent.futures
import dataclasses
import hashlib
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from bonsai_jax.engine.prefix import Match, PrefixCache
from bonsai_jax.engine.prefix_folder import PrefixFolder
from bonsai_jax.engine.prefix_rows import PAGES_AT_ONCE, WORD
from bonsai_jax.engine.programs import Call
from bonsai_jax.engine.runner import Runner
from bonsai_jax.engine.stored import versions
from bonsai_jax.model import Model

MOST_FLYING = 4  # dispatches whose words wait to be written: their memory on the device is bounded
MOST_HELD = 0.5  # of all pages may be held by writes that wait
SAMPLES = 1024  # numbers of each array of the weights that tell models apart
CLOSE_S = 30.0  # most seconds in which a closing engine still writes

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Job:
    """Something to be written that is held until its copy is dispatched: a page, or the state of a checkpoint
    and, if it lies within a page, that page. used: files that count as used when it is written."""

    name: str
    page: int | None
    checkpoint: int | None = None
    used: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Stored:
    """What files have of a prompt's beginning.

    first   the number of the first of `pages` in the prompt
    pages   words of full pages
    state   words of the state after `tokens` tokens, and those of the page in which these end; None: pages
    alone
    """

    first: int
    pages: list[np.ndarray]
    tokens: int
    state: np.ndarray | None = None
    tail: np.ndarray | None = None


class PrefixStore:
    """Files for one engine's prefix cache, on one device. For the engine's thread.

    wake   has the engine's thread call a function
    """

    def __init__(self, folder: PrefixFolder, runner: Runner, wake: Callable[[Callable[[], None]], None]):
        self.folder, self._runner, self._wake = folder, runner, wake
        _, self._page_words, self._state_words = runner.calls.stored_layout
        self._page_size = runner.limits.page_size
        self._saves = runner.options.checkpoints > 0
        self._jobs: deque[Job] = deque()
        self._flying = 0
        self._known: set[str] = set()  # files that are there, or will be
        self._failed = False  # a write; then there are no more
        self._reader = concurrent.futures.ThreadPoolExecutor(2, "bonsai-jax prefix reader")
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "bonsai-jax prefix writer")

    # Writing.

    def keep(
        self, cache: PrefixCache, tokens: list[int], table: Sequence[int], owner: str, states: dict[int, int]
    ):
        """Write the pages of an answer that has ended, and the states by position, as far as they are not.
        Nothing that overwrites them is dispatched. Pages that are free by now have a twin in the cache, which
        is written when its own answer ends."""
        if self._failed:
            return
        keys = self._keys(tokens, owner)
        jobs = [Job(self.folder.page(key), page) for key, page in zip(keys[1:], table, strict=False)]
        for position, checkpoint in states.items():
            number, within = divmod(position, self._page_size)
            name = self.folder.state(keys[number], tokens[number * self._page_size : position])
            jobs.append(Job(name, table[number] if within else None, checkpoint))
        jobs = [job for job in jobs if job.page is None or not cache.pages.is_free(job.page)]
        new = [job for job in jobs if job.name not in self._known]
        new = [job for job in new if not self.folder.has(job.name)]
        self._known.update(job.name for job in jobs)
        if new:
            new[-1] = dataclasses.replace(new[-1], used=tuple(job.name for job in reversed(jobs)))
        for job in new:
            if len(self._jobs) > MOST_HELD * cache.pages.count:
                self._known.discard(job.name)
                continue
            self._hold(cache, job)
            self._jobs.append(job)

    def step(self, cache: PrefixCache) -> None:
        """Dispatch copies of the pages and states that wait to be written, as long as few are under way."""
        while self._jobs and self._flying < MOST_FLYING:
            jobs = [self._jobs.popleft()]
            while jobs[0].checkpoint is None and self._jobs and len(jobs) < PAGES_AT_ONCE:
                if self._jobs[0].checkpoint is not None:
                    break
                jobs.append(self._jobs.popleft())
            pages = [job.page for job in jobs if job.page is not None]
            calls = [self._runner.calls.read_pages(pages)] if pages else []
            if jobs[0].checkpoint is not None:
                calls.append(self._runner.calls.read_state(jobs[0].checkpoint))
            words = [self._runner.dispatch(call).drawn for call in calls]
            for job in jobs:
                self._release(cache, job)
            self._flying += 1
            self._writer.submit(self._write, jobs, words)

    @property
    def idle(self) -> bool:
        """Whether nothing waits that could be dispatched now."""
        return not self._jobs or self._flying >= MOST_FLYING

    def _write(self, jobs: list[Job], words: list[concurrent.futures.Future[list[Any]]]) -> None:
        """In the writer's thread."""
        try:
            arrays = [np.asarray(future.result()[0]) for future in words]
            if jobs[0].checkpoint is not None:
                tail = arrays[0][:1] if len(arrays) > 1 else np.zeros((1, 0), np.int32)
                parts = [np.concatenate([arrays[-1][:1], tail], axis=1)[0]]
            else:
                parts = list(arrays[0])
            for job, part in zip(jobs, parts, strict=False):
                if not self._failed:
                    self.folder.write(job.name, memoryview(np.ascontiguousarray(part)).cast("B"))
                    self.folder.used(job.used)
        except OSError as error:
            self._failed = True
            log.warning("prefix cache: nothing more is written to %s: %s", self.folder.path, error.strerror)
        except (RuntimeError, ValueError, concurrent.futures.CancelledError):
            # The dispatch failed, and the engine says so.
            self._known.difference_update(job.name for job in jobs)
        self._wake(self._written)

    def _written(self) -> None:
        self._flying -= 1

    def _hold(self, cache: PrefixCache, job: Job) -> None:
        if job.page is not None:
            cache.pages.hold(job.page)
        if job.checkpoint is not None and cache.checkpoints is not None:
            cache.checkpoints.hold(job.checkpoint)

    def _release(self, cache: PrefixCache, job: Job) -> None:
        if job.page is not None:
            cache.release([job.page])
        if job.checkpoint is not None:
            cache.release_checkpoint(job.checkpoint)

    # Reading.

    def look_up(
        self, tokens: list[int], most: int, owner: str, known: Match, then: Callable[[Stored | None], None]
    ):
        """Look for more of a prompt than memory knows, and have the engine's thread call `then` with it, or
        None.

        most   tokens that may be shared
        known  what memory knows
        """

        def work() -> None:
            more = None
            try:
                more = self._more(tokens, most, owner, known)
            except OSError as error:
                log.warning("prefix cache: %s cannot be read: %s", self.folder.path, error.strerror)
            self._wake(lambda: then(more))

        self._reader.submit(work)

    def _more(self, tokens: list[int], most: int, owner: str, known: Match) -> Stored | None:
        """In a reader's thread."""
        size, keys = self._page_size, self._keys(tokens[:most], owner)
        first = (known.known if self._saves else known.tokens) // size
        names = [self.folder.page(key) for key in keys[1:]]
        last = first
        while last < len(names) and self.folder.has(names[last]):
            last += 1
        if not self._saves:
            pages = self._read_pages(names[first:last])
            self.folder.used(reversed(names[:last]))
            return Stored(first, pages, (first + len(pages)) * size) if pages else None
        for number in range(last, -1, -1):
            for within, name in self.folder.states(keys[number]):
                position = number * size + within
                if not known.tokens < position <= most:
                    continue
                if name != self.folder.state(keys[number], tokens[number * size : position]):
                    continue
                pages = self._read_pages(names[first:number])
                words = self._state_words + (self._page_words if within else 0)
                state = self._read(name, words) if len(pages) == max(0, number - first) else None
                if state is None:
                    continue
                self.folder.used([name, *reversed(names[:number])])
                tail = state[self._state_words :] if within else None
                return Stored(first, pages, position, state[: self._state_words], tail)
        return None

    def _read_pages(self, names: Sequence[str]) -> list[np.ndarray]:
        """Of these files, until one is missing."""
        each = (self._read(name, self._page_words) for name in names)
        return list(itertools.takewhile(lambda words: words is not None, each))  # pyrefly: ignore[bad-return]

    def _read(self, name: str, words: int) -> np.ndarray | None:
        content = self.folder.read(name, words * WORD)
        if content is None:
            self._known.discard(name)
            return None
        return np.frombuffer(content, np.int32)

    def restore(self, cache: PrefixCache, tokens: list[int], owner: str, stored: Stored) -> None:
        """Put into memory what files had, as far as there is room for it. Nothing is dispatched yet that
        overwrites it."""
        size, full = self._page_size, stored.tokens // self._page_size
        table = cache.hold_pages(tokens[: full * size], owner)
        # Meanwhile memory may know more of the beginning, or less.
        if stored.first <= len(table):
            new = cache.pages.take(min(max(0, full - len(table)), cache.pages.available))
            words = stored.pages[len(table) - stored.first :][: len(new)]
            for at in range(0, len(new), PAGES_AT_ONCE):
                part = slice(at, at + PAGES_AT_ONCE)
                self._dispatch(self._runner.calls.write_pages(new[part], words[part]))
            table += new
            cache.insert(tokens[: len(table) * size], table, ready=True, owner=owner)
        if stored.state is not None and len(table) >= full:
            self._restore_state(cache, tokens[: stored.tokens], table, owner, stored)
        cache.release(table)

    def _restore_state(
        self, cache: PrefixCache, tokens: list[int], table: list[int], owner: str, stored: Stored
    ) -> None:
        if stored.tail is not None:
            if not cache.pages.available:
                return
            table += cache.pages.take(1)
            self._dispatch(self._runner.calls.write_pages(table[-1:], [stored.tail]))
            cache.insert(tokens, table, ready=True, owner=owner)
        if (checkpoint := cache.checkpoint()) is not None and stored.state is not None:
            self._dispatch(self._runner.calls.write_state(checkpoint, stored.state))
            cache.attach(checkpoint, tokens, table, owner)

    def _dispatch(self, call: Call) -> None:
        self._runner.dispatch(call)

    def _keys(self, tokens: Sequence[int], owner: str) -> list[str]:
        """The owner's key, and that of each full page of these tokens."""
        keys, size = [self.folder.root(owner)], self._page_size
        for first in range(0, len(tokens) - size + 1, size):
            keys.append(self.folder.next(keys[-1], tokens[first : first + size]))
        return keys

    def calls(self) -> list[Call]:
        """Of each program, without any page or state but the first, as it is."""
        words = np.zeros(self._state_words, np.int32)
        own = [self._runner.calls.read_pages([]), self._runner.calls.write_pages([], [])]
        if self._saves:
            own += [
                self._runner.calls.read_state(0),
                self._runner.calls.write_state(self._runner.options.checkpoints, words),
            ]
        return own

    # The end.

    def forget(self) -> None:
        """The pool is lost: nothing that waits can be written."""
        self._known.difference_update(job.name for job in self._jobs)
        self._jobs.clear()

    def close(self, cache: PrefixCache) -> None:
        """Write what waits, for CLOSE_S at most, and end the threads."""
        self._reader.shutdown()
        while self._jobs:
            self._flying = 0
            self.step(cache)
            try:
                self._writer.submit(lambda: None).result(CLOSE_S)
            except concurrent.futures.TimeoutError:
                self.forget()
        self._writer.shutdown()


def identity(model: Model, runner: Runner) -> str:
    """The name of all on which the words depend: the model, a sample of its weights, the layout of the cache,
    the version of this package, and the platform, whose kernels round in their own way."""
    text, *_ = runner.calls.stored_layout
    digest = hashlib.sha256()
    for part in (text, model.config, runner.options.context, versions(), jax.default_backend()):
        digest.update(repr(part).encode() + b"\0")
    if model.params.adapter is not None:  # whose scales are not among the arrays
        digest.update(repr(jax.tree.structure(model.params.adapter)).encode())
    for array in jax.device_get(_samples(model.params)):
        digest.update(f"{array.shape} {array.dtype}".encode() + np.asarray(array).tobytes())
    return digest.hexdigest()[:40]


@jax.jit
def _samples(params: Any) -> list[jax.Array]:
    """Some numbers of each array of the weights, from its beginning to its end."""

    def sample(array: jax.Array) -> jax.Array:
        at = np.linspace(0, array.size - 1, min(SAMPLES, array.size)).astype(np.int64)
        return array[np.unravel_index(at, array.shape)] if array.ndim else array

    return [sample(leaf) for leaf in jax.tree.leaves(params)]


def opened(
    path: str | os.PathLike[str],
    most_bytes: int,
    model: Model,
    runner: Runner,
    wake: Callable[[Callable[[], None]], None],
) -> PrefixStore:
    """The store of an engine. Errors are those of PrefixFolder."""
    return PrefixStore(PrefixFolder(path, identity(model, runner), most_bytes), runner, wake)
