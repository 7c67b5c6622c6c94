"""The settings of a server."""

import dataclasses
from typing import Any

from bonsai_jax import choices
from bonsai_jax.sampling_params import SamplingParams

MEGABYTE = 2**20


@dataclasses.dataclass(frozen=True)
class Settings:
    """Limits and defaults of a server.

    name            of the model, in answers and in /v1/models
    keys            of which a request must give one; (): none is needed
    share_prefixes  requests with different keys share cached beginnings of prompts, too
    local           the server can be reached from this machine alone
    origins         of web pages that may use the server, beside its own
    sampling, max_new_tokens, template   for requests that do not say; max_new_tokens None: until the context
                    is full
    pooling         of embeddings, for requests that do not say
    max_queue       answers that may wait for a row; more requests get 429
    max_answers     of one request: n for each prompt
    max_body        bytes
    body_s          seconds that a body may take to arrive
    timeout_s       seconds after which an answer ends with the text so far
    """

    name: str = "model"
    keys: tuple[str, ...] = ()
    share_prefixes: bool = False
    local: bool = True
    origins: tuple[str, ...] = ()
    sampling: SamplingParams = SamplingParams(temperature_first=True)
    max_new_tokens: int | None = None
    template: dict[str, Any] = dataclasses.field(default_factory=dict)
    pooling: choices.Pooling = "mean"
    max_queue: int = 256
    max_answers: int = 128
    max_body: int = 16 * MEGABYTE
    body_s: float = 60.0
    timeout_s: float = 600.0
