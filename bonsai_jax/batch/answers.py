"""Answers to lines, by an Engine in this process."""

import asyncio
import dataclasses
from typing import Any

from bonsai_jax.batch.lines import PROTOCOLS, Line, Needs
from bonsai_jax.batch.results import answered, failed
from bonsai_jax.engine import Engine, Handle
from bonsai_jax.engine.answers import Output
from bonsai_jax.model import Model
from bonsai_jax.protocols.answers import Head, Usage, answer
from bonsai_jax.protocols.errors import FieldError
from bonsai_jax.protocols.submit import Defaults, submissions, submitted
from bonsai_jax.sampling_params import SamplingParams

WAIT_S = 0.5  # of the Engine: answers are not streamed, so a dispatch may have many steps


@dataclasses.dataclass(frozen=True)
class Job:
    """Settings for all lines of a batch.

    batch_size       most sequences generated at once, by each device along the mesh's axis "data"
    pages            in each device's cache; None: enough for batch_size sequences of the whole context
    sampling         for lines that do not set it; with a seed, line i has seed + i - 1
    max_new_tokens   for lines that do not set it; None: until the context is full
    template         variables of the chat template, such as enable_thinking
    """

    batch_size: int = 32
    pages: int | None = None
    sampling: SamplingParams = SamplingParams()
    max_new_tokens: int | None = None
    template: dict[str, Any] = dataclasses.field(default_factory=dict)


class Answers:
    """An engine that can answer lines with these needs. `await answers(line)` gives a line of the output.
    `close` cancels requests in progress."""

    def __init__(self, model: Model, job: Job, needs: Needs):
        how = {"logprobs": needs.logprobs, "logit_biases": needs.logit_biases, "max_wait_s": WAIT_S}
        self.job, self.engine = job, Engine(model, max_batch_size=job.batch_size, pages=job.pages, **how)
        self.close = self.engine.close

    async def __call__(self, line: Line) -> dict[str, Any]:
        """Raises RuntimeError if the engine has failed or is closed."""
        model, request = self.engine.model, line.request
        if isinstance(request, FieldError):
            return failed(line, request)
        try:
            asked = request, model, self._defaults(line.number)
            # To compile a constraint may take a second, in which other lines go on.
            each = (
                await asyncio.to_thread(submissions, *asked)
                if request.is_constrained
                else submissions(*asked)
            )
            handles = [submitted(self.engine, request, one) for one in each]
        except FieldError as error:
            return failed(line, error)
        try:
            outputs = [await _outputs(handle) for handle in handles if handle is not None]
        except RuntimeError as error:  # this line's dispatch failed; the engine may go on
            return failed(line, error)
        pairs = [(one.ids, output) for one, own in zip(each, outputs, strict=True) for output in own]
        whole = [answer(request, model.tokenizer, ids, output) for ids, output in pairs]
        prompt = sum(len(one.ids) for one in each)
        usage = Usage(
            prompt,
            sum(len(output.tokens) for _, output in pairs),
            sum(own[0].cached_tokens for own in outputs),
        )
        head = Head(model.name, model.tokenizer, prompt)
        return answered(line, PROTOCOLS[request.path].whole(request, whole, head, usage))

    def _defaults(self, number: int) -> Defaults:
        """For a line of this number. One without a seed has a seed of its own, the same in every run."""
        sampling = self.job.sampling
        if sampling.seed is not None:
            sampling = dataclasses.replace(sampling, seed=sampling.seed + number - 1)
        return Defaults(self.engine.most_tokens, sampling, self.job.max_new_tokens, self.job.template)


async def _outputs(handle: Handle) -> list[Output]:
    async for _ in handle:
        pass
    return handle.results()
