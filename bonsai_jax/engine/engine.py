"""Many requests at once: `Engine` takes them from any thread, `Handle` gives their answers."""

import atexit
import contextlib
import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from bonsai_jax.config import SamplingParams
from bonsai_jax.decoding import sampling as sampling_arrays
from bonsai_jax.decoding.steps import LogitsProcessor
from bonsai_jax.engine.answers import Piece
from bonsai_jax.engine.handle import Handle
from bonsai_jax.engine.loop import Loop
from bonsai_jax.engine.prompts import Prompt, check_new, checked_sampling, encode, step_options
from bonsai_jax.engine.runner import Options
from bonsai_jax.model import Model
from bonsai_jax.network import cache as kv
from bonsai_jax.network.taps import Taps
from bonsai_jax.progress import Progress, shown
from bonsai_jax.weights.memory import bytes_per_row

TRIES = 2  # failures in a row, with nothing drawn between, after which an engine gives up


class Engine:
    """Answers requests as they come, many at once.

        with bj.Engine(model, max_rows=32) as engine:
            handle = engine.submit("Once upon a time", bj.SamplingParams(), max_new_tokens=64)
            for piece in handle:
                print(piece.text, end="")

    max_rows     most answers written at once, by each device along the mesh's axis "data"; None: run.rows
    pages        of each device's cache, run.page_size tokens each; None: as many as max_rows of `context`
                 tokens need. Fewer are enough where most answers are shorter: when they run out, the request
                 that came last waits, and later goes on where it was
    context      most tokens of a prompt and its answer; None: run.context
    logprobs     most alternatives that a request may ask for; None: no request gets log-probabilities
    logit_biases most tokens that a request's SamplingParams.logit_bias may name
    speculate, taps, logits_processor   as for `generate`; the same for all requests, and compiled in
    checkpoints  recurrent states that the prefix cache keeps, each device, for models that have them (a state
                 is as large as what a row keeps: card.py); None: max_rows, 0: such prompts are read whole
    max_wait_s   seconds that a new request, or the next token of a stream, waits for others at most, as far
                 as single steps and chunks of prefill are shorter
    prefill_tokens   tokens of prompts that are read at once, between two steps; None: 2,048, on a CPU 512
    reproducible the same bits alone and in a crowd: rows and chunks of one size, no prefix cache, and pages
                 for a whole answer taken beforehand

    Safe to call from several threads, and from asyncio. What is compiled: decode for 1, 2, 4, ... max_rows
    rows, and prefill of a few sizes; `warmup` does it beforehand, else what is needed when it is.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_rows: int | None = None,
        pages: int | None = None,
        context: int | None = None,
        logprobs: int | None = None,
        logit_biases: int = 16,
        speculate: str | None = None,
        taps: Taps | None = None,
        logits_processor: LogitsProcessor | None = None,
        checkpoints: int | None = None,
        max_wait_s: float = 0.1,
        prefill_tokens: int | None = None,
        reproducible: bool = False,
    ):
        max_rows = model.run.rows if max_rows is None else max_rows
        context = model.run.context if context is None else context
        if not isinstance(context, int | np.integer) or not 1 <= context <= model.run.context:
            raise ValueError(
                f"Engine: context is {context!r}; the model was loaded for 1 to {model.run.context}"
            )
        pages = max_rows * kv.page_count(context, model.run.page_size) if pages is None else pages
        counts = {"max_rows": (max_rows, 1), "pages": (pages, 1), "logit_biases": (logit_biases, 1)}
        counts |= {"checkpoints": (checkpoints or 0, 0), "prefill_tokens": (prefill_tokens or 1, 1)}
        for name, (value, least) in counts.items():
            if not isinstance(value, int | np.integer) or value < least:
                raise ValueError(f"Engine: {name} is {value!r}; it must be a whole number, {least} or more")
        if not isinstance(max_wait_s, int | float) or not max_wait_s >= 0:
            raise ValueError(f"Engine: max_wait_s is {max_wait_s!r}; it must be a number, 0 or more")
        self.model = model
        self.options = Options(
            max_rows,
            pages,
            context,
            speculate=speculate,
            biases=1 << (logit_biases - 1).bit_length(),
            max_wait_s=max_wait_s,
            prefill_tokens=prefill_tokens or 0,
            reproducible=reproducible,
            checkpoints=_checkpoints(model, checkpoints, max_rows),
            **step_options(model, taps, logits_processor, logprobs),
        )
        self._loop = Loop(model, self.options, threaded=True)
        self._inbox: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()  # the inbox, or one of these:
        self._broken: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="bonsai-jax engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # before Python ends, which a thread must not outlive

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def warmup(self, progress: Progress = False) -> None:
        """Compile all that will be needed (prompts of vectors excepted). Waits until it is done.

        progress   True: a bar on stderr; or called with executables compiled so far and in all
        """
        done, failed = threading.Event(), []

        def work():
            try:
                self._loop.warmup(update)
            except Exception as error:
                failed.append(error)
            done.set()

        with shown(progress, "compiling") as update:
            self._send(work)
            done.wait()
        if failed:
            raise failed[0]

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams = SamplingParams(),
        *,
        max_new_tokens: int = 128,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        priority: int = 0,
        logprobs: int | None = None,
        n: int = 1,
    ) -> Handle:
        """Ask for n answers to a prompt. Returns at once; the answers come through the Handle.

        priority   requests of a higher one get a row first, and keep it when pages run out
        logprobs   alternatives of each token, at most the engine's
        n          answers, with seeds seed, seed + 1, ...
        The rest as for `generate`.
        Raises ValueError for a request that this engine could never run, and RuntimeError where the engine is
        closed or has failed.
        """
        ids = encode(self.model, prompt)
        check_new(max_new_tokens)
        checked_sampling(sampling)
        for name, value in {"n": n, "priority": priority}.items():
            if not isinstance(value, int | np.integer):
                raise TypeError(f"{name} is {value!r}; it must be a whole number")
        self._check(len(ids), max_new_tokens, sampling, logprobs, n)
        seed = sampling_arrays.any_seed() if sampling.seed is None else sampling.seed
        handle = Handle(n, len(ids))
        answers = [
            self._loop.ask(
                ids,
                dataclasses.replace(sampling, seed=seed + index),
                max_new_tokens=max_new_tokens,
                stop=stop,
                ignore_eos=ignore_eos,
                priority=priority,
                logprobs=logprobs,
                index=index,
                told=handle.tell,
            )
            for index in range(n)
        ]

        def cancel():
            for answer in answers:
                self._loop.cancel(answer)

        def add():
            for answer in answers:
                self._loop.add(answer)

        handle.cancel_answers = lambda: self._send(cancel, late=True)
        self._send(add)
        return handle

    def close(self) -> None:
        """Cancel every request that is on its way, and free the device's memory."""
        atexit.unregister(self.close)
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _check(self, tokens: int, new: int, params: SamplingParams, logprobs: int | None, n: int) -> None:
        o = self.options
        most = min(o.context, o.pages * self.model.run.page_size)
        if tokens + new > most:
            limit = f"context={o.context}" if most == o.context else f"pages={o.pages}"
            shorter = f"max_new_tokens of {most - tokens} or less, or " if tokens < most else ""
            raise ValueError(
                f"{tokens} tokens of prompt and {new} new ones do not fit an engine with {limit}; give "
                f"{shorter}an Engine with context={tokens + new} and "
                f"pages={kv.page_count(tokens + new, self.model.run.page_size)} or more"
            )
        most_logprobs = -1 if o.logprobs is None else o.logprobs
        whole = isinstance(logprobs, int | np.integer)
        if logprobs is not None and not (whole and 0 <= logprobs <= most_logprobs):
            raise ValueError(
                f"logprobs is {logprobs!r}, and the engine's {o.logprobs}; give Engine(logprobs=) the most "
                "alternatives that a request may ask for"
            )
        if len(params.logit_bias) > o.biases:
            raise ValueError(
                f"SamplingParams: logit_bias names {len(params.logit_bias)} tokens, and the engine has room "
                f"for {o.biases}; give Engine(logit_biases=)"
            )
        sampling_arrays.check_bias(params, self.model.config.vocab_size)
        if n < 1:
            raise ValueError(f"n is {n}; ask for 1 answer or more")

    def _send(self, work: Callable[[], None], late: bool = False) -> None:
        """Have the engine's thread do it. late: nothing is lost if there is no thread any more."""
        with self._changed:
            if self._broken is not None and not late:
                raise RuntimeError(f"the engine has failed, and runs nothing more: {self._broken}")
            if self._closed and not late:
                raise RuntimeError("the engine is closed; make another")
            self._inbox.append(work)
            self._changed.notify()

    def _run(self) -> None:
        try:
            self._turns()
        except Exception as error:  # of no dispatch; nobody may wait for a thread that is gone
            with self._changed:
                self._broken = error
            while self._inbox:
                with contextlib.suppress(Exception):  # of what has failed already, which each is told below
                    self._inbox.popleft()()
        for answer in list(self._loop.answers.values()):
            answer.told(self._broken or Piece("", [], "cancelled", index=answer.reader.index))
        self._loop.close()

    def _turns(self) -> None:
        busy = False
        while self._next(wait=not busy):
            try:
                busy = self._loop.turn()
            except Exception as error:
                busy = True
                self._failed(error)

    def _next(self, *, wait: bool) -> bool:
        """Do what was asked for. False: nothing more will be."""
        with self._changed:
            while wait and not self._inbox and not self._closed:
                self._changed.wait()
            work = len(self._inbox)
            over = self._closed or self._broken is not None
        for _ in range(work):
            self._inbox.popleft()()
        return not over

    def _failed(self, error: Exception) -> None:
        """Go on with those who wait, or give up."""
        reason = RuntimeError(f"the engine failed while this request was running: {error}")
        reason.__cause__ = error
        try:
            self._loop.fail(reason)
        except Exception as again:
            error, self._loop.failures = again, TRIES
        if self._loop.failures >= TRIES:
            with self._changed:
                self._broken = error


def _checkpoints(model: Model, asked: int | None, rows: int) -> int:
    """Checkpoints of what pages do not hold: recurrent states, and rings of windows. None where all is in
    pages."""
    if not bytes_per_row(model.config, model.run):
        return 0
    return rows if asked is None else asked
