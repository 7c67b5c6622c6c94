"""bonsai-jax pull: fetch a model from the Hugging Face Hub into the cache."""

from typing import Annotated

import typer

from bonsai_jax.cli import options, text

HubName = Annotated[
    str,
    typer.Argument(metavar="USER/REPO:QUANT", help="The model, named as for -m; QUANT may be left out."),
]


def command(name: HubName, as_json: options.Json = False) -> None:
    """Fetch a model from the Hugging Face Hub and print its path. An interrupted download resumes where it
    stopped; files that are in the cache are checked, and fetched again if they are damaged."""
    from checkpoints.hub import fetch

    path = fetch(name, check=True)
    print(text.json_line({"name": name, "path": path}) if as_json else path)
