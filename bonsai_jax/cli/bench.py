"""bonsai-jax bench: a table of speeds, as llama-bench makes it."""

import math
from typing import Annotated, Literal

import typer

from bonsai_jax.cli import options
from bonsai_jax.progress import bar


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [-1]
    if min(sizes) < 0:
        raise typer.BadParameter(f"{text!r} is no list of sizes such as 512 or 128,512")
    return sizes


def command(
    model: options.ModelName = None,
    prompts: Annotated[
        str, typer.Option("-p", "--n-prompt", metavar="SIZES", help="Prompt sizes of the pp tests; 0: none.")
    ] = "512",
    new_tokens: Annotated[
        str, typer.Option("-n", "--n-gen", metavar="SIZES", help="Sizes of the tg tests; 0: none.")
    ] = "128",
    sampled: Annotated[
        str | None,
        typer.Option(
            "-g",
            "--n-sampled",
            metavar="SIZES",
            help="Sizes of the gen tests, sampling included; 0: none. By default those of -n.",
        ),
    ] = None,
    depths: Annotated[
        str, typer.Option("-d", "--n-depth", metavar="SIZES", help="Tokens in the cache before each test.")
    ] = "0",
    batches: Annotated[
        str,
        typer.Option(
            "-b",
            "--n-batch",
            metavar="SIZES",
            help="Rows of the batch tests, 128 + 128 tokens each, with -g sampled too; 0: none.",
        ),
    ] = "0",
    speculate: options.Speculate = None,
    repetitions: Annotated[
        int, typer.Option("-r", "--repetitions", min=1, metavar="N", help="Timed runs of each test.")
    ] = 5,
    output: Annotated[
        Literal["md", "jsonl", "csv"], typer.Option("-o", "--output", help="Form of the table.")
    ] = "md",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object a line: -o jsonl.")] = False,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Instead: phases of a prefill and of a decode step, timed apart."),
    ] = False,
    impl: options.Impl = "auto",
    schedule: options.Schedule = "auto",
    weights: options.Weights = "auto",
    cache_dtype: options.CacheType = None,
    activation_bits: options.ActivationBits = "8",
    data_parallel: options.DataParallel = 1,
    tensor_parallel: options.TensorParallel = 1,
    all_reduce: options.AllReduce = "auto",
    coordinator: options.Coordinator = None,
    num_processes: options.NumProcesses = None,
    process_id: options.ProcessId = None,
    offline: options.Offline = False,
    no_compile_cache: options.NoCompileCache = False,
) -> None:
    """Measure prompt processing (pp), token generation (tg), and with sampling (gen): tok/s, GB/s, share of
    the memory ceiling.

    Sizes may be lists: -p 512,2048. pp and tg are llama-bench's, without tokenization and sampling; gen is
    what generate and stream run, with the default sampling, and with --speculate behind a prompt of random
    tokens.

    With --profile: what of a prefill (-p) and of a decode step (-n; of each of -b's numbers of rows, else of
    one) takes how long, and how near that is to what memory or tensor cores allow. Phases are timed apart, so
    they do not sum to the step, which has a row of its own.

    With --data-parallel every device does the whole test, and the tokens of all count.
    """
    sizes, rows = (_sizes(prompts), _sizes(new_tokens), _sizes(depths)), _sizes(batches)
    of_gen = _sizes(new_tokens if sampled is None else sampled)
    if not any(sizes[0] + sizes[1] + of_gen + rows):
        raise typer.BadParameter("nothing to measure: -p, -n, -g and -b are all 0")
    if profile and data_parallel * tensor_parallel > 1:
        raise typer.BadParameter("--profile measures one device")
    output = "jsonl" if as_json else output
    options.compile_cache_off(no_compile_cache)
    options.join_processes(coordinator, num_processes, process_id)

    import bonsai_jax as bj
    from bonsai_jax.measure import bench
    from bonsai_jax.measure import profile as phases
    from bonsai_jax.network import architectures
    from checkpoints import open_checkpoint

    context = max(
        max(sizes[0] + sizes[1] + of_gen) + max(sizes[2]), 2 * bench.BATCH_TOKENS if any(rows) else 0
    )
    run = options.run_config(
        impl=impl,
        schedule=schedule,
        context=context,
        weights=weights,
        cache_dtype=cache_dtype,
        activation_bits=activation_bits,
        all_reduce=all_reduce,
        speculate=speculate,
    )
    checkpoint = open_checkpoint("demo" if model is None else model, offline=offline)
    most = architectures.config_of(checkpoint).context_length
    if context > most:
        raise typer.BadParameter(
            f"-p, -n, -g, -d and -b ask for {context} tokens of a row; the model was made for at most {most}"
        )
    mesh = options.mesh(data=data_parallel, tensor=tensor_parallel)
    with bar("loading") as update:
        loaded = bj.from_checkpoint(checkpoint, run, mesh=mesh, progress=update)
    if profile:
        header = {"md": phases.markdown_header(), "csv": bench.csv_header(phases.Phase), "jsonl": None}[
            output
        ]
        if header:
            print(header)
        form = {"md": phases.markdown, "csv": bench.csv_line, "jsonl": bench.json_line}[output]
        steps = [{"tokens": n} for n in sizes[0] if n]
        steps += [{"rows": n} for n in rows if n] or [{"rows": 1} for _ in filter(None, sizes[1][:1])]
        for depth in sizes[2]:
            for step in steps:
                for row in phases.measure(loaded, depth, repetitions, **step):
                    print(form(row), flush=True)
        return
    size_bytes = sum(t.nbytes for t in checkpoint.tensors.values())
    parameters = sum(math.prod(t.shape) for t in checkpoint.tensors.values())
    if header := {"md": bench.markdown_header, "csv": bench.csv_header, "jsonl": str}[output]():
        print(header)
    with bar("measuring") as update:
        how = {"sampled": of_gen, "batches": rows, "speculate": speculate, "progress": update}
        for row in bench.measure(loaded, *sizes, repetitions, **how):
            if output == "md":
                print(bench.markdown(row, size_bytes, parameters), flush=True)
            else:
                print({"jsonl": bench.json_line, "csv": bench.csv_line}[output](row), flush=True)
