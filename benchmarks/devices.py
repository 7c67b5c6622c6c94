"""Speed on several devices beside that on one: data parallel throughput, tensor parallel decode and prefill.

    python benchmarks/devices.py                    # all, on 1, 2, 4, ... of the devices that there are
    python benchmarks/devices.py -o jsonl -d 1,4 -s tensor

The tests are those of `bonsai-jax bench` with --data-parallel and --tensor-parallel; with data parallelism
every device has the same rows as the one. What must be reached is beside what was.
"""

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Iterator

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast, which virtual machines may lack

import jax

import bonsai_jax as bj
from bonsai_jax.measure import bench


@dataclasses.dataclass(frozen=True)
class Series:
    """One model on more and more devices.

    split     the axis of the mesh: "data" or "tensor"
    required  of a test, the speed over one device's that is asked for, by number of devices
    """

    model: str
    split: str
    prompts: tuple[int, ...]
    new_tokens: tuple[int, ...]
    batches: tuple[int, ...]
    required: dict[str, dict[int, float]]


EVERY = {n: 0.95 * n for n in (2, 4, 8)}
SERIES = (
    Series("synth:llama-70b:q4_k_m", "tensor", (2048,), (64,), (), {"tg64": {4: 2.2}, "pp2048": {4: 3.0}}),
    Series("synth:bonsai-8b:q1_0", "data", (), (128,), (8,), {"tg128": EVERY, "batch8": EVERY}),
    Series("synth:bonsai-8b:q4_k_m", "data", (), (128,), (8,), {"tg128": EVERY, "batch8": EVERY}),
)


def rows(series: Series, devices: int, repetitions: int) -> Iterator[bench.Row]:
    """One model on one number of devices."""
    began = time.perf_counter()
    mesh = None
    if devices > 1:
        mesh = bj.make_mesh(**{"data" if series.split == "data" else "model": devices})
    tokens = max((*series.prompts, *series.new_tokens, 2 * bench.BATCH_TOKENS if series.batches else 0))
    model = bj.load(series.model, bj.RunConfig(context=tokens, batch_size=1), mesh=mesh)
    jax.block_until_ready(model.params)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    print(
        f"{series.model}: {series.split} parallel on {devices}, loaded in "
        f"{time.perf_counter() - began:.1f} s, at most {peak / 1e9:.1f} GB on a device so far",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    # Decode first: if time runs out, it is what counts.
    yield from bench.measure(model, (), series.new_tokens, (0,), repetitions, batches=series.batches)
    yield from bench.measure(model, series.prompts, (), (0,), repetitions)


def line(row: bench.Row, one: bench.Row | None, required: dict[int, float]) -> str:
    """A row of the table for people."""
    devices = row.data_parallel * row.tensor_parallel
    factor = "-" if one is None else f"{row.tok_s / one.tok_s:.2f}"
    asked = f"{required[devices]:.2f}" if devices in required else "-"
    split = "data" if row.data_parallel > 1 else "tensor" if row.tensor_parallel > 1 else "-"
    ceiling = "-" if row.ceiling_share is None else f"{row.ceiling_share:.0%}"
    return (
        f"| {row.model} | {row.test} | {devices} | {split} | {row.tok_s:,.1f} ± {row.tok_s_std:.1f} "
        f"| {factor} | {asked} | {ceiling} |"
    )


def main() -> None:
    there = jax.device_count()
    numbers = [n for n in (1, 2, 4, 8) if n <= there]
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-m", "--models", help="only these, such as synth:bonsai-8b:q1_0")
    p.add_argument("-s", "--split", choices=("data", "tensor"), help="only this")
    p.add_argument("-d", "--devices", default=",".join(map(str, [numbers[-1], *numbers[:-1]])))
    p.add_argument("-r", "--repetitions", type=int, default=3)
    p.add_argument("-o", "--output", choices=("md", "jsonl"), default="md")
    p.add_argument("--commit", help="for a checkout without history")
    arguments = p.parse_args()
    if arguments.output == "md":
        print("| model | test | devices | split | tok/s | of one | required | ceiling |")
        print("| --- | --- | ---: | --- | ---: | ---: | ---: | ---: |")
    done: dict[tuple[str, str], dict[int, bench.Row]] = {}
    for series in SERIES:
        if arguments.split not in (None, series.split):
            continue
        if arguments.models and series.model not in arguments.models.split(","):
            continue
        for devices in map(int, arguments.devices.split(",")):
            for row in rows(series, devices, arguments.repetitions):
                if arguments.commit:
                    row = dataclasses.replace(row, commit=arguments.commit)
                of_test = done.setdefault((row.model, row.test), {})
                of_test[devices] = row
                if arguments.output == "jsonl":
                    print(bench.json_line(row), flush=True)
                else:
                    # Also those that waited for the one device.
                    for r in of_test.values() if devices == 1 else [row]:
                        print(line(r, of_test.get(1), series.required.get(r.test, {})), flush=True)


if __name__ == "__main__":
    main()
