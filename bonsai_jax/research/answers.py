"""What generated answers look like inside: their activations, read in a second pass."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from bonsai_jax.config import ModelConfig
from bonsai_jax.model import Model
from bonsai_jax.network import kinds, parallel
from bonsai_jax.network.taps import STREAM, Taps
from bonsai_jax.research.batches import batches
from bonsai_jax.research.reading import Reader, batch_tokens, widths

BY_KEY = {"scores", "pattern"}  # of each token and all keys, which answers have different numbers of


def read_answers(
    model: Model,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    read: Taps,
    taps: Taps | None = None,
) -> list[dict[str, Float[np.ndarray, "L tokens ..."]]]:
    """What `read` reads, under the edits of `taps`, at the position from which each token of an answer was
    drawn: the prompt's last token for the first, then the token before.

    Reading answers again at the speed of prefill takes a small part of the time of writing them, and leaves
    the programs that write as they are. Values equal those of the decode steps up to rounding.
    """
    edited = taps is not None and taps.edit is not None
    stop = None if read.layers is None else max(read.layers) + 1
    whole = [[*prompt, *answer[:-1]] for prompt, answer in zip(prompts, answers, strict=True)]
    out: list[dict[str, np.ndarray]] = [{} for _ in whole]
    shapes = list(batches([len(ids) for ids in whole], batch_tokens(), widths()))
    with contextlib.closing(Reader(model, _joined(read, taps) if edited else read, stop)) as reader:
        reader.prepare((rows, width) for _, rows, width in shapes)
        for numbers, rows, width in shapes:
            _, activations = reader.read(*reader.padded([whole[i] for i in numbers], rows, width))
            each = {site: parallel.fetch(x) for site, x in activations.items()}
            if edited and read.layers is not None:  # every layer was read
                each = {site: x[_places(model.config, site, read.layers)] for site, x in each.items()}
            for row, i in enumerate(numbers):
                drawn = slice(len(prompts[i]) - 1, len(prompts[i]) - 1 + len(answers[i]))
                out[i] = {site: np.array(x[:, row, drawn]) for site, x in each.items()}
    return out


def check_read(read: Taps, num_layers: int, prompts: Sequence[Any]) -> None:
    """Raise TypeError or ValueError for taps, or prompts, that `read_answers` cannot read."""
    if not isinstance(read, Taps):
        raise TypeError(f'read is a {type(read).__name__}; give bj.Taps, such as bj.Taps("output", layers=5)')
    if not read.read or read.edit is not None:
        raise ValueError('read: it names sites to read, as in bj.Taps("output"); edits are taps=')
    if by_key := sorted(read.read & BY_KEY):
        raise ValueError(f"read: {', '.join(by_key)}: of all keys; call bj.forward on prompt and answer")
    if any(isinstance(prompt, np.ndarray) for prompt in prompts):
        raise ValueError("read: a prompt is vectors; call bj.forward on them and the embedded answer")
    read.check_layers(num_layers)


@functools.lru_cache(maxsize=32)  # one object for the same taps, so that nothing is compiled again
def _joined(read: Taps, taps: Taps) -> Taps:
    """One Taps that reads in every layer what `read` names, and edits as `taps` does."""
    edit, layers = taps.edit, taps.layers
    assert edit is not None
    if layers is None:
        return Taps(read.read, edit, taps.at)
    numbers = np.array(sorted(layers))

    def in_own_layers(name: str, layer: int | jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(jnp.isin(layer, numbers), edit(name, layer, x), x)

    return Taps(read.read, in_own_layers, taps.at)


def _places(config: ModelConfig, site: str, layers: frozenset[int]) -> list[int]:
    """Where these layers are among those that have a site."""
    own = [
        number
        for number, layer in enumerate(config.layers)
        if site in STREAM or any(site in kinds.get(half.kind).SITES for half in layer.halves)
    ]
    return [place for place, number in enumerate(own) if number in layers]
