"""How near our distributions are to an oracle's, from the oracle's 20 likeliest tokens at each place.

An oracle's row is {"prompt": ids, "tokens": its greedy answer [n], "top_ids" and "top_logprobs": [n][20],
likeliest first}.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

import bonsai_jax as bj


@dataclasses.dataclass(frozen=True)
class Agreement:
    """kl: mean over tokens of KL(oracle || ours), of its top 20 and the rest as one event. same_top: share of
    tokens."""

    kl: float
    same_top: float


def agreement(model: bj.Model, rows: list[dict], *, padded: bool = False) -> Agreement:
    """Teacher-forced on the oracle's own answers: one figure over all tokens of all rows.

    padded  read all rows as one batch, by one program; else each by `bj.logits`
    """
    kl, same = [], []
    texts = [row["prompt"] + row["tokens"][:-1] for row in rows]
    read = padded_logits(model, texts) if padded else (bj.logits(model, ids) for ids in texts)
    for row, scores in zip(rows, read, strict=True):
        top_ids = np.array(row["top_ids"])
        scores = scores[-len(top_ids) :]
        kl.append(top_kl(top_ids, np.array(row["top_logprobs"]), log_softmax(scores)))
        same.append(scores.argmax(-1) == top_ids[:, 0])
    return Agreement(float(np.concatenate(kl).mean()), float(np.concatenate(same).mean()))


def padded_logits(model: bj.Model, texts: list[list[int]]) -> list[np.ndarray]:
    """Logits of all tokens of each text, [length, vocab], by one program."""
    lengths = [len(ids) for ids in texts]
    tokens = np.zeros((len(texts), max(lengths)), np.int32)
    for row, ids in zip(tokens, texts, strict=True):
        row[: len(ids)] = ids
    scores, _ = bj.jitted.forward(model.params, tokens, jnp.array(lengths), model.config)
    return [np.asarray(one)[:length] for one, length in zip(scores, lengths, strict=True)]


def top_kl(top_ids: np.ndarray, top_logprobs: np.ndarray, log_p: np.ndarray) -> np.ndarray:
    """KL per token, [n]; log_p is ours, [n, vocab]."""
    p, q = np.exp(top_logprobs), np.exp(np.take_along_axis(log_p, top_ids, axis=1))
    rest_p, rest_q = np.maximum(1 - p.sum(1), 1e-12), np.maximum(1 - q.sum(1), 1e-12)
    return (p * np.log(p / q)).sum(1) + rest_p * np.log(rest_p / rest_q)


def divergence(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """KL(p || q) of each place, [...], of log-probabilities [..., vocab]."""
    return (np.exp(log_p) * (log_p - log_q)).sum(-1)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In float64, along the last axis."""
    x = logits.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))
