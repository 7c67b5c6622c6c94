"""Model files made of model files: other formats (quantizing), by llama.cpp's mixes (recipes)."""

from bonsai_jax.making.quantizing import Change, planned, quantize_file

__all__ = ["Change", "planned", "quantize_file"]
