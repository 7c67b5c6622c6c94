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

    columns = {match.start("meaning") for match in map(ROW.match, lines) if match}
    for line in lines:
        if row := split_row(line, columns):
            if sentences:
                flush()
            rows.append(row)
        elif line.startswith("  ") and rows:
            rows[-1][1] += " " + line.strip()
        else:
            if rows:
                flush()
            sentences.append(line.strip())
    flush()
    return parts


def split_row(line: str, columns: set[int]) -> list[str] | None:
    """Name and meaning; the longest name of a table stands one space before a column of meanings."""
    if match := ROW.match(line):
        return [match["name"], match["meaning"]]
    name, _, meaning = line.partition(" ")
    tight = name.isidentifier() and len(name) + 1 in columns and name not in ("Returns", "Raises")
    return [name, meaning] if tight else None


def plain(text: str) -> str:
    """Text in which Markdown finds nothing but `code`."""
    spans = text.split("`")
    spans[::2] = [re.sub(r"([\\*_\[\]<>|])", r"\\\1", span) for span in spans[::2]]
    return "`".join(spans)
