"""The text of an answer while it is written, for readers that are generators.

A reader is straight code. Where it needs text that has not come yet, it yields, and it goes on when there is
more:

    def read(cursor: Cursor) -> Steps[None]:
        yield from cursor.spaces()
        name = yield from cursor.until("\\n", most=64)
        cursor.call(name)

So a text gives the same events wherever it is cut into pieces.
"""

from collections.abc import Callable, Generator
from typing import Literal, NamedTuple

type Steps[T] = Generator[None, None, T]

MOST_NAME = 256  # characters of a function's or a parameter's name


class Event(NamedTuple):
    """More of an answer.

    kind  "thought", "answer" or "call"
    text  of a call: more of its arguments, as JSON
    name  of the function, in the first event of a call; else None
    """

    kind: Literal["thought", "answer", "call"]
    text: str
    name: str | None = None


class Broken(Exception):
    """The text at the cursor is not what a reader expects, so it is no call."""


class Cursor:
    """The text that has come, the place where a reader is, and the events so far.

    at      the index in `text` of the next character
    good    where a broken call ends: what was read before this index is in the events, what comes after it
            will be text
    closed  whether the text is complete
    calls   how many have begun

    keeps_spaces  answers have no calls, so their white space need not wait
    """

    def __init__(self, keeps_spaces: bool = False) -> None:
        self.text, self.at, self.good, self.closed = "", 0, 0, False
        self.events: list[Event] = []
        self.calls = 0
        self._spaces, self._keeps_spaces, self._after_call = "", keeps_spaces, False

    # ---- What a reader writes ----

    def answer(self, text: str) -> None:
        """Text for the user. White space at its end waits: beside calls it belongs to the format."""
        end = len(text) if self._keeps_spaces else len(text.rstrip())
        if end:
            self.events.append(Event("answer", self._spaces + text[:end]))
            self._spaces, self._after_call = "", False
        self._spaces += text[end:]

    def thought(self, text: str) -> None:
        """More of a thought."""
        if text:
            self._put_spaces()
            self.events.append(Event("thought", text))

    def call(self, name: str) -> None:
        """A call begins: from now on what was read stays a call. White space between calls is dropped."""
        if self._after_call:
            self._spaces = ""
        self._after_call = True
        self.calls, self.good = self.calls + 1, self.at
        self.events.append(Event("call", "", name))

    def arguments(self, text: str) -> None:
        """More of a call's arguments."""
        if text:
            self.events.append(Event("call", text))

    def accept(self) -> None:
        """What was read so far is no text, even if the next part is broken."""
        self.good = self.at

    def finish(self) -> None:
        """The answer has ended. White space behind its last call is dropped."""
        if not self.calls:
            self._put_spaces()

    def _put_spaces(self) -> None:
        if self._spaces:
            self.events.append(Event("answer", self._spaces))
            self._spaces = ""

    # ---- What a reader reads ----

    def room(self, count: int) -> Steps[bool]:
        """Wait for `count` characters. False: the text ends before."""
        while len(self.text) - self.at < count:
            if self.closed:
                return False
            yield
        return True

    def peek(self) -> Steps[str]:
        """The next character; "" at the end."""
        yield from self.room(1)
        return self.text[self.at : self.at + 1]

    def literal(self, text: str) -> Steps[bool]:
        """Whether this text comes next; it is read if so."""
        while not self.text.startswith(text, self.at):
            rest = self.text[self.at : self.at + len(text)]
            if not text.startswith(rest) or self.closed:
                return False
            yield
        self.at += len(text)
        return True

    def expect(self, text: str) -> Steps[None]:
        """Read this text. Raises Broken if another comes."""
        if not (yield from self.literal(text)):
            raise Broken

    def spaces(self) -> Steps[str]:
        """Read white space."""
        begin = self.at
        while (yield from self.room(1)) and self.text[self.at].isspace():
            self.at += 1
        return self.text[begin : self.at]

    def either(self, *marks: str) -> Steps[str]:
        """Read the first of these marks that comes next; "" if none does."""
        for mark in marks:
            if (yield from self.literal(mark)):
                return mark
        return ""

    def until(self, mark: str, most: int | None = None) -> Steps[str]:
        """Read up to a mark, and the mark; returns the text before it. Raises Broken if there is none, or
        more than `most` characters come before it."""
        searched = self.at
        while (end := self.text.find(mark, searched)) < 0:
            searched = max(self.at, len(self.text) - len(mark) + 1)
            if self.closed or (most is not None and searched - self.at > most):
                raise Broken
            yield
        if most is not None and end - self.at > most:
            raise Broken
        text = self.text[self.at : end]
        self.at = end + len(mark)
        return text

    def flow(self, put: Callable[[str], None], *marks: str) -> Steps[str]:
        """Pass text on as soon as it is certain, up to the first of some marks, which is read and returned;
        "" at the end of the text."""
        while True:
            ends = [(end, mark) for mark in marks if (end := self.text.find(mark, self.at)) >= 0]
            if ends:
                end, mark = min(ends)
                put(self.text[self.at : end])
                self.at = self.good = end + len(mark)
                return mark
            rest = self.text[self.at :]
            certain = len(rest) if self.closed else len(rest) - waiting(rest, marks)
            put(rest[:certain])
            self.forget(self.at + certain)
            if self.closed:
                return ""
            yield

    def forget(self, at: int) -> None:
        """Go on at this index, and drop the text before it: no reader goes back."""
        self.text, self.at, self.good = self.text[at:], 0, 0


def waiting(text: str, marks: tuple[str, ...]) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    most = min(len(text), max(map(len, marks), default=1) - 1)
    return next((n for n in range(most, 0, -1) if any(m.startswith(text[-n:]) for m in marks)), 0)
