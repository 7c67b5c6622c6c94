"""A real model's weights rounded to Q1_0 by our encoder and written by our writer: run by llama.cpp and here.

    uv run python benchmarks/requantized_vs_llamacpp.py model.gguf [--tie] [--only REGEX] [--keep FOLDER]
    PYTHONPATH=. python benchmarks/requantized_vs_llamacpp.py --against FOLDER/oracle.json FOLDER/q1_0.gguf

The text of such a model is poor: it was not trained for one bit. What counts is that two implementations,
which share no code, find the same probabilities. llama.cpp runs the same weights twice: written out as F32,
where neither side rounds anything, and as the Q1_0 file, where it rounds activations to 8 bits per group of
32. With every matrix rounded a model may say the same whatever it reads, and then agreement is cheap: so a
figure tells how much its predictions depend on the context, and --only rounds some matrices and not all.

--keep leaves the file and llama.cpp's answers behind. --against reads those answers where llama.cpp is not,
as on a machine with a GPU, and also reads every token in a step of its own: through the kernels of a decode
step.
"""

import argparse
import functools
import hashlib
import json
import re
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import bonsai_jax as bj
from bonsai_jax import card, machine
from bonsai_jax.decoding import jitted
from bonsai_jax.network import cache as kv
from bonsai_jax.weights.read import blocks
from checkpoints import Checkpoint, Tensor, open_checkpoint, write_gguf
from pallas_kernels import dequantize, formats, from_blocks, quantize
from tests.agreement import agreement, log_softmax, top_kl

PROMPTS = Path(__file__).parent.parent / "tests" / "data" / "prompts.json"
MOST = 48  # tokens of a prompt, the last n of which are predicted
FORMAT = "q1_0"


def requantized(checkpoint: Checkpoint, tie: bool, only: str) -> Iterator[Tensor]:
    """The checkpoint's tensors: matrices that are asked for, and are whole groups wide, as Q1_0."""
    for t in checkpoint.tensors.values():
        if tie and t.name == "output.weight":
            continue
        raw = blocks(t)
        whole = len(t.shape) == 2 and t.shape[1] % formats.get(FORMAT).WEIGHTS == 0
        if whole and re.search(only, t.name):
            yield Tensor(t.name, FORMAT, t.shape, np.asarray(_round(raw, t.format)))
        else:
            yield Tensor(t.name, t.format, t.shape, np.asarray(raw))


@functools.partial(jax.jit, static_argnums=1)
def _round(raw: jax.Array, format: str) -> jax.Array:
    return formats.pack(FORMAT, quantize(dequantize(from_blocks(raw, format)), FORMAT).fields)


def kl_step_by_step(model: bj.Model, rows: list[dict]) -> tuple[float, float]:
    """As `agreement`, (KL, share of same top tokens), but each token is read in a step of its own."""
    kl, same = [], []
    for row in rows:
        ids, top_ids = row["prompt"] + row["tokens"][:-1], np.array(row["top_ids"])
        cache, scores = kv.empty(model.config, model.run, 1, len(ids)), []
        for token in ids:
            tokens, lengths = jnp.array([[token]], jnp.int32), jnp.array([1], jnp.int32)
            step, cache = jitted.extend(model.params, cache, tokens, lengths, model.config)
            scores.append(step[0, 0])
        ours = np.asarray(jnp.stack(scores[-len(top_ids) :]))
        kl.append(top_kl(top_ids, np.array(row["top_logprobs"]), log_softmax(ours)))
        same.append(ours.argmax(-1) == top_ids[:, 0])
    return float(np.concatenate(kl).mean()), float(np.concatenate(same).mean())


def what_the_context_tells(model: bj.Model, rows: list[dict]) -> float:
    """Mean KL of a prediction from the mean of all predictions, in nats; of every fourth token.

    I = mean_t KL(p_t || mean_t p_t): near 0 for a model that says the same whatever it reads
    """
    log_p = np.concatenate(
        [
            log_softmax(bj.logits(model, row["prompt"] + row["tokens"][:-1])[-len(row["tokens"]) :: 4])
            for row in rows
        ]
    )
    p = np.exp(log_p)
    return float((p * (log_p - np.log(p.mean(0)))).sum(1).mean())


def make_oracle(path: Path, prompts: int, n: int, folder: Path) -> dict:
    """llama.cpp's answers on the weights of this Q1_0 file as F32, and on the file as it is."""
    from tests.bonsai_jax.llama_cpp import LlamaCpp, write_float32

    checkpoint = open_checkpoint(str(path))
    tokenizer = bj.Tokenizer.from_checkpoint(checkpoint)
    texts = [prompt["text"] for prompt in json.loads(PROMPTS.read_text())][:prompts]
    ids, (readable,) = [tokenizer.encode(text)[:MOST] for text in texts], tokenizer.encode("a")
    cuts = [max(1, len(text) - n) for text in ids]  # read before, and behind it the text's own tokens
    oracle = {
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "xllamacpp": version("xllamacpp"),
    }
    exact = folder / "f32.gguf"
    write_float32(checkpoint, exact)
    try:
        for name, file in ("float32", exact), ("as_is", path):
            llama_cpp = LlamaCpp(file, context=256)
            oracle[name] = [
                llama_cpp.greedy(text[:cut], n, readable=readable, text=text[cut:])
                for text, cut in zip(ids, cuts, strict=True)
            ]
            del llama_cpp
    finally:
        exact.unlink()
    return oracle


def report(path: Path, oracle: dict, run: bj.RunConfig, *, steps: bool) -> float:
    """Print how far this device's distributions are from the oracle's. Returns the largest KL to F32."""
    model = bj.load(str(path), run)
    where = f"{machine.device_name()}, {card.step_names(model.params, model.config)}"
    print(f"{where}, cache {model.run.cache_dtype}, jax {jax.__version__}")
    tokens = sum(len(row["tokens"]) for row in oracle["float32"])
    print(
        f"llama.cpp (xllamacpp {oracle['xllamacpp']}): {len(oracle['float32'])} prompts, {tokens} tokens, "
        f"the context tells {what_the_context_tells(model, oracle['float32']):.2f} nats\n"
    )
    print("| llama.cpp runs the weights as | here | KL, its top 20 | same top token |")
    print("| --- | --- | ---: | ---: |")
    worst = 0.0
    for name, label in ("float32", "F32"), ("as_is", "Q1_0, activations of 8 bits"):
        found = agreement(model, oracle[name])
        print(f"| {label} | all at once | {found.kl:.2e} | {found.same_top:.1%} |")
        worst = max(worst, found.kl) if name == "float32" else worst
        if steps:
            kl, same = kl_step_by_step(model, oracle[name])
            print(f"| {label} | step by step | {kl:.2e} | {same:.1%} |", flush=True)
            worst = max(worst, kl) if name == "float32" else worst
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a GGUF file or synth:..., to requantize; with --against the Q1_0 file")
    parser.add_argument("--tie", action="store_true", help="leave output.weight out: the embedding serves")
    parser.add_argument("--only", default="", metavar="REGEX", help="round only matrices whose name it finds")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("-n", type=int, default=16, help="tokens behind each prompt")
    parser.add_argument("--keep", type=Path, help="folder for q1_0.gguf and oracle.json")
    parser.add_argument("--against", type=Path, help="an oracle.json that --keep left behind")
    parser.add_argument("--activation-bits", type=int, choices=(8, 16), default=8)
    parser.add_argument("--cache-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--limit", type=float, default=5e-3, help="exit with an error at a larger KL to F32")
    arguments = parser.parse_args()
    run = bj.RunConfig(
        context=256,
        batch_size=1,
        cache_dtype=arguments.cache_dtype,
        activation_bits=arguments.activation_bits,
    )
    if arguments.against:
        oracle, path = json.loads(arguments.against.read_text()), Path(arguments.model)
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != oracle["sha256"]:
            raise SystemExit(
                f"{path}: sha256 {found[:12]}...; {arguments.against} is of {oracle['sha256'][:12]}..."
            )
        kl = report(path, oracle, run, steps=True)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            folder = arguments.keep or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            path, checkpoint = folder / "q1_0.gguf", open_checkpoint(arguments.model)
            write_gguf(path, checkpoint.metadata, requantized(checkpoint, arguments.tie, arguments.only))
            oracle = make_oracle(path, arguments.prompts, arguments.n, folder)
            if arguments.keep:
                (folder / "oracle.json").write_text(json.dumps(oracle, separators=(",", ":")) + "\n")
            kl = report(path, oracle, run, steps=False)
    raise SystemExit(f"KL {kl:.1e} exceeds {arguments.limit:.0e}" if not kl < arguments.limit else 0)


if __name__ == "__main__":
    main()
