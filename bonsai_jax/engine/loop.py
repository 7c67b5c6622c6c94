"""The loop of an engine: plans become dispatches, and their tokens become text.

    plan t + 1 and dispatch it    while the device works on t
    read t                        tokens to text; requests that end release their row and pages

It runs in a thread of its own (engine.py), or in the thread that waits for the answers (text.py).
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np

from bonsai_jax.constraints import Constraint
from bonsai_jax.decoding import steps as decoding
from bonsai_jax.engine import prefix_store, stand_in
from bonsai_jax.engine.answers import Answer, Piece, Reader
from bonsai_jax.engine.calls import Allowed, numbered
from bonsai_jax.engine.constrained import Constrained
from bonsai_jax.engine.delivery import Delivery, Drawn, piece
from bonsai_jax.engine.flights import Flight, Letters
from bonsai_jax.engine.options import Options
from bonsai_jax.engine.plans import Plan, Request
from bonsai_jax.engine.prefix import PrefixCache
from bonsai_jax.engine.prefix_store import PrefixStore, Stored
from bonsai_jax.engine.programs import Call
from bonsai_jax.engine.prompts import Ids
from bonsai_jax.engine.runner import Runner
from bonsai_jax.engine.scheduler import Scheduler
from bonsai_jax.engine.stand_in import StandIns
from bonsai_jax.model import Model
from bonsai_jax.network import parallel
from bonsai_jax.sampling_params import SamplingParams
from pallas_kernels.device import platform

STEADY_STEPS = 8  # decode steps of a plan over several processes, whose clocks differ


@dataclasses.dataclass(frozen=True)
class Load:
    """What an engine has to do.

    running, waiting   answers with a row, and without
    pages      of all devices
    free_pages     that hold nothing
    cached_pages   that no running answer uses, with prompts that a later one may begin with
    preempted  how often an answer has lost its pages to others
    """

    running: int
    waiting: int
    pages: int
    free_pages: int
    cached_pages: int
    preempted: int


class Loop:
    """Runs the requests of one engine. Not for several threads at once. together: around pieces of one step
    that go to several answers."""

    def __init__(
        self,
        model: Model,
        options: Options,
        *,
        threaded: bool = False,
        together: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self.model, self.options = model, options
        self.runner = Runner(model, options, threaded=threaded)
        self.answers: dict[Request, Answer] = {}
        self.scheduler = self._empty_scheduler()
        self.store: PrefixStore | None = None
        self._looking: set[Request] = set()  # those for which files are read
        self.delivery = Delivery(self.cancel, together)
        self.constrained = Constrained(model, self._force, self.delivery.finish)
        self.letters = Letters(self.runner, self._allowed)
        self.failures = 0  # dispatches in a row that failed
        self.plans = 0  # made so far
        self.version = 0  # of the weights: how often they were replaced
        self._flying: deque[Flight] = deque()
        self._read_at: float | None = None
        self._beside_prefill: list[Call] = []  # of the decode programs that `prepare` named

    def ask(
        self,
        ids: Ids,
        params: SamplingParams,
        *,
        max_new_tokens: int,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        priority: int = 0,
        logprobs: int | None = None,
        index: int = 0,
        constraint: Constraint | None = None,
        owner: str = "",
        places: tuple[int, ...] | None = None,
        adapter: int = 0,
        on_piece: Callable[[Piece | Exception], None],
    ) -> Answer:
        """A request for one answer, to be passed to `add`. Requests with different adapters share no
        beginnings of prompts. Raises ValueError for a constraint that cannot be
        compiled, and for too many sequence breakers."""
        vectors = isinstance(ids, np.ndarray)
        eos = [] if ignore_eos else sorted(self.model.tokenizer.eos_ids)
        reusable = 0 if vectors or not self.runner.shares else None
        owner = f"{owner}\0adapter {adapter}" if adapter else owner
        request = Request(ids, max_new_tokens, reusable, vectors, priority, owner, places=places)
        reader = Reader(self.model.tokenizer, frozenset(eos), stop, index)
        rules = self.runner.calls.rules(params, eos, adapter)
        penalized = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        request.chained, chained = params.chained, params if params.chained else None
        if chained is not None:
            self.runner.calls.chain(chained)
        answer = Answer(request, reader, rules, chained, bool(penalized) or params.dry, logprobs, on_piece)
        if constraint is not None:
            self.constrained.begin(answer, constraint, ignore_eos)
        return answer

    def add(self, answer: Answer) -> None:
        """Schedule a request, after what files know of its prompt is in memory."""
        if answer.matcher is not None:
            if self.constrained.over(answer):  # nothing is to be drawn
                answer.request.ended = True
                answer.on_piece(piece(answer))
                return
            self._need("hidden")
        if answer.chained is not None:
            self._need("chain")
        answer.version = self.version
        self.answers[answer.request] = answer
        if self.store is None or not self._look_up(answer.request):
            self.scheduler.add(answer.request)

    def _look_up(self, request: Request) -> bool:
        """Whether files are asked for more of a request's prompt than memory knows."""
        tokens, most = request.prompt, len(request.prompt) - 1
        if self.store is None or request.reusable == 0:
            return False
        known = self._prefix.match(tokens, most, request.owner)
        if known is None or most - known.tokens < self.runner.limits.page_size:
            return False
        self._looking.add(request)
        self.store.look_up(tokens, most, request.owner, known, functools.partial(self._looked_up, request))
        return True

    def _looked_up(self, request: Request, stored: Stored | None) -> None:
        if request not in self._looking:  # it was cancelled
            return
        self._looking.remove(request)
        if stored is not None and self.store is not None:
            self.store.restore(self._prefix, request.prompt, request.owner, stored)
        self.scheduler.add(request)

    @property
    def _prefix(self) -> PrefixCache:
        """The prefix cache of an engine on one device."""
        return self.scheduler.devices[0].prefix

    def open_store(
        self, path: str | os.PathLike[str], most_bytes: int, wake: Callable[[Callable[[], None]], None]
    ) -> None:
        """Keep cached beginnings of prompts in files (prefix_store.opened)."""
        self.store = prefix_store.opened(path, most_bytes, self.model, self.runner, wake)

    def cancel(self, answer: Answer, *, read: int | None = None) -> None:
        """End a request. Its row and pages are free for the next plan. One that has ended, also by a dispatch
        that failed, is not in the scheduler any more. read: as for Scheduler.end."""
        request = answer.request
        if self.answers.pop(request, None) is None:
            return
        if request in self._looking:
            self._looking.remove(request)
            request.ended = True
            return
        in_pages = request.device is not None and request.read == request.to_read and request.reusable != 0
        tokens, table = request.cached(read) if in_pages else [], request.table
        self.scheduler.end(request, read=read)
        self._save_states()
        if self.store is not None and tokens:
            known = self._prefix.match(tokens, len(tokens), request.owner)
            states = {} if known is None else known.states
            if request.places is not None:
                last = (*request.places, len(tokens))
                states = {at: checkpoint for at, checkpoint in states.items() if at in last}
            self.store.keep(self._prefix, tokens, table, request.owner, states)

    def turn(self) -> bool:
        """Make and dispatch a plan, then read the oldest dispatch that is not read. False: there is no work
        left."""
        plan, reads = None, False
        self.constrained.collect()
        if self.store is not None:
            self.store.step(self._prefix)
        if not self.letters.write(self._flying, self.constrained.pending):
            self.delivery.deliver()
            self.constrained.wait()
            return True
        # Without a mailbox a draw of split steps is read before the next plan, which needs masks.
        most_unread = 2 if self.runner.limits.mailbox or not self.scheduler.constrained else 1
        if self._unread_plans() < most_unread:
            plan = self.scheduler.plan()
            if plan is None:
                self._read_at = None
            else:
                self.plans += 1
                plan.version = self.version
                self._dispatch(plan)
        self.delivery.deliver()  # of the draw before this plan
        if self._flying and (plan is None or self._unread_plans() > 1):
            flight, reads = self._flying.popleft(), True  # it may free the pages that a request waits for
            first_token = bool(flight.rows) and not flight.steps and self.options.max_wait_s is not None
            if not first_token:  # a first token is read before more programs are compiled
                self.runner.catch_up()
            self._read(flight)
            self.failures = 0
        if plan is None and not reads and self.constrained.pending:
            self.constrained.wait()
            return True
        stores = self.store is not None and not self.store.idle
        return plan is not None or reads or stores or bool(self._flying) or bool(self.scheduler.waiting)

    def use(self, model: Model, restart: bool) -> None:
        """Run plans from now on with the weights of this model, whose structure is the same. restart: running
        requests read their tokens again with them."""
        self._hold()
        self.model = model
        self.runner.use(model)
        self.scheduler.renew(restart)
        self.version += 1

    def fail(self, error: Exception) -> None:
        """A dispatch failed: running requests end with the error, waiting ones run on a new pool. Raises what
        making the pool raises."""
        self.failures += 1
        self._flying.clear()
        self.delivery.forget()
        waiting = self.scheduler.waiting
        unread = {request for request in waiting if not request.flights} | self._looking
        if self.store is not None:
            self.store.forget()
        lost = [answer for request, answer in self.answers.items() if request not in unread]
        self.answers = {r: a for r, a in self.answers.items() if r in unread}
        for answer in lost:
            answer.request.ended = True
        for answer in lost:
            answer.on_piece(error)
        before = self.scheduler
        self.scheduler = self._empty_scheduler()
        self.scheduler.compiled, self.scheduler.compiled_split = before.compiled, before.compiled_split
        self.scheduler.compiled_chained = before.compiled_chained
        for request in waiting:
            if request in self.answers:
                self.scheduler.add(request)
        self.runner.reset()

    def load(self) -> Load:
        """For any thread; counts may be of different moments."""
        scheduler = self.scheduler
        pages = [device.pages for device in scheduler.devices]
        return Load(
            sum(len(device.running) for device in scheduler.devices),
            len(scheduler.waiting),
            sum(own.count for own in pages),
            sum(own.available - own.idle for own in pages),
            sum(own.idle for own in pages),
            scheduler.preempted,
        )

    def close(self) -> None:
        """Free the device's memory."""
        self.runner.close_mailbox()
        self.constrained.close()
        if self.store is not None:
            self.store.close(self._prefix)
        self.runner.close()

    def warmup(
        self, progress: Callable[[int, int], None], constraints: bool = False, samplers: bool = False
    ) -> None:
        """Compile every program, by running it without a request. constraints: also those of split steps;
        samplers: all of these once more, for pools with a chain."""
        self._hold()
        scheduler, sizes, calls = self.scheduler, self._sizes(), []
        for chained in (False, True) if samplers else (False,):
            calls += self._every_call(chained) + (self._every_split_call(chained) if constraints else [])
        self.runner.warmup(calls, progress)
        warm = [scheduler.compiled] + [scheduler.compiled_split] * constraints
        if samplers:
            warm += [scheduler.compiled_chained[split] for split in (False, True)[: 1 + constraints]]
        for compiled in warm:
            compiled.update(sizes)

    def compile_constrained(self) -> None:
        """Begin to compile the programs of split steps, one after another in another thread."""
        compiled, sizes = self.scheduler.compiled_split, self._sizes()

        def done(future: concurrent.futures.Future[None]) -> None:
            if not future.cancelled() and future.exception() is None:
                compiled.update(sizes)  # requests that came earlier had to take few of them

        self.runner.compile_split(self._every_split_call(chained=False)).add_done_callback(done)

    def compile_ahead(self) -> None:
        """Begin to compile every program, for another loop of this process, and take no more calls."""
        for call in self._every_call():
            self.runner.compile(call)
        self.runner.finish_alone()

    def _sizes(self) -> list[int | tuple[int, int]]:
        """Rows of decode programs and shapes of prefill, beginning with those that a first request needs."""
        (fewest, *rows), (shortest, *shapes) = self.runner.limits.row_sizes, self.runner.limits.shapes
        return [fewest, shortest, *rows, *shapes]

    def _every_split_call(self, chained: bool) -> list[Call]:
        """Of each program of split steps."""
        self._need("hidden")
        padding = self.runner.calls.split_padding
        each = (padding(size, n, chained) for size in self._sizes() for n in self._variants)
        return list({call.program: call for calls in each for call in calls}.values())

    @property
    def _variants(self) -> list[int | None]:
        """Of log-probabilities."""
        return [None] if self.options.logprobs is None else [None, self.options.logprobs]

    def _every_call(self, chained: bool = False) -> list[Call]:
        """Of each program, without any request."""
        if chained:
            self._need("chain")
        padding = self.runner.calls.padding
        calls = [padding(size, n, chained) for size in self._sizes() for n in self._variants]
        calls += [padding(None, None, chained)] if self.runner.shares else []
        if chained:
            return calls
        calls += [self.runner.calls.save(None)] if self.runner.saves else []
        return calls + ([] if self.store is None else self.store.calls())

    def prepare(self, requests: int) -> None:
        """Choose the decode program for this number of requests on each device. If it is not there yet, it is
        compiled beside that of the first prefill."""
        scheduler, sizes = self.scheduler, self.runner.limits.row_sizes
        rows = next((n for n in sizes if n >= requests), sizes[-1])
        if jax.process_count() == 1:  # others may have other programs
            programs, news = self._stand_ins(), [request.max_new_tokens for request in self.answers]
            cost = lambda n: stand_in.steps(n * self.runner.data, news)  # noqa: E731
            rows = programs.best(rows, sizes, cost) or rows
            scheduler.take_turns(rows)
            scheduler.stand_in = programs.best
        split = scheduler.constrained > 0
        unchained = scheduler.compiled_split if split else scheduler.compiled
        (scheduler.compiled_chained[split] if scheduler.chained else unchained).add(rows)
        self._beside_prefill = self._calls(rows)

    def _stand_ins(self) -> StandIns:
        """Of this loop's programs."""
        step_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.model.params))
        has: Any = lambda size: self.runner.has(self._calls(size))  # noqa: E731
        program: Any = lambda size: self._calls(size)[0].program  # noqa: E731
        return StandIns(has, program, step_bytes, counts=self.model.loaded)

    def compile_first(self) -> None:
        """Begin to compile what the requests run first, for another loop of this process, and take no more
        calls."""
        plan = self.scheduler.plan()
        if plan is not None:  # else all answers are known from their constraints
            (call,) = self._calls(plan.shape)
            self._compile_beside(call)
            self.runner.compile(call)
        self.runner.finish_alone()

    def _calls(self, size: int | tuple[int, int]) -> list[Call]:
        """Of the programs for decode of a number of rows, or of that for prefill of a shape."""
        asked = self._asked(self.answers)
        split, chained = self.scheduler.constrained > 0, self.scheduler.chained > 0
        if split:
            return self.runner.calls.split_padding(size, asked, chained)
        return [self.runner.calls.padding(size, asked, chained)]

    def _compile_beside(self, prefill: Call) -> None:
        """Begin to compile a prefill and the decode programs that wait for it. On a GPU these come first:
        their one large kernel takes longest, and is being compiled while prefill is traced."""
        calls, self._beside_prefill = self._beside_prefill, []
        order = [prefill, *calls] if platform() == "cpu" else [*calls, prefill]
        for call in order if calls else []:
            self.runner.compile(call)

    def _hold(self) -> None:
        """Leave no draw on the device that waits for a letter: before whatever may load a program, or waits
        for the device."""
        self.letters.hold(self._flying)

    def _need(self, part: str) -> None:
        if not self.runner.has_part(part):
            self._hold()
        self.runner.need(part)

    def _empty_scheduler(self) -> Scheduler:
        scheduler = Scheduler(self.runner.limits, self.runner.data)
        scheduler.reads_first = self.options.max_wait_s is None
        if not scheduler.reads_first:  # until `_time` has measured steps
            scheduler.idle_steps = 1 if jax.process_count() == 1 else STEADY_STEPS
        return scheduler

    # To the device.

    def _unread_plans(self) -> int:
        """Dispatched plans whose results are not all read."""
        return len({id(flight.plan) for flight in self._flying})

    def _save_states(self) -> None:
        """Dispatch the copies of states that must come before the next plan."""
        saves, self.scheduler.saves = self.scheduler.saves, []
        for one in saves:
            self.runner.dispatch(self.runner.calls.save(one))

    def _dispatch(self, plan: Plan) -> None:
        self._save_states()
        reads = list(itertools.chain(*plan.reads))
        chains = self._chain if plan.chained else None
        for device, chunks in enumerate(plan.reads):
            for read in chunks:
                if not read.starts or not read.first:
                    continue
                if not self.answers[read.request].began:
                    # Forced tokens that are read with the prompt may be cached, too. They are not counted.
                    self.answers[read.request].cached = min(read.first, len(read.request.prompt) - 1)
                if self._remembers(read.request):
                    alone = [[read] if d == device else [] for d in range(self.runner.data)]
                    note = self.runner.dispatch(self.runner.calls.note(alone, self._rules, chains))
                    self._flying.append(Flight(plan, [], note))
                    read.starts = False
        if reads:
            asked = self._asked(read.request for read in reads)
            how = plan.shape, self._rules, asked, plan.split, chains
            call = self.runner.calls.prefill(plan.reads, *how)
            self._compile_beside(call)
            drawn = self.runner.dispatch(call)
            draws = [(i, read.request) for i, read in numbered(plan.reads, plan.shape[0]) if read.draws]
            self._flying.append(Flight(plan, [] if plan.split else draws, drawn))
        if any(plan.draws):
            asked = self._asked(request for request, _ in itertools.chain(*plan.draws))
            call = self.runner.calls.draw(plan.draws, plan.rows, self._allowed, asked, plan.chained)
            rows = [(i, request) for i, (request, _) in numbered(plan.draws, plan.rows)]
            guesses = self.runner.limits.guess_width - 1
            drawn, letters = self.runner.dispatch(call), self.runner.limits.mailbox
            self._flying.append(Flight(plan, rows, drawn, 1, guesses, letters, waits=letters))
        if plan.split and any(plan.writes):
            drawing = {request for request, _ in itertools.chain(*plan.draws)}
            self.runner.dispatch(self.runner.calls.read_newest(plan.writes, plan.rows, drawing))
        elif any(plan.writes):
            asked = self._asked(itertools.chain(*plan.writes))
            call = self.runner.calls.decode(plan.writes, plan.rows, plan.steps, asked, plan.chained)
            rows = list(numbered(plan.writes, plan.rows))
            self._flying.append(Flight(plan, rows, self.runner.dispatch(call), steps=plan.steps))
        if any(plan.guesses):
            asked = self._asked(itertools.chain(*plan.guesses))
            call = self.runner.calls.decode(plan.guesses, plan.guess_rows, plan.steps, asked)
            rows = list(numbered(plan.guesses, plan.guess_rows))
            self._flying.append(Flight(plan, rows, self.runner.dispatch(call), steps=plan.steps))

    def _remembers(self, request: Request) -> bool:
        o = self.options
        return self.answers[request].remembers or o.speculate is not None or o.logits_processor is not None

    def _rules(self, request: Request) -> np.ndarray:
        return self.answers[request].rules

    def _chain(self, request: Request) -> np.ndarray | None:
        answer = self.answers[request]
        return None if answer.chained is None else self.runner.calls.chain(answer.chained, answer.mu)

    def _allowed(self, request: Request) -> Allowed | None:
        """What a request may draw next; None: it has no constraint."""
        matcher = self.answers[request].matcher
        if matcher is None:
            return None
        if request.verifies:
            return Allowed(matcher.drafts, matcher.allowed_along)
        return Allowed([], matcher.allowed[None])

    def _asked(self, requests: Iterable[Request]) -> int | None:
        if self.options.logprobs is None or all(self.answers[r].logprobs is None for r in requests):
            return None
        return self.options.logprobs

    # From the device.

    def _read(self, flight: Flight) -> None:
        on_device = flight.dispatch.drawn.result()
        if not flight.rows:
            jax.block_until_ready(on_device)
            return
        drawn, scores, mu = jax.tree.map(parallel.fetch, on_device)
        if self._flying:
            self.runner.wait_until_started(self._flying[0].dispatch)
        end = drawn.shape[1] - flight.guesses
        steps, tokens, guesses = drawn[:, 0], drawn[:, 1:end], drawn[:, end:].tolist()
        counts = (tokens != decoding.NO_TOKEN).sum(axis=1)
        # Whole arrays to lists: converting number by number would take longer than everything else.
        counts, steps, tokens = counts.tolist(), steps.tolist(), tokens[:, : counts.max()].tolist()
        for i, request in flight.rows:
            new = tokens[i][: counts[i]]
            least, _ = request.flights.popleft()
            answer = self.answers.get(request)
            if answer is not None:
                answer.version = flight.plan.version
            if answer is not None and mu is not None:
                answer.mu = float(mu[i])  # for when it is pre-empted, or reads forced tokens
            if not new and not least:
                continue  # its mask was late
            if answer is not None and self._record(answer, new, guesses[i]):
                self.delivery.note(Drawn(answer, len(new), steps[i], scores, i, least))
        self.constrained.send()
        if not any(flight.plan.draws):  # after a draw the next plan comes first, which waits for masks alone
            self.delivery.deliver()
        self._time(flight)

    def _record(self, answer: Answer, new: list[int], guesses: list[int]) -> bool:
        """Note what an answer has drawn, and what is proposed to follow. False: it has ended, perhaps by
        that."""
        if answer.request.ended:
            return False
        answer.request.said += new
        answer.untold += new
        if answer.matcher is not None:
            try:
                self.constrained.drawn(answer, new, guesses)
            except ValueError as error:
                self.delivery.finish(answer, error)
        return not answer.request.ended

    def _force(self, request: Request, tokens: list[int]) -> bool:
        return self.scheduler.force(request, tokens)

    def _time(self, flight: Flight) -> None:
        if not flight.steps:
            return
        before, self._read_at = self._read_at, time.perf_counter()
        if self.options.max_wait_s is None or jax.process_count() > 1:
            return  # no request waits, or the clocks of several processes would differ
        if any(flight.plan.reads) or any(flight.plan.draws) or before is None:
            return
        self.scheduler.measured(flight.steps, self._read_at - before, self.options.max_wait_s)
