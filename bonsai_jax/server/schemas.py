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
NEW = between(1, fields.MOST_NEW)
LIMIT = either(NEW, {"const": -1})  # of new tokens; -1: none
SAMPLING = {  # of every protocol: fields.SAMPLING
    "temperature": between(0, fields.MOST_TEMPERATURE, "number"),
    **dict.fromkeys(("top_p", "min_p"), _SHARE),
    "top_k": between(-1, 2**31 - 1),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), between(-(10**6), 10**6, "number")),
    **dict.fromkeys(("repetition_penalty", "repeat_penalty"), between(*fields.REPETITIONS, "number")),
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": between(-fields.MOST_BIAS, fields.MOST_BIAS, "number"),
        "maxProperties": fields.MOST_BIASES,
    },
    "seed": WHOLE,
}
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
