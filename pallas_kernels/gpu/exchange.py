"""Values on their way from block to block of one launch, through words of global memory.

There is no barrier: each word has a tag of 2 bits that says which contents of its place it belongs to
(memory.tagged). A reader loads its words again until all have the tag that it waits for, so a value is
on its way to its reader as soon as it is written. With a barrier all would wait for the slowest write, count,
and only then read. All blocks must run at once.

Two vectors of two layers, X and H, in a launch of three blocks, each of which makes a part of both:

    block 0   read X | write H | read H ............ | write X' | read X' | write H'
    block 1   read X | write H | read H ............ | write X' | ...
    block 2   ............ read X | write H | read H | write X' | ...

No word is overwritten while somebody may still read it. A block writes its part of X' only when it has read
all of H. Each part of H was written by a block that had read all of X before, so nobody reads X any more. The
same holds for H', with X' in the place of H. This is why every block that reads a vector must also make
something that all later writers of that vector wait for, and why a phase that reads only a part of a vector
(of its columns, or of its rows) must be followed by one that reads the sums of all parts.

So whoever waits for a word finds in its place what it waits for or what was there before, never what comes
after. Three tags tell the two from each other and from the zeros that a workspace begins with.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gpu import memory


def tag(number):
    """Of the number-th contents of a place: 1, 2 or 3."""
    return number % 3 + 1


def first_contents(x: jax.Array, number: int) -> jax.Array:
    """float32 as `Exchange.send` would have written it, as the number-th contents of its place, before the
    launch began: words of a workspace."""
    words = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.minimum(words, 0x7FFFFFFC) + 2 & ~3 | tag(number)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A vector that blocks pass on: words of the workspace (a ref of i32) from `begin`, a multiple of 4, on,
    with a tag. Numbers are float32 with 22 bits of mantissa."""

    workspace: Any
    begin: int
    tag: Any

    def send(self, at, values: list, row_begin: Any = 0):
        """1, 2 or 4 neighbouring numbers from element `at` of the row that begins at `row_begin` on."""
        words = [memory.tagged(value, self.tag) for value in values]
        memory.store_for_others(words, self.workspace, row_begin + self.begin + at)

    def receive(self, places) -> list:
        """Wait for the numbers at ((element, constant), count) places. All are loaded again and again: it is
        for few blocks that wait (memory.load_tagged_words)."""
        places = [((at, constant + self.begin), count) for (at, constant), count in places]
        return memory.load_tagged(self.workspace, places, self.tag, at_once=True)

    def receive_each(self, starts: list) -> list:
        """Wait for the number at each element, an index and a constant."""
        places = [((at + (constant + self.begin), 0), 1) for at, constant in starts]
        return memory.load_tagged(self.workspace, places, self.tag)

    def receive_eights(self, starts: list) -> list[list]:
        """Wait for the 8 neighbouring numbers from each element, an index and a constant, on."""
        places = [((at + (constant + self.begin), more), 4) for at, constant in starts for more in (0, 4)]
        numbers = memory.load_tagged(self.workspace, places, self.tag)
        return [numbers[k : k + 8] for k in range(0, len(numbers), 8)]

    def send_four(self, at, words: list):
        """Four words as one, from element `at` on; the last is a number that `memory.tagged` has made."""
        memory.store_four_for_others(words, self.workspace, at + self.begin)

    def receive_fours(self, starts: list) -> list[list]:
        """Wait for what `send_four` has sent to each of these elements."""
        return memory.load_fours(self.workspace, [at + self.begin for at in starts], self.tag)
