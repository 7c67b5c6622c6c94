"""A model's thoughts, the text between <think> and </think>."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from bonsai_jax.tokens.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"


def begun(tokenizer: "Tokenizer", ids: list[int]) -> bool:
    """Whether a prompt ends within a thought, as after a chat template that opens one."""
    return tokenizer.decode(ids[-8:]).rstrip().endswith(OPEN)


class Part(NamedTuple):
    """Text that is a thought, with its tags, or that is none."""

    text: str
    thought: bool


class Splitter:
    """Tells thoughts from the rest of a text that comes piece by piece.

    within  whether the text begins within a thought
    """

    def __init__(self, within: bool):
        self.within, self._pending = within, ""

    def next(self, text: str) -> list[Part]:
        """The parts of one more piece; what may be the beginning of a tag waits for the next piece."""
        self._pending, parts = self._pending + text, []
        while (at := self._pending.find(self._tag)) >= 0:
            parts.append(self._take(at + len(CLOSE) if self.within else at))
            self.within = not self.within
        waiting = max(
            n for n in range(len(self._tag)) if self._tag[:n] == self._pending[len(self._pending) - n :]
        )
        return [part for part in (*parts, self._take(len(self._pending) - waiting)) if part.text]

    def end(self) -> list[Part]:
        """The text that still waits, at the end."""
        return [self._take(len(self._pending))] if self._pending else []

    @property
    def _tag(self) -> str:
        return CLOSE if self.within else OPEN

    def _take(self, count: int) -> Part:
        text, self._pending = self._pending[:count], self._pending[count:]
        return Part(text, self.within)


class Shown:
    """Text as `generate` prints it, piece by piece. On a terminal thoughts and their tags are dimmed;
    elsewhere the text is unchanged."""

    def __init__(self, within: bool):
        from rich.console import Console

        console = Console()
        self.dims = console.is_terminal and not console.is_dumb_terminal
        self._splitter = Splitter(within)

    def next(self, text: str) -> str:
        """What to print after one more piece."""
        return self._dimmed(self._splitter.next(text)) if self.dims else text

    def end(self) -> str:
        """What to print at the end."""
        return self._dimmed(self._splitter.end()) if self.dims else ""

    def _dimmed(self, parts: list[Part]) -> str:
        from rich.style import Style

        return "".join(Style(dim=True).render(part.text) if part.thought else part.text for part in parts)
