"""What the parts of the server's description are written with: JSON schemas."""

from typing import Any

from bonsai_jax.protocols import fields
from bonsai_jax.sampling_params import LONGEST_BREAKER, MOST

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


_SIZE, _SHARE, _COUNT = between(0, MOST, "number"), between(0, 1, "number"), between(0, 2**31 - 1)
SAMPLERS = {  # of every protocol: fields.SAMPLERS
    **dict.fromkeys(("typical_p", "typ_p", "xtc_probability", "xtc_threshold"), _SHARE),
    **dict.fromkeys(("dry_multiplier", "dry_base", "mirostat_tau", "mirostat_eta"), _SIZE),
    **dict.fromkeys(("dynatemp_range", "dynatemp_exponent"), _SIZE),
    **dict.fromkeys(("min_tokens", "dry_allowed_length"), _COUNT),
    "top_n_sigma": between(-MOST, MOST, "number"),
    "dry_penalty_last_n": between(-1, 2**31 - 1),
    "dry_sequence_breakers": {
        **listed({"type": "string", "minLength": 1, "maxLength": LONGEST_BREAKER}),
        "maxItems": fields.MOST_BREAKERS,
    },
    "mirostat": {"enum": [0, 2]},
}
FUNCTION = {"type": "string", "pattern": r"^[A-Za-z0-9_.:/-]{1,128}$"}
CALL = closed({"id": TEXT, "function": closed({"name": TEXT, "arguments": TEXT})})
TOOL = closed(
    {
        "type": {"const": "function"},
        "function": closed({"name": FUNCTION}, {"description": TEXT, "parameters": OBJECT}),
    }
)
