"""Answers to lines, by an Engine in this process."""

import asyncio
import dataclasses
import functools
from typing import Any

from bonsai_jax import constraints
from bonsai_jax.batch import objects
from bonsai_jax.batch.lines import Line, Needs
from bonsai_jax.batch.requests import FieldError, Request
from bonsai_jax.config import SamplingParams
from bonsai_jax.constraints import Constraint
from bonsai_jax.engine import Engine, Handle
from bonsai_jax.engine.answers import Output
from bonsai_jax.engine.prompts import each_sampling, encode
from bonsai_jax.model import Model

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
            return objects.failed(line, request)
        try:
            if request.constraint is not None:  # it may take a second, in which other lines go on
                await asyncio.to_thread(self._compile, request.constraint)
            handles = self._submitted(line.number, request)
        except FieldError as error:
            return objects.failed(line, error)
        try:
            outputs = [output for handle in handles for output in await _outputs(handle)]
        except RuntimeError as error:  # this line's dispatch failed; the engine may go on
            return objects.failed(line, error)
        return objects.answered(line, objects.completion(request, outputs, model.name, model.tokenizer))

    def _submitted(self, number: int, request: Request) -> list[Handle]:
        """A handle for each prompt. Raises FieldError for a request that cannot be run."""
        where = "messages" if request.chat else "prompt"
        try:
            prompts = [self._ids(request, prompt) for prompt in request.prompts]
        except ValueError as error:
            raise FieldError(where, str(error)) from None
        lengths = [self._new_tokens(request, len(ids), where) for ids in prompts]
        sampling = dataclasses.replace(self.job.sampling, **request.sampling)
        if sampling.seed is not None and "seed" not in request.sampling:
            sampling = dataclasses.replace(sampling, seed=sampling.seed + number - 1)
        each = each_sampling(sampling, len(prompts) * request.n)[:: request.n]
        how: dict[str, Any] = {"stop": request.stop, "logprobs": request.logprobs, "n": request.n}
        how["constraint"] = request.constraint
        try:
            return [
                self.engine.submit(ids, own, max_new_tokens=new, **how)
                for ids, own, new in zip(prompts, each, lengths, strict=True)
            ]
        except ValueError as error:  # from the first `submit`; everything else is checked
            raise FieldError("logit_bias" if "logit_bias" in str(error) else where, str(error)) from None

    def _compile(self, constraint: Constraint) -> None:
        """Raise FieldError for a constraint that cannot be compiled."""
        model = self.engine.model
        try:
            constraints.compile(constraint, model.tokenizer, model.config.vocab_size)
        except (ValueError, ImportError) as error:
            raise FieldError("response_format", str(error)) from None

    def _check_size(self, request: Request, prompt: Any) -> None:
        """Raise ValueError for a prompt that cannot fit, before it is tokenized: a tokenizer takes 100 bytes
        of memory for each character."""
        texts = [message["content"] for message in prompt] if request.chat else [prompt]
        size = sum(map(len, texts))
        unit, longest = "token ids", 1
        if isinstance(texts[0], str):
            unit, longest = "characters", max(map(len, self.engine.model.tokenizer.texts))
        if size > self._most * longest:
            raise ValueError(
                f"{size} {unit} of prompt are more than {self._most} tokens, which this job has room for"
            )

    @functools.cached_property
    def _most(self) -> int:
        """Most tokens of a prompt and its answer."""
        options = self.engine.options
        return min(options.context, options.pages * self.engine.model.run.page_size)

    def _ids(self, request: Request, prompt: Any) -> list[int]:
        self._check_size(request, prompt)
        if request.chat:
            prompt = self.engine.model.tokenizer.encode_chat(prompt, **self.job.template)
        return encode(self.engine.model, prompt)  # pyrefly: ignore[bad-return]

    def _new_tokens(self, request: Request, length: int, where: str) -> int:
        most = self._most
        new = request.max_new_tokens or self.job.max_new_tokens or max(1, most - length)
        if length + new > most:
            raise FieldError(
                where if length >= most else "max_tokens",
                f"{length} tokens of prompt and {new} new ones exceed this job's {most}; ask for fewer, or "
                "give the job a larger context",
            )
        return new


async def _outputs(handle: Handle) -> list[Output]:
    async for _ in handle:
        pass
    return handle.results()
