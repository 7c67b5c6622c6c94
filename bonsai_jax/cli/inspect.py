"""bonsai-jax inspect: what is in a model file, and how this machine would run it. Reads no weights."""

import dataclasses
import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bonsai_jax.cli import options, text
from bonsai_jax.cli.spread import spread

if TYPE_CHECKING:
    from bonsai_jax import RunConfig
    from bonsai_jax.network.unsupported import Missing
    from bonsai_jax.weights.records import LoadPlan
    from bonsai_jax.weights.specs import Description
    from checkpoints import Checkpoint
    from pallas_kernels import problems

LONGEST_VALUE = 72  # characters of a metadata value in the table
LONGEST_LIST = 16  # entries of a metadata list in JSON
BATCH_ROWS = {"1 row": 1, "8 rows": 8, "64 rows": 64, "prefill": 512}  # rows of activations


@spread
def command(
    *,
    argument: Annotated[str | None, typer.Argument(metavar="MODEL", help="The model, instead of -m.")] = None,
    model: options.ModelOptions,
    context: options.Context = 0,
    draft: options.DraftModel = None,
    as_json: options.Json = False,
    run: options.RunOptions,
) -> None:
    """Show metadata, tensors by format, sizes in bytes, the speed that memory allows, and which kernels would
    run. With --draft weights and cache of both models count."""
    if argument is not None and model.name is not None:
        raise typer.BadParameter("name one model: as the argument or with -m")
    if argument is not None:
        model = dataclasses.replace(model, name=argument)
    requested = run.config(context=context, speculation=options.SpeculationOptions(draft=draft))

    from bonsai_jax.model import opened_draft_model
    from bonsai_jax.network import architectures
    from bonsai_jax.network.unsupported import UnsupportedArchitecture
    from bonsai_jax.weights import memory
    from bonsai_jax.weights.plan import planned, resolve

    checkpoint = model.checkpoint()
    try:
        draft_checkpoint = opened_draft_model(requested, offline=model.offline)
        description = architectures.describe(checkpoint, draft_model=draft_checkpoint)
    except UnsupportedArchitecture as error:
        _print_unsupported(checkpoint, error.missing, as_json)
        raise
    resolved = resolve(description, requested)
    figures = _figures(description, resolved)
    chosen = _kernels(planned(description, resolved))
    verdicts = memory.explain_weights(description, dataclasses.replace(resolved, weights=requested.weights))
    stored = [dataclasses.asdict(verdict) for verdict in verdicts]
    if as_json:
        out = {
            **_contents(checkpoint),
            "figures": figures,
            "weights": stored,
            "kernels": chosen,
        }
        print(text.json_line(out))
        return
    _print_contents(checkpoint)
    print(text.table([(key, _readable(key, value)) for key, value in figures.items()]), end="\n\n")
    for verdict in stored:
        print(f"weights {'->' if verdict['taken'] else '  '} {verdict['kernel']}: {verdict['reason']}")
    print()
    print(f"kernels by rows of activations (prefill: {BATCH_ROWS['prefill']}); a name alone runs any number")
    print(text.table([_kernel_cells(entry) for entry in chosen]), end="\n\n")
    for op, reason, kernels in _refused(chosen):
        print(f"{op} not by {', '.join(kernels)}: {reason}")


def _contents(checkpoint: "Checkpoint") -> dict[str, Any]:
    """The contents of a file, for JSON."""
    metadata = {key: _shortened(value) for key, value in checkpoint.metadata.items()}
    return {"source": checkpoint.source, "metadata": metadata, "tensors": _by_format(checkpoint)}


def _print_contents(checkpoint: "Checkpoint") -> None:
    tensors = _by_format(checkpoint)
    print(checkpoint.source, end="\n\n")
    print(text.table([(key, _one_line(value)) for key, value in checkpoint.metadata.items()]), end="\n\n")
    print(text.table([tuple(tensors[0]), *(tuple(row.values()) for row in tensors)]), end="\n\n")


def _print_unsupported(checkpoint: "Checkpoint", missing: "Missing | None", as_json: bool) -> None:
    """The contents of a file that does not run, and what we lack to run it."""
    if as_json:
        lacks = dataclasses.asdict(missing) if missing else None
        print(text.json_line({**_contents(checkpoint), "unsupported": lacks}))
        return
    _print_contents(checkpoint)
    if missing:
        print(f"{missing.models}: not supported. The nearest that runs is {missing.nearest}; it lacks")
        print("\n".join(f"  - {lack}" for lack in missing.lacks))


def _shortened(value: Any) -> Any:
    """A metadata value for JSON; a long list becomes its length and its first entries."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list) and len(value) > LONGEST_LIST:
        return {"length": len(value), "first": value[:LONGEST_LIST]}
    return value


def _one_line(value: Any) -> str:
    """A metadata value on one line; an array becomes its length and its first entries."""
    if isinstance(value, (str, int, float, bool)):
        line = repr(value) if isinstance(value, str) else str(value)
    elif isinstance(value, dict):
        line = json.dumps(value)
    else:
        try:
            first = ", ".join(repr(x) if isinstance(x, str) else str(x) for x in value[:4])
            line = f"{len(value)} entries: {first}{', ...' if len(value) > 4 else ''}"
        except TypeError:
            line = str(value)
    line = " ".join(line.split())
    return line if len(line) <= LONGEST_VALUE else line[: LONGEST_VALUE - 3] + "..."


def _by_format(checkpoint: "Checkpoint") -> list[dict[str, Any]]:
    """A row for each format, the largest first, then one for all tensors."""
    rows = []
    for format in {t.format for t in checkpoint.tensors.values()}:
        tensors = [t for t in checkpoint.tensors.values() if t.format == format]
        rows.append(_row(format, tensors))
    rows.sort(key=lambda row: -row["bytes"])
    return [*rows, _row("all", list(checkpoint.tensors.values()))]


def _row(name: str, tensors: list) -> dict[str, Any]:
    parameters, size = sum(math.prod(t.shape) for t in tensors), sum(t.nbytes for t in tensors)
    bits = round(8 * size / parameters, 3) if parameters else 0.0
    return {
        "format": name,
        "tensors": len(tensors),
        "parameters": parameters,
        "bytes": size,
        "bits/weight": bits,
    }


def _figures(description: "Description", run: "RunConfig") -> dict[str, Any]:
    from bonsai_jax import card, machine
    from bonsai_jax.weights import memory

    config, fold = description.config, description.folding
    step, states = card.step_bytes(description, run), memory.bytes_per_row(config, run)
    return {
        "device": machine.device_name(),
        "weights on the device": run.weights,
        "weight bytes": memory.weight_bytes(description, run),
        "KV bytes per token": memory.bytes_per_token(config, run),
        **({"draft model": run.draft_model} if run.draft_model else {}),
        "cache dtype": run.cache_dtype,
        "context": run.context,
        "model's own context": config.context_length,
        **({"state bytes per sequence": states} if states else {}),
        **({"state dtype": run.state_dtype} if "delta_net" in config.kinds else {}),
        **({"ignored tensors": ", ".join(description.skipped)} if description.skipped else {}),
        **({"Hadamard-folded weights": len(fold.weights)} if fold else {}),
        "KV bytes at that context": memory.cache_bytes(config, run),
        "bytes per decoded token": step,
        "memory bytes/s": machine.bandwidth(),
        "ceiling tok/s": machine.bandwidth() / step,
    }


def _readable(key: str, value: Any) -> str:
    if key == "ceiling tok/s":
        return f"{value:.1f}"
    if key == "memory bytes/s":
        return f"{value / 1e9:.1f} GB/s"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _kernels(plan: "LoadPlan") -> list[dict[str, Any]]:
    """For every matrix, attention, the decode step and sampling: the kernel for each number of rows, and why
    candidates that come before it in the order of preference were refused."""
    from pallas_kernels import device, problems

    config, run = plan.config, plan.run
    matrices: Counter = Counter()
    for matrix, times in plan.each():
        matrices[matrix] += times
    looked_up, entries = [("vector_table",)], []
    if any(matrix.fields == ("head",) for matrix in matrices):
        looked_up.append(("embed",))
    for matrix, times in matrices.items():
        cases = {name: (matrix.problem, rows, run.impl) for name, rows in BATCH_ROWS.items()}
        entries.append(_entry(" ".join(matrix.fields), times, cases))
        if matrix.fields in looked_up:
            entries[-1] |= {"kernels": {"any": "look-up of rows"}, "not": {}}
        if matrix.experts:
            problem = plan.experts_problem(matrix)
            by_expert = _entry("", 0, {name: (problem, rows, "auto") for name, rows in BATCH_ROWS.items()})
            entries[-1]["kernels"] = {name: plan.kernel(matrix, rows) for name, rows in BATCH_ROWS.items()}
            entries[-1]["not"] |= by_expert["not"]
    for kind in sorted({mixer.kind for layer in config.layers for mixer in layer.mixers}):
        for group in config.groups(kind):
            for problem, impl in zip(group.settings.problems(run), group.settings.impls(run), strict=True):
                cases = {problem.phase: (problem, 1, impl)}
                entries.append(_entry(kind.replace("_", " "), len(group.layers), cases))
    step = _step_entry(plan)
    draw = problems.Sampling(device.platform(), config.vocab_size)
    return [*entries, step, _entry("sampling", 1, {"any": (draw, 1, run.impl)})]


def _entry(what: str, times: int, cases: Mapping[str, tuple["problems.Problem", int, str]]) -> dict[str, Any]:
    """The kernels of one operation, and why others were refused.

    times  how often a forward pass runs it
    cases  name -> (problem, rows, impl), the arguments of selection.explain
    """
    from pallas_kernels import selection

    kernels, reasons = {}, {}
    for name, (problem, rows, impl) in cases.items():
        for verdict in selection.explain(problem, rows, impl):
            if verdict.taken:
                kernels[name] = verdict.kernel + verdict.reason.removeprefix(selection.FIRST)
                break
            if not verdict.reason.startswith("is for "):
                reasons.setdefault(verdict.kernel, verdict.reason)
    (problem, *_), *_ = cases.values()
    return {"what": what, "problem": str(problem), "times": times, "kernels": kernels, "not": reasons}


def _step_entry(plan: "LoadPlan") -> dict[str, Any]:
    """The schedule of a decode step for each batch size."""
    from bonsai_jax.network import schedules

    problem, chosen = schedules.step_problem(plan), schedules.step_plan(plan).schedules
    sizes = {n: dataclasses.replace(problem, rows=n) for n in BATCH_ROWS.values()}
    entry = _entry("decode step", 1, {f"{n} rows": (case, 1, plan.run.schedule) for n, case in sizes.items()})
    entry["kernels"] = {"1 row" if rows == 1 else f"to {rows} rows": schedule for rows, schedule in chosen}
    entry["kernels"]["more" if chosen else "any"] = "launches"
    return entry


def _kernel_cells(entry: dict[str, Any]) -> tuple[str, ...]:
    """The cells of a row: operation, problem, how often it runs, and its kernels, or kernel."""
    alike = itertools.groupby(entry["kernels"].items(), key=lambda item: item[1])
    by_kernel = [(", ".join(rows for rows, _ in group), kernel) for kernel, group in alike]
    kernels = "; ".join(f"{rows}: {kernel}" for rows, kernel in by_kernel)
    return (
        entry["what"],
        entry["problem"],
        f"x {entry['times']}",
        kernels if len(by_kernel) > 1 else by_kernel[0][1],
    )


def _refused(chosen: list[dict[str, Any]]) -> list[tuple[str, str, list[str]]]:
    """(operation, reason, the kernels that were refused for it), each reason once."""
    refused: dict[tuple[str, str], dict[str, None]] = {}
    for entry in chosen:
        op = "matmul" if entry["problem"].startswith("matmul") else entry["what"]
        for kernel, reason in entry["not"].items():
            refused.setdefault((op, reason), {})[kernel] = None
    return [(op, reason, list(kernels)) for (op, reason), kernels in refused.items()]
