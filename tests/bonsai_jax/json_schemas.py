"""JSON schemas: some by hand, and any number from a seed. Answers to them are short."""

import random
from typing import Any

KEYS = [
    "name",
    "id",
    "größe",
    "名前",
    "a b",
    'quo"te',
    "x-y",
    "ключ",
    "back\\slash",
    "e\u0301",
    "line\nbreak",
    "🙂",
    "/~1",
]
PATTERNS = ["^[a-f]{2,4}$", "^(yes|no)$", "^[0-9]{3}-[0-9]{2}$", "^x+$", "^[A-Z][a-z]{0,4}$", "^\\d{1,3}$"]

TREE: dict[str, Any] = {
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "leaf": {"type": "integer", "minimum": 0, "maximum": 9},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]},
            },
            "required": ["leaf", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/tree",
}
LIST: dict[str, Any] = {  # a list of lists, by its root
    "type": "array",
    "maxItems": 2,
    "items": {"anyOf": [{"type": "boolean"}, {"$ref": "#"}]},
}
BY_HAND: list[Any] = [
    TREE,
    LIST,
    {},
    {"const": {"größe": [1, None, "é"]}},
    {"enum": ["red", "green", 1, 2.5, None, True, [1, 2], {"a": "b"}]},
    {"type": "integer", "minimum": -5, "maximum": 17},
    {"type": "integer", "exclusiveMinimum": 99, "exclusiveMaximum": 1001},
    {"type": "integer", "minimum": 0, "maximum": 500, "multipleOf": 25},
    {"type": "number", "minimum": -1.5, "maximum": 2.25},
    {"type": "string", "minLength": 2, "maxLength": 6},
    {"type": "string", "pattern": "^(ab|cd)+e?$", "maxLength": 12},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": ["integer", "null", "boolean"], "minimum": 3, "maximum": 30},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"const": 1}, {"enum": ["a", "b"]}], "items": False, "minItems": 2},
    {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False},
    {
        "type": "object",
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
        "maxProperties": 2,
    },
    {
        "anyOf": [
            {"type": "object", "properties": {"kind": {"const": k}, k: {"const": n}}, "required": ["kind", k]}
            | {"additionalProperties": False}
            for n, k in enumerate(("circle", "square", "ключ"))
        ]
    },
    {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 99}}},
            {"properties": {"a": {"maximum": 7}}, "required": ["a"], "maxProperties": 1},
        ],
    },
    {
        "type": "object",
        "properties": {key: {"enum": [key, 0]} for key in KEYS},
        "required": KEYS[::2],
        "additionalProperties": False,
    },
]


def schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A random schema of values that are at most so deep."""
    simple = ["string", "pattern", "integer", "number", "enum", "boolean", "null", "const"]
    kind = rng.choice(
        simple + ["object", "object", "array", "tuple", "union", "types", "reference"] * (depth > 0)
    )
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(1, 6)}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 8}
    if kind in ("integer", "number"):
        low = rng.randint(-200, 200)
        return {
            "type": kind,
            "minimum": low,
            rng.choice(["maximum", "exclusiveMaximum"]): low + rng.randint(1, 300),
        }
    if kind == "enum":
        values = [*rng.sample(KEYS, 3), rng.randint(-9, 99), None, True, round(rng.random(), 3)]
        return {"enum": rng.sample(values, rng.randint(1, 5))}
    if kind == "const":
        return {"const": rng.choice([*KEYS, 7, {"a": [rng.choice(KEYS)]}])}
    if kind == "object":
        keys = rng.sample(KEYS, rng.randint(1, 4))
        return {
            "type": "object",
            "properties": {key: schema(rng, depth - 1) for key in keys},
            "required": rng.sample(keys, rng.randint(0, len(keys))),
            "additionalProperties": False,
        }
    if kind == "array":
        least = rng.randint(0, 2)
        return {
            "type": "array",
            "items": schema(rng, depth - 1),
            "minItems": least,
            "maxItems": least + rng.randint(0, 2),
        }
    if kind == "tuple":
        items = [schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if kind == "union":
        return {"anyOf": [schema(rng, depth - 1) for _ in range(rng.randint(2, 3))]}
    if kind == "types":
        return {
            "type": rng.sample(["boolean", "null", "integer"], 2),
            "minimum": 0,
            "maximum": rng.randint(1, 50),
        }
    if kind == "reference":
        return {
            "$defs": {"one": schema(rng, 0)},
            "type": "array",
            "items": {"$ref": "#/$defs/one"},
            "maxItems": 2,
        }
    return {"type": kind}


def seeded(count: int) -> list[dict[str, Any]]:
    """So many different schemas. References are to definitions of the root, so one with any is not nested."""
    rng, schemas = random.Random(31), []
    while len(schemas) < count:
        one = schema(rng)
        if one not in schemas and ("$defs" not in str(one) or "$defs" in one):
            schemas.append(one)
    return schemas
