"""A model on this CPU, side by side with llama.cpp in the same process: prefill of 512 tokens, decode of 128.

    uv run python benchmarks/cpu_vs_llamacpp.py [-m FILE | -m synth:bonsai-1.7b:q1_0] [--record]

The demo model (SmolLM2) without -m; a synthetic one is written to a file for both.

Both read the same token ids with as many threads; repetitions are interleaved, so that a machine that slows
down slows both. --record appends the rows to benchmarks/results/<device>.jsonl.
"""

import argparse
import os
import statistics
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import xllamacpp

import bonsai_jax as bj
from bonsai_jax import bench, card
from bonsai_jax.params import blocks
from checkpoints import Tensor, open_checkpoint, write_gguf
from checkpoints.demo import demo_path

PROMPT, NEW = 512, 128
# Of the demo model: ratios to llama.cpp below which this exits with an error.
REQUIRED = {"pp": 2.0, "tg": 0.7}


class LlamaCpp:
    """Speeds that llama.cpp's server reports for a request: they leave tokenizing out."""

    def __init__(self, path: str, threads: int):
        params = xllamacpp.CommonParams()
        params.model.path = path
        params.n_ctx = 1024
        params.n_parallel = 1
        params.verbosity = 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self.server = xllamacpp.Server(params)

    def request(self, ids: list[int], max_tokens: int) -> dict[str, float]:
        asked = {
            "prompt": ids,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        return self.server.handle_completions(asked)["timings"]

    def prefill(self, ids: list[int]) -> float:
        timings = self.request(ids, 1)
        assert timings["prompt_n"] == len(ids), timings
        return timings["prompt_per_second"]

    def decode(self, tokens: int) -> float:
        timings = self.request([1], tokens)
        assert timings["predicted_n"] == tokens, timings
        return timings["predicted_per_second"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", help="a GGUF file, or synth:..; the demo model without one")
    parser.add_argument("-r", "--repetitions", type=int, default=7)
    parser.add_argument(
        "--record", action="store_true", help="append rows to benchmarks/results/<device>.jsonl"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.model or str(demo_path())
        if path.startswith("synth:"):
            path = written(path, Path(folder) / f"{path.replace(':', '-')}.gguf")
        missed = compare(path, arguments.repetitions, arguments.record)
    sys.exit("a required ratio was missed" if missed and not arguments.model else 0)


def written(source: str, path: Path) -> str:
    """A synthetic model as the GGUF file that it would be."""
    checkpoint = open_checkpoint(source)
    tensors = (Tensor(t.name, t.format, t.shape, np.asarray(blocks(t))) for t in checkpoint.tensors.values())
    write_gguf(path, checkpoint.metadata, tensors)
    return str(path)


def compare(path: str, repetitions: int, recorded: bool) -> bool:
    """Run, print, record; whether a ratio is below the required one."""
    threads = len(os.sched_getaffinity(0))
    theirs = LlamaCpp(path, threads)
    model = bj.load(path, bj.RunConfig(context=PROMPT + NEW, rows=1))
    tests = {"pp": bench.Test(model, "pp", PROMPT), "tg": bench.Test(model, "tg", NEW)}
    ids = np.asarray(tests["pp"].ids)[0].tolist()
    theirs.prefill(ids), theirs.decode(8)

    speeds: dict[str, list[float]] = {key: [] for key in ("pp", "pp llama.cpp", "tg", "tg llama.cpp")}
    for _ in range(repetitions):
        speeds["pp"].append(tests["pp"].run())
        speeds["pp llama.cpp"].append(theirs.prefill(ids))
        speeds["tg"].append(tests["tg"].run())
        speeds["tg llama.cpp"].append(theirs.decode(NEW))

    print(
        f"{bench.model_name(path)} on {card.device_name()}, {threads} threads, "
        f"median of {repetitions} (smallest to largest)"
    )
    print(
        f"jax {version('jax')}, xllamacpp {version('xllamacpp')}; "
        f"memory reads {card.bandwidth() / 1e9:.1f} GB/s\n"
    )
    print("| test | bonsai-jax tok/s | llama.cpp tok/s | ratio | required |")
    print("| --- | ---: | ---: | ---: | ---: |")
    missed = False
    for kind, test in tests.items():
        ours, other = speeds[kind], speeds[f"{kind} llama.cpp"]
        ratio = statistics.median(ours) / statistics.median(other)
        missed |= ratio < REQUIRED[kind]
        print(f"| {test.name} | {spread(ours)} | {spread(other)} | {ratio:.2f} | {REQUIRED[kind]} |")
    if recorded:
        record([tests[kind].row(speeds[kind]) for kind in tests], tests, speeds)
    return missed


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def record(rows: list[bench.Row], tests: dict[str, bench.Test], speeds: dict[str, list[float]]) -> None:
    """Our rows, and llama.cpp's with impl "llama.cpp": of the bytes that it moves nothing is known here."""
    import dataclasses
    import json

    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    path = folder / f"{card.device_name().lower().replace(' ', '-')}.jsonl"
    with path.open("a") as file:
        for row, kind in zip(rows, tests, strict=True):
            other = speeds[f"{kind} llama.cpp"]
            theirs = dataclasses.replace(
                row,
                impl=f"llama.cpp (xllamacpp {version('xllamacpp')})",
                tok_s=statistics.fmean(other),
                tok_s_std=statistics.stdev(other) if len(other) > 1 else 0.0,
            )
            no_bytes = dataclasses.asdict(theirs) | {"gb_s": None, "ceiling_share": None}
            file.write(bench.json_line(row) + "\n" + json.dumps(no_bytes) + "\n")
    print(f"\nrecorded in {path}")


if __name__ == "__main__":
    main()
