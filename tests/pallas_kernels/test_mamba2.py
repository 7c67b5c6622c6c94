"""Mamba 2 and its convolution, against numpy in float64, a token at a time."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import causal_conv, mamba2

EPS = 1e-5


def positions_of(read: np.ndarray, counts: np.ndarray, width: int) -> np.ndarray:
    """Of the next tokens of each row, of which the first `counts` are real."""
    place = np.arange(width)
    return np.where(place < counts[:, None], read[:, None] + place, -1)


def test_a_row_may_read_its_tokens_in_pieces():
    """A convolution over rows whose tokens come in pieces of different lengths, with padding."""
    rng = np.random.default_rng(0)
    B, T, C = 3, 23, 5
    for width in (2, 3, 4):
        x, weights, bias = rng.normal(size=(B, T, C)), rng.normal(size=(2, C, width)), rng.normal(size=(2, C))
        before = np.concatenate([np.zeros((B, width - 1, C)), x], axis=1)
        want = sum(before[:, i : T + i] * weights[1, :, i] for i in range(width)) + bias[1]
        tails = jnp.asarray(rng.normal(size=(2, B, width, C)), jnp.float32)
        read, got = np.zeros(B, int), np.zeros((B, T, C))
        while (read < T).any():
            counts, piece, other = np.minimum(rng.integers(0, 6, B), T - read), np.zeros((B, 6, C)), tails[0]
            for row, n in enumerate(counts):
                piece[row, :n] = x[row, read[row] : read[row] + n]
            y, tails = causal_conv(
                jnp.asarray(piece), tails, jnp.asarray(positions_of(read, counts, 6)), 1,
                weights=jnp.asarray(weights), bias=jnp.asarray(bias),
            )  # fmt: skip
            np.testing.assert_array_equal(tails[0], other)
            for row, n in enumerate(counts):
                got[row, read[row] : read[row] + n] = y[row, :n]
            read += counts
        np.testing.assert_allclose(got, want, atol=1e-5)


def one_by_one(projected, sizes, groups, conv, conv_bias, decay, dt, skip, norm):
    """The definition, for one row."""
    (H, P, N), (C, W) = sizes, conv.shape
    silu = lambda v: v / (1 + np.exp(-v))  # noqa: E731
    S, out = np.zeros((H, P, N)), []
    z, channels, step = np.split(projected, (H * P, H * P + C), axis=-1)
    seen = np.concatenate([np.zeros((W - 1, C)), channels])
    for t in range(len(projected)):
        x, b, c = np.split(silu((seen[t : t + W] * conv.T).sum(0) + conv_bias), (H * P, H * P + groups * N))
        x, b, c = x.reshape(H, P), b.reshape(groups, N), c.reshape(groups, N)
        time, y = np.log1p(np.exp(step[t] + dt)), np.zeros((H, P))
        for h in range(H):
            g = h // (H // groups)
            S[h] = np.exp(time[h] * decay[h]) * S[h] + time[h] * np.outer(x[h], b[g])
            y[h] = S[h] @ c[g] + skip[h] * x[h]
        y = silu(z[t]) * y.reshape(-1)
        if norm is not None:
            y = y.reshape(groups, -1)
            y = (y / np.sqrt((y**2).mean(-1, keepdims=True) + EPS)).reshape(-1) * norm
        out.append(y)
    return np.array(out), S


@pytest.mark.parametrize("groups, normed", [(1, True), (2, True), (4, False)])
def test_pieces_of_every_length_are_the_recurrence(groups, normed):
    """Chunks of 64, parts of them, single tokens and padding; the other layer's states stay as they are."""
    rng = np.random.default_rng(groups)
    B, T, H, P, N, W = 2, 150, 4, 8, 16, 4
    C = H * P + 2 * groups * N
    projected = rng.normal(size=(B, T, H * P + C + H))
    weights = {
        "conv": rng.normal(size=(C, W)) / 2, "conv_bias": rng.normal(size=C) / 10,
        "decay": -np.exp(rng.normal(size=H) / 2), "dt": rng.normal(size=H), "skip": rng.normal(size=H),
        "norm": rng.normal(1, 0.1, size=H * P) if normed else None,
    }  # fmt: skip
    want = [one_by_one(projected[row], (H, P, N), groups, **weights) for row in range(B)]
    on_device = {
        name: None if w is None else jnp.asarray(np.stack([np.zeros_like(w), w]), jnp.float32)
        for name, w in weights.items()
    }
    states, tails = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, B, H, P, N), (2, B, W, C)))
    read, other, got = np.zeros(B, int), states[0], np.zeros((B, T, H * P))
    for counts in ([70, 64], [1, 1], [1, 0], [3, 60], [75, 25]):
        width, counts = max(counts), np.array(counts)
        piece = np.zeros((B, width, projected.shape[-1]))
        for row, n in enumerate(counts):
            piece[row, :n] = projected[row, read[row] : read[row] + n]
        y, states, tails = mamba2(
            jnp.asarray(piece, jnp.float32), states, tails, jnp.asarray(positions_of(read, counts, width)), 1,
            groups=groups, eps=EPS, **on_device,
        )  # fmt: skip
        for row, n in enumerate(counts):
            got[row, read[row] : read[row] + n] = y[row, :n]
        read += counts
    assert (read == T).all()
    np.testing.assert_allclose(got, [y for y, _ in want], atol=5e-5)
    np.testing.assert_allclose(states[1], [S for _, S in want], atol=5e-5)
    np.testing.assert_array_equal(states[0], other)
