"""An answer on a terminal, as it comes: markdown block by block, words wrapped at the window's edge.

    blocks that are complete      printed once, and never touched again: they scroll away as usual
    the block that is being written   drawn again with every piece; only lines that changed are written

A block is what stands at the top of a document: a paragraph, a heading, a table, a fence of code; and an item
of a list.
"""

import itertools
import re
import sys
import threading
import time
from typing import NamedTuple

from markdown_it import MarkdownIt
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown
from rich.style import Style
from rich.syntax import Syntax
from rich.text import Text

from bonsai_jax.tokens.answer_parser import Event

DRAW_EVERY_S = 0.05
DRAW_SHARE = 0.2  # at most, of the time, for drawing

# Without HTML: tags in an answer are text that the reader should see.
PARSER = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")
CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
CODES = re.compile(r"\x1b\[[0-9;]*m|\x1b\]8;[^\x1b]*\x1b\\")
TRAILING = re.compile(r" +((?:\x1b\[[0-9;]*m)*)$")


class Region:
    """The lines at the end of a terminal that are drawn again and again.

    content  what `draw` was given last
    note     a line below it about the program
    lines    what the terminal shows: the end of the two that fits the window
    """

    def __init__(self, console: Console):
        self.console = console
        self.content: list[str] = []
        self.note: list[str] = []
        self.lines: list[str] = []

    def draw(self, lines: list[str]) -> None:
        """Replace the lines drawn before."""
        self.content = lines
        # A line above the top of the window could not be drawn again.
        self._show([*lines, *self.note][1 - self.console.height :])

    def write_below(self, text: str | None) -> None:
        """Set the note; None: remove it."""
        self.note = [] if text is None else [self.one_line(text)]
        self.draw(self.content)

    def finish(self, lines: list[str]) -> None:
        """Replace the lines by these, which stay."""
        self._show(lines)
        if self.lines:
            self._write("\n")
        self.content, self.lines = [], []

    def one_line(self, text: str) -> str:
        """A dim line, cut at the window's edge."""
        with self.console.capture() as capture:
            self.console.print(Text(text, Style(dim=True)), end="", no_wrap=True, overflow="ellipsis")
        return capture.get()

    def _show(self, lines: list[str]) -> None:
        """Lines at the beginning that are the same stay untouched."""
        if lines == self.lines:
            return
        same, most = 0, min(len(lines), len(self.lines)) - 1
        while same < most and lines[same] == self.lines[same]:
            same += 1
        # Where the window has become narrower, terminals have wrapped what was drawn.
        up = sum(self._height(line) for line in self.lines[same:]) - 1
        move = f"\r\x1b[{up}A" if up > 0 else "\r"
        self._write(f"{move}\x1b[J" + "\n".join(lines[same:]))
        self.lines = list(lines)

    def _height(self, line: str) -> int:
        """Rows of the window that a line takes."""
        return max(1, -(-cell_len(CODES.sub("", line)) // self.console.width))

    def _write(self, text: str) -> None:
        self.console.file.write(text)
        self.console.file.flush()


class CodeLines(CodeBlock):
    """Code without a frame or background, so that it can be copied."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        yield Syntax(code, self.lexer_name, theme=self.theme, word_wrap=True, background_color="default")


class HeadingLine(Heading):
    """A heading at the left."""

    LEVEL_ALIGN = {}  # noqa: RUF012 - as in rich


class Document(Markdown):
    """Markdown as chats show it: line breaks are the model's, addresses are shown."""

    elements = Markdown.elements | {
        "fence": CodeLines,
        "code_block": CodeLines,
        "heading_open": HeadingLine,
    }

    def __init__(self, text: str):
        super().__init__("", code_theme="ansi_dark", hyperlinks=False)
        self.parsed = PARSER.parse(text)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"


class Block(NamedTuple):
    """Where a block begins.

    line  of the text, counted from 0
    item  whether it is an item of a list
    """

    line: int
    item: bool


def blocks(text: str) -> list[Block]:
    """The blocks of a markdown text, in order."""
    starts = []
    for token in PARSER.parse(text):
        if token.map is None or token.type in ("bullet_list_open", "ordered_list_open"):
            continue
        if token.level == 0 or (token.level == 1 and token.type == "list_item_open"):
            starts.append(Block(token.map[0], token.type == "list_item_open"))
    return starts


class Passage:
    """Text of one kind, a thought or an answer, while it is written.

    markdown  whether it is rendered; else its lines are shown as they are, dimmed for a thought
    """

    def __init__(self, region: Region, markdown: bool, dim: bool):
        self.region, self.markdown, self.dim = region, markdown, dim
        self._text = ""  # of the blocks that are not finished
        self._after: Block | None = None  # the block that was finished last
        self._draw_at = 0.0

    def add(self, text: str) -> None:
        self._text += text.translate(CONTROL)
        began = time.perf_counter()
        if began < self._draw_at:
            return
        starts = self._starts()
        self._finish(starts)
        current = self._lines(self._text, starts[-1]) if starts else []
        self.region.draw(current)
        took = time.perf_counter() - began
        self._draw_at = began + max(DRAW_EVERY_S, took / DRAW_SHARE)

    def end(self) -> None:
        starts = self._starts()
        self._finish(starts)
        if starts:
            self.region.finish(self._lines(self._text, starts[-1]))

    def _starts(self) -> list[Block]:
        if self.markdown:
            return blocks(self._text)
        if self._after is None:
            self._text = self._text.lstrip("\n")
        lines = self._text.split("\n")
        return [Block(at, True) for at in range(len(lines) - (not lines[-1]))]

    def _finish(self, starts: list[Block]) -> None:
        """Print all blocks but the last for good."""
        lines = self._text.split("\n")
        for block, after in itertools.pairwise(starts):
            self.region.finish(self._lines("\n".join(lines[block.line : after.line]), block))
            self._after = block
        if starts:
            self._text = "\n".join(lines[starts[-1].line :])

    def _lines(self, text: str, block: Block) -> list[str]:
        """A block's lines on the terminal, after an empty one where blocks are apart."""
        console = self.region.console
        together = self._after is None or (block.item and self._after.item)
        content: RenderableType = Text(text.rstrip("\n"), Style(dim=self.dim))
        with console.capture() as capture:
            console.print(Document(text) if self.markdown else content)
        lines = [TRAILING.sub(r"\1", line) for line in capture.get().split("\n")]
        if self.markdown:  # rich puts empty lines around some blocks
            full = [at for at, line in enumerate(lines) if CODES.sub("", line).strip()] or [0]
            lines = lines[full[0] : full[-1] + 1]
        else:
            lines.pop()  # after the last line break
        return lines if together else ["", *lines]


class Screen:
    """An answer on a terminal. Safe to call from several threads.

    markdown  whether the answer is rendered
    """

    def __init__(self, *, markdown: bool):
        self.region = Region(Console(file=sys.stdout, highlight=False))
        self.markdown = markdown
        self._lock = threading.Lock()
        self._passage: Passage | None = None
        self._kind = ""

    def wait(self, text: str) -> None:
        """A line that is shown until the answer comes."""
        with self._lock:
            self.region.draw([self.region.one_line(text)])

    def note(self, text: str | None) -> None:
        """A line below the answer so far, about the program; None: remove it."""
        with self._lock:
            self.region.write_below(text)

    def add(self, text: str, events: list[Event]) -> None:
        """More of the answer.

        text    as the model writes it
        events  what it is made of (tokens/answer_parser.py)
        """
        with self._lock:
            for event in events:
                self._add(event)

    def end(self) -> None:
        """The text is complete, or nothing more will come."""
        with self._lock:
            if self._passage:
                self._passage.end()
            else:
                self.region.draw([])

    def _add(self, event: Event) -> None:
        kind, text, name = event
        text = text if name is None else f"{name} {text}"
        if self._passage is None or kind != self._kind or name is not None:
            if not text.strip():  # an empty thought, or line breaks around one
                return
            if self._passage:
                self._passage.end()
                self.region.finish([""])
            markdown = self.markdown and kind == "answer"
            self._passage, self._kind = Passage(self.region, markdown, kind == "thought"), kind
        self._passage.add(text)


class Pipe:
    """An answer as plain text, for a file, a pipe or a terminal that only prints."""

    def wait(self, text: str) -> None:
        pass

    def note(self, text: str | None) -> None:
        pass

    def add(self, text: str, events: list[Event]) -> None:
        print(text, end="", flush=True)

    def end(self) -> None:
        print(flush=True)


def output(*, plain: bool) -> Screen | Pipe:
    """Where an answer goes: standard output."""
    console = Console(file=sys.stdout)
    if console.is_terminal and not console.is_dumb_terminal:
        return Screen(markdown=not plain)
    return Pipe()
