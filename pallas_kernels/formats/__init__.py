"""Quantization formats, one file each: everything that knows the bits of a format is in `formats/<name>.py`.

A format module defines

    WEIGHTS      weights per block
    BLOCK        numpy struct dtype of one block, as stored in a file (little-endian, packed)
    RANDOM       {float field: value} for random blocks: with random codes in the other fields, the weights
                 have mean 0 and standard deviation 1, nearly. A tuple of values: each block draws one of
                 them. A function, for a field whose bytes are not all valid, or that stores its scale in
                 another way: key, shape [..., *field shape], standard deviation float32 [...] -> the field
    dequantize   {field: array [..., *field shape]} -> float32 [..., WEIGHTS]
    LEVELS       how many values a weight has, times the scale of its block: 2 (-1, 1) or 3 (-1, 0, 1); absent
                 in other formats
    quantize     float32 [..., WEIGHTS] -> {field: array}; absent if the format has no encoder, or one that
                 needs an importance matrix
    quantize_weighted  float32 [..., blocks of a row, WEIGHTS] and importance of the columns, which has this
                 shape or broadcasts to it -> {field: array}, with errors weighted by column; absent if the
                 format's rule does not depend on an importance matrix

and, if GPU kernels multiply it,

    tile         blocks -> {field: array}, the layout that kernels read; the integers are its field "words"
    untile       the inverse of `tile`, given the matrix's shape, (N, K)
    LANES        a tiles.Lanes, which says how a lane reads its share of the tiles; absent: tiles are those of
                 the kernels for 1 bit

and, if the CPU kernel multiplies it,

    CPU          a cpu.vectors.Vectors: how vector instructions read rows of its blocks

A format imports what it shares with another one. No other file knows a format's name: kernels and plans read
these attributes.

A row of K weights is K / WEIGHTS blocks. `unpack` turns file bytes into one array per field (a struct of
arrays, which devices read efficiently); `pack` is its inverse. `get(name)` imports by file name, so a new
file is a new format.
"""

import functools
import importlib
import math
import pkgutil
from collections.abc import Iterable
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np


def names(kernels: str | None = None) -> list[str]:
    """All formats, or those that one family of kernels ("bit" or "int") multiplies."""
    every = sorted(m.name for m in pkgutil.iter_modules(__path__))
    return every if kernels is None else [name for name in every if family(name) == kernels]


@functools.cache
def get(name: str) -> ModuleType:
    """The module of a format. Raises NotImplementedError, with the supported names, if there is none."""
    if name not in names():
        raise NotImplementedError(f"format {name!r} is not supported; supported: {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name}")


def family(name: str) -> str | None:
    """The family of kernels that reads the format's tiles: "bit" (1 bit), "int" (2 to 8 bits), or None if the
    format has no tiles."""
    return "int" if hasattr(get(name), "LANES") else "bit" if hasattr(get(name), "tile") else None


def is_ternary(name: str) -> bool:
    """Whether weights are -d, 0 and d, in tiles of two bits a weight (q2_0_g128.py)."""
    return family(name) == "int" and getattr(get(name), "LEVELS", None) == 3


def unpack(name: str, raw) -> dict[str, jax.Array]:
    """File bytes, uint8 [..., K / WEIGHTS * block bytes] -> {field: [..., K / WEIGHTS, *field shape]}."""
    block = get(name).BLOCK
    if raw.shape[-1] % block.itemsize:
        raise ValueError(
            f"{name}: {raw.shape[-1]} bytes per row are not a multiple of the block's {block.itemsize} bytes"
        )
    raw = raw.reshape(*raw.shape[:-1], -1, block.itemsize)
    fields = {}
    for field, (dtype, offset) in _layout(block).items():
        item = raw[..., offset : offset + dtype.itemsize].reshape(
            *raw.shape[:-1], *dtype.shape, dtype.base.itemsize
        )
        if dtype.base.itemsize == 1:
            item = item[..., 0]
        fields[field] = jax.lax.bitcast_convert_type(item, dtype.base)
    return fields


def values(name: str, raw: np.ndarray) -> np.ndarray:
    """File bytes, uint8 [..., K / WEIGHTS * block bytes] -> float32 [..., K / WEIGHTS, WEIGHTS], on the host.
    By numpy, where the format's own code lets it: nothing is compiled."""
    module = get(name)
    blocks = raw.view(module.BLOCK)
    with jax.ensure_compile_time_eval():  # within jax.eval_shape too
        return np.asarray(module.dequantize({field: blocks[field] for field in _layout(module.BLOCK)}))


def copied(name: str, shape: tuple[int, ...], matrices: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    """`unpack` by numpy for matrices that lie below each other, each uint8 [rows, bytes of a row]: copied
    once, into memory that XLA can use without another copy.

    shape   of all weights together: (rows, K), or (matrices, rows of each, K)
    Returns {field: [*shape[:-1], K / WEIGHTS, *field shape]}, uninitialized beyond the rows of matrices.
    """
    *lead, k = shape
    layout = _layout(get(name).BLOCK)
    # One item per field of a block: numpy would copy byte by byte otherwise.
    items = np.dtype(
        {
            "names": list(layout),
            "formats": [f"V{dtype.itemsize}" for dtype, _ in layout.values()],
            "offsets": [offset for _, offset in layout.values()],
            "itemsize": get(name).BLOCK.itemsize,
        }
    )
    rows = math.prod(lead), k // get(name).WEIGHTS
    room = {field: _aligned(rows, items[field]) for field in layout}
    first = 0
    for raw in matrices:
        blocks = raw.view(items)
        for field in layout:
            room[field][first : first + len(blocks)] = blocks[field]
        first += len(blocks)
    return {
        field: room[field].view(dtype.base).reshape(*lead, -1, *dtype.shape)
        for field, (dtype, _) in layout.items()
    }


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialized array that XLA can use without a copy: it must begin at a multiple of 64 bytes."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    first = -memory.ctypes.data % 64
    return memory[first : first + size].view(dtype).reshape(shape)


def pack(name: str, fields: dict[str, jax.Array]) -> jax.Array:
    """The inverse of `unpack`: fields -> file bytes, uint8 [..., K / WEIGHTS * block bytes]."""
    block = get(name).BLOCK
    parts = []
    for field, (dtype, _) in _layout(block).items():
        value = fields[field]
        lead = value.shape[: value.ndim - len(dtype.shape)]
        parts.append(jax.lax.bitcast_convert_type(value, jnp.uint8).reshape(*lead, dtype.itemsize))
    raw = jnp.concatenate(parts, axis=-1)
    return raw.reshape(*raw.shape[:-2], -1)


def random_fields(
    name: str, key: jax.Array, lead: tuple[int, ...], mean: float, std: float
) -> dict[str, jax.Array]:
    """Random blocks [*lead] as fields, their weights with about this mean and standard deviation.

    Codes are random and valid. Scales vary from block to block (0.5 to 1.5 times their mean), so that tests
    notice a kernel that reads the scale of another block. Formats without codes (f32, f16, bf16) draw normal
    weights. `mean` applies to these alone; the weights of other formats have mean 0.
    """
    module = get(name)
    scale = std * jax.random.uniform(jax.random.fold_in(key, 0), lead, minval=0.5, maxval=1.5)
    fields = {}
    for i, (field, (dtype, _)) in enumerate(_layout(module.BLOCK).items(), 1):
        field_key = jax.random.fold_in(key, i)
        if module.WEIGHTS == 1:
            fields[field] = (mean + std * jax.random.normal(field_key, lead)).astype(dtype.base)
        elif field in module.RANDOM:
            value = module.RANDOM[field]
            if isinstance(value, tuple):
                value = jax.random.choice(field_key, jnp.float32(value), lead)
            if callable(value):
                fields[field] = value(field_key, (*lead, *dtype.shape), scale)
            else:
                fields[field] = (value * scale).astype(dtype.base)
        else:
            unsigned = np.dtype(f"uint{8 * dtype.base.itemsize}")
            codes = jax.random.bits(field_key, (*lead, *dtype.shape), unsigned)
            fields[field] = jax.lax.bitcast_convert_type(codes, dtype.base)
    return fields


def _layout(block: np.dtype) -> dict[str, tuple[np.dtype, int]]:
    """In the file's order."""
    return {field: (entry[0], entry[1]) for field, entry in (block.fields or {}).items()}
