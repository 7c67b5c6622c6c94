"""One of the two processes of test_parallel.py, each with one CPU device: `on_two_processes.py FILE
COORDINATOR ID` tells, as lines of JSON, what the command line prints that generates over both, then what the
library does, and process 0 what it does alone."""

import contextlib
import dataclasses
import io
import json
import sys

import jax

import bonsai_jax as bj
from bonsai_jax.cli import app
from checkpoints import open_checkpoint

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], list(range(10))]
# Greedy and seeded ones.
SAMPLING = [bj.SamplingParams(temperature=float(row % 2), seed=row) for row in range(len(PROMPTS))]
RUN = bj.RunConfig(weights="packed")  # as the command line has it: what it compiles serves `one_by_one` too
NEW = {"max_new_tokens": 6, "ignore_eos": True}


@dataclasses.dataclass
class Counted:
    """A file's blocks that count the bytes that are read of them."""

    data: object
    read: int = 0

    def __getattr__(self, name):
        return getattr(self.data, name)

    def __getitem__(self, index):
        part = self.data[index]
        self.read += part.nbytes
        return part


def one_by_one(model: bj.Model) -> list[list[int]]:
    each = (
        bj.generate(model, [ids], sampling=how, **NEW) for ids, how in zip(PROMPTS, SAMPLING, strict=True)
    )
    return [output.tokens for (output,) in each]


def tell(value) -> None:
    print("told", json.dumps(value), flush=True)  # Gloo prints lines of its own


def main(path: str, coordinator: str, process: str) -> None:
    options = ["--tensor-parallel", "2", "--coordinator", coordinator, "--num-processes", "2"]
    command = ["generate", "Hello", "-m", path, "-n", "6", "--temp", "0", "--ignore-eos", "--json"]
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(io.StringIO()):
        app([*command, *options, "--process-id", process, "--weights", "packed"], standalone_mode=False)
    tell(stdout.getvalue())

    checkpoint = open_checkpoint(path)
    split = {name: t for name, t in checkpoint.tensors.items() if len(t.shape) == 2}
    counted = {name: dataclasses.replace(t, data=Counted(t.data)) for name, t in split.items()}
    checkpoint = dataclasses.replace(checkpoint, tensors={**checkpoint.tensors, **counted})
    model = bj.from_checkpoint(checkpoint, RUN, mesh=bj.make_mesh(model=2))
    tell([t.data.read / t.nbytes for t in counted.values()])
    leaves = jax.tree.leaves(model.params)
    processes = {shard.device.process_index for leaf in leaves for shard in leaf.addressable_shards}
    tell([sorted(processes), jax.process_index(), jax.device_count()])
    tell(one_by_one(model))
    rows = bj.load(path, RUN, mesh=bj.make_mesh(data=2))
    tell([output.tokens for output in bj.generate(rows, PROMPTS, sampling=SAMPLING, **NEW)])
    tell(float(bj.logits(rows, PROMPTS[1]).sum()))
    if process == "0":
        alone = bj.load(path, RUN)
        greedy = bj.SamplingParams(temperature=0.0, seed=0)
        (output,) = bj.generate(alone, ["Hello"], sampling=greedy, **NEW)
        tell(output.tokens)
        tell(one_by_one(alone))
        tell(float(bj.logits(alone, PROMPTS[1]).sum()))


if __name__ == "__main__":
    main(*sys.argv[1:])
