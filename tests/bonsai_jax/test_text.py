"""generate and stream: what is asked for beside the text, many prompts, and requests that cannot be met.

A prompt and its answer have 17 to 32 tokens, unless something else is wanted: then one row has one program of
prefill and one of decode, and so have four."""

import dataclasses
import functools
import os
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax import text
from bonsai_jax.decoding import jitted
from bonsai_jax.engine import rows as on_device
from bonsai_jax.engine.answers import Reader
from bonsai_jax.engine.programs import compiled
from bonsai_jax.engine.scheduler import Scheduler
from bonsai_jax.progress import said_after
from tests.bonsai_jax.tokens import assert_same

GREEDY = bj.SamplingParams(temperature=0.0)
REPEATED = dataclasses.replace(GREEDY, repetition_penalty=1.3)


@functools.cache
def tiny() -> bj.Model:
    return bj.load("synth:tiny-llama:q8_0", bj.RunConfig(page_size=16, activation_bits=16))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def log_p(model: bj.Model, ids: list[int], tokens: list[int]) -> np.ndarray:
    """float32 [tokens, V]: before each token of an answer, by another road than the one that drew it."""
    return np.asarray(jax.nn.log_softmax(bj.logits(model, [*ids, *tokens])[len(ids) - 1 : -1]))


def test_log_probabilities_are_the_models_own():
    """Of its distribution before penalties and temperature, for every row and piece."""
    model, prompts = tiny(), [prompt(5, 1), prompt(20, 2), prompt(9, 3)]
    sampling = bj.SamplingParams(temperature=1.5, seed=3, repetition_penalty=1.3)
    outputs = bj.generate(model, prompts, max_new_tokens=10, sampling=sampling, ignore_eos=True, logprobs=4)
    for ids, output in zip(prompts, outputs, strict=True):
        want = log_p(model, ids, output.tokens)
        got = output.logprobs
        assert got.ids.shape == got.top.shape == (10, 4)
        np.testing.assert_allclose(got.token, want[np.arange(10), output.tokens], atol=1e-4)
        np.testing.assert_allclose(got.top, np.take_along_axis(want, got.ids, 1), atol=1e-4)
        np.testing.assert_allclose(got.top, -np.sort(-want)[:, :4], atol=1e-4)
    alone = dataclasses.replace(sampling, seed=4)
    pieces = list(
        bj.stream(model, prompts[1], max_new_tokens=10, sampling=alone, ignore_eos=True, logprobs=4)
    )
    assert_same([[t for p in pieces for t in p.tokens]], [outputs[1].tokens])
    streamed = jax.tree.map(lambda *parts: np.concatenate(parts), *(piece.logprobs for piece in pieces))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), streamed, outputs[1].logprobs)


def test_log_probabilities_end_with_the_answer():
    model, ids = tiny(), prompt(6, 4)
    options = {"max_new_tokens": 26, "sampling": GREEDY, "ignore_eos": True}
    free = bj.generate(model, [ids], **options)[0].text
    cut = bj.generate(model, [ids], **options, stop=free[7:10], logprobs=4)[0]
    assert len(cut.tokens) < 26 and cut.logprobs.token.shape == (len(cut.tokens),)
    assert cut.logprobs.ids.shape == (len(cut.tokens), 4)


def banned(logits, state):
    """Never the token that was just read, nor an even one."""
    even = jnp.arange(logits.shape[1]) % 2 == 0
    again = jax.nn.one_hot(state.tokens, logits.shape[1], dtype=bool)
    return jnp.where(even | again, -jnp.inf, logits)


def test_a_logits_processor_sees_every_draw():
    model, ids = tiny(), prompt(8, 5)
    options = {"max_new_tokens": 12, "sampling": GREEDY, "ignore_eos": True}
    drawn = bj.generate(model, [ids, prompt(3)], **options, logits_processor=banned)[0].tokens
    scores = bj.logits(model, [*ids, *drawn])[len(ids) - 1 : -1]
    scores[:, ::2] = -np.inf
    scores[np.arange(1, 12), drawn[:-1]] = -np.inf
    assert drawn == scores.argmax(-1).tolist()


NOTHING = "no token can be drawn: logits are NaN or infinite, or every token is banned; 2 were drawn before"


@pytest.mark.parametrize("harm", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("sampling", [GREEDY, bj.SamplingParams(seed=1)], ids=["greedy", "drawn"])
def test_where_no_token_can_be_drawn_it_raises(harm, sampling):
    """A greedy draw from NaN gave an id beyond the vocabulary; with every token banned token 0 was drawn."""
    model, ids = tiny(), prompt(5)

    def harmed(logits, state):
        at_third = state.remaining == 4
        harm_there = logits.at[:].set(harm) if harm < 0 else logits.at[:, 300].set(harm)
        return jnp.where(at_third[:, None], harm_there, logits)

    options = {"max_new_tokens": 6, "sampling": sampling, "ignore_eos": True, "logits_processor": harmed}
    with pytest.raises(ValueError, match=NOTHING):
        bj.generate(model, [ids, prompt(3)], **options)
    streamed = bj.stream(model, ids, **options, speculate="ngram")
    with pytest.raises(ValueError, match=NOTHING):
        list(streamed)
    state = bj.new_state(model, 1, 32, sampling, 6, ignore_eos=True)
    arrays = model.params, state, jnp.array([ids]), jnp.array([5]), model.config
    drawn = bj.generate_tokens(*arrays, size=6, logits_processor=harmed)
    assert (drawn.tokens[0] >= 0).tolist() == [True] * 2 + [False] * 4 and drawn.state.remaining == 0
    with pytest.raises(ValueError, match="no token can be drawn"):
        bj.checked(bj.generate_tokens)(*arrays, size=6, logits_processor=harmed)


@pytest.mark.parametrize("ended", ["length", "stop"])
def test_a_stop_string_that_the_last_half_character_completes_is_cut(ended):
    tokenizer = tiny().tokenizer
    ids = [tokenizer.encode(c)[0] for c in "abc"]
    half = next(i for i in range(256) if tokenizer.token_bytes(i) == b"\xe4")
    reader = Reader(tokenizer, frozenset([500]), ["bc\ufffd"])
    drawn = [*ids, half, *([500] if ended == "stop" else [])]
    piece = reader.read(drawn, True)
    assert (piece.text, piece.finish_reason) == ("a", "stop")
    assert Reader(tokenizer, frozenset([500])).read(drawn, True).text == "abc\ufffd"


def odd(logits, state):
    return jnp.where(jnp.arange(logits.shape[1]) % 2 == 0, -jnp.inf, logits)


def test_a_steered_answer_is_the_argmax_of_steered_logits():
    """Of odd tokens: `stream` takes both, too."""
    model, ids = tiny(), prompt(8, 6)
    vector = jnp.asarray(np.random.default_rng(2).normal(0, 0.5, model.config.hidden), jnp.float32)
    taps = bj.Taps(edit=lambda name, layer, x: x + vector * (layer == 1) if name == "output" else x)
    options = {"max_new_tokens": 9, "sampling": GREEDY, "ignore_eos": True}
    steered = options | {"taps": taps, "logits_processor": odd}
    (output,) = bj.generate(model, [ids], **steered)
    whole = jnp.array([[*ids, *output.tokens]])
    logits, _ = jitted.forward(model.params, whole, jnp.array([whole.shape[1]]), model.config, taps=taps)
    assert output.tokens == (2 * logits[0, len(ids) - 1 : -1, 1::2].argmax(-1) + 1).tolist()
    plain = bj.logits(model, [*ids, *output.tokens])[len(ids) - 1 : -1]
    assert output.tokens != (2 * plain[:, 1::2].argmax(-1) + 1).tolist()
    streamed = bj.stream(model, ids, **steered)
    assert [t for piece in streamed for t in piece.tokens] == output.tokens


def test_vectors_are_a_prompt():
    """Embedded tokens give what the tokens give, alone and beside prompts of tokens."""
    model = tiny()
    ids = [prompt(7, 7), prompt(11, 8)]
    vectors = [bj.embed(model.params, jnp.array(i)) for i in ids]
    options = {"max_new_tokens": 10, "sampling": GREEDY, "ignore_eos": True}
    want = [output.tokens for output in bj.generate(model, [*ids, ids[1]], **options)]
    mixed = bj.generate(model, [vectors[0], ids[1], vectors[1]], **options)
    assert_same([output.tokens for output in mixed], want)
    assert [output.prompt_tokens for output in mixed] == [7, 11, 11]
    assert_same([bj.generate(model, vectors[0], **options)[0].tokens], [want[0]])
    streamed = bj.stream(model, vectors[1], **options)
    assert_same([[t for piece in streamed for t in piece.tokens]], [want[1]])
    with pytest.raises(ValueError, match=r"vectors has shape \(3, 5\); expected \[tokens, 256\]"):
        bj.generate(model, [np.zeros((3, 5), np.float32)])


def test_a_script_may_leave_a_stream_open():
    code = (
        "import bonsai_jax as bj; model = bj.load('synth:tiny-llama:q8_0')\n"
        "pieces = bj.stream(model, 'x', max_new_tokens=20, ignore_eos=True); print(next(pieces).tokens)"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=300)
    errors = [line for line in done.stderr.decode().splitlines() if not line.startswith("bonsai-jax: ")]
    assert (done.returncode, errors) == (0, []) and done.stdout


def test_the_first_token_of_a_stream_is_there_before_steps_are_compiled(monkeypatch):
    first_piece = threading.Event()

    class Decode:
        def lower(self, *_, **__):
            said = "no steps yet" if first_piece.wait(60) else "the first piece waits for decode"
            raise RuntimeError(said)

    monkeypatch.setattr(on_device, "decode_rows", Decode())
    model, ids = tiny(), prompt(5)
    pieces = bj.stream(model, ids, max_new_tokens=20, sampling=GREEDY, ignore_eos=True)
    assert next(pieces).tokens == [int(bj.logits(model, ids)[-1].argmax())]
    first_piece.set()
    with pytest.raises(RuntimeError, match="no steps yet"):
        next(pieces)


def programs() -> int:
    return len(compiled)


def test_a_pool_has_rows_for_many_prompts_and_for_few():
    """Of the default's 32, and 8 for a few, which cost less memory: two programs of decode for all numbers of
    prompts."""
    assert tiny().run.batch_size == 32
    options = {"max_new_tokens": 3, "sampling": GREEDY, "ignore_eos": True}
    alone = {n: bj.generate(tiny(), prompt(5, n), **options)[0].tokens for n in (0, 20, 39)}
    for count in (3, 8, 9, 40):
        outputs = bj.generate(tiny(), [prompt(5, n) for n in range(count)], **options)
        for n, tokens in alone.items():
            assert n >= count or outputs[n].tokens == tokens
    rows = [text._pool_rows(tiny(), n) for n in (1, 8, 9, 40)]
    assert rows == [8, 8, 32, 32]


def test_many_prompts_are_few_programs_and_their_answers_are_in_order():
    """21 prompts of 4 to 60 tokens in 8 rows: one program of decode, and few of prefill."""
    model = dataclasses.replace(tiny(), run=dataclasses.replace(tiny().run, batch_size=8))
    rng = np.random.default_rng(0)
    few = [prompt(int(n), int(n)) for n in rng.integers(4, 60, 21)]
    before, seen = programs(), []
    options = {"max_new_tokens": 4, "sampling": GREEDY, "ignore_eos": True}
    outputs = bj.generate(model, few, **options, progress=lambda *done: seen.append(done))
    assert programs() - before <= 3
    assert [output.prompt_tokens for output in outputs] == list(map(len, few))
    assert seen == sorted(seen) and seen[-1] == (21, 21) and len(set(seen)) > 2
    for i in (0, 9, 20):
        whole = jnp.asarray(bj.logits(model, [*few[i], *outputs[i].tokens])[len(few[i]) - 1 : -1])
        assert outputs[i].tokens == whole.argmax(-1).tolist()


def test_other_numbers_and_lengths_of_prompts_run_the_same_programs():
    model = tiny()

    def answer(rows, length, new=2):
        bj.generate(model, [prompt(length, s) for s in range(rows)], max_new_tokens=new, sampling=GREEDY)

    answer(4, 20), answer(8, 31), answer(5, 30)  # the third gets a program of its size
    before = programs()
    for rows, length, new in ((3, 29, 2), (5, 32, 40), (6, 31, 2), (7, 32, 20)):
        answer(rows, length, new)
    assert programs() == before


def test_a_call_whose_programs_exist_starts_no_thread(monkeypatch):
    how = {"max_new_tokens": 3, "sampling": GREEDY, "ignore_eos": True}
    answer = lambda: bj.generate(tiny(), prompt(20, 3), **how)[0].tokens  # noqa: E731
    want = [answer() for _ in range(4)][-1]  # the third compiles a program of its size
    started, start = [], threading.Thread.start
    noted = lambda thread: (started.append(thread.name), start(thread))  # noqa: E731
    monkeypatch.setattr(threading.Thread, "start", noted)
    assert answer() == want and started == []


def test_decode_is_compiled_while_the_prompt_is_read():
    """Each program is compiled once, both in threads, prefill first."""
    threads, traced = [], []

    def listen(event, seconds, fun_name="", **_):
        if event == "/jax/core/compile/backend_compile_duration":
            threads.append(threading.current_thread().name)
        if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            traced.append(fun_name)

    processor = lambda logits, state: logits  # noqa: E731 - no other test has it, so nothing is compiled
    how = {"max_new_tokens": 3, "sampling": GREEDY, "ignore_eos": True}
    bj.generate(tiny(), [prompt(20, 3)], **how)  # compiles what is not a program of the engine
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        pieces = list(bj.stream(tiny(), prompt(20, 3), **how, logits_processor=processor))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert sum(len(piece.tokens) for piece in pieces) == 3
    assert [name.split("_")[0] for name in threads] == ["bonsai-jax compile"] * 2
    assert traced == ["jit(prefill)", "jit(decode)"]


def test_work_that_waits_for_the_last_dispatch_is_done(monkeypatch):
    """Nothing can be planned until a dispatch is read, as where another request's pages must come free."""
    plan, turns = Scheduler.plan, []

    def short_of_pages(scheduler):
        flying = any(r.flights for device in scheduler.devices for r in device.running)
        turns.append(flying)
        return None if turns[-1] else plan(scheduler)

    monkeypatch.setattr(Scheduler, "plan", short_of_pages)
    (output,) = bj.generate(tiny(), [prompt(20, 3)], max_new_tokens=70, sampling=GREEDY, ignore_eos=True)
    assert True in turns and len(output.tokens) == 70


def test_a_long_compilation_is_said_on_stderr(capsys):
    with said_after(0.05, "compiling something"):
        time.sleep(0.5)
    with said_after(30, "something quick"):
        pass
    assert capsys.readouterr().err == "bonsai-jax: compiling something ...\n"


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"sampling": {"temperature": 0.5}}, TypeError, r"sampling is a dict; give bj\.SamplingParams"),
        ({"sampling": [GREEDY, {}]}, TypeError, "sampling is a dict"),
        ({"logprobs": -1}, ValueError, "logprobs is -1; it must be a whole number, 0 or more"),
        ({"logprobs": 513}, ValueError, "logprobs is 513; it must be a whole number, 0 to 512"),
        ({"taps": "output"}, TypeError, r"taps is a str; give bj\.Taps\(edit="),
        ({"max_new_tokens": 2.5}, ValueError, "max_new_tokens is 2.5; it must be a whole number"),
        ({"taps": bj.Taps({"output"})}, ValueError, r"taps: read names output, .*call bj\.forward"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens is 0"),
        ({"logprobs": 1.5}, ValueError, r"logprobs is 1\.5; it must be a whole number"),
        ({"stop": [5]}, TypeError, r"stop is \[5\]; give a text, or a list of texts"),
        ({"stop": b"x"}, TypeError, "stop is b'x'; give a text"),
        (
            {"logits_processor": lambda logits, state: logits[:, :5]},
            ValueError,
            r"logits_processor: it returned shape \(\d+, 5\); expected logits of shape \(\d+, 512\)",
        ),
        ({"logits_processor": lambda logits, state: None}, ValueError, "logits_processor: it returned None"),
    ],
)
def test_options_that_cannot_be(options, error, message):
    with pytest.raises(error, match=message):
        bj.generate(tiny(), [[1, 2], [3]], **options)


IDS = [7, 1, 300, 2]


@pytest.mark.parametrize(
    "one",
    [
        IDS,
        tuple(IDS),
        np.array(IDS),
        np.array(IDS, np.uint16),
        jnp.array(IDS),
        list(np.array(IDS)),
        [IDS],
        np.array([IDS]),
        [jnp.array(IDS)],
        iter(IDS),
    ],
)
def test_a_list_or_array_of_ids_is_one_prompt(one):
    options = {"max_new_tokens": np.int64(3), "sampling": GREEDY, "ignore_eos": True, "logprobs": np.int8(1)}
    (output,) = bj.generate(tiny(), one, **options)
    streamed = bj.stream(tiny(), IDS, **options)
    assert output.prompt_tokens == len(IDS)
    assert output.tokens == [token for piece in streamed for token in piece.tokens]


def test_prompts_may_be_texts_and_ids():
    model, text = tiny(), "One"
    prompts = [text, IDS, np.array(IDS), model.tokenizer.encode(text)]
    outputs = bj.generate(model, prompts, max_new_tokens=3, sampling=GREEDY, ignore_eos=True)
    assert outputs[0] == outputs[3] and outputs[1] == outputs[2]


def test_an_encoded_chat_is_one_prompt():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = dataclasses.replace(tiny().tokenizer, chat_template=template)
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    (output,) = bj.generate(tiny(), ids, max_new_tokens=2, sampling=GREEDY)
    assert output.prompt_tokens == len(ids) > 1


@pytest.mark.parametrize(
    "prompts", [[True, 2, 3], [1, "a"], np.array([True]), [[1.5, 2]], [None], [b"ab"], [{"a": 1}]]
)
def test_prompts_that_cannot_be(prompts):
    with pytest.raises(TypeError, match=r"a prompt is .*; give a text, a list of token ids"):
        bj.generate(tiny(), prompts)
    with pytest.raises(TypeError, match=r"a prompt is .*many prompts, to bj\.generate"):
        next(bj.stream(tiny(), ["One", "Two"]))


@pytest.mark.parametrize("prompts", [None, 5, {"One": 1}, np.array(5), b"One"])
def test_what_is_no_list_of_prompts(prompts):
    with pytest.raises(TypeError, match=r"prompts are a .*; give a text, or a list of prompts"):
        bj.generate(tiny(), prompts)


def test_what_was_given_in_place_of_a_model_is_named():
    with pytest.raises(TypeError, match=r"model is a str; give what bj\.load returns"):
        bj.generate("demo", "One")
    with pytest.raises(TypeError, match=r"params is a Model; give model\.params"):
        bj.forward(tiny(), [[1]], [1], tiny().config)
    with pytest.raises(TypeError, match=r"run is a str; give bj\.RunConfig"):
        bj.load("synth:tiny-llama:q8_0", "q8_0")
    with pytest.raises(TypeError, match=r"mesh is a int; give bj\.make_mesh"):
        bj.load("synth:tiny-llama:q8_0", mesh=2)


def test_a_context_that_is_the_models_own_is_not_to_be_made_larger():
    longest = dataclasses.replace(tiny(), run=dataclasses.replace(tiny().run, context=8192))
    with pytest.raises(ValueError, match=r"exceed the context of 8192; shorten them$"):
        bj.generate(longest, [[1] * 9000])


def test_a_string_of_taps_is_one_name():
    assert bj.Taps("output").read == {"output"}


def test_generate_reads_its_prompts_before_it_decodes(monkeypatch):
    """An engine, whose streams wait for each next token, does not."""
    plans, plan = [], Scheduler.plan

    def noted(self):
        if (made := plan(self)) is not None:
            plans.append((sum(map(len, made.reads)), made.steps))
        return made

    monkeypatch.setattr(Scheduler, "plan", noted)
    prompts = [prompt(600, 1), prompt(20, 2), prompt(20, 3)]  # the first takes several chunks
    bj.generate(tiny(), prompts, max_new_tokens=4, sampling=GREEDY, ignore_eos=True)
    last = max(i for i, (reads, _) in enumerate(plans) if reads)
    assert last > 0 and not any(steps for _, steps in plans[:last]) and plans[last][1] > 0
    del plans[:]
    with bj.Engine(tiny(), max_batch_size=4, context=1024) as engine:
        handles = [engine.submit(ids, max_new_tokens=4, sampling=GREEDY, ignore_eos=True) for ids in prompts]
        for handle in handles:
            handle.result()
    last = max(i for i, (reads, _) in enumerate(plans) if reads)
    assert any(steps for _, steps in plans[:last])
