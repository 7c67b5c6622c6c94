"""The matrices of a model that adapters may change, and where files have them."""

import dataclasses
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from bonsai_jax.config import ModelConfig
from bonsai_jax.network import architectures
from bonsai_jax.network.adapter import Adapter, adaptable
from bonsai_jax.weights.specs import Spec

# Architectures whose GGUF files have rows of queries and keys in the order of an interleaved rope, where
# Hugging Face files have them in halves. Others have one order in both.
TURNED = frozenset((
    *("arcee", "deepseek", "granite", "granitehybrid", "granitemoe", "internlm2", "llama", "minicpm"),
    *("mistral3", "smollm3"),
))  # fmt: skip
# Those whose GGUF files have v heads of a gated delta net tiled, where Hugging Face files have them grouped.
TILED = frozenset(("qwen35", "qwen35moe"))


@dataclasses.dataclass(frozen=True)
class Target:
    """A matrix of every layer of a group.

    spec    its tensors in files
    group   number of the group of its kind
    layers  of the model, in the order of the stack
    settings  of the kind, in these layers
    start   its first row in the array of Params
    shape   (N, K)
    """

    spec: Spec
    group: int
    layers: tuple[int, ...]
    settings: Any
    start: int
    shape: tuple[int, int]

    @property
    def kind(self) -> str:
        return str(self.spec.kind)

    @property
    def name(self) -> str:
        return self.spec.field


def targets(config: ModelConfig) -> list[Target]:
    """All of a model, in the order of its groups and of its architecture's table."""
    table, every = architectures.get(config.architecture).TENSORS, []
    for kind in config.kinds:
        for number, group in enumerate(config.groups(kind)):
            starts: dict[str, int] = {}
            first = group.layers[0]
            for spec in table:
                if spec.kind != kind or spec.field not in adaptable(kind) or first not in spec.layers(config):
                    continue
                n, k = spec.sizes(config, first)
                start = starts.get(spec.array, 0)
                every.append(Target(spec, number, group.layers, group.settings, start, (n, k)))
                starts[spec.array] = start + n
    return every


def names(every: Collection[Target]) -> list[str]:
    """What `where` may name: matrices, and kinds."""
    return list(dict.fromkeys([*(t.name for t in every), *(t.kind for t in every)]))


def check(adapter: Adapter, config: ModelConfig) -> None:
    """Raise ValueError for an adapter that is not of such a model."""
    own = {(t.kind, t.group, t.name): (len(t.layers), *t.shape, t.start) for t in targets(config)}
    for kind, group, name, change in adapter.each():
        shape = change.a.shape[0], *change.shape, change.start
        if own.get((kind, group, name)) != shape:
            raise ValueError(
                f"adapter: {kind}.{name} of group {group} is of {shape[0]} layers, {shape[1]} x {shape[2]}; "
                f"this {config.architecture} model has {own.get((kind, group, name), 'no such matrix')}"
            )


def refuses(target: Target, naming: str, config: ModelConfig) -> str | None:
    """Why the file of an adapter cannot change this matrix, or None.

    naming  whose names the file has, "gguf" or "huggingface"
    """
    if target.spec.name(naming) is None:
        return f"{naming} files of {config.architecture} have no name for {target.kind}.{target.name}"
    changed = target.spec.from_huggingface is not None
    changed = changed or hasattr(architectures.get(config.architecture), "tensors_from_huggingface")
    if naming == "huggingface" and changed:
        return (
            f"folders of {config.architecture} have other numbers than this model computes with, and no "
            "adapter of one can be read or written; take llama.cpp's .gguf"
        )
    return None


class Order(NamedTuple):
    """Rows and columns of a file's matrix in the order of the model: row i here is row rows[i] there. None:
    they have the same."""

    rows: np.ndarray | None = None
    columns: np.ndarray | None = None

    @property
    def inverse(self) -> "Order":
        """Of the model's matrix in the order of the file."""
        return Order(*(None if order is None else np.argsort(order) for order in self))


def order(target: Target, naming: str, config: ModelConfig) -> Order:
    """That of a matrix in a file of this naming.

    In a GGUF file of an architecture in TURNED row 2 i + j of a head of queries or keys is row
    j head_dim / 2 + i of the folder that it was made of; in one of TILED v head j (k heads) + i is v head
    i (v heads / k heads) + j of the folder.
    """
    settings, name = target.settings, target.name
    own = architectures.get(config.architecture).__name__.rpartition(".")[-1]
    if target.kind == "attention" and name in ("q", "k") and own in TURNED:
        from_folder = Order(_turned(target.shape[0], settings.head_dim))
        model_is_gguf = _interleaved(config)
    elif target.kind == "delta_net" and own in TILED:
        heads = np.arange(settings.v_heads).reshape(settings.k_heads, -1).T.reshape(-1)
        width = 1 if name in ("alpha", "beta") else settings.v_dim
        values = (heads[:, None] * width + np.arange(width)).reshape(-1)
        before = settings.qkv_width - settings.v_width if name == "qkv" else 0  # queries and keys
        values = np.concatenate([np.arange(before), before + values])
        from_folder = Order(None, values) if name == "out" else Order(values)
        model_is_gguf = not settings.grouped
    else:
        return Order()
    if (naming == "gguf") == model_is_gguf:
        return Order()
    return from_folder if naming == "huggingface" else from_folder.inverse


def _turned(rows: int, head_dim: int) -> np.ndarray:
    return np.arange(rows).reshape(-1, 2, head_dim // 2).swapaxes(1, 2).reshape(-1)


def _interleaved(config: ModelConfig) -> bool:
    """Whether a model of an architecture in TURNED has rows of queries and keys as in GGUF files."""
    ropes = [group.settings.rope for group in config.groups("attention")]
    return any(rope is not None and rope.interleaved for rope in ropes)
