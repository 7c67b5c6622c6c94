"""Where the arrays of a model lie: rows over the mesh axis "data", matrices and KV heads over "model".

A layer's matrices are split so that two sums over devices are all that it needs (Shoeybi et al. 2019):

        x          each device: its heads            sum          its ffn columns            sum
    [B, T, H] --> q k v --> attention --> its part of W_o --> x --> gate, up --> its part of W_down --> x

Embedding and head are split by vocabulary: the look-up is summed, the logits are gathered, and each device
draws the same tokens. Each tensor names the logical axes along which it is split (specs.Spec.axes), and the
settings of its kind say which part of such an axis a device has (`runs`).
"""

import ctypes
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int

from bonsai_jax import arguments
from bonsai_jax.config import ModelConfig
from bonsai_jax.weights.specs import Source, Spec
from pallas_kernels import QTensor, device, formats
from pallas_kernels.tiles import TILE_COLUMNS, TILE_ROWS

DATA, MODEL = "data", "model"
Key = TypeVar("Key")
# Logical axis -> mesh axis; any other name is an axis that devices along "model" split.
RULES: dict[str | None, str | None] = {"rows": DATA, "layers": None, None: None}

# Starts of each device's runs, and their lengths, along one axis of an array.
Runs = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]


def even_runs(size: int, parts: int) -> Runs:
    """An axis of this size in `parts` equal pieces."""
    count = size // parts
    return tuple((index * count,) for index in range(parts)), (count,)


def make_mesh(data: int = 1, model: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of data x model devices for `load`: rows are split over `data`, weights over `model`.

    devices   the first data x model of jax.devices(), unless given
    Raises ValueError when there are fewer.
    """
    data, model = arguments.whole("data", data, 1), arguments.whole("model", model, 1)
    if devices is not None and not isinstance(devices, Iterable):
        raise TypeError(f"devices is a {type(devices).__name__}; give a list of jax.devices()")
    devices = jax.devices() if devices is None else list(devices)
    for one in devices:
        arguments.kind("devices", one, jax.Device, "a list of jax.devices()")
    if data * model > len(devices):
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


PEERS = ("rows", "devices", None, None)  # logical axes of Params.peers


class Whole(NamedTuple):
    """An array that devices may split.

    settings   of the layers that have it; None for an array of the model's own
    shape      (outputs, inputs) of a matrix
    format     the file's
    stored     that in which a matrix is stored
    tiled      whether in tiles
    regrouped  whether the inputs lie in the order in which devices have them (records.Member)
    """

    spec: Spec
    settings: Any
    shape: tuple[int, ...]
    format: str = "f32"
    stored: str = "f32"
    tiled: bool = False
    regrouped: bool = False


class Recipe(Protocol):
    """How a device makes a matrix of what it is given: a static value.

    share   what each device has of the result; None: all
    whole   of each tensor whether every device is given all of it, and not its share
    """

    @property
    def share(self) -> "Share | None": ...
    @property
    def whole(self) -> tuple[bool, ...]: ...
    def __call__(self, given: tuple) -> QTensor: ...


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the weights of a model go.

    mesh        the devices; None: the default device
    all_reduce  RunConfig's
    count       devices that share the weights; None: as many as the mesh has
    """

    mesh: Mesh | None = None
    all_reduce: str = "auto"
    count: int | None = None

    @property
    def parts(self) -> int:
        return size(self.mesh, MODEL) if self.count is None else self.count

    @property
    def axis(self) -> str | None:
        """Params.axis."""
        return MODEL if self.parts > 1 else None

    def shares(self, config: ModelConfig, arrays: Mapping[Key, Whole]) -> "dict[Key, Share | None]":
        """What each device has of each of these arrays; None: all of it.

        Raises ValueError, with the sizes of the mesh's "model" axis that would do, where a layer or a matrix
        does not split.
        """
        if reason := self._refuses(config, arrays.values()):
            others = [dataclasses.replace(self, count=n + 1) for n in range(config.attention.num_heads)]
            able = ", ".join(str(p.parts) for p in others if not p._refuses(config, arrays.values()))
            raise ValueError(f"mesh: {self.parts} devices along {MODEL!r}: {reason}; sizes that do: {able}")
        return {key: self._share(array) for key, array in arrays.items()}

    def _refuses(self, config: ModelConfig, arrays: Iterable[Whole]) -> str | None:
        """Why this model cannot be split over so many devices, or None."""
        if self.parts == 1:
            return None
        halves = dict.fromkeys(half for layer in config.layers for half in layer.halves)
        reasons = [half.refuses_split(self.parts) for half in halves]
        return next(filter(None, reasons), None) or next(filter(None, map(self._refuses_array, arrays)), None)

    def _refuses_array(self, a: Whole) -> str | None:
        share, field = self._share(a), a.spec.field
        if share is None or a.spec.axes[0] == "vocab" or len(a.spec.shape) == 3:
            return None
        if share.axis == 0:
            rows = TILE_ROWS if a.tiled else 1
            whole = share.count % rows == 0
            return None if whole else f"{field}: {share.count} rows are no whole tiles of {rows}"
        columns = math.lcm(formats.get(a.stored).WEIGHTS, TILE_COLUMNS if a.tiled else 1)
        if all(count % columns == 0 for count in share.counts):
            return None
        return f"{field}: {a.shape[1]} columns of {a.stored} do not split at {columns}"

    def _share(self, a: Whole) -> "Share | None":
        """The vocabulary is padded to whole shares, with rows that are never read."""
        axis = next((axis for axis, name in enumerate(a.spec.axes) if name is not None), None)
        if self.parts == 1 or axis is None:
            return None
        name = str(a.spec.axes[axis])
        if name == "vocab":
            unit = self.parts * (TILE_ROWS if a.tiled else 1)
            starts, counts = even_runs(-(-a.shape[axis] // unit) * unit, self.parts)
        elif a.regrouped:
            starts, counts = even_runs(a.shape[axis], self.parts)
        else:
            starts, counts = a.settings.runs(name, self.parts)
        block = formats.get(a.format).WEIGHTS if axis else 1
        return Share(axis, starts, counts, whole_blocks=all(count % block == 0 for count in counts))

    def blocks(self, t: Source, share: "Share | None") -> np.ndarray | jax.Array:
        """A matrix's blocks, uint8; over a mesh the shares of all devices side by side. Nothing else of the
        file is read."""
        data = t.data
        if self.mesh is None:
            return data

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

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def made(self, recipe: Recipe, given: tuple) -> QTensor:
        """A matrix, each device's share made by itself."""
        if self.mesh is None:
            return recipe(given)
        spec, given_specs = self._specs(recipe)
        return mapped(recipe, self.mesh, (given_specs,), spec)(given)

    def zeros(self, recipe: Recipe, given: tuple, layers: int) -> QTensor:
        """A stack of such matrices, all zeros; no device ever has all of it."""
        one = jax.eval_shape(functools.partial(self.made, recipe), given)
        sharding = self.mesh and NamedSharding(self.mesh, P(None, *self._spec(recipe.share)))
        make = lambda: jax.tree.map(lambda f: jnp.zeros((layers, *f.shape), f.dtype), one)  # noqa: E731
        return jax.jit(make, out_shardings=sharding)()

    @functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
    def placed(self, recipe: Recipe, stack: QTensor, given: tuple, index) -> QTensor:
        """The same stack with such a matrix in the place of one layer."""

        def place(stack, given, index):
            return jax.tree.map(lambda field, new: field.at[index].set(new), stack, recipe(given))

        if self.mesh is None:
            return place(stack, given, index)
        spec, given_specs = self._specs(recipe)
        in_stack = P(None, *spec)
        return mapped(place, self.mesh, (in_stack, given_specs, P()), in_stack)(stack, given, index)

    def _specs(self, recipe: Recipe) -> tuple[P, tuple[P, ...]]:
        """How a matrix lies on the mesh, and what it is made of."""
        spec = self._spec(recipe.share)
        return spec, tuple(P() if whole else spec for whole in recipe.whole)

    def stacked(self, pieces: Sequence[np.ndarray], shares: "Sequence[Share | None]", axes) -> jax.Array:
        """Small arrays [layers, ...] of the same layers, joined along their second axis: the part of each
        device of each array, side by side."""
        if any(share is None for share in shares):
            whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)
            return self.put(whole, axes)
        by_device = [
            np.stack([share.cut(layer, index) for layer in piece])
            for index in range(self.parts)
            for piece, share in zip(pieces, shares, strict=True)
            if share is not None
        ]
        return self.put(np.concatenate(by_device, axis=1), axes)

    def put(self, value: np.ndarray | jax.Array, axes: Sequence[str | None] = ()) -> jax.Array:
        """A small array that every process has whole; over a mesh by its logical axes."""
        if self.mesh is None:
            return jax.device_put(value)
        names = tuple(mesh_axis(axis) for axis in axes)
        return spread(value, NamedSharding(self.mesh, present(names, self.mesh)))

    def peers(self) -> Int[jax.Array, "data model devices+2 2"] | None:
        """Addresses of the mailboxes in which a decode step sums over devices; None where it has none, as
        with "auto" if devices cannot write into each other's memory. "mailbox" then raises
        NotImplementedError."""
        if self.mesh is None or self.parts == 1 or self.all_reduce == "psum":
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
        return self.put(value, PEERS)

    def _spec(self, share: "Share | None") -> P:
        return P() if share is None else P(*[None] * share.axis, self.axis)


ONE_DEVICE = Placement()


@functools.cache  # never freed: compiled programs may know its address
def _mailbox(owner: Any, group: tuple[Any, ...]) -> jax.Array:
    """Memory of a device that the other devices of its group write into (pallas_kernels/all_reduce.py). A
    group counts its calls in it; if two groups shared a mailbox, each would wait for a count that never
    comes."""
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
    """The part of a matrix on each device along the mesh axis "model", rows (axis 0) or columns (axis 1).
    Device `index` has, for each run, positions start .. start + count - 1, with start from starts[index] and
    count from counts; the runs follow one another.

    whole_blocks   whether they are whole blocks of the file's format, which run along the columns
    """

    axis: int
    starts: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    whole_blocks: bool = True

    @property
    def count(self) -> int:
        return sum(self.counts)

    def shape(self, whole: tuple[int, int]) -> tuple[int, int]:
        return (self.count, whole[1]) if self.axis == 0 else (whole[0], self.count)

    def cut(self, whole: np.ndarray, index: int, per_element: float = 1) -> np.ndarray:
        """A device's share of an array; per_element: weights that one element along the axis stands for."""
        runs = zip(self.starts[index], self.counts, strict=True)
        bounds = [(round(start / per_element), round((start + count) / per_element)) for start, count in runs]
        return np.concatenate([whole[a:b] if self.axis == 0 else whole[:, a:b] for a, b in bounds], self.axis)

    def own(self, whole: QTensor) -> QTensor:
        """This device's share of a matrix of blocks, inside shard_map. Rows beyond the matrix are zeros."""
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


def spread(array: np.ndarray | jax.Array, sharding: NamedSharding) -> jax.Array:
    """An array that every process has whole, put onto a mesh: each process gives its own devices their parts.
    An array that already lies so is returned as it is."""
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


def mesh_axis(name: str | None) -> str | None:
    """The mesh axis over which a logical axis is split."""
    return RULES.get(name, MODEL)
