r"""How likely continuations of prompts are.

    prompt ---- continuation 1      a prompt is read together with the longest of its continuations;
        \------ continuation 2      the others are read in a second batch, behind copies of the prompt's row

A recurrent state cannot go back to the end of a prompt, so models that have one read the prompt alone.
The output matrix is applied to the tokens before those that are scored, and to no others.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
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
from bonsai_jax.research.batches import batches
from bonsai_jax.research.reading import Reader, batch_tokens, whole_ids
from bonsai_jax.weights import placement

SCORED_TOKENS = 256  # tokens whose logits exist at once: bounds [tokens, vocabulary]
BRANCH_COPIES = 4  # copies of a batch's cache that branches are read behind: bounds their memory

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
    rows = list(_rows(items, alone, rewinds=not model.config.groups("delta_net")))
    flat = [Results(own) for _, each in items for own in each]
    reader, room = Reader(model), max((len(ids) - 1 for row in rows for _, ids in row.branches), default=0)
    pending: deque[_Pending] = deque()
    done = 0
    with shown(progress, "scoring") as update:
        update(done, len(rows))
        for numbers, count, width in batches([len(row.tokens) for row in rows], batch_tokens()):
            batch = [rows[i] for i in numbers]
            _read_batch(reader, batch, count, width, room, pending)
            while len(pending) > 2:  # the device has work while results are fetched
                pending.popleft().store(flat)
            done += len(batch)
            update(done, len(rows))
        for batch in pending:
            batch.store(flat)
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


class _Pending(NamedTuple):
    """Targets whose results are on their way from the device, with their places in these."""

    targets: list[Target]
    places: list[int]
    logprobs: jax.Array
    greedy: jax.Array

    def store(self, results: list[Results]) -> None:
        logprobs, greedy = parallel.fetch(self.logprobs), parallel.fetch(self.greedy)
        for target, place in zip(self.targets, self.places, strict=True):
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


def _read_batch(
    reader: Reader, batch: list[Row], count: int, width: int, room: int, pending: deque[_Pending]
) -> None:
    """Read rows, and what comes behind them."""
    tokens, lengths = reader.padded([row.tokens for row in batch], count, width)
    hidden, _ = reader.read(tokens, lengths, room)
    pending.append(_score_targets(reader.model, hidden, [row.targets for row in batch]))
    prompts = np.zeros(len(tokens), np.int32)
    prompts[: len(batch)] = [row.prompt for row in batch]
    branches = [(parent, n, ids) for parent, row in enumerate(batch) for n, ids in row.branches]
    most_rows = max(1, BRANCH_COPIES * batch_tokens() // reader.capacity)
    sizes = [len(ids) - 1 for *_, ids in branches]
    for numbers, count, width in batches(sizes, batch_tokens(), most_rows=most_rows, mixed=False):
        some = [branches[i] for i in numbers]
        tokens, lengths = reader.padded([ids[:-1] for *_, ids in some], count, width)
        parents = np.zeros(len(tokens), np.int32)
        parents[: len(some)] = [parent for parent, *_ in some]
        hidden = reader.read_behind(prompts, parents, tokens, lengths)
        targets = [
            [Target(offset - 1, n, offset, ids[offset]) for offset in range(1, len(ids))]
            for _, n, ids in some
        ]
        pending.append(_score_targets(reader.model, hidden, targets))


def _score_targets(model: Model, hidden: jax.Array, by_row: list[list[Target]]) -> _Pending:
    """token_scores of the targets of each row."""
    devices = placement.size(model.mesh, placement.DATA)
    own_rows = len(hidden) // devices
    targets, where = [], [[] for _ in range(devices)]
    for row, some in enumerate(by_row):
        for target in some:
            where[row // own_rows].append(len(targets))
            targets.append((row % own_rows, target))
    size = max(map(len, where))
    size = (
        1 << (size - 1).bit_length() if size <= SCORED_TOKENS else -(-size // SCORED_TOKENS) * SCORED_TOKENS
    )
    columns, places = np.zeros((devices * size, 3), np.int32), [0] * len(targets)
    for device, numbers in enumerate(where):
        for place, n in enumerate(numbers, device * size):
            row, target = targets[n]
            columns[place], places[n] = (row, target.position, target.token), place
    placed = parallel.place_rows(columns, model.mesh)
    return _Pending(
        [target for _, target in targets], places, *score_tokens(model.params, hidden, placed, model.config)
    )


@over_mesh(("rows", "rows"))
def token_scores(
    params: Params, hidden: Float[Array, "B T H"], columns: Int[Array, "N 3"], config: ModelConfig
) -> tuple[Float[Array, "N"], Bool[Array, "N"]]:
    """log softmax(logits)[token], and whether the token is the likeliest, for each (row, position, token) of
    hidden states."""

    def scores(columns):
        row, position, token = columns.T
        logits = decoder.unembed(params, hidden[row, position], config)
        own, largest = jnp.take_along_axis(logits, token[:, None], axis=1), logits.max(1, keepdims=True)
        total = jnp.exp(logits - largest).sum(1)
        # argmax is the first of equal ones. As a reduction it takes an XLA of CPUs twice the product's time.
        earlier = (logits == own) & (jnp.arange(logits.shape[1]) < token[:, None])
        greedy = (own == largest)[:, 0] & ~earlier.any(1)
        return (own - largest)[:, 0] - jnp.log(total), greedy

    if len(columns) <= SCORED_TOKENS:
        return scores(columns)
    logprobs, greedy = jax.lax.map(scores, columns.reshape(-1, SCORED_TOKENS, 3))
    return logprobs.reshape(-1), greedy.reshape(-1)


score_tokens = jitted.donating(token_scores)
