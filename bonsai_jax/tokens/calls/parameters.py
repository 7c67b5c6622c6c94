"""Calls with a tag for each parameter, whose values are text that the tool's schema makes JSON (values.py).

    <function=weather>
    <parameter=city>
    Rome
    </parameter>
    </function>

Strings are passed on while they are written; other values when they are complete.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from bonsai_jax.tokens.calls.cursor import MOST_NAME, Broken, Cursor, Steps
from bonsai_jax.tokens.calls.values import as_json, types


@dataclasses.dataclass(frozen=True)
class Style:
    """How a format writes parameters.

    key         what comes before and behind a parameter's name
    value       what comes before a value (after white space), and behind it
    end         what ends a call
    lines       whether a value stands on lines of its own: one line break at either side is not part of it
    attributes  a pattern for what stands behind the name within its tag: group 1 says "true" if the value is
                a string, whatever the schema says
    """

    key: tuple[str, str]
    value: tuple[str, str]
    end: str
    lines: bool = False
    attributes: re.Pattern[str] | None = None


def parameters(cursor: Cursor, style: Style, schema: Any) -> Steps[None]:
    """Read the parameters of a call that has begun, and its end.

    schema  JSON schema of the tool's arguments; {} if there is no such tool
    """
    separator = "{"
    while True:
        yield from cursor.spaces()
        if not (yield from cursor.literal(style.key[0])):
            break
        name, allowed = yield from _key(cursor, style, schema)
        cursor.arguments(f"{separator}{json.dumps(name, ensure_ascii=False)}: ")
        cursor.accept()
        separator = ", "
        if allowed == {"string"}:
            whole = yield from _string(cursor, style)
        else:
            whole = yield from _other(cursor, style, allowed)
        if not whole:
            return
    ended = yield from cursor.literal(style.end)
    rest = cursor.text[cursor.at :]
    cut_off = cursor.closed and not ended and (style.key[0].startswith(rest) or style.end.startswith(rest))
    if not cut_off:
        cursor.arguments("{}" if separator == "{" else "}")
    elif separator == "{":
        cursor.arguments("{")  # no JSON, so that nobody takes it for a call without arguments
    cursor.accept() if ended else None


def _key(cursor: Cursor, style: Style, schema: Any) -> Steps[tuple[str, frozenset[str]]]:
    """Read a parameter's name, and what comes before its value; returns the name and the types allowed."""
    name = yield from cursor.until(style.key[1], MOST_NAME)
    if style.value[0]:
        yield from cursor.spaces()
        yield from cursor.expect(style.value[0])
    given = None
    if style.attributes is not None:
        match = style.attributes.fullmatch(name)
        if match is None:
            raise Broken
        name, given = match[1], match[2]
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    own = properties.get(name) if isinstance(properties, Mapping) else None
    allowed = types(own, schema)
    if given == "true":
        allowed = frozenset(("string",))
    elif given == "false":
        allowed = types({}) - {"string"}
    return name.strip(), allowed


def _string(cursor: Cursor, style: Style) -> Steps[bool]:
    """Pass a string on as it comes. False: the text ended within it."""
    pending = ""

    def put(text: str) -> None:
        nonlocal pending
        text = pending + text
        pending = "\n" if style.lines and text.endswith("\n") else ""
        cursor.arguments(json.dumps(text.removesuffix(pending), ensure_ascii=False)[1:-1])

    cursor.arguments('"')
    if style.lines:
        yield from cursor.literal("\n")
    whole = yield from cursor.flow(put, style.value[1])
    cursor.arguments('"' if whole else json.dumps(pending)[1:-1])
    return bool(whole)


def _other(cursor: Cursor, style: Style, allowed: frozenset[str]) -> Steps[bool]:
    """Pass a value on that may be no string, when it is complete. False: the text ended within it."""
    try:
        text = yield from cursor.until(style.value[1])
    except Broken:
        cursor.arguments(cursor.text[cursor.at :])
        cursor.forget(len(cursor.text))
        return False
    if style.lines:
        text = text.removeprefix("\n").removesuffix("\n")
    cursor.arguments(as_json(text, allowed))
    return True
