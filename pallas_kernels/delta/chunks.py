"""The recurrence of many tokens on tensor cores: chunks of 64 tokens, S in registers from one to the next.

A block has 64 columns of S of a v head of a row, transposed, in registers of its 8 warps. With G the sum of g
within a chunk, up to and with a token, and D the chunk's d's:

    warps 0 to 3   K [K^T  S]  -> A[t, i] = b_t exp(G_t - G_i) k_t . k_i, i < t;   R = b (v - exp(G) K S)
    warps 4 to 7   Q [K^T  S]  -> M[t, i] = exp(G_t - G_i) q_t . k_i, i <= t;      exp(G) Q S, kept
    warps 0 to 3   of A's four diagonal blocks of 16: (I + A_jj)^-1, a column in a lane
    each warp      8 columns of D = (I + A)^-1 R, by blocks: D_j = (I + A_jj)^-1 (R_j - sum_i<j A_ji D_i)
    warps 4 to 7   o = exp(G) Q S + M D
    each warp      S <- exp(G_end) S + sum_i exp(G_end - G_i) k_i d_i^T,  of 1/8 of the rows of S

Products are of TF32 (10 bits of mantissa, to nearest), sums and S itself float32. The next chunk's queries
and keys are on their way to registers, and its values to shared memory, while one is multiplied.

In shared memory numbers that are multiplied have 10 bits already. Lanes read pairs of neighbours: which of
their columns a step of the sum takes is free, as long as both operands agree.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.delta import inputs, reference
from pallas_kernels.gpu import lanes, memory, tensor_cores
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.shared_memory import bytes_taken
from pallas_kernels.gpu.values import fma, index, integer, minimum, real, select

CHUNK = 64
COLUMNS = 64  # of S
THREADS = 256
WARPS = THREADS // 32
PAD = 8  # words behind each row: lanes that read pairs of eight rows meet no bank twice
SHORT = CHUNK + PAD


def shared_bytes(k_dim: int) -> int:
    return bytes_taken(*(4 * words for words in _scratch(k_dim).values()))


def _scratch(K: int) -> dict[str, int]:
    """Words of shared memory: keys and below them queries; S transposed; -A and below it M; R and then D,
    transposed; values; of each token G and b."""
    return {
        "kq_smem": 2 * CHUNK * (K + PAD),
        "s_smem": COLUMNS * (K + PAD),
        "am_smem": 2 * CHUNK * SHORT,
        "d_smem": COLUMNS * SHORT,
        "v_smem": CHUNK * SHORT,
        "gates_smem": 2 * CHUNK,
    }


def run(qkv_z, gates, states, tails, positions, layer, weights, eps: float, grouped: bool, stores: bool):
    """delta.delta_net of many tokens a row: the reference with kernels for its recurrence, and for what
    precedes that."""

    def made(*arrays, **sizes):
        return jax.custom_batching.sequential_vmap(functools.partial(inputs.delta_inputs, **sizes))(*arrays)

    recur = jax.custom_batching.sequential_vmap(functools.partial(delta_chunks, grouped=grouped))
    return reference.run(
        qkv_z, gates, states, tails, positions, layer, weights, eps, grouped, stores, inputs=made, recur=recur
    )


@functools.partial(jax.jit, static_argnames="grouped")
def delta_chunks(
    qk: jax.Array,
    v: jax.Array,
    b: jax.Array,
    g: jax.Array,
    states: jax.Array,
    layer: jax.Array,
    fresh: jax.Array,
    grouped: bool,
) -> tuple[jax.Array, jax.Array]:
    """delta.delta_net's recurrence of many tokens.

    qk      float32 [B, T, 2, Hk, K]: queries, normed and scaled, and keys, normed
    v       float32 [B, T, Hv, V]
    b, g    float32 [B, T, Hv]; 0 for padding, of which nothing is kept
    states  float32 or float16 [L, B, Hv, K, V]
    fresh   bool [B]: rows whose state counts as 0
    Returns o, float32 [B, T, Hv, V], and the states.
    """
    B, T, _, Hk, K = qk.shape
    Hv, V = v.shape[2:]
    padding = -T % CHUNK
    by_chunk = lambda x: jnp.pad(x, ((0, 0), (0, padding), (0, 0))).reshape(B, -1, CHUNK, Hv)  # noqa: E731
    sums = jnp.cumsum(by_chunk(g), axis=2) * math.log2(math.e)  # for powers of two
    gates = jnp.stack([sums, by_chunk(b)], axis=3).transpose(0, 4, 1, 3, 2)  # [B, Hv, chunks, 2, CHUNK]
    states_ref = jax.new_ref(states)
    o = launch(
        functools.partial(_body, k_heads=Hk, K=K, V=V, grouped=grouped),
        {
            "qk": qk.reshape(B, T, 2 * Hk * K),
            "v": v.reshape(B, T, Hv * V),
            "gates": gates.reshape(B, Hv, -1, 2 * CHUNK),
            "states": states_ref,
            "layer": jnp.asarray(layer, jnp.int32).reshape(1),
            "fresh": fresh.astype(jnp.int32),
        },
        {"o": jax.ShapeDtypeStruct((B, T, Hv * V), jnp.float32)},
        name="delta_chunks",
        blocks=B * Hv * (V // COLUMNS),
        threads=THREADS,
        scratch={name: plgpu.SMEM((words,), jnp.float32) for name, words in _scratch(K).items()},
    )
    return o.reshape(B, T, Hv, V), jax.freeze(states_ref)


def _body(qk, v, gates, states, layer, fresh, o, *, k_heads: int, K: int, V: int, grouped: bool, **smem):
    heads, chunks = gates.type.shape[1:3]
    parts = V // COLUMNS
    block, thread = lanes.block(), lanes.thread(reuse=True)
    row, head, column = block // (heads * parts), block // parts % heads, block % parts * COLUMNS
    k_head = head // (heads // k_heads) if grouped else head % k_heads
    me = Lane(thread // 32, thread % 32, thread % 32 // 4, thread % 4, K, **smem)
    # Keys, and then queries.
    source = Source(qk, v, gates, thread, row, head, ((k_head + k_heads) * K, k_head * K), head * V + column)
    place = index(memory.load(layer, 0)), row, head, column

    begun = memory.load(fresh, row) == 0
    S = lanes.choose(begun, lambda: me.load_state(states, *place), [real(0)] * (K // 4))
    source.bring_values(me, index(0))

    def chunk(c, carry):
        S, loaded = carry[: K // 4], carry[K // 4 :]
        following = minimum(c + 1, chunks - 1)
        memory.wait_copies(0)
        lanes.block_barrier()  # values are there, and nobody reads the chunk before
        source.store_tokens(me, loaded)
        me.share_state(S)
        lanes.block_barrier()
        from_state = me.multiply()
        with lanes.when(me.has_keys):
            me.store_right_side(from_state)
            lanes.warp_barrier()
            me.invert()
        lanes.block_barrier()
        source.bring_values(me, following)
        loaded = source.load(me, following)  # not before: sums of products need the registers
        me.solve()
        lanes.block_barrier()
        with lanes.when(~me.has_keys):
            source.store(me, c, o, me.outputs(from_state))
        return [*me.updated(S), *loaded]

    S = lanes.loop(0, chunks, 1, [*S, *source.load(me, index(0))], chunk)[: K // 4]
    memory.wait_copies(0)
    me.store_state(S, states, *place)


@dataclasses.dataclass(frozen=True)
class Source:
    """What a block reads and writes of memory: a row's tokens, and its heads' first columns among all
    (`of_qk`: of keys and of queries; `of_v`: of this block's values)."""

    qk: Any
    v: Any
    gates: Any
    thread: Any
    row: Any
    head: Any
    qk_columns: tuple
    v_column: Any

    @property
    def tokens(self) -> int:
        return self.qk.type.shape[1]

    def _pieces(self, me: "Lane"):
        """(token of a chunk, column) of this thread's fours of keys, and of queries."""
        each = me.K // 4  # threads of a row
        at_once = THREADS // each
        return [(self.thread // each + r, self.thread % each * 4) for r in range(0, CHUNK, at_once)]

    def _token(self, c, i):
        """The i-th of a chunk; the last for those behind it, whose gates are 0."""
        return minimum(c * CHUNK + i, self.tokens - 1)

    def load(self, me: "Lane", c) -> list:
        """A chunk's keys and queries, and gates: this thread's part."""
        loaded = [memory.load(self.gates, self.row, self.head, c, self.thread % (2 * CHUNK))]
        for first in self.qk_columns:
            for i, column in self._pieces(me):
                loaded += memory.load_reals(4, self.qk, [self.row, self._token(c, i), first + column])
        return loaded

    def store_tokens(self, me: "Lane", loaded: list):
        """What was loaded into shared memory."""
        gate, *loaded = loaded
        memory.store(gate, me.gates_smem, self.thread % (2 * CHUNK))
        places = [(i + first, column) for first in (0, CHUNK) for i, column in self._pieces(me)]
        for n, (i, column) in enumerate(places):
            x = list(map(tensor_cores.tf32, loaded[4 * n : 4 * n + 4]))
            memory.store_reals(x, me.kq_smem, [i * me.wide + column])

    def bring_values(self, me: "Lane", c):
        """Ask for a chunk's values, 16 bytes at a time."""
        pieces = COLUMNS // 4
        piece, size = self.thread % pieces * 4, self.v.type.shape[2]
        for r in range(0, CHUNK, THREADS // pieces):
            i = self.thread // pieces + r
            to = memory.shared_address(me.v_smem) + integer(i * SHORT + piece) * 4
            token = self.row * self.tokens + self._token(c, i)
            offset = integer(self.v_column + piece) * 4
            at = memory.at_byte(memory.address(self.v), integer(token), 4 * size, offset)
            memory.copy_async(to, at, 16)
        memory.commit_copies()

    def store(self, me: "Lane", c, o, outputs: list):
        for half in (0, 1):
            token = c * CHUNK + me.tokens[half]
            with lanes.when(token < self.tokens):
                for j, tile in enumerate(outputs):
                    column = self.v_column + me.t * 2 + 8 * j
                    memory.store_reals(tile[2 * half : 2 * half + 2], o, [self.row, token, column])


@dataclasses.dataclass(frozen=True)
class Lane:
    """A lane 4 g + t of a warp, K, and shared memory.

    Tiles of sums are 16 x 8, of which a lane has [row g, columns 2 t and 2 t + 1] and [row g + 8, the same].
    """

    warp: Any
    lane: Any
    g: Any
    t: Any
    K: int
    kq_smem: Any
    s_smem: Any
    am_smem: Any
    d_smem: Any
    v_smem: Any
    gates_smem: Any

    @property
    def wide(self) -> int:
        return self.K + PAD

    @property
    def has_keys(self):
        """Whether this warp's 16 tokens are keys; else queries."""
        return self.warp < WARPS // 2

    @property
    def tokens(self) -> list:
        """Of a chunk, of this lane's two rows of sums."""
        first = self.warp % (WARPS // 2) * 16 + self.g
        return [first, first + 8]

    def token_gates(self, which: int) -> list:
        """G (0) or b (1) of those two."""
        return [memory.load(self.gates_smem, token + which * CHUNK) for token in self.tokens]

    def left(self, ref, width: int, row, column) -> list:
        """A first operand: 16 rows, 8 columns."""
        top = self._place(width) + row * width + column
        (a0, a2), (a1, a3) = (memory.load_reals(2, ref, [top + at]) for at in (0, 8 * width))
        return [a0, a1, a2, a3]

    def right(self, ref, width: int, row, column) -> list:
        """A second operand, which lies transposed: 8 rows, 8 columns."""
        return memory.load_reals(2, ref, [self._place(width) + column + row * width])

    def _place(self, width: int):
        return self.g * width + self.t * 2

    def multiply(self) -> list:
        """-A or M to shared memory, of this warp's 16 rows; exp(G) K S or exp(G) Q S: eight tiles."""
        tiles = 2 * CHUNK // 8

        def step(k, sums):
            sums = [sums[4 * j : 4 * j + 4] for j in range(tiles)]
            for more in range(0, 32, 8):
                a = self.left(self.kq_smem, self.wide, self.warp * 16, k + more)
                for j in range(tiles):
                    ref = self.kq_smem if j < tiles // 2 else self.s_smem
                    b = self.right(ref, self.wide, j % (tiles // 2) * 8, k + more)
                    sums[j] = tensor_cores.add_product_tf32(sums[j], a, b)
            return [x for tile in sums for x in tile]

        sums = lanes.loop(0, self.K, 32, [real(0)] * (4 * tiles), step)
        self._store_decayed(sums[: 2 * tiles])
        decays = [lanes.exp2(sum) for sum in self.token_gates(0) for _ in range(2)]
        rest = sums[2 * tiles :]
        return [[x * e for x, e in zip(rest[i : i + 4], decays, strict=True)] for i in range(0, 2 * tiles, 4)]

    def _store_decayed(self, sums: list):
        for j in range(CHUNK // 8):
            first = self.t * 2 + 8 * j
            column_sums = memory.load_reals(2, self.gates_smem, [first])
            for half, (token, row_sum, b) in enumerate(
                zip(self.tokens, self.token_gates(0), self.token_gates(1), strict=True)
            ):
                stop = token + select(self.has_keys, index(0), 1)
                factor = select(self.has_keys, -b, 1.0)
                out = []
                for e, column_sum in enumerate(column_sums):
                    seen = first + e < stop
                    decay = lanes.exp2(select(seen, row_sum - column_sum, 0.0))
                    x = factor * decay * sums[4 * j + 2 * half + e]
                    out.append(tensor_cores.tf32(select(seen, x, 0.0)))
                row = self.warp * 16 + self.g + 8 * half
                memory.store_reals(out, self.am_smem, [row * SHORT + first])

    def store_right_side(self, from_state: list):
        """R, transposed."""
        for half, (token, b) in enumerate(zip(self.tokens, self.token_gates(1), strict=True)):
            for j, tile in enumerate(from_state):
                column = self.t * 2 + 8 * j
                values = memory.load_reals(2, self.v_smem, [token * SHORT + column])
                for e, x in enumerate(values):
                    at = (column + e) * SHORT + token
                    memory.store(b * (x - tile[2 * half + e]), self.d_smem, at)

    def invert(self):
        """(I + A_jj)^-1 in the place of -A_jj, j this warp's number: by forward substitution, a column in
        each of 16 lanes, and once more in the others."""
        column, corner = self.lane % 16, self.warp * 16 * (SHORT + 1)
        x: list = []
        for t in range(16):
            entry = select(column == t, 1.0, 0.0)
            for first in range(0, t, 4):
                a = memory.load_reals(4, self.am_smem, [corner + (t * SHORT + first)])
                for w, known in zip(a, x[first:], strict=False):
                    entry = fma(w, known, entry)
            x.append(entry)
        lanes.warp_barrier()
        for t, entry in enumerate(x):
            memory.store(tensor_cores.tf32(entry), self.am_smem, corner + column + t * SHORT)

    def solve(self):
        """D in the place of R, of this warp's 8 columns."""
        first = self.warp * 8

        def product(sums, row, column):
            for more in (0, 8):
                a = self.left(self.am_smem, SHORT, row, column + more)
                b = self.right(self.d_smem, SHORT, first, column + more)
                sums = tensor_cores.add_product_tf32(sums, a, b)
            return sums

        for j in range(0, CHUNK, 16):
            places = [
                (first + self.t * 2 + e) * SHORT + self.g + (j + 8 * half) for half in (0, 1) for e in (0, 1)
            ]
            sums = [memory.load(self.d_smem, at) for at in places]
            for i in range(0, j, 16):
                sums = product(sums, j, i)
            self._store_columns(sums, places)
            sums = product([real(0)] * 4, j, j)
            lanes.warp_barrier()
            self._store_columns(sums, places)

    def _store_columns(self, sums, places):
        for x, at in zip(sums, places, strict=True):
            memory.store(tensor_cores.tf32(x), self.d_smem, at)
        lanes.warp_barrier()

    def outputs(self, tiles: list) -> list:
        for k in range(0, CHUNK, 8):
            a = self.left(self.am_smem, SHORT, self.warp * 16, k)
            tiles = [
                tensor_cores.add_product_tf32(tile, a, self.right(self.d_smem, SHORT, 8 * j, k))
                for j, tile in enumerate(tiles)
            ]
        return tiles

    # S, transposed: of each warp all columns and K / 8 rows, in tiles of 16 columns and 8 rows.

    @property
    def _row(self):
        return self.warp * (self.K // WARPS)

    def _tiles(self) -> list:
        """(first column, first row of the warp's)."""
        return [(m, n) for m in range(0, COLUMNS, 16) for n in range(0, self.K // WARPS, 8)]

    def _places(self):
        """(column, row) of each number of S that this lane has."""
        return [
            (self.g + (m + 8 * half), self._row + self.t * 2 + (n + e))
            for m, n in self._tiles()
            for half in (0, 1)
            for e in (0, 1)
        ]

    def load_state(self, states, layer, row, head, first) -> list:
        places = ([layer, row, head, k, first + v] for v, k in self._places())
        return [lanes.reals(memory.load_stored(1, states, place))[0] for place in places]

    def store_state(self, S, states, layer, row, head, first):
        for s, (v, k) in zip(S, self._places(), strict=True):
            memory.store_rounded(s, states, [layer, row, head, k, first + v])

    def share_state(self, S):
        """As it is multiplied."""
        places = self._places()
        for i in range(0, len(S), 2):
            v, k = places[i]
            memory.store_reals(list(map(tensor_cores.tf32, S[i : i + 2])), self.s_smem, [v * self.wide + k])

    def updated(self, S) -> list:
        end = memory.load(self.gates_smem, CHUNK - 1)
        decay = lanes.exp2(end)
        S = [s * decay for s in S]
        for i in range(0, CHUNK, 8):
            token = self.t * 2 + i
            weights = [lanes.exp2(end - gate) for gate in memory.load_reals(2, self.gates_smem, [token])]
            first = token * self.wide + self._row + self.g

            def key(e, n, first=first, weights=weights):
                x = memory.load(self.kq_smem, first + (e * self.wide + n))
                return tensor_cores.tf32(x * weights[e])

            keys = {n: [key(e, n) for e in (0, 1)] for n in range(0, self.K // WARPS, 8)}
            updates = {m: self.left(self.d_smem, SHORT, m, i) for m in range(0, COLUMNS, 16)}
            for tile, (m, n) in enumerate(self._tiles()):
                at = slice(4 * tile, 4 * tile + 4)
                S[at] = tensor_cores.add_product_tf32(S[at], updates[m], keys[n])
        return S
