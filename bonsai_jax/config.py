"""Three configurations by lifetime: the model file's, this process's, this request's. All frozen."""

import dataclasses
import math
import operator
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax

from bonsai_jax import choices


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    base               theta of pair i is base^(-2i / head_dim)
    interleaved        True: pairs are (0, 1), (2, 3), ... (GGUF's llama); False: (i, i + head_dim / 2)
    scaling            how the frequencies are stretched beyond the original context
    factor             linear, yarn, llama3: context extension, 4.0 = four times the original
    original_context   yarn, llama3: tokens the model was first trained on
    beta_fast, _slow   yarn: rotations within the original context above / below which a pair is kept /
                       stretched
    mscale             yarn: factor on cos and sin at all positions; the paper's is 0.1 ln(factor) + 1
    low_, high_freq_factor   llama3: the same borders, in wavelengths per original context
    """

    base: float
    interleaved: bool = False
    scaling: Literal["none", "linear", "yarn", "llama3"] = "none"
    factor: float = 1.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self):
        if not self.base > 1:
            raise ValueError(f"RopeConfig: base is {self.base}; it must be above 1")
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"RopeConfig: low_freq_factor is {self.low_freq_factor}; "
                f"it must be below high_freq_factor, {self.high_freq_factor}"
            )


def yarn_mscale(factor: float) -> float:
    """YaRN's factor on cos and sin, 0.1 ln(factor) + 1 (Peng et al. 2023): 1.1386 for a fourfold context."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0


@dataclasses.dataclass(frozen=True)
class DeltaConfig:
    """Sizes of layers that mix tokens by a gated delta net (pallas_kernels/delta).

    k_heads, v_heads  heads of queries and keys, and of values; a k head serves v_heads / k_heads of them
    k_dim, v_dim      their widths
    conv              tokens that the convolution before it sees, the newest among them
    grouped           v head h uses k head h // (v_heads / k_heads), as in Hugging Face files; else, as in
                      GGUF files, h % k_heads
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv: int
    grouped: bool = False

    def __post_init__(self):
        if self.v_heads % self.k_heads:
            raise ValueError(
                f"model config: {self.v_heads} v heads do not divide into {self.k_heads} k heads"
            )
        if self.conv < 2:
            raise ValueError(f"model config: the convolution sees {self.conv} tokens; supported: from 2 on")

    @property
    def v_width(self) -> int:
        return self.v_heads * self.v_dim

    @property
    def qkv_width(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.k_heads * self.k_dim + self.v_width


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """Sizes of layers whose channels are mixed by experts (pallas_kernels/experts).

    count       experts of a layer
    used        of them, for each token the likeliest
    ffn         width of one's feed-forward
    normalized  whether the weights of those used are divided by their sum
    """

    count: int
    used: int
    ffn: int
    normalized: bool = True

    def __post_init__(self):
        if not 1 <= self.used <= self.count:
            raise ValueError(f"model config: {self.used} of {self.count} experts are used for a token")

    def share_read(self, rows: int) -> float:
        """Of a layer's experts, those that a step of so many rows reads, were all equally likely."""
        return 1 - (1 - self.used / self.count) ** rows


Mixer = Literal["attention", "delta"]
Channels = Literal["mlp", "experts"]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """What the file says of the model. Hashable, and a pytree without leaves: an argument of jitted functions
    that decides what is compiled, named in static_argnames or not.

    vocab_size       rows of the embedding, which can exceed the tokenizer's tokens
    activation       of the feed-forward's gate; "gelu" is tanh's approximation
    window           keys that a query sees, itself among them; None: all before it
    attention_scale  factor on scores; None: 1 / sqrt(head_dim)
    attention_gate   whether what a head gives is multiplied by the sigmoid of a gate as wide, which wq
                     makes too: of each head its query, then its gate
    rotated          values of each head, the first ones, that rope turns; None: all
    mixers           of each layer, what mixes its tokens; (): attention in all
    channels         of each layer, what mixes its channels; (): mlp, the gated feed-forward, in all
    delta            sizes of the layers whose mixer is delta
    experts          sizes of the layers whose channels are mixed by experts
    aside            how names begin of what the file has and we leave aside: a draft layer, a vision tower
    draft            how names begin of the draft layer's tensors (draft.py); None: there is none, or it is
                     left aside (RunConfig.draft)
    """

    architecture: str
    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope: RopeConfig
    activation: Literal["silu", "gelu"] = "silu"
    window: int | None = None
    attention_scale: float | None = None
    attention_gate: bool = False
    rotated: int | None = None
    mixers: tuple[Mixer, ...] = ()
    channels: tuple[Channels, ...] = ()
    delta: DeltaConfig | None = None
    experts: ExpertsConfig | None = None
    aside: tuple[str, ...] = ()
    draft: str | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not isinstance(value, bool) and value <= 0:
                raise ValueError(f"model config: {field.name} is {value}; it must be positive")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model config: {self.num_heads} query heads do not divide into {self.num_kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"model config: head_dim is {self.head_dim}; rotary embeddings need an even one")
        if self.rotated is not None and (self.rotated % 2 or self.rotated > self.head_dim):
            raise ValueError(
                f"model config: rope turns {self.rotated} values of a head of {self.head_dim}; an even "
                "number up to that is expected"
            )

    @property
    def kinds(self) -> tuple[tuple[Mixer, Channels], ...]:
        """Of each layer what mixes its tokens, and what its channels."""
        mixers: tuple[Mixer, ...] = self.mixers or ("attention",) * self.num_layers
        channels: tuple[Channels, ...] = self.channels or ("mlp",) * self.num_layers
        return tuple(zip(mixers, channels, strict=True))

    def layers_of(self, kind: Mixer | Channels) -> tuple[int, ...]:
        """The layers that have this mixer of tokens or of channels, in order: weights and state of a kind are
        stacked so."""
        return tuple(layer for layer, kinds in enumerate(self.kinds) if kind in kinds)

    def places(self, layer: int) -> tuple[int, int]:
        """Of a layer, how many before it have its mixer of tokens, and how many its mixer of channels: its
        indices into the stacks of the two."""
        mixer, channels = self.kinds[layer]
        return self.layers_of(mixer).index(layer), self.layers_of(channels).index(layer)

    @property
    def period(self) -> int:
        """The least number of layers after which kinds repeat: 1 where all layers are alike, num_layers where
        nothing repeats."""
        kinds = self.kinds
        return next(p for p in range(1, len(kinds) + 1) if kinds[p:] == kinds[: len(kinds) - p])

    def of_device(self, parts: int) -> "ModelConfig":
        """With the heads that each of `parts` devices has; KV heads are one at least."""
        delta = self.delta and dataclasses.replace(
            self.delta, k_heads=self.delta.k_heads // parts, v_heads=self.delta.v_heads // parts
        )
        return dataclasses.replace(
            self,
            num_heads=self.num_heads // parts,
            num_kv_heads=max(1, self.num_kv_heads // parts),
            delta=delta,
        )

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def q_rows(self) -> int:
        """Outputs of wq: queries, with their gates where there are any."""
        return self.q_width * (2 if self.attention_gate else 1)

    @property
    def rope_dim(self) -> int:
        """Values of a head that rope turns."""
        return self.head_dim if self.rotated is None else self.rotated

    @property
    def rope_pairs(self) -> int:
        return self.rope_dim // 2

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def draft_inputs(self) -> int:
        """Of the matrix ahead of the draft layer: a token's embedding and a hidden vector."""
        return 2 * self.hidden


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """How this process runs the model. Values of named settings: choices.py.

    impl         "auto": what pallas_kernels/selection.py finds best for each matrix; "reference": jnp on any
                 device; "pallas": Pallas kernels, and an error where a decode step has none
    schedule     how a decode step's kernels are launched. "one_launch": all layers in one kernel;
                 "layer_products": two launches per layer, one for attention and one for all products up to
                 the next attention; "layer_gemms": eight launches per layer, for batches; "launches": one
                 launch per operation. "auto": the schedule with the fewest launches that supports the batch
                 size. A named schedule that this model or device cannot run is an error; batch sizes that it
                 is not for use "launches"
    weights      "packed": blocks stay as they are and are decoded where they are used; "decoded": float32,
                 decoded once at load; "auto": packed where kernels read them; on a CPU without a kernel for
                 each matrix decoded, where free memory has room for it (card.explain_weights)
    activation_bits  8 or 16, to which kernels may round activations, per group of 16 to 128; 16 is nearly
                 exact. The reference rounds nothing
    all_reduce   how devices that share weights sum in a decode step: "mailbox", by writing into each
                 other's memory (pallas_kernels/all_reduce.py), or "psum", which is NCCL's on GPUs;
                 "auto": by mailbox where all devices reach each other's memory
    cache_dtype  of keys and values; None: float32 on CPU, float16 elsewhere. "int8": a byte and a scale for
                 each token and head, half of float16's bytes, without derivatives
    page_size    tokens in a page of the cache
    context      most tokens a row may hold, prompt and answer together; 0: the model's own, at most 4096
    rows         most rows run at once; of more prompts each begins when another has ended
    draft        whether the draft layer (MTP) that the file has is loaded, for speculate="mtp"; else it is
                 left aside
    """

    impl: choices.Impl = "auto"
    schedule: choices.Schedule = "auto"
    weights: choices.WeightStorage = "auto"
    activation_bits: choices.ActivationBits = 8
    all_reduce: choices.AllReduce = "auto"
    cache_dtype: choices.CacheDtype | None = None
    page_size: int = 64
    context: int = 0
    rows: int = 8
    draft: bool = False

    def __post_init__(self):
        _one_of(self, "impl", get_args(choices.Impl))
        _one_of(self, "schedule", get_args(choices.Schedule))
        _one_of(self, "weights", get_args(choices.WeightStorage))
        _one_of(self, "activation_bits", get_args(choices.ActivationBits))
        _one_of(self, "all_reduce", get_args(choices.AllReduce))
        _one_of(self, "cache_dtype", (*get_args(choices.CacheDtype), None))
        _one_of(self, "draft", (True, False))
        _within(self, "page_size", 1, 2**20, whole=True)
        _within(self, "context", 0, 2**31 - 1, whole=True)
        _within(self, "rows", 1, 2**31 - 1, whole=True)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn. Numbers are traced: changing them does not recompile.

    Applied in this order (llama.cpp's): penalties and bias, top-k, top-p, min-p, temperature, draw; or with
    the temperature before top-k (that of OpenAI-style servers).

    temperature         0: always the most likely token, and the truncations below do not matter
    top_k               keep the k most likely tokens (and those tied with the k-th); 0: all
    top_p               keep the fewest most likely tokens whose probabilities sum to p or more; 1: all
    min_p               keep tokens at least min_p times as likely as the likeliest; 0: all
    temperature_first   probabilities of top_p and min_p are those at this temperature, not at 1
    repetition_penalty  logits of tokens in prompt or answer are divided (if positive) or multiplied by it
    presence_penalty    subtracted from the logits of tokens in the answer; 0: none
    frequency_penalty   the same, times their count; 0: none
    logit_bias          {token id: added to its logit}
    seed                of which the last 32 bits count; None: drawn from the operating system. Prompts of one
                        call with one SamplingParams get seed, seed + 1, ...
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

    def __post_init__(self):
        _within(self, "temperature", 0, math.inf)
        _within(self, "top_k", 0, 2**31 - 1, whole=True)
        _within(self, "top_p", 0, 1)
        _within(self, "min_p", 0, 1)
        _one_of(self, "temperature_first", (True, False))
        _within(self, "repetition_penalty", 0, math.inf)
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(
                f"SamplingParams: repetition_penalty is {self.repetition_penalty}; it must be above 0"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            _within(self, name, -(10**6), 10**6)
        if self.seed is not None:
            _within(self, "seed", -math.inf, math.inf, whole=True)
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"SamplingParams: logit_bias is {self.logit_bias!r}; give {{token id: bias}}")
        for token, bias in self.logit_bias.items():
            # -inf bans a token; of +inf no distribution can be made.
            if not (_is_number(token, whole=True) and _is_number(bias) and bias < math.inf):
                raise ValueError(
                    f"SamplingParams: logit_bias has {token!r}: {bias!r}; expected a token id and a number"
                )


def _one_of(config, name: str, choices: tuple) -> None:
    value = getattr(config, name)
    if value not in choices:
        listed = ", ".join(repr(c) for c in choices)
        raise ValueError(f"{type(config).__name__}: {name} is {value!r}; it must be one of {listed}")


def _within(config, name: str, low: float, high: float, *, whole: bool = False) -> None:
    value = getattr(config, name)
    if not _is_number(value, whole=whole):
        kind = "a whole number" if whole else "a number"
        raise ValueError(f"{type(config).__name__}: {name} is {value!r}; it must be {kind}")
    if not low <= value <= high:  # False for NaN too
        raise ValueError(f"{type(config).__name__}: {name} is {value}; it must lie in {low:,} to {high:,}")


def _is_number(value: Any, *, whole: bool = False) -> bool:
    """Whether it is one of Python's, numpy's or jax's numbers; NaN is none."""
    try:
        return not isinstance(value, str) and (operator.index if whole else float)(value) == value
    except (TypeError, ValueError):
        return False
