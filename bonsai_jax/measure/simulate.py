"""Predicts how an engine will behave, without a device: the engine's own Scheduler, a simulated clock, and
measured times in place of the work.

    arrivals -> Scheduler.plan() -> StepTimes.seconds(plan) -> its tokens are known, one plan later -> ...

As in loop.py, the token that a prefill draws is known when the prefill is done, and the tokens of decode
steps when the last step of their plan is done. Work of the engine beside its device (detokenizing, waiting
for the GIL) is in `StepTimes.dispatch_s`. Prompts share no prefixes.
"""

import bisect
import dataclasses
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bonsai_jax.engine.scheduler import Limits, Plan, Request, Scheduler

BATCH_DEPTH = 192  # mean tokens in the cache per sequence of bench's batch tests: 128, and half of 128 more
TEST = re.compile(r"(?:gen-)?(pp|tg|gen|batch)(\d+)(?:@d(\d+))?")


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request: when it arrives, and how many tokens its prompt and its answer have."""

    at_s: float
    prompt_tokens: int
    new_tokens: int


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """How long a device works: linear between measured points, and beyond the last two.

    decode      (batch size, seconds of a step on an empty cache), in order
    stored_s    additional seconds of a step for each token in the cache
    prefill     (tokens, seconds of a prefill into an empty cache), in order
    pair_s      additional seconds of a prefill for each pair of a new token and a token in the cache
    dispatch_s  seconds that the device idles between two plans
    """

    decode: Sequence[tuple[int, float]]
    prefill: Sequence[tuple[int, float]]
    stored_s: float = 0.0
    pair_s: float = 0.0
    dispatch_s: float = 0.0

    @staticmethod
    def measured(rows: Iterable[Mapping[str, Any]], dispatch_s: float = 0.0) -> "StepTimes":
        """From rows of `bench` (bench.Row) for one model on one device: ppN, tgN, batchB, and the same at a
        depth. Of several rows of one test the last one counts; rows with sampling (genN, gen-batchB) replace
        those without.

        Raises ValueError if there is no row of prefill, or none of decode.
        """
        tests: dict[tuple[str, int, int], float] = {}
        for row in sorted(rows, key=lambda row: "gen" in row["test"]):
            if match := TEST.fullmatch(row["test"]):
                kind, size, depth = match[1].replace("gen", "tg"), int(match[2]), int(match[3] or 0)
                tests[kind, size, depth] = row["tok_s"]
        prefill = {
            n: n / speed for (kind, n, depth), speed in sorted(tests.items()) if (kind, depth) == ("pp", 0)
        }
        one = {depth + n / 2: 1 / speed for (kind, n, depth), speed in tests.items() if kind == "tg"}
        batches = {n: n / speed for (kind, n, _), speed in tests.items() if kind == "batch"}
        if not prefill or not (one or batches):
            raise ValueError("rows of bench for prefill (pp512) and for decode (tg128 or batch8) are needed")
        stored_s = _slope(one) if len(one) > 1 else 0.0
        empty = {rows: s - stored_s * rows * BATCH_DEPTH for rows, s in batches.items()}
        if one:
            shallow = min(one)
            empty[1] = one[shallow] - stored_s * shallow
        pairs = [
            (n / speed - prefill[n]) / (n * depth)
            for (kind, n, depth), speed in tests.items()
            if kind == "pp" and depth and n in prefill
        ]
        return StepTimes(
            sorted(empty.items()), sorted(prefill.items()), stored_s, max([0.0, *pairs]), dispatch_s
        )

    def seconds(self, plan: Plan) -> tuple[float, float]:
        """Seconds of the busiest device for a plan: its dispatch and prefill, and its decode steps."""
        seconds, steps = self.dispatch_s, 0.0
        if any(plan.reads):
            rows, tokens = plan.shape
            before = max(sum(read.count * read.first for read in reads) for reads in plan.reads)
            least = _at(self.decode, 1)  # a prefill reads all weights too
            seconds += max(least, _at(self.prefill, rows * tokens)) + self.pair_s * before
        if plan.steps:
            stored = max(sum(request.stored for request in writes) for writes in plan.writes)
            steps = plan.steps * (_at(self.decode, plan.rows) + self.stored_s * stored)
        return seconds, steps


@dataclasses.dataclass
class Answer:
    """When a request arrived, and when its first and its last token were known, in simulated seconds."""

    arrival: Arrival
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.first_s - self.arrival.at_s

    @property
    def per_token_s(self) -> float:
        """Seconds per token after the first."""
        return (self.last_s - self.first_s) / max(1, self.arrival.new_tokens - 1)


@dataclasses.dataclass
class Outcome:
    """What the simulated engine did.

    answers    in the order of arrivals
    plans      dispatches
    preempted  how often a request lost its pages to another
    busy_s     seconds in which the device worked or waited for a dispatch
    """

    answers: list[Answer]
    plans: int = 0
    preempted: int = 0
    busy_s: float = 0.0

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return max(a.last_s for a in self.answers) - min(a.arrival.at_s for a in self.answers)

    @property
    def new_tok_s(self) -> float:
        return sum(a.arrival.new_tokens for a in self.answers) / self.seconds


def simulate(
    arrivals: Sequence[Arrival],
    times: StepTimes,
    limits: Limits,
    *,
    devices: int = 1,
    max_wait_s: float | None = 0.1,
    warm: bool = True,
) -> Outcome:
    """Simulate an engine that serves these requests.

    limits      those of the engine: Limits.for_engine
    devices     how many share the queue
    max_wait_s  as for Engine; None: as in `generate`, where nobody waits for a single token
    warm        whether every program is compiled at the start; else the Scheduler decides which are, and
                compiling takes no time
    Raises ValueError for a request that needs more pages than a device has.
    """
    for arrival in arrivals:
        if arrival.prompt_tokens + arrival.new_tokens > limits.pages * limits.page_size:
            raise ValueError(f"{arrival} needs more than {limits.pages} pages of {limits.page_size} tokens")
    scheduler = Scheduler(limits, devices)
    # As Loop does at its start.
    scheduler.reads_first = max_wait_s is None
    scheduler.idle_steps = limits.steps if scheduler.reads_first else 1
    if warm:
        scheduler.compiled |= {*limits.row_sizes, *limits.shapes}
    coming = deque(sorted((Answer(arrival) for arrival in arrivals), key=lambda a: a.arrival.at_s))
    outcome, known = Outcome(list(coming)), dict[Request, Answer]()
    drawn: dict[Request, int] = {}  # tokens that the device has drawn, known to the scheduler or not
    flying: deque[tuple[Plan, int, list[tuple[Request, int]], float]] = deque()  # like Loop's flights
    now = free = 0.0
    read_at: float | None = None
    while True:
        while coming and coming[0].arrival.at_s <= now:
            answer = coming.popleft()
            request = Request(range(answer.arrival.prompt_tokens), answer.arrival.new_tokens, reusable=0)
            known[request], drawn[request] = answer, 0
            scheduler.add(request)
        plan = None
        if len({id(plan) for plan, *_ in flying}) < 2:
            plan = scheduler.plan()
            if plan is None:
                read_at = None
            else:
                prefill_s, steps_s = times.seconds(plan)
                done = max(now, free) + prefill_s
                free = done + steps_s
                outcome.plans, outcome.busy_s = outcome.plans + 1, outcome.busy_s + prefill_s + steps_s
                if any(plan.reads):
                    flying.append((plan, 0, _reads(plan, drawn), done))
                if plan.steps:
                    flying.append((plan, plan.steps, _writes(plan, drawn), free))
        if flying and (plan is None or len({id(plan) for plan, *_ in flying}) > 1):
            read, steps, draws, ready = flying.popleft()
            now = max(now, ready)
            for request, tokens in draws:
                _record(scheduler, request, known[request], tokens, now)
            if steps:
                before, read_at = read_at, now
                if max_wait_s is not None and before is not None and not any(read.reads):
                    scheduler.measured(steps, now - before, max_wait_s)
        elif plan is None:
            if not coming:
                outcome.preempted = scheduler.preempted
                return outcome
            now = max(now, coming[0].arrival.at_s)


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest of the values that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def _reads(plan: Plan, drawn: dict[Request, int]) -> list[tuple[Request, int]]:
    """How many tokens each request draws in a plan's prefill."""
    draws = [(read.request, 1) for reads in plan.reads for read in reads if read.draws]
    for request, _ in draws:
        drawn[request] += 1
    return draws


def _writes(plan: Plan, drawn: dict[Request, int]) -> list[tuple[Request, int]]:
    """How many tokens each request draws in a plan's decode steps."""
    draws = []
    for request in (request for writes in plan.writes for request in writes):
        tokens = min(plan.steps, request.max_new_tokens - drawn[request])
        draws.append((request, tokens))
        drawn[request] += tokens
    return draws


def _record(scheduler: Scheduler, request: Request, answer: Answer, tokens: int, now: float) -> None:
    """Note that the tokens of a flight are known, as Loop does."""
    request.flights.popleft()
    if request.ended or not tokens:
        return
    if not request.said:
        answer.first_s = now
    request.said += [0] * tokens
    answer.last_s = now
    if len(request.said) >= request.max_new_tokens:
        scheduler.end(request)


def _at(points: Sequence[tuple[int, float]], x: float) -> float:
    """The value at x of the line through the two points nearest to it; with one point, through (0, 0)."""
    if len(points) == 1:
        points = [(0, 0.0), *points]
    i = min(max(1, bisect.bisect_left(points, (x, 0.0))), len(points) - 1)
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


def _slope(points: Mapping[float, float]) -> float:
    """The slope of the line through the first and the last point, at least 0."""
    (x0, y0), (x1, y1) = min(points.items()), max(points.items())
    return max(0.0, (y1 - y0) / (x1 - x0))
