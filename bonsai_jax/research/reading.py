"""The layers alone, over a cache: what scores, activations and embeddings are made of."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, cast

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from bonsai_jax.config import ModelConfig
from bonsai_jax.decoding import jitted
from bonsai_jax.decoding.steps import hidden_states
from bonsai_jax.engine.prompts import check_room, encode, is_vectors
from bonsai_jax.model import Model
from bonsai_jax.network import parallel
from bonsai_jax.network.cache import KVCache, page_count
from bonsai_jax.network.parallel import over_mesh
from bonsai_jax.network.params import Params
from bonsai_jax.network.taps import Taps
from bonsai_jax.weights import placement
from pallas_kernels.device import platform


@over_mesh("rows")
def branch_states(
    params: Params,
    cache: KVCache,
    prompts: Int[Array, "R"],
    parents: Int[Array, "B"],
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    config: ModelConfig,
) -> Float[Array, "B T H"]:
    """hidden_states of tokens that continue the first `prompts` tokens of rows `parents` of a cache, which
    stays as it is."""
    cache = cache.rewind(prompts) if cache.rewinds else cache  # else a row has no more than its prompt
    return hidden_states(params, cache.take(parents), tokens, lengths, config)[0]


read_branches = jitted.donating(branch_states)


def batch_tokens() -> int:
    """Tokens of a batch on each device: enough to fill it."""
    return 2048 if platform() == "cpu" else 8192


def whole_ids(model: Model, texts: Iterable[Any], what: str) -> list[list[int]]:
    """Token ids of each text. Raises TypeError or ValueError for one that cannot be read as a whole."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise TypeError(f"{what} are a {type(texts).__name__}; give a list of texts")
    every = []
    for text in texts:
        if is_vectors(text):
            raise TypeError(f"{what}: one is an array of vectors; give texts or token ids")
        ids = cast(list[int], encode(model, text))
        check_room(model, len(ids), 0)
        every.append(ids)
    return every


class Reader:
    """Reads batches of whole sequences through the first layers of a model. Its cache is reused while the
    shape of a batch stays the same."""

    def __init__(self, model: Model, taps: Taps | None = None, stop_at_layer: int | None = None):
        self.model, self.options = model, {"taps": taps, "stop_at_layer": stop_at_layer}
        config, stop = model.config, stop_at_layer or model.config.num_layers
        # A cache has the layers that run, and one with attention at least, whose pages give its size.
        stop = max(stop, min(group.layers[0] for group in config.attention_groups) + 1)
        self._config = dataclasses.replace(config, layers=config.layers[:stop], draft=None)
        self._cache: KVCache | None = None
        self._shape: tuple[int, int] | None = None

    def padded(
        self, ids: Sequence[Sequence[int]], rows: int, width: int
    ) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B"]]:
        """Token ids as int32 [rows, width], padded at the end, and their lengths; rows without a sequence
        have length 0. Over a mesh there are rows for every device."""
        rows = placement.padded_rows(rows, self.model.mesh)
        tokens, lengths = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
        for row, own in enumerate(ids):
            tokens[row, : len(own)], lengths[row] = own, len(own)
        return tokens, lengths

    def read(
        self, tokens: Int[np.ndarray, "B T"], lengths: Int[np.ndarray, "B"], room: int = 0
    ) -> tuple[Float[Array, "B T H"], dict[str, Float[Array, "L B ..."]]]:
        """hidden_states of whole sequences, and what taps read. room: tokens that may follow in the cache."""
        model, pages = self.model, page_count(tokens.shape[1] + room, self.model.run.page_size)
        # Few sizes of caches: fewer programs read what comes behind.
        pages = pages if room == 0 else 1 << (pages - 1).bit_length()
        shape = len(tokens), pages * model.run.page_size
        if shape != self._shape or self._cache is None:
            self._cache = None  # its memory is free before the next one is made
            self._cache = parallel.empty_cache(self._config, model.run, *shape, model.mesh, rewinds=True)
            self._shape = shape
        hidden, self._cache, activations = jitted.hidden_states(
            model.params, self._cache.reset(), *self._placed(tokens, lengths), model.config, **self.options
        )
        return hidden, activations

    @property
    def capacity(self) -> int:
        """Tokens that a row of the batch that was read last may have, with those that follow."""
        assert self._shape is not None
        return self._shape[1]

    def read_behind(
        self,
        prompts: Int[np.ndarray, "R"],
        parents: Int[np.ndarray, "B"],
        tokens: Int[np.ndarray, "B T"],
        lengths: Int[np.ndarray, "B"],
    ) -> Float[Array, "B T H"]:
        """hidden_states of tokens that continue the first `prompts` tokens of rows `parents` of the batch
        that was read last."""
        model, arrays = self.model, self._placed(prompts, parents, tokens, lengths)
        return read_branches(model.params, self._cache, *arrays, model.config)

    def _placed(self, *arrays: np.ndarray) -> list[jax.Array]:
        return [parallel.place_rows(array, self.model.mesh) for array in arrays]
