"""On a CPU a greedy text is the same alone and beside others, and however its prompt is padded and cut, with
8-bit activations too: SmolLM2."""

import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import bonsai_jax as bj
from tests.bonsai_jax.vocabularies import smollm2_path

pytestmark = pytest.mark.usefixtures("optimized")
pytest.importorskip("llvmlite")  # the extra `cpu`

GREEDY = bj.SamplingParams(temperature=0.0)
HOW = {"max_new_tokens": 24, "ignore_eos": True}
STARTS = ("Once upon a time", "def main():", "The capital of France", "In 1969", "import numpy as np")
MOST = 33


@pytest.fixture(scope="module")
def model():
    return bj.load(str(smollm2_path()), bj.RunConfig(batch_size=MOST, context=512, weights="packed"))


@pytest.fixture(scope="module")
def prompts():
    return [f"{STARTS[i % len(STARTS)]} {i}" for i in range(MOST)]


@pytest.fixture(scope="module")
def alone(model, prompts):
    return [bj.generate(model, prompt, sampling=GREEDY, **HOW)[0].tokens for prompt in prompts[:9]]


@pytest.mark.parametrize(
    "size", [9, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 5, 6, 7, 8, 33))]
)
def test_generate(model, prompts, alone, size):
    together = bj.generate(model, prompts[:size], sampling=GREEDY, **HOW)
    assert [output.tokens for output in together[:9]] == alone[:size]


@pytest.mark.slow
def test_an_engine(model, prompts, alone):
    with bj.Engine(model) as engine:
        handles = [engine.submit(prompt, GREEDY, **HOW) for prompt in prompts]
        assert [handle.result(300).tokens for handle in handles[:9]] == alone


TEXT = (Path(__file__).parents[1] / "data/moby_dick.txt").read_text()[:2000]
LENGTHS = [17, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 33, 65, 100))]


@pytest.mark.parametrize("length", LENGTHS)
def test_extend_by_hand(model, length):
    """generate pads a prompt to a power of two; here it is read as long as it is, and then token by token."""
    ids = model.tokenizer.encode(TEXT)[:length]
    whole = bj.generate(model, ids, sampling=GREEDY, **HOW)[0].tokens
    cache, tokens, new = bj.new_cache(model, batch_size=1, context=256), [], ids
    while len(tokens) < len(whole):
        logits, cache = bj.jitted.extend(
            model.params, cache, jnp.array([new]), jnp.array([len(new)]), model.config
        )
        new = [int(np.argmax(logits[0, -1]))]
        tokens += new
    assert tokens == whole


def test_logits_have_the_same_bits_padded_and_in_parts(model):
    ids = model.tokenizer.encode(TEXT)[:17]

    def extend(cache, new, width):
        tokens = jnp.array([new + [0] * (width - len(new))])
        logits, cache = bj.jitted.extend(model.params, cache, tokens, jnp.array([len(new)]), model.config)
        return np.asarray(logits[0, : len(new)]), cache

    whole, _ = extend(bj.new_cache(model, batch_size=1, context=256), ids, 17)
    padded, _ = extend(bj.new_cache(model, batch_size=1, context=256), ids, 64)
    np.testing.assert_array_equal(padded, whole)
    cache, each = bj.new_cache(model, batch_size=1, context=256), []
    for token in ids:
        logits, cache = extend(cache, [token], 1)
        each.append(logits[0])
    np.testing.assert_array_equal(np.stack(each), whole)


@functools.cache
def tiny(source) -> bj.Model:
    return bj.load(f"synth:{source}", bj.RunConfig(page_size=16, weights="packed"))


CROWDS = [
    (source, rows) if rows == 33 else pytest.param(source, rows, marks=pytest.mark.slow)
    for source in ("tiny-qwen3:q8_0", "tiny-gemma3:q4_0")
    for rows in (2, 3, 4, 5, 7, 8, 9, 16, 17, 33)
]


@pytest.mark.parametrize(("source", "rows"), CROWDS)
def test_logits_have_the_same_bits_beside_other_rows(source, rows):
    """These models norm queries and keys, and Gemma what each half of a layer adds, outside of products. XLA
    summed many rows in another order than few."""
    model = tiny(source)
    ids = np.random.default_rng(0).integers(0, 256, (rows, 5)).astype(np.int32)

    def logits(first, last):
        """Of a prompt, and of a step."""
        cache, out = bj.new_cache(model, batch_size=last - first, context=16), []
        for tokens in (ids[first:last, :4], ids[first:last, 4:]):
            lengths = jnp.full(last - first, tokens.shape[1], jnp.int32)
            got, cache = bj.jitted.extend(model.params, cache, tokens, lengths, model.config)
            out.append(np.asarray(got))
        return np.concatenate(out, axis=1)

    together = logits(0, rows)
    for row in (0, rows // 2, rows - 1):
        np.testing.assert_array_equal(together[row], logits(row, row + 1)[0])
