"""The gated delta net of one token a row, in one launch: convolution, norms, gates, state, gated norm.

A block has a v head of a row. Its threads share out S: each has 4 neighbouring columns of K / groups rows.

    S, tail, qkv, weights                        all asked for at once; S is most of it, 64 KB
    threads as channels:     convolution, silu -> shared memory; sums of squares by warp
    threads as parts of S:   S^T k, S^T q of their rows -> shared memory
    threads as columns:      their sums over groups -> d, o;  d -> shared memory, o's squares by warp
    threads as parts of S:   exp(g) S + k d^T -> memory
    threads as columns:      rms_norm(o) silu(z) -> memory

With o = exp(g) S^T q + (k . q) d the old S is all that products need, and is read once. A k head's queries
and keys are made by each of the v heads that use it, of which the first stores them in the tail: in the slot
of a position that no other block reads.

With few blocks a thread's part of S is in registers, which is the shortest way. A multiprocessor has
registers for one such block, and its memory has nothing to do while that block works. So with many blocks S
is in shared memory, which has room for two of them.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device
from pallas_kernels.delta.reference import Gates
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.activation_math import silu
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import (
    exp,
    fma,
    index,
    integer,
    log,
    maximum,
    minimum,
    real,
    rsqrt,
    select,
    sum_of_squares,
    total,
)

THREADS = 256
WARPS = THREADS // 32
MOST_IN_REGISTERS = 6  # blocks for each multiprocessor; with more, S is in shared memory
CONV = 4  # tokens that the convolution sees: a vector of weights


def run(qkv_z, gates, states, tails, positions, layer, weights, eps: float, grouped: bool):
    """delta.delta_net of one token a row."""
    kernel = functools.partial(delta_step, eps=eps, grouped=grouped)
    gates = gates._replace(x=gates.x[:, 0]) if isinstance(gates, Gates) else gates[:, 0]
    y, states, tails = jax.custom_batching.sequential_vmap(kernel)(
        qkv_z[:, 0], gates, states, tails, positions[:, 0], layer, weights
    )
    return y[:, None], states, tails


@functools.partial(jax.jit, static_argnames=("eps", "grouped"))
def delta_step(
    qkv_z: jax.Array,
    gates: jax.Array | Gates,
    states: jax.Array,
    tails: jax.Array,
    positions: jax.Array,
    layer: jax.Array,
    weights: dict[str, jax.Array],
    eps: float,
    grouped: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """delta.delta_net's kernel for one token a row: its arguments without the axis of tokens; weights conv,
    decay, dt and norm by name."""
    rows, heads, K, V = states.shape[1:]
    groups = 4 * THREADS // V  # of threads, which have rows of S in turn
    states_ref, tails_ref = jax.new_ref(states), jax.new_ref(tails)
    words = lambda *shape: plgpu.SMEM(shape, jnp.float32)  # noqa: E731
    in_registers = rows * heads <= MOST_IN_REGISTERS * device.multiprocessors()
    made, to_make = (None, gates) if isinstance(gates, Gates) else (gates, None)
    y = launch(
        functools.partial(_body, eps=eps, grouped=grouped),
        {
            "qkv_z": qkv_z,
            "made": made,
            "to_make": to_make,
            "states": states_ref,
            "tails": tails_ref,
            "positions": positions,
            "layer": jnp.asarray(layer, jnp.int32).reshape(1),
            "weights": weights,
        },
        {"y": jax.ShapeDtypeStruct((rows, heads * V), jnp.float32)},
        name="delta_step",
        blocks=rows * heads,
        threads=THREADS,
        scratch={
            "u_smem": words(2 * K + V),
            "squares_smem": words((2 * K + V) // 32),
            "gates_smem": words(3 * WARPS),
            "products_smem": words(2 * groups * V),
            "d_smem": words(V),
            "o_smem": words(V // 32),
        }
        | ({} if in_registers else {"state_smem": words(K * V)}),
    )
    return y, jax.freeze(states_ref), jax.freeze(tails_ref)


def _body(
    qkv_z, made, to_make, states, tails, positions, layer, weights, y,
    u_smem, squares_smem, gates_smem, products_smem, d_smem, o_smem, state_smem=None,
    *, eps: float, grouped: bool,
):  # fmt: skip
    heads, K, V = states.type.shape[2:]
    row, head = lanes.block() // heads, lanes.block() % heads
    position = memory.load(positions, row)
    layer = index(memory.load(layer, 0))
    thread = lanes.thread(reuse=True)
    ended = integer(position) >= 2**31  # -1: nothing of the row is read, or kept
    with lanes.when(ended & (thread < V)):
        memory.store(real(0), y, row, head * V + thread)
    with lanes.when(~ended):
        # As parts of S: columns 4 c .. 4 c + 3 of rows first .. first + count - 1.
        c, group = thread % (V // 4), thread // (V // 4)
        count = K * V // (4 * THREADS)
        first = group * count
        place = lambda i: [layer, row, head, first + i, c * 4]  # noqa: E731
        part = _InRegisters() if state_smem is None else _InSharedMemory(state_smem, thread)
        part.ask(states, [place(i) for i in range(count)], position != 0)
        column = lanes.thread() % V
        z = memory.load(qkv_z, row, head * V + column + tails.type.shape[3])
        channels = _Channels(head, heads, K, V, tails.type.shape[3], grouped)
        seen = [
            _Seen.load(channels, first, qkv_z, tails, weights["conv"], row, layer, position)
            for first in range(0, channels.count, THREADS)
        ]
        parts = [] if to_make is None else _parts_of_gates(to_make, row, layer, head, heads)
        gamma, dt, decay = (
            memory.load(weights[name], layer, at)
            for name, at in (("norm", column), ("dt", head), ("decay", head))
        )
        for some in seen:
            some.convolve(tails, u_smem, squares_smem)
        if to_make is not None:
            _sum_gates(parts, gates_smem)
        lanes.block_barrier()

        k, q = ([memory.load_reals(4, u_smem, [first + at + i]) for i in range(0, count, 4)] for at in (K, 0))
        k, q = ([x for four in fours for x in four] for fours in (k, q))
        part.wait()
        S = [part.load(i) for i in range(count)]
        for which, x in enumerate((k, q)):
            sums = [
                functools.reduce(lambda so_far, i: fma(S[i][j], x[i], so_far), range(count), real(0))
                for j in range(4)
            ]
            memory.store_reals(sums, products_smem, [group * (2 * V) + c * 4 + which * V])
        lanes.block_barrier()

        if to_make is None:
            alpha, beta = (memory.load(made, row, head + i * heads) for i in (0, 1))
        else:
            alpha, beta = _gates(gates_smem, to_make.x.type.shape[1], eps)
        retained = exp(decay * _softplus(alpha + dt))
        b = lanes.reciprocal(exp(-beta) + 1)
        per_q, per_k = (
            minimum(rsqrt(total([memory.load(squares_smem, w + i) for i in range(K // 32)])), 1 / eps)
            for w in (0, K // 32)
        )
        per_q = per_q * K**-0.5
        o = real(0)

        def column_output():
            groups = products_smem.type.shape[0] // (2 * V)
            k_product, q_product = (
                total([memory.load(products_smem, column + (2 * r + i) * V) for r in range(groups)])
                for i in (0, 1)
            )
            v = memory.load(u_smem, column + 2 * K)
            d = b * (v - retained * per_k * k_product)
            # Of both, this lane's parts of the whole heads.
            lane = lanes.thread() % 32
            q_and_k = [[memory.load(u_smem, lane + (at + i)) for i in range(0, K, 32)] for at in (0, K)]
            together = lanes.warp_sum_real(total([a * e for a, e in zip(*q_and_k, strict=True)]))
            o = retained * per_q * q_product + together * per_q * per_k * d
            memory.store(d * per_k, d_smem, column)
            squares = lanes.warp_sum_real(o * o)
            with lanes.when(lane == 0):
                memory.store(squares, o_smem, column // 32)
            return [o]

        (o,) = lanes.choose(thread < V, column_output, [o])
        lanes.block_barrier()
        d = memory.load_reals(4, d_smem, [c * 4])
        for i in range(count):
            new = [fma(k[i], e, retained * s) for e, s in zip(d, part.load(i), strict=True)]
            memory.store_reals(new, states, place(i))
        with lanes.when(thread < V):
            mean = total([memory.load(o_smem, w) for w in range(V // 32)]) * (1 / V)
            memory.store(o * rsqrt(mean + eps) * gamma * silu(z), y, row, head * V + column)


class _InRegisters:
    """A thread's part of S, rows of 4 neighbouring columns."""

    def ask(self, states, places: list, condition):
        """Ask for the rows at these places, or have zeros where the condition does not hold."""
        flat = lanes.choose(
            condition,
            lambda: [v for place in places for v in memory.load_reals(4, states, place)],
            [real(0)] * (4 * len(places)),
        )
        self.rows = [flat[at : at + 4] for at in range(0, len(flat), 4)]

    def wait(self):
        """Until they are there."""

    def load(self, i: int) -> list:
        """Row i."""
        return self.rows[i]


class _InSharedMemory:
    """The same; nobody else reads a thread's part, so no barrier is needed."""

    def __init__(self, smem, thread):
        self.smem, self.thread = smem, thread

    def _place(self, i: int) -> list:
        return [self.thread * 4 + i * (4 * THREADS)]

    def ask(self, states, places: list, condition):
        with lanes.when(condition):
            target = memory.shared_address(self.smem) + integer(self.thread) * 16
            for i, place in enumerate(places):
                memory.copy_async(target, memory.address_of(states, place), 16, i * 16 * THREADS, source_at=0)
        with lanes.when(~condition):
            for i in range(len(places)):
                memory.store_reals([real(0)] * 4, self.smem, self._place(i))
        memory.commit_copies()

    def wait(self):
        memory.wait_copies(0)

    def load(self, i: int) -> list:
        return memory.load_reals(4, self.smem, self._place(i))


class _Channels:
    """Channels of the convolution that a v head has: K of its queries, K of its keys, V of its values."""

    def __init__(self, head, heads: int, K: int, V: int, width: int, grouped: bool):
        k_heads = (width - heads * V) // (2 * K)
        each = heads // k_heads
        self.K, self.V, self.head = K, V, head
        self.k_head = head // each if grouped else head % k_heads
        self.keys, self.values = k_heads * K, 2 * k_heads * K
        self.is_first = head % each == 0 if grouped else head < k_heads

    @property
    def count(self) -> int:
        return 2 * self.K + self.V

    def place(self, i):
        """Among all, of the i-th."""
        qk_place = i % self.K + self.k_head * self.K + select(i < self.K, index(0), self.keys)
        return select(i < 2 * self.K, qk_place, self.head * self.V + i + (self.values - 2 * self.K))

    def stores(self, i):
        """Whether this head stores it in the tail."""
        return self.is_first | (i >= 2 * self.K)


@dataclasses.dataclass(frozen=True)
class _Seen:
    """What the convolution sees of a thread's channel, oldest first, and its weights; i is behind the last
    for threads that have none."""

    i: Any
    count: int
    seen: list
    weights: list
    stores: Any
    place: list

    @classmethod
    def load(cls, channels: _Channels, first: int, qkv_z, tails, conv, row, layer, position) -> "_Seen":
        i = lanes.thread() + first
        at = channels.place(minimum(i, channels.count - 1))
        weights = memory.load_reals(CONV, conv, [layer, at, 0])
        new = memory.load(qkv_z, row, at)
        seen = [new]
        for back in range(1, CONV):
            old = memory.load(tails, layer, row, (position + (CONV - back)) % CONV, at)
            seen.append(select(position >= back, old, 0.0))
        stored = (i < channels.count) & channels.stores(i), [layer, row, position % CONV, at]
        return cls(i, channels.count, seen[::-1], weights, *stored)

    def convolve(self, tails, u_smem, squares_smem):
        """The newest into the tail, where this thread stores it; silu of the convolution; the sum of squares
        of every 32 channels."""
        with lanes.when(self.stores):
            memory.store(self.seen[-1], tails, *self.place)
        u = silu(total([x * w for x, w in zip(self.seen, self.weights, strict=True)]))
        squares = lanes.warp_sum_real(u * u)
        with lanes.when(self.i < self.count):  # whole warps have channels, or none
            memory.store(u, u_smem, self.i)
            with lanes.when(lanes.thread() % 32 == 0):
                memory.store(squares, squares_smem, self.i // 32)


def _parts_of_gates(gates: Any, row, layer, head, heads: int) -> list:
    """This thread's parts of x, gamma and the rows of both gates; zeros of x behind its end."""
    hidden, parts = gates.x.type.shape[1], []
    for first in range(0, hidden, 4 * THREADS):
        at = lanes.thread() * 4 + first
        inside = at < hidden
        start = select(inside, at, 0)
        places = (gates.x, [row, start]), (gates.gamma, [layer, start])
        places += tuple((gates.weights, [layer, head + which * heads, start]) for which in (0, 1))
        x, *rest = (memory.load_reals(4, ref, place) for ref, place in places)
        parts.append([[select(inside, v, 0.0) for v in x], *rest])
    return parts


def _sum_gates(parts: list, gates_smem):
    """Of each warp: the sum of squares of its part of x, and its part of both gates' products."""
    sums = [real(0)] * 3
    for x, gamma, *rows in parts:
        sums[0] = sum_of_squares(x, sums[0])
        normed = [v * g for v, g in zip(x, gamma, strict=True)]
        for which, w in enumerate(rows):
            for a, e in zip(normed, w, strict=True):
                sums[1 + which] = fma(a, e, sums[1 + which])
    for i, s in enumerate(map(lanes.warp_sum_real, sums)):
        with lanes.when(lanes.thread() % 32 == 0):
            memory.store(s, gates_smem, lanes.thread() // 32 + i * WARPS)


def _gates(gates_smem, hidden: int, eps: float):
    squares, alpha, beta = (
        total([memory.load(gates_smem, i * WARPS + w) for w in range(WARPS)]) for i in range(3)
    )
    per_x = rsqrt(squares * (1 / hidden) + eps)
    return alpha * per_x, beta * per_x


def _softplus(x):
    return maximum(x, 0.0) + log(exp(-abs(x)) + 1)
