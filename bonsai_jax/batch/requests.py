"""The bodies of OpenAI's requests, as an Engine takes them. An unknown field is an error, because an answer
that ignores it would answer another request.

Meanings: platform.openai.com/docs/api-reference, chat/create and completions/create. In addition, as in other
servers: top_k, min_p, repetition_penalty, under the names of SamplingParams.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from bonsai_jax import constraints
from bonsai_jax.config import SamplingParams
from bonsai_jax.constraints import Constraint

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MOST_NEW, MOST_ANSWERS, MOST_LOGPROBS, MOST_BIASES = 2**31 - 1, 128, 20, 1024


class FieldError(ValueError):
    """A request that cannot be met because of the field `param`."""

    def __init__(self, param: str, message: str):
        super().__init__(f"{param}: {message}")
        self.param = param


@dataclasses.dataclass(frozen=True)
class Request:
    """A body's request. None: the body does not say.

    prompts    the messages of a chat, or texts and lists of token ids
    sampling   fields of SamplingParams
    logprobs   alternatives for each token; None: no log-probabilities
    constraint what answers must match; None: anything
    """

    url: str
    model: str | None
    prompts: list[Any]
    sampling: dict[str, Any]
    max_new_tokens: int | None = None
    stop: list[str] = dataclasses.field(default_factory=list)
    n: int = 1
    logprobs: int | None = None
    constraint: Constraint | None = None

    @property
    def chat(self) -> bool:
        return self.url == CHAT


def request(url: str, body: Mapping[str, Any]) -> Request:
    """The request in a body sent to this URL. A field that is null counts as missing.

    Raises FieldError, which names the field.
    """
    known, given = FIELDS[url], {}
    for name, value in body.items():
        if name not in known:
            names = ", ".join(sorted(known))
            raise FieldError(name, f"not a field that {url} takes; it takes {names}")
        if value is not None:
            given[name] = known[name](name, value)
    needed = "messages" if url == CHAT else "prompt"
    if needed not in given:
        raise FieldError(needed, "missing")
    if url == CHAT:
        logprobs = given.get("top_logprobs", 0) if given.get("logprobs") else None
        if logprobs is None and given.get("top_logprobs"):
            raise FieldError("top_logprobs", 'needs "logprobs": true')
        prompts = [given["messages"]]
    else:
        logprobs, prompts = given.get("logprobs"), given["prompt"]
    sampling = {name: given[name] for name in SAMPLING if name in given}
    for name, value in sampling.items():
        try:
            SamplingParams(**{name: value})
        except ValueError as error:
            raise FieldError(name, str(error).removeprefix(f"SamplingParams: {name} ")) from None
    return Request(
        url,
        given.get("model"),
        prompts,
        sampling,
        given.get("max_completion_tokens", given.get("max_tokens")),
        given.get("stop", []),
        given.get("n", 1),
        logprobs,
        given.get("response_format"),
    )


# Checks of values. Each returns the value as a Request has it.


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise FieldError(name, f"{_shown(value)} is not a text")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FieldError(name, f"{_shown(value)} is not a number")
    return value


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise FieldError(name, f"{_shown(value)} is not a whole number")
    return value


def _from(low: int, high: int) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        if not low <= _whole(name, value) <= high:
            raise FieldError(name, f"{value} does not lie in {low} to {high}")
        return value

    return check


def _truth(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise FieldError(name, f"{_shown(value)} is neither true nor false")
    return value


def _stop(name: str, value: Any) -> list[str]:
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) and text for text in texts):
        raise FieldError(name, f"{_shown(value)} is neither a text nor a list of texts, none of them empty")
    return texts


def _bias(name: str, value: Any) -> dict[int, float]:
    ids = isinstance(value, dict) and all(token.isdecimal() and len(token) < 11 for token in value)
    if not ids:
        raise FieldError(name, f'{_shown(value)} is not an object such as {{"50256": -100}}')
    if len(value) > MOST_BIASES:
        raise FieldError(name, f"names {len(value)} tokens, and may name {MOST_BIASES}")
    return {int(token): _number(f"{name}.{token}", bias) for token, bias in value.items()}


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FieldError(name, f"{_shown(value)} is not an object")
    return value


def _only(*allowed: Any) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        if value not in allowed:
            raise FieldError(name, f"{_shown(value)} is not supported; leave it out")
        return value

    return check


def response_format(name: str, value: Any) -> Constraint | None:
    """The constraint that a response_format asks for; None: any text.

    {"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"schema": {...}}};
    in the last "name", "description" and "strict" have no effect: answers always match the schema.
    """
    kind = _object(name, value).get("type")
    fields = {"text": {"type"}, "json_object": {"type"}, "json_schema": {"type", "json_schema"}}
    if not isinstance(kind, str) or kind not in fields:
        raise FieldError(f"{name}.type", f"{_shown(kind)} is not supported, only {', '.join(fields)}")
    for other in value.keys() - fields[kind]:
        raise FieldError(f"{name}.{other}", f"not a field of a format of type {kind}")
    if kind != "json_schema":
        return None if kind == "text" else constraints.json_object()
    where = f"{name}.json_schema"
    given = _object(where, value.get(kind))
    for other in given.keys() - {"name", "description", "schema", "strict"}:
        raise FieldError(f"{where}.{other}", "not a field; it has name, description, schema and strict")
    schema = _object(f"{where}.schema", given.get("schema"))
    try:
        return constraints.json_schema(schema)
    except ValueError as error:
        raise FieldError(f"{where}.schema", str(error)) from None


def _prompt(name: str, value: Any) -> list[Any]:
    """A text, a list of texts, token ids, or a list of such lists."""

    def ids(prompt: Any) -> bool:
        return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)

    if isinstance(value, str) or ids(value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(one, str) or ids(one) for one in value):
        return value
    raise FieldError(name, f"{_shown(value)} is not a text, a list of token ids, or a list of these")


def _messages(name: str, value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise FieldError(name, f"{_shown(value)} is not a list of messages")
    messages = []
    for i, message in enumerate(value):
        where, fields = f"{name}[{i}]", {}
        for key, part in _object(where, message).items():
            if part is None:
                continue
            if key not in ("role", "content", "name"):
                raise FieldError(f"{where}.{key}", "not supported; messages have role, content and name")
            fields[key] = (
                _content(f"{where}.{key}", part) if key == "content" else _text(f"{where}.{key}", part)
            )
        for key in ("role", "content"):
            if key not in fields:
                raise FieldError(f"{where}.{key}", "missing")
        messages.append(fields)
    return messages


def _content(name: str, value: Any) -> str:
    """A text, or a list of text parts, which become lines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise FieldError(name, f"{_shown(value)} is neither a text nor a list of parts")
    for i, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise FieldError(f"{name}[{i}]", f"{_shown(part)} is not a part of type text; no other is read")
    return "\n".join(part["text"] for part in value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


SAMPLING = {
    **dict.fromkeys(("temperature", "top_p", "frequency_penalty", "presence_penalty"), _number),
    **dict.fromkeys(("min_p", "repetition_penalty"), _number),
    **{"top_k": _whole, "seed": _whole, "logit_bias": _bias},
}
BOTH = {
    **SAMPLING,
    **{"model": _text, "max_tokens": _from(1, MOST_NEW), "stop": _stop, "n": _from(1, MOST_ANSWERS)},
    **{"stream": _only(False), "response_format": response_format},
    **{"user": _text, "metadata": _object, "store": _truth},  # they do not change answers
}
FIELDS = {
    CHAT: {
        **BOTH,
        **{"messages": _messages, "max_completion_tokens": _from(1, MOST_NEW)},
        **{"logprobs": _truth, "top_logprobs": _from(0, MOST_LOGPROBS)},
    },
    COMPLETIONS: {
        **BOTH,
        **{"prompt": _prompt, "logprobs": _from(0, MOST_LOGPROBS), "echo": _only(False), "best_of": _only(1)},
    },
}
