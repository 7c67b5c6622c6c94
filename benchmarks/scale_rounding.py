"""What GPU products of 1-bit weights lose by rounding, simulated with the story model.

    JAX_PLATFORMS=cpu uv run python benchmarks/scale_rounding.py
    PYTHONPATH=. python benchmarks/scale_rounding.py --steps 1,2,4,8,9,16      # on a GPU

A kernel of our own takes the place of the others (selection.register). It multiplies in float32, but rounds
activations to 8 bits in groups of `columns`, and with `scales` the weights' scales d as
pallas_kernels/matmul/bit_mma/group_sums.py does: to 7 bits of the largest of a row's four groups. What the
output matrix reads, which is in Q8_0, has groups of 32 everywhere. `rotated` means that a Hadamard transform
of 512 values comes before the rounding and its inverse behind it; inputs of folded weights are transformed
like that (rotation.py). `down 16` stands for 16 bits of what down reads, as steps of up to 8 rows have it.
Prints KL(exact || rounded) in nats, the mean over the tokens of texts that the model wrote, and its standard
error over texts.

With --steps it prints the same of decode steps through this device's own kernels, for each number of rows,
and its ratio to that of 32 columns with exact scales, which llama.cpp has.
"""

import argparse
import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import bonsai_jax as bj
from pallas_kernels import dequantize, selection
from pallas_kernels.norm import rms_norm
from pallas_kernels.precision import EXACT
from pallas_kernels.problems import Matmul
from pallas_kernels.rotation import Rotation
from tests.agreement import divergence, log_softmax
from tests.gpu.steps import log_p_of_steps

GROUP, GROUPS = 128, 4  # columns of a scale, and scales that are rounded together
STARTS = ("Once upon a time", "The old king", "Lily had a red ball", "In the forest")
TEXTS, TOKENS = 16, 200  # and of each text


class Rounding(NamedTuple):
    """How activations are rounded.

    columns    that share a scale; None: activations are not rounded
    down_bits  bits of what down reads; others have 8
    rotated    whether a Hadamard transform comes before, and its inverse behind it
    """

    columns: int | None
    down_bits: int = 8
    rotated: bool = False

    def __str__(self):
        down = f", down {self.down_bits}" * (self.down_bits != 8)
        return f"groups of {self.columns}{down}{', rotated' * self.rotated}" if self.columns else "float32"


EXACTLY, AS_LLAMA_CPP = Rounding(None), Rounding(32)
ROUNDINGS = (EXACTLY, AS_LLAMA_CPP, *map(Rounding, (64, 128, 256)), Rounding(128, 16))
ROUNDINGS += (Rounding(32, rotated=True), Rounding(128, rotated=True))


def rounded_activations(x: Float[Array, "*batch K"], columns: int, bits: int) -> Float[Array, "*batch K"]:
    groups = x.reshape(*x.shape[:-1], -1, columns)
    scale = jnp.maximum(jnp.abs(groups).max(-1, keepdims=True), 1e-20) / (2 ** (bits - 1) - 1)
    return (jnp.round(groups / scale) * scale).reshape(x.shape)


def rotation_of(columns: int) -> Rotation:
    """With random signs. It transforms 1,024 columns together, as Bonsai 2 does, or the largest power of two
    that divides their number: 512 with the story model."""
    signs = np.random.default_rng(columns).choice([-1.0, 1.0], columns)
    return Rotation.from_signs(signs, min(columns & -columns, 1024))


def rounded_scales(w: Float[Array, "N K"]) -> Float[Array, "N K"]:
    """+-d -> +-round(127 d / D) D / 127, D the largest d of a row's four groups."""
    n, d = len(w), jnp.abs(w[:, ::GROUP])
    steps = jnp.pad(d, [(0, 0), (0, -d.shape[1] % GROUPS)]).reshape(n, -1, GROUPS)
    unit = jnp.maximum(steps.max(-1, keepdims=True), 1e-20) / 127
    taken = (jnp.round(steps / unit) * unit).reshape(n, -1)[:, : d.shape[1]]
    return jnp.sign(w) * jnp.repeat(taken, GROUP, axis=1)


@contextlib.contextmanager
def simulated(rounding: Rounding, scales: bool) -> Iterator[None]:
    """Products round, in models that are loaded in here."""

    def run(x, weights, part_layer, layer, gamma, eps, residual, activation):
        x = x.astype(jnp.float32)
        if gamma is not None:
            x = rms_norm(x, gamma[layer] if gamma.ndim == 2 else gamma, eps)
        dense = [dequantize(w if part_layer is None else w[part_layer]) for w in weights]
        columns, bits, rotated = rounding
        if weights[0].format != "q1_0":
            columns, bits, rotated = columns and 32, 8, False
        elif scales:
            dense = [rounded_scales(w) for w in dense]
        if columns is not None:
            n, k = weights[0].shape
            rotation = rotation_of(k)
            x = rotation(x) if rotated else x
            x = rounded_activations(x, columns, bits if k > n else 8)  # down alone has more inputs
            x = rotation.back(x) if rotated else x
        y = [jnp.matmul(x, w.T, precision=EXACT) for w in dense]
        out = y[0] if len(y) == 1 else activation(*y)
        return out if residual is None else out + residual

    kernel = selection.Candidate("rounding", Matmul, lambda problem: None, run, pallas=False)
    selection.register(kernel, before=selection.candidates(Matmul)[0].name)
    try:
        yield
    finally:
        selection.unregister(kernel)


def log_probabilities(
    texts: list[list[int]], rounding: Rounding, scales: bool = False
) -> Float[np.ndarray, "texts tokens V"]:
    with simulated(rounding, scales):
        model = bj.load("stories", bj.RunConfig(weights="packed", cache_dtype="float32"))
        tokens, lengths = jnp.asarray(texts), jnp.full(len(texts), len(texts[0]))
        logits, _ = jax.jit(lambda params: bj.forward(params, tokens, lengths, model.config))(model.params)
    return log_softmax(np.asarray(logits))


def log_probabilities_of_steps(texts: list[list[int]], rows: int) -> Float[np.ndarray, "texts tokens V"]:
    model = bj.load("stories", bj.RunConfig(weights="packed", cache_dtype="float32", batch_size=rows))
    parts = (texts[first : first + rows] for first in range(0, len(texts), rows))
    return np.concatenate([log_p_of_steps(model, part) for part in parts])


def in_nats(kl: Float[np.ndarray, "texts"]) -> str:
    return f"{kl.mean():.2e} +- {kl.std(ddof=1) / len(kl) ** 0.5:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", default="", help="rows of decode steps, as 1,8")
    arguments = parser.parse_args()
    starts = list(STARTS) * (TEXTS // len(STARTS))  # each is continued in another way
    options = {"max_new_tokens": TOKENS, "sampling": bj.SamplingParams(seed=0), "ignore_eos": True}
    outputs = bj.generate(bj.load("stories"), starts, **options)
    texts = [list(output.tokens) for output in outputs]
    exact = log_probabilities(texts, EXACTLY)
    kl_of = lambda log_p: divergence(exact, log_p).mean(-1)  # noqa: E731  # of each text
    if not arguments.steps:
        print("| activations | exact scales | rounded scales |\n|---|---:|---:|")
        for rounding in ROUNDINGS:
            cells = [in_nats(kl_of(log_probabilities(texts, rounding, scales))) for scales in (False, True)]
            print(f"| {rounding} | {cells[0]} | {cells[1]} |", flush=True)
        return
    theirs = kl_of(log_probabilities(texts, AS_LLAMA_CPP))
    print(f"{AS_LLAMA_CPP}: {in_nats(theirs)}")
    print("| rows | KL | over groups of 32 |\n|---:|---:|---:|")
    for rows in map(int, arguments.steps.split(",")):
        kl = kl_of(log_probabilities_of_steps(texts, rows))
        print(f"| {rows} | {in_nats(kl)} | {kl.mean() / theirs.mean():.2f} |", flush=True)


if __name__ == "__main__":
    main()
