"""Text in, text out: `generate` and `stream`, which run an engine's loop (engine/), and `logits`."""

import atexit
import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
from jaxtyping import Float

from bonsai_jax.constraints import Constraint
from bonsai_jax.decoding import jitted
from bonsai_jax.decoding import steps as core
from bonsai_jax.decoding.sampling import bias_width
from bonsai_jax.engine.answers import Output, Piece, output
from bonsai_jax.engine.loop import Loop
from bonsai_jax.engine.options import Options
from bonsai_jax.engine.prompts import (
    Ids,
    Prompt,
    answer_options,
    check_room,
    checked_sampling,
    compiled_constraint,
    each_constraint,
    each_prompt,
    each_sampling,
    encode,
    pad,
    step_options,
)
from bonsai_jax.model import Model, check_model
from bonsai_jax.network import cache as kv
from bonsai_jax.network import parallel
from bonsai_jax.network.kinds.attention import PREFILL_CHUNK
from bonsai_jax.network.taps import Taps
from bonsai_jax.progress import Progress, shown
from bonsai_jax.research import answers
from bonsai_jax.sampling_params import SamplingParams
from bonsai_jax.weights import placement
from pallas_kernels.device import platform

# A prompt, how its answer is drawn, what it must match, and what takes its pieces.
Request = tuple[Ids, SamplingParams, Constraint | None, Callable[[Any], None]]
FEW_ROWS = 8
STREAM_WAIT_S = 0.1  # most seconds between two pieces of `stream`, if a step takes less


def generate(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    stop: str | Sequence[str] = (),
    ignore_eos: bool = False,
    logprobs: int | None = None,
    speculate: str | None = None,
    taps: Taps | None = None,
    read: Taps | None = None,
    logits_processor: core.LogitsProcessor | None = None,
    constraint: Constraint | Sequence[Constraint | None] | None = None,
    progress: Progress = False,
) -> list[Output]:
    """Answer prompts, up to `model.run.batch_size` at once (on each device that the mesh gives rows to). When
    an answer ends, the next prompt begins (engine/).

    prompts         a prompt, or a list of prompts: each a text, token ids as a list or an integer array [T],
                    or float32 [T, hidden], vectors as `embed` makes them (a trained soft prompt)
    max_new_tokens  most tokens of each answer
    sampling        one for all prompts, or one each
    stop            texts that end an answer
    ignore_eos      continue after the model's own end-of-generation tokens
    logprobs        n: each Output has the log-probabilities of its tokens and of the n likeliest in their
                    place (sampling.Logprobs)
    speculate       "ngram": the same tokens in fewer steps where the text repeats or edits its prompt, with
                    proposals from the text itself (speculation.py); "mtp": with proposals from the file's
                    draft layer, for a model loaded with RunConfig(draft=True). A model that was loaded with
                    RunConfig(draft_model=) has proposals from that model, and no others
    taps            edits activations (steering)
    read            what to read at the position from which each token is drawn: Output.activations. Prompt
                    and answer are read once more for it, at the speed of prefill (research/answers.py), and
                    generation is as fast as without
    logits_processor  (logits, state) -> logits, traced, before every draw (see `step`). Like taps it is
                    compiled in, so define it once for all calls. It must treat each row by itself; rows
                    that look at each other need generate_tokens
    constraint      what answers must match, one for all prompts or one each; after a thought, if a prompt is
                    a chat whose template has them
    progress        True: a bar on stderr; or called with answers finished so far and in all
    Returns one Output per prompt, in order. The same seeds and prompts give the same text.
    Raises ValueError for an empty prompt, one that leaves no room for max_new_tokens in the context, and
    where no token can be drawn, because logits are NaN or infinite or every token is banned, and for a
    constraint that cannot be compiled; NotImplementedError for a `speculate` that has no file in proposers/,
    and for `speculate` with SamplingParams.chained.
    """
    check_model(model)
    ids = [encode(model, prompt) for prompt in each_prompt(prompts)]
    per_row = each_sampling(sampling, len(ids))
    options = step_options(model, taps, logits_processor, logprobs, speculate, per_row)
    how = answer_options(max_new_tokens, stop, ignore_eos) | {"logprobs": options["logprobs"]}
    constraints = each_constraint(model, constraint, ids)
    pieces: list[list[Any]] = [[] for _ in ids]
    requests = list(zip(ids, per_row, constraints, [_taking(parts) for parts in pieces], strict=True))
    if read is not None:
        answers.check_read(read, model.config.num_layers, ids)
    if not ids:
        return []
    with _loop(model, requests, how, **options) as loop, shown(progress, "answering") as update:
        while loop.turn():
            update(len(ids) - len(loop.answers), len(ids))
        update(len(ids), len(ids))
    outputs = [output(parts, len(prompt)) for parts, prompt in zip(pieces, ids, strict=True)]
    if read is None:
        return outputs
    tokens = [one.tokens for one in outputs]
    activations = answers.read_answers(model, cast(list[list[int]], ids), tokens, read, taps)
    return [dataclasses.replace(one, activations=own) for one, own in zip(outputs, activations, strict=True)]


def stream(
    model: Model,
    prompt: Prompt,
    *,
    max_new_tokens: int = 128,
    sampling: SamplingParams = SamplingParams(),
    stop: str | Sequence[str] = (),
    ignore_eos: bool = False,
    logprobs: int | None = None,
    speculate: str | None = None,
    taps: Taps | None = None,
    logits_processor: core.LogitsProcessor | None = None,
    constraint: Constraint | None = None,
) -> Iterator[Piece]:
    """Answer one prompt, piece by piece, while the device runs the next steps. Arguments and errors as for
    `generate`.

    A `break` out of the loop over the pieces ends the generation. Text that could be the beginning of a stop
    string comes with a later piece, once it is known not to be.
    """
    ids = encode(model, prompt)
    checked_sampling(sampling)
    options = step_options(model, taps, logits_processor, logprobs, speculate, [sampling])
    how = answer_options(max_new_tokens, stop, ignore_eos) | {"logprobs": options["logprobs"]}
    pieces: deque[Any] = deque()
    compiled = compiled_constraint(model, constraint, ids)
    request = ids, sampling, compiled, _taking(pieces)
    with _loop(model, [request], how, max_wait_s=STREAM_WAIT_S, **options) as loop:
        while True:
            loop.turn()
            while pieces:
                piece = pieces.popleft()
                yield piece
                if piece.finish_reason is not None:
                    return


def compile_ahead(
    model: Model,
    prompts: Prompt | Sequence[Prompt] = "Hello",
    *,
    max_new_tokens: int = 128,
    sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    logprobs: int | None = None,
    speculate: str | None = None,
    taps: Taps | None = None,
    logits_processor: core.LogitsProcessor | None = None,
    constraint: Constraint | Sequence[Constraint | None] | None = None,
) -> None:
    """Begin to compile, in other threads, what `generate` or `stream` with these arguments runs first, and
    return at once. On one device that can be done while weights are read:

        model = bj.load("model.gguf", on_shapes=bj.compile_ahead)
        model = bj.load("model.gguf", on_shapes=lambda model: bj.compile_ahead(model, prompts))

    Arguments and errors as for `generate`. Only the number of prompts and their lengths matter, not what they
    say.
    """
    check_model(model)
    ids = [encode(model, prompt) for prompt in each_prompt(prompts)]
    per_row = each_sampling(sampling, len(ids))
    options = step_options(model, taps, logits_processor, logprobs, speculate, per_row)
    how = answer_options(max_new_tokens, (), False) | {"logprobs": options["logprobs"]}
    constraints = each_constraint(model, constraint, ids)
    requests = [(*each, _taking([])) for each in zip(ids, per_row, constraints, strict=True)]
    if not requests:
        return
    _asked(model.shapes(), requests, how, **options).compile_first()


def _taking(pieces: Any) -> Callable[[Any], None]:
    """A function that appends a request's pieces to these, and raises an exception that ends it."""

    def add(piece: Any) -> None:
        if isinstance(piece, Exception):
            raise piece
        pieces.append(piece)

    return add


@contextlib.contextmanager
def _loop(
    model: Model,
    requests: Sequence[Request],
    how: dict[str, Any],
    **options: Any,
) -> Iterator[Loop]:
    """A loop that has all these requests, and ends with the context, or before Python does, where a script
    leaves a stream open. Arguments as for `_asked`."""
    loop, is_open = _asked(model, requests, how, **options), True

    def close() -> None:
        nonlocal is_open
        if is_open:
            is_open = False
            loop.close()

    atexit.register(close)
    forget = atexit.unregister  # when such a stream is deleted, this module's names are gone
    try:
        yield loop
    finally:
        forget(close)
        close()


def _asked(
    model: Model,
    requests: Sequence[Request],
    how: dict[str, Any],
    **options: Any,
) -> Loop:
    """A loop that has all these requests, and room for them; its decode programs will be compiled beside its
    first prefill. how: arguments of Loop.ask; options: of Options."""
    ids = [prompt for prompt, *_ in requests]
    for prompt in ids:
        check_room(model, len(prompt), how["max_new_tokens"])
    run = model.run
    each = -(-len(ids) // placement.size(model.mesh, placement.DATA))  # prompts for each device
    room = _pool_rows(model, each)
    pages = _pool_pages(model, room, [len(prompt) + how["max_new_tokens"] for prompt in ids])
    biases = bias_width([params for _, params, *_ in requests])
    loop = Loop(model, Options(room, pages, run.context, biases=biases, **options))
    try:
        for prompt, params, constraint, on_piece in requests:
            loop.add(loop.ask(prompt, params, constraint=constraint, on_piece=on_piece, **how))
        if loop.answers and (how["max_new_tokens"] > 1 or loop.scheduler.constrained):
            loop.prepare(each)
    except BaseException:
        loop.close()
        raise
    return loop


def _pool_rows(model: Model, prompts: int) -> int:
    """Rows of each device's pool for so many prompts. All calls share few sizes, because programs are
    compiled for each: on a GPU there is one, the size that `load` has checked; on a CPU, where fresh memory
    costs time, 8 for few prompts."""
    few = platform() == "cpu" and prompts <= FEW_ROWS
    return min(FEW_ROWS, model.run.batch_size) if few else model.run.batch_size


def _pool_pages(model: Model, rows: int, lengths: Sequence[int]) -> int:
    """Pages of a pool of so many rows for answers that end at these lengths, of few sizes likewise: on a CPU
    room for 1,024 tokens, 4,096 and so on."""
    run = model.run
    most = rows * kv.page_count(run.context, run.page_size)
    if platform() != "cpu":
        return most
    longest = sorted((kv.page_count(n, run.page_size) for n in lengths), reverse=True)[:rows]
    sizes = (kv.page_count(4**i, run.page_size) for i in range(5, 32))
    return min(most, next(pages for pages in sizes if pages >= sum(longest)))


def logits(model: Model, token_ids: Sequence[int]) -> Float[np.ndarray, "T V"]:
    """Teacher-forced scores: float32 [T, vocab], row t from tokens 0..t, so that it predicts token t + 1.

    Raises ValueError for an empty sequence, an id beyond the vocabulary, or one longer than the context.
    """
    return np.concatenate(list(iter_logits(model, token_ids)))


def iter_logits(model: Model, token_ids: Sequence[int]) -> Iterator[Float[np.ndarray, "chunk V"]]:
    """`logits` in chunks of at most 512 tokens, for texts whose logits do not fit in memory at once."""
    ids = encode(model, token_ids, "token_ids")
    check_room(model, len(ids), 0)
    rows = placement.padded_rows(1, model.mesh)
    context = min(core.bucket(len(ids)), model.run.context)  # few programs
    cache = parallel.empty_cache(model.config, model.run, rows, context, model.mesh)
    for first in range(0, len(ids), PREFILL_CHUNK):
        chunk = ids[first : first + PREFILL_CHUNK]
        tokens, lengths = pad([chunk] * rows, model.mesh)
        scores, cache = jitted.extend(model.params, cache, tokens, lengths, model.config)
        yield parallel.fetch(scores)[0, : len(chunk)]
