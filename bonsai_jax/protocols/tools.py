"""Tools in requests: functions that the model may call, and whether it must."""

from collections.abc import Callable, Mapping
from typing import Any

from bonsai_jax.protocols.errors import FieldError
from bonsai_jax.protocols.fields import json_object, shown, text
from bonsai_jax.tokens import tools

MOST_TOOLS = 512

Tool = dict[str, Any]


def listed(name: str, value: Any, read: Callable[[str, dict[str, Any]], Tool | None]) -> list[Tool]:
    """The functions in a list of tools, as chat templates take them; and whether arguments must keep to the
    schema ("strict").

    read  (where, tool) -> a tool as in OpenAI's chat completions; None for one that is left out
    """
    if not isinstance(value, list):
        raise FieldError(name, f"{shown(value)} is not a list of tools")
    if len(value) > MOST_TOOLS:
        raise FieldError(name, f"{len(value)} tools; at most {MOST_TOOLS} are taken")
    own: list[Tool] = []
    for i, tool in enumerate(value):
        where = f"{name}[{i}]"
        one = read(where, json_object(where, tool))
        if one is None:
            continue
        strict = one["function"].get("strict") if isinstance(one.get("function"), dict) else None
        try:
            own += [tool | {"strict": strict is True} for tool in tools.checked([one])]
        except ValueError as error:
            field, _, message = str(error).removeprefix("tools[0]").partition(": ")
            raise FieldError(where + field, message) from None
    names = [tool["function"]["name"] for tool in own]
    if twice := [one for i, one in enumerate(names) if one in names[:i]]:
        raise FieldError(name, f"there are two functions {twice[0]!r}")
    return own


def function(where: str, tool: Mapping[str, Any], schema: str = "parameters") -> Tool:
    """A tool whose fields are those of its function. schema: the name of the field with its JSON schema."""
    own = {"name": text(f"{where}.name", tool.get("name"))}
    for field, key in (("description", "description"), ("strict", "strict"), (schema, "parameters")):
        if tool.get(field) is not None:
            own[key] = tool[field]
    return {"type": "function", "function": own}


def chosen(own: list[Tool], choice: str, name: str) -> dict[str, Any]:
    """Fields of a Request: the tools that the model may call, and whether it must.

    choice  "auto", "none", "required", or the name of the function to be called
    """
    if choice == "none":
        return {"tools": [], "tool_choice": choice}
    names = [tool["function"]["name"] for tool in own]
    if choice not in ("auto", "required", *names) or (choice == "required" and not own):
        raise FieldError(name, f"{choice!r} is none of the functions in tools: {', '.join(names) or 'none'}")
    return {"tools": own, "tool_choice": choice}
