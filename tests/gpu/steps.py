"""Distributions behind tokens that decode steps read one by one: through the kernels of a step."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

import bonsai_jax as bj
from bonsai_jax.decoding import jitted
from bonsai_jax.network import cache as kv
from tests.agreement import divergence, log_softmax


def log_p_of_steps(model: bj.Model, ids, cache: kv.KVCache | None = None) -> np.ndarray:
    """[rows, tokens, V] behind each of `ids` [rows, tokens], which follow what the cache holds."""
    ids, out = jnp.asarray(ids, jnp.int32), []
    cache, lengths = cache or kv.empty(model.config, model.run, *ids.shape), jnp.ones(len(ids), jnp.int32)
    for i in range(ids.shape[1]):
        scores, cache = jitted.extend(model.params, cache, ids[:, i : i + 1], lengths, model.config)
        out.append(log_softmax(np.asarray(scores[:, 0])))
    return np.stack(out, axis=1)


def kl_of_schedules(
    load: Callable[..., bj.Model], schedule: str, ids, cache_dtype: str = "float32"
) -> np.ndarray:
    """[rows, tokens] KL(steps by launches || by a schedule), of the model that `load` gives with options of
    RunConfig. Activations are not rounded to 8 bits."""
    log_p = []
    for each in ("launches", schedule):
        model = load(cache_dtype=cache_dtype, activation_bits=16, schedule=each)
        assert model.params.step.schedule(len(ids)) == each
        log_p.append(log_p_of_steps(model, ids))
    return divergence(*log_p)
