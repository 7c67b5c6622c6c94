"""bonsai-jax batch: a file of requests to a file of answers, in OpenAI's batch format."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bonsai_jax.cli import options

if TYPE_CHECKING:
    from bonsai_jax import Model
    from bonsai_jax.batch import Report


def command(
    source: Annotated[
        Path,
        typer.Argument(metavar="IN", help="A file with a request on each line, as OpenAI's batches have."),
    ],
    output: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="Where answers go, a line each, as they come; what it has already is kept."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--model",
            metavar="MODEL",
            help="What answers all lines; left out, the model that they name.",
        ),
    ] = None,
    batch_size: Annotated[
        int,
        typer.Option(
            "--batch-size", min=1, metavar="N", help="Most sequences generated at once, on each device."
        ),
    ] = 32,
    pages: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Pages of the cache, 64 tokens each; left out, enough for full contexts.",
        ),
    ] = None,
    max_new_tokens: options.NewTokens = -1,
    think: options.Think = None,
    temperature: options.Temperature = 0.8,
    top_k: options.TopK = 40,
    top_p: options.TopP = 0.95,
    min_p: options.MinP = 0.05,
    temperature_first: options.TemperatureFirst = False,
    repetition_penalty: options.RepeatPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    seed: options.Seed = -1,
    context: options.Context = 0,
    impl: options.Impl = "auto",
    schedule: options.Schedule = "auto",
    weights: options.Weights = "auto",
    cache_dtype: options.CacheType = None,
    activation_bits: options.ActivationBits = "8",
    data_parallel: options.DataParallel = 1,
    tensor_parallel: options.TensorParallel = 1,
    all_reduce: options.AllReduce = "auto",
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Run on a Ray cluster, an actor for each GPU: auto, ray://host:port, or local, which starts "
            "one here.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="With --ray: actors; left out, as many as GPUs, or without any as nodes."
        ),
    ] = None,
    as_json: options.Json = False,
    offline: options.Offline = False,
    no_compile_cache: options.NoCompileCache = False,
) -> None:
    """Answer a file of requests in OpenAI's batch format (chat completions and completions), many at once.

    Sampling options and -n are for lines that do not say; with --seed S line i has S + i - 1. Answers come in
    no order. Run again, it answers the lines that have none yet, and those with an error. stderr says at the
    end what it cost; with --json, stdout has the same as one object.
    """
    if workers is not None and ray is None:
        raise typer.BadParameter("--workers needs --ray")
    if ray is not None and data_parallel > 1:
        raise typer.BadParameter("--data-parallel is for one process; with --ray give --workers")
    params = options.sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        temperature_first=temperature_first,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
    )
    run = options.run_config(
        impl=impl,
        schedule=schedule,
        context=context,
        weights=weights,
        cache_dtype=cache_dtype,
        activation_bits=activation_bits,
        all_reduce=all_reduce,
        batch_size=batch_size if pages is None else 1,  # what loading asks of memory
    )
    from bonsai_jax import batch

    job = batch.Job(
        batch_size=batch_size,
        pages=pages,
        sampling=params,
        max_new_tokens=None if max_new_tokens < 0 else max_new_tokens,
        template={} if think is None else {"enable_thinking": think},
    )
    how = {"named": model, "progress": True}
    if ray is None:

        def load(name: str) -> "Model":
            mesh = options.mesh(data=data_parallel, tensor=tensor_parallel)
            return options.load(name, run, on=mesh, offline=offline, no_compile_cache=no_compile_cache)

        report = batch.run(load, source, output, job, **how)
    else:
        from bonsai_jax.batch import on_ray

        of_actor = on_ray.Load(run, tensor_parallel, offline, not no_compile_cache)
        where = {"address": ray, "workers": workers}
        report = on_ray.run(of_actor, source, output, job, **where, **how, tell=_tell)
    print(_line_of(report), file=sys.stderr)
    if as_json:
        names = ("lines", "errors", "done_before", "prompt_tokens", "new_tokens", "seconds", "tok_s")
        names += ("seconds_per_1000_lines", "devices", "device_seconds", "cpu_seconds")
        print(options.to_json({name: getattr(report, name) for name in names}))


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _line_of(report: "Report") -> str:
    before = f", {report.done_before:,} done before" if report.done_before else ""
    text = f"{report.lines:,} lines answered, {report.errors:,} with an error{before}"
    if report.seconds_per_1000_lines is None:
        return f"{text}; nothing was left to do"
    return (
        f"{text}; {report.seconds:,.1f} s, {report.seconds_per_1000_lines:,.1f} s for 1,000 lines; "
        f"{report.prompt_tokens:,} tokens in, {report.new_tokens:,} out, {report.tok_s:,.0f} tok/s; "
        f"{report.device_seconds:,.1f} device seconds, {report.cpu_seconds:,.1f} CPU seconds"
    )
