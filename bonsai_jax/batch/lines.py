"""Lines of a batch's input: {"custom_id": ..., "method": "POST", "url": ..., "body": {...}}.

What is wrong with the file ends the job before it begins: JSON that is none, a custom_id that is missing or
is another line's. What is wrong with a request is its answer.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bonsai_jax.batch.requests import FIELDS, FieldError, Request, request


@dataclasses.dataclass(frozen=True)
class Line:
    """number   of the line in its file, from 1
    request     what its body asks for, or why nobody can answer it"""

    number: int
    custom_id: str
    request: Request | FieldError


@dataclasses.dataclass
class Needs:
    """What lines need: how many are not done, and of an engine for all. model: the one that they name."""

    lines: int = 0
    logprobs: int | None = None
    logit_biases: int = 1
    model: str | None = None


def read(path: Path) -> Iterator[Line]:
    """Lines that are not empty. Raises ValueError with line and column for what is no JSON object, or has no
    custom_id."""
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
    """Of the lines that are not done.

    one_model   the lines say which model answers them
    Raises ValueError, with the lines' numbers, where two have one custom_id or name two models, and for a
    custom_id in `done` that no line has.
    """
    found, numbers, of_model = Needs(), dict[str, int](), 0
    for line in lines:
        if line.custom_id in numbers:
            raise ValueError(
                f"{path}: lines {numbers[line.custom_id]} and {line.number} have the same custom_id, "
                f"{line.custom_id!r}; give each its own"
            )
        numbers[line.custom_id] = line.number
        found.lines += line.custom_id not in done
        asked = line.request
        if isinstance(asked, FieldError):
            continue
        if one_model and asked.model is not None:
            if found.model not in (None, asked.model):
                raise ValueError(
                    f"{path}: lines {of_model} and {line.number} name two models, {found.model!r} and "
                    f"{asked.model!r}; say which one answers all"
                )
            found.model, of_model = asked.model, of_model or line.number
        if asked.logprobs is not None:
            found.logprobs = max(found.logprobs or 0, asked.logprobs)
        found.logit_biases = max(found.logit_biases, len(asked.sampling.get("logit_bias", ())))
    for custom_id in sorted(done - numbers.keys())[:1]:
        raise ValueError(f"{path} has no line {custom_id!r}, which the output answers; give another output")
    return found


def objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbers and JSON objects of the lines of a file, empty ones left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, parse(line, f"{path}:{number}")


def parse(line: bytes, where: str) -> dict[str, Any]:
    """A line's JSON object. Raises ValueError with the column."""
    try:
        found = json.loads(line.decode().removeprefix("\ufeff").rstrip("\r\n"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}:{error.colno}: not JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}:{error.start + 1}: not UTF-8") from None
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of too many digits
        raise ValueError(f"{where}: not JSON that Python reads: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f'{where}:1: not a JSON object, such as {{"custom_id": "1", ...}}')
    return found


def _request(line: dict[str, Any]) -> Request:
    for name in line.keys() - {"method", "url", "body"}:
        raise FieldError(name, "not a field of a line; it has custom_id, method, url and body")
    if line.get("method") != "POST":
        raise FieldError("method", f"{line.get('method')!r} is not supported, only 'POST'")
    url, body = line.get("url"), line.get("body")
    if not isinstance(url, str) or url not in FIELDS:
        raise FieldError("url", f"{url!r} is not supported, only {' and '.join(map(repr, FIELDS))}")
    if not isinstance(body, dict):
        raise FieldError("body", "not an object")
    return request(url, body)
