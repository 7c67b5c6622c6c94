"""Scheduler, pages and prefix cache, with a device that stores tokens in place of keys and values. A row
draws a token that depends on the tokens in its pages, so a page of another row shows. Single decisions:
test_scheduler.py."""

from collections import deque

import numpy as np
import pytest

from bonsai_jax.engine.pages import Pages
from bonsai_jax.engine.plans import row_sizes
from bonsai_jax.engine.prefix import Match, PrefixCache
from bonsai_jax.engine.scheduler import Limits, Request, Scheduler

SIZE, STOP = 4, 0  # tokens of a page; the token that ends a row


def limits(**changed) -> Limits:
    shapes = [(1, 8), (1, 32), (4, 8)]
    known = {"max_batch_size": 4, "pages": 24, "page_size": SIZE, "row_sizes": (1, 2, 4), "shapes": shapes}
    return Limits(**known | {"prefill_cost": 8, "steps": 16} | changed)


@pytest.mark.parametrize(
    ("most", "between", "sizes"),
    [
        (1, (24,), [1]),
        (24, (24,), [1, 2, 4, 8, 16, 24]),
        (48, (24,), [1, 2, 4, 8, 16, 24, 32, 48]),
        (12, (12, 24), [1, 2, 4, 8, 12]),
        (32, (12, 24), [1, 2, 4, 8, 12, 16, 24, 32]),
    ],
)
def test_decode_is_compiled_for_few_sizes_and_for_all_rows(most, between, sizes):
    assert row_sizes(most, between) == sizes


def next_token(tokens: list[int]) -> int:
    return hash(tuple(tokens)) % 23


def alone(prompt: list[int], new: int) -> list[int]:
    said: list[int] = []
    while len(said) < new and (not said or said[-1] != STOP):
        said.append(next_token([*prompt, *said]))
    return said


class Device:
    """Its pages hold tokens, and a row its newest one. recurrent: a row keeps all tokens that it has read,
    too, in a state that pages do not hold."""

    def __init__(self, pages: int, recurrent: bool = False):
        self.recurrent, self.states = recurrent, {}  # by row, and by -1 - checkpoint
        self.pages = [[-1] * SIZE for _ in range(pages)]
        self.rows: dict[int, list[int]] = {}  # tokens stored, the newest one, how many may be drawn
        self.tokens_read = 0

    def store(self, table, at, token):
        self.pages[table[at // SIZE]][at % SIZE] = token

    def draw(self, row, table):
        stored, _, left = self.rows[row]
        token = next_token([self.pages[table[i // SIZE]][i % SIZE] for i in range(stored)])
        self.rows[row] = [stored, token, 0 if token == STOP else left - 1]
        return token

    def save(self, saves):
        while saves:
            one = saves.pop(0)
            if one.row in self.states:
                self.states[-1 - one.checkpoint] = list(self.states[one.row])

    def run(self, plan):
        out = []
        for read in plan.reads[0]:
            tokens = [*read.request.prompt, *read.request.said]
            if read.copy:
                self.pages[read.copy[1]] = list(self.pages[read.copy[0]])
            for at in range(read.first, read.first + read.count):
                self.store(read.table, at, tokens[at])
            self.tokens_read += read.count
            if self.recurrent:
                begins = read.row if read.begins is None else -1 - read.begins
                state = [*(self.states[begins] if read.first else []), *tokens[read.first :][: read.count]]
                assert state == tokens[: read.first + read.count]
                self.states[read.row] = state
                if read.saves is not None:
                    self.states[-1 - read.saves] = state
            if read.draws:
                self.rows[read.row] = [len(tokens), -1, read.request.max_new_tokens - len(read.request.said)]
                out.append((read.request, [self.draw(read.row, read.table)]))
        for request in plan.writes[0]:
            drawn = []
            for _ in range(plan.steps):
                stored, newest, left = self.rows[request.row]
                if left:
                    self.store(request.table, stored, newest)
                    self.states[request.row] = [*self.states.get(request.row, []), newest]
                    self.rows[request.row][0] += 1
                    drawn.append(self.draw(request.row, request.table))
            out.append((request, drawn))
        return out


def run(scheduler: Scheduler, device: Device, arrivals=(), cancel=lambda request: False) -> int:
    """Until nothing is left, results a plan late, as an engine has them. Returns the plans made."""
    flying, arrivals, plans = deque(), deque(arrivals), 0
    while True:
        for _ in range(min(len(arrivals), 3)):
            scheduler.add(arrivals.popleft())
        plan = scheduler.plan()
        if plan is not None:
            plans += 1
            device.save(scheduler.saves)
            assert plan.rows >= max(map(len, plan.writes)) and plan.steps <= 16
            reads = sum(read.count for read in plan.reads[0])
            assert len(plan.reads[0]) <= plan.shape[0] and reads <= plan.shape[0] * plan.shape[1]
            flying.append(device.run(plan))
        elif not flying:
            assert not scheduler.waiting and not arrivals, "requests wait for ever"
            return plans
        if flying and (plan is None or len(flying) > 1):
            for request, drawn in flying.popleft():
                request.flights.popleft()
                if request.ended:
                    continue
                request.said += drawn
                over = request.said[-1:] == [STOP] or len(request.said) == request.max_new_tokens
                if over or cancel(request):
                    tokens = len(request.prompt) + len(request.said)
                    scheduler.end(request, read=tokens - 1 if over else None)


def assert_all_is_back(scheduler: Scheduler) -> None:
    (device,) = scheduler.devices
    assert device.pages.available == device.pages.count and set(device.pages.holders) == {0}
    assert sorted(device.free_rows) == list(range(scheduler.limits.max_batch_size)) and not device.running


@pytest.mark.parametrize("reads_first", [False, True])
@pytest.mark.parametrize("reserve, checkpoints", [(False, None), (True, None), (False, 3)])
def test_a_thousand_requests_with_too_few_pages_say_what_each_says_alone(reserve, checkpoints, reads_first):
    rng = np.random.default_rng(0)
    beginnings = [rng.integers(1, 23, 30).tolist() for _ in range(4)]
    requests = []
    for _ in range(1000):
        shared = beginnings[rng.integers(4)][: rng.integers(0, 30)] if rng.random() < 0.7 else []
        prompt = [*shared, *rng.integers(1, 23, rng.integers(1, 30)).tolist()]
        reusable = [None, None, 0, len(prompt)][rng.integers(4)]
        new = int(rng.integers(1, 40))
        requests.append(Request(prompt, new, reusable, priority=int(rng.integers(2))))
    scheduler = Scheduler(limits(reserve=reserve, checkpoints=checkpoints))
    scheduler.reads_first = reads_first
    device = Device(24, recurrent=checkpoints is not None)
    cancelled = set(rng.integers(0, 1000, 50).tolist())
    run(scheduler, device, requests, lambda r: r.number in cancelled and len(r.said) > 3)
    for request in requests:
        want = alone(request.prompt, request.max_new_tokens)
        assert request.ended and request.said == want[: len(request.said)]
        assert len(request.said) == len(want) or request.number in cancelled
    assert_all_is_back(scheduler)
    assert (scheduler.preempted == 0) == reserve
    if checkpoints:
        kept = scheduler.devices[0].prefix.checkpoints
        assert kept.available == kept.count and set(kept.holders) == {0}
    if reserve:  # nothing is read twice, and beginnings are shared
        assert device.tokens_read < 0.95 * sum(len(r.prompt) for r in requests)


def test_the_longest_wait_for_a_next_token_is_one_chunk_of_prefill():
    """Tokens of prompts that the device works through between two draws of a row, whoever comes meanwhile;
    and while prompts are being read, a plan has one step."""
    rng = np.random.default_rng(0)
    scheduler, device = Scheduler(limits(pages=400, row_sizes=(1, 2, 4, 8), max_batch_size=8)), Device(400)
    scheduler.idle_steps = 5
    waited: dict[Request, int] = {}  # tokens, since it drew
    longest, flying = [], deque()
    for _ in range(400):
        if rng.random() < 0.4:
            length = int(rng.integers(1, 150))
            scheduler.add(Request(rng.integers(1, 23, length).tolist(), int(rng.integers(1, 40)), reusable=0))
        plan = scheduler.plan()
        if plan is not None:
            unread = any(r.read < r.to_read for r in scheduler.devices[0].running)
            assert plan.steps <= (1 if unread else 16)
            waited = {r: n + sum(read.count for read in plan.reads[0]) for r, n in waited.items()}
            longest += [waited[r] for r in plan.writes[0] if r in waited]
            waited |= dict.fromkeys([*plan.writes[0], *(r.request for r in plan.reads[0] if r.draws)], 0)
            flying.append(device.run(plan))
        if flying and (plan is None or len(flying) > 1):
            for request, drawn in flying.popleft():
                request.flights.popleft()
                request.said += drawn
                if request.said[-1:] == [STOP] or len(request.said) == request.max_new_tokens:
                    scheduler.end(request)
                    waited.pop(request, None)
    assert len(longest) > 300 and max(longest) == 32  # the largest shape
    assert max(waited.values()) <= 32  # and nobody waits still


def test_a_prefix_of_two_thousand_tokens_is_read_once():
    scheduler, device = Scheduler(limits(pages=1200)), Device(1200)
    shared = np.random.default_rng(0).integers(1, 23, 2000).tolist()
    run(scheduler, device, [Request([*shared, 5, 6], 4)])
    assert device.tokens_read == 2002
    second = Request([*shared, 7, 8, 9], 4)
    run(scheduler, device, [second])
    assert device.tokens_read == 2002 + 3
    assert second.said == alone(second.prompt, 4)


def test_a_recurrent_state_is_kept_where_prompts_part():
    """The first leaves one behind a chunk of 32 tokens; the second, which knows where they part, one there;
    the third, which reads its tail only, one behind its last full page."""
    scheduler, device = Scheduler(limits(pages=200, checkpoints=4)), Device(200, recurrent=True)
    shared = np.random.default_rng(0).integers(1, 23, 40).tolist()
    read = []
    for tail in ([5, 6, 7, 8, 9, 10], [11, 12], [13] * 5, [13] * 5):
        before = device.tokens_read
        request = Request([*shared, *tail], 3)
        run(scheduler, device, [request])
        assert request.said == alone(request.prompt, 3)
        read.append(device.tokens_read - before)
    assert read == [46, 10, 5, 1]


def test_who_is_cancelled_is_in_no_further_plan_and_its_pages_are_free_at_once():
    scheduler, device = Scheduler(limits()), Device(24)
    requests = [Request([n + 1] * 9, 30) for n in range(2)]
    for request in requests:
        scheduler.add(request)
    for _ in range(2):
        device.run(scheduler.plan())
    (pages,) = (d.pages for d in scheduler.devices)
    before = pages.available
    num_pages = len(requests[0].table)
    scheduler.end(requests[0])
    assert pages.available == before + num_pages > before
    assert scheduler.plan().writes == [[requests[1]]]


def test_speculation_never_runs_out_of_pages():
    """Bounds only: what is drawn lies between steps and steps * width."""
    scheduler = Scheduler(limits(width=8))
    request = Request(list(range(1, 9)), 40)
    scheduler.add(request)
    scheduler.plan()
    assert (request.stored, request.left) == (8 + 1 + 16 - 1, 40 - 1 - 16)
    scheduler.plan()
    assert len(request.table) * SIZE >= request.stored == 8 + 1 + 16 + 16 - 1 and request.left == 7


def test_guesses_for_constrained_rows_have_pages():
    """Those that are read after the newest token, whatever of them is drawn."""
    scheduler, width = Scheduler(limits(width=8, guess_width=4)), 4
    request = Request(list(range(1, 9)), 40, constrained=True)
    scheduler.add(request)
    drawn = 1
    while len(request.said) < 40:
        plan = scheduler.plan()
        assert plan.split and plan.draws == [[(request, request.row)]] and not any(plan.guesses)
        left = 40 - len(request.said)
        most = min(width, left) if request.said else 1  # nothing is guessed with the prompt
        assert [*request.flights] == [(1, most)]
        room = len(request.table) * SIZE - len(request.prompt) - len(request.said)
        if plan.writes[0]:
            assert room >= min(most + width - 1, left - 1)
        request.said += [1] * min(drawn, request.flights.popleft()[1])
        request.ready, drawn = True, drawn % width + 1


def test_the_page_that_has_been_idle_longest_is_taken_first():
    lost = []
    pages = Pages(3, lost.append)
    first, second, third = pages.take(3)
    for page in (second, first, third):
        pages.release(page, keep=True)
    pages.hold(second)  # it serves again
    pages.release(second, keep=True)
    assert pages.available == 3 and pages.take(2) == [first, third] and lost == [first, third]
    pages.hold(second)
    assert pages.available == 0


def test_what_a_prompt_shares_is_found_by_its_tokens():
    cache = PrefixCache(8, SIZE)
    tokens = list(range(1, 11))  # two pages and a half
    table = cache.pages.take(3)
    cache.insert(tokens[:8], table, ready=False)
    assert cache.match(tokens, 9) is None  # being computed: wait
    cache.insert(tokens, table, ready=True)
    assert cache.match([*tokens, 99], 10) == Match(table[:2], 10, table[2])
    assert cache.match([1, 2, 3, 9], 4) == Match([], 3, table[0])
    assert cache.match([2, *tokens], 10) == Match([], 0)
    assert cache.match([*tokens, 99], 10, "another's") == Match([], 0)
    other = cache.pages.take(3)
    cache.insert([*tokens[:4], 50, 51, 52, 53], other, ready=True)  # its first page is one that is known
    assert cache.match([*tokens[:4], 50, 51], 6) == Match([table[0]], 6, other[1])
    cache.release(table)
    cache.release(other)
    assert cache.pages.available == 8 and cache.pages.idle == 4
    cache.pages.take(8)  # all are written over
    assert cache.match(tokens, 9) == Match([], 0)
