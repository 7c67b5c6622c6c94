"""LFM2: a list of Python calls with keywords.

    <|tool_call_start|>[weather(city="Rome", days=3)]<|tool_call_end|>

Arguments are passed on when the list is complete. Some templates of LFM2 do not show the format, so its token
in the vocabulary is a sign too.
"""

import ast
import json

from bonsai_jax.tokens.calls.cursor import Broken, Cursor, Steps
from bonsai_jax.tokens.calls.format import Format, Tools
from bonsai_jax.tokens.calls.grammar import Grammar, python_call

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
MOST = 1 << 16  # characters of all calls: Python's parser takes much memory for each
JSON_NAMES = {"true": True, "false": False, "null": None}


def read(cursor: Cursor, tools: Tools, trigger: str) -> Steps[None]:
    text = yield from cursor.until(CLOSE, MOST)
    for name, arguments in parsed(text.strip()):
        cursor.call(name)
        cursor.arguments(arguments)


def parsed(text: str) -> list[tuple[str, str]]:
    """Functions' names, and their arguments as JSON. Raises Broken for anything but calls with literals."""
    try:
        body = ast.parse(text, mode="eval").body
        calls = body.elts if isinstance(body, ast.List) else [body]
        if not calls:
            raise Broken
        return [_call(call) for call in calls]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise Broken from None


def _call(call: ast.expr) -> tuple[str, str]:
    if not isinstance(call, ast.Call) or call.args or any(one.arg is None for one in call.keywords):
        raise Broken
    arguments = {one.arg: ast.literal_eval(_Named().visit(one.value)) for one in call.keywords}
    return ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)


class _Named(ast.NodeTransformer):
    """JSON's names of values, which models write within Python too."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(JSON_NAMES[node.id]) if node.id in JSON_NAMES else node


FORMAT = Format(
    name="pythonic",
    signs=(OPEN,),
    triggers=(OPEN,),
    read=read,
    grammar=Grammar(OPEN, "[", python_call, ", ", f"]{CLOSE}"),
    marks=(OPEN, CLOSE),
    token=OPEN,
)
