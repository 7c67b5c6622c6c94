"""Options that several commands share. A dataclass is a group of options: a command takes it as one argument
(spread.py), and a method turns it into what it is for: a model, a RunConfig, SamplingParams, a mesh. Defaults
are those of the library."""

import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bonsai_jax import choices
from bonsai_jax.decoding import proposers
from bonsai_jax.progress import bar

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.sharding import Mesh

    from bonsai_jax import Constraint, Model, RunConfig
    from checkpoints import Checkpoint


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Which model."""

    name: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--model",
            metavar="MODEL",
            help="A GGUF file, a Hugging Face folder, user/repo:quant, synth:bonsai-8b:q1_0, "
            "stories, or demo, the default.",
        ),
    ] = None
    offline: Annotated[
        bool,
        typer.Option("--offline", help="Do not use the network: load user/repo from the cache on this disk."),
    ] = False

    def checkpoint(self) -> "Checkpoint":
        """The model's checkpoint, opened; that of the demo model if no model is named."""
        from checkpoints import open_checkpoint

        return open_checkpoint("demo" if self.name is None else self.name, offline=self.offline)


@dataclasses.dataclass(frozen=True)
class LoadOptions(ModelOptions):
    """Which model, for commands that load and run it."""

    no_compile_cache: Annotated[
        bool,
        typer.Option("--no-compile-cache", help="Do not store compiled programs in the user's cache folder."),
    ] = False
    lora: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE[:SCALE]",
            help="An adapter (LoRA) to put beside the weights: a folder of PEFT, or llama.cpp's .gguf file; "
            "may be given several times, which adds them up.",
        ),
    ] = None

    def load(
        self,
        run: "RunConfig",
        mesh: "Mesh | None" = None,
        checkpoint: "Checkpoint | None" = None,
        on_shapes: "Callable[[Model], None] | None" = None,
    ) -> "Model":
        """The model, loaded with a progress bar. A line on stderr names an extra that is not installed and
        would make it faster.

        checkpoint  the opened checkpoint; None: it is opened here
        on_shapes   as for bj.load
        """
        if self.no_compile_cache:
            turn_off_compile_cache()
        from bonsai_jax.starting import start_device

        start_device()  # it takes half a second on a GPU, while the rest is imported
        import bonsai_jax as bj
        from bonsai_jax.network import architectures
        from bonsai_jax.weights import memory

        checkpoint = checkpoint or self.checkpoint()  # a download shows a bar of its own
        with bar("loading") as update:
            loaded = bj.from_checkpoint(
                checkpoint,
                run,
                mesh=mesh,
                lora=self.lora or (),
                offline=self.offline,
                progress=update,
                on_shapes=on_shapes,
            )
        if missing := memory.missing_extra(architectures.describe(checkpoint), loaded.run):
            print(missing, file=sys.stderr)
        return loaded


def turn_off_compile_cache() -> None:
    """In this process; loading a model would turn it on (compile_cache.py)."""
    import jax

    jax.config.update("jax_enable_compilation_cache", False)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How the model runs."""

    impl: Annotated[
        choices.Impl,
        typer.Option(help="What computes the operations: a reference in jax.numpy, or Pallas kernels."),
    ] = "auto"
    schedule: Annotated[
        choices.Schedule,
        typer.Option(
            help="How the kernels of a decode step are launched: all layers in one launch, two, five or "
            "eight launches per layer, or one for each operation."
        ),
    ] = "auto"
    weights: Annotated[
        choices.WeightStorage,
        typer.Option(help="Store weights packed as in the file, or dequantize them to float32 at load."),
    ] = "auto"
    cache_dtype: Annotated[
        choices.CacheDtype | None,
        typer.Option(
            help="Type of keys and values in the cache; the default is float32 on a CPU, float16 on a GPU. "
            "int8 takes half the memory of float16.",
        ),
    ] = None
    state_dtype: Annotated[
        choices.StateDtype,
        typer.Option(
            help="Type of the states of gated delta nets (Qwen3.5, Bonsai 27B); float16 takes half the "
            "memory of float32, and steps of several sequences are faster.",
        ),
    ] = "float32"
    activation_bits: Annotated[
        choices.ActivationBits,
        typer.Option(help="Bits to which kernels may round activations; 16 is nearly exact."),
    ] = 8

    def config(
        self,
        *,
        context: int,
        all_reduce: choices.AllReduce = "auto",
        batch_size: int = 1,
        speculation: "SpeculationOptions | None" = None,
    ) -> "RunConfig":
        """The RunConfig; it loads what the proposer needs."""
        from bonsai_jax import RunConfig

        others = {"context": context, "all_reduce": all_reduce, "batch_size": batch_size}
        return RunConfig(
            **dataclasses.asdict(self), **others, **({} if speculation is None else speculation.loads)
        )


DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="MODEL",
        help="A smaller model with the same vocabulary, which guesses the tokens; named as with -m.",
    ),
]


@dataclasses.dataclass(frozen=True)
class SpeculationOptions:
    """Whether a step draws several tokens, and who proposes them."""

    speculate: Annotated[
        Literal[*proposers.names()] | None,  # pyrefly: ignore
        typer.Option(
            help="Draw the same tokens in fewer steps, by guessing several and checking them at once. ngram "
            "guesses what followed the newest tokens earlier in the text; mtp asks the draft layer in the "
            "model's file; draft_model asks the model of --draft, which implies it."
        ),
    ] = None
    draft: DraftModel = None

    @property
    def proposer(self) -> str | None:
        """The proposer's name; None: steps do not speculate. Raises BadParameter for options that contradict
        each other."""
        if self.speculate == "draft_model" and self.draft is None:
            raise typer.BadParameter("--speculate draft_model needs --draft MODEL")
        if self.draft is not None and self.speculate not in (None, "draft_model"):
            raise typer.BadParameter(f"--draft MODEL and --speculate {self.speculate}: give one of them")
        return self.speculate if self.draft is None else "draft_model"

    @property
    def loads(self) -> dict[str, Any]:
        """Fields of RunConfig."""
        name = self.proposer
        if name is None or (needs := proposers.get(name).LOADS) is None:
            return {}
        return {needs: True if self.draft is None else self.draft}


@dataclasses.dataclass(frozen=True)
class DeviceOptions:
    """The devices that share one copy of the weights."""

    tensor_parallel: Annotated[
        int,
        typer.Option(
            "--tensor-parallel",
            "-tp",
            min=1,
            metavar="N",
            help="Devices over which one copy of the weights is split.",
        ),
    ] = 1
    all_reduce: Annotated[
        choices.AllReduce,
        typer.Option(
            help="How these devices add their partial sums in a decode step: psum, which is NCCL on GPUs, or "
            "mailbox, by writing into each other's memory."
        ),
    ] = "auto"

    def mesh(self, data_parallel: int = 1) -> "Mesh | None":
        """The devices to run on, of all processes if there are several; None for the default device."""
        import jax

        import bonsai_jax as bj

        if jax.process_count() > 1 and data_parallel * self.tensor_parallel != jax.device_count():
            raise typer.BadParameter(
                f"--data-parallel {data_parallel} x --tensor-parallel {self.tensor_parallel} leaves "
                f"processes without work: they have {jax.device_count()} devices"
            )
        if data_parallel == self.tensor_parallel == 1:
            return None
        return bj.make_mesh(data_parallel, self.tensor_parallel)


@dataclasses.dataclass(frozen=True)
class ProcessOptions:
    """The processes, on one host or several, that run one model together."""

    coordinator: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Address of process 0, if the same command runs on several hosts to run one model together.",
        ),
    ] = None
    num_processes: Annotated[
        int | None, typer.Option("--num-processes", min=1, metavar="N", help="How many processes run it.")
    ] = None
    process_id: Annotated[
        int | None,
        typer.Option("--process-id", min=0, metavar="N", help="The number of this process, counted from 0."),
    ] = None

    def join(self) -> None:
        """Connect to the other processes (jax.distributed.initialize), before jax is asked for devices. From
        then on every process but process 0 prints nothing."""
        if self.coordinator is None:
            if self.num_processes is not None or self.process_id is not None:
                raise typer.BadParameter("--num-processes and --process-id need --coordinator host:port")
            return
        import jax

        # jax asks the cluster's manager (Slurm, MPI) for what is left out.
        jax.distributed.initialize(self.coordinator, self.num_processes, self.process_id)
        if jax.process_index():
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends


def _stop_texts(value: list[str] | None) -> list[str] | None:
    if "" in (value or ()):
        raise ValueError("stop: an empty text would end every answer before it begins")
    return value


Think = Annotated[
    bool | None,
    typer.Option(
        "--think/--no-think",
        help="Whether a model that can think does so; the default is its chat template's.",
    ),
]


@dataclasses.dataclass(frozen=True)
class AnswerOptions:
    """What an answer begins with and what ends it."""

    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system message.")] = None
    think: Think = None
    stop: Annotated[
        list[str] | None,
        typer.Option(
            "--stop",
            metavar="TEXT",
            callback=_stop_texts,
            help="A text that ends the answer; may be given several times.",
        ),
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Do not stop at the model's end tokens.")
    ] = False


@dataclasses.dataclass(frozen=True)
class ConstraintOptions:
    """What an answer must match."""

    json_schema: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Answer in JSON that matches the schema in this file; -: standard input. Or the schema "
            'itself, such as \'{"type": "object"}\'.',
        ),
    ] = None
    regex: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Answer with a text that matches this expression as a whole."),
    ] = None
    grammar: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Answer as the grammar in this file says, in Lark's syntax or GBNF."
        ),
    ] = None
    choice: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Answer with this text, or another one that is given likewise."),
    ] = None

    def constraint(self) -> "Constraint | None":
        """The constraint; None: an answer may be anything."""
        from bonsai_jax import constraints
        from bonsai_jax.cli import text

        given = [(name, value) for name, value in vars(self).items() if value]
        if len(given) > 1:
            names = " and ".join(f"--{name.replace('_', '-')}" for name, _ in given)
            raise typer.BadParameter(f"{names}: give one of them")
        if not given:
            return None
        ((name, value),) = given
        in_file = name == "grammar" or (name == "json_schema" and not value.lstrip().startswith("{"))
        return getattr(constraints, name)(text.read(Path(value)) if in_file else value)


def template_variables(think: bool | None) -> dict[str, Any]:
    """Variables of the chat template for --think and --no-think; {} if neither is given."""
    return {} if think is None else {"enable_thinking": think}


# ---- Single options ----


def _new_tokens(value: int) -> int:
    if value == 0:  # refused before a model is loaded
        raise ValueError("max_new_tokens is 0; it must be a whole number, 1 or more, or -1")
    return value


NewTokens = Annotated[
    int,
    typer.Option(
        "-n",
        "--max-new-tokens",
        min=-1,
        callback=_new_tokens,
        metavar="N",
        help="Most tokens of an answer; -1: until the context is full.",
    ),
]
Context = Annotated[
    int,
    typer.Option(
        "-c",
        "--ctx",
        min=0,
        metavar="N",
        help="Most tokens of a prompt and its answer together; 0: the model's own limit, at most 4096.",
    ),
]
DataParallel = Annotated[
    int,
    typer.Option(
        "--data-parallel",
        "-dp",
        min=1,
        metavar="N",
        help="Copies of the model, on devices of their own, each with its own sequences.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
