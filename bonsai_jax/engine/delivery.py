"""What an engine's loop has drawn becomes pieces, which answers are given when the device has work again."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from bonsai_jax.decoding.sampling import NOTHING_TO_DRAW, Logprobs
from bonsai_jax.engine.answers import Answer, Piece


class Drawn(NamedTuple):
    """What a dispatch has drawn for one answer, which does not know of it yet.

    count   of its tokens in `Answer.untold`
    steps   of decode
    scores  of all rows of the dispatch, of which `row` is the answer's; None: no row has log-probabilities
    least   tokens that the dispatch draws for it, unless it ends
    """

    answer: Answer
    count: int
    steps: int
    scores: Logprobs | None
    row: int
    least: int


class Delivery:
    """Gives the answers of one loop their pieces.

    end       Loop.cancel
    together  around pieces that go to several answers (wakes.py)
    """

    def __init__(self, end: Callable[..., None], together: Callable[[], AbstractContextManager[None]]):
        self._end, self._together = end, together
        self._drawn: list[Drawn] = []

    def note(self, drawn: Drawn) -> None:
        """For the next `deliver`."""
        self._drawn.append(drawn)

    def forget(self) -> None:
        """What was noted comes from a dispatch that failed."""
        self._drawn.clear()

    def deliver(self) -> None:
        """Give answers everything that was noted, and end those that are complete."""
        if not self._drawn:
            return
        every, self._drawn = self._drawn, []
        with self._together():
            for drawn in every:
                if not drawn.answer.request.ended:
                    self._give(drawn)

    def finish(self, answer: Answer, error: Exception | None) -> None:
        """End an answer whose constraint allows no more, or has failed."""
        self.deliver()
        if not answer.request.ended:  # else its last piece was sent
            last = piece(answer) if error is None else error
            self._end(answer, read=_row_read(answer, by_device=False))
            answer.on_piece(last)

    def _give(self, drawn: Drawn) -> None:
        answer, count, steps, scores, row, least = drawn
        n = answer.logprobs
        own = piece(answer, None if n is None or scores is None else _row_logprobs(scores, row, n), steps)
        undrawn = own.finish_reason is None and count < least  # the device has ended this row
        if own.finish_reason is not None or undrawn:
            last = answer.request.said[-1:]
            by_device = own.finish_reason == "length" or bool({*last} & answer.reader.end_tokens)
            self._end(answer, read=None if undrawn else _row_read(answer, by_device))
        if count or own.finish_reason is not None:
            answer.on_piece(own)
        if undrawn:
            said = len(answer.request.said)
            answer.on_piece(ValueError(f"{NOTHING_TO_DRAW}; {said} were drawn before"))


def piece(answer: Answer, scores: Logprobs | None = None, steps: int = 0) -> Piece:
    """The next piece of an answer, of its tokens in `untold`."""
    request, matcher = answer.request, answer.matcher
    tokens, answer.untold = answer.untold, []
    complete = matcher is not None and matcher.complete
    ended = len(request.said) >= request.max_new_tokens
    if answer.began:
        return answer.reader.read(tokens, ended, scores, steps, complete, answer.version)
    answer.began = True
    first = answer.reader.read(tokens, ended, scores, 0, complete, answer.version)
    return dataclasses.replace(first, cached_tokens=answer.cached)


def _row_read(answer: Answer, by_device: bool) -> int | None:
    """Tokens of the prompt and answer that its row has read, and no more. None: nobody knows, because of stop
    strings and constraints only the host knows, and the device may have gone on."""
    request = answer.request
    if by_device and not request.unread:  # the newest token is read when the next one is drawn
        return len(request.prompt) + len(request.said) - 1
    return None if any(most for _, most in request.flights) else request.stored


def _row_logprobs(scores: Logprobs, row: int, n: int) -> Logprobs:
    """Logprobs of one row, with n alternatives."""
    ids, top = scores.ids[row, :, :n], scores.top[row, :, :n]
    sampled = None if scores.sampled is None else scores.sampled[row]
    return scores.replace(token=scores.token[row], ids=ids, top=top, sampled=sampled)
