"""The seconds that a user waits, from the start of a process on: with nothing compiled, and the second time.

    python benchmarks/start.py -m MODEL [-n 256] [-b 64] [--starts 2] [--rounds 1] > rows.jsonl

Each start is a process of its own, which stores programs and sets Python's garbage collector as the command
line does. The starts of a round share one folder of compiled programs, which is empty at the first and
removed at the end. A start before them all does not count: it brings the model and the packages, of which a
GPU's have gigabytes, into the operating system's page cache. Python's bytecode is compiled before that, as
pip does, also where PYTHONDONTWRITEBYTECODE is set; else the first start would compile jax's sources, too. A
row has, in seconds:

    imported       since the process began, when `import bonsai_jax` is done
    loaded         the same, when the model is on the device
    first_piece    the same, at the first piece of `stream`, with one row, as `bonsai-jax generate` has
    silence        the longest time between two pieces after the first
    other_length   `generate` of one prompt and 4 tokens with room for twice as many, after `stream` has ended
    other_number   `generate` of three prompts and 4 tokens, after one prompt, with rows for the batch size:
                   by programs that are there, if that is soon done (bonsai_jax/engine/stand_in.py)
    warmup         `Engine.warmup` for the batch size, after all that
"""

import argparse
import dataclasses
import functools
import gc
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

IMPORTS = "import jax, bonsai_jax as bj; bj.load, bj.stream, bj.Engine; jax.jit(lambda x: x + 1)(1)"
# Of which a start imports more than that, when it needs them.
PACKAGES = ("jax", "jaxlib", "bonsai_jax", "pallas_kernels", "checkpoints")
PROMPT = "Once upon a time there was a"


def child(
    model_name: str, new: int, batch_size: int, cache_dtype: str | None, began: float, counts: bool
) -> dict[str, float]:
    """One start, in the process that `began` at this time (time.time()). counts: else it ends with the text
    of the stream."""
    since = lambda: time.time() - began  # noqa: E731
    gc.set_threshold(50_000)  # as the command line does
    from bonsai_jax import compile_cache
    from bonsai_jax.starting import start_device

    compile_cache.use_programs()
    start_device()  # as the command line does before it imports the rest
    import bonsai_jax as bj

    _ = bj.load, bj.stream, bj.Engine
    row = {"imported": since()}
    on_shapes = functools.partial(bj.compile_ahead, prompts=PROMPT, max_new_tokens=new)  # as `generate` does
    model = bj.load(model_name, bj.RunConfig(batch_size=1, cache_dtype=cache_dtype), on_shapes=on_shapes)
    row["loaded"] = since()
    times = []
    for _ in bj.stream(model, PROMPT, max_new_tokens=new, ignore_eos=True):
        times.append(since())
    row["first_piece"] = times[0]
    row["silence"] = max((b - a for a, b in itertools.pairwise(times)), default=0.0)
    if not counts:
        return row

    def seconds(call) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    row["other_length"] = seconds(lambda: next(bj.stream(model, PROMPT, max_new_tokens=2 * new)))
    many = dataclasses.replace(model, run=dataclasses.replace(model.run, batch_size=batch_size))
    bj.generate(many, PROMPT, max_new_tokens=4)
    row["other_number"] = seconds(lambda: bj.generate(many, [PROMPT] * 3, max_new_tokens=4))
    with bj.Engine(many) as engine:
        row["warmup"] = seconds(engine.warmup)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", default="demo")
    parser.add_argument("-n", "--new", type=int, default=256, help="tokens of the stream")
    parser.add_argument("-b", "--batch-size", type=int, default=64)
    parser.add_argument("--cache-dtype", help="of keys and values; default: the library's")
    parser.add_argument("--starts", type=int, default=2, help="that share a folder of compiled programs")
    parser.add_argument("--rounds", type=int, default=1, help="of starts, each with an empty folder")
    parser.add_argument("--commit", help="for a checkout without history")
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--uncounted", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        row = child(args.model, args.new, args.batch_size, args.cache_dtype, args.child, not args.uncounted)
        print(json.dumps(row), flush=True)
        # As commands end: a thread of XLA's that wants the GIL at Python's end can abort the process.
        os._exit(0)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": ""}
        environment.pop("JAX_COMPILATION_CACHE_DIR")
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # as the command line does
        environment["PYTHONPYCACHEPREFIX"] = str(Path(folder) / "bytecode")
        if (hub := Path.home() / ".cache" / "huggingface").exists():
            environment.setdefault("HF_HOME", str(hub))
        command = [
            sys.executable,
            __file__,
            "-m",
            args.model,
            "-n",
            str(args.new),
            "-b",
            str(args.batch_size),
            *([] if args.cache_dtype is None else ["--cache-dtype", args.cache_dtype]),
        ]
        imports = {**environment, "JAX_ENABLE_COMPILATION_CACHE": "false"}
        subprocess.run([sys.executable, "-c", IMPORTS], env=imports, check=True)
        folders = [importlib.util.find_spec(name).submodule_search_locations[0] for name in PACKAGES]
        compile_all = [sys.executable, "-m", "compileall", "-q", "-j0", *folders]
        subprocess.run(compile_all, env=imports, stdout=subprocess.DEVNULL)  # some files are of other Pythons

        def started(programs: str, *options: str) -> dict[str, float]:
            done = subprocess.run(
                [*command, "--child", repr(time.time()), *options],
                env={**environment, "XDG_CACHE_HOME": str(Path(folder) / programs)},
                stdout=subprocess.PIPE,
                check=True,
            )
            return json.loads(done.stdout)

        started("uncounted", "--uncounted")
        for number, start in itertools.product(range(args.rounds), range(args.starts)):
            rows.append({"start": start + 1, **started(f"round {number}")})
    from bonsai_jax.measure import bench

    for row in rows:
        seconds = {k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}
        sizes = {"model": args.model, "batch_size": args.batch_size, "cache_dtype": args.cache_dtype}
        print(json.dumps({**bench.origin(args.commit), **sizes, **seconds}), flush=True)


if __name__ == "__main__":
    main()
