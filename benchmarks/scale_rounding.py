"""What GPU products of 1-bit weights with many rows lose, simulated on a CPU with the story model.

    JAX_PLATFORMS=cpu uv run python benchmarks/scale_rounding.py

A kernel of our own takes the place of the reference (selection.register). It multiplies in float32, but
rounds activations to 8 bits in groups of `columns`, and with `scales` the weights' scales d as
pallas_kernels/matmul/bit_mma/group_sums.py does: to 7 bits of the largest of a row's four groups. Prints
KL(exact || rounded) in nats, the mean over the tokens of texts that the model wrote, and its standard error
over texts.
"""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import bonsai_jax as bj
from pallas_kernels import dequantize, selection
from pallas_kernels.norm import rms_norm
from pallas_kernels.problems import Matmul
from tests.agreement import log_softmax

GROUP, GROUPS = 128, 4  # columns of a scale, and scales that are rounded together
STARTS = ("Once upon a time", "The old king", "Lily had a red ball", "In the forest")
TEXTS, TOKENS = 16, 200  # and of each text
COLUMNS = None, 32, 64, 128, 256  # that share a scale of activations; None: not rounded


def rounded_activations(x: Float[Array, "*batch K"], columns: int) -> Float[Array, "*batch K"]:
    groups = x.reshape(*x.shape[:-1], -1, columns)
    scale = jnp.maximum(jnp.abs(groups).max(-1, keepdims=True), 1e-20) / 127
    return (jnp.round(groups / scale) * scale).reshape(x.shape)


def rounded_scales(w: Float[Array, "N K"]) -> Float[Array, "N K"]:
    """+-d -> +-round(127 d / D) D / 127, D the largest d of a row's four groups."""
    n, d = len(w), jnp.abs(w[:, ::GROUP])
    steps = jnp.pad(d, [(0, 0), (0, -d.shape[1] % GROUPS)]).reshape(n, -1, GROUPS)
    unit = jnp.maximum(steps.max(-1, keepdims=True), 1e-20) / 127
    taken = (jnp.round(steps / unit) * unit).reshape(n, -1)[:, : d.shape[1]]
    return jnp.sign(w) * jnp.repeat(taken, GROUP, axis=1)


@contextlib.contextmanager
def rounding(columns: int | None, scales: bool) -> Iterator[None]:
    """Q1_0's products round, in models that are loaded in here."""

    def run(x, weights, part_layer, layer, gamma, eps, residual, activation):
        x = x.astype(jnp.float32)
        if gamma is not None:
            x = rms_norm(x, gamma[layer] if gamma.ndim == 2 else gamma, eps)
        x = x if columns is None else rounded_activations(x, columns)
        dense = [dequantize(w if part_layer is None else w[part_layer]) for w in weights]
        y = [x @ (rounded_scales(w) if scales else w).T for w in dense]
        out = y[0] if len(y) == 1 else activation(*y)
        return out if residual is None else out + residual

    refuses = lambda problem: None if problem.format == "q1_0" else "is for Q1_0"  # noqa: E731
    kernel = selection.Candidate("rounding", Matmul, refuses, run, pallas=False)
    selection.register(kernel, before=selection.candidates(Matmul)[0].name)
    try:
        yield
    finally:
        selection.unregister(kernel)


def log_probabilities(
    texts: list[list[int]], columns: int | None, scales: bool
) -> Float[np.ndarray, "texts tokens V"]:
    with rounding(columns, scales):
        model = bj.load("stories", bj.RunConfig(weights="packed", cache_dtype="float32"))
        tokens, lengths = jnp.asarray(texts), jnp.full(len(texts), len(texts[0]))
        logits, _ = jax.jit(lambda params: bj.forward(params, tokens, lengths, model.config))(model.params)
    return log_softmax(np.asarray(logits))


def main() -> None:
    starts = list(STARTS) * (TEXTS // len(STARTS))  # each is continued in another way
    outputs = bj.generate(bj.load("stories"), starts, max_new_tokens=TOKENS, ignore_eos=True)
    texts = [list(output.tokens) for output in outputs]
    exact = log_probabilities(texts, None, False)
    print("| activations | exact scales | rounded scales |\n|---|---:|---:|")
    for columns in COLUMNS:
        cells = []
        for scales in (False, True):
            each = exact - log_probabilities(texts, columns, scales)
            kl = (np.exp(exact) * each).sum(-1).mean(-1)  # of each text
            cells.append(f"{kl.mean():.2e} +- {kl.std(ddof=1) / len(kl) ** 0.5:.0e}")
        print(f"| {f'groups of {columns}' if columns else 'float32'} | {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
