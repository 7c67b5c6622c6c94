"""From logits to tokens, on the device, each row with its own parameters and key."""

import secrets
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.experimental import multihost_utils
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from bonsai_jax import arguments
from bonsai_jax.sampling_params import SamplingParams, seeded
from pallas_kernels import device, problems, selection, serializable
from pallas_kernels.sampling import NO_TOKEN as NO_TOKEN
from pallas_kernels.sampling import Rules, draw, reference
from pallas_kernels.zeros import zeros

NOTHING_TO_DRAW = "no token can be drawn: logits are NaN or infinite, or every token is banned"


@serializable
class Sampler(struct.PyTreeNode):
    """SamplingParams of B rows as arrays, and the tables that penalties need. SamplingParams has meanings and
    ranges.

    keys        one random key per row; the token at position p is drawn with fold_in(key, p), so a row's
                draws depend on its seed and its position only
    bias_ids    int32 [B, M], token ids with a logit bias, padded with an id beyond the vocabulary
    bias        float32 [B, M]
    seen        bool [B, V], tables of tokens: whether each is in the prompt or the answer
    counts      int32 [B, V]: times it is in the answer
    table       int32 [B], the row of `seen` and `counts` that each row has, where they are the tables of
                other rows too (an engine's): no two the same; beyond all: nothing is counted. None: its own
    impl        the kernel that draws (pallas_kernels.sampling), chosen for the default device
    scored      whether Logprobs, where they are asked for, have `sampled`
    """

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]
    temperature_first: Bool[Array, "B"]
    repetition_penalty: Float[Array, "B"]
    presence_penalty: Float[Array, "B"]
    frequency_penalty: Float[Array, "B"]
    bias_ids: Int[Array, "B M"]
    bias: Float[Array, "B M"]
    keys: Key[Array, "B"]
    seen: Bool[Array, "tables V"]
    counts: Int[Array, "tables V"]
    table: Int[Array, "B"] | None = None
    impl: str = struct.field(pytree_node=False, default="reference")
    scored: bool = struct.field(pytree_node=False, default=False)


@serializable
class Logprobs(struct.PyTreeNode):
    """Log-probabilities, in nats. `token` and `top` are of the model's own distribution: log_softmax of its
    logits, before any processor, penalty or temperature.

    token   float32 [...], of each drawn token
    ids     int32 [..., n], the n likeliest tokens in its place, the likeliest first
    top     float32 [..., n], of these
    sampled float32 [...], of each drawn token in the distribution that it was drawn from, after processor,
            penalties, biases, mask, truncations and temperature; 0 where the likeliest is taken. None unless
            asked for (Sampler.scored)
    """

    token: Float[Array, "*shape"]
    ids: Int[Array, "*shape n"]
    top: Float[Array, "*shape n"]
    sampled: Float[Array, "*shape"] | None = None


def log_softmax(logits: Float[Array, "*batch V"]) -> Float[Array, "*batch V"]:
    """logits - log sum exp(logits), with a sum that has the same bits in every program.

    XLA adds floats in an order that depends on what surrounds the sum. Here exp(logits - max), at most 1, is
    cut into three integers of 12 bits, which are added. They do not overflow for less than 2^19 tokens, and
    what is below 2^-36 is dropped.
    """
    x = logits.astype(jnp.float32)
    x -= x.max(axis=-1, keepdims=True)
    rest, total = jnp.exp(x), jnp.zeros(x.shape[:-1])
    for word in range(1, 4):
        rest = rest * 4096
        whole = jnp.floor(rest)
        total += whole.astype(jnp.int32).sum(axis=-1) * 2.0 ** (-12 * word)
        rest = rest - whole
    return x - jnp.log(total)[..., None]


def token_logprobs(logits: Float[Array, "B V"], tokens: Int[Array, "B"], n: int | None) -> Logprobs | None:
    """Logprobs [B] of these tokens, and of the n likeliest; None for n=None."""
    if n is None:
        return None
    scores = log_softmax(logits)
    top, ids = jax.lax.top_k(scores, n)
    return Logprobs(jnp.take_along_axis(scores, tokens[:, None], axis=1)[:, 0], ids, top)


def no_logprobs(shape: tuple[int, ...], n: int | None, scored: bool) -> Logprobs | None:
    """Zeros of this shape, to be filled in; None for n=None. scored: with `sampled`."""
    if n is None:
        return None
    sampled = jnp.zeros(shape) if scored else None
    return Logprobs(jnp.zeros(shape), jnp.zeros((*shape, n), jnp.int32), jnp.zeros((*shape, n)), sampled)


def sampled_logprobs(own: Rules, logits: Float[Array, "B V"], tokens: Int[Array, "B"]) -> Float[Array, "B"]:
    """log p(token) of tokens that were drawn from these logits by these rules.

    log_softmax(logits' / temperature over the tokens that truncation keeps)[token],  0 for temperature 0

    with logits' after penalties and bias. A number without meaning for NO_TOKEN.
    """
    left = reference.penalize(own, logits.astype(jnp.float32))
    heat = jnp.where(own.temperature > 0, own.temperature, 1.0)[:, None]
    scores = log_softmax(jnp.where(reference.truncate(own, left), left / heat, -jnp.inf))
    drawn = jnp.take_along_axis(scores, jnp.maximum(tokens, 0)[:, None], axis=1)[:, 0]
    return jnp.where(own.temperature > 0, drawn, 0.0)


def sampler(
    params: SamplingParams | Sequence[SamplingParams], rows: int, vocab_size: int, impl: str = "auto"
) -> Sampler:
    """Arrays for `rows` rows from one SamplingParams, whose seed then counts up from row to row, or from one
    per row.

    impl  of the kernel that draws, as in RunConfig
    Raises ValueError if their number is not `rows` or a logit bias names a token beyond the vocabulary.
    """
    if isinstance(params, SamplingParams):
        seed = any_seed() if params.seed is None else params.seed
        per_row = [seeded(params, seed + row) for row in range(rows)]
    else:
        per_row = checked_list(params)
        if len(per_row) != rows:
            raise ValueError(
                f"params: {len(per_row)} SamplingParams for {rows} prompts: give one for all, or one for each"
            )
    fields = columns(per_row, vocab_size)
    seeds = fields.pop("seeds")
    # device_put compiles nothing; it must copy, because states are donated.
    fields = jax.device_put(fields, may_alias=False)
    fields |= {"seen": zeros((rows, vocab_size), bool), "counts": zeros((rows, vocab_size), np.int32)}
    return Sampler(keys=keys(seeds), impl=kernel(vocab_size, impl), **fields)


def checked_list(params: Any, name: str = "params") -> list[SamplingParams]:
    """SamplingParams of several rows. Raises TypeError, with this name, for anything else."""
    remedy = "bj.SamplingParams, such as bj.SamplingParams(temperature=0.5), or a list of these"
    arguments.kind(name, params, (list, tuple), remedy)
    for one in params:
        arguments.kind(name, one, SamplingParams, remedy)
    return list(params)


def columns(
    per_row: Sequence[SamplingParams], vocab_size: int, biases: int | None = None
) -> dict[str, np.ndarray]:
    """Fields of a Sampler as numpy arrays from one SamplingParams for each row, and `seeds`, uint32, from
    which `keys` makes the keys.

    biases   room for biased tokens in each row; None: the next power of two
    """
    for p in per_row:
        check_bias(p, vocab_size)
    if biases is None:
        biases = bias_width(per_row)
    bias_ids = np.full((len(per_row), biases), vocab_size, np.int32)
    bias = np.zeros((len(per_row), biases), np.float32)
    for row, p in enumerate(per_row):
        bias_ids[row, : len(p.logit_bias)] = list(p.logit_bias)
        bias[row, : len(p.logit_bias)] = list(p.logit_bias.values())
    types = dict.fromkeys(("temperature", "top_p", "min_p"), np.float32) | {"top_k": np.int32}
    types |= dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), np.float32)
    types |= {"temperature_first": np.bool_}
    rules = {name: np.array([getattr(p, name) for p in per_row], dtype) for name, dtype in types.items()}
    seeds = [any_seed() if p.seed is None else p.seed for p in per_row]
    return {
        **rules,
        "bias_ids": bias_ids,
        "bias": bias,
        "seeds": np.array([seed % 2**32 for seed in seeds], np.uint32),
    }


def check_bias(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError if a logit bias names a token beyond the vocabulary."""
    for token in params.logit_bias:
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"SamplingParams: logit_bias names token {token}; the vocabulary has {vocab_size}"
            )


def bias_width(per_row: Sequence[SamplingParams]) -> int:
    """Room for the biases of each row: a power of two, so that few shapes are compiled. At least 1, because
    under shard_map jax 0.11.2 crashes on an empty array in a loop."""
    return 1 << max(0, max(len(p.logit_bias) for p in per_row) - 1).bit_length()


def keys(seeds: UInt32[Array | np.ndarray, "B"]) -> Key[Array, "B"]:
    """A key for each seed, that of Threefry for the words 0 and the seed, as jax.random.key makes it. From a
    numpy array nothing is compiled."""
    if isinstance(seeds, np.ndarray):
        words = jax.device_put(np.stack([np.zeros_like(seeds), seeds], axis=1), may_alias=False)
    else:
        words = jnp.stack([jnp.zeros_like(seeds), seeds], axis=1)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def kernel(vocab_size: int, impl: str = "auto") -> str:
    """The kernel that draws tokens on the default device."""
    return selection.choose(problems.Sampling(device.platform(), vocab_size), impl=impl)


def any_seed() -> int:
    """A random seed, the same in all processes."""
    seed = secrets.randbits(31)
    return seed if jax.process_count() == 1 else int(multihost_utils.broadcast_one_to_all(np.uint32(seed)))


def read_prompt(s: Sampler, tokens: Int[Array, "B T"], valid: Bool[Array, "B T"]) -> Sampler:
    """Enter a prompt's tokens, those that are valid, for the repetition penalty."""
    tokens = jnp.where(valid, tokens, s.seen.shape[1])  # beyond the vocabulary: dropped
    return s.replace(seen=s.seen.at[_table(s)[:, None], tokens].set(True, mode="drop"))


def remember(s: Sampler, tokens: Int[Array, "B T"], valid: Bool[Array, "B T"]) -> Sampler:
    """Count the answer's tokens, those that are valid, for all penalties."""
    at = _table(s)[:, None], jnp.where(valid, tokens, s.seen.shape[1])  # beyond the vocabulary: dropped
    return s.replace(seen=s.seen.at[at].set(True, mode="drop"), counts=s.counts.at[at].add(1, mode="drop"))


def without_tables(s: Sampler, rows: Bool[Array, "B"]) -> Sampler:
    """The sampler that counts nothing of these rows."""
    return s.replace(table=jnp.where(rows, len(s.seen), _table(s)))


def cleared(s: Sampler, rows: Bool[Array, "B"]) -> Sampler:
    """The sampler with empty tables of these rows."""
    at = jnp.where(rows, _table(s), len(s.seen))
    return s.replace(seen=s.seen.at[at].set(False, mode="drop"), counts=s.counts.at[at].set(0, mode="drop"))


def with_own_tables(s: Sampler) -> Sampler:
    """The sampler whose tables are those of its rows alone, in their order."""
    if s.table is None:
        return s
    seen, counts = (x.at[s.table].get(mode="clip") for x in (s.seen, s.counts))
    return s.replace(seen=seen, counts=counts, table=None)


def _table(s: Sampler) -> Int[Array, "B"]:
    return jnp.arange(len(s.keys), dtype=jnp.int32) if s.table is None else s.table


def foresee(s: Sampler, tokens: Int[Array, "B T-1"]) -> Sampler:
    """A sampler with arrays [B, T, ...] for each row's next T tokens: element t as if tokens[:, :t] had been
    drawn. Negative tokens do not count."""
    rows, T = tokens.shape[0], tokens.shape[1] + 1
    each = jax.tree.map(lambda x: jnp.repeat(x, T, axis=0), with_own_tables(s))  # [B T, ...]
    earlier = (tokens[:, None] >= 0) & (jnp.arange(T - 1) < jnp.arange(T)[:, None])  # [B, T, T - 1]
    before = jnp.broadcast_to(tokens[:, None], earlier.shape).reshape(rows * T, T - 1)
    each = remember(each, before, earlier.reshape(rows * T, T - 1))
    return jax.tree.map(lambda x: x.reshape(rows, T, *x.shape[1:]), each)


def sample_each(
    s: Sampler,
    logits: Float[Array, "B T V"],
    positions: Int[Array, "B T"],
    allowed: UInt32[Array, "B T words"] | None = None,
) -> Int[Array, "B T"]:
    """`sample` at T positions of each row, with a sampler from `foresee`. Does not update the sampler."""
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (s, logits, positions, allowed))
    return sample(*flat)[0].reshape(positions.shape)


def score_each(
    s: Sampler,
    logits: Float[Array, "B T V"],
    tokens: Int[Array, "B T"],
    allowed: UInt32[Array, "B T words"] | None = None,
) -> Float[Array, "B T"]:
    """`sampled_logprobs` of the tokens that `sample_each` drew."""
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (s, logits, tokens, allowed))
    sampler, logits, drawn, masks = flat
    return sampled_logprobs(rules(sampler, masks), logits, drawn).reshape(tokens.shape)


def sample(
    s: Sampler,
    logits: Float[Array, "B V"],
    positions: Int[Array, "B"],
    allowed: UInt32[Array, "B words"] | None = None,
) -> tuple[Int[Array, "B"], Sampler]:
    """Draw each row's token at its position, and count it.

    token = argmax(logits', or logits' / temperature + Gumbel noise over the tokens that truncation keeps)

    with logits' after penalties and bias: pallas_kernels.sampling.draw.

    allowed   bit i % 32 of word i // 32 says whether token i may be drawn; None: all may
    Draws NO_TOKEN where logits' has NaN or +inf, or no token may be drawn.
    """
    keys = jax.random.key_data(s.keys)[:, :2]
    tokens, seen, counts = draw(logits, rules(s, allowed), keys, positions, impl=s.impl)
    return tokens, s.replace(seen=seen, counts=counts)


def guess(s: Sampler, logits: Float[Array, "B V"], positions: Int[Array, "B"]) -> Int[Array, "B"]:
    """What `sample` would draw without penalties. Counts nothing, so no table is read or copied."""
    rows, zeros = len(s.keys), jnp.zeros(len(s.keys))
    neutral = {"presence_penalty": zeros, "frequency_penalty": zeros, "repetition_penalty": zeros + 1}
    none = {
        "seen": jnp.zeros((1, logits.shape[1]), bool),
        "counts": jnp.zeros((1, logits.shape[1]), jnp.int32),
    }
    return sample(s.replace(**neutral, **none, table=jnp.ones(rows, jnp.int32)), logits, positions)[0]


def guess_each(s: Sampler, logits: Float[Array, "B T V"], positions: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """`guess` at T positions of each row."""
    without = s.replace(seen=None, counts=None, table=None)  # tables are large, and a guess reads none
    each = jax.tree.map(lambda x: jnp.repeat(x, positions.shape[1], axis=0), without)
    return guess(each, logits.reshape(-1, logits.shape[-1]), positions.reshape(-1)).reshape(positions.shape)


def rules(s: Sampler, allowed: UInt32[Array, "B words"] | None = None) -> Rules:
    """The rules of a draw; allowed: as for `sample`."""
    same = [name for name in Rules._fields if name not in ("table", "allowed")]
    return Rules(**{name: getattr(s, name) for name in same}, table=_table(s), allowed=allowed)
