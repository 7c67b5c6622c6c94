"""Matrices that are stored rotated, as Bonsai 2's are (checkpoints/folding.py, version 1 of its contract).

A row w of a matrix becomes H(s * w), and who multiplies rotates the input in the same way. The product stays
as it is, because H is its own inverse and s are signs:

    W x = W_stored H(s * x)

Rounding then meets weights and activations whose largest numbers are spread over a block (QuIP#, Tseng et al.
2024, arXiv:2402.04396).
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints import Checkpoint, folding
from checkpoints.folding import PREFIX
from pallas_kernels import Rotation

ARCHITECTURES = ("llama", "qwen3", "qwen3moe", "qwen35")  # that the contract is written for
ROTATED = re.compile(
    r"(blk\.\d+\.(attn_(q|k|v|qkv|gate|output)|ssm_out|ffn_(gate|up|down)(_exps|_shexp)?)|output)\.weight"
)
SEED = 0  # of the signs


@dataclasses.dataclass(frozen=True)
class Fold:
    """names: of the tensors that are rotated; signs: float32 +-1, by the width of their rows."""

    block: int
    names: tuple[str, ...]
    signs: Mapping[int, np.ndarray]

    @property
    def metadata(self) -> dict[str, Any]:
        keys = {
            "version": np.uint32(1),
            "transform": "normalized-sylvester-walsh-hadamard",
            "axis": "input-last-dimension",
            "block_size": np.uint32(self.block),
            "sign_mode": "explicit",
            "sign_widths": np.array(list(self.signs), np.int32),
            "sign_values": np.concatenate(list(self.signs.values())).astype(np.int32),
            "weight_names": list(self.names),
        }
        return {f"{PREFIX}{key}": value for key, value in keys.items()}

    def rotation(self, width: int) -> Rotation:
        """Of rows of this width."""
        return Rotation(jnp.asarray(self.signs[width]), self.block)


def fold(checkpoint: Checkpoint, block: int) -> Fold:
    """Choose the matrices to rotate, in blocks of so many inputs, and their signs. Embeddings, routers and
    small arrays stay as they are. Raises ValueError for a block that does not fit and for a file that is
    rotated already, NotImplementedError for an architecture that has no such files."""
    where, tensors = checkpoint.source, checkpoint.tensors
    if folding(checkpoint) is not None:
        raise ValueError(f"{where}: its weights are rotated already")
    if (architecture := checkpoint.metadata.get("general.architecture")) not in ARCHITECTURES:
        raise NotImplementedError(
            f"{where}: rotated weights are for {', '.join(ARCHITECTURES)}; this is {architecture}"
        )
    names = tuple(name for name in tensors if ROTATED.fullmatch(name))
    widths = sorted({tensors[name].shape[-1] for name in names})
    largest = min((width & -width for width in widths), default=1)
    if block < 2 or block & (block - 1) or block > largest:
        raise ValueError(
            f"{where}: fold is {block}; it must be a power of two that divides the inputs of every matrix, "
            f"{', '.join(map(str, widths))}: at most {largest}"
        )
    rng = np.random.default_rng(SEED)
    return Fold(block, names, {n: rng.choice(np.array([-1, 1], np.float32), n) for n in widths})
