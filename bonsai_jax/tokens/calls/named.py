"""Calls whose arguments are a JSON object behind the function's name."""

from bonsai_jax.tokens.calls.cursor import MOST_NAME, Broken, Cursor, Steps
from bonsai_jax.tokens.calls.json_text import arguments_as_they_come


def name(cursor: Cursor) -> Steps[str]:
    """Read a function's name: letters, digits and _ . : / -"""
    begin = cursor.at
    while (yield from cursor.room(1)) and is_name(cursor.text[cursor.at]) and cursor.at - begin < MOST_NAME:
        cursor.at += 1
    if cursor.at == begin:
        raise Broken
    return cursor.text[begin : cursor.at]


def is_name(text: str) -> bool:
    """Whether a text may be a function's name."""
    return bool(text) and all(letter.isalnum() or letter in "_.:/-" for letter in text)


def call(cursor: Cursor, function: str, *ends: str) -> Steps[None]:
    """Read the arguments of a call of this function."""
    yield from cursor.spaces()
    if (yield from cursor.peek()) != "{":
        raise Broken
    cursor.call(function)
    yield from arguments_as_they_come(cursor, *ends)
