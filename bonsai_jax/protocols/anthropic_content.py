"""Anthropic's messages and tools, as OpenAI's chat completions have them and templates read them.

A message's content is a text or a list of blocks. Blocks of one message become one message or more: results
of tools first, each a message of the role "tool", then the text.

Types: the package anthropic, types/message_create_params.py.
"""

import json
import re
from typing import Any

from bonsai_jax.protocols import tools
from bonsai_jax.protocols.errors import FieldError
from bonsai_jax.protocols.fields import json_object, shown, text

Message = dict[str, Any]

# What clients put at the beginning and the end of the system prompt, or in messages of the system after each
# of the user, and what changes with each request. The prefix cache would find nothing that comes after it, it
# says nothing to a model, and a template would take a message in the midst of calls for a new question.
BILLING = "x-anthropic-billing-header:"
BUDGET = re.compile(r"\s*<total_tokens>[^<]*</total_tokens>\s*$")


def system(name: str, value: Any) -> str:
    """The system prompt: a text, or text blocks, which become paragraphs."""
    blocks = [value] if isinstance(value, str) else [_text_block(*one) for one in _each(name, value)]
    blocks = [block for block in blocks if not block.startswith(BILLING)]
    return BUDGET.sub("", "\n\n".join(blocks))


def messages(name: str, value: Any) -> list[Message]:
    """The messages of a conversation."""
    if not isinstance(value, list) or not value:
        raise FieldError(name, f"{shown(value)} is not a list of messages")
    own: list[Message] = []
    for i, message in enumerate(value):
        where = f"{name}[{i}]"
        role, content = json_object(where, message).get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise FieldError(f"{where}.role", f"{shown(role)} is none of user, assistant, system")
        said = [{"role": role, "content": content}]
        if not isinstance(content, str):
            said = _said(role, _each(f"{where}.content", content))
        if role == "system":
            said = [one | {"content": left} for one in said if (left := BUDGET.sub("", one["content"]))]
        own += said
    if not own:
        raise FieldError(name, "only the system speaks, and says nothing; add a message of the user")
    if own[-1]["role"] == "assistant":
        raise FieldError(name, "the last message must be the user's: this server cannot continue an answer")
    return own


def offered(name: str, value: Any) -> list[tools.Tool]:
    """Tools with a schema. Those that run at Anthropic are left out."""

    def read(where: str, tool: dict[str, Any]) -> tools.Tool | None:
        if tool.get("type", "custom") not in ("custom", None):
            return None
        return tools.function(where, tool, "input_schema")

    return tools.listed(name, value, read)


def choice(name: str, value: Any) -> tuple[str, bool]:
    """("auto", "none", "required" or the name of a tool, whether the model may make several calls)"""
    own = json_object(name, value)
    kind = text(f"{name}.type", own.get("type"))
    if kind not in ("auto", "any", "tool", "none"):
        raise FieldError(f"{name}.type", f"{shown(kind)} is none of auto, any, tool, none")
    if kind == "tool":
        kind = text(f"{name}.name", own.get("name"))
    return "required" if kind == "any" else kind, own.get("disable_parallel_tool_use") is not True


def _each(where: str, value: Any) -> list[tuple[str, dict[str, Any]]]:
    """(where, block) for each block."""
    if not isinstance(value, list):
        raise FieldError(where, f"{shown(value)} is neither a text nor a list of blocks")
    return [(f"{where}[{i}]", json_object(f"{where}[{i}]", block)) for i, block in enumerate(value)]


def _text_block(where: str, block: dict[str, Any]) -> str:
    if block.get("type") != "text":
        raise FieldError(where, f"{shown(block)} is not a block of type text; no other is read")
    return text(f"{where}.text", block.get("text"))


def _said(role: str, blocks: list[tuple[str, dict[str, Any]]]) -> list[Message]:
    """One message's blocks as messages."""
    results, texts, thoughts, calls = [], [], [], []
    for where, block in blocks:
        match block.get("type"):
            case "tool_result" if role == "user":
                results.append(_result(where, block))
            case "thinking" if role == "assistant":
                thoughts.append(text(f"{where}.thinking", block.get("thinking")))
            case "redacted_thinking" if role == "assistant":
                pass
            case "tool_use" if role == "assistant":
                calls.append(_call(where, block))
            case _:
                texts.append(_text_block(where, block))
    if results and not texts:
        return results
    message: Message = {"role": role, "content": "\n\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [*results, message]


def _call(where: str, block: dict[str, Any]) -> dict[str, Any]:
    given = json_object(f"{where}.input", block.get("input"))
    function = {"name": text(f"{where}.name", block.get("name")), "arguments": json.dumps(given)}
    return {"id": text(f"{where}.id", block.get("id")), "type": "function", "function": function}


def _result(where: str, block: dict[str, Any]) -> Message:
    """What a tool has returned: a text, or text blocks."""
    content, id = block.get("content"), text(f"{where}.tool_use_id", block.get("tool_use_id"))
    if content is None:
        content = ""
    elif not isinstance(content, str):
        content = "\n".join(_text_block(*one) for one in _each(f"{where}.content", content))
    return {"role": "tool", "tool_call_id": id, "content": content}
