"""Engine: answers in a crowd are the answers alone, whatever is cancelled, stopped, pre-empted or shared."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.decoding import chain, jitted
from bonsai_jax.engine import options, stored
from bonsai_jax.engine import rows as on_device
from bonsai_jax.engine.calls import Calls
from bonsai_jax.engine.delivery import Delivery
from bonsai_jax.engine.scheduler import Scheduler
from bonsai_jax.weights import memory
from checkpoints import open_checkpoint
from tests.bonsai_jax.test_speculation import HYBRID, two_layers
from tests.bonsai_jax.tokens import assert_same

GREEDY = bj.SamplingParams(temperature=0.0)
MOST = 24  # new tokens
# One for all but a few, so that they have the same four executables: pages for two of the longest answers.
SHAPE = {"max_batch_size": 4, "context": 96, "prefill_tokens": 32, "pages": 12}
OF_HYBRIDS = {"max_batch_size": 2, "context": 96, "prefill_tokens": 32, "pages": 7, "logprobs": 0}


@functools.cache
def tiny(source: str = "synth:tiny-llama:q8_0") -> bj.Model:
    run = bj.RunConfig(page_size=16, cache_dtype="float32", activation_bits=16)
    return bj.from_checkpoint(two_layers(open_checkpoint(source)), run)


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


MADE = (
    "backend_compile_duration",
    stored.LOADED,
)  # events of a program that was compiled or read from a file


@pytest.fixture(scope="module")
def warmed():
    """An engine, and the threads that compiled for it."""
    threads = []
    listener = lambda event, s, **_: threads.append(threading.current_thread().name * event.endswith(MADE))  # noqa: E731
    with bj.Engine(tiny(), **SHAPE) as engine:
        jax.monitoring.register_event_duration_secs_listener(listener)
        try:
            engine.warmup()
        finally:
            jax.monitoring.unregister_event_duration_listener(listener)
        yield engine, threads


@pytest.fixture(scope="module")
def engine(warmed):
    return warmed[0]


def alone(prompts, params, model: bj.Model | None = None) -> list[list[int]]:
    """MOST tokens of each, by the pure function, which knows nothing of engines."""
    model, rows = model or tiny(), 8  # one program for all tests
    outputs = []
    for first in range(0, len(prompts), rows):
        some = [*prompts[first : first + rows], *[[1]] * rows][:rows]
        sampling = [*params[first : first + rows], *[GREEDY] * rows][:rows]
        tokens = np.zeros((rows, 64), np.int32)
        for row, ids in zip(tokens, some, strict=True):
            row[: len(ids)] = ids
        state = bj.new_state(model, rows, 96, sampling, MOST, ignore_eos=True)
        lengths = jnp.array(list(map(len, some)), jnp.int32)
        drawn = jitted.generate_tokens(model.params, state, tokens, lengths, model.config, size=MOST)
        outputs += np.asarray(drawn.tokens).tolist()
    return outputs[: len(prompts)]


def said(tokens: list[int]) -> str:
    """Their text, as far as its characters are whole."""
    detokenizer = tiny().tokenizer.detokenizer(at_start=False)
    return "".join(map(detokenizer.push, tokens))


def assert_all_pages_are_back(engine: bj.Engine) -> None:
    """Free or idle, and every row."""
    for _ in range(200):
        (device,) = engine._loop.scheduler.devices
        if not device.running and device.pages.available == device.pages.count:
            break
        time.sleep(0.02)
    assert not device.running and not engine._loop.answers
    assert device.pages.available == device.pages.count and set(device.pages.holders) == {0}
    assert sorted(device.free_rows) == list(range(engine.options.max_batch_size))


def soak(engine: bj.Engine, count: int, seed: int) -> None:
    """Random requests of which each must end as it would alone; the first four outgrow the pages together."""
    rng = np.random.default_rng(seed)
    shared = prompt(40, 1000)  # what a third of the prompts begin with
    prompts, params, new, stops = [], [], [], []
    for i in range(count):
        own = prompt(int(rng.integers(1, 60)), seed + i)
        prompts.append([*shared[: rng.integers(10, 40)], *own][:60] if rng.random() < 0.3 else own)
        params.append(dataclasses.replace(GREEDY, temperature=float(i % 2), seed=i % 7))
        if i % 5 == 0:  # what penalties remember must survive pre-emption
            params[-1] = dataclasses.replace(params[-1], repetition_penalty=1.2, frequency_penalty=0.3)
        new.append(int(rng.integers(1, MOST + 1)))
        if i < 4:
            prompts[-1], new[-1] = prompt(28, seed + i), MOST
    free = alone(prompts, params)
    cancelled = rng.random(count) < 0.1
    handles = []
    together = contextlib.ExitStack()
    together.enter_context(engine._changed)  # the engine waits until the first four are there
    for i in range(count):
        text = said(free[i][: new[i]])
        at = int(rng.integers(0, len(text) + 1))
        stops.append(text[at : at + 3] if rng.random() < 0.2 else "")
        handles.append(
            engine.submit(
                prompts[i],
                params[i],
                max_new_tokens=new[i],
                stop=[stops[i]] if stops[i] else (),
                ignore_eos=True,
                priority=int(rng.integers(0, 2)),
            )
        )
        if i == 3:
            together.close()
        if cancelled[i]:
            threading.Timer(float(rng.random()) * 0.2, handles[-1].cancel).start()
    for i, handle in enumerate(handles):
        got = handle.result(timeout_s=300)
        assert got.tokens == free[i][: len(got.tokens)], i
        whole = said(free[i][: new[i]])
        if got.finish_reason == "cancelled":
            assert cancelled[i]
        elif stops[i]:
            assert got.finish_reason == "stop" and got.text == whole[: whole.find(stops[i])]
        else:
            assert got.finish_reason == "length" and len(got.tokens) == new[i]
    assert_all_pages_are_back(engine)


def test_a_crowd_says_what_each_says_alone(engine):
    """With pages for half of the rows, after a warm-up that leaves nothing to be compiled."""
    alone([[1]], [GREEDY])
    compiled, before = [], engine._loop.scheduler.preempted
    listener = lambda event, seconds, **_: compiled.append(event) if "backend_compile" in event else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        soak(engine, 60, seed=1)
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert not compiled
    assert engine._loop.scheduler.preempted > before


@pytest.mark.slow
def test_two_thousand_requests(engine):
    import resource

    soak(engine, 200, seed=2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    soak(engine, 2000, seed=3)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


def test_the_second_of_two_with_one_beginning_reads_its_tail_only(engine, monkeypatch):
    beginning = prompt(50, 7)
    prompts = [[*beginning, *prompt(9, 8)], [*beginning, *prompt(5, 9)]]
    want = alone(prompts, [GREEDY, GREEDY])
    read = []
    prefill = Calls.prefill

    def noted(self, reads, *rest):
        read.extend((r.first, r.count, r.copy is not None) for of in reads for r in of)
        return prefill(self, reads, *rest)

    monkeypatch.setattr(Calls, "prefill", noted)
    outputs = [engine.submit(ids, GREEDY, max_new_tokens=MOST, ignore_eos=True).result(60) for ids in prompts]
    assert_same([o.tokens for o in outputs], want)
    # 3 full pages shared; 2 tokens of the fourth copied with their page, which its owner had written on
    assert [r for r in read if r[0] >= 48] == [(50, 5, True)] and read[0][0] == 0
    assert sum(count for _, count, _ in read) == 59 + 5
    again = engine.submit(prompts[0], GREEDY, max_new_tokens=MOST, ignore_eos=True).result(60)
    assert again.tokens == want[0] and read[-1][:2] == (58, 1)


def test_only_draws_at_the_end_of_a_prompt_are_counted(engine):
    """A prompt that is read in two parts is drawn from after each. Here a token that counts is likelier."""
    prompts = [prompt(60, 70 + i) for i in range(4)]
    again = dataclasses.replace(GREEDY, frequency_penalty=-2.0)
    handles = [engine.submit(ids, again, max_new_tokens=MOST, ignore_eos=True) for ids in prompts]
    assert [h.result(60).tokens for h in handles] == alone(prompts, [again] * 4)


def test_a_long_prefix_is_computed_once():
    """In several prefills, which end within a page."""
    shared = prompt(500, 60)
    first, second = [*shared, *prompt(7, 61)], [*shared, *prompt(5, 62)]
    options = {"max_new_tokens": 8, "ignore_eos": True}
    outputs = []
    for prompts in ([second], [first, second]):  # alone, and behind the other
        with bj.Engine(tiny(), max_batch_size=1, context=528, prefill_tokens=128) as engine:
            outputs.append([engine.submit(ids, GREEDY, **options).result(200) for ids in prompts])
    (want,), (before, got) = outputs
    assert (want.cached_tokens, before.cached_tokens, got.cached_tokens) == (0, 0, 500)
    assert got.tokens == want.tokens and got.text == want.text != before.text


@pytest.mark.parametrize("model", [tiny, lambda: tiny(HYBRID)])
def test_owners_share_with_themselves_alone(model):
    """Pages, and recurrent states."""
    ids, cached, tokens = prompt(70, 63), [], []
    options = {"max_new_tokens": 4, "ignore_eos": True}
    with bj.Engine(model(), max_batch_size=2, context=128) as engine:
        for owner in ("ann", "bob", "ann", "bob", ""):
            output = engine.submit(ids, GREEDY, **options, owner=owner).result(200)
            cached.append(output.cached_tokens)
            tokens.append(output.tokens)
        with pytest.raises(TypeError, match="owner"):
            engine.submit(ids, GREEDY, owner=3)
        assert_all_pages_are_back(engine)
    assert cached[0] == cached[1] == cached[4] == 0 < cached[2] == cached[3]
    assert all(other == tokens[0] for other in tokens)


def test_a_recurrent_state_survives_preemption_and_is_shared_at_page_borders():
    """Too few pages for two rows; what they share ends behind two pages."""
    shared = prompt(40, 70)
    prompts = [[*shared, *prompt(4 + i, 71 + i)] for i in range(6)]
    want = alone(prompts, [GREEDY] * 6, tiny(HYBRID))
    with bj.Engine(tiny(HYBRID), **OF_HYBRIDS) as engine:
        options = {"max_new_tokens": MOST, "ignore_eos": True, "logprobs": 0}
        handles = [engine.submit(ids, GREEDY, **options) for ids in prompts]
        outputs = [handle.result(300) for handle in handles]
        assert_same([output.tokens for output in outputs], want)
        assert engine._loop.scheduler.preempted > 0
        assert outputs[-1].cached_tokens == 32
        assert_all_pages_are_back(engine)


def each_decode(engine, monkeypatch, run):
    """Calls run(program, *arguments) in place of each decode program."""
    programs = engine._loop.runner.programs
    get = programs.get

    def patched(call):
        program = get(call)
        return functools.partial(run, program) if call.function is on_device.decode_rows else program

    monkeypatch.setattr(programs, "get", patched)


def test_the_next_dispatch_is_asked_for_while_one_is_running(engine, monkeypatch):
    """On GPUs of a mesh a dispatch returns when its steps are nearly over. Here it returns when the next
    plan is made; and the first ones are short, as nobody knows how long a step takes."""
    plan, planned, steps, late = Scheduler.plan, [], [], []

    def counted(self):
        planned.append(None)
        return plan(self)

    def returning_late(decode, params, pool, columns):
        steps.append(int(columns[0, 1]))
        until = time.monotonic() + 60
        while len(planned) <= len(steps) and time.monotonic() < until and not late:
            time.sleep(0.001)
        late.extend([len(steps)] if len(planned) <= len(steps) else [])
        return decode(params, pool, columns)

    engine._loop.scheduler.idle_steps = engine._loop._empty_scheduler().idle_steps  # as if it were new
    monkeypatch.setattr(Scheduler, "plan", counted)
    each_decode(engine, monkeypatch, returning_late)
    ids = prompt(10, 41)
    want = alone([ids], [GREEDY])
    assert_same([engine.submit(ids, GREEDY, max_new_tokens=MOST, ignore_eos=True).result(300).tokens], want)
    assert not late and len(steps) > 3
    assert steps[0] == 1 and all(b <= 2 * a for a, b in itertools.pairwise(steps))


def test_a_warmup_compiles_side_by_side(warmed):
    engine, threads = warmed
    compiling = [name for name in threads if name.startswith("bonsai-jax compile")]
    limits = engine._loop.runner.limits
    assert len(compiling) == len(limits.row_sizes) + len(limits.shapes) + 1  # and `note`
    assert len(set(compiling)) > 1 or os.cpu_count() == 1


def test_a_first_token_does_not_wait_for_the_steps_behind_it(engine, monkeypatch):
    first_read, late = threading.Event(), []

    def waiting(decode, *arguments):
        late.append(not first_read.wait(60))
        return decode(*arguments)

    each_decode(engine, monkeypatch, waiting)
    handle = engine.submit(prompt(10, 42), GREEDY, max_new_tokens=MOST, ignore_eos=True)
    pieces = iter(handle)  # kept, because a reader that leaves would cancel
    assert len(next(pieces).tokens) == 1
    first_read.set()
    assert len(handle.result(300).tokens) == MOST and late and not any(late)


def test_text_is_made_when_the_next_dispatch_has_begun(engine, monkeypatch):
    """The thread that dispatches competes for the GIL with the one that reads. It needs 20 ms here."""
    thread, begun, read = engine._loop.runner._thread, [], []
    submit, give = thread.submit, Delivery._give

    def slow(run):
        def later():
            time.sleep(0.02)
            begun.append(None)
            return run()

        return submit(later)

    def noted(self, drawn):
        read.append((len(begun), bool(engine._loop._flying)))
        return give(self, drawn)

    monkeypatch.setattr(thread, "submit", slow)
    monkeypatch.setattr(Delivery, "_give", noted)
    engine.submit(prompt(10, 43), GREEDY, max_new_tokens=80, ignore_eos=True).result(300)
    after = [count > i + 1 for i, (count, more) in enumerate(read) if more]
    assert len(after) > 2 and all(after)


def test_answers_of_one_prompt_have_seeds_of_their_own():
    ids, hot = prompt(40, 11), bj.SamplingParams(temperature=1.0, seed=3)
    want = alone([ids] * 3, [dataclasses.replace(hot, seed=3 + i) for i in range(3)])
    with bj.Engine(tiny(), logprobs=2, **SHAPE) as engine:
        handle = engine.submit(ids, hot, max_new_tokens=MOST, ignore_eos=True, n=3, logprobs=1)
        outputs = handle.results(60)
        with pytest.raises(ValueError, match=r"logprobs is 3, and the engine's 2; give Engine\(logprobs=\)"):
            engine.submit(ids, max_new_tokens=1, logprobs=3)
    assert_same([o.tokens for o in outputs], want)
    scores = np.asarray(jax.nn.log_softmax(bj.logits(tiny(), [*ids, *want[1]])[39:-1]))
    np.testing.assert_allclose(outputs[1].logprobs.token, scores[np.arange(MOST), want[1]], atol=1e-4)
    np.testing.assert_allclose(outputs[1].logprobs.top[:, 0], scores.max(1), atol=1e-4)
    assert outputs[1].logprobs.ids.shape == (MOST, 1)
    assert {piece.index for piece in handle} == {0, 1, 2}
    with pytest.raises(ValueError, match=r"3 answers were asked for: results\(\)"):
        handle.result()


def test_threads_and_asyncio_at_once(engine):
    prompts = [prompt(5 + i, 20 + i) for i in range(8)]
    want = alone(prompts, [GREEDY] * 8)
    options = {"max_new_tokens": MOST, "ignore_eos": True}

    async def streamed(ids):
        return [t async for piece in engine.submit(ids, GREEDY, **options) for t in piece.tokens]

    async def waited(ids):
        return (await engine.submit(ids, GREEDY, **options)).tokens

    async def both():
        return await asyncio.gather(*map(streamed, prompts[:2]), *map(waited, prompts[2:4]))

    def in_thread(ids):
        return [t for piece in engine.submit(ids, GREEDY, **options) for t in piece.tokens]

    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(lambda: asyncio.run(both()))
        rest = list(pool.map(in_thread, prompts[4:]))
    assert_same([*first.result(), *rest], want)


def test_cancelling_frees_pages_and_an_idle_engine_uses_no_cpu(engine):
    handle = engine.submit(prompt(20, 30), GREEDY, max_new_tokens=76, ignore_eos=True)
    next(iter(handle))
    handle.cancel()
    output = handle.result(10)
    assert output.finish_reason == "cancelled" and len(output.tokens) < 76
    assert_all_pages_are_back(engine)
    time.sleep(0.05)
    before = time.clock_gettime(time.pthread_getcpuclockid(engine._thread.ident))
    time.sleep(0.3)
    assert time.clock_gettime(time.pthread_getcpuclockid(engine._thread.ident)) - before < 0.005


@pytest.mark.parametrize(
    "tokens, options, message",
    [
        (60, {"max_new_tokens": 60}, r"60 tokens of prompt and 60 new ones do not fit an engine with "
         r"context=96; give max_new_tokens of 36 or less, or an Engine with context=120 and pages=8 or more"),
        (5, {"logprobs": 0}, r"logprobs is 0, and the engine's None; give Engine\(logprobs=\)"),
        (5, {"n": 0}, "n is 0"),
        (5, {"sampling": bj.SamplingParams(logit_bias=dict.fromkeys(range(17), 1.0))}, "17 tokens.* 16"),
        (5, {"sampling": bj.SamplingParams(logit_bias={512: 1.0})}, "names token 512"),
        (5, {"stop": [""]}, "stop: an empty text"),
        (5, {"stop": [5]}, r"stop is \[5\]"),
        (5, {"priority": "high"}, "priority is 'high'; it must be a whole number"),
        (5, {"n": 1.5}, r"n is 1\.5; it must be a whole number"),
    ],
)  # fmt: skip
def test_what_cannot_be_says_what_could(engine, tokens, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        engine.submit(prompt(tokens, 0), **{"max_new_tokens": 4} | options)


def test_a_request_that_can_draw_nothing_ends_alone():
    ids = prompt(10, 41)
    banned = dataclasses.replace(GREEDY, logit_bias=dict.fromkeys(range(512), -np.inf))
    options = {"max_new_tokens": 9, "ignore_eos": True}
    with bj.Engine(tiny(), **SHAPE, logit_biases=512) as engine:
        first = engine.submit(ids, GREEDY, **options)
        nothing = engine.submit(ids, banned, **options)
        last = engine.submit(ids, GREEDY, **options)
        with pytest.raises(RuntimeError, match=r"no token can be drawn: .*; 0 were drawn before"):
            nothing.result(60)
        assert len(first.result(60).tokens) == 9 and first.result().tokens == last.result(60).tokens
        assert_all_pages_are_back(engine)


def cancelled(handle: bj.Handle) -> bool:
    """Whether the request ends so within seconds, long before its last token."""
    return handle.result(30).finish_reason == "cancelled"


LONG = {"max_new_tokens": 86, "ignore_eos": True}


def test_more_biases_than_tokens_are_as_many_as_tokens():
    """Room for them was made by naming as many tokens, of which some are beyond the vocabulary."""
    with bj.Engine(tiny(), **SHAPE, logit_biases=60_000) as engine:
        assert engine.options.biases == 512
    with pytest.raises(ValueError, match=r"Engine: logit_biases is 2147483648; it must be .*, 1 to"):
        bj.Engine(tiny(), **SHAPE, logit_biases=2**31)


def test_a_break_out_of_a_stream_cancels_the_request(engine):
    handle = engine.submit(prompt(8, 50), GREEDY, **LONG)
    for _ in handle:
        break
    assert cancelled(handle)
    other = engine.submit(prompt(8, 50), GREEDY, **LONG)
    reader, second = iter(other), iter(other)
    next(reader), next(second)
    reader.close()  # somebody else still reads
    assert len([t for piece in second for t in piece.tokens]) > 1 and not cancelled(other)
    assert_all_pages_are_back(engine)


def test_a_task_that_is_cancelled_or_late_cancels_its_request(engine):
    handles = [engine.submit(prompt(8, 51 + i), GREEDY, **LONG) for i in range(3)]

    async def first_piece(handle):
        async for _ in handle:
            break

    async def leave():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(handles[0], 0.005)
        task = asyncio.ensure_future(handles[1].__aiter__().__anext__())
        await task
        waiting = asyncio.create_task(waited(handles[1]))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, first_piece(handles[2]), return_exceptions=True)

    async def waited(handle):
        return await handle

    asyncio.run(leave())
    assert all(map(cancelled, handles))
    assert_all_pages_are_back(engine)


def test_an_endless_wait_is_one(engine):
    assert engine.submit([1], max_new_tokens=1).result(float("inf")).tokens


def test_a_failure_ends_who_runs_and_the_next_are_served(engine, monkeypatch):
    ids = prompt(10, 40)
    want = alone([ids], [GREEDY])
    decode, left = Calls.decode, [1]

    def failing(self, *arguments):
        if left[0]:
            left[0] -= 1
            raise RuntimeError("the kernel says no")
        return decode(self, *arguments)

    monkeypatch.setattr(Calls, "decode", failing)
    options = {"max_new_tokens": MOST, "ignore_eos": True}
    failed = engine.submit(ids, GREEDY, **options)
    with pytest.raises(RuntimeError, match="while this request was running: the kernel says no"):
        failed.result(60)
    failed.cancel()  # which broke the engine: the request was no longer the scheduler's
    assert_same([engine.submit(ids, GREEDY, **options).result(60).tokens], want)
    assert_all_pages_are_back(engine)


def test_an_engine_that_fails_twice_says_that_it_gives_up(monkeypatch):
    def failing(self, *arguments):
        raise RuntimeError("no device")

    monkeypatch.setattr(Calls, "prefill", failing)
    with bj.Engine(tiny(), **SHAPE) as engine:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no device"):
                engine.submit([1, 2], max_new_tokens=2).result(60)
        engine._thread.join(10)
        with pytest.raises(RuntimeError, match="the engine has failed, and runs nothing more: no device"):
            engine.submit([1, 2], max_new_tokens=2)
    with pytest.raises(RuntimeError, match=r"closed|failed"):
        engine.submit([1, 2], max_new_tokens=2)


def test_an_engine_whose_thread_ends_leaves_nobody_waiting(monkeypatch):
    """Not of a dispatch, but of what is asked for: there is no second try then."""

    def failing(request):
        raise RuntimeError("no room to wait in")

    with bj.Engine(tiny(), **SHAPE) as engine:
        first = engine.submit(prompt(5, 0), GREEDY, max_new_tokens=90, ignore_eos=True)
        monkeypatch.setattr(engine._loop.scheduler, "add", failing)
        with pytest.raises(RuntimeError, match="no room to wait in"):  # at once, or later
            engine.submit([1, 2], max_new_tokens=2).result(60)
        with pytest.raises(RuntimeError, match="no room to wait in"):
            first.result(60)


@pytest.mark.parametrize(
    "wrong", [{"max_batch_size": 1.5}, {"pages": 0}, {"context": 8.5}, {"prefill_tokens": -3},
              {"checkpoints": -1}, {"max_wait_s": "0.1"}, {"max_wait_s": -1}]
)  # fmt: skip
def test_sizes_of_an_engine_are_counts(wrong):
    with pytest.raises(ValueError, match=f"Engine: {next(iter(wrong))} is "):
        bj.Engine(tiny(), **SHAPE | wrong)


@pytest.mark.parametrize(
    ("source", "speculate"), [(HYBRID, None), ("synth:tiny-llama:q8_0", None), (HYBRID, "ngram")]
)
def test_the_plan_of_memory_counts_the_pools_arrays(source, speculate):
    """The samplers' exactly, where an engine may have any; all within a hundredth. It also counts the states
    and scores that steps work on, which are not in the pool (test_aot_models)."""
    model, how = tiny(source), SHAPE | {"speculate": speculate}
    with bj.Engine(model, **how) as engine:
        runner, plan = engine._loop.runner, options.pool_bytes(model, engine.options)
        pool, samplers = nbytes(runner._pool), 0
        beside = memory.copied_bytes(model.config, model.run) + memory.score_bytes(model.config)
        plan -= engine.options.max_batch_size * beside
        if speculate is None:
            runner.need("chain")
            samplers = nbytes(runner._parts["chain"])
            own = runner._parts["chain"]
            assert samplers == len(own.used) * chain.row_bytes(model.config.vocab_size, own.dry.ids.shape[1])
    assert plan == pytest.approx(pool + samplers, rel=0.01)


@pytest.mark.parametrize(("share", "checkpoints"), [(1.0, 8), (0.9, 4), (0.5, None)])
def test_an_engine_has_as_many_checkpoints_as_fit(share, checkpoints, monkeypatch):
    """Half of them, or half of those, where memory is short; the caller's number as it is, or an error."""
    model = tiny(HYBRID)
    how = {"max_batch_size": 8, "pages": 16}
    with bj.Engine(model, **how, checkpoints=8) as engine:
        whole = options.pool_bytes(model, engine.options)
    monkeypatch.setattr(memory.machine, "device_memory", lambda: share * whole)
    if checkpoints is None:
        with pytest.raises(MemoryError, match="max_batch_size=8 and pages=16 take"):
            bj.Engine(model, **how)
        return
    with bj.Engine(model, **how) as engine:
        assert engine.options.checkpoints == checkpoints
    if share < 1:
        with pytest.raises(MemoryError):
            bj.Engine(model, **how, checkpoints=8)


def nbytes(tree) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(tree))


def test_closing_cancels():
    with bj.Engine(tiny(), **SHAPE) as engine:
        handle = engine.submit(prompt(5, 0), GREEDY, max_new_tokens=90, ignore_eos=True)
    assert handle.result(1).finish_reason in ("cancelled", "length")
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.submit([1], max_new_tokens=2)


def test_a_reproducible_engine_has_the_same_bits_alone_and_in_a_crowd():
    ids, options = prompt(20, 80), {"max_new_tokens": MOST, "ignore_eos": True, "logprobs": 2}
    with bj.Engine(tiny(), logprobs=2, reproducible=True, **SHAPE) as engine:
        alone = engine.submit(ids, GREEDY, **options).result(120)
        others = [engine.submit(prompt(7 * i, 80 + i), GREEDY, **options) for i in range(1, 6)]
        crowd = engine.submit(ids, GREEDY, **options).result(120)
        assert all(len(other.result(120).tokens) == MOST for other in others)
    assert crowd.tokens == alone.tokens and crowd.cached_tokens == 0
    jax.tree.map(np.testing.assert_array_equal, crowd.logprobs, alone.logprobs)


@pytest.mark.parametrize("how", ["ngram", "reproducible"])
def test_other_ways_say_the_same(how):
    """Speculation, whose steps draw several tokens, and one size of everything."""
    ids = prompt(6, 50)
    prompts = [ids * 4, prompt(33, 51), ids * 3 + prompt(4, 52), ids, [*ids, *prompt(30, 53)]]
    want = alone(prompts, [GREEDY] * 5)
    special = {"speculate": "ngram"} if how == "ngram" else {"reproducible": True}
    with bj.Engine(tiny(), **SHAPE, **special) as engine:
        handles = [engine.submit(p, GREEDY, max_new_tokens=MOST, ignore_eos=True) for p in prompts]
        outputs = [handle.result(120) for handle in handles]
        assert [o.tokens for o in outputs] == want
        if how == "ngram":
            assert min(o.steps for o in outputs) < MOST - 1
        assert_all_pages_are_back(engine)


def test_recurrent_states_of_rows_are_their_own():
    """Bit for bit, of a model with a gated delta net: beside others, in a row that others had, and behind one
    that was cancelled."""
    how = {"max_new_tokens": 6, "ignore_eos": True, "logprobs": 0}
    with bj.Engine(tiny(HYBRID), reproducible=True, **OF_HYBRIDS) as engine:

        def ask(ids):
            return engine.submit(ids, GREEDY, **how)

        def drawn(handle):
            output = handle.result(300)
            assert output.logprobs.ids.shape == (6, 0)
            return output.tokens, np.asarray(output.logprobs.token).tolist()

        alone = drawn(ask(prompt(20, 60)))
        handles = [ask(ids) for ids in (prompt(9, 61), prompt(20, 60), prompt(40, 62))]
        assert [drawn(handle) for handle in handles][1] == alone
        long = [engine.submit(prompt(11, n), GREEDY, **how | {"max_new_tokens": 37}) for n in (63, 64)]
        for handle in long:
            next(iter(handle))
            handle.cancel()
        assert [drawn(ask(prompt(20, 60))) for _ in range(2)] == [alone, alone]
