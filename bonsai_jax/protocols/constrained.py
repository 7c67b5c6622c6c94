"""The fields of a body that say what answers must match, as Constraints.

    response_format                        OpenAI's: JSON. A schema may also be beside its type
    json_schema, grammar, regex, choice    as llama-server and SGLang name them, and bonsai_jax
    ebnf                                   SGLang's name of a grammar
    structured_outputs                     vLLM's: an object with json, json_object, regex, choice or grammar
    guided_json, guided_regex, ...         the same in its older versions

A request may have one of them.
"""

import json
from collections.abc import Mapping
from typing import Any

from bonsai_jax import constraints
from bonsai_jax.constraints import Constraint
from bonsai_jax.protocols.errors import FieldError
from bonsai_jax.protocols.fields import Check, json_object, shown, text, truth


def json_schema(name: str, value: Any) -> Constraint:
    """The constraint of a JSON schema."""
    schema = json_object(name, value)
    try:
        return constraints.json_schema(schema)
    except ValueError as error:
        raise FieldError(name, str(error)) from None


def _schema(name: str, value: Any) -> Constraint:
    """The constraint of a JSON schema: an object, or its JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise FieldError(name, f"{shown(value)} is not JSON: {error}") from None
    return json_schema(name, value)


def response_format(name: str, value: Any) -> Constraint | None:
    """The constraint that a response_format asks for; None: any text.

    {"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"schema": {...}}};
    in the last "name", "description" and "strict" have no effect: answers always match the schema. As in
    llama-server, "schema" may be a field of the format itself, of both types.
    """
    kind = json_object(name, value).get("type")
    fields = {
        "text": {"type"},
        "json_object": {"type", "schema"},
        "json_schema": {"type", "schema", "json_schema"},
    }
    if not isinstance(kind, str) or kind not in fields:
        raise FieldError(f"{name}.type", f"{shown(kind)} is not supported, only {', '.join(fields)}")
    for other in value.keys() - fields[kind]:
        raise FieldError(f"{name}.{other}", f"not a field of a format of type {kind}")
    if kind == "text":
        return None
    schema, where = value.get("schema"), f"{name}.json_schema"
    if kind == "json_object":
        return json_schema(f"{name}.schema", schema) if schema else constraints.json_object()
    if schema is not None:
        if value.get(kind) is not None:
            raise FieldError(f"{name}.schema", f"cannot be combined with {where}")
        return json_schema(f"{name}.schema", schema)
    given = json_object(where, value.get(kind))
    for other in given.keys() - {"name", "description", "schema", "strict"}:
        raise FieldError(f"{where}.{other}", "not a field; it has name, description, schema and strict")
    return json_schema(f"{where}.schema", given.get("schema"))


def _grammar(name: str, value: Any) -> Constraint | None:
    """An empty text is none, as in llama-server: clients send it where no grammar is asked for."""
    return None if value == "" else _of_text(constraints.grammar, name, value)


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


_KINDS: dict[str, Check] = {
    **{"json": _schema, "json_object": _any_object},
    **{"regex": _regex, "choice": _choice, "grammar": _grammar},
}


def _structured_outputs(name: str, value: Any) -> Constraint | None:
    given = {kind: one for kind, one in json_object(name, value).items() if one is not None}
    # Whether JSON may have other white space than json.dumps writes. Here it never has.
    truth(f"{name}.disable_any_whitespace", given.pop("disable_any_whitespace", True))
    for kind in given.keys() - _KINDS.keys():
        raise FieldError(f"{name}.{kind}", f"not a field; it has one of {', '.join(_KINDS)}")
    if len(given) != 1:
        raise FieldError(name, f"has {len(given)} of {', '.join(_KINDS)}; give one")
    ((kind, one),) = given.items()
    return _KINDS[kind](f"{name}.{kind}", one)


FIELDS: dict[str, Check] = {
    **{"response_format": response_format, "structured_outputs": _structured_outputs},
    **{"json_schema": _schema, "regex": _regex, "choice": _choice, "grammar": _grammar, "ebnf": _grammar},
    **{f"guided_{kind}": check for kind, check in _KINDS.items()},
}
PLACES = {name: name for name in FIELDS}


def chosen(given: Mapping[str, Any], places: Mapping[str, str] = PLACES) -> dict[str, Any]:
    """`constraint` and `constraint_field` of a Request with these values. Raises FieldError for several.

    places   names of fields that give a constraint, and how an error names each
    """
    names = [name for name in places if given.get(name) is not None]
    if len(names) > 1:
        raise FieldError(names[1], f"cannot be combined with {names[0]}")
    return {"constraint": given[names[0]], "constraint_field": places[names[0]]} if names else {}
