"""Model files made of model files: other formats (quantizing), by llama.cpp's mixes (recipes)
and importance matrices (importance)."""

from bonsai_jax.making.importance import Importance, read_importance
from bonsai_jax.making.quantizing import Change, check_new, planned, quantize_file

__all__ = ["Change", "Importance", "check_new", "planned", "quantize_file", "read_importance"]
