"""What commands read and print: text files, JSON, tables."""

import json
import math
import sys
from pathlib import Path
from typing import Any

STDIN = Path("-")


def read(path: Path) -> str:
    """The text of a file, or of standard input for "-", without its final newline, as llama.cpp reads it.
    Raises ValueError if it is not UTF-8, or if standard input is empty."""
    name = "standard input" if path == STDIN else str(path)
    try:
        text = sys.stdin.read() if path == STDIN else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: byte {error.start} is not UTF-8 text") from None
    if not text and path == STDIN:
        raise ValueError("standard input is empty; give a text as the argument, with -f, or piped")
    return text.removesuffix("\n")


def json_line(value: Any) -> str:
    """One line of JSON. Numpy's values become numbers and lists; NaN and infinity become null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if isinstance(value, Path):
            return str(value)
        if hasattr(value, "tolist"):  # numpy's, without importing numpy
            return plain(value.tolist())
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(value))


def table(rows: list[tuple[Any, ...]]) -> str:
    """Aligned columns, each as wide as its widest entry."""
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(str(x).ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )
