"""The draft layer that a file may have (MTP, multi-token prediction): one more layer, after the model's, that
predicts the token after the next (Qwen3.5; DeepSeek-AI 2024, section 2.2).

    x_i = W_join [norm(embed(token i + 1)), norm(h_i)];   h_i: what the model's head sees of token i
    y_i = one layer of attention over x_0 .. x_i and a feed-forward
    token i + 2 ~ head(norm(y_i));   for later tokens norm(y_i) stands for h_i + 1

It shares embedding and head with the model. Its keys and values have pages of their own under the model's
block table, those of x_i at position i: it reads what the model reads, one token later (`follow`).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bonsai_jax.config import ModelConfig
from bonsai_jax.network import decoder, rope
from bonsai_jax.network.cache import KVCache
from bonsai_jax.network.kinds import attention, mlp
from bonsai_jax.network.kinds.place import Place
from bonsai_jax.network.params import Params
from pallas_kernels import matmul
from pallas_kernels.norm import rms_norm


def follow(
    params: Params,
    cache: KVCache,
    hidden: Float[Array, "B T H"],
    tokens: Int[Array, "B T"] | Float[Array, "B T H"],
    positions: Int[Array, "B T"],
    config: ModelConfig,
) -> KVCache:
    """The cache with the draft layer's keys and values for the tokens that the model has just read.

    hidden  what the decoder made of the tokens, not yet normed; the rest as for `decoder`
    """
    if params.draft is None or cache.draft is None:
        return cache
    # The first token here pairs with the hidden vector of the one before; a sequence that begins has none.
    place = jnp.where(positions[:, :1] > 0, positions[:, :1] - 1, -1)
    h = _model_norm(params, cache.draft.hidden[:, None], config)
    _, cache = _attended(params, cache, h, tokens[:, :1], place, config)
    if tokens.shape[1] > 1:
        place = jnp.where(positions[:, 1:] >= 0, positions[:, :-1], -1)
        h = _model_norm(params, hidden[:, :-1], config)
        _, cache = _attended(params, cache, h, tokens[:, 1:], place, config)
    return rewound(cache, cache, hidden, (positions >= 0).sum(1))


def rewound(
    cache: KVCache, before: KVCache, hidden: Float[Array, "B T H"], count: Int[Array, "B"]
) -> KVCache:
    """The cache after `count` of each row's tokens, whose hidden vectors are `hidden`; `before` is the cache
    before them."""
    if cache.draft is None or before.draft is None:
        return cache
    last = jnp.take_along_axis(hidden, jnp.maximum(count - 1, 0)[:, None, None], 1)[:, 0]
    last = jnp.where(count[:, None] > 0, last, before.draft.hidden)
    return cache.replace(draft=cache.draft.replace(hidden=last))


def foresee(
    params: Params,
    cache: KVCache,
    tokens: Int[Array, "B"],
    running: Array,
    count: int,
    config: ModelConfig,
) -> tuple[Int[Array, "B count"], KVCache]:
    """The likeliest tokens after each running row's newest, one after the other, and the cache."""
    assert params.draft is not None and cache.draft is not None
    norm = params.final_norm if params.draft.norm is None else params.draft.norm
    own_norm = params.replace(final_norm=norm)
    h, position, drawn = _model_norm(params, cache.draft.hidden[:, None], config), cache.lengths - 1, []
    for _ in range(count):
        inside = jnp.where(running & (position < cache.capacity), position, -1)[:, None]
        x, cache = _attended(params, cache, h, jnp.maximum(tokens, 0)[:, None], inside, config)
        place = _place(params, config, config.mlp, params.draft.layers.mlp[0], inside)
        y, *_ = mlp.block(x, place, cache, None)
        tokens = decoder.unembed(own_norm, y, config)[:, 0].argmax(-1).astype(jnp.int32)
        h, position = rms_norm(y, norm, config.rms_norm_eps), position + 1
        drawn.append(tokens)
    return jnp.stack(drawn, axis=1), cache


def _model_norm(params: Params, hidden: jax.Array, config: ModelConfig) -> jax.Array:
    """What the model's head sees."""
    return rms_norm(hidden, params.final_norm, config.rms_norm_eps)


def _attended(
    params: Params, cache: KVCache, h, tokens, positions, config: ModelConfig
) -> tuple[jax.Array, KVCache]:
    """The layer up to its feed-forward."""
    draft = params.draft
    assert draft is not None and cache.draft is not None
    e = tokens if jnp.issubdtype(tokens.dtype, jnp.floating) else decoder.embed(params, tokens)
    eps = config.rms_norm_eps
    both = [rms_norm(e, draft.embed_norm, eps), rms_norm(h, draft.hidden_norm, eps)]
    x = matmul(jnp.concatenate(both, axis=-1), draft.join)
    state = cache.attention[0].replace(k=cache.draft.k, v=cache.draft.v)
    place = _place(params, config, config.attention, draft.layers.attention[0], positions)
    x, own, _ = attention.block(x, place, cache.replace(attention=(state,)), None)
    (state,) = own.attention
    return x, cache.replace(draft=cache.draft.replace(k=state.k, v=state.v))


def _place(params: Params, config: ModelConfig, settings, weights, positions) -> Place:
    """Where a half of the draft layer runs."""
    own = attention.ropes(config).index(config.attention.rope)
    rotation = rope.rotation(config.attention.rope, params.rope_frequencies[own], positions)
    return Place(
        settings=settings,
        weights=weights,
        group=0,
        index=0,
        eps=config.rms_norm_eps,
        positions=positions,
        rotations={config.attention.rope: rotation},
        num_keys=positions.max() + 1,
        axis=params.axis,
        peers=params.peers,
    )
