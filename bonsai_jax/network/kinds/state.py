"""What mixers store of sequences, and what the engine, files and speculation do with it, whatever it is."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
from jaxtyping import Array, Int


@dataclasses.dataclass(frozen=True)
class Room:
    """How much a state has room for.

    rows     sequences; with pages that an engine deals out, also its checkpoints
    context  most tokens of each
    pages    of all sequences together, where KVCache.block_table deals them out; None: as many as `context`
             tokens of each sequence take
    chunk    most tokens of a sequence that are read at once; None: any number
    """

    rows: int
    context: int
    pages: int | None = None
    chunk: int | None = None


class State:
    """What the layers of a group store of each sequence; a row is one sequence. A base of flax dataclasses.

    These methods are right for arrays [layers, rows, ...] that are made of all tokens together (recurrent
    states): such a kind declares its arrays, `impl` and `prefill_impl` (the kernels chosen for one token of
    each sequence and for more), and no method. A kind that stores anything else overrides them.
    """

    recurrent: ClassVar[bool] = True  # made of all tokens together: none can be taken back

    def copies(self, rows: Int[Array, "R"], pages: Int[Array, "R pages_per_row"]) -> Self:
        """The state of these rows, repeated as often as they are named, each with pages of its own, in order.

        pages  of the block table, that these rows have now
        """
        return jax.tree.map(lambda array: array[:, rows], self)

    def taken(self, rows: Int[Array, "R"], begins: Int[Array, "R"] | None = None) -> Self:
        """The state of these rows, which begin as the rows `begins` are (None: as they are themselves). Pages
        stay where they are. A row's number may be beyond the last: padding."""
        begins = rows if begins is None else begins
        return jax.tree.map(
            lambda array: array.at[:, begins].get(mode="clip", wrap_negative_indices=False), self
        )

    def put(self, new: Self, rows: Int[Array, "R"], saves: Int[Array, "R"] | None = None) -> Self:
        """This state with `new`, which `taken` has made of it, in these rows, and in the rows `saves` too.
        Nothing is put in rows beyond the last."""
        state = self
        for places in (rows,) if saves is None else (rows, saves):
            state = jax.tree.map(
                lambda array, part, at=places: array.at[:, at].set(
                    part, mode="drop", wrap_negative_indices=False
                ),
                state,
                new,
            )
        return state

    def with_row_copies(self, source: Int[Array, "R"], to: Int[Array, "R"]) -> Self:
        """This state with rows `to` as copies of rows `source`; those beyond the last are none. Without the
        barrier XLA could read and write in one loop, for which it copies the whole array."""
        return self.put(jax.lax.optimization_barrier(self.taken(source)), to)

    def page_content(self, pages: Int[Array, "R"]) -> Any:
        """What these pages of the block table hold, arrays [layers, R, ...]; None: no such pages."""
        return None

    def with_page_content(self, content: Any, pages: Int[Array, "R"]) -> Self:
        """This state with what `page_content` returned in these pages; those beyond the last are none."""
        return self

    def row_content(self, rows: Int[Array, "R"]) -> Any:
        """What is stored of these rows beside pages of the block table, arrays [layers, R, ...]; None:
        nothing."""
        return self.taken(rows)

    def with_row_content(self, content: Any, rows: Int[Array, "R"]) -> Self:
        """This state with what `row_content` returned in these rows; those beyond the last are none."""
        return self.put(content, rows)

    def with_page_copies(self, source: Int[Array, "R"], to: Int[Array, "R"]) -> Self:
        """This state with pages `to` of the block table as copies of its pages `source`; those beyond the
        last are none."""
        return self

    def with_page_offset(self, device: Int[Array, ""]) -> Self:
        """This state, where it has page numbers, with them counted from the pages of another device, so many
        devices before."""
        return self

    def sizes(self) -> dict[str, Any]:
        """The sizes that a model gives it, by name, for the check of a saved state."""
        shapes = [array.shape for array in jax.tree.leaves(self)]
        return {"recurrent states": [(layers, *sizes) for layers, _, *sizes in shapes]}


def map_states(change: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """The tree with change(state, *that state in the others) in place of each State."""
    return jax.tree.map(change, tree, *others, is_leaf=lambda node: isinstance(node, State))
