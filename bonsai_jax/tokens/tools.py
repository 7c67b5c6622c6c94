"""Tools that a prompt offers to the model, as OpenAI's API has them:

{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
READ = {"type": "object", "properties": {}}  # what templates read of parameters
NONE = READ | {"additionalProperties": False}  # parameters of a function that has none


def checked(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools as chat templates take them: with a description and parameters, which some templates read
    without looking whether they are there. Fields that are not for the model are left out. A function without
    parameters takes no arguments, as in OpenAI's API.

    Raises ValueError, which names the field, for anything else.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ValueError("tools: expected a list of {'type': 'function', 'function': {'name': ...}}")
    out: list[dict[str, Any]] = []
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
            raise ValueError(f"{where}: expected {{'type': 'function', 'function': {{'name': ...}}}}")
        name = function.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(f"{where}.function.name: expected up to 128 letters, digits and _ . : / -")
        if any(name == other["function"]["name"] for other in out):
            raise ValueError(f"{where}.function.name: there are two tools {name!r}")
        description, parameters = function.get("description") or "", function.get("parameters")
        if not isinstance(description, str):
            raise ValueError(f"{where}.function.description: expected a text")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise ValueError(f"{where}.function.parameters: expected a JSON schema, which is an object")
        parameters = NONE if parameters is None else parameters
        missing = {key: empty for key, empty in READ.items() if key not in parameters}
        parameters = missing | dict(parameters)
        own = {"name": name, "description": description, "parameters": parameters}
        more = {key: value for key, value in function.items() if key not in (*own, "strict")}
        out.append({"type": "function", "function": own | more})
    return out


def schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The functions' names, and JSON schemas of their arguments."""
    functions = [tool["function"] for tool in checked(tools)]
    return {function["name"]: function["parameters"] for function in functions}
