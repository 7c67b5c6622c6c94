"""A real model through the kernels of a decode step, against the exact definition on the same device.

    PYTHONPATH=. python benchmarks/kernels_vs_definition.py SmolLM2-135M-Instruct.Q4_1.gguf

Both read llama.cpp's kept greedy answers to 20 prompts (tests/data): the kernels one row, one token a step;
the definition all texts at once, which for it is the same. Printed are the KL of the distributions over the
whole vocabulary, and the share of places with the same likeliest token. Then the kernels write greedily, and
the definition reads what they wrote: a text is the one that the definition would have written if every token
is its likeliest. Where that is not so first, the texts part, and by how many nats is the margin.

Three programs are compiled, whatever the lengths of the texts: the definition, and a loop of decode steps for
each width of activations. Each part prints its seconds: a GPU takes most of them to compile.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import bonsai_jax as bj
from bonsai_jax import ModelConfig, card, machine
from bonsai_jax.decoding import steps as core
from bonsai_jax.measure import bench
from bonsai_jax.network import cache as kv
from bonsai_jax.network.cache import KVCache
from bonsai_jax.network.params import Params
from tests.agreement import log_softmax

ORACLE = Path(__file__).parent.parent / "tests" / "data" / "smollm2_oracle.json"
NEAR_TIE = 0.01  # nats
LIMITS = {8: (3e-3, 0.96), 16: (1e-5, 1.0)}  # KL at most; same top token at least (16: near-ties aside)
NEW_TOKENS = 64  # of each answer
# The definition runs three times: to search for its fastest products would take longer than they do.
UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


@functools.partial(jax.jit, static_argnames="config")
def at_once(
    params: Params, tokens: Int[Array, "B T"], first: Int[Array, "B"], config: ModelConfig
) -> Float[Array, "B NEW_TOKENS V"]:
    """Logits behind the tokens from place `first` of each text on, all texts read at once. Padding behind a
    text is read too, which changes nothing before it."""
    logits, _ = core.forward(params, tokens, jnp.full(tokens.shape[0], tokens.shape[1]), config)
    places = first[:, None] + jnp.arange(NEW_TOKENS)
    return jnp.take_along_axis(logits, places[..., None], axis=1)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def by_steps(
    params: Params,
    cache: KVCache,
    tokens: Int[Array, "T"],
    given: Int[Array, ""],
    length: Int[Array, ""],
    config: ModelConfig,
) -> tuple[Int[Array, "T"], Float[Array, "NEW_TOKENS V"], KVCache]:
    """`length` tokens from the first on, one row, one token a step.

    given    tokens that are read as they are; in place of those behind stands the likeliest one
    cache    its tokens are forgotten
    Returns the tokens that were read, and the one behind; logits behind the last NEW_TOKENS; the cache.
    """

    def step(i, carry):
        tokens, scores, cache = carry
        logits, cache = bench.last_logits(params, cache, tokens[i][None, None], config)
        likeliest = logits[0].argmax().astype(tokens.dtype)
        tokens = tokens.at[i + 1].set(jnp.where(i + 1 < given, tokens[i + 1], likeliest))
        # What is too early lands in the first place, and is overwritten.
        return tokens, scores.at[jnp.maximum(i - length + NEW_TOKENS, 0)].set(logits[0]), cache

    cache = cache.replace(lengths=jnp.zeros_like(cache.lengths))
    scores = jnp.zeros((NEW_TOKENS, config.vocab_size))
    return jax.lax.fori_loop(0, length, step, (tokens, scores, cache))


@contextlib.contextmanager
def part(name: str) -> Iterator[None]:
    """Says what is being done, and how long it took."""
    print(f"{name} ...", end=" ", flush=True)
    began = time.perf_counter()
    yield
    print(f"{time.perf_counter() - began:.1f} s", flush=True)


def padded(texts: list[list[int]], size: int) -> np.ndarray:
    return np.array([text + [0] * (size - len(text)) for text in texts], np.int32)


def divergence(want: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """KL(want || scores), and by how many nats `want` prefers its own likeliest token to that of `scores`, at
    each place."""
    got = log_softmax(scores)
    chosen = np.take_along_axis(want, got.argmax(-1)[..., None], axis=-1)[..., 0]
    return (np.exp(want) * (want - got)).sum(-1), want.max(-1) - chosen


def margin(scores: np.ndarray, answer: np.ndarray) -> float | None:
    """By how many nats the definition prefers its own token, where an answer first has another; None where it
    has none. `scores` are the definition's for this answer."""
    differs = np.flatnonzero(scores.argmax(-1) != answer)
    if not differs.size:
        return None
    log_p = log_softmax(scores[differs[0]])
    return float(log_p.max() - log_p[answer[differs[0]]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a GGUF file whose tokenizer is SmolLM2's")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--cache-dtype", help="of the kernels' cache; else the device's default")
    arguments = parser.parse_args()
    rows = json.loads(ORACLE.read_text())["float32"][: arguments.prompts]
    assert all(len(row["tokens"]) == NEW_TOKENS for row in rows)
    prompts = [row["prompt"] for row in rows]
    kept = [row["prompt"] + row["tokens"][:-1] for row in rows]
    size = max(map(len, kept)) + 1  # room for the token behind the last that is read
    first = np.array([len(prompt) - 1 for prompt in prompts], np.int32)
    texts = padded(kept, size)

    settings = {"context": 1024, "batch_size": 1}
    with part("load the model, three times"):
        exact = bj.load(arguments.model, bj.RunConfig(**settings, cache_dtype="float32", impl="reference"))
        settings |= {"cache_dtype": arguments.cache_dtype}
        models = {
            bits: bj.load(arguments.model, bj.RunConfig(**settings, activation_bits=bits)) for bits in LIMITS
        }
    config = exact.config
    caches = {bits: kv.empty(config, model.run, 1, size) for bits, model in models.items()}
    with concurrent.futures.ThreadPoolExecutor() as threads:
        with part("trace the definition and the steps of each width"):
            lowered = at_once.lower(exact.params, texts, first, config)
            definition = threads.submit(lowered.compile, compiler_options=UNTUNED)
            steps = {}
            for bits, model in models.items():
                lowered = by_steps.lower(
                    model.params, caches[bits], texts[0], first[0], first[0], config=config
                )
                steps[bits] = threads.submit(lowered.compile)
        with part("compile the definition (and the steps, meanwhile)"):
            definition = definition.result()
        with part("the definition on the kept answers"):
            scores = np.asarray(definition(exact.params, texts, first))
            want = list(threads.map(log_softmax, scores))

        failures = []
        for bits, (most, least) in LIMITS.items():
            model, cache = models[bits], caches[bits]
            with part(f"{bits} bits: compile what is left of the steps"):
                step = steps[bits].result()
            with part(f"{bits} bits: the kept answers by steps"):
                got = []
                for text, length in zip(texts, map(len, kept), strict=True):
                    count = np.int32(length)
                    _, scores, cache = step(model.params, cache, text, count, count)
                    got.append(np.asarray(scores))
                compared = list(threads.map(divergence, want, got))
                kl, gaps = (np.concatenate(values) for values in zip(*compared, strict=True))
            with part(f"{bits} bits: greedy answers by steps"):
                answers = []
                for text, length in zip(padded(prompts, size), map(len, prompts), strict=True):
                    counts = (np.int32(length), np.int32(length + NEW_TOKENS - 1))
                    written, _, cache = step(model.params, cache, text, *counts)
                    answers.append(np.asarray(written)[length : length + NEW_TOKENS])
            with part(f"{bits} bits: the definition on those"):
                wrote = [
                    prompt + answer[:-1].tolist() for prompt, answer in zip(prompts, answers, strict=True)
                ]
                scores = np.asarray(definition(exact.params, padded(wrote, size), first))
                margins = [gap for gap in map(margin, scores, answers) if gap is not None]
            llama_cpp = sum(row["tokens"] == a.tolist() for row, a in zip(rows, answers, strict=True))
            print(
                f"{machine.device_name()}, {card.step_names(model.params, model.config)}, "
                f"jax {jax.__version__}, {bits} bits: "
                f"{len(kl)} tokens, KL {kl.mean():.2e} (largest {kl.max():.1e}), "
                f"same top token {(gaps == 0).mean():.2%} (else at most {gaps.max():.4f} nats apart), "
                f"{model.run.cache_dtype} cache, same greedy text {len(rows) - len(margins)} of {len(rows)}, "
                f"llama.cpp's in float32 {llama_cpp}"
                + "".join(f", parted at {gap:.4f} nats" for gap in margins),
                flush=True,
            )
            parted_clearly = bits == 16 and any(gap > NEAR_TIE for gap in margins)
            same = gaps <= (NEAR_TIE if bits == 16 else 0)
            if not kl.mean() <= most or not same.mean() >= least or parted_clearly:  # NaN too
                failures.append(str(bits))
    raise SystemExit(f"beyond the limits: {', '.join(failures)} bits" if failures else 0)


if __name__ == "__main__":
    main()
