"""Attention over a paged key-value cache in jnp, and what a layer does to queries and keys before it: the
reference, and the path of every device without a kernel."""

import types
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import cache_layouts
from pallas_kernels.attention.scores import Scores
from pallas_kernels.cache_layouts import Pages
from pallas_kernels.precision import multiply_precision

NO_TAPS: Mapping[str, Callable[[Array], Array]] = types.MappingProxyType({})
KEYS_PER_BLOCK = 256  # keys visited at a time, in whole pages: bounds what is gathered out of the pages


def attention(
    q: Float[Array, "B T H D"],
    k_pages: Pages,
    v_pages: Pages,
    block_table: Int[Array, "B pages_per_row"],
    positions: Int[Array, "B T"],
    layer: int | Int[Array, ""],
    *,
    num_keys: int | Int[Array, ""],
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, "L H"] | None = None,
    taps: Mapping[str, Callable[[Array], Array]] = NO_TAPS,
) -> Float[Array, "B T H D"]:
    """Causal grouped-query attention of T queries a row against that row's pages.

    out = softmax(scale q k^T, over keys at positions <= the query's) v

    q            queries after rope, rotated as the layout of the pages has it (cache_layouts: rotate)
    k_, v_pages  the whole cache, [L, pages, page_size, Hkv, D] as its layout stores it (cache_layouts);
                 `layer` picks the layer inside, nothing is sliced out for it
    block_table  int32, the page that holds tokens [i * page_size, (i + 1) * page_size) of a row
    positions    int32, of each query within its row; -1 for padding, whose output is 0
    num_keys     keys to visit, at least 1 + the largest position. An int is a loop of known length, which
                 jax.grad can reverse; a traced value stops the loop early instead.
    window       sliding-window attention: a query sees itself and the window - 1 keys before it; None: all
    scale        None: 1 / sqrt(D)
    softcap      scores are softcap tanh(score / softcap), as in Gemma 2; None: they are not bounded
    sinks        of each layer and query head a score, neither scaled nor capped, that joins the softmax as a
                 key would whose value is 0 (gpt-oss): the sum of weights has exp(sink) more; None: no sinks
    taps         {name: x -> x}, what is done to "scores" (-inf where masked) and to "pattern", their softmax,
                 both [B, H, T, keys]; with them softmax is of all keys at once: num_keys if it is an int,
                 else as many as a row's pages hold
    Returns float32 [B, T, H, D].
    Raises ValueError where sizes do not fit each other, and TypeError for numbers of the wrong kind.

    Softmax is computed online over blocks of keys (Milakov and Gimelshein 2018), in float32, with products
    in full precision unless JAX's own setting says otherwise (precision.py). A block that is masked for a row
    leaves that row's bits as they were, so a row does not depend on how long the others are.
    """
    *_, page_size, Hkv, head_dim = check("attention", q, k_pages, v_pages, block_table, positions)
    if q.ndim != 4 or q.shape[3] != head_dim:
        raise ValueError(
            f"attention: q is {list(q.shape)}; give it as [B, T, H, D], with the D of the cache, {head_dim}"
        )
    B, T, H, D = q.shape
    factor = Scores(window, scale, softcap).factor(D)
    if H % Hkv:
        raise ValueError(f"attention: {H} query heads do not divide into {Hkv} KV heads")
    if sinks is not None and (sinks.ndim != 2 or sinks.shape[1] != H):
        raise ValueError(
            f"attention: sinks are {list(sinks.shape)}; give [layers, {H}], one for each query head"
        )
    sink = None if sinks is None else sinks[layer].astype(jnp.float32).reshape(Hkv, H // Hkv, 1)
    pages_per_block = min(max(1, KEYS_PER_BLOCK // page_size), block_table.shape[1])
    block = pages_per_block * page_size
    table = jnp.pad(block_table, ((0, 0), (0, -block_table.shape[1] % pages_per_block)))
    q = q.astype(jnp.float32).reshape(B, T, Hkv, H // Hkv, D) * factor

    def scored(i, pages):
        """Scores of a block of keys [B, Hkv, G, T, block], and its values [B, block, Hkv, D]."""
        k = cache_layouts.read(k_pages, (layer, pages)).reshape(B, -1, Hkv, D)
        v = cache_layouts.read(v_pages, (layer, pages)).reshape(B, -1, Hkv, D)
        keys = i * block + jnp.arange(k.shape[1])
        return _scores(q, k, positions[:, :, None], keys, window, softcap), v

    if "scores" in taps or "pattern" in taps:
        return _at_once(*scored(0, block_table), num_keys, sink, taps)

    def visit(i, carry):
        maximum, total, out = carry  # [B, Hkv, G, T], [B, Hkv, G, T], [B, Hkv, G, T, D]
        pages = jax.lax.dynamic_slice_in_dim(table, i * pages_per_block, pages_per_block, axis=1)
        scores, v = scored(i, pages)
        new_maximum = jnp.maximum(maximum, scores.max(-1))
        # A query that has seen no key yet has a maximum of -inf, and -inf - -inf is NaN.
        base = jnp.where(jnp.isneginf(new_maximum), 0.0, new_maximum)
        weights = jnp.exp(scores - base[..., None])
        keep = jnp.exp(maximum - base)
        total = keep * total + weights.sum(-1)
        out = keep[..., None] * out + jnp.einsum(
            "bkgts,bskd->bkgtd", weights, v, precision=multiply_precision()
        )
        return new_maximum, total, out

    heads = (B, Hkv, H // Hkv, T)
    if sink is None:
        carry = (jnp.full(heads, -jnp.inf), jnp.zeros(heads), jnp.zeros((*heads, D)))
    else:  # the first key that every query sees
        carry = (jnp.broadcast_to(sink, heads), jnp.ones(heads), jnp.zeros((*heads, D)))
    if table.shape[1] == pages_per_block:  # no loop: on a GPU its condition would go to the host and back
        _, total, out = visit(0, carry)
    else:
        first = 0
        if window is not None and not isinstance(num_keys, int):
            seeing = jnp.where(positions < 0, positions.max(), positions).min()
            first = jnp.maximum(seeing - window + 1, 0) // block
        _, total, out = jax.lax.fori_loop(first, (num_keys + block - 1) // block, visit, carry)
    out = out / jnp.where(total == 0, 1.0, total)[..., None]
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, H, D)


def attention_within(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T Hkv D"],
    v: Float[Array, "B T Hkv D"],
    positions: Int[Array, "B T"],
    layer: int | Int[Array, ""],
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, "L H"] | None = None,
    taps: Mapping[str, Callable[[Array], Array]] = NO_TAPS,
) -> Float[Array, "B T H D"]:
    """`attention` of sequences that begin and end with these tokens, all keys at once and without pages: a
    backward pass reads these arrays alone.

    q, k    after rope
    layer   for sinks
    The rest as for `attention`.
    """
    B, T, H, D = q.shape
    Hkv = k.shape[2]
    q = q.astype(jnp.float32).reshape(B, T, Hkv, H // Hkv, D) * Scores(window, scale, softcap).factor(D)
    sink = None if sinks is None else sinks[layer].astype(jnp.float32).reshape(Hkv, H // Hkv, 1)
    keys = jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions)[:, None]  # nothing sees padding
    return _at_once(_scores(q, k, positions[:, :, None], keys, window, softcap), v, T, sink, taps)


def _scores(q, k, queries, keys, window: int | None, softcap: float | None) -> Float[Array, "B Hkv G T S"]:
    """Scores of queries [B, T, Hkv, G, D], scaled, and keys [B, S, Hkv, D] at these positions, [B, T, 1] and
    [S] or [B, 1, S]; -inf where a query does not see the key."""
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k, precision=multiply_precision())
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    visible = keys <= queries  # [B, T, S]
    if window is not None:
        visible &= queries - keys < window
    return jnp.where(visible[:, None, None], scores, -jnp.inf)


def _at_once(
    scores: Float[Array, "B Hkv G T S"],
    v: Float[Array, "B S Hkv D"],
    num_keys: int | Int[Array, ""],
    sink: Float[Array, "Hkv G 1"] | None,
    taps: Mapping[str, Callable[[Array], Array]],
) -> Float[Array, "B T H D"]:
    """softmax(scores) v with taps on both; a query without a key gets 0."""
    if isinstance(num_keys, int):
        scores, v = scores[..., :num_keys], v[:, :num_keys]
    (B, Hkv, G, T, S), D = scores.shape, v.shape[-1]
    scores = scores.reshape(B, Hkv * G, T, S)
    scores = taps["scores"](scores) if "scores" in taps else scores
    maximum = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    if sink is not None:
        sink = sink.reshape(Hkv * G, 1, 1)
        maximum = jnp.maximum(maximum, jax.lax.stop_gradient(sink))
    base = jnp.where(jnp.isneginf(maximum), 0.0, maximum)
    weights = jnp.exp(scores - base)
    total = weights.sum(-1, keepdims=True)
    total = total if sink is None else total + jnp.exp(sink - base)
    pattern = weights / jnp.where(total == 0, 1.0, total)
    pattern = taps["pattern"](pattern) if "pattern" in taps else pattern
    pattern = pattern.reshape(B, Hkv, G, T, S)
    out = jnp.einsum("bkgts,bskd->btkgd", pattern, v, precision=multiply_precision())
    return out.reshape(B, T, Hkv * G, D)


def apply_rope(
    x: Float[Array, "B T H D"], cos: Float[Array, "B T R"], sin: Float[Array, "B T R"], interleaved: bool
) -> Float[Array, "B T H D"]:
    """Rotary position embedding (Su et al. 2021): pair i is turned by the angle of cos[..., i] and sin[...,
    i].

    (a, b) -> (a cos - b sin, b cos + a sin)

    interleaved   pairs are (0, 1), (2, 3), ...; else (i, i + D / 2)

    With fewer angles than D / 2 only the first values turn, two for each angle; the rest stay.
    """
    cos, sin = cos[:, :, None], sin[:, :, None]
    if (turned := 2 * cos.shape[-1]) < x.shape[-1]:
        x, rest = jnp.split(x, (turned,), axis=-1)
        return jnp.concatenate([apply_rope(x, cos[:, :, 0], sin[:, :, 0], interleaved), rest], axis=-1)
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def write_pages(
    pages: Pages,
    new: Float[Array, "B T Hkv D"],
    block_table: Int[Array, "B pages_per_row"],
    positions: Int[Array, "B T"],
    layer: int | Int[Array, ""],
) -> Pages:
    """Store keys or values of one layer at their positions, as the layout of the pages has it; those at
    position -1 (padding) are dropped."""
    num_pages, page_size = cache_layouts.shape(pages)[1:3]
    page = jnp.take_along_axis(block_table, jnp.maximum(positions, 0) // page_size, axis=1)
    page = jnp.where(positions < 0, num_pages, page)  # out of bounds: dropped
    return cache_layouts.write(pages, new, (layer, page, positions % page_size))


def check(op: str, x, k_pages, v_pages, block_table, positions) -> tuple[int, ...]:
    """The shape of the cache: (layers, pages, page_size, KV heads, head_dim). Raises, in one sentence with
    the sizes and the remedy, where an argument does not fit."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{op}: queries are {x.dtype}; they are floating point: .astype(jnp.float32)")
    for name, ids in {"block_table": block_table, "positions": positions}.items():
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise TypeError(f"{op}: {name} is {ids.dtype}; it holds integers: .astype(jnp.int32)")
    k_shape, v_shape = (cache_layouts.shape(pages) for pages in (k_pages, v_pages))
    if len(k_shape) != 5 or k_shape != v_shape:
        raise ValueError(
            f"{op}: k_pages are {list(k_shape)} and v_pages {list(v_shape)}; both are one cache's, "
            "[layers, pages, page_size, KV heads, head_dim]"
        )
    if positions.shape != x.shape[:2]:
        raise ValueError(
            f"{op}: positions are {list(positions.shape)}, but there are queries of {x.shape[0]} rows of "
            f"{x.shape[1]} tokens; give {list(x.shape[:2])}, with -1 for padding"
        )
    if block_table.ndim != 2 or len(block_table) != len(x):
        raise ValueError(
            f"{op}: block_table is {list(block_table.shape)}; {x.shape[0]} rows need "
            f"[{x.shape[0]}, pages of a row]"
        )
    return k_shape
