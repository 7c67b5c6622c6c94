"""Prefill, step and generate: equal along every way round, row by row, page by page, and in place."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.decoding import jitted
from bonsai_jax.decoding import steps as core
from bonsai_jax.network.kinds import attention
from tests.bonsai_jax.tokens import assert_same

GREEDY = bj.SamplingParams(temperature=0.0)


@functools.cache
def tiny(name="tiny-llama"):  # whose text varies
    return bj.load(f"synth:{name}:q8_0", bj.RunConfig(page_size=16, cache_dtype="float32", impl="reference"))


def prompt(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, n).tolist()


# One shape for all states, so that few programs are compiled; rows without a prompt read one token.
ROWS, WIDTH, CONTEXT, NEW = 6, 64, 512, 24


def new(model, params=GREEDY, max_new=NEW):
    return bj.new_state(model, ROWS, CONTEXT, params, max_new, ignore_eos=True)


def padded(prompts):
    prompts = [*prompts, *[[0]] * ROWS][:ROWS]
    tokens = np.zeros((ROWS, WIDTH), np.int32)
    for row, ids in zip(tokens, prompts, strict=True):
        row[: len(ids)] = ids
    return tokens, np.array([len(ids) for ids in prompts], np.int32)


def read(model, state, prompts):
    return jitted.prefill(model.params, state, *padded(prompts), model.config).state


def prefilled(model, prompts, params=GREEDY):
    return read(model, new(model, params), prompts)


def decode(model, state, limit):
    return jitted.decode(model.params, state, model.config, limit=limit, size=NEW)


def behind(cache, state):
    """A state that reads on behind a cache."""
    return core.start(cache, state.sampler, state.stop_ids, jnp.full(ROWS, NEW))


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("tiny-qwen3", "tiny-qwen2")]


@pytest.mark.parametrize("name", ["tiny-llama", *OTHERS])  # test_oracle_tiny.py decodes with each
def test_prefill_equals_reading_token_by_token(name):
    """The seed systems' caches went out of step at 17 tokens."""
    model, ids, lengths = tiny(name), prompt(64), np.array([1, 2, 16, 17, 33, 64])

    def keys(state, row):
        pages = np.asarray(state.cache.states["attention"][0].k)[:, state.cache.block_table[row]]
        return pages.reshape(model.config.num_layers, -1, model.config.attention.kv_width)[:, : lengths[row]]

    at_once = prefilled(model, [ids[:length] for length in lengths])
    one_by_one = prefilled(model, [ids[:1]] * ROWS)
    for at in range(1, 64):
        more = at < lengths
        forced = np.where(more, ids[at], one_by_one.tokens).astype(np.int32)
        one_by_one = one_by_one.replace(tokens=forced, remaining=more.astype(np.int32))
        one_by_one = decode(model, one_by_one, limit=1).state
    assert at_once.cache.lengths.tolist() == one_by_one.cache.lengths.tolist() == lengths.tolist()
    for row in range(ROWS):
        np.testing.assert_allclose(keys(at_once, row), keys(one_by_one, row), atol=2e-5)
    assert at_once.tokens.tolist() == one_by_one.tokens.tolist()


def test_prefill_in_chunks_equals_prefill_at_once(monkeypatch):
    model = tiny()
    prompts = [prompt(61, 1), prompt(40, 2), prompt(64, 3), prompt(24, 4)]
    whole = prefilled(model, prompts)
    monkeypatch.setattr(attention, "PREFILL_CHUNK", 12)  # no divisor of 64
    run = jax.jit(core.prefill, static_argnames="config")
    chunked = run(model.params, new(model), *padded(prompts), config=model.config).state
    np.testing.assert_array_equal(chunked.cache.lengths, whole.cache.lengths)
    assert_same([chunked.tokens], [whole.tokens])
    np.testing.assert_allclose(
        chunked.cache.states["attention"][0].v, whole.cache.states["attention"][0].v, atol=2e-5
    )


def test_prefill_goes_on_behind_what_the_cache_holds():
    model, ids = tiny(), prompt(60, 4)
    state = prefilled(model, [ids[:23]])
    state = read(model, behind(state.cache, state), [ids[23:]])
    assert state.tokens[0] == prefilled(model, [ids]).tokens[0] and state.cache.lengths[0] == 60


def test_a_row_keeps_its_bits_whatever_the_other_rows_hold():
    model, own = tiny(), prompt(20, 5)
    sampling = [dataclasses.replace(bj.SamplingParams(), seed=s) for s in range(ROWS)]
    runs = []
    for seed, lengths in ((6, (3, 31)), (7, (32, 18))):
        prompts = [prompt(lengths[0], seed), own, prompt(lengths[1], seed + 10)]
        state, drawn, _ = decode(model, prefilled(model, prompts, sampling), limit=NEW)
        (stored,), pages = state.cache.states["attention"], state.cache.block_table[1]
        runs.append((drawn[1], np.asarray(stored.k)[:, pages], np.asarray(stored.v)[:, pages]))
    assert_same(*([drawn] for drawn, _, _ in runs))
    for one, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_row_in_a_batch_gives_the_text_it_gives_alone():
    model = tiny()
    prompts = [prompt(n, n) for n in (18, 24, 30)]
    together = bj.generate(model, prompts, max_new_tokens=20, sampling=GREEDY, ignore_eos=True)
    alone = [
        bj.generate(model, [ids], max_new_tokens=20, sampling=GREEDY, ignore_eos=True)[0] for ids in prompts
    ]
    assert_same([output.tokens for output in together], [output.tokens for output in alone])
    assert [output.text for output in together] == [output.text for output in alone]


def test_shuffled_pages_give_the_same_bits_as_pages_in_order():
    model, prompts = tiny(), [prompt(30, 8), prompt(9, 9)]
    state, other = new(model), new(model)
    table = np.random.default_rng(0).permutation(state.cache.block_table.size).astype(np.int32)
    table = table.reshape(state.cache.block_table.shape)
    results = []
    for s in (state, other.replace(cache=other.cache.replace(block_table=jnp.asarray(table)))):
        s, drawn, _ = decode(model, read(model, s, prompts), limit=15)
        results.append((drawn, np.asarray(s.cache.states["attention"][0].k)[:, s.cache.block_table]))
    assert_same(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_the_cache_is_donated_and_updated_in_place():
    model = tiny()
    state = bj.new_state(model, 1, 2048, GREEDY, 8, ignore_eos=True)
    state = state.replace(tokens=jnp.zeros(1, jnp.int32))  # the first to be read
    (stored,) = state.cache.states["attention"]
    cache_bytes = stored.k.nbytes + stored.v.nbytes
    compiled = jitted.decode.lower(model.params, state, model.config, limit=4, size=8).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= cache_bytes
    assert (
        compiled.memory_analysis().temp_size_in_bytes < cache_bytes / 2
    )  # XLA's dots on CPU copy one layer's weights
    before = stored.k.unsafe_buffer_pointer()
    after = jitted.decode(model.params, state, model.config, limit=4, size=8).state
    assert stored.k.is_deleted() and stored.v.is_deleted()
    assert after.cache.states["attention"][0].k.unsafe_buffer_pointer() == before


def test_greedy_tokens_are_the_argmax_of_teacher_forced_logits():
    model, ids = tiny(), prompt(19, 11)
    output = bj.generate(model, [ids], max_new_tokens=30, sampling=GREEDY, ignore_eos=True)[0]
    scores = bj.logits(model, ids + output.tokens[:-1])
    assert scores.shape == (48, model.config.vocab_size) and scores.std() > 2
    assert_same([output.tokens], [scores[18:].argmax(-1)])


def test_stream_and_generate_agree_and_a_seed_repeats():
    model, ids = tiny(), prompt(12, 12)
    sampling = bj.SamplingParams(temperature=1.0, seed=5)
    whole = bj.generate(model, [ids], max_new_tokens=40, sampling=sampling, ignore_eos=True)[0]
    pieces = list(bj.stream(model, ids, max_new_tokens=40, sampling=sampling, ignore_eos=True))
    assert "".join(p.text for p in pieces) == whole.text
    assert_same([[t for p in pieces for t in p.tokens]], [whole.tokens])
    assert len(whole.tokens) == 40
    assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == whole.finish_reason == "length"
    other = bj.generate(
        model, [ids], max_new_tokens=40, sampling=dataclasses.replace(sampling, seed=6), ignore_eos=True
    )
    assert other[0].tokens != whole.tokens


def generated(state, prompts):
    model = tiny()
    return jitted.generate_tokens(model.params, state, *padded(prompts), model.config, size=NEW)


def test_an_end_token_ends_its_row_only():
    model, prompts = tiny(), [prompt(7, 13), prompt(8, 14)]
    free = generated(new(model), prompts).tokens.tolist()
    ending = free[0][5]
    state = new(model)
    state = state.replace(stop_ids=state.stop_ids.at[0, 0].set(ending))
    state, drawn, _ = generated(state, prompts)
    at = free[0].index(ending)
    assert drawn[0].tolist() == [*free[0][: at + 1], *[core.NO_TOKEN] * (NEW - 1 - at)]
    assert_same(drawn[1:], free[1:])
    assert state.cache.lengths.tolist()[:2] == [7 + at, 8 + 23]


@pytest.mark.parametrize("logprobs", [None, 2])
def test_each_function_returns_state_tokens_and_logprobs(logprobs):
    """Of two rows the second ends with its first token: steps draw none for it."""
    model, (tokens, lengths) = tiny(), (jnp.array([[1, 2, 3], [4, 5, 6]]), jnp.array([3, 2]))
    state = bj.new_state(model, 2, 64, GREEDY, [4, 1], ignore_eos=True)
    arguments = model.params, state, tokens, lengths, model.config
    options = {"logprobs": logprobs}
    whole = jax.jit(bj.generate_tokens, static_argnames=("size", "logprobs"))(*arguments, size=4, **options)
    first = jax.jit(bj.prefill, static_argnames="logprobs")(*arguments, **options)
    second = jitted.step(model.params, first.state, model.config, **options)
    rest = jitted.decode(model.params, second.state, model.config, limit=2, size=2, **options)
    results = [whole, first, second, rest]
    assert {type(drawn) for drawn in results} == {bj.Drawn}
    assert [drawn.tokens.shape for drawn in results] == [(2, 4), (2,), (2,), (2, 2)]
    joined = jnp.concatenate([first.tokens[:, None], second.tokens[:, None], rest.tokens], axis=1)
    assert joined.tolist() == whole.tokens.tolist()
    assert second.tokens.tolist() == [whole.tokens[0, 1], core.NO_TOKEN]
    for drawn in results:
        if logprobs is None:
            assert drawn.logprobs is None
            continue
        shape = drawn.tokens.shape
        assert drawn.logprobs.token.shape == shape and drawn.logprobs.ids.shape == (*shape, 2)
        likeliest = np.asarray(drawn.logprobs.ids[0, ..., 0] if len(shape) > 1 else drawn.logprobs.ids[:1, 0])
        np.testing.assert_array_equal(likeliest, np.ravel(drawn.tokens[0]))  # greedy


def test_rows_have_their_own_limit():
    _, drawn, _ = generated(new(tiny(), max_new=[3, 9, 1, 24, 2, 23]), [prompt(4), prompt(5)])
    assert (np.asarray(drawn) != core.NO_TOKEN).sum(1).tolist() == [3, 9, 1, 24, 2, 23]


def test_stop_strings_cut_the_text_and_are_never_streamed_in_part():
    model, ids = tiny(), prompt(6, 15)
    free = bj.generate(model, [ids], max_new_tokens=40, sampling=GREEDY, ignore_eos=True)[0].text
    stop = free[9:13]
    at = free.find(stop)
    cut = bj.generate(model, [ids], max_new_tokens=40, sampling=GREEDY, ignore_eos=True, stop=[stop])[0]
    assert (cut.text, cut.finish_reason) == (free[:at], "stop")
    pieces = list(
        bj.stream(model, ids, max_new_tokens=40, sampling=GREEDY, ignore_eos=True, stop=[stop, "never"])
    )
    assert "".join(p.text for p in pieces) == free[:at] and pieces[-1].finish_reason == "stop"


def test_more_prompts_than_rows_run_one_after_the_other_with_the_same_seeds():
    model = tiny()
    prompts, sampling = [prompt(30, s) for s in range(4)], bj.SamplingParams(seed=9)
    at_once = bj.generate(model, prompts, max_new_tokens=8, sampling=sampling, ignore_eos=True)
    small = dataclasses.replace(model, run=dataclasses.replace(model.run, batch_size=1))
    in_turn = bj.generate(small, prompts, max_new_tokens=8, sampling=sampling, ignore_eos=True)
    assert_same([o.tokens for o in in_turn], [o.tokens for o in at_once])


def test_a_rewound_cache_forgets():
    model, ids = tiny(), prompt(20, 16)
    state = prefilled(model, [[*ids, *prompt(11, 17)]])
    state = read(model, behind(state.cache.rewind(jnp.full(ROWS, 12)), state), [ids[12:]])
    assert state.tokens[0] == prefilled(model, [ids]).tokens[0]


@pytest.mark.parametrize("speculate", [None, pytest.param("ngram", marks=pytest.mark.slow)])
def test_an_output_as_wide_as_one_token_and_a_limit_beyond_the_width(speculate):
    model, ids = tiny(), prompt(5, 3)

    def fresh():
        return bj.new_state(model, ROWS, CONTEXT, GREEDY, NEW, ignore_eos=True, speculate=speculate)

    begun = read(model, fresh(), [ids])
    one = jitted.generate_tokens(model.params, fresh(), *padded([ids]), model.config, size=1)
    np.testing.assert_array_equal(one.tokens[:, 0], begun.tokens)
    state, first, _ = jitted.decode(model.params, begun, model.config, limit=9, size=1)
    rest = decode(model, state, NEW).tokens
    whole = decode(model, read(model, fresh(), [ids]), NEW).tokens
    drawn = NEW - 1  # behind prefill's
    np.testing.assert_array_equal(np.hstack([first, rest])[:, :drawn], whole[:, :drawn])  # none is lost
    with pytest.raises(ValueError, match="size is 0; it must be a whole number, 1 or more"):
        jitted.generate_tokens(model.params, fresh(), *padded([ids]), model.config, size=0)


def test_requests_that_cannot_be_met_say_why():
    model = tiny("tiny-qwen3")
    with pytest.raises(ValueError, match="a prompt is empty"):
        bj.generate(model, [[]])
    with pytest.raises(
        ValueError, match=r"2040 tokens of prompt and 100 new ones exceed the context of 2048"
    ):
        bj.generate(model, [prompt(2040)], max_new_tokens=100)
    with pytest.raises(ValueError, match="token 512 is beyond the vocabulary of 512"):
        bj.generate(model, [[512]])
    with pytest.raises(ValueError, match="context is 5000, but the model was made for at most 2048"):
        bj.load("synth:tiny-qwen3:q8_0", bj.RunConfig(context=5000))
    with pytest.raises(MemoryError, match=r"a cache of .* lower batch_size$"):
        bj.load("synth:tiny-qwen3:q8_0", bj.RunConfig(batch_size=10**9))
    with pytest.raises(NotImplementedError, match=r"schedule='one_launch' cannot run decode"):  # on no device
        bj.load("synth:tiny-gemma3:q8_0", bj.RunConfig(schedule="one_launch"))


@pytest.mark.slow  # the recipe a_thousand_seeds (test_recipes.py) does the same, held against probabilities
def test_the_step_runs_under_vmap_and_jit_of_the_user():
    """A thousand samples in one jit starts here: one prompt, a seed per sample."""
    model, ids = tiny(), prompt(10, 18)

    @jax.jit
    def sample(key):
        state = bj.new_state(model, 1, 64, bj.SamplingParams(temperature=1.0, seed=0), 6, ignore_eos=True)
        state = state.replace(sampler=state.sampler.replace(keys=key[None]))
        state = bj.prefill(model.params, state, jnp.array([ids]), jnp.array([len(ids)]), model.config).state
        return bj.decode(model.params, state, model.config, limit=5, size=5).tokens[0]

    keys = jax.vmap(jax.random.key)(jnp.arange(3))
    together = jax.vmap(sample)(keys)
    assert_same(together, [sample(key) for key in keys])
