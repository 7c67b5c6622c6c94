"""What the scheduler takes and what it says: requests, plans, and the limits of an engine. No tensors."""

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(eq=False)
class Request:
    """One answer on its way.

    prompt         token ids, or vectors: whatever has a length
    reusable       most tokens that need not be read where their pages are known; None: all but the last
    vectors        the prompt is vectors
    priority       higher ones first; of equal ones the first that came
    said           tokens drawn and known
    device, row    where it runs; None: it waits
    table          its pages
    read           tokens of prompt and `said` whose reading is dispatched or was spared
    to_read        those to be read before it writes on
    started        something is read since it got its row
    copy           (source, destination) of a page to copy before anything is read
    checkpoint     where the state lies that it begins with, behind tokens that it shares; None: it has none
    cuts           where a chunk ends, so that a state can be kept there
    flights        (least, most) tokens of each dispatched draw that is not known yet
    """

    prompt: Any
    max_new_tokens: int
    reusable: int | None = None
    vectors: bool = False
    priority: int = 0
    said: list[int] = dataclasses.field(default_factory=list)
    number: int = 0
    device: int | None = None
    row: int | None = None
    table: list[int] = dataclasses.field(default_factory=list)
    read: int = 0
    to_read: int = 0
    started: bool = False
    copy: tuple[int, int] | None = None
    checkpoint: int | None = None
    cuts: tuple[int, ...] = ()
    flights: deque[tuple[int, int]] = dataclasses.field(default_factory=deque)
    ended: bool = False

    @property
    def order(self) -> tuple[int, int]:
        return -self.priority, self.number

    @property
    def stored(self) -> int:
        """Most tokens that its pages hold when all that is dispatched is done, once all is read."""
        tokens = len(self.prompt) + len(self.said) - 1
        for _, most in self.flights:  # `sum` of a generator takes three times as long; see `_writes`
            tokens += most
        return tokens

    @property
    def left(self) -> int:
        """Most tokens that it may still draw then."""
        left = self.max_new_tokens - len(self.said)
        for least, _ in self.flights:
            left -= least
        return left


@dataclasses.dataclass
class Read:
    """Tokens [first, first + count) of a request, and with the last ones a draw. Row and pages are those that
    it has now; behind the plan they may be another's. A recurrent state is taken from the checkpoint `begins`
    and kept in `saves`, where these are not None."""

    request: Request
    row: int
    table: list[int]
    first: int
    count: int
    draws: bool
    starts: bool
    copy: tuple[int, int] | None
    begins: int | None = None
    saves: int | None = None


@dataclasses.dataclass
class Plan:
    """Work for the devices: prefill of `reads`, each device's own, in an array of (rows, tokens) a device;
    then decode of the rows of `writes`, `rows` a device, for `steps` steps."""

    reads: list[list[Read]]
    shape: tuple[int, int]
    writes: list[list[Request]]
    rows: int
    steps: int


def row_sizes(most: int) -> list[int]:
    """Rows that decode is compiled for: powers of two, so that they are few, 24, and `most`. To 24 rows a
    step of Q1_0 is one launch: 1.76 ms of the 8B where 32 rows take 2.13 (Q4_K_M: 3.31 and 3.40)."""
    return [n for n in sorted({*(2**i for i in range(31)), 24}) if n < most] + [most]


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the executables can do, of each device.

    max_rows, pages, page_size   of the cache
    row_sizes    rows that decode is compiled for
    shapes       (rows, tokens) that prefill is compiled for
    prefill_cost what a prefill takes besides its tokens, as so many tokens more
    steps        most decode steps of a plan
    width        most tokens that a row draws in a step (speculation)
    checkpoints  of recurrent states; None: the model keeps nothing but pages
    reserve      pages for the whole answer are taken beforehand, so that nothing is pre-empted
    """

    max_rows: int
    pages: int
    page_size: int
    row_sizes: Sequence[int]
    shapes: Sequence[tuple[int, int]]
    prefill_cost: int
    steps: int
    width: int = 1
    checkpoints: int | None = None
    reserve: bool = False

    @staticmethod
    def of_engine(
        max_rows: int,
        pages: int,
        *,
        page_size: int = 64,
        prefill_tokens: int = 2048,
        prefill_cost: int = 100,
        steps: int = 64,
        width: int = 1,
        checkpoints: int | None = None,
        reproducible: bool = False,
    ) -> "Limits":
        """Those of an Engine, by default on a GPU (runner.py has a CPU's). reproducible: one size of each,
        for prefill a quarter of the longest, as most prompts are short."""
        # One long chunk of one row, or short chunks of several: more shapes gain little (LOG.md, "Engine").
        short = max(32, prefill_tokens // 16)
        long = [n for n in (short, 4 * short, 16 * short) if n < prefill_tokens]
        several = sorted({min(n, max_rows) for n in (4, 16)} - {1})
        shapes = [(1, n) for n in (*long, prefill_tokens)]
        shapes += [(n, short) for n in several if n * short <= prefill_tokens]
        return Limits(
            max_rows=max_rows,
            pages=pages,
            page_size=page_size,
            row_sizes=[max_rows] if reproducible else row_sizes(max_rows),
            shapes=[(1, min(4 * short, prefill_tokens))] if reproducible else shapes,
            prefill_cost=prefill_cost,
            steps=steps,
            width=width,
            checkpoints=checkpoints,
            reserve=reproducible,
        )
