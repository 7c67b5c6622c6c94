"""The samplers before the draw: against references in numpy float64, and beside rows that do not use them."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

import bonsai_jax as bj
from bonsai_jax.cli import app
from bonsai_jax.cli.sampling_options import SamplingOptions
from bonsai_jax.decoding import breakers, chain, dry, jitted, sampling, truncations
from bonsai_jax.engine import programs
from bonsai_jax.protocols import anthropic_messages, openai_chat, openai_completions, openai_responses
from bonsai_jax.protocols.errors import FieldError
from bonsai_jax.protocols.submit import Defaults, submissions, submitted
from bonsai_jax.sampling_params import SamplingParams
from pallas_kernels.sampling import reference
from tests.bonsai_jax.tokens import assert_same

MANY, ROWS = 24, 4  # tokens and rows of the arrays that properties are tested on
BETWEEN = st.floats(0, 1, width=32, allow_subnormal=False)  # XLA takes subnormal numbers for 0


def drawn_logits(seed: int, spread: float, digits: int, banned: float) -> np.ndarray:
    """float32 [ROWS, MANY], with ties where digits are few, and a finite number in each row."""
    rng = np.random.default_rng(seed)
    x = np.float32(rng.normal(0, spread, (ROWS, MANY)).round(digits))
    x[rng.random(x.shape) < banned] = -np.inf
    x[:, 3] = np.maximum(x[:, 3], -2)
    return x


LOGITS = st.builds(
    drawn_logits,
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.3, 2.0, 8.0]),
    st.sampled_from([0, 1, 8]),
    st.sampled_from([0.0, 0.3, 0.95]),
)
FEW = settings(max_examples=40, deadline=None)
compiled = {
    name: jax.jit(getattr(truncations, name)) for name in ("typical", "top_n_sigma", "xtc", "mirostat")
}
heat = jax.jit(truncations.dynamic_temperature)


def shares(x: np.ndarray) -> np.ndarray:
    p = np.exp(np.float64(x) - np.float64(x).max())
    return p / p.sum()


def information(p: np.ndarray) -> float:
    return -sum(x * math.log(x) for x in p if x > 0)


def kept(name: str, x: np.ndarray, *parameters: float) -> np.ndarray:
    each = [jnp.full(ROWS, value, jnp.float32) for value in parameters]
    out = np.asarray(compiled[name](x, *each))
    np.testing.assert_array_equal(out[out > -np.inf], x[out > -np.inf])  # what is kept is as it was
    return out > -np.inf


@FEW
@given(LOGITS, st.floats(1 / 64, 63 / 64, width=32))
def test_typical_keeps_the_nearest_to_the_entropy(x, p):
    for row, keep in zip(x, kept("typical", x, p), strict=True):
        q = shares(row)
        drawn = np.flatnonzero(q > 0)
        distance = np.abs(-np.log(q[drawn]) - information(q))
        levels = np.unique(distance.round(5))
        sums = [q[drawn][distance <= level + 1e-5].sum() for level in levels]
        if np.abs(np.array(sums) - p).min() < 1e-5:
            continue  # float32 may decide either way
        level = next(level for level, total in zip(levels, sums, strict=True) if total > p)
        assert keep[drawn[distance < level - 1e-4]].all() and not keep[drawn[distance > level + 1e-4]].any()
        assert not keep[q == 0].any()


@FEW
@given(LOGITS, st.floats(-1, 4, width=32, allow_subnormal=False))  # XLA takes subnormal numbers for 0
def test_top_n_sigma_keeps_what_is_near_the_largest(x, n):
    for row, keep in zip(x, kept("top_n_sigma", x, n), strict=True):
        own = np.float64(row[row > -np.inf])
        least = own.max() - n * own.std() if n > 0 else -1e9
        unclear = np.abs(row - least) < 1e-4
        assert ((keep == ((row >= least) & (row > -np.inf))) | unclear).all()


@FEW
@given(LOGITS, BETWEEN, BETWEEN, st.floats(0, 1, exclude_max=True, width=32))
def test_xtc_removes_all_likely_tokens_but_the_last(x, probability, least, chance):
    for row, keep in zip(x, kept("xtc", x, probability, least, chance), strict=True):
        q = shares(row)
        if np.abs(q - least).min() < 1e-6:
            continue
        likely = q >= least
        happens = 0 < probability >= chance and least <= 0.5 and likely.any()
        last = row[likely].min() if happens else np.inf
        assert (keep == ((row > -np.inf) & ~(likely & (row > last)))).all()


@FEW
@given(LOGITS, st.floats(0, 10, width=32))
def test_mirostat_keeps_what_does_not_surprise(x, mu):
    for row, keep in zip(x, kept("mirostat", x, mu), strict=True):
        with np.errstate(divide="ignore"):
            surprise = -np.log2(shares(row))
        want = (surprise <= mu) | (row == row.max())
        assert ((keep == want) | (np.abs(surprise - mu) < 1e-4)).all()


@FEW
@given(LOGITS, st.floats(0, 2, width=32), st.floats(0, 2, width=32), st.floats(0, 3, width=32))
def test_the_temperature_rises_with_the_entropy(x, temperature, spread, exponent):
    each = [jnp.full(ROWS, value, jnp.float32) for value in (temperature, spread, exponent)]
    for row, got in zip(x, heat(x, *each, jnp.zeros(ROWS, jnp.int32)), strict=True):
        count = (row > -np.inf).sum()
        low, high = max(0.0, temperature - spread), temperature + spread
        share = information(shares(row)) / math.log(count) if count > 1 else 0.0
        want = low + (high - low) * share**exponent if count > 1 else 1.0
        # Near 0 a power of a small exponent multiplies an error of the entropy.
        assert share < 1e-3 or abs(got - (want if spread > 0 else temperature)) < 2e-3 * (1 + high)


# ---- DRY ----

N = 40  # tokens of a history
HEADS = {1: [0], 2: [1], 3: [0, 1], 4: [2]}  # class: tails
TAILS = [(), (5,), (5, 6)]


def penalties(history: list[int], multiplier, base, allowed, last_n, classes) -> dict[int, float]:
    """DRY's penalties by its description: for each token the longest repetition that it would continue."""
    window = history[-last_n:] if last_n > 0 else history if last_n < 0 else []
    if len(window) <= allowed:
        return {}
    limit = len(window)
    for ago, head in enumerate(reversed(window)):
        after = window[len(window) - ago :]
        fits = [len(t) for i, t in enumerate(TAILS) if i in HEADS.get(classes[head], ())
                and tuple(after[: len(t)]) == t and len(t) <= ago]  # fmt: skip
        if fits:
            limit = ago - max(fits)
            break
    if limit < allowed:
        return {}
    longest: dict[int, int] = {}
    for at in range(1, len(window)):  # window[at] comes after what could be repeated
        size = 0
        while size < limit and size < at and window[at - 1 - size] == window[-1 - size]:
            size += 1
        if size >= allowed and 0 not in HEADS.get(classes[window[at]], ()):
            longest[window[at]] = max(longest.get(window[at], 0), size)
    most = int(88.7228391 / math.log(base)) if base > 1.000001 else 0
    exponents = {t: min(n - allowed, most) if most else n - allowed for t, n in longest.items()}
    return {token: multiplier * base**exponent for token, exponent in exponents.items()}


@functools.cache
def dry_row():
    return jax.jit(dry.penalized)


@FEW
@given(
    st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=N), min_size=ROWS, max_size=ROWS),
    st.lists(st.integers(0, 4), min_size=9, max_size=9),
    st.sampled_from([0.8, 2.0]),
    st.sampled_from([1.0, 1.75, 1e5]),
    st.integers(0, 4),
    st.sampled_from([-1, 0, 3, 12]),
)
def test_dry_penalizes_by_its_description(histories, kinds, multiplier, base, allowed, last_n):
    classes = np.zeros(MANY, np.uint8)
    classes[:9] = kinds
    own = chain.unpacked(np.zeros(ROWS, chain.layout(MANY)))["dry"]
    for number, tails in HEADS.items():
        own["heads"][:, number, 0] = sum(1 << tail for tail in tails)
    own["tails"][:] = -1
    for i, tail in enumerate(TAILS):
        own["tails"][:, i, : len(tail)] = tail
    own["classes"][:] = classes.view(np.uint32)
    own |= {"multiplier": np.full(ROWS, multiplier, np.float32), "base": np.full(ROWS, base, np.float32)}
    own |= {name: np.full(ROWS, value, np.int32) for name, value in
            {"allowed_length": allowed, "last_n": last_n, "count": len(TAILS)}.items()}  # fmt: skip
    ids = np.array([[*history, *[7] * (N + 5 - len(history))] for history in histories], np.int32)
    lengths = np.array([len(history) for history in histories], np.int32)
    got = dry_row()(dry.Dry(**own, ids=ids), jnp.zeros((ROWS, MANY)), lengths)
    for history, row in zip(histories, np.asarray(got), strict=True):
        want = np.zeros(MANY)
        for token, penalty in penalties(history, multiplier, base, allowed, last_n, classes).items():
            want[token] = -penalty
        np.testing.assert_allclose(row, want, rtol=1e-4)


# ---- Models and engines ----

SHAPE = {"max_batch_size": 4, "context": 96, "prefill_tokens": 32, "pages": 12}
MOST = 24
HOT = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
CHAINED = {
    "dry": {"dry_multiplier": 3.0, "dry_allowed_length": 0},
    "mirostat": {"mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.5},
    "xtc and typical": {"xtc_probability": 0.5, "typical_p": 0.9, "top_n_sigma": 2.5, "dynatemp_range": 0.5},
}


@functools.cache
def tiny() -> bj.Model:
    return bj.load("synth:tiny-llama:q8_0", bj.RunConfig(page_size=16, cache_dtype="float32"))


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


@pytest.fixture(scope="module")
def engine():
    with bj.Engine(tiny(), **SHAPE) as engine:
        yield engine


def answers(engine, prompts, params, **options) -> list[bj.Output]:
    how = {"max_new_tokens": MOST, "ignore_eos": True} | options
    handles = [engine.submit(ids, own, **how) for ids, own in zip(prompts, params, strict=True)]
    return [handle.result(120) for handle in handles]


def alone(prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    """By the pure function, in one program."""
    model, tokens = tiny(), np.zeros((4, 32), np.int32)
    for row, ids in zip(tokens, prompts, strict=True):
        row[: len(ids)] = ids
    state = bj.new_state(model, 4, 96, params, MOST, ignore_eos=True)
    lengths = jnp.array(list(map(len, prompts)), jnp.int32)
    drawn = jitted.generate_tokens(model.params, state, tokens, lengths, model.config, size=MOST)
    return np.asarray(drawn.tokens).tolist()


def test_rows_with_samplers_draw_in_an_engine_what_they_draw_alone_and_leave_others_as_they_are(engine):
    """More prompt and answer than there are pages for: what a row remembers survives pre-emption."""
    prompts = [prompt(28, seed) for seed in range(4)]
    plain = dataclasses.replace(HOT, seed=9, repetition_penalty=1.1)
    params = [dataclasses.replace(HOT, seed=i, **change) for i, change in enumerate(CHAINED.values())]
    loop = engine._loop
    without = answers(engine, prompts[3:], [plain])
    assert not loop.runner._others and not loop.scheduler.compiled_chained[False]
    outputs = answers(engine, prompts, [*params, plain])
    assert loop.scheduler.preempted and not loop.scheduler.chained
    assert_same([o.tokens for o in outputs], alone(prompts, [*params, plain]))
    assert outputs[3].tokens == without[0].tokens
    for own, ids, hot in zip(outputs, prompts, params, strict=False):  # each does something
        assert own.tokens != answers(engine, [ids], [dataclasses.replace(HOT, seed=hot.seed)])[0].tokens


def test_dry_knows_the_tokens_that_a_prompt_shares(engine):
    ids = [*prompt(3, 50), *prompt(8, 51) * 3][:27]
    params = [dataclasses.replace(HOT, temperature=0.0, dry_multiplier=3.0, dry_allowed_length=1)]
    first, second = (answers(engine, [ids], params)[0] for _ in range(2))
    assert not first.cached_tokens and second.cached_tokens > 20
    assert_same([second.tokens], [first.tokens])
    longest = {tuple(second.tokens[i : i + 4]) for i in range(MOST - 3)}
    assert len(longest) == MOST - 3  # nothing of four tokens is said twice


@pytest.mark.parametrize(("least", "end"), [(0, "stop"), (5, "stop"), (MOST, "length")])
def test_end_tokens_are_banned_until_an_answer_has_min_tokens(engine, least, end):
    eos = dict.fromkeys(tiny().tokenizer.eos_ids, 1000.0)
    params = dataclasses.replace(HOT, seed=3, min_tokens=least, logit_bias=eos)
    (output,) = answers(engine, [prompt(9, 60)], [params], ignore_eos=False)
    assert (len(output.tokens), output.finish_reason) == (least, end)
    if least == 5:
        (same,) = bj.generate(tiny(), [prompt(9, 60)], sampling=params, max_new_tokens=MOST)
        pieces = bj.stream(tiny(), prompt(9, 60), sampling=params, max_new_tokens=MOST)
        assert same.tokens == output.tokens == [token for piece in pieces for token in piece.tokens]


def test_a_constraint_bans_tokens_before_the_samplers(engine):
    """Forced tokens ("kilometres", many at once) are read as a chunk; Mirostat's limit goes on after them."""
    must = bj.regex("[0-9]{6} kilometres and [0-9]{5}")
    each = [dataclasses.replace(HOT, seed=i, **change) for i, change in enumerate(CHAINED.values())]
    outputs = answers(engine, [prompt(5, 70)] * 3, each, constraint=must, ignore_eos=False, max_new_tokens=60)
    for output in outputs:
        assert output.finish_reason == "stop" and re.fullmatch(must.text, output.text)
    assert len({output.text for output in outputs}) == 3


@pytest.mark.slow
def test_warmup_compiles_programs_for_samplers():
    with bj.Engine(tiny(), max_batch_size=1, context=64, prefill_tokens=32, pages=8) as engine:
        engine.warmup(constraints=True, samplers=True)
        scheduler, before = engine._loop.scheduler, len(programs.compiled)
        assert scheduler.compiled_chained[False] == scheduler.compiled_chained[True] == scheduler.compiled
        for must in (None, bj.choice(["a", "b"])):
            how = {"max_new_tokens": 4, "constraint": must}
            engine.submit([1, 2, 3], SamplingParams(mirostat=2), **how).result(60)
        assert len(programs.compiled) == before


def test_an_engine_that_speculates_says_that_it_has_no_samplers():
    mirostat = SamplingParams(mirostat=2)
    error = r"mirostat with speculate='ngram'; leave speculate or these out"
    with pytest.raises(NotImplementedError, match=error):
        bj.generate(tiny(), "x", sampling=[mirostat], speculate="ngram")
    with pytest.raises(NotImplementedError, match=error):
        bj.new_state(tiny(), 1, 32, mirostat, 4, speculate="ngram")
    with bj.Engine(tiny(), **SHAPE, speculate="ngram") as speculating:
        with pytest.raises(NotImplementedError, match=error):
            speculating.submit("x", mirostat)
        with pytest.raises(NotImplementedError, match=error):
            speculating.warmup(samplers=True)


def test_a_state_with_samplers_goes_on_from_its_file(tmp_path):
    model = tiny()
    state = bj.new_state(model, 2, 96, [SamplingParams(mirostat=2), SamplingParams(dry_multiplier=1)], MOST)
    noted = chain.note(state.chain, jnp.array([[1, 2], [3, 4]]), jnp.array([0, 5]), jnp.ones((2, 2), bool))
    state = state.replace(chain=noted.replace(mu=jnp.array([3.5, 10.0])))
    bj.save_state(tmp_path / "state", state)
    loaded = bj.load_state(tmp_path / "state", model)
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(loaded.chain), jax.tree.leaves(state.chain), strict=True):
        np.testing.assert_array_equal(a, b)


def test_candidates_leave_what_the_whole_vocabulary_leaves(monkeypatch):
    """Rows of many settings, of which top-k keeps at most 16 tokens, or ties, or all."""
    changes = [
        {"top_k": 5, "typical_p": 0.6},
        {"top_k": 16, "dynatemp_range": 0.7, "top_p": 0.8},
        {"top_k": 9, "top_n_sigma": 1.0, "min_p": 0.1},
        {"top_k": 7, "xtc_probability": 1.0, "xtc_threshold": 0.05, "temperature_first": True},
        {"mirostat": 2, "mirostat_tau": 2.0},
        {},
    ]
    model, rows, vocabulary = tiny(), len(changes), 512
    each = [dataclasses.replace(HOT, temperature=0.8, seed=1, **change) for change in changes]
    state = bj.new_state(model, rows, 32, each, 1)
    rules = sampling.rules(state.sampler)
    keys = jax.random.key_data(state.sampler.keys)[:, :2]

    def left(x):
        zeros = jnp.zeros(rows, jnp.int32)
        return chain.remaining(state.chain, rules, x, zeros, state.stop_ids, keys)

    monkeypatch.setattr(reference, "CANDIDATES", 16)
    for digits in (8, 1):
        x = np.random.default_rng(digits).normal(0, 2, (rows, vocabulary)).round(digits).astype(np.float32)
        found = []
        for size in (vocabulary, 0):
            monkeypatch.setattr(reference, "SORTED", size)
            found.append(jax.jit(lambda x: left(x))(x))
        for whole, candidates in zip(*found, strict=True):
            np.testing.assert_allclose(candidates, whole, rtol=1e-6)


def test_xtc_happens_as_often_as_asked():
    """By a row's key and position alone, and apart from the noise of tokens."""
    keys = jax.random.key_data(sampling.keys(np.arange(2000, dtype=np.uint32)))[:, :2]
    chances = np.stack([chain._chance(keys, jnp.full(2000, position)) for position in (0, 7)])
    assert (np.abs(np.quantile(chances, [0.1, 0.5, 0.9], axis=1).T - [0.1, 0.5, 0.9]) < 0.04).all()
    assert abs(np.corrcoef(chances)[0, 1]) < 0.06 and chances.min() >= 0 and chances.max() < 1


# ---- What users give ----


def test_breakers_are_heads_with_their_tails():
    tokenizer = tiny().tokenizer
    made = breakers.compiled(("he!", "\n"), tokenizer, 600)
    tails = [tuple(t[t >= 0]) for t in made.tails[: made.count]]

    def of(text: str) -> list[tuple[int, ...]]:
        (id,) = tokenizer.encode(text, add_special=False)
        heads = made.heads[made.classes[id]]
        return sorted(tails[i] for i in range(made.count) if heads[i // 32] >> i % 32 & 1)

    mark = tuple(tokenizer.encode("!", add_special=False))
    assert of("\n") == [()] and of("he") == [mark] and of("x") == []
    assert of("h") == [tuple(tokenizer.encode("e!", add_special=False))]
    assert made is breakers.compiled(("he!", "\n"), tokenizer, 600) and not made.classes[512:].any()
    assert breakers.compiled((), tokenizer, 600).count == 0
    many = tuple(f"{i:040}" for i in range(9))
    with pytest.raises(ValueError, match=r"dry_sequence_breakers can be cut in .* and 128 fit"):
        breakers.compiled(many, tokenizer, 600)


BODY = {
    **{"typ_p": 0.9, "top_n_sigma": 1.5, "dry_multiplier": 0.8, "dry_base": 2, "dry_allowed_length": 3},
    **{"dry_penalty_last_n": 64, "dry_sequence_breakers": ["\n", "|"], "xtc_probability": 0.5},
    **{"xtc_threshold": 0.2, "mirostat": 2, "mirostat_tau": 4.5, "mirostat_eta": 0.2, "min_tokens": 3},
    **{"dynatemp_range": 0.3, "dynatemp_exponent": 1.5},
}
MESSAGES = [{"role": "user", "content": "Hello"}]
BODIES = {
    openai_chat: {"messages": MESSAGES},
    openai_completions: {"prompt": "Hello"},
    openai_responses: {"input": "Hello"},
    anthropic_messages: {"messages": MESSAGES, "max_tokens": 9},
}


@pytest.mark.parametrize("protocol", BODIES, ids=lambda module: module.__name__.split(".")[-1])
def test_requests_have_samplers_under_llama_cpp_s_names(protocol):
    asked = protocol.request(BODIES[protocol] | BODY, strict=True).sampling
    want = {("typical_p" if name == "typ_p" else name): value for name, value in BODY.items()}
    assert asked == want and SamplingParams(**asked).chained
    for name, wrong, said in [
        ("typ_p", 2, "is 2; it must lie in 0 to 1"),
        ("mirostat", 1, "is 1; it must be one of 0, 2"),
        ("min_tokens", 1.5, "1.5 is not a whole number"),
        ("dry_sequence_breakers", "x", "'x' is not a list of at most 32 texts"),
        ("dry_sequence_breakers", [""], "has ''; a text must have 1 to 40 characters"),
    ]:
        with pytest.raises(FieldError) as refused:
            protocol.request(BODIES[protocol] | {name: wrong})
        assert refused.value.param == name and said in str(refused.value)


def test_a_request_s_breakers_are_compiled_before_it_is_submitted(engine):
    defaults = Defaults(most_tokens=64)
    body = {"prompt": "a b a b", "max_tokens": 4, "dry_multiplier": 2, "seed": 1}
    request = openai_completions.request(body)
    (one,) = submissions(request, tiny(), defaults)
    handle = submitted(engine, request, one)
    assert handle is not None and len(handle.result(120).tokens) == 4
    many = {"dry_sequence_breakers": [f"{i:040}" for i in range(9)]}
    with pytest.raises(FieldError, match="can be cut in") as refused:
        submissions(openai_completions.request(body | many), tiny(), defaults)
    assert refused.value.param == "dry_sequence_breakers"


def test_flags_are_llama_cpp_s():
    flags = {
        "--typical": "typical_p", "--top-nsigma": "top_n_sigma", "--xtc-probability": "xtc_probability",
        "--xtc-threshold": "xtc_threshold", "--dry-multiplier": "dry_multiplier", "--dry-base": "dry_base",
        "--dry-allowed-length": "dry_allowed_length", "--dry-penalty-last-n": "dry_penalty_last_n",
        "--dry-sequence-breaker": "dry_sequence_breakers", "--dynatemp-range": "dynatemp_range",
        "--dynatemp-exp": "dynatemp_exponent", "--mirostat": "mirostat", "--mirostat-tau": "mirostat_tau",
        "--mirostat-eta": "mirostat_eta", "--min-tokens": "min_tokens",
    }  # fmt: skip
    command = typer.main.get_command(app).commands["generate"]
    assert flags.items() <= {opt: p.name for p in command.params for opt in p.opts}.items()
    options = SamplingOptions(typical_p=0.5, dry_sequence_breakers=["none", "\n"], seed=3)
    assert options.params() == SamplingParams(typical_p=0.5, dry_sequence_breakers=("\n",), seed=3)
