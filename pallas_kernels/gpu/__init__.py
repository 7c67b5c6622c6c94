"""What kernels are written in: lanes, memory and tensor cores of a GPU, as MLIR and PTX.

`gpu.lanes` and the others are imported when first used: it takes a second, and only GPUs need them.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return importlib.import_module(f"{__name__}.{name}")
