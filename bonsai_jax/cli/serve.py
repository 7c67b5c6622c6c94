"""bonsai-jax serve: a server that programs which speak OpenAI's or Anthropic's API already know."""

import dataclasses
import functools
import ipaddress
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bonsai_jax import choices
from bonsai_jax.cli import options
from bonsai_jax.cli.sampling_options import SamplingOptions
from bonsai_jax.cli.spread import spread

if TYPE_CHECKING:
    from bonsai_jax import Adapter, Model, ModelConfig

GIGABYTE = 10**9
KEYS = "BONSAI_JAX_API_KEYS"  # environment variable


@dataclasses.dataclass(frozen=True)
class PlaceOptions:
    """Where the server is, and who may use it."""

    host: Annotated[
        str,
        typer.Option(metavar="HOST", help="The address to listen at; 0.0.0.0 for all of this machine's."),
    ] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="The port; 0: any that is free.")
    ] = 8000
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            help="A key that requests must give; may be given several times. Other users of this machine can "
            f"read it in the list of processes: better use --api-key-file, or the variable {KEYS}.",
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        typer.Option("--api-key-file", metavar="FILE", help="A file with a key on each line."),
    ] = None
    cors: Annotated[
        list[str] | None,
        typer.Option(
            "--cors",
            metavar="ORIGIN",
            help="The origin of a web page that may use the server, such as https://chat.example, or * for "
            "all; may be given several times.",
        ),
    ] = None

    share_prefixes: Annotated[
        bool,
        typer.Option(
            "--share-prefixes",
            help="Share cached beginnings of prompts between keys, too. Then who has a key can learn from "
            "the time of an answer whether somebody else sent the same beginning.",
        ),
    ] = False

    def keys(self) -> tuple[str, ...]:
        """All keys, from the options, the file and the environment."""
        lines = [*(self.api_key or ()), *os.environ.get(KEYS, "").split(",")]
        if self.api_key_file is not None:
            lines += self.api_key_file.read_text().splitlines()
        keys = tuple(dict.fromkeys(line.strip() for line in lines if line.strip()))
        if not keys and (self.api_key is not None or self.api_key_file is not None):
            raise ValueError("--api-key, --api-key-file: no key was given, or only empty ones")
        return keys

    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


@dataclasses.dataclass(frozen=True)
class PrefixOptions:
    """Where cached beginnings of prompts are kept, beside memory."""

    prefix_cache: Annotated[
        Path | None,
        typer.Option(
            "--prefix-cache",
            metavar="DIR",
            help="Keep cached beginnings of prompts in this folder, too: the next start continues from them.",
        ),
    ] = None
    prefix_cache_size: Annotated[
        float,
        typer.Option(
            "--prefix-cache-size",
            min=0.001,
            metavar="GB",
            help="Most gigabytes in this folder; what was not used for the longest time is removed.",
        ),
    ] = 16.0

    def engine_options(self) -> dict[str, Any]:
        """The arguments of Engine."""
        return {
            "prefix_cache": self.prefix_cache,
            "prefix_cache_bytes": round(self.prefix_cache_size * GIGABYTE),
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LimitOptions:
    """What a request may ask for."""

    max_queue: Annotated[
        int,
        typer.Option(
            "--max-queue", min=0, metavar="N", help="Answers that may wait; further requests get status 429."
        ),
    ] = 256
    max_answers: Annotated[
        int,
        typer.Option(
            "--max-answers",
            min=1,
            metavar="N",
            help="Most answers of one request: n, which is at most 4096, for each prompt.",
        ),
    ] = 128
    max_body: Annotated[
        int, typer.Option("--max-body", min=1, metavar="MB", help="Most megabytes of a request's body.")
    ] = 16
    timeout: Annotated[
        float,
        typer.Option(
            min=0.001, metavar="S", help="Seconds after which an answer ends with the text written so far."
        ),
    ] = 600.0
    grace: Annotated[
        float,
        typer.Option(
            min=0, metavar="S", help="Seconds that running requests have to end after SIGTERM or Ctrl-C."
        ),
    ] = 30.0


@dataclasses.dataclass(frozen=True)
class ServeSamplingOptions(SamplingOptions):
    """How tokens are drawn, in the order of OpenAI-style servers."""

    temperature_first: Annotated[
        bool,
        typer.Option(
            "--temperature-first/--temperature-last",
            help="Apply the temperature before top_p and min_p, as other servers do, or after them.",
        ),
    ] = True


@spread
def command(
    *,
    model: options.LoadOptions,
    alias: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The model's name in the API; the default is that of -m."),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE[:SCALE]",
            help="An adapter for requests whose model is NAME; may be given several times. --lora is for all "
            "requests.",
        ),
    ] = None,
    place: PlaceOptions,
    batch_size: Annotated[
        int,
        typer.Option(
            "-b", "--batch-size", min=0, metavar="N",
            help="Most answers generated at once, on each device; 0: as many as memory suggests.",
        ),
    ] = 0,
    pages: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N",
            help="Pages of the cache, 64 tokens each; the default lets every answer fill the context.",
        ),
    ] = None,
    context: options.Context = 0,
    max_new_tokens: options.NewTokens = -1,
    logit_biases: Annotated[
        int,
        typer.Option(
            "--logit-biases", min=1, max=1024, metavar="N",
            help="Most tokens that the logit_bias of a request may name; many make every step slower.",
        ),
    ] = 32,
    think: options.Think = None,
    pooling: Annotated[
        choices.Pooling,
        typer.Option(help="How /v1/embeddings makes a vector, unless a request says."),
    ] = "mean",
    prefixes: PrefixOptions,
    limits: LimitOptions,
    warmup: Annotated[
        bool,
        typer.Option(help="Compile every program at the start, or each when a request first needs it."),
    ] = True,
    speculation: options.SpeculationOptions,
    data_parallel: options.DataParallel = 1,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Log requests for health and metrics too.")
    ] = False,
    sampling: ServeSamplingOptions,
    run: options.RunOptions,
    devices: options.DeviceOptions,
) -> None:  # fmt: skip
    """Serve a model to programs that speak OpenAI's or Anthropic's API, until SIGTERM or Ctrl-C.

    A line on standard output says where the server is, and another when it is ready. Sampling options and -n
    apply to requests that do not set them. Requests are logged on stderr, one line each, without their texts.
    """
    try:
        from bonsai_jax.server import run as serving
        from bonsai_jax.server.settings import MEGABYTE, Settings
    except ImportError as error:
        if error.name not in ("starlette", "uvicorn", "prometheus_client"):
            raise
        raise ImportError(f'{error.name} is not installed; pip install "bonsai-jax[serve]"') from None
    keys, files = place.keys(), _adapter_files(adapter or [])
    config = run.config(
        context=context,
        all_reduce=devices.all_reduce,
        batch_size=batch_size if pages is None else 1,  # loading checks whether a cache for these fits
        speculation=speculation,
    )
    socket = serving.bound(place.host, place.port)
    level = logging.DEBUG if verbose else logging.INFO
    logging.basicConfig(format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("bonsai_jax.server").setLevel(level)
    if not keys and not place.is_local():
        warning = "without --api-key everybody who reaches this address can use the model"
        print(f"warning: --host {place.host}: {warning}", file=sys.stderr)
    import bonsai_jax as bj
    from bonsai_jax.adapters.files import load_scaled
    from bonsai_jax.model import check_chained
    from bonsai_jax.protocols import fields

    if (drawing := sampling.params()).chained:
        check_chained(speculation.proposer)
    how: dict[str, Any] = {"max_batch_size": batch_size or None, "pages": pages}
    how |= {"speculate": speculation.proposer}
    how |= {"logprobs": fields.MOST_LOGPROBS, "logit_biases": logit_biases}

    def adapters(config: "ModelConfig") -> "dict[str, Adapter]":
        return {name: load_scaled(file, config) for name, file in files.items()}

    def compile_ahead(shapes: "Model") -> None:
        bj.Engine.compile_ahead(shapes, **how, adapters=adapters(shapes.config))

    mesh = devices.mesh(data_parallel)
    if mesh is not None and prefixes.prefix_cache is not None:
        raise ValueError("--prefix-cache works on one device; leave it out, or the options for several")
    loaded = model.load(config, mesh, on_shapes=compile_ahead if warmup else None)
    name = alias or loaded.name
    if name in files:
        raise typer.BadParameter(f"--adapter {name}: the model itself has this name; take another")
    settings = Settings(
        name=name,
        keys=keys,
        share_prefixes=place.share_prefixes,
        local=place.is_local(),
        origins=tuple(place.cors or ()),
        sampling=drawing,
        max_new_tokens=None if max_new_tokens < 0 else max_new_tokens,
        template=options.template_variables(think),
        pooling=pooling,
        max_queue=limits.max_queue,
        max_answers=limits.max_answers,
        max_body=limits.max_body * MEGABYTE,
        timeout_s=limits.timeout,
    )
    engine = bj.Engine(loaded, **how, **prefixes.engine_options(), adapters=adapters(loaded.config))
    say = functools.partial(print, flush=True)
    serving.serve(engine, settings, socket, compile=warmup, grace_s=limits.grace, tell=say)
    if warmup:  # threads that still compile programs for it would hold the process up
        sys.stderr.flush()
        os._exit(0)


def _adapter_files(named: list[str]) -> dict[str, str]:
    """Files of --adapter by name."""
    files: dict[str, str] = {}
    for one in named:
        name, _, file = one.partition("=")
        if not name or not file:
            raise typer.BadParameter(f"--adapter {one}: give NAME=FILE or NAME=FILE:SCALE")
        if name in files:
            raise typer.BadParameter(f"--adapter {name}: it is given twice")
        files[name] = file
    return files
