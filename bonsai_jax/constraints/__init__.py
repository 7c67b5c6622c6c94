"""Constrained output: answers that match a JSON schema, a regular expression, a grammar, or one of some texts
(docs/constrained.md).

    constraint.py   Constraint, a value, and the functions that make one
    compiled.py     a Constraint for a model's tokens, through llguidance: compile
    matcher.py      Matcher: where an answer stands in one, and the mask of the tokens that may come next
    masks.py        masks of many answers, together or in threads

    Constraint --compile, once--> Compiled --for each answer--> Matcher
    a token that was drawn -> Matcher -> a bit for each token that may come next, or tokens that must
"""

from bonsai_jax.constraints.compiled import Compiled, compile, installed, prepare
from bonsai_jax.constraints.constraint import (
    Constraint,
    choice,
    grammar,
    json_object,
    json_schema,
    regex,
)
from bonsai_jax.constraints.matcher import Matcher

__all__ = [
    "Compiled",
    "Constraint",
    "Matcher",
    "choice",
    "compile",
    "grammar",
    "installed",
    "json_object",
    "json_schema",
    "prepare",
    "regex",
]
