"""What the file of an adapter holds, and the adapter that a model makes of it: names, fused tensors, ranks
and scales that differ, the order of rows."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from bonsai_jax.adapters.making import assembled
from bonsai_jax.adapters.targets import Target, order, refuses, targets
from bonsai_jax.config import ModelConfig
from bonsai_jax.network.adapter import Adapter
from bonsai_jax.weights.specs import Rows
from checkpoints import CheckpointError
from pallas_kernels import LowRank


@dataclasses.dataclass(frozen=True)
class Pair:
    """The change of one matrix in a file: scale B A, with A [rank, K] and B [N, rank]."""

    a: np.ndarray
    b: np.ndarray
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclasses.dataclass(frozen=True)
class Contents:
    """A file's pairs, by the name of the matrix that they change, as in a model's file: "blk.0.attn_q.weight"
    or "model.layers.0.self_attn.q_proj.weight".

    source  for errors
    naming  "gguf" or "huggingface"
    """

    source: str
    naming: str
    pairs: Mapping[str, Pair]


def placed(contents: Contents, config: ModelConfig) -> Adapter:
    """The adapter of a model. Ranks that differ within a stack are filled up with zeros, and so are layers
    that have no change.

    Raises NotImplementedError for a matrix that adapters cannot change here, and CheckpointError for shapes
    that are not the model's.
    """
    used: set[str] = set()
    changes = {}
    for target in targets(config):
        layers = {}
        for index, layer in enumerate(target.layers):
            for name, rows in _names(target, contents.naming, layer):
                if name in contents.pairs:
                    layers[index] = _pair(contents, name, rows, target, config)
                    used.add(name)
                    break
        if layers:
            if reason := refuses(target, contents.naming, config):
                raise NotImplementedError(f"{contents.source}: {reason}")
            changes[target] = _stacked(layers, target)
    if unused := [name for name in contents.pairs if name not in used]:
        able = ", ".join(dict.fromkeys(f"{t.kind}.{t.name}" for t in targets(config)))
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        raise NotImplementedError(
            f"{contents.source}: it changes {', '.join(unused[:3])}{more}, which this {config.architecture} "
            f"model does not have, or of which adapters are not supported; they are of: {able}"
        )
    return assembled(changes, config)


def _names(target: Target, naming: str, layer: int) -> list[tuple[str, Rows | None]]:
    """Names that a file may have for a matrix, and for one in which its rows lie, with these."""
    own, fused = target.spec.name(naming), target.spec.fused
    names: list[tuple[str, Rows | None]] = [] if own is None else [(own.format(layer), None)]
    if fused is not None and (whole := fused.name(naming)) is not None:
        rows = None if fused.rows is None else fused.rows(target.settings)
        names.insert(0, (whole.format(layer), rows))  # the last of several may have the same name
    return names


def _pair(contents: Contents, name: str, rows: Rows | None, target: Target, config: ModelConfig) -> Pair:
    pair, (n, k) = contents.pairs[name], target.shape
    outputs = n if rows is None else rows.repeats * rows.size
    if pair.a.shape != (pair.rank, k) or pair.b.shape != (outputs, pair.rank):
        raise CheckpointError(
            f"{contents.source}: {name}: A is {list(pair.a.shape)} and B {list(pair.b.shape)}; this model "
            f"needs [rank, {k}] and [{outputs}, rank]: the adapter is of another model"
        )
    b = pair.b
    if rows is not None:
        b = b[_indices(rows)]
    rows_order, columns = order(target, contents.naming, config)
    a = pair.a if columns is None else pair.a[:, columns]
    return dataclasses.replace(pair, a=a, b=b if rows_order is None else b[rows_order])


def _stacked(layers: dict[int, Pair], target: Target) -> LowRank:
    """A change of a stack of the pairs of its layers, which have one scale or get it in B."""
    rank, (n, k) = max(pair.rank for pair in layers.values()), target.shape
    scales = {pair.scale for pair in layers.values()}
    scale = scales.pop() if len(scales) == 1 else 1.0
    dtype = np.result_type(*(array.dtype for pair in layers.values() for array in (pair.a, pair.b)))
    a, b = (np.zeros((len(target.layers), *shape), dtype) for shape in ((rank, k), (n, rank)))
    for index, pair in layers.items():
        a[index, : pair.rank] = pair.a
        b[index, :, : pair.rank] = pair.b if scale == pair.scale else pair.scale * pair.b
    return LowRank(jnp.asarray(a), jnp.asarray(b), scale, target.start)


def contents(source: str, naming: str, adapter: Adapter, config: ModelConfig) -> Contents:
    """What a file of an adapter holds. Matrices that files of this naming may have in one, rows below rows,
    get one pair, whose rank is the sum of theirs. Raises NotImplementedError for one that such a file cannot
    change."""
    pairs: dict[str, Pair] = {}
    for target in targets(config):
        change = _change(adapter, target)
        if change is None:
            continue
        if reason := refuses(target, naming, config):
            raise NotImplementedError(f"{source}: {reason}")
        rows, columns = order(target, naming, config).inverse
        a, b = np.asarray(change.a), np.asarray(change.b)
        a = a if columns is None else a[..., columns]
        b = b if rows is None else b[:, rows]
        for index, layer in enumerate(target.layers):
            pair = Pair(a[index], b[index], change.scale)
            name, within = _names(target, naming, layer)[0]
            pairs[name] = pair if within is None else _with_rows(pairs.get(name), pair, within)
    return Contents(source, naming, pairs)


def _change(adapter: Adapter, target: Target) -> LowRank | None:
    groups = adapter.layers.get(target.kind)
    return None if groups is None else groups[target.group].get(target.name)


def _with_rows(whole: Pair | None, pair: Pair, rows: Rows) -> Pair:
    """The pair of a fused matrix, perhaps one that has others' rows, with those of one more."""
    b = np.zeros((rows.repeats * rows.size, pair.rank), pair.b.dtype)
    b[_indices(rows)] = pair.scale * pair.b
    if whole is None:
        return Pair(pair.a, b, 1.0)
    return Pair(np.concatenate([whole.a, pair.a]), np.concatenate([whole.b, b], axis=1), 1.0)


def _indices(rows: Rows) -> np.ndarray:
    """The rows of a fused matrix that are one's own."""
    own = [np.arange(start, stop) for start, stop in rows.runs]
    return np.concatenate([rows.size * r + run for r in range(rows.repeats) for run in own])
