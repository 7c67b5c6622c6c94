"""Formats that are a JSON list of calls behind a mark of their own.

<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome"}}]        Granite 3, Phi-4-mini
<TOOLCALL>[{"name": "weather", "arguments": {"city": "Rome"}}]</TOOLCALL>        Nemotron
<tool_calls>[{"name": "weather", "arguments": {"city": "Rome"}}]</tool_calls>        Apriel
<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Rome"}}]<|END_ACTION|>
                                                                         Command R7B and A
"""

from bonsai_jax.tokens.calls import json_text
from bonsai_jax.tokens.calls.cursor import Cursor, Steps
from bonsai_jax.tokens.calls.format import Format, Tools
from bonsai_jax.tokens.calls.grammar import Call, Grammar, command_object, json_object


def listed(name: str, mark: str, end: str, *, ends: str | None = None, call: Call | None = None) -> Format:
    """The format whose calls are a list behind a mark.

    end   the mark behind the list, which answers may lack
    ends  what constrained answers have there; None: `end`
    """

    def read(cursor: Cursor, tools: Tools, trigger: str) -> Steps[None]:
        yield from json_text.calls(cursor, end)
        yield from json_text.close(cursor, end)

    own = json_object("{", "arguments", "}") if call is None else call
    grammar = Grammar(mark, "[", own, ", ", f"]{end if ends is None else ends}")
    return Format(name, (mark,), (mark,), read, grammar, marks=(mark, end))


GRANITE = listed("granite", "<|tool_call|>", "<|/tool_call|>", ends="")
NEMOTRON = listed("nemotron", "<TOOLCALL>", "</TOOLCALL>")
APRIEL = listed("apriel", "<tool_calls>", "</tool_calls>")
COMMAND = listed("command", "<|START_ACTION|>", "<|END_ACTION|>", call=command_object)
