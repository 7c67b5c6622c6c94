"""Which format each tensor of a file gets: llama.cpp's mixes (its llama-quant.cpp), and ours for formats that
it does not write.

A mix has a format for most matrices, and a better one for those that cost most accuracy: the output matrix,
values, the second matrix of feed-forwards in some layers. Norms, biases, routers and convolutions stay as
they are.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from checkpoints.checkpoint import Stored
from checkpoints.geometry import GEOMETRY


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A way to quantize a file.

    name       as users write it
    base       the format of most matrices
    file_type  `general.file_type` of such files; None: llama.cpp has no number for it
    """

    name: str
    base: str
    file_type: int | None


_SAME_NAME = {
    **{
        "f32": 0,
        "f16": 1,
        "q4_0": 2,
        "q4_1": 3,
        "q8_0": 7,
        "q5_0": 8,
        "q5_1": 9,
        "q6_k": 18,
        "iq4_nl": 25,
        "iq4_xs": 30,
    },
    **{"iq1_s": 24, "iq1_m": 31, "iq2_xxs": 19, "iq2_xs": 20, "iq3_xxs": 23, "iq3_s": 26},
    **{"bf16": 32, "tq1_0": 36, "tq2_0": 37, "nvfp4": 39, "q1_0": 40, "pq2_0": None, "ptq1_0": None},
}
_MIXES = {
    **{
        "q2_k": ("q2_k", 10),
        "q2_k_s": ("q2_k", 21),
        "q3_k_s": ("q3_k", 11),
        "q3_k_m": ("q3_k", 12),
        "q3_k_l": ("q3_k", 13),
    },
    **{"q4_k_s": ("q4_k", 14), "q4_k_m": ("q4_k", 15), "q5_k_s": ("q5_k", 16), "q5_k_m": ("q5_k", 17)},
    **{"iq2_s": ("iq2_xs", 28), "iq2_m": ("iq2_s", 29), "iq3_xs": ("iq3_s", 22), "iq3_m": ("iq3_s", 27)},
    **{"mxfp4": ("mxfp4", 38), "q2_0": ("q2_0_g64", 41)},
}
RECIPES = {name: Recipe(name, name, file_type) for name, file_type in _SAME_NAME.items()} | {
    name: Recipe(name, *rest) for name, rest in _MIXES.items()
}
ALIASES = {
    "q3_k": "q3_k_m",
    "q4_k": "q4_k_m",
    "q5_k": "q5_k_m",
    "mxfp4_moe": "mxfp4",
}  # as llama-quantize has them
FLOATS = ("f32", "f16", "bf16")

# Where a row is no multiple of a format's block; and where not even of 32, f16.
_CODEBOOKS = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")
_FALLBACKS = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0", "iq4_xs": "iq4_nl"}
_FALLBACKS |= dict.fromkeys(_CODEBOOKS, "iq4_nl")
_OTHERS_FALL_BACK_TO = "q4_0"
# Matrices that stay: small, or read in a way that no packed format serves.
_KEPT = re.compile(
    r"_norm\.weight|ffn_gate_inp\.weight|altup|laurel|per_layer_model_proj|ssm_conv1d|shortconv\.conv\.weight"
    r"|indexer\.[kq]_proj\.weight|position_embd|token_types|attn_rel_b\.weight|ffn_gate_tid2eid\.weight"
)
_VALUES = ("attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight")
_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
_SMALLEST = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq2_m")  # mixes of up to 2.7 bits a weight
_TERNARY = ("tq1_0", "tq2_0", "q2_0_g64", "pq2_0", "ptq1_0")


def recipe(name: str) -> Recipe:
    """The recipe of this name, in any case. Raises ValueError with the names that there are."""
    key = name.lower().replace("-", "_")
    key = ALIASES.get(key, key)
    if key not in RECIPES:
        raise ValueError(f"format {name!r} is not known; known are {', '.join(sorted(RECIPES))}")
    return RECIPES[key]


def formats_of(
    tensors: Sequence[Stored],
    metadata: Mapping[str, Any],
    recipe: Recipe,
    *,
    pure: bool = False,
    chosen: Iterable[tuple[str, str]] = (),
    weighted: bool = False,
) -> dict[str, str]:
    """The format that each tensor of a GGUF file gets, by name.

    pure    every matrix gets the recipe's base format
    chosen  (regular expression, format) of tensors that get another one; the first that is found in the name
            counts
    weighted  whether there is an importance matrix
    Raises ValueError for a format or an expression that is not valid.
    """
    rules = [_rule(*pair) for pair in chosen]
    mix = _Mix(tensors, metadata, recipe, weighted)
    out = {}
    for tensor in sorted(tensors, key=lambda t: (_layer(t.name), t.name)):
        if not is_matrix(tensor):
            out[tensor.name] = tensor.format
            continue
        choice = next((format for pattern, format in rules if pattern.search(tensor.name)), None)
        if choice is None:
            choice = recipe.base if pure else mix.format_of(tensor)
        out[tensor.name] = _that_fits(choice, tensor.shape[-1])
    return {tensor.name: out[tensor.name] for tensor in tensors}


def is_matrix(tensor: Stored) -> bool:
    """Whether this tensor is quantized at all."""
    return len(tensor.shape) > 1 and tensor.name.endswith("weight") and not _KEPT.search(tensor.name)


def needs_importance(tensor: str, format: str) -> bool:
    """Whether this tensor is too poor in this format without an importance matrix, by llama.cpp's rule."""
    return format in _CODEBOOKS[:-1] and tensor not in ("output.weight", *_EMBEDDINGS)


def _rule(pattern: str, format: str) -> tuple[re.Pattern[str], str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
    bases = {r.base for r in RECIPES.values()}  # iq2_s is the name of a format and of a mix with another one
    key = format.lower().replace("-", "_")
    return compiled, key if key in bases else recipe(format).base


def _that_fits(format: str, columns: int) -> str:
    """This format, or one with smaller blocks for rows that are no multiple of its blocks."""
    if columns % GEOMETRY[format].weights == 0:
        return format
    other = _FALLBACKS.get(format, _OTHERS_FALL_BACK_TO)
    return other if columns % GEOMETRY[other].weights == 0 else "f16"


def _layer(name: str) -> int:
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else -1


class _Mix:
    """llama.cpp's choice for each matrix, asked in the order of layers."""

    def __init__(
        self, tensors: Sequence[Stored], metadata: Mapping[str, Any], recipe: Recipe, weighted: bool
    ):
        names = [t.name for t in tensors]
        key = f"{metadata.get('general.architecture')}."

        def number(name: str, default: int) -> int:
            value = metadata.get(key + name, default)
            return int(max(value)) if isinstance(value, Sequence) or getattr(value, "ndim", 0) else int(value)

        self.recipe, self.base, self.weighted = recipe, recipe.base, weighted
        self.tied = "output.weight" not in names
        self.layers = number("block_count", 1)
        self.experts = number("expert_count", 0)
        self.shared_heads = number("attention.head_count", 1) // max(1, number("attention.head_count_kv", 1))
        self.values = sum(name.endswith(_VALUES) for name in names)
        self.values_seen = 0

    def format_of(self, tensor: Stored) -> str:
        name = tensor.name
        if self.base in FLOATS:
            return self.base
        if name == "output.weight" or (self.tied and name in _EMBEDDINGS):
            return self._output(tensor.shape[-1])
        if self.recipe.name == "mxfp4":
            return "mxfp4" if len(tensor.shape) > 2 else "q8_0"
        if name in _EMBEDDINGS:
            return self._embeddings()
        if self.recipe.name in _SMALLEST:
            return self._smallest(name)
        if name.endswith(_VALUES):
            self.values_seen += 1
            return self._values(self.values_seen - 1)
        if name.endswith("attn_k.weight") and self.experts == 8:
            return "q8_0"
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            return {"iq3_xxs": "iq2_s", "iq3_xs": "iq3_xxs"}.get(self.recipe.name, self.base)
        if "ffn_down" in name:
            return self._down(_layer(name))
        if name.endswith("attn_output.weight"):
            return self._attention_output()
        if self.recipe.name == "iq3_xs" and ("ffn_gate" in name or "ffn_up" in name):
            middle = self.layers // 8 <= _layer(name) < 7 * self.layers // 8
            return "iq3_xxs" if middle else self.base
        return self.base

    def _output(self, columns: int) -> str:
        if self.recipe.name == "mxfp4" or self.base == "q8_0" or columns % GEOMETRY[self.base].weights:
            return "q8_0"
        return "q5_k" if self.recipe.name in ("iq3_xxs", *_SMALLEST) else "q6_k"

    def _embeddings(self) -> str:
        if self.recipe.name in ("iq2_s", "iq2_m", "iq3_xxs"):
            return "iq3_s"
        if self.recipe.name in _SMALLEST:
            return "q2_k"
        return "q4_k" if self.base in _TERNARY else self.base

    def _smallest(self, name: str) -> str:
        """The mixes of up to 2.7 bits a weight."""
        better = "iq3_s" if self.recipe.name in ("iq2_s", "iq2_m") else "q2_k"
        if name.endswith(_VALUES):
            return "q4_k" if self.shared_heads >= 4 or self.experts >= 4 else better
        if name.endswith("attn_k.weight") and self.experts == 8:
            return "q4_k"
        if "ffn_down" in name and _layer(name) < self.layers // 8:
            return better
        if name.endswith("attn_output.weight"):
            if self.experts == 8:
                return "q5_k"
            fewest = self.recipe.name in ("iq1_s", "iq1_m")
            return "iq2_xxs" if fewest else "iq3_s" if better == "iq3_s" else self.base
        return self.base

    def _values(self, layer: int) -> str:
        few = self.shared_heads >= 4  # so many heads share one of keys and values that its matrix is small
        format = {
            "q2_k": "q4_k" if few else "q3_k",
            "q2_k_s": "q4_k" if few else self.base,
            "q3_k_m": "q5_k" if layer < 2 else "q4_k",
            "q3_k_l": "q5_k",
            "q4_k_s": "q5_k" if layer < 4 else self.base,
            "q4_k_m": "q6_k" if _more_bits(layer, self.values) else self.base,
            "q5_k_m": "q6_k" if _more_bits(layer, self.values) else self.base,
            "iq4_nl": "q5_k" if few else self.base,
            "iq4_xs": "q5_k" if few else self.base,
            "iq3_xxs": "q4_k" if few else self.base if self.weighted else "iq3_s",
            "iq3_xs": "q4_k" if few else self.base,
            "iq3_s": "q4_k" if few else self.base,
            "iq3_m": "q4_k",
        }.get(self.recipe.name, self.base)
        if self.layers == 80 and format in ("q3_k", "q4_k"):  # the 70B models
            format = "q5_k"
        return "q8_0" if self.experts == 8 else format

    def _down(self, layer: int) -> str:
        first, more = layer < self.layers // 8, _more_bits(layer, self.layers)
        return {
            "q2_k": "q3_k",
            "q2_k_s": "q4_k" if first else self.base,
            "q3_k_m": "q5_k" if layer < self.layers // 16 else "q4_k",
            "q3_k_l": "q5_k",
            "q4_k_s": "q5_k" if first else self.base,
            "q4_k_m": "q6_k" if more else self.base,
            "q5_k_m": "q6_k" if more else self.base,
            "iq4_nl": "q5_k" if first and not self.weighted else self.base,
            "iq4_xs": "q5_k" if first and not self.weighted else self.base,
            "iq3_xxs": self.base if self.weighted else "q4_k" if first else "q3_k",
            "iq3_m": "q4_k" if first or (self.experts == 8 and more) else self.base,
            "q4_0": "q4_1" if first and self.weighted else self.base,
            "q5_0": "q5_1" if first and self.weighted else self.base,
        }.get(self.recipe.name, self.base)

    def _attention_output(self) -> str:
        if self.experts == 8:
            better = ("q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m", "iq4_nl", "iq4_xs")
            better += ("iq3_xxs", "iq3_xs", "iq3_s", "iq3_m")
            return "q5_k" if self.recipe.name in better else self.base
        better = {"q2_k": "q3_k", "q3_k_m": "q4_k", "q3_k_l": "q5_k", "iq3_xxs": "iq3_s", "iq3_m": "q4_k"}
        return better.get(self.recipe.name, self.base)


def _more_bits(layer: int, layers: int) -> bool:
    """The first and the last eighth of the layers, and every third between them."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
