"""The gated delta net of one token a row, or of a few (speculation), in one launch: convolution, norms,
gates, state, gated norm.

A block has a v head of a row. Its threads share out S: each has 4 neighbouring columns of K / groups rows.

    S, tail, qkv, weights                        all asked for at once; S is most of it, 64 KB (float16: 32)
    threads as channels:     convolution, silu -> shared memory; sums of squares by warp
    for each token:
        threads as parts of S:   S^T k, S^T q of their rows -> shared memory
        threads as columns:      their sums over groups -> d, o;  d -> shared memory, o's squares by warp
        threads as parts of S:   exp(g) S + k d^T
        threads as columns:      rms_norm(o) silu(z) -> memory
    S -> memory

With o = exp(g) S^T q + (k . q) d the old S is all that products need, and is read once. A k head's queries
and keys are made by each of the v heads that use it, of which the first stores them in the tail: in the slot
of a position that no other block reads. Several tokens have no such slots: XLA makes the tail behind them.

With few blocks a thread's part of S is in registers, which is the shortest way. A multiprocessor has
registers for one such block, and its memory has nothing to do while that block works. So with many blocks S
is in shared memory, which has room for two of them. With several tokens it arrives there, because registers
have their gates meanwhile, and then stays in registers from token to token.

Speculation reads tokens without storing S, and afterwards stores what those that were accepted make of it, in
all layers by one launch (`replay`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device
from pallas_kernels.causal_conv import inputs as convolved
from pallas_kernels.delta import step_gates, step_state
from pallas_kernels.delta.reference import Gates, GateSums
from pallas_kernels.delta.step_state import THREADS
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
    total,
)
from pallas_kernels.matmul.bit_mma import activations, quantize_rows
from pallas_kernels.matmul.bit_mma.product import GROUP

Integers = Literal["few", "many"]
MOST_IN_REGISTERS = 1  # blocks for each multiprocessor; with more, S is in shared memory
CONV = 4  # tokens that the convolution sees: a vector of weights


def run(
    qkv_z, gates, states, tails, positions, layer, weights, eps: float, grouped: bool, stores: bool,
    integers: Integers | None = None,
):  # fmt: skip
    """delta.delta_net of one token a row, or of up to 8."""
    kernel = functools.partial(delta_step, eps=eps, grouped=grouped, stores=stores, integers=integers)
    y, states, tails = jax.custom_batching.sequential_vmap(kernel)(
        qkv_z[None], _with_layer_axis(gates), states, tails, positions, layer, weights
    )
    return y[0] if integers is None else y, states, tails


def _with_layer_axis(gates: jax.Array | Gates | GateSums) -> jax.Array | Gates | GateSums:
    if isinstance(gates, GateSums):
        return gates
    return gates._replace(x=gates.x[None]) if isinstance(gates, Gates) else gates[None]


def replay(qkv_z, gates, states, tails, positions, weights, eps: float, grouped: bool):
    """delta.replay of up to 8 tokens a row: states and tails of all layers."""
    kernel = functools.partial(delta_step, eps=eps, grouped=grouped)
    _, states, tails = jax.custom_batching.sequential_vmap(kernel)(
        qkv_z, gates, states, tails, positions, 0, weights
    )
    return states, tails


@functools.partial(jax.jit, static_argnames=("eps", "grouped", "stores", "integers"))
def delta_step(
    qkv_z: jax.Array,
    gates: jax.Array | Gates | GateSums,
    states: jax.Array,
    tails: jax.Array,
    positions: jax.Array,
    layer: jax.Array,
    weights: dict[str, jax.Array],
    eps: float,
    grouped: bool,
    stores: bool = True,
    integers: Integers | None = None,
) -> tuple[Any, jax.Array, jax.Array]:
    """delta.delta_net's kernel, for one layer or several, from `layer` on: qkv_z, gates (or their x) and y
    have an axis of layers before those of delta_net. Without `stores`, states and tails stay as they are.
    weights: conv, decay, dt and norm by name.

    integers  y is rounded for the product that reads it, in one layer of heads of 128: "few" as quantize_rows
              makes Quantized of it, "many" as activations_int8 does; rows are then row * tokens + token
    """
    layers, rows, tokens, _ = qkv_z.shape
    heads, K, V = states.shape[2:]
    groups = 4 * THREADS // V  # of threads, which have rows of S in turn
    # Refs are written in place; of arrays that are only read they would be copies.
    states_ref = jax.new_ref(states) if stores else None
    tails_ref = jax.new_ref(tails) if stores and tokens == 1 else None
    words = lambda *shape: plgpu.SMEM(shape, jnp.float32)  # noqa: E731
    stored_words = K * V * states.dtype.itemsize // 4
    in_registers = tokens == 1 and layers * rows * heads <= MOST_IN_REGISTERS * device.multiprocessors()
    to_make = gates if isinstance(gates, Gates) else None
    sums = gates if isinstance(gates, GateSums) else None
    results: dict[str, Any] = {"y": jax.ShapeDtypeStruct((layers, rows, tokens, heads * V), jnp.float32)}
    if integers is not None:
        if V != GROUP or heads % 4 or layers > 1:
            raise NotImplementedError(f"delta_step rounds fours of heads of {GROUP}, in one layer")
        few = quantize_rows.results_of(heads * V)
        results = few if integers == "few" else activations.results_of(rows * tokens, heads * V)
    y = launch(
        functools.partial(_body, eps=eps, grouped=grouped, stores=stores, integers=integers),
        {
            "qkv_z": qkv_z,
            "made": gates if to_make is None and sums is None else None,
            "to_make": to_make,
            "sums": sums,
            "states": states if states_ref is None else states_ref,
            "tails": tails if tails_ref is None else tails_ref,
            "positions": positions,
            "first_layer": jnp.asarray(layer, jnp.int32).reshape(1),
            "weights": weights,
        },
        results,
        name="delta_step",
        blocks=layers * rows * heads,
        threads=THREADS,
        scratch={
            "u_smem": words(tokens * (2 * K + V)),
            "squares_smem": words(tokens * ((2 * K + V) // 32)),
            "gates_smem": words(tokens * 3 * step_gates.WARPS),
            "products_smem": words(2 * groups * V),
            "d_smem": words(V),
            "o_smem": words(V // 32),
            **({} if integers is None else {"y_smem": words(V)}),
        }
        | ({} if in_registers else {"state_smem": plgpu.SMEM((stored_words,), jnp.int32)}),
    )
    y = quantize_rows.Quantized(*y) if integers == "few" else y
    if states_ref is None:
        return y, states, tails
    if tails_ref is not None:
        tails = jax.freeze(tails_ref)
    else:
        own = jax.lax.dynamic_slice_in_dim(tails, layer, layers)
        after = jax.vmap(lambda qkv, tail: convolved(qkv, tail, positions)[1])
        own = after(qkv_z[..., : tails.shape[-1]].astype(jnp.float32), own)
        tails = jax.lax.dynamic_update_slice_in_dim(tails, own, layer, 0)
    return y, jax.freeze(states_ref), tails


def _body(*, qkv_z, states, positions, first_layer, integers, y=None, y_smem=None, **rest):
    layers, rows, tokens, _ = qkv_z.type.shape
    heads, _, V = states.type.shape[2:]
    row, head, own = lanes.block() // heads, lanes.block() % heads, index(0)
    layer = index(memory.load(first_layer, 0))
    if layers > 1:
        row, own = row % rows, row // rows
        layer = layer + own
    # Results, by the names that both store_group have.
    rounded = {name: rest.pop(name) for name in list(rest) if name.endswith("_gmem")}

    def store(value, token):
        """The output of each of the first V threads."""
        with lanes.when(lanes.thread(reuse=True) < V):
            column = lanes.thread(reuse=True)
            if y_smem is None:
                memory.store(value, y, own, row, token, head * V + column)
            else:
                memory.store(value, y_smem, column)
        if y_smem is None:
            return
        lanes.block_barrier()
        with lanes.when(lanes.thread(reuse=True) < 32):
            rounding = quantize_rows if integers == "few" else activations
            x = [memory.load(y_smem, first + more) for first, more in rounding.columns_of_lane(index(0))]
            place = row * tokens + token
            if integers == "few":
                quantize_rows.store_group(x, place, head, rows * tokens, **rounded)
            else:
                activations.store_group(x, place, head, **rounded)

    at = [memory.load(positions, row, token) for token in range(tokens)]
    ended = [integer(position) >= 2**31 for position in at]  # -1: nothing of the token is read, or kept
    for token, is_ended in enumerate(ended):
        with lanes.when(is_ended):
            store(real(0), token)
    with lanes.when(~ended[0]):
        read = total([select(is_ended, index(0), index(1)) for is_ended in ended])
        _Head(
            qkv_z=qkv_z, states=states, store=store, own=own, row=row, head=head, layer=layer, position=at[0],
            **rest,
        ).run(read)  # fmt: skip


class _Head:
    """A v head of a row in a layer, as a thread of its block sees it; refs by their names in the launch."""

    def __init__(
        self, *, own, row, head, layer, position, eps: float, grouped: bool, stores: bool,
        qkv_z, made, to_make, sums, states, tails, weights, store: Callable,
        u_smem, squares_smem, gates_smem, products_smem, d_smem, o_smem, state_smem=None,
    ):  # fmt: skip
        """own: number of the layer in qkv_z and gates; position: of the first token; store(value, token):
        stores the outputs."""
        self.own, self.row, self.head, self.layer, self.position = own, row, head, layer, position
        self.eps, self.stores = eps, stores
        self.qkv_z, self.made, self.to_make, self.sums, self.store = qkv_z, made, to_make, sums, store
        self.states, self.tails, self.weights = states, tails, weights
        self.u_smem, self.squares_smem, self.gates_smem = u_smem, squares_smem, gates_smem
        self.products_smem, self.d_smem, self.o_smem = products_smem, d_smem, o_smem
        self.tokens = qkv_z.type.shape[2]
        self.heads, self.K, self.V = states.type.shape[2:]
        self.thread = lanes.thread(reuse=True)
        self.column = lanes.thread() % self.V
        # As parts of S: columns 4 c .. 4 c + 3 of rows first .. first + count - 1.
        self.c, self.group = self.thread % (self.V // 4), self.thread // (self.V // 4)
        self.count = self.K * self.V // (4 * THREADS)
        self.first = self.group * self.count
        self.part = step_state.InRegisters()
        if state_smem is not None:
            self.part = step_state.InSharedMemory(state_smem, self.thread, self.count)
        self.channels = _Channels(head, self.heads, self.K, self.V, tails.type.shape[3], grouped)

    def run(self, read):
        """read: how many of the tokens are read."""
        self.part.ask(self.states, [self._place(i) for i in range(self.count)], self.position != 0)
        z = self._z(0)  # asked for before all else waits; of several tokens each asks for its own
        self._prepare()
        lanes.block_barrier()
        if self.tokens == 1:
            self._token(0, z, self.part.wait, self.part.load, self._store)
            return
        self.part.wait()
        S = [v for i in range(self.count) for v in self.part.load(i)]

        def one(token, S):
            new = []
            self._token(
                token,
                self._z(token),
                lambda: None,
                lambda i: S[4 * i : 4 * i + 4],
                lambda i, row: new.extend(
                    step_state.numbers(step_state.words(row, self.states))
                ),  # as if it had been stored
            )
            return new

        S = lanes.loop(0, read, 1, S, one)
        for i in range(self.count):
            self._store(i, S[4 * i : 4 * i + 4])

    def _place(self, i: int) -> list:
        """Of this thread's row i of S."""
        return [self.layer, self.row, self.head, self.first + i, self.c * 4]

    def _store(self, i: int, row: list):
        if self.stores:
            words = step_state.words(row, self.states)
            stored = lanes.vector_of(words, self.states.type.element_type, len(row) // len(words))
            memory.store_stored(stored, self.states, self._place(i))

    def _z(self, token):
        at = self.head * self.V + self.column + self.tails.type.shape[3]
        return memory.load(self.qkv_z, self.own, self.row, token, at)

    def _prepare(self):
        """Make what does not wait for S: the convolution of all tokens, and their gates."""
        seen = [_Seen.load(self, first) for first in range(0, self.channels.count, THREADS)]
        rounds, parts = [], []
        if self.to_make is not None:
            begins = range(0, self.tokens, step_gates.GATES_TOGETHER)
            rounds = [range(first, min(first + step_gates.GATES_TOGETHER, self.tokens)) for first in begins]
            parts = step_gates.parts_of_gates(self, rounds[0])
        self.gamma, self.dt, self.decay = (
            memory.load(self.weights[name], self.layer, at)
            for name, at in (("norm", self.column), ("dt", self.head), ("decay", self.head))
        )
        for some in seen:
            some.convolve(self)
        if self.sums is not None:
            step_gates.add_sums(self)
        for i, some in enumerate(rounds):
            step_gates.sum_parts(step_gates.parts_of_gates(self, some) if i else parts, some, self.gates_smem)

    def _token(self, token, z, wait: Callable, load: Callable, use: Callable):
        """The recurrence of a token, and its output.

        wait      until S is there
        load(i)   this thread's row i of S, 4 numbers
        use(i, row)  takes it as it is after the token
        """
        K, V, count = self.K, self.V, self.count
        u, squares = token * (2 * K + V), token * ((2 * K + V) // 32)
        k, q = (
            [memory.load_reals(4, self.u_smem, [self.first + (u + at + i)]) for i in range(0, count, 4)]
            for at in (K, 0)
        )
        k, q = ([x for four in fours for x in four] for fours in (k, q))
        wait()
        S = [load(i) for i in range(count)]
        for which, x in enumerate((k, q)):
            sums = [
                functools.reduce(lambda so_far, i: fma(S[i][j], x[i], so_far), range(count), real(0))
                for j in range(4)
            ]
            memory.store_reals(sums, self.products_smem, [self.group * (2 * V) + self.c * 4 + which * V])
        lanes.block_barrier()

        if self.made is not None:
            alpha, beta = (
                memory.load(self.made, self.own, self.row, token, self.head + i * self.heads) for i in (0, 1)
            )
        else:
            columns = (
                GROUP * self.sums.products.type.shape[0]
                if self.to_make is None
                else self.to_make.x.type.shape[-1]
            )
            alpha, beta = step_gates.alpha_and_beta(self.gates_smem, token, columns, self.eps)
        retained = exp(self.decay * _softplus(alpha + self.dt))
        b = lanes.reciprocal(exp(-beta) + 1)
        per_q, per_k = (
            minimum(
                rsqrt(total([memory.load(self.squares_smem, squares + (w + i)) for i in range(K // 32)])),
                1 / self.eps,
            )
            for w in (0, K // 32)
        )
        per_q = per_q * K**-0.5

        def column_output():
            groups = self.products_smem.type.shape[0] // (2 * V)
            k_product, q_product = (
                total([memory.load(self.products_smem, self.column + (2 * r + i) * V) for r in range(groups)])
                for i in (0, 1)
            )
            v = memory.load(self.u_smem, self.column + (u + 2 * K))
            d = b * (v - retained * per_k * k_product)
            # Of both, this lane's parts of the whole heads.
            lane = lanes.thread() % 32
            q_and_k = [
                [memory.load(self.u_smem, lane + (u + at + i)) for i in range(0, K, 32)] for at in (0, K)
            ]
            together = lanes.warp_sum_real(total([a * e for a, e in zip(*q_and_k, strict=True)]))
            o = retained * per_q * q_product + together * per_q * per_k * d
            memory.store(d * per_k, self.d_smem, self.column)
            squared = lanes.warp_sum_real(o * o)
            with lanes.when(lane == 0):
                memory.store(squared, self.o_smem, self.column // 32)
            return [o]

        (o,) = lanes.choose(self.thread < V, column_output, [real(0)])
        lanes.block_barrier()
        d = memory.load_reals(4, self.d_smem, [self.c * 4])
        for i in range(count):
            use(i, [fma(k[i], e, retained * s) for e, s in zip(d, load(i), strict=True)])
        mean = total([memory.load(self.o_smem, w) for w in range(V // 32)]) * (1 / V)
        self.store(o * rsqrt(mean + self.eps) * self.gamma * silu(z), token)


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
    seen: list
    weights: list
    place: list

    @classmethod
    def load(cls, head: _Head, first: int) -> "_Seen":
        i, position = lanes.thread() + first, head.position
        at = head.channels.place(minimum(i, head.channels.count - 1))
        weights = memory.load_reals(CONV, head.weights["conv"], [head.layer, at, 0])
        seen = [memory.load(head.qkv_z, head.own, head.row, token, at) for token in range(head.tokens)]
        for back in range(1, CONV):
            slot = (position + (CONV - back)) % CONV
            old = memory.load(head.tails, head.layer, head.row, slot, at)
            seen.insert(0, select(position >= back, old, 0.0))
        return cls(i, seen, weights, [head.layer, head.row, position % CONV, at])

    def convolve(self, head: _Head):
        """The newest into the tail, where this thread stores it; silu of the convolution; the sum of squares
        of every 32 channels; of each token."""
        channels = head.channels
        if head.stores and head.tokens == 1:
            with lanes.when((self.i < channels.count) & channels.stores(self.i)):
                memory.store(self.seen[-1], head.tails, *self.place)
        for token in range(head.tokens):
            seen = self.seen[token : token + CONV]
            u = silu(total([x * w for x, w in zip(seen, self.weights, strict=True)]))
            squares = lanes.warp_sum_real(u * u)
            with lanes.when(self.i < channels.count):  # whole warps have channels, or none
                memory.store(u, head.u_smem, self.i + token * channels.count)
                with lanes.when(lanes.thread() % 32 == 0):
                    memory.store(squares, head.squares_smem, self.i // 32 + token * (channels.count // 32))


def _softplus(x):
    return maximum(x, 0.0) + log(exp(-abs(x)) + 1)
