"""Every policy of the scheduler, as tables of decisions.

A plan is written as text: "a[0:8] b[0:4] in 4x8, ab x2" reads a's tokens 0 to 8 and b's 0 to 4 in an array of
4 rows of 8 tokens, and then decodes a and b for 2 steps. "draw a, read ab" are halves of split steps. Pages
have 4 tokens. test_scheduler_tokens.py runs the plans.
"""

import itertools

import pytest

from bonsai_jax.engine.plans import Limits, Request
from bonsai_jax.engine.runner import ON_CPU
from bonsai_jax.engine.scheduler import Scheduler

SIZE = 4  # tokens of a page
SHAPES = [(1, 8), (1, 32), (4, 8)]
ONE, TOGETHER = {"shapes": [(1, 32)]}, {"shapes": [(4, 8)]}  # a prompt in each prefill, or up to four


def scheduler(devices: int = 1, **changed) -> Scheduler:
    """With every program compiled, so that sizes follow from the requests alone."""
    limits = {"max_batch_size": 4, "pages": 24, "page_size": SIZE, "row_sizes": (1, 2, 4), "shapes": SHAPES}
    made = Scheduler(Limits(**limits | {"prefill_cost": 8, "steps": 16} | changed), devices)
    made.compiled |= {*made.limits.row_sizes, *made.limits.shapes}
    made.compiled_split |= made.compiled
    return made


def prompt(name: str, tokens: int) -> list[int]:
    """Tokens that no other name has."""
    return [1000 * ord(name) + i for i in range(tokens)]


def add(s: Scheduler, **lengths) -> dict[str, Request]:
    """Requests by name, in order: (tokens of the prompt, new tokens, fields of Request)."""
    requests = {}
    for name, (tokens, new, *fields) in lengths.items():
        ids = prompt(name, tokens) if isinstance(tokens, int) else tokens
        requests[name] = Request(ids, new, **(fields[0] if fields else {}))
        s.add(requests[name])
    return requests


def plan(s: Scheduler, requests: dict[str, Request]) -> str:
    """The next plan as text; "" where there is none."""
    name = {request: name for name, request in requests.items()}.__getitem__
    made = s.plan()
    if made is None:
        return ""
    reads = [f"{name(r.request)}[{r.first}:{r.first + r.count}]" for r in itertools.chain(*made.reads)]
    writes = "".join(map(name, itertools.chain(*made.writes)))
    reading = [f"{' '.join(reads)} in {made.shape[0]}x{made.shape[1]}"] if reads else []
    draws = "".join(name(request) for request, _ in itertools.chain(*made.draws))
    drawing = [f"draw {draws}"] if draws else []
    decoding = [f"read {writes}" if made.split else f"{writes} x{made.steps}"] if writes else []
    return ", ".join(reading + drawing + decoding)


def draw(request: Request, *counts: int) -> None:
    """So many tokens of the oldest dispatches become known."""
    for count in counts:
        request.flights.popleft()
        request.said += [7] * count


def finish(s: Scheduler, request: Request) -> None:
    """All its draws become known, and it ends."""
    while request.flights:
        draw(request, request.flights[0][1])
    s.end(request)


# Order.


@pytest.mark.parametrize(
    ("priorities", "order"),
    [((0, 0, 0), "abc"), ((0, 1, 0), "bac"), ((0, 1, 1), "bca"), ((-1, 0, 1), "cba"), ((1, 0, 1), "acb")],
)
def test_requests_start_by_priority_then_arrival(priorities, order):
    """One row, and answers of one token: it is free for the next plan, before the token is known."""
    s = scheduler(max_batch_size=1, row_sizes=(1,))
    a, b, c = ({"priority": n} for n in priorities)
    requests = add(s, a=(5, 1, a), b=(5, 1, b), c=(5, 1, c))
    assert [plan(s, requests) for _ in range(4)] == [*(f"{name}[0:5] in 1x8" for name in order), ""]


@pytest.mark.parametrize(("priority", "reads"), [(0, "a[32:40] in 1x8"), (1, "b[0:6] in 1x8")])
def test_chunks_of_prompts_are_read_by_priority_then_arrival(priority, reads):
    s = scheduler(shapes=[(1, 8), (1, 32)])
    requests = add(s, a=(40, 1))
    assert plan(s, requests) == "a[0:32] in 1x32"
    requests |= add(s, b=(6, 1, {"priority": priority}))
    assert plan(s, requests) == reads


# Pages. A request starts with pages for its prompt.


@pytest.mark.parametrize(
    ("b", "c", "started"),
    [(8, 4, "abc"), (9, 4, "a"), (9, 1, "a"), (16, 1, "a")],  # a has 2 of 5 pages
)
def test_later_requests_do_not_overtake_one_that_needs_pages(b, c, started):
    s = scheduler(pages=5)
    requests = add(s, a=(8, 1), b=(b + 4 * (b > 8), 1), c=(c, 1))
    plan(s, requests)
    assert [name for name, r in requests.items() if r.row is not None] == [*started]
    assert s.waiting == [r for r in requests.values() if r.row is None]


@pytest.mark.parametrize(
    ("new", "pages", "starts"),
    [
        (1, 3, True),  # a's 8 tokens fill its 2 pages, and it needs no more
        (2, 3, False),  # it needs a third
        (40, 3, False),
        (2, 4, True),
        (40, 4, True),  # one page is left to it, however long its answer
    ],
)
def test_a_page_is_left_for_each_running_request_that_needs_more(new, pages, starts):
    s = scheduler(pages=pages, row_sizes=(4,))
    requests = add(s, a=(8, new), b=(3, 1))
    plan(s, requests)
    assert ((requests["b"].row is not None), s.preempted) == (starts, 0)


@pytest.mark.parametrize(("reserve", "pages"), [(False, 2), (True, 4)])
def test_with_reserve_a_request_starts_with_pages_for_its_answer(reserve, pages):
    """8 tokens of prompt and 8 new ones, the last of which is not stored: 15."""
    s = scheduler(reserve=reserve, shapes=[(1, 4)])
    (request,) = add(s, a=(8, 8)).values()
    s.plan()
    assert len(request.table) == pages


THREE = {"pages": 6, "row_sizes": (4,)}  # three prompts of one page, each with a long answer


def test_steps_are_halved_before_a_request_is_preempted():
    s = scheduler(**THREE)
    requests = add(s, a=(4, 40), b=(4, 40), c=(4, 40))
    assert plan(s, requests) == "a[0:4] b[0:4] c[0:4] in 4x8, abc x4"  # 16 would need 12 pages, 8 need 6
    assert s.preempted == 0 and s.devices[0].pages.available == 0


@pytest.mark.parametrize(
    ("priorities", "lost"), [((0, 0, 0), "c"), ((0, 0, 1), "b"), ((0, 1, 1), "a"), ((0, -1, 0), "b")]
)
def test_the_last_request_of_the_lowest_priority_is_preempted(priorities, lost):
    s = scheduler(**THREE)
    a, b, c = ({"priority": n} for n in priorities)
    requests = add(s, a=(4, 40, a), b=(4, 40, b), c=(4, 40, c))
    plan(s, requests)
    made = plan(s, requests)  # two pages come back, one for each of the others
    assert (set("abc") - set(made.split()[0]), s.preempted) == ({lost}, 1)
    assert s.waiting == [requests[lost]] and requests[lost].table == []


def test_a_preempted_request_waits_before_later_ones():
    s = scheduler(**THREE)
    requests = add(s, a=(4, 40), b=(4, 40), c=(4, 40), d=(4, 40))
    plan(s, requests)
    assert s.waiting == [requests["d"]]
    plan(s, requests)
    assert s.waiting == [requests["c"], requests["d"]]


def test_a_preempted_request_waits_for_its_own_tokens_and_then_reads_them():
    """Others start meanwhile."""
    s = scheduler(**THREE)
    requests = add(s, a=(4, 40), b=(4, 6), c=(4, 40))
    plan(s, requests), plan(s, requests)
    c = requests["c"]
    assert s.waiting == [c] and [*c.flights] == [(1, 1), (4, 4)]
    finish(s, requests["b"])
    requests |= add(s, d=(3, 1))
    assert "c" not in (made := plan(s, requests)) and made.startswith("d[0:3] in 1x8")
    draw(c, 1, 4)
    finish(s, requests["d"])
    finish(s, requests["a"])
    made = plan(s, requests)
    assert made.startswith("c[0:8] in 1x8") and c.to_read == 4 + 5


def test_a_request_that_is_alone_waits_for_pages_instead_of_being_preempted():
    """b has drawn its last token; its pages come back when it is known."""
    s = scheduler(pages=3, **TOGETHER)
    requests = add(s, b=(8, 1), a=(3, 9))
    assert plan(s, requests) == "b[0:8] a[0:3] in 4x8, a x1"
    assert (plan(s, requests), s.preempted) == ("", 0)
    finish(s, requests["b"])
    assert plan(s, requests) == "a x7"


# Steps.


@pytest.mark.parametrize(
    ("a", "b", "more", "steps"),
    [
        (30, 30, {}, 5),  # no request waits
        (3, 30, {}, 5),
        (3, 3, {}, 2),  # not more than can be drawn
        (30, 30, {"c": (4, 9)}, 16),  # c waits for one of two rows
        (13, 30, {"c": (4, 9)}, 12),  # until a's answer ends
        (3, 30, {"c": (4, 9)}, 4),
        (30, 30, {"c": (4, 9), "d": (4, 9)}, 16),
    ],
)
def test_steps_of_a_plan(a, b, more, steps):
    s = scheduler(max_batch_size=2, row_sizes=(2,), pages=100, steps=64, **TOGETHER)
    s.idle_steps = 5
    requests = add(s, a=(4, a), b=(4, b), **more)
    assert plan(s, requests) == f"a[0:4] b[0:4] in 4x8, ab x{steps}"


@pytest.mark.parametrize(
    ("width", "idle", "a", "b"),
    [
        (1, 5, (2, 2), (5, 5)),
        (8, 1, (1, 2), (1, 8)),  # speculation draws 1 to 8 tokens in a step
        (8, 5, (2, 2), (5, 16)),  # at most limits.steps in a plan
    ],
)
def test_bounds_of_the_tokens_that_a_plan_draws(width, idle, a, b):
    """a may draw 2 tokens more, b 30. Both have pages for the most that they may store."""
    s = scheduler(width=width, **TOGETHER)
    s.idle_steps = idle
    requests = add(s, a=(4, 3), b=(4, 31))
    s.plan()
    assert [requests[name].flights[-1] for name in "ab"] == [a, b]
    assert [len(requests[name].table) for name in "ab"] == [-(-(4 + most) // SIZE) for _, most in (a, b)]


def test_one_step_while_a_prompt_is_pending():
    s = scheduler(pages=100, shapes=[(1, 8)])
    requests = add(s, a=(4, 30), b=(24, 9))
    made = [plan(s, requests) for _ in range(4)]
    assert made == [
        "a[0:4] in 1x8, a x1",
        "b[0:8] in 1x8, a x1",
        "b[8:16] in 1x8, a x1",
        "b[16:24] in 1x8, ab x16",
    ]


def test_all_prompts_that_have_a_row_are_read_before_a_step():
    """In `generate`. c waits for a row; when it has one, b waits for its prompt, too."""
    s = scheduler(max_batch_size=2, row_sizes=(2,), pages=100, shapes=[(1, 8)])
    s.reads_first = True
    requests = add(s, a=(4, 5), b=(24, 30), c=(12, 9))
    made = [plan(s, requests) for _ in range(5)]
    assert made == [
        "a[0:4] in 1x8",
        "b[0:8] in 1x8",
        "b[8:16] in 1x8",
        "b[16:24] in 1x8, ab x4",
        "c[0:8] in 1x8",
    ]
    assert plan(s, requests) == "c[8:12] in 1x8, bc x16"


@pytest.mark.parametrize(
    ("reads_first", "both"),
    [
        (False, ["a[0:7] in 4x8, a x9", "b[6:7] c[6:7] in 4x8, bc x9"]),
        (True, ["a[0:7] in 4x8", "b[6:7] c[6:7] in 4x8, abc x9"]),
    ],
)
def test_a_prompt_that_waits_for_another_s_beginning_is_read_before_a_step(reads_first, both):
    s = scheduler(pages=100, **TOGETHER)
    s.reads_first = reads_first
    same = prompt("a", 6)
    requests = add(s, a=([*same, 1], 10), b=([*same, 2], 10), c=([*same, 3], 10))
    assert [plan(s, requests), plan(s, requests)] == both


@pytest.mark.parametrize(
    ("idle", "steps", "seconds", "wait", "after"),
    [
        (4, 4, 0.02, 0.1, 8),  # 10 would fit; at most twice as many as before
        (8, 8, 0.04, 0.1, 10),  # 5 ms a step: half of the wait is 10 steps
        (16, 16, 0.32, 0.1, 2),
        (16, 16, 8.0, 0.1, 1),  # not fewer than one
        (16, 16, 0.0, 0.1, 16),  # not more than limits.steps
        (12, 12, 0.06, 0.2, 16),
    ],
)
def test_steps_take_half_of_what_a_request_may_wait(idle, steps, seconds, wait, after):
    s = scheduler()
    s.idle_steps = idle
    s.measured(steps, seconds, wait)
    assert s.idle_steps == after


# Programs.


@pytest.mark.parametrize(
    ("lengths", "cost", "compiled", "shape"),
    [
        ((8,), 8, SHAPES, (1, 8)),
        ((9,), 8, SHAPES, (1, 8)),  # 8 tokens at the cost of 16; 9 at the cost of 40
        ((28,), 8, SHAPES, (1, 32)),  # a little padding costs less than more prefills
        ((28,), 0, SHAPES, (1, 8)),
        ((8, 8), 8, SHAPES, (1, 8)),
        ((8, 8, 8), 8, SHAPES, (4, 8)),
        ((8, 8, 8, 28), 8, SHAPES, (4, 8)),
        ((28, 8, 8), 8, SHAPES, (1, 32)),
        ((2, 28), 8, SHAPES, (4, 8)),  # the oldest is read too, and so no chunk of 32
        ((8,), 8, [], (1, 32)),  # nothing is compiled: of each length only the shape with the most rows
        ((8, 8, 8), 8, [], (4, 8)),
        ((8,), 8, [(4, 8)], (1, 32)),
        ((8,), 8, [(1, 8)], (1, 8)),
        ((8,), 0, [(4, 8)], (1, 8)),  # 4 times the cost of the best shape: compile it
    ],
)
def test_shapes_of_prefill(lengths, cost, compiled, shape):
    s = scheduler(prefill_cost=cost, pages=100)
    s.compiled = set(compiled)
    add(s, **{name: (n, 1) for name, n in zip("abcd", lengths, strict=False)})
    assert s.plan().shape == shape and s.compiled == {*compiled, shape}


@pytest.mark.parametrize(
    ("prompts", "changed", "prefills"),
    [
        (15, {}, 2),
        (15, ON_CPU, 4),
        (9, ON_CPU, 4),
        (6, ON_CPU, 2),
        (5, ON_CPU, 10),
        (2, {"prefill_cost": 1}, 4),
    ],
)
def test_prompts_are_read_together_where_padding_costs_less_than_more_prefills(prompts, changed, prefills):
    """64 tokens each, in chunks of 32: up to 16 in one prefill on a GPU, and 8 on a CPU."""
    limits = Limits.for_engine(32, 500, prefill_tokens=512, **changed)
    s = Scheduler(limits)
    s.compiled |= {*limits.row_sizes, *limits.shapes}
    requests = add(s, **{chr(ord("a") + i): (64, 100) for i in range(prompts)})
    count = 0
    while any(r.read < len(r.prompt) for r in requests.values()):
        count += any(s.plan().reads)
    assert count == prefills


@pytest.mark.parametrize(
    ("prompts", "shapes"),
    [
        (1, [(1, 128)]),
        (2, [(1, 128)] * 2),
        (3, [(4, 128)]),
        (5, [(4, 128), (1, 128)]),
        (8, [(4, 128)] * 2),
        (16, [(16, 128)]),
        (20, [(16, 128), (4, 128)]),
    ],
)
def test_short_prompts_are_read_four_or_sixteen_at_a_time_on_a_gpu(prompts, shapes):
    limits = Limits.for_engine(32, 500)
    s = Scheduler(limits)
    s.compiled |= {*limits.row_sizes, *limits.shapes}
    add(s, **{chr(ord("A") + i): (100, 100) for i in range(prompts)})
    assert [s.plan().shape for _ in shapes] == shapes
    assert not any(s.plan().reads)


def test_a_shape_that_a_padded_one_has_stood_in_for_is_compiled_in_the_end():
    s = scheduler()
    s.compiled, answers = set(), iter([None, (1, 32), (1, 8)])
    s.stand_in = lambda shape, others, cost: next(answers)
    for shape in ((1, 32), (1, 32), (1, 8)):
        add(s, a=(8, 1))
        assert s.plan().shape == shape


@pytest.mark.parametrize(
    ("first", "reads"), [("vectors", "a[0:6] in 1x8"), ("tokens", "b[0:6] c[0:6] in 4x8")]
)
def test_vectors_and_tokens_are_not_read_together(first, reads):
    s = scheduler(shapes=[(4, 8)] if first == "tokens" else SHAPES)
    vectors = {"vectors": True, "reusable": 0, "priority": 1 if first == "vectors" else -1}
    requests = add(s, a=(6, 1, vectors), b=(6, 1), c=(6, 1))
    assert plan(s, requests) == reads


@pytest.mark.parametrize(
    ("writers", "compiled", "rows"),
    [
        (1, [1, 2, 4], 1),
        (2, [1, 2, 4], 2),
        (3, [1, 2, 4], 4),
        (1, [2], 2),
        (3, [2], 4),
        (1, [], 4),
        (0, [1], 0),
    ],
)
def test_rows_of_decode(writers, compiled, rows):
    """The smallest program that is compiled and large enough; else the largest is compiled."""
    s = scheduler(**TOGETHER)
    s.compiled = {*compiled}
    add(s, **{name: (4, 9 if i < writers else 1) for i, name in enumerate("abc"[: max(writers, 1)])})
    assert s.plan().rows == rows and s.compiled == {*compiled, (4, 8), *([rows] if rows else [])}


# Prefixes.

LONG = prompt("s", 12)  # three pages


@pytest.mark.parametrize(
    ("tokens", "reusable", "first"),
    [
        ([*LONG, 1, 2], None, 12),
        (LONG, None, 11),  # the last token is read: it draws the next
        ([*LONG[:10], 1, 2], None, 10),  # two pages, and two tokens of a copy of the third
        ([*LONG, 1, 2], 12, 12),
        ([*LONG, 1, 2], 9, 9),
        ([*LONG, 1, 2], 0, 0),
        ([1, *LONG], None, 0),
        ([*LONG, 7, 7, 7, 1], None, 15),  # the answer is known, too
    ],
)
def test_tokens_that_are_known_are_not_read(tokens, reusable, first):
    s = scheduler(**ONE)
    requests = add(s, a=(LONG, 4))
    plan(s, requests)
    finish(s, requests["a"])
    requests |= add(s, b=(tokens, 1, {"reusable": reusable}))
    assert plan(s, requests).startswith(f"b[{first}:{len(tokens)}]")


def test_a_request_waits_while_another_computes_its_beginning():
    """Others overtake it."""
    s = scheduler(shapes=[(1, 8)])
    requests = add(s, a=([*LONG, 1], 1), b=([*LONG, 2], 1), c=(5, 1))
    assert plan(s, requests) == "a[0:8] in 1x8"
    assert s.waiting == [requests["b"]] and requests["c"].row is not None
    made = [plan(s, requests) for _ in range(4)]
    assert made == ["a[8:13] in 1x8", "b[12:13] in 1x8", "c[0:5] in 1x8", ""]


def test_a_request_that_is_cancelled_while_it_waits_does_not_start():
    s = scheduler(max_batch_size=1, row_sizes=(1,))
    requests = add(s, a=(5, 1), b=(5, 1), c=(5, 1))
    plan(s, requests)
    s.end(requests["b"])
    assert [plan(s, requests), plan(s, requests)] == ["c[0:5] in 1x8", ""]


def test_cancelling_many_waiting_requests_takes_no_time():
    """Not each of them a walk over all others: 20,000 stalled an engine for seconds."""
    s = scheduler()
    requests = [Request([1], 1, priority=i % 3) for i in range(20_000)]
    for request in requests:
        s.add(request)
    looked = []
    order, Counted = Request.order, type("Counted", (Request,), {})
    Counted.order = property(lambda self: looked.append(1) or order.fget(self))
    for request in requests:
        request.__class__ = Counted
    for request in requests[5000:15_000]:
        s.end(request)
    assert len(looked) < 10_000 * 20 and len(s.waiting) == 10_000
    assert set(s.waiting) == {*requests[:5000], *requests[15_000:]}
    assert s.waiting == sorted(s.waiting, key=order.fget)


def test_a_cancelled_request_leaves_only_what_it_has_computed():
    s = scheduler(shapes=[(1, 8)])
    requests = add(s, a=(LONG, 1))
    plan(s, requests)
    s.end(requests["a"])
    requests |= add(s, b=([*LONG, 1], 1))
    assert plan(s, requests) == "b[8:13] in 1x8"


def test_without_a_page_for_a_copy_full_pages_are_shared():
    s = scheduler(pages=2)
    requests = add(s, a=(LONG[:8], 1))
    plan(s, requests)
    finish(s, requests["a"])
    requests |= add(s, b=(LONG[:8], 1))
    assert plan(s, requests) == "b[4:8] in 1x8"


def test_the_end_of_a_prefix_is_overwritten_before_its_beginning():
    s = scheduler(pages=4, **ONE)
    requests = add(s, a=([*LONG, 1, 2, 3, 4], 1))
    plan(s, requests)
    finish(s, requests["a"])
    requests |= add(s, b=(4, 1))
    plan(s, requests)
    finish(s, requests["b"])
    requests |= add(s, c=([*LONG, 9], 1))
    assert plan(s, requests) == "c[12:13] in 1x32"


@pytest.mark.parametrize(
    ("tokens", "device"),
    [
        ([*LONG, 1], 0),  # it knows the beginning
        ([*LONG[:6], 1], 0),
        (prompt("x", 13), 1),  # it has more pages
    ],
)
def test_a_request_goes_to_the_device_that_knows_more_of_it_and_else_has_more_pages(tokens, device):
    s = scheduler(devices=2, **ONE)
    requests = add(s, a=(LONG, 30))
    plan(s, requests)
    assert requests["a"].device == 0
    requests |= add(s, b=(tokens, 1))
    plan(s, requests)
    assert requests["b"].device == device


# Recurrent states: a chunk ends where one is to be saved.


@pytest.mark.parametrize(
    ("tokens", "reads"),
    [
        (prompt("x", 14), ["b[0:12]", "b[12:14]"]),  # the last full page before the last token
        (prompt("x", 12), ["b[0:8]", "b[8:12]"]),
        (prompt("x", 4), ["b[0:4]"]),
        ([*LONG[:8], *prompt("x", 7)], ["b[0:8]", "b[8:12]", "b[12:15]"]),  # where it parts from a
        ([*LONG, 1, 2], ["b[12:14]"]),  # a saved a state there
        ([*LONG, *LONG], ["b[12:20]", "b[20:24]"]),
    ],
)
def test_chunks_end_where_states_are_saved(tokens, reads):
    s = scheduler(checkpoints=4, pages=100, **ONE)
    requests = add(s, a=([*LONG, 5, 6, 7], 1))
    assert [plan(s, requests).split()[0] for _ in range(2)] == ["a[0:12]", "a[12:15]"]
    finish(s, requests["a"])
    requests |= add(s, b=(tokens, 1))
    made = [read for _ in range(4) if (read := s.plan()) is not None]
    chunks = [read for one in made for read in one.reads[0]]
    assert [f"b[{r.first}:{r.first + r.count}]" for r in chunks] == reads
    assert (chunks[0].begins is None) == (chunks[0].first == 0)
    saved = [r.first + r.count for r in chunks if r.saves is not None]
    assert saved == [r.first + r.count for r in chunks if (r.first + r.count) % SIZE == 0 and not r.draws]


@pytest.mark.parametrize(("checkpoints", "first"), [(1, 0), (2, 12)])
def test_the_least_recently_used_checkpoint_is_overwritten(checkpoints, first):
    s = scheduler(checkpoints=checkpoints, pages=100)
    requests = add(s, a=([*LONG, 1], 1), b=(prompt("x", 9), 1))
    for name in "ab":
        while requests[name].read < max(requests[name].to_read, 1):
            plan(s, requests)
        finish(s, requests[name])
    requests |= add(s, c=([*LONG, 2], 1))
    assert s.plan().reads[0][0].first == first


# Split steps, while a request has a constraint.

BOUND = {"constrained": True}


def test_a_request_draws_when_its_mask_is_ready_and_others_go_on():
    s = scheduler(**TOGETHER)
    requests = add(s, a=(4, 9, BOUND), b=(4, 9))
    a, b = requests.values()
    assert plan(s, requests) == "a[0:4] b[0:4] in 4x8, draw ab, read ab"
    draw(a, 1)
    draw(b, 1)
    assert plan(s, requests) == "draw b, read b"  # a's token is read, and its mask is not there
    draw(b, 1)
    a.ready = True
    assert plan(s, requests) == "draw ab, read ab" and not a.ready and b.ready


def test_rows_enter_and_leave_split_steps_where_they_are():
    """a has drawn the token that it reads first; and draws first what it has read."""
    s = scheduler(steps=2, **TOGETHER)
    requests = add(s, a=(4, 9))
    assert plan(s, requests) == "a[0:4] in 4x8, a x2"
    requests |= add(s, b=(4, 9, BOUND))
    assert plan(s, requests) == "b[0:4] in 4x8, draw b, read ab"
    s.end(requests["b"])
    assert plan(s, requests) == "draw a, a x2"
    assert list(requests["a"].flights) == [(1, 1), (2, 2), (1, 1), (2, 2)]
    assert plan(s, requests) == "a x2"


def test_forced_tokens_are_read_in_one_chunk_where_pages_allow():
    s = scheduler(pages=4)
    requests = add(s, a=(5, 11, BOUND))
    (a,) = requests.values()
    assert plan(s, requests) == "a[0:5] in 1x8, draw a, read a"
    draw(a, 1)
    assert not s.force(a, [1, 2, 3]) and not s.force(a, [1] * 11) and a.said == [7]  # few; more than 4 pages
    assert s.force(a, [1, 2, 3, 4]) and a.said == [7, 1, 2, 3, 4] and len(a.table) == 3
    a.ready = True
    assert plan(s, requests) == "a[6:10] in 1x8, draw a, read a"


def test_the_last_draw_reads_nothing():
    s = scheduler()
    requests = add(s, a=(4, 2, BOUND))
    (a,) = requests.values()
    assert plan(s, requests) == "a[0:4] in 1x8, draw a, read a"
    draw(a, 1)
    a.ready = True
    assert plan(s, requests) == "draw a"
    finish(s, a)
    assert plan(s, requests) == "" and s.constrained == 0
    assert s.devices[0].pages.available == 24 and len(s.devices[0].free_rows) == 4
