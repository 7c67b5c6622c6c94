"""GLM-4.5 and later; the line break behind the name is missing from 4.7 on.

<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Rome</arg_value>
</tool_call>
"""

from bonsai_jax.tokens.calls import named
from bonsai_jax.tokens.calls.cursor import Broken, Cursor, Steps
from bonsai_jax.tokens.calls.format import Format, Tools
from bonsai_jax.tokens.calls.grammar import Grammar, tagged
from bonsai_jax.tokens.calls.parameters import Style, parameters

OPEN, CLOSE = "<tool_call>", "</tool_call>"
STYLE = Style(key=("<arg_key>", "</arg_key>"), value=("<arg_value>", "</arg_value>"), end=CLOSE)


def read(cursor: Cursor, tools: Tools, trigger: str) -> Steps[None]:
    yield from cursor.spaces()
    name = yield from named.name(cursor)
    yield from cursor.spaces()
    for mark in (STYLE.key[0], CLOSE):  # else the call is none
        at = cursor.at
        if (yield from cursor.literal(mark)):
            cursor.at = at
            cursor.call(name)
            return (yield from parameters(cursor, STYLE, tools.get(name, {})))
    raise Broken


FORMAT = Format(
    name="glm",
    signs=("<arg_key>",),
    triggers=(OPEN,),
    read=read,
    grammar=Grammar(OPEN, "", tagged("", "\n", STYLE, ""), f"\n{OPEN}", ""),
    marks=(OPEN, CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
