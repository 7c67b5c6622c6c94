"""The draft layer that a file may have (MTP, multi-token prediction): one more layer, after the model's, that
predicts the token after the next (Qwen3.5; DeepSeek-AI 2024, section 2.2).

    x_i = W_join [norm(embed(token i + 1)), norm(h_i)];   h_i: what the model's head sees of token i
    y_i = one layer of attention over x_0 .. x_i and a feed-forward or experts
    token i + 2 ~ head(norm(y_i));   for later tokens norm(y_i) stands for h_i + 1

It shares embedding and head with the model. Its keys and values have pages of their own under the model's
block table, those of x_i at position i: it reads what the model reads, one token later (`follow`). Who
speculates with it keeps its state (decoding/proposers/mtp.py); a plain forward pass knows nothing of it.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from bonsai_jax.config import ModelConfig, RunConfig
from bonsai_jax.network import decoder, kinds, rope
from bonsai_jax.network.cache import KVCache
from bonsai_jax.network.kinds import attention
from bonsai_jax.network.kinds.place import STEP_TOKENS, Place
from bonsai_jax.network.kinds.state import Room
from bonsai_jax.network.params import Draft, Params
from pallas_kernels import matmul, rms_norm, serializable


@serializable
class DraftState(struct.PyTreeNode):
    """What the draft layer stores of each row.

    attention  keys and values of its one layer, in pages of their own under the KVCache's block table
    hidden     float32 [rows, hidden]: what the model made of each row's last token, not normed
    """

    attention: attention.State
    hidden: Float[Array, "B H"]

    @property
    def states(self) -> attention.State:
        """What its mixer stores."""
        return self.attention

    def with_states(self, states: attention.State) -> "DraftState":
        """The same with other `states`."""
        return self.replace(attention=states)


@serializable
class Unread(struct.PyTreeNode):
    """What the model has made of tokens that the draft layer is to read later, together.

    hidden  float32 [rows, most, hidden], not normed, of each row's tokens from position `first` on
    first   int32 [rows]
    """

    hidden: Float[Array, "B most H"]
    first: Int[Array, "B"]

    def noted(self, hidden: Float[Array, "B T H"], positions: Int[Array, "B T"]) -> "Unread":
        """With those of the tokens at these positions, -1 for none."""
        row, place = jnp.arange(len(self.first))[:, None], positions - self.first[:, None]
        place = jnp.where(positions >= 0, place, self.hidden.shape[1])
        return self.replace(hidden=self.hidden.at[row, place].set(hidden, mode="drop"))


def empty(config: ModelConfig, run: RunConfig, rows: int, pages: int) -> DraftState:
    """The state of rows that have read nothing; `pages` as many as the block table deals out."""
    state = attention.empty(config.attention, 1, run, Room(rows, run.page_size, pages))
    return with_kernels(DraftState(state, jnp.zeros((rows, config.hidden))), config, run)


def with_kernels(state: DraftState, config: ModelConfig, run: RunConfig) -> DraftState:
    """The same state, for the kernels that are chosen for the model on this device."""
    one, many = config.attention.kernels(run)
    return state.replace(attention=state.attention.replace(impl=one, prefill_impl=many))


def follow(
    params: Params,
    draft: Draft,
    state: DraftState,
    cache: KVCache,
    hidden: Float[Array, "B T H"],
    tokens: Int[Array, "B T"] | Float[Array, "B T H"],
    positions: Int[Array, "B T"],
    config: ModelConfig,
) -> tuple[Float[Array, "B T H"], DraftState]:
    """The draft layer's state after the tokens that the model has just read; and what its attention has made
    of each, for `likeliest`, but of a sequence's first token.

    cache      the model's, for its block table
    hidden     what the decoder made of the tokens, not yet normed
    positions  of the tokens; -1 for those to leave out, which come after a row's others
    """
    # Each token is read with the hidden vector of the token before it. A sequence's first token has none, and
    # is moved to the end as padding, because padding follows tokens.
    begins = positions[:, 0] == 0

    def in_pairs(a):
        return jnp.where(begins.reshape(-1, *[1] * (a.ndim - 1)), jnp.roll(a, -1, axis=1), a)

    h = _model_norm(params, jnp.concatenate([state.hidden[:, None], hidden[:, :-1]], axis=1), config)
    before = jnp.where(positions > 0, positions - 1, -1)
    h, tokens, before = map(in_pairs, (h, tokens, before))
    x, state = _attended(params, draft, state, cache, h, tokens, before, config)
    count = (positions >= 0).sum(1)
    last = jnp.take_along_axis(hidden, jnp.maximum(count - 1, 0)[:, None, None], 1)[:, 0]
    return x, state.replace(hidden=jnp.where(count[:, None] > 0, last, state.hidden))


def foresee(
    params: Params,
    draft: Draft,
    state: DraftState,
    cache: KVCache,
    tokens: Int[Array, "B"],
    running: Array,
    count: int,
    config: ModelConfig,
) -> tuple[Int[Array, "B count"], DraftState]:
    """The likeliest tokens after each running row's newest, one after the other, and the state."""
    h, position, drawn = _model_norm(params, state.hidden[:, None], config), cache.lengths - 1, []
    for _ in range(count):
        inside = jnp.where(running & (position < cache.capacity), position, -1)[:, None]
        x, state = _attended(params, draft, state, cache, h, jnp.maximum(tokens, 0)[:, None], inside, config)
        own, h = likeliest(params, draft, cache, x, inside, config)
        tokens, position = own[:, 0], position + 1
        drawn.append(tokens)
    return jnp.stack(drawn, axis=1), state


def likeliest(
    params: Params,
    draft: Draft,
    cache: KVCache,
    x: Float[Array, "B T H"],
    positions: Int[Array, "B T"],
    config: ModelConfig,
) -> tuple[Int[Array, "B T"], Float[Array, "B T H"]]:
    """The likeliest token after each of these, and the layer's output for it, normed; x: what the layer's
    attention has made of them."""
    norm, channels = params.final_norm if draft.norm is None else draft.norm, config.layers[-1].channels
    place = _place(params, config, channels, draft.layers[channels.kind][0], cache, positions)
    y, *_ = kinds.get(channels.kind).block(x, place, None, None)
    tokens = decoder.unembed(params.replace(final_norm=norm), y, config).argmax(-1).astype(jnp.int32)
    return tokens, rms_norm(y, norm, config.rms_norm_eps)


def _model_norm(params: Params, hidden: jax.Array, config: ModelConfig) -> jax.Array:
    """What the model's head sees."""
    return rms_norm(hidden, params.final_norm, config.rms_norm_eps)


def _attended(
    params: Params, draft: Draft, state: DraftState, cache: KVCache, h, tokens, positions, config: ModelConfig
) -> tuple[jax.Array, DraftState]:
    """The layer up to its feed-forward."""
    B, T = positions.shape
    together = _together(state, T)
    if together > 1:
        h, tokens, positions = (a.reshape(B * T, 1, *a.shape[2:]) for a in (h, tokens, positions))
        cache = cache.with_tokens_as_rows(T)
    e = tokens if jnp.issubdtype(tokens.dtype, jnp.floating) else decoder.embed(params, tokens)
    eps = config.rms_norm_eps
    both = [rms_norm(e, draft.embed_norm, eps), rms_norm(h, draft.hidden_norm, eps)]
    x = matmul(jnp.concatenate(both, axis=-1), draft.join)
    weights = draft.layers["attention"][0]
    place = _place(params, config, config.attention, weights, cache, positions, together)
    x, own, _ = attention.block(x, place, state.attention, None)
    return x.reshape(B, T, -1), state.replace(attention=own)


def _together(state: DraftState, tokens: int) -> int:
    """So many neighbouring rows are one sequence's: few tokens are read as rows of one token, as the model
    reads them (decoder.py)."""
    few = tokens <= STEP_TOKENS and STEP_TOKENS % tokens == 0
    return tokens if few and state.attention.impl == "decode" else 1


def _place(
    params: Params, config: ModelConfig, settings, weights, cache: KVCache, positions, together: int = 1
) -> Place:
    """Where a half of the draft layer runs."""
    return Place(
        settings=settings,
        weights=weights,
        group=0,
        index=0,
        eps=config.rms_norm_eps,
        residual_scale=config.residual_scale,
        positions=positions,
        rotations=rope.rotations(config, params.rope_frequencies, positions),
        num_keys=positions.max() + 1,
        block_table=cache.block_table,
        axis=params.axis,
        peers=params.peers,
        tokens=together,
    )
