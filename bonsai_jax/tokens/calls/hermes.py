"""Qwen 2.5 and 3, Hermes, Granite 4, and many others.

<tool_call>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_call>
"""

from bonsai_jax.tokens.calls import json_text
from bonsai_jax.tokens.calls.cursor import Cursor, Steps
from bonsai_jax.tokens.calls.format import Format, Tools
from bonsai_jax.tokens.calls.grammar import Grammar, json_object

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def read(cursor: Cursor, tools: Tools, trigger: str) -> Steps[None]:
    yield from json_text.calls(cursor, CLOSE)
    yield from json_text.close(cursor, CLOSE)


FORMAT = Format(
    name="hermes",
    signs=(OPEN,),
    triggers=(OPEN,),
    read=read,
    grammar=Grammar(OPEN, "", json_object("\n{", "arguments", f"}}\n{CLOSE}"), f"\n{OPEN}", ""),
    marks=(OPEN, CLOSE),
)
