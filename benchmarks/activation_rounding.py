"""How far 8-bit activations are from the truth, format by format: ours on this device and llama.cpp's on the
same file.

    uv run python benchmarks/activation_rounding.py [-m FILE] [FORMAT ...] [--rows 1 8] [--limit 1.0]
    uv run python benchmarks/activation_rounding.py q1_0 tq2_0 q2_0_g64 --rest f32 --only "blk[.][369][.]"

For each format a model (without -m the demo, SmolLM2-135M) is requantized by `bj.quantize_file`, all matrices
with rows of whole blocks of the format. The others get the formats that quantize_file falls back to, or
--rest f32, whose activations nobody rounds. A model with every matrix in 1.1 or 2.1 bits is ruined and its
KL erratic; --only rounds the matrices whose name the expression finds. Then texts are read, of each the first
tokens as a prompt:

    truth       the same blocks with float32 activations (activation_bits=16), on a CPU. It is llama.cpp's F32
                expansion of the file to a KL of 1e-6 (tests/bonsai_jax/test_oracle.py)
    decode      ours, 8-bit activations: every token in a step of its own, of 1 and of 8 texts together
    prefill     ours, 8-bit activations: all tokens of all texts at once
    llama.cpp   on the file, which it reads with 8-bit activations, in steps

KL(truth || each) in nats, mean over tokens, of llama.cpp's 20 likeliest tokens and the rest as one event: the
same events for all. The error beside a ratio is the jackknife's over texts; KLs of two implementations of one
rounding differ by that much.
"""

import argparse
import json
import math
import re
import tempfile
from importlib.metadata import version
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

import bonsai_jax as bj
from bonsai_jax import machine
from bonsai_jax.decoding import jitted
from bonsai_jax.network import cache as kv
from checkpoints import open_checkpoint
from checkpoints.demo import demo_path
from checkpoints.geometry import GEOMETRY
from tests.agreement import log_softmax, padded_logits, top_kl

DATA = Path(__file__).parent.parent / "tests" / "data"
TEXTS, PROMPT, SCORED = 8, 24, 64  # texts; of each: tokens read before, tokens scored
FORMATS = (
    *("q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0", "iq4_nl", "iq4_xs", "mxfp4", "nvfp4"),
    *("q3_k", "q2_k", "q2_0_g64", "tq2_0", "tq1_0", "q1_0"),
)
RECIPE = {"q2_0_g64": "q2_0", "q5_k": "q5_k_s", "q4_k": "q4_k_s", "q3_k": "q3_k_s"}


def texts(tokenizer: bj.Tokenizer, count: int) -> Int[np.ndarray, "texts tokens"]:
    """Half of them from a novel, half from the prompts of the tests, in many languages and code."""
    length, novel = PROMPT + SCORED, (DATA / "moby_dick.txt").read_text()
    mixed = "\n\n".join(prompt["text"] for prompt in json.loads((DATA / "prompts.json").read_text()))
    cut = []
    for text, rows in ((novel, (count + 1) // 2), (mixed, count // 2)):
        ids = tokenizer.encode(text[: 8 * length * count], parse_special=False)
        starts = np.linspace(0, len(ids) - length, rows).astype(int) if rows else []
        cut += [ids[start : start + length] for start in starts]
    return np.array(cut, np.int32)


def in_steps(
    model: bj.Model, ids: Int[np.ndarray, "texts tokens"], rows: int
) -> Float[np.ndarray, "texts scored V"]:
    """Logits of the scored places: each token read in a step of its own, `rows` texts at once."""
    out = []
    for first in range(0, len(ids), rows):
        part = ids[first : first + rows]
        cache, scores = kv.empty(model.config, model.run, len(part), part.shape[1]), []
        for column in part.T:
            step, cache = jitted.extend(
                model.params,
                cache,
                jnp.asarray(column)[:, None],
                jnp.ones(len(part), jnp.int32),
                model.config,
            )
            scores.append(np.asarray(step[:, 0]))
        out.append(np.stack(scores[PROMPT:], 1))
    return np.concatenate(out)


def at_once(model: bj.Model, ids: Int[np.ndarray, "texts tokens"]) -> Float[np.ndarray, "texts scored V"]:
    return np.stack(padded_logits(model, ids.tolist()))[:, PROMPT:]


def llama_cpp(
    path: Path, ids: Int[np.ndarray, "texts tokens"], readable: int
) -> tuple[np.ndarray, np.ndarray]:
    """The ids and log-probabilities of its likeliest tokens, [texts, scored, 20]."""
    from tests.bonsai_jax.llama_cpp import LlamaCpp

    model = LlamaCpp(path, context=256)
    first = PROMPT + 1
    rows = [model.greedy(row[:first], SCORED, readable=readable, text=row[first:]) for row in ids.tolist()]
    return np.array([row["top_ids"] for row in rows]), np.array([row["top_logprobs"] for row in rows])


def requantized(source: str, path: Path, format: str, rest: str | None, only: str) -> float:
    """Write the file. Returns the share of the matrices' weights that have the format."""
    matrices = [t for t in open_checkpoint(source).tensors.values() if len(t.shape) == 2]
    whole = [t.name for t in matrices if t.shape[1] % GEOMETRY[format].weights == 0]
    others = {t.name for t in matrices} - {name for name in whole if re.search(only, name)}
    changes = bj.quantize_file(
        source,
        path,
        RECIPE.get(format, format),
        pure=True,
        requantize=True,
        overwrite=True,
        tensor_formats=[(f"^{re.escape(name)}$", rest) for name in others] if rest else (),
    )
    own = sum(c.weights for c in changes if c.after == format and len(c.shape) == 2)
    return own / sum(math.prod(t.shape) for t in matrices)


def ratio(
    ours: Float[np.ndarray, "texts scored"], theirs: Float[np.ndarray, "texts scored"]
) -> tuple[float, float]:
    """Ours over theirs, of means, and its error: the jackknife's over texts."""
    a, b = ours.sum(1), theirs.sum(1)
    without = (a.sum() - a) / (b.sum() - b)
    return a.sum() / b.sum(), float(np.sqrt((len(a) - 1) * without.var()))


def row(source: str, format: str, ids: np.ndarray, options: argparse.Namespace) -> float:
    """Print a format's row of the table. Returns the largest ratio."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        share = requantized(source, path, format, options.rest, options.only)
        (readable,) = bj.Tokenizer.from_checkpoint(open_checkpoint(str(path))).encode("a")
        top, theirs = llama_cpp(path, ids, readable)
        exact, rounded = (
            bj.load(str(path), bj.RunConfig(context=256, cache_dtype="float32", activation_bits=bits))
            for bits in (16, 8)
        )
    ours = {f"decode, {rows}": in_steps(rounded, ids, rows) for rows in options.rows}
    ours["prefill"] = at_once(rounded, ids)
    truth = log_softmax(at_once(exact, ids))

    def kl(log_probs: np.ndarray) -> Float[np.ndarray, "texts scored"]:
        """From the truth; of probabilities of llama.cpp's likeliest tokens, [texts, scored, 20]."""
        places = np.take_along_axis(truth, top, -1)
        flat = [a.reshape(-1, a.shape[-1]) for a in (places, log_probs)]
        each = top_kl(np.broadcast_to(np.arange(top.shape[-1]), flat[0].shape), *flat)
        return each.reshape(top.shape[:2])

    base = kl(theirs)
    cells, worst = [], 0.0
    for scores in ours.values():
        own = kl(np.take_along_axis(log_softmax(scores), top, -1))
        value, error = ratio(own, base)
        cells.append(f"{own.mean():.2e} | {value:.2f} ± {error:.2f}")
        worst = max(worst, value)
    print(f"| {format} | {share:.0%} | {base.mean():.2e} | {' | '.join(cells)} |", flush=True)
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("formats", nargs="*", default=FORMATS, metavar="FORMAT")
    parser.add_argument("-m", "--model", help="a GGUF file to requantize")
    parser.add_argument("--rest", choices=("f32",), help="format of matrices that FORMAT does not fit")
    parser.add_argument("--only", default="", metavar="REGEX", help="with --rest: names of matrices to round")
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 8), help="texts in a decode step")
    parser.add_argument("--texts", type=int, default=TEXTS)
    parser.add_argument("--limit", type=float, help="exit with an error at a larger ratio")
    options = parser.parse_args()
    if options.only and not options.rest:
        parser.error("--only says which matrices are rounded; say what the others become: --rest f32")
    source = options.model or str(demo_path())
    ids = texts(bj.Tokenizer.from_checkpoint(open_checkpoint(source)), options.texts)
    print(
        f"{machine.device_name()}, xllamacpp {version('xllamacpp')}; {len(ids)} texts, {SCORED} tokens each\n"
    )
    names = [*(f"decode, {rows}" for rows in options.rows), "prefill"]
    print(f"| format | of weights | llama.cpp | {' | '.join(f'{name} | over llama.cpp' for name in names)} |")
    print(f"| --- | ---: | ---: |{' ---: | ---: |' * len(names)}")
    worst = {format: row(source, format, ids, options) for format in options.formats}
    above = {format: value for format, value in worst.items() if options.limit and value > options.limit}
    raise SystemExit(f"over {options.limit}: {above}" if above else 0)


if __name__ == "__main__":
    main()
