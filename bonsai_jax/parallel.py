"""Many devices: rows over the mesh axis "data", matrices and KV heads over the mesh axis "model".

Every device runs the functions of decoding.py on its share, inside `jax.shard_map`. A layer's matrices are
split so that two sums over devices are all that it needs (Shoeybi et al. 2019):

        x          each device: its heads            sum          its ffn columns            sum
    [B, T, H] --> q k v --> attention --> its part of W_o --> x --> gate, up --> its part of W_down --> x

Embedding and head are split by vocabulary: the look-up is summed, the logits are gathered, and each device
draws the same tokens. `AXES` and `RULES` say all of this; what a device does with it is `Params.axis` in
layers.py.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from bonsai_jax import cache as kv
from bonsai_jax import decoding as core
from bonsai_jax.cache import KVCache
from bonsai_jax.config import ModelConfig, RunConfig
from bonsai_jax.decoding import State
from bonsai_jax.params import Params
from pallas_kernels import LayerStack, QTensor, dispatch, formats
from pallas_kernels.qtensor import Rows

DATA, MODEL = "data", "model"

# Logical axes of the arrays of Params and KVCache; what is not here is on every device. Of a quantized
# matrix, outputs and inputs are the first two axes of each of its fields behind the layers.
AXES: dict[str, tuple[str | None, ...]] = {
    "embed": ("vocab", None),
    "head": ("vocab", None),
    "wqkv": ("layers", "heads", None),
    "bqkv": ("layers", "heads"),
    "wo": ("layers", None, "heads"),
    "w_gate": ("layers", "ffn", None),
    "w_up": ("layers", "ffn", None),
    "w_down": ("layers", None, "ffn"),
    "k": ("layers", "rows", None, "heads", None),  # a row's pages lie with the row
    "v": ("layers", "rows", None, "heads", None),
}
# Logical axis -> mesh axis.
RULES = {"rows": DATA, "vocab": MODEL, "heads": MODEL, "ffn": MODEL, "layers": None}

TILE_ROWS, TILE_COLUMNS = 16, 256  # borders of the layouts that kernels read (pallas_kernels/tiles.py)


def make_mesh(data: int = 1, model: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of data x model devices for `load`: rows are split over `data`, weights over `model`.

    devices   the first data x model of jax.devices(), unless given
    Raises ValueError when there are fewer.
    """
    devices = jax.devices() if devices is None else list(devices)
    if min(data, model) < 1 or data * model > len(devices):
        raise ValueError(f"a mesh of data={data} x model={model} devices; there are {len(devices)}")
    return usable(Mesh(np.array(devices[: data * model]).reshape(data, model), (DATA, MODEL)))


def usable(mesh: Mesh) -> Mesh:
    """The same mesh with Auto axes: on the Explicit ones that jax.make_mesh makes, Pallas calls fail outside
    shard_map. Raises ValueError for axes other than "data" and "model"."""
    if unknown := sorted(set(mesh.axis_names) - {DATA, MODEL}):
        raise ValueError(f'mesh: axes are {mesh.axis_names}, {unknown[0]!r} among them; use "data", "model"')
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def size(mesh: Mesh | None, axis: str) -> int:
    """Devices along a mesh axis; 1 where there is none."""
    return 1 if mesh is None else dict(mesh.shape).get(axis, 1)


def padded_rows(rows: int, mesh: Mesh | None) -> int:
    """The next number of rows that splits over the devices."""
    return -(-rows // size(mesh, DATA)) * size(mesh, DATA)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the weights of a model go: `params.load` asks it.

    config   of the whole model
    """

    mesh: Mesh
    config: ModelConfig

    @property
    def parts(self) -> int:
        return size(self.mesh, MODEL)

    @property
    def axis(self) -> str | None:
        """Params.axis."""
        return MODEL if self.parts > 1 else None

    def check(self, matrices: Sequence[tuple[str, tuple[int, ...], str, str]]) -> None:
        """Raise ValueError, with the sizes of the mesh's "model" axis that would do, where a matrix does not
        split.

        matrices   field of Params (wq, wk, wv apart), shape (outputs, inputs), format and impl of each
        """
        config = self.config
        reasons = {d: _refuses(config, matrices, d) for d in (self.parts, *range(1, config.num_heads + 1))}
        if reason := reasons[self.parts]:
            able = ", ".join(str(d) for d in range(1, config.num_heads + 1) if not reasons[d])
            raise ValueError(f"mesh: {self.parts} devices along {MODEL!r}: {reason}; sizes that do: {able}")

    def put(self, field: str, value: Any) -> Any:
        """A field of Params (or of its layers) over the mesh. Static shapes become those of one device."""
        if value is None:
            return None
        if self.parts > 1:
            if field == "wqkv":
                value = self._qkv(value)
            elif field == "bqkv":
                value = value[:, self._qkv_rows(0, value.shape[1])]
            elif field in AXES:
                value = jax.tree.map(
                    lambda w: self._share(field, w), value, is_leaf=lambda leaf: isinstance(leaf, QTensor)
                )
        names = tuple(RULES[axis] if axis else None for axis in AXES.get(field, ()))
        sharding = NamedSharding(self.mesh, _present(names, self.mesh))
        return jax.tree.map(lambda array: jax.device_put(array, sharding), value)

    def _share(self, field: str, w: QTensor) -> QTensor:
        """Static shape of a device's share; the vocabulary is padded with rows of zeros (which are bytes:
        what they decode to is never read) to whole shares."""
        *_, outputs, inputs = AXES[field]
        (n, k), parts = w.shape, self.parts
        if outputs == "vocab":
            unit = TILE_ROWS if w.impl == "mosaic" else 1
            units = -(-n // (unit * parts)) * parts
            n = units * unit
            w = w.replace(fields={name: _pad_rows(f, units) for name, f in w.fields.items()})
        shape = (n // parts if outputs else n, k // parts if inputs else k)
        return _rechosen(w.replace(shape=shape))

    def _qkv(self, stacks: tuple[LayerStack, ...]) -> tuple[LayerStack, ...]:
        """Joined queries, keys and values with each device's rows together: its q, its k, its v."""
        placed, first = [], 0
        for stack in stacks:
            parts = []
            for part in stack.parts:
                at, pieces = first, []
                for piece in part.pieces if isinstance(part, Rows) else (part,):
                    pieces.append(self._ordered(piece, self._qkv_rows(at, piece.shape[0])))
                    at += piece.shape[0]
                parts.append(Rows(tuple(pieces)) if isinstance(part, Rows) else pieces[0])
            first += stack.shape[0]
            placed.append(LayerStack(tuple(parts), stack.where))
        return tuple(placed)

    def _ordered(self, w: QTensor, rows: np.ndarray) -> QTensor:
        unit = TILE_ROWS if w.impl == "mosaic" else 1
        units = rows.reshape(-1, unit)[:, 0] // unit
        fields = {name: field[:, units] for name, field in w.fields.items()}
        return _rechosen(w.replace(fields=fields, shape=(len(rows) // self.parts, w.shape[1])))

    def _qkv_rows(self, first: int, count: int) -> np.ndarray:
        """Of rows first .. first + count - 1 of the joined matrix (q, k, v), those of each device in turn,
        counted from `first`. Where there are fewer KV heads than devices, several have the same one."""
        c, rows = self.config, []
        heads, kv_heads = c.num_heads // self.parts, max(1, c.num_kv_heads // self.parts)
        for device in range(self.parts):
            kv_first = device * c.num_kv_heads // self.parts
            for start, head, number in (
                (0, device * heads, heads),
                (c.q_width, kv_first, kv_heads),
                (c.q_width + c.kv_width, kv_first, kv_heads),
            ):
                rows.append(start + np.arange(head * c.head_dim, (head + number) * c.head_dim))
        ids = np.concatenate(rows) - first
        return ids[(ids >= 0) & (ids < count)]


def empty_cache(config: ModelConfig, run: RunConfig, rows: int, context: int, mesh: Mesh | None) -> KVCache:
    """cache.empty over a mesh: each device has the pages of its rows and of its KV heads.

    Raises ValueError for a number of rows that does not split.
    """
    if mesh is None:
        return kv.empty(config, run, rows, context)
    if rows % size(mesh, DATA):
        near = rows // size(mesh, DATA) * size(mesh, DATA)
        able = " or ".join(str(n) for n in (near, near + size(mesh, DATA)) if n)
        raise ValueError(f"{rows} rows do not split over {size(mesh, DATA)} devices; {able} would")
    parts = size(mesh, MODEL)
    # As many KV heads as devices have together: more than the model's where several have the same.
    held = dataclasses.replace(config, num_kv_heads=parts * max(1, config.num_kv_heads // parts))
    shape = jax.eval_shape(lambda: kv.empty(held, run, rows, context))
    sharding = shardings(shape, mesh)
    table = np.arange(shape.block_table.size, dtype=np.int32).reshape(shape.block_table.shape)
    return shape.replace(
        k=jnp.zeros(shape.k.shape, shape.k.dtype, device=sharding.k),  # never whole on one device
        v=jnp.zeros(shape.v.shape, shape.v.dtype, device=sharding.v),
        block_table=jax.device_put(table, sharding.block_table),
        lengths=jnp.zeros(rows, jnp.int32, device=sharding.lengths),
    )


def specs(tree, mesh: Mesh):
    """PartitionSpec of each array of Params, KVCache or State, by `AXES` and `RULES`. What AXES does not name
    is whole on every device in Params, and has rows first elsewhere."""
    default = () if isinstance(tree, Params) else ("rows",)

    def spec(path, _):
        names = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
        axes = next((AXES[name] for name in names if name in AXES), default)
        return _present(tuple(RULES[axis] if axis else None for axis in axes), mesh)

    return jax.tree_util.tree_map_with_path(spec, tree)


def shardings(tree, mesh: Mesh):
    """NamedSharding of each array: `specs` on the mesh."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs(tree, mesh), is_leaf=lambda x: isinstance(x, P)
    )


def place_state(state: State, mesh: Mesh | None) -> State:
    """A state whose cache is `empty_cache`'s, with everything else beside its rows."""
    return state if mesh is None else jax.device_put(state, shardings(state, mesh))


def prefill(
    params: Params,
    state: State,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    config: ModelConfig,
    *,
    mesh: Mesh | None,
) -> State:
    """decoding.prefill over a mesh (None: on one device), jitted; the state is donated."""
    if mesh is None:
        return core.prefill_jit(params, state, tokens, lengths, config)
    return _prefill(params, state, tokens, lengths, config, mesh)


def decode(
    params: Params,
    state: State,
    config: ModelConfig,
    *,
    limit: int | Int[Array, ""],
    size: int,
    mesh: Mesh | None,
) -> tuple[State, Int[Array, "B size"]]:
    """decoding.decode over a mesh (None: on one device), jitted; the state is donated."""
    if mesh is None:
        return core.decode_jit(params, state, config, limit=limit, size=size)
    return _decode(params, state, jnp.asarray(limit, jnp.int32), config, size, mesh)


def generate_tokens(
    params: Params,
    state: State,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    config: ModelConfig,
    *,
    size: int,
    mesh: Mesh | None,
) -> tuple[State, Int[Array, "B size"]]:
    """decoding.generate_tokens over a mesh (None: on one device), jitted; the state is donated."""
    if mesh is None:
        return core.generate_tokens(params, state, tokens, lengths, config, size=size)
    return _generate_tokens(params, state, tokens, lengths, config, size, mesh)


def teacher_forced_logits(
    params: Params,
    cache: KVCache,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    config: ModelConfig,
    *,
    mesh: Mesh | None,
) -> tuple[Float[Array, "B T V"], KVCache]:
    """decoding.teacher_forced_logits over a mesh (None: on one device); the cache is donated."""
    if mesh is None:
        return core.teacher_forced_logits(params, cache, tokens, lengths, config)
    return _teacher_forced_logits(params, cache, tokens, lengths, config, mesh)


# Each row's tokens depend on its own row only, so devices along "data" run loops of different lengths; those
# along "model" draw the same tokens and stay in step. check_vma is off because gathered logits are the same
# on every device, but JAX's types do not know it.


@functools.partial(jax.jit, static_argnames=("config", "mesh"), donate_argnames="state")
def _prefill(params, state, tokens, lengths, config, mesh):
    rows, held = _present((DATA,), mesh), specs(state, mesh)

    def run(params, state, tokens, lengths):
        state = core.prefill(params, _own_pages(state, mesh), tokens, lengths, config)
        return _own_pages(state, mesh, back=True)

    in_specs = (specs(params, mesh), held, rows, rows)
    return _mapped(run, mesh, in_specs, held)(params, state, tokens, lengths)


@functools.partial(jax.jit, static_argnames=("config", "size", "mesh"), donate_argnames="state")
def _decode(params, state, limit, config, size, mesh):
    rows, held = _present((DATA,), mesh), specs(state, mesh)

    def run(params, state, limit):
        state, drawn = core.decode(params, _own_pages(state, mesh), config, limit=limit, size=size)
        return _own_pages(state, mesh, back=True), drawn

    return _mapped(run, mesh, (specs(params, mesh), held, P()), (held, rows))(params, state, limit)


@functools.partial(jax.jit, static_argnames=("config", "size", "mesh"), donate_argnames="state")
def _generate_tokens(params, state, tokens, lengths, config, size, mesh):
    rows, held = _present((DATA,), mesh), specs(state, mesh)

    def run(params, state, tokens, lengths):
        state = _own_pages(state, mesh)
        state, drawn = core.generate_tokens(params, state, tokens, lengths, config, size=size)
        return _own_pages(state, mesh, back=True), drawn

    in_specs = (specs(params, mesh), held, rows, rows)
    return _mapped(run, mesh, in_specs, (held, rows))(params, state, tokens, lengths)


@functools.partial(jax.jit, static_argnames=("config", "mesh"), donate_argnames="cache")
def _teacher_forced_logits(params, cache, tokens, lengths, config, mesh):
    rows, held = _present((DATA,), mesh), specs(cache, mesh)

    def run(params, cache, tokens, lengths):
        cache = _own_pages(cache, mesh)
        logits, cache = core.teacher_forced_logits(params, cache, tokens, lengths, config)
        return logits, _own_pages(cache, mesh, back=True)

    in_specs = (specs(params, mesh), held, rows, rows)
    return _mapped(run, mesh, in_specs, (rows, held))(params, cache, tokens, lengths)


def _own_pages(tree, mesh: Mesh, back: bool = False):
    """A State or KVCache inside shard_map: its block table in terms of the pages that this device has, or
    `back` in terms of all pages."""
    if size(mesh, DATA) == 1:
        return tree
    if isinstance(tree, State):
        return tree.replace(cache=_own_pages(tree.cache, mesh, back))
    first = jax.lax.axis_index(DATA) * tree.k.shape[1]
    return tree.replace(block_table=tree.block_table + (first if back else -first))


def _mapped(function, mesh: Mesh, in_specs, out_specs):
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _present(names: tuple[str | None, ...], mesh: Mesh) -> P:
    """A PartitionSpec of the names that are axes of this mesh."""
    return P(*(name if name in mesh.axis_names else None for name in names))


def _refuses(config: ModelConfig, matrices, parts: int) -> str | None:
    """Why these matrices do not split over so many devices, or None."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if parts == 1:
        return None
    if heads % parts or (kv_heads % parts and parts % kv_heads):
        return f"{heads} query heads and {kv_heads} KV heads do not split evenly"
    for field, (n, k), format, impl in matrices:
        axes = AXES["wqkv" if field in ("wq", "wk", "wv") else field]
        outputs, inputs = axes[-2:]
        tiled = impl == "mosaic"
        rows = TILE_ROWS if tiled else 1
        columns = math.lcm(formats.get(format).WEIGHTS, TILE_COLUMNS if tiled else 1)
        if outputs == "heads" and config.head_dim % rows:
            return f"{field}: heads of {config.head_dim} rows are no whole tiles of {rows}"
        if outputs == "ffn" and n % (parts * rows):
            return f"{field}: {n} rows do not split at {rows}"
        if inputs and k % (parts * columns):
            return f"{field}: {k} columns of {format} do not split at {columns}"
    return None


def _rechosen(w: QTensor) -> QTensor:
    """The choice for many rows depends on the shape, which is now a device's."""
    if w.gemm == "xla":
        return w
    return w.replace(gemm=dispatch.choose(dispatch.Problem("gemm", dispatch.platform(), w.format, w.shape)))


def _pad_rows(field: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(field, [(0, rows - field.shape[0])] + [(0, 0)] * (field.ndim - 1))
