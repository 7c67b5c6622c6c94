"""A Request as arguments of Engine.submit: prompts become token ids, and what it does not say gets defaults.

    Request --submissions--> Submissions --submitted--> Handles

Encoding texts and rendering templates may take seconds: call this outside of an event loop.
"""

import dataclasses
import json
from typing import Any, cast

from bonsai_jax import constraints
from bonsai_jax.constraints import Constraint
from bonsai_jax.decoding import breakers
from bonsai_jax.engine import Engine, Handle
from bonsai_jax.engine.prompts import each_sampling, encode
from bonsai_jax.model import Model
from bonsai_jax.protocols.errors import FieldError
from bonsai_jax.protocols.fields import SAMPLERS
from bonsai_jax.protocols.request import Request
from bonsai_jax.sampling_params import SamplingParams
from bonsai_jax.tokens import departures
from bonsai_jax.tokens.calls import tool_grammar
from bonsai_jax.tokens.calls.grammar import Thought
from bonsai_jax.tokens.thoughts import first_thought
from bonsai_jax.tokens.tokenizer import Tokenizer

Places = tuple[int, ...] | None
TOO_LONG = "context_length_exceeded"  # OpenAI's code, which agents look for


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Settings for requests that do not say.

    most_tokens      of a prompt and its answer, as the engine has room for
    sampling         of which a request replaces some fields
    max_new_tokens   None: until the context is full
    template         variables of the chat template, such as enable_thinking
    places           chats say where later prompts will part ways with them (tokens/departures.py), for
                     engines that save states
    clip             a request that asks for more new tokens than there is room for gets fewer; else it is an
                     error
    """

    most_tokens: int
    sampling: SamplingParams = SamplingParams()
    max_new_tokens: int | None = None
    template: dict[str, Any] = dataclasses.field(default_factory=dict)
    places: bool = False
    clip: bool = False


@dataclasses.dataclass(frozen=True)
class Submission:
    """One prompt of a request. options: arguments of Engine.submit; max_new_tokens may be 0, for an echo
    without an answer."""

    ids: list[int]
    options: dict[str, Any]


def submissions(request: Request, model: Model, defaults: Defaults) -> list[Submission]:
    """One for each prompt. Raises FieldError for a prompt that cannot be encoded, or has no room."""
    prompts = _encoded(request, model, defaults)
    thinks = (defaults.template | request.template).get("enable_thinking") is not False
    each_constraint = [constraint(request, model, ids, thinks) for ids, _ in prompts]
    lengths = [_new_tokens(request, len(ids), defaults) for ids, _ in prompts]
    sampling = SamplingParams(**vars(defaults.sampling) | request.sampling)
    check_breakers(sampling, model)
    each = each_sampling(sampling, len(prompts) * request.n)[:: request.n]
    how = {"stop": request.stop, "ignore_eos": request.ignore_eos, "logprobs": request.logprobs}
    how["n"] = request.n
    return [
        Submission(
            ids,
            {"sampling": own, "max_new_tokens": new, "constraint": must, "checkpoints_at": places, **how},
        )
        for (ids, places), own, new, must in zip(prompts, each, lengths, each_constraint, strict=True)
    ]


def check_breakers(sampling: SamplingParams, model: Model) -> None:
    """Compile DRY's sequence breakers. Raises FieldError for more than there is room for."""
    if sampling.dry:
        try:
            breakers.compiled(sampling.dry_sequence_breakers, model.tokenizer, model.config.vocab_size)
        except ValueError as error:
            prefix = "SamplingParams: dry_sequence_breakers "
            raise FieldError("dry_sequence_breakers", str(error).removeprefix(prefix)) from None


def constraint(request: Request, model: Model, ids: list[int], thinks: bool) -> Constraint | None:
    """What answers to a prompt must match, compiled for the model; None: anything. thinks: thinking is not
    switched off. Raises FieldError for what cannot be compiled."""
    must, where = request.constraint, request.constraint_field
    if not request.is_constrained:
        return None
    thought = first_thought(model.tokenizer, ids, thinks)
    if request.constrains_calls:
        if must is not None:
            raise FieldError(where, "cannot be combined with strict tools or a tool_choice")
        must, where, thought = _calls(request, model.tokenizer, thought), "tools", "none"
    if must is not None:
        must = dataclasses.replace(must, thought=thought)
        try:
            constraints.compile(must, model.tokenizer, model.config.vocab_size)
        except (ValueError, ImportError) as error:
            raise FieldError(where, str(error).removeprefix(f"{must.kind}: ")) from None
    return must


def _calls(request: Request, tokenizer: Tokenizer, thought: Thought) -> Constraint:
    """Calls of the request's tools, and if the model may choose, other text."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in request.tools}
    text = tool_grammar(
        None if tokenizer.writes_harmony else tokenizer.known_call_format(),
        schemas,
        request.tool_choice,
        parallel=request.parallel_calls,
        thought=thought,
        control_ids=tokenizer.control_ids,
    )
    try:
        return constraints.grammar(text)
    except ValueError as error:  # it is too long
        raise FieldError("tools", str(error)) from None


def prompt_ids(request: Request, model: Model, defaults: Defaults) -> list[list[int]]:
    """Token ids of each prompt. Raises FieldError for one that cannot be encoded."""
    return [ids for ids, _ in _encoded(request, model, defaults)]


def _encoded(request: Request, model: Model, defaults: Defaults) -> list[tuple[list[int], Places]]:
    """Token ids of each prompt, and Engine.submit's checkpoints_at. Errors are those of `prompt_ids`."""
    try:
        return [_ids(request, model, prompt, defaults) for prompt in request.prompts]
    except FieldError:
        raise
    except ValueError as error:  # ChatTemplateError is one
        raise FieldError(request.where, str(error)) from None


def chat_ids(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    template: dict[str, Any],
    tools: list[dict[str, Any]],
) -> list[int]:
    """Token ids of a chat. Raises ValueError where the template refuses it, and FieldError for tools that
    this model cannot call."""
    check_tools(tokenizer, tools)
    return tokenizer.encode_chat(roles(tokenizer, messages), tools=tools, **template)


def check_tools(tokenizer: Tokenizer, tools: list[dict[str, Any]]) -> None:
    """Raise FieldError for tools that this model cannot call."""
    if tools and not tokenizer.writes_harmony:
        try:
            tokenizer.known_call_format()
        except NotImplementedError as error:
            raise FieldError("tools", str(error).removeprefix("tools: ")) from None


def chat_texts(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[str]:
    """Everything in a chat that becomes tokens."""
    texts = [message["content"] for message in messages]
    calls = [message["tool_calls"] for message in messages if "tool_calls" in message]
    return [*texts, *map(json.dumps, [*calls, *tools])]


def roles(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A developer's message is the system's, for a template that does not know developers."""
    if "developer" in (tokenizer.chat_template or ""):
        return messages
    return [
        message | {"role": "system"} if message.get("role") == "developer" else message
        for message in messages
    ]


def _ids(request: Request, model: Model, prompt: Any, defaults: Defaults) -> tuple[list[int], Places]:
    texts = chat_texts(prompt, request.tools) if request.chat else [prompt]
    check_size(request.where, model.tokenizer, texts, defaults.most_tokens)
    places: Places = None
    if request.chat:
        template = defaults.template | request.template
        if defaults.places:
            check_tools(model.tokenizer, request.tools)
            own = roles(model.tokenizer, prompt)
            prompt, places = departures.encode_chat(model.tokenizer, own, tools=request.tools, **template)
        else:
            prompt = chat_ids(model.tokenizer, prompt, template, request.tools)
    return cast(list[int], encode(model, prompt)), places


def check_size(where: str, tokenizer: Tokenizer, texts: list[Any], most: int) -> None:
    """Raise FieldError for texts, or one list of token ids, that cannot fit `most` tokens. A tokenizer takes
    100 bytes of memory for each character, so this comes before it."""
    size = sum(map(len, texts))
    unit, longest = "token ids", 1
    if isinstance(texts[0], str):
        unit, longest = "characters", tokenizer.longest_text
    if size > most * longest:
        raise FieldError(
            where,
            f"{size} {unit} of prompt are more than {most} tokens, for which there is room",
            code=TOO_LONG,
        )


def _new_tokens(request: Request, length: int, defaults: Defaults) -> int:
    most, left = defaults.most_tokens, defaults.most_tokens - length
    new = defaults.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
    if length > most or (left < 1 and new != 0):
        raise FieldError(
            request.where,
            f"{length} tokens of prompt, and there is room for {most} with the answer; shorten it",
            code=TOO_LONG,
        )
    if new is None:
        return left
    if new > left and not defaults.clip:
        raise FieldError(
            "max_tokens",
            f"{length} tokens of prompt and {new} new ones exceed the {most} that there is room for; ask for "
            "fewer, or give a larger context",
        )
    return min(new, left)


def adapter_name(engine: Engine, request: Request) -> str | None:
    """The engine's adapter that a request names as its model; None: it names none of them."""
    return request.model if request.model in engine.options.adapters else None


def submitted(engine: Engine, request: Request, one: Submission, owner: str = "") -> Handle | None:
    """The Handle of a submission of this owner (Engine.submit); None where only an echo is asked for. Raises
    FieldError for what the engine could never run, and RuntimeError where it is closed or has failed."""
    if not one.options["max_new_tokens"]:
        return None
    try:
        return engine.submit(one.ids, **one.options, owner=owner, adapter=adapter_name(engine, request))
    except ValueError as error:
        named = (name for name in ("logit_bias", "logprobs") if name in str(error))
        raise _refused(request, next(named, None), error) from None
    except NotImplementedError as error:  # in an engine that speculates
        named = (name for name in SAMPLERS if name in request.sampling)
        raise _refused(request, next(named, None), error) from None


def _refused(request: Request, name: str | None, error: Exception) -> FieldError:
    """The engine's error about a field of SamplingParams, as the body calls it; None: about the prompts."""
    message = str(error).removeprefix("SamplingParams: ").removeprefix(f"{name} ")
    return FieldError(request.where if name is None else request.sampling_names.get(name, name), message)
