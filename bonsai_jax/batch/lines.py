"""Lines of a batch's input: {"custom_id": ..., "method": "POST", "url": ..., "body": {...}}.

An error in the file ends the job before it begins: invalid JSON, a custom_id that is missing or not unique.
An error in a request becomes the answer to its line.
"""

import contextlib
import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bonsai_jax.protocols import openai_chat, openai_completions
from bonsai_jax.protocols.errors import FieldError
from bonsai_jax.protocols.request import Request

PROTOCOLS = {protocol.PATH: protocol for protocol in (openai_chat, openai_completions)}


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the input.

    number      in its file, from 1
    request     from its body, or the error in it
    """

    number: int
    custom_id: str
    request: Request | FieldError


@dataclasses.dataclass
class Needs:
    """What the unanswered lines need of an engine.

    lines          how many there are
    logprobs, logit_biases   the most that one asks for
    model          the name in the lines
    """

    lines: int = 0
    logprobs: int | None = None
    logit_biases: int = 1
    model: str | None = None


@contextlib.contextmanager
def opened(source: str | Path) -> Iterator[Path]:
    """A file with the lines, which are read twice; "-" is standard input, copied to one."""
    if str(source) != "-":
        yield Path(source)
        return
    with tempfile.TemporaryDirectory(prefix="bonsai-jax-") as folder:
        path = Path(folder) / "stdin"
        with path.open("wb") as copy:
            shutil.copyfileobj(sys.stdin.buffer, copy)
        yield path


def read(path: Path) -> Iterator[Line]:
    """Lines that are not empty. Raises ValueError with line and column for a line that is not a JSON object
    or has no custom_id."""
    for number, line in objects(path):
        custom_id = line.pop("custom_id", None)
        if not isinstance(custom_id, str) or not custom_id:
            raise ValueError(
                f"{path}:{number}: custom_id is {custom_id!r}; each line needs a text of its own"
            )
        try:
            yield Line(number, custom_id, _request(line))
        except FieldError as error:
            yield Line(number, custom_id, error)


def needs(path: Path, lines: Iterable[Line], done: set[str], *, one_model: bool) -> Needs:
    """The needs of the lines that are not in `done`.

    one_model   all lines must name the same model
    Raises ValueError, with the lines' numbers, where two have the same custom_id or name two models, and for
    a custom_id in `done` that no line has.
    """
    total, numbers, model_line = Needs(), dict[str, int](), 0
    for line in lines:
        if line.custom_id in numbers:
            raise ValueError(
                f"{path}: lines {numbers[line.custom_id]} and {line.number} have the same custom_id, "
                f"{line.custom_id!r}; give each its own"
            )
        numbers[line.custom_id] = line.number
        total.lines += line.custom_id not in done
        asked = line.request
        if isinstance(asked, FieldError):
            continue
        if one_model and asked.model is not None:
            if total.model not in (None, asked.model):
                raise ValueError(
                    f"{path}: lines {model_line} and {line.number} name two models, {total.model!r} and "
                    f"{asked.model!r}; say which one answers all"
                )
            total.model, model_line = asked.model, model_line or line.number
        if asked.logprobs is not None:
            total.logprobs = max(total.logprobs or 0, asked.logprobs)
        total.logit_biases = max(total.logit_biases, len(asked.sampling.get("logit_bias", ())))
    for custom_id in sorted(done - numbers.keys())[:1]:
        raise ValueError(f"{path} has no line {custom_id!r}, which the output answers; give another output")
    return total


def objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbers and JSON objects of the lines of a file, except empty ones."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, parse(line, f"{path}:{number}")


def parse(line: bytes, where: str) -> dict[str, Any]:
    """A line's JSON object. Raises ValueError with the column."""
    try:
        parsed = json.loads(line.decode().removeprefix("\ufeff").rstrip("\r\n"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}:{error.colno}: not JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}:{error.start + 1}: not UTF-8") from None
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of too many digits
        raise ValueError(f"{where}: not JSON that Python reads: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f'{where}:1: not a JSON object, such as {{"custom_id": "1", ...}}')
    return parsed


def _request(line: dict[str, Any]) -> Request:
    for name in line.keys() - {"method", "url", "body"}:
        raise FieldError(name, "not a field of a line; it has custom_id, method, url and body")
    if line.get("method") != "POST":
        raise FieldError("method", f"{line.get('method')!r} is not supported, only 'POST'")
    url, body = line.get("url"), line.get("body")
    if not isinstance(url, str) or url not in PROTOCOLS:
        raise FieldError("url", f"{url!r} is not supported, only {' and '.join(map(repr, PROTOCOLS))}")
    if not isinstance(body, dict):
        raise FieldError("body", "not an object")
    return PROTOCOLS[url].request(body, strict=True)
