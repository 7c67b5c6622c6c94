"""Outputs of an Engine as OpenAI's objects: chat.completion, text_completion, and the line of a batch's
output that contains them.

Types: the package openai, types/chat/chat_completion.py and types/completion.py.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from bonsai_jax.batch.lines import Line
from bonsai_jax.batch.requests import FieldError, Request
from bonsai_jax.engine.answers import Output
from bonsai_jax.tokens.answer_parser import Harmony
from bonsai_jax.tokens.tokenizer import Tokenizer


def answered(line: Line, body: dict[str, Any]) -> dict[str, Any]:
    """A line of the output with an answer."""
    return _line(line, 200, body, None)


def failed(line: Line, error: Exception) -> dict[str, Any]:
    """A line of the output with an error, of the request (400) or ours (500). The message is in the
    response's body, as from a server, and in `error`, which is null in a line with an answer."""
    param = error.param if isinstance(error, FieldError) else None
    status, code, kind = 500, "server_error", "server_error"
    if param is not None:
        status, code, kind = 400, "invalid_request", "invalid_request_error"
    body = {"error": {"message": str(error), "type": kind, "param": param, "code": code}}
    return _line(line, status, body, {"code": code, "message": str(error)})


def completion(
    request: Request, outputs: Sequence[Output], model: str, tokenizer: Tokenizer
) -> dict[str, Any]:
    """The body of an answer. outputs: request.n for each prompt, prompt by prompt."""
    choice = _chat_choice if request.chat else _text_choice
    prompt = sum(output.prompt_tokens for output in outputs[:: request.n])
    new = sum(len(output.tokens) for output in outputs)
    return {
        "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{secrets.token_hex(12)}",
        "object": "chat.completion" if request.chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": index,
                **choice(output, request, tokenizer),
                "finish_reason": output.finish_reason,
            }
            for index, output in enumerate(outputs)
        ],
        "usage": {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new},
    }


def _chat_choice(output: Output, request: Request, tokenizer: Tokenizer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
    if tokenizer.writes_harmony:  # requests have no functions that could be called
        parser = Harmony()
        events = parser.next(output.text) + parser.end()
        message["content"] = "".join(text for kind, text, _ in events if kind == "answer")
        message["reasoning_content"] = "".join(text for kind, text, _ in events if kind == "thought")
    if (scores := output.logprobs) is None:
        return {"message": message, "logprobs": None}

    def token(id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(id)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    content = [
        {
            **token(id, own),
            "top_logprobs": list(map(token, ids[: request.logprobs], top)),
        }
        for id, own, ids, top in zip(
            output.tokens, *(x.tolist() for x in (scores.token, scores.ids, scores.top)), strict=True
        )
    ]
    return {"message": message, "logprobs": {"content": content, "refusal": None}}


def _text_choice(output: Output, request: Request, tokenizer: Tokenizer) -> dict[str, Any]:
    if (scores := output.logprobs) is None:
        return {"text": output.text, "logprobs": None}

    def text(id: int) -> str:
        return tokenizer.token_bytes(id).decode(errors="replace")

    # Where each token's text begins. A character in several tokens begins with the first of them.
    offsets, detokenizer, at = [], tokenizer.answer_detokenizer(), 0
    for id in output.tokens:
        offsets.append(at)
        at += len(detokenizer.push(id))
    top = [
        # Of tokens with equal texts the likeliest.
        {text(id): score for id, score in reversed([*zip(ids, likeliest, strict=True)])}
        for ids, likeliest in zip(scores.ids.tolist(), scores.top.tolist(), strict=True)
    ]
    logprobs = {
        "tokens": [text(id) for id in output.tokens],
        "token_logprobs": scores.token.tolist(),
        "top_logprobs": top if request.logprobs else None,
        "text_offset": offsets,
    }
    return {"text": output.text, "logprobs": logprobs}


def _line(line: Line, status: int, body: dict[str, Any], error: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": line.custom_id,
        "response": {"status_code": status, "request_id": secrets.token_hex(16), "body": body},
        "error": error,
    }
