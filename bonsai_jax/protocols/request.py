"""A request in the engine's terms, whatever protocol it came by."""

import dataclasses
from typing import Any

from bonsai_jax.constraints import Constraint


@dataclasses.dataclass(frozen=True)
class Request:
    """A body's request. None: the body does not say.

    path       of its protocol
    prompts    the messages of a chat (one list of them), or texts and lists of token ids
    chat       prompts are messages, which the chat template formats
    template   variables of the chat template
    tools      functions that may be called, as OpenAI's chat completions have them
    tool_choice   "auto", "none" (then `tools` is empty), "required", or the name of the function that must
               be called
    parallel_calls   an answer may have several calls
    sampling   fields of SamplingParams
    sampling_names   what the body calls those that it has under another name
    max_new_tokens   0 only with echo
    ignore_eos continue after the model's own end tokens
    logprobs   alternatives for each token; None: no log-probabilities
    echo       answers begin with their prompts
    stream     the answer is a stream of events
    stream_usage     whose last has the usage
    constraint what answers must match; None: anything
    constraint_field   the body's field that says so
    """

    path: str
    model: str | None
    prompts: list[Any]
    sampling: dict[str, Any]
    sampling_names: dict[str, str] = dataclasses.field(default_factory=dict)
    chat: bool = False
    template: dict[str, Any] = dataclasses.field(default_factory=dict)
    tools: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    tool_choice: str = "auto"
    parallel_calls: bool = True
    max_new_tokens: int | None = None
    stop: list[str] = dataclasses.field(default_factory=list)
    n: int = 1
    ignore_eos: bool = False
    logprobs: int | None = None
    echo: bool = False
    stream: bool = False
    stream_usage: bool = False
    constraint: Constraint | None = None
    constraint_field: str = "response_format"

    @property
    def is_constrained(self) -> bool:
        """Whether answers must match something."""
        return self.constraint is not None or self.constrains_calls

    @property
    def constrains_calls(self) -> bool:
        """Whether functions must be called, or calls must keep to their schemas."""
        forced = self.tool_choice != "auto" or any(tool.get("strict") for tool in self.tools)
        return bool(self.tools) and forced

    @property
    def where(self) -> str:
        """The field that has the prompts."""
        return "messages" if self.chat else "prompt"
