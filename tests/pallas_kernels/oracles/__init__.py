"""What formats say their weights are, independently of `pallas_kernels/formats`.

The gguf package is the oracle of the formats that it can dequantize. Any other format has a file here, named
after the format and written from its description, with one function:

    dequantize(block: bytes) -> list[float]     the weights of one block, one at a time, in float64
"""

import importlib
import pkgutil
import struct

import numpy as np

from pallas_kernels import formats


def names() -> list[str]:
    """The formats that have a file here."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def dequantize(name: str, raw: np.ndarray) -> np.ndarray:
    """uint8 [..., bytes of whole blocks] -> float32 [..., weights].

    Raises LookupError, which says what to write, for a format that has no oracle.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # NaN scales; infinite scales times zero
        if name not in names():
            return _by_gguf(name, raw)
        module, size = importlib.import_module(f"{__name__}.{name}"), formats.get(name).BLOCK.itemsize
        weights = [module.dequantize(block.tobytes()) for block in raw.reshape(-1, size)]
        return np.array(weights, np.float64).astype(np.float32).reshape(*raw.shape[:-1], -1)


def _by_gguf(name: str, raw: np.ndarray) -> np.ndarray:
    import gguf

    try:
        return gguf.dequantize(raw, gguf.GGMLQuantizationType[name.upper()])
    except (KeyError, NotImplementedError):
        module = formats.get(name)
        raise LookupError(
            f"format {name} has no oracle, because the gguf package cannot dequantize it. "
            f"Write tests/pallas_kernels/oracles/{name}.py: dequantize(block: bytes) -> list[float] returns "
            f"the {module.WEIGHTS} weights of a block of {module.BLOCK.itemsize} bytes. Follow the format's "
            f"description, weight by weight, without looking at pallas_kernels/formats/{name}.py"
        ) from None


def float16(two: bytes) -> float:
    return struct.unpack("<e", two)[0]
