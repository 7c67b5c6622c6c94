"""Prompts as token ids or vectors, and checks of everything else in a request."""

import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from bonsai_jax.config import SamplingParams
from bonsai_jax.decoding import steps as decoding
from bonsai_jax.model import Model
from bonsai_jax.network import parallel
from bonsai_jax.network.taps import Taps

Prompt = str | Sequence[int] | Float[Array, "T H"]
Ids = list[int] | Float[np.ndarray, "T H"]


def step_options(model: Model, taps: Taps | None, logits_processor, logprobs: int | None) -> dict[str, Any]:
    """Options of steps.step. Raises ValueError or TypeError for those that a generation does not support."""
    if taps is not None and not isinstance(taps, Taps):
        raise TypeError(f"taps is a {type(taps).__name__}; give bj.Taps(edit=...)")
    if taps is not None and taps.read:
        raise ValueError(
            f"taps: read names {', '.join(sorted(taps.read))}, but these taps only edit; to read, call "
            "bj.forward, or bj.generate with read="
        )
    most = model.config.vocab_size
    if logprobs is not None and not (isinstance(logprobs, int | np.integer) and 0 <= logprobs <= most):
        raise ValueError(
            f"logprobs is {logprobs!r}; give the number of alternatives, 0 to the vocabulary's {most}"
        )
    return {"taps": taps, "logits_processor": logits_processor, "logprobs": logprobs}


def checked_sampling(params: Any) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise TypeError(
            f"sampling is a {type(params).__name__}; give bj.SamplingParams, such as "
            "bj.SamplingParams(temperature=0.5)"
        )
    return params


def each_sampling(params: SamplingParams | Sequence[SamplingParams], rows: int) -> list[SamplingParams]:
    """One SamplingParams for each prompt; the seeds of a shared one count up from prompt to prompt."""
    if isinstance(params, list | tuple):
        if len(params) != rows:
            raise ValueError(
                f"{len(params)} SamplingParams for {rows} prompts: give one for all, or one for each"
            )
        return [checked_sampling(p) for p in params]
    shared = checked_sampling(params)
    if shared.seed is None:
        return [shared] * rows
    return [dataclasses.replace(shared, seed=shared.seed + row) for row in range(rows)]


def is_vectors(prompt: Any) -> bool:
    """Whether a prompt is an array of vectors in place of tokens."""
    return hasattr(prompt, "dtype") and jnp.issubdtype(prompt.dtype, jnp.floating)


def each_prompt(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """The prompts of one call. A text, or an array of vectors, is one prompt."""
    if isinstance(prompts, str) or is_vectors(prompts):
        return [cast(Prompt, prompts)]
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts are a {type(prompts).__name__}; give a text, or a list of prompts")
    return cast(Sequence[Prompt], prompts)


def encode(model: Model, prompt: Prompt) -> Ids:
    """A prompt's token ids, or its vectors."""
    if not isinstance(model, Model):
        raise TypeError(f"model is a {type(model).__name__}; give what bj.load returns")
    if isinstance(prompt, str):
        ids = model.tokenizer.encode(prompt)
    elif is_vectors(prompt):
        vectors = np.asarray(prompt, np.float32)
        if vectors.ndim != 2 or vectors.shape[1] != model.config.hidden or not len(vectors):
            raise ValueError(
                f"a prompt of vectors has shape {vectors.shape}; expected [tokens, {model.config.hidden}] "
                "(token ids are whole numbers)"
            )
        return vectors
    else:
        try:
            if isinstance(prompt, bytes | Mapping):  # whose bytes and keys would pass for ids
                raise TypeError
            ids = [operator.index(token) for token in prompt]
        except TypeError:
            raise TypeError(
                f"a prompt is {str(prompt)[:60]!r}; give a text, a list of token ids (whole numbers), or "
                "vectors as bj.embed makes them; many prompts, to bj.generate, are a list of these"
            ) from None
    if not ids:
        raise ValueError("the prompt is empty; give at least one token")
    for token in ids:
        if not 0 <= token < model.config.vocab_size:
            raise ValueError(f"token {token} is beyond the vocabulary of {model.config.vocab_size}")
    return ids


def check_new(max_new_tokens: int) -> None:
    if not isinstance(max_new_tokens, int | np.integer) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens!r}; it must be a whole number, 1 or more")


def check_room(model: Model, prompt_tokens: int, max_new_tokens: int) -> None:
    context, most = model.run.context, model.config.context_length
    if prompt_tokens + max_new_tokens > context:
        larger = f", or load with a larger context (this model's own is {most})" if context < most else ""
        raise ValueError(
            f"{prompt_tokens} tokens of prompt and {max_new_tokens} new ones exceed the context of "
            f"{context}; shorten them{larger}"
        )


def pad(ids: Sequence[Ids], mesh: jax.sharding.Mesh | None = None) -> tuple[jax.Array, jax.Array]:
    """Prompts as int32 [rows, bucket], or vectors as float32 [rows, bucket, hidden], padded at the end with
    zeros, and their lengths, int32 [rows]."""
    first = np.asarray(ids[0])
    dtype = np.float32 if first.ndim > 1 else np.int32
    tokens = np.zeros((len(ids), decoding.bucket(max(map(len, ids))), *first.shape[1:]), dtype)
    for row, prompt in zip(tokens, ids, strict=True):
        row[: len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in ids], np.int32)
    return parallel.place_rows(tokens, mesh), parallel.place_rows(lengths, mesh)
