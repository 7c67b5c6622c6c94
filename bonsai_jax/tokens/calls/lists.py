"""Formats that are a JSON list of calls behind a mark of their own.

<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome"}}]        Granite 3, Phi-4-mini
<TOOLCALL>[{"name": "weather", "arguments": {"city": "Rome"}}]</TOOLCALL>        Nemotron
"""

from bonsai_jax.tokens.calls import json_text
from bonsai_jax.tokens.calls.cursor import Cursor, Steps
from bonsai_jax.tokens.calls.format import Format, Tools
from bonsai_jax.tokens.calls.grammar import Grammar, json_object


def listed(name: str, mark: str, end: str, must_end: bool) -> Format:
    """The format whose calls are a list behind a mark. must_end: constrained calls have the end mark."""

    def read(cursor: Cursor, tools: Tools, trigger: str) -> Steps[None]:
        yield from json_text.calls(cursor, end)
        yield from json_text.close(cursor, end)

    grammar = Grammar(mark, "[", json_object("{", "arguments", "}"), ", ", f"]{end}" if must_end else "]")
    return Format(name, (mark,), (mark,), read, grammar, marks=(mark, end))


GRANITE = listed("granite", "<|tool_call|>", "<|/tool_call|>", must_end=False)
NEMOTRON = listed("nemotron", "<TOOLCALL>", "</TOOLCALL>", must_end=True)
