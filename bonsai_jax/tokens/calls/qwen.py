"""Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5; some leave <tool_call> out. Seed-OSS has a tag of its own.

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
SEED_OPEN, SEED_CLOSE = "<seed:tool_call>", "</seed:tool_call>"
STYLE = Style(key=("<parameter=", ">"), value=("", "</parameter>"), end="</function>", lines=True)


def read(cursor: Cursor, tools: Tools, trigger: str) -> Steps[None]:
    if trigger != FUNCTION:
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
    yield from json_text.close(cursor, CLOSE, SEED_CLOSE)


def format(name: str, sign: str, open: str, close: str) -> Format:
    call = tagged("\n<function=", ">\n", STYLE, f"\n{close}")
    grammar = Grammar(open, "", call, f"\n{open}", "")
    return Format(name, (sign,), (open, FUNCTION), read, grammar, marks=(open, close))


FORMAT = format("qwen-xml", "<parameter=", OPEN, CLOSE)
SEED = format("seed", SEED_OPEN, SEED_OPEN, SEED_CLOSE)
