r"""How likely continuations of prompts are.

    prompt ---- continuation 1      a prompt is read together with the longest of its continuations;
        \------ continuation 2      the others are read in a second batch, behind the prompt's pages

A recurrent state cannot go back to the end of a prompt, so models that have one read the prompt alone.
The output matrix is applied to the tokens before those that are scored, and to no others.
"""

import contextlib
import dataclasses
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bonsai_jax.config import ModelConfig
from bonsai_jax.decoding import jitted
from bonsai_jax.engine.prompts import check_room, encode
from bonsai_jax.model import Model
from bonsai_jax.network import decoder, parallel
from bonsai_jax.network.parallel import over_mesh
from bonsai_jax.network.params import Params
from bonsai_jax.progress import Progress, shown
from bonsai_jax.research.batches import NO_LIMIT, batches
from bonsai_jax.research.reading import Reader, batch_tokens, is_recurrent, whole_ids, widths
from bonsai_jax.weights import placement
from pallas_kernels.device import platform

BRANCH_ROOM = 4  # times the tokens of a batch: the cache's room for continuations of its rows

Ids = Sequence[int]


@dataclasses.dataclass(frozen=True)
class Score:
    """How likely one continuation is.

    logprob         natural logarithm of its probability, the sum of token_logprobs
    is_greedy       whether greedy decoding would write these tokens behind the prompt
    tokens          its token ids
    token_logprobs  float32 [tokens]: log p(token | prompt, the tokens before it)
    """

    logprob: float
    is_greedy: bool
    tokens: list[int]
    token_logprobs: Float[np.ndarray, "tokens"]


def score(
    model: Model,
    prompts: Sequence[str | Ids],
    continuations: Sequence[Sequence[str | Ids]],
    *,
    progress: Progress = False,
) -> list[list[Score]]:
    """Score continuations of prompts: log p(c | prompt) = sum_t log p(c_t | prompt, c_1 ... c_(t-1)).

    prompts        texts or token ids
    continuations  for each prompt a list of texts or token ids. The tokens of a text are those that follow
                   the prompt's when both are encoded together; its own, where the prompt's would change
    progress       True: a bar; or called with prompts read so far and in all
    Returns for each prompt a Score for each of its continuations. A prompt is read once for all of its
    continuations, as are equal prompts (over a mesh with an axis "data", once for each continuation).
    Raises ValueError for an empty prompt or continuation, or where both exceed the context, and TypeError for
    what are no texts or ids.

    No scaling by length: divide `logprob` by len(tokens), or by the characters of the text, as you need it.
    """
    if not isinstance(model, Model):
        raise TypeError(f"model is a {type(model).__name__}; give what bj.load returns")
    items = _items(model, prompts, continuations)
    alone = placement.size(model.mesh, placement.DATA) > 1  # rows of other devices' pages cannot be copied
    rows = list(_rows(items, alone, rewinds=not is_recurrent(model.config)))
    flat = [Results(own) for _, each in items for own in each]
    pending, done = deque[list[_Pending]](), 0
    with shown(progress, "scoring") as update, contextlib.closing(Reader(model)) as reader:
        update(done, len(rows))
        plan = _plan(reader, rows)
        reader.prepare(
            [batch.shape for batch in plan], [own.shape for batch in plan for own in batch.branches]
        )
        for batch in plan:
            pending.append(_read_batch(reader, batch))
            if len(pending) > 1:  # the device has work while results are fetched
                _store(pending.popleft(), flat)
            done += len(batch.rows)
            update(done, len(rows))
        for some in pending:
            _store(some, flat)
    scores = iter(flat)
    return [[next(scores).score() for _ in each] for _, each in items]


class Target(NamedTuple):
    """A token to be scored: at an offset of a continuation, whose number counts through all prompts. The
    hidden state before it is at `position` of its row."""

    position: int
    continuation: int
    offset: int
    token: int


@dataclasses.dataclass
class Row:
    """A sequence that is read whole.

    tokens   a prompt, and but for its last token the continuation that is read together with it
    prompt   tokens of the prompt
    targets  tokens to be scored from this row's hidden states
    branches  (number, token ids) of continuations of two tokens or more that are read behind the prompt
    """

    tokens: list[int]
    prompt: int
    targets: list[Target]
    branches: list[tuple[int, list[int]]]


@dataclasses.dataclass
class Results:
    """What is known of one continuation."""

    tokens: list[int]
    logprobs: Float[np.ndarray, "tokens"] = dataclasses.field(init=False)
    greedy: Bool[np.ndarray, "tokens"] = dataclasses.field(init=False)

    def __post_init__(self):
        self.logprobs = np.zeros(len(self.tokens), np.float32)
        self.greedy = np.zeros(len(self.tokens), bool)

    def score(self) -> Score:
        total = float(self.logprobs.sum(dtype=np.float64))
        return Score(total, bool(self.greedy.all()), self.tokens, self.logprobs)


class _Branches(NamedTuple):
    """A batch of continuations: of each (row of the batch before, number, token ids); rows and width."""

    rows: list[tuple[int, int, list[int]]]
    shape: tuple[int, int]


class _Batch(NamedTuple):
    """Rows that are read together, their number and width with padding, and what is read behind them."""

    rows: list[Row]
    shape: tuple[int, int]
    branches: list[_Branches]


class _Pending(NamedTuple):
    """Targets whose results are on their way from the device, with their places in these."""

    targets: list[Target]
    places: list[int]
    logprobs: jax.Array
    greedy: jax.Array


def _store(pending: list[_Pending], results: list[Results]) -> None:
    for targets, places, *on_device in pending:
        logprobs, greedy = map(parallel.fetch, on_device)
        for target, place in zip(targets, places, strict=True):
            own = results[target.continuation]
            own.logprobs[target.offset], own.greedy[target.offset] = logprobs[place], greedy[place]


def _items(model: Model, prompts: Any, continuations: Any) -> list[tuple[list[int], list[list[int]]]]:
    """Token ids of each prompt and of its continuations."""
    ids = whole_ids(model, prompts, "prompts")
    if isinstance(continuations, str | Mapping) or not isinstance(continuations, Iterable):
        raise TypeError(f"continuations are a {type(continuations).__name__}; give a list for each prompt")
    continuations = list(continuations)
    if len(continuations) != len(ids):
        raise ValueError(f"{len(continuations)} lists of continuations for {len(ids)} prompts: give one each")
    items = []
    for number, (prompt, own, each) in enumerate(zip(prompts, ids, continuations, strict=True)):
        if isinstance(each, str | Mapping) or not isinstance(each, Iterable):
            raise TypeError(f"continuations[{number}] is {each!r:.60}; give a list of continuations")
        encoded = [_continuation(model, prompt, own, one, number) for one in each]
        items.append((own, encoded))
    return items


def _continuation(model: Model, prompt: Any, ids: list[int], one: Any, number: int) -> list[int]:
    """Token ids of a continuation."""
    if isinstance(one, str):
        together = model.tokenizer.encode(prompt + one) if isinstance(prompt, str) else []
        if together[: len(ids)] == ids:
            tokens = together[len(ids) :]
        else:
            tokens = model.tokenizer.encode(one, add_special=False)
    else:
        tokens = encode(model, one) if len(one) else []
    if not len(tokens):
        raise ValueError(f"continuations[{number}] has an empty one; give at least one token")
    if np.ndim(tokens) != 1:
        raise TypeError(f"continuations[{number}] has an array of vectors; give texts or token ids")
    check_room(model, len(ids), len(tokens))
    return list(tokens)


def _rows(items: list[tuple[list[int], list[list[int]]]], alone: bool, rewinds: bool) -> Iterable[Row]:
    """What is read in the first place; alone: each continuation with a prompt of its own; rewinds: a cache
    can forget a continuation."""
    numbers = itertools.count()
    branches: dict[Any, list[tuple[int, list[int]]]] = {}  # by prompt: equal ones are read once
    for prompt, each in items:
        for ids in each:
            number = next(numbers)
            branches.setdefault((tuple(prompt), number if alone else None), []).append((number, ids))
    for (prompt, _), own in branches.items():
        last, together = len(prompt) - 1, []
        if rewinds or len(own) == 1:
            number, together = max(own, key=lambda branch: len(branch[1]))
            own = [branch for branch in own if branch[0] != number]
        targets = [Target(last + offset, number, offset, token) for offset, token in enumerate(together)]
        targets += [Target(last, n, 0, ids[0]) for n, ids in own]
        rest = [(n, ids) for n, ids in own if len(ids) > 1]
        yield Row([*prompt, *together[:-1]], len(prompt), targets, rest)


def _plan(reader: Reader, rows: list[Row]) -> list[_Batch]:
    """The batches to read, each with the batches of continuations that follow it."""
    plan = []
    for numbers, count, width in _batches([len(row.tokens) for row in rows]):
        batch = [rows[i] for i in numbers]
        branches = [(parent, n, ids) for parent, row in enumerate(batch) for n, ids in row.branches]
        sizes, continued = [len(ids) - 1 for *_, ids in branches], []
        if sizes:
            each = reader.tokens_behind(widths().padded(max(sizes)))
            most_rows = max(1, BRANCH_ROOM * batch_tokens() // each)
            for some, branch_rows, branch_width in _batches(sizes, most_rows):
                continued.append(_Branches([branches[i] for i in some], (branch_rows, branch_width)))
        plan.append(_Batch(batch, (count, width), continued))
    return plan


def _batches(
    lengths: list[int], most_rows: int = NO_LIMIT
) -> Iterator[tuple[Int[np.ndarray, "items"], int, int]]:
    return batches(lengths, batch_tokens(), widths(), most_rows=most_rows)


def _read_batch(reader: Reader, batch: _Batch) -> list[_Pending]:
    """Read rows, and what comes behind them."""
    hidden, _ = reader.read(*reader.padded([row.tokens for row in batch.rows], *batch.shape))
    pending = _score_targets(reader.model, hidden, [row.targets for row in batch.rows])
    for branches, shape in batch.branches:
        tokens, lengths = reader.padded([ids[:-1] for *_, ids in branches], *shape)
        parents, prompts = np.zeros((2, len(tokens)), np.int32)
        parents[: len(branches)] = [parent for parent, *_ in branches]
        prompts[: len(branches)] = [batch.rows[parent].prompt for parent, *_ in branches]
        hidden = reader.read_behind(prompts, parents, tokens, lengths)
        targets = [
            [Target(offset - 1, n, offset, ids[offset]) for offset in range(1, len(ids))]
            for _, n, ids in branches
        ]
        pending += _score_targets(reader.model, hidden, targets)
    return pending


def scored_tokens() -> int:
    """Tokens whose logits exist at once, [tokens, vocabulary]: on a CPU as many as its caches hold."""
    return 128 if platform() == "cpu" else 1024


def _score_targets(model: Model, hidden: jax.Array, by_row: list[list[Target]]) -> list[_Pending]:
    """token_scores of the targets of each row."""
    return [
        _Pending(targets, places, *score_tokens(model.params, taken, columns, model.config))
        for targets, places, taken, columns in taken_states(model, hidden, by_row)
    ]


class Taken(NamedTuple):
    """Targets, their places in the arrays beside, the hidden states before them, and their (row, position,
    token)."""

    targets: list[Target]
    places: list[int]
    states: jax.Array
    columns: jax.Array


def taken_states(model: Model, hidden: jax.Array, by_row: list[list[Target]]) -> Iterator[Taken]:
    """The hidden states before the targets of each row, at most scored_tokens() on each device at a time."""
    devices = placement.size(model.mesh, placement.DATA)
    own_rows = len(hidden) // devices
    by_device: list[list[tuple[int, Target]]] = [[] for _ in range(devices)]
    for row, some in enumerate(by_row):
        by_device[row // own_rows] += [(row % own_rows, target) for target in some]
    most = scored_tokens()
    for first in range(0, max(map(len, by_device)), most):
        part = [own[first : first + most] for own in by_device]
        size = _scored(max(map(len, part)))
        columns, targets, places = np.zeros((devices * size, 3), np.int32), [], []
        for device, own in enumerate(part):
            for place, (row, target) in enumerate(own, device * size):
                columns[place] = row, target.position, target.token
                targets.append(target)
                places.append(place)
        placed = parallel.place_rows(columns, model.mesh)
        yield Taken(targets, places, take_states(model.params, hidden, placed), placed)


def _scored(count: int) -> int:
    """How many tokens are scored for this many: on a CPU the next power of two; on a GPU always the same
    number, because compiling another program takes longer than scoring."""
    most = scored_tokens()
    return min(most, max(4, 1 << (count - 1).bit_length())) if platform() == "cpu" else most


@over_mesh("rows")
def states_before(
    params: Params, hidden: Float[Array, "B T H"], columns: Int[Array, "N 3"]
) -> Float[Array, "N H"]:
    """The hidden states at each (row, position, token)."""
    row, position, _ = columns.T
    return hidden[row, position]


@over_mesh(("rows", "rows"))
def token_scores(
    params: Params, hidden: Float[Array, "N H"], columns: Int[Array, "N 3"], config: ModelConfig
) -> tuple[Float[Array, "N"], Bool[Array, "N"]]:
    """log softmax(logits)[token], and whether the token is the likeliest, for the hidden state before each
    (row, position, token)."""
    token = columns[:, 2]
    logits = decoder.unembed(params, hidden, config)
    own, largest = jnp.take_along_axis(logits, token[:, None], axis=1), logits.max(1, keepdims=True)
    total = jnp.exp(logits - largest).sum(1)
    # argmax is the first of equal ones. As a reduction it takes an XLA of CPUs twice the product's time.
    earlier = (logits == own) & (jnp.arange(logits.shape[1]) < token[:, None])
    greedy = (own == largest)[:, 0] & ~earlier.any(1)
    return (own - largest)[:, 0] - jnp.log(total), greedy


take_states = jitted.donating(states_before)
score_tokens = jitted.donating(token_scores)
