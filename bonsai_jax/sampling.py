"""From logits to tokens, on the device: each row by its own parameters and key."""

import secrets
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.experimental import multihost_utils
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Float, Int, Key

from bonsai_jax.config import SamplingParams
from pallas_kernels import serializable

NO_TOKEN = -1  # in place of a token: there is none
CANDIDATES = 128  # a draw looks at so many of the likeliest tokens, and rarely at more


@serializable
class Sampler(struct.PyTreeNode):
    """SamplingParams of B rows as arrays, with what penalties must remember. Meanings and ranges:
    SamplingParams.

    keys        one random key per row; the token at position p is drawn with fold_in(key, p), so a row's
                draws depend on its seed and its position only
    bias_ids    int32 [B, M], token ids with a logit bias, padded with an id beyond the vocabulary
    bias        float32 [B, M]
    seen        bool [B, V]: the token is in the prompt or the answer
    counts      int32 [B, V]: times it is in the answer
    """

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]
    repetition_penalty: Float[Array, "B"]
    presence_penalty: Float[Array, "B"]
    frequency_penalty: Float[Array, "B"]
    bias_ids: Int[Array, "B M"]
    bias: Float[Array, "B M"]
    keys: Key[Array, "B"]
    seen: Bool[Array, "B V"]
    counts: Int[Array, "B V"]


@serializable
class Logprobs(struct.PyTreeNode):
    """Log-probabilities, in nats, of the model's own distribution: log_softmax of its logits, before any
    processor, penalty or temperature.

    token   float32 [...], of each drawn token
    ids     int32 [..., n], the n likeliest tokens in its place, the likeliest first
    top     float32 [..., n], theirs
    """

    token: Float[Array, "*shape"]
    ids: Int[Array, "*shape n"]
    top: Float[Array, "*shape n"]


def logprobs_of(logits: Float[Array, "B V"], tokens: Int[Array, "B"], n: int) -> Logprobs:
    """Logprobs [B] of these tokens, and of the n likeliest."""
    scores = jax.nn.log_softmax(logits.astype(jnp.float32))
    top, ids = jax.lax.top_k(scores, n)
    return Logprobs(jnp.take_along_axis(scores, tokens[:, None], axis=1)[:, 0], ids, top)


def no_logprobs(shape: tuple[int, ...], n: int) -> Logprobs:
    """Logprobs of this shape, to be filled."""
    return Logprobs(jnp.zeros(shape), jnp.zeros((*shape, n), jnp.int32), jnp.zeros((*shape, n)))


def sampler(params: SamplingParams | Sequence[SamplingParams], rows: int, vocab_size: int) -> Sampler:
    """Arrays for `rows` rows from one SamplingParams (whose seed then counts up from row to row) or one per
    row.

    Raises ValueError when their number is not `rows` or a logit bias names a token beyond the vocabulary.
    """
    if isinstance(params, SamplingParams):
        seed = _any_seed() if params.seed is None else params.seed
        per_row, seeds = [params] * rows, [seed + row for row in range(rows)]
    else:
        per_row = list(params)
        if len(per_row) != rows:
            raise ValueError(
                f"{len(per_row)} SamplingParams for {rows} prompts: give one for all, or one for each"
            )
        seeds = [_any_seed() if p.seed is None else p.seed for p in per_row]
    for p in per_row:
        for token in p.logit_bias:
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"SamplingParams: logit_bias names token {token}; the vocabulary has {vocab_size}"
                )
    most = max(len(p.logit_bias) for p in per_row)
    # A power of two: few shapes, few compilations. Never 0: under shard_map, jax 0.11.2 crashes on an empty
    # array in a loop.
    width = 1 << max(0, most - 1).bit_length()
    bias_ids = np.full((rows, width), vocab_size, np.int32)
    bias = np.zeros((rows, width), np.float32)
    for row, p in enumerate(per_row):
        bias_ids[row, : len(p.logit_bias)] = list(p.logit_bias)
        bias[row, : len(p.logit_bias)] = list(p.logit_bias.values())

    def column(name, dtype):
        return jnp.array([getattr(p, name) for p in per_row], dtype)

    return Sampler(
        temperature=column("temperature", jnp.float32),
        top_k=column("top_k", jnp.int32),
        top_p=column("top_p", jnp.float32),
        min_p=column("min_p", jnp.float32),
        repetition_penalty=column("repetition_penalty", jnp.float32),
        presence_penalty=column("presence_penalty", jnp.float32),
        frequency_penalty=column("frequency_penalty", jnp.float32),
        bias_ids=jnp.array(bias_ids),
        bias=jnp.array(bias),
        keys=jax.vmap(jax.random.key)(jnp.array([seed % 2**32 for seed in seeds], jnp.uint32)),
        seen=jnp.zeros((rows, vocab_size), bool),
        counts=jnp.zeros((rows, vocab_size), jnp.int32),
    )


def _any_seed() -> int:
    """A seed that nobody chose, the same in all processes."""
    seed = secrets.randbits(31)
    return seed if jax.process_count() == 1 else int(multihost_utils.broadcast_one_to_all(np.uint32(seed)))


def read_prompt(s: Sampler, tokens: Int[Array, "B T"], valid: Bool[Array, "B T"]) -> Sampler:
    """Note a prompt's tokens for the repetition penalty."""
    row = jnp.arange(tokens.shape[0])[:, None]
    beyond = s.seen.shape[1]  # dropped
    return s.replace(seen=s.seen.at[row, jnp.where(valid, tokens, beyond)].set(True, mode="drop"))


def remember(s: Sampler, tokens: Int[Array, "B T"], valid: Bool[Array, "B T"]) -> Sampler:
    """Count tokens of the answer, those that are valid."""
    row = jnp.arange(tokens.shape[0])[:, None]
    tokens = jnp.where(valid, tokens, s.seen.shape[1])  # beyond the vocabulary: dropped
    seen = s.seen.at[row, tokens].set(True, mode="drop")
    return s.replace(seen=seen, counts=s.counts.at[row, tokens].add(1, mode="drop"))


def foresee(s: Sampler, tokens: Int[Array, "B T-1"]) -> Sampler:
    """A sampler whose arrays are [B, T, ...]: before the next token of each row, and for every T after it if
    these come before; a negative token is none."""
    rows, T = tokens.shape[0], tokens.shape[1] + 1
    each = jax.tree.map(lambda x: jnp.repeat(x, T, axis=0), s)  # [B T, ...]
    earlier = (tokens[:, None] >= 0) & (jnp.arange(T - 1) < jnp.arange(T)[:, None])  # [B, T, T - 1]
    before = jnp.broadcast_to(tokens[:, None], earlier.shape).reshape(rows * T, T - 1)
    each = remember(each, before, earlier.reshape(rows * T, T - 1))
    return jax.tree.map(lambda x: x.reshape(rows, T, *x.shape[1:]), each)


def sample_each(s: Sampler, logits: Float[Array, "B T V"], positions: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """`sample` for a sampler of T positions of each row (`foresee`), all at once. Remembers nothing."""
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (s, logits, positions))
    return sample(*flat)[0].reshape(positions.shape)


def sample(
    s: Sampler, logits: Float[Array, "B V"], positions: Int[Array, "B"]
) -> tuple[Int[Array, "B"], Sampler]:
    """Draw the token at `positions` of each row, and remember it.

    token = argmax(logits', or logits' / temperature + Gumbel noise over the tokens that truncation keeps)

    with logits' after penalties and bias. A batch of greedy rows skips all but the argmax.
    """
    logits = _penalize(s, logits.astype(jnp.float32))
    tokens = jax.lax.cond(
        jnp.any(s.temperature > 0),
        _draw,
        lambda s, logits, positions: jnp.argmax(logits, -1),
        s,
        logits,
        positions,
    ).astype(jnp.int32)
    row = jnp.arange(tokens.shape[0])
    return tokens, s.replace(seen=s.seen.at[row, tokens].set(True), counts=s.counts.at[row, tokens].add(1))


def _penalize(s: Sampler, logits: jax.Array) -> jax.Array:
    penalty = s.repetition_penalty[:, None]
    logits = jnp.where(s.seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    logits -= s.frequency_penalty[:, None] * s.counts + s.presence_penalty[:, None] * (s.counts > 0)
    row = jnp.arange(logits.shape[0])[:, None]
    return logits.at[row, s.bias_ids].add(s.bias, mode="drop")


def _draw(s: Sampler, logits: jax.Array, positions: jax.Array) -> jax.Array:
    """Among the likeliest tokens, where they hold all that truncation keeps in every row; else among all.
    Noise is a token's own, so that both draw the same."""
    # Without barriers XLA sees slices of a sort, and sorts the vocabulary. One for both outputs would be a
    # reader of their tuple, at which jaxlib 0.11.2 aborts.
    best = jax.lax.top_k(logits, min(CANDIDATES, logits.shape[1]))
    top, ids = (jax.lax.optimization_barrier(array) for array in best)
    keep, all_kept_are_here = _truncate_sorted(s, top, logits)
    greedy = s.temperature == 0
    temperature = jnp.where(greedy, 1.0, s.temperature)[:, None]

    def race(logits, keep, ids):
        noise = jax.vmap(_gumbel)(s.keys, positions, ids)
        return jnp.argmax(jnp.where(keep, logits / temperature + noise, -jnp.inf), -1)

    def among_candidates():
        return jnp.take_along_axis(ids, race(top, keep, ids)[:, None], 1)[:, 0]

    def among_all():
        every = jnp.broadcast_to(jnp.arange(logits.shape[1]), logits.shape)
        return race(logits, _truncate(s, logits), every).astype(ids.dtype)

    drawn = jax.lax.cond(jnp.all(all_kept_are_here | greedy), among_candidates, among_all)
    return jnp.where(greedy, ids[:, 0], drawn)


def _gumbel(key: Key[Array, ""], position: Int[Array, ""], ids: Int[Array, "n"]) -> Float[Array, "n"]:
    """Noise -log(-log u) of tokens, by row, position and id alone (Threefry counts the ids)."""
    words = jax.random.key_data(jax.random.fold_in(key, position))[:2]
    counts = ids.astype(jnp.uint32)
    bits = threefry_2x32(words, jnp.concatenate([counts, jnp.zeros_like(counts)]))[: len(ids)]
    u = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23  # neither 0 nor 1
    return -jnp.log(-jnp.log(u))


def _truncate_sorted(s: Sampler, top: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What `_truncate` leaves of a row's likeliest tokens, whose logits are [B, n], the likeliest first; and
    whether in that row it leaves none but them."""
    n, vocabulary = top.shape[1], logits.shape[1]
    peak, last = top[:, :1], top[:, -1:]
    k = jnp.where(s.top_k > 0, jnp.minimum(s.top_k, vocabulary), vocabulary)[:, None]
    kth = jnp.where(k <= n, jnp.take_along_axis(top, jnp.minimum(k, n) - 1, 1), -jnp.inf)
    weight = jnp.where(top >= kth, jnp.exp(top - peak), 0.0)
    # The sum over what top-k keeps is known where it keeps candidates only, or all tokens.
    ends_here = (kth > last) | (n == vocabulary)
    everything = jnp.exp(logits - peak).sum(-1, keepdims=True)
    total = jnp.where(ends_here, weight.sum(-1, keepdims=True), everything)
    reached = jnp.cumsum(weight, 1) >= s.top_p[:, None] * total
    at = jnp.where(reached.any(1), reached.argmax(1), n - 1)[:, None]
    whole = (s.top_p >= 1)[:, None]
    nucleus = jnp.where(reached.any(1, keepdims=True) & ~whole, jnp.take_along_axis(top, at, 1), -jnp.inf)
    keep = (top >= kth) & (top >= nucleus) & (jnp.exp(top - peak) >= s.min_p[:, None])
    cut = ends_here | (nucleus > last) | (jnp.exp(last - peak) < s.min_p[:, None])
    known = ends_here | (k == vocabulary) | whole
    return keep, (cut & known)[:, 0]


def _truncate(s: Sampler, logits: jax.Array) -> jax.Array:
    """bool [B, V]: what top-k, then top-p, then min-p leave. Thresholds are found bit by bit, without sorting
    the vocabulary, and only where a row asks for them."""
    p = jnp.exp(logits - logits.max(-1, keepdims=True))

    def by_thresholds():
        order = _sortable(logits)
        k = jnp.where(s.top_k > 0, s.top_k, logits.shape[1])
        keep = order >= _threshold(order, jnp.ones_like(logits), k.astype(jnp.float32))[:, None]
        weight = jnp.where(keep, p, 0.0)
        nucleus = order >= _threshold(order, weight, s.top_p * weight.sum(-1))[:, None]
        return keep & (nucleus | (s.top_p >= 1)[:, None])

    cut = jnp.any((s.top_k > 0) | (s.top_p < 1))
    keep = jax.lax.cond(cut, by_thresholds, lambda: jnp.ones(logits.shape, bool))
    return keep & (p >= s.min_p[:, None])


def _sortable(x: jax.Array) -> jax.Array:
    """uint32 in the order of float32: sign bit set for positives, all bits turned for negatives."""
    x = jnp.where(x == 0, 0.0, x)  # -0 becomes +0; XLA takes x + 0.0 for x
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(order: jax.Array, weight: jax.Array, target: jax.Array) -> jax.Array:
    """uint32 [B]: the largest t for which the weights of {order >= t} sum to target or more; 0 if none does.

    Found from the highest bit down, in 32 passes over the row.
    """

    def try_bit(i, t):
        candidate = t | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        reached = jnp.sum(jnp.where(order >= candidate[:, None], weight, 0.0), axis=-1)
        return jnp.where(reached >= target, candidate, t)

    return jax.lax.fori_loop(0, 32, try_bit, jnp.zeros(order.shape[0], jnp.uint32))
