"""Hadamard folding (Bonsai 2): which weights are stored rotated, and how their inputs must be transformed.

    y = W_stored H(s * P(x))        for every weight in `weights`
    h = s * H(z)                    for a row z of every table in `tables`, after the look-up

H is the normalized Sylvester-Walsh-Hadamard transform of each `block` values,
H[r, c] = (-1)^popcount(r & c) / sqrt(block); s are signs, by the width of the input; P is the identity, but
where `v_grouped` it brings the v heads of a gated delta net from tiled order into grouped. H is its own
inverse, and so is s.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from .checkpoint import Checkpoint, CheckpointError

PREFIX = "prism.hadamard."
METADATA_KEYS = (
    *("version", "transform", "axis", "block_size", "sign_mode", "sign_widths", "sign_values"),
    *("weight_names", "inverse_weight_names", "gdn_v_grouped", "tied_output"),
)


@dataclasses.dataclass(frozen=True)
class Folding:
    """A file's folded weights.

    block      values that are transformed together, a power of two
    signs      {width of the input: float32 +-1}; no entry: no signs
    weights    names of the tensors whose inputs become H(s * P(x))
    tables     names of the tensors whose rows are rotated back after the look-up
    v_grouped  whether P regroups v heads before the output matrix of a gated delta net
    """

    block: int
    signs: Mapping[int, np.ndarray]
    weights: frozenset[str]
    tables: frozenset[str]
    v_grouped: bool

    def folds(self, name: str) -> bool:
        return name in self.weights or name in self.tables


def folding(checkpoint: Checkpoint) -> Folding | None:
    """The folding that a file's metadata describes (prism.hadamard.*); None without these keys.

    Raises CheckpointError, with key, value and the supported values, for any unknown detail: a model that is
    run differently from how it was folded writes nonsense.
    """
    own = {key: value for key, value in checkpoint.metadata.items() if key.startswith(PREFIX)}
    if not own:
        return None

    def refuse(key: str, value: Any, expected: str):
        text = " ".join(repr(value).split())
        text = text if len(text) <= 80 else text[:77] + "..."
        raise CheckpointError(f"{checkpoint.source}: {PREFIX}{key} is {text}; {expected}")

    def value(key: str, default: Any = None) -> Any:
        entry = own.get(PREFIX + key, default)
        entry = entry.tolist() if isinstance(entry, np.ndarray | np.generic) else entry
        if entry is None:
            raise CheckpointError(f"{checkpoint.source}: {PREFIX}{key} is missing; folded weights need it")
        return entry

    for key in own:
        if (name := key.removeprefix(PREFIX)) not in METADATA_KEYS:
            refuse(name, own[key], f"an unknown key of the contract; known: {', '.join(METADATA_KEYS)}")
    for key, able in {
        "version": (1, 2),
        "transform": ("normalized-sylvester-walsh-hadamard",),
        "axis": ("input-last-dimension",),
        "sign_mode": ("identity", "explicit"),
    }.items():
        if (given := value(key)) not in able or isinstance(given, bool):
            refuse(key, given, f"supported: {', '.join(map(str, able))}")
    tensors, block = checkpoint.tensors, value("block_size")
    if not isinstance(block, int) or block < 2 or block & (block - 1):
        refuse("block_size", block, "a power of two is expected")
    names = {
        key: value(key, default) for key, default in (("weight_names", None), ("inverse_weight_names", []))
    }
    for key, listed in names.items():
        if not isinstance(listed, list):
            refuse(key, listed, "a list of names is expected")
        for name in listed:
            if name not in tensors or len(tensors[name].shape) not in (2, 3):  # 3: a matrix of each expert
                refuse(key, name, "each must name a matrix of the file")
            if (inputs := tensors[name].shape[-1]) % block:
                refuse("block_size", block, f"it must divide the {inputs} inputs of {name}")
    weights, tables = map(frozenset, names.values())
    if both := sorted(weights & tables):
        refuse("inverse_weight_names", both[0], "a tensor of weight_names cannot be among these")
    if other := sorted(tables - {"token_embd.weight"}):
        refuse("inverse_weight_names", other[0], "supported: token_embd.weight")
    if "token_embd.weight" in weights:
        refuse("weight_names", "token_embd.weight", "a table belongs in inverse_weight_names")
    # Without an output matrix the table is multiplied too: the file must say that it is meant so.
    tied = bool(tables) and "output.weight" not in tensors
    if bool(value("tied_output", False)) != tied or (value("version") == 2) != tied:
        expected = "version 2 and tied_output go with a folded token_embd.weight and no output.weight"
        refuse("tied_output", value("tied_output", False), f"{expected}; version is {value('version')}")
    if value("sign_mode") == "explicit":
        signs = _signs(value, refuse)
    elif np.any(np.asarray(value("sign_values", [])) != 1):
        refuse("sign_mode", "identity", "with it sign_values are absent, or all 1")
    else:
        signs = {}
    for name in weights | tables:
        if value("sign_mode") == "explicit" and (inputs := tensors[name].shape[-1]) not in signs:
            refuse("sign_widths", value("sign_widths"), f"{name} has {inputs} inputs")
    if (grouped := value("gdn_v_grouped", False)) not in (True, False):
        refuse("gdn_v_grouped", grouped, "true or false is expected")
    return Folding(block, signs, weights, tables, bool(grouped))


def _signs(value, refuse) -> dict[int, np.ndarray]:
    widths, values = value("sign_widths"), np.asarray(value("sign_values"))
    if not isinstance(widths, list) or any(not isinstance(w, int) or w < 1 for w in widths):
        refuse("sign_widths", widths, "a list of widths, above 0, is expected")
    if len(set(widths)) != len(widths):
        refuse("sign_widths", widths, "each width must be given once")
    if values.dtype.kind not in "iuf":
        refuse("sign_values", value("sign_values"), "a list of numbers is expected")
    if values.shape != (sum(widths),):
        refuse("sign_values", list(values.shape), f"{sum(widths)} values are expected, for widths {widths}")
    if (wrong := values[abs(values) != 1]).size:
        refuse("sign_values", float(wrong[0]), "each must be 1 or -1")
    cut = np.split(values.astype(np.float32), np.cumsum(widths)[:-1])
    return dict(zip(widths, cut, strict=True))
