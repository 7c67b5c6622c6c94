"""Kinds of half a layer, one file each: what mixes tokens (attention, delta_net) and what mixes channels
(mlp, experts). A file holds everything that knows its kind:

    a dataclass   its settings, which an architecture gives per layer: `kind`, the file's name; `for_device`,
                  `runs` and `refuses_split` say how devices split it; for what mixes tokens also
                  `bytes_per_token`, `bytes_per_row` and `scratch_bytes` of the cache, and `problems`, from
                  which kernels are chosen
    TENSORS       the tensors that it may have, each with its usual names in GGUF and Hugging Face files;
                  `tensors(...)` picks those that an architecture has
    Weights       the arrays that they become, stacked over the layers of a group (ModelConfig.groups)
    State         what the cache keeps for it, and AXES, how devices split that; `empty(...)` makes one. For
                  what mixes tokens
    PRODUCTS      the arrays that fused launches multiply with (network/fused.py); None: none computes it
    SITES         its taps (network/taps.py)
    block         (x, place, cache, workspace) -> (x, cache, workspace): the computation and its residual

`get(name)` imports by file name, so a new file is a new kind; network/params.py and network/cache.py have a
field for each.
"""

import dataclasses
import importlib
from types import ModuleType

from bonsai_jax.weights.specs import Spec

NAMES = ("attention", "delta_net", "mlp", "experts")


def get(name: str) -> ModuleType:
    """The module of a kind."""
    return importlib.import_module(f"{__name__}.{name}")


def tensors(
    kind: str, *fields: str, optional: bool = False, **names: tuple[str, str | None]
) -> tuple[Spec, ...]:
    """Specs of the tensors that layers of a kind have.

    fields    of the kind's TENSORS, under their usual names
    names     field=(GGUF, Hugging Face): the same under others, without the layer's prefix
    optional  whether a file may lack them
    """
    menu = get(kind).TENSORS
    usual = {field: (menu[field].gguf, menu[field].huggingface) for field in fields}
    return tuple(
        dataclasses.replace(
            menu[field],
            kind=kind,
            gguf=f"blk.{{}}.{gguf}",
            huggingface=None if huggingface is None else f"model.layers.{{}}.{huggingface}",
            optional=optional,
        )
        for field, (gguf, huggingface) in {**usual, **names}.items()
    )
