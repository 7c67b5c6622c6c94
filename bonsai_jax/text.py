"""Text in, text out: `generate`, `stream` and `logits`, on the functions of arrays of decoding.py."""

import dataclasses
import operator
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from bonsai_jax import decoding as core
from bonsai_jax import jitted, parallel, placement
from bonsai_jax.config import SamplingParams
from bonsai_jax.model import Model, new_state
from bonsai_jax.sampling import Logprobs
from bonsai_jax.taps import Taps
from bonsai_jax.tokenizer import Detokenizer, Tokenizer

STREAM_SIZE = 64  # most tokens decoded in one dispatch of `stream`

Prompt = str | Sequence[int] | Float[Array, "T H"]
Ids = list[int] | Float[np.ndarray, "T H"]


@dataclasses.dataclass(frozen=True)
class Output:
    """One finished answer. `tokens` leaves out the token that ended it; `text` ends before a stop string.

    logprobs  of `tokens`, as numpy arrays [tokens]; None unless asked for
    steps     decode steps that drew all tokens but the first, which prefill draws
    """

    text: str
    tokens: list[int]
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    logprobs: Logprobs | None = None
    steps: int = 0


@dataclasses.dataclass(frozen=True)
class Piece:
    """A bit of a streamed answer.

    text           what became readable: never half a character, empty while one is incomplete
    tokens         the new tokens behind it
    finish_reason  None until the last piece
    logprobs       of `tokens`, as numpy arrays [tokens]; None unless asked for
    steps          decode steps that drew them; 0 for the first token, which prefill draws
    """

    text: str
    tokens: list[int]
    finish_reason: Literal["stop", "length"] | None = None
    logprobs: Logprobs | None = None
    steps: int = 0


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
) -> list[Output]:
    """Answer prompts, up to `model.run.rows` at once (on each device that the mesh gives rows to), those of
    like length together, in one jitted call for each group.

    prompts         texts, token ids, or float32 [T, hidden]: vectors as `embed` makes them (a trained soft
                    prompt). A text or an array of vectors alone is one prompt
    max_new_tokens  most tokens of each answer
    sampling        one for all prompts, or one each
    stop            texts that end an answer; they are looked for on the host, when the group is done
    ignore_eos      go on behind the model's own end-of-generation tokens
    logprobs        n: each Output has the log-probabilities of its tokens and of the n likeliest in their
                    place (sampling.Logprobs)
    speculate       "ngram": the same tokens in fewer steps where the text repeats or edits its prompt, with
                    proposals from the text itself (speculation.py)
    taps            edits activations on their way (steering). To read them, call `forward` on the answer
    logits_processor  (logits, state) -> logits, traced, before every draw (see `step`). Like taps it is
                    compiled in: define it once, not anew for each call
    Returns one Output per prompt, in order. The same seeds and number of prompts give the same text.
    Raises ValueError for an empty prompt, or one that leaves no room for max_new_tokens in the context, and
    NotImplementedError for a `speculate` that is no file of proposers/.
    """
    each: Any = [prompts] if isinstance(prompts, str) or _is_vectors(prompts) else prompts
    ids = [_encode(model, prompt) for prompt in each]
    options = _options(model, taps, logits_processor, logprobs)
    _check_new(max_new_tokens)
    for prompt in ids:
        _check_room(model, len(prompt), max_new_tokens)
    per_row = _spread(sampling, len(ids))
    outputs: list[Output | None] = [None] * len(ids)
    for group in _groups(model, ids):
        of_group = [ids[i] for i in group], [per_row[i] for i in group]
        how = {"ignore_eos": ignore_eos, "speculate": speculate}
        answers = _generate_group(model, *of_group, max_new_tokens, stop, how, options)
        for i, answer in zip(group, answers, strict=True):
            outputs[i] = answer
    return [output for output in outputs if output is not None]


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
    ids = _encode(model, prompt)
    options = _options(model, taps, logits_processor, logprobs)
    _check_new(max_new_tokens)
    _check_room(model, len(ids), max_new_tokens)
    context = min(core.bucket(len(ids)) + core.bucket(max_new_tokens), model.run.context)
    rows = placement.padded_rows(1, model.mesh)  # each device with rows answers the same prompt
    how = {"ignore_eos": ignore_eos, "speculate": speculate}
    state = new_state(model, rows, context, [_sampling(sampling)] * rows, max_new_tokens, **how)
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

    reader = _Reader(model.tokenizer, _end_tokens(state), stop)
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
    ids = _encode(model, token_ids)
    _check_room(model, len(ids), 0)
    rows = placement.padded_rows(1, model.mesh)
    cache = parallel.empty_cache(model.config, model.run, rows, len(ids), model.mesh)
    for first in range(0, len(ids), core.PREFILL_CHUNK):
        chunk = ids[first : first + core.PREFILL_CHUNK]
        tokens, lengths = pad([chunk] * rows, model.mesh)
        scores, cache = jitted.extend(model.params, cache, tokens, lengths, model.config)
        yield parallel.fetch(scores)[0, : len(chunk)]


class _Reader:
    """New tokens of one row in, pieces of text out: decodes characters, looks for stop strings, names the
    end."""

    def __init__(self, tokenizer: Tokenizer, end_tokens: frozenset[int], stop: str | Sequence[str]):
        stop = (stop,) if isinstance(stop, str) else stop
        if any(not s for s in stop):
            raise ValueError("stop: an empty text would end every answer before it begins")
        self.detokenizer: Detokenizer = tokenizer.detokenizer(
            at_start=False
        )  # an answer continues its prompt
        self.end_tokens, self.stop, self.held = end_tokens, tuple(stop), ""

    def read(self, drawn: Sequence[int] | np.ndarray, ended: bool, scores: Sequence[Logprobs] = ()) -> Piece:
        """drawn   ends at the first NO_TOKEN
        ended   no more will come
        scores  their Logprobs, if asked for
        """
        text, tokens, reason = self._read(drawn, ended)
        of_tokens = [jax.tree.map(lambda x: x[: len(tokens)], of) for of in scores]
        return Piece(text, tokens, reason, *of_tokens)

    def _read(self, drawn, ended: bool) -> tuple[str, list[int], Literal["stop", "length"] | None]:
        tokens: list[int] = []
        for token in map(int, drawn):
            if token == core.NO_TOKEN:
                break
            if token in self.end_tokens:
                return self.held + self.detokenizer.flush(), tokens, "stop"
            tokens.append(token)
            self.held += self.detokenizer.push(token)
            found = [at for at in map(self.held.find, self.stop) if at >= 0]
            if found:
                return self.held[: min(found)], tokens, "stop"
        if ended:
            return self.held + self.detokenizer.flush(), tokens, "length"
        text, self.held = _split_before_stop(self.held, self.stop)
        return text, tokens, None


def _split_before_stop(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """Split off the longest end of `text` that is the beginning of a stop string."""
    longest = max(map(len, stop), default=1) - 1
    for n in range(min(longest, len(text)), 0, -1):
        if any(s.startswith(text[-n:]) for s in stop):
            return text[:-n], text[-n:]
    return text, ""


def _groups(model: Model, ids: Sequence[Ids]) -> Iterator[list[int]]:
    """Indices of the prompts that run together: neighbours in length, vectors apart from tokens. The longest
    come first: what does not fit the device's memory fails at once. Within a group they keep their order."""
    at_once = model.run.rows * placement.size(model.mesh, placement.DATA)
    for vectors in (False, True):
        kind = [i for i, prompt in enumerate(ids) if isinstance(prompt, np.ndarray) == vectors]
        kind.sort(key=lambda i: -len(ids[i]))
        for first in range(0, len(kind), at_once):
            yield sorted(kind[first : first + at_once])


def _generate_group(
    model: Model,
    ids: Sequence[Ids],
    sampling_params: Sequence[SamplingParams],
    max_new_tokens: int,
    stop: str | Sequence[str],
    how: dict[str, Any],
    options: dict[str, Any],
) -> list[Output]:
    """how, options: as of new_state and of decoding.step."""
    # Rows, too, are a power of two, so that few programs are compiled.
    data = placement.size(model.mesh, placement.DATA)
    of_device = -(-len(ids) // data)
    rows = data * min(1 << (of_device - 1).bit_length(), model.run.rows)
    padding = rows - len(ids)  # prompts of one token and answers of one, of which nobody hears
    tokens, lengths = pad([*ids, *[ids[0][:1]] * padding], model.mesh)
    size = core.bucket(max_new_tokens)
    context = min(tokens.shape[1] + size, model.run.context)
    sampling_params = [*sampling_params, *[SamplingParams(temperature=0.0, seed=0)] * padding]
    new = [max_new_tokens] * len(ids) + [1] * padding
    state = new_state(model, rows, context, sampling_params, new, **how)
    end_tokens = _end_tokens(state)
    state, drawn, *scores = jitted.generate_tokens(
        model.params, state, tokens, lengths, model.config, size=size, **options
    )
    drawn, scores, steps = jax.tree.map(parallel.fetch, (drawn, scores, _steps(state)))
    steps = (drawn != core.NO_TOKEN).sum(1) - 1 if steps is None else steps
    outputs = []
    for row, prompt in enumerate(ids):
        of_row = [jax.tree.map(lambda x, row=row: x[row], of) for of in scores]
        piece = _Reader(model.tokenizer, end_tokens, stop).read(drawn[row], True, of_row)
        reason = piece.finish_reason or "length"
        seen = piece.text, piece.tokens, reason, len(prompt), piece.logprobs
        outputs.append(Output(*seen, int(steps[row])))
    return outputs


def _options(model: Model, taps: Taps | None, logits_processor, logprobs: int | None) -> dict[str, Any]:
    """As decoding.step takes them. Raises ValueError or TypeError for what a generation cannot do."""
    if taps is not None and not isinstance(taps, Taps):
        raise TypeError(f"taps is a {type(taps).__name__}; give bj.Taps(edit=...)")
    if taps is not None and taps.read:
        raise ValueError(
            f"taps: read names {', '.join(sorted(taps.read))}, but a generation returns no activations; call "
            "bj.forward on the prompt and its answer with the same taps"
        )
    if logprobs is not None and not 0 <= logprobs <= model.config.vocab_size:
        raise ValueError(
            f"logprobs is {logprobs}; give the number of alternatives, 0 to the vocabulary's "
            f"{model.config.vocab_size}"
        )
    return {"taps": taps, "logits_processor": logits_processor, "logprobs": logprobs}


def _steps(state: core.State) -> jax.Array | None:
    """int32 [B], steps made, where they are not as many as tokens."""
    return None if state.speculation is None else state.speculation.steps


def _end_tokens(state: core.State) -> frozenset[int]:
    return frozenset(parallel.fetch(state.stop_ids)[0].tolist()) - {core.NO_TOKEN}


def _sampling(params: Any) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise TypeError(
            f"sampling is a {type(params).__name__}; give bj.SamplingParams, such as "
            "bj.SamplingParams(temperature=0.5)"
        )
    return params


def _spread(params: SamplingParams | Sequence[SamplingParams], rows: int) -> list[SamplingParams]:
    """One SamplingParams per prompt; seeds of a shared one count up over all groups."""
    if isinstance(params, list | tuple):
        if len(params) != rows:
            raise ValueError(
                f"{len(params)} SamplingParams for {rows} prompts: give one for all, or one for each"
            )
        return [_sampling(p) for p in params]
    shared = _sampling(params)
    if shared.seed is None:
        return [shared] * rows
    return [dataclasses.replace(shared, seed=shared.seed + row) for row in range(rows)]


def _is_vectors(prompt: Any) -> bool:
    """Whether a prompt is an array of vectors in place of tokens."""
    return hasattr(prompt, "dtype") and jnp.issubdtype(prompt.dtype, jnp.floating)


def _encode(model: Model, prompt: Prompt) -> Ids:
    """A prompt's token ids, or its vectors."""
    if isinstance(prompt, str):
        ids = model.tokenizer.encode(prompt)
    elif _is_vectors(prompt):
        vectors = np.asarray(prompt, np.float32)
        if vectors.ndim != 2 or vectors.shape[1] != model.config.hidden or not len(vectors):
            raise ValueError(
                f"a prompt of vectors has shape {vectors.shape}; expected [tokens, {model.config.hidden}]"
            )
        return vectors
    else:
        try:
            ids = [operator.index(token) for token in prompt]
        except TypeError:
            raise TypeError(
                f"a prompt is {str(prompt)[:60]!r}; give a text, a list of token ids (whole numbers), or "
                "vectors as bj.embed makes them; many prompts, to bj.generate, are a list of these"
            ) from None
    if not ids:
        raise ValueError("the prompt is empty; give at least one token")
    for token in ids:
        if not 0 <= token < model.config.vocab_size:
            raise ValueError(f"token {token} is beyond the vocabulary of {model.config.vocab_size}")
    return ids


def _check_new(max_new_tokens: int) -> None:
    if not isinstance(max_new_tokens, int | np.integer) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be a whole number, 1 or more")


def _check_room(model: Model, prompt_tokens: int, max_new_tokens: int) -> None:
    if prompt_tokens + max_new_tokens > model.run.context:
        raise ValueError(
            f"{prompt_tokens} tokens of prompt and {max_new_tokens} new ones exceed the context of "
            f"{model.run.context}; shorten them, or load with a larger context "
            f"(this model's own is {model.config.context_length})"
        )


def pad(ids: Sequence[Ids], mesh: jax.sharding.Mesh | None = None) -> tuple[jax.Array, jax.Array]:
    """Prompts as int32 [rows, bucket], or vectors as float32 [rows, bucket, hidden], padded at the end with
    zeros, and their lengths, int32 [rows]."""
    first = np.asarray(ids[0])
    dtype = np.float32 if first.ndim > 1 else np.int32
    tokens = np.zeros((len(ids), core.bucket(max(map(len, ids))), *first.shape[1:]), dtype)
    for row, prompt in zip(tokens, ids, strict=True):
        row[: len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in ids], np.int32)
    return parallel.place_rows(tokens, mesh), parallel.place_rows(lengths, mesh)
