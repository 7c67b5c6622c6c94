"""Rotary position embedding: how fast each pair of values turns, and the angles at given positions."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bonsai_jax.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Rope:
    """Which values of a head turn, and how fast.

    base               theta of pair i is base^(-2i / dim)
    dim                values of a head that turn, the first ones; an even number
    interleaved        True: pairs are (0, 1), (2, 3), ... (GGUF's llama); False: (i, i + dim / 2)
    scaling            how the frequencies are stretched beyond the original context
    factor             linear, yarn, llama3: context extension, 4.0 = four times the original
    original_context   yarn, llama3: tokens the model was first trained on
    beta_fast, _slow   yarn: rotations within the original context above / below which a pair keeps its
                       frequency / is stretched
    truncate           yarn: whether the two borders are whole numbers of pairs
    mscale             yarn: factor on cos and sin at all positions; the paper's is 0.1 ln(factor) + 1
    low_, high_freq_factor   llama3: the same borders, in wavelengths per original context
    turned             proportional: pairs that turn, the first ones; the others have a frequency of 0
    divided            whether the divisors that a GGUF file may hold (rope_freqs) are meant for it
    short_, long_factors   longrope: by which the frequency of each pair is divided where the model is loaded
                       for a context of at most the original one, and for a longer one; (): by 1
    """

    base: float
    dim: int
    interleaved: bool = False
    scaling: Literal["none", "linear", "yarn", "llama3", "longrope", "proportional"] = "none"
    factor: float = 1.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    turned: int = 0
    divided: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self):
        if not self.base > 1:
            raise ValueError(f"rope: base is {self.base}; it must be above 1")
        if self.dim <= 0 or self.dim % 2:
            raise ValueError(f"rope: {self.dim} values of a head turn; expected an even number above 0")
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope: low_freq_factor is {self.low_freq_factor}; "
                f"it must be below high_freq_factor, {self.high_freq_factor}"
            )
        for name in ("short_factors", "long_factors"):
            if (given := len(getattr(self, name))) not in (0, self.pairs):
                raise ValueError(f"rope: {given} {name}; expected one for each of {self.pairs} pairs")
            if min(getattr(self, name), default=1.0) <= 0:
                raise ValueError(f"rope: {name} are {getattr(self, name)}; numbers above 0 are expected")

    @property
    def pairs(self) -> int:
        return self.dim // 2


def yarn_mscale(factor: float, multiplier: float = 1.0) -> float:
    """YaRN's factor on cos and sin, 0.1 multiplier ln(factor) + 1 (Peng et al. 2023): 1.1386 for a fourfold
    context."""
    return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def longrope_mscale(factor: float, original_context: int) -> float:
    """LongRoPE's factor on cos and sin, sqrt(1 + ln(factor) / ln(original context)) (Ding et al. 2024)."""
    if factor <= 1.0 or original_context <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_context))


def frequencies(rope: Rope, context: int = 0) -> np.ndarray:
    """Radians per position of each pair, float32 [dim / 2], of a model loaded for so many tokens.

    none    theta_i = base^(-2 i / dim)
    linear  theta_i / factor
    yarn    theta_i where a pair turns more than beta_fast times within the original context, theta_i / factor
            where it turns less than beta_slow times, and a ramp over i between the two (Peng et al. 2023, as
            in llama.cpp)
    llama3  the same idea with borders in wavelengths and a ramp over frequency (Llama 3.1)
    longrope  theta_i / long_factors_i in contexts above the original one, else theta_i / short_factors_i
    proportional  theta_i of the first `turned` pairs, and 0 (Gemma 4)
    """
    i = np.arange(rope.pairs)
    theta = rope.base ** (-2.0 * i / rope.dim)
    if rope.scaling == "none":
        return theta.astype(np.float32)
    if rope.scaling == "linear":
        return (theta / rope.factor).astype(np.float32)
    if rope.scaling == "proportional":
        return np.where(i < rope.turned, theta, 0).astype(np.float32)
    if rope.scaling == "longrope":
        factors = rope.long_factors if context > rope.original_context else rope.short_factors
        return (theta / np.array(factors or [1.0])).astype(np.float32)
    turns = rope.original_context * theta / (2 * math.pi)  # within the original context
    if rope.scaling == "llama3":
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    else:

        def pair_that_turns(times):
            return (
                rope.dim * math.log(rope.original_context / (times * 2 * math.pi)) / (2 * math.log(rope.base))
            )

        low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(0, low), min(rope.dim - 1, high)
        keep = 1 - (i - low) / max(0.001, high - low)
    keep = np.clip(keep, 0.0, 1.0)
    return (theta * keep + theta / rope.factor * (1 - keep)).astype(np.float32)


def ropes(config: ModelConfig) -> tuple[Rope, ...]:
    """The ropes of a model, each once."""
    each = (group.settings.rope for group in config.attention_groups)
    return tuple(dict.fromkeys(one for one in each if one is not None))


def model_frequencies(
    config: ModelConfig, context: int, tensors: Mapping[str, Float[Array, "R"]]
) -> list[np.ndarray | jax.Array]:
    """`frequencies` of each of a model's ropes, in a model loaded for so many tokens.

    tensors  what GGUF files hold, of each pair: "rope_divisors", by which llama.cpp writes Llama 3's scaling;
             "rope_long" and "rope_short", longrope's factors. Frequencies of ropes that are `divided` are
             divided by those that there are
    """

    def divided(rope: Rope) -> np.ndarray | jax.Array:
        if not rope.divided:
            return frequencies(rope, context)
        chosen = "rope_long" if context > rope.original_context else "rope_short"
        by = tensors.get("rope_divisors", tensors.get(chosen, np.float32(1)))
        by = by if isinstance(by, jax.core.Tracer) else np.asarray(by)  # traced: shapes alone are asked for
        return frequencies(rope, context) / by

    return [divided(rope) for rope in ropes(config)]


def rotation(
    rope: Rope, frequencies: Float[Array, "R"], positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B T R"], Float[Array, "B T R"]]:
    """Cosine and sine of each pair's angle at these positions, times mscale."""
    angle = positions[..., None].astype(jnp.float32) * frequencies
    return rope.mscale * jnp.cos(angle), rope.mscale * jnp.sin(angle)


def rotations(
    config: ModelConfig, frequencies: Sequence[Float[Array, "R"]], positions: Int[Array, "B T"]
) -> dict[Rope, tuple[Float[Array, "B T R"], Float[Array, "B T R"]]]:
    """`rotation` of each of a model's ropes, whose frequencies are Params.rope_frequencies."""
    each = zip(ropes(config), frequencies, strict=True)
    return {one: rotation(one, own, positions) for one, own in each}
