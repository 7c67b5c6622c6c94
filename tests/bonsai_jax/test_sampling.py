"""Sampling against a sort-based numpy oracle, and its draws against the distribution they should follow."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bonsai_jax.config import RunConfig
from bonsai_jax.decoding.sampling import keys, read_prompt, sample, sampler
from bonsai_jax.sampling_params import SamplingParams
from pallas_kernels.sampling import reference

V = 50
PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


draw = jax.jit(sample)


@functools.partial(jax.jit, static_argnums=2)
def at_positions(s, logits, n):
    return jax.vmap(lambda position: sample(s, logits[None], position[None])[0][0])(jnp.arange(n))


def draws(params, logits, n=4000):
    """n draws of one row's next token, at n positions."""
    return np.asarray(at_positions(sampler([params], 1, len(logits)), np.float32(logits), n))


def kept_by_sorting(logits, params):
    """Tokens that truncation leaves, by the textbook: sort, cut."""
    p = np.exp(logits - logits.max())
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    q = p[order] / p[order].sum()
    order = order[: np.searchsorted(np.cumsum(q), params.top_p - 1e-6) + 1]
    return set(order[p[order] >= params.min_p * p.max()].tolist())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "change",
    [
        {"top_k": 5},
        {"top_k": 1},
        {"top_p": 0.7},
        {"top_p": 0.05},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_truncation_keeps_what_sorting_keeps(change, seed):
    params = dataclasses.replace(PLAIN, **change)
    logits = np.random.default_rng(seed).normal(0, 2, V)
    want = kept_by_sorting(logits, params)
    drawn = draws(dataclasses.replace(params, temperature=50.0), logits)  # nearly uniform over what is kept
    assert set(drawn.tolist()) == want


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature):
    logits = np.random.default_rng(1).normal(0, 1, 8)
    drawn = draws(dataclasses.replace(PLAIN, temperature=temperature), logits, 20000)
    want = np.exp(logits / temperature) / np.exp(logits / temperature).sum() * len(drawn)
    counts = np.bincount(drawn, minlength=8)
    assert ((counts - want) ** 2 / want).sum() < 24.3  # chi-squared, 7 degrees of freedom, 0.1 %


def kept_with_ties(logits, params):
    """bool [V], float64: a token stays with all that are as likely, as SamplingParams says."""
    p = np.exp(logits.astype(np.float64) - logits.max())
    p = p ** (1 / params.temperature) if params.temperature_first else p
    order = np.sort(logits)[::-1]
    keep = logits >= order[min(params.top_k, len(logits)) - 1] if params.top_k else np.ones(len(logits), bool)
    if params.top_p < 1:
        levels = np.unique(logits[keep])[::-1]
        sums = np.array([p[keep & (logits >= level)].sum() for level in levels]) / p[keep].sum()
        close = np.abs(sums - params.top_p).min() < 1e-5  # float32 may decide either way
        keep &= logits >= levels[np.argmax(sums >= params.top_p)]
    else:
        close = False
    close |= params.min_p > 0 and np.abs(p - params.min_p).min() < 1e-6
    return keep & (p >= params.min_p), close


MANY = [
    {},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"top_k": 7},
    {"top_k": 300},
    {"top_k": 10**6, "top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 1},
    {"top_k": 30, "top_p": 0.8, "min_p": 0.1, "temperature": 0.5, "temperature_first": True},
    {"top_p": 0.9, "temperature": 2.0, "temperature_first": True},
]


@pytest.mark.parametrize("digits", [8, 1, 0], ids=["no ties", "ties", "heavy ties"])
@pytest.mark.parametrize("spread", [0.1, 2.0, 8.0], ids=["flat", "usual", "peaked"])
def test_candidates_hold_what_the_whole_vocabulary_would_keep(digits, spread):
    """All settings as rows of one batch, 700 tokens of which 128 are looked at: where those are said to be
    enough they are what thresholds over all keep, which is what sorting keeps."""
    rng = np.random.default_rng(int(10 * spread) + digits)
    logits = rng.normal(0, spread, (len(MANY), 700)).round(digits).astype(np.float32)
    rows = [dataclasses.replace(PLAIN, **change) for change in MANY]
    s, x = sampler(rows, len(rows), 700), jnp.asarray(logits)
    top, ids = jax.lax.top_k(x, 128)
    here, enough = jax.jit(reference.truncate_sorted)(s, top, x)
    dense = np.asarray(jax.jit(reference.truncate)(s, x))
    for row, params in enumerate(rows):
        want, close = kept_with_ties(logits[row], params)
        assert close or (dense[row] == want).all(), params
        if enough[row] and not close:
            assert set(np.asarray(ids[row])[here[row]]) == set(np.flatnonzero(dense[row])), params
        certain = 0 < want.sum() < 128 and (params.top_k <= 128 or params.top_p == 1) and not digits < 8
        assert enough[row] or close or not certain or params.top_k == 300, params


def test_a_draw_is_the_same_however_many_candidates_there_are(monkeypatch):
    """The last are all, for which nothing else is compiled; of half of the rows many logits are equal."""
    monkeypatch.setattr(reference, "SORTED", 0)
    logits = np.random.default_rng(5).normal(0, 2, (len(MANY), 400))
    logits = np.concatenate([logits.round(8), logits.round(1)]).astype(np.float32)
    rows = [dataclasses.replace(PLAIN, **change, seed=i) for i, change in enumerate([*MANY, *MANY])]
    s, drawn = sampler(rows, len(rows), 400), []
    for candidates in (1, 16, 512):
        monkeypatch.setattr(reference, "CANDIDATES", candidates)
        run = jax.jit(lambda s, x, p: sample(s, x, p)[0])
        alone = jax.jit(
            lambda i, s, x: sample(*jax.tree.map(lambda of: of[i][None], (s, x)), jnp.array([3]))[0][0]
        )
        drawn.append([np.asarray(run(s, logits, np.full(len(rows), position))) for position in range(20)])
        np.testing.assert_array_equal(drawn[-1][3], [alone(i, s, logits) for i in range(len(rows))])
    np.testing.assert_array_equal(drawn[0], drawn[1])
    np.testing.assert_array_equal(drawn[0], drawn[2])


MANY_TOKENS = 1301  # no multiple of 128
UNEVEN = np.random.default_rng(11).normal(0, 2, MANY_TOKENS).astype(np.float32)
SETTINGS = {  # (change, logits)
    "flat, all": ({}, UNEVEN / 20),
    "top-k 1, of many alike": ({"top_k": 1}, UNEVEN.round(0).clip(-9, 3)),
    "top-k 64": ({"top_k": 64, "temperature": 0.7}, UNEVEN),
    "top-k 64, heavy ties": ({"top_k": 64}, UNEVEN.round(0)),
    "top-k 1000": ({"top_k": 1000, "temperature": 2.0}, UNEVEN / 2),
    "top-k 1000, top-p": ({"top_k": 1000, "top_p": 0.8, "temperature": 1.5}, UNEVEN / 2),
    "top-p, peaked": ({"top_p": 0.9}, 3 * UNEVEN),
    "top-p, flat": ({"top_p": 0.4}, UNEVEN / 20),
    "top-p 0.01": ({"top_p": 0.01}, UNEVEN),
    "min-p": ({"min_p": 0.1, "temperature": 3.0}, UNEVEN),
    "defaults": (dataclasses.asdict(SamplingParams()), UNEVEN),
    "temperature first": (
        {"top_k": 100, "top_p": 0.8, "min_p": 0.02, "temperature": 1.7, "temperature_first": True},
        UNEVEN,
    ),
    "penalties": (
        {"top_k": 100, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
        UNEVEN,
    ),
    "bias": ({"top_k": 50, "logit_bias": {t: -np.inf if t % 2 else 6.0 for t in range(40)}}, UNEVEN),
    "one token is allowed": ({"top_k": 40}, np.where(np.arange(MANY_TOKENS) == 1300, 0.0, -np.inf)),
}


def test_tokens_are_as_frequent_as_they_are_likely():
    """Within five standard errors, in each of many settings; those that are expected less than 25 times count
    as one. On a GPU, where kernels draw, over ten million draws each."""
    on_gpu = jax.default_backend() == "gpu"
    repeated, steps = (1000, 10_000) if on_gpu else (20, 20)
    rng, n = np.random.default_rng(3), len(SETTINGS)
    rows = [dataclasses.replace(PLAIN, **{**change, "seed": 0}) for change, _ in SETTINGS.values()]
    logits = np.stack([x for _, x in SETTINGS.values()]).astype(np.float32)
    seen = rng.random((n, MANY_TOKENS)) < 0.3
    counts = np.where(rng.random(seen.shape) < 0.1, rng.integers(0, 4, seen.shape), 0).astype(np.int32)

    @jax.jit
    def histogram(s, logits):
        def one(position, found):
            tokens, _ = sample(s, logits, jnp.full(len(logits), position))
            return found.at[jnp.arange(len(logits)) // repeated, tokens].add(1)

        return jax.lax.fori_loop(0, steps, one, jnp.zeros((n, MANY_TOKENS), jnp.int32))

    many = [dataclasses.replace(row, seed=i) for row in rows for i in range(repeated)]
    s = sampler(many, len(many), MANY_TOKENS)
    s = s.replace(seen=jnp.repeat(seen, repeated, axis=0), counts=jnp.repeat(counts, repeated, axis=0))
    found = np.asarray(histogram(s, jnp.repeat(logits, repeated, axis=0)))
    for i, (name, params) in enumerate(zip(SETTINGS, rows, strict=True)):
        x = logits[i]
        penalty = np.float32(params.repetition_penalty)
        x = np.where(seen[i], np.where(x > 0, x / penalty, x * penalty), x)
        x = x - (np.float32(params.frequency_penalty) * counts[i])
        x = x - np.float32(params.presence_penalty) * (counts[i] > 0)
        for token, bias in params.logit_bias.items():
            x[token] += np.float32(bias)
        keep, close = kept_with_ties(x, params)
        assert not close, name
        p = np.where(keep, np.exp((x.astype(np.float64) - x.max()) / params.temperature), 0)
        want, got = p / p.sum() * repeated * steps, found[i]
        assert got.sum() == repeated * steps and (got[~keep] == 0).all(), name
        rare = want < 25
        want, got = (np.append(v[~rare], v[rare].sum()) for v in (want, got))
        error = np.sqrt(want * (1 - want / want.sum())) + 1e-9
        assert (np.abs(got - want) <= 5 * error + (want < 25) * 10).all(), name


def test_equal_logits_beyond_top_k_are_kept():
    assert set(draws(dataclasses.replace(PLAIN, top_k=2), np.array([3.0, 1.0, 1.0, 0.0])).tolist()) == {
        0,
        1,
        2,
    }


def test_rows_keep_their_own_parameters_and_do_not_depend_on_each_other():
    logits = jnp.asarray(np.random.default_rng(2).normal(0, 1, (3, V)), jnp.float32)
    rows = [
        SamplingParams(temperature=0.0),
        dataclasses.replace(PLAIN, seed=7),
        dataclasses.replace(PLAIN, top_k=1),
    ]
    together, _ = draw(sampler(rows, 3, V), logits, jnp.array([5, 5, 5]))
    for i, row in enumerate(rows):
        alone, _ = draw(sampler([row], 1, V), logits[i : i + 1], jnp.array([5]))
        assert together[i] == alone[0]
    assert together[0] == logits[0].argmax() and together[2] == logits[2].argmax()


def test_only_allowed_tokens_are_drawn():
    words = jnp.array([[1 << 3, 1 << (40 - 32)], [(1 << 7) | (1 << 9), 0]], jnp.uint32)
    s = sampler([SamplingParams(temperature=0.0), PLAIN], 2, V)
    logits = jnp.zeros((2, V)).at[0, 40].set(1.0).at[0, 41].set(2.0)
    drawn = [draw(s, logits, jnp.full(2, i), words)[0].tolist() for i in range(20)]
    assert {a for a, _ in drawn} == {40} and {b for _, b in drawn} == {7, 9}


def test_a_shared_seed_counts_up_from_row_to_row():
    logits = jnp.zeros((2, V))
    both, _ = draw(sampler(dataclasses.replace(PLAIN, seed=3), 2, V), logits, jnp.array([0, 0]))
    second, _ = draw(sampler([dataclasses.replace(PLAIN, seed=4)], 1, V), logits[:1], jnp.array([0]))
    assert both[1] == second[0] and both[0] != both[1]


def penalized(params, logits, prompt, answer):
    """What a greedy row picks after this prompt and answer."""
    s = read_prompt(
        sampler([params], 1, V),
        jnp.array([prompt], jnp.int32).reshape(1, -1),
        jnp.ones((1, len(prompt)), bool),
    )
    for token in answer:
        forced = jnp.where(jnp.arange(V) == token, 1e9, 0.0)[None]
        _, s = draw(s.replace(temperature=jnp.zeros(1)), forced, jnp.array([0]))
    return int(draw(s, jnp.asarray(logits, jnp.float32)[None], jnp.array([0]))[0][0])


def test_penalties_and_bias_change_what_is_picked():
    greedy = SamplingParams(temperature=0.0)
    logits = np.full(V, -10.0)
    logits[[3, 4]] = 2.0, 1.9
    assert penalized(greedy, logits, [3], []) == 3
    # The repetition penalty counts the prompt ...
    assert penalized(dataclasses.replace(greedy, repetition_penalty=1.2), logits, [3], []) == 4
    # ... and makes negative logits more negative, not less.
    assert (
        penalized(
            dataclasses.replace(greedy, repetition_penalty=1.2),
            -np.abs(logits) - 1 + 4 * (logits > 0),
            [4],
            [],
        )
        == 3
    )
    # Presence and frequency count the answer only.
    assert penalized(dataclasses.replace(greedy, presence_penalty=0.2), logits, [3], []) == 3
    assert penalized(dataclasses.replace(greedy, presence_penalty=0.2), logits, [], [3]) == 4
    assert penalized(dataclasses.replace(greedy, frequency_penalty=0.06), logits, [], [3]) == 3
    assert penalized(dataclasses.replace(greedy, frequency_penalty=0.06), logits, [], [3, 3]) == 4
    assert penalized(dataclasses.replace(greedy, logit_bias={4: 0.2}), logits, [], []) == 4
    assert penalized(dataclasses.replace(greedy, logit_bias={3: -1e9, 4: -1e9, 9: 1e9}), logits, [], []) == 9


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"top_k": -1},
        {"repetition_penalty": 0.0},
        {"temperature": "0.5"},
        {"temperature": None},
        {"temperature_first": "no"},
        {"top_k": 1.5},
        {"seed": 1.5},
        {"logit_bias": [5]},
    ],
)
def test_parameters_out_of_range_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=f"SamplingParams: {next(iter(bad))} is "):
        SamplingParams(**bad)


@pytest.mark.parametrize("bad", [{5: float("nan")}, {5: float("inf")}, {5: "1"}, {"5": 1.0}, {1.5: 1.0}])
def test_a_bias_is_a_number_of_a_token(bad):
    """NaN drew that token each time."""
    with pytest.raises(ValueError, match=r"logit_bias has .*; expected a token id and a number"):
        SamplingParams(logit_bias=bad)
    SamplingParams(
        logit_bias={np.int64(5): -np.inf}, temperature=jnp.float32(1), top_k=np.int8(3), seed=2**70
    )


@pytest.mark.parametrize(
    "bad",
    [
        {"context": 1.5},
        {"context": "8192"},
        {"page_size": 3.5},
        {"batch_size": None},
        {"draft": "no"},
        {"batch_size": -1},
    ],
)
def test_a_run_is_of_whole_numbers(bad):
    with pytest.raises(ValueError, match=rf"RunConfig: {next(iter(bad))} is .*; it must (be|lie)"):
        RunConfig(**bad)


def test_a_bias_beyond_the_vocabulary_and_a_wrong_number_of_rows_are_refused():
    with pytest.raises(ValueError, match="token 50; the vocabulary has 50"):
        sampler(SamplingParams(logit_bias={50: 1.0}), 1, V)
    with pytest.raises(ValueError, match="2 SamplingParams for 3 prompts"):
        sampler([PLAIN, PLAIN], 3, V)


def test_keys_are_those_of_jax_random_on_the_host_and_traced():
    seeds = np.array([0, 7, 2**32 - 1], np.uint32)
    want = jax.random.key_data(jax.vmap(lambda seed: jax.random.key(seed, impl="threefry2x32"))(seeds))
    for made in (keys(seeds), jax.jit(keys)(jnp.asarray(seeds))):
        np.testing.assert_array_equal(jax.random.key_data(made), want)
