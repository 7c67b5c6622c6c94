"""MiniMax-M2, and DeepSeek V3.2, whose tags have another name and say what is a string.

<minimax:tool_call>
<invoke name="weather">
<parameter name="city">Rome</parameter>
</invoke>
</minimax:tool_call>
"""

import re

from bonsai_jax.tokens.calls import json_text, named
from bonsai_jax.tokens.calls.cursor import MOST_NAME, Broken, Cursor, Steps
from bonsai_jax.tokens.calls.format import Format, Tools
from bonsai_jax.tokens.calls.grammar import Grammar, tagged
from bonsai_jax.tokens.calls.parameters import Style, parameters


def invocations(name: str, sign: str, prefix: str, style: Style, outer: str) -> Format:
    """The format whose calls are <invoke> tags, with a prefix, within an outer tag."""
    invoke = f'<{prefix}invoke name="'

    def read(cursor: Cursor, tools: Tools, trigger: str) -> Steps[None]:
        yield from cursor.spaces()
        yield from cursor.expect(invoke)
        while True:
            function = yield from cursor.until('">', MOST_NAME)
            if not named.is_name(function):
                raise Broken
            cursor.call(function)
            yield from parameters(cursor, style, tools.get(function, {}))
            resume_at = cursor.at
            yield from cursor.spaces()
            if not (yield from cursor.literal(invoke)):
                cursor.at = resume_at
                break
        yield from json_text.close(cursor, close)

    open, close = f"<{outer}>", f"</{outer}>"
    call = tagged(invoke, '">\n', style, "\n")
    grammar = Grammar(open, "\n", call, "", close)
    return Format(name, (sign,), (open,), read, grammar, marks=(open, close))


STYLE = Style(key=('<parameter name="', '">'), value=("", "</parameter>"), end="</invoke>")
FORMAT = invocations("minimax", "<minimax:tool_call>", "", STYLE, "minimax:tool_call")

DSML = "｜DSML｜"
DSML_STYLE = Style(
    key=(f"<{DSML}parameter ", ">"),
    value=("", f"</{DSML}parameter>"),
    end=f"</{DSML}invoke>",
    attributes=re.compile(r'name="([^"]*)"(?:\s+string="(true|false)")?'),
)
DEEPSEEK = invocations("deepseek-v3.2", DSML, DSML, DSML_STYLE, f"{DSML}function_calls")
