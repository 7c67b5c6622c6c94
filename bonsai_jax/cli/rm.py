"""bonsai-jax rm: delete models from the cache of the Hugging Face Hub."""

from typing import Annotated

import typer

from bonsai_jax.cli import list as list_models
from bonsai_jax.cli.pull import HubName


def command(
    name: HubName,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Delete without asking.")] = False,
) -> None:
    """Delete a model from the cache; without QUANT, all models of a repository."""
    from checkpoints import demo
    from checkpoints.hub import cache

    print(list_models.table(demo.fetched() if name == demo.NAME else cache.find(name)))
    if not yes:
        typer.confirm("delete?", abort=True)
    if name == demo.NAME:
        demo.fetched_path().unlink()
    else:
        cache.remove(name)
