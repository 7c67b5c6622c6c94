"""What the parts of the server's description are written with: JSON schemas."""

from typing import Any

Schema = dict[str, Any]

TEXT, TRUTH, NUMBER, WHOLE, OBJECT = (
    {"type": t} for t in ("string", "boolean", "number", "integer", "object")
)
IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def listed(items: Schema, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least}


def between(low: float, high: float, kind: str = "integer") -> Schema:
    return {"type": kind, "minimum": low, "maximum": high}


def closed(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object; null for an optional field counts as missing."""
    nullable = {name: either(schema, {"type": "null"}) for name, schema in (optional or {}).items()}
    return {"type": "object", "properties": required | nullable, "required": list(required)}


FUNCTION = {"type": "string", "pattern": r"^[A-Za-z0-9_.:/-]{1,128}$"}
CALL = closed({"id": TEXT, "function": closed({"name": TEXT, "arguments": TEXT})})
TOOL = closed(
    {
        "type": {"const": "function"},
        "function": closed({"name": FUNCTION}, {"description": TEXT, "parameters": OBJECT}),
    }
)
