"""bonsai-jax inspect: what is in a model file, and what this machine makes of it. No weight is read."""

import dataclasses
import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bonsai_jax.cli import options

if TYPE_CHECKING:
    from bonsai_jax import ModelConfig, RunConfig
    from bonsai_jax.weights.plan import LoadPlan
    from checkpoints import Checkpoint

LONGEST = 72  # characters of a metadata value
LONGEST_LIST = 16  # entries of one, as JSON
ROWS = {"1 row": 1, "8 rows": 8, "64 rows": 64, "prefill": 512}  # of activations


def command(
    name: Annotated[str | None, typer.Argument(metavar="MODEL", help="The model, instead of -m.")] = None,
    model: options.ModelName = None,
    impl: options.Impl = "auto",
    schedule: options.Schedule = "auto",
    context: options.Context = 0,
    weights: options.Weights = "auto",
    cache_dtype: options.CacheType = None,
    offline: options.Offline = False,
    as_json: options.Json = False,
) -> None:
    """Show metadata, tensors by format, bytes, the speed that memory allows, and what would run."""
    if name is not None and model is not None:
        raise typer.BadParameter("name one model: as the argument or with -m")
    asked = options.run_config(
        impl=impl, schedule=schedule, context=context, weights=weights, cache_dtype=cache_dtype
    )
    source = next((given for given in (name, model) if given is not None), "demo")

    from bonsai_jax.model import load_plan, resolve
    from bonsai_jax.network import architectures
    from checkpoints import open_checkpoint

    checkpoint = open_checkpoint(source, offline=offline)
    config = architectures.config_of(checkpoint)
    run = resolve(asked, checkpoint, config)
    tensors = _by_format(checkpoint)
    figures = _figures(checkpoint, config, run)
    chosen = _kernels(load_plan(checkpoint, config, run), config, run)
    stored = _weights(checkpoint, config, dataclasses.replace(run, weights=asked.weights))
    if as_json:
        out = {
            "source": checkpoint.source,
            "metadata": {key: _of_json(value) for key, value in checkpoint.metadata.items()},
            "tensors": tensors,
            "figures": figures,
            "weights": stored,
            "kernels": chosen,
        }
        print(options.to_json(out))
        return
    print(checkpoint.source, end="\n\n")
    print(options.table([(key, _short(value)) for key, value in checkpoint.metadata.items()]), end="\n\n")
    print(options.table([tuple(tensors[0]), *(tuple(row.values()) for row in tensors)]), end="\n\n")
    print(options.table([(key, _readable(key, value)) for key, value in figures.items()]), end="\n\n")
    for verdict in stored:
        print(f"weights {'->' if verdict['taken'] else '  '} {verdict['kernel']}: {verdict['reason']}")
    print()
    print(f"kernels by rows of activations; prefill: {ROWS['prefill']}; one name: for any number of rows")
    print(options.table([_one_line(entry) for entry in chosen]), end="\n\n")
    for op, reason, kernels in _refused(chosen):
        print(f"{op} not by {', '.join(kernels)}: {reason}")


def _of_json(value: Any) -> Any:
    """A metadata value for JSON: of long arrays the length and the first entries."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list) and len(value) > LONGEST_LIST:
        return {"length": len(value), "first": value[:LONGEST_LIST]}
    return value


def _short(value: Any) -> str:
    """A metadata value on one line: of arrays the length and the first entries."""
    if isinstance(value, (str, int, float, bool)):
        text = repr(value) if isinstance(value, str) else str(value)
    elif isinstance(value, dict):
        text = json.dumps(value)
    else:
        try:
            first = ", ".join(repr(x) if isinstance(x, str) else str(x) for x in value[:4])
            text = f"{len(value)} entries: {first}{', ...' if len(value) > 4 else ''}"
        except TypeError:
            text = str(value)
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def _by_format(checkpoint: "Checkpoint") -> list[dict[str, Any]]:
    """A row for each format, largest first, and one for all."""
    rows = []
    for format in {t.format for t in checkpoint.tensors.values()}:
        of_it = [t for t in checkpoint.tensors.values() if t.format == format]
        rows.append(_row(format, of_it))
    rows.sort(key=lambda row: -row["bytes"])
    return [*rows, _row("all", list(checkpoint.tensors.values()))]


def _row(name: str, tensors: list) -> dict[str, Any]:
    parameters, held = sum(math.prod(t.shape) for t in tensors), sum(t.nbytes for t in tensors)
    bits = round(8 * held / parameters, 3) if parameters else 0.0
    return {
        "format": name,
        "tensors": len(tensors),
        "parameters": parameters,
        "bytes": held,
        "bits/weight": bits,
    }


def _figures(checkpoint: "Checkpoint", config: "ModelConfig", run: "RunConfig") -> dict[str, Any]:
    from bonsai_jax import card
    from bonsai_jax.network import cache as kv
    from checkpoints import folding

    step = card.step_bytes(checkpoint, run)
    return {
        "device": card.device_name(),
        "weights on the device": run.weights,
        "weight bytes": card.held_bytes(checkpoint, config, run),
        "KV bytes per token": kv.bytes_per_token(config, run.cache_dtype),
        "cache dtype": run.cache_dtype,
        "context": run.context,
        "model's own context": config.context_length,
        **({"bytes of a row's states": states} if (states := kv.bytes_per_row(config)) else {}),
        **({"left aside": ", ".join(aside)} if (aside := _aside(checkpoint, config)) else {}),
        **({"Hadamard-folded weights": len(fold.weights)} if (fold := folding(checkpoint)) else {}),
        "KV bytes at that context": card.cache_bytes(config, run),
        "bytes per decoded token": step,
        "memory bytes/s": card.bandwidth(),
        "ceiling tok/s": card.bandwidth() / step,
    }


def _aside(checkpoint: "Checkpoint", config: "ModelConfig") -> list[str]:
    """How names begin of tensors that nothing here runs, as a draft layer."""
    return [start for start in config.aside if any(name.startswith(start) for name in checkpoint.tensors)]


def _readable(key: str, value: Any) -> str:
    if key == "ceiling tok/s":
        return f"{value:.1f}"
    if key == "memory bytes/s":
        return f"{value / 1e9:.1f} GB/s"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _weights(checkpoint: "Checkpoint", config: "ModelConfig", asked: "RunConfig") -> list[dict[str, Any]]:
    """How weights are stored, and why."""
    from bonsai_jax import card

    return [dataclasses.asdict(v) for v in card.explain_weights(checkpoint, config, asked)]


def _kernels(plan: "LoadPlan", config: "ModelConfig", run: "RunConfig") -> list[dict[str, Any]]:
    """For every matrix, attention, the decode step and sampling the kernel for each number of rows, and why
    those before it in the order of preference were not taken."""
    from bonsai_jax.weights.plan import attention_problems, delta_problems
    from pallas_kernels import problems, selection

    def entry(what: str, times: int, asked: Mapping[str, tuple[problems.Problem, int, str]]):
        kernels, reasons = {}, {}
        for name, (problem, rows, impl) in asked.items():
            for verdict in selection.explain(problem, rows, impl):
                if verdict.taken:
                    kernels[name] = verdict.kernel + verdict.reason.removeprefix(selection.FIRST)
                    break
                if not verdict.reason.startswith("is for "):
                    reasons.setdefault(verdict.kernel, verdict.reason)
        (problem, *_), *_ = asked.values()
        return {"what": what, "problem": str(problem), "times": times, "kernels": kernels, "not": reasons}

    matrices: Counter = Counter()
    for matrix, times in plan.each():
        matrices[matrix] += times
    has_head, found = any(matrix.fields == ("head",) for matrix in matrices), []
    for matrix, times in matrices.items():
        asked = {name: (matrix.problem, rows, run.impl) for name, rows in ROWS.items()}
        found.append(entry(" ".join(matrix.fields), times, asked))
        if has_head and matrix.fields == ("embed",):
            found[-1] |= {"kernels": {"any": "look-up of rows"}, "not": {}}
        if matrix.experts:
            problem = plan.experts_problem(matrix)
            by_expert = entry("", 0, {name: (problem, rows, "auto") for name, rows in ROWS.items()})
            found[-1]["kernels"] = {name: plan.kernel(matrix, rows) for name, rows in ROWS.items()}
            found[-1]["not"] |= by_expert["not"]
    of_many = "reference" if run.impl == "reference" else "auto"
    layers = len(config.layers_of("attention"))
    for problem, impl in zip(attention_problems(config, run), (run.impl, of_many), strict=True):
        found.append(entry("attention", layers, {problem.phase: (problem, 1, impl)}))
    if config.delta is not None:
        layers = len(config.layers_of("delta"))
        for problem in delta_problems(config.delta):
            found.append(entry("delta net", layers, {problem.phase: (problem, 1, of_many)}))
    of_rows = {n: dataclasses.replace(plan.problem, rows=n) for n in ROWS.values()}
    step = entry("decode step", 1, {f"{n} rows": (of, 1, run.schedule) for n, of in of_rows.items()})
    schedules = [(rows, schedule) for rows, schedule in plan.step.schedules]
    step["kernels"] = {"1 row" if rows == 1 else f"to {rows} rows": schedule for rows, schedule in schedules}
    step["kernels"]["more" if schedules else "any"] = "launches"
    draw = problems.Sampling(plan.problem.platform, config.vocab_size)
    return [*found, step, entry("sampling", 1, {"any": (draw, 1, run.impl)})]


def _one_line(entry: dict[str, Any]) -> tuple[str, ...]:
    """What, its problem, how many, and the kernels: one name where it is the same for all rows."""
    alike = itertools.groupby(entry["kernels"].items(), key=lambda item: item[1])
    by_kernel = [(", ".join(rows for rows, _ in of), kernel) for kernel, of in alike]
    said = "; ".join(f"{rows}: {kernel}" for rows, kernel in by_kernel)
    said = said if len(by_kernel) > 1 else by_kernel[0][1]
    return entry["what"], entry["problem"], f"x {entry['times']}", said


def _refused(chosen: list[dict[str, Any]]) -> list[tuple[str, str, list[str]]]:
    """(op, reason, kernels that for this reason do not run it), each once."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for entry in chosen:
        op = "matmul" if entry["problem"].startswith("matmul") else entry["what"]
        for kernel, reason in entry["not"].items():
            found.setdefault((op, reason), {})[kernel] = None
    return [(op, reason, list(kernels)) for (op, reason), kernels in found.items()]
