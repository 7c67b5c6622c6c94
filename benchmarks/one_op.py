"""What the benchmarks of single ops share: clock, rows, the empty launch and the speed of light.

An op is timed as the model runs it: a chain over the layers of a stack, unrolled in one jit, which a GPU runs
as one graph. Each call of the chain takes what the one before it left, and each layer what the layer before
it left, so that nothing overlaps that would not overlap in a model. (A loop in the jit costs 20 us a turn on
a GPU, whatever is in it: LOG.md.)
"""

import argparse
import dataclasses
import functools
import json
import statistics
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from bonsai_jax import machine
from bonsai_jax.measure import bench
from bonsai_jax.measure.bench import seconds_per_call

EMPTY_CHAIN = 64
PASSES = 4  # of the speed of light over what a chain reads
# Bytes of a chain, a millisecond of an H200's memory: the host's part of a call, 50 to 100 us, is over while
# the device still works on the call before, and does not count.
CHAIN_MB = 4300


@dataclasses.dataclass(frozen=True)
class Row(bench.Origin):
    """One op at one shape, as it is kept for the record.

    layers      matrices or caches of the chain, each read once a call
    bytes       that one launch must read and write
    us          median over repetitions, per launch; us_min, us_max: the spread
    gb_s        bytes / us
    ceiling_share  gb_s over the measured copy rate
    light_us    the same bytes read by an XLA reduction: no launches between, nothing computed
    empty_us    a launch that does nothing, in a chain like this one; None where there are no kernels
    error       norm of the difference to the definition over the definition's norm, in this run
    """

    impl: str
    op: str
    model: str
    shape: str
    rows: int
    layers: int
    bytes: int
    us: float
    us_min: float
    us_max: float
    gb_s: float
    ceiling_share: float
    light_us: float
    empty_us: float | None
    error: float


def light_seconds(arrays: list[jax.Array], **counts) -> float:
    """To read these arrays once: a reduction over all of them, again and again in one jit, as each pass needs
    what the pass before found. The median."""

    @jax.jit
    def read(found, arrays):
        for _ in range(PASSES):
            found = functools.reduce(jnp.maximum, [(a.astype(jnp.float32) - found).max() for a in arrays])
        return found

    times = seconds_per_call(lambda found: read(found, arrays), jnp.float32(0), **counts)
    return statistics.median(times) / PASSES


@functools.cache
def empty_us() -> float | None:
    """Microseconds of a kernel that copies 512 bytes, in an unrolled chain in one jit; None without a GPU."""
    if jax.default_backend() != "gpu":
        return None
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(x_gmem, out_gmem):
        out_gmem[...] = x_gmem[...]

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32))

    @jax.jit
    def chain(x):
        for _ in range(EMPTY_CHAIN):
            x = kernel(x)
        return x

    times = seconds_per_call(chain, jnp.arange(128, dtype=jnp.float32), repetitions=9, calls=20)
    return 1e6 * statistics.median(times) / EMPTY_CHAIN


def row(
    arguments: argparse.Namespace, times: list[float], light: float, moved: int, *, launches: int, **rest
) -> Row:
    """`times` and `light` are of a whole chain, `moved` the bytes of one launch."""
    us = [1e6 * t / launches for t in times]
    gb_s = moved / statistics.median(us) / 1e3
    return Row(
        **bench.origin(arguments.commit),
        bytes=moved,
        us=statistics.median(us),
        us_min=min(us),
        us_max=max(us),
        gb_s=gb_s,
        ceiling_share=1e9 * gb_s / machine.bandwidth(),
        light_us=1e6 * light / launches,
        empty_us=empty_us(),
        **rest,
    )


def parser(description: str, models: str) -> argparse.ArgumentParser:
    """Options that every op's benchmark has."""
    p = argparse.ArgumentParser(description=description)
    p.add_argument("-m", "--models", default=models, help="synthetic models, for their shapes")
    p.add_argument("-r", "--repetitions", type=int, default=11)
    p.add_argument("--rows", default="1", help="rows of a decode step, such as 1,8")
    p.add_argument("--rotate-mb", type=float, default=CHAIN_MB, help="of a chain; far beyond the L2")
    p.add_argument("--most-layers", type=int, default=512, help="of a chain: bounds what is compiled")
    p.add_argument("--calls", type=int, default=20, help="calls of the chain in one repetition")
    p.add_argument("--commit", help="for a checkout without history")
    p.add_argument("-o", "--output", choices=("md", "jsonl"), default="md")
    return p


def layers_for(arguments: argparse.Namespace, moved: int) -> int:
    """Layers of a chain, so that it moves --rotate-mb, if --most-layers allows. (As many launches as that
    take a millisecond too: each 2 us at least.)"""
    return max(2, min(-(-int(arguments.rotate_mb * 1e6) // moved), arguments.most_layers))


def report_and_check(rows: Iterable[Row], output: str, limit: float) -> None:
    """Print rows as they come; exit with an error if one was further than `limit` from its definition."""
    wrong = []
    if output == "md":
        print("| op | model | shape | rows | us (spread) | GB/s | ceiling | light us | empty us | error |")
        print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for r in rows:
        if not r.error < limit:  # NaN too
            wrong.append(f"{r.op} of {r.model}: {r.error:.1e}")
        empty = "-" if r.empty_us is None else f"{r.empty_us:.2f}"
        line = (
            f"| {r.op} ({r.impl}) | {r.model} | {r.shape} | {r.rows} "
            f"| {r.us:.2f} ({r.us_min:.2f} to {r.us_max:.2f}) | {r.gb_s:.0f} | {r.ceiling_share:.0%} "
            f"| {r.light_us:.2f} | {empty} | {r.error:.1e} |"
        )
        print(line if output == "md" else json.dumps(dataclasses.asdict(r)), flush=True)
    if wrong:
        raise SystemExit(f"further than {limit:.0e} from the definition: {'; '.join(wrong)}")
