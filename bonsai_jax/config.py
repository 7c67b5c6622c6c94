"""Two configurations by lifetime: the model file's and this process's. Those of a request are SamplingParams
(sampling_params.py). All frozen."""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol, get_args

import jax

from bonsai_jax import arguments, choices

ATTENTION = ("attention", "latent_attention")  # kinds that store keys in pages


class Half(Protocol):
    """What a layer does to its tokens, or to its channels: the settings of a kind (network/kinds), a frozen
    dataclass. Layers with equal settings share their stacks of weights and their state."""

    @property
    def kind(self) -> str:
        """The kind's name, that of its file."""
        ...

    def for_device(self, parts: int) -> "Half":
        """The settings of each of `parts` devices among which the layer is split."""
        ...


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer: x <- x + mixer(x), among tokens; then x <- x + channels(x), within each token.

    mixer, channels  each a Half; None: the layer does without
    beside    a second mixer, which reads what the first reads: x <- x + mixer(x) + beside(x)
    parallel  all halves read the layer's input: x <- x + mixer(x) + channels(x)
    output    what comes after both: x <- output(x) (kinds/layer_output.py)
    """

    mixer: Any
    channels: Any
    beside: Any = None
    parallel: bool = False
    output: Any = None

    @property
    def mixers(self) -> tuple[Any, ...]:
        return tuple(half for half in (self.mixer, self.beside) if half is not None)

    @property
    def halves(self) -> tuple[Any, ...]:
        return (*self.mixers, *(half for half in (self.channels, self.output) if half is not None))

    def changed(self, change: Callable[[Any], Any]) -> "Layer":
        """The layer with change(half) in place of each half."""
        names = [
            name for name in ("mixer", "channels", "beside", "output") if getattr(self, name) is not None
        ]
        return dataclasses.replace(self, **{name: change(getattr(self, name)) for name in names})


@dataclasses.dataclass(frozen=True)
class Group:
    """All layers of a kind whose settings are equal, in order."""

    settings: Any
    layers: tuple[int, ...]


class Run(NamedTuple):
    """Layers from `start` on that repeat: `turns` times `period` layers, whose settings are the same in every
    turn."""

    start: int
    period: int
    turns: int


class Position(NamedTuple):
    """Where the weights and the state of half a layer lie: in which group of its kind, at which index."""

    group: int
    index: int


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """What the file says about the model. Hashable, and a pytree without leaves: an argument of jitted
    functions that decides what is compiled, named in static_argnames or not.

    vocab_size       rows of the embedding, which can exceed the tokenizer's tokens
    rms_norm_eps     of every norm
    layers           what each layer does (network/kinds)
    embedding_scale  the embedding's rows are multiplied by it
    residual_scale   what each half of a layer adds to its input is multiplied by it
    logit_scale      logits are multiplied by it
    layer_norm       norms subtract the mean first: LayerNorm without bias (Ba et al. 2016); else RMSNorm
    layer_vector     width of the vector that each token has for each layer beside its embedding
                     (network/layer_vectors.py); 0: there is none
    logit_softcap    logits, after that, become c tanh(logits / c); None: they stay as they are
    skipped          prefixes of tensor names that are not loaded: a draft layer, a vision tower
    draft            prefix of the draft layer's tensors (network/draft.py); None: the file has none, or it is
                     not loaded (RunConfig.draft)
    draft_model      the model that proposes tokens for this one (RunConfig.draft_model); None: there is none
    """

    architecture: str
    hidden: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    layers: tuple[Layer, ...]
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    layer_norm: bool = False
    layer_vector: int = 0
    logit_softcap: float | None = None
    skipped: tuple[str, ...] = ()
    draft: str | None = None
    draft_model: "ModelConfig | None" = None

    def __post_init__(self):
        for name in ("hidden", "vocab_size", "context_length"):
            if (value := getattr(self, name)) <= 0:
                raise ValueError(f"model config: {name} is {value}; it must be positive")
        if not self.layers:
            raise ValueError("model config: it has no layers")

    def __hash__(self) -> int:
        """Kept: programs are looked up by it before each of their calls."""
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    def __getstate__(self) -> dict[str, Any]:
        """Hashes of strings differ between processes."""
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds that its layers have, each once."""
        return tuple(dict.fromkeys(half.kind for layer in self.layers for half in layer.halves))

    @functools.cached_property
    def _groups(self) -> dict[str, tuple[Group, ...]]:
        layers: dict[Any, list[int]] = {}
        for number, layer in enumerate(self.layers):
            for half in layer.halves:
                layers.setdefault(half, []).append(number)
        return {
            kind: tuple(Group(half, tuple(layers[half])) for half in layers if half.kind == kind)
            for kind in self.kinds
        }

    def groups(self, kind: str) -> tuple[Group, ...]:
        """The groups of a kind, in the order of their first layers; none if no layer has it."""
        return self._groups.get(kind, ())

    def layers_with(self, kind: str) -> tuple[int, ...]:
        """The layers that have a kind, in order."""
        return tuple(sorted(layer for group in self.groups(kind) for layer in group.layers))

    def position(self, layer: int, half: Any) -> Position:
        """Where a half of this layer lies."""
        groups = self.groups(half.kind)
        group = next(i for i, one in enumerate(groups) if one.settings == half)
        return Position(group, groups[group].layers.index(layer))

    @functools.cached_property
    def runs(self) -> tuple[Run, ...]:
        """All layers, as runs of layers that repeat, with as few layers in their first turns as there can be:
        prefill loops over turns, so that no others are traced and compiled. One run with a period of 1 where
        all layers are alike."""
        number = {layer: i for i, layer in enumerate(self.layers)}
        layers = [number[layer] for layer in self.layers]
        count = len(layers)
        best: list[tuple[Run, ...]] = [()] * (count + 1)  # runs of the layers from the i-th on
        traced = [0] * (count + 1)
        for start in reversed(range(count)):
            choices = []
            for period in range(1, count - start + 1):
                first, stop = layers[start : start + period], start
                while layers[stop : stop + period] == first:
                    stop += period
                    choices.append((period + traced[stop], 1 + len(best[stop]), -stop, period))
            traced[start], _, before, period = min(choices)  # of equals the longest first
            best[start] = Run(start, period, (-before - start) // period), *best[-before]
        return best[0]

    def for_device(self, parts: int) -> "ModelConfig":
        """The config of each of `parts` devices that share the weights."""
        layers = tuple(layer.changed(lambda half: half.for_device(parts)) for layer in self.layers)
        return dataclasses.replace(self, layers=layers)

    def with_mixers(self, mixers: Iterable[Any]) -> "ModelConfig":
        """The config with other mixers, one for each layer."""
        each = zip(self.layers, mixers, strict=True)
        return dataclasses.replace(
            self, layers=tuple(dataclasses.replace(layer, mixer=mixer) for layer, mixer in each)
        )

    @property
    def rope_pairs(self) -> int:
        """Pairs of the first rope that a GGUF file's divisors or factors are meant for."""
        ropes = (group.settings.rope for group in self.attention_groups)
        return next((rope.pairs for rope in ropes if rope is not None and rope.divided), 0)

    @property
    def layer_vectors(self) -> int:
        """Width of the vectors that a token has for all layers together."""
        return self.num_layers * self.layer_vector

    @property
    def draft_inputs(self) -> int:
        """Inputs of the draft layer's first matrix: a token's embedding and a hidden vector."""
        return 2 * self.hidden

    @property
    def attention_groups(self) -> tuple[Group, ...]:
        """The groups of layers that store keys in pages."""
        return tuple(group for kind in ATTENTION for group in self.groups(kind))

    @property
    def attention(self) -> Any:
        """Settings of the first layer with attention (network/kinds: attention, latent_attention)."""
        return self.attention_groups[0].settings

    @property
    def delta_net(self) -> Any:
        """Settings of the first layer with a gated delta net; None: there is none."""
        return self._first("delta_net")

    @property
    def mlp(self) -> Any:
        """Settings of the first layer with a gated feed-forward; None: there is none."""
        return self._first("mlp")

    @property
    def experts(self) -> Any:
        """Settings of the first layer with experts; None: there is none."""
        return self._first("experts")

    def _first(self, kind: str) -> Any:
        groups = self.groups(kind)
        return groups[0].settings if groups else None


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """How this process runs the model. Values of named settings: choices.py.

    impl         "auto": what pallas_kernels/selection.py finds best for each matrix; "reference": jnp on any
                 device; "pallas": Pallas kernels, and an error where a decode step has none
    schedule     how a decode step's kernels are launched. "one_launch": all layers in one kernel;
                 "layer_products": two launches per layer, one for attention and one for all products up to
                 the next attention; "int_launches": five launches per layer, for batches of 5 to 8;
                 "layer_gemms": eight launches per layer, for larger batches; "launches": one launch per
                 operation. "auto": the schedule with the fewest launches that supports the batch
                 size. A named schedule that this model or device cannot run is an error; batch sizes that it
                 is not for use "launches"
    weights      "packed": blocks stay as they are and are decoded where they are used; "decoded": float32,
                 decoded once at load; "auto": packed where kernels read them; on a CPU without a kernel for
                 each matrix decoded, where free memory has room for it (memory.explain_weights)
    activation_bits  8 or 16, to which kernels may round activations, per group of 16 to 128; 16 is nearly
                 exact. The reference rounds nothing. On a GPU, what down reads of weights in Q1_0 always has
                 16 in products of up to 8 rows (docs/accuracy.md)
    all_reduce   how devices that share weights sum in a decode step: "mailbox", by writing into each
                 other's memory (pallas_kernels/all_reduce.py), or "psum", which is NCCL's on GPUs;
                 "auto": by mailbox where all devices reach each other's memory
    cache_dtype  of keys and values; None: float32 on CPU, float16 elsewhere. "int8": a byte and a scale for
                 each token and head, half of float16's bytes, without derivatives
    state_dtype  of the states of gated delta nets. "float16": half the bytes that a step reads and writes of
                 each sequence, and half the memory; states are rounded as they are stored, in decoding after
                 every token (docs/accuracy.md)
    page_size    tokens in a page of the cache
    context      most tokens of a sequence, prompt and answer together; 0: the model's own, at most 4096
    batch_size   most sequences generated at once, on each device that has rows of its own; further prompts
                 wait until a sequence ends. 0: up to 64, on a CPU up to 32, as many as half of the memory
                 holds that weights leave free
    draft        whether the draft layer (MTP) that the file has is loaded, for speculate="mtp"; else it is
                 left aside
    draft_model  a smaller model with the same vocabulary, as `load` takes it, which proposes tokens that this
                 one checks (decoding/proposers/draft_model.py); None: there is none. It runs on one device,
                 with this context, page_size, cache_dtype and state_dtype
    Raises ValueError for a value that a setting does not have; it lists those that it has.
    """

    impl: choices.Impl = "auto"
    schedule: choices.Schedule = "auto"
    weights: choices.WeightStorage = "auto"
    activation_bits: choices.ActivationBits = 8
    all_reduce: choices.AllReduce = "auto"
    cache_dtype: choices.CacheDtype | None = None
    state_dtype: choices.StateDtype = "float32"
    page_size: int = 64
    context: int = 0
    batch_size: int = 0
    draft: bool = False
    draft_model: str | None = None

    def __post_init__(self):
        for name, values in {
            "impl": get_args(choices.Impl),
            "schedule": get_args(choices.Schedule),
            "weights": get_args(choices.WeightStorage),
            "activation_bits": get_args(choices.ActivationBits),
            "all_reduce": get_args(choices.AllReduce),
            "cache_dtype": (*get_args(choices.CacheDtype), None),
            "state_dtype": get_args(choices.StateDtype),
        }.items():
            arguments.set_field(self, name, arguments.one_of, values)
        arguments.set_field(self, "draft", arguments.flag)
        if self.draft_model is not None:
            object.__setattr__(self, "draft_model", _source("RunConfig: draft_model", self.draft_model))
            if self.draft:
                raise ValueError("RunConfig: draft and draft_model are two proposers; leave one of them out")
        arguments.set_field(self, "page_size", arguments.whole, 1, 2**20)
        arguments.set_field(self, "context", arguments.whole)
        arguments.set_field(self, "batch_size", arguments.whole)


def _source(name: str, value: Any) -> str:
    """A model's path or name."""
    arguments.kind(name, value, (str, os.PathLike), "a path, or a name such as 'user/repo:Q8_0'")
    return os.fspath(value)
