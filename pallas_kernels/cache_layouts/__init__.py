"""Layouts of the key-value cache, one file each: everything that knows how a key or a value is stored.

Pages are an array [layers, pages, page_size, KV heads, head_dim], or a dict of arrays that begin with these
axes (numbers of 8 bits, and a scale for each token and head): one for keys, one for values. A layout module
defines

    DTYPE       of the array, or {field: dtype}: pages are recognized by it
    OPERAND     jnp.bfloat16 or jnp.float16, which tensor cores multiply
    PREFILL     the layout that kernels of prefill multiply as it lies: this one; "float16", in which rows get
                what they see of it beforehand (attention/prefill_pages.py); None: they cannot
    rotate      queries or keys, float32 [..., head_dim] after rope -> the same times an orthogonal matrix
                that is its own inverse: what scores are made of, and what is stored of keys
    quantize    float32 [..., head_dim] -> what is stored of it; finite numbers stay finite
    dequantize  its inverse, float32 [..., head_dim]; zeros are stored as finite numbers

and what a lane of decode attention does, called while it is traced (pallas_kernels/gpu). `stored` is what is
stored of 8 neighbouring numbers of a head, as a list of MLIR values; a pair is a word (i32) of two numbers of
OPERAND, the first in its low half:

    WEIGHT_EXPONENT  softmax weights are multiplied as numbers of at most 2^this
    in_range    query, lanes -> (query times a power of two, what scores are to be multiplied by for it, or
                None); a query is a lane's numbers of it, lists of 8 float32; so many lanes have it all
    split       two float32 -> [high, low]: pairs whose sum they are
    load        refs of pages, indices of the first number -> stored
    load_scale  refs of pages, indices of a head -> what its stored numbers are to be multiplied by, a vector
                of one (`lanes.reals` of it when it is wanted: a lane that widens it waits for memory); None:
                they are the numbers themselves
    store, store_scale  the inverse: (stored, or the scale), refs of pages, indices
    rotate_lanes  head, distances -> head, as `rotate` has it. A head is a lane's numbers of it, lists of 8
                float32; the lanes at these distances (xor) have the rest
    narrow      head, distances -> (a list of stored, scale), as `quantize` has it
    pairs       stored -> its neighbours, without their scale: 4 times the pairs whose sum they are
    pairs_across  two of stored -> what stands in the same place of both: 8 times such pairs
    pairs_transposed  a word of which each half has a number of 2 bytes, or two of 1, of another key
                (memory.load_transposed) -> for each number the pair of both keys. Not of numbers of 4 bytes

What one layout has as another has it, it imports. `get(name)` imports by file name, so a new file is a new
layout.
"""

import functools
import importlib
import math
import pkgutil
from types import ModuleType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.zeros import zeros

Pages = Float[Array, "L pages page_size Hkv D"] | dict[str, Array]


def names() -> list[str]:
    """The names of all layouts."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__))


@functools.cache
def get(name: str) -> ModuleType:
    """The module of the layout called `name`. Raises NotImplementedError, with a list of all layouts."""
    if name not in names():
        raise NotImplementedError(f"cache layout {name!r} is not supported; supported: {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name}")


def recognize(pages: Pages) -> ModuleType:
    """The module of the layout that these pages have. Raises NotImplementedError for what none has."""
    dtypes = jax.tree.map(lambda array: array.dtype, pages)
    for name in names():
        if dtypes == get(name).DTYPE:
            return get(name)
    raise NotImplementedError(
        f"no layout of the cache has pages of {dtypes}; supported: {', '.join(names())}"
    )


def name_of(pages: Pages) -> str:
    """The name of the layout that these pages have; raises as `recognize`."""
    return recognize(pages).__name__.rpartition(".")[2]


def shape(pages: Pages) -> tuple[int, ...]:
    """(layers, pages, page_size, KV heads, head_dim)."""
    return jax.eval_shape(recognize(pages).dequantize, pages).shape


def empty(name: str, shape: tuple[int, ...]) -> Pages:
    """Pages of zeros, for keys or values of this shape (layers, pages, page_size, KV heads, head_dim)."""
    return jax.tree.map(lambda a: zeros(a.shape, a.dtype), _stored(name, shape))


def bytes_per_head(name: str, head_dim: int) -> int:
    """Bytes of one token's key, or value, of one head."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(_stored(name, (head_dim,))))


def read(pages: Pages, at: tuple) -> Float[Array, "... D"]:
    """What is stored `at` these indices, as float32."""
    return recognize(pages).dequantize(jax.tree.map(lambda array: array[at], pages))


def write(pages: Pages, new: Float[Array, "... D"], at: tuple) -> Pages:
    """Pages with `new` stored `at` these indices; those out of bounds are dropped."""
    stored = recognize(pages).quantize(new)
    return jax.tree.map(lambda array, values: array.at[at].set(values, mode="drop"), pages, stored)


@functools.cache  # each would be a trace
def _stored(name: str, shape: tuple[int, ...]):
    """Shapes and dtypes of what is stored."""
    return jax.eval_shape(get(name).quantize, jax.ShapeDtypeStruct(shape, jnp.float32))
