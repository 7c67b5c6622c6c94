"""The messages of an OpenAI chat, as chat templates read them."""

from typing import Any

from bonsai_jax.protocols.errors import FieldError
from bonsai_jax.protocols.fields import Check, json_object, shown, text

TEXTS = ("role", "name", "reasoning_content", "tool_call_id")  # fields that are texts


def check(strict: bool) -> Check:
    """The check of a list of messages. strict: raise FieldError for a field of a message that no template
    would be given."""

    def messages(name: str, value: Any) -> list[dict[str, Any]]:
        if not isinstance(value, list) or not value:
            raise FieldError(name, f"{shown(value)} is not a list of messages")
        return [_message(f"{name}[{i}]", message, strict) for i, message in enumerate(value)]

    return messages


def _message(where: str, value: Any, strict: bool) -> dict[str, Any]:
    message: dict[str, Any] = {}
    for key, part in json_object(where, value).items():
        if part is None:
            continue
        if key == "content":
            message[key] = _content(f"{where}.{key}", part)
        elif key in TEXTS:
            message[key] = text(f"{where}.{key}", part)
        elif key == "tool_calls":
            message[key] = _calls(f"{where}.{key}", part)
        elif strict:
            names = ", ".join((*TEXTS, "tool_calls"))
            raise FieldError(f"{where}.{key}", f"not supported; messages have content, {names}")
    if message.get("tool_calls") or message.get("reasoning_content"):
        message.setdefault("content", "")
    for key in ("role", "content", *(["tool_call_id"] if message.get("role") == "tool" else [])):
        if key not in message:
            raise FieldError(f"{where}.{key}", "missing")
    return message


def _calls(name: str, value: Any) -> list[dict[str, Any]]:
    """Calls of functions, as an answer has them."""
    if not isinstance(value, list):
        raise FieldError(name, f"{shown(value)} is not a list of calls")
    calls = []
    for i, call in enumerate(value):
        where = f"{name}[{i}]"
        function = json_object(f"{where}.function", json_object(where, call).get("function"))
        texts = {key: text(f"{where}.function.{key}", function.get(key)) for key in ("name", "arguments")}
        calls.append({"id": text(f"{where}.id", call.get("id")), "type": "function", "function": texts})
    return calls


def _content(name: str, value: Any) -> str:
    """A text, or a list of text parts, which become lines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise FieldError(name, f"{shown(value)} is neither a text nor a list of parts")
    for i, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise FieldError(f"{name}[{i}]", f"{shown(part)} is not a part of type text; no other is read")
    return "\n".join(part["text"] for part in value)
