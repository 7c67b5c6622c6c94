"""The error of a gated delta net whose state S is stored in fewer bits, from the same one in float64.

    uv run python benchmarks/delta_state_rounding.py [--tokens 32768] [--heads 8] [--seed 0]

Heads of 128 x 128 read random tokens. After each token every new S is rounded to float32, float16 or
bfloat16; all else is float64, so that the table shows what rounding S costs and nothing else:

    d = b (v - exp(g) S^T k);   S <- round(exp(g) S + k d^T);   o = S^T q, of S before it is rounded

    q, k     normal numbers, divided by their norms
    v        silu of normal numbers with a deviation of 2
    b        sigmoid of a normal number
    exp(g)   exp(-A softplus(alpha + dt)), alpha normal with a deviation of 0.5, dt drawn as Qwen3-Next
             initialises it; A of each head likewise, uniform from 0 to 16, or in the column "slow" 1e-4, with
             which a head forgets almost nothing

An error is |o - o in float64| / |o in float64|, mean over heads and the last 1,024 tokens. The last line has
the same error of activations in 8 bits, normal numbers in groups of 128, for comparison.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

DIM = 128
LAST = 1024  # tokens at the end, whose errors count
FORMATS = ("float32", "float16", "bfloat16")
GROUP, TOP = 128, 127  # of 8-bit activations on a GPU


def decays(heads: int, slow: bool) -> tuple[Float[Array, "H"], Float[Array, "H"]]:
    """A and dt of each head."""
    a = jax.random.uniform(jax.random.key(5), (heads,), minval=0, maxval=16)
    low, high = jnp.log(jnp.array([1e-3, 1e-1]))
    step = jnp.exp(jax.random.uniform(jax.random.key(6), (heads,), minval=low, maxval=high))
    return jnp.full(heads, 1e-4) if slow else a, step + jnp.log(-jnp.expm1(-step))  # softplus(dt) is the step


@functools.partial(jax.jit, static_argnames=("tokens", "heads", "slow"))
def output_errors(tokens: int, heads: int, seed: int, slow: bool) -> Float[Array, "tokens formats H"]:
    """Relative errors of o after each token."""
    a, dt = decays(heads, slow)
    key = jax.random.key(seed)

    def token(states: tuple[Array, ...], number: Array):
        draw = iter(jax.random.split(jax.random.fold_in(key, number), 6))
        q, k, v = (jax.random.normal(next(draw), (heads, DIM)) for _ in range(3))
        q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        v = jax.nn.silu(2 * v)
        alpha, beta = (jax.random.normal(next(draw), (heads,)) for _ in range(2))
        decay, b = jnp.exp(-a * jax.nn.softplus(0.5 * alpha + dt)), jax.nn.sigmoid(beta)

        def update(S: Float[Array, "H K V"]) -> tuple[Float[Array, "H V"], Float[Array, "H K V"]]:
            old = decay[:, None, None] * S.astype(jnp.float64)
            d = b[:, None] * (v - jnp.einsum("hkv,hk->hv", old, k))
            new = old + k[:, :, None] * d[:, None, :]
            return jnp.einsum("hkv,hk->hv", new, q), new

        (exact, *rounded), new = zip(*map(update, states), strict=True)
        norm = jnp.linalg.norm(exact, axis=-1)
        errors = jnp.stack([jnp.linalg.norm(o - exact, axis=-1) / norm for o in rounded])
        return tuple(S.astype(before.dtype) for S, before in zip(new, states, strict=True)), errors

    empty = tuple(jnp.zeros((heads, DIM, DIM), dtype) for dtype in ("float64", *FORMATS))
    return jax.lax.scan(token, empty, jnp.arange(tokens))[1]


def activation_error(seed: int) -> float:
    """Of normal numbers that are rounded to 8 bits, group by group."""
    x = jax.random.normal(jax.random.key(seed), (10_000, GROUP))
    scale = jnp.abs(x).max(axis=-1, keepdims=True) / TOP
    error = jnp.linalg.norm(jnp.round(x / scale) * scale - x, axis=-1) / jnp.linalg.norm(x, axis=-1)
    return float(error.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of tokens; heads are the same for every seed")
    options = parser.parse_args()
    with jax.enable_x64(True):
        usual, slow = (
            output_errors(options.tokens, options.heads, options.seed, slow)[-LAST:].mean((0, 2))
            for slow in (False, True)
        )
        print("| S | error of o | slow |\n| --- | ---: | ---: |")
        for format, *errors in zip(FORMATS, usual, slow, strict=True):
            print(f"| {format} | {' | '.join(f'{float(error):.1e}' for error in errors)} |")
        print(f"\n8-bit activations: {activation_error(options.seed):.1e}")


if __name__ == "__main__":
    main()
