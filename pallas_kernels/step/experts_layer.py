"""A layer with experts in a decode step of one row, and the next layer's q, k and v, in one launch, a block
on each multiprocessor, for weights of 2 to 8 bits.

    q, k, v -> [attention] -> [o, + x] -> x -> [norm, router, top-k] -> [norm, gate, up, SwiGLU of the chosen]
            -> [down of the chosen, their sum, + x] -> x -> [norm, next q, k, v]

Attention is decode.py's, a product kq_decode.py's, and activations go from block to block as words with a
tag, as in layer_products.py. What experts add:

    router    a block makes the logit of one expert; every block reads all logits and takes the largest itself
    gate, up  a chosen expert has blocks of its own
    down      the chosen experts' matrices side by side are one matrix, of as many columns as they have in
              all; what it is multiplied by are their hidden vectors times the router's weights

Two rings bring weights: one those that are known ahead (o, next q, k, v), one those of experts, from the
moment that they are chosen. All blocks must run at once.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import cache_layouts, device
from pallas_kernels.attention import decode_plan
from pallas_kernels.attention.decode import Attention
from pallas_kernels.attention.decode_plan import WARPS
from pallas_kernels.attention.decode_splits import Exchange
from pallas_kernels.attention.decode_warp import Cache
from pallas_kernels.gpu import lanes, memory, shared_memory
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import (
    as_real,
    index,
    integer,
    minimum,
    real,
    select,
    sum_of_squares,
    total,
)
from pallas_kernels.matmul import kq_decode_plan
from pallas_kernels.matmul.activations_shared import eights
from pallas_kernels.matmul.epilogue import inverse_rms, over_warps
from pallas_kernels.matmul.kq_decode_block import Block, IntegerProduct, scratch
from pallas_kernels.matmul.kq_decode_ring import Ring, Share, Stream
from pallas_kernels.qtensor import LayerStack, QTensor
from pallas_kernels.step import router
from pallas_kernels.step.layer_products import Phase, phase_of, pieces_of
from pallas_kernels.step.router import Experts
from pallas_kernels.tiles import COLUMNS, ROWS

ATTENDED, MIDDLE, LOGITS, HIDDEN, OUTPUT = range(5)  # what goes from block to block


class Planned(NamedTuple):
    """products  of o, gate and up, down, next q, k, v or not
    depths, slot_bytes  of a warp in the ring of o and next q, k, v; in that of experts
    """

    products: tuple[IntegerProduct, ...]
    depths: tuple[int, int]
    slot_bytes: tuple[int, int]

    @property
    def rings(self) -> tuple[tuple[IntegerProduct, ...], ...]:
        o, gate_up, down, *following = self.products
        return (o, *following), (gate_up, down)


def plan(phases: Sequence[Phase], experts: Experts, attention_words: int, bits: int, eps: float):
    """The Planned of one row for the default device; None where there is no room for two items of a warp in
    each ring, or an expert has less than a block."""
    blocks = device.multiprocessors()
    if blocks < experts.used:
        return None
    products = []
    for number, phase in enumerate(phases):
        wide, most = (experts.used if number == 2 else 1), (blocks // experts.used if number == 1 else blocks)
        placed = kq_decode_plan.share_out(phase.parts, phase.formats, most)
        products.append(
            IntegerProduct(
                kq_decode_plan.Plan(WARPS, kq_decode_plan.together(placed, 1), placed), 1,
                phase.columns * wide, sum(part.n_tiles for part in placed), phase.columns // COLUMNS * wide,
                len(phase.parts[0]), eps, bits,
            )
        )  # fmt: skip
    planned = Planned(tuple(products), (0, 0), (0, 0))
    slot_bytes = tuple(
        max(part.item_bytes(p.matrices) for p in ring for part in p.plan.parts) for ring in planned.rings
    )
    # All of a product's items at once, if there is room.
    depths = [
        max(2, *(part.tiles * p.per_warp for p in ring for part in p.plan.parts)) for ring in planned.rings
    ]
    rest = [size * 4 for size in _scratch_words(products, experts, attention_words).values()]
    while True:
        rings = [WARPS * d * size for d, size in zip(depths, slot_bytes, strict=True)]
        if shared_memory.bytes_taken(*rest, *rings) <= device.shared_bytes():
            return Planned(tuple(products), (depths[0], depths[1]), (slot_bytes[0], slot_bytes[1]))
        if max(depths) == 2:
            return None
        larger = max((0, 1), key=lambda i: (depths[i] > 2, rings[i]))
        depths[larger] -= 1


def _scratch_words(products, experts: Experts, attention_words: int) -> dict[str, int]:
    """Shared memory besides the rings."""
    own = {name: ref.shape[0] for name, ref in scratch(products).items()}
    return {**own, "attention_smem": attention_words, "dots_smem": 2 * WARPS, "chosen_smem": 2 * experts.used}


def _widths(hidden: int, q: int, ffn: int, experts: Experts) -> list[int]:
    """Of what goes from block to block."""
    return [q, hidden, experts.logits, experts.used * ffn, hidden]


def workspace_words(hidden: int, q: int, ffn: int, experts: Experts) -> int:
    """Of the workspace, besides what attention needs."""
    return sum(_widths(hidden, q, ffn, experts))


def refuses(
    hidden: int, ffn: int, heads: tuple[int, int, int], experts: Experts, bits: int, layer, following
) -> str | None:
    """Why a layer cannot be one launch on the default device, or None.

    ffn               of an expert
    heads             of queries, of keys, and their width
    layer, following  (format, rows) of the parts of q, k and v, of o, gate, up and down, of a layer and of
                      the next, or None
    """
    if layer[2] != layer[3]:
        return "gate and up have different formats"
    if hidden > 4 * WARPS * COLUMNS:
        return f"hidden is {hidden} wide; the router has room for {4 * WARPS * COLUMNS}"
    q, (query_heads, kv_heads, head_dim) = heads[0] * heads[2], heads
    phases = [phase_of(layer[1], q), phase_of(layer[2], hidden, 2), phase_of(layer[4], ffn)]
    if following is not None:
        phases.append(phase_of(following[0], hidden))
    of_attention = decode_plan.Plan(
        1, kv_heads, query_heads // kv_heads, head_dim, 1, 1, device.multiprocessors(), True, 0.0, False
    )
    if of_attention.team != WARPS:
        return f"{query_heads} query heads are more than blocks of attention"
    if plan(phases, experts, of_attention.scratch, bits, 0.0) is None:
        return f"{experts.used} experts of {ffn} activations leave no room for weights on their way"
    return None


def run(
    qkv: jax.Array, x: jax.Array, stacks: Sequence[LayerStack], of_router: LayerStack, norms, head_norms,
    cache, positions: jax.Array, rotation: tuple[jax.Array, jax.Array], layer: int, workspace: jax.Array, *,
    experts: Experts, eps: float, interleaved: bool,
):  # fmt: skip
    """`experts_layer` of a model's stacks: of q, k and v, of o, gate, up and down.

    norms   float32 [L, hidden], gammas before the feed-forward and before attention
    cache   pages of keys and of values, and their table
    """
    joined, o, gate, up, down = stacks
    of_phases = [(o,), (gate, up), (down,)]
    layers, gammas = [layer] * 3, [norms[0][layer : layer + 1], None]
    if layer + 1 < len(joined.where):
        of_phases.append((joined,))
        layers.append(layer + 1)
        gammas[1] = norms[1][layer + 1 : layer + 2]
    pieces = [
        list(zip(*(pieces_of(stack, at) for stack in of), strict=True))
        for of, at in zip(of_phases, layers, strict=True)
    ]
    part, at = of_router.where[layer]
    w_router = of_router.parts[part]
    assert isinstance(w_router, QTensor)
    kernel = functools.partial(
        experts_layer,
        formats_of=tuple(tuple(part[0].format for part in parts) for parts in pieces),
        experts=experts,
        eps=eps,
        interleaved=interleaved,
        bits=pieces[0][0][0].products.activation_bits,
    )
    weights = tuple(
        tuple(tuple(_one_layer(w.fields, number in (1, 2)) for w in part) for part in parts)
        for number, parts in enumerate(pieces)
    )
    x, following, *rest = jax.custom_batching.sequential_vmap(kernel)(
        qkv, x, weights, w_router.fields["w"][at].reshape(w_router.shape), tuple(gammas),
        None if head_norms[0] is None else head_norms, *cache, positions, rotation,
        jnp.asarray(layer, jnp.int32).reshape(1), workspace,
    )  # fmt: skip
    return x, None if following is None else following[:, : joined.shape[0]], *rest


def _one_layer(fields: dict[str, jax.Array], of_experts: bool) -> dict[str, jax.Array]:
    """Of a stack of one layer: of experts, that of its experts."""
    return {name: field[0] for name, field in fields.items()} if of_experts else fields


@functools.partial(jax.jit, static_argnames=("formats_of", "experts", "eps", "interleaved", "bits"))
def experts_layer(
    qkv: jax.Array,
    x: jax.Array,
    weights: tuple[tuple[tuple[dict[str, Any], ...], ...], ...],
    router: jax.Array,
    norms: tuple[jax.Array, jax.Array | None],
    head_norms: tuple[jax.Array, jax.Array] | None,
    k_pages: cache_layouts.Pages,
    v_pages: cache_layouts.Pages,
    block_table: jax.Array,
    positions: jax.Array,
    rotation: tuple[jax.Array, jax.Array],
    layer: jax.Array,
    workspace: jax.Array,
    *,
    formats_of: tuple[tuple[str, ...], ...],
    experts: Experts,
    eps: float,
    interleaved: bool,
    bits: int = 8,
) -> tuple[jax.Array, jax.Array | None, cache_layouts.Pages, cache_layouts.Pages, jax.Array]:
    """x <- x + W_o attention(q, k, v);  x <- x + sum_e w_e W_down,e (silu(W_gate,e n) * (W_up,e n)),
    n = norm(x);  and of the next layer W_qkv norm(x), where there is one.

    qkv, x     float32 [1, W], [1, hidden]
    weights    of o, gate and up, down, and next q, k and v or not: of each its parts, rows below rows, of
               these a matrix or, for gate and up, two; stacks of one, of experts of all that a layer has
    router     float32, float16 or bfloat16 [count, hidden]
    norms      float32 [1, hidden]: before the feed-forward and before the next layer's attention, or None
    head_norms, pages, table, positions, rotation   as for decode_layers
    layer      int32 [1]: another one, modulo 3, than in the launch before with this workspace
    workspace  int32, zeros before the first launch, `workspace_words` and those of empty_workspace
    formats_of  of the parts of each product
    bits       8 or 16, to which activations are rounded
    Returns x, the next q, k and v, rows of all parts, or None, the pages, updated in place, and the
    workspace. Which experts a token has is decided on logits of 22 bits of mantissa; of equal ones the lower
    index comes first.
    """
    hidden, page_size, kv_heads, head_dim = x.shape[1], *cache_layouts.shape(k_pages)[2:]
    phases = [Phase(parts, of) for parts, of in zip(weights, formats_of, strict=True)]
    q, ffn = phases[0].columns, phases[2].columns
    attention = Attention(
        rows=1, kv_heads=kv_heads, group=q // (kv_heads * head_dim), head_dim=head_dim, page_size=page_size,
        pages=block_table.shape[1], most_blocks=device.multiprocessors(), normed=head_norms is not None,
        eps=eps, interleaved=interleaved, pairs=rotation[0].shape[-1],
    )  # fmt: skip
    planned = plan(phases, experts, attention.scratch, bits, eps)
    if planned is None:
        raise NotImplementedError(
            f"experts_layer: activations of {bits} bits leave no room in {device.shared_bytes()} bytes of "
            "shared memory"
        )
    results = {"x_out_gmem": jax.ShapeDtypeStruct(x.shape, jnp.float32)}
    if len(phases) == 4:
        results["qkv_out_gmem"] = jax.ShapeDtypeStruct((1, planned.products[3].n_tiles * ROWS), jnp.float32)
    pages, ref = jax.tree.map(jax.new_ref, (k_pages, v_pages)), jax.new_ref(workspace)
    smem = {
        name: plgpu.SMEM((size,), jnp.int32 if name in ("q_smem", "chosen_smem") else jnp.float32)
        for name, size in _scratch_words(planned.products, experts, attention.scratch).items()
    }
    rings = {
        name: plgpu.SMEM((WARPS * depth * size // 4,), jnp.int32)
        for name, depth, size in zip(
            ("known_smem", "experts_smem"), planned.depths, planned.slot_bytes, strict=True
        )
    }
    sizes = _widths(hidden, q, ffn, experts)
    out = launch(
        lambda **refs: _Layer(planned, experts, attention, cache_layouts.of(k_pages), sizes, **refs).run(),
        {
            "qkv": qkv, "x": x, "weights": weights, "router": router, "norms": norms,
            "head_norms": head_norms, "pages": pages, "table": block_table, "positions": positions,
            "rotation": rotation, "layer": layer, "workspace": ref,
        },
        results,
        name="experts_layer",
        blocks=device.multiprocessors(),
        threads=32 * WARPS,
        scratch={**rings, **smem},
    )  # fmt: skip
    y, following = out if len(phases) == 4 else (out, None)
    return y, following, *jax.tree.map(jax.freeze, pages), jax.freeze(ref)


class _ChosenStream(NamedTuple):
    """A Stream of matrices side by side, those of the chosen experts."""

    share: Share
    weight_gmem: Sequence[dict[str, Any]]
    chosen: Any
    of_expert: int

    def item(self, tile, step):
        step = self.share.first_step + step
        expert = self.chosen(step // self.of_expert)
        row = expert * self.share.part.n_tiles + self.share.first_tile + tile
        return row * self.of_expert + step % self.of_expert


class _Layer:
    """The launch, as a lane of a block sees it; refs without a suffix are of global memory."""

    def __init__(
        self, planned: Planned, experts: Experts, attention: Attention, layout, widths: list[int], *,
        qkv, x, weights, router, norms, head_norms, pages, table, positions, rotation, layer, workspace,
        x_out_gmem, known_smem, experts_smem, attention_smem, dots_smem, chosen_smem, qkv_out_gmem=None,
        **smem,
    ):  # fmt: skip
        self.planned, self.experts, self.attention, self.widths = planned, experts, attention, widths
        self.qkv, self.x, self.weights, self.router, self.norms = qkv, x, weights, router, norms
        self.x_out, self.qkv_out, self.workspace = x_out_gmem, qkv_out_gmem, workspace
        self.known_smem, self.experts_smem, self.smem = known_smem, experts_smem, smem
        self.attention_smem, self.dots_smem, self.chosen_smem = attention_smem, dots_smem, chosen_smem
        (keys, values), (cos, sin), (q_gamma, k_gamma) = pages, rotation, head_norms or (None, None)
        self.cache = Cache(layout, keys, values, table, positions, cos, sin, q_gamma, k_gamma)
        self.layer = memory.load(layer, 0)
        self.tag = self.layer % 3 + 1

    def run(self):
        o, gate_up, down, *following = self.planned.products
        known = Ring(
            [self._streams(0, o), *(self._streams(3, product) for product in following)],
            self.known_smem, self.planned.depths[0], self.planned.slot_bytes[0],
        )  # fmt: skip
        state = known.filled()
        self._attend()
        state = self._product(0, self._shares(o), known, state)

        of_expert = gate_up.plan.parts[0].blocks
        number = integer(lanes.block()) // of_expert
        inside = select(number < self.experts.used, integer(lanes.block()) - number * of_expert, 2**30)
        share = Share.of(gate_up.plan.parts[0], gate_up.steps, WARPS, inside)
        block = self._block(1, share, number)
        row = self._router_row(block, 0)  # on its way before x is there
        loaded = block.load()
        self._route(block, loaded, row)

        expert = memory.load(self.chosen_smem, minimum(number, self.experts.used - 1))
        (of_down,) = self._shares(down)
        streams = (
            Stream(share, self.weights[1][0], expert),
            _ChosenStream(
                of_down, self.weights[2][0], functools.partial(memory.load, self.chosen_smem),
                down.steps // self.experts.used,
            ),
        )  # fmt: skip
        ring = Ring(
            [[stream] for stream in streams],
            self.experts_smem, self.planned.depths[1], self.planned.slot_bytes[1],
        )  # fmt: skip
        of_experts = ring.filled()
        of_experts = lanes.choose(share.here, lambda: block.run(loaded, ring, of_experts, 0), of_experts)
        self._product(2, [of_down], ring, of_experts, in_ring=1)
        if following:
            self._product(3, self._shares(following[0]), known, state, in_ring=1)
        memory.wait_copies(0)

    def _shares(self, product: IntegerProduct) -> list[Share]:
        return [Share.of(part, product.steps, WARPS) for part in product.plan.parts]

    def _streams(self, number: int, product: IntegerProduct) -> list[Stream]:
        shares = self._shares(product)
        return [Stream(s, of, integer(0)) for s, of in zip(shares, self.weights[number], strict=True)]

    def _product(self, number: int, shares: list[Share], ring: Ring, state: list, in_ring: int = 0) -> list:
        """The parts of a product that this block has: the state of the ring behind them."""
        for share in shares:
            block = self._block(number, share)
            run = lambda block=block, state=state: block.run(block.load(), ring, state, in_ring)  # noqa: E731
            state = lanes.choose(share.here, run, state)
        return state

    def _block(self, number: int, share: Share, expert=None) -> Block:
        """expert  which of the chosen it makes hidden values of"""
        gamma = {1: self.norms[0], 3: self.norms[1]}.get(number)
        residuals = {
            0: functools.partial(memory.load, self.x),
            # Of this block's own threads, past a cache that is not kept up to date.
            2: lambda row, n: memory.load_written_by_others(self.x_out, n),
        }

        def store(y, row, n):
            if number == 3:
                memory.store(y, self.qkv_out, 0, n)
                return
            if number == 1:
                n = index(expert) * (self.widths[HIDDEN] // self.experts.used) + n
            else:
                memory.store(y, self.x_out, 0, n)
            self._send((MIDDLE, HIDDEN, OUTPUT)[number], n, y)

        load = functools.partial(self._receive, (ATTENDED, MIDDLE, HIDDEN, OUTPUT)[number])
        return Block(
            self.planned.products[number], share, store, residuals.get(number),
            self._weighted if number == 2 else load, gamma_gmem=gamma, norm_layer=integer(0), **self.smem,
        )  # fmt: skip

    def _at(self, vector: int) -> int:
        return sum(self.widths[:vector])

    def _send(self, vector: int, n, y):
        memory.store_tagged(y, self.workspace, n + self._at(vector), self.tag)

    def _receive(self, vector: int, places: list) -> list[list]:
        """8 float32 from each (row, column) of a vector on, when they are there."""
        starts = [at + self._at(vector) for _, at in places]
        words = memory.load_tagged(
            self.workspace, [((at, more), 4) for at in starts for more in (0, 4)], self.tag
        )
        return [words[k : k + 8] for k in range(0, len(words), 8)]

    def _weighted(self, places: list) -> list[list]:
        """What down is multiplied by."""
        ffn = self.widths[HIDDEN] // self.experts.used
        weights = [as_real(memory.load(self.chosen_smem, at // ffn + self.experts.used)) for _, at in places]
        received = self._receive(HIDDEN, places)
        return [[v * w for v in values] for values, w in zip(received, weights, strict=True)]

    def _attend(self):
        begin = sum(self.widths)

        def load_qkv(row, columns):
            return [v for first, i in columns for v in memory.load_reals(4, self.qkv, [row, first + i])]

        with lanes.when(lanes.block() < self.attention.blocks):
            self.attention.run(
                self.cache, self.attention.keep(self.cache), index(self.layer), self.attention_smem, load_qkv,
                lambda y, row, n: self._send(ATTENDED, n, y), Exchange(self.workspace, begin, self.tag),
            )  # fmt: skip
            lanes.block_barrier()

    def _router_row(self, block: Block, first: int) -> list[list]:
        """Of this block's expert among those from `first` on, in the columns of this lane's activations."""
        expert = minimum(lanes.block() + first, self.experts.count - 1)
        steps, at_once = block.sizes.steps, block.activations.at_once
        step = [minimum(block.first_step + u, steps - 1) for u in range(at_once)]
        return eights(self.router, [(expert, index(s * COLUMNS + block.lane * 8)) for s in step])

    def _route(self, block: Block, loaded, row: list[list]):
        """The chosen experts and the bits of their weights into shared memory."""
        _, x, gammas = loaded
        blocks, count = device.multiprocessors(), self.experts.count
        for first in range(0, count, blocks):
            if first:
                lanes.block_barrier()  # the sums before were read
                row = self._router_row(block, first)
            dot, squares = real(0), real(0)
            for u, (w, gamma) in enumerate(zip(row, gammas, strict=True)):
                counts = integer(u) < block.share.mine
                v = [select(counts, value, 0.0) for value in x[u, 0]]
                squares = sum_of_squares(v, squares)
                dot = total([dot, *(a * g * b for a, g, b in zip(v, gamma, w, strict=True))])
            for at, value in enumerate((dot, squares)):
                value = lanes.warp_sum_real(value)
                with lanes.when(block.lane == 0):
                    memory.store(value, self.dots_smem, block.warp + at * WARPS)
            lanes.block_barrier()
            with lanes.when((integer(lanes.thread()) == 0) & (lanes.block() + first < count)):
                dot, squares = (
                    over_warps(lambda w, at=at: memory.load(self.dots_smem, w + at), WARPS)
                    for at in (0, WARPS)
                )
                logit = dot * inverse_rms(squares, block.sizes.columns, block.sizes.eps)
                self._send(LOGITS, lanes.block() + first, logit)
        missing = lanes.thread() + count
        with lanes.when((lanes.block() == 0) & (missing < self.experts.logits)):
            self._send(LOGITS, missing, real(router.NONE))
        with lanes.when(block.warp == 0):
            each = self.experts.logits // router.LANES
            at = index(block.lane * each) + self._at(LOGITS)
            logits = memory.load_tagged(
                self.workspace, [((at, more), 4) for more in range(0, each, 4)], self.tag
            )
            router.choose(logits, block.lane, self.experts, self.chosen_smem)
        lanes.block_barrier()
