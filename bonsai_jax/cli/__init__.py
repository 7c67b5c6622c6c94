"""The command line, one module per command. Heavy packages are imported when a command needs them."""

import contextlib
import gc
import io
import os
import sys
from collections.abc import Iterator
from typing import Annotated

import typer
from typer.core import TyperGroup

from bonsai_jax import compile_cache
from bonsai_jax.cli import (
    aliases,
    batch,
    bench,
    chat,
    convert,
    diff,
    env,
    errors,
    generate,
    imatrix,
    inspect,
    perplexity,
    pull,
    quantize,
    rm,
    serve,
)
from bonsai_jax.cli import list as list_models

INTERRUPTED, UNREAD = 128 + 2, 128 + 13  # what shells report for SIGINT and SIGPIPE


class Commands(TyperGroup):
    """The commands. An error of the user, a file or the machine ends in one clear line on stderr."""

    def parse_args(self, ctx, args):
        with self._reported(ctx):  # --version and --help print here
            return super().parse_args(ctx, args)

    def invoke(self, ctx):
        with self._reported(ctx):
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result

    @contextlib.contextmanager
    def _reported(self, ctx) -> Iterator[None]:
        debug = ctx.params.get("debug", False)
        try:
            yield
        except KeyboardInterrupt:
            print(file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # the reader, such as `head`, has closed the pipe: flush nothing at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(UNREAD) from None
        except (ValueError, NotImplementedError, MemoryError, OSError, ImportError) as error:
            if debug:
                raise
            print(f"error: {errors.one_line(error, self._parameters(ctx))}", file=sys.stderr)
            raise typer.Exit(1) from None
        except (RuntimeError, AssertionError) as error:  # XLA raises these; typer.Exit is a RuntimeError too
            if debug or isinstance(error, typer.Exit):
                raise
            why = errors.no_devices()
            if why is None and "RESOURCE_EXHAUSTED" in str(error):
                exhausted = MemoryError(f"out of device memory; lower context: {error}")
                why = errors.one_line(exhausted, self._parameters(ctx))
            if why is None:
                raise
            print(f"error: {why}", file=sys.stderr)
            raise typer.Exit(1) from None

    def _parameters(self, ctx) -> list:
        """The parameters of the command that ran."""
        command = self.commands.get(ctx.invoked_subcommand)
        return command.params if command else []


app = typer.Typer(
    cls=Commands,
    help="Run 1-bit and K-quantized language models with JAX.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 10_000,  # help is as wide as the terminal
        "token_normalize_func": aliases.our_name,
    },
)
COMMANDS = {
    "generate": (generate, "Answer one prompt."),
    "chat": (chat, "Talk with a model."),
    "batch": (batch, "Answer a file of requests, in OpenAI's batch format."),
    "serve": (serve, "Serve a model to programs that speak OpenAI's API."),
    "inspect": (inspect, "Show what is in a model file and how it would run."),
    "bench": (bench, "Measure speeds, beside the ceiling that memory sets."),
    "perplexity": (perplexity, "Measure how well a model predicts a text."),
    "pull": (pull, "Fetch a model from the Hugging Face Hub."),
    "list": (list_models, "List the models from the Hub that are in the cache."),
    "imatrix": (imatrix, "Importance matrices on a text, for quantize."),
    "convert": (convert, "Write a Hugging Face folder as a GGUF file, or a GGUF file as a folder."),
    "quantize": (quantize, "Write a model's weights in another format."),
    "diff": (diff, "Compare two files of a model."),
    "rm": (rm, "Delete models from the cache."),
    "env": (env, "Print versions, devices, memory and folders."),
}
for name, (module, summary) in COMMANDS.items():
    app.command(name, short_help=summary)(module.command)


def _version(requested: bool) -> None:
    if requested:
        print(f"bonsai-jax {env.version('bonsai-jax') or '(a checkout that is not installed)'}", flush=True)
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", hidden=True, help="Show errors with their traceback.")
    ] = False,
) -> None:
    """Run 1-bit and K-quantized language models with JAX."""


def main() -> None:
    gc.set_threshold(50_000)  # at the default of 700 Python searches jax's many objects for cycles too often
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this process
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    compile_cache.use_programs()
    # Unless the user wants otherwise, XLA takes the memory that weights and cache need (machine.reserve). To
    # take three quarters of a large GPU it needs over a second, at each start.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the locale cannot write
    try:
        app()
    except SystemExit as end:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:  # a full disk: reported, unless this is its first sign
            if not end.code:
                raise end from None
        if not end.code and "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized():
            sys.modules["jax"].distributed.shutdown()  # waits for the other processes, which need this one
        # Python's own shutdown would abort the process if one of XLA's threads, still running a step,
        # released a Python object.
        os._exit(0 if end.code == UNREAD else int(end.code or 0))
