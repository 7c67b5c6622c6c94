"""How likely each token of a text is, and which tokens are likelier in its place."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bonsai_jax.config import ModelConfig
from bonsai_jax.decoding import jitted
from bonsai_jax.decoding.sampling import Logprobs
from bonsai_jax.network import decoder, parallel
from bonsai_jax.network.parallel import over_mesh
from bonsai_jax.network.params import Params
from bonsai_jax.research.batches import batches
from bonsai_jax.research.reading import Reader, batch_tokens
from bonsai_jax.research.score import Taken, Target, taken_states


def prompt_logprobs(reader: Reader, prompts: Sequence[Sequence[int]], top: int) -> list[Logprobs]:
    """log p(t_i | t_0 ... t_(i-1)) of every token but the first, and the `top` likeliest in its place.

    prompts  token ids, at least one each
    Returns for each prompt Logprobs as numpy arrays: token [tokens - 1], ids and top [tokens - 1, top].
    """
    out = [_nothing(len(ids) - 1, top) for ids in prompts]
    model, pending = reader.model, list[_Pending]()
    rows, widths = reader.shapes
    plan = list(batches([len(ids) for ids in prompts], batch_tokens(), widths, rows=rows))
    reader.prepare((rows, width) for _, rows, width in plan)
    for numbers, rows, width in plan:
        some = [prompts[i] for i in numbers]
        hidden, _ = reader.read(*reader.padded(some, rows, width))
        targets = [
            [Target(place, number, place, token) for place, token in enumerate(ids[1:])]
            for number, ids in zip(numbers.tolist(), some, strict=True)
        ]
        for taken in taken_states(model, hidden, targets):
            scores = scored(model.params, taken.states, taken.columns, model.config, logprobs=top)
            pending.append(_Pending(taken, scores))
            if len(pending) > 1:  # the device has work while results are fetched
                _store(pending.pop(0), out)
    for some in pending:
        _store(some, out)
    return out


class _Pending(NamedTuple):
    """Scores on their way from the device."""

    taken: Taken
    scores: tuple[jax.Array, jax.Array, jax.Array]


def _nothing(tokens: int, top: int) -> Logprobs:
    wide = (tokens, top)
    return Logprobs(np.zeros(tokens, np.float32), np.zeros(wide, np.int32), np.zeros(wide, np.float32))  # type: ignore[arg-type]


def _store(pending: _Pending, out: list[Logprobs]) -> None:
    token, ids, top = map(parallel.fetch, pending.scores)
    for target, place in zip(pending.taken.targets, pending.taken.places, strict=True):
        own, at = out[target.continuation], target.offset
        own.token[at], own.ids[at], own.top[at] = token[place], ids[place], top[place]  # type: ignore[index]


@over_mesh(("rows", "rows", "rows"))
def top_scores(
    params: Params,
    hidden: Float[Array, "N H"],
    columns: Int[Array, "N 3"],
    config: ModelConfig,
    *,
    logprobs: int,
) -> tuple[Float[Array, "N"], Int[Array, "N logprobs"], Float[Array, "N logprobs"]]:
    """log softmax(logits)[token] for the hidden state before each (row, position, token), and the `logprobs`
    likeliest tokens with theirs."""
    scores = jax.nn.log_softmax(decoder.unembed(params, hidden, config).astype(jnp.float32))
    top, ids = jax.lax.top_k(scores, logprobs)
    return jnp.take_along_axis(scores, columns[:, 2:], axis=1)[:, 0], ids, top


scored = jitted.donating(top_scores)
