"""Checks of the arguments of functions of arrays: shapes and types always, values inside `checked`."""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from bonsai_jax import arguments
from bonsai_jax.config import ModelConfig
from bonsai_jax.decoding.state import State
from bonsai_jax.network.cache import KVCache
from bonsai_jax.network.taps import Taps

# Arguments that are not arrays.
STATIC = (
    "config",
    "size",
    "taps",
    "logits_processor",
    "logprobs",
    "stop_at_layer",
    "logits",
    "remat",
    "pooling",
)

_checking = contextvars.ContextVar("checking", default=False)


def check(holds: jax.Array, message: str, **values: jax.Array) -> None:
    """While `checked` traces, raise ValueError(message.format(**values)) if `holds` turns out False.
    Otherwise do nothing, because jax dispatches programs with checks more slowly."""
    if _checking.get():
        checkify.check(holds, message, **values)  # pyrefly: ignore[bad-argument-type]


def checked(function: Callable) -> Callable:
    """`function` (bj.prefill, bj.step, bj.decode, bj.extend, bj.forward, bj.generate_tokens), jitted, with
    the values of its arguments checked too: lengths, token ids, room in the cache. For debugging: it waits
    for the device at each call, and donates nothing.

    Raises ValueError where the function itself would return meaningless numbers.
    """
    if isinstance(function, jax.stages.Wrapped):  # one of bj.jitted, which is traced without checks
        function = inspect.unwrap(function, stop=lambda f: not isinstance(f, jax.stages.Wrapped))
    signature = inspect.signature(function)

    def traced(*args, **kwargs):
        with _on():
            return checkify.checkify(lambda: function(*args, **kwargs))()

    traced.__signature__ = signature  # pyrefly: ignore[missing-attribute]
    static = [name for name in STATIC if name in signature.parameters]
    run = jax.jit(traced, static_argnames=static)

    @functools.wraps(function)
    def with_values_checked(*args, **kwargs):
        error, out = run(*args, **kwargs)
        if message := error.get():
            raise ValueError(message.replace(" (`check` failed)", ""))
        return out

    return with_values_checked


@contextlib.contextmanager
def _on() -> Iterator[None]:
    before = _checking.set(True)
    try:
        yield
    finally:
        _checking.reset(before)


def check_options(
    state: Any, config: Any, taps: Any, logits_processor: Any = None, logprobs: Any = None
) -> None:
    """Raise TypeError or ValueError, with the argument's name, for arguments of a function that draws."""
    arguments.kind("state", state, State, "what bj.new_state returns")
    arguments.kind("config", config, ModelConfig, "model.config")
    check_taps(taps)
    if logits_processor is not None:
        arguments.function("logits_processor", logits_processor)
    if logprobs is not None:
        arguments.whole("logprobs", logprobs, 0, config.vocab_size)


def check_taps(taps: Any) -> None:
    if taps is not None:
        arguments.kind("taps", taps, Taps, "bj.Taps(edit=...)")


def check_remat(remat: Any, config: ModelConfig) -> None:
    """Raise ValueError unless it is True, False or "offload", and NotImplementedError for models whose layers
    cannot be computed again."""
    if not (isinstance(remat, bool) or (isinstance(remat, str) and remat == "offload")):
        raise ValueError(f'remat is {arguments.shown(remat)}; it must be True, False or "offload"')
    if remat and any(group.settings.reads is not None for group in config.groups("attention")):
        raise NotImplementedError(
            f"remat: layers of {config.architecture} read another layer's keys, which are not stored then; "
            "leave remat out"
        )


def check_limit(limit: Any) -> None:
    """Raise ValueError unless it is a whole number, 0 or more, or a traced one."""
    if not isinstance(limit, jax.core.Tracer):
        arguments.whole("limit", limit)


def checked_tokens(
    tokens, lengths, cache: KVCache | None, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """Tokens [B, T] or vectors [B, T, H], and their lengths [B], as arrays.

    Raises ValueError for other shapes, TypeError for other types.
    """
    arguments.kind("config", config, ModelConfig, "model.config")
    if cache is not None:
        arguments.kind("cache", cache, KVCache, "what bj.new_cache returns")
    tokens, lengths = arguments.array("tokens", tokens), arguments.array("lengths", lengths)
    vectors = jnp.issubdtype(tokens.dtype, jnp.floating)
    if not vectors and not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"tokens are {tokens.dtype}; expected int32 ids, or float32 vectors")
    if tokens.ndim != 2 + vectors or (vectors and tokens.shape[2] != config.hidden):
        expected = f"vectors [rows, tokens, {config.hidden}]" if vectors else "ids [rows, tokens]"
        raise ValueError(f"tokens have shape {tokens.shape}; expected {expected}, one row a sequence")
    rows = tokens.shape[0]
    if lengths.shape != (rows,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"lengths are {lengths.dtype} {lengths.shape}; expected int32 ({rows},), the number of tokens in "
            f"each of the {rows} rows"
        )
    if cache is not None and cache.lengths.shape != (rows,):
        raise ValueError(f"tokens have {rows} rows, but the cache has {cache.lengths.shape[0]}")
    width = tokens.shape[1]
    check(
        jnp.all((lengths >= 0) & (lengths <= width)),
        "lengths: {least} to {most} are not within 0 to {width}, the width of tokens",
        most=lengths.max(), least=lengths.min(), width=jnp.int32(width),
    )  # fmt: skip
    if not vectors:
        inside = (tokens >= 0) & (tokens < config.vocab_size)
        real = jnp.arange(width) < lengths[:, None]
        check(
            jnp.all(inside | ~real),
            "tokens: ids from {least} to {most}, but the vocabulary has {size}",
            least=tokens.min(), most=tokens.max(), size=jnp.int32(config.vocab_size),
        )  # fmt: skip
    if cache is not None:
        check(
            jnp.all(cache.lengths + lengths <= cache.capacity),
            "a row would have {most} tokens, but the cache has room for {capacity}: give it a larger context",
            most=(cache.lengths + lengths).max(), capacity=jnp.int32(cache.capacity),
        )  # fmt: skip
    return tokens, lengths
