"""Kinds of half a layer, one file each: what mixes tokens (attention, latent_attention, delta_net,
short_conv, mamba2), what mixes channels (mlp, plain_mlp, experts), and what comes after both (layer_output).
A file holds everything that knows its kind:

    a dataclass   its settings, which an architecture gives per layer: `kind`, the file's name; `for_device`,
                  `runs` and `refuses_split` say how devices split it; for what mixes channels also `ffn`, the
                  width of the hidden vector
    TENSORS       the tensors that it may have, each with its usual names in GGUF and Hugging Face files;
                  `tensors(...)` picks those that an architecture has
    Weights       the arrays that they become, stacked over the layers of a group (ModelConfig.groups)
    PRODUCTS      the arrays that fused launches multiply with (network/fused.py), () where they know small
                  arrays alone; None: none computes it
    FUSED         beside PRODUCTS: the settings and the small arrays that fused launches know of, or that the
                  refusals of pallas_kernels see. A model with others runs operation by operation
    MIXED         in mixers: more settings and small arrays, which only `mix` reads, the part of `block`
                  between its products. Launches that call `mix` run models that have them
    SITES         its taps (network/taps.py)
    ADAPTED       tensors of its table, matrices that `matmul` and `gated` multiply, which adapters may change
                  (network/adapter.py); () where it has no such name
    block         (x, place, state, workspace) -> (x, state, workspace): the computation and its residual
    phases        settings -> the parts of `block` that measure/profile.py times (phases.py)
    order         where files of GGUF and Hugging Face have rows in another order: which rows of the one those
                  of the other are; `in_order`, settings with the order of others (making/converting.py)

What mixes tokens has also

    its settings  `bytes_per_token`, `bytes_per_row`, `scratch_bytes` and `copied_bytes` of the cache;
                  `bytes_read` and `operations` of a step; `output_width`; `problems`, for one token of each
                  sequence and for many, the `impls` that are asked for, and the `kernels` chosen
    State         what the cache stores for it, with what the engine, files and speculation do with that
                  (state.py), and AXES, how devices split it
    empty         (settings, layers, run, room) -> State
    replay        (updates, place, state) -> State, where State.recurrent: speculation reads tokens without
                  updating the state (Place.updates), and then applies the updates of those accepted, of all
                  layers [layers, ...]

`get(name)` imports by file name, so a new file is a new kind once its name is in NAMES. Weights and states
are stored by this name: params.layers["attention"], cache.states["attention"].
"""

import dataclasses
import importlib
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from bonsai_jax.weights.specs import Fused, Rows, Spec

NAMES = (
    *("attention", "latent_attention", "delta_net", "short_conv", "mamba2"),
    *("mlp", "plain_mlp", "experts", "layer_output"),
)


def get(name: str) -> ModuleType:
    """The module of a kind."""
    return importlib.import_module(f"{__name__}.{name}")


def tensors(
    kind: str,
    *fields: str,
    optional: bool = False,
    rows_of: tuple[str | None, str | None] | None = None,
    **names: tuple[str, str | None],
) -> tuple[Spec, ...]:
    """Specs of the tensors that layers of a kind have.

    fields    of the kind's TENSORS, under their usual names
    names     field=(GGUF, Hugging Face): the same under others, without the layer's prefix
    optional  whether a file may lack them
    rows_of   (GGUF, Hugging Face): a tensor in which those of `fields` and `names` may lie below each other,
              without the layer's prefix; where these are experts' tensors, those of each expert
    """
    menu = get(kind).TENSORS
    usual = {field: (menu[field].gguf, menu[field].huggingface) for field in fields}
    fused = {field: menu[field].fused for field in (*fields, *names)}
    if rows_of is not None:
        counts = [menu[field].shape[-2:][0] for field in fused]
        fused |= {field: Fused(*rows_of, _below(counts, i)) for i, field in enumerate(list(fused))}
    return tuple(
        dataclasses.replace(
            menu[field],
            kind=kind,
            gguf=f"blk.{{}}.{gguf}",
            huggingface=None if huggingface is None else f"model.layers.{{}}.{huggingface}",
            optional=optional,
            fused=(whole := fused[field]) and whole.under("blk.{}.", "model.layers.{}."),
        )
        for field, (gguf, huggingface) in {**usual, **names}.items()
    )


def _below(counts: list[str], i: int) -> Callable[[Any], Rows]:
    """The rows of the i-th of several matrices that lie below each other; counts: names of settings."""

    def rows(settings: Any) -> Rows:
        ends = list(itertools.accumulate(getattr(settings, name) for name in counts))
        return Rows(1, ends[-1], ((ends[i - 1] if i else 0, ends[i]),))

    return rows
