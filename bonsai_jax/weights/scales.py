"""The scales that GGUF files carry beside matrices: the product with NAME.weight is multiplied by NAME.scale.

    NAME.scale        f32 [1]; of experts [experts]
    NAME.input_scale  how its maker rounded activations; like llama.cpp, this is not read

NVFP4 files have them, because the format's own scales are eight-bit floats. While blocks are loaded, their
floats are multiplied by the scale and rounded again: no kernel and no layer knows of it. NVFP4 blocks have no
float wide enough and get one: they become `nvfp4_scaled` (pallas_kernels/formats).
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints import Checkpoint, CheckpointError
from checkpoints.checkpoint import Stored
from pallas_kernels import formats

WEIGHT, SCALE, INPUT_SCALE = ".weight", ".scale", ".input_scale"


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A matrix, or one for each expert, with its scale in its blocks. Each access to `data` computes them.

    source  the file, for messages
    whole   its tensor
    scale   f32 [1], or one for each matrix
    """

    source: str
    whole: Stored
    scale: Stored

    @property
    def name(self) -> str:
        return self.whole.name

    @property
    def format(self) -> str:
        return getattr(formats.get(self.whole.format), "SCALED", self.whole.format)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape

    @property
    def data(self) -> np.ndarray:
        """uint8 [*shape[:-1], bytes of a row]. Raises CheckpointError where the format's floats cannot be
        multiplied by the scale without losing more than they are rounded by."""
        module, own = formats.get(self.format), formats.get(self.whole.format).BLOCK
        stored = np.ascontiguousarray(self.whole.data).view(own)
        blocks = np.empty(stored.shape, module.BLOCK)
        for field in module.BLOCK.names:
            blocks[field] = stored[field] if field in own.names else module.UNSCALED[field]
        factor = np.ascontiguousarray(self.scale.data).view(np.float32)
        if not np.isfinite(factor).all():
            raise self._error("it is not finite")
        for field in _floats(self.format):
            exact = blocks[field].astype(np.float32)
            exact *= factor.reshape(-1, *[1] * (exact.ndim - 1))
            with np.errstate(over="ignore"):
                blocks[field] = exact
            error, largest = np.abs(blocks[field].astype(np.float32) - exact).max(), np.abs(exact).max()
            dtype = module.BLOCK[field]
            if not error <= largest * float(jnp.finfo(dtype).eps):  # it is subnormal, or infinite
                raise self._error(f"its largest {field} would be {largest:.3g}, which a {dtype} cannot hold")
        return blocks.view(np.uint8).reshape(*self.shape[:-1], -1)

    def _error(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.source}: tensor {self.name} cannot be multiplied by {self.scale.name}: {reason}; convert "
            "the model to a file without scales"
        )

    @property
    def nbytes(self) -> int:
        """Of `data`: blocks may be larger than the file's."""
        own, stored = formats.get(self.format).BLOCK.itemsize, formats.get(self.whole.format).BLOCK.itemsize
        return self.whole.nbytes // stored * own

    def forget(self) -> None:
        self.whole.forget()


def _floats(format: str) -> list[str]:
    """The fields of a block by which all its weights are multiplied."""
    block = formats.get(format).BLOCK
    return [field for field in block.names or () if jnp.issubdtype(block[field].base, jnp.floating)]


def with_scales(checkpoint: Checkpoint, tensors: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
    """The tensors of a GGUF file: scales are multiplied into their matrices. Those of other files unchanged.

    named  tensors that the architecture itself asks for: these are no scales

    Raises CheckpointError for a scale of another shape or format, and NotImplementedError for a matrix whose
    format has no floats.
    """
    if checkpoint.naming != "gguf":
        return dict(tensors)
    out = dict(tensors)
    for name, t in tensors.items():
        weight = name.removesuffix(INPUT_SCALE).removesuffix(SCALE) + WEIGHT
        if name in named or not name.endswith((SCALE, INPUT_SCALE)) or weight not in tensors:
            continue
        whole = tensors[weight]
        if len(whole.shape) < 2:
            continue
        del out[name]
        if name.endswith(INPUT_SCALE):
            continue
        count = whole.shape[0] if len(whole.shape) == 3 else 1
        if t.format != "f32" or t.shape not in ((1,), (count,)):
            raise CheckpointError(
                f"{checkpoint.source}: tensor {name} is {t.format} {t.shape}; the scale of {weight}, "
                f"{whole.shape}, must be f32 (1,)" + (f" or ({count},)" if count > 1 else "")
            )
        out[weight] = scaled = Scaled(checkpoint.source, whole, t)
        if not _floats(scaled.format):
            raise NotImplementedError(
                f"{checkpoint.source}: tensor {name} is the scale of a {whole.format} matrix, whose blocks "
                "have no float to multiply; supported: formats that have a float in each block, and NVFP4"
            )
    return out
