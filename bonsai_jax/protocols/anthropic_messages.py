"""Anthropic's messages: POST /v1/messages, as Claude Code and the package anthropic send them.

Meanings: docs.anthropic.com, api/messages. cache_control has no effect, because every prefix is cached.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from bonsai_jax.constraints import Constraint
from bonsai_jax.protocols import anthropic_content, constrained, fields, tools
from bonsai_jax.protocols.answers import Answer, Head, Part, ServerEvent, Template, Usage
from bonsai_jax.protocols.conversation import with_system
from bonsai_jax.protocols.errors import FieldError, RequestError
from bonsai_jax.protocols.request import Request
from bonsai_jax.tokens.answer_parser import Event

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"
KINDS = {  # of errors, by status
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
PROMPT = {
    **{"model": fields.text, "messages": anthropic_content.messages, "system": anthropic_content.system},
    **{"tools": anthropic_content.offered, "tool_choice": anthropic_content.choice},
}


def _thinking(name: str, value: Any) -> bool:
    kind = fields.json_object(name, value).get("type")
    return fields.one_of("enabled", "adaptive", "disabled")(f"{name}.type", kind) != "disabled"


def _format(name: str, value: Any) -> Constraint:
    kind = fields.json_object(name, value).get("type")
    fields.one_of("json_schema")(f"{name}.type", kind)
    return constrained.json_schema(f"{name}.schema", value.get("schema"))


def _output(name: str, value: Any) -> Constraint | None:
    """The constraint that an output_config asks for; None: any text. Its effort has no effect."""
    form = fields.json_object(name, value).get("format")
    return None if form is None else _format(f"{name}.format", form)


FIELDS = {
    **PROMPT,
    **{"max_tokens": fields.between(1, fields.MOST_NEW), "stop_sequences": fields.stop},
    **fields.SAMPLING,
    **fields.SAMPLERS,
    **{"stream": fields.truth, "thinking": _thinking, "metadata": fields.json_object},
    **{"output_config": _output, "output_format": _format},  # the latter is the older form
}
FORMATS = {"output_config": "output_config.format", "output_format": "output_format"}


def request(body: Mapping[str, Any], *, strict: bool = False) -> Request:
    """The request in a body. Raises FieldError, which names the field."""
    given = fields.read(body, FIELDS, strict=strict, path=PATH)
    for name in ("messages", "max_tokens"):
        if name not in given:
            raise FieldError(name, "missing")
    return _request(given)


def prompt(body: Mapping[str, Any]) -> Request:
    """The request in a body that asks how many tokens its prompt has."""
    given = fields.read(body, FIELDS, strict=False, path=COUNT_PATH)
    if "messages" not in given:
        raise FieldError("messages", "missing")
    return _request(given)


def _request(given: dict[str, Any]) -> Request:
    choice, parallel = given.get("tool_choice", ("auto", True))
    return Request(
        path=PATH,
        model=given.get("model"),
        prompts=[with_system([given.get("system", "")], given["messages"])],
        **fields.sampling(given),
        chat=True,
        template={"enable_thinking": given["thinking"]} if "thinking" in given else {},
        **tools.chosen(given.get("tools", []), choice, "tool_choice"),
        parallel_calls=parallel,
        max_new_tokens=given.get("max_tokens"),
        stop=given.get("stop_sequences", []),
        stream=given.get("stream", False),
        **constrained.chosen(given, FORMATS),
    )


def whole(request: Request, answers: Sequence[Answer], head: Head, usage: Usage) -> dict[str, Any]:
    """A message."""
    (answer,) = answers
    content = [block for event in answer.events if (block := _block(event))]
    reason, stop = _stopped(answer.output.finish_reason, answer.output.stop, bool(answer.calls))
    end = {"content": content, "stop_reason": reason, "stop_sequence": stop}
    return _frame(request, head) | end | {"usage": _usage(usage)}


def error(error: RequestError) -> dict[str, Any]:
    """{"type": "error", ...}."""
    kind = KINDS.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


class Stream:
    """message_start, then the blocks one after the other, message_delta, message_stop."""

    def __init__(self, request: Request, head: Head):
        self._request, self._head = request, head
        self._index, self._open = -1, ""  # the block that is being written, and its kind
        self._more: Template | None = None  # of its text
        self._called = False
        self._end: tuple[str, str | None] = ("end_turn", None)

    def begin(self) -> list[ServerEvent]:
        start = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = _usage(Usage(self._head.prompt_tokens, 0, self._head.cached_tokens))
        message = _frame(self._request, self._head) | start | {"usage": usage}
        return [_event("message_start", message=message), _event("ping")]

    def next(self, part: Part) -> list[ServerEvent]:
        events = [own for event in part.events for own in self._written(event)]
        if part.finish_reason is not None:
            self._end = _stopped(part.finish_reason, part.stop, self._called)
        return events

    def end(self, usage: Usage) -> list[ServerEvent]:
        reason, stop = self._end
        delta = {"stop_reason": reason, "stop_sequence": stop}
        last = _event("message_delta", delta=delta, usage=_usage(usage))
        return [*self._close(), last, _event("message_stop")]

    def failed(self, failure: RequestError) -> list[ServerEvent]:
        return [ServerEvent(error(failure), "error")]

    def _written(self, event: Event) -> list[ServerEvent]:
        events = []
        if event.name is not None or event.kind != self._open:
            events = self._close()
            self._index, self._open = self._index + 1, event.kind
            self._called = self._called or event.kind == "call"
            events.append(_event("content_block_start", index=self._index, content_block=_empty(event)))
            kind, key = DELTAS[event.kind]
            self._more = Template(self._delta({"type": kind, key: Template.HOLE}), DELTA)
        if event.text and self._more is not None:
            events.append(self._more.event(event.text))
        return events

    def _close(self) -> list[ServerEvent]:
        """The end of the block that is being written."""
        if not self._open:
            return []
        signed = []
        if self._open == "thought":
            signed = [ServerEvent(self._delta({"type": "signature_delta", "signature": ""}), DELTA)]
        self._open = ""
        return [*signed, _event("content_block_stop", index=self._index)]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        """The body of an event DELTA."""
        return {"type": DELTA, "index": self._index, "delta": delta}


DELTA = "content_block_delta"
DELTAS = {
    "answer": ("text_delta", "text"),
    "thought": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def _event(name: str, **data: Any) -> ServerEvent:
    return ServerEvent({"type": name, **data}, name)


def _frame(request: Request, head: Head) -> dict[str, Any]:
    """What a message begins with. Clients look for the model that they have asked for."""
    model = request.model or head.model
    return {"id": f"msg_{head.key}", "type": "message", "role": "assistant", "model": model}


def _empty(event: Event) -> dict[str, Any]:
    """A block, before its text."""
    if event.kind == "call":
        return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": event.name, "input": {}}
    if event.kind == "thought":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _block(event: Event) -> dict[str, Any]:
    """A whole block. Arguments that are no JSON object, because the answer was cut off or the model erred,
    are wrapped as Anthropic asks clients to do it."""
    block = _empty(event)
    if event.kind != "call":
        return block | {DELTAS[event.kind][1]: event.text}
    try:
        given = json.loads(event.text or "{}")
    except (ValueError, RecursionError):
        given = None
    return block | {"input": given if isinstance(given, dict) else {"INVALID_JSON": event.text}}


def _stopped(reason: str | None, stop: str | None, called: bool) -> tuple[str, str | None]:
    """stop_reason and stop_sequence."""
    if reason != "stop":
        return "max_tokens", None
    if stop is not None:
        return "stop_sequence", stop
    return "tool_use" if called else "end_turn", None


def _usage(own: Usage) -> dict[str, Any]:
    """Cached tokens are not among input_tokens."""
    return {
        "input_tokens": own.prompt_tokens - own.cached_tokens,
        "cache_read_input_tokens": own.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": own.new_tokens,
    }
