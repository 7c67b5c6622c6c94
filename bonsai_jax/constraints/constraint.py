"""Constraint: what an answer must match. A value without a tokenizer; compiled.py fits it to a model."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from bonsai_jax import arguments
from bonsai_jax.tokens.calls.grammar import Thought

MOST_CHARACTERS = 1 << 16  # of a schema, expression or grammar: llguidance takes seconds for much longer ones


@dataclasses.dataclass(frozen=True)
class Constraint:
    """What an answer must match, made by `json_schema`, `json_object`, `regex`, `choice` or `grammar`.
    Hashable, and it can be pickled.

    kind     of text
    text     the schema as JSON, the expression, the grammar, or the texts as a JSON list
    thought  what comes before the text that must match, and is free; None: as the prompt has it
             (tokens/thoughts.py)
    """

    kind: Literal["json_schema", "regex", "grammar", "choice"]
    text: str
    thought: Thought | None = None

    def __post_init__(self):
        if len(self.text) > MOST_CHARACTERS:
            raise ValueError(
                f"{self.kind} has {len(self.text):,} characters; it may have {MOST_CHARACTERS:,}"
            )


def json_schema(schema: Mapping[str, Any] | str) -> Constraint:
    """Answers that are JSON of this schema, on one line as `json.dumps` writes it.

    schema   a JSON schema (draft 2020-12), as a dict or as JSON. Properties come in the schema's order.
             "x-guidance": {"whitespace_flexible": true} in it allows other spaces and lines
    Keywords that llguidance does not know are errors when the constraint is compiled.
    Raises ValueError for what is not JSON, and TypeError for what is not a schema.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"json_schema: schema is not JSON: {error}") from None
    arguments.kind("json_schema: schema", schema, Mapping, 'a schema such as {"type": "object"}')
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json_schema: schema is not JSON: {error}") from None
    return Constraint("json_schema", text)


def json_object() -> Constraint:
    """Answers that are any JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> Constraint:
    """Answers that match a regular expression from beginning to end. Syntax: that of Rust's crate `regex`,
    without look-around, anchors and word boundaries."""
    arguments.kind("regex: pattern", pattern, str, "a text")
    return Constraint("regex", pattern)


def choice(texts: Sequence[str]) -> Constraint:
    """Answers that are one of these texts. Raises ValueError for none, and for an empty text."""
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise TypeError(
            f'choice: texts is {arguments.shown(texts)}; give a list of texts such as ["yes", "no"]'
        )
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(
            f"choice: texts is {arguments.shown(texts)}; give one text or more, none of them empty"
        )
    return Constraint("choice", json.dumps(list(dict.fromkeys(texts)), ensure_ascii=False))


def grammar(text: str) -> Constraint:
    """Answers that a context-free grammar makes, written in Lark's syntax as llguidance reads it, with the
    rule `start`; or in llama.cpp's GBNF, with the rule `root`."""
    arguments.kind("grammar: text", text, str, "a text")
    return Constraint("grammar", text)
