"""Where the arrays of a model lie: rows over the mesh axis "data", matrices and KV heads over "model".

A layer's matrices are split so that two sums over devices are all that it needs (Shoeybi et al. 2019):

        x          each device: its heads            sum          its ffn columns            sum
    [B, T, H] --> q k v --> attention --> its part of W_o --> x --> gate, up --> its part of W_down --> x

Embedding and head are split by vocabulary: the look-up is summed, the logits are gathered, and each device
draws the same tokens. `AXES` and `RULES` say all of this; what a device does with it is `Params.axis` in
layers.py.
"""

import ctypes
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from bonsai_jax.config import ModelConfig
from checkpoints import Gathered, Tensor
from pallas_kernels import QTensor, device, formats

DATA, MODEL = "data", "model"

# Logical axes of the arrays of Params and KVCache; what is not here is on every device. Of a quantized
# matrix, outputs and inputs are the first two axes of each of its fields behind the layers.
AXES: dict[str, tuple[str | None, ...]] = {
    "embed": ("vocab", None),
    "head": ("vocab", None),
    **dict.fromkeys(("wq", "wk", "wv", "wqkv"), ("layers", "heads", None)),
    "bqkv": ("layers", "heads"),
    "wo": ("layers", None, "heads"),
    "w_gate": ("layers", "ffn", None),
    "w_up": ("layers", "ffn", None),
    "w_down": ("layers", None, "ffn"),
    **dict.fromkeys(("delta_qkv", "delta_z", "delta_in"), ("layers", "delta", None)),
    **dict.fromkeys(("delta_alpha", "delta_beta", "delta_gates"), ("layers", "delta", None)),
    **dict.fromkeys(("delta_dt", "delta_a"), ("layers", "delta")),
    "delta_conv": ("layers", "delta", None),
    "delta_out": ("layers", None, "delta"),
    "router": ("layers", None, None),
    **dict.fromkeys(("expert_gate", "expert_up", "expert_down"), ("layers", "experts", None, None)),
    "join": ("layers", None, None),
    "s": ("layers", "rows", "delta"),
    "tail": ("layers", "rows", None, "delta"),
    "k": ("layers", "rows", None, "heads"),  # a row's pages lie with the row
    "v": ("layers", "rows", None, "heads"),
    "peers": ("rows", "devices", None, None),
    **dict.fromkeys(
        ("signs", "flips"), (None,)
    ),  # of folded weights: a device with a part of inputs cuts out its own
}
# Logical axis -> mesh axis.
RULES = {
    **dict.fromkeys(("vocab", "heads", "delta", "ffn", "experts", "devices"), MODEL),
    "rows": DATA,
    "layers": None,
}

TILE_ROWS, TILE_COLUMNS = 16, 256  # borders of the layouts that kernels read (pallas_kernels/tiles.py)


def make_mesh(data: int = 1, model: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of data x model devices for `load`: rows are split over `data`, weights over `model`.

    devices   the first data x model of jax.devices(), unless given
    Raises ValueError when there are fewer.
    """
    devices = jax.devices() if devices is None else list(devices)
    if min(data, model) < 1 or data * model > len(devices):
        raise ValueError(
            f"a mesh of data={data} x model={model} devices; there are {len(devices)}; lower one of them, or "
            "make more of a CPU (jax_num_cpu_devices)"
        )
    return usable(Mesh(np.array(devices[: data * model]).reshape(data, model), (DATA, MODEL)))


def usable(mesh: Mesh) -> Mesh:
    """The same mesh with Auto axes: on the Explicit ones that jax.make_mesh makes, Pallas calls fail outside
    shard_map. Raises ValueError for axes other than "data" and "model"."""
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}; give bj.make_mesh(data, model)")
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
    all_reduce  RunConfig's
    """

    mesh: Mesh
    config: ModelConfig
    all_reduce: str = "auto"

    @property
    def parts(self) -> int:
        return size(self.mesh, MODEL)

    @property
    def axis(self) -> str | None:
        """Params.axis."""
        return MODEL if self.parts > 1 else None

    def check(self, matrices: Sequence[tuple[str, tuple[int, ...], str, bool, bool]]) -> None:
        """Raise ValueError, with the sizes of the mesh's "model" axis that would do, where a matrix does not
        split.

        matrices   field of Params (wq, wk, wv apart), shape (outputs, inputs) and format of each, whether it
                   is stored in tiles, and whether its inputs are regrouped (plan.Member)
        """
        config = self.config
        reasons = {d: _refuses(config, matrices, d) for d in (self.parts, *range(1, config.num_heads + 1))}
        if reason := reasons[self.parts]:
            able = ", ".join(str(d) for d in range(1, config.num_heads + 1) if not reasons[d])
            raise ValueError(f"mesh: {self.parts} devices along {MODEL!r}: {reason}; sizes that do: {able}")

    def share(
        self, field: str, shape: tuple[int, int], tiled: bool, regrouped: bool = False
    ) -> "Share | None":
        """What each device has of a matrix of this shape (outputs, inputs); None: all of it. The vocabulary
        is padded to whole shares, with what is never read. Of inputs that are regrouped by k head
        (plan.Member) those of a device's heads are neighbours."""
        outputs, inputs = AXES[field][-2:]
        c, parts = self.config, self.parts
        if parts > 1 and c.experts and "experts" in AXES[field]:  # ahead of outputs and inputs
            return _even_share(0, c.experts.count // parts, parts)
        if parts == 1 or not (outputs or inputs):
            return None
        if "delta" in (outputs, inputs) and not regrouped:
            return self.delta_share(field, 1 if inputs else 0)
        if inputs:
            return _even_share(1, shape[1] // parts, parts)
        if field in ("wk", "wv"):  # with fewer KV heads than devices, several have the same one
            starts = tuple((d * c.num_kv_heads // parts * c.head_dim,) for d in range(parts))
            return Share(0, starts, (max(1, c.num_kv_heads // parts) * c.head_dim,))
        unit = TILE_ROWS if outputs == "vocab" and tiled else 1
        return _even_share(0, -(-shape[0] // (unit * parts)) * unit, parts)

    def delta_share(self, field: str, axis: int) -> "Share":
        """Of a gated delta net a device has some k heads, and the v heads that use them: neighbours where v
        heads are grouped, else some of each repetition."""
        d, parts = self.config.delta, self.parts
        assert d is not None
        width = 1 if field in ("delta_alpha", "delta_beta", "delta_dt", "delta_a") else d.v_dim
        repeats = 1 if d.grouped else d.v_heads // d.k_heads
        run = d.v_heads // repeats // parts * width  # of v heads that lie side by side
        counts, starts = (
            [run] * repeats,
            [[(r * parts + i) * run for r in range(repeats)] for i in range(parts)],
        )
        if field in ("delta_qkv", "delta_conv"):  # queries and keys lie ahead
            k_run = d.k_heads // parts * d.k_dim
            counts = [k_run, k_run, *counts]
            behind = 2 * parts * k_run
            starts = [
                [i * k_run, (parts + i) * k_run, *(behind + start for start in of)]
                for i, of in enumerate(starts)
            ]
        return Share(axis, tuple(map(tuple, starts)), tuple(counts))

    def blocks(self, t: Tensor | Gathered, share: "Share | None") -> jax.Array:
        """A matrix's blocks over the mesh, uint8: the share of each device, which is all that is read of the
        file, side by side."""
        data = t.data

        def read(index) -> np.ndarray:
            if share is None:
                return np.ascontiguousarray(data[index])
            start = index[share.axis].start or 0
            weights = t.shape[1] / data.shape[1] if share.axis else 1  # of a byte
            own = share.cut(data, round(start * weights) // share.count, weights)
            beyond = [(0, 0)] * data.ndim
            if share.axis == 0:
                beyond[0] = (0, share.count - len(own))
            return np.pad(own, beyond)

        rows = data.shape[0] if share is None or share.axis == 1 else share.count * self.parts
        sharding = NamedSharding(self.mesh, self._spec(share))
        return jax.make_array_from_callback((rows, *data.shape[1:]), sharding, read)

    def made(self, make: Callable[[Any], QTensor], share: "Share | None", whole: tuple[bool, ...]):
        """`make` on each device, of a tuple: of its share of the blocks, or where `whole` says so of what
        every device has."""
        spec = self._spec(share)
        return mapped(make, self.mesh, (self._sources(spec, whole),), spec)

    def placed(self, make: Callable[[Any], QTensor], share: "Share | None", whole: tuple[bool, ...]):
        """The same, into a layer's place: (stack, what to make it of, layer) -> stack."""
        spec = self._spec(share)
        stack = P(None, *spec)

        def place(stack, sources, layer):
            return jax.tree.map(lambda field, new: field.at[layer].set(new), stack, make(sources))

        return mapped(place, self.mesh, (stack, self._sources(spec, whole), P()), stack)

    def _sources(self, spec: P, whole: tuple[bool, ...]) -> tuple[P, ...]:
        return tuple(P() if of_all else spec for of_all in whole)

    def zeros(self, shape: QTensor, layers: int, share: "Share | None") -> QTensor:
        """A stack of such matrices; never whole on one device."""
        sharding = NamedSharding(self.mesh, P(None, *self._spec(share)))
        return jax.tree.map(lambda f: jnp.zeros((layers, *f.shape), f.dtype, device=sharding), shape)

    def biases(self, biases: Sequence[Float[np.ndarray, "L N"]]) -> jax.Array:
        """Those of queries, keys and values as one: the part of each device, side by side."""
        of_device = []
        for index in range(self.parts):
            for field, bias in zip(("wq", "wk", "wv"), biases, strict=True):
                share = self.share(field, (bias.shape[1], 0), False)
                of_device.append(bias if share is None else share.cut(bias.T, index).T)
        return self.vectors("bqkv", np.concatenate(of_device, axis=1))

    def of_heads(self, field: str, value: np.ndarray) -> jax.Array:
        """A small array of a gated delta net's heads, [layers, heads, ...]: the part of each device, side by
        side."""
        share = self.delta_share(field, 0)
        parts = [np.stack([share.cut(of, index) for of in value]) for index in range(self.parts)]
        return self.vectors(field, np.concatenate(parts, axis=1))

    def vectors(self, field: str, value: np.ndarray) -> jax.Array:
        """A small array that every process has whole, over the mesh by `AXES`."""
        names = tuple(RULES[axis] if axis else None for axis in AXES.get(field, ()))
        return spread(value, NamedSharding(self.mesh, present(names, self.mesh)))

    def peers(self) -> Int[Array, "data model devices+2 2"] | None:
        """Where the mailboxes are for the sums of a decode step; None where it has none, as with "auto" where
        devices cannot write into each other's memory. There "mailbox" raises NotImplementedError."""
        if self.parts == 1 or self.all_reduce == "psum":
            return None
        names, grid = self.mesh.axis_names, self.mesh.devices
        grid = grid.transpose([names.index(axis) for axis in (DATA, MODEL) if axis in names])
        grid = grid.reshape(size(self.mesh, DATA), self.parts)
        if not all(_reach_each_other(tuple(row)) for row in grid):
            if self.all_reduce == "auto":
                return None
            raise NotImplementedError(
                "all_reduce='mailbox' needs GPUs of one process, of compute capability 8.0 or newer, that "
                "reach each other's memory; leave it to 'psum'"
            )
        mailboxes = [[_mailbox(owner, tuple(row)) for owner in row] for row in grid]
        from pallas_kernels import all_reduce  # only GPUs need it

        pointers = [[box.unsafe_buffer_pointer() for box in row] for row in mailboxes]
        value = np.array([[all_reduce.addresses(row, me) for me in range(self.parts)] for row in pointers])
        return self.vectors("peers", value)

    def _spec(self, share: "Share | None") -> P:
        return P() if share is None else P(*[None] * share.axis, self.axis)


@functools.cache  # for good: what knows its address may live as long as the process
def _mailbox(owner: Any, group: tuple[Any, ...]) -> jax.Array:
    """Memory of a device that those of its group write into (pallas_kernels/all_reduce.py). A group
    counts its calls there: in a mailbox of two groups it would wait for a number that never comes."""
    from pallas_kernels import all_reduce  # only GPUs need it

    zeros = np.zeros(all_reduce.mailbox_words(len(group)), np.int32)
    return jax.block_until_ready(jax.device_put(zeros, owner))


def _reach_each_other(devices: tuple[Any, ...]) -> bool:
    """Whether these are GPUs of this process that read and write each other's memory."""
    if any(d.platform != "gpu" or d.process_index != jax.process_index() for d in devices):
        return False
    if int(device.platform().removeprefix("sm_")) < 80:
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    able = ctypes.c_int()
    for a, b in itertools.permutations(devices, 2):
        if driver.cuDeviceCanAccessPeer(ctypes.byref(able), a.local_hardware_id, b.local_hardware_id):
            return False
        if not able.value:
            return False
    return True


@dataclasses.dataclass(frozen=True)
class Share:
    """What each device along the mesh axis "model" has of a matrix: rows (axis 0) or columns (axis 1)
    start .. start + count - 1 of each run in starts[index] and counts, index being its own, one run behind
    the other."""

    axis: int
    starts: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]

    @property
    def count(self) -> int:
        return sum(self.counts)

    def shape(self, whole: tuple[int, int]) -> tuple[int, int]:
        return (self.count, whole[1]) if self.axis == 0 else (whole[0], self.count)

    def whole_blocks(self, format: str) -> bool:
        """Whether it is cut at borders of the format's blocks, which run along the columns."""
        return self.axis == 0 or all(count % formats.get(format).WEIGHTS == 0 for count in self.counts)

    def cut(self, whole: np.ndarray, index: int, per_element: float = 1) -> np.ndarray:
        """A device's share of an array, of which an element along the axis holds so many weights."""
        runs = zip(self.starts[index], self.counts, strict=True)
        bounds = [(round(start / per_element), round((start + count) / per_element)) for start, count in runs]
        return np.concatenate([whole[a:b] if self.axis == 0 else whole[:, a:b] for a, b in bounds], self.axis)

    def of(self, whole: QTensor) -> QTensor:
        """This device's share of a matrix in blocks, inside shard_map. Rows beyond the matrix are zeros."""
        starts = jnp.array(self.starts)[jax.lax.axis_index(MODEL)]

        def cut(field: jax.Array) -> jax.Array:
            weights = whole.shape[1] // field.shape[1] if self.axis else 1  # of a block, along this axis
            last = max(start + count for start, count in zip(self.starts[-1], self.counts, strict=True))
            beyond = max(0, last // weights - field.shape[self.axis])
            padding = [(0, beyond if axis == self.axis else 0) for axis in range(field.ndim)]
            padded = jnp.pad(field, padding)
            runs = [
                jax.lax.dynamic_slice_in_dim(padded, start // weights, count // weights, self.axis)
                for start, count in zip(starts, self.counts, strict=True)
            ]
            return runs[0] if len(runs) == 1 else jnp.concatenate(runs, self.axis)

        fields = {name: cut(field) for name, field in whole.fields.items()}
        return whole.replace(fields=fields, shape=self.shape(whole.shape))


def _even_share(axis: int, count: int, parts: int) -> Share:
    return Share(axis, tuple((index * count,) for index in range(parts)), (count,))


def spread(array: np.ndarray | jax.Array, sharding: NamedSharding) -> jax.Array:
    """An array that every process has whole, over a mesh: each puts its devices' parts there. Arrays that are
    there already stay."""
    if isinstance(array, jax.Array):
        if array.sharding == sharding:
            return array
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(spread(jax.random.key_data(array), sharding))
    value = np.asarray(array)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def mapped(function, mesh: Mesh, in_specs, out_specs):
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def present(names: tuple[str | None, ...], mesh: Mesh) -> P:
    """A PartitionSpec of the names that are axes of this mesh."""
    return P(*(name if name in mesh.axis_names else None for name in names))


def _refuses(config: ModelConfig, matrices, parts: int) -> str | None:
    """Why these matrices do not split over so many devices, or None."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if parts == 1:
        return None
    if heads % parts or (kv_heads % parts and parts % kv_heads):
        return f"{heads} query heads and {kv_heads} KV heads do not split evenly"
    if (d := config.delta) and d.k_heads % parts:
        return f"{d.k_heads} k heads of the delta net do not split evenly"
    if (e := config.experts) and e.count % parts:
        return f"{e.count} experts do not split evenly"
    for field, (n, k), format, tiled, regrouped in matrices:
        outputs, inputs = AXES[field][-2:]
        rows = TILE_ROWS if tiled else 1
        columns = math.lcm(formats.get(format).WEIGHTS, TILE_COLUMNS if tiled else 1)
        if d and "delta" in (outputs, inputs):
            run = d.v_dim * (d.v_heads // parts if d.grouped or regrouped else d.k_heads // parts)
            if inputs and run % columns:
                return f"{field}: v heads of {run} columns of {format} do not split at {columns}"
            of_heads = field in ("delta_qkv", "delta_z")
            if of_heads and (run % rows or d.k_heads // parts * d.k_dim % rows):
                return f"{field}: heads are no whole tiles of {rows} rows"
            if outputs and field in ("delta_alpha", "delta_beta") and d.v_heads // parts % rows:
                return f"{field}: {d.v_heads // parts} rows are no whole tiles of {rows}"
            continue
        if outputs == "heads" and config.head_dim % rows:
            return f"{field}: heads of {config.head_dim} rows are no whole tiles of {rows}"
        if outputs == "ffn" and n % (parts * rows):
            return f"{field}: {n} rows do not split at {rows}"
        if inputs and k % (parts * columns):
            return f"{field}: {k} columns of {format} do not split at {columns}"
    return None
