"""A small model that continues stories, trained from scratch with the weights of Q1_0, on every GPU there is.

    python examples/story_model/train.py prepare stories/*.jsonl --data data
    python examples/story_model/train.py train --data data --out OUT --seconds 200
    python examples/story_model/train.py train --data data --out OUT --seconds 200 --float    # to compare

Each process takes the GPUs in CUDA_VISIBLE_DEVICES and splits batches over them.
"""

import argparse
import functools
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from data import prepare, test_rows, windows  # beside this file
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from new_model import write_new_model  # beside this file

import bonsai_jax as bj
from bonsai_jax import training

# 33.6 M weights with a vocabulary of 4,096.
SIZES = {"layers": 10, "hidden": 512, "ffn": 1536, "heads": 8, "kv_heads": 4, "head_dim": 64}
TENSOR_CORES = "BF16_BF16_F32"  # products of bfloat16, sums of float32; weights and the rest are float32


def optimizer() -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019) for a learning rate of 1; norms do not decay."""
    matrices = lambda weights: jax.tree.map(lambda w: w.ndim > 1, weights)  # noqa: E731
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b2=0.95),
        optax.add_decayed_weights(0.1, matrices),
    )


def learning_rate(peak: float, step: int, warmup: int, progress: float) -> float:
    """A linear rise over `warmup` steps, and a cosine from `peak` to 0 over the time that there is."""
    return peak * min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def programs(plan: training.TrainingPlan, mesh: Mesh, length: int, remat: bool):
    """step(weights, moments, rate, tokens, starts) -> weights, moments, loss of windows of `length` tokens
    that begin at `starts`; and summed(weights, rows) -> [nats, tokens] of test rows. Both split rows over a
    mesh."""
    rules = optimizer()
    split = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)

    def logits(weights, rows):
        lengths = jnp.full(len(rows), rows.shape[1])  # tokens after the last count for nothing
        tokens = jnp.maximum(rows, 0)
        return bj.forward(plan.rounded(weights), tokens, lengths, plan.config, remat=remat)[0]

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
        nats = -training.token_logprobs(logits(weights, rows), jnp.maximum(rows, 0))
        return jax.lax.psum(jnp.array([jnp.where(counted, nats, 0).sum(), counted.sum()]), "data")

    return step, jax.jit(split(own_sum, in_specs=(P(), P("data")), out_specs=P()))


class Curve:
    """The losses of all steps, and a line for every `seconds` of them."""

    def __init__(self, tokens_per_step: int, seconds: float):
        self.tokens_per_step, self.seconds = tokens_per_step, seconds
        self.losses: list[float] = []
        self.lines: list[dict[str, float]] = []
        self.last_line, self.start = 0, time.monotonic()
        self.before = self.start

    def add(self, loss: float, rate: float) -> None:
        self.losses.append(loss)
        now, steps = time.monotonic(), len(self.losses)
        if now - self.before < self.seconds:
            return
        speed = (steps - self.last_line) * self.tokens_per_step / (now - self.before)
        line = {"seconds": now - self.start, "step": steps, "tokens": steps * self.tokens_per_step}
        line |= {"loss": float(np.mean(self.losses[self.last_line :])), "rate": rate, "tok/s": speed}
        self.lines.append(line)
        self.last_line, self.before = steps, now
        print(" ".join(f"{name} {value:.5g}" for name, value in line.items()), flush=True)


def train(options: argparse.Namespace) -> None:
    """Train until the time is over, and write the model and what happened."""
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    data, name = np.load(options.data / "data.npz"), "float" if options.float else "one-bit"
    plan = new_plan(options, name)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    everywhere, by_rows = (NamedSharding(mesh, spec) for spec in (P(), P("data")))
    rows = options.rows * mesh.size
    step, summed = programs(plan, mesh, options.length, options.remat)
    weights = jax.device_put(plan.weights(), everywhere)
    moments = jax.device_put(optimizer().init(weights), everywhere)
    padding = max(0, options.capacity - data["train"].size)
    tokens = jax.device_put(np.pad(data["train"], (0, padding)), everywhere)
    lines = test_rows(data["test"], options.length, rows)
    tests = [jax.device_put(part, by_rows) for part in lines.reshape(-1, rows, options.length)]
    count = sum(w.size for w in weights.values())
    print(f"{name}: {count / 1e6:.1f} M weights on {mesh.size} x {jax.devices()[0].device_kind}", flush=True)

    def perplexity() -> float:
        nats, number = sum(np.asarray(summed(weights, part), np.float64) for part in tests)
        return math.exp(nats / number)

    def save() -> None:
        if not options.float:  # a file of floats is too large to take along
            plan.save(options.out / f"{name}.gguf", weights, overwrite=True)

    print(f"before training: perplexity {perplexity():.1f}, {time.monotonic() - began:.0f} s", flush=True)
    curve, waiting = None, []
    for number, starts in enumerate(
        windows(data["starts"], data["train"].size, options.length, rows, options.seed)
    ):
        spent = 0.0 if curve is None else time.monotonic() - curve.start
        total = 1.0 if curve is None else began + options.seconds - options.reserve - curve.start
        progress = number / options.steps if options.steps else spent / max(total, 1e-3)
        if progress >= 1:
            break
        rate = learning_rate(options.rate, number, options.warmup, progress)
        starts = jax.device_put(starts, by_rows)
        weights, moments, loss = step(weights, moments, jnp.float32(rate), tokens, starts)
        if curve is None:  # compiled, and the time begins
            print(f"first loss {float(loss):.3f} after {time.monotonic() - began:.0f} s", flush=True)
            curve, saved = Curve(rows * options.length, options.report), time.monotonic()
            continue
        waiting.append(loss)
        if len(waiting) > 2:  # the host is two steps before the devices
            curve.add(float(waiting.pop(0)), rate)
        if options.save and time.monotonic() - saved > options.save:
            save()
            saved = time.monotonic()
    losses = [*curve.losses, *(float(loss) for loss in waiting)]
    seen, took = (len(losses) + 1) * rows * options.length, time.monotonic() - curve.start
    report = {
        "weights": count,
        "steps": len(losses) + 1,
        "tokens": seen,
        "tokens of data": data["train"].size,
    }
    report |= {"loss": float(np.mean(losses[-50:])), "test perplexity": perplexity(), "tok/s": seen / took}
    save()
    report["seconds"] = time.monotonic() - began
    settings = {name: str(value) for name, value in vars(options).items()}
    result = {"report": report, "settings": settings, "curve": curve.lines}
    (options.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{name}: {json.dumps(report)}", flush=True)


def new_plan(options: argparse.Namespace, name: str) -> training.TrainingPlan:
    """Of a model of random weights."""
    tokenizer = tokenizers.Tokenizer.from_file(str(options.data / "tokenizer.json"))
    sizes = {size: getattr(options, size) for size in SIZES}
    sizes |= {"vocab": max(options.vocab, tokenizer.get_vocab_size()), "context": 2 * options.length}
    source = options.data / f"new-{name}.gguf"
    write_new_model(source, tokenizer, sizes, options.seed)
    if options.float:
        return training.plan(source, "f32", pure=True)
    return training.plan(source, "q1_0", pure=True, tensor_formats=[("token_embd", options.embedding)])


def main(arguments: Sequence[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parts = parser.add_subparsers(dest="part", required=True)
    before, run = parts.add_parser("prepare"), parts.add_parser("train")
    for part in (before, run):
        part.add_argument("--data", type=Path, required=True)
        part.add_argument("--vocab", type=int, default=4096, help="tokens of the vocabulary")
    before.add_argument("files", type=Path, nargs="+")
    before.add_argument("--test", type=int, default=2000, help="stories that are not trained")
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--seconds", type=float, default=200, help="from the start of this process")
    run.add_argument(
        "--reserve", type=float, default=20, help="of these, for the last perplexity and the file"
    )
    run.add_argument("--steps", type=int, default=0, help="in place of the time")
    run.add_argument("--float", action="store_true", help="float32 weights: what one bit costs")
    run.add_argument("--embedding", default="q8_0", help="format of the embedding, the output matrix too")
    run.add_argument("--rows", type=int, default=32, help="of a step, on each device")
    run.add_argument("--length", type=int, default=512)
    run.add_argument(
        "--capacity", type=int, default=1 << 27, help="tokens on a device: one program for all data"
    )
    run.add_argument("--rate", type=float, default=2e-3)
    run.add_argument("--warmup", type=int, default=100)
    run.add_argument("--report", type=float, default=10, help="seconds between two lines")
    run.add_argument("--save", type=float, default=90, help="seconds between two files; 0: only the last")
    run.add_argument("--remat", action=argparse.BooleanOptionalAction, default=True)
    run.add_argument("--seed", type=int, default=0)
    for name, size in SIZES.items():
        run.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    options = parser.parse_args(arguments)
    if options.part == "prepare":
        prepare(options.files, options.data, options.vocab, options.test)
    else:
        with jax.default_matmul_precision(TENSOR_CORES):
            train(options)


if __name__ == "__main__":
    main()
