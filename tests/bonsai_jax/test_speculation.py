"""Speculation draws what plain decoding draws, in fewer steps where the text foresees itself."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.decoding import jitted, proposers, sampling, speculation, steps
from bonsai_jax.decoding.proposers import ngram
from bonsai_jax.decoding.state import Speculation
from bonsai_jax.network import decoder
from checkpoints import Checkpoint, open_checkpoint
from tests.bonsai_jax.tokens import assert_same

GREEDY = bj.SamplingParams(temperature=0.0)
HOT = bj.SamplingParams(temperature=1.0, seed=3)
PENALIZED = dataclasses.replace(HOT, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2)
BIASED = dataclasses.replace(GREEDY, logit_bias={7: 2.0}, repetition_penalty=1.3)
ROWS = [GREEDY, HOT, PENALIZED, BIASED]
RNG = np.random.default_rng(0)
IDS = [RNG.integers(0, 256, n).tolist() for n in (6, 31, 17, 24)]
NEW, CONTEXT = 17, 48  # row 1 fills its pages: the last token is never read
NONE = sampling.NO_TOKEN
LLAMA, HYBRID = "synth:tiny-llama:q8_0", "synth:tiny-qwen35:f32"


@functools.cache
def tiny(source=LLAMA) -> bj.Model:
    checkpoint = open_checkpoint(source)
    return bj.from_checkpoint(
        two_layers(checkpoint) if source == HYBRID else checkpoint, bj.RunConfig(page_size=16)
    )


def two_layers(checkpoint: Checkpoint) -> Checkpoint:
    """Of a hybrid, its first layer, a delta net, and its third, with attention: few, to be compiled soon. Of
    others the first two: few to be run."""
    hybrid = checkpoint.metadata["general.architecture"] == "qwen35"
    aside, last = (("blk.1.", "blk.3."), "blk.2.") if hybrid else (("blk.2.",), "blk.1.")
    tensors = {
        name.replace(last, "blk.1."): t
        for name, t in checkpoint.tensors.items()
        if not name.startswith(aside)
    }
    metadata = dict(checkpoint.metadata)
    metadata[f"{metadata['general.architecture']}.block_count"] = 2
    if hybrid:
        metadata["qwen35.attention.recurrent_layers"] = np.array([1, 0])
    return dataclasses.replace(checkpoint, tensors=tensors, metadata=metadata)


def new(speculate=None, most=NEW, source=LLAMA):
    return bj.new_state(tiny(source), len(IDS), CONTEXT, ROWS, most, ignore_eos=True, speculate=speculate)


def prompts():
    tokens = np.zeros((len(IDS), 32), np.int32)
    for row, ids in zip(tokens, IDS, strict=True):
        row[: len(ids)] = ids
    return jnp.array(tokens), jnp.array([len(ids) for ids in IDS])


def run(state, source=LLAMA):
    model = tiny(source)
    return jitted.generate_tokens(model.params, state, *prompts(), model.config, size=NEW, logprobs=2)


@functools.cache
def plain(source=LLAMA):
    """The state behind plain decoding, its tokens, and their log-probabilities."""
    state, tokens, scores = run(new(source=source), source)
    return state, np.asarray(tokens), scores


def with_known_answers(most=NEW, source=LLAMA):
    """A state whose proposer knows the answers, but for a mistake at every fifth token of row 1, and all of
    row 2: what is accepted is known, whatever a random model writes."""
    answers = plain(source)[1].copy()
    answers[1, ::5] = (answers[1, ::5] + 1) % 256
    answers[2] = NONE
    state = new("ngram", most, source)
    ids = np.full(state.speculation.ids.shape, NONE)
    for row, (prompt, answer) in enumerate(zip(IDS, answers, strict=True)):
        ids[row, len(prompt) : len(prompt) + NEW] = answer
    ids, trust = jnp.array(ids, jnp.int32), jnp.ones(len(IDS))
    return state.replace(
        speculation=state.speculation.replace(ids=ids, trust=trust, proposer="known", width=4)
    )


def read_on(params, state, config, count):
    """A proposer that finds the answers behind the text."""
    ids = state.speculation.ids
    at = state.cache.lengths[:, None] + 1 + jnp.arange(count)
    known = jnp.take_along_axis(ids, jnp.minimum(at, ids.shape[1] - 1), 1)
    return jnp.where(at < ids.shape[1], known, NONE), state


@pytest.fixture(autouse=True)
def teller(monkeypatch):
    get, known = (
        proposers.get,
        SimpleNamespace(propose=read_on, time=lambda params, config: 0.0, MEMORY=8, ALONE=4),
    )
    monkeypatch.setattr(proposers, "get", lambda name: known if name == "known" else get(name))


def test_rows_advance_by_what_was_foreseen_and_draw_the_same():
    """Greedy, sampled, penalized and biased rows in one batch; log-probabilities too."""
    before, want, scores = plain()
    state, got, speculated = run(with_known_answers())
    assert_same(got, want)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), speculated, scores)
    # Of 16 tokens behind the first: 4 a step; 4 and 1 in turns, up to each mistake and at it; 1.
    assert state.speculation.steps.tolist() == [4, 7, 16, 4]
    assert state.cache.lengths.tolist() == before.cache.lengths.tolist() == [22, 47, 33, 40]
    assert state.tokens.tolist() == before.tokens.tolist() and not state.remaining.any()
    for row, (prompt, answer) in enumerate(zip(IDS, want.tolist(), strict=True)):
        assert state.speculation.ids[row, : len(prompt) + NEW].tolist() == prompt + answer
    counts = [np.bincount(row, minlength=tiny().config.vocab_size) for row in want]
    np.testing.assert_array_equal(state.sampler.counts, counts)


def test_recurrent_states_take_in_what_is_kept():
    """Rows that keep different numbers of proposals, and one without any: the same tokens, and the states
    behind them."""
    before, want, _ = plain(HYBRID)
    state, got, _ = run(with_known_answers(source=HYBRID), HYBRID)
    assert_same(got, want)
    assert state.speculation.steps.tolist() == [4, 7, 16, 4]
    assert state.cache.lengths.tolist() == before.cache.lengths.tolist()
    for ours, theirs in zip(
        *(jax.tree.leaves(s.cache.states["delta_net"][0]) for s in (state, before)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_a_stop_token_ends_its_row_within_a_run():
    want = plain()[1]
    stop = int(want[0, 7])  # the third of the four that a step draws
    assert stop not in want[0, :7]
    state = with_known_answers()
    state, drawn, _ = run(state.replace(stop_ids=state.stop_ids.at[0, 0].set(stop)))
    assert drawn[0].tolist() == [*want[0, :8].tolist(), *[NONE] * (NEW - 8)]
    np.testing.assert_array_equal(drawn[1:], want[1:])
    assert state.cache.lengths.tolist() == [6 + 7, 47, 33, 40] and state.tokens[0] == stop


def test_rows_have_their_own_limits():
    most, want = [3, 1, 17, 8], plain()[1]
    state, drawn, _ = run(with_known_answers(most))
    for row, n in enumerate(most):
        assert drawn[row].tolist() == [*want[row, :n].tolist(), *[NONE] * (NEW - n)]
    assert state.cache.lengths.tolist() == [6 + 2, 31, 17 + 16, 24 + 7]


def test_pages_of_other_rows_are_never_written():
    """Row 1 has no room for what it may still produce: its proposals end where its pages do."""
    before, want, _ = plain()
    state, drawn, _ = run(with_known_answers([NEW, NEW + 9, NEW, NEW]))
    np.testing.assert_array_equal(drawn, want)
    np.testing.assert_allclose(
        state.cache.states["attention"][0].k[:, :3], before.cache.states["attention"][0].k[:, :3], atol=1e-5
    )


def test_decoding_in_pieces_and_from_a_file(tmp_path):
    """Rows that have filled the output wait for the others; a saved state goes on."""
    model = tiny()
    state, first, _ = jitted.prefill(model.params, with_known_answers(), *prompts(), model.config)
    pieces = [first[:, None]]
    for piece in range(20):
        if not state.remaining.any():
            break
        state, drawn, _ = jitted.decode(model.params, state, model.config, limit=3, size=5)
        pieces.append(drawn)
        if piece == 0:
            assert (drawn >= 0).sum(1).tolist() == [5, 5, 3, 5]
            bj.save_state(tmp_path / "state", state)
            back = bj.load_state(tmp_path / "state", model)
            assert jax.tree.structure(back) == jax.tree.structure(state)
            jax.tree.map(np.testing.assert_array_equal, back.speculation, state.speculation)
            state = back
    joined = np.concatenate(pieces, axis=1).tolist()
    assert_same([[token for token in row if token >= 0] for row in joined], plain()[1])


def looping(logits, state):
    """Three quarters of the time the model says 60, 61, ... 66, 60, ..., and never a token for the fifth
    time."""
    following = jnp.where((state.tokens >= 60) & (state.tokens < 66), state.tokens + 1, 60)
    on = (state.cache.lengths % 16 < 12) & (state.remaining > 1)
    often = state.sampler.counts >= 4
    return jnp.where(often, -jnp.inf, logits) + 30.0 * on[:, None] * jax.nn.one_hot(
        following, logits.shape[1]
    )


PUSH = jnp.asarray(RNG.normal(0, 0.5, 256), jnp.float32)
STEERED = bj.Taps(edit=lambda name, layer, x: x + PUSH * (layer == 1) if name == "output" else x)


def test_a_text_that_repeats_takes_few_steps():
    """By n-grams, greedy and sampled, with a processor and taps."""
    ids = [[60, 61, 62, 63, 64, 65, 66] * 3, IDS[1]]
    options = {"max_new_tokens": 40, "ignore_eos": True, "logits_processor": looping, "taps": STEERED}
    want, got = (
        bj.generate(tiny(), ids, sampling=ROWS[:2], speculate=how, **options) for how in (None, "ngram")
    )
    assert [o.tokens for o in got] == [o.tokens for o in want]
    assert [o.steps for o in want] == [39, 39] and max(o.steps for o in got) < 32


def scripted(script, monkeypatch) -> tuple[int, int]:
    """The steps of an answer that is this script, and how often n-grams were looked up. The prompt is 40
    tokens that differ."""
    model, prompt, looks = tiny(), np.arange(60, 100, dtype=np.int32), []
    propose = ngram.propose

    def counted(*arguments):
        jax.debug.callback(lambda: looks.append(1))
        return propose(*arguments)

    monkeypatch.setattr(ngram, "propose", counted)
    new = len(script)
    state = bj.new_state(model, 1, 40 + new, ROWS[0], new + 1, ignore_eos=True, speculate="ngram")
    state, *_ = jitted.prefill(model.params, state, prompt[None], np.array([40], np.int32), model.config)
    script, s = jnp.asarray(script, jnp.int32), state.speculation
    s = s.replace(ids=s.ids.at[:, 40].set(script[0]))
    state = state.replace(tokens=script[:1], speculation=s)

    def forced(logits, state):
        token = script[jnp.clip(state.cache.lengths - 40, 0, new - 1)]
        return logits + 1e6 * jax.nn.one_hot(token, logits.shape[1])

    options = {"config": model.config, "limit": new, "size": new - 1, "logits_processor": forced}
    state, drawn, _ = jax.jit(functools.partial(steps.decode, **options))(model.params, state)
    jax.effects_barrier()
    np.testing.assert_array_equal(drawn[0], script[1:])
    return int(state.speculation.steps[0]), len(looks)


def test_texts_are_looked_up_as_often_as_it_pays(monkeypatch):
    """At each step while proposals are trusted, so that few steps are lost behind a token that nothing
    foresees; else at every fourth."""
    free = np.arange(200, 241)
    assert scripted(free, monkeypatch) == (40, 10)
    edits = np.where(np.arange(40) % 8 == 7, free[:40], np.arange(60, 100))
    made, looks = scripted(edits, monkeypatch)
    assert made < 18 and looks == made


def test_frequencies_are_those_of_the_distribution():
    """2,048 rows: the first token and, where that is the one that was proposed, the second."""
    model, rows = tiny(), 2048
    ids = np.array([[*IDS[0], *[0] * 10]], np.int32)  # as bj.logits reads them
    cache = bj.new_cache(model, 1, 16)
    _, cache = jitted.extend(model.params, cache, ids, np.array([6], np.int32), model.config)
    hot = bj.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
    p = np.asarray(jax.nn.softmax(bj.logits(model, [*IDS[0], 9])[-1]))
    guess = int(p.argmax())
    after = np.asarray(jax.nn.softmax(bj.logits(model, [*IDS[0], 9, guess])[-1]))
    state = bj.new_state(model, rows, 16, hot, 8, ignore_eos=True, speculate="ngram")
    state = state.replace(cache=cache, tokens=jnp.full(rows, 9))

    @jax.jit
    def step(params, state):
        state = state.replace(cache=state.cache.take([0] * rows))
        return speculation.step(
            params, state, jnp.full((rows, 1), guess), jnp.ones(rows, bool), config=model.config
        )

    drawn = np.asarray(step(model.params, state).tokens)
    accepted = drawn[:, 0] == guess
    np.testing.assert_array_equal(drawn[:, 1] >= 0, accepted)
    for tokens, probabilities in ((drawn[:, 0], p), (drawn[accepted, 1], after)):
        n, likely = len(tokens), probabilities > 0.01
        assert n > 100 and likely.sum() > 3
        found = np.bincount(tokens, minlength=len(p)) / n
        error = np.sqrt(probabilities * (1 - probabilities) / n)
        assert (abs(found - probabilities)[likely] < 5 * error[likely]).all()


def trusting(*trust, width):
    ids, steps = jnp.zeros((len(trust), 1), jnp.int32), jnp.zeros(len(trust), jnp.int32)
    return Speculation(ids, steps, jnp.array(trust), width=width)


@pytest.mark.parametrize(
    ("trust", "proposals", "running", "tokens"),
    [
        ([0.3], 7, [True], 1),
        ([0.45], 7, [True], 4),
        ([0.7], 7, [True], 4),
        ([0.8], 7, [True], 8),
        ([1.0], 3, [True], 4),  # the other four would be no proposals
        ([1.0], 0, [True], 1),
        ([1.0, 0.0], 3, [True, True], 4),  # 4 and 1 tokens in the time of 1.4 steps
        ([0.5, 0.0], 3, [True, True], 1),
        ([0.5, 0.0], 3, [True, False], 4),
        ([0.7, 0.3, 0.7], 1, [True] * 3, 2),
        ([0.1, 0.1, 0.5], 1, [True] * 3, 1),
    ],
)
def test_a_step_reads_what_draws_most_in_its_time(trust, proposals, running, tokens):
    width = speculation.width(len(trust), "ngram")
    given = jnp.where(jnp.arange(width - 1) < proposals, 5, NONE) * jnp.ones((len(trust), 1), jnp.int32)
    chosen = speculation.tokens_to_read(trusting(*trust, width=width), given, jnp.array(running))
    assert speculation.widths(width)[chosen] == tokens


def test_a_step_after_many_keys_reads_less():
    """Each of its tokens reads all of them."""
    params, state = tiny().params, new("ngram")
    keys = state.cache.states["attention"][0].k
    per_token = 2 * keys.shape[0] * keys.shape[3] * keys.shape[4] * keys.dtype.itemsize
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    weights -= 0 if params.head is None else params.embed.nbytes
    each = speculation.key_time(params, state.cache, tiny().config)
    np.testing.assert_allclose(each, per_token / weights / 2)
    read = lambda keys: speculation.tokens_to_read(  # noqa: E731
        trusting(0.9, width=8), jnp.zeros((1, 7), jnp.int32), jnp.array([True]), jnp.array([keys])
    )
    assert [int(read(keys)) for keys in (0.0, 0.5, 1.0, 100.0)] == [2, 1, 1, 0]


def test_trust_is_the_share_of_late_proposals_that_were_right():
    """Read or not; those behind a row's tokens are not checked, and without proposals nothing is learnt."""
    proposals = jnp.array([[4, 5, 6], [4, 5, 6], [4, 5, 6], [4, 5, NONE], [NONE] * 3, [4, 5, 6]])
    drawn = jnp.array(
        [[4, 5, 6, 7], [4, 9, NONE, NONE], [9, *[NONE] * 3], [4, 5, 9, NONE], [9, *[NONE] * 3], [NONE] * 4]
    )
    got = speculation.learned(trusting(*[0.5] * 6, width=4), proposals, drawn).trust
    checks = [[1, 1, 1], [1, 0], [0], [1, 1], [], []]
    want = [functools.reduce(lambda trust, right: trust * 7 / 8 + right / 8, each, 0.5) for each in checks]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_trust_in_guesses_that_were_made_one_by_one():
    """A wrong one says nothing against the next; without a guess or a token nothing is learnt."""
    guesses = jnp.array([[4, 5, 6], [4, 9, 6], [NONE, 5, 6], [4, 5, 6], [NONE] * 3])
    drawn = jnp.array([[4, 5, 6], [4, 5, 6], [4, 5, NONE], [NONE] * 3, [NONE] * 3])
    got = speculation.compared(trusting(*[0.5] * 5, width=4), guesses, drawn).trust
    checks = [[1, 1, 1], [1, 0, 1], [1], [], []]
    want = [functools.reduce(lambda trust, right: trust * 7 / 8 + right / 8, each, 0.5) for each in checks]
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("source", [LLAMA, "synth:tiny-qwen3moe:q8_0"])
def test_tokens_of_a_step_are_rows_where_kernels_have_one_token_each(source, monkeypatch):
    """Here by the reference: hidden vectors, keys and lengths are those of a step that is not taken apart."""
    model, tokens = tiny(source), jnp.array(RNG.integers(0, 256, (3, 4)))
    cache = bj.new_cache(model, 3, 32)
    read = jnp.array(RNG.integers(0, 256, (3, 15)))
    _, cache = bj.extend(model.params, cache, read, jnp.array([15, 3, 8]), model.config)
    positions = jnp.where(jnp.arange(4) < jnp.array([4, 2, 0])[:, None], cache.lengths[:, None], -1)
    positions = jnp.where(positions < 0, -1, positions + jnp.arange(4))

    def step():
        return jax.jit(lambda: decoder.decoder(model.params, tokens, positions, cache, model.config, 32))()

    want, before, _ = step()
    monkeypatch.setattr(decoder, "_as_rows", lambda params, tokens, *_: tokens.shape[1] > 1)
    got, after, _ = step()
    valid = (positions >= 0)[..., None]
    np.testing.assert_allclose(jnp.where(valid, got, 0), jnp.where(valid, want, 0), atol=1e-4)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), after, before)


def test_tokens_of_a_step_are_rows_where_a_state_waits_for_those_accepted(monkeypatch):
    """Here by the reference, with delta nets: hidden vectors, the states before and after some of the tokens
    are accepted, and keys are those of a step that is not taken apart."""
    model, tokens = tiny(HYBRID), jnp.array(RNG.integers(0, 256, (3, 4)))
    cache, config = bj.new_cache(model, 3, 32), model.config
    read = jnp.array(RNG.integers(0, 256, (3, 15)))
    _, cache = bj.extend(model.params, cache, read, jnp.array([15, 3, 8]), config)
    offset, counts = jnp.arange(4), jnp.array([[4], [2], [0]])
    positions = jnp.where(offset < counts, cache.lengths[:, None] + offset, -1)
    accepted = jnp.where(offset < jnp.array([[3], [1], [0]]), positions, -1)

    def step():
        hidden, after, updates = decoder.decoder(
            model.params, tokens, positions, cache, config, 32, keep_updates=True
        )
        return hidden, after, decoder.replay(model.params, after, updates, accepted, config)

    want, *before = jax.jit(lambda: step())()
    monkeypatch.setattr(decoder, "_as_rows", lambda params, tokens, *_: tokens.shape[1] > 1)
    got, *after = jax.jit(lambda: step())()
    valid = (positions >= 0)[..., None]
    np.testing.assert_allclose(jnp.where(valid, got, 0), jnp.where(valid, want, 0), atol=1e-4)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), after, before)
    (waiting,), (stored,) = (each.states["delta_net"] for each in after)
    np.testing.assert_array_equal(waiting.s, cache.states["delta_net"][0].s)
    changed = np.abs(stored.s - waiting.s).max(axis=(0, 2, 3, 4)) > 1e-3
    assert changed.tolist() == [True, True, False]


def of_text(rows, count, capacity=16):
    ids = np.full((len(rows), capacity), 99, np.int32)  # what lies behind the text is of no text
    for row, text in zip(ids, rows, strict=True):
        row[: len(text)] = text
    ends = jnp.array([len(text) - 1 for text in rows])
    state = SimpleNamespace(
        speculation=Speculation(jnp.array(ids), ends, ends), cache=SimpleNamespace(lengths=ends)
    )
    return jax.jit(lambda: ngram.propose(None, state, None, count)[0])().tolist()


def test_ngrams_propose_what_followed():
    rows = {
        (1, 2, 3, 4, 5, 1, 2, 3): [4, 5, 1],
        (1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3): [4, 9, 2],  # three tokens before two
        (9, 2, 3, 4, 1, 2, 3, 5, 2, 3): [5, 2, 3],  # of two the latest
        (7, 3, 4, 5, 3): [4, 5, 3],  # one, for want of more
        (1, 2, 1, 2, 1, 2): [1, 2, 1],  # in circles
        (5, 5, 5): [5, 5, 5],
        (1, 2, 3): [-1, -1, -1],
        (4,): [-1, -1, -1],
        (-1, -1, -1): [-1, -1, -1],  # vectors
        (-1, 3, 4, -1, 3): [4, -1, 3],
        (*range(1, 15), 1, 2): [3, 4, 5],  # to the end of the pages
    }
    assert dict(zip(rows, of_text(rows, 3), strict=True)) == rows


def test_a_prompt_of_vectors_and_a_stream_that_a_stop_text_ends():
    vectors = bj.embed(tiny().params, jnp.array(IDS[0]))
    options = {"max_new_tokens": 24, "ignore_eos": True, "speculate": "ngram"}
    (got,) = bj.generate(tiny(), vectors, sampling=GREEDY, **options)
    assert_same([got.tokens[:NEW]], [plain()[1][0]])
    repeated = dataclasses.replace(GREEDY, logit_bias={60: 1e6})
    (whole,) = bj.generate(tiny(), vectors, sampling=repeated, **options)
    assert whole.tokens == [60] * 24 and whole.steps < 12
    stop = whole.text[:20]
    pieces = list(bj.stream(tiny(), vectors, sampling=repeated, stop=stop, **options))
    assert "".join(p.text for p in pieces) == "" and pieces[-1].finish_reason == "stop"
    tokens = [t for p in pieces for t in p.tokens]
    assert tokens == whole.tokens[: len(tokens)]
    assert pieces[0].steps == 0 and 0 < sum(p.steps for p in pieces) < len(tokens) - 1
    with pytest.raises(
        NotImplementedError, match="speculate is 'oracle'; supported: " + ", ".join(proposers.names())
    ):
        bj.generate(tiny(), [IDS[0]], speculate="oracle")


def test_the_cache_is_updated_in_place():
    state = bj.new_state(tiny(), 1, 2048, GREEDY, 8, speculate="ngram")
    cache_bytes = state.cache.states["attention"][0].k.nbytes + state.cache.states["attention"][0].v.nbytes
    compiled = jitted.decode.lower(tiny().params, state, tiny().config, limit=4, size=8).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= cache_bytes
    assert compiled.memory_analysis().temp_size_in_bytes < cache_bytes / 2


def test_penalties_are_those_of_each_position():
    @jax.jit
    def foreseen(s):
        s = sampling.remember(s, jnp.array([[1, 1], [2, 5]]), jnp.array([[True, True], [True, False]]))
        return sampling.foresee(s, jnp.array([[1, 3], [4, -1]]))

    each = foreseen(sampling.sampler(PENALIZED, 2, 8))
    counts = [
        [[0, 2, 0, 0, 0, 0, 0, 0], [0, 3, 0, 0, 0, 0, 0, 0], [0, 3, 0, 1, 0, 0, 0, 0]],
        [[0, 0, 1, 0, 0, 0, 0, 0], [0, 0, 1, 0, 1, 0, 0, 0], [0, 0, 1, 0, 1, 0, 0, 0]],
    ]
    np.testing.assert_array_equal(each.counts, counts)
    np.testing.assert_array_equal(each.seen, np.array(counts) > 0)
