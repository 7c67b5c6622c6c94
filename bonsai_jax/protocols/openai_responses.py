"""OpenAI's responses, without storing any: POST /v1/responses, as Codex CLI sends them.

Meanings: platform.openai.com/docs/api-reference/responses.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bonsai_jax import constraints
from bonsai_jax.constraints import Constraint
from bonsai_jax.protocols import constrained, fields, openai, responses_input, tools
from bonsai_jax.protocols.answers import Answer, Head, Part, ServerEvent, Template, Usage
from bonsai_jax.protocols.conversation import with_system
from bonsai_jax.protocols.errors import FieldError, RequestError
from bonsai_jax.protocols.openai import error
from bonsai_jax.protocols.request import Request
from bonsai_jax.protocols.responses_items import Item, item
from bonsai_jax.tokens.tokenizer import Tokenizer

__all__ = ["PATH", "Stream", "error", "request", "whole"]

PATH = "/v1/responses"
CHOICES = ("auto", "none", "required")  # of tools, beside one by its name
NOTHING = [{"role": "user", "content": ""}]  # what clients ask to see whether the server is there


def _stored(name: str, value: Any) -> None:
    raise FieldError(name, "this server stores no responses; send the whole conversation as input")


def _effort(name: str, value: Any) -> str | None:
    effort = fields.json_object(name, value).get("effort")
    return None if effort is None else fields.one_of(*openai.EFFORTS)(f"{name}.effort", effort)


def _choice(name: str, value: Any) -> str:
    if isinstance(value, str):
        return fields.one_of(*CHOICES)(name, value)
    return fields.text(f"{name}.name", fields.json_object(name, value).get("name"))


def _text(name: str, value: Any) -> Constraint | None:
    """The constraint that a text's format asks for; None: any text."""
    form = fields.json_object(f"{name}.format", fields.json_object(name, value).get("format") or {})
    kinds = ("text", "json_object", "json_schema")
    kind = fields.one_of(*kinds)(f"{name}.format.type", form.get("type", "text"))
    if kind == "json_schema":
        return constrained.json_schema(f"{name}.format.schema", form.get("schema"))
    return None if kind == "text" else constraints.json_object()


FIELDS = {
    **fields.SAMPLING,
    **fields.SAMPLERS,
    **{"model": fields.text, "input": responses_input.messages, "instructions": fields.text},
    **{"max_output_tokens": fields.new_tokens(1), "stream": fields.truth},
    **{"tools": responses_input.offered, "tool_choice": _choice, "parallel_tool_calls": fields.truth},
    **{"reasoning": _effort, "text": _text, "metadata": fields.json_object, "store": fields.truth},
    **{"previous_response_id": _stored, "conversation": _stored, "background": fields.only(False)},
}


def request(body: Mapping[str, Any], *, strict: bool = False) -> Request:
    """The request in a body. Raises FieldError, which names the field."""
    given = fields.read(body, FIELDS, strict=strict, path=PATH)
    if "input" not in given:
        raise FieldError("input", "missing")
    return Request(
        path=PATH,
        model=given.get("model"),
        prompts=[with_system([given.get("instructions", "")], given["input"] or NOTHING)],
        **fields.sampling(given),
        chat=True,
        template=openai.thinking(given.get("reasoning")),
        **tools.chosen(given.get("tools", []), given.get("tool_choice", "auto"), "tool_choice"),
        parallel_calls=given.get("parallel_tool_calls", True),
        max_new_tokens=given.get("max_output_tokens"),
        **constrained.chosen(given, {"text": "text.format"}),
        stream=given.get("stream", False),
    )


def whole(request: Request, answers: Sequence[Answer], head: Head, usage: Usage) -> dict[str, Any]:
    """A response."""
    (answer,) = answers
    items = [item(event) for event in answer.events]
    return _response(request, head, _status(answer.output.finish_reason), items, usage)


class Stream:
    """response.created, then the items one after the other, then the whole response."""

    def __init__(self, request: Request, head: Head):
        self._request, self._head = request, head
        self._items: list[Item] = []
        self._more: Template | None = None  # of the last item's text
        self._number, self._status = 0, "completed"

    def begin(self) -> list[ServerEvent]:
        response = _response(self._request, self._head, "in_progress", [], None)
        return [
            self._event(f"response.{name}", {"response": response}) for name in ("created", "in_progress")
        ]

    def next(self, part: Part) -> list[ServerEvent]:
        events = []
        for event in part.events:
            if not self._items or event.name is not None or event.kind != self._items[-1].kind:
                events += self._done()
                self._items.append(item(event._replace(text="")))
                events += self._about(self._items[-1].begin())
                name, data = self._items[-1].delta(Template.HOLE)
                self._more = Template({"type": name, **data, **self._place}, name)
            if event.text and self._more is not None:
                self._items[-1].text += event.text
                events.append(self._more.event(event.text, sequence_number=self._next_number()))
        if part.finish_reason is not None:
            self._status = _status(part.finish_reason)
        return events

    def end(self, usage: Usage) -> list[ServerEvent]:
        done = self._done()
        response = _response(self._request, self._head, self._status, self._items, usage)
        return [*done, self._event(f"response.{self._status}", {"response": response})]

    def failed(self, failure: RequestError) -> list[ServerEvent]:
        response = _response(self._request, self._head, "failed", self._items, None)
        reason = error(failure)["error"]
        response["error"] = {"code": reason["code"] or "server_error", "message": reason["message"]}
        return [self._event("response.failed", {"response": response})]

    def _done(self) -> list[ServerEvent]:
        return self._about(self._items[-1].end(self._status)) if self._items else []

    def _about(self, events: list[tuple[str, dict[str, Any]]]) -> list[ServerEvent]:
        return [self._event(name, data | self._place) for name, data in events]

    @property
    def _place(self) -> dict[str, int]:
        """Of the last item."""
        return {"output_index": len(self._items) - 1}

    def _event(self, name: str, data: dict[str, Any]) -> ServerEvent:
        return ServerEvent({"type": name, **data, "sequence_number": self._next_number()}, name)

    def _next_number(self) -> int:
        self._number += 1
        return self._number - 1


def _status(reason: str | None) -> str:
    return "completed" if reason == "stop" else "incomplete"


def _response(
    request: Request, head: Head, status: str, items: Sequence[Item], usage: Usage | None
) -> dict[str, Any]:
    own = {
        "id": f"resp_{head.key}",
        "object": "response",
        "created_at": head.created,
        "status": status,
        "model": head.model,
        "output": [one.whole(status if one is items[-1] else "completed") for one in items],
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "parallel_tool_calls": request.parallel_calls,
        "tool_choice": _echoed(request.tool_choice),
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in request.tools],
        "max_output_tokens": request.max_new_tokens,
        "previous_response_id": None,
        "store": False,
    }
    return own if usage is None else own | {"usage": _usage(usage, head.tokenizer, items)}


def _echoed(choice: str) -> Any:
    """A tool_choice as a request has it."""
    return choice if choice in CHOICES else {"type": "function", "name": choice}


def _usage(own: Usage, tokenizer: Tokenizer, items: Sequence[Item]) -> dict[str, Any]:
    """Counts of tokens. Those of thoughts are counted in their text."""
    thoughts = "".join(one.text for one in items if one.kind == "thought")
    reasoning = len(tokenizer.encode(thoughts, add_special=False)) if thoughts else 0
    return {
        "input_tokens": own.prompt_tokens,
        "input_tokens_details": {"cached_tokens": own.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": own.new_tokens,
        "output_tokens_details": {"reasoning_tokens": min(reasoning, own.new_tokens)},
        "total_tokens": own.prompt_tokens + own.new_tokens,
    }
