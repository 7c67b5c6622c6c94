"""Text in, text out: `generate`, `stream` and `logits`, on the functions of arrays of decoding.py."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from bonsai_jax import cache as kv
from bonsai_jax import decoding as core
from bonsai_jax import jitted, parallel, placement
from bonsai_jax.answers import Output, Piece, Reader, output
from bonsai_jax.config import SamplingParams
from bonsai_jax.engine.loop import Loop, Options
from bonsai_jax.model import Model, new_state
from bonsai_jax.progress import Progress, shown
from bonsai_jax.prompts import (
    Ids,
    Prompt,
    check_new,
    check_room,
    checked_sampling,
    each_sampling,
    encode,
    is_vectors,
    pad,
    step_options,
)
from bonsai_jax.sampling import bias_width
from bonsai_jax.taps import Taps

STREAM_SIZE = 64  # most tokens decoded in one dispatch of `stream`


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
    logits_processor: core.LogitsProcessor | None = None,
    progress: Progress = False,
) -> list[Output]:
    """Answer prompts, up to `model.run.rows` at once (on each device that the mesh gives rows to): when one
    ends, the next begins (engine/).

    prompts         texts, token ids, or float32 [T, hidden]: vectors as `embed` makes them (a trained soft
                    prompt). A text or an array of vectors alone is one prompt
    max_new_tokens  most tokens of each answer
    sampling        one for all prompts, or one each
    stop            texts that end an answer
    ignore_eos      go on behind the model's own end-of-generation tokens
    logprobs        n: each Output has the log-probabilities of its tokens and of the n likeliest in their
                    place (sampling.Logprobs)
    speculate       "ngram": the same tokens in fewer steps where the text repeats or edits its prompt, with
                    proposals from the text itself (speculation.py); "mtp": by the file's draft layer, of a
                    model loaded with RunConfig(draft=True)
    taps            edits activations on their way (steering). To read them, call `forward` on the answer
    logits_processor  (logits, state) -> logits, traced, before every draw (see `step`). Like taps it is
                    compiled in: define it once, not anew for each call. Each row must stand for itself;
                    rows that look at each other need generate_tokens
    progress        True: a bar on stderr; or called with answers finished so far and in all
    Returns one Output per prompt, in order. The same seeds and prompts give the same text.
    Raises ValueError for an empty prompt, or one that leaves no room for max_new_tokens in the context, and
    NotImplementedError for a `speculate` that is no file of proposers/.
    """
    each: Any = [prompts] if isinstance(prompts, str) or is_vectors(prompts) else prompts
    ids = [encode(model, prompt) for prompt in each]
    options = step_options(model, taps, logits_processor, logprobs)
    check_new(max_new_tokens)
    for prompt in ids:
        check_room(model, len(prompt), max_new_tokens)
    per_row = each_sampling(sampling, len(ids))
    if not ids:
        return []
    # Powers of two, so that few programs are compiled.
    of_device = -(-len(ids) // placement.size(model.mesh, placement.DATA))
    rows = min(1 << (of_device - 1).bit_length(), model.run.rows)
    context = min(core.bucket(max(map(len, ids)) + max_new_tokens), model.run.context)
    loop = Loop(
        model,
        Options(
            max_rows=rows,
            pages=rows * kv.page_count(context, model.run.page_size),
            context=context,
            speculate=speculate,
            biases=bias_width(per_row),
            **options,
        ),
    )
    pieces: list[list[Any]] = [[] for _ in ids]
    for told, prompt, params in zip(pieces, ids, per_row, strict=True):
        how = {"max_new_tokens": max_new_tokens, "stop": stop, "ignore_eos": ignore_eos, "logprobs": logprobs}
        loop.add(loop.ask(prompt, params, **how, told=told.append))
    with shown(progress, "answering") as update:
        while loop.turn():
            update(len(ids) - len(loop.answers), len(ids))
        update(len(ids), len(ids))
    loop.release()
    return [output(of, len(prompt)) for of, prompt in zip(pieces, ids, strict=True)]


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
) -> Iterator[Piece]:
    """Answer one prompt, piece by piece, while the device works ahead. Arguments and errors as for
    `generate`.

    Text that could be the beginning of a stop string is held back until it is known not to be.
    """
    ids = encode(model, prompt)
    options = step_options(model, taps, logits_processor, logprobs)
    check_new(max_new_tokens)
    check_room(model, len(ids), max_new_tokens)
    context = min(core.bucket(len(ids)) + core.bucket(max_new_tokens), model.run.context)
    rows = placement.padded_rows(1, model.mesh)  # each device with rows answers the same prompt
    how = {"ignore_eos": ignore_eos, "speculate": speculate}
    state = new_state(model, rows, context, [checked_sampling(sampling)] * rows, max_new_tokens, **how)
    for _, piece in continue_stream(model, state, ids, stop=stop, **options):
        yield piece


def continue_stream(
    model: Model, state: core.State, ids: Ids, *, stop: str | Sequence[str] = (), **options: Any
) -> Iterator[tuple[core.State, Piece]]:
    """Stream the answer to `ids`, read behind what a state of one row (or of several alike, of which the
    first is streamed) already holds; `stream` and `chat` stand on it. options: as of decoding.step.

    Yields with each piece the newest state, the one to go on with: earlier ones are donated. It may be a few
    tokens ahead of the piece (`KVCache.rewind`).
    """
    tokens, lengths = pad([ids] * state.tokens.shape[0], model.mesh)

    def decode(state: core.State, limit: int):
        limits = np.int32(limit)
        state, *drawn = jitted.decode(
            model.params, state, model.config, limit=limits, size=STREAM_SIZE, **options
        )
        # copies: the next dispatch donates the state's own
        return state, drawn, jax.tree.map(jnp.copy, (state.remaining, _steps(state)))

    reader = Reader(model.tokenizer, _end_tokens(state), stop)
    fetch = parallel.fetch

    def of_row(scores):
        return [jax.tree.map(lambda x: fetch(x)[0], of) for of in scores]

    first = jitted.prefill(model.params, state, tokens, lengths, model.config, **options)
    state, *scores = first if isinstance(first, tuple) else (first,)
    scores = [jax.tree.map(lambda x: x[:, None], of) for of in scores]
    piece = reader.read(fetch(state.tokens)[:1], fetch(state.remaining)[0] == 0, of_row(scores))
    yield state, piece  # before the steps are compiled: the first token is there at once
    if piece.finish_reason is not None:
        return
    steps, began = 1, time.perf_counter()
    made = 0 if state.speculation is None else fetch(state.speculation.steps)[0]
    state, *out = decode(state, 1)
    while True:
        # Dispatched before the tokens of the one before are waited for: the device never waits for the host.
        state, *next_out = decode(state, steps)
        drawn, (remaining, total) = out
        tokens, before = fetch(drawn[0])[0], made
        made = before + (tokens != core.NO_TOKEN).sum() if total is None else fetch(total)[0]
        piece = reader.read(tokens, fetch(remaining)[0] == 0, of_row(drawn[1:]))
        yield state, dataclasses.replace(piece, steps=int(made - before))
        if piece.finish_reason is not None:
            return
        out = next_out
        # As many steps a dispatch as take a twentieth of a second, so that text flows and dispatches are few.
        elapsed, began = time.perf_counter() - began, time.perf_counter()
        # Processes must take the same number, and their clocks differ.
        most = STREAM_SIZE // 8 if jax.process_count() > 1 else int(steps * 0.05 / elapsed)
        steps = max(1, min(most, 2 * steps, STREAM_SIZE))


def logits(model: Model, token_ids: Sequence[int]) -> Float[np.ndarray, "T V"]:
    """Teacher-forced scores: float32 [T, vocab], row t from tokens 0..t, so that it predicts token t + 1.

    Raises ValueError for an empty sequence, an id beyond the vocabulary, or one longer than the context.
    """
    return np.concatenate(list(iter_logits(model, token_ids)))


def iter_logits(model: Model, token_ids: Sequence[int]) -> Iterator[Float[np.ndarray, "chunk V"]]:
    """`logits` in chunks of at most 512 tokens, for texts whose logits do not fit in memory at once."""
    ids = encode(model, token_ids)
    check_room(model, len(ids), 0)
    rows = placement.padded_rows(1, model.mesh)
    cache = parallel.empty_cache(model.config, model.run, rows, len(ids), model.mesh)
    for first in range(0, len(ids), core.PREFILL_CHUNK):
        chunk = ids[first : first + core.PREFILL_CHUNK]
        tokens, lengths = pad([chunk] * rows, model.mesh)
        scores, cache = jitted.extend(model.params, cache, tokens, lengths, model.config)
        yield parallel.fetch(scores)[0, : len(chunk)]


def _steps(state: core.State) -> jax.Array | None:
    """int32 [B], steps made, where they are not as many as tokens."""
    return None if state.speculation is None else state.speculation.steps


def _end_tokens(state: core.State) -> frozenset[int]:
    return frozenset(parallel.fetch(state.stop_ids)[0].tolist()) - {core.NO_TOKEN}
