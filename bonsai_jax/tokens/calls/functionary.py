"""Functionary, and Llama where its system prompt asks for it: JSON within a tag with the name.

<function=weather>{"city": "Rome"}</function>
"""

from bonsai_jax.tokens.calls import json_text, named
from bonsai_jax.tokens.calls.cursor import MOST_NAME, Broken, Cursor, Steps
from bonsai_jax.tokens.calls.format import Format, Tools
from bonsai_jax.tokens.calls.grammar import Grammar, name_and_json

OPEN, CLOSE = "<function=", "</function>"


def read(cursor: Cursor, tools: Tools, trigger: str) -> Steps[None]:
    name = (yield from cursor.until(">", MOST_NAME)).strip()
    if not named.is_name(name):
        raise Broken
    yield from named.call(cursor, name, CLOSE)
    yield from json_text.close(cursor, CLOSE)


FORMAT = Format(
    name="functionary",
    signs=(OPEN,),
    triggers=(OPEN,),
    read=read,
    grammar=Grammar(OPEN, "", name_and_json("", ">", CLOSE), OPEN, ""),
)
