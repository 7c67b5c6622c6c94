"""The loop of an engine: plans become dispatches, and their tokens become text.

    plan t + 1 and dispatch it    while the device works on t
    read t                        tokens to text; requests that end release their row and pages

It runs in a thread of its own (engine.py), or in the thread that waits for the answers (text.py).
"""

import dataclasses
import functools
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from bonsai_jax.config import SamplingParams
from bonsai_jax.constraints import Constraint
from bonsai_jax.decoding import steps as decoding
from bonsai_jax.decoding.sampling import NOTHING_TO_DRAW, Logprobs
from bonsai_jax.engine import prefix_store
from bonsai_jax.engine.answers import Answer, Piece, Reader
from bonsai_jax.engine.constrained import Constrained
from bonsai_jax.engine.plans import Plan, Request
from bonsai_jax.engine.prefix import PrefixCache
from bonsai_jax.engine.prefix_store import PrefixStore, Stored
from bonsai_jax.engine.programs import Call
from bonsai_jax.engine.prompts import Ids
from bonsai_jax.engine.runner import Dispatch, Options, Runner, numbered
from bonsai_jax.engine.scheduler import Scheduler
from bonsai_jax.model import Model
from bonsai_jax.network import parallel

STEADY_STEPS = 8  # decode steps of a plan over several processes, whose clocks differ


@dataclasses.dataclass
class Flight:
    """A dispatch of a plan whose results are not read yet.

    rows    the places in its results of the requests that draw
    steps   of decode; 0: it is a prefill
    """

    plan: Plan
    rows: list[tuple[int, Request]]
    dispatch: Dispatch
    steps: int = 0


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
    """Runs the requests of one engine. Not for several threads at once."""

    def __init__(self, model: Model, options: Options, *, threaded: bool = False):
        self.model, self.options = model, options
        self.runner = Runner(model, options, threaded=threaded)
        self.answers: dict[Request, Answer] = {}
        self.scheduler = self._empty_scheduler()
        self.store: PrefixStore | None = None
        self._looking: set[Request] = set()  # those for which files are read
        self.constrained = Constrained(model, self._force, self._finish)
        self.failures = 0  # dispatches in a row that failed
        self.plans = 0  # made so far
        self._flying: deque[Flight] = deque()
        self._untold: list[tuple[Any, ...]] = []  # arguments of _tell
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
        on_piece: Callable[[Piece | Exception], None],
    ) -> Answer:
        """A request for one answer, to be passed to `add`. Raises ValueError for a constraint that cannot be
        compiled."""
        vectors = isinstance(ids, np.ndarray)
        eos = [] if ignore_eos else sorted(self.model.tokenizer.eos_ids)
        reusable = 0 if vectors or not self.runner.shares else None
        request = Request(ids, max_new_tokens, reusable, vectors, priority, owner, places=places)
        reader = Reader(self.model.tokenizer, frozenset(eos), stop, index)
        rules = self.runner.rules(params, eos)
        remembers = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        answer = Answer(request, reader, rules, bool(remembers), logprobs, on_piece)
        if constraint is not None:
            self.constrained.begin(answer, constraint, ignore_eos)
        return answer

    def add(self, answer: Answer) -> None:
        """Schedule a request, after what files know of its prompt is in memory."""
        if answer.matcher is not None:
            if self.constrained.over(answer):  # nothing is to be drawn
                answer.request.ended = True
                answer.on_piece(self.piece(answer))
                return
            self.runner.split()
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

    def cancel(self, answer: Answer, *, read_all: bool = False) -> None:
        """End a request. Its row and pages are free for the next plan. One that has ended, also by a dispatch
        that failed, is not in the scheduler any more. read_all: as for Scheduler.end."""
        request = answer.request
        if self.answers.pop(request, None) is None:
            return
        if request in self._looking:
            self._looking.remove(request)
            request.ended = True
            return
        read = request.device is not None and request.read == request.to_read and request.reusable != 0
        tokens, table = [*request.prompt, *request.said][:-1] if read else [], request.table
        self.scheduler.end(request, read_all=read_all)
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
        # A draw of split steps is read before the next plan, which needs masks; the device is busy meanwhile.
        if self._unread_plans() < (1 if self.scheduler.constrained else 2):
            plan = self.scheduler.plan()
            if plan is None:
                self._read_at = None
            else:
                self.plans += 1
                self._dispatch(plan)
        self._tell_all()  # of the draw before this plan
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

    def fail(self, error: Exception) -> None:
        """A dispatch failed: running requests end with the error, waiting ones run on a new pool. Raises what
        making the pool raises."""
        self.failures += 1
        self._flying.clear()
        self._untold.clear()
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
        self.constrained.close()
        if self.store is not None:
            self.store.close(self._prefix)
        self.runner.close()

    def warmup(self, progress: Callable[[int, int], None], constraints: bool = False) -> None:
        """Compile every program, by running it without a request. constraints: also those of split steps."""
        self.runner.warmup(self._every_call() + (self._every_split_call() if constraints else []), progress)
        self.scheduler.compiled.update(self._sizes())
        if constraints:
            self.scheduler.compiled_split.update(self._sizes())

    def compile_ahead(self) -> None:
        """Begin to compile every program, for another loop of this process, and take no more calls."""
        for call in self._every_call():
            self.runner.compile(call)
        self.runner.finish_alone()

    def _sizes(self) -> list[int | tuple[int, int]]:
        """Rows of decode programs and shapes of prefill, beginning with those that a first request needs."""
        (fewest, *rows), (shortest, *shapes) = self.runner.limits.row_sizes, self.runner.limits.shapes
        return [fewest, shortest, *rows, *shapes]

    def _every_split_call(self) -> list[Call]:
        """Of each program of split steps."""
        self.runner.split()
        each = (self.runner.split_padding(size, n) for size in self._sizes() for n in self._variants)
        return list({call.program: call for calls in each for call in calls}.values())

    @property
    def _variants(self) -> list[int | None]:
        """Of log-probabilities."""
        return [None] if self.options.logprobs is None else [None, self.options.logprobs]

    def _every_call(self) -> list[Call]:
        """Of each program, without any request."""
        calls = [self.runner.padding(size, n) for size in self._sizes() for n in self._variants]
        calls += [self.runner.padding(None, None)] if self.runner.shares else []
        calls += [self.runner.save(None)] if self.runner.saves else []
        return calls + ([] if self.store is None else self.store.calls())

    def prepare(self, rows: int) -> None:
        """Have the decode program for this batch size compiled beside that of the first prefill."""
        split = self.scheduler.constrained > 0
        (self.scheduler.compiled_split if split else self.scheduler.compiled).add(rows)
        self._beside_prefill = self._calls(rows)

    def compile_first(self) -> None:
        """Begin to compile what the requests run first, for another loop of this process, and take no more
        calls."""
        plan = self.scheduler.plan()
        if plan is not None:  # else all answers are known from their constraints
            (call,) = self._calls(plan.shape)
            self.runner.compile(call)
            self._compile_beside(call)
        self.runner.finish_alone()

    def _calls(self, size: int | tuple[int, int]) -> list[Call]:
        """Of the programs for decode of a number of rows, or of that for prefill of a shape."""
        asked = self._asked(self.answers)
        split = self.scheduler.constrained > 0
        return self.runner.split_padding(size, asked) if split else [self.runner.padding(size, asked)]

    def _compile_beside(self, prefill: Call) -> None:
        """Begin to compile a prefill, and then the decode programs that wait for it."""
        calls, self._beside_prefill = self._beside_prefill, []
        for call in [prefill, *calls] if calls else []:
            self.runner.compile(call)

    def _empty_scheduler(self) -> Scheduler:
        scheduler = Scheduler(self.runner.limits, self.runner.data)
        if self.options.max_wait_s is not None:  # until `_time` has measured steps
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
            self.runner.dispatch(self.runner.save(one))

    def _dispatch(self, plan: Plan) -> None:
        self._save_states()
        reads = list(itertools.chain(*plan.reads))
        for device, chunks in enumerate(plan.reads):
            for read in chunks:
                if not read.starts or not read.first:
                    continue
                if not self.answers[read.request].began:
                    self.answers[read.request].cached = read.first
                if self._remembers(read.request):
                    alone = [[read] if d == device else [] for d in range(self.runner.data)]
                    note = self.runner.dispatch(self.runner.note(alone, self._rules))
                    self._flying.append(Flight(plan, [], note))
                    read.starts = False
        if reads:
            asked = self._asked(read.request for read in reads)
            how = plan.shape, self._rules, asked, plan.split
            call = self.runner.prefill(plan.reads, *how)
            self._compile_beside(call)
            drawn = self.runner.dispatch(call)
            draws = [(i, read.request) for i, read in numbered(plan.reads, plan.shape[0]) if read.draws]
            self._flying.append(Flight(plan, [] if plan.split else draws, drawn))
        if any(plan.draws):
            asked = self._asked(request for request, _ in itertools.chain(*plan.draws))
            call = self.runner.draw(plan.draws, plan.rows, self._allowed, asked)
            rows = [(i, request) for i, (request, _) in numbered(plan.draws, plan.rows)]
            self._flying.append(Flight(plan, rows, self.runner.dispatch(call), steps=1))
        if plan.split and any(plan.writes):
            self.runner.dispatch(self.runner.read_newest(plan.writes, plan.rows))
        elif any(plan.writes):
            asked = self._asked(itertools.chain(*plan.writes))
            drawn = self.runner.dispatch(self.runner.decode(plan.writes, plan.rows, plan.steps, asked))
            self._flying.append(Flight(plan, list(numbered(plan.writes, plan.rows)), drawn, steps=plan.steps))

    def _remembers(self, request: Request) -> bool:
        o = self.options
        return self.answers[request].remembers or o.speculate is not None or o.logits_processor is not None

    def _rules(self, request: Request) -> np.ndarray:
        return self.answers[request].rules

    def _allowed(self, request: Request) -> np.ndarray | None:
        """The mask of a request's next draw; None: it has no constraint."""
        matcher = self.answers[request].matcher
        return None if matcher is None else matcher.allowed

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
        drawn, scores = jax.tree.map(parallel.fetch, on_device)
        if self._flying:
            self.runner.wait_until_started(self._flying[0].dispatch)
        steps, tokens = drawn[:, 0], drawn[:, 1:]
        counts = (tokens != decoding.NO_TOKEN).sum(axis=1)
        # Whole arrays to lists: converting number by number would take longer than everything else.
        counts, steps, tokens = counts.tolist(), steps.tolist(), tokens[:, : counts.max()].tolist()
        for i, request in flight.rows:
            new = tokens[i][: counts[i]]
            least = self._record(request, new)
            self._untold.append((request, len(new), steps[i], scores, i, least))
        self.constrained.send()
        if not any(flight.plan.draws):  # after a draw the next plan comes first, which waits for masks alone
            self._tell_all()
        self._time(flight)

    def _record(self, request: Request, new: list[int]) -> int:
        """Note what a request has drawn. Returns the tokens that it draws at least, unless it ends."""
        least, _ = request.flights.popleft()
        answer = self.answers.get(request)
        if not request.ended and answer is not None:
            request.said += new
            answer.untold += new
            if answer.matcher is not None:
                try:
                    self.constrained.drawn(answer, new)
                except ValueError as error:
                    self._finish(answer, error)
        return least

    def _tell_all(self) -> None:
        """Give answers the pieces that they have drawn."""
        untold, self._untold = self._untold, []
        for draw in untold:
            self._tell(*draw)

    def _tell(
        self, request: Request, count: int, steps: int, scores: Logprobs | None, row: int, least: int
    ) -> None:
        """Give an answer the next `count` of its drawn tokens, and end it if it is complete."""
        answer = self.answers.get(request)
        if request.ended or answer is None:
            return
        n = answer.logprobs
        row_scores = None if n is None or scores is None else _row_logprobs(scores, row, n)
        piece = self.piece(answer, row_scores, steps)
        undrawn = piece.finish_reason is None and count < least  # the device has ended this row
        if piece.finish_reason is not None or undrawn:
            # Of stop strings and constraints only the host knows, and the device may have read on.
            ended = piece.finish_reason == "length" or {*request.said[-1:]} & answer.reader.end_tokens
            self.cancel(answer, read_all=bool(ended) and not undrawn and answer.matcher is None)
        if count or piece.finish_reason is not None:
            answer.on_piece(piece)
        if undrawn:
            answer.on_piece(ValueError(f"{NOTHING_TO_DRAW}; {len(request.said)} were drawn before"))

    def piece(self, answer: Answer, scores: Logprobs | None = None, steps: int = 0) -> Piece:
        """The next piece of an answer, of its tokens in `untold`."""
        request, matcher = answer.request, answer.matcher
        tokens, answer.untold = answer.untold, []
        complete = matcher is not None and matcher.complete
        ended = len(request.said) >= request.max_new_tokens
        if answer.began:
            return answer.reader.read(tokens, ended, scores, steps, complete)
        answer.began = True
        piece = answer.reader.read(tokens, ended, scores, 0, complete)
        return dataclasses.replace(piece, cached_tokens=answer.cached)

    def _force(self, request: Request, tokens: list[int]) -> bool:
        return self.scheduler.force(request, tokens)

    def _finish(self, answer: Answer, error: Exception | None) -> None:
        """End an answer whose constraint allows no more, or has failed."""
        self._tell_all()
        if not answer.request.ended:  # else its last piece was sent
            last = self.piece(answer) if error is None else error
            self.cancel(answer)
            answer.on_piece(last)

    def _time(self, flight: Flight) -> None:
        if not flight.steps:
            return
        before, self._read_at = self._read_at, time.perf_counter()
        if self.options.max_wait_s is None or jax.process_count() > 1:
            return  # no request waits, or the clocks of several processes would differ
        if any(flight.plan.reads) or any(flight.plan.draws) or before is None:
            return
        self.scheduler.measured(flight.steps, self._read_at - before, self.options.max_wait_s)


def _row_logprobs(scores: Logprobs, row: int, n: int) -> Logprobs:
    """Logprobs of one row, with n alternatives."""
    return scores.replace(token=scores.token[row], ids=scores.ids[row, :, :n], top=scores.top[row, :, :n])
