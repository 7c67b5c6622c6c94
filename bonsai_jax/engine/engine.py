"""Many requests at once: `Engine` takes them from any thread, `Handle` gives their answers."""

import atexit
import concurrent.futures
import contextlib
import dataclasses
import functools
import inspect
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bonsai_jax import constraints, forks
from bonsai_jax.arguments import any_whole, flag, kind, whole
from bonsai_jax.constraints import Constraint
from bonsai_jax.decoding import sampling as sampling_arrays
from bonsai_jax.decoding.steps import LogitsProcessor
from bonsai_jax.engine import options as engine_options
from bonsai_jax.engine.adapters import number as adapter_number
from bonsai_jax.engine.adapters import with_all as with_adapters
from bonsai_jax.engine.answers import Piece
from bonsai_jax.engine.handle import Handle
from bonsai_jax.engine.loop import Load, Loop
from bonsai_jax.engine.prompts import (
    Prompt,
    answer_options,
    checked_sampling,
    compiled_constraint,
    encode,
)
from bonsai_jax.engine.updates import fitting
from bonsai_jax.engine.wakes import Wakes
from bonsai_jax.model import Model, check_chained
from bonsai_jax.network import cache as kv
from bonsai_jax.network.adapter import Adapter
from bonsai_jax.network.params import Params
from bonsai_jax.network.taps import Taps
from bonsai_jax.progress import Progress, shown
from bonsai_jax.sampling_params import SamplingParams, seeded
from pallas_kernels.device import for_threads

MOST_ANSWERS = 4096  # of one request
PREFIX_CACHE_BYTES = 16 * 10**9
TRIES = 2  # failed dispatches in a row after which an engine gives up
ARRIVAL_S = 0.001  # for which an idle engine waits for the next request that is known to arrive


class Engine:
    """Answers many requests at once, as they come.

        with bj.Engine(model, max_batch_size=32) as engine:
            handle = engine.submit("Once upon a time", bj.SamplingParams(), max_new_tokens=64)
            for piece in handle:
                print(piece.text, end="")

    max_batch_size   most sequences generated at once, on each device along the mesh's axis "data"; None:
                 run.batch_size
    pages        in each device's cache, run.page_size tokens each; None: enough for max_batch_size sequences
                 of `context` tokens. Fewer will do where most answers are shorter: when they run out, the
                 request that came last waits, and later continues where it was
    context      most tokens of a prompt and its answer; None: run.context
    logprobs     most alternatives that a request may ask for; None: no request gets log-probabilities
    sampled_logprobs   answers with log-probabilities also have those of their tokens after penalties,
                 truncations and temperature: Logprobs.sampled
    logit_biases most tokens that a request's SamplingParams.logit_bias may name, up to 65,536
    speculate, taps, logits_processor   as for `generate`; compiled in, the same for all requests
    checkpoints  recurrent states in each device's prefix cache, for models that have them; each takes the
                 memory of a row's state (card.py). None: max_batch_size, or as many as fit, and at least 4,
                 which a conversation of an agent needs; 0: such prompts are read whole
    max_wait_s   most seconds that a new request, or the next token of a stream, waits for other work, if a
                 single step and a chunk of prefill take less
    prefill_tokens   most tokens of prompts that are read between two steps; None: 2,048, on a CPU 512
    reproducible the same bits for a request alone and in a crowd: decode and prefill of one size, no prefix
                 cache, and pages for the whole answer from the start
    prefix_cache a folder in which cached beginnings of prompts are kept, also for the next process
                 (prefix_folder.py); None: in memory alone
    prefix_cache_bytes   of all files in it; those unused for the longest time are removed
    adapters     {name: bj.Adapter}, of which each request may name one (docs/adapters.md): rows with other
                 adapters run beside each other. One that the model has already is added to each

    Safe to call from several threads, and from asyncio. It compiles decode for 1, 2, 4, ... max_batch_size
    rows and prefill of a few sizes, each when it is first needed; `warmup` compiles them all beforehand.
    Raises ValueError for a number that is not a whole one or too small, and for a context beyond the model's.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_batch_size: int | None = None,
        pages: int | None = None,
        context: int | None = None,
        logprobs: int | None = None,
        sampled_logprobs: bool = False,
        logit_biases: int = 16,
        speculate: str | None = None,
        taps: Taps | None = None,
        logits_processor: LogitsProcessor | None = None,
        checkpoints: int | None = None,
        max_wait_s: float = 0.1,
        prefill_tokens: int | None = None,
        reproducible: bool = False,
        prefix_cache: str | os.PathLike[str] | None = None,
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
        adapters: dict[str, Adapter] | None = None,
    ):
        self.options = engine_options.checked(
            model, max_batch_size=max_batch_size, pages=pages, context=context, logprobs=logprobs,
            sampled_logprobs=sampled_logprobs, logit_biases=logit_biases, speculate=speculate, taps=taps,
            logits_processor=logits_processor, checkpoints=checkpoints, max_wait_s=max_wait_s,
            prefill_tokens=prefill_tokens, reproducible=reproducible, prefix_cache=prefix_cache,
            prefix_cache_bytes=prefix_cache_bytes, adapters=adapters,
        )  # fmt: skip
        self.model = model = with_adapters(model, adapters)
        self._wakes = Wakes()
        self._loop = Loop(model, self.options, threaded=True, together=self._wakes.together)
        if prefix_cache is not None:
            wake = functools.partial(self._send, late=True)
            try:
                self._loop.open_store(prefix_cache, prefix_cache_bytes, wake)
            except OSError:
                self._loop.close()
                raise
        self._inbox: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()  # the inbox, or one of these:
        self._arriving = 0  # requests that are being made ready
        self._broken: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=for_threads(self._run), name="bonsai-jax engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # the thread must end before Python does

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def compile_ahead(cls, model: Model, **arguments: Any) -> None:
        """Begin to compile, in other threads, every program of an Engine with these arguments, and return at
        once. On one device that can be done while weights are read:

            options = {"max_batch_size": 64}
            model = bj.load("model.gguf", on_shapes=lambda model: bj.Engine.compile_ahead(model, **options))
            engine = bj.Engine(model, **options)

        A request to the engine waits for its own programs only. Errors as for Engine.
        """
        given = inspect.signature(cls).bind(model, **arguments)
        given.apply_defaults()
        options = engine_options.checked(**given.arguments)
        Loop(with_adapters(model, given.arguments["adapters"]).shapes(), options).compile_ahead()

    @property
    def most_tokens(self) -> int:
        """Most tokens of a prompt and its answer that a request may have."""
        return min(self.options.context, self.options.pages * self.model.run.page_size)

    @property
    def saves_states(self) -> bool:
        """Whether a prompt can continue an earlier one only where its state was saved: `submit` can be told
        where."""
        return self._loop.runner.saves

    @property
    def broken(self) -> Exception | None:
        """Why the engine runs nothing more; None: it does."""
        return self._broken

    def load(self) -> Load:
        """How many answers are running and waiting, and what is in the pages, at this moment."""
        return self._loop.load()

    def warmup(
        self, progress: Progress = False, *, constraints: bool = False, samplers: bool = False
    ) -> None:
        """Compile every program except those for prompts of vectors. Waits until it is done.

        constraints  also those that run while a request has a constraint
        samplers   also those that run while a request uses SamplingParams.chained
        progress   True: a bar on stderr; or called with executables compiled so far and in all
        Raises RuntimeError if the engine is closed meanwhile.
        """
        constraints = flag("warmup: constraints", constraints)
        if samplers := flag("warmup: samplers", samplers):
            check_chained(self.options.speculate)
        done, failed = threading.Event(), []

        def counted(programs: int, total: int) -> None:
            if self._closed:
                raise RuntimeError(f"the engine was closed with {programs} of {total} programs compiled")
            update(programs, total)

        def work():
            try:
                self._loop.warmup(counted, constraints, samplers)
            except Exception as error:
                failed.append(error)
            done.set()

        with shown(progress, "compiling") as update:
            self._send(work)
            done.wait()
        if failed:
            raise failed[0]

    def compile_constrained(self) -> None:
        """Begin to compile, in other threads and without haste, what the first request with a constraint
        needs, and return at once. Requests go on meanwhile, and those with a constraint wait for their own
        programs only. Without llguidance it does nothing.

        Raises RuntimeError if the engine is closed or has failed.
        """
        if constraints.installed():
            tokens = self.model.tokenizer, self.model.config.vocab_size
            threading.Thread(target=constraints.prepare, args=tokens, name="bonsai-jax tokens").start()
            self._send(self._loop.compile_constrained)

    @property
    def version(self) -> int:
        """How often `update_params` has replaced the weights."""
        return self._loop.version

    def update_params(self, params: Params, *, restart: bool = False) -> int:
        """Go on with other weights of the same structure, between two steps. No request is lost. Returns the
        new `version` when later steps run with them.

        params    like engine.model.params: the same fields, formats, shapes and types, as a training step
                  makes them of dense weights, or `load` of another file. Arrays that lie elsewhere are copied
                  to where the engine's lie, others are shared with the caller, who must not donate them
        restart   running answers read their prompts and their tokens so far again, with the new weights. Else
                  they go on from their next token; their keys, values and states so far remain those of the
                  old weights

        Requests that have no row yet are answered by the new weights alone. Cached beginnings of prompts are
        forgotten. `Piece.version` and `Output.versions` say which weights drew a token. The engine lets go of
        the old arrays; both are in memory until then. Any thread may call it. It waits for the dispatch of
        steps that are planned, so in a coroutine use `await asyncio.to_thread(engine.update_params, params)`.

        Raises TypeError for what is no Params, ValueError for another structure, which names the first array
        that differs, or for an engine with prefix_cache, whose files belong to one model's weights, and
        RuntimeError where the engine is closed or has failed. It then runs as before.
        """
        restart = flag("update_params: restart", restart)
        if self._loop.store is not None:
            raise ValueError(
                "update_params: files of a prefix_cache belong to one model; make an Engine without"
            )
        params = fitting(params, self.model.params)
        swapped: concurrent.futures.Future[int] = concurrent.futures.Future()

        def swap() -> None:
            try:
                model = dataclasses.replace(self.model, params=params)
                self._loop.use(model, restart)
                self.model = model
                swapped.set_result(self.version)
            except Exception as error:
                swapped.set_exception(error)

        self._send(swap)
        return swapped.result()

    @contextlib.contextmanager
    def arriving(self) -> Iterator[None]:
        """Around the work that makes a request ready and submits it:

            with engine.arriving():
                handle = engine.submit(render(messages))

        When others are in such a block, an idle engine does not begin with the first request alone. It waits
        up to 1 ms for the next one, until one prefill has as many prompts as it can read. A request alone
        does not wait. Any thread may use it.
        """
        with self._changed:
            self._arriving += 1
        try:
            yield
        finally:
            with self._changed:
                self._arriving -= 1
                self._changed.notify()

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
        constraint: Constraint | None = None,
        owner: str = "",
        checkpoints_at: Sequence[int] | None = None,
        adapter: str | None = None,
    ) -> Handle:
        """Ask for n answers to a prompt. Returns at once; the answers come through the Handle.

        priority   requests of higher priority get a row first, and keep it when pages run out
        logprobs   alternatives for each token, at most the engine's
        n          answers, with seeds seed, seed + 1, ...; at most 4,096
        constraint what every answer must match, after a thought if the prompt is a chat whose template has
                   them. It is compiled in this thread, which can take a second;
                   `constraints.compile` does it beforehand
        owner      requests share cached beginnings of prompts with those of the same owner alone
        checkpoints_at   positions in the prompt, in tokens, where later prompts will part ways with it: a
                   model whose states pages do not hold saves them there. None: at its last full page
        adapter    the name of one of the engine's adapters; None: none of them
        The other arguments are those of `generate`.
        Raises ValueError for a request that this engine could never run, and RuntimeError where the engine is
        closed or has failed.
        """
        ids = encode(self.model, prompt)
        checked_sampling(sampling)
        how = answer_options(max_new_tokens, stop, ignore_eos)
        n, priority = whole("n", n, 1, MOST_ANSWERS), any_whole("priority", priority)
        if logprobs is not None:
            logprobs = whole("logprobs", logprobs)
        constraint = compiled_constraint(self.model, constraint, ids)
        kind("owner", owner, str, "a name")
        if sampling.chained:
            check_chained(self.options.speculate)
        if checkpoints_at is not None:
            kind("checkpoints_at", checkpoints_at, (list, tuple), "a list of positions")
            checkpoints_at = tuple(whole("checkpoints_at", at, 0, len(ids)) for at in checkpoints_at)
        self._check(len(ids), how["max_new_tokens"], sampling, logprobs)
        number = 0 if adapter is None else adapter_number(adapter, self.options.adapters)
        seed = sampling_arrays.any_seed() if sampling.seed is None else sampling.seed
        handle = Handle(n, len(ids), self._wakes)
        answers = [
            self._loop.ask(
                ids,
                seeded(sampling, seed + index),
                **how,
                priority=priority,
                logprobs=logprobs,
                index=index,
                constraint=constraint,
                owner=owner,
                places=checkpoints_at,
                adapter=number,
                on_piece=handle.add,
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
        """Cancel every request that is running or waiting, and free the device's memory."""
        atexit.unregister(self.close)
        if forks.forked():  # the engine is the other process's
            return
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _check(self, tokens: int, new: int, params: SamplingParams, logprobs: int | None) -> None:
        o, most = self.options, self.most_tokens
        if tokens + new > most:
            limit = f"context={o.context}" if most == o.context else f"pages={o.pages}"
            shorter = f"max_new_tokens of {most - tokens} or less, or " if tokens < most else ""
            raise ValueError(
                f"{tokens} tokens of prompt and {new} new ones do not fit an engine with {limit}; give "
                f"{shorter}an Engine with context={tokens + new} and "
                f"pages={kv.page_count(tokens + new, self.model.run.page_size)} or more"
            )
        most_logprobs = -1 if o.logprobs is None else o.logprobs
        if logprobs is not None and logprobs > most_logprobs:
            raise ValueError(
                f"logprobs is {logprobs!r}, and the engine's {o.logprobs}; give Engine(logprobs=) the most "
                "alternatives that a request may ask for"
            )
        if len(params.logit_bias) > o.biases:
            raise ValueError(
                f"SamplingParams: logit_bias names {len(params.logit_bias)} tokens, and the engine has room "
                f"for {o.biases}; name fewer, or give Engine(logit_biases=), which is --logit-biases of a "
                "server"
            )
        sampling_arrays.check_bias(params, self.model.config.vocab_size)

    def _send(self, work: Callable[[], None], late: bool = False) -> None:
        """Have the engine's thread run this work. late: if the thread has ended, drop it silently."""
        if late and forks.forked():
            return
        forks.check()
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
        except Exception as error:  # outside of a dispatch: all requests end with it
            with self._changed:
                self._broken = error
            while self._inbox:
                with contextlib.suppress(
                    Exception
                ):  # a consequence of the error, which each answer gets below
                    self._inbox.popleft()()
        for answer in list(self._loop.answers.values()):
            answer.on_piece(self._broken or Piece("", [], "cancelled", index=answer.reader.index))
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
        """Run the work in the inbox. False: no more will come."""
        with self._changed:
            while wait and not self._inbox and not self._closed:
                self._changed.wait()
            if wait:
                self._gather()
            work = len(self._inbox)
            over = self._closed or self._broken is not None
        for _ in range(work):
            self._inbox.popleft()()
        return not over

    def _gather(self) -> None:
        """With the lock: wait for requests that are known to arrive, as `arriving` says."""
        most = max(rows for rows, _ in self._loop.runner.limits.shapes)
        while self._arriving and len(self._inbox) < most:
            work = len(self._inbox)
            changed = lambda: self._closed or not self._arriving or len(self._inbox) > work  # noqa: E731, B023
            if not self._changed.wait_for(changed, ARRIVAL_S) or self._closed:
                return

    def _failed(self, error: Exception) -> None:
        """Go on with the waiting requests, or give up."""
        reason = RuntimeError(f"the engine failed while this request was running: {error}")
        reason.__cause__ = error
        try:
            self._loop.fail(reason)
        except Exception as second:
            error, self._loop.failures = second, TRIES
        if self._loop.failures >= TRIES:
            with self._changed:
                self._broken = error
