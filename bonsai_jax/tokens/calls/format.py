"""What a format of calls defines."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from bonsai_jax.tokens.calls.cursor import Cursor, Steps
from bonsai_jax.tokens.calls.grammar import Grammar

Tools = Mapping[str, Any]  # functions' names, and JSON schemas of their arguments


@dataclasses.dataclass(frozen=True)
class Format:
    """How a family of models writes calls of functions.

    name       as errors and documents have it
    signs      texts in a chat template that the format is known by; one is enough
    triggers   texts with which calls begin; no trigger contains another
    read       (cursor, tools, trigger) reads calls behind a trigger, and what ends them. It raises Broken
               where the text is no call; the text behind `cursor.good` is then text
    grammar    what a constrained call looks like
    at_start   begins calls too, but only where an answer begins
    token      a token of the vocabulary that the format is known by, if no sign of any is in the template
    marks      tokens of the format that are control tokens in some vocabularies. They are shown in answers
               (Tokenizer.answer_detokenizer), because calls are found by them
    """

    name: str
    signs: tuple[str, ...]
    triggers: tuple[str, ...]
    read: Callable[[Cursor, Tools, str], Steps[None]]
    grammar: Grammar
    at_start: str = ""
    token: str | None = None
    marks: tuple[str, ...] = ()
