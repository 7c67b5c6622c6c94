"""How well a model predicts a text: perplexity, and divergence from the predictions of another run.

As in llama.cpp's perplexity tool, the text is cut into chunks of `context` tokens. Each chunk starts with BOS
if the model uses one. Only tokens after the first half of a chunk are scored, so that each has at least half
a chunk of text before it.

    chunk   BOS t1 t2 ... t[c/2]  | t[c/2 + 1] ... t[c - 1]
                    context       |        scored            c - 1 - c/2 tokens
"""

import dataclasses
import math
import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import numpy as np
from jaxtyping import Float, Int

from bonsai_jax.model import Model
from bonsai_jax.text import iter_logits

LOGIT_ROWS = 32  # rows of logits computed at once, which bounds the memory of float64 copies


@dataclasses.dataclass
class Mean:
    """A running mean with its standard error, sqrt(variance / (count - 1)), in float64."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    largest: float = -math.inf

    def add(self, values: np.ndarray) -> None:
        values = np.asarray(values, np.float64)
        self.count += values.size
        self.total += float(values.sum())
        self.squares += float(np.square(values).sum())
        self.largest = max(self.largest, float(values.max(initial=-math.inf)))

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def error(self) -> float:
        if self.count < 2:
            return math.nan
        variance = max(0.0, self.squares / self.count - self.mean**2)
        return math.sqrt(variance / (self.count - 1))


def perplexity(nll: Mean) -> tuple[float, float]:
    """exp(mean negative log-likelihood), and its standard error: that of the mean times the perplexity."""
    ppl = math.exp(nll.mean)
    return ppl, ppl * nll.error


@dataclasses.dataclass
class Divergence:
    """The divergence of this run from a base run, over the same scored tokens.

    kl        KL(base || this run) of each predicted distribution, in nats
    same_top  1 where both runs give the same token the highest probability, else 0
    each      the KL divergences themselves, in the order of the text
    """

    kl: Mean = dataclasses.field(default_factory=Mean)
    same_top: Mean = dataclasses.field(default_factory=Mean)
    each: list[np.ndarray] = dataclasses.field(default_factory=list)

    def add(self, base: Float[np.ndarray, "T V"], log_probs: Float[np.ndarray, "T V"]) -> None:
        self.each.append(kl_divergence(base, log_probs))
        self.kl.add(self.each[-1])
        self.same_top.add(base.argmax(-1) == log_probs.argmax(-1))

    def kl_percentile(self, share: float) -> float:
        """The KL divergence that this share of the tokens, in percent, does not exceed (numpy's linear
        interpolation)."""
        return float(np.percentile(np.concatenate(self.each), share))


def log_softmax(logits: Float[np.ndarray, "T V"]) -> Float[np.ndarray, "T V"]:
    """float32 log-probabilities; the normalization is summed in float64.

    log p = x - max(x) - log sum exp(x - max(x))
    """
    out = np.empty(logits.shape, np.float32)
    for first in range(0, len(logits), LOGIT_ROWS):
        x = logits[first : first + LOGIT_ROWS].astype(np.float32)
        x -= x.max(-1, keepdims=True)
        out[first : first + LOGIT_ROWS] = x - np.log(np.exp(x).sum(-1, dtype=np.float64, keepdims=True))
    return out


def kl_divergence(
    base: Float[np.ndarray, "T V"], log_probs: Float[np.ndarray, "T V"]
) -> Float[np.ndarray, "T"]:
    """Kullback-Leibler divergence of each row, from log-probabilities; float64.

    KL(p || q) = sum_v p_v (log p_v - log q_v)
    """
    out = np.empty(len(base), np.float64)
    for first in range(0, len(base), LOGIT_ROWS):
        rows = slice(first, first + LOGIT_ROWS)
        p = base[rows].astype(np.float64)
        out[rows] = (np.exp(p) * (p - log_probs[rows])).sum(-1)
    return out


def chunks(ids: Sequence[int], context: int, bos_id: int | None) -> Int[np.ndarray, "chunks context"]:
    """Token ids cut into whole chunks; the rest is dropped. Unless `bos_id` is None, it replaces the first
    token of each chunk.

    Raises ValueError if the tokens fill fewer than two chunks, as llama.cpp does, or if context is below 4.
    """
    if context < 4:
        raise ValueError(f"chunks of {context} tokens: at least 4 are needed")
    if len(ids) < 2 * context:
        raise ValueError(
            f"the text has {len(ids)} tokens; chunks of {context} need at least {2 * context}: "
            "give a longer text or a smaller context"
        )
    cut = np.array(ids[: len(ids) // context * context], np.int32).reshape(-1, context)
    if bos_id is not None:
        cut[:, 0] = bos_id
    return cut


def scored(context: int) -> int:
    """How many tokens of a chunk are scored."""
    return context - 1 - context // 2


def score_chunk(
    model: Model, chunk: Int[np.ndarray, "context"]
) -> tuple[Float[np.ndarray, "T V"], Float[np.ndarray, "T"]]:
    """The predicted log-probabilities at each scored token of a chunk, and the tokens' negative
    log-likelihoods."""
    first = len(chunk) // 2
    parts, position = [], 0
    for logits in iter_logits(model, chunk.tolist()):
        rows = slice(max(0, first - position), max(0, len(chunk) - 1 - position))
        parts.append(log_softmax(logits[rows]))
        position += len(logits)
    log_probs = np.concatenate(parts)
    targets = chunk[first + 1 :]
    return log_probs, -log_probs[np.arange(len(targets)), targets].astype(np.float64)


class BaseWriter:
    """Writes the log-probabilities of a run, chunk by chunk, into an .npz file, which np.load can read:

    tokens     int32 [chunks, context]
    log_probs  float32 [chunks, scored tokens per chunk, vocabulary]

    The file takes 4 bytes x vocabulary for every scored token: 50 MB per chunk of 512 for a vocabulary of
    49,152. It is renamed to `path` when it is complete.
    """

    def __init__(self, path: Path, tokens: Int[np.ndarray, "chunks context"], vocab_size: int):
        self.path, self.part = path, path.with_name(path.name + ".part")
        self.shape = (len(tokens), scored(tokens.shape[1]), vocab_size)
        self.file = zipfile.ZipFile(self.part, "w", zipfile.ZIP_STORED, allowZip64=True)
        with self.file.open("tokens.npy", "w") as entry:
            np.lib.format.write_array(entry, tokens)
        self.entry = self.file.open("log_probs.npy", "w", force_zip64=True)
        header = {"descr": "<f4", "fortran_order": False, "shape": self.shape}
        np.lib.format.write_array_header_1_0(self.entry, header)

    def write(self, log_probs: Float[np.ndarray, "T V"]) -> None:
        self.entry.write(np.ascontiguousarray(log_probs, "<f4").tobytes())

    def __enter__(self) -> "BaseWriter":
        return self

    def __exit__(self, kind, *_) -> None:
        self.entry.close()
        self.file.close()
        if kind is None:
            os.replace(self.part, self.path)
        else:
            self.part.unlink()


class BaseReader:
    """Reads the file of a BaseWriter, chunk by chunk. Raises ValueError if the file was made from another
    text, chunk size or vocabulary, or is not such a file."""

    def __init__(self, path: Path, tokens: Int[np.ndarray, "chunks context"], vocab_size: int):
        try:
            self.file = zipfile.ZipFile(path)
            with self.file.open("tokens.npy") as entry:
                stored = np.lib.format.read_array(entry, allow_pickle=False)
            self.entry = self.file.open("log_probs.npy")
            np.lib.format.read_magic(self.entry)
            shape, _, dtype = np.lib.format.read_array_header_1_0(self.entry)
        except (zipfile.BadZipFile, KeyError, ValueError) as error:
            raise ValueError(
                f"{path}: not a file of log-probabilities, as --kl-base writes it: {error}"
            ) from None
        if not np.array_equal(stored, tokens):
            raise ValueError(
                f"{path}: made from another text, tokenizer or chunk size ({stored.shape[0]} chunks of "
                f"{stored.shape[-1]} tokens; this text has {tokens.shape[0]} of {tokens.shape[1]})"
            )
        if shape != (len(tokens), scored(tokens.shape[1]), vocab_size) or dtype != np.float32:
            raise ValueError(
                f"{path}: log-probabilities {dtype} {shape} do not fit a vocabulary of {vocab_size}"
            )
        self.chunk_shape = shape[1:]

    def read(self) -> Float[np.ndarray, "T V"]:
        count = math.prod(self.chunk_shape)
        data = _read_fully(self.entry, 4 * count)
        return np.frombuffer(data, "<f4").reshape(self.chunk_shape)

    def __enter__(self) -> "BaseReader":
        return self

    def __exit__(self, *_) -> None:
        self.entry.close()
        self.file.close()


def _read_fully(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise ValueError("the file of log-probabilities ends early")
    return data


@dataclasses.dataclass
class Result:
    """Figures over the tokens scored so far: their negative log-likelihoods in nats, and the divergence from
    a base run, if there is one."""

    nll: Mean = dataclasses.field(default_factory=Mean)
    divergence: Divergence = dataclasses.field(default_factory=Divergence)


def evaluate(
    model: Model,
    cut: Int[np.ndarray, "chunks context"],
    *,
    write: BaseWriter | None = None,
    compare: BaseReader | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Result:
    """Score every chunk, and write the log-probabilities to a base file or compare them with one."""
    result = Result()
    for done, chunk in enumerate(cut, 1):
        log_probs, losses = score_chunk(model, chunk)
        result.nll.add(losses)
        if write is not None:
            write.write(log_probs)
        if compare is not None:
            result.divergence.add(compare.read(), log_probs)
        progress(done, len(cut))
    return result
