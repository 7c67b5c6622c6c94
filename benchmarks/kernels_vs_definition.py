"""A real model through the kernels of a decode step, against the exact definition on the same device.

    PYTHONPATH=. python benchmarks/kernels_vs_definition.py SmolLM2-135M-Instruct.Q4_1.gguf

Both read llama.cpp's kept greedy answers to 20 prompts (tests/data), every token in a step of its own: KL of
the distributions over the whole vocabulary, and share of places with the same likeliest token. Then both
write greedily: the texts must be the same but for near-ties, which are counted with their margins.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import bonsai_jax as bj
from bonsai_jax import cache as kv
from bonsai_jax import card
from bonsai_jax import decoding as core
from tests.agreement import log_softmax

ORACLE = Path(__file__).parent.parent / "tests" / "data" / "smollm2_oracle.json"
NEAR_TIE = 0.01  # nats
LIMITS = {8: (3e-3, 0.96), 16: (1e-5, 0.999)}  # KL at most, same top token at least
NEW_TOKENS = 64


def step_logits(model: bj.Model, ids: list[int], last: int) -> np.ndarray:
    """Logits behind the last tokens of `ids`, float32 [last, V], from steps of one token each."""
    cache, scores = kv.empty(model.config, model.run, 1, model.run.context), []
    for token in ids:
        tokens, lengths = jnp.array([[token]], jnp.int32), jnp.array([1], jnp.int32)
        step, cache = core.teacher_forced_logits(model.params, cache, tokens, lengths, model.config)
        scores.append(step[0, 0])
    return np.asarray(jnp.stack(scores[-last:]))


def first_difference(exact: bj.Model, ids: list[int], a: list[int], b: list[int]) -> float | None:
    """Where two greedy answers part: by how many nats the definition prefers its token; None where they are
    the same."""
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if x != y:
            log_p = log_softmax(bj.logits(exact, ids + a[:i])[-1:])[0]
            return float(log_p[x] - log_p[y])
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a GGUF file whose tokenizer is SmolLM2's")
    parser.add_argument("--prompts", type=int, default=20)
    arguments = parser.parse_args()
    rows = json.loads(ORACLE.read_text())["float32"][: arguments.prompts]
    settings = {"context": 1024, "rows": 1, "cache_dtype": "float32"}
    exact = bj.load(arguments.model, bj.RunConfig(**settings, impl="xla"))
    texts = [(row["prompt"] + row["tokens"][:-1], len(row["tokens"])) for row in rows]
    want = [log_softmax(step_logits(exact, *text)) for text in texts]
    greedy = {"max_new_tokens": NEW_TOKENS, "sampling": bj.SamplingParams(temperature=0), "ignore_eos": True}
    answers = [bj.generate(exact, [row["prompt"]], **greedy)[0].tokens for row in rows]
    failures = []
    for bits, (most, least) in LIMITS.items():
        model = bj.load(arguments.model, bj.RunConfig(**settings, activation_bits=bits))
        got = [log_softmax(step_logits(model, *text)) for text in texts]
        kl = np.concatenate([(np.exp(p) * (p - q)).sum(-1) for p, q in zip(want, got, strict=True)])
        same = np.concatenate([p.argmax(-1) == q.argmax(-1) for p, q in zip(want, got, strict=True)])
        parted = [
            first_difference(
                exact, row["prompt"], answer, bj.generate(model, [row["prompt"]], **greedy)[0].tokens
            )
            for row, answer in zip(rows, answers, strict=True)
        ]
        margins = [margin for margin in parted if margin is not None]
        print(
            f"{card.device_name()}, {card.impl_names(model.params)}, jax {jax.__version__}, {bits} bits: "
            f"{len(kl)} tokens, KL {kl.mean():.2e} (largest {kl.max():.1e}), "
            f"same top token {same.mean():.2%}, same greedy text {len(rows) - len(margins)} of {len(rows)}"
            + "".join(f", parted at {margin:.4f} nats" for margin in margins),
            flush=True,
        )
        parted_clearly = bits == 16 and any(margin > NEAR_TIE for margin in margins)
        if kl.mean() > most or same.mean() < least or parted_clearly:
            failures.append(str(bits))
    raise SystemExit(f"beyond the limits: {', '.join(failures)} bits" if failures else 0)


if __name__ == "__main__":
    main()
