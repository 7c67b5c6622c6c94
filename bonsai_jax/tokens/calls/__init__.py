"""Calls of functions in the models' own formats: one file for each.

    formats   hermes, llama, mistral, deepseek, qwen, minimax, glm, gemma, pythonic, functionary, lists
    shared    cursor (text as it comes), json_text, named, parameters and values (tags), grammar

A model's format follows from its chat template (`call_format`). gpt-oss has its own parser, because its calls
are a kind of message (answer_parser.Harmony), and its own grammars (harmony).
"""

from collections.abc import Container, Mapping
from typing import Any

from bonsai_jax.tokens.calls import (
    deepseek,
    functionary,
    gemma,
    glm,
    harmony,
    hermes,
    lists,
    llama,
    minimax,
    mistral,
    pythonic,
    qwen,
)
from bonsai_jax.tokens.calls.format import Format
from bonsai_jax.tokens.calls.grammar import Rules, Thought

# In this order a template is looked through: formats that share a sign with a later one come first.
FORMATS = (
    gemma.FORMAT,
    minimax.FORMAT,
    minimax.DEEPSEEK,
    glm.FORMAT,
    qwen.SEED,
    qwen.FORMAT,
    functionary.FORMAT,
    deepseek.FORMAT,
    mistral.NAMED,
    mistral.FORMAT,
    lists.GRANITE,
    lists.NEMOTRON,
    lists.APRIEL,
    lists.COMMAND,
    pythonic.FORMAT,
    hermes.FORMAT,
    llama.FORMAT,
)


def call_format(template: str | None, tokens: Container[str] = ()) -> Format | None:
    """The format in which a model with this chat template writes calls; None if it is none that we know.

    tokens  names of control tokens of the vocabulary
    """
    template = template or ""
    for format in FORMATS:
        if any(sign in template for sign in format.signs):
            return deepseek.FENCED if format is deepseek.FORMAT and "```json" in template else format
    return next((one for one in FORMATS if one.token is not None and one.token in tokens), None)


def tool_grammar(
    format: Format | None,
    tools: Mapping[str, Any],
    choice: str = "auto",
    *,
    parallel: bool = True,
    thought: Thought = "none",
    control_ids: Mapping[str, int] | None = None,
) -> str:
    """A grammar (llguidance's Lark) for answers with calls whose arguments keep to their schemas.

    format       None: harmony's, in which an answer has one call
    tools        functions' names, and JSON schemas of their arguments
    choice       "auto": text, and calls where the model begins one; "required": calls alone; or the name of
                 the one function to be called
    parallel     whether an answer may have several calls
    thought      "begun": the answer begins within a thought, which is free; "possible": it may begin with one
    control_ids  the control tokens of the vocabulary, {name: id}
    Raises ValueError for a name that is no tool's.
    """
    if choice not in ("auto", "required"):
        if choice not in tools:
            raise ValueError(f"tool_choice: {choice!r} is not one of the tools {', '.join(tools)}")
        tools, parallel = {choice: tools[choice]}, False
    rules = Rules(control_ids or {})
    if format is None:
        return rules.written(harmony.calls(rules, tools, choice, thought))
    shape = format.grammar
    calls = shape.calls(rules, tools, parallel)
    if choice != "auto":
        start = f"{rules.text(shape.opening)} {calls}"
    elif shape.whole_answer:
        start = f"{rules.text(shape.opening)} {calls} | /([^{{](.|\\n)*)?/"
    else:
        start = f"({rules.until(shape.opening)} {calls}){'*' if parallel else '?'} TEXT"
    if thought == "begun" or (thought == "possible" and choice != "auto"):  # free text may have one anyway
        start = f"{rules.thought(thought)} ({start})"
    return rules.written(start)
