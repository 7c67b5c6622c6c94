"""Other weights for a running engine: whether they fit its programs, and where they must lie."""

from typing import Any

import jax
import numpy as np

from bonsai_jax.arguments import kind, shown
from bonsai_jax.network.params import Params

NAME = "update_params"


def fitting(params: Any, own: Params) -> Params:
    """These weights where the engine's own lie, as its programs take them. Arrays that lie there already are
    not copied; those of numpy always are, as their owner may write to them.

    params   as Engine.update_params takes them
    own      the engine's weights now
    Raises TypeError for what is no Params, and ValueError for weights of another structure, which names the
    first array that differs.
    """
    kind(NAME, params, Params, "weights like engine.model.params, such as jax.tree.map makes of them")
    names, old = zip(*jax.tree_util.tree_leaves_with_path(own), strict=True)
    structure, given = jax.tree.structure(own), jax.tree.structure(params)
    if structure != given:
        raise ValueError(f"{NAME}: {_other_structure(own, params)}")
    new = jax.tree.leaves(params)
    for path, before, after in zip(names, old, new, strict=True):
        if (why := _refused(before, after)) is not None:
            raise ValueError(f"{NAME}: params{jax.tree_util.keystr(path)} {why}")
    placed = [_placed(after, before.sharding) for before, after in zip(old, new, strict=True)]
    # Addresses at which devices exchange sums are the engine's, whatever was computed of them.
    return jax.tree.unflatten(structure, placed).replace(peers=own.peers)


def _refused(before: jax.Array, after: Any) -> str | None:
    """Why an array cannot take the place of the engine's; None: it can."""
    if isinstance(after, jax.core.Tracer):
        return "is being traced; call update_params outside of jit, with arrays"
    if not isinstance(after, jax.Array | np.ndarray):
        return f"is {shown(after)}; give an array"
    if isinstance(after, jax.Array) and after.is_deleted():
        return "was donated or deleted; give an array that no other function takes over"
    if (after.shape, after.dtype) != (before.shape, before.dtype):
        return f"is {after.dtype}{list(after.shape)}; the engine has {before.dtype}{list(before.shape)}"
    return None


def _placed(array: jax.Array | np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    if isinstance(array, np.ndarray):
        return jax.device_put(array, sharding, may_alias=False)
    return array if array.sharding == sharding else jax.device_put(array, sharding)


def _other_structure(own: Params, given: Params) -> str:
    """Where two Params differ, other than by the values, shapes and types of arrays."""
    names, theirs = (
        [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        for tree in (own, given)
    )
    for name in names:
        if name not in theirs:
            return f"params{name} is missing; give every array of engine.model.params"
    for name in theirs:
        if name not in names:
            return f"params{name} is no array of the engine's; give those of engine.model.params alone"
    at = _first_leaf(jax.tree.structure(own), jax.tree.structure(given))
    return (
        f"params{names[at]} belongs to a part whose format, shape, kernels or mesh are not the engine's; "
        "make weights from engine.model.params, as jax.tree.map and replace do, or load them with the same "
        "RunConfig"
    )


def _first_leaf(one: jax.tree_util.PyTreeDef, other: jax.tree_util.PyTreeDef) -> int:
    """The number of the first leaf below the innermost node at which two structures differ, which have the
    same leaves."""
    before = 0
    for child, its in zip(one.children(), other.children(), strict=False):
        if child != its:
            return before + _first_leaf(child, its)
        before += child.num_leaves
    return 0
