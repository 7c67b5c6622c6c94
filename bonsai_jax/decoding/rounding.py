"""Few lengths are compiled: tokens are padded before a jitted function sees them."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def rounded(length: int) -> int:
    """The number of tokens to which this one is padded: 1 to 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, ..., four
    numbers for each power of two, so that at most a quarter is added."""
    step = 1 << max(0, (length - 1).bit_length() - 3)
    return -(-length // step) * step


class Rounded:
    """A jitted function of `tokens` [B, T, ...] and `lengths` that is compiled for `rounded(T)` tokens.

    jitted   the function; it does not depend on padding
    cut      (result, T) -> the result for T tokens; None where no shape of the result depends on T

    Within another program (jit, vmap, grad) tokens stay as they are, as they do in `lower`, `trace` and
    `eval_shape`.
    """

    def __init__(self, jitted: Any, cut: Callable[[Any, int], Any] | None = None):
        functools.update_wrapper(self, jitted)
        self._jitted, self._cut, self._signature = jitted, cut, inspect.signature(jitted)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(*args, **kwargs)
        tokens = bound.arguments["tokens"]
        if isinstance(tokens, jax.core.Tracer):
            return self._jitted(*args, **kwargs)
        tokens = tokens if isinstance(tokens, jax.Array) else np.asarray(tokens)
        width = tokens.shape[1] if tokens.ndim > 1 else 1
        if rounded(width) == width:
            return self._jitted(*args, **kwargs)
        pad = jnp.pad if isinstance(tokens, jax.Array) else np.pad
        added = ((0, 0), (0, rounded(width) - width), *[(0, 0)] * (tokens.ndim - 2))
        bound.arguments["tokens"] = pad(tokens, added)
        out = self._jitted(*bound.args, **bound.kwargs)
        return out if self._cut is None else self._cut(out, width)

    def lower(self, *args: Any, **kwargs: Any):
        return self._jitted.lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any):
        return self._jitted.trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any):
        return self._jitted.eval_shape(*args, **kwargs)

    def clear_cache(self):
        self._jitted.clear_cache()
