"""DRY ("don't repeat yourself"): a penalty for the token that would make a repetition longer (p-e-w 2024,
oobabooga/text-generation-webui#5677; as llama.cpp computes it).

    newest first    c b a | y c b c c b a        window: the newest tokens of prompt and answer
    repeats         -       0 0 0 0 0 3 0 ...    how long what ends before each place equals the newest tokens

A token that stood after n >= allowed_length tokens that equal the newest n loses multiplier *
base^(n - allowed_length); of several n the largest counts. n does not reach beyond the newest breaker
(breakers.py).
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from bonsai_jax.decoding.breakers import LONGEST_TAIL
from pallas_kernels import serializable

LOG_MAX = 88.7228391  # log of the largest float32, with llama.cpp's digits: no power exceeds it
NONE = -1


@serializable
class Dry(struct.PyTreeNode):
    """What DRY knows of B rows.

    multiplier, base, allowed_length   0: a row is without it
    last_n     newest tokens that are its window; negative: all
    ids        int32 [B, capacity of the cache]: prompt and answer by position; -1 where no token was read
    classes    the bytes of Breakers.classes in words, the first in the lowest bits
    heads, tails, count   those of Breakers
    """

    multiplier: Float[Array, "B"]
    base: Float[Array, "B"]
    allowed_length: Int[Array, "B"]
    last_n: Int[Array, "B"]
    ids: Int[Array, "B capacity"]
    classes: UInt32[Array, "B class_words"]
    heads: UInt32[Array, "B classes words"]
    tails: Int[Array, "B tails longest"]
    count: Int[Array, "B"]


def note(dry: Dry, tokens: Int[Array, "B T"], first: Int[Array, "B"], valid: Bool[Array, "B T"]) -> Dry:
    """Store the valid ones of a row's tokens, which stand at position `first` and after."""
    position = jnp.where(valid, first[:, None] + jnp.arange(tokens.shape[1]), dry.ids.shape[1])
    row = jnp.arange(tokens.shape[0])[:, None]
    return dry.replace(ids=dry.ids.at[row, position].set(tokens, mode="drop"))


def penalized(dry: Dry, logits: Float[Array, "B V"], lengths: Int[Array, "B"]) -> Float[Array, "B V"]:
    """Logits after the penalty. lengths: tokens of prompt and answer."""
    capacity = dry.ids.shape[1]
    window = jnp.minimum(lengths, jnp.where(dry.last_n < 0, capacity, dry.last_n))
    ago = jnp.arange(capacity)
    inside = ago < window[:, None]
    back = jnp.take_along_axis(dry.ids, jnp.maximum(lengths[:, None] - 1 - ago, 0), 1)
    back = jnp.where(inside, back, NONE)  # [B, capacity], the newest first
    classes = _classes(dry, back)
    limit = _since_breaker(dry, back, classes, window)
    allowed, most = dry.allowed_length, _most_exponent(dry.base)
    active = (dry.multiplier > 0) & (window > allowed) & (limit >= allowed)
    repeats = _repeats(back, jnp.where(active, jnp.minimum(limit, allowed + most), 0))
    following = jnp.pad(back, ((0, 0), (1, 0)), constant_values=NONE)[:, :-1]  # the token after each place
    breaks = jnp.pad(_is_head(dry, classes, 0), ((0, 0), (1, 0)))[:, :-1]
    hit = active[:, None] & inside & (repeats >= allowed[:, None]) & (following != NONE) & ~breaks
    row = jnp.arange(len(back))[:, None]
    longest = jnp.full(logits.shape, NONE, jnp.int32)
    longest = longest.at[row, jnp.where(hit, following, logits.shape[1])].max(repeats, mode="drop")
    exponent = jnp.minimum(longest - allowed[:, None], most[:, None]).astype(jnp.float32)
    penalty = dry.multiplier[:, None] * dry.base[:, None] ** exponent
    return jnp.where(longest == NONE, logits, logits - penalty)


def _most_exponent(base: Float[Array, "B"]) -> Int[Array, "B"]:
    """The largest exponent of a row; without a limit, as many as there can be tokens."""
    most = (LOG_MAX / jnp.log(jnp.where(base > 1.000001, base, 2.0))).astype(jnp.int32)
    return jnp.where((base > 1.000001) & (most > 0), most, 2**30)


def _repeats(back: Int[Array, "B N"], limit: Int[Array, "B"]) -> Int[Array, "B N"]:
    """How many tokens from each place on, up to `limit`, equal the newest ones. At place 0 it means
    nothing, and is 0."""
    size = back.shape[1]
    padded = jnp.pad(back, ((0, 0), (0, size)), constant_values=NONE)

    def unfinished(carry):
        n, alive, _ = carry
        return (n < limit.max()) & jnp.any(alive)

    def compare(carry):
        n, alive, repeats = carry
        newest = jax.lax.dynamic_slice_in_dim(back, n, 1, 1)
        other = jax.lax.dynamic_slice_in_dim(padded, n, size, 1)
        alive &= (newest == other) & (other != NONE) & (n < limit)[:, None]
        return n + 1, alive, repeats + alive

    places = jnp.broadcast_to(jnp.arange(size) > 0, back.shape)
    return jax.lax.while_loop(unfinished, compare, (0, places, jnp.zeros_like(back)))[2]


def _classes(dry: Dry, tokens: Int[Array, "B N"]) -> Int[Array, "B N"]:
    """Classes of tokens; 0 for none."""
    at = jnp.maximum(tokens, 0)
    words = jnp.take_along_axis(dry.classes, at // 4, 1)
    classes = words >> (8 * (at % 4)).astype(jnp.uint32) & 255
    return jnp.where(tokens == NONE, 0, classes.astype(jnp.int32))


def _is_head(dry: Dry, classes: Int[Array, "B N"], tail: int | Int[Array, ""]) -> Bool[Array, "B N"]:
    """Whether tokens of these classes are heads of a tail."""
    word, bit = jnp.asarray(tail) // 32, (jnp.asarray(tail) % 32).astype(jnp.uint32)
    own = jax.lax.dynamic_index_in_dim(dry.heads, word, 2, keepdims=False)  # [B, classes]
    return jnp.take_along_axis(own, classes, 1) >> bit & 1 != 0


def _since_breaker(
    dry: Dry, back: Int[Array, "B N"], classes: Int[Array, "B N"], window: Int[Array, "B"]
) -> Int[Array, "B"]:
    """How many newest tokens come after the breaker whose head is the newest; of several breakers with this
    head the longest counts. The window, where there is none."""
    size = back.shape[1]
    ago = jnp.arange(size)
    padded = jnp.pad(back, ((0, 0), (LONGEST_TAIL, 0)), constant_values=NONE)
    used = jnp.where(dry.multiplier > 0, dry.count, 0)

    def with_tail(number, longest):
        tail = jax.lax.dynamic_index_in_dim(dry.tails, number, 1, keepdims=False)  # [B, longest]
        length = (tail != NONE).sum(1)[:, None]

        def with_token(i, same):
            after = jax.lax.dynamic_slice_in_dim(padded, LONGEST_TAIL - 1 - i, size, 1)
            token = jax.lax.dynamic_slice_in_dim(tail, i, 1, 1)
            return same & ((after == token) | (i >= length))

        same = jax.lax.fori_loop(0, length.max(), with_token, jnp.ones(back.shape, bool))
        head = _is_head(dry, classes, number) & (number < used)[:, None]
        return jnp.where(head & same & (ago >= length), jnp.maximum(longest, length), longest)

    longest = jax.lax.fori_loop(0, used.max(), with_tail, jnp.full(back.shape, NONE))
    breaks = (longest != NONE) & (ago < window[:, None])
    at = breaks.argmax(1)[:, None]
    since = at - jnp.take_along_axis(longest, at, 1)
    return jnp.where(breaks.any(1), since[:, 0], window)
