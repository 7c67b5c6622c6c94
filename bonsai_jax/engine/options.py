"""The settings of an engine, which stay as they are, and the memory that it takes."""

import dataclasses
import os
from typing import Any

from bonsai_jax.arguments import MOST, flag, kind, number, whole
from bonsai_jax.decoding import chain
from bonsai_jax.decoding.steps import LogitsProcessor
from bonsai_jax.engine.adapters import names as adapter_names
from bonsai_jax.engine.prompts import step_options
from bonsai_jax.model import Model, check_model
from bonsai_jax.network import cache as kv
from bonsai_jax.network.taps import Taps
from bonsai_jax.weights import memory

MOST_BIASES = 65536  # of one request; each row of the batch has room for them
LONGEST_WAIT_S = 1e9
# The system prompt, the question, the newest prompt and its answer: see checkpoints.py.
LEAST_CHECKPOINTS = 4
MOST_BYTES = 2**62


@dataclasses.dataclass(frozen=True)
class Options:
    """See Engine. biases: room for a request's logit biases; adapters: their names (adapters.py)."""

    max_batch_size: int
    pages: int
    context: int
    logprobs: int | None = None
    sampled_logprobs: bool = False
    speculate: str | None = None
    taps: Taps | None = None
    logits_processor: LogitsProcessor | None = None
    biases: int = 1
    max_wait_s: float | None = None
    prefill_tokens: int = 0
    reproducible: bool = False
    checkpoints: int = 0
    adapters: tuple[str, ...] = ()


def checked(
    model: Model, *, max_batch_size, pages, context, logprobs, sampled_logprobs, logit_biases, speculate,
    taps, logits_processor, checkpoints, max_wait_s, prefill_tokens, reproducible, prefix_cache,
    prefix_cache_bytes, adapters,
) -> Options:  # fmt: skip
    """The arguments of an Engine, checked, and with every default filled in."""
    check_model(model)

    def count(name: str, value: int | None, default: int, least: int = 1, most: int = MOST) -> int:
        return default if value is None else whole(f"Engine: {name}", value, least, most)

    max_batch_size = count("max_batch_size", max_batch_size, model.run.batch_size)
    context = count("context", context, model.run.context, most=model.run.context)
    enough = max_batch_size * kv.page_count(context, model.run.page_size)
    pages = count("pages", pages, enough)
    logit_biases = count("logit_biases", logit_biases, 16, most=MOST_BIASES)
    logit_biases = min(logit_biases, model.config.vocab_size)  # no request can name more
    sampled_logprobs = flag("Engine: sampled_logprobs", sampled_logprobs)
    if sampled_logprobs and logprobs is None:
        raise ValueError("Engine: sampled_logprobs needs logprobs; give logprobs=0 or more, too")
    states = count("checkpoints", checkpoints, max(max_batch_size, LEAST_CHECKPOINTS), 0)
    if not memory.bytes_per_row(model.config, model.run):  # neither recurrent states nor rings of windows
        states = 0
    if prefix_cache is not None:
        kind("Engine: prefix_cache", prefix_cache, (str, os.PathLike), "a folder's path")
        _check_prefix_cache(model, taps, reproducible)
    whole("Engine: prefix_cache_bytes", prefix_cache_bytes, 1, MOST_BYTES)
    asked = f"Engine: max_batch_size={max_batch_size} and pages={pages}"
    options = Options(
        max_batch_size,
        pages,
        context,
        sampled_logprobs=sampled_logprobs,
        biases=1 << (logit_biases - 1).bit_length(),
        max_wait_s=number("Engine: max_wait_s", max_wait_s, 0, LONGEST_WAIT_S),
        prefill_tokens=count("prefill_tokens", prefill_tokens, 0),
        reproducible=flag("Engine: reproducible", reproducible),
        checkpoints=states,
        adapters=adapter_names(model, adapters),
        **step_options(model, taps, logits_processor, logprobs, speculate),
    )
    if checkpoints is None:
        options = _with_room(model, options)
    memory.check_room(pool_bytes(model, options), asked)
    return options


def _with_room(model: Model, options: Options) -> Options:
    """These options with half of their checkpoints, or half of those, while they exceed the memory."""
    while pool_bytes(model, options) > memory.room() and options.checkpoints > LEAST_CHECKPOINTS:
        fewer = max(options.checkpoints // 2, LEAST_CHECKPOINTS)
        options = dataclasses.replace(options, checkpoints=fewer)
    return options


def _check_prefix_cache(model: Model, taps: Taps | None, reproducible: Any) -> None:
    """Raise for an engine whose cached prompts cannot be kept in files."""
    if model.mesh is not None:
        raise NotImplementedError("prefix_cache over a mesh; one device's engine can keep prompts in files")
    if taps is not None:
        raise ValueError("prefix_cache: taps change keys and values, which files of other engines have not")
    if reproducible is True:
        raise ValueError("prefix_cache: an engine with reproducible=True has no prefix cache; leave one out")


def pool_bytes(model: Model, o: Options) -> int:
    """Bytes of the pool on each device, also of the samplers that it has once a request uses one."""
    page, chained = model.run.page_size, 0
    if o.speculate is None:
        chained = chain.row_bytes(model.config.vocab_size, kv.page_count(o.context, page) * page)
    how = {"checkpoints": o.checkpoints, "beside": chained}
    return memory.pool_bytes(model.config, model.run, o.max_batch_size, o.pages * page, **how)
