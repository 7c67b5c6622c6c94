"""What a model thinks before it answers, between <think> and </think>: dimmed on a terminal."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bonsai_jax.tokens.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"


def begun(tokenizer: "Tokenizer", ids: list[int]) -> bool:
    """Whether a prompt ends within a thought, as templates leave it that open one."""
    return tokenizer.decode(ids[-8:]).rstrip().endswith(OPEN)


class Shown:
    """Text on its way to stdout, piece by piece: on a terminal thoughts are dimmed, tags and all; elsewhere
    it is as it was.

    within  whether it begins within a thought
    """

    def __init__(self, within: bool):
        from rich.console import Console

        console = Console()
        self.dims = console.is_terminal and not console.is_dumb_terminal
        self.within, self._held = within, ""

    def next(self, text: str) -> str:
        """What to print of the text so far: the beginning of a tag waits for the rest of it."""
        if not self.dims:
            return text
        self._held, out = self._held + text, []
        while (at := self._held.find(self._tag)) >= 0:
            out.append(self._taken(at + len(CLOSE) if self.within else at))
            self.within = not self.within
        waiting = max(n for n in range(len(self._tag)) if self._tag[:n] == self._held[len(self._held) - n :])
        return "".join(out) + self._taken(len(self._held) - waiting)

    def end(self) -> str:
        """What still waits."""
        return self._taken(len(self._held))

    @property
    def _tag(self) -> str:
        return CLOSE if self.within else OPEN

    def _taken(self, count: int) -> str:
        from rich.style import Style

        text, self._held = self._held[:count], self._held[count:]
        return Style(dim=True).render(text) if self.within and text else text
