"""DeepSeek V3 and R1, and V3.1, whose calls are shorter.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather
```json
{"city": "Rome"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>
<｜tool▁calls▁end｜>
"""

from bonsai_jax.tokens.calls import json_text, named
from bonsai_jax.tokens.calls.cursor import MOST_NAME, Broken, Cursor, Steps
from bonsai_jax.tokens.calls.format import Format, Tools
from bonsai_jax.tokens.calls.grammar import Grammar, name_and_json

CALLS, CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
SEPARATOR = "<｜tool▁sep｜>"
CALL_END, CALLS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
FENCE = "```json\n"


def read(cursor: Cursor, tools: Tools, trigger: str) -> Steps[None]:
    if trigger == CALLS:
        yield from cursor.spaces()
        yield from cursor.expect(CALL)
    while True:
        name = yield from cursor.until(SEPARATOR, MOST_NAME)
        yield from cursor.spaces()
        if (yield from cursor.peek()) != "{":
            name = yield from named.name(cursor)
            yield from cursor.spaces()
            yield from cursor.literal(FENCE.strip())
        if not named.is_name(name.strip()):
            raise Broken
        yield from named.call(cursor, name.strip(), CALL_END, CALLS_END)
        yield from json_text.close(cursor, "```")
        yield from json_text.close(cursor, CALL_END)
        resume_at = cursor.at
        yield from cursor.spaces()
        if not (yield from cursor.literal(CALL)):
            cursor.at = resume_at
            break
    yield from json_text.close(cursor, CALLS_END)


MARKS = (CALLS, CALL, SEPARATOR, CALL_END, CALLS_END)
FORMAT = Format(
    name="deepseek-v3.1",
    signs=(CALL,),
    triggers=(CALLS, CALL),
    read=read,
    grammar=Grammar(CALLS, "", name_and_json(CALL, SEPARATOR, CALL_END), "", CALLS_END),
    marks=MARKS,
)
FENCED_CALL = name_and_json(f"{CALL}function{SEPARATOR}", f"\n{FENCE}", f"\n```{CALL_END}")
# Told from the other by its template; read alike.
FENCED = Format(
    name="deepseek-v3",
    signs=("```json",),
    triggers=(CALLS, CALL),
    read=read,
    grammar=Grammar(CALLS, "", FENCED_CALL, "\n", CALLS_END),
    marks=MARKS,
)
