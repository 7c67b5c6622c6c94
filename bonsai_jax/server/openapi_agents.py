"""The description of what agents speak: Anthropic's messages, and OpenAI's responses."""

from bonsai_jax.protocols import anthropic_messages, fields, openai, openai_responses
from bonsai_jax.server.schemas import (
    FUNCTION,
    LIMIT,
    NEW,
    NUMBER,
    OBJECT,
    SAMPLERS,
    SAMPLING,
    TEXT,
    TRUTH,
    WHOLE,
    Schema,
    closed,
    either,
    listed,
)  # fmt: skip


def block(kind: str, required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object that names its kind."""
    return closed({"type": {"const": kind}, **required}, optional)


# ---- Anthropic's messages ----

TEXTS = either(TEXT, listed(block("text", {"text": TEXT})))
BLOCK = either(
    block("text", {"text": TEXT}),
    block("thinking", {"thinking": TEXT}),
    block("tool_use", {"id": TEXT, "name": TEXT, "input": OBJECT}),
    block("tool_result", {"tool_use_id": TEXT}, {"content": TEXTS}),
)
MESSAGE = closed({"role": {"enum": ["user", "assistant", "system"]}, "content": either(TEXT, listed(BLOCK))})
FORMAT = closed({"type": {"const": "json_schema"}, "schema": OBJECT})
PROMPT = {
    "model": TEXT,
    "system": TEXTS,
    "tools": listed(closed({"name": FUNCTION}, {"description": TEXT, "input_schema": OBJECT})),
    "tool_choice": either(
        closed({"type": {"enum": ["auto", "none", "any"]}}, {"disable_parallel_tool_use": TRUTH}),
        closed({"type": {"const": "tool"}, "name": TEXT}),
    ),
    "thinking": closed({"type": {"enum": ["enabled", "adaptive", "disabled"]}}),
    "output_config": closed({}, {"format": FORMAT}),
    "output_format": FORMAT,
}
STOP = {"type": "string", "minLength": 1, "maxLength": fields.LONGEST_STOP}
ASKED = {
    **PROMPT,
    **SAMPLING,
    **SAMPLERS,
    **{"stop_sequences": {**listed(STOP), "maxItems": fields.MOST_STOPS}, "stream": TRUTH},
}
ANSWERED = closed(
    {
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "id": TEXT,
        "model": TEXT,
        "content": listed(closed({"type": {"enum": ["text", "thinking", "tool_use"]}})),
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        "usage": closed({"input_tokens": WHOLE, "output_tokens": WHOLE, "cache_read_input_tokens": WHOLE}),
    }
)

# ---- OpenAI's responses ----

PARTS = either(TEXT, listed(closed({"text": TEXT})))
ITEM = either(
    block("message", {"role": {"enum": ["user", "assistant", "system", "developer"]}, "content": PARTS}),
    block("function_call", {"call_id": TEXT, "name": TEXT, "arguments": TEXT}),
    block("function_call_output", {"call_id": TEXT, "output": PARTS}),
    block("reasoning", {}, {"summary": listed(closed({"text": TEXT}))}),
)
RESPONSES = {
    **SAMPLING,
    **SAMPLERS,
    "model": TEXT,
    "instructions": TEXT,
    "max_output_tokens": LIMIT,
    "stream": TRUTH,
    "tools": listed(block("function", {"name": FUNCTION}, {"description": TEXT, "parameters": OBJECT})),
    "tool_choice": either(
        {"enum": ["auto", "none", "required"]}, closed({"type": {"const": "function"}, "name": TEXT})
    ),
    "text": closed({}, {"format": closed({"type": {"enum": ["text", "json_object"]}})}),
    "parallel_tool_calls": TRUTH,
    "reasoning": closed({}, {"effort": {"enum": list(openai.EFFORTS)}}),
}
RESPONSE = closed(
    {
        "id": TEXT,
        "object": {"const": "response"},
        "created_at": NUMBER,
        "status": {"enum": ["completed", "incomplete"]},
        "model": TEXT,
        "output": listed(closed({"type": {"enum": ["message", "reasoning", "function_call"]}, "id": TEXT})),
        "usage": closed({"input_tokens": WHOLE, "output_tokens": WHOLE, "total_tokens": WHOLE}),
    }
)
POSTS: dict[str, tuple[str, Schema, Schema]] = {  # summary, request, answer
    openai_responses.PATH: (
        "Answer a conversation, as Codex asks",
        closed({"input": either(TEXT, listed(ITEM))}, RESPONSES),
        RESPONSE,
    ),
    anthropic_messages.PATH: (
        "Answer a conversation, as Claude Code asks",
        closed({"messages": listed(MESSAGE, 1), "max_tokens": NEW}, ASKED),
        ANSWERED,
    ),
    anthropic_messages.COUNT_PATH: (
        "How many tokens a conversation has",
        closed({"messages": listed(MESSAGE, 1)}, PROMPT),
        closed({"input_tokens": WHOLE}),
    ),
}
