"""An answer as `generate` prints it on a terminal: thoughts are dimmed."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bonsai_jax.tokens.answer_parser import Event, Harmony, Tags


class Shown:
    """Text as `generate` prints it, piece by piece. On a terminal thoughts are dimmed and the marks around
    them left out, and a call is its function's name before its arguments; elsewhere the text is unchanged."""

    def __init__(self, parser: "Tags | Harmony"):
        from rich.console import Console

        console = Console()
        self.dims = console.is_terminal and not console.is_dumb_terminal
        self._parser, self._last = parser, ""
        self._kind: str | None = None  # of the event before

    def next(self, text: str) -> str:
        """What to print after one more piece."""
        return self._shown(self._parser.next(text)) if self.dims else text

    def end(self) -> str:
        """What to print at the end."""
        return self._shown(self._parser.end()) if self.dims else ""

    def _shown(self, events: list["Event"]) -> str:
        from rich.style import Style

        out = ""
        for kind, text, name in events:
            own = f"{name} {text}" if name is not None else text
            changes = name is not None or kind != self._kind
            if changes and self._last and "\n" not in (self._last, own[:1]):
                out += "\n\n"
            out += Style(dim=True).render(own) if kind == "thought" else own
            self._kind, self._last = kind, own[-1:] or self._last
        return out
