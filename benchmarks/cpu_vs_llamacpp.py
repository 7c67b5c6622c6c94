"""A model on this CPU, side by side with llama.cpp in the same process: prefill of 512 tokens, decode of 128.
With --memory and --first-token what a process of its own takes.

    uv run python benchmarks/cpu_vs_llamacpp.py [-m FILE | -m synth:bonsai-1.7b:q1_0] [--record]
    uv run python benchmarks/cpu_vs_llamacpp.py -m synth:bonsai-1.7b:q1_0 --memory
    uv run python benchmarks/cpu_vs_llamacpp.py --first-token

The demo model (SmolLM2) without -m; a synthetic one is written to a file for both. Ends with an error where a
number is worse than what REQUIRED asks of that model.

Both read the same token ids with as many threads; repetitions are interleaved, so that a machine that slows
down slows both. --record appends the rows to benchmarks/results/<device>.jsonl.

Memory is the largest resident set of a process that loads the file, reads 512 tokens and decodes 128; of two
runs the second, which finds compiled programs. The first token is timed from the start of `bonsai-jax
generate` to the first byte that it prints: with an empty folder of compiled programs, and the best of three
with a full one.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

import bonsai_jax as bj
from bonsai_jax import machine
from bonsai_jax.measure import bench
from bonsai_jax.weights.memory import cache_bytes
from bonsai_jax.weights.read import blocks
from checkpoints import Tensor, open_checkpoint, write_gguf
from checkpoints.demo import demo_path

PROMPT, NEW = 512, 128


@dataclasses.dataclass(frozen=True)
class Required:
    """What is asked of a model: ratios to llama.cpp's prefill and decode, at least; bytes of a process, at
    most, where `most_bytes` says nothing stricter."""

    pp: float = 0.0
    tg: float = 0.0
    peak: float = float("inf")


REQUIRED = {
    "demo": Required(pp=2.0, tg=0.7),
    "synth:qwen2.5-1.5b:q4_k_m": Required(pp=1.25, tg=0.5, peak=1.8e9),
    "synth:bonsai-1.7b:q1_0": Required(pp=1.25, tg=0.5),
    "synth:bonsai-8b:q1_0": Required(tg=0.5, peak=2.2e9),
}
FIRST_TOKEN = {"cold": 4.0, "warm": 2.0}  # seconds at most, of the demo model


class LlamaCpp:
    """Speeds that llama.cpp's server reports for a request: they leave tokenizing out."""

    def __init__(self, path: str, threads: int):
        import xllamacpp  # here: processes whose memory is measured do without

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
    parser.add_argument(
        "-m", "--model", help="a GGUF file, or synth:..; the demo model without one", default="demo"
    )
    parser.add_argument("-p", "--prompt", type=int, default=PROMPT, help="tokens of prefill; 0: none")
    parser.add_argument("-n", "--new", type=int, default=NEW, help="tokens of decode")
    parser.add_argument("-r", "--repetitions", type=int, default=7)
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="where synthetic files stay for the next run"
    )
    parser.add_argument("--memory", action="store_true", help="measure memory, and no speed")
    parser.add_argument("--first-token", action="store_true", help="time the first token, and nothing else")
    parser.add_argument(
        "--record", action="store_true", help="append rows to benchmarks/results/<device>.jsonl"
    )
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.in_this_process:
        print(json.dumps(answered(asked.model)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = str(demo_path()) if asked.model == "demo" else asked.model
        if path.startswith("synth:"):
            path = written(path, (asked.keep or Path(folder)) / f"{path.replace(':', '-')}.gguf")
        required = REQUIRED.get(asked.model, Required())
        if asked.first_token:
            missed = first_token(path, Path(folder))
        elif asked.memory:
            missed = memory(path, Path(folder), required)
        else:
            sizes = {kind: n for kind, n in (("pp", asked.prompt), ("tg", asked.new)) if n}
            missed = compare(path, sizes, asked.repetitions, required, asked.record)
    sys.exit("a required number was missed" if missed else 0)


def first_token(path: str, folder: Path) -> bool:
    """Print, and whether it comes too late."""
    command = [sys.executable, "-m", "bonsai_jax", "generate", "Once upon a time", "-m", path, "-n", "1"]

    def seconds(programs: str) -> float:
        began = time.perf_counter()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment(folder, programs)
        ) as process:
            assert process.stdout is not None and process.stdout.read(1)
            return time.perf_counter() - began

    seconds(
        "not counted"
    )  # now Python's bytecode and the file are where they are when installed and once read
    found = {"cold": seconds("kept"), "warm": min(seconds("kept") for _ in range(3))}
    print("| first token | s | required |\n| --- | ---: | ---: |")
    for name, took in found.items():
        print(f"| {name} | {took:.2f} | {FIRST_TOKEN[name]} |")
    return any(took > FIRST_TOKEN[name] for name, took in found.items())


def memory(path: str, folder: Path, required: Required) -> bool:
    """Print, and whether it is too much."""
    command = [sys.executable, __file__, "-m", path, "--in-this-process"]
    for _ in range(2):
        done = subprocess.run(
            command, stdout=subprocess.PIPE, check=True, text=True, env=environment(folder, "kept")
        )
    found = json.loads(done.stdout)
    most = most_bytes(path, found["cache"], required)
    gb = [f"{size / 1e9:.3f}" for size in (os.path.getsize(path), found["cache"], found["peak"], most)]
    print(f"| file GB | cache GB | peak GB | required |\n| ---: | ---: | ---: | ---: |\n| {' | '.join(gb)} |")
    return found["peak"] > most


def most_bytes(path: str, cache: int, required: Required) -> float:
    """A quarter more than the file, 0.4 GB for Python, jax and the rest, and the cache."""
    return min(required.peak, 1.25 * os.path.getsize(path) + 0.4e9 + cache)


def answered(path: str) -> dict[str, int]:
    """Bytes of this process at most, and of its cache."""
    model = bj.load(path, bj.RunConfig(context=PROMPT + NEW, batch_size=1))
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, PROMPT).tolist()
    for _ in bj.stream(model, ids, max_new_tokens=NEW, ignore_eos=True):
        pass
    return {"peak": machine.peak_memory(), "cache": cache_bytes(model.config, model.run)}


def environment(folder: Path, programs: str) -> dict[str, str]:
    """Of a process on the CPU that keeps compiled programs in a folder of this name, and has its own bytecode
    as installed packages do."""
    others = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    places = {"XDG_CACHE_HOME": folder / programs, "PYTHONPYCACHEPREFIX": folder / "bytecode"}
    return others | {"JAX_PLATFORMS": "cpu"} | {name: str(place) for name, place in places.items()}


def written(source: str, path: Path) -> str:
    """A synthetic model as the GGUF file that it would be."""
    if path.exists():
        return str(path)
    checkpoint = open_checkpoint(source)
    tensors = (Tensor(t.name, t.format, t.shape, np.asarray(blocks(t))) for t in checkpoint.tensors.values())
    write_gguf(path, checkpoint.metadata, tensors)
    return str(path)


def compare(path: str, sizes: dict[str, int], repetitions: int, required: Required, recorded: bool) -> bool:
    """Run, print, record; whether a ratio is below the required one. sizes: tokens of each kind of test."""
    threads = len(os.sched_getaffinity(0))
    theirs = LlamaCpp(path, threads)
    model = bj.load(path, bj.RunConfig(context=sum(sizes.values()), batch_size=1))
    tests = {kind: bench.Test(model, kind, n) for kind, n in sizes.items()}
    measured = {
        "pp": lambda n: theirs.prefill(np.asarray(tests["pp"].ids)[0, :n].tolist()),
        "tg": theirs.decode,
    }
    for kind in tests:
        measured[kind](8)

    speeds: dict[str, list[float]] = {key: [] for kind in tests for key in (kind, f"{kind} llama.cpp")}
    for _ in range(repetitions):
        for kind, test in tests.items():
            speeds[kind].append(test.run())
            speeds[f"{kind} llama.cpp"].append(measured[kind](test.tokens))

    print(
        f"{Path(path).stem} on {machine.device_name()}, {threads} threads, "
        f"median of {repetitions} (smallest to largest)"
    )
    print(
        f"jax {version('jax')}, xllamacpp {version('xllamacpp')}; "
        f"memory reads {machine.bandwidth() / 1e9:.1f} GB/s\n"
    )
    print("| test | bonsai-jax tok/s | llama.cpp tok/s | ratio | required |")
    print("| --- | ---: | ---: | ---: | ---: |")
    missed = False
    for kind, test in tests.items():
        ours, other = speeds[kind], speeds[f"{kind} llama.cpp"]
        ratio = statistics.median(ours) / statistics.median(other)
        least = getattr(required, kind)
        missed |= ratio < least
        print(f"| {test.name} | {spread(ours)} | {spread(other)} | {ratio:.2f} | {least or '-'} |")
    if recorded:
        record([tests[kind].row(speeds[kind]) for kind in tests], tests, speeds)
    return missed


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def record(rows: list[bench.Row], tests: dict[str, bench.Test], speeds: dict[str, list[float]]) -> None:
    """Our rows, and llama.cpp's with impl "llama.cpp": of the bytes that it moves nothing is known here."""
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    path = folder / f"{machine.device_name().lower().replace(' ', '-')}.jsonl"
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
