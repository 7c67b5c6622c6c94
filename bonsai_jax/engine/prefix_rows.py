"""Pages and states of the pool as words, to be stored in files and put back: functions of arrays.

    page    its keys and values in all layers that block tables deal pages out to
    state   what mixers store of a row beside such pages: recurrent states, rings

Each is a row of int32, in the order of the pool's arrays. A dispatch moves a few, so that it takes little
memory.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from bonsai_jax.decoding import jitted
from bonsai_jax.decoding.state import State
from bonsai_jax.engine.rows import Result, states_of, with_states
from bonsai_jax.network.kinds.state import map_states
from bonsai_jax.network.params import Params

PAGES_AT_ONCE = 8
WORD = jnp.dtype(jnp.int32).itemsize


def read_pages(params: Params, pool: State, pages: Int[Array, "R"]) -> Result:
    """The words of these pages, as Result.drawn [R, words]."""
    return Result(pool, _words(_pages(pool, pages), len(pages)))


def write_pages(params: Params, pool: State, pages: Int[Array, "R"], words: Int[Array, "R W"]) -> Result:
    """Fill these pages with words; those beyond the last are none."""
    content = _content(_pages(pool, pages), words)
    states = states_of(pool)
    return Result(with_states(pool, map_states(lambda s, c: s.with_page_content(c, pages), states, content)))


def read_state(params: Params, pool: State, rows: Int[Array, "R"]) -> Result:
    """The words of these rows' states, as Result.drawn [R, words]."""
    return Result(pool, _words(_rows(pool, rows), len(rows)))


def write_state(params: Params, pool: State, rows: Int[Array, "R"], words: Int[Array, "R W"]) -> Result:
    """Fill these rows' states with words; those beyond the last are none."""
    content = _content(_rows(pool, rows), words)
    states = states_of(pool)
    return Result(with_states(pool, map_states(lambda s, c: s.with_row_content(c, rows), states, content)))


def layout(pool: State) -> tuple[str, int, int]:
    """What the words are, as text, and how many those of a page and of a state are."""
    one = jnp.zeros(1, jnp.int32)
    each = [jax.eval_shape(function, pool, one) for function in (_pages, _rows)]
    texts = [[(str(path), x.shape, x.dtype.name) for path, x in jax.tree.leaves_with_path(c)] for c in each]
    counts = [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(c)) // WORD for c in each]
    return repr(texts), counts[0], counts[1]


def _pages(pool: State, pages: Int[Array, "R"]) -> Any:
    return map_states(lambda state: state.page_content(pages), states_of(pool))


def _rows(pool: State, rows: Int[Array, "R"]) -> Any:
    return map_states(lambda state: state.row_content(rows), states_of(pool))


def _words(content: Any, rows: int) -> Int[Array, "R W"]:
    """Arrays [layers, R, ...] as words."""
    parts = [jnp.zeros((rows, 0), jnp.int32)]
    for array in jax.tree.leaves(content):
        each = WORD // array.dtype.itemsize
        flat = jnp.moveaxis(array, 1, 0).reshape((rows, -1, each) if each > 1 else (rows, -1))
        parts.append(jax.lax.bitcast_convert_type(flat, jnp.int32))
    return jnp.concatenate(parts, axis=1)


def _content(like: Any, words: Int[Array, "R W"]) -> Any:
    """Words as arrays of the shapes and types of `like`."""
    leaves, structure = jax.tree.flatten(like)
    parts, first = [], 0
    for array in leaves:
        layers, rows, *rest = array.shape
        count = layers * math.prod(rest) * array.dtype.itemsize // WORD
        part = jax.lax.bitcast_convert_type(words[:, first : first + count], array.dtype)
        parts.append(jnp.moveaxis(part.reshape(rows, layers, *rest), 0, 1))
        first += count
    return jax.tree.unflatten(structure, parts)


read_pages_rows = jitted.donating(read_pages, "pool")
write_pages_rows = jitted.donating(write_pages, "pool")
read_state_rows = jitted.donating(read_state, "pool")
write_state_rows = jitted.donating(write_state, "pool")
