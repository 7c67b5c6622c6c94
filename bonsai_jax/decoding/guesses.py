"""What a proposer would have proposed after a row's latest tokens. By that it is checked where it has
proposed nothing, because that takes time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bonsai_jax.decoding.sampling import NO_TOKEN

CHECKED = 8  # tokens: as many rows as one tile of an output matrix

Guess = Callable[[Float[Array, "B C H"], Int[Array, "B C"]], Int[Array, "B C"]]


def none(positions: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Of no token."""
    return jnp.full(positions.shape, NO_TOKEN, jnp.int32)


def after_latest(hidden: Float[Array, "B T H"], positions: Int[Array, "B T"], guess: Guess) -> jax.Array:
    """int32 [B, T]: the guess after each of a row's latest CHECKED tokens, NO_TOKEN after the others.

    positions  of the tokens; -1 behind a row's last
    guess      (hidden vectors, positions) of some -> the guess after each
    """
    (rows, width), checked = positions.shape, min(CHECKED, positions.shape[1])
    columns = (positions >= 0).sum(1)[:, None] - checked + jnp.arange(checked)  # below 0: it read fewer
    latest = jnp.maximum(columns, 0)
    guesses = guess(
        jnp.take_along_axis(hidden, latest[..., None], 1), jnp.take_along_axis(positions, latest, 1)
    )
    row, columns = jnp.arange(rows)[:, None], jnp.where(columns >= 0, columns, width)
    return none(positions).at[row, columns].set(guesses, mode="drop")
