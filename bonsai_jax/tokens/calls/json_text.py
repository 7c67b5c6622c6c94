"""JSON within an answer: calls that are objects with a name and arguments, read while they are written.

    {"name": "weather", "arguments": {"city": "Rome"}}

Arguments are passed on as the model writes them, as soon as the name is known. JSON that breaks before that
is no call. Broken arguments are passed on all the same, because their beginning already was; they end at the
end of the text, or where the format's end mark stands outside of a JSON string.
"""

import json
import re
from collections.abc import Collection

from bonsai_jax.tokens.calls.cursor import MOST_NAME, Broken, Cursor, Steps

NAMES = ("name", "tool_name")
ARGUMENTS = ("arguments", "parameters")
IN_STRING = re.compile(r'["\\]')
SCALAR = re.compile(r"[-+.\w]")


def calls(cursor: Cursor, *ends: str, known: Collection[str] | None = None) -> Steps[None]:
    """Read one call, several behind each other (with white space, "," or ";" between), or a list of calls.

    ends   end marks of the format, which end a broken JSON value
    known  names of functions; an object with another name is no call
    Raises Broken where the text is not a call.
    """
    yield from cursor.spaces()
    if (yield from cursor.literal("[")):
        while True:
            yield from cursor.spaces()
            yield from call(cursor, *ends, known=known)
            yield from cursor.spaces()
            if (yield from cursor.literal("]")):
                return cursor.accept()
            yield from cursor.expect(",")
    while True:
        yield from call(cursor, *ends, known=known)
        resume_at = cursor.at
        yield from cursor.spaces()
        if (yield from cursor.either(",", ";")):
            yield from cursor.spaces()
        if (yield from cursor.peek()) != "{":
            cursor.at = resume_at
            return


def close(cursor: Cursor, *ends: str) -> Steps[None]:
    """Read white space and an end mark, if it comes next."""
    resume_at = cursor.at
    yield from cursor.spaces()
    if (yield from cursor.either(*ends)):
        cursor.accept()
    else:
        cursor.at = resume_at


def call(cursor: Cursor, *ends: str, known: Collection[str] | None = None) -> Steps[None]:
    """Read an object with a name and arguments, in any order and among other members."""
    yield from cursor.expect("{")
    name, arguments, begun = None, "{}", False
    try:
        while True:
            yield from cursor.spaces()
            if (yield from cursor.literal("}")):
                break
            yield from cursor.literal(",")
            yield from cursor.spaces()
            key = yield from string(cursor)
            yield from cursor.spaces()
            yield from cursor.expect(":")
            yield from cursor.spaces()
            if key in NAMES and name is None:
                name = yield from string(cursor)
                if not name or len(name) > MOST_NAME or (known is not None and name not in known):
                    raise Broken
            elif key in ARGUMENTS and not begun and name is not None and (yield from cursor.peek()) == "{":
                cursor.call(name)
                begun = True
                yield from arguments_as_they_come(cursor, *ends)
            elif key in ARGUMENTS and not begun:
                arguments = yield from whole_arguments(cursor)
            else:
                yield from value(cursor)
    except Broken:
        if not begun:
            raise
        cursor.at = cursor.good
    if not begun:
        if name is None:
            raise Broken
        cursor.call(name)
        cursor.arguments(arguments)
    cursor.accept()


def string(cursor: Cursor) -> Steps[str]:
    """Read a JSON string; returns what it stands for."""
    begin = cursor.at
    yield from cursor.expect('"')
    yield from _to_end_of_string(cursor)
    try:
        return json.loads(cursor.text[begin : cursor.at], strict=False)
    except ValueError:
        raise Broken from None


def _to_end_of_string(cursor: Cursor) -> Steps[None]:
    """Read the rest of a string, whose first quote has been read."""
    while True:
        mark = IN_STRING.search(cursor.text, cursor.at)
        if mark is not None and mark[0] == '"':
            cursor.at = mark.end()
            return
        cursor.at = len(cursor.text) if mark is None else mark.start()
        if not (yield from cursor.room(1 if mark is None else 2)):
            raise Broken
        if mark is not None:
            cursor.at += 2


def value(cursor: Cursor) -> Steps[str]:
    """Read any JSON value; returns its text. Only strings and brackets are checked."""
    begin, depth = cursor.at, 0
    while True:
        first = yield from cursor.peek()
        if first == '"':
            yield from string(cursor)
        elif first in ("{", "["):
            cursor.at += 1
            depth += 1
        elif first in ("}", "]") and depth:
            cursor.at += 1
            depth -= 1
        elif SCALAR.match(first):
            while (yield from cursor.room(1)) and SCALAR.match(cursor.text, cursor.at):
                cursor.at += 1
        elif first in (",", ":") and depth:
            cursor.at += 1
        else:
            raise Broken
        if not depth:
            return cursor.text[begin : cursor.at]
        yield from cursor.spaces()


def whole_arguments(cursor: Cursor) -> Steps[str]:
    """Read arguments that come before the name, or are an object within a string; returns the object."""
    text = yield from value(cursor)
    try:
        if text.startswith('"'):
            text = json.loads(text, strict=False).strip() or "null"
        given = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        raise Broken from None
    if given is not None and not isinstance(given, dict):
        raise Broken
    return "{}" if given is None else text


def arguments_as_they_come(cursor: Cursor, *ends: str) -> Steps[bool]:
    """Pass a JSON object on as it is written. False: it ended before its last bracket."""
    firsts = re.escape("".join(end[0] for end in ends))
    stop = re.compile(f'["{{}}\\[\\]{firsts}]')
    at, depth, quoted = cursor.at, 0, False

    def put() -> None:
        nonlocal at
        cursor.arguments(cursor.text[cursor.at : at])
        cursor.forget(at)
        at = 0

    while True:
        mark = (IN_STRING if quoted else stop).search(cursor.text, at)
        at, needed = (len(cursor.text), 1) if mark is None else (mark.start(), 1)
        if mark is None:
            pass
        elif mark[0] == "\\":
            needed = 2
        elif mark[0] == '"':
            quoted = not quoted
        elif mark[0] in "{[":
            depth += 1
        elif mark[0] in "}]":
            depth -= 1
        elif any(cursor.text.startswith(end, at) for end in ends):
            put()
            return False
        elif any(end.startswith(cursor.text[at:]) for end in ends):
            needed = len(cursor.text) - at + 1
        if mark is not None and len(cursor.text) - at >= needed:
            at += needed
            if not depth:
                put()
                return True
            continue
        put()
        if not (yield from cursor.room(needed)):
            at = len(cursor.text)
            put()
            return False
