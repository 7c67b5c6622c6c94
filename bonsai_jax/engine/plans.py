"""The scheduler's inputs and outputs: requests, plans, and the limits of an engine. No tensors."""

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple


@dataclasses.dataclass(eq=False)
class Request:
    """One answer being generated.

    prompt         token ids, or vectors
    reusable       most tokens that it may share with other requests instead of reading them; None: all but
                   the last
    vectors        the prompt is vectors
    priority       a higher one runs first; equal ones run in order of arrival
    owner          it may share with requests of the same owner alone
    said           tokens that have been drawn and are known to the host
    number         in order of arrival
    device, row    where it runs; None: it waits. A row is also None when its last draws are dispatched
    table          its pages
    read           tokens of prompt and `said` that it shares, or whose chunks are dispatched
    to_read        tokens to be read before it decodes
    started        a chunk has been dispatched since it got its row
    copy           (source, destination) of a page to copy before its first chunk
    checkpoint     the recurrent state that it begins with, after the tokens that it shares; None: it has none
    places         where later prompts will part ways with this one (checkpoints.py); None: nobody knows
    cuts           positions where a chunk ends, so that a recurrent state can be saved there
    saved_at       the last position in its prompt with a saved state
    last_state     the checkpoint with the state after all its draws, which are not all known yet; None: it is
                   not saved
    flights        (least, most) tokens of each dispatched draw that is not known yet
    ended          it is complete or cancelled
    constrained    each of its draws needs a mask
    chained        it uses a sampler of decoding/chain.py
    ready          the host has the mask for its next draw
    complete       its constraint allows no more draws; it ends when that is delivered
    undrawn        its newest token is read, and the next is not drawn: its steps are split (split_rows.py)
    guessed        its newest token is read with guesses (split_guesses.py)
    verifies       likewise for the token before, of the plan that draws
    unread         forced tokens at its end, which it does not read
    outdated       its pages hold keys and values of earlier weights, so no other request may share them
    """

    prompt: Any
    max_new_tokens: int
    reusable: int | None = None
    vectors: bool = False
    priority: int = 0
    owner: str = ""
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
    places: tuple[int, ...] | None = None
    cuts: tuple[int, ...] = ()
    saved_at: int = 0
    last_state: int | None = None
    flights: deque[tuple[int, int]] = dataclasses.field(default_factory=deque)
    ended: bool = False
    constrained: bool = False
    chained: bool = False
    ready: bool = True
    complete: bool = False
    undrawn: bool = False
    guessed: bool = False
    verifies: bool = False
    unread: int = 0
    outdated: bool = False

    @property
    def order(self) -> tuple[int, int]:
        return -self.priority, self.number

    @property
    def stored(self) -> int:
        """Most tokens that its pages hold after all dispatched work, once its prompt is read."""
        tokens = len(self.prompt) + len(self.said) - 1 + self.undrawn - self.unread
        for _, most in self.flights:  # `sum` of a generator takes three times as long; see `_writes`
            tokens += most
        return tokens

    def hold(self) -> None:
        """The draw that waits for its mask takes no token, so the newest one is not drawn from yet."""
        if self.flights and self.flights[-1] != (0, 0):
            self.flights[-1] = 0, 0
            self.undrawn = self.row is not None

    @property
    def late(self) -> bool:
        """Its dispatched draw waits for a mask that is not made."""
        return self.constrained and not (self.ready or self.ended) and any(most for _, most in self.flights)

    def cached(self, count: int | None) -> list[int]:
        """The tokens in its pages, once its prompt is read: the first `count`; None: all but the newest,
        which is read when the next one is drawn."""
        return [*self.prompt, *self.said][: len(self.prompt) + len(self.said) - 1 if count is None else count]

    @property
    def left(self) -> int:
        """Most tokens that it may still draw after all dispatched work."""
        left = self.max_new_tokens - len(self.said)
        for least, _ in self.flights:
            left -= least
        return left


class Save(NamedTuple):
    """A copy of a row's state in a checkpoint. It must be dispatched before the next plan."""

    device: int
    row: int
    checkpoint: int


@dataclasses.dataclass
class Read:
    """One chunk of a request: tokens [first, first + count).

    row, table     of the request now; after this plan they may be another's
    draws          the prompt ends with this chunk, and its last token draws the next
    starts         the first chunk since the request got its row
    copy           (source, destination) of a page to copy before
    begins         the checkpoint with the recurrent state to begin with; None: the row's own state
    saves          the checkpoint to save the state in after the chunk; None: none
    """

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
    """Work for the devices: a prefill, then draws of split steps, then decode steps, then guesses.

    reads    for each device the chunks of the prefill
    shape    (rows, tokens) of the prefill's array on each device
    writes   for each device the requests that decode
    rows     of the decode program on each device
    steps    of decode
    draws    for each device the requests that draw after the prefill, before the decode steps, with their
             rows, which after this plan may be another's
    split    the prefill draws nothing, and in place of decode steps `writes` read their newest token
    chained  a running request uses the chain of samplers, so programs are those of a pool that has one
    guesses  for each device the requests that take a whole step, with speculation, while others' are split
    guess_rows   of their decode program
    version  of the weights that it runs with (Engine.version)
    """

    reads: list[list[Read]]
    shape: tuple[int, int]
    writes: list[list[Request]]
    rows: int
    steps: int
    draws: list[list[tuple[Request, int]]] = dataclasses.field(default_factory=list)
    split: bool = False
    chained: bool = False
    guesses: list[list[Request]] = dataclasses.field(default_factory=list)
    guess_rows: int = 0
    version: int = 0


def row_sizes(most: int, between: Sequence[int] = (24,)) -> list[int]:
    """Rows that decode is compiled for: powers of two, so that there are few, some between them, and `most`.
    Up to 24 rows a step of Q1_0 is one launch on a GPU: with the 8B 24 rows take 1.76 ms and 32 rows 2.13
    (Q4_K_M: 3.31 and 3.40)."""
    return [n for n in sorted({*(2**i for i in range(31)), *between}) if n < most] + [most]


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the programs of each device can do. A row is one sequence being generated.

    max_batch_size   rows of the cache
    pages, page_size   of the cache
    row_sizes    rows that decode is compiled for
    shapes       (rows, tokens) that prefill is compiled for
    prefill_cost the fixed cost of a prefill, in tokens
    steps        most decode steps of a plan
    width        most tokens that a row draws in a step (speculation)
    guess_width  likewise a row with a constraint; 1: nothing is guessed for it
    mailbox      draws wait on the device for their masks (mailbox.py), so plans need not
    checkpoints  for recurrent states; None: the model has only pages
    reserve      a request takes the pages for its whole answer when it starts, so that none is pre-empted
    """

    max_batch_size: int
    pages: int
    page_size: int
    row_sizes: Sequence[int]
    shapes: Sequence[tuple[int, int]]
    prefill_cost: int
    steps: int
    width: int = 1
    guess_width: int = 1
    mailbox: bool = False
    checkpoints: int | None = None
    reserve: bool = False

    @staticmethod
    def for_engine(
        max_batch_size: int,
        pages: int,
        *,
        page_size: int = 64,
        prefill_tokens: int = 2048,
        prefill_rows: Sequence[int] = (4, 16),
        prefill_cost: int = 100,  # 8B Q4_K_M on an H200 reads 512 tokens in 15.4 ms and 2,048 in 53.8
        between: Sequence[int] = (24,),
        steps: int = 64,
        width: int = 1,
        guess_width: int = 1,
        mailbox: bool = False,
        checkpoints: int | None = None,
        reproducible: bool = False,
    ) -> "Limits":
        """The limits of an Engine, by default on a GPU (runner.py has those of a CPU).

        prefill_rows   prompts of a prefill of short ones
        between        of `row_sizes`
        reproducible   one decode size and one prefill shape, whose length is a quarter of the longest because
                       most prompts are short
        """
        # One long chunk of one row, or short chunks of several: more shapes gain little (LOG.md, "Engine"),
        # and each is a program to compile.
        short = max(32, prefill_tokens // 16)
        long = [n for n in (short, 4 * short, 16 * short) if n < prefill_tokens]
        many = sorted({min(rows, max_batch_size) for rows in prefill_rows} - {1})
        shapes = [(1, n) for n in (*long, prefill_tokens)]
        shapes += [(rows, short) for rows in many if rows * short <= prefill_tokens]
        return Limits(
            max_batch_size=max_batch_size,
            pages=pages,
            page_size=page_size,
            row_sizes=[max_batch_size] if reproducible else row_sizes(max_batch_size, between),
            shapes=[(1, min(4 * short, prefill_tokens))] if reproducible else shapes,
            prefill_cost=prefill_cost,
            steps=steps,
            width=width,
            guess_width=guess_width,
            mailbox=mailbox,
            checkpoints=checkpoints,
            reserve=reproducible,
        )
