"""How the tokens of a request are drawn. docs/sampling.md has formulas and sources."""

import copy
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from bonsai_jax import arguments
from bonsai_jax.arguments import set_field

BREAKERS = ("\n", ":", '"', "*")
LONGEST_BREAKER = 40  # characters; llama.cpp reads as many bytes
MOST = 1e6  # of numbers that multiply or are added: beyond any use


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn. Numbers are traced: changing them does not recompile.

    Applied in this order (llama.cpp's): penalties and bias, DRY, top-n-sigma, top-k, typical, top-p, min-p,
    XTC, temperature, draw; or with the temperature before top-k (that of OpenAI-style servers).

    temperature         0: always the most likely token, and top-k, top-p and min-p do not matter
    top_k               keep the k most likely tokens (and those tied with the k-th); 0: all
    top_p               keep the fewest most likely tokens whose probabilities sum to p or more; 1: all
    min_p               keep tokens at least min_p times as likely as the likeliest; 0: all
    temperature_first   probabilities of what follows top-k are those at this temperature, not at 1
    repetition_penalty  logits of tokens in prompt or answer are divided (if positive) or multiplied by it
    presence_penalty    subtracted from the logits of tokens in the answer; 0: none
    frequency_penalty   the same, times their count; 0: none
    logit_bias          {token id: added to its logit}
    seed                of which the last 32 bits count; None: drawn from the operating system. Prompts of one
                        call with one SamplingParams get seed, seed + 1, ...

    A request that uses one of the following runs in programs of its own (`chained`); they cannot be combined
    with `speculate`. Defaults are llama.cpp's, and turn each of them off.

    min_tokens          tokens that end an answer are banned until it has so many; with as many as
                        max_new_tokens or more it never ends by itself
    dry_multiplier      DRY: a token that would make a repetition longer loses dry_multiplier *
                        dry_base^(length - dry_allowed_length), with the length of what it would repeat
    dry_base, dry_allowed_length   as above; shorter repetitions are free
    dry_penalty_last_n  newest tokens of prompt and answer in which repetitions are looked for; -1: all
    dry_sequence_breakers   texts across which no repetition goes
    top_n_sigma         keep tokens whose logits are at most so many standard deviations below the largest;
                        0 or less: all
    typical_p           keep the tokens whose information is nearest to the entropy, until their probabilities
                        sum to more than p; 1: all
    xtc_probability     how often, of all tokens that are at least as likely as xtc_threshold, only the least
                        likely is kept; 0: never
    xtc_threshold       above 0.5: never
    dynatemp_range      the temperature lies within `temperature` -+ range, the higher the larger the entropy
                        is; 0: it is fixed
    dynatemp_exponent   temperature = lowest + (highest - lowest) * (entropy / largest entropy)^exponent
    mirostat            2: Mirostat 2.0 with its temperature and biases alone, in place of penalties and all
                        truncations; 0: without it
    mirostat_tau        the information, in bits, that a token has on average
    mirostat_eta        how fast the limit of information follows
    Raises ValueError for a value out of these ranges; it names the field.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    temperature_first: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    min_tokens: int = 0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = BREAKERS
    top_n_sigma: float = 0.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1

    def __post_init__(self):
        set_field(self, "temperature", arguments.number, 0)
        set_field(self, "top_k", arguments.whole)
        for name in ("top_p", "min_p", "typical_p", "xtc_probability", "xtc_threshold"):
            set_field(self, name, arguments.number, 0, 1)
        set_field(self, "temperature_first", arguments.flag)
        set_field(self, "repetition_penalty", arguments.number)
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(
                f"SamplingParams: repetition_penalty is {self.repetition_penalty}; it must be above 0"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            set_field(self, name, arguments.number, -(10**6), 10**6)
        if self.seed is not None:
            set_field(self, "seed", arguments.any_whole)
        set_field(self, "logit_bias", _biases)
        for name in ("min_tokens", "dry_allowed_length"):
            set_field(self, name, arguments.whole)
        set_field(self, "dry_penalty_last_n", arguments.whole, -1)
        set_field(self, "dry_sequence_breakers", _breakers)
        set_field(self, "top_n_sigma", arguments.number, -MOST, MOST)
        for name in ("dry_multiplier", "dry_base", "dynatemp_range", "dynatemp_exponent"):
            set_field(self, name, arguments.number, 0, MOST)
        for name in ("mirostat_tau", "mirostat_eta"):
            set_field(self, name, arguments.number, 0, MOST)
        set_field(self, "mirostat", arguments.one_of, (0, 2))

    @property
    def chained(self) -> bool:
        """Whether it uses a sampler of decoding/chain.py."""
        xtc = self.xtc_probability > 0 and self.xtc_threshold <= 0.5
        truncates = self.top_n_sigma > 0 or self.typical_p < 1 or xtc
        return self.mirostat > 0 or self.min_tokens > 0 or self.dry or truncates or self.dynatemp_range > 0

    @property
    def dry(self) -> bool:
        """Whether it penalizes repetitions by DRY."""
        used = self.dry_multiplier > 0 and self.dry_base >= 1 and self.dry_penalty_last_n != 0
        return used and self.mirostat == 0


def seeded(params: SamplingParams, seed: int) -> SamplingParams:
    """The same with this seed, without checking all the other fields once more."""
    own = copy.copy(params)
    object.__setattr__(own, "seed", seed)
    return own


def _biases(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {arguments.shown(value)}; give {{token id: bias}}")
    biases = {}
    for token, bias in value.items():
        try:
            token, bias = arguments.whole("", token), arguments.number("", bias)
        except ValueError:
            bias = math.inf
        if bias == math.inf:  # -inf bans a token; +inf gives no distribution
            pair = f"{arguments.shown(token)}: {arguments.shown(value[token])}"
            raise ValueError(f"{name} has {pair}; expected a token id and a number")
        biases[token] = bias
    return biases


def _breakers(name: str, value: Any) -> tuple[str, ...]:
    texts = tuple(value) if isinstance(value, list | tuple) else None
    if texts is None or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name} is {arguments.shown(value)}; it must be a list of texts")
    for text in texts:
        halves = any("\ud800" <= character <= "\udfff" for character in text)  # of characters
        if halves or not 0 < len(text) <= LONGEST_BREAKER:
            raise ValueError(
                f"{name} has {arguments.shown(text)}; a text must have 1 to {LONGEST_BREAKER} characters"
            )
    return texts
