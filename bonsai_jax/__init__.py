"""bonsai-jax: functional JAX inference for 1-bit and K-quantized language models.

    import bonsai_jax as bj
    model = bj.load("model.gguf")  # or "user/repo:Q8_0" from the Hub; "demo": SmolLM2 from PyPI
    for piece in bj.stream(model, "Once upon a time", max_new_tokens=64):
        print(piece.text, end="", flush=True)

Below the functions on text stand pure functions on arrays: `prefill`, `step`, `decode`, `generate_tokens`
over a `State`, `extend` and `hidden_states` over a `KVCache`, and `forward`, which can be put under jit, vmap
and grad; `jitted` has them jitted.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

for _name in ("checkpoints", "pallas_kernels"):
    # A file or folder of this name beside a user's script or notebook comes before the installed package.
    _spec = importlib.util.find_spec(_name)
    _folders = list(_spec.submodule_search_locations or ()) if _spec else []
    _place = _folders[0] if _folders else _spec.origin if _spec else None
    _beside = Path(__file__).resolve().parent.parent
    if _place is None or Path(_place).resolve() != _beside / _name:
        raise ImportError(
            f"bonsai_jax needs the package {_name} that lies beside it in {_beside}, but Python found "
            f"{_place or 'none'}; rename that {'folder' if _folders else 'file'}, or start Python in another "
            "folder"
        )

if TYPE_CHECKING:
    from bonsai_jax.adapters import load_adapter, lora, merge, save_adapter
    from bonsai_jax.config import ModelConfig, RunConfig
    from bonsai_jax.constraints import Constraint, choice, grammar, json_object, json_schema, regex
    from bonsai_jax.decoding import jitted
    from bonsai_jax.decoding.checks import checked
    from bonsai_jax.decoding.sampling import Logprobs
    from bonsai_jax.decoding.state import Drawn, State
    from bonsai_jax.decoding.steps import (
        decode,
        extend,
        forward,
        generate_tokens,
        hidden_states,
        prefill,
        start,
        step,
    )
    from bonsai_jax.engine import Engine, Handle
    from bonsai_jax.engine.answers import Output, Piece
    from bonsai_jax.making import convert, quantize_file
    from bonsai_jax.model import Model, from_checkpoint, load, new_cache, new_state
    from bonsai_jax.network.adapter import Adapter
    from bonsai_jax.network.cache import KVCache
    from bonsai_jax.network.decoder import embed, unembed
    from bonsai_jax.network.parallel import over_mesh
    from bonsai_jax.network.taps import Taps
    from bonsai_jax.research.embeddings import embed_texts
    from bonsai_jax.research.harvest import Harvested, harvest
    from bonsai_jax.research.importance import importance
    from bonsai_jax.research.score import Score, score
    from bonsai_jax.sampling_params import SamplingParams
    from bonsai_jax.save import load_state, save_state
    from bonsai_jax.text import compile_ahead, generate, iter_logits, logits, stream
    from bonsai_jax.tokens.tokenizer import Tokenizer
    from bonsai_jax.weights.placement import make_mesh
    from checkpoints import CheckpointError

# Imported when first used: jax takes a second or two, which `bonsai-jax --help` need not wait for.
_HOMES = {
    "bonsai_jax.adapters": ("load_adapter", "lora", "merge", "save_adapter"),
    "bonsai_jax.network.adapter": ("Adapter",),
    "bonsai_jax.engine.answers": ("Output", "Piece"),
    "bonsai_jax.network.cache": ("KVCache",),
    "bonsai_jax.decoding.checks": ("checked",),
    "bonsai_jax.constraints": ("Constraint", "choice", "grammar", "json_object", "json_schema", "regex"),
    "bonsai_jax.config": ("ModelConfig", "RunConfig"),
    "bonsai_jax.sampling_params": ("SamplingParams",),
    "bonsai_jax.decoding.steps": (
        *("decode", "extend", "forward", "generate_tokens", "hidden_states", "prefill", "start", "step"),
    ),
    "bonsai_jax.engine": ("Engine", "Handle"),
    "bonsai_jax.making": ("convert", "quantize_file"),
    "bonsai_jax.model": ("Model", "from_checkpoint", "load", "new_cache", "new_state"),
    "bonsai_jax.network.parallel": ("over_mesh",),
    "bonsai_jax.weights.placement": ("make_mesh",),
    "bonsai_jax.decoding.sampling": ("Logprobs",),
    "bonsai_jax.decoding.state": ("Drawn", "State"),
    "bonsai_jax.research.embeddings": ("embed_texts",),
    "bonsai_jax.research.harvest": ("Harvested", "harvest"),
    "bonsai_jax.research.importance": ("importance",),
    "bonsai_jax.research.score": ("Score", "score"),
    "bonsai_jax.save": ("load_state", "save_state"),
    "bonsai_jax.network.taps": ("Taps",),
    "bonsai_jax.text": ("compile_ahead", "generate", "iter_logits", "logits", "stream"),
    "bonsai_jax.tokens.tokenizer": ("Tokenizer",),
    "bonsai_jax.network.decoder": ("embed", "unembed"),
    "checkpoints": ("CheckpointError",),
}


def __getattr__(name: str):
    if name == "__version__":
        from importlib import metadata

        return metadata.version("bonsai-jax")
    if name == "jitted":
        return importlib.import_module("bonsai_jax.decoding.jitted")
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(home), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


__all__ = [
    "Adapter",
    "CheckpointError",
    "Constraint",
    "Drawn",
    "Engine",
    "Handle",
    "Harvested",
    "KVCache",
    "Logprobs",
    "Model",
    "ModelConfig",
    "Output",
    "Piece",
    "RunConfig",
    "SamplingParams",
    "Score",
    "State",
    "Taps",
    "Tokenizer",
    "checked",
    "choice",
    "compile_ahead",
    "convert",
    "decode",
    "embed",
    "embed_texts",
    "extend",
    "forward",
    "from_checkpoint",
    "generate",
    "generate_tokens",
    "grammar",
    "harvest",
    "hidden_states",
    "importance",
    "iter_logits",
    "jitted",
    "json_object",
    "json_schema",
    "load",
    "load_adapter",
    "load_state",
    "logits",
    "lora",
    "make_mesh",
    "merge",
    "new_cache",
    "new_state",
    "over_mesh",
    "prefill",
    "quantize_file",
    "regex",
    "save_adapter",
    "save_state",
    "score",
    "start",
    "step",
    "stream",
    "unembed",
]
