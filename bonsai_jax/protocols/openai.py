"""What OpenAI's protocols have in common: fields of requests, errors, usage.

Meanings: platform.openai.com/docs/api-reference. Types: the package openai. In addition, as in other servers:
top_k, min_p, repetition_penalty and other samplers under the names of SamplingParams, ignore_eos, more ways
to say what answers must match (constrained.py), for completions too, and `timings` as llama-server has it.
"""

from typing import Any

import numpy as np

from bonsai_jax.protocols import constrained
from bonsai_jax.protocols.answers import Head, ServerEvent, Usage
from bonsai_jax.protocols.errors import FieldError, RequestError
from bonsai_jax.protocols.fields import (
    MOST_ANSWERS,
    SAMPLERS,
    SAMPLING,
    Check,
    between,
    json_object,
    new_tokens,
    only,
    stop,
    text,
    truth,
)

KINDS = {  # of errors, by status
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
LEAST_LOGPROB = -9999.0
DONE = ServerEvent("[DONE]")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # of reasoning


def _stream_options(name: str, value: Any) -> bool:
    usage = json_object(name, value).get("include_usage")
    return usage is not None and truth(f"{name}.include_usage", usage)


COMMON: dict[str, Check] = {
    **SAMPLING,
    **SAMPLERS,
    **{"model": text, "max_tokens": new_tokens(1), "stop": stop, "n": between(1, MOST_ANSWERS)},
    **constrained.FIELDS,
    **{"stream": truth, "stream_options": _stream_options, "ignore_eos": truth},
    **{"user": text, "metadata": json_object, "store": truth},  # they do not change answers
}
# What clients of other servers may ask for and this one cannot do. Without it they would get another answer.
REFUSED: dict[str, Check] = {
    "functions": only([], instead="give tools"),
    "function_call": only("auto", "none", instead="give tools and tool_choice"),
    "stop_token_ids": only([], instead="give texts as stop"),
    "include_stop_str_in_output": only(False, instead="leave it out, and add the stop text to the answer"),
    "prompt_logprobs": only(instead="ask /v1/completions with echo and logprobs"),
    "truncate_prompt_tokens": only(instead="shorten the prompt; /tokenize says how long it is"),
}
NEW_TURN = (
    "leave it out; to continue an answer, send /apply-template's text and its beginning to /v1/completions"
)
TURNS: dict[str, Check] = {  # of chats
    "add_generation_prompt": only(True, instead=NEW_TURN),
    "continue_final_message": only(False, instead=NEW_TURN),
}
WHOLE_ONLY = {"stream": only(False)}  # what a batch takes


def thinking(effort: str | None) -> dict[str, Any]:
    """Variables of the chat template: gpt-oss's reads reasoning_effort, most others enable_thinking."""
    own: dict[str, Any] = {} if effort is None else {"enable_thinking": effort != "none"}
    if effort not in (None, "none"):
        own["reasoning_effort"] = effort
    return own


def streaming(given: dict[str, Any]) -> tuple[bool, bool]:
    """Whether the answer is sent as it comes, and whether the last event has the usage."""
    stream = given.get("stream", False)
    if "stream_options" in given and not stream:
        raise FieldError("stream_options", 'needs "stream": true')
    return stream, given.get("stream_options", False)


def error(error: RequestError) -> dict[str, Any]:
    """{"error": ...}. 400 for everything in the body that is at fault, so that `param` names the field."""
    kind = KINDS.get(error.status, "invalid_request_error")
    code = error.code or ("invalid_request" if error.param is not None else kind)
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": code}}


def numbers(logprobs: Any) -> list[Any]:
    """Log-probabilities as lists. JSON has no infinity: OpenAI's least number is in its place."""
    return np.maximum(logprobs, LEAST_LOGPROB).tolist()


def frame(head: Head, kind: str, prefix: str) -> dict[str, Any]:
    """What each body or chunk begins with."""
    return {"id": f"{prefix}-{head.key}", "object": kind, "created": head.created, "model": head.model}


def finish(reason: str | None) -> str | None:
    """An answer that ran out of its time was cut, like one that is too long."""
    return "length" if reason == "cancelled" else reason


def usage(own: Usage) -> dict[str, Any]:
    """`usage`, and `timings` where they are known."""
    counts = {
        "prompt_tokens": own.prompt_tokens,
        "completion_tokens": own.new_tokens,
        "total_tokens": own.prompt_tokens + own.new_tokens,
        "prompt_tokens_details": {"cached_tokens": own.cached_tokens},
    }
    return {"usage": counts} | ({} if own.timings is None else {"timings": _timings(own)})


def _timings(own: Usage) -> dict[str, Any]:
    """As llama-server has them: milliseconds, and tokens a second. prompt_n: tokens that were read. The first
    new token is drawn when the prompt is read, so predicted_ms is the time of the others."""
    assert own.timings is not None

    def rates(name: str, all_tokens: int, tokens: int, seconds: float) -> dict[str, Any]:
        return {
            f"{name}_n": all_tokens,
            f"{name}_ms": seconds * 1e3,
            f"{name}_per_token_ms": seconds * 1e3 / tokens if tokens else 0.0,
            f"{name}_per_second": tokens / seconds if seconds > 0 else 0.0,
        }

    read = own.prompt_tokens - own.cached_tokens
    return {
        "cache_n": own.cached_tokens,
        **rates("prompt", read, read, own.timings.prompt_s),
        **rates("predicted", own.new_tokens, max(0, own.new_tokens - 1), own.timings.new_s),
    }
