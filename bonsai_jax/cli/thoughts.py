"""A model's thoughts, the text between <think> and </think>, dimmed on a terminal."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bonsai_jax.tokens.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"


def begun(tokenizer: "Tokenizer", ids: list[int]) -> bool:
    """Whether a prompt ends within a thought, as after a chat template that opens one."""
    return tokenizer.decode(ids[-8:]).rstrip().endswith(OPEN)


class Shown:
    """Text as it is printed, piece by piece. On a terminal thoughts and their tags are dimmed; elsewhere the
    text is unchanged.

    within  whether the text begins within a thought
    """

    def __init__(self, within: bool):
        from rich.console import Console

        console = Console()
        self.dims = console.is_terminal and not console.is_dumb_terminal
        self.within, self._pending = within, ""

    def next(self, text: str) -> str:
        """What to print after one more piece; what may be the beginning of a tag waits for the next piece."""
        if not self.dims:
            return text
        self._pending, out = self._pending + text, []
        while (at := self._pending.find(self._tag)) >= 0:
            out.append(self._take(at + len(CLOSE) if self.within else at))
            self.within = not self.within
        waiting = max(
            n for n in range(len(self._tag)) if self._tag[:n] == self._pending[len(self._pending) - n :]
        )
        return "".join(out) + self._take(len(self._pending) - waiting)

    def end(self) -> str:
        """What to print at the end: the text that still waits."""
        return self._take(len(self._pending))

    @property
    def _tag(self) -> str:
        return CLOSE if self.within else OPEN

    def _take(self, count: int) -> str:
        from rich.style import Style

        text, self._pending = self._pending[:count], self._pending[count:]
        return Style(dim=True).render(text) if self.within and text else text
