"""The draw's kernels on a GPU against the definition there, at vocabularies of real models. (How often each
token is drawn: test_sampling.py, which test_gpu.py runs again.)"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sampling import draw
from tests.pallas_kernels.test_lockstep_sampling import PLAIN, ROWS, rules

pytestmark = pytest.mark.gpu

DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
PENALTIES = {"repetition_penalty": 2.0, "presence_penalty": 0.25, "frequency_penalty": 0.125}  # exact
SETTINGS = [
    *ROWS,
    DEFAULTS,
    DEFAULTS | {"top_k": 0},
    DEFAULTS | PENALTIES,
    PENALTIES,
    PENALTIES | {"top_k": 320},
]


@pytest.fixture(autouse=True, scope="module")
def on_a_gpu():
    assert jax.default_backend() == "gpu", "these tests ask for a GPU; jax found none"


@pytest.mark.parametrize("vocabulary", [151669, 49152, 700])
@pytest.mark.parametrize(
    ("digits", "spread"), [(8, 3.0), (0, 3.0), (8, 0.1), (1, 10.0)], ids=["usual", "ties", "flat", "peaked"]
)
def test_the_kernels_draw_what_the_definition_draws(vocabulary, digits, spread):
    """All settings as rows of one batch. exp, log and the order of sums differ: two of 2,000 draws may."""
    rng, rows = np.random.default_rng(vocabulary + digits), len(SETTINGS)
    shape = rows, vocabulary
    tables = rng.random(shape) < 0.1, np.where(rng.random(shape) < 0.05, rng.integers(0, 4, shape), 0)
    r = rules(SETTINGS, vocabulary, biases=32, tables=(tables[0], tables[1].astype(np.int32)))
    ids = rng.integers(0, vocabulary, (rows, 1)) + np.arange(32) * 7  # some beyond the vocabulary
    biases = rng.integers(-2, 3, ids.shape)
    biases[0] = 0
    r = r._replace(bias_ids=jnp.asarray(ids, jnp.int32), bias=jnp.asarray(biases, jnp.float32))
    keys = jnp.asarray(rng.integers(0, 2**32, (rows, 2), dtype=np.uint32))
    by = {impl: jax.jit(draw, static_argnames="impl") for impl in ("two_launches", "reference")}
    other = 0
    for position in range(100):
        logits = spread * jax.random.normal(jax.random.key(position), shape)
        logits = jnp.round(logits, digits) if digits < 8 else logits
        at = jnp.full(rows, position)
        (tokens, seen, counts), (its, *_) = (f(logits, r, keys, at, impl=impl) for impl, f in by.items())
        other += int((tokens != its).sum())
        row = jnp.arange(rows)
        assert (seen == r.seen.at[row, tokens].set(True)).all()
        assert (counts == r.counts.at[row, tokens].add(1)).all()
    assert other <= 2


@pytest.mark.parametrize("tokens", [1, 30, 400, 3000])
def test_a_mask_that_leaves_few_tokens(tokens):
    """Side by side, as digits are: of fewer groups than a top-k looks for. exp, log and sums differ."""
    vocabulary, rows, rng = 151669, len(SETTINGS), np.random.default_rng(tokens)
    bits = np.zeros((rows, -(-vocabulary // 32) * 32), bool)
    bits[:, 40_000 + rng.permutation(2 * tokens)[:tokens]] = True
    words = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    r = rules(SETTINGS, vocabulary)._replace(allowed=jnp.asarray(words))
    keys = jnp.asarray(rng.integers(0, 2**32, (rows, 2), dtype=np.uint32))
    by = {impl: jax.jit(draw, static_argnames="impl") for impl in ("two_launches", "reference")}
    other = 0
    for position in range(50):
        logits = 3 * jax.random.normal(jax.random.key(position), (rows, vocabulary))
        drawn, its = (f(logits, r, keys, jnp.full(rows, position), impl=impl)[0] for impl, f in by.items())
        assert bits[np.arange(rows), np.asarray(drawn)].all()
        other += int((drawn != its).sum())
    assert other <= 2


@pytest.mark.parametrize("rows", [1, 2, 133, 300])
def test_a_row_is_drawn_the_same_in_any_batch(rows):
    vocabulary = 32000
    logits = 3 * jax.random.normal(jax.random.key(0), (rows, vocabulary))
    keys = jax.random.bits(jax.random.key(1), (rows, 2), jnp.uint32)
    f = jax.jit(draw, static_argnames="impl")
    many = f(logits, rules([DEFAULTS] * rows, vocabulary), keys, jnp.arange(rows), impl="two_launches")[0]
    for i in {0, rows // 2, rows - 1}:
        one = slice(i, i + 1)
        alone = f(logits[one], rules([DEFAULTS], vocabulary), keys[one], jnp.array([i]), impl="two_launches")
        assert alone[0][0] == many[i]


def test_penalties_of_a_row_are_no_other_rows():
    """A row with a penalty reads its tables; the logits of the others stay as they are."""
    vocabulary = 5000
    seen = np.ones((2, vocabulary), bool)
    seen[:, 17] = False
    greedy = PLAIN | {"temperature": 0.0}
    tables = seen, np.zeros(seen.shape, np.int32)
    r = rules([greedy | {"repetition_penalty": 2.0}, greedy], vocabulary, tables=tables)
    logits = np.ones((2, vocabulary), np.float32)
    logits[:, 99] = 1.5
    f = jax.jit(draw, static_argnames="impl")
    drawn = f(
        jnp.asarray(logits), r, jnp.zeros((2, 2), jnp.uint32), jnp.zeros(2, jnp.int32), impl="two_launches"
    )
    assert drawn[0].tolist() == [17, 99]


def test_a_row_that_is_not_finite_draws_no_token():
    """All settings, each beside a row that is as it should be."""
    vocabulary, rows = 49152, 2 * len(SETTINGS)
    r = rules([setting for setting in SETTINGS for _ in range(2)], vocabulary)
    f = jax.jit(draw, static_argnames="impl")
    for harm in (np.nan, -np.nan, np.inf, -np.inf):
        logits = np.random.default_rng(0).normal(0, 3, (rows, vocabulary)).astype(np.float32)
        logits[::2, slice(None) if harm == -np.inf else [77, 40000]] = harm
        keys = jnp.ones((rows, 2), jnp.uint32)
        drawn, seen, counts = f(jnp.asarray(logits), r, keys, jnp.arange(rows), impl="two_launches")
        assert (drawn[::2] == -1).all() and (drawn[1::2] >= 0).all()
        assert not seen[::2].any() and not counts[::2].any() and (counts[1::2].sum(1) == 1).all()
