"""bonsai-jax batch: a file of requests to a file of answers, in OpenAI's batch format."""

import dataclasses
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bonsai_jax.cli import options, text
from bonsai_jax.cli.sampling_options import SamplingOptions
from bonsai_jax.cli.spread import spread

if TYPE_CHECKING:
    from bonsai_jax import Model
    from bonsai_jax.batch import Report


@dataclasses.dataclass(frozen=True)
class BatchModelOptions(options.LoadOptions):
    """Which model, where the requests may name one."""

    name: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--model",
            metavar="MODEL",
            help="The model that answers every line; the default is the one that the lines name.",
        ),
    ] = None


@spread
def command(
    *,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN",
            help="A file with a request on each line, in OpenAI's batch format; - is standard input.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="The file to which answers are appended, a line each, in the order they end; - is standard "
            "output.",
        ),
    ],
    model: BatchModelOptions,
    batch_size: Annotated[
        int,
        typer.Option(
            "-b", "--batch-size", min=1, metavar="N", help="Most answers generated at once, on each device."
        ),
    ] = 32,
    pages: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Pages of the cache, 64 tokens each; the default lets every sequence fill the context.",
        ),
    ] = None,
    max_new_tokens: options.NewTokens = -1,
    context: options.Context = 0,
    think: options.Think = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Run on a Ray cluster, with an actor on each GPU: auto, ray://host:port, or local, which "
            "starts a cluster on this machine.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="With --ray: number of actors; the default is one per GPU, or per node if there are none.",
        ),
    ] = None,
    data_parallel: options.DataParallel = 1,
    as_json: options.Json = False,
    sampling: SamplingOptions,
    run: options.RunOptions,
    devices: options.DeviceOptions,
) -> None:
    """Answer a file of requests in OpenAI's batch format (chat completions and completions), many at once.

    Sampling options and -n apply to requests that do not set them; with --seed S, line i has seed S + i - 1.
    Answers are written in the order in which they end. Run the command again to answer the lines that have no
    answer yet, or an error. At the end stderr reports the cost; with --json, stdout has it as one object.
    """
    if workers is not None and ray is None:
        raise typer.BadParameter("--workers needs --ray")
    if as_json and str(output) == "-":
        raise typer.BadParameter("--json and OUT - would both write to standard output; leave one out")
    if ray is not None and data_parallel > 1:
        raise typer.BadParameter("--data-parallel is for one process; with --ray give --workers")
    config = run.config(
        context=context,
        all_reduce=devices.all_reduce,
        batch_size=batch_size if pages is None else 1,  # loading checks whether a cache for these fits
    )
    from bonsai_jax import batch

    job = batch.Job(
        batch_size=batch_size,
        pages=pages,
        sampling=sampling.params(),
        max_new_tokens=None if max_new_tokens < 0 else max_new_tokens,
        template=options.template_variables(think),
    )
    how = {"named": model.name, "progress": True}
    if ray is None:

        def load(name: str) -> "Model":
            return dataclasses.replace(model, name=name).load(config, devices.mesh(data_parallel))

        report = batch.run(load, source, output, job, **how)
    else:
        from bonsai_jax.batch import on_ray

        how_loaded = model.offline, not model.no_compile_cache, tuple(model.lora or ())
        on_actor = on_ray.Load(config, devices.tensor_parallel, *how_loaded)
        say = functools.partial(print, file=sys.stderr, flush=True)
        report = on_ray.run(on_actor, source, output, job, address=ray, workers=workers, **how, tell=say)
    print(_summary(report), file=sys.stderr)
    if as_json:
        names = ("lines", "errors", "done_before", "prompt_tokens", "new_tokens", "seconds", "tok_s")
        names += ("seconds_per_1000_lines", "devices", "device_seconds", "cpu_seconds")
        print(text.json_line({name: getattr(report, name) for name in names}))


def _summary(report: "Report") -> str:
    before = f", {report.done_before:,} done before" if report.done_before else ""
    counts = f"{report.lines:,} lines answered, {report.errors:,} with an error{before}"
    if report.seconds_per_1000_lines is None:
        return f"{counts}; nothing was left to do"
    return (
        f"{counts}; {report.seconds:,.1f} s, {report.seconds_per_1000_lines:,.1f} s for 1,000 lines; "
        f"{report.prompt_tokens:,} tokens in, {report.new_tokens:,} out, {report.tok_s:,.0f} tok/s; "
        f"{report.device_seconds:,.1f} device seconds, {report.cpu_seconds:,.1f} CPU seconds"
    )
