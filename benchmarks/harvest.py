"""bj.harvest of one layer's residual stream, beside prefill of the same layers in the same process.

    python benchmarks/harvest.py [-m demo] [--layer 15] [--texts 400] [-r 3] [--commit NAME] > rows.jsonl

Texts are token ids, random ones of random lengths: 64 to 512 tokens. Activations stay on the device, and each
batch is waited for. Prefill reads one prompt of 512 tokens through the same layers, without the output
matrix. Both take turns.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

import bonsai_jax as bj
from bonsai_jax.measure import bench
from bonsai_jax.research.reading import Reader

PREFILL = 512  # tokens


@dataclasses.dataclass(frozen=True)
class Row(bench.Origin):
    """One layer of one model.

    tokens         of all texts
    first_s        the first pass, which compiles
    tok_s          median over the repetitions; tok_s_min, tok_s_max: the spread
    prefill_tok_s  of the layers up to this one, median
    share          tok_s / prefill_tok_s
    """

    model: str
    layer: int
    texts: int
    tokens: int
    first_s: float
    tok_s: float
    tok_s_min: float
    tok_s_max: float
    prefill_tok_s: float
    share: float


def prefill_seconds(model: bj.Model, layer: int) -> Callable[[], float]:
    """A function that reads a prompt through the layers up to this one, and says how long it took."""
    tokens = np.random.default_rng(1).integers(0, model.config.vocab_size, (1, PREFILL)).astype(np.int32)
    reader, lengths = Reader(model, stop_at_layer=layer + 1), np.array([PREFILL], np.int32)

    def seconds() -> float:
        began = time.perf_counter()
        jax.block_until_ready(reader.read(tokens, lengths)[0])
        return time.perf_counter() - began

    for _ in range(bench.WARMUP_CALLS):
        seconds()
    return seconds


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-m", "--model", default="demo")
    p.add_argument("--layer", type=int, help="from 0; the one in the middle unless given")
    p.add_argument("--texts", type=int, default=400)
    p.add_argument("-r", "--repetitions", type=int, default=3)
    p.add_argument("--commit", help="for a checkout without history")
    arguments = p.parse_args()
    model = bj.load(arguments.model)
    layer = model.config.num_layers // 2 if arguments.layer is None else arguments.layer
    taps, draw = bj.Taps("output", layers=layer), np.random.default_rng(0)
    lengths = draw.integers(64, PREFILL + 1, arguments.texts)
    texts = [draw.integers(0, model.config.vocab_size, length).tolist() for length in lengths]
    tokens = int(lengths.sum())

    def harvest_seconds() -> float:
        began = time.perf_counter()
        for batch in bj.harvest(model, texts, taps):
            jax.block_until_ready(batch.activations)
        return time.perf_counter() - began

    first_s, prefill = harvest_seconds(), prefill_seconds(model, layer)
    speeds, prefill_speeds = [], []
    for _ in range(arguments.repetitions):
        prefill_speeds += [PREFILL / prefill() for _ in range(5)]
        speeds.append(tokens / harvest_seconds())
        prefill_speeds += [PREFILL / prefill() for _ in range(5)]
    tok_s, prefill_tok_s = statistics.median(speeds), statistics.median(prefill_speeds)
    row = Row(
        **bench.origin(arguments.commit),
        model=model.name, layer=layer, texts=arguments.texts, tokens=tokens, first_s=first_s, tok_s=tok_s,
        tok_s_min=min(speeds), tok_s_max=max(speeds), prefill_tok_s=prefill_tok_s,
        share=tok_s / prefill_tok_s,
    )  # fmt: skip
    print(json.dumps(dataclasses.asdict(row)), flush=True)


if __name__ == "__main__":
    main()
