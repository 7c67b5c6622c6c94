"""Perplexity and divergence against direct computations in numpy float64."""

import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.measure import evaluate


@pytest.fixture(scope="module")
def model():
    return bj.load("synth:tiny-llama:q8_0", bj.RunConfig(context=64, batch_size=1))


def text_ids(n):
    return np.random.default_rng(0).integers(0, 256, n).tolist()


def exact_log_softmax(logits):
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize("context", [4, 17, 64])
def test_perplexity_is_llama_cpps(model, context):
    """Chunks of n tokens that begin with BOS; tokens n/2 + 1 to n - 1 of each are scored."""
    ids = text_ids(3 * context + context // 2)
    nll = evaluate.evaluate(model, evaluate.chunks(ids, context, bos_id=300)).nll
    losses = []
    for i in range(3):
        chunk = [300, *ids[i * context + 1 : (i + 1) * context]]
        log_p = exact_log_softmax(bj.logits(model, chunk))
        losses += [-log_p[j, chunk[j + 1]] for j in range(context // 2, context - 1)]
    ppl, error = evaluate.perplexity(nll)
    assert nll.count == len(losses) == 3 * evaluate.scored(context)
    assert ppl == pytest.approx(np.exp(np.mean(losses)), rel=1e-6)
    assert error == pytest.approx(
        np.exp(np.mean(losses)) * np.std(losses) / np.sqrt(len(losses) - 1), rel=1e-4
    )


def test_chunks():
    ids = list(range(11))
    np.testing.assert_array_equal(evaluate.chunks(ids, 4, None), [[0, 1, 2, 3], [4, 5, 6, 7]])
    np.testing.assert_array_equal(evaluate.chunks(ids, 5, 99), [[99, 1, 2, 3, 4], [99, 6, 7, 8, 9]])
    with pytest.raises(ValueError, match="11 tokens; chunks of 6 need at least 12"):
        evaluate.chunks(ids, 6, None)


def test_a_context_of_many_prefill_chunks_is_scored_alike():
    """The scored half begins in the middle of one piece of iter_logits and goes on in the next."""
    model = bj.load("synth:tiny-llama:q8_0", bj.RunConfig(context=1200, batch_size=1))
    chunk = np.array(text_ids(1200), np.int32)
    log_probs, losses = evaluate.score_chunk(model, chunk)
    exact = exact_log_softmax(bj.logits(model, chunk))[600:1199]
    np.testing.assert_allclose(log_probs, exact, atol=5e-6)
    np.testing.assert_allclose(losses, -exact[np.arange(599), chunk[601:]], atol=5e-6)


def test_kl_divergence_is_its_definition():
    rng = np.random.default_rng(1)
    p, q = (exact_log_softmax(rng.normal(0, 3, (70, 50))) for _ in range(2))
    direct = [sum(np.exp(a) * (a - b) for a, b in zip(x, y, strict=True)) for x, y in zip(p, q, strict=True)]
    np.testing.assert_allclose(evaluate.kl_divergence(p, q), direct, rtol=1e-12)
    divergence = evaluate.Divergence()
    divergence.add(p, q)
    assert divergence.kl.mean == pytest.approx(np.mean(direct))
    assert divergence.kl.error == pytest.approx(np.std(direct) / np.sqrt(69))
    assert divergence.kl.largest == pytest.approx(max(direct))
    assert divergence.same_top.mean == np.mean(p.argmax(-1) == q.argmax(-1))


def test_a_model_does_not_diverge_from_itself(model, tmp_path):
    path, cut, vocab = (
        tmp_path / "base.npz",
        evaluate.chunks(text_ids(150), 32, None),
        model.config.vocab_size,
    )
    with evaluate.BaseWriter(path, cut, vocab) as write:
        evaluate.evaluate(model, cut, write=write)
    with evaluate.BaseReader(path, cut, vocab) as base:
        divergence = evaluate.evaluate(model, cut, compare=base).divergence
    assert divergence.kl.count == 4 * evaluate.scored(32)
    assert divergence.kl.mean == divergence.kl.largest == 0
    assert divergence.same_top.mean == 1
    with np.load(path) as stored:  # the documented form
        np.testing.assert_array_equal(stored["tokens"], cut)
        assert stored["log_probs"].shape == (4, evaluate.scored(32), vocab)
        np.testing.assert_allclose(np.exp(stored["log_probs"]).sum(-1), 1, atol=1e-5)


def test_a_base_file_that_does_not_fit_is_refused(model, tmp_path):
    path, cut, vocab = tmp_path / "base.npz", evaluate.chunks(text_ids(64), 32, None), model.config.vocab_size
    with pytest.raises(RuntimeError), evaluate.BaseWriter(path, cut, vocab):
        raise RuntimeError("interrupted")
    assert not list(tmp_path.iterdir())  # half a file is no file
    with evaluate.BaseWriter(path, cut, vocab) as write:
        evaluate.evaluate(model, cut, write=write)
    with pytest.raises(ValueError, match="another text, tokenizer or chunk size"):
        evaluate.BaseReader(path, cut + 1, vocab)
    with pytest.raises(ValueError, match="do not fit a vocabulary of 7"):
        evaluate.BaseReader(path, cut, 7)
    path.write_bytes(b"no zip file")
    with pytest.raises(ValueError, match="not a file of log-probabilities"):
        evaluate.BaseReader(path, cut, vocab)
