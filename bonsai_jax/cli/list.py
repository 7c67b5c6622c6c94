"""bonsai-jax list: the models in the cache of the Hub."""

import dataclasses
import sys
from typing import TYPE_CHECKING

from bonsai_jax.cli import options

if TYPE_CHECKING:
    from checkpoints.hub.cache import CachedModel


def command(as_json: options.Json = False) -> None:
    """List the models from the Hugging Face Hub that are in the cache: name for -m, files, size.

    With --json: {"folder": the cache, "models": [{"name", "files", "nbytes"}, ...]}. A download that stopped
    has no files.
    """
    from checkpoints.hub import cache

    found = cache.models()
    if as_json:
        models = [dataclasses.asdict(model) for model in found]
        print(options.to_json({"folder": cache.folder(), "models": models}))
    elif found:
        print(table(found))
    else:
        print(f"no models in {cache.folder()}; bonsai-jax pull user/repo:quant gets one", file=sys.stderr)


def table(models: "list[CachedModel]") -> str:
    from checkpoints.hub.names import readable

    return options.table([(model.name, _files(model), readable(model.nbytes)) for model in models])


def _files(model: "CachedModel") -> str:
    if not model.files:
        return "unfinished download"
    return model.files[0] if len(model.files) == 1 else f"{len(model.files)} files"
