"""Activations of many texts, for dictionaries (SAEs), probes and statistics."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from bonsai_jax.model import Model
from bonsai_jax.network.taps import Taps
from bonsai_jax.progress import Progress, shown
from bonsai_jax.research.batches import NO_LIMIT, batches
from bonsai_jax.research.reading import Reader, batch_tokens, whole_ids, widths

SORTED_TEXTS = 1024  # texts that are sorted by length together


class Harvested(NamedTuple):
    """One batch of `harvest`: B rows of T tokens, padded at the end.

    activations  {site: float32 [layers, B, T, ...]} on the device, for the layers that taps name
    tokens       int32 [B, T], their ids
    mask         bool [B, T], True for tokens, False for padding
    texts        int [B], the number of each row's text, from 0; -1 for a row that is all padding
    """

    activations: dict[str, Float[Array, "L B T ..."]]
    tokens: Int[np.ndarray, "B T"]
    mask: Bool[np.ndarray, "B T"]
    texts: Int[np.ndarray, "B"]


def harvest(
    model: Model,
    texts: Iterable[str | Sequence[int]],
    taps: Taps,
    *,
    batch_size: int | None = None,
    progress: Progress = False,
) -> Iterator[Harvested]:
    """Read texts, and yield what `taps` read at every token, batch by batch.

        for activations, tokens, mask, numbers in bj.harvest(model, texts, bj.Taps("output", layers=15)):
            x = activations["output"][0][mask]        # [tokens, hidden]

    The layers run as in prefill: on kernels, up to the deepest layer that taps name, without the output
    matrix. Texts are taken 1,024 at a time and sorted by length, so that few programs are compiled and little
    is padded. The next batch runs while yours is used.

    texts       texts or token ids; any iterable
    taps        which sites to read, in which layers (Taps.layers). It may edit, too
    batch_size  most rows of a batch; None: as many as fill the device
    progress    True: a bar; or called with texts read so far and in all (0 if `texts` has no length)
    Raises ValueError for taps that read nothing, for an empty text, and for one longer than the context, and
    NotImplementedError for sites that a kernel keeps to itself (looking-inside.md).
    """
    if not isinstance(model, Model):
        raise TypeError(f"model is a {type(model).__name__}; give what bj.load returns")
    if not isinstance(taps, Taps):
        raise TypeError(f'taps is a {type(taps).__name__}; give bj.Taps, such as bj.Taps("output", layers=5)')
    if not taps.read and not taps.inputs:
        raise ValueError('taps: they read nothing; name sites, as in bj.Taps("output")')
    taps.check_layers(model.config.num_layers)
    if batch_size is not None and (not isinstance(batch_size, int | np.integer) or batch_size < 1):
        raise ValueError(f"batch_size is {batch_size!r}; it must be a whole number, 1 or more, or None")
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise TypeError(f"texts are a {type(texts).__name__}; give an iterable of texts")
    return _one_ahead(_harvest(model, texts, taps, batch_size, progress))


def _harvest(model: Model, texts: Iterable, taps: Taps, batch_size, progress) -> Iterator[Harvested]:
    opened = Reader(model, taps, None if taps.layers is None else max(taps.layers) + 1)
    most_tokens, most_rows = (batch_tokens(), NO_LIMIT) if batch_size is None else (NO_LIMIT, batch_size)
    total, first = len(texts) if isinstance(texts, Sequence) else 0, 0
    with shown(progress, "reading") as update, contextlib.closing(opened) as reader:
        update(0, total)
        for some in itertools.batched(texts, SORTED_TEXTS):
            ids, done = whole_ids(model, some, "texts"), 0
            lengths = [len(own) for own in ids]
            each = list(batches(lengths, most_tokens, widths(), most_rows=most_rows))
            reader.prepare((count, width) for _, count, width in each)
            for numbers, count, width in each:
                tokens, counts = reader.padded([ids[i] for i in numbers], count, width)
                _, activations = reader.read(tokens, counts)
                texts_read = np.full(len(tokens), -1)
                texts_read[: len(numbers)] = first + numbers
                yield Harvested(activations, tokens, np.arange(width) < counts[:, None], texts_read)
                done += len(numbers)
                update(first + done, total)
            first += len(ids)


def _one_ahead[T](items: Iterator[T]) -> Iterator[T]:
    """The same items; each is made before the one before it is given out."""
    last: list[T] = []
    for item in items:
        yield from last
        last = [item]
    yield from last
