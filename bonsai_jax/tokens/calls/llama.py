"""Llama 3.1 to 3.3. The whole answer is the call; <|python_tag|> may come first.

    {"name": "weather", "parameters": {"city": "Rome"}}

An answer in JSON looks the same, so only names of the request's tools make a call.
"""

from bonsai_jax.tokens.calls import json_text
from bonsai_jax.tokens.calls.cursor import Cursor, Steps
from bonsai_jax.tokens.calls.format import Format, Tools
from bonsai_jax.tokens.calls.grammar import Grammar, json_object

TAG = "<|python_tag|>"


def read(cursor: Cursor, tools: Tools, trigger: str) -> Steps[None]:
    if trigger == "{":
        cursor.at -= 1
    yield from json_text.calls(cursor, TAG, known=tools)


FORMAT = Format(
    name="llama",
    signs=(TAG, '{"name": function name, "parameters"'),
    triggers=(TAG,),
    at_start="{",
    read=read,
    grammar=Grammar("{", "", json_object("", "parameters", "}"), "; {", "", whole_answer=True),
    marks=(TAG,),
)
