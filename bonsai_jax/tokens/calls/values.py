"""Values of parameters that a model writes as plain text, as JSON; their types follow from the schema.

<parameter=days>3</parameter>      {"type": "integer"}    3
<parameter=city>3</parameter>      {"type": "string"}     "3"
"""

import ast
import json
from collections.abc import Mapping
from typing import Any

ALL = frozenset(("string", "integer", "number", "boolean", "null", "object", "array"))
MOST_LITERAL = 1 << 16  # characters that Python's parser is given
MOST_NESTED = 16  # references and unions within each other
WORDS = {"true": ("boolean", "true"), "false": ("boolean", "false")}
WORDS |= {"null": ("null", "null"), "none": ("null", "null")}


def types(schema: Any, root: Any = None, depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows. What it says in other ways than "type", "enum", "const", "anyOf",
    "oneOf", "allOf" and references within it is not looked at.

    root  the schema that references point into; None: this one
    """
    root = schema if root is None else root
    if not isinstance(schema, Mapping) or depth > MOST_NESTED:
        return ALL
    allowed = ALL
    if "type" in schema:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        allowed &= frozenset(name for name in names if isinstance(name, str)) or ALL
        if "number" in names:
            allowed |= {"integer"}
    if isinstance(schema.get("enum"), list):
        allowed &= frozenset(map(type_name, schema["enum"]))
    if "const" in schema:
        allowed &= {type_name(schema["const"])}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            allowed &= frozenset().union(*(types(one, root, depth + 1) for one in schema[key]))
    for one in schema.get("allOf") or () if isinstance(schema.get("allOf"), list) else ():
        allowed &= types(one, root, depth + 1)
    if isinstance(schema.get("$ref"), str):
        allowed &= types(_referenced(schema["$ref"], root), root, depth + 1)
    return allowed


def type_name(value: Any) -> str:
    """The JSON type of a value."""
    if value is None:
        return "null"
    names = {bool: "boolean", str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return names[type(value)]


def as_json(text: str, allowed: frozenset[str]) -> str:
    """A value as JSON text, of one of the allowed types; as a string if it can be none of them.

    Another type than string goes first where both are allowed: models write the string "3" as 3 only if the
    schema has no number.
    """
    bare = text.strip()
    kind, word = WORDS.get(bare.lower(), ("", ""))
    if kind in allowed:
        return word
    try:
        value = json.loads(bare, parse_constant=_refused)
    except (ValueError, RecursionError):
        return _as_literal(bare, allowed) or json.dumps(text, ensure_ascii=False)
    kind = type_name(value)
    if kind == "string" and "string" in allowed and allowed != ALL:
        return json.dumps(text, ensure_ascii=False)
    if kind == "number" and "number" not in allowed and "integer" in allowed and value.is_integer():
        return str(int(value))
    return bare if kind in allowed else json.dumps(text, ensure_ascii=False)


def _as_literal(text: str, allowed: frozenset[str]) -> str | None:
    """JSON of a list or object that is written as Python writes it; None if it is none."""
    if not text.startswith(("[", "{")) or len(text) > MOST_LITERAL:
        return None
    try:
        value = ast.literal_eval(text)
        return json.dumps(value, ensure_ascii=False, allow_nan=False) if type_name(value) in allowed else None
    except (ValueError, TypeError, KeyError, SyntaxError, RecursionError, MemoryError):
        return None


def _referenced(reference: str, root: Any) -> Any:
    """What "#/$defs/name" points to; None if there is no such thing."""
    at = root
    for part in reference.removeprefix("#").split("/")[1:]:
        at = at.get(part) if isinstance(at, Mapping) else None
    return at


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
