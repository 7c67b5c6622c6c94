"""Where an answer stands in its constraint, and what may come next: for one answer, or for many together."""

import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import UInt32

if TYPE_CHECKING:
    from llguidance import LLMatcher

BEGIN_S = 0.0012  # what threads take to begin: 32 masks of 25 us took 1.2 to 1.5 ms in 16 threads of a Xeon


class _Next(NamedTuple):
    """What may come after a draft."""

    allowed: UInt32[np.ndarray, "words"]
    forced: list[int]


class Matcher:
    """Where one answer stands in its constraint. One thread at a time.

    kind      of the constraint, for its errors
    words     of a mask
    end_tokens   those that end an answer
    forced    tokens that must come next, in this order; [] where there is more than one way
    ends      after these the answer is complete
    complete  nothing may follow but the end
    past_end  the answer goes on as long as it can: tokens that end it are not allowed
    find_s    CPU time of the last `find`, or of its mask, in seconds; after `Together.find` it may be a mean
    drafts    tokens that may be drawn next, one after the other; `find` leaves those after which the answer
              goes on, and finds what may come after each
    """

    def __init__(self, kind: str, words: int, end_tokens: Sequence[int], own: "LLMatcher"):
        self._kind, self._end_tokens, self._own = kind, end_tokens, own
        ends: dict[int, int] = {}
        for token in end_tokens:
            ends[token // 32] = ends.get(token // 32, 0) | 1 << token % 32
        self._end_words = [(word, ~np.uint32(bits)) for word, bits in ends.items()]
        self._bits = np.zeros(words, np.uint32)
        self.forced: list[int] = []
        self.ends = self.complete = self._past_end = False
        self.find_s = 0.0
        self.drafts: list[int] = []
        self._after: list[_Next] = []  # of each draft

    @property
    def past_end(self) -> bool:
        return self._past_end

    @past_end.setter
    def past_end(self, value: bool) -> None:
        self._past_end = value
        self._allow(self._bits.copy())

    @property
    def allowed(self) -> UInt32[np.ndarray, "words"]:
        """Bit i % 32 of word i // 32: token i may be drawn next. As `find` found it."""
        return bit(self.forced[0], len(self._bits)) if self.forced else self._bits

    @property
    def allowed_along(self) -> UInt32[np.ndarray, "drafts+1 words"]:
        """`allowed`, now and after each of `drafts`."""
        return np.stack([self.allowed, *(after.allowed for after in self._after)])

    def consume(self, tokens: Sequence[int]) -> None:
        """Go on by tokens that were drawn or forced. Raises ValueError where the constraint does not allow
        them, or has become too large."""
        self._go_on(self._own, tokens)
        forced, newest = self.forced, list(tokens)
        if len(newest) > 1 and newest[:-1] == self.drafts[: len(newest) - 1]:
            forced, newest = self._after[len(newest) - 2].forced, newest[-1:]
        self.forced = forced[len(newest) :] if forced[: len(newest)] == newest else []
        self.drafts, self._after = [], []
        self.complete = self._own.is_stopped()

    def find(self) -> None:
        """Find what may come next: `forced`, `ends` and `allowed`. Raises ValueError where that is nothing,
        or the constraint has become too large."""
        began = time.thread_time()
        try:
            if self._find_forced():
                self._allow(self._mask())
            self._find_along()
        finally:
            self.find_s = time.thread_time() - began

    def _find_forced(self) -> bool:
        """Whether nothing is forced, so that a mask is to be made."""
        if self.forced or self.complete:
            return False
        self.forced = self._own.compute_ff_tokens()
        if self.forced:
            after = self._own.deep_copy()
            self._go_on(after, self.forced)
            self.ends = after.is_stopped()
        self._check()
        return not self.forced

    def _mask(self) -> UInt32[np.ndarray, "words"]:
        bits = np.empty_like(self._bits)
        self._own.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        return bits

    def _allow(self, bits: UInt32[np.ndarray, "words"]) -> None:
        if self._past_end:
            for word, others in self._end_words:
                bits[word] &= others
        self._bits = bits
        self._check()

    def _check(self) -> None:
        if self._own.is_error():
            raise ValueError(f"{self._kind}: {_reason(self._own)}")

    def _find_along(self) -> None:
        """Cut the drafts where one is not allowed, ends the answer, or makes the constraint too large, and
        find what may come after each."""
        if not self.drafts:
            return
        drafts, self.drafts, self._after = self.drafts, [], []
        further = self.copy()
        for token in drafts:
            word, bit = divmod(token, 32)
            if token in self._end_tokens or not further.allowed[word] >> np.uint32(bit) & 1:
                return
            try:
                further.consume([token])
                further.find()
            except ValueError:
                return
            if further.complete:
                return
            self.drafts.append(token)
            self._after.append(_Next(further.allowed, list(further.forced)))

    def copy(self) -> "Matcher":
        """Another one at the same place."""
        new = Matcher(self._kind, len(self._bits), self._end_tokens, self._own.deep_copy())
        new._bits, new.forced = self._bits, list(self.forced)
        new.ends, new.complete, new._past_end = self.ends, self.complete, self._past_end
        return new

    def _go_on(self, own: "LLMatcher", tokens: Sequence[int]) -> None:
        if not own.consume_tokens(list(tokens)):
            raise ValueError(f"{self._kind}: {_reason(own)}")


class Together:
    """`Matcher.find` of several matchers of one model. Masks are made one after another, for as long as
    threads take to begin; then llguidance makes the others in threads of its own. These do not wait for the
    GIL, as Python's threads do ten times as long as a mask takes."""

    def __init__(self, threads: int):
        from llguidance import LLExecutor

        self._threads, self._executor = threads, LLExecutor(threads)

    def find(self, matchers: Sequence[Matcher]) -> list[Exception | None]:
        """The error of each, or None."""
        errors: list[Exception | None] = [None] * len(matchers)
        unforced = []
        for i, matcher in enumerate(matchers):
            try:
                if matcher._find_forced():
                    unforced.append(i)
            except ValueError as error:
                errors[i] = error
        for i, mask in zip(unforced, self._masks([matchers[i] for i in unforced]), strict=True):
            try:
                matchers[i]._allow(mask)
            except ValueError as error:
                errors[i] = error
        for matcher, error in zip(matchers, errors, strict=True):
            if error is None:
                matcher._find_along()
        return errors

    def _masks(self, matchers: Sequence[Matcher]) -> Sequence[UInt32[np.ndarray, "words"]]:
        masks: list[np.ndarray] = []
        began = time.perf_counter()
        for matcher in matchers:
            if time.perf_counter() - began > BEGIN_S:
                break
            before = time.thread_time()
            masks.append(matcher._mask())
            matcher.find_s = time.thread_time() - before
        return [*masks, *self._in_threads(matchers[len(masks) :])]

    def _in_threads(self, matchers: Sequence[Matcher]) -> Sequence[UInt32[np.ndarray, "words"]]:
        if not matchers:
            return []
        rows, began = np.empty((len(matchers), len(matchers[0]._bits)), np.uint32), time.perf_counter()
        places = [(matcher._own, place) for place, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(places, rows.ctypes.data, rows.strides[0], len(rows))
        spent_s = max(0.0, time.perf_counter() - began - BEGIN_S) * min(self._threads, len(rows))
        for matcher in matchers:
            matcher.find_s = spent_s / len(rows)
        return list(rows)


def _reason(own: Any) -> str:
    """Why a matcher has failed, on one line."""
    error = own.get_error().strip()
    if "NoExtension" in error:
        return "no text matches it"
    if wrong := re.search(r'(invalid regex ".*").*?^error: (.*?)$', error, re.DOTALL | re.MULTILINE):
        return f"{wrong[2]}, {wrong[1]}"[:300]
    lines = [line.strip() for line in error.splitlines() if line.strip() not in ("", "<non-verbose/>")]
    lines = lines[: next((i for i, line in enumerate(lines) if line.startswith("<backtrace>")), None)]
    return " ".join(lines)[:300] or "it does not allow this token"


def bit(token: int, words: int) -> UInt32[np.ndarray, "words"]:
    """A mask that allows this token alone."""
    bits = np.zeros(words, np.uint32)
    bits[token // 32] = _one_bit(token)
    return bits


def _one_bit(token: int) -> np.uint32:
    """Of its word."""
    return np.uint32(1 << token % 32)
