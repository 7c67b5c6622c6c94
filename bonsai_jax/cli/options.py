"""Options that several commands share, and what they become: a loaded model, sampling parameters, a text."""

import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bonsai_jax.progress import bar

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from bonsai_jax import Model, RunConfig, SamplingParams

Impls = Literal["auto", "reference", "pallas"]
Schedules = Literal["auto", "one_launch", "layer_products", "launches"]
Holdings = Literal["auto", "packed", "decoded"]
CacheTypes = Literal["float32", "bfloat16", "float16", "int8"] | None
Bits = Literal["8", "16"]  # typer has choices of text only

ModelName = Annotated[
    str | None,
    typer.Option(
        "-m",
        "--model",
        metavar="MODEL",
        help="A GGUF file, a Hugging Face folder, user/repo:quant, synth:bonsai-8b:q1_0, "
        "or demo, the default.",
    ),
]
Impl = Annotated[Impls, typer.Option(help="What runs the ops: the reference in jnp, or Pallas kernels.")]
Schedule = Annotated[
    Schedules,
    typer.Option(help="How the kernels of a decode step are launched: all layers at once, or each."),
]
Context = Annotated[
    int,
    typer.Option(
        "-c",
        "--ctx",
        min=0,
        metavar="N",
        help="Most tokens of prompt and answer together; 0: the model's own, at most 4096.",
    ),
]
Weights = Annotated[
    Holdings,
    typer.Option(help="Keep weights packed as in the file, or decode them to float32 at load."),
]
CacheType = Annotated[
    CacheTypes,
    typer.Option(
        "--cache-dtype",
        help="Type of keys and values in the cache; by default float32 on CPU, float16 on GPU. "
        "int8 takes half of float16's memory.",
    ),
]
ActivationBits = Annotated[
    Bits,
    typer.Option(
        "--activation-bits", help="Bits to which kernels may round activations; 16 is nearly exact."
    ),
]
DataParallel = Annotated[
    int,
    typer.Option(
        "--data-parallel",
        "-dp",
        min=1,
        metavar="N",
        help="Devices that each hold all weights, and rows of their own.",
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        "--tensor-parallel",
        "-tp",
        min=1,
        metavar="N",
        help="Devices over which one copy of the weights is split.",
    ),
]
AllReduce = Annotated[
    Literal["auto", "psum", "mailbox"],
    typer.Option(
        help="How devices that share weights sum in a decode step: psum (NCCL) or by each other's memory."
    ),
]
Coordinator = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Address of process 0, where one command on each of several hosts runs one model.",
    ),
]
NumProcesses = Annotated[
    int | None, typer.Option("--num-processes", min=1, metavar="N", help="How many processes there are.")
]
ProcessId = Annotated[
    int | None, typer.Option("--process-id", min=0, metavar="N", help="Which of them this is, from 0.")
]
Offline = Annotated[
    bool, typer.Option("--offline", help="Never use the network: take user/repo from the cache.")
]
NoCompileCache = Annotated[
    bool, typer.Option("--no-compile-cache", help="Do not keep compiled programs in the user's cache folder.")
]


def _new_tokens(value: int) -> int:
    if value == 0:  # said before a model is loaded
        raise ValueError("max_new_tokens is 0; it must be a whole number, 1 or more, or -1")
    return value


def _stop(value: list[str] | None) -> list[str] | None:
    if "" in (value or ()):
        raise ValueError("stop: an empty text would end every answer before it begins")
    return value


NewTokens = Annotated[
    int,
    typer.Option(
        "-n",
        "--max-new-tokens",
        "--n-predict",
        min=-1,
        callback=_new_tokens,
        metavar="N",
        help="Most tokens of an answer; -1: until the context is full.",
    ),
]
Temperature = Annotated[
    float, typer.Option("--temp", min=0, metavar="T", help="Temperature; 0: always the most likely token.")
]
TopK = Annotated[
    int, typer.Option("--top-k", min=0, metavar="K", help="Keep the k most likely tokens; 0: all.")
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p", min=0, max=1, metavar="P", help="Keep tokens up to this probability in sum; 1: all."
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        "--min-p",
        min=0,
        max=1,
        metavar="P",
        help="Keep tokens this likely, relative to the likeliest; 0: all.",
    ),
]
TemperatureFirst = Annotated[
    bool, typer.Option("--temperature-first", help="Apply --temp before --top-p and --min-p, not after them.")
]
RepeatPenalty = Annotated[
    float,
    typer.Option("--repeat-penalty", metavar="X", help="Divides the logits of tokens seen before; 1: none."),
]
PresencePenalty = Annotated[
    float,
    typer.Option(
        "--presence-penalty", metavar="X", help="Subtracted from the logits of tokens in the answer; 0: none."
    ),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(
        "--frequency-penalty", metavar="X", help="The same, for each time that they are in it; 0: none."
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "-s", "--seed", min=-1, metavar="N", help="Seed of the random draws; -1: another one every time."
    ),
]
Speculate = Annotated[
    Literal["ngram", "mtp"] | None,
    typer.Option(
        help="Draw the same tokens in fewer steps, where they are foreseen: ngram looks up what followed "
        "the newest ones earlier in prompt and answer; mtp asks the draft layer that the file has."
    ),
]
Think = Annotated[
    bool | None,
    typer.Option(
        "--think/--no-think", help="Whether a model that can think does; left out, as its template has it."
    ),
]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system message.")]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        metavar="TEXT",
        callback=_stop,
        help="A text that ends the answer; may be given several times.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object, instead of text.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on behind the model's end tokens.")]


def sampling(*, seed: int, **params: Any) -> "SamplingParams":
    """Parameters by the names that SamplingParams has for them."""
    from bonsai_jax import SamplingParams

    return SamplingParams(seed=None if seed < 0 else seed, **params)


def run_config(
    *,
    context: int,
    impl: Impls,
    weights: Holdings,
    cache_dtype: CacheTypes,
    schedule: Schedules,
    activation_bits: Bits = "8",
    all_reduce: Literal["auto", "psum", "mailbox"] = "auto",
    batch_size: int = 1,
    speculate: Literal["ngram", "mtp"] | None = None,
) -> "RunConfig":
    """How the command line runs a model."""
    from bonsai_jax import RunConfig

    return RunConfig(
        impl=impl,
        schedule=schedule,
        context=context,
        weights=weights,
        cache_dtype=cache_dtype,
        activation_bits=16 if activation_bits == "16" else 8,
        all_reduce=all_reduce,
        batch_size=batch_size,
        draft=speculate == "mtp",
    )


def join_processes(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Make one machine of several processes (jax.distributed.initialize): before jax is asked for devices.
    All but process 0 are silent from then on."""
    if coordinator is None:
        if num_processes is not None or process_id is not None:
            raise typer.BadParameter("--num-processes and --process-id need --coordinator host:port")
        return
    import jax

    # What is left out is found where a cluster's manager (Slurm, MPI) started the processes.
    jax.distributed.initialize(coordinator, num_processes, process_id)
    if jax.process_index():
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the end


def mesh(*, data: int = 1, tensor: int = 1) -> "Mesh | None":
    """The devices to run on; None for the default one. With several processes, all of their devices."""
    import jax

    import bonsai_jax as bj

    if jax.process_count() > 1 and data * tensor != jax.device_count():
        raise typer.BadParameter(
            f"--data-parallel {data} x --tensor-parallel {tensor} leaves processes without work: "
            f"they have {jax.device_count()} devices"
        )
    return None if data == tensor == 1 else bj.make_mesh(data, tensor)


def load(
    source: str | None,
    run: "RunConfig",
    *,
    on: "Mesh | None" = None,
    offline: bool = False,
    no_compile_cache: bool = False,
) -> "Model":
    """The model, loaded with a progress bar; the demo model where none is named. A line to stderr says what
    is not installed and would help."""
    compile_cache_off(no_compile_cache)
    import bonsai_jax as bj
    from bonsai_jax.network import architectures
    from bonsai_jax.weights import memory
    from checkpoints import open_checkpoint

    # A download has a bar of its own.
    checkpoint = open_checkpoint("demo" if source is None else source, offline=offline)
    with bar("loading") as update:
        loaded = bj.from_checkpoint(checkpoint, run, mesh=on, progress=update)
    description = architectures.describe(checkpoint)
    if missing := memory.missing_extra(description, loaded.run):
        print(missing, file=sys.stderr)
    return loaded


def compile_cache_off(asked: bool) -> None:
    """Turn off for this process, if asked to, what loading a model turns on (compile_cache.py)."""
    if asked:
        import jax

        jax.config.update("jax_enable_compilation_cache", False)


STDIN = Path("-")


def read_text(path: Path) -> str:
    """A text file, or standard input for "-", without its last line's end, as llama.cpp reads it. ValueError
    if it is not UTF-8, or if standard input is empty."""
    name = "standard input" if path == STDIN else str(path)
    try:
        text = sys.stdin.read() if path == STDIN else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: byte {error.start} is not UTF-8 text") from None
    if not text and path == STDIN:
        raise ValueError("standard input is empty; give a text as the argument, with -f, or piped")
    return text.removesuffix("\n")


def to_json(value: Any) -> str:
    """One line of JSON. Numpy's values become numbers and lists; NaN and infinity become null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if isinstance(value, Path):
            return str(value)
        if hasattr(value, "tolist"):  # numpy's, without importing numpy
            return plain(value.tolist())
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(value))


def table(rows: list[tuple[Any, ...]]) -> str:
    """Lines of aligned columns: numbers as they are, each column as wide as its widest entry."""
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(str(x).ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )
