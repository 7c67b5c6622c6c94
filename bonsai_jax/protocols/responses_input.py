"""The input of OpenAI's responses as messages of a chat.

Input is a text or a list of items: messages, calls of functions, their results, thoughts. What an assistant
thought, said and called, with nothing between, is one message. Items of other kinds are left out, and so are
tools that are no functions: clients send those that OpenAI runs itself.
"""

from typing import Any

from bonsai_jax.protocols import tools
from bonsai_jax.protocols.errors import FieldError
from bonsai_jax.protocols.fields import json_object, shown, text

Message = dict[str, Any]
ROLES = ("user", "assistant", "system", "developer")


def messages(name: str, value: Any) -> list[Message]:
    """The messages of an input."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise FieldError(name, f"{shown(value)} is neither a text nor a list of items")
    own: list[Message] = []
    for i, item in enumerate(value):
        _add(own, f"{name}[{i}]", json_object(f"{name}[{i}]", item))
    return own


def offered(name: str, value: Any) -> list[tools.Tool]:
    """Functions among the tools."""

    def read(where: str, tool: dict[str, Any]) -> tools.Tool | None:
        return tools.function(where, tool) if tool.get("type") == "function" else None

    return tools.listed(name, value, read)


def _add(own: list[Message], where: str, item: dict[str, Any]) -> None:
    """Add an item to the messages."""
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role not in ROLES:
                raise FieldError(f"{where}.role", f"{shown(role)} is none of {', '.join(ROLES)}")
            content = _content(f"{where}.content", item.get("content"))
            if role == "assistant" and not _answer(own)["content"]:
                _answer(own)["content"] = content
            else:
                own.append({"role": role, "content": content})
        case "reasoning":
            if thoughts := _thoughts(where, item):
                _answer(own)["reasoning_content"] = thoughts
        case "function_call":
            texts = {key: text(f"{where}.{key}", item.get(key)) for key in ("name", "arguments", "call_id")}
            function = {"name": texts["name"], "arguments": texts["arguments"]}
            call = {"id": texts["call_id"], "type": "function", "function": function}
            _answer(own).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            content = _content(f"{where}.output", item.get("output"))
            id = text(f"{where}.call_id", item.get("call_id"))
            own.append({"role": "tool", "tool_call_id": id, "content": content})
        case "item_reference":
            raise FieldError(where, "refers to an item, and this server stores none; send the item itself")


def _answer(own: list[Message]) -> Message:
    """The assistant's message that is last; a new one if there is none."""
    if not own or own[-1]["role"] != "assistant":
        own.append({"role": "assistant", "content": ""})
    return own[-1]


def _thoughts(where: str, item: dict[str, Any]) -> str:
    """What a model has thought; its summary if that is all there is."""
    for key in ("content", "summary"):
        if item.get(key):
            return _content(f"{where}.{key}", item[key])
    return ""


def _content(where: str, value: Any) -> str:
    """A text, or a list of parts with texts, which become lines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise FieldError(where, f"{shown(value)} is neither a text nor a list of parts")
    texts = []
    for i, part in enumerate(value):
        own = json_object(f"{where}[{i}]", part)
        if not isinstance(own.get("text"), str):
            raise FieldError(f"{where}[{i}]", f"{shown(part)} has no text; no other part is read")
        texts.append(own["text"])
    return "\n".join(texts)
