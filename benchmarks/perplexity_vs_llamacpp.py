"""Perplexity of SmolLM2 here and by llama.cpp, on the same tokens: chapters of Moby-Dick (tests/data).

    uv run python benchmarks/perplexity_vs_llamacpp.py [--chunks N]

llama.cpp's perplexity tool is not in xllamacpp, so its server is asked token by token for the log-probability
of the text's own next token: a bias makes it draw that one, and the log-probability it reports is the one
before the bias. The chunks are those of `bonsai-jax perplexity` and of llama.cpp's tool: 512 tokens, of which
the second half is scored. Takes some minutes.
"""

import argparse
from pathlib import Path

import numpy as np

import bonsai_jax as bj
from bonsai_jax.measure import evaluate
from checkpoints.demo import demo_path
from tests.bonsai_jax.llama_cpp import LlamaCpp

TEXT = Path(__file__).parent.parent / "tests" / "data" / "moby_dick.txt"
CONTEXT = 512


def main(most_chunks: int | None) -> None:
    path = demo_path()
    model = bj.load(str(path))
    ids = model.tokenizer.encode(TEXT.read_text())
    chunks = evaluate.chunks(ids, CONTEXT, model.tokenizer.bos_id if model.tokenizer.add_bos else None)
    chunks = chunks[:most_chunks]
    oracle = LlamaCpp(path)
    ours, theirs, difference = evaluate.Mean(), evaluate.Mean(), evaluate.Mean()
    for i, chunk in enumerate(chunks):
        _, nll = evaluate.score_chunk(model, chunk)
        expected = np.array([-oracle.log_probability(chunk[: at + 1], chunk[at + 1]) for at in range(
            CONTEXT // 2, CONTEXT - 1)])  # fmt: skip
        ours.add(nll)
        theirs.add(expected)
        difference.add(nll - expected)
        print(f"{i + 1} of {len(chunks)} chunks: {evaluate.perplexity(ours)[0]:.4f} here, "
              f"{evaluate.perplexity(theirs)[0]:.4f} llama.cpp", flush=True)  # fmt: skip
    print(f"{len(ids)} tokens, {ours.count} scored")
    for name, nll in (("bonsai-jax", ours), ("llama.cpp", theirs)):
        print("{}: {:.4f} +- {:.4f}".format(name, *evaluate.perplexity(nll)))
    print(f"difference of the mean negative log-likelihoods: {difference.mean:.2e} +- {difference.error:.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunks", type=int, help="only the first of them")
    main(parser.parse_args().chunks)
