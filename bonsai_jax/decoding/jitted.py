"""The functions of decoding.py, jitted, under their own names. What they update (the state, the cache) is
donated: the caller goes on with what is returned. On a mesh as on one device.

    state = bj.jitted.prefill(model.params, state, tokens, lengths, model.config)
    state = bj.jitted.step(model.params, state, model.config)

What is compiled depends on the shapes of arrays and on arguments that are no arrays: config, size, taps,
logits_processor (compared by identity: define them once, not anew for each call) and logprobs.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax

from bonsai_jax.decoding import steps as decoding
from bonsai_jax.decoding.checks import STATIC


def donating(function: Callable, donated: str | None = None, **options: Any) -> Any:
    """jax.jit of a function whose arguments that are no arrays (checks.STATIC) decide what is compiled."""
    parameters = inspect.signature(function).parameters
    static = [name for name in STATIC if name in parameters]
    return jax.jit(function, static_argnames=static, donate_argnames=donated, **options)


prefill = donating(decoding.prefill, "state")
step = donating(decoding.step, "state")
decode = donating(decoding.decode, "state")
generate_tokens = donating(decoding.generate_tokens, "state")
extend = donating(decoding.extend, "cache")
forward = donating(decoding.forward)
