"""The samplers that most requests do not use, before the draw: DRY, top-n-sigma, typical, XTC, dynamic
temperature, Mirostat 2.0, and the ban of end tokens.

    logits -> penalties, bias, mask, min_tokens -> DRY -> top-n-sigma -> top-k -> typical -> top-p -> min-p
           -> XTC -> temperature -> draw

The order is llama.cpp's. With `temperature_first` the temperature comes before top-k. A row with Mirostat has
biases, temperature and Mirostat alone, as in llama.cpp.

State.chain is None in programs for rows that use none of these: nothing is computed for them. Where it is
not, rows that do not use it (`used`) draw by the rules and the kernel that they always have. For the others
this file leaves -inf in place of what is not to be drawn, and the same kernel draws from the rest.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Float, Int, UInt32

from bonsai_jax.decoding import breakers, dry, truncations
from bonsai_jax.decoding.dry import Dry
from bonsai_jax.decoding.sampling import Sampler, rules, sampled_logprobs
from bonsai_jax.sampling_params import SamplingParams
from bonsai_jax.tokens.tokenizer import Tokenizer
from pallas_kernels import serializable
from pallas_kernels.sampling import Rules, draw, reference

FLOATS = (
    *("top_n_sigma", "typical_p", "xtc_probability", "xtc_threshold", "dynatemp_range"),
    *("dynatemp_exponent", "mirostat_tau", "mirostat_eta"),
)


@serializable
class Chain(struct.PyTreeNode):
    """The samplers of B rows, beside the Sampler. SamplingParams has meanings and ranges.

    used     the row uses one of them; else its other numbers mean nothing
    mu       Mirostat's limit of information, in bits
    drawn    tokens of the answer so far
    """

    used: Bool[Array, "B"]
    min_tokens: Int[Array, "B"]
    top_n_sigma: Float[Array, "B"]
    typical_p: Float[Array, "B"]
    xtc_probability: Float[Array, "B"]
    xtc_threshold: Float[Array, "B"]
    dynatemp_range: Float[Array, "B"]
    dynatemp_exponent: Float[Array, "B"]
    mirostat: Int[Array, "B"]
    mirostat_tau: Float[Array, "B"]
    mirostat_eta: Float[Array, "B"]
    mu: Float[Array, "B"]
    drawn: Int[Array, "B"]
    dry: Dry


def layout(vocab_size: int) -> np.dtype:
    """How one row's samplers are sent to the device: a numpy structured type of 4-byte fields."""
    own = [
        *((name, np.int32) for name in ("used", "min_tokens", "mirostat")),
        *((name, np.float32) for name in (*FLOATS, "mu")),
    ]
    repetitions = [
        *((name, np.float32) for name in ("multiplier", "base")),
        *((name, np.int32) for name in ("allowed_length", "last_n", "count")),
        ("classes", np.uint32, (-(-vocab_size // 4),)),
        ("heads", np.uint32, (breakers.CLASSES, breakers.TAIL_WORDS)),
        ("tails", np.int32, (breakers.TAILS, breakers.LONGEST_TAIL)),
    ]
    return np.dtype([*own, ("dry", np.dtype(repetitions))])


def columns(params: SamplingParams, tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    """A row's samplers in this layout, before its first token. Raises ValueError for too many breakers."""
    row = np.zeros((), layout(vocab_size))
    row["used"] = params.chained
    for name in ("min_tokens", "mirostat", *FLOATS):
        row[name] = getattr(params, name)
    row["mu"] = 2 * params.mirostat_tau
    if params.dry:
        compiled = breakers.compiled(params.dry_sequence_breakers, tokenizer, vocab_size)
        own = row["dry"]
        for name in ("multiplier", "base", "allowed_length"):
            own[name] = getattr(params, f"dry_{name}")
        own["last_n"] = params.dry_penalty_last_n
        own["count"], own["heads"], own["tails"] = compiled.count, compiled.heads, compiled.tails
        own["classes"].view(np.uint8)[:vocab_size] = compiled.classes
    return row


def empty(rows: int, vocab_size: int, capacity: int) -> Chain:
    """Rows that use nothing, and have room for `capacity` tokens."""
    fields = unpacked(np.zeros(rows, layout(vocab_size)))
    fields["dry"]["ids"] = np.full((rows, capacity), dry.NONE, np.int32)
    fields = jax.device_put(_typed(fields) | {"drawn": np.zeros(rows, np.int32)}, may_alias=False)
    return Chain(dry=Dry(**fields.pop("dry")), **fields)


@functools.cache
def row_bytes(vocab_size: int, capacity: int) -> int:
    """Bytes of a Chain for each row."""
    one = jax.eval_shape(lambda: empty(1, vocab_size, capacity))
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(one))


def unpacked(rows: np.ndarray) -> dict[str, Any]:
    """The fields of rows of `layout`."""
    own = {name: rows[name] for name in rows.dtype.names or ()}
    return {name: unpacked(part) if part.dtype.names else part for name, part in own.items()}


def with_rows(chain: Chain, fields: dict[str, Any]) -> Chain:
    """The chain with the fields of `layout`, [B, ...], in place of its own."""
    fields = dict(fields)
    return chain.replace(dry=chain.dry.replace(**fields.pop("dry")), **_typed(fields))


def _typed(fields: dict[str, Any]) -> dict[str, Any]:
    return fields | {"used": fields["used"] > 0}


def note(chain: Chain, tokens: Int[Array, "B T"], first: Int[Array, "B"], valid: Bool[Array, "B T"]) -> Chain:
    """Enter the valid ones of a row's tokens, which stand at position `first` and after, for DRY."""
    return chain.replace(dry=dry.note(chain.dry, tokens, first, valid))


def sample(
    chain: Chain,
    s: Sampler,
    logits: Float[Array, "B V"],
    positions: Int[Array, "B"],
    stop_ids: Int[Array, "B S"],
    running: Bool[Array, "B"],
    allowed: UInt32[Array, "B words"] | None = None,
    scored: bool = False,
) -> tuple[Int[Array, "B"], Sampler, Chain, Float[Array, "B"] | None]:
    """sampling.sample for a batch in which some rows use the chain.

    running  rows that draw
    scored   return sampling.sampled_logprobs too, else None. XTC's are those after its own draw, whether the
             likeliest are left out
    """
    own, keys, used = rules(s, allowed), jax.random.key_data(s.keys)[:, :2], chain.used
    logits = logits.astype(jnp.float32)
    left, temperature = remaining(chain, own, logits, positions, stop_ids, keys)
    drawn_from, how = jnp.where(used[:, None], left, logits), _drawing(own, used, temperature)
    tokens, seen, counts = draw(drawn_from, how, keys, positions, impl=s.impl)
    scores = sampled_logprobs(how, drawn_from, tokens) if scored else None
    log_p = truncations.log_probabilities(left)
    surprise = -jnp.take_along_axis(log_p, jnp.maximum(tokens, 0)[:, None], 1)[:, 0] / jnp.log(2.0)
    follows = used & (chain.mirostat > 0) & running & (tokens >= 0)
    mu = chain.mu - chain.mirostat_eta * (surprise - chain.mirostat_tau)
    chain = note(chain, tokens[:, None], positions, (running & (tokens >= 0))[:, None])
    chain = chain.replace(mu=jnp.where(follows, mu, chain.mu), drawn=chain.drawn + running)
    return tokens, s.replace(seen=seen, counts=counts), chain, scores


def _drawing(own: Rules, used: Bool[Array, "B"], temperature: Float[Array, "B"]) -> Rules:
    """The rules by which rows draw from what is left: those that use the chain with a temperature alone."""
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature_first": False}
    neutral |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    changed = {name: jnp.where(used, value, getattr(own, name)) for name, value in neutral.items()}
    bias = jnp.where(used[:, None], 0.0, own.bias)
    return own._replace(temperature=jnp.where(used, temperature, own.temperature), bias=bias, **changed)


def remaining(
    chain: Chain,
    own: Rules,
    logits: Float[Array, "B V"],
    positions: Int[Array, "B"],
    stop_ids: Int[Array, "B S"],
    keys: UInt32[Array, "B 2"],
) -> tuple[Float[Array, "B V"], Float[Array, "B"]]:
    """Logits of the tokens among which each row draws, -inf for others, and the temperature of the draw."""
    vocabulary, mirostat = logits.shape[1], chain.mirostat > 0
    penalties = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    unpenalized = own._replace(
        **{name: jnp.where(mirostat, neutral, getattr(own, name)) for name, neutral in penalties.items()}
    )
    x = reference.penalize(unpenalized, logits)[:, :vocabulary]
    row = jnp.arange(len(x))[:, None]
    bans = (chain.drawn < chain.min_tokens)[:, None] & (stop_ids >= 0)
    x = x.at[row, jnp.where(bans, stop_ids, vocabulary)].set(-jnp.inf, mode="drop")
    numbers = jnp.where(x < jnp.inf, x, jnp.inf).max(-1, keepdims=True) < jnp.inf  # neither NaN nor +inf
    by_mirostat = truncations.mirostat(truncations.heated(x, own.temperature), chain.mu)
    repeats = jnp.any(chain.used & (chain.dry.multiplier > 0))
    x = jax.lax.cond(repeats, lambda x: dry.penalized(chain.dry, x, positions), lambda x: x, x)
    x = truncations.top_n_sigma(x, chain.top_n_sigma)
    heat = _temperature(chain, own, x, vocabulary - (x > -jnp.inf).sum(-1))
    x = jnp.where(own.temperature_first[:, None], truncations.heated(x, heat), x)
    x, later = _truncated(chain, own, x, _chance(keys, positions))
    temperature = jnp.where(own.temperature_first, _applied(heat), later)
    x = jnp.where(mirostat[:, None], by_mirostat, x)
    temperature = jnp.where(mirostat, _applied(own.temperature), temperature)
    return jnp.where(numbers, x, jnp.nan), temperature


def _applied(temperature: Float[Array, "B"]) -> Float[Array, "B"]:
    """The temperature of a draw from logits that were divided by it: 1, or 0 for the likeliest."""
    return jnp.where(temperature > 0, 1.0, 0.0)


def _temperature(chain: Chain, own: Rules, x: jax.Array, banned: jax.Array) -> Float[Array, "B"]:
    spread, exponent = chain.dynatemp_range, chain.dynatemp_exponent
    return truncations.dynamic_temperature(x, own.temperature, spread, exponent, banned)


def _truncated(
    chain: Chain, own: Rules, x: Float[Array, "B V"], chance: Float[Array, "B"]
) -> tuple[Float[Array, "B V"], Float[Array, "B"]]:
    """From top-k to XTC: what is left, and the temperature of a draw from it. Among the likeliest tokens,
    where top-k keeps no others in every row."""
    vocabulary = x.shape[1]

    def among_all():
        return _truncations(chain, own, x, chance, vocabulary)

    if vocabulary <= reference.SORTED:
        return among_all()
    size = reference.CANDIDATES
    top, ids = (jax.lax.optimization_barrier(array) for array in jax.lax.top_k(x, size))
    kth = jnp.take_along_axis(top, jnp.clip(own.top_k, 1, size)[:, None] - 1, 1)[:, 0]
    fits = (own.top_k > 0) & (own.top_k <= size) & ((kth > top[:, -1]) | (top[:, -1] == -jnp.inf))

    def among_likeliest():
        left, temperature = _truncations(chain, own, top, chance, vocabulary)
        row = jnp.arange(len(x))[:, None]
        return jnp.full_like(x, -jnp.inf).at[row, ids].set(left), temperature

    return jax.lax.cond(jnp.all(fits | ~chain.used | (chain.mirostat > 0)), among_likeliest, among_all)


def _truncations(
    chain: Chain, own: Rules, x: Float[Array, "B n"], chance: Float[Array, "B"], vocabulary: int
) -> tuple[Float[Array, "B n"], Float[Array, "B"]]:
    """`_truncated`, with each step only where a row has it. n: all tokens, or enough of the likeliest."""

    def where_asked(asked, step, x, *parameters):
        return jax.lax.cond(jnp.any(chain.used & asked), step, lambda x, *_: x, x, *parameters)

    x = where_asked(own.top_k > 0, truncations.top_k, x, own.top_k)
    # llama.cpp's dynamic temperature counts tokens without a probability, which only some steps remove.
    most = jnp.where(own.top_k > 0, jnp.minimum(own.top_k, vocabulary), vocabulary)
    removed = (chain.typical_p < 1) | (own.top_p < 1) | (own.min_p > 0)
    banned = jnp.where(removed, 0, jnp.maximum(most - (x > -jnp.inf).sum(-1), 0))
    x = where_asked(chain.typical_p < 1, truncations.typical, x, chain.typical_p)
    x = where_asked(own.top_p < 1, truncations.top_p, x, own.top_p)
    x = truncations.min_p(x, own.min_p)
    x = truncations.xtc(x, chain.xtc_probability, chain.xtc_threshold, chance)
    return x, _temperature(chain, own, x, banned)


def _chance(keys: UInt32[Array, "B 2"], positions: Int[Array, "B"]) -> Float[Array, "B"]:
    """Uniform in [0, 1), of a row's key and position, and of no token: the second word that Threefry counts
    is 1, and 0 for the noise of tokens."""

    def one(key, position):
        own = reference.at_position(key, position)
        bits = threefry_2x32((own[0], own[1]), jnp.array([0, 1], jnp.uint32))[0]
        return (bits >> 8).astype(jnp.float32) * 2.0**-24

    return jax.vmap(one)(keys, positions)
