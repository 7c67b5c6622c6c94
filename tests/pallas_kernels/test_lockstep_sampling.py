"""The kernels of the draw, those of GPUs in numpy (lockstep): the definition's tokens, and its tables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sampling import Rules, cpu, kernel, reference
from tests.pallas_kernels.lockstep import lockstep

PLAIN = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature_first": False,
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
}  # fmt: skip
KINDS = {"top_k": jnp.int32, "temperature_first": bool}
ROWS = [
    {},  # by groups
    {"temperature": 0.0},
    *({"top_k": k} for k in (1, 5, 20)),
    *({"top_k": 20, "top_p": p, "min_p": 0.02} for p in (0.9, 0.4, 0.0)),
    {"top_p": 0.01},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 0.5, "temperature_first": True},
    {"top_p": 0.3, "min_p": 0.01, "temperature": 2.0, "temperature_first": True},
    {"temperature": 0.0, "temperature_first": True},
    {"min_p": 0.5},
    # The whole row, unless there are few.
    *({"top_k": k} for k in (300, 1000)),
    {"top_k": 1000, "top_p": 0.7},
    {"top_p": 0.95},
    {"top_p": 0.0, "temperature": 3.0},
]


def rules(rows: list[dict], vocabulary: int, biases: int = 1, tables=None) -> Rules:
    """Arrays of these settings; biases and tables of tokens that count for nothing, if none are given."""
    columns = {
        name: jnp.array([{**PLAIN, **row}[name] for row in rows], KINDS.get(name, jnp.float32))
        for name in PLAIN
    }
    shape = len(rows), vocabulary
    seen, counts = tables or (np.zeros(shape, bool), np.zeros(shape, np.int32))
    return Rules(
        **columns,
        bias_ids=jnp.asarray(np.full((len(rows), biases), vocabulary, np.int32)),
        bias=jnp.asarray(np.zeros((len(rows), biases), np.float32)),
        seen=jnp.asarray(seen),
        counts=jnp.asarray(counts),
        table=jnp.arange(len(rows)),
    )


def check(logits, rules, seed=0):
    """The kernels draw what the definition draws: its tokens, and its tables. Returns all three."""
    rng, rows = np.random.default_rng(seed), len(logits)
    keys = jnp.asarray(rng.integers(0, 2**32, (rows, 2), dtype=np.uint32))
    positions = jnp.asarray(rng.integers(0, 10**6, rows), jnp.int32)
    with lockstep(at_a_time=len(logits)):
        on_gpu = kernel.draw(jnp.asarray(logits), rules, keys, positions)
    on_cpu = jax.jit(cpu.run)(jnp.asarray(logits), rules, keys, positions)
    want = jax.jit(reference.draw)(jnp.asarray(logits), rules, keys, positions)
    for got in (on_gpu, on_cpu):
        for result, its in zip(got, want, strict=True):
            np.testing.assert_array_equal(result, its)
    return [np.asarray(x) for x in want]


@pytest.mark.parametrize(
    ("vocabulary", "digits", "spread"),
    [(3001, 8, 2.0), (3001, 0, 2.0), (3001, 8, 0.1), (3001, 1, 8.0), (129, 1, 2.0), (50, 8, 2.0)],
    ids=["usual", "heavy ties", "flat", "peaked", "a group and a token", "less than a group"],
)
def test_the_kernels_draw_what_the_definition_draws(vocabulary, digits, spread):
    logits = np.random.default_rng(vocabulary).normal(0, spread, (len(ROWS), vocabulary))
    check(logits.round(digits).astype(np.float32), rules(ROWS, vocabulary))


def test_penalties_and_biases_are_the_definitions():
    """Sums and products that are exact, so that no rounding decides."""
    vocabulary, rng = 2000, np.random.default_rng(0)
    rows = [
        {"temperature": 0.0},
        {"repetition_penalty": 2.0, "top_k": 10},
        {"presence_penalty": 0.5, "frequency_penalty": 0.25, "top_k": 10},
        {"repetition_penalty": 0.5, "frequency_penalty": -0.25},
        {},
        {"top_k": 3},
    ]
    shape = len(rows), vocabulary
    logits = (rng.integers(-64, 64, shape) / 16).astype(np.float32)
    tables = rng.random(shape) < 0.2, (rng.integers(0, 4, shape) * (rng.random(shape) < 0.2)).astype(np.int32)
    r = rules(rows, vocabulary, biases=64, tables=tables)
    ids = np.stack([rng.permutation(vocabulary)[:64] for _ in rows]).astype(np.int32)
    ids[:, 40:] = np.where(rng.random((len(rows), 24)) < 0.5, vocabulary, ids[:, 40:])
    r = r._replace(bias_ids=jnp.asarray(ids), bias=jnp.asarray(rng.integers(-8, 8, ids.shape), jnp.float32))
    tokens, seen, counts = check(logits, r)
    # The same tables among those of other rows; the last two rows have no penalty, and no table.
    number, has = np.array([7, 3, 0, 8, 20, 9], np.int32), slice(0, 4)
    more = rng.random((9, vocabulary)) < 0.5, rng.integers(0, 9, (9, vocabulary)).astype(np.int32)
    for whole, own in zip(more, tables, strict=True):
        whole[number[has]] = own[has]
    there = dict(zip(("seen", "counts"), map(jnp.asarray, more), strict=True))
    tokens_there, *tables_there = check(logits, r._replace(**there, table=jnp.asarray(number)))
    np.testing.assert_array_equal(tokens_there, tokens)
    for whole, its, after in zip(more, (seen, counts), tables_there, strict=True):
        whole[number[has]] = its[has]
        np.testing.assert_array_equal(after, whole)


@pytest.mark.parametrize("row", [{}, {"top_k": 20, "top_p": 0.9}, {"temperature": 0.0}], ids=str)
def test_one_token_is_allowed(row):
    vocabulary, allowed = 400, [7, 399]
    logits = np.full((2, vocabulary), -np.inf, np.float32)
    logits[[0, 1], allowed] = 1.0, -50.0
    assert check(logits, rules([row] * 2, vocabulary))[0].tolist() == allowed


def test_a_row_that_is_not_finite_or_has_nothing_allowed_draws_no_token():
    """Whatever the way: by groups, among candidates, among all. Other rows draw as ever."""
    vocabulary, rng = 1430, np.random.default_rng(2)
    ways = [
        {},
        {"temperature": 0.0},
        {"top_k": 4},
        {"top_k": 4, "top_p": 0.5},
        {"top_p": 0.9},
        {"min_p": 0.1},
    ]
    ways += [{"top_k": 1000}, {"top_k": 1000, "top_p": 0.7}]
    for harm in (np.nan, np.inf, -np.inf):
        logits = rng.normal(0, 2, (2 * len(ways), vocabulary)).astype(np.float32)
        harmed = slice(None) if harm == -np.inf else [7, 900]
        logits[::2, harmed] = harm
        drawn = check(logits, rules([way for way in ways for _ in range(2)], vocabulary))[0]
        assert (drawn[::2] == -1).all() and (drawn[1::2] >= 0).all()
    logits = rng.normal(0, 2, (len(ways), vocabulary)).astype(np.float32)
    nothing = rules(ways, vocabulary)._replace(allowed=jnp.zeros((len(ways), 45), jnp.uint32))
    assert (check(logits, nothing)[0] == -1).all()


def test_tokens_that_are_allowed():
    """Bits of 45 words, with some behind the vocabulary; a twentieth of the tokens."""
    vocabulary, rng = 1430, np.random.default_rng(1)
    rows = [{}, {"temperature": 0.0}, {"top_k": 4}, {"top_k": 9, "temperature": 9.0}, {"top_p": 0.9}]
    bits = rng.random((len(rows), 45 * 32)) < 0.05
    bits[:, vocabulary:] = True
    words = (bits.reshape(len(rows), 45, 32) << np.arange(32, dtype=np.uint32)).sum(-1).astype(np.uint32)
    logits = rng.normal(0, 2, (len(rows), vocabulary)).astype(np.float32)
    r = rules(rows, vocabulary)._replace(allowed=jnp.asarray(words))
    for seed in range(2):
        drawn = check(logits, r, seed)[0]
        assert bits[np.arange(len(rows)), drawn].all()
        assert drawn[1] == np.where(bits[1, :vocabulary], logits[1], -np.inf).argmax()


@pytest.mark.parametrize("tokens", [3, 40, 600], ids=["few", "a group's", "more than there is room for"])
def test_a_mask_leaves_fewer_groups_than_are_looked_for(tokens):
    """As within JSON: punctuation or digits alone. All are candidates, where there is room."""
    vocabulary, rng = 3001, np.random.default_rng(tokens)
    allowed = rng.permutation(700)[:tokens] + 1500  # of six groups of 24
    logits = np.full((len(ROWS), vocabulary), -np.inf, np.float32)
    logits[:, allowed] = rng.normal(0, 2, (len(ROWS), tokens))
    for seed in range(2):
        assert np.isin(check(logits, rules(ROWS, vocabulary), seed)[0], allowed).all()


def test_more_candidates_than_there_is_room_for():
    """Of 600 likeliest ones, in nine groups of which each has more than nine."""
    vocabulary, rows = 1300, [{"top_k": 3}, {"top_k": 3, "top_p": 0.5}, {"temperature": 0.0}, {"top_p": 0.5}]
    logits = np.zeros((len(rows), vocabulary), np.float32)
    logits[:, rows_of_ties := np.arange(100, 1300, 2)] = 2.0
    drawn = np.array([check(logits, rules(rows, vocabulary), seed)[0] for seed in range(2)])
    assert np.isin(drawn, rows_of_ties).all() and (drawn[:, 2] == 100).all()


@pytest.mark.parametrize("vocabulary", [1, 16, 31, 49152, 151669])
def test_the_cpu_kernel_with_other_vocabularies(vocabulary):
    """Rows in a batch, alone, and under vmap; tables of 0 and 1 are read where a row has penalties."""
    rng, rows = np.random.default_rng(vocabulary), len(ROWS)
    logits = jnp.asarray(rng.normal(0, 3, (rows, vocabulary)), jnp.float32)
    keys = jnp.asarray(rng.integers(0, 2**32, (rows, 2), dtype=np.uint32))
    r, positions = rules(ROWS, vocabulary), jnp.arange(rows)
    want = jax.jit(reference.draw)(logits, r, keys, positions)
    together = jax.jit(cpu.run)(logits, r, keys, positions)
    each_rules = r._replace(table=jnp.zeros_like(r.table))
    each = jax.jit(jax.vmap(cpu.run))(
        *jax.tree.map(lambda x: x[:, None], (logits, each_rules, keys, positions))
    )
    for ours, alone, its in zip(together, each, want, strict=True):
        np.testing.assert_array_equal(ours, its)
        np.testing.assert_array_equal(alone[:, 0], its)


def test_the_cpu_kernel_draws_by_the_probabilities():
    """Frequencies of 40,000 draws against probabilities in float64, in standard errors; all truncations."""
    logits, draws = np.array([2.0, 1.5, 1.0, 0.0, -1.0, -8.0, 0.5, 0.2], np.float32), 40_000
    for row, kept in (
        ({}, range(8)),
        ({"temperature": 2.0}, range(8)),
        ({"top_k": 3}, (0, 1, 2)),
        ({"top_p": 0.5}, (0, 1)),
        ({"min_p": 0.3}, (0, 1, 2)),
    ):
        r = rules([row] * draws, 8)
        keys = jnp.broadcast_to(jnp.array([7, 11], jnp.uint32), (draws, 2))
        drawn = jax.jit(cpu.run)(jnp.broadcast_to(logits, (draws, 8)), r, keys, jnp.arange(draws))[0]
        p = np.exp(logits.astype(np.float64) / row.get("temperature", 1.0)) * np.isin(np.arange(8), kept)
        p /= p.sum()
        counts = np.bincount(np.asarray(drawn), minlength=8)
        assert not counts[p == 0].any()
        errors = (counts - draws * p)[p > 0] / np.sqrt(draws * p * (1 - p))[p > 0]
        assert np.abs(errors).max() < 4.5


@pytest.mark.parametrize("temperature", [1e-30, 1e-38])
def test_the_cpu_kernel_at_temperatures_near_0_draws_the_likeliest(temperature):
    logits = -np.arange(1.0, 33.0, dtype=np.float32)[::-1].copy()[None]
    keys = jnp.zeros((1, 2), jnp.uint32)
    drawn = cpu.run(
        jnp.asarray(logits), rules([{"temperature": temperature}], 32), keys, jnp.zeros(1, jnp.int32)
    )
    assert drawn[0].tolist() == [31]
