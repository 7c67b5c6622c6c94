"""Functions of arrays over many devices: each device runs them on its share (placement.py), inside
`jax.shard_map`."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import DictKey, GetAttrKey

from bonsai_jax import forks
from bonsai_jax.config import ModelConfig, RunConfig
from bonsai_jax.network import cache as kv
from bonsai_jax.network import kinds
from bonsai_jax.network.cache import KVCache
from bonsai_jax.network.kinds.state import map_states
from bonsai_jax.network.params import AXES, Params
from bonsai_jax.weights.placement import DATA, MODEL, mapped, mesh_axis, present, size, spread

F = TypeVar("F", bound=Callable)


SPLITS = ("rows", "layers", "whole")


def over_mesh(returns: Any, *, arrays: str = "rows") -> Callable[[F], F]:
    """Decorates function(params, ...), so that params may lie over a mesh. Every device then runs it on its
    share, inside shard_map; where params have no mesh nothing changes.

        @over_mesh(("rows", "cache"))
        def last_logits(params, cache, tokens, config) -> tuple[logits, cache]: ...

    Arguments that hold a KVCache are split by `placement.AXES`. Of other arrays each device has its rows, the
    first axis; scalars are on every device, and arguments that are not arrays are static.

    returns   the result with a word in place of each array, or of each part whose arrays are split alike:
              "rows": arrays with rows first; "layers": arrays with layers first, then rows; "whole": the same
              on every device; an argument's name: a part that has the fields of that argument and is split
              like it. A part that may be None is named too. On every call, also without a mesh, a result of
              another structure raises ValueError
    arrays    "whole" where arrays among the arguments have no rows

    Each row's tokens depend on that row only, so devices along "data" run loops of different lengths; those
    along "model" draw the same tokens and stay in step.
    """
    words = jax.tree.structure(returns)

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        for name in jax.tree.leaves(returns):
            if name not in SPLITS and name not in signature.parameters:
                raise ValueError(
                    f"over_mesh: returns has {name!r}; give one of {', '.join(SPLITS)} or an argument's name"
                )

        @functools.wraps(function)
        def anywhere(params: Params, *args: Any, **kwargs: Any):
            if not isinstance(params, Params):
                raise TypeError(f"params is a {type(params).__name__}; give model.params")
            forks.check()
            if params.mesh is None:
                out = function(params, *args, **kwargs)
                words.flatten_up_to(out)
                return out
            mesh, bound = params.mesh, signature.bind(params, *args, **kwargs).arguments
            bound = {name: jnp.asarray(v) if isinstance(v, list) else v for name, v in bound.items()}
            traced = {name: value for name, value in bound.items() if _arrays(value)}
            static = {name: value for name, value in bound.items() if name not in traced}
            splits = {"rows": present((DATA,), mesh), "layers": present((None, DATA), mesh), "whole": P()}

            def spec(value):
                if isinstance(value, Params) or _has_cache(value):
                    return specs(value, mesh)
                return jax.tree.map(lambda x: splits[arrays] if np.ndim(x) else P(), value)

            def on_device(traced):
                traced = {name: _own_pages(value, mesh) for name, value in traced.items()}
                traced["params"] = traced["params"].replace(mesh=None)
                return _own_pages(function(**traced, **static), mesh, back=True)

            in_specs = {name: spec(value) for name, value in traced.items()}
            out_specs = jax.tree.map((in_specs | splits).__getitem__, returns)
            # check_vma is off because gathered logits are the same on every device, but JAX's types do not
            # know it.
            return mapped(on_device, mesh, (in_specs,), out_specs)(traced)

        return cast(F, anywhere)

    return decorate


def _arrays(value) -> bool:
    """Whether it is arrays, and nothing else."""
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(isinstance(leaf, jax.Array | np.ndarray | np.generic) for leaf in leaves)


def _is_cache(value) -> bool:
    return isinstance(value, KVCache)


def _has_cache(value) -> bool:
    """Whether it is a KVCache or contains one."""
    return any(map(_is_cache, jax.tree.leaves(value, is_leaf=_is_cache)))


def _own_pages(tree, mesh: Mesh, back: bool = False):
    """Whatever holds a KVCache, inside shard_map: its block table in terms of the pages that this device has,
    or `back` in terms of all pages."""
    if size(mesh, DATA) == 1:
        return tree

    def own(value):
        if not _is_cache(value):
            return value
        device = jax.lax.axis_index(DATA) * (1 if back else -1)

        return value.replace(
            block_table=value.block_table + device * value.num_pages,
            states=map_states(lambda state: state.with_page_offset(device), value.states),
        )

    return jax.tree.map(own, tree, is_leaf=_is_cache)


def empty_cache(
    config: ModelConfig,
    run: RunConfig,
    rows: int,
    context: int,
    mesh: Mesh | None,
    pages: int | None = None,
    *,
    rewinds: bool = False,
    checkpoints: int = 0,
) -> KVCache:
    """cache.empty over a mesh: each device has the pages of its rows and of its KV heads.

    Raises ValueError for a number of rows that does not split.
    """
    options = {"rewinds": rewinds, "checkpoints": checkpoints}
    if mesh is None:
        return kv.empty(config, run, rows, context, pages, **options)
    if rows % size(mesh, DATA):
        near = rows // size(mesh, DATA) * size(mesh, DATA)
        able = " or ".join(str(n) for n in (near, near + size(mesh, DATA)) if n)
        raise ValueError(f"{rows} rows do not split over {size(mesh, DATA)} devices; {able} would")
    whole = with_copied_heads(config, size(mesh, MODEL))
    make = functools.partial(kv.empty, whole, run, rows, context, pages, **options)
    # Compiled, so that its zeros are never whole on one device.
    return jax.jit(make, out_shardings=shardings(jax.eval_shape(make), mesh))()


def with_copied_heads(config: ModelConfig, parts: int) -> ModelConfig:
    """With as many KV heads as devices have together: more than the model's where several have the same."""

    def copied(half):
        if half.kind != "attention":
            return half
        return dataclasses.replace(half, num_kv_heads=parts * max(1, half.num_kv_heads // parts))

    layers = tuple(layer.changed(copied) for layer in config.layers)
    return dataclasses.replace(config, layers=layers)


def specs(tree, mesh: Mesh):
    """PartitionSpec of each array of Params, KVCache or State, by the axes that kinds of layers and `AXES`
    give it. Other arrays are whole on every device in Params, and have rows first elsewhere."""
    default = () if isinstance(tree, Params) else ("rows",)

    def spec(path, _):
        names = [
            key.name if isinstance(key, GetAttrKey) else key.key
            for key in path
            if isinstance(key, GetAttrKey | DictKey)
        ]
        return present(tuple(mesh_axis(axis) for axis in _axes(names, default)), mesh)

    return jax.tree_util.tree_map_with_path(spec, tree)


def _axes(names: list[str], default: tuple) -> tuple[str | None, ...]:
    """The logical axes of an array with these names on the way to it."""
    if "adapter" in names[:-1]:  # Params', small and whole on every device; State's own has rows
        return ("rows",) if names[-1] == "chosen" else ()
    if "rotation" in names:
        return ()  # the signs of folded weights: a device that has a part of the inputs cuts out its own
    kind = next((name for name in names if name in kinds.NAMES), None)
    if kind is None:
        return next((AXES[name] for name in names if name in AXES), default)
    module = kinds.get(kind)
    arrays = {spec.array: ("layers", *spec.axes) for spec in module.TENSORS.values()}
    arrays |= getattr(module, "AXES", {})
    return next((arrays[name] for name in names if name in arrays), default)


def shardings(tree, mesh: Mesh):
    """NamedSharding of each array: `specs` on the mesh."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs(tree, mesh), is_leaf=lambda x: isinstance(x, P)
    )


def place_state[T](state: T, mesh: Mesh | None) -> T:
    """A state whose cache is `empty_cache`'s, with everything else beside its rows."""
    return state if mesh is None else jax.tree.map(spread, state, shardings(state, mesh))


def copied[T](tree: T, mesh: Mesh | None) -> T:
    """Arrays that every process has whole, whole on every device."""
    return tree if mesh is None else jax.tree.map(lambda x: spread(x, NamedSharding(mesh, P())), tree)


def place_rows(array: np.ndarray | jax.Array, mesh: Mesh | None) -> jax.Array:
    """An array with rows first that every process has whole, over the mesh."""
    return jnp.asarray(array) if mesh is None else spread(array, NamedSharding(mesh, present((DATA,), mesh)))


def fetch(array: jax.Array) -> np.ndarray:
    """An array on the host: all of it, whichever processes' devices hold it. Every process must ask."""
    jax.block_until_ready(array)  # Ctrl-C ends this wait, but not that of a copy to the host
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
