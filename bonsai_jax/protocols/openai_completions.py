"""OpenAI's completions of texts and token ids: POST /v1/completions.

With `echo` an answer begins with its prompt, and the log-probabilities with those of the prompt's tokens: the
first has none. Evaluation harnesses score texts so, and ask for one new token or none (max_tokens: 0). They
leave the new token's score out without looking, so it is there even if it ends the answer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bonsai_jax.decoding.sampling import Logprobs
from bonsai_jax.protocols import constrained, fields, openai
from bonsai_jax.protocols.answers import Answer, Echo, Head, Part, ServerEvent, Template, Usage
from bonsai_jax.protocols.errors import FieldError, RequestError
from bonsai_jax.protocols.openai import error
from bonsai_jax.protocols.request import Request
from bonsai_jax.tokens.tokenizer import Tokenizer

__all__ = ["PATH", "Stream", "error", "request", "whole"]

PATH = "/v1/completions"
FIELDS = {
    **openai.COMMON,
    **{"prompt": fields.prompt, "logprobs": fields.between(0, fields.MOST_LOGPROBS)},
    **{"best_of": fields.only(1)},
}
WHOLE_ONLY = {**openai.WHOLE_ONLY, "echo": fields.only(False)}
SERVED = {
    **openai.REFUSED,
    **{"echo": fields.truth, "suffix": fields.only("")},
    **{"max_tokens": fields.new_tokens(0)},
}


def request(body: Mapping[str, Any], *, strict: bool = False) -> Request:
    """The request in a body. Raises FieldError, which names the field."""
    known = FIELDS | (WHOLE_ONLY if strict else SERVED)
    given = fields.read(body, known, strict=strict, path=PATH)
    if "prompt" not in given:
        raise FieldError("prompt", "missing")
    echo, most = given.get("echo", False), given.get("max_tokens")
    if most == 0 and not echo:
        raise FieldError("max_tokens", 'is 0, which needs "echo": true; give 1 or more')
    stream, usage = openai.streaming(given)
    scores = echo and most == 1 and given.get("logprobs") is not None
    return Request(
        path=PATH,
        model=given.get("model"),
        prompts=given["prompt"],
        **fields.sampling(given),
        max_new_tokens=most,
        stop=given.get("stop", []),
        n=given.get("n", 1),
        ignore_eos=given.get("ignore_eos", False) or scores,
        logprobs=given.get("logprobs"),
        echo=echo,
        stream=stream,
        stream_usage=usage,
        **constrained.chosen(given),
    )


def whole(request: Request, answers: Sequence[Answer], head: Head, usage: Usage) -> dict[str, Any]:
    """A text_completion."""
    choices = []
    for index, answer in enumerate(answers):
        output, text = answer.output, _Text(request, head.tokenizer)
        choices.append(
            {
                "index": index,
                **text.next(output.text, output.tokens, output.logprobs, answer.echo),
                "finish_reason": openai.finish(output.finish_reason),
            }
        )
    frame = openai.frame(head, "text_completion", "cmpl")
    return frame | {"choices": choices} | openai.usage(usage)


class Stream:
    """text_completions, each with more of the text."""

    def __init__(self, request: Request, head: Head):
        self._request, self._head = request, head
        self._frame = openai.frame(head, "text_completion", "cmpl")
        count = len(request.prompts) * request.n
        self._texts = [_Text(request, head.tokenizer) for _ in range(count)]
        more = {"text": Template.HOLE, "logprobs": None}
        self._plain = [Template(self._chunk(index, more)) for index in range(count)]

    def begin(self) -> list[ServerEvent]:
        return []

    def next(self, part: Part) -> list[ServerEvent]:
        if self._request.logprobs is None and part.echo is None and part.finish_reason is None:
            return [self._plain[part.index].event(part.text)] if part.text else []
        more = self._texts[part.index].next(part.text, part.tokens, part.logprobs, part.echo)
        if not (more["text"] or more["logprobs"] or part.finish_reason):
            return []
        return [ServerEvent(self._chunk(part.index, more, openai.finish(part.finish_reason)))]

    def end(self, usage: Usage) -> list[ServerEvent]:
        last = [ServerEvent(self._frame | {"choices": []} | openai.usage(usage))]
        return [*(last if self._request.stream_usage else []), openai.DONE]

    def failed(self, failure: RequestError) -> list[ServerEvent]:
        return [ServerEvent(error(failure))]

    def _chunk(self, index: int, more: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        usage = {"usage": None} if self._request.stream_usage else {}
        return self._frame | {"choices": [{"index": index, **more, "finish_reason": finish}]} | usage


class _Text:
    """`text` and `logprobs` of a choice, part by part. Offsets count from the beginning of its text."""

    def __init__(self, request: Request, tokenizer: Tokenizer):
        self._request, self._tokenizer = request, tokenizer
        self._detokenizer, self._at = tokenizer.answer_detokenizer(), 0

    def next(
        self, text: str, tokens: Sequence[int], scores: Logprobs | None, echo: Echo | None
    ) -> dict[str, Any]:
        lists: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        asked = self._request.logprobs is not None
        if echo is not None:
            text = echo.text + text
            if asked:
                self._add_echo(lists, echo)
            self._at = len(echo.text)
        if scores is not None and len(tokens):
            self._add(lists, tokens, scores)
        logprobs: Any = lists if asked and lists["tokens"] else None
        if logprobs and not self._request.logprobs:
            logprobs["top_logprobs"] = None
        return {"text": text, "logprobs": logprobs}

    def _add_echo(self, lists: dict[str, list[Any]], echo: Echo) -> None:
        """The prompt's tokens. The first has no probability."""
        detokenizer, at = self._tokenizer.detokenizer(), 0
        for id in echo.tokens:
            lists["text_offset"].append(min(at, len(echo.text)))
            at += len(detokenizer.push(id))
        lists["tokens"] += map(self._token, echo.tokens)
        scores = echo.logprobs
        lists["token_logprobs"] += [None, *([] if scores is None else openai.numbers(scores.token))]
        lists["top_logprobs"] += [None, *([] if scores is None else self._top(scores))]

    def _add(self, lists: dict[str, list[Any]], tokens: Sequence[int], scores: Logprobs) -> None:
        # Where each token's text begins. A character in several tokens begins with the first of them.
        for id in tokens:
            lists["text_offset"].append(self._at)
            self._at += len(self._detokenizer.push(id))
        lists["tokens"] += map(self._token, tokens)
        lists["token_logprobs"] += openai.numbers(scores.token)
        lists["top_logprobs"] += self._top(scores)

    def _top(self, scores: Logprobs) -> list[dict[str, float]]:
        """Of tokens with equal texts the likeliest."""
        return [
            {self._token(id): score for id, score in reversed([*zip(ids, top, strict=True)])}
            for ids, top in zip(scores.ids.tolist(), openai.numbers(scores.top), strict=True)
        ]

    def _token(self, id: int) -> str:
        return self._tokenizer.token_bytes(id).decode(errors="replace")
