"""bonsai-jax bench: a table of speeds, as llama-bench makes it."""

import math
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bonsai_jax.cli import options
from bonsai_jax.cli.spread import spread
from bonsai_jax.progress import bar

if TYPE_CHECKING:
    from bonsai_jax import Model

Form = Literal["md", "jsonl", "csv"]


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [-1]
    if min(sizes) < 0:
        raise typer.BadParameter(f"{text!r} is not a list of sizes such as 512 or 128,512")
    return sizes


@spread
def command(
    *,
    model: options.LoadOptions,
    prompts: Annotated[
        str,
        typer.Option(
            "-p", "--n-prompt", metavar="SIZES", help="Prompt sizes of the pp tests; 0: no such test."
        ),
    ] = "512",
    new_tokens: Annotated[
        str, typer.Option("-n", "--n-gen", metavar="SIZES", help="Sizes of the tg tests; 0: no such test.")
    ] = "128",
    sampled: Annotated[
        str | None,
        typer.Option(
            "-g",
            "--n-sampled",
            metavar="SIZES",
            help="Sizes of the gen tests, which include sampling; 0: no such test. Default: those of -n.",
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
            help="Batch sizes of the batch tests, of sequences of 128 + 128 tokens, with -g also sampled; 0: "
            "no such test.",
        ),
    ] = "0",
    speculation: options.SpeculationOptions,
    repetitions: Annotated[
        int, typer.Option("-r", "--repetitions", min=1, metavar="N", help="Timed runs of each test.")
    ] = 5,
    output: Annotated[Form, typer.Option("-o", "--output", help="Form of the table.")] = "md",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line, as -o jsonl does.")
    ] = False,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Time the phases of a prefill and of a decode step instead."),
    ] = False,
    data_parallel: options.DataParallel = 1,
    run: options.RunOptions,
    devices: options.DeviceOptions,
    processes: options.ProcessOptions,
) -> None:
    """Measure prompt processing (pp), token generation (tg), and generation with sampling (gen): tok/s, GB/s,
    share of the memory ceiling.

    Sizes may be lists: -p 512,2048. pp and tg are llama-bench's tests, without tokenization and sampling. gen
    is what generate and stream run, with the default sampling; with --speculate it follows a prompt of random
    tokens.

    With --profile: how long each phase of a prefill (-p) and of a decode step (-n, or each batch size of -b)
    takes, and how near it comes to the limit set by memory or by the tensor cores. Phases are timed one by
    one, so they do not add up to the whole step, which has a row of its own.

    With --data-parallel every device runs the whole test, and the tokens of all devices count.
    """
    sizes, batch_sizes = (_sizes(prompts), _sizes(new_tokens), _sizes(depths)), _sizes(batches)
    sampled_sizes = _sizes(new_tokens if sampled is None else sampled)
    if not any(sizes[0] + sizes[1] + sampled_sizes + batch_sizes):
        raise typer.BadParameter("nothing to measure: -p, -n, -g and -b are all 0")
    if profile and data_parallel * devices.tensor_parallel > 1:
        raise typer.BadParameter("--profile measures one device")
    form: Form = "jsonl" if as_json else output
    processes.join()

    from bonsai_jax.measure import bench
    from bonsai_jax.network import architectures

    longest = max(sizes[0] + sizes[1] + sampled_sizes) + max(sizes[2])
    context = max(longest, 2 * bench.BATCH_TOKENS if any(batch_sizes) else 0)
    config = run.config(context=context, all_reduce=devices.all_reduce, speculation=speculation)
    checkpoint = model.checkpoint()
    limit = architectures.config_of(checkpoint).context_length
    if context > limit:
        raise typer.BadParameter(
            f"-p, -n, -g, -d and -b ask for {context} tokens per sequence; "
            f"the model was made for at most {limit}"
        )
    loaded = model.load(config, devices.mesh(data_parallel), checkpoint)
    if profile:
        steps = [{"tokens": n} for n in sizes[0] if n]
        steps += [{"rows": n} for n in batch_sizes if n] or [{"rows": 1} for _ in filter(None, sizes[1][:1])]
        _profile(loaded, sizes[2], steps, repetitions, form)
        return
    size_bytes = sum(t.nbytes for t in checkpoint.tensors.values())
    parameters = sum(math.prod(t.shape) for t in checkpoint.tensors.values())
    if header := {"md": bench.markdown_header, "csv": bench.csv_header, "jsonl": str}[form]():
        print(header)
    with bar("measuring") as update:
        how = {
            "sampled": sampled_sizes,
            "batches": batch_sizes,
            "speculate": speculation.proposer,
            "progress": update,
        }
        for row in bench.measure(loaded, *sizes, repetitions, **how):
            if form == "md":
                print(bench.markdown(row, size_bytes, parameters), flush=True)
            else:
                print({"jsonl": bench.json_line, "csv": bench.csv_line}[form](row), flush=True)


def _profile(
    model: "Model", depths: list[int], steps: list[dict[str, int]], repetitions: int, form: Form
) -> None:
    """Print the phases of each step at each depth."""
    from bonsai_jax.measure import bench
    from bonsai_jax.measure import profile as phases

    if form == "md":
        print(phases.markdown_header())
    elif form == "csv":
        print(bench.csv_header(phases.Phase))
    line = {"md": phases.markdown, "csv": bench.csv_line, "jsonl": bench.json_line}[form]
    for depth in depths:
        for step in steps:
            for row in phases.measure(model, depth, repetitions, **step):
                print(line(row), flush=True)
