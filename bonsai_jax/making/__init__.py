"""Model files made of model files: other formats (quantizing), by llama.cpp's mixes (recipes),
importance matrices (importance) and rotations (rotating); folders as GGUF files and back (converting)."""

from bonsai_jax.making.converting import Converted, convert
from bonsai_jax.making.importance import Importance, read_importance
from bonsai_jax.making.quantizing import Change, check_new, planned, quantize_file

__all__ = [
    "Change",
    "Converted",
    "Importance",
    "check_new",
    "convert",
    "planned",
    "quantize_file",
    "read_importance",
]
