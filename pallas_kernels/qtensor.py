"""Weights on the device: one QTensor per matrix, one LayerStack per weight that every layer has."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels import formats, tiles
from pallas_kernels.precision import bits_for
from pallas_kernels.pytree import serializable
from pallas_kernels.rotation import Rotation


@dataclasses.dataclass(frozen=True)
class Products:
    """The kernels that multiply a matrix: chosen at load (pallas_kernels/selection.py), static under jit.

    kernels          (most rows of activations, kernel), ascending; None in the last: any number of rows
    activation_bits  8 or 16: kernels may round activations to so many bits, in groups of 128 columns (1-bit
                     weights on a GPU), 32, or the columns that share a scale if they are fewer. 16 is nearly
                     exact
    tiled            whether a kernel reads the format's tiles; if not, blocks as they stand in the file
    few_rows_bits    activation_bits for up to FEW_ROWS rows (precision.py); None: the same
    """

    kernels: tuple[tuple[int | None, str], ...] = ((None, "reference"),)
    activation_bits: int = 8
    tiled: bool = False
    few_rows_bits: int | None = None

    def bits(self, rows: int) -> int:
        """To which kernels may round this number of rows of activations."""
        return bits_for(rows, self.activation_bits, self.few_rows_bits)

    def kernel(self, rows: int) -> str:
        """The kernel for this number of rows of activations."""
        return next(kernel for most, kernel in self.kernels if most is None or rows <= most)

    def __str__(self):
        first, parts = 1, []
        for most, kernel in self.kernels:
            last = "" if most == first else " and more" if most is None else f" to {most}"
            parts.append(f"{kernel} for {first}{last} rows")
            first = (most or 0) + 1
        return ", ".join(parts) if len(parts) > 1 else self.kernels[0][1]


@serializable
class QTensor(struct.PyTreeNode):
    """A matrix of N rows and K columns (rows are outputs: y = x @ W.T) in a quantization format.

    fields    {name: array [*lead, N, K / WEIGHTS, *field shape]}, the struct of arrays that `formats.unpack`
              returns. `lead` is empty for one matrix and (layers,) for a stack
    format    name of a file in pallas_kernels/formats
    shape     (N, K), without `lead`
    tiled     whether `fields` come from the format's `tile`, the layout that GPU kernels read; if not, they
              are those of the file's blocks
    products  the kernels that multiply it
    rotation  of its inputs, if the matrix is stored rotated (folded); else None
    """

    fields: dict[str, jax.Array]
    format: str = struct.field(pytree_node=False)
    shape: tuple[int, int] = struct.field(pytree_node=False)
    tiled: bool = struct.field(pytree_node=False, default=False)
    products: Products = struct.field(pytree_node=False, default=Products())
    rotation: Rotation | None = None

    @property
    def nbytes(self) -> int:
        return sum(field.nbytes for field in self.fields.values())

    def __getitem__(self, index) -> "QTensor":
        """Index into `lead`: the matrix of one layer."""
        return self.replace(fields={name: field[index] for name, field in self.fields.items()})

    def rows(self, ids: jax.Array) -> jax.Array:
        """float32 [*ids.shape, K]: the dequantized rows `ids` of a single matrix, for embedding look-ups.
        Rows that are stored rotated are rotated back."""
        if self.rotation is not None:
            return self.rotation.back(self.replace(rotation=None).rows(ids))
        if self.tiled and (rows := getattr(formats.get(self.format), "rows", None)):
            return rows(self.fields, ids, self.shape[1])
        if self.tiled:
            # Whole tiles of 16 rows, as matrices of one tile.
            fields = {
                name: jnp.expand_dims(field[ids // 16], ids.ndim) for name, field in self.fields.items()
            }
            tiles = self.replace(fields=fields, shape=(16, self.shape[1]))
            return jnp.take_along_axis(dequantize(tiles), (ids % 16)[..., None, None], axis=-2)[..., 0, :]
        return dequantize(self.replace(fields={name: field[ids] for name, field in self.fields.items()}))


def from_blocks(raw: jax.Array, format: str) -> QTensor:
    """File bytes, uint8 [*lead, N, bytes of a row] -> QTensor.

    Raises NotImplementedError for a format that has no file in pallas_kernels/formats.
    """
    fields = formats.unpack(format, raw)
    columns = raw.shape[-1] // formats.get(format).BLOCK.itemsize * formats.get(format).WEIGHTS
    return QTensor(fields, format, (raw.shape[-2], columns))


def tiled_nbytes(format: str, shape: tuple[int, int]) -> int:
    """Bytes of a matrix of this shape, (N, K), in the layout that GPU kernels read."""
    return -(-shape[0] // tiles.TILE_ROWS) * -(-shape[1] // tiles.TILE_COLUMNS) * _tile_nbytes(format)


@functools.cache
def _tile_nbytes(format: str) -> int:
    module = formats.get(format)
    row = tiles.TILE_COLUMNS // module.WEIGHTS * module.BLOCK.itemsize
    raw = jax.ShapeDtypeStruct((tiles.TILE_ROWS, row), jnp.uint8)
    fields = jax.eval_shape(lambda raw: tile(from_blocks(raw, format)).fields, raw)
    return sum(math.prod(field.shape) * field.dtype.itemsize for field in fields.values())


def tile(w: QTensor) -> QTensor:
    """The same weights in the layout that GPU kernels read. Raises AttributeError for a format without tiles
    (formats.family)."""
    return w.replace(fields=formats.get(w.format).tile(w.fields), tiled=True)


def dequantize(w: QTensor) -> jax.Array:
    """float32 [*lead, N, K]: the weights, exactly as the format defines them."""
    module = formats.get(w.format)
    blocks = module.dequantize(module.untile(w.fields, w.shape) if w.tiled else w.fields)
    return blocks.reshape(*blocks.shape[:-2], w.shape[1])


def quantize(x: jax.Array, format: str, importance: jax.Array | None = None) -> QTensor:
    """float32 [*lead, N, K] -> QTensor.

    importance  float32 [K] or [*lead, K]: the mean square of the activations that each column is multiplied
                with. Errors are weighted by it, as in ggml's quantizer; a format with one rule ignores it
    Raises NotImplementedError if the format has no encoder, or one that needs importance, and ValueError if
    K is not a multiple of its block, or for an importance of another shape.
    """
    module = formats.get(format)
    weighted = hasattr(module, "quantize_weighted")
    if not hasattr(module, "quantize") and (importance is None or not weighted):
        able = [name for name in formats.names() if hasattr(formats.get(name), "quantize")]
        without = " without the importance of columns" if weighted else ""
        raise NotImplementedError(
            f"format {format} has no encoder{without}; formats that have one: {', '.join(able)}"
        )
    if x.shape[-1] % module.WEIGHTS:
        raise ValueError(
            f"{format}: {x.shape[-1]} columns are not a multiple of its block of {module.WEIGHTS}"
        )
    blocks = x.reshape(*x.shape[:-1], -1, module.WEIGHTS)
    if importance is not None and importance.shape not in (x.shape[-1:], (*x.shape[:-2], x.shape[-1])):
        raise ValueError(
            f"{format}: importance has shape {importance.shape} for weights {x.shape}; expected one number "
            f"per column, {x.shape[-1:]}"
        )
    if importance is None or not weighted:
        fields = module.quantize(blocks)
    else:
        columns = jnp.asarray(importance, jnp.float32)[..., None, :]  # of every row
        fields = module.quantize_weighted(blocks, columns.reshape(*columns.shape[:-1], *blocks.shape[-2:]))
    return QTensor(fields, format, (x.shape[-2], x.shape[-1]))


@serializable
class Rows(struct.PyTreeNode):
    """Matrices with the same input, stacked by rows, that stay separate because their formats differ.

    pieces   QTensors of N_i x K, each with the same leading axes
    """

    pieces: tuple[QTensor, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(piece.shape[0] for piece in self.pieces), self.pieces[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


@serializable
class LayerStack(struct.PyTreeNode):
    """One weight of every layer, stacked by format, because files mix formats from layer to layer.

    parts   one stack per format (for joined weights, per combination of formats), each with a leading axis of
            the layers that have it
    where   (part, index within the part) for each layer
    """

    parts: tuple[QTensor | Rows, ...]
    where: tuple[tuple[int, int], ...] = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, int]:
        return self.parts[0].shape

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def at(self, layer, use: Callable[[QTensor | Rows, int | jax.Array], jax.Array]) -> jax.Array:
        """use(part, index) for a layer. If the layer is traced, formats are the branches of one
        `lax.switch`."""
        if isinstance(layer, int):
            part, index = self.where[layer]
            return use(self.parts[part], index)
        if len(self.parts) == 1:
            return use(self.parts[0], layer)
        part, index = jnp.array(self.where, jnp.int32).T
        branches = [lambda i, part=part: use(part, i) for part in self.parts]
        return jax.lax.switch(part[layer], branches, index[layer])


class Watched(LayerStack):
    """A stack whose products call note(x, chosen) with their inputs, as they are multiplied: normed,
    [*batch, K]. chosen, int32 [*batch, used], says by which experts, and x may then be [*batch, used, K];
    None: there are no experts."""

    note: Callable[[jax.Array, jax.Array | None], None] = struct.field(pytree_node=False)


def noted(weights: tuple, inputs: Callable[[], jax.Array], chosen: jax.Array | None = None) -> tuple:
    """Matrices that are about to be multiplied with `inputs()`; those that are watched have noted this."""
    for w in weights:
        if isinstance(w, Watched):
            w.note(inputs(), chosen)
    return tuple(LayerStack(w.parts, w.where) if isinstance(w, Watched) else w for w in weights)


def leaves(weights) -> list[QTensor]:
    """The matrices in a tree of weights."""
    every = jax.tree.leaves(weights, is_leaf=lambda leaf: isinstance(leaf, QTensor))
    return [leaf for leaf in every if isinstance(leaf, QTensor)]
