"""A small model that continues stories, trained from scratch with the weights of Q1_0, on every GPU there is.

    python examples/story_model/train.py prepare stories/*.jsonl --data data
    python examples/story_model/train.py train --data data --out OUT --seconds 200
    python examples/story_model/train.py train --data data --out OUT --seconds 200 --float     # for comparison

Each process takes the GPUs in CUDA_VISIBLE_DEVICES and splits batches over them.
"""

import argparse
import functools
import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import bonsai_jax as bj
from bonsai_jax import training

from new_model import END, train_tokenizer, write_new_model  # beside this file

SIZES = {"layers": 10, "hidden": 512, "ffn": 1536, "heads": 8, "kv_heads": 4, "head_dim": 64}  # 33.6 M weights
TENSOR_CORES = "BF16_BF16_F32"  # products of bfloat16, sums of float32; weights and the rest are float32
TOKENIZER_STORIES = 50_000  # enough for a vocabulary of some thousand


def prepare(files: Sequence[Path], folder: Path, vocab: int, test: int) -> None:
    """Stories, shuffled, as tokens in data.npz: `train`, one behind another, each after END; `starts`, where they
    begin; `test`, stories that are not trained, and the END of the last."""
    texts = sorted({json.loads(line) for file in files for line in file.read_text().splitlines()})
    random.Random(0).shuffle(texts)
    test = min(test, len(texts) // 10)
    tokenizer = train_tokenizer(texts[test : test + TOKENIZER_STORIES], vocab)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    ids = [np.array([end, *encoding.ids], np.uint16) for encoding in tokenizer.encode_batch(texts)]
    arrays = {"train": np.concatenate([*ids[test:], [np.uint16(end)]]), "test": np.concatenate([*ids[:test], [np.uint16(end)]])}
    starts = np.cumsum([0, *map(len, ids[test:])])[:-1].astype(np.int32)
    np.savez(folder / "data.npz", **arrays, starts=starts)
    words = sum(len(text.split()) for text in texts)
    print(f"{len(texts)} stories, {words} words; {arrays['train'].size} tokens to train, {arrays['test'].size} to test")


def padded(tokens: np.ndarray, length: int, rows: int) -> np.ndarray:
    """The test stories, int32 [n * rows, length]: as many in a row as fit whole, each after END, and END after the
    last; -1 beyond."""
    bounds = np.flatnonzero(tokens == 0)
    lines, begin = [], 0
    while begin < len(bounds) - 1:
        last = begin + 1
        while last + 1 < len(bounds) and bounds[last + 1] - bounds[begin] < length:
            last += 1
        line = tokens[bounds[begin] : bounds[last] + 1][:length]
        lines.append(np.pad(line.astype(np.int32), (0, length - len(line)), constant_values=-1))
        begin = last
    return np.stack(lines + [np.full(length, -1, np.int32)] * (-len(lines) % rows))


def optimizer() -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019) for a learning rate of 1; norms do not decay."""
    matrices = lambda weights: jax.tree.map(lambda w: w.ndim > 1, weights)  # noqa: E731
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.95), optax.add_decayed_weights(0.1, matrices)
    )


def learning_rate(peak: float, step: int, warmup: int, progress: float) -> float:
    """A linear rise over `warmup` steps, and a cosine from `peak` to 0 over the time that there is."""
    return peak * min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def programs(plan: training.TrainingPlan, mesh: Mesh, length: int, remat: bool):
    """step(weights, moments, rate, tokens, starts) -> weights, moments, loss of windows of `length` tokens that
    begin at `starts`; and summed(weights, rows) -> [nats, tokens] of padded rows. Both split rows over the mesh."""
    rules = optimizer()
    split = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)

    def logits(weights, rows):
        lengths = jnp.full(len(rows), rows.shape[1])  # tokens after the last count for nothing
        return bj.forward(plan.rounded(weights), jnp.maximum(rows, 0), lengths, plan.config, remat=remat)[0]

    def own_slope(weights, tokens, starts):
        rows = tokens[starts[:, None] + jnp.arange(length)].astype(jnp.int32)

        def loss(weights):
            return training.cross_entropy(logits(weights, rows), rows, jnp.ones(rows.shape, bool))

        return jax.lax.pmean(jax.value_and_grad(loss)(weights), "data")

    slope = split(own_slope, in_specs=(P(), P(), P("data")), out_specs=P())

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(weights, moments, rate, tokens, starts):
        loss, gradients = slope(weights, tokens, starts)
        changes, moments = rules.update(gradients, moments, weights)
        return jax.tree.map(lambda w, change: w - rate * change, weights, changes), moments, loss

    def own_sum(weights, rows):
        counted = rows[:, 1:] >= 0
        nats = -jnp.where(counted, training.token_logprobs(logits(weights, rows), jnp.maximum(rows, 0)), 0)
        return jax.lax.psum(jnp.array([nats.sum(), counted.sum()]), "data")

    return step, jax.jit(split(own_sum, in_specs=(P(), P("data")), out_specs=P()))


def train(options: argparse.Namespace) -> dict[str, float]:
    """Train until the time is over; returns what it prints last."""
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(options.data / "tokenizer.json"))
    data = np.load(options.data / "data.npz")
    name = "float" if options.float else "one-bit"
    source = options.data / f"new-{name}.gguf"
    vocab = max(options.vocab, tokenizer.get_vocab_size())
    sizes = {size: getattr(options, size) for size in SIZES}
    write_new_model(source, tokenizer, sizes | {"vocab": vocab, "context": 2 * options.length})
    formats = [] if options.float else [("token_embd", options.embedding)]
    plan = training.plan(source, "f32" if options.float else "q1_0", pure=True, tensor_formats=formats)

    devices = np.array(jax.devices())
    mesh = Mesh(devices, ("data",))
    everywhere = NamedSharding(mesh, P())
    rows = options.rows * len(devices)
    step, summed = programs(plan, mesh, options.length, options.remat)
    weights = jax.device_put(plan.weights(), everywhere)
    moments = jax.device_put(optimizer().init(weights), everywhere)
    tokens = jax.device_put(np.pad(data["train"], (0, max(0, options.capacity - data["train"].size))), everywhere)
    lines = padded(data["test"], options.length, rows)
    tests = [jax.device_put(part, NamedSharding(mesh, P("data"))) for part in np.split(lines, len(lines) // rows)]
    count = sum(w.size for w in weights.values())
    print(f"{name}: {count / 1e6:.1f} M weights, {len(devices)} x {devices[0].device_kind}, {rows} rows of {options.length}")

    def perplexity() -> float:
        nats, number = sum(np.asarray(summed(weights, part), np.float64) for part in tests)
        return math.exp(nats / number)

    starts, rng = data["starts"], np.random.default_rng(options.seed)
    usable = starts[starts + options.length <= data["train"].size]
    peak, curve, losses, waiting = options.rate, [], [], []
    queue = np.zeros(0, np.int32)
    number, first, reported = 0, None, 0.0
    saved = time.monotonic()
    with jax.default_matmul_precision(TENSOR_CORES):
        print(f"before training: perplexity {perplexity():.1f}, {time.monotonic() - began:.0f} s", flush=True)
        while True:
            now = time.monotonic()
            last = began + options.seconds - options.reserve
            progress = 0.0 if first is None else (now - first) / max(1.0, last - first)
            if progress >= 1 or (options.steps and number == options.steps):
                break
            while len(queue) < rows:
                queue = np.concatenate([queue, rng.permutation(usable)])
            batch, queue = queue[:rows], queue[rows:]
            if options.steps:
                progress = number / options.steps
            rate = learning_rate(peak, number, options.warmup, progress)
            batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
            weights, moments, loss = step(weights, moments, jnp.float32(rate), tokens, batch)
            waiting.append(loss)
            if first is None or len(waiting) > 2:  # the host is two steps before the device
                losses.append(float(waiting.pop(0)))
            number += 1
            if first is None:  # compiled
                first = reported = time.monotonic()
                print(f"first step after {first - began:.0f} s", flush=True)
            elif now - reported > options.report:
                speed = (len(losses) - (curve[-1]["step"] if curve else 1)) * rows * options.length / (now - reported)
                recent = losses[curve[-1]["step"] if curve else 1 :]
                curve.append({"step": len(losses), "tokens": len(losses) * rows * options.length, "loss": float(np.mean(recent)), "rate": rate, "tok/s": speed})
                reported = now
                print(f"{now - began:5.0f} s  step {len(losses):6}  {curve[-1]['tokens'] / 1e6:7.1f} M tokens  loss {curve[-1]['loss']:.4f}  rate {rate:.2e}  {speed / 1e3:.0f} k tok/s", flush=True)
            if not options.float and options.save and now - saved > options.save:
                plan.save(options.out / f"{name}.gguf", weights, overwrite=True)
                saved = time.monotonic()
        losses += [float(loss) for loss in waiting]
        took = time.monotonic() - (first or began)
        test = perplexity()
    if not options.float:
        plan.save(options.out / f"{name}.gguf", weights, overwrite=True)
    report = {
        "weights": count, "steps": number, "tokens": number * rows * options.length, "epochs": number * rows * options.length / data["train"].size,
        "loss": float(np.mean(losses[-20:])), "test perplexity": test, "tok/s": max(0, number - 1) * rows * options.length / took, "seconds": time.monotonic() - began,
    }
    (options.out / f"{name}.json").write_text(json.dumps({"report": report, "curve": curve, "options": {k: str(v) for k, v in vars(options).items()}}))
    print(f"{name}:", json.dumps(report), flush=True)
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    before = parts.add_parser("prepare")
    before.add_argument("files", type=Path, nargs="+")
    before.add_argument("--test", type=int, default=2000, help="stories that are not trained")
    run = parts.add_parser("train")
    for part in (before, run):
        part.add_argument("--data", type=Path, required=True)
        part.add_argument("--vocab", type=int, default=4096, help="tokens of the vocabulary")
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--seconds", type=float, default=200, help="from the start of this process")
    run.add_argument("--reserve", type=float, default=20, help="of these, for the last perplexity and the file")
    run.add_argument("--steps", type=int, default=0, help="in place of the time")
    run.add_argument("--float", action="store_true", help="float32 weights: what one bit costs")
    run.add_argument("--embedding", default="q8_0", help="format of the embedding, which is the output matrix too")
    run.add_argument("--rows", type=int, default=32, help="of a step, on each device")
    run.add_argument("--length", type=int, default=512)
    run.add_argument("--capacity", type=int, default=1 << 27, help="tokens on each device: programs for all data are one")
    run.add_argument("--rate", type=float, default=2e-3)
    run.add_argument("--warmup", type=int, default=100)
    run.add_argument("--report", type=float, default=10, help="seconds between two lines")
    run.add_argument("--save", type=float, default=90, help="seconds between two files; 0: only the last")
    run.add_argument("--remat", action=argparse.BooleanOptionalAction, default=False)
    run.add_argument("--seed", type=int, default=0)
    for name, size in SIZES.items():
        run.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    options = parser.parse_args(arguments)
    if options.part == "prepare":
        prepare(options.files, options.data, options.vocab, options.test)
    else:
        train(options)


if __name__ == "__main__":
    main()
