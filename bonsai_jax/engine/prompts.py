"""Prompts as token ids or vectors, and checks of everything else in a request."""

import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from bonsai_jax import arguments, constraints
from bonsai_jax.constraints import Constraint
from bonsai_jax.decoding import steps as decoding
from bonsai_jax.decoding.sampling import checked_list
from bonsai_jax.model import Model, check_chained, check_model, chosen_proposer
from bonsai_jax.network import parallel
from bonsai_jax.network.layer_vectors import refuse_vectors
from bonsai_jax.network.taps import Taps
from bonsai_jax.sampling_params import SamplingParams, seeded
from bonsai_jax.tokens.thoughts import first_thought

Prompt = str | Sequence[int] | Float[Array, "T H"]
Ids = list[int] | Float[np.ndarray, "T H"]


def step_options(
    model: Model,
    taps: Taps | None,
    logits_processor: Any,
    logprobs: int | None,
    speculate: str | None,
    sampling: Sequence[SamplingParams] = (),
) -> dict[str, Any]:
    """Options of a loop's steps. Raises ValueError or TypeError for those that a generation does not support,
    and NotImplementedError for an unknown `speculate`, or one with this sampling. A model's draft model is in
    `speculate` of the result, though nobody asked for it."""
    if taps is not None:
        arguments.kind("taps", taps, Taps, "bj.Taps(edit=...)")
    if logits_processor is not None:
        arguments.function("logits_processor", logits_processor)
    if taps is not None and taps.read:
        raise ValueError(
            f"taps: read names {', '.join(sorted(taps.read))}, but these taps only edit; to read, call "
            "bj.forward, or bj.generate with read="
        )
    if logprobs is not None:
        logprobs = arguments.whole("logprobs", logprobs, 0, model.config.vocab_size)
    speculate = chosen_proposer(model, speculate)
    if any(params.chained for params in sampling):
        check_chained(speculate)
    options = {"taps": taps, "logits_processor": logits_processor, "logprobs": logprobs}
    return options | {"speculate": speculate}


def answer_options(max_new_tokens: int, stop: str | Sequence[str], ignore_eos: bool) -> dict[str, Any]:
    """Options of Loop.ask. Raises ValueError or TypeError for others."""
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, Sequence) or not all(isinstance(text, str) for text in stop):
        raise TypeError(f"stop is {arguments.shown(stop)}; give a text, or a list of texts")
    if not all(stop):
        raise ValueError("stop: an empty text would end every answer before it begins")
    return {
        "stop": tuple(stop),
        "max_new_tokens": arguments.whole("max_new_tokens", max_new_tokens, 1),
        "ignore_eos": arguments.flag("ignore_eos", ignore_eos),
    }


def each_constraint(
    model: Model,
    constraint: Constraint | Sequence[Constraint | None] | None,
    ids: Sequence[Ids],
) -> list[Constraint | None]:
    """One constraint, or None, for each prompt. Errors as for `compiled_constraint`."""
    each = constraint if isinstance(constraint, list | tuple) else [constraint] * len(ids)
    if len(each) != len(ids):
        raise ValueError(
            f"constraint: {len(each)} constraints for {len(ids)} prompts; give one for all, or one each"
        )
    return [compiled_constraint(model, one, own) for one, own in zip(each, ids, strict=True)]


def compiled_constraint(model: Model, constraint: Any, ids: Ids) -> Constraint | None:
    """The constraint of an answer to this prompt, with what comes before (thoughts.py), compiled. Raises
    TypeError for what is neither one nor None, ValueError for one that cannot be compiled, and
    NotImplementedError where draws have no masks."""
    if constraint is None:
        return None
    remedy = 'a constraint, such as bj.regex("[0-9]+") or bj.json_schema({...})'
    arguments.kind("constraint", constraint, Constraint, remedy)
    if jax.process_count() > 1:
        raise NotImplementedError("constraint over several processes; one process can use many devices")
    if constraint.thought is None:
        thought = "none" if isinstance(ids, np.ndarray) else first_thought(model.tokenizer, ids)
        constraint = dataclasses.replace(constraint, thought=thought)
    constraints.compile(constraint, model.tokenizer, model.config.vocab_size)
    return constraint


def each_sampling(params: SamplingParams | Sequence[SamplingParams], rows: int) -> list[SamplingParams]:
    """One SamplingParams for each prompt; the seeds of a shared one count up from prompt to prompt."""
    if isinstance(params, list | tuple):
        if len(params) != rows:
            raise ValueError(
                f"sampling: {len(params)} SamplingParams for {rows} prompts; give one for all, or one each"
            )
        return checked_list(params, "sampling")
    shared = checked_sampling(params)
    if shared.seed is None:
        return [shared] * rows
    return [seeded(shared, shared.seed + row) for row in range(rows)]


def checked_sampling(params: Any) -> SamplingParams:
    remedy = "bj.SamplingParams, such as bj.SamplingParams(temperature=0.5)"
    arguments.kind("sampling", params, SamplingParams, remedy)
    return params


def is_vectors(prompt: Any) -> bool:
    """Whether a prompt is an array of vectors in place of tokens."""
    return isinstance(prompt, np.ndarray | jax.Array) and jnp.issubdtype(prompt.dtype, jnp.floating)


def _is_ids(prompt: Any) -> bool:
    """Whether a prompt is an array of token ids."""
    array = isinstance(prompt, np.ndarray | jax.Array) and prompt.ndim == 1
    return array and jnp.issubdtype(prompt.dtype, jnp.integer)


def each_prompt(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """The prompts of one call. A text, a list or array of token ids, or an array of vectors is one prompt."""
    if isinstance(prompts, str) or is_vectors(prompts) or _is_ids(prompts):
        return [cast(Prompt, prompts)]
    scalar = getattr(prompts, "ndim", None) == 0
    if scalar or isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts are a {type(prompts).__name__}; give a text, or a list of prompts")
    listed = list(np.asarray(prompts) if isinstance(prompts, jax.Array) else prompts)
    if listed and not isinstance(listed[0], str):
        first = listed[0]  # a number, or an array without axes, is a token
        if isinstance(first, int | float) or getattr(first, "ndim", None) == 0:
            return [cast(Prompt, listed)]
    return cast(Sequence[Prompt], listed)


def encode(model: Model, prompt: Prompt, name: str = "a prompt") -> Ids:
    """A prompt's token ids, or its vectors. name: of the prompt in errors."""
    check_model(model)
    if isinstance(prompt, str):
        ids = model.tokenizer.encode(prompt)
    elif is_vectors(prompt):
        refuse_vectors(model.config)
        vectors = np.asarray(prompt, np.float32)
        if vectors.ndim != 2 or vectors.shape[1] != model.config.hidden or not len(vectors):
            raise ValueError(
                f"{name} of vectors has shape {vectors.shape}; expected [tokens, {model.config.hidden}] "
                "(token ids are whole numbers)"
            )
        return vectors
    else:
        try:
            if isinstance(prompt, bytes | Mapping):  # whose bytes and keys would pass for ids
                raise TypeError
            tokens = np.asarray(prompt).tolist() if isinstance(prompt, jax.Array) else list(prompt)
            ids = tokens if set(map(type, tokens)) == {int} else [_token_id(token) for token in tokens]
        except (TypeError, ValueError):
            raise TypeError(
                f"{name} is {arguments.shown(prompt)}; give a text, a list of token ids (whole numbers), "
                "or vectors as bj.embed makes them; many prompts, to bj.generate, are a list of these"
            ) from None
    if not ids:
        raise ValueError(f"{name} is empty; give at least one token")
    size = model.config.vocab_size
    if min(ids) < 0 or max(ids) >= size:
        token = next(id for id in ids if not 0 <= id < size)
        raise ValueError(f"{name}: token {arguments.shown(token)} is beyond the vocabulary of {size}")
    return ids


def _token_id(token: Any) -> int:
    """A number of numpy or jax as an int. Raises TypeError for what is no whole number."""
    if isinstance(token, bool):
        raise TypeError
    return operator.index(token)


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
