"""What changes while tokens are drawn (State), and what a function that draws them returns (Drawn)."""

from typing import NamedTuple

from flax import struct
from jaxtyping import Array, Bool, Float, Int

from bonsai_jax.decoding.chain import Chain
from bonsai_jax.decoding.sampling import Logprobs, Sampler
from bonsai_jax.network.cache import KVCache
from bonsai_jax.network.draft import DraftState
from bonsai_jax.network.draft_model import DraftModelState
from bonsai_jax.network.kinds.place import STEP_TOKENS
from pallas_kernels import serializable


@serializable
class Speculation(struct.PyTreeNode):
    """What B rows that speculate store beside their cache.

    ids       int32 [B, capacity of the cache]: prompt and answer by position, the newest token at
              cache.lengths; NO_TOKEN where vectors were read in place of tokens
    steps     int32 [B], the steps of `decode` in which a row drew tokens: with the number of its tokens, how
              many one step gave
    trust     float32 [B], 0 to 1: the share of a row's latest proposals that were right (speculation.learned)
    draft     what the draft layer or the draft model stores, where the proposer needs one
    proposer  a file of proposers/
    width     most tokens of a row in one step, its newest among them
    """

    ids: Int[Array, "B capacity"]
    steps: Int[Array, "B"]
    trust: Float[Array, "B"]
    draft: DraftState | DraftModelState | None = None
    proposer: str = struct.field(pytree_node=False, default="ngram")
    width: int = struct.field(pytree_node=False, default=STEP_TOKENS)


@serializable
class Hidden(struct.PyTreeNode):
    """Between the two programs of a step, where reading and drawing are apart (engine/split_rows.py).

    vectors  float32 [B, H], the residual stream after each row's newest token, or [B, W, H], after proposals
             too
    undrawn  bool [B], the row's last draw took no token, so its vector is still to be drawn from
    """

    vectors: Float[Array, "B *W H"]
    undrawn: Bool[Array, "B"]


@serializable
class State(struct.PyTreeNode):
    """Everything that changes while B rows are generated. A row is one sequence being generated.

    cache       keys and values of all tokens but each row's newest
    tokens      int32 [B], each row's newest token, which the next step reads; NO_TOKEN before prefill
    remaining   int32 [B], tokens a row may still draw; 0: it has ended, and steps leave it as it is
    stop_ids    int32 [B, S], tokens that end a row, padded with -1
    sampler     each row's sampling parameters, key and token counts
    speculation  what `decode` proposes tokens from; None: it does not speculate
    chain       the samplers that most requests do not use; None: no row uses them
    hidden      what is read and not yet drawn from, where these are two programs; else None
    adapter     int32 [B], which of an engine's adapters each row has; None: the engine has one or none
    """

    cache: KVCache
    tokens: Int[Array, "B"]
    remaining: Int[Array, "B"]
    stop_ids: Int[Array, "B S"]
    sampler: Sampler
    speculation: Speculation | None = None
    chain: Chain | None = None
    hidden: Hidden | None = None
    adapter: Int[Array, "B"] | None = None


class Drawn(NamedTuple):
    """What `prefill`, `step`, `decode` and `generate_tokens` return.

    state     goes into the next call
    tokens    int32, the tokens drawn: [B] for prefill and step, [B, size] for decode and generate_tokens.
              NO_TOKEN where a row drew none because it had ended, or because it ends: its logits have NaN or
              +inf, or no token may be drawn. The token that ends a row is among them
    logprobs  Logprobs of the tokens' shape, of numbers that mean nothing at NO_TOKEN; None unless asked for
              with logprobs=n
    """

    state: State
    tokens: Int[Array, "B *size"]
    logprobs: Logprobs | None = None
