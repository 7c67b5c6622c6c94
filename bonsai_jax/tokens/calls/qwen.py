"""Qwen3-Coder, Qwen3.5 and Nemotron 3; some models leave <tool_call> out.

<tool_call>
<function=weather>
<parameter=city>
Rome
</parameter>
</function>
</tool_call>
"""

from bonsai_jax.tokens.calls import json_text, named
from bonsai_jax.tokens.calls.cursor import MOST_NAME, Broken, Cursor, Steps
from bonsai_jax.tokens.calls.format import Format, Tools
from bonsai_jax.tokens.calls.grammar import Grammar, tagged
from bonsai_jax.tokens.calls.parameters import Style, parameters

OPEN, FUNCTION, CLOSE = "<tool_call>", "<function=", "</tool_call>"
STYLE = Style(key=("<parameter=", ">"), value=("", "</parameter>"), end="</function>", lines=True)


def read(cursor: Cursor, tools: Tools, trigger: str) -> Steps[None]:
    if trigger == OPEN:
        yield from cursor.spaces()
        yield from cursor.expect(FUNCTION)
    while True:
        name = (yield from cursor.until(">", MOST_NAME)).strip()
        if not named.is_name(name) or (trigger == FUNCTION and name not in tools):
            raise Broken
        cursor.call(name)
        yield from parameters(cursor, STYLE, tools.get(name, {}))
        resume_at = cursor.at
        yield from cursor.spaces()
        if not (yield from cursor.literal(FUNCTION)):
            cursor.at = resume_at
            break
    yield from json_text.close(cursor, CLOSE)


FORMAT = Format(
    name="qwen-xml",
    signs=("<function=",),
    triggers=(OPEN, FUNCTION),
    read=read,
    grammar=Grammar(OPEN, "", tagged("\n<function=", ">\n", STYLE, f"\n{CLOSE}"), f"\n{OPEN}", ""),
    marks=(OPEN, CLOSE),
)
