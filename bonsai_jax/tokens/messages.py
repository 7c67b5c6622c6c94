"""Messages of OpenAI's API as chat templates read them.

Templates agree on "role", "content" and "tool_calls", but not on the rest: whether arguments of calls are
objects or JSON text, whether a message that only calls has "" or null as its content, and where they look for
thoughts and results. What a template takes is found out by rendering a short conversation (`_taste`).
"""

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bonsai_jax.tokens.chat_template import ChatTemplateError, render

Message = dict[str, Any]
THINKING = re.compile(r"""message\.thinking|m\.thinking|\[['"]thinking['"]\]|['"]thinking['"] in""")
SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


class Taste(NamedTuple):
    """What a template takes.

    as_text        arguments of calls as JSON text; else as objects
    empty          the content of a message that only calls
    thoughts       the field for thoughts; "content": between tags before the answer; "": none
    short_ids      ids of calls have exactly nine letters and digits (Mistral)
    with_responses   results are in the message with the calls, as "tool_responses" (Gemma 4)
    """

    as_text: bool = False
    empty: str | None = ""
    thoughts: str = ""
    short_ids: bool = False
    with_responses: bool = False


def for_template(source: str, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages as this template reads them. Messages without calls, results and thoughts are unchanged.

    Raises ValueError for calls that are none, and for a result whose call is not there.
    """
    own, taste = [dict(message) for message in messages], _taste(source)
    names: dict[str, str] = {}
    for i, message in enumerate(own):
        if message.get("tool_calls"):
            calls = [_call(f"messages[{i}].tool_calls[{j}]", x) for j, x in enumerate(message["tool_calls"])]
            names |= {call["id"]: call["function"]["name"] for call in calls if "id" in call}
            message["tool_calls"] = [_as_liked(call, taste) for call in calls]
            message["content"] = message.get("content") or taste.empty
        elif message.get("tool_calls", 1) in ([], None):  # templates ask whether the field is there
            del message["tool_calls"]
        if message.get("role") == "tool":
            _name(message, names, taste)
        if "reasoning_content" in message:
            _place_thoughts(message, taste)
    return _with_responses(own) if taste.with_responses else own


def _call(where: str, call: Any) -> Message:
    """A call with its arguments as an object, or as text where that is no JSON object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: expected {{'id': ..., 'function': {{'name': ..., 'arguments': ...}}}}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            value = None
        arguments = value if isinstance(value, Mapping) else arguments
    elif arguments is None:
        arguments = {}
    elif not isinstance(arguments, Mapping):
        raise ValueError(f"{where}.function.arguments: expected JSON text")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _as_liked(call: Message, taste: Taste) -> Message:
    arguments = call["function"]["arguments"]
    if taste.as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    call = {**call, "function": {**call["function"], "arguments": arguments}}
    if taste.short_ids:
        call["id"] = _short(call.get("id", ""))
    return call


def _name(message: Message, names: Mapping[str, str], taste: Taste) -> None:
    """Give a result the name of its function, which some templates write."""
    id = message.get("tool_call_id")
    if isinstance(id, str) and id in names:
        message.setdefault("name", names[id])
    if taste.short_ids:
        message["tool_call_id"] = _short(id or "")


def _short(id: str) -> str:
    """An id of nine letters and digits; the same for the same id."""
    return id if SHORT_ID.fullmatch(id) else hashlib.sha256(id.encode()).hexdigest()[:9]


def _place_thoughts(message: Message, taste: Taste) -> None:
    thoughts = message["reasoning_content"]
    if taste.thoughts != "reasoning_content":
        del message["reasoning_content"]
    if not thoughts:
        message.pop("reasoning_content", None)
    elif taste.thoughts == "thinking":
        message["thinking"] = thoughts
        if message.get("tool_calls"):  # gpt-oss: beside a call either thoughts or content
            message["content"] = ""
    elif taste.thoughts == "content":
        message["content"] = f"<think>\n{thoughts}\n</think>\n\n{message.get('content') or ''}"


def _with_responses(messages: list[Message]) -> list[Message]:
    """Results in the message that has their calls."""
    out: list[Message] = []
    for message in messages:
        if message.get("role") == "tool" and out and out[-1].get("tool_calls"):
            content = message.get("content")
            try:
                value = json.loads(content) if isinstance(content, str) else content
            except (ValueError, RecursionError):
                value = content
            one = {"name": message.get("name", "unknown"), "response": value}
            out[-1].setdefault("tool_responses", []).append(one)
        else:
            out.append(message)
    return out


@functools.lru_cache(maxsize=8)
def _taste(source: str) -> Taste:
    """What a template takes, by rendering a conversation with a call in every way that is known."""
    thoughts = ""
    if "reasoning_content" in source:
        thoughts = "reasoning_content"
    elif THINKING.search(source):
        thoughts = "thinking"
    elif "</think>" in source:
        thoughts = "content"
    more = {"thoughts": thoughts, "short_ids": bool(re.search(r"id\s*\|\s*length", source))}
    more["with_responses"] = "tool_responses" in source
    ways = [Taste(as_text, empty, **more) for as_text in (False, True) for empty in ("", None)]
    return max(ways, key=lambda way: _fits(source, way))


def _fits(source: str, taste: Taste) -> int:
    """How well a way suits a template: 2 if the call is shown with its arguments, 1 if it is shown."""
    call = {
        "id": "a1b2c3d4e",
        "type": "function",
        "function": {"name": "look_up", "arguments": {"key": "rose"}},
    }
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": taste.empty, "tool_calls": [_as_liked(call, taste)]},
        {"role": "tool", "content": "red", "name": "look_up", "tool_call_id": "a1b2c3d4e"},
    ]
    tool = {"name": "look_up", "description": "", "parameters": {"type": "object", "properties": {}}}
    variables = {"bos_token": "", "eos_token": "", "add_generation_prompt": True}
    variables |= {"tools": [{"type": "function", "function": tool}], "messages": messages}
    try:
        text = render(source, variables)
        without = render(source, variables | {"messages": messages[:1]})
    except ChatTemplateError:
        return 0
    shown = text.count("look_up") > without.count("look_up")
    odd = "{'key'" in text or '\\"key' in text or (taste.empty is None and "None" in text)
    return shown + (shown and "rose" in text and not odd)
