"""Fresh adapters, and several added to one."""

import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bonsai_jax import arguments
from bonsai_jax.adapters.targets import Target, names, targets
from bonsai_jax.config import ModelConfig
from bonsai_jax.network.adapter import Adapter
from pallas_kernels import LowRank


def lora(
    config: ModelConfig,
    rank: int,
    *,
    key: jax.Array,
    alpha: float | None = None,
    where: Collection[str] | None = None,
    dtype: Any = jnp.float32,
) -> Adapter:
    """A fresh adapter for a model's matrices (Hu et al. 2021), which changes nothing yet.

    y = W x + alpha / rank B (A x),   A of N(0, 1 / in), B = 0

    rank   rows of A [rank, in] and columns of B [out, rank]
    key    a random key, for A
    alpha  None: the rank, so that the scale is 1
    where  which matrices: names of them ("q", "k", "v", "o", "gate", "up", "down") or of kinds ("attention",
           "mlp", "delta_net"); None: all that adapters may change, which are those of the layers, but for
           experts with their routers, and the K and V of latent attention
    dtype  of A and B: float32, bfloat16 or float16
    `params.replace(adapter=...)` and Model.with_adapter put it beside the weights. Gradients with respect to
    it are those of any pytree.
    Raises ValueError for a name that the model does not have, and for an alpha that is no positive number.
    """
    arguments.kind("config", config, ModelConfig, "model.config")
    rank = arguments.whole("rank", rank, 1)
    alpha = float(rank) if alpha is None else arguments.number("alpha", alpha)
    if alpha <= 0:
        raise ValueError(f"alpha is {alpha}; it must be a positive number")
    chosen = _chosen(targets(config), where)
    changes = {}
    for own, target in zip(jax.random.split(key, len(chosen)), chosen, strict=True):
        count, (n, k) = len(target.layers), target.shape
        a = jax.random.normal(own, (count, rank, k)) / math.sqrt(k)
        b = jnp.zeros((count, n, rank), dtype)
        changes[target] = LowRank(a.astype(dtype), b, alpha / rank, target.start)
    return assembled(changes, config)


def _chosen(every: list[Target], where: Collection[str] | None) -> list[Target]:
    if where is None:
        return every
    if isinstance(where, str):
        raise TypeError(f"where is the text {where!r}; give a list of names: [{where!r}]")
    if unknown := [name for name in where if name not in names(every)]:
        raise ValueError(f"where: {', '.join(unknown)}: this model has {', '.join(names(every))}")
    return [target for target in every if target.name in where or target.kind in where]


def assembled(changes: dict[Target, LowRank], config: ModelConfig) -> Adapter:
    """The adapter of these changes."""
    layers: dict[str, tuple[dict[str, LowRank], ...]] = {}
    for target, change in changes.items():
        groups = layers.setdefault(target.kind, tuple({} for _ in config.groups(target.kind)))
        groups[target.group][target.name] = change
    return Adapter(layers)


def added(adapters: Sequence[Adapter]) -> Adapter:
    """One adapter whose changes are the sums of those of several: their A and B side by side, with the scales
    in B. Of none one without changes."""
    if len(adapters) == 1:
        return adapters[0]
    layers: dict[str, tuple[dict[str, LowRank], ...]] = {}
    for kind in dict.fromkeys(kind for adapter in adapters for kind in adapter.layers):
        groups = zip(*(adapter.layers[kind] for adapter in adapters if kind in adapter.layers), strict=True)
        layers[kind] = tuple(_sums(group) for group in groups)
    return Adapter(layers)


def _sums(group: Sequence[dict[str, LowRank]]) -> dict[str, LowRank]:
    """The sums of changes of the same matrices."""
    sums = {}
    for name in dict.fromkeys(name for changes in group for name in changes):
        own = [changes[name] for changes in group if name in changes]
        a = jnp.concatenate([change.a for change in own], axis=-2)
        b = jnp.concatenate([change.scale * change.b for change in own], axis=-1)
        sums[name] = LowRank(a, b, 1.0, own[0].start) if len(own) > 1 else own[0]
    return sums


def stacked(adapters: Sequence[Adapter]) -> Adapter:
    """Several adapters in one, of which each sequence has one (Adapter.chosen): with a second axis for them,
    ranks filled up with zeros, and scales in B. What an adapter does not change is zeros."""
    layers: dict[str, tuple[dict[str, LowRank], ...]] = {}
    for kind in dict.fromkeys(kind for adapter in adapters for kind in adapter.layers):
        count = max(len(adapter.layers.get(kind, ())) for adapter in adapters)
        every = [adapter.layers.get(kind, ({},) * count) for adapter in adapters]
        layers[kind] = tuple(_stack(group) for group in zip(*every, strict=True))
    return Adapter(layers)


def _stack(group: Sequence[dict[str, LowRank]]) -> dict[str, LowRank]:
    """Each matrix's changes by several adapters as one."""
    stacks = {}
    for name in dict.fromkeys(name for changes in group for name in changes):
        known = [changes[name] for changes in group if name in changes]
        rank = max(change.rank for change in known)
        none = known[0].replace(a=jnp.zeros_like(known[0].a), b=jnp.zeros_like(known[0].b))
        each = [changes.get(name, none) for changes in group]
        a = [jnp.pad(change.a, ((0, 0), (0, rank - change.rank), (0, 0))) for change in each]
        b = [jnp.pad(change.scale * change.b, ((0, 0), (0, 0), (0, rank - change.rank))) for change in each]
        stacks[name] = LowRank(jnp.stack(a, axis=1), jnp.stack(b, axis=1), 1.0, known[0].start)
    return stacks
