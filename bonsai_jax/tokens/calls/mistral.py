"""Mistral and its relatives: a list of objects, or in newer models the name and then the arguments.

[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]
[TOOL_CALLS]weather[ARGS]{"city": "Rome"}
[TOOL_CALLS]weather[CALL_ID]Ab1Cd2Ef3[ARGS]{"city": "Rome"}
"""

from bonsai_jax.tokens.calls import json_text, named
from bonsai_jax.tokens.calls.cursor import Cursor, Steps
from bonsai_jax.tokens.calls.format import Format, Tools
from bonsai_jax.tokens.calls.grammar import Grammar, json_object, name_and_json

MARK, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def read(cursor: Cursor, tools: Tools, trigger: str) -> Steps[None]:
    yield from cursor.spaces()
    if (yield from cursor.peek()) in ("[", "{"):
        return (yield from json_text.calls(cursor))
    name = yield from named.name(cursor)
    if (yield from cursor.literal(CALL_ID)):
        yield from cursor.until(ARGS, 64)
    else:
        yield from cursor.literal(ARGS)
    yield from named.call(cursor, name)


FORMAT = Format(
    name="mistral",
    signs=(MARK,),
    triggers=(MARK,),
    read=read,
    grammar=Grammar(MARK, " [", json_object("{", "arguments", "}"), ", ", "]"),
    marks=(MARK, CALL_ID, ARGS),
)
# Told from the other by its template; read alike.
NAMED = Format(
    name="mistral-args",
    signs=(ARGS,),
    triggers=(MARK,),
    read=read,
    grammar=Grammar(MARK, "", name_and_json("", ARGS, ""), MARK, ""),
    marks=(MARK, CALL_ID, ARGS),
)
