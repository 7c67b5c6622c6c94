"""All layers of a decode step of one row whose channels are mixed by experts, in one launch, a block on each
multiprocessor, for weights of 2 to 8 bits.

    q, k, v -> [attention] -> [o, + x] -> x -> [norm, router, top-k] -> [norm, gate, up, activation]
            -> [down of the chosen, their sum, + x] -> x -> [norm, next layer's q, k, v]

Attention is attention/decode.py's, a product int_mma/decode.py's, and activations go from block to block as
gpu/exchange.py has it. What experts add:

    router    a block makes the logit of one expert; every block reads all logits and takes the largest itself
    gate, up  a chosen expert has blocks of its own
    down      the chosen experts' matrices side by side are one matrix, of as many columns as they have in
              all; what it is multiplied by are their hidden vectors times the router's weights

Two rings bring weights: one those that are known ahead (o, next q, k, v), one those of experts, from the
moment that they are chosen. Where layers have a product's matrices in different formats, code for each is in
the kernel, and which part of a stack a layer has is read from a table. All blocks must run at once.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import cache_layouts, device
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.attention.decode import Attention
from pallas_kernels.attention.decode_cache import Cache
from pallas_kernels.attention.decode_plan import WARPS
from pallas_kernels.experts import router
from pallas_kernels.experts.router import Experts
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.exchange import Exchange, first_contents, tag
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import as_real, index, integer, minimum, real, select, sum_of_squares, total
from pallas_kernels.matmul.epilogue import inverse_rms, over_warps
from pallas_kernels.matmul.int_mma.activations_shared import WarpActivations
from pallas_kernels.matmul.int_mma.decode_block import Block
from pallas_kernels.matmul.int_mma.decode_plan import IntegerProduct
from pallas_kernels.matmul.int_mma.decode_ring import Ring, Share, Stream
from pallas_kernels.qtensor import LayerStack, QTensor, leaves
from pallas_kernels.step.experts_plan import DOWN, GATE_UP, NEXT_QKV, OUT, Planned, plan, scratch_words
from pallas_kernels.step.inputs import StepInputs
from pallas_kernels.step.layer_products_plan import Phase
from pallas_kernels.tiles import TILE_COLUMNS

# What goes from block to block; x is twice a layer, behind o and behind down.
QKV, ATTENDED, MIDDLE, LOGITS, HIDDEN, OUTPUT = range(6)


def run(
    qkv: jax.Array, x: jax.Array, stacks: Sequence[LayerStack], router_stack: LayerStack,
    inputs: StepInputs, *, experts: Experts, eps: float, interleaved: bool, activation: Activation = SILU,
) -> tuple[jax.Array, cache_layouts.Pages, cache_layouts.Pages]:  # fmt: skip
    """`experts_layers` of a model's stacks: of q, k and v, of o, gate, up and down."""
    joined, o, gate, up, down = stacks
    products = (o,), (gate, up), (down,), (joined,)
    pieces = [
        [
            list(zip(*map(leaves, parts), strict=True))
            for parts in zip(*(stack.parts for stack in each), strict=True)
        ]
        for each in products
    ]
    weights = tuple(
        tuple(
            tuple(tuple(_flat(w, number in (GATE_UP, DOWN)) for w in part) for part in parts)
            for parts in each
        )
        for number, each in enumerate(pieces)
    )
    (w_router,) = router_stack.parts
    assert isinstance(w_router, QTensor)
    kernel = functools.partial(
        experts_layers,
        formats_of=tuple(tuple(tuple(part[0].format for part in parts) for parts in each) for each in pieces),
        experts=experts, eps=eps, interleaved=interleaved, bits=pieces[0][0][0][0].products.activation_bits,
        activation=activation,
    )  # fmt: skip
    return jax.custom_batching.sequential_vmap(kernel)(
        qkv, x, weights, jnp.asarray([each[0].where for each in products], jnp.int32),
        w_router.fields["w"].reshape(-1, *w_router.shape), inputs,
    )  # fmt: skip


def _flat(w: QTensor, by_expert: bool) -> dict[str, jax.Array]:
    """Fields of a stack, of experts by layer and expert."""
    if not by_expert:
        return w.fields
    return {name: field.reshape(-1, *field.shape[2:]) for name, field in w.fields.items()}


@functools.partial(
    jax.jit, static_argnames=("formats_of", "experts", "eps", "interleaved", "bits", "activation")
)
def experts_layers(
    qkv: jax.Array,
    x: jax.Array,
    weights: tuple[tuple[tuple[tuple[dict[str, Any], ...], ...], ...], ...],
    where: jax.Array,
    router: jax.Array,
    inputs: StepInputs,
    *,
    formats_of: tuple[tuple[tuple[str, ...], ...], ...],
    experts: Experts,
    eps: float,
    interleaved: bool,
    bits: int = 8,
    activation: Activation = SILU,
) -> tuple[jax.Array, cache_layouts.Pages, cache_layouts.Pages]:
    """One token of a row through all layers, whose q, k and v of the first are given.

    x <- x + W_o attention(q, k, v);  x <- x + sum_e w_e W_down,e activation(W_gate,e n, W_up,e n),
    n = norm(x);  q, k, v <- W_qkv norm(x), of the next layer

    qkv, x     float32 [1, W], without bias, [1, hidden]
    weights    of o, gate and up, down, and q, k and v: for each combination of formats that layers have its
               parts, rows below rows, of these a matrix or, for gate and up, two: stacks over layers, of
               experts over layers times experts
    where      int32 [4, L, 2]: of each product and layer the combination and the index in its stack
    router     float32, float16 or bfloat16 [L, count, hidden]
    formats_of  of the parts of each product
    bits       8 or 16, to which activations are rounded
    Returns x and the pages, updated in place. Which experts a token has is decided on logits of 22 bits of
    mantissa; of equal ones the lower index comes first.
    """
    hidden, page_size, kv_heads, head_dim = x.shape[1], *cache_layouts.shape(inputs.k_pages)[2:]
    phases = [
        [
            Phase(parts, of, parts[0][0]["words"].shape[2] * TILE_COLUMNS)
            for parts, of in zip(*each, strict=True)
        ]
        for each in zip(weights, formats_of, strict=True)
    ]
    q, ffn = phases[OUT][0].columns, phases[DOWN][0].columns
    attention = Attention(
        rows=1, kv_heads=kv_heads, group=q // (kv_heads * head_dim), head_dim=head_dim, page_size=page_size,
        pages=inputs.block_table.shape[1], most_blocks=device.multiprocessors(),
        normed=inputs.head_norms is not None, eps=eps, interleaved=interleaved,
        pairs=inputs.rotation[0].shape[-1],
    )  # fmt: skip
    planned = plan(phases, experts, attention.scratch, bits, eps, activation)
    if planned is None:
        raise NotImplementedError(
            f"experts_layers: activations of {bits} bits leave no room in {device.shared_bytes()} bytes of "
            "shared memory"
        )
    widths = [qkv.shape[1], q, hidden, experts.logits, experts.used * ffn, hidden]
    first = qkv if inputs.bias is None else qkv + inputs.bias[0]
    begun = jnp.pad(first_contents(first[0]), (0, sum(widths[1:]) + attention.partials))
    workspace, x_ref = jax.new_ref(begun), jax.new_ref(x)
    pages = jax.tree.map(jax.new_ref, (inputs.k_pages, inputs.v_pages))
    layout = cache_layouts.recognize(inputs.k_pages)
    smem = {
        name: plgpu.SMEM((size,), jnp.int32 if name in ("q_smem", "chosen_smem") else jnp.float32)
        for name, size in scratch_words(planned.products, experts, attention.scratch).items()
    }
    rings = map(operator.mul, planned.depths, planned.slot_bytes)
    known, chosen = (plgpu.SMEM((WARPS * size // 4,), jnp.int32) for size in rings)
    launch(
        lambda **refs: _Layers(planned, experts, attention, layout, widths, **refs).run(),
        {
            "x": x_ref, "weights": weights, "where": where, "router": router,
            "norms": (inputs.ffn_norm, inputs.attn_norm), "head_norms": inputs.head_norms,
            "bias": inputs.bias, "pages": pages, "table": inputs.block_table,
            "positions": inputs.positions, "rotation": inputs.rotation, "workspace": workspace,
        },
        {},
        name="experts_layers",
        blocks=device.multiprocessors(),
        threads=32 * WARPS,
        scratch={"known_smem": known, "experts_smem": chosen, **smem},
    )  # fmt: skip
    return jax.freeze(x_ref), *jax.tree.map(jax.freeze, pages)


class _ChosenStream(NamedTuple):
    """A Stream of matrices side by side, those of the chosen experts; first: of the layer's experts."""

    share: Share
    weight_gmem: Sequence[dict[str, Any]]
    first: Any
    chosen: Any
    expert_steps: int

    def item(self, tile, step):
        step = self.share.first_step + step
        expert = self.first + self.chosen(step // self.expert_steps)
        row = expert * self.share.part.n_tiles + self.share.first_tile + tile
        return row * self.expert_steps + step % self.expert_steps


class _Layers:
    """The launch, as a lane of a block sees it; refs without a suffix are of global memory."""

    def __init__(
        self, planned: Planned, experts: Experts, attention: Attention, layout, widths: list[int], *,
        x, weights, where, router, norms, head_norms, bias, pages, table, positions, rotation, workspace,
        known_smem, experts_smem, attention_smem, dots_smem, chosen_smem, **smem,
    ):  # fmt: skip
        self.planned, self.experts, self.attention, self.widths = planned, experts, attention, widths
        self.x, self.weights, self.where, self.router, self.norms = x, weights, where, router, norms
        self.bias, self.workspace, self.layers = bias, workspace, where.type.shape[1]
        self.known_smem, self.experts_smem, self.smem = known_smem, experts_smem, smem
        self.attention_smem, self.dots_smem, self.chosen_smem = attention_smem, dots_smem, chosen_smem
        self.cache = Cache(layout, pages, table, positions, rotation, head_norms)

    def run(self):
        self.bounds = self.attention.keep(self.cache)
        lanes.loop(0, self.layers, 1, [], lambda layer, carry: _Layer(self, layer).run() or carry)


class _Layer:
    """A layer of it."""

    def __init__(self, launch: _Layers, layer):
        self.launch, self.layer, self.tag = launch, integer(layer), tag(integer(layer))
        self.planned, self.experts, self.widths = launch.planned, launch.experts, launch.widths

    def run(self):
        state = self._known().filled()
        self._attend()
        state = self._product(OUT, self._known(), state, 0)
        self._mix()
        self._product(NEXT_QKV, self._known(), state, 1)
        memory.wait_copies(0)

    def _known(self) -> Ring:
        """The ring of what is known ahead; made anew where it is used, so that what it is made of is not kept
        in registers."""
        phases = self._streams(OUT, self.layer), self._streams(NEXT_QKV, self.layer + 1)
        return Ring(phases, self.launch.known_smem, self.planned.depths[0], self.planned.slot_bytes[0])

    def _mix(self):
        """Router and experts."""
        expert_blocks = self.planned.blocks(GATE_UP)
        number = integer(lanes.block()) // expert_blocks
        inside = select(number < self.experts.used, integer(lanes.block()) - number * expert_blocks, 2**30)
        choosing = max(expert_blocks * self.experts.used, self.planned.blocks(DOWN))
        owners = min(self.experts.count, device.multiprocessors())
        expert = lambda: memory.load(self.launch.chosen_smem, minimum(number, self.experts.used - 1))  # noqa: E731
        gate_up = self._streams(GATE_UP, self.layer, inside)
        (product,) = self.planned.products[GATE_UP]
        block = self._block(GATE_UP, product, gate_up[0].share, number)

        def mixed():
            row = self._router_row(block, 0)  # on its way before x is there
            loaded = block.load()
            self._send_logits(block, loaded, row)
            self._choose(block)
            streams = [s._replace(layer=s.layer * self.experts.count + expert()) for s in gate_up]
            phases = [streams, self._chosen_streams()]
            ring = Ring(phases, self.launch.experts_smem, self.planned.depths[1], self.planned.slot_bytes[1])
            state = ring.filled()
            run = lambda: block.run(loaded, ring, state, 0)  # noqa: E731
            self._product(DOWN, ring, lanes.choose(gate_up[0].share.has_tiles, run, state), 1)

        if owners > choosing:
            # Blocks that have a logit and nothing else: who waits for others' words must make some later.
            with lanes.when((lanes.block() >= choosing) & (lanes.block() < owners)):
                row = self._router_row(block, 0)
                self._send_logits(block, block.load(), row)
        with lanes.when(lanes.block() < choosing):
            mixed()

    def _streams(self, number: int, layer, block=None) -> list[Stream]:
        """Of all combinations of formats, of which the layer has one, and all their parts."""
        at = minimum(layer, self.launch.layers - 1)
        combination, place = (memory.load(self.launch.where, number, at, i) for i in (0, 1))
        several, streams = len(self.planned.products[number]) > 1, []
        for i, product in enumerate(self.planned.products[number]):
            has = layer < self.launch.layers
            if several:
                has = has & (combination == i)
            for part, weights in zip(product.plan.parts, self.launch.weights[number][i], strict=True):
                share = Share.for_block(part, product.steps, WARPS, block)
                if several or number == NEXT_QKV:
                    has_tiles = share.has_tiles & has
                    share = share._replace(has_tiles=has_tiles, tiles=select(has, share.tiles, 0))
                streams.append(Stream(share, weights, place))
        return streams

    def _chosen_streams(self) -> list[_ChosenStream]:
        load = functools.partial(memory.load, self.launch.chosen_smem)
        expert_steps = self.planned.products[DOWN][0].steps // self.experts.used
        return [
            _ChosenStream(s.share, s.weight_gmem, s.layer * self.experts.count, load, expert_steps)
            for s in self._streams(DOWN, self.layer)
        ]

    def _product(self, number: int, ring: Ring, state: list, in_ring: int) -> list:
        """The parts of a product that this block has: the state of the ring behind them."""
        streams = ring.phases[in_ring]
        parts = [p for product in self.planned.products[number] for p in [product] * len(product.plan.parts)]
        for product, stream in zip(parts, streams, strict=True):
            block = self._block(number, product, stream.share)
            run = lambda block=block, state=state: block.run(block.load(), ring, state, in_ring)  # noqa: E731
            state = lanes.choose(stream.share.has_tiles, run, state)
        return state

    def _block(self, number: int, product: IntegerProduct, share: Share, expert=None) -> Block:
        """expert  which of the chosen it makes hidden values of"""
        ffn_norm, attn_norm = self.launch.norms
        gamma = {GATE_UP: ffn_norm, NEXT_QKV: attn_norm}.get(number)
        residual = None
        if number in (OUT, DOWN):  # of this block's own threads, past a cache that is not kept up to date
            residual = lambda row, n: memory.load_written_by_others(self.launch.x, n)  # noqa: E731
        elif number == NEXT_QKV and self.launch.bias is not None:
            residual = lambda row, n: memory.load(self.launch.bias, self.layer + 1, n)  # noqa: E731

        def store(y, row, n, _):
            if number == GATE_UP:
                n = index(expert) * (self.widths[HIDDEN] // self.experts.used) + n
            elif number != NEXT_QKV:
                memory.store(y, self.launch.x, 0, n)
            self._send((MIDDLE, HIDDEN, OUTPUT, QKV)[number], n, y)

        load = functools.partial(self._receive, (ATTENDED, MIDDLE, HIDDEN, OUTPUT)[number])
        layer = self.layer + 1 if number == NEXT_QKV else self.layer
        return Block(
            product, share, store, residual, self._weighted if number == DOWN else load,
            gamma_gmem=gamma, norm_layer=layer, **self.launch.smem,
        )  # fmt: skip

    def _begin(self, vector: int) -> int:
        return sum(self.widths[:vector])

    def _send(self, vector: int, n, y):
        tag_of_layer = tag(self.layer + 1) if vector == QKV else self.tag
        Exchange(self.launch.workspace, self._begin(vector), tag_of_layer).send(n, [y])

    def _receive(self, vector: int, places: list) -> list[list]:
        """Wait for 8 float32 from each (row, column) of a vector on."""
        exchange = Exchange(self.launch.workspace, self._begin(vector), self.tag)
        return exchange.receive_eights([(at, 0) for _, at in places])

    def _weighted(self, places: list) -> list[list]:
        """What down is multiplied by."""
        ffn, used = self.widths[HIDDEN] // self.experts.used, self.experts.used
        weights = [as_real(memory.load(self.launch.chosen_smem, at // ffn + used)) for _, at in places]
        received = self._receive(HIDDEN, places)
        return [[v * w for v in values] for values, w in zip(received, weights, strict=True)]

    def _attend(self):
        launched, begin = self.launch, sum(self.widths)

        def load_qkv(row, columns):
            return Exchange(launched.workspace, 0, self.tag).receive([(column, 4) for column in columns])

        with lanes.when(lanes.block() < launched.attention.blocks):
            launched.attention.run(
                launched.cache, launched.bounds, index(self.layer), launched.attention_smem, load_qkv,
                lambda y, row, n: self._send(ATTENDED, n, y), Exchange(launched.workspace, begin, self.tag),
                next_layer=index(minimum(self.layer + 1, launched.layers - 1)),
            )  # fmt: skip
            lanes.block_barrier()

    def _router_row(self, block: Block, first: int) -> list[list]:
        """Of this block's expert among those from `first` on, in the columns of this lane's activations."""
        expert = minimum(lanes.block() + first, self.experts.count - 1)
        steps, activations = block.sizes.steps, block.activations
        assert isinstance(activations, WarpActivations)  # nothing is rotated: see problems.Step
        step = [minimum(block.first_step + u, steps - 1) for u in range(activations.at_once)]
        columns = [index(s * TILE_COLUMNS + block.lane * 8) for s in step]
        load = lambda at: memory.load_reals(4, self.launch.router, [self.layer, expert, at])  # noqa: E731
        return [[v for half in (0, 4) for v in load(column + half)] for column in columns]

    def _send_logits(self, block: Block, loaded, row: list[list]):
        """Of this block's experts; by the first also of those that there are not."""
        _, x, gammas = loaded
        blocks, count, dots_smem = device.multiprocessors(), self.experts.count, self.launch.dots_smem
        for first in range(0, count, blocks):
            if first:
                lanes.block_barrier()  # the sums before were read
                row = self._router_row(block, first)
            dot, squares = real(0), real(0)
            for u, (w, gamma) in enumerate(zip(row, gammas, strict=True)):
                counts = integer(u) < block.share.own_steps
                v = [select(counts, value, 0.0) for value in x[u, 0]]
                squares = sum_of_squares(v, squares)
                dot = total([dot, *(a * g * b for a, g, b in zip(v, gamma, w, strict=True))])
            for at, value in enumerate((dot, squares)):
                value = lanes.warp_sum_real(value)
                with lanes.when(block.lane == 0):
                    memory.store(value, dots_smem, block.warp + at * WARPS)
            lanes.block_barrier()
            with lanes.when((integer(lanes.thread()) == 0) & (lanes.block() + first < count)):
                dot, squares = (
                    over_warps(lambda w, at=at: memory.load(dots_smem, w + at), WARPS) for at in (0, WARPS)
                )
                logit = dot * inverse_rms(squares, block.sizes.columns, block.sizes.eps)
                self._send(LOGITS, lanes.block() + first, logit)
        missing = lanes.thread() + count
        with lanes.when((lanes.block() == 0) & (missing < self.experts.logits)):
            self._send(LOGITS, missing, real(router.NONE))

    def _choose(self, block: Block):
        """The chosen experts and the bits of their weights into shared memory."""
        with lanes.when(block.warp == 0):
            each = self.experts.logits // router.LANES
            exchange = Exchange(self.launch.workspace, self._begin(LOGITS), self.tag)
            logits = exchange.receive([((block.lane * each, more), 4) for more in range(0, each, 4)])
            router.choose(logits, block.lane, self.experts, self.launch.chosen_smem)
        lanes.block_barrier()
