"""OpenAI's chat completions: POST /v1/chat/completions."""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from bonsai_jax.decoding.sampling import Logprobs
from bonsai_jax.protocols import constrained, fields, openai, openai_messages, tools
from bonsai_jax.protocols.answers import Answer, Head, Part, ServerEvent, Template, Usage
from bonsai_jax.protocols.errors import FieldError, RequestError
from bonsai_jax.protocols.openai import error
from bonsai_jax.protocols.request import Request
from bonsai_jax.tokens.answer_parser import Event
from bonsai_jax.tokens.tokenizer import Tokenizer

__all__ = ["PATH", "Stream", "error", "request", "whole"]

PATH = "/v1/chat/completions"
# Names that Tokenizer.encode_chat and the template's other variables have.
RESERVED = {"self", "messages", "add_generation_prompt", "bos_token", "eos_token", "tools"}
TEXTS = {"thought": "reasoning_content", "answer": "content"}  # where events' texts are, by kind
FIELDS = {
    **openai.COMMON,
    "max_completion_tokens": fields.new_tokens(1),
    **{"logprobs": fields.truth, "top_logprobs": fields.between(0, fields.MOST_LOGPROBS)},
}


def _tools(name: str, value: Any) -> list[tools.Tool]:
    return tools.listed(name, value, lambda where, tool: tool)


def _choice(name: str, value: Any) -> str:
    """ "auto", "none", "required", or the name of the function to be called."""
    if isinstance(value, str):
        return fields.one_of("auto", "none", "required")(name, value)
    function = fields.json_object(f"{name}.function", fields.json_object(name, value).get("function"))
    return fields.text(f"{name}.function.name", function.get("name"))


TOOLS = {"tools": _tools, "tool_choice": _choice, "parallel_tool_calls": fields.truth}


def variables(name: str, value: Any) -> dict[str, Any]:
    """The check of a chat template's variables."""
    for key in fields.json_object(name, value):
        if key in RESERVED:
            raise FieldError(f"{name}.{key}", "this variable is made of the request's other fields")
    return value


SERVED = {
    **openai.REFUSED,
    **openai.TURNS,
    "reasoning_effort": fields.one_of(*openai.EFFORTS),
    "chat_template_kwargs": variables,
}  # not in a batch


def request(body: Mapping[str, Any], *, strict: bool = False) -> Request:
    """The request in a body. Raises FieldError, which names the field."""
    known = FIELDS | TOOLS | {"messages": openai_messages.check(strict)}
    known |= openai.WHOLE_ONLY if strict else SERVED
    given = fields.read(body, known, strict=strict, path=PATH)
    if "messages" not in given:
        raise FieldError("messages", "missing")
    logprobs = given.get("top_logprobs", 0) if given.get("logprobs") else None
    if logprobs is None and given.get("top_logprobs"):
        raise FieldError("top_logprobs", 'needs "logprobs": true')
    stream, usage = openai.streaming(given)
    return Request(
        path=PATH,
        model=given.get("model"),
        prompts=[given["messages"]],
        **fields.sampling(given),
        chat=True,
        template=_variables(given),
        **tools.chosen(given.get("tools", []), given.get("tool_choice", "auto"), "tool_choice"),
        parallel_calls=given.get("parallel_tool_calls", True),
        max_new_tokens=given.get("max_completion_tokens") or given.get("max_tokens"),
        stop=given.get("stop", []),
        n=given.get("n", 1),
        ignore_eos=given.get("ignore_eos", False),
        logprobs=logprobs,
        stream=stream,
        stream_usage=usage,
        **constrained.chosen(given),
    )


def _variables(given: dict[str, Any]) -> dict[str, Any]:
    """Variables of the chat template."""
    return openai.thinking(given.get("reasoning_effort")) | given.get("chat_template_kwargs", {})


def whole(request: Request, answers: Sequence[Answer], head: Head, usage: Usage) -> dict[str, Any]:
    """A chat.completion."""
    choices = [
        {
            "index": index,
            "message": _message(answer),
            "logprobs": _logprobs(request, answer.output.tokens, answer.output.logprobs, head.tokenizer),
            "finish_reason": _finish(answer.output.finish_reason, answer.output.stop, _last(answer)),
        }
        for index, answer in enumerate(answers)
    ]
    frame = openai.frame(head, "chat.completion", "chatcmpl")
    return frame | {"choices": choices} | openai.usage(usage)


def _message(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.said("answer"), "refusal": None}
    if thought := answer.said("thought"):
        message["reasoning_content"] = thought
    if answer.calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [_call(event) for event in answer.calls]
    return message


def _call(event: Event) -> dict[str, Any]:
    """A call, or its beginning."""
    function = {"name": event.name, "arguments": event.text}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _last(answer: Answer) -> str | None:
    """The arguments of the last call, as far as they were written; None: there is no call."""
    return next((event.text for event in reversed(answer.events) if event.kind == "call"), None)


def _finish(reason: str | None, stop: str | None, arguments: str | None) -> str | None:
    """stop: the stop text that ended the answer. arguments: of its last call; None: it has none."""
    calls = reason == "stop" and arguments is not None and (stop is None or _is_json(arguments))
    return "tool_calls" if calls else openai.finish(reason)


def _is_json(text: str) -> bool:
    """Whether arguments are whole: those of a call that was cut off are never JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class Stream:
    """chat.completion.chunks."""

    def __init__(self, request: Request, head: Head):
        self._request, self._head = request, head
        self._frame = openai.frame(head, "chat.completion.chunk", "chatcmpl")
        self._calls = [0] * request.n  # that have begun, by answer
        self._arguments: list[list[str]] = [[] for _ in range(request.n)]  # of the last of them, in pieces
        self._plain: dict[tuple[int, str], Template] = {}  # of an answer's thoughts and text

    def begin(self) -> list[ServerEvent]:
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(index, delta) for index in range(self._request.n)]

    def next(self, part: Part) -> list[ServerEvent]:
        if part.logprobs is None and part.finish_reason is None:
            return [self._event(part.index, event) for event in part.events]
        scores = _logprobs(self._request, part.tokens, part.logprobs, self._head.tokenizer)
        deltas = [self._delta(part.index, event) for event in part.events]
        chunks = []
        for delta in deltas or ([{}] if scores else []):
            chunks.append(self._chunk(part.index, delta, scores))
            scores = None  # they are those of all the text of this part
        if part.finish_reason is not None:
            called = self._calls[part.index] > 0
            arguments = "".join(self._arguments[part.index]) if called else None
            finish = _finish(part.finish_reason, part.stop, arguments)
            chunks.append(self._chunk(part.index, {}, finish=finish))
        return chunks

    def _event(self, index: int, event: Event) -> ServerEvent:
        """Of a part without log-probabilities."""
        if event.kind == "call":
            return self._chunk(index, self._delta(index, event))
        plain = self._plain.get((index, event.kind))
        if plain is None:
            body = self._body(index, {TEXTS[event.kind]: Template.HOLE})
            plain = self._plain[index, event.kind] = Template(body)
        return plain.event(event.text)

    def _delta(self, index: int, event: Event) -> dict[str, Any]:
        if event.kind != "call":
            return {TEXTS[event.kind]: event.text}
        call: dict[str, Any] = {"function": {"arguments": event.text}}
        if event.name is not None:
            self._calls[index] += 1
            self._arguments[index] = []
            call = _call(event)
        self._arguments[index].append(event.text)
        return {"tool_calls": [{"index": self._calls[index] - 1, **call}]}

    def end(self, usage: Usage) -> list[ServerEvent]:
        last = [ServerEvent(self._frame | {"choices": []} | openai.usage(usage))]
        return [*(last if self._request.stream_usage else []), openai.DONE]

    def failed(self, failure: RequestError) -> list[ServerEvent]:
        return [ServerEvent(error(failure))]

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None
    ) -> ServerEvent:
        return ServerEvent(self._body(index, delta, logprobs, finish))

    def _body(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if self._request.stream_usage else {}
        return self._frame | {"choices": [choice]} | usage


def _logprobs(
    request: Request, tokens: Sequence[int], scores: Logprobs | None, tokenizer: Tokenizer
) -> dict[str, Any] | None:
    if scores is None or not tokens:
        return None

    def token(id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(id)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    lists = (openai.numbers(scores.token), scores.ids.tolist(), openai.numbers(scores.top))
    content = [
        {**token(id, own), "top_logprobs": list(map(token, ids[: request.logprobs], top))}
        for id, own, ids, top in zip(tokens, *lists, strict=True)
    ]
    return {"content": content, "refusal": None}
