"""bonsai-jax list: the models in the cache of the Hugging Face Hub, and the demo model."""

import dataclasses
import sys
from typing import TYPE_CHECKING

from bonsai_jax.cli import options, text

if TYPE_CHECKING:
    from checkpoints.hub.cache import CachedModel


def command(as_json: options.Json = False) -> None:
    """List the models that `pull` has fetched: name for -m, files, size.

    With --json: {"folder": the cache, "models": [{"name", "files", "nbytes"}, ...]}. A download that was
    interrupted has no files.
    """
    from checkpoints import demo
    from checkpoints.hub import cache

    models = cache.models() + (demo.fetched() if demo.fetched_path().is_file() else [])
    if as_json:
        described = [dataclasses.asdict(model) for model in models]
        print(text.json_line({"folder": cache.folder(), "models": described}))
    elif models:
        print(table(models))
    else:
        print(f"no models in {cache.folder()}; bonsai-jax pull user/repo:quant fetches one", file=sys.stderr)


def table(models: "list[CachedModel]") -> str:
    from checkpoints.hub.names import readable

    return text.table([(model.name, _files(model), readable(model.nbytes)) for model in models])


def _files(model: "CachedModel") -> str:
    if not model.files:
        return "unfinished download"
    return model.files[0] if len(model.files) == 1 else f"{len(model.files)} files"
