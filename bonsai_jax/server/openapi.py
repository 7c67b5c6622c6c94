"""GET /openapi.json: what the server takes and gives, in OpenAPI 3.1. Protocols of agents: openapi_agents.py.

A field that is not listed is ignored, or refused with status 400 (openai.REFUSED). Bounds are those of
bonsai_jax/protocols/fields.py. What depends on the model (tokens beyond its vocabulary, prompts beyond its
context) is a 400 that no schema shows.
"""

from typing import get_args

from bonsai_jax import choices
from bonsai_jax.protocols import fields, openai, openai_chat, openai_completions, openai_embeddings
from bonsai_jax.server import openapi_agents
from bonsai_jax.server.schemas import (
    CALL,
    IDS,
    LIMIT,
    NEW,
    NUMBER,
    OBJECT,
    SAMPLERS,
    SAMPLING,
    TEXT,
    TOOL,
    TRUTH,
    WHOLE,
    Schema,
    between,
    closed,
    either,
    listed,
)  # fmt: skip

MESSAGE = closed(
    {"role": TEXT},
    {
        "content": either(TEXT, listed(closed({"type": {"const": "text"}, "text": TEXT}))),
        "tool_calls": listed(CALL),
        **dict.fromkeys(("name", "reasoning_content", "tool_call_id"), TEXT),
    },
)
STOP = {"type": "string", "minLength": 1, "maxLength": fields.LONGEST_STOP}
SCHEMA = either(OBJECT, TEXT)  # a text: its JSON
STRUCTURED = {
    **{"json": SCHEMA, "json_object": {"const": True}, "regex": TEXT, "grammar": TEXT},
    "choice": listed({"type": "string", "minLength": 1}, 1),
}
COMMON = {
    "model": TEXT,
    "max_tokens": LIMIT,
    **SAMPLING,
    **SAMPLERS,
    "stop": either(STOP, {**listed(STOP), "maxItems": fields.MOST_STOPS}),
    "n": between(1, fields.MOST_ANSWERS),
    "ignore_eos": TRUTH,
    "stream": TRUTH,
    "response_format": either(
        closed({"type": {"const": "text"}}),
        closed({"type": {"const": "json_object"}}, {"schema": OBJECT}),
        closed({"type": {"const": "json_schema"}, "json_schema": closed({"schema": OBJECT})}),
        closed({"type": {"const": "json_schema"}, "schema": OBJECT}),
    ),
    "structured_outputs": either(
        *(closed({name: schema}, {"disable_any_whitespace": TRUTH}) for name, schema in STRUCTURED.items())
    ),
    **{f"guided_{name}": schema for name, schema in STRUCTURED.items()},
    **{name: STRUCTURED[name] for name in ("regex", "choice", "grammar")},
    **{"json_schema": SCHEMA, "ebnf": STRUCTURED["grammar"]},
    "stream_options": closed({}, {"include_usage": TRUTH}),
}
VARIABLES = {"chat_template_kwargs": OBJECT}
CHAT = COMMON | {
    "max_completion_tokens": LIMIT,
    "logprobs": TRUTH,
    "top_logprobs": between(0, fields.MOST_LOGPROBS),
    "reasoning_effort": {"enum": list(openai.EFFORTS)},
    "tools": listed(TOOL),
    "tool_choice": either(
        {"enum": ["auto", "none", "required"]},
        closed({"type": {"const": "function"}, "function": closed({"name": TEXT})}),
    ),
    "parallel_tool_calls": TRUTH,
    **VARIABLES,
}
COMPLETION = COMMON | {
    "max_tokens": between(-1, fields.MOST_NEW),
    "logprobs": between(0, fields.MOST_LOGPROBS),
    "echo": TRUTH,
}
EMBEDDING = {
    "model": TEXT,
    "encoding_format": {"enum": ["float", "base64"]},
    "dimensions": NEW,
    "pooling": {"enum": list(get_args(choices.Pooling))},
}
PROMPT = either(TEXT, IDS, listed(either(TEXT, IDS), 1))
USAGE = closed({"prompt_tokens": WHOLE, "total_tokens": WHOLE})
FINISH = {"enum": ["stop", "length", "tool_calls"]}


def _completion(kind: str, choice: Schema) -> Schema:
    choices_ = listed(closed({"index": WHOLE, "finish_reason": FINISH, **choice}))
    return closed(
        {
            "id": TEXT,
            "object": {"const": kind},
            "created": WHOLE,
            "model": TEXT,
            "choices": choices_,
            "usage": USAGE,
        }
    )


ANSWER = closed(
    {"role": {"const": "assistant"}, "content": either(TEXT, {"type": "null"})},
    {"reasoning_content": TEXT, "tool_calls": listed(CALL)},
)
VECTOR = closed({"object": {"const": "embedding"}, "index": WHOLE, "embedding": either(TEXT, listed(NUMBER))})
PIECE = closed({"id": WHOLE, "piece": either(TEXT, listed(WHOLE))})
POSTS: dict[str, tuple[str, Schema, Schema]] = {  # summary, request, answer
    openai_chat.PATH: (
        "Answer a chat",
        closed({"messages": listed(MESSAGE, 1)}, CHAT),
        _completion("chat.completion", {"message": ANSWER}),
    ),
    openai_completions.PATH: (
        "Continue texts",
        closed({"prompt": PROMPT}, COMPLETION),
        _completion("text_completion", {"text": TEXT}),
    ),
    openai_embeddings.PATH: (
        "A vector for each text",
        closed({"input": PROMPT}, EMBEDDING),
        closed({"object": {"const": "list"}, "data": listed(VECTOR), "model": TEXT, "usage": USAGE}),
    ),
    **openapi_agents.POSTS,
    "/tokenize": (
        "Token ids of a text",
        closed({"content": TEXT}, dict.fromkeys(("add_special", "parse_special", "with_pieces"), TRUTH)),
        closed({"tokens": listed(either(WHOLE, PIECE)), "count": WHOLE}),
    ),
    "/detokenize": (
        "The text of token ids",
        closed({"tokens": {**IDS, "minItems": 0}}),
        closed({"content": TEXT}),
    ),
    "/apply-template": (
        "The text that a chat becomes",
        closed({"messages": listed(MESSAGE, 1)}, VARIABLES),
        closed({"prompt": TEXT}),
    ),
}
STATUS = closed({"status": TEXT})
GETS: dict[str, tuple[str, Schema]] = {
    "/v1/models": ("The model that is served", closed({"data": listed(OBJECT)})),
    "/health": ("Whether the engine runs", STATUS),
    "/ready": ("Whether every program is compiled", STATUS),
    "/tokenizer_info": (
        "Names of special tokens, and the chat template",
        closed({}, {"bos_token": TEXT, "eos_token": TEXT, "chat_template": TEXT}),
    ),
    "/version": ("The server's version", closed({"version": TEXT})),
}
ERROR = closed({"error": closed({"message": TEXT, "type": TEXT})})
ERRORS = {
    400: "The request is at fault; the message names the field",
    401: "No valid API key",
    403: "Another site's page, or an unknown name of this server",
    408: "The body came too slowly",
    413: "The body is too large",
    429: "Too many requests; see Retry-After",
    500: "The server's fault",
    503: "Not now",
}


def _response(text: str, schema: Schema, stream: bool = False) -> Schema:
    content: Schema = {"application/json": {"schema": schema}}
    if stream:
        content["text/event-stream"] = {"schema": closed({"data": TEXT})}  # of each event
    return {"description": text, "content": content}


def _operation(summary: str, answer: Schema, body: Schema | None = None, stream: bool = False) -> Schema:
    responses = {"200": _response("The answer", answer, stream)}
    responses |= {str(status): _response(text, ERROR) for status, text in ERRORS.items()}
    operation: Schema = {"summary": summary, "responses": responses}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation


def description(version: str, *, keys: bool) -> Schema:
    """The whole description. keys: requests must give one."""
    paths: Schema = {}
    for path, (summary, body, answer) in POSTS.items():
        paths[path] = {"post": _operation(summary, answer, body, stream="stream" in body["properties"])}
    for path, (summary, answer) in GETS.items():
        paths[path] = {"get": _operation(summary, answer)}
    for path in ("/health", "/ready"):
        paths[path]["get"]["responses"]["503"] = _response("Not so", STATUS)
    own: Schema = {"openapi": "3.1.0", "info": {"title": "bonsai-jax", "version": version}, "paths": paths}
    if keys:
        own["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        own["security"] = [{"key": []}]
    return own
