"""One vector for each text."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bonsai_jax import choices
from bonsai_jax.config import ModelConfig
from bonsai_jax.decoding import jitted
from bonsai_jax.model import Model
from bonsai_jax.network import parallel
from bonsai_jax.network.parallel import over_mesh
from bonsai_jax.network.params import Params
from bonsai_jax.progress import Progress, shown
from bonsai_jax.research.batches import batches
from bonsai_jax.research.reading import Reader, batch_tokens, whole_ids
from pallas_kernels import layer_norm, rms_norm


def embed_texts(
    model: Model,
    texts: Iterable[str | Sequence[int]],
    *,
    pooling: choices.Pooling = "mean",
    progress: Progress = False,
) -> Float[np.ndarray, "N H"]:
    """A unit vector for each text, from the model's last hidden states.

    h_t = norm(x_t), the residual stream behind the last layer at token t, after the final norm: what the
    output matrix reads.  "mean": e = sum_t h_t / T;  "last": e = h_T.  Returned: e / |e|

    texts     texts (encoded with the tokenizer's special tokens) or token ids
    pooling   "mean" of all tokens, or the "last" token, whichever the model was trained for
    progress  True: a bar; or called with texts read so far and in all
    Returns float32 [texts, hidden], so that products of rows are cosines.
    Raises ValueError for an empty text, one longer than the context, and an unknown pooling.
    """
    if not isinstance(model, Model):
        raise TypeError(f"model is a {type(model).__name__}; give what bj.load returns")
    if pooling not in get_args(choices.Pooling):
        listed = " or ".join(map(repr, get_args(choices.Pooling)))
        raise ValueError(f"pooling is {pooling!r}; it must be {listed}")
    ids = whole_ids(model, texts, "texts")
    with shown(progress, "embedding") as update, contextlib.closing(Reader(model)) as reader:
        return embed_ids(reader, ids, pooling, update)


def embed_ids(
    reader: Reader,
    ids: Sequence[Sequence[int]],
    pooling: choices.Pooling,
    update: Callable[[int, int], None] = lambda done, total: None,
) -> Float[np.ndarray, "N H"]:
    """`embed_texts` of token ids, by a Reader, which keeps its programs and its cache from call to call."""
    model, done = reader.model, 0
    out = np.zeros((len(ids), model.config.hidden), np.float32)
    rows, widths = reader.shapes
    each = list(batches([len(own) for own in ids], batch_tokens(), widths, rows=rows))
    reader.prepare((rows, width) for _, rows, width in each)
    for numbers, rows, width in each:
        tokens, lengths = reader.padded([ids[i] for i in numbers], rows, width)
        hidden, _ = reader.read(tokens, lengths)
        counts = parallel.place_rows(lengths, model.mesh)
        vectors = pooled_vectors(model.params, hidden, counts, model.config, pooling=pooling)
        out[numbers] = parallel.fetch(vectors)[: len(numbers)]
        done += len(numbers)
        update(done, len(ids))
    return out


@over_mesh("rows")
def pooled(
    params: Params,
    hidden: Float[Array, "B T H"],
    lengths: Int[Array, "B"],
    config: ModelConfig,
    *,
    pooling: choices.Pooling,
) -> Float[Array, "B H"]:
    """The normed hidden states of each row's tokens as one unit vector."""
    norm = layer_norm if config.layer_norm else rms_norm
    normed = norm(hidden, params.final_norm, config.rms_norm_eps)
    offset = jnp.arange(hidden.shape[1])
    taken = offset < lengths[:, None] if pooling == "mean" else offset == lengths[:, None] - 1
    total = jnp.where(taken[..., None], normed, 0.0).sum(1)  # its length does not matter: no mean is needed
    return total / jnp.maximum(jnp.linalg.norm(total, axis=-1, keepdims=True), 1e-30)


pooled_vectors = jitted.donating(pooled)
