"""A draft model proposes: the text is plain decoding's, and a draft model that agrees saves steps."""

import dataclasses
import functools
import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax import machine
from bonsai_jax.decoding import jitted, sampling, step_width
from bonsai_jax.decoding.proposers import draft_model
from bonsai_jax.decoding.sampling import NO_TOKEN
from bonsai_jax.network import architectures
from bonsai_jax.tokens.tokenizer import Tokenizer
from bonsai_jax.tokens.vocabulary import UNUSED, differ_at
from bonsai_jax.weights import memory, plan
from checkpoints import Checkpoint, open_checkpoint
from tests.bonsai_jax.command_line import run
from tests.bonsai_jax.test_speculation import BIASED, GREEDY, HOT, PENALIZED, two_layers
from tests.bonsai_jax.tokens import assert_same
from tests.pallas_kernels.aot import as_on_a_gpu, shapes

LLAMA, QWEN3, HYBRID, WINDOWED = (
    f"synth:tiny-{name}" for name in ("llama:q8_0", "qwen3:q8_0", "qwen35:f32", "gemma3:q8_0")
)
NEW = 20
RNG = np.random.default_rng(4)
PROMPTS = [RNG.integers(0, 256, n).tolist() for n in (70, 7, 19, 33)]  # one longer than the windows of 48
ROWS = [GREEDY, HOT, PENALIZED, BIASED]


@pytest.fixture(autouse=True)
def cheap(monkeypatch):
    """A step of a draft model, which is as large as the model here, takes a twentieth of its time."""
    monkeypatch.setattr(draft_model, "time", lambda params, config: 0.05)


@functools.cache
def model(source: str, draft: str | None = None) -> bj.Model:
    run = bj.RunConfig(page_size=16, context=128, batch_size=2, draft_model=draft)
    with mock.patch("bonsai_jax.model.open_checkpoint", opened):
        return bj.from_checkpoint(opened(source), run)


def opened(source: str, **options) -> Checkpoint:
    """Of the hybrid two layers, which compile sooner."""
    checkpoint = open_checkpoint(source, **options)
    return two_layers(checkpoint) if source == HYBRID else checkpoint


def answers(pair: bj.Model, **more) -> list[bj.Output]:
    """Of four prompts in two rows, which change hands."""
    how = {"sampling": ROWS, "max_new_tokens": NEW, "ignore_eos": True, "logprobs": 1}
    return bj.generate(pair, PROMPTS, **(how | more))


@functools.cache
def plain(source: str) -> list[bj.Output]:
    return answers(model(source))


@pytest.mark.parametrize(
    ("source", "draft"),
    [(LLAMA, LLAMA), (LLAMA, QWEN3), (LLAMA, HYBRID), (LLAMA, WINDOWED), (HYBRID, LLAMA), (WINDOWED, LLAMA)],
)
def test_the_text_is_plain_decoding_s(source, draft):
    got, want = answers(model(source, draft)), plain(source)
    if source == WINDOWED:  # its texts repeat a token
        assert [one.tokens for one in got] == [one.tokens for one in want]
    else:
        assert_same([one.tokens for one in got], [one.tokens for one in want])
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one.logprobs.token, other.logprobs.token, atol=1e-4)
    if draft == source:  # four tokens a step, of sampled rows too; penalties alone are not foreseen
        assert all(
            one.steps <= NEW // 4 + 2 for one, params in zip(got, ROWS, strict=True) if params != PENALIZED
        )
    else:
        assert max(one.steps for one in got) > NEW // 2


def prefilled(pair: bj.Model, params=GREEDY, new: int = NEW, rows: int = 2) -> bj.State:
    """A state that has read the last prompts, two unless said otherwise, and has drawn a token for each."""
    prompts = PROMPTS[-rows:]
    tokens, lengths = np.zeros((rows, 48), np.int32), np.array([len(ids) for ids in prompts], np.int32)
    for row, ids in zip(tokens, prompts, strict=True):
        row[: len(ids)] = ids
    state = bj.new_state(pair, rows, 96, params, new, ignore_eos=True)
    return jitted.prefill(pair.params, state, tokens, lengths, pair.config).state


def decoded(pair: bj.Model, state: bj.State, limit: int):
    return jitted.decode(pair.params, state, pair.config, limit=np.int32(limit), size=NEW)


def proposed(pair: bj.Model, state: bj.State) -> np.ndarray:
    propose = jax.jit(functools.partial(draft_model.propose, config=pair.config, count=3))
    return np.asarray(propose(pair.params, state)[0])


@pytest.mark.parametrize("draft", [LLAMA, WINDOWED, HYBRID])
def test_it_proposes_its_own_answer_to_what_was_read(draft):
    """After a prompt, after a step with proposals that were wrong, and after plain steps that it has read
    together; the draft model alone, in another program, says what it proposes."""
    pair, alone = model(QWEN3, draft), model(draft)
    state, texts = prefilled(pair, new=2 * NEW), [list(ids) for ids in PROMPTS[2:]]
    for text, token in zip(texts, state.tokens.tolist(), strict=True):
        text.append(token)
    wrong = state.speculation.trust
    for limit, trust in ((1, 1.0), (3, 0.0), (9, 0.0), (1, 1.0), (0, 1.0)):
        trusting = state.speculation.replace(trust=jnp.full_like(wrong, 1.0))
        want = bj.generate(alone, texts, max_new_tokens=3, sampling=GREEDY, ignore_eos=True)
        assert proposed(pair, state.replace(speculation=trusting)).tolist() == [one.tokens for one in want]
        state = state.replace(speculation=trusting.replace(trust=jnp.full_like(wrong, trust)))
        state, drawn, _ = decoded(pair, state, limit)
        for text, tokens in zip(texts, drawn.tolist(), strict=True):
            text += [token for token in tokens if token != NO_TOKEN]
    assert state.cache.lengths.tolist() == [len(text) - 1 for text in texts]


def test_it_drafts_what_pays(monkeypatch):
    """Seven tokens for one row and three for two, if they are likely right and cheap; else none."""

    def count(trust: float, time: float, rows: int = 2) -> int:
        monkeypatch.setattr(draft_model, "time", lambda params, config: time)
        pair = model(LLAMA, LLAMA)
        state = bj.new_state(pair, rows, 32, GREEDY, NEW)
        state = state.replace(tokens=jnp.full(rows, 3, jnp.int32))
        s = state.speculation.replace(trust=jnp.full(rows, trust))
        tokens, _ = draft_model.propose(pair.params, state.replace(speculation=s), pair.config, s.width - 1)
        (numbers,) = {*(np.asarray(tokens) != NO_TOKEN).sum(1).tolist()}
        return numbers

    assert [count(1.0, 0.05), count(1.0, 0.05, rows=1), count(0.6, 0.05, rows=1)] == [3, 7, 3]
    assert [count(0.3, 0.05), count(1.0, 1.0)] == [0, 0]
    assert count(0.7, 0.05) == 3 and count(0.7, 0.3) == 0  # of the same trust, by the draft model's size
    assert count(1.0, 0.45) == 0  # it would pay, if this trust were not chance


@pytest.mark.parametrize(
    ("rows", "width", "share", "pays"),
    [
        *((1, 8, 0.55, False), (1, 8, 0.4, False), (1, 8, 0.39, True), (1, 8, 0.22, True)),
        *((2, 4, 0.22, True), (4, 2, 0.22, False), (8, 2, 0.16, False), (8, 2, 0.15, True)),
    ],
)
def test_it_could_pay_if_nine_of_ten_were_right(rows, width, share, pays):
    """Also by hand: four tokens of one row are 3.439, in the time of 1.4 and of three single draft steps and
    one of four tokens; two of eight rows 1.9, in that of 2.4 for 1.77, and of one draft step and a following
    one."""
    assert step_width.could_pay(rows, width, share) == pays
    if rows == 1:
        assert ((1 + 0.9 + 0.81 + 0.729) / (1.4 + share * (3 + 1.4)) > 1.1) == pays
    if rows == 8:
        assert (1.9 * 1.77 / (2.4 + share * (1.77 + 2.4)) > 1.1) == pays


def test_it_reads_nothing_where_it_can_never_pay(monkeypatch):
    pair = model(LLAMA, LLAMA)
    state = bj.new_state(pair, 2, 32, GREEDY, NEW)
    reads = {}
    for share in (0.05, 0.39, 0.4):
        monkeypatch.setattr(draft_model, "time", lambda params, config, share=share: share)
        tokens, positions = jnp.array([[3], [4]]), jnp.zeros((2, 1), jnp.int32)
        own = draft_model.follow(pair.params, state, None, tokens, positions, pair.config)
        reads[share] = bool(jnp.any(own.states["attention"][0].k))
    assert reads == {0.05: True, 0.39: True, 0.4: False}


@pytest.mark.parametrize(
    # Microseconds of their steps on an H200 (docs/performance.md).
    ("source", "us", "draft", "draft_us"),
    [("8b", 536, "1.7b", 309), ("8b", 536, "4b", 492), ("27b", 2160, "1.7b", 309)],
)
def test_on_a_gpu_its_layers_count(monkeypatch, source, us, draft, draft_us):
    """By bytes alone they would be 0.23, 0.54 and 0.06 of the time."""
    monkeypatch.undo()
    with as_on_a_gpu((9, 0)):
        (params, _, config), (own, _, own_config) = (
            shapes(f"synth:bonsai-{name}:q1_0", context=64) for name in (source, draft)
        )
        config, seen = dataclasses.replace(config, draft_model=own_config), []

        def traced(params):
            seen.append(draft_model.time(params, config))

        jax.eval_shape(traced, params.replace(draft_model=own))
    assert 1 / 1.6 < seen[0] / (draft_us / us) < 1.6


def test_its_time_on_a_cpu_is_the_share_of_bytes_that_it_reads(monkeypatch):
    monkeypatch.undo()
    pair = model(LLAMA, QWEN3)
    read = [sum(w.nbytes for w in jax.tree.leaves(p)) for p in (pair.params.draft_model, model(LLAMA).params)]
    read[1] -= pair.params.embed.nbytes  # it has an output matrix beside it
    assert pair.params.draft_model.head is None
    assert draft_model.time(pair.params, pair.config) == pytest.approx(read[0] / read[1])


LONG = 60  # tokens: more than a row draws between two looks at its draft model


def compiled(pair: bj.Model, limit: int = LONG):
    """decode(params, state), in a program of its own: the share of a draft step's time is a part of it."""
    return jax.jit(functools.partial(bj.decode, config=pair.config, limit=limit, size=LONG))


@pytest.fixture
def work(monkeypatch) -> tuple[list, list]:
    """What draft models do: the tokens that they draft for each step or group of plain steps; and how many
    tokens of each row they read along, with the number that the program has room for."""
    drafts, reads = [], []
    network = draft_model.draft_model
    foresee, read = network.foresee, network.read

    def counted_drafts(params, state, cache, tokens, running, count, *others):
        jax.debug.callback(lambda count: drafts.append(int(count)), count)
        return foresee(params, state, cache, tokens, running, count, *others)

    def counted_reads(params, state, cache, tokens, positions, config):
        room = positions.shape[1]
        jax.debug.callback(lambda number: reads.append((room, number.tolist())), (positions >= 0).sum(1))
        return read(params, state, cache, tokens, positions, config)

    monkeypatch.setattr(network, "foresee", counted_drafts)
    monkeypatch.setattr(network, "read", counted_reads)
    return drafts, reads


def test_a_draft_model_that_is_never_right_is_soon_left_alone(monkeypatch, work):
    """From then on it drafts nothing, and reads the tokens of 32 plain steps together. Four steps read
    proposals: 0.8 (7/8)^4 < 0.49, from where four tokens for two rows pay (1.65 steps, and a tenth more)."""
    pair = model(LLAMA, LLAMA)
    state = prefilled(pair, [GREEDY, HOT], new=LONG)
    guess = sampling.guess
    monkeypatch.setattr(sampling, "guess", lambda s, logits, at: (guess(s, logits, at) + 1) % logits.shape[1])
    state, drawn, _ = compiled(pair)(pair.params, state)
    jax.effects_barrier()
    drafts, reads = work
    assert (np.asarray(drawn) != NO_TOKEN).sum(1).tolist() == [LONG - 1] * 2
    assert drafts == [3, 3, 3, 3, 0, 0]
    assert reads[-6:] == [(4, [1, 1])] * 4 + [(32, [32, 32]), (32, [23, 23])]
    assert state.speculation.steps.tolist() == [LONG - 1] * 2
    np.testing.assert_allclose(state.speculation.trust, 0.8 * (7 / 8) ** (4 + 8 + 8), rtol=1e-5)


def test_a_draft_model_that_could_never_pay_does_nothing(monkeypatch, work):
    pair = model(LLAMA, LLAMA)
    before = prefilled(pair, HOT, new=LONG, rows=1)
    trusted = before.replace(speculation=before.speculation.replace(trust=jnp.ones(1)))
    jax.effects_barrier()
    del work[1][:]  # what it read of the prompt
    monkeypatch.setattr(draft_model, "time", lambda params, config: 0.55)
    after = compiled(pair)(pair.params, trusted).state
    jax.effects_barrier()
    assert work == ([], [])
    jax.tree.map(np.testing.assert_array_equal, after.speculation.draft, before.speculation.draft)


def test_drafting_begins_again_when_guesses_are_right(monkeypatch, work):
    """The draft model is the model. After 32 plain steps the latest eight guesses, of a greedy and of a
    sampled row, make the trust 1 - (7/8)^8, with which a step drafts three tokens, and soon seven."""
    monkeypatch.setattr(draft_model, "time", lambda params, config: 0.1)
    pair = model(LLAMA, LLAMA)
    for params in (GREEDY, HOT):
        state = prefilled(pair, params, new=LONG, rows=1)
        state = state.replace(speculation=state.speculation.replace(trust=jnp.zeros(1)))
        state, first, _ = compiled(pair, 32)(pair.params, state)
        assert state.speculation.steps.tolist() == [(np.asarray(first) != NO_TOKEN).sum()] == [32]
        np.testing.assert_allclose(state.speculation.trust, 1 - (7 / 8) ** 8, rtol=1e-6)
        state, rest, _ = compiled(pair)(pair.params, state)
        jax.effects_barrier()
        drafts, reads = work
        assert (np.asarray(rest) != NO_TOKEN).sum() == LONG - 1 - 32
        assert drafts[:2] == [0, 3] and 7 in drafts and 0 not in drafts[1:]
        assert int(state.speculation.steps[0]) < 32 + (LONG - 32) // 3 and (32, [32]) in reads
        del drafts[:], reads[:]


@pytest.mark.parametrize(("limit", "drawn"), [(2, [2, 2]), (8, [8, 5]), (20, [20, 5])])
def test_each_row_is_judged_by_what_it_drew(limit, drawn, monkeypatch):
    """The draft model is the model, but is made wrong at every third position. One of the rows may draw five
    tokens; and of twenty the last eight count."""
    pair, guess = model(LLAMA, LLAMA), sampling.guess
    monkeypatch.setattr(
        sampling, "guess", lambda s, logits, at: (guess(s, logits, at) + (at % 3 == 0)) % logits.shape[1]
    )
    state, before = prefilled(pair, [GREEDY, HOT], LONG), [0.3, 0.1]
    first = (state.cache.lengths + 1).tolist()
    speculation = state.speculation.replace(trust=jnp.array(before))
    state = state.replace(speculation=speculation, remaining=jnp.array([50, 5]))
    state, tokens, _ = compiled(pair, limit)(pair.params, state)
    assert (np.asarray(tokens) != NO_TOKEN).sum(1).tolist() == drawn
    rights = [[at % 3 != 0 for at in range(one, one + n)][-8:] for one, n in zip(first, drawn, strict=True)]
    want = [
        functools.reduce(lambda trust, right: trust * 7 / 8 + right / 8, each, trust)
        for each, trust in zip(rights, before, strict=True)
    ]
    np.testing.assert_allclose(state.speculation.trust, want, rtol=1e-5)


@pytest.mark.parametrize("share", [0.1, 0.3])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("draft", [LLAMA, QWEN3, HYBRID])
def test_texts_over_many_looks_are_plain_decoding_s(draft, rows, share, monkeypatch):
    """With trust that a row has or lacks at first, in a dispatch of all steps and in several of few."""
    monkeypatch.setattr(draft_model, "time", lambda params, config: share)
    pair = model(LLAMA, draft)
    whole, part = compiled(pair), compiled(pair, 5)
    for params in (GREEDY, HOT):
        want = long_text(params == HOT, rows)
        for trust, decode in ((0.0, whole), (0.9, part)):
            state = prefilled(pair, params, LONG, rows)
            before = jnp.where(jnp.arange(rows) == 1, 0.5, trust)
            state = state.replace(speculation=state.speculation.replace(trust=before))
            texts = [[] for _ in range(rows)]
            while (state.remaining > 0).any():
                state, tokens, _ = decode(pair.params, state)
                for text, row in zip(texts, tokens.tolist(), strict=True):
                    text += [token for token in row if token != NO_TOKEN]
            assert texts == want


@functools.cache
def long_text(hot: bool, rows: int) -> list[list[int]]:
    """What plain decoding draws in the rows of `prefilled`."""
    alone = model(LLAMA)
    state = prefilled(alone, HOT if hot else GREEDY, LONG, rows)
    tokens = compiled(alone)(alone.params, state).tokens
    return [row[: LONG - 1] for row in tokens.tolist()]


def test_shared_prefixes_and_their_files_have_its_keys(tmp_path):
    """Of prompts with the same beginning the second one reads little, and proposals are right from the first:
    else steps of a row alone would be more. So in the next process, which reads files."""
    pair = model(LLAMA, LLAMA)
    prompt, other = [*PROMPTS[0][:64], 5, 6], [*PROMPTS[0][:64], 9, 8, 7]
    how = {"max_batch_size": 1, "prefix_cache": tmp_path}
    for first in (prompt, other):
        with bj.Engine(pair, **how) as engine:
            for ids in (first, other):
                options = {"max_new_tokens": NEW, "ignore_eos": True}
                output = engine.submit(ids, HOT, **options).result(200)
                cached = output.cached_tokens
                (want,) = bj.generate(model(LLAMA), [ids], sampling=HOT, **options)
                assert output.tokens == want.tokens and output.steps <= 4
            assert cached >= 64
    with bj.Engine(pair, **how) as engine:
        output = engine.submit(other, HOT, max_new_tokens=NEW, ignore_eos=True).result(200)
        assert output.cached_tokens >= 64 and output.steps <= 4


@pytest.mark.parametrize("draft", [HYBRID, WINDOWED])
def test_checkpoints_have_what_it_stores_of_rows(draft):
    """A recurrent state and a ring belong to a row: a prompt continues from a copy of both models'."""
    pair = model(draft, draft)
    prompt = PROMPTS[0] + PROMPTS[3]
    options = {"max_new_tokens": NEW, "ignore_eos": True}
    with bj.Engine(pair, max_batch_size=1) as engine:
        outputs = [engine.submit(prompt + more, HOT, **options).result(200) for more in ([], [3], [3])]
    assert outputs[2].cached_tokens > 60
    assert outputs[1].steps == outputs[2].steps <= 5  # proposals are right after what was read or stored
    want = bj.generate(model(pair.source), [prompt, [*prompt, 3]], sampling=[HOT, HOT], **options)
    assert [one.tokens for one in outputs[:2]] == [one.tokens for one in want]
    assert outputs[2].tokens == outputs[1].tokens


def test_rows_with_constraints_and_prompts_of_vectors():
    pair, without = model(LLAMA, LLAMA), model(LLAMA)
    how = {"constraint": [bj.regex("[a-f]{12}"), None, None, None]}
    got, want = answers(pair, **how), answers(without, **how)
    assert [one.tokens for one in got] == [one.tokens for one in want]
    vectors = np.asarray(bj.embed(without.params, np.array(PROMPTS[1])))
    options = {"sampling": GREEDY, "max_new_tokens": NEW, "ignore_eos": True}
    (one,), (other,) = (bj.generate(each, [vectors], **options) for each in (pair, without))
    assert one.tokens == other.tokens


@pytest.mark.parametrize("draft", [LLAMA, HYBRID, WINDOWED])
def test_a_saved_state_goes_on(draft, tmp_path):
    pair = model(LLAMA, draft)
    state, *_ = decoded(pair, prefilled(pair, [GREEDY, HOT]), 2)
    bj.save_state(tmp_path / "state", state)
    again = bj.load_state(tmp_path / "state", pair)
    jax.tree.map(np.testing.assert_array_equal, again.speculation, state.speculation)
    got, want = decoded(pair, again, NEW), decoded(pair, state, NEW)
    assert (np.asarray(want.tokens) != NO_TOKEN).sum() > NEW
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.state.speculation.steps, want.state.speculation.steps)
    with pytest.raises(ValueError, match="a draft model True, but the model False"):
        bj.load_state(tmp_path / "state", model(LLAMA))
    if draft == LLAMA:
        with pytest.raises(ValueError, match=r"this state has .* but the model"):
            bj.load_state(tmp_path / "state", model(LLAMA, QWEN3))


def test_what_it_needs_is_said():
    pair, source = model(LLAMA, LLAMA), "synth:tiny-llama:q8_0"
    with pytest.raises(ValueError, match=r"'ngram', but this model has the draft model 'synth:tiny-llama"):
        bj.generate(pair, [[1]], speculate="ngram")
    with pytest.raises(ValueError, match=r"'draft_model' needs a draft model; .*draft_model=\"small.gguf\""):
        bj.generate(model(LLAMA), [[1]], speculate="draft_model")
    with pytest.raises(NotImplementedError, match="speculate='draft_model'; leave the draft model or these"):
        bj.generate(pair, [[1]], sampling=bj.SamplingParams(min_tokens=3))
    with pytest.raises(ValueError, match="draft and draft_model are two proposers"):
        bj.RunConfig(draft=True, draft_model=source)
    with pytest.raises(TypeError, match="draft_model is a int"):
        bj.RunConfig(draft_model=3)
    with pytest.raises(NotImplementedError, match="draft_model over a mesh"):
        bj.load(source, bj.RunConfig(draft_model=source), mesh=bj.make_mesh(1, 1))
    with pytest.raises(
        ValueError,
        match=r"draft_model: .*stories.* has another vocabulary than .*: token 0 is .*, not '!'; give",
    ):
        bj.load(source, bj.RunConfig(draft_model="stories"))


def test_the_same_weights_without_it():
    alone = model(LLAMA, LLAMA).without_draft_model()
    want = [one.tokens for one in plain(LLAMA)]
    assert [one.tokens for one in answers(alone)] == want
    got = answers(alone, speculate="ngram", sampling=[GREEDY, HOT, PENALIZED, BIASED])
    assert [one.tokens for one in got] == want
    assert alone.params.embed is model(LLAMA, LLAMA).params.embed


def test_vocabularies_may_differ_in_what_pads_them():
    one = Tokenizer.from_checkpoint(open_checkpoint(LLAMA))

    def ending(*texts: str, kind: int = 1) -> Tokenizer:
        kinds = one.kinds + bytes([kind]) * len(texts)
        return Tokenizer(**vars(one) | {"texts": [*one.texts, *texts], "kinds": kinds})

    padded, longer = ending("[PAD0]", kind=UNUSED), ending("<think>")
    assert differ_at(one, padded) is differ_at(padded, one) is differ_at(padded, longer) is None
    assert differ_at(longer, ending("<other>")) == len(one.texts)
    assert differ_at(one, ending(*map(str, range(200)))) == len(one.texts)


def test_its_bytes_count(monkeypatch):
    both = architectures.describe(open_checkpoint(LLAMA), draft_model=open_checkpoint(QWEN3))
    run = plan.resolve(both, bj.RunConfig(context=64, batch_size=2, draft_model=QWEN3))
    each = [architectures.describe(open_checkpoint(source)) for source in (LLAMA, QWEN3)]
    assert memory.weight_bytes(both, run) == sum(memory.weight_bytes(one, run) for one in each)
    per_token = [memory.bytes_per_token(one.config, run) for one in each]
    assert memory.bytes_per_token(both.config, run) == sum(per_token) and min(per_token) > 0
    fits = memory.weight_bytes(each[0], run) + memory.cache_bytes(each[0].config, run)
    monkeypatch.setattr(machine, "device_memory", lambda: fits + 1000)
    with pytest.raises(MemoryError, match=r"and its draft model .*qwen3.* leave the draft model out"):
        memory.check(both, run)
    memory.check(memory.without_draft_model(both), run)


def test_the_command_line(tmp_path):
    tiny = "synth:tiny-llama:q8_0"
    options = ["-p", "Hello", "-n", "12", "--temp", "0", "--ignore-eos", "--json", "--ctx", "64"]
    alone, both = (
        json.loads(run("generate", "-m", tiny, *more, *options).stdout) for more in ([], ["--draft", tiny])
    )
    assert both["tokens"] == alone["tokens"] and both["tokens_per_step"] > 2
    for more, message in {
        ("--speculate", "draft_model"): "--speculate draft_model needs --draft",
        ("--speculate", "ngram", "--draft", tiny): "--speculate ngram: give one of them",
    }.items():
        done = run("generate", "-m", tiny, *more, *options)
        assert done.exit_code != 0 and message in " ".join(done.stderr.replace("│", "").split())
    done = run("bench", "-m", tiny, "--draft", tiny, "-p", 0, "-n", 0, "-g", 16, "-d", 32, "-r", 1, "--json")
    row = json.loads(done.stdout)
    assert row["test"] == "gen16+draft_model@d32" and row["tokens_per_step"] >= 4
