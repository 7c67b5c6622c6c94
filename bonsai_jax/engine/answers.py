"""Answers: tokens become text, piece by piece, and pieces become an Output."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import numpy as np

from bonsai_jax.constraints import Matcher
from bonsai_jax.decoding.sampling import NO_TOKEN, Logprobs
from bonsai_jax.engine.plans import Request
from bonsai_jax.sampling_params import SamplingParams
from bonsai_jax.tokens.tokenizer import Detokenizer, Tokenizer

FinishReason = Literal["stop", "length", "cancelled"]


@dataclasses.dataclass(frozen=True)
class Output:
    """One finished answer. `tokens` leaves out the token that ended it; `text` ends before a stop string. It
    is the answer as the model writes it, with its thoughts: `tokens.answer_parser` tells these apart.

    logprobs  of `tokens`, as numpy arrays [tokens]; None unless asked for
    steps     decode steps that drew all tokens but the first, which prefill draws
    cached_tokens  tokens of the prompt whose keys and values were in the cache and were not read again
    activations  {site: float32 [layers, tokens, ...]}, what `generate(read=)` names, at the position from
              which each of `tokens` was drawn; None unless asked for
    stop      the stop string that ended it; None if another thing did
    versions  for each of `tokens` the version of the weights that drew it (Engine.version)
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    logprobs: Logprobs | None = None
    steps: int = 0
    cached_tokens: int = 0
    activations: dict[str, np.ndarray] | None = None
    stop: str | None = None
    versions: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a streamed answer.

    text           whole characters only; empty while a character is incomplete
    tokens         the new tokens of this part
    finish_reason  None until the last piece
    logprobs       of `tokens`, as numpy arrays [tokens]; None unless asked for
    steps          decode steps that drew `tokens`; 0 for the first token, which prefill draws
    index          the number of the answer, of a request for several
    cached_tokens  in the first piece: as in Output
    stop           in the last piece: as in Output
    version        of the weights that drew `tokens` (Engine.version)
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason | None = None
    logprobs: Logprobs | None = None
    steps: int = 0
    index: int = 0
    cached_tokens: int = 0
    stop: str | None = None
    version: int = 0


def output(pieces: Sequence[Piece], prompt_tokens: int) -> Output:
    """An answer from all its pieces."""
    scores = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    return Output(
        "".join(piece.text for piece in pieces),
        [token for piece in pieces for token in piece.tokens],
        pieces[-1].finish_reason or "length",
        prompt_tokens,
        jax.tree.map(lambda *parts: np.concatenate(parts), *scores) if scores else None,
        sum(piece.steps for piece in pieces),
        sum(piece.cached_tokens for piece in pieces),
        stop=pieces[-1].stop,
        versions=[piece.version for piece in pieces for _ in piece.tokens],
    )


class Reader:
    """New tokens of one row in, pieces of text out: decodes characters, looks for stop strings, and finds the
    finish reason. Text that could be the beginning of a stop string waits in `pending`."""

    def __init__(
        self, tokenizer: Tokenizer, end_tokens: frozenset[int], stop: Sequence[str] = (), index: int = 0
    ):
        self.detokenizer: Detokenizer = tokenizer.answer_detokenizer()
        self.end_tokens, self.stop, self.pending, self.index = end_tokens, stop, "", index

    def read(
        self,
        drawn: Sequence[int] | np.ndarray,
        ended: bool,
        scores: Logprobs | None = None,
        steps: int = 0,
        complete: bool = False,
        version: int = 0,
    ) -> Piece:
        """drawn   token ids, up to the first NO_TOKEN
        ended   no more tokens will come
        scores  their Logprobs, if asked for
        steps   decode steps that drew them
        complete  the answer's constraint allows no more
        version of the weights that drew them
        """
        text, tokens, reason = self._read(drawn, ended, complete)
        if scores is not None:
            scores = jax.tree.map(lambda x: x[: len(tokens)], scores)
        ends = [own for own in self.stop if reason == "stop" and self.pending.startswith(own, len(text))]
        stop = ends[0] if ends else None
        return Piece(text, tokens, reason, scores, steps, self.index, stop=stop, version=version)

    def _read(self, drawn, ended: bool, complete: bool) -> tuple[str, list[int], FinishReason | None]:
        tokens: list[int] = []
        for token in map(int, drawn):
            if token == NO_TOKEN:
                break
            if token in self.end_tokens:
                return self._last("stop", tokens)
            tokens.append(token)
            self.pending += self.detokenizer.push(token)
            if self.stop and (end := self._stopped()) is not None:
                return self.pending[:end], tokens, "stop"
        if ended or complete:
            return self._last("stop" if complete else "length", tokens)
        text, self.pending = _split_before_stop(self.pending, self.stop) if self.stop else (self.pending, "")
        return text, tokens, None

    def _last(self, reason: FinishReason, tokens: list[int]) -> tuple[str, list[int], FinishReason]:
        """The rest of the text. It may end with an incomplete character, which may complete a stop string."""
        self.pending += self.detokenizer.flush()
        end = self._stopped()
        return (self.pending, tokens, reason) if end is None else (self.pending[:end], tokens, "stop")

    def _stopped(self) -> int | None:
        """Where the first stop string begins in the text."""
        return min((at for at in map(self.pending.find, self.stop) if at >= 0), default=None)


@dataclasses.dataclass(eq=False)
class Answer:
    """One answer to a request.

    request   the scheduler's view of it
    reader    turns its tokens into text
    rules     how it draws (Runner.rules)
    chained   its settings, where it uses samplers of decoding/chain.py; else None
    mu        Mirostat's limit after its tokens, where it uses these; None before the first
    remembers whether its draws depend on earlier tokens through penalties
    logprobs  the number of alternatives asked for; None: no log-probabilities
    on_piece  called with each Piece, or with the exception that ends it
    cached    tokens of the prompt that were in the cache
    matcher   where it stands in its constraint; None: it has none
    untold    drawn and forced tokens that `reader` has not read yet
    began     a piece of it has been made
    version   of the weights that drew its newest tokens
    """

    request: Request
    reader: Reader
    rules: np.ndarray
    chained: SamplingParams | None
    remembers: bool
    logprobs: int | None
    on_piece: Callable[[Piece | Exception], None]
    mu: float | None = None
    cached: int = 0
    matcher: Matcher | None = None
    untold: list[int] = dataclasses.field(default_factory=list)
    began: bool = False
    version: int = 0


def _split_before_stop(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """Split off the longest end of `text` that is the beginning of a stop string."""
    longest = max(map(len, stop), default=1) - 1
    for n in range(min(longest, len(text)), 0, -1):
        if any(s.startswith(text[-n:]) for s in stop):
            return text[:-n], text[-n:]
    return text, ""
