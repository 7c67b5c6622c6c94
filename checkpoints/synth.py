"""Models of seeded random weights: "synth:<model>:<format>[:seed]".

They have the shapes, metadata and tensor list of real models, so that speed can be measured and code tested
without a file. Tensors are only descriptions: their blocks are drawn on the device that runs them.
"""

import dataclasses
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .checkpoint import Checkpoint, CheckpointError, RandomTensor
from .geometry import GEOMETRY, tensor_nbytes


@dataclasses.dataclass(frozen=True)
class _Delta:
    """A gated delta net, in all layers except every fourth."""

    k_heads: int
    v_heads: int
    head_dim: int
    rotated: int  # values of an attention head that rope rotates
    conv: int = 4
    interval: int = 4


@dataclasses.dataclass(frozen=True)
class _Latent:
    """Latent attention: widths of the vectors that queries, and keys and values, are made of; numbers of a
    head's query that do not turn, and that do, and of its value. A q_rank of 0: queries are made of the
    input."""

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclasses.dataclass(frozen=True)
class _Experts:
    """Experts in place of the feed-forward, in all layers after the first `dense`.

    shared       width of a shared expert; 0: there is none
    gated        whether a sigmoid weighs the shared expert
    choice_bias  whether there is a bias for the choice alone
    keys         other keys of the metadata
    """

    count: int
    used: int
    ffn: int
    shared: int = 0
    gated: bool = False
    choice_bias: bool = False
    dense: int = 0
    keys: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class _Windows:
    """Attention that sees a window of keys, in all layers but every `pattern`-th. A rope_base of 0 is the
    model's. Softcaps of scores and of logits: 0 is none."""

    size: int
    pattern: int
    rope_base: float = 0.0
    head_norms: bool = False
    softcaps: tuple[float, float] = (0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class _Model:
    architecture: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_base: float
    tied: bool
    specials: int  # id of <|endoftext|>; <|im_start|> and <|im_end|> follow
    pre_tokenizer: str = "qwen2"
    yarn: tuple[float, int] | None = None  # factor, original context
    norm_eps: float = 1e-6
    delta: _Delta | None = None
    latent: _Latent | None = None
    experts: _Experts | None = None
    windows: _Windows | None = None
    folded: int = 0  # values per Hadamard transform of the inputs (folding.py); 0: not folded
    draft: bool = False  # whether there is a draft layer (MTP) behind the others
    logit_scale: float = 0.0  # 0: none
    rotated: int = 0  # values of a head that rope rotates; 0: all
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # keys of its own

    @property
    def is_gemma(self) -> bool:
        return self.architecture.startswith("gemma")

    @property
    def is_parallel(self) -> bool:
        """Whether both halves of a layer read the same LayerNorm of its input."""
        return self.architecture in ("command-r", "cohere2")

    @property
    def has_pre_norms(self) -> bool:
        return self.architecture not in ("olmo2", "exaone4")

    @property
    def has_post_norms(self) -> bool:
        return self.is_gemma or self.architecture == "glm4" or not self.has_pre_norms

    def head_norms(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Shapes of the norms of queries and of keys: of a head, or of all together."""
        if self.architecture in ("olmo2", "minimax-m2"):
            return (self.heads * self.head_dim,), (self.kv_heads * self.head_dim,)
        return ((self.head_dim,),) * 2 if self.has_head_norms else None

    @property
    def is_gpt_oss(self) -> bool:
        """Whether there are sinks, and biases everywhere."""
        return self.architecture == "gpt-oss"

    @property
    def has_head_norms(self) -> bool:
        if self.is_gemma:
            return self.windows is not None and self.windows.head_norms
        named = ("qwen3", "qwen3moe", "exaone4", "apertus", "maple", "hunyuan-dense")
        return self.delta is not None or self.architecture in named

    @property
    def has_biases(self) -> bool:
        """Of q, k and v."""
        return self.architecture in ("qwen2", "qwen2moe", "glm4moe", "gpt-oss", "seed_oss", "glm4")

    @property
    def joins(self) -> tuple[str, ...]:
        """Which matrices are one tensor."""
        return {"phi3": ("qkv", "gate and up"), "glm4": ("gate and up",)}.get(self.architecture, ())

    def is_delta(self, layer: int) -> bool:
        return self.delta is not None and (layer + 1) % self.delta.interval != 0 and layer < self.layers


_SIGMOIDS = (
    ("expert_gating_func", 2), ("expert_shared_count", 1), ("expert_weights_norm", True),
    ("expert_weights_scale", 1.8),
)  # fmt: skip
MODELS = {
    "bonsai-8b": _Model(
        "qwen3", 36, 4096, 12288, 32, 8, 128, 151669, 65536, 1e6, False, 151643, yarn=(4.0, 16384)
    ),
    "bonsai-4b": _Model(
        "qwen3", 36, 2560, 9728, 32, 8, 128, 151669, 32768, 1e6, True, 151643, yarn=(4.0, 8192)
    ),
    "bonsai-1.7b": _Model(
        "qwen3", 28, 2048, 6144, 16, 8, 128, 151669, 32768, 1e6, True, 151643, yarn=(4.0, 8192)
    ),
    # The demo model's; widths that are no multiples of 256.
    "smollm2-135m": _Model(
        "llama", 30, 576, 1536, 9, 3, 64, 49152, 8192, 1e5, True, 1, "smollm", norm_eps=1e-5
    ),
    # Its weights are tied; Qwen's own GGUF files have the matrix twice all the same, in two formats.
    "qwen2.5-1.5b": _Model("qwen2", 28, 1536, 8960, 12, 2, 128, 151936, 32768, 1e6, False, 151643),
    "bonsai-27b": _Model(
        "qwen35", 64, 5120, 17408, 24, 4, 256, 248320, 262144, 1e7, False, 248044, "qwen35",
        delta=_Delta(16, 48, 128, 64),
    ),
    "bonsai-27b-mtp": _Model(
        "qwen35", 64, 5120, 17408, 24, 4, 256, 248320, 262144, 1e7, False, 248044, "qwen35",
        delta=_Delta(16, 48, 128, 64), draft=True,
    ),
    "bonsai-2-27b": _Model(
        "qwen35", 64, 5120, 17408, 24, 4, 256, 248320, 262144, 1e7, False, 248044, "qwen35",
        delta=_Delta(16, 48, 128, 64), folded=1024,
    ),
    "qwen3-30b-a3b": _Model(
        "qwen3moe", 48, 2048, 6144, 32, 4, 128, 151936, 40960, 1e6, False, 151643,
        experts=_Experts(128, 8, 768),
    ),
    "qwen3.6-35b-a3b": _Model(
        "qwen35moe", 40, 2048, 512, 16, 2, 256, 248320, 262144, 1e7, False, 248044, "qwen35",
        delta=_Delta(16, 32, 128, 64), experts=_Experts(256, 8, 512, 512, True),
    ),
    # Width and heads are chosen for its 20 billion parameters: no file of it was at hand.
    "maple-20b-a1b": _Model(
        "maple", 24, 2048, 512, 16, 4, 128, 151936, 32768, 1e6, False, 151643,
        windows=_Windows(512, 4, 1e4, True),
        experts=_Experts(
            256, 8, 512, keys=(("rope.dimension_count", 64), ("swiglu_clamp_exp", [7.0] * 24))
        ),
    ),
    "gemma3-12b": _Model(
        "gemma3", 48, 3840, 15360, 16, 8, 256, 262208, 131072, 1e6, True, 1,
        windows=_Windows(1024, 6, 1e4, True),
    ),
    "gpt-oss-20b": _Model(
        "gpt-oss", 24, 2880, 2880, 64, 8, 64, 201088, 131072, 1.5e5, False, 199999, "gpt-4o",
        yarn=(32.0, 4096), norm_eps=1e-5, experts=_Experts(32, 4, 2880),
        windows=_Windows(128, 2),
    ),
    "glm-4.7-flash": _Model(
        "deepseek2", 47, 2048, 10240, 20, 1, 576, 154880, 202752, 1e6, False, 154820, "glm4", norm_eps=1e-5,
        latent=_Latent(768, 512, 192, 64, 256),
        experts=_Experts(64, 4, 1536, 1536, choice_bias=True, dense=1, keys=_SIGMOIDS),
    ),
    "mistral-small-24b": _Model(
        "llama", 40, 5120, 32768, 32, 8, 128, 131072, 131072, 1e9, False, 131069, "tekken", norm_eps=1e-5
    ),
    "llama-70b": _Model(
        "llama", 80, 8192, 28672, 64, 8, 128, 128256, 8192, 5e5, False, 128000, "llama-bpe", norm_eps=1e-5
    ),
    # Small enough for any test, and awkward where real models are: grouped heads, a query width that is not
    # the hidden size (qwen3), YaRN (qwen3), biases (qwen2), tied and untied. Every block size divides every
    # row.
    "tiny-qwen3": _Model("qwen3", 3, 256, 512, 4, 2, 128, 512, 2048, 1e6, True, 306, yarn=(4.0, 512)),
    "tiny-qwen2": _Model("qwen2", 3, 256, 512, 4, 2, 64, 512, 2048, 1e6, True, 306),
    "tiny-llama": _Model(
        "llama", 3, 256, 512, 4, 2, 64, 512, 8192, 1e4, False, 306, "llama-bpe", norm_eps=1e-5
    ),
    # No gate.
    "tiny-arcee": _Model(
        "arcee", 3, 256, 512, 4, 2, 64, 512, 8192, 1e4, False, 306, "llama-bpe", norm_eps=1e-5
    ),
    # Both kinds of layer, layers behind the last period, several v heads of a k head.
    "tiny-qwen35": _Model(
        "qwen35", 4, 256, 512, 4, 2, 64, 512, 8192, 1e6, False, 306, "qwen35",
        delta=_Delta(2, 4, 64, 16, interval=3),
    ),
    "tiny-qwen35-mtp": _Model(
        "qwen35", 4, 256, 512, 4, 2, 64, 512, 8192, 1e6, False, 306, "qwen35",
        delta=_Delta(2, 4, 64, 16, interval=3), draft=True,
    ),
    # Windows of less than a page, layers after the last period, both ropes.
    "tiny-gemma3": _Model(
        "gemma3", 5, 256, 512, 4, 2, 128, 512, 2048, 1e6, True, 306, windows=_Windows(48, 3, 1e4, True)
    ),
    "tiny-gemma2": _Model(
        "gemma2", 4, 256, 512, 4, 2, 64, 512, 2048, 1e4, True, 306,
        windows=_Windows(80, 2, 1e4, False, (50.0, 30.0)),
    ),
    # Norms after both halves alone, and of all queries and keys of a token together.
    "tiny-olmo2": _Model("olmo2", 3, 256, 512, 4, 2, 64, 512, 2048, 5e5, False, 306),
    "tiny-olmo3": _Model(
        "olmo2", 5, 256, 512, 4, 2, 64, 512, 2048, 5e5, False, 306, yarn=(8.0, 256), windows=_Windows(48, 4)
    ),
    "tiny-exaone4": _Model("exaone4", 3, 256, 512, 4, 2, 64, 512, 2048, 1e6, True, 306),
    "tiny-command-r": _Model(
        "command-r", 3, 256, 512, 4, 2, 64, 512, 2048, 1e4, True, 306, norm_eps=1e-5, logit_scale=0.75
    ),
    "tiny-cohere2": _Model(
        "cohere2", 5, 256, 512, 4, 2, 64, 512, 2048, 5e4, True, 306, norm_eps=1e-5, logit_scale=0.75,
        windows=_Windows(48, 4),
    ),
    "tiny-apertus": _Model("apertus", 3, 256, 512, 4, 2, 64, 512, 2048, 1e6, False, 306, norm_eps=1e-5),
    "tiny-bitnet": _Model("bitnet", 3, 256, 512, 4, 2, 64, 512, 2048, 5e5, True, 306, norm_eps=1e-5),
    # Rows that are multiples of 32 alone, as gpt-oss has them; windows of less than a page.
    "tiny-gpt-oss": _Model(
        "gpt-oss", 4, 288, 160, 4, 2, 64, 512, 2048, 1.5e5, False, 306, "gpt-4o", yarn=(4.0, 512),
        norm_eps=1e-5, experts=_Experts(8, 3, 160), windows=_Windows(48, 2),
    ),
    # Llamas with something else. A file named phi3 would need Phi-3's special tokens in llama.cpp.
    "tiny-smollm3": _Model("smollm3", 5, 256, 512, 4, 2, 64, 512, 2048, 1e6, False, 306),
    "tiny-granite": _Model(
        "granite", 2, 256, 512, 4, 2, 64, 512, 2048, 1e6, False, 306,
        more={"embedding_scale": 3.0, "residual_scale": 0.5, "attention.scale": 0.25, "logit_scale": 1.5},
    ),
    "tiny-mistral3": _Model(
        "mistral3", 2, 256, 512, 4, 2, 64, 512, 2048, 1e6, False, 306, yarn=(16.0, 128),
        more={"attention.temperature_scale": 0.1, "rope.scaling.yarn_log_multiplier": 1.0},
    ),
    "tiny-seed-oss": _Model("seed_oss", 2, 256, 512, 4, 2, 128, 512, 2048, 1e6, False, 306),
    "tiny-glm4": _Model("glm4", 2, 256, 512, 4, 2, 64, 512, 2048, 1e4, False, 306, rotated=32),
    "tiny-phi4": _Model(
        "phi3", 2, 256, 512, 4, 2, 64, 512, 2048, 1e4, False, 306, rotated=48,
        more={"rope.scaling.original_context_length": 256, "rope.scaling.attn_factor": math.sqrt(1.375)},
    ),
    "tiny-ernie4.5": _Model("ernie4_5", 2, 256, 512, 4, 1, 64, 512, 2048, 5e5, True, 306),
    "tiny-hunyuan": _Model("hunyuan-dense", 2, 256, 512, 4, 2, 128, 512, 2048, 1e6, True, 306),
    "tiny-qwen3moe": _Model(
        "qwen3moe", 3, 256, 512, 4, 2, 64, 512, 8192, 1e6, False, 306, experts=_Experts(8, 3, 256)
    ),
    # A shared expert with a gate.
    "tiny-qwen2moe": _Model(
        "qwen2moe", 2, 256, 512, 4, 2, 64, 512, 8192, 1e6, False, 306,
        experts=_Experts(8, 3, 256, 512, True),
    ),
    "tiny-qwen35moe": _Model(
        "qwen35moe", 2, 256, 512, 4, 2, 64, 512, 8192, 1e6, False, 306, "qwen35",
        delta=_Delta(2, 4, 64, 16, interval=2), experts=_Experts(8, 3, 256, 256, True),
    ),
    # Windows with half a head's rope beside layers without one. The limit is one that activations reach.
    "tiny-maple": _Model(
        "maple", 3, 256, 512, 4, 2, 64, 512, 2048, 1e6, False, 306,
        windows=_Windows(48, 2, 1e4, True),
        experts=_Experts(8, 3, 256, keys=(("rope.dimension_count", 32), ("swiglu_clamp_exp", [0.5] * 3))),
    ),
    # A layer without experts, and in the others a bias for the choice and a shared expert.
    "tiny-ernie4_5-moe": _Model(
        "ernie4_5-moe", 2, 256, 512, 4, 2, 64, 512, 8192, 1e4, True, 306,
        experts=_Experts(
            8, 3, 256, 256, choice_bias=True, dense=1, keys=(("interleave_moe_layer_step", 1),)
        ),
    ),
    # Sigmoids, and a draft layer that is left aside.
    "tiny-glm4moe": _Model(
        "glm4moe", 2, 256, 512, 4, 2, 64, 512, 8192, 1e4, False, 306,
        experts=_Experts(
            8, 3, 256, 256, choice_bias=True, dense=1,
            keys=(
                ("expert_gating_func", 2), ("expert_shared_count", 1), ("expert_weights_norm", True),
                ("expert_weights_scale", 2.5), ("rope.dimension_count", 32),
            ),
        ),
    ),
    # A layer without experts, and one row of the cache for all heads.
    "tiny-deepseek2": _Model(
        "deepseek2", 2, 256, 512, 4, 1, 144, 512, 8192, 1e4, False, 306, latent=_Latent(256, 128, 64, 16, 64),
        experts=_Experts(8, 3, 256, 256, choice_bias=True, dense=1, keys=_SIGMOIDS),
    ),
    "tiny-minimax-m2": _Model(
        "minimax-m2", 2, 256, 256, 4, 2, 64, 512, 8192, 1e4, False, 306,
        experts=_Experts(
            8, 3, 256, choice_bias=True, keys=(("expert_gating_func", 2), ("rope.dimension_count", 32))
        ),
    ),
    # beta and alpha in one matrix.
    "tiny-qwen3next": _Model(
        "qwen3next", 2, 256, 512, 4, 2, 64, 512, 8192, 1e6, True, 306,
        delta=_Delta(2, 4, 64, 16, interval=2), experts=_Experts(8, 3, 256, 256, True),
    ),
}  # fmt: skip
_MIXES = {"q4_k_m": "q4_k", "q5_k_m": "q5_k"}
# What llama.cpp stores a matrix in whose rows no blocks of the format divide.
_FALLBACKS = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
_NOT_WEIGHTS = ("i8", "i16", "i32", "i64", "f64", "q8_1", "q8_k")

# The first merges of English; each part is a byte's symbol or the result of an earlier merge.
_MERGES = """\
Ġ t|Ġ a|i n|h e|r e|o n|e r|Ġt he|a t|o r|e n|Ġ w|i s|Ġ s|Ġ o|a n|Ġ c|i t|e s|Ġ b|e d|Ġ f|in g|Ġ p|
o u|Ġa n|a l|a r|Ġt o|Ġ m|Ġo f|Ġ in|Ġ d|Ġ h|Ġan d|a s|l e|i c|o m|i on|Ġt h|Ġ Ġ|ĠĠ ĠĠ|l l|en t|Ġ n|
Ġ l|s t|Ġ re|v e"""

_CHAT_TEMPLATE = """{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""


def open_synth(source: str) -> Checkpoint:
    """The checkpoint that "synth:<model>:<format>[:seed]" names. Without a seed it is 0.

    The format applies to every matrix (norms and biases are f32); q4_k_m and q5_k_m are llama.cpp's mixes.
    Raises CheckpointError, with the known names, for an unknown model or format.
    """
    parts = source.lower().split(":")
    if not 3 <= len(parts) <= 4 or parts[0] != "synth":
        raise CheckpointError(
            f"{source}: not a synthetic model; write synth:<model>:<format>[:seed], as synth:bonsai-8b:q1_0"
        )
    _, name, format, *seeds = parts
    if name not in MODELS:
        raise CheckpointError(f"{source}: model is {name!r}; there are {', '.join(MODELS)}")
    known = [*_MIXES, *(format for format in GEOMETRY if format not in _NOT_WEIGHTS)]
    if format not in known:
        known = f"{', '.join(known)} (checkpoints/geometry.py lists them)"
        raise CheckpointError(f"{source}: format is {format!r}; there are {known}")
    seed = seeds[0] if seeds else "0"
    if not (seed.isascii() and seed.isdecimal() and len(seed) <= 10 and int(seed) < 1 << 32):
        raise CheckpointError(f"{source}: seed is {seed!r}; a number from 0 to {(1 << 32) - 1} is expected")
    model = MODELS[name]
    tensors = {
        tensor_name: _describe(source, tensor_name, tensor_format, shape, int(seed), mean, std)
        for tensor_name, tensor_format, shape, mean, std in _tensors(model, format)
    }
    return Checkpoint(source=source, naming="gguf", metadata=_metadata(name, model), tensors=tensors)


def _describe(source, name, format, shape, seed, mean, std) -> RandomTensor:
    if shape[-1] % GEOMETRY[format].weights:
        block = GEOMETRY[format].weights
        raise CheckpointError(f"{source}: shape of {name} is {shape}; {format} rows are multiples of {block}")
    # crc32, because Python's hash of a str changes from process to process.
    seed = zlib.crc32(f"{seed}:{name}".encode())
    return RandomTensor(name, format, shape, seed, mean, std, tensor_nbytes(format, shape))


def _tensors(model: _Model, format: str) -> Iterator[tuple[str, str, tuple[int, ...], float, float]]:
    """Name, format, shape, mean and standard deviation of every tensor.

    Linears keep their input's variance. Those that write to the residual stream are smaller, so that the sum
    over all layers stays near 1. The output matrix gives logits a deviation of 2.5, as a trained model's are:
    under a flat distribution an error in the logits would not show. Where embeddings are scaled up (Gemma),
    the last norm makes that deviation: a token would otherwise predict nothing but itself.
    """
    base = _MIXES.get(format, format)
    hidden = model.hidden
    q_width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    residual = 1 / math.sqrt(2 * model.layers)

    def linear(name: str, rows: int, columns: int, format: str = base, gain: float = 1.0):
        return name, format, (rows, columns), 0.0, gain / math.sqrt(columns)

    def norm(name: str, width: int):
        return name, "f32", (width,), 1.0, 0.1

    def feed_forward(i: int, down_format: str):
        named_after = model.delta is not None or model.architecture in ("glm4moe", "gpt-oss", "seed_oss")
        if model.has_pre_norms and not model.is_parallel:
            yield norm(f"blk.{i}.{'post_attention' if named_after else 'ffn'}_norm.weight", hidden)
        if (e := model.experts) is not None and i >= e.dense:
            # Probabilities as a trained router's: the likeliest of 8 has about a third.
            yield f"blk.{i}.ffn_gate_inp.weight", "f32", (e.count, hidden), 0.0, 1 / math.sqrt(hidden)
            for name, rows, columns, format, gain in (
                ("gate", e.ffn, hidden, base, 1.0),
                ("up", e.ffn, hidden, base, 1.0),
                ("down", hidden, e.ffn, down_format, residual),
            ):
                _, format, shape, mean, std = linear("", rows, columns, format, gain)
                yield f"blk.{i}.ffn_{name}_exps.weight", format, (e.count, *shape), mean, std
                if model.is_gpt_oss:
                    yield f"blk.{i}.ffn_{name}_exps.bias", "f32", (e.count, rows), 0.0, 0.1
            if model.is_gpt_oss:
                yield f"blk.{i}.ffn_gate_inp.bias", "f32", (e.count,), 0.0, 0.1
            if e.choice_bias:
                yield f"blk.{i}.exp_probs_b.bias", "f32", (e.count,), 0.0, 0.1
            if e.shared:
                yield linear(f"blk.{i}.ffn_gate_shexp.weight", e.shared, hidden)
                yield linear(f"blk.{i}.ffn_up_shexp.weight", e.shared, hidden)
                yield linear(f"blk.{i}.ffn_down_shexp.weight", hidden, e.shared, down_format, residual)
            if e.gated:
                yield f"blk.{i}.ffn_gate_inp_shexp.weight", "f32", (hidden,), 0.0, 1 / math.sqrt(hidden)
            return
        joined = "gate and up" in model.joins
        if model.architecture not in ("arcee", "apertus") and not joined:
            yield linear(f"blk.{i}.ffn_gate.weight", model.ffn, hidden)
        yield linear(f"blk.{i}.ffn_up.weight", (1 + joined) * model.ffn, hidden)
        yield linear(f"blk.{i}.ffn_down.weight", hidden, model.ffn, down_format, residual)
        if model.architecture == "bitnet":
            yield norm(f"blk.{i}.ffn_sub_norm.weight", model.ffn)
        if model.has_post_norms:
            yield norm(f"blk.{i}.post_ffw_norm.weight", hidden)

    head_format = "q6_k" if format in _MIXES else base
    if model.tied:
        yield linear("token_embd.weight", model.vocab, hidden, head_format, 0.5 if model.is_gemma else 2.5)
    else:
        yield "token_embd.weight", base, (model.vocab, hidden), 0.0, 1.0
    for i in range(model.layers + model.draft):
        v_format = down_format = base
        if format in _MIXES:
            v_format = down_format = "q6_k" if _more_bits(i, model.layers) else base
            if model.layers == 80 and v_format == "q4_k":
                v_format = (
                    "q5_k"  # llama.cpp's rule for 70B: eight heads share attn_v, so it is small and worth it
                )
        if model.has_pre_norms:
            yield norm(f"blk.{i}.attn_norm.weight", hidden)
        if model.is_delta(i):
            yield from _delta_net(model, f"blk.{i}", linear, norm, base, residual)
            yield from feed_forward(i, down_format)
            continue
        if model.latent is not None:
            yield from _latent_attention(model, f"blk.{i}", linear, norm, base, residual)
            yield from feed_forward(i, down_format)
            continue
        if "qkv" in model.joins:
            yield linear(f"blk.{i}.attn_qkv.weight", q_width + 2 * kv_width, hidden)
        else:
            yield linear(f"blk.{i}.attn_q.weight", q_width * (2 if model.delta else 1), hidden)
            yield linear(f"blk.{i}.attn_k.weight", kv_width, hidden)
            yield linear(f"blk.{i}.attn_v.weight", kv_width, hidden, v_format)
        if model.is_gpt_oss:
            yield f"blk.{i}.attn_sinks.weight", "f32", (model.heads,), 0.0, 1.0
            yield f"blk.{i}.attn_output.bias", "f32", (hidden,), 0.0, 0.1
        if model.has_biases:
            for name, width in ("attn_q", q_width), ("attn_k", kv_width), ("attn_v", kv_width):
                yield f"blk.{i}.{name}.bias", "f32", (width,), 0.0, 0.1
        for name, shape in zip(("attn_q_norm", "attn_k_norm"), model.head_norms() or (), strict=False):
            yield f"blk.{i}.{name}.weight", "f32", shape, 1.0, 0.1
        if model.architecture == "bitnet":
            yield norm(f"blk.{i}.attn_sub_norm.weight", q_width)
        yield linear(f"blk.{i}.attn_output.weight", hidden, q_width, gain=residual)
        if model.has_post_norms:
            yield norm(f"blk.{i}.post_attention_norm.weight", hidden)
        yield from feed_forward(i, down_format)
    if model.draft:
        block = f"blk.{model.layers}.nextn"
        yield linear(f"{block}.eh_proj.weight", hidden, 2 * hidden)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            yield norm(f"{block}.{name}.weight", hidden)
    yield "output_norm.weight", "f32", (hidden,), 5.0 if model.is_gemma else 1.0, 0.1
    if not model.tied:
        yield linear("output.weight", model.vocab, hidden, head_format, 2.5)
    if model.architecture == "phi3":
        for length, mean in ("short", 1.5), ("long", 4.0):
            yield f"rope_factors_{length}.weight", "f32", (model.rotated // 2,), mean, 0.1


def _latent_attention(model: _Model, block: str, linear, norm, base: str, residual: float) -> Iterator:
    """Tensors of latent attention."""
    a = model.latent
    assert a is not None
    if a.q_rank:
        yield linear(f"{block}.attn_q_a.weight", a.q_rank, model.hidden)
        yield norm(f"{block}.attn_q_a_norm.weight", a.q_rank)
    queries = ("attn_q_b", a.q_rank) if a.q_rank else ("attn_q", model.hidden)
    yield linear(f"{block}.{queries[0]}.weight", model.heads * (a.nope + a.rope), queries[1])
    yield linear(f"{block}.attn_kv_a_mqa.weight", a.kv_rank + a.rope, model.hidden)
    yield norm(f"{block}.attn_kv_a_norm.weight", a.kv_rank)
    for name, rows, columns in ("attn_k_b", a.kv_rank, a.nope), ("attn_v_b", a.value, a.kv_rank):
        format = base if columns % GEOMETRY[base].weights == 0 else _FALLBACKS.get(base, base)
        # Keys are made of c, of which each head's query is multiplied with the other side.
        std = 1 / math.sqrt(a.kv_rank)
        yield f"{block}.{name}.weight", format, (model.heads, rows, columns), 0.0, std
    yield linear(f"{block}.attn_output.weight", model.hidden, model.heads * a.value, gain=residual)


def _delta_net(model: _Model, block: str, linear, norm, base: str, residual: float) -> Iterator:
    """Tensors of a gated delta net. States decay by about a tenth per token. Files of 1 and 2 bits per weight
    store the gates' matrices in bf16."""
    d = model.delta
    assert d is not None
    inner, channels = d.v_heads * d.head_dim, (2 * d.k_heads + d.v_heads) * d.head_dim
    gate_format = "bf16" if 8 * GEOMETRY[base].bytes < 3 * GEOMETRY[base].weights else base
    yield linear(f"{block}.attn_qkv.weight", channels, model.hidden)
    yield linear(f"{block}.attn_gate.weight", inner, model.hidden)
    if model.architecture == "qwen3next":
        yield linear(f"{block}.ssm_ba.weight", 2 * d.v_heads, model.hidden, gate_format)
    else:
        yield linear(f"{block}.ssm_alpha.weight", d.v_heads, model.hidden, gate_format)
        yield linear(f"{block}.ssm_beta.weight", d.v_heads, model.hidden, gate_format)
    yield f"{block}.ssm_conv1d.weight", "f32", (channels, d.conv), 0.0, 1 / math.sqrt(d.conv)
    yield f"{block}.ssm_dt.bias", "f32", (d.v_heads,), 0.0, 0.5
    yield f"{block}.ssm_a", "f32", (d.v_heads,), -0.15, 0.03
    yield norm(f"{block}.ssm_norm.weight", d.head_dim)
    yield linear(f"{block}.ssm_out.weight", model.hidden, inner, gain=residual)


def _more_bits(i: int, layers: int) -> bool:
    """llama.cpp's `use_more_bits`: the first and last eighth of the layers, and every third between."""
    return i < layers // 8 or i >= 7 * layers // 8 or (i - layers // 8) % 3 == 2


def _metadata(name: str, model: _Model) -> dict[str, Any]:
    """The metadata of a GGUF file of this model, under llama.cpp's keys."""
    hyperparameters: dict[str, Any] = {
        "block_count": model.layers + model.draft,
        "context_length": model.context,
        "embedding_length": model.hidden,
        "feed_forward_length": model.ffn,
        "attention.head_count": model.heads,
        "attention.head_count_kv": model.kv_heads,
        "attention.key_length": model.head_dim,
        "attention.value_length": model.head_dim,
        f"attention.layer_norm{'' if model.is_parallel else '_rms'}_epsilon": float(
            np.float32(model.norm_eps)
        ),  # as a file would hold it
        "rope.freq_base": model.rope_base,
    }
    if model.architecture == "llama":
        hyperparameters |= {"rope.dimension_count": model.head_dim, "vocab_size": model.vocab}
    if e := model.experts:
        hyperparameters |= {
            "expert_count": e.count,
            "expert_used_count": e.used,
            "expert_feed_forward_length": e.ffn,
            **({"expert_shared_feed_forward_length": e.shared} if e.shared else {}),
            **({"leading_dense_block_count": e.dense} if e.dense else {}),
            **dict(e.keys),
        }
    if a := model.latent:
        hyperparameters |= {
            "attention.kv_lora_rank": a.kv_rank,
            "attention.value_length": a.kv_rank,
            "attention.key_length_mla": a.nope + a.rope,
            "attention.value_length_mla": a.value,
            "rope.dimension_count": a.rope,
            "vocab_size": model.vocab,
            **({"attention.q_lora_rank": a.q_rank} if a.q_rank else {}),
        }
    if w := model.windows:
        hyperparameters |= {
            "attention.sliding_window": w.size,
            "attention.sliding_window_pattern": [(i + 1) % w.pattern != 0 for i in range(model.layers)]
            if model.architecture == "maple"
            else w.pattern,
            **({"rope.freq_base_swa": w.rope_base} if w.rope_base else {}),
        }
        keys = ("attn_logit_softcapping", "final_logit_softcapping")
        hyperparameters |= {key: cap for key, cap in zip(keys, w.softcaps, strict=True) if cap}
    if model.logit_scale:
        hyperparameters["logit_scale"] = model.logit_scale
    if d := model.delta:
        thirds = [-(-d.rotated // 2 // 3), -(-d.rotated // 2 // 3)]
        hyperparameters |= {
            "full_attention_interval": d.interval,
            "rope.dimension_count": d.rotated,
            "ssm.conv_kernel": d.conv,
            "ssm.state_size": d.head_dim,
            "ssm.group_count": d.k_heads,
            "ssm.time_step_rank": d.v_heads,
            "ssm.inner_size": d.v_heads * d.head_dim,
        }
        if model.architecture != "qwen3next":  # whose rope has no sections
            sections = [*thirds, d.rotated // 2 - sum(thirds), 0]
            hyperparameters["rope.dimension_sections"] = np.array(sections, np.int32)
    if model.yarn:
        factor, original = model.yarn
        hyperparameters |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": factor,
            "rope.scaling.original_context_length": original,
        }
    if model.rotated:
        hyperparameters["rope.dimension_count"] = model.rotated
    if model.draft:
        hyperparameters["nextn_predict_layers"] = 1
    hyperparameters |= model.more
    return {
        "general.architecture": model.architecture,
        "general.type": "model",
        "general.name": f"synth {name}",
        **{f"{model.architecture}.{key}": value for key, value in hyperparameters.items()},
        **(_xielu(model.layers) if model.architecture == "apertus" else {}),
        **(_folding(model) if model.folded else {}),
        **_tokenizer(model),
    }


def _xielu(layers: int) -> dict[str, Any]:
    """Parameters of Apertus' activation, by layer, before the softplus of both alphas."""
    rng = np.random.default_rng(0)
    alphas = {f"xielu.alpha_{sign}": rng.normal(0.5, 0.3, layers).astype(np.float32) for sign in "np"}
    rest = {"xielu.beta": 0.5, "xielu.eps": -1e-6}
    return alphas | {key: np.full(layers, value, np.float32) for key, value in rest.items()}


def _folding(model: _Model) -> dict[str, Any]:
    """All linears are folded, except for a delta net's gates, and so is the embedding. Random weights stay
    random when they are rotated."""
    names = [name for name, _, shape, _, _ in _tensors(model, "f32") if len(shape) == 2]
    plain = ("ssm_alpha.weight", "ssm_beta.weight", "ssm_conv1d.weight", "token_embd.weight")
    d = model.delta
    inner = {d.v_heads * d.head_dim} if d else {model.heads * model.head_dim}
    widths = sorted({model.hidden, model.ffn} | inner)
    return {
        "prism.hadamard.version": 1,
        "prism.hadamard.transform": "normalized-sylvester-walsh-hadamard",
        "prism.hadamard.axis": "input-last-dimension",
        "prism.hadamard.block_size": model.folded,
        "prism.hadamard.sign_mode": "explicit",
        "prism.hadamard.sign_widths": np.array(widths, np.int32),
        "prism.hadamard.sign_values": np.random.default_rng(0).choice([-1, 1], sum(widths)).astype(np.int32),
        "prism.hadamard.weight_names": [name for name in names if not name.endswith(plain)],
        "prism.hadamard.inverse_weight_names": ["token_embd.weight"],
        "prism.hadamard.gdn_v_grouped": d is not None,
    }


def _tokenizer(model: _Model) -> dict[str, Any]:
    """A small, valid byte-level BPE: 256 bytes, 50 merges, ChatML's special tokens. Other ids are words that
    no merge makes, so that what a random model says has text, and is streamed as other answers are."""
    normal, control = 1, 3  # llama.cpp's token types
    merges = _MERGES.replace("\n", "").split("|")
    tokens = [*_byte_symbols(), *(merge.replace(" ", "") for merge in merges)]
    types = np.full(model.vocab, normal, np.int32)
    tokens += [f"Ġword{i}" for i in range(len(tokens), model.vocab)]
    end_of_text, im_end = model.specials, model.specials + 2
    tokens[end_of_text : im_end + 1] = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
    types[end_of_text : im_end + 1] = control
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": model.pre_tokenizer,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": end_of_text,
        "tokenizer.ggml.eos_token_id": im_end,
        "tokenizer.ggml.padding_token_id": end_of_text,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": _CHAT_TEMPLATE,
    }


def _byte_symbols() -> list[str]:
    """GPT-2's symbols of the 256 bytes, in its order: printable ones themselves, others from U+0100."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
