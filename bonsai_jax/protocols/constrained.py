"""The fields of a body that say what answers must match, as Constraints.

    response_format                        OpenAI's: JSON
    json_schema, grammar, regex, choice    as llama-server and SGLang name them, and bonsai_jax
    structured_outputs                     vLLM's: an object with json, json_object, regex, choice or grammar

A request may have one of them.
"""

from collections.abc import Mapping
from typing import Any

from bonsai_jax import constraints
from bonsai_jax.constraints import Constraint
from bonsai_jax.protocols.errors import FieldError
from bonsai_jax.protocols.fields import Check, json_object, shown, text


def json_schema(name: str, value: Any) -> Constraint:
    """The constraint of a JSON schema."""
    schema = json_object(name, value)
    try:
        return constraints.json_schema(schema)
    except ValueError as error:
        raise FieldError(name, str(error)) from None


def response_format(name: str, value: Any) -> Constraint | None:
    """The constraint that a response_format asks for; None: any text.

    {"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"schema": {...}}};
    in the last "name", "description" and "strict" have no effect: answers always match the schema.
    """
    kind = json_object(name, value).get("type")
    fields = {"text": {"type"}, "json_object": {"type"}, "json_schema": {"type", "json_schema"}}
    if not isinstance(kind, str) or kind not in fields:
        raise FieldError(f"{name}.type", f"{shown(kind)} is not supported, only {', '.join(fields)}")
    for other in value.keys() - fields[kind]:
        raise FieldError(f"{name}.{other}", f"not a field of a format of type {kind}")
    if kind != "json_schema":
        return None if kind == "text" else constraints.json_object()
    where = f"{name}.json_schema"
    given = json_object(where, value.get(kind))
    for other in given.keys() - {"name", "description", "schema", "strict"}:
        raise FieldError(f"{where}.{other}", "not a field; it has name, description, schema and strict")
    return json_schema(f"{where}.schema", given.get("schema"))


def _grammar(name: str, value: Any) -> Constraint:
    return _of_text(constraints.grammar, name, value)


def _regex(name: str, value: Any) -> Constraint:
    return _of_text(constraints.regex, name, value)


def _of_text(make: Any, name: str, value: Any) -> Constraint:
    try:
        return make(text(name, value))
    except ValueError as error:
        raise FieldError(name, str(error)) from None


def _choice(name: str, value: Any) -> Constraint:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        raise FieldError(name, f"{shown(value)} is not a list of texts, none of them empty")
    return _of_text(lambda _: constraints.choice(value), name, "")


def _any_object(name: str, value: Any) -> Constraint:
    if value is not True:
        raise FieldError(name, f"{shown(value)} is not true; leave it out")
    return constraints.json_object()


_STRUCTURED: dict[str, Check] = {
    **{"json": json_schema, "json_object": _any_object},
    **{"regex": _regex, "choice": _choice, "grammar": _grammar},
}


def _structured_outputs(name: str, value: Any) -> Constraint:
    given = {kind: one for kind, one in json_object(name, value).items() if one is not None}
    for kind in given.keys() - _STRUCTURED.keys():
        raise FieldError(f"{name}.{kind}", f"not a field; it has one of {', '.join(_STRUCTURED)}")
    if len(given) != 1:
        raise FieldError(name, f"has {len(given)} of {', '.join(_STRUCTURED)}; give one")
    ((kind, one),) = given.items()
    return _STRUCTURED[kind](f"{name}.{kind}", one)


FIELDS: dict[str, Check] = {
    **{"response_format": response_format, "structured_outputs": _structured_outputs},
    **{"json_schema": json_schema, "grammar": _grammar, "regex": _regex, "choice": _choice},
}


def chosen(given: Mapping[str, Any]) -> dict[str, Any]:
    """`constraint` and `constraint_field` of a Request with these values. Raises FieldError for several."""
    names = [name for name in FIELDS if given.get(name) is not None]
    if len(names) > 1:
        raise FieldError(names[1], f"cannot be combined with {names[0]}")
    return {"constraint": given[names[0]], "constraint_field": names[0]} if names else {}
