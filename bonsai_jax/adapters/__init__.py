"""Adapters (LoRA): made, added, merged into weights, and in files (docs/adapters.md)."""

from bonsai_jax.adapters.files import load_adapter, save_adapter
from bonsai_jax.adapters.making import lora
from bonsai_jax.adapters.merging import merge

__all__ = ["load_adapter", "lora", "merge", "save_adapter"]
