"""An extension of griffe: our docstrings, which are made for a terminal, as Markdown.

name   meaning              a table of arguments or fields; lines that go on are indented
y = sum_k x[k] W[n, k]      a formula, in a paragraph of its own: code
Returns ... Raises ...      sentences; words in `quotes` are code
"""

import re

import griffe

ROW = re.compile(r"(?P<name>[\w`.*, \[\]()]*?[\w)\]`]) {2,}(?P<meaning>\S.*)")
FORMULA = re.compile(r"^[^.]*?( <- |=) ?\S.*$")


class Docstrings(griffe.Extension):
    def on_package(self, *, pkg, loader, **_) -> None:
        """Every docstring of a package, when it has been read."""
        rewrite(pkg)


def rewrite(obj) -> None:
    if obj.docstring:
        obj.docstring.value = markdown(obj.docstring.value)
    for member in obj.members.values():
        if not member.is_alias:
            rewrite(member)


def markdown(docstring: str) -> str:
    parts = []
    for paragraph in docstring.split("\n\n"):
        lines = paragraph.split("\n")
        if all(line.startswith("    ") for line in lines):
            parts.append(paragraph)
        elif is_formula(lines):
            parts.append("\n".join("    " + line for line in lines))
        else:
            parts += tables(lines)
    return "\n\n".join(parts)


def is_formula(lines: list[str]) -> bool:
    """A paragraph of equations: signs and names, no sentence."""
    text = " ".join(lines)
    return "=" in text and not text.endswith((".", ":")) and not any(ROW.match(line) for line in lines[:1])


def tables(lines: list[str]) -> list[str]:
    """Rows become Markdown tables, and the lines between them sentences."""
    parts: list[str] = []
    rows: list[list[str]] = []
    sentences: list[str] = []

    def flush() -> None:
        if sentences:
            parts.append(plain(" ".join(sentences)))
        if rows:
            parts.append("| name | meaning |\n|---|---|\n" + "\n".join(
                f"| `{name.strip('`')}` | {plain(meaning)} |" for name, meaning in rows
            ))  # fmt: skip
        sentences.clear()
        rows.clear()

    for line in lines:
        if match := ROW.match(line):
            if sentences:
                flush()
            rows.append([match["name"], match["meaning"]])
        elif line.startswith("  ") and rows:
            rows[-1][1] += " " + line.strip()
        else:
            if rows:
                flush()
            sentences.append(line.strip())
    flush()
    return parts


def plain(text: str) -> str:
    """Text in which Markdown finds nothing but `code`."""
    spans = text.split("`")
    spans[::2] = [re.sub(r"([\\*_\[\]<>|])", r"\\\1", span) for span in spans[::2]]
    return "`".join(spans)
