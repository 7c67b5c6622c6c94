"""SmolLM2 in each format predicts a text as well as with llama.cpp's blocks."""

import pytest

import bonsai_jax as bj
from bonsai_jax.making import quantize_file
from tests.agreement import agreement
from tests.bonsai_jax.llama_cpp import LlamaCpp
from tests.bonsai_jax.quantized_perplexity import PLAIN, WITH_IMPORTANCE, Comparison

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized")]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    return Comparison(tmp_path_factory.mktemp("perplexity"))


@pytest.mark.parametrize("format", [*PLAIN, *WITH_IMPORTANCE])
def test_perplexity_is_at_most_one_percent_more(comparison, format):
    result = comparison.compare(format)
    print(f"{format}: {result.ours:.3f}, with ggml's blocks {result.ggml:.3f}")
    assert result.ours < 1.01 * result.ggml


@pytest.mark.parametrize("format", ["iq2_m", "iq3_xxs"])
def test_llama_cpp_reads_these_files(comparison, format, tmp_path):
    path = tmp_path / "new.gguf"
    quantize_file(comparison.original, path, format, importance=comparison.importance)
    model = bj.load(str(path), bj.RunConfig(context=256))
    prompt, (readable,) = (model.tokenizer.encode(text) for text in ("Call me Ishmael. Some years ago", "a"))
    agreed = agreement(model, [LlamaCpp(path, context=256).greedy(prompt, 12, readable=readable)])
    assert agreed.kl < 5e-3
