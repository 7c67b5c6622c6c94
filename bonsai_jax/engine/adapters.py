"""An engine's adapters, of which each request has one: params.adapter has them all, number 0 being that of
requests that name none."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bonsai_jax.adapters import making, targets
from bonsai_jax.arguments import kind, shown
from bonsai_jax.model import Model
from bonsai_jax.network import parallel
from bonsai_jax.network.adapter import Adapter, refuse_split


def names(model: Model, adapters: Any) -> tuple[str, ...]:
    """Those that requests may name. Raises TypeError for what is no dict of adapters, and ValueError for an
    adapter of another model."""
    if adapters is None:
        return ()
    kind("Engine: adapters", adapters, Mapping, "a dict of adapters by name")
    for name, adapter in adapters.items():
        kind("Engine: the name of an adapter", name, str, "a text")
        kind(f"Engine: adapter {name}", adapter, Adapter, "what bj.lora or bj.load_adapter returns")
        targets.check(adapter, model.config)
    return tuple(adapters)


def number(name: Any, known: tuple[str, ...]) -> int:
    """The number of one of these names. Raises ValueError for another."""
    if name not in known:
        have = f"the engine has {', '.join(known)}" if known else "give Engine(adapters={name: adapter})"
        raise ValueError(f"adapter: no adapter is called {shown(name)}; {have}")
    return 1 + known.index(name)


def with_all(model: Model, adapters: Mapping[str, Adapter] | None) -> Model:
    """The model with all adapters in one. An adapter that it has already is number 0, and added to each."""
    if not adapters:
        return model
    refuse_split(model.params.axis)
    own = [] if model.params.adapter is None else [model.params.adapter]
    each = [making.added([*own, *some]) for some in ([], *([adapter] for adapter in adapters.values()))]
    stacked = parallel.copied(making.stacked(each), model.mesh)
    return dataclasses.replace(model, params=model.params.replace(adapter=stacked))
