"""ggml's own encoders, out of the library that the package xllamacpp carries."""

import ctypes
import functools
import importlib.util
from pathlib import Path

import numpy as np

from checkpoints.geometry import GEOMETRY


@functools.cache
def _library() -> ctypes.CDLL:
    spec = importlib.util.find_spec("xllamacpp")
    assert spec is not None and spec.submodule_search_locations
    (path,) = Path(spec.submodule_search_locations[0]).glob("xllamacpp*.so")
    library = ctypes.CDLL(str(path))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    return library


def quantize(x: np.ndarray, format: str, importance: np.ndarray | None = None) -> np.ndarray:
    """float32 [rows, K] -> blocks, uint8 [rows, bytes of a row]. importance: float32 [K]."""
    geometry = GEOMETRY[format]
    x = np.ascontiguousarray(x, np.float32)
    rows, columns = x.shape
    importance = None if importance is None else np.ascontiguousarray(importance, np.float32)
    assert importance is None or importance.shape == (columns,)
    out = np.zeros((rows, columns // geometry.weights * geometry.bytes), np.uint8)
    written = _library().ggml_quantize_chunk(
        ctypes.c_int(geometry.id), ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(out.ctypes.data),
        ctypes.c_int64(0), ctypes.c_int64(rows), ctypes.c_int64(columns),
        None if importance is None else ctypes.c_void_p(importance.ctypes.data),
    )  # fmt: skip
    assert written == out.nbytes
    return out
