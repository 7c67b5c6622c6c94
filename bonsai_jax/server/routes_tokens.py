"""POST /tokenize, /detokenize, /apply-template and GET /tokenizer_info: what the tokenizer makes of a text, a
chat or token ids.

Names are llama-server's; those of vLLM (`prompt`, `add_special_tokens`) are taken, too. By /tokenizer_info
lm-eval sees that a server has a tokenizer.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from bonsai_jax.protocols import fields, openai_chat, openai_messages
from bonsai_jax.protocols.errors import FieldError
from bonsai_jax.protocols.submit import check_size, roles
from bonsai_jax.server import bodies
from bonsai_jax.server.responses import json_response
from bonsai_jax.server.service import Service
from bonsai_jax.tokens.tokenizer import Tokenizer

TOKENIZE = {
    **dict.fromkeys(("content", "prompt"), fields.text),
    **dict.fromkeys(("add_special", "add_special_tokens", "parse_special", "with_pieces"), fields.truth),
}
TEMPLATE = {"chat_template_kwargs": openai_chat.variables, "tools": openai_chat.TOOLS["tools"]}


async def tokenize(service: Service, request: Request) -> Response:
    """{"content": TEXT, "add_special": false, "parse_special": true} -> {"tokens": [...], "count": N}

    "with_pieces": true makes each token {"id": ID, "piece": TEXT}. A piece that is not UTF-8 is a list of its
    bytes, as in llama-server.
    """
    given = await _given(service, request, TOKENIZE, "content", "prompt")
    name, tokenizer = "content" if "content" in given else "prompt", service.model.tokenizer
    special = given.get("add_special", given.get("add_special_tokens", False))
    # Longer texts are no prompts of this model, and a tokenizer takes 100 bytes of memory for a character.
    check_size(name, tokenizer, [given[name]], service.defaults.most_tokens)

    def encoded() -> list[int]:
        parse = given.get("parse_special", True)
        return tokenizer.encode(given[name], add_special=special, parse_special=parse)

    tokens = await _called(service, name, encoded)
    own = [_piece(tokenizer, id) for id in tokens] if given.get("with_pieces") else tokens
    return json_response({"tokens": own, "count": len(tokens)})


def _piece(tokenizer: Tokenizer, id: int) -> dict[str, Any]:
    data = tokenizer.token_bytes(id)
    try:
        return {"id": id, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": id, "piece": list(data)}


async def detokenize(service: Service, request: Request) -> Response:
    """{"tokens": [...]} -> {"content": TEXT}, also as `prompt`"""
    given = await _given(service, request, {"tokens": fields.ids}, "tokens")
    ids, tokenizer, size = given["tokens"], service.model.tokenizer, service.model.config.vocab_size
    if (most := max(ids, default=0)) >= size:
        raise FieldError("tokens", f"token {fields.shown(most)} is beyond the vocabulary of {size}")
    text = await _called(service, "tokens", lambda: tokenizer.decode(ids, skip_special=False))
    return json_response({"content": text, "prompt": text})


async def tokenizer_info(service: Service, request: Request) -> Response:
    """Names of special tokens, and the chat template."""
    tokenizer = service.model.tokenizer
    names = {name: None if id is None else tokenizer.texts[id] for name, id in (
        ("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id),
    )}  # fmt: skip
    info = {"chat_template": tokenizer.chat_template, "model_max_length": service.defaults.most_tokens}
    return json_response(names | info)


async def apply_template(service: Service, request: Request) -> Response:
    """{"messages": [...]} -> {"prompt": TEXT}, the text that a chat becomes."""
    known = TEMPLATE | {"messages": openai_messages.check(strict=False)}
    given = await _given(service, request, known, "messages")
    variables = service.settings.template | given.get("chat_template_kwargs", {})
    tokenizer = service.model.tokenizer

    def applied() -> str:
        messages, tools = roles(tokenizer, given["messages"]), given.get("tools")
        return tokenizer.apply_chat_template(messages, tools=tools, **variables)

    return json_response({"prompt": await _called(service, "messages", applied)})


async def _given(service: Service, request: Request, known: dict[str, Any], *needed: str) -> dict[str, Any]:
    """The fields of the body. Raises FieldError without any of those that are needed."""
    body = await bodies.json_object(service, request)
    given = fields.read(body, known, strict=False, path=request.url.path)
    if not given.keys() & {*needed}:
        raise FieldError(needed[0], "missing")
    return given


async def _called(service: Service, where: str, function: Any) -> Any:
    """The function's result, of a thread. Its ValueError is about the field `where`."""
    try:
        return await service.in_thread(function)
    except ValueError as error:
        raise FieldError(where, str(error)) from None
