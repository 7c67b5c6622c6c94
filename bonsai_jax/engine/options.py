"""What is fixed when an engine is made."""

import dataclasses

from bonsai_jax.decoding.steps import LogitsProcessor
from bonsai_jax.network.taps import Taps


@dataclasses.dataclass(frozen=True)
class Options:
    """See Engine. biases: room for a request's logit biases; adapters: their
    names (adapters.py)."""

    max_batch_size: int
    pages: int
    context: int
    logprobs: int | None = None
    sampled_logprobs: bool = False
    speculate: str | None = None
    taps: Taps | None = None
    logits_processor: LogitsProcessor | None = None
    biases: int = 1
    max_wait_s: float | None = None
    prefill_tokens: int = 0
    reproducible: bool = False
    checkpoints: int = 0
    adapters: tuple[str, ...] = ()
