"""The functions of steps.py, jitted, under their own names, on one device or a mesh. The state or cache that
they update is donated: go on with the one they return.

    state, tokens, _ = bj.jitted.prefill(model.params, state, tokens, lengths, model.config)
    state, tokens, _ = bj.jitted.step(model.params, state, model.config)

A program is compiled for each combination of array shapes and of the arguments that are not arrays: config,
size, taps, logits_processor and logprobs. taps and logits_processor are compared by identity, so define them
once. `prefill`, `generate_tokens` and `extend` pad tokens to one of a few lengths first (rounding.py).
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax

from bonsai_jax.decoding import steps
from bonsai_jax.decoding.checks import STATIC
from bonsai_jax.decoding.rounding import Rounded


def donating(function: Callable, donated: str | None = None, **options: Any) -> Any:
    """jax.jit of a function, with the arguments that are not arrays (checks.STATIC) static."""
    parameters = inspect.signature(function).parameters
    static = [name for name in STATIC if name in parameters]
    return jax.jit(function, static_argnames=static, donate_argnames=donated, **options)


def _first_tokens(logits_and_cache: tuple, count: int) -> tuple:
    logits, cache = logits_and_cache
    return logits[:, :count], cache


prefill = Rounded(donating(steps.prefill, "state"))
step = donating(steps.step, "state")
decode = donating(steps.decode, "state")
generate_tokens = Rounded(donating(steps.generate_tokens, "state"))
extend = Rounded(donating(steps.extend, "cache"), _first_tokens)
hidden_states = donating(steps.hidden_states, "cache")
forward = donating(steps.forward)
