"""gpt-oss. Calls and answers are messages; answer_parser.py has the format.

<|channel|>analysis<|message|>The weather.<|end|><|start|>assistant
<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>

<|call|> and <|return|> are end tokens, so grammars end before them, and an answer has one call.
"""

from collections.abc import Mapping
from typing import Any

from bonsai_jax.tokens.calls.grammar import Rules, Thought

FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"
PREAMBLE = "<|channel|>commentary<|message|>"
NEXT = "<|start|>assistant"


def thoughts(rules: Rules, thought: Thought, *more: str) -> str:
    """An expression for the messages before the one that matters: thoughts, and those with `more` headers."""
    if thought not in ("begun", "possible"):
        return ""
    rest = f"{rules.until('<|end|>')} {rules.text(NEXT)}"
    headers = " | ".join(map(rules.text, (ANALYSIS, *more)))
    before = rules.add("message", f"({headers}) {rest}")
    return f"{rest if thought == 'begun' else ''} {before}*"


def before(rules: Rules, thought: Thought) -> str:
    """An expression for everything before the text of the answer."""
    return "" if thought == "none" else f"{thoughts(rules, thought)} {rules.text(FINAL)}"


def calls(rules: Rules, tools: Mapping[str, Any], choice: str, thought: Thought) -> str:
    """An expression for an answer with a call; with choice "auto" it may be a text for the user instead.
    The recipient stands behind the channel, as models write it first, or before it, as in history."""
    options = []
    for name, schema in tools.items():
        to, json = rules.text(f" to=functions.{name}"), rules.json(schema)
        channel, end = rules.text("<|channel|>commentary"), rules.text(" <|constrain|>json<|message|>")
        options.append(rules.add("call", f"({channel} {to} | {to} {channel}) {end} {json}"))
    if choice != "auto":
        return f"{thoughts(rules, thought)} ({' | '.join(options)})"
    options.append(f"{rules.text(FINAL)} TEXT")
    return f"{thoughts(rules, thought, PREAMBLE)} ({' | '.join(options)})"
