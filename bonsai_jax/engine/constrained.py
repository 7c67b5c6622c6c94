"""The answers of a loop that have a constraint: their matchers, masks and forced tokens.

    tokens that were drawn -> drawn: the matcher goes on, and a thread finds what may come next
        -> collect: the request is ready for its next draw, or it says forced tokens

Forced tokens at the beginning of an answer are read with its prompt, many in a row in one chunk.
"""

import itertools
import time
from collections.abc import Callable

from bonsai_jax import constraints
from bonsai_jax.constraints import Constraint
from bonsai_jax.constraints.masks import Masks
from bonsai_jax.decoding.sampling import NO_TOKEN
from bonsai_jax.engine.answers import Answer
from bonsai_jax.engine.plans import Request
from bonsai_jax.model import Model

# A plan waits for masks for LATE_S seconds, or for this share of a step, as the device is busy meanwhile.
# Requests whose masks come later are left out of it.
LATE_S, LATE_STEPS = 0.005, 0.5
LONGEST_STEP_S = 0.4
IDLE_S = 0.05  # most seconds to wait for a mask where there is nothing else to do


class Constrained:
    """The constrained answers of one loop.

    force    Scheduler.force
    finish   ends an answer whose constraint allows no more, or, with an error, has failed
    """

    def __init__(
        self,
        model: Model,
        force: Callable[[Request, list[int]], bool],
        finish: Callable[[Answer, Exception | None], None],
    ):
        self._tokens = model.tokenizer, model.config.vocab_size
        self._force, self._finish = force, finish
        self._masks = Masks()
        self._sent_at = self._step_s = 0.0

    @property
    def pending(self) -> int:
        """Answers whose masks are being made."""
        return self._masks.pending

    def begin(self, answer: Answer, constraint: Constraint, ignore_eos: bool) -> None:
        """Give a new answer its constraint. Its first forced tokens are read with its prompt. Raises
        ValueError for a constraint that cannot be compiled."""
        request = answer.request
        matcher = constraints.compile(constraint, *self._tokens).matcher()
        matcher.past_end = ignore_eos
        answer.matcher, request.constrained = matcher, True
        while matcher.forced and answer.logprobs is None and not self.over(answer):
            forced = matcher.forced[: request.max_new_tokens - len(request.said)]
            matcher.consume(forced)
            request.said += forced
            answer.untold += forced
            matcher.find()

    def over(self, answer: Answer) -> bool:
        """Whether nothing is left to draw."""
        complete = answer.matcher is not None and answer.matcher.complete
        return complete or len(answer.request.said) >= answer.request.max_new_tokens

    def drawn(self, answer: Answer, tokens: list[int], guesses: list[int]) -> None:
        """Go on by tokens that were drawn, and find what may come next once `send` is called. guesses: what
        is proposed to follow, and read meanwhile, up to the first NO_TOKEN. Raises ValueError where the
        constraint has become too large."""
        matcher, request = answer.matcher, answer.request
        assert matcher is not None
        if not tokens:
            return
        request.complete = bool(answer.reader.end_tokens.intersection(tokens))
        if request.complete:
            return
        matcher.consume(tokens)
        request.complete = self.over(answer)
        if not request.complete:
            if guesses:
                matcher.drafts = list(itertools.takewhile(lambda token: token != NO_TOKEN, guesses))
            self._find(answer)

    def send(self) -> None:
        """Have threads find what may come next. Called once a step."""
        self._masks.send()
        before, self._sent_at = self._sent_at, time.perf_counter()
        self._step_s = min(self._sent_at - before, LONGEST_STEP_S)

    def collect(self) -> None:
        """Let requests draw whose masks are made; wait for others, but not long."""
        if self._masks.pending:
            self._masks.collect(max(LATE_S, LATE_STEPS * self._step_s))

    def wait(self) -> None:
        """Wait for a mask."""
        self._masks.wait(IDLE_S)

    def close(self) -> None:
        self._masks.close()

    def _find(self, answer: Answer) -> None:
        matcher = answer.matcher
        assert matcher is not None
        self._masks.start(matcher, lambda error: self._found(answer, error))

    def _found(self, answer: Answer, error: Exception | None) -> None:
        request, matcher = answer.request, answer.matcher
        assert matcher is not None
        if request.ended:
            return
        if error is not None:
            self._finish(answer, error)
        elif not (matcher.forced and answer.logprobs is None and self._say_forced(answer)):
            request.ready = True
        elif self.over(answer):
            self._finish(answer, None)
        else:
            self._find(answer)
            self._masks.send()

    def _say_forced(self, answer: Answer) -> bool:
        """Have an answer say its forced tokens, where that is faster than to draw them. At its end they are
        not even read."""
        request, matcher = answer.request, answer.matcher
        assert matcher is not None
        forced = matcher.forced[: request.max_new_tokens - len(request.said)]
        if matcher.ends or len(request.said) + len(forced) == request.max_new_tokens:
            request.hold()
            request.said += forced
            request.unread = len(forced)
        elif not self._force(request, forced):
            return False
        matcher.consume(forced)
        answer.untold += forced
        return True
