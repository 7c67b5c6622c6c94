"""Gemma 4: names without quotes, and strings between tokens of their own.

<|tool_call>call:weather{city:<|"|>Rome<|"|>,days:3}<tool_call|>
"""

import json

from bonsai_jax.tokens.calls import json_text, named
from bonsai_jax.tokens.calls.cursor import MOST_NAME, Broken, Cursor, Steps
from bonsai_jax.tokens.calls.format import Format, Tools
from bonsai_jax.tokens.calls.grammar import Grammar, gemma_object
from bonsai_jax.tokens.calls.values import ALL, as_json

OPEN, QUOTE, CLOSE = "<|tool_call>", '<|"|>', "<tool_call|>"
SCALAR_ENDS = ",}]"
MOST_NESTED = 64


def read(cursor: Cursor, tools: Tools, trigger: str) -> Steps[None]:
    yield from cursor.spaces()
    yield from cursor.expect("call:")
    name = yield from named.name(cursor)
    if (yield from cursor.peek()) != "{":
        raise Broken
    cursor.call(name)
    yield from _value(cursor)
    yield from json_text.close(cursor, CLOSE)


def _value(cursor: Cursor, depth: int = 0) -> Steps[None]:
    """Pass a value on as JSON, while it comes."""
    if depth > MOST_NESTED:
        raise Broken
    yield from cursor.spaces()
    if (yield from cursor.literal(QUOTE)):
        cursor.arguments('"')
        if (yield from cursor.flow(lambda text: cursor.arguments(_escaped(text)), QUOTE)):
            cursor.arguments('"')
    elif (yield from cursor.literal("{")):
        yield from _entries(cursor, "{", "}", depth + 1)
    elif (yield from cursor.literal("[")):
        yield from _entries(cursor, "[", "]", depth + 1)
    else:
        begin = cursor.at
        while (yield from cursor.room(1)) and cursor.text[cursor.at] not in SCALAR_ENDS:
            cursor.at += 1
        text = cursor.text[begin : cursor.at].strip()
        if (yield from cursor.peek()) and text:
            cursor.arguments(as_json(text, ALL))
        else:
            raise Broken
    cursor.accept()


def _entries(cursor: Cursor, open: str, close: str, depth: int) -> Steps[None]:
    """Pass on what is within brackets, the first of which has been read, and the last bracket."""
    separator = open
    while True:
        yield from cursor.spaces()
        if (yield from cursor.literal(close)):
            cursor.arguments(close if separator != open else open + close)
            return
        if separator != open:
            yield from cursor.expect(",")
            yield from cursor.spaces()
        key = ""
        if open == "{":
            quoted = yield from cursor.literal(QUOTE)
            name = yield from cursor.until(QUOTE if quoted else ":", MOST_NAME)
            if quoted:
                yield from cursor.expect(":")
            key = f"{json.dumps(name.strip(), ensure_ascii=False)}: "
        cursor.arguments(separator + key)
        cursor.accept()
        separator = ", "
        yield from _value(cursor, depth)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


FORMAT = Format(
    name="gemma",
    signs=(OPEN,),
    triggers=(OPEN,),
    read=read,
    grammar=Grammar(OPEN, "call:", gemma_object(QUOTE), f"{CLOSE}{OPEN}call:", CLOSE),
    marks=(OPEN, QUOTE, CLOSE),
)
