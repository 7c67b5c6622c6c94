"""The options of a chat with a server."""

import dataclasses
import os
from typing import TYPE_CHECKING, Annotated

import typer

from bonsai_jax.cli import options

if TYPE_CHECKING:
    from bonsai_jax.cli.chat.remote import Server

KEYS = ("BONSAI_API_KEY", "OPENAI_API_KEY")  # environment variables
# Groups of a model in this process.
LOCAL = (options.LoadOptions, options.RunOptions, options.DeviceOptions, options.SpeculationOptions)
LOCAL_ALONE = {"context", "on_full"}  # options likewise


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """A server that answers, in place of a model in this process."""

    url: Annotated[
        str | None,
        typer.Option(
            "--server",
            metavar="URL",
            help="Talk with a model at a server that speaks OpenAI's API, such as http://127.0.0.1:8000; "
            "-m names one of its models.",
        ),
    ] = None
    key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            help="The server's key. Other users of this machine can read it in the list of processes: better "
            "set the variable BONSAI_API_KEY or OPENAI_API_KEY.",
        ),
    ] = None

    def opened(self, context: typer.Context) -> "Server | None":
        """The server; None: a model in this process answers. Raises BadParameter for options that do not go
        together, and ServerError.

        context  of the command
        """
        if self.url is None:
            if self.key is not None:
                raise typer.BadParameter("--api-key needs --server")
            return None
        if given := _given(context):
            raise typer.BadParameter(f"{', '.join(given)}: for a model in this process, not with --server")
        from bonsai_jax.cli.chat.remote import Server

        keys = (self.key, *map(os.environ.get, KEYS))
        return Server(self.url, next((key.strip() for key in keys if key), None))


def _given(context: typer.Context) -> list[str]:
    """The flags on this command line that are for a model in this process."""
    names = {field.name for group in LOCAL for field in dataclasses.fields(group)} - {"name"} | LOCAL_ALONE
    sources = {
        parameter: context.get_parameter_source(parameter.name or "") for parameter in context.command.params
    }
    return [
        max(parameter.opts, key=len)
        for parameter, source in sources.items()
        if parameter.name in names and source is not None and source.name == "COMMANDLINE"
    ]
