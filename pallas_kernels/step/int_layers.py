"""All layers of a decode step of up to 4 rows in one launch, a block on each multiprocessor, for weights of 2
to 8 bits.

    q, k, v -> [attention] -> [o, + x] -> x -> [norm, gate, up, activation] -> [down, + x] -> x
            -> [norm, next layer's q, k, v]

Attention is attention/decode.py's, a product int_mma/decode.py's, and activations go from block to block as
gpu/exchange.py has it. A warp's ring brings weights without a pause from layer to layer (decode_ring.Window):
those of o, and of gate and up, are on their way while attention runs. Where channels are mixed by experts,
experts_layers.py has what is between o and the next q, k and v.

Where layers have a product's matrices in different formats, code for each is in the kernel, and which part of
a stack a layer has is read from a table. All blocks must run at once.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import cache_layouts, device
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.attention.decode import Attention
from pallas_kernels.attention.decode_cache import Cache
from pallas_kernels.attention.decode_plan import WARPS
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.exchange import Exchange, first_contents, tag
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import index, integer, minimum, select
from pallas_kernels.matmul.int_mma.activations_shared import rounded_words
from pallas_kernels.matmul.int_mma.decode_block import Block
from pallas_kernels.matmul.int_mma.decode_plan import IntegerProduct
from pallas_kernels.matmul.int_mma.decode_ring import Ring, Share, Stream, Window
from pallas_kernels.qtensor import LayerStack, QTensor, leaves
from pallas_kernels.step.inputs import StepInputs
from pallas_kernels.step.int_layers_plan import (
    DOWN,
    GATE_UP,
    NEXT_QKV,
    OUT,
    Planned,
    plan,
    scratch_words,
)
from pallas_kernels.step.layer_products_plan import Phase
from pallas_kernels.step.layer_products_stacks import rounded_vectors
from pallas_kernels.tiles import TILE_ROWS

# Fields of the matrices of each product, by combination of formats, part (rows below rows) and, for gate and
# up, matrix.
Weights = tuple[tuple[tuple[tuple[dict[str, Any], ...], ...], ...], ...]
# (launch, layer) -> what runs it
LayerType = Callable[["Layers", Any], "Layer"]
# What goes from block to block; x is twice a layer, behind o and behind down. Only routers make logits.
QKV, ATTENDED, MIDDLE, LOGITS, HIDDEN, OUTPUT = range(6)


class Stacked(NamedTuple):
    """What a launch is given of a model's stacks: weights, `where` and static settings."""

    weights: Weights
    where: jax.Array
    settings: dict[str, Any]


def stacked(stacks: Sequence[LayerStack], by_expert: tuple[int, ...] = ()) -> Stacked:
    """stacks: of q, k and v, of o, gate, up and down; by_expert: products whose stacks have all experts."""
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
        tuple(tuple(tuple(_fields(w, number in by_expert) for w in part) for part in parts) for parts in each)
        for number, each in enumerate(pieces)
    )
    formats_of = tuple(tuple(tuple(part[0].format for part in parts) for parts in each) for each in pieces)
    settings = {"formats_of": formats_of, "bits": pieces[0][0][0][0].products.activation_bits}
    return Stacked(weights, jnp.asarray([each[0].where for each in products], jnp.int32), settings)


def _fields(w: QTensor, by_expert: bool) -> dict[str, jax.Array]:
    """Fields of a stack, of experts by layer and expert."""
    if not by_expert:
        return w.fields
    return {name: field.reshape(-1, *field.shape[2:]) for name, field in w.fields.items()}


def run(
    qkv: jax.Array, x: jax.Array, stacks: Sequence[LayerStack], inputs: StepInputs,
    *, eps: float, interleaved: bool, activation: Activation = SILU, tokens: int = 1,
) -> tuple[jax.Array, cache_layouts.Pages, cache_layouts.Pages]:  # fmt: skip
    """`int_layers` of a model's stacks: of q, k and v, of o, gate, up and down."""
    weights, where, settings = stacked(stacks)
    joined, o, gate, up, down = stacks
    settings["rounded"] = rounded_vectors([o], (gate, up, down), [joined])
    kernel = functools.partial(
        int_layers, eps=eps, interleaved=interleaved, activation=activation, tokens=tokens, **settings
    )
    return jax.custom_batching.sequential_vmap(kernel)(qkv, x, weights, where, inputs)


@functools.partial(
    jax.jit, static_argnames=("formats_of", "eps", "interleaved", "bits", "rounded", "activation", "tokens")
)
def int_layers(
    qkv: jax.Array,
    x: jax.Array,
    weights: Weights,
    where: jax.Array,
    inputs: StepInputs,
    *,
    formats_of: tuple[tuple[tuple[str, ...], ...], ...],
    eps: float,
    interleaved: bool,
    bits: int = 8,
    rounded: tuple[bool, bool, bool] = (False, False, False),
    activation: Activation = SILU,
    tokens: int = 1,
) -> tuple[jax.Array, cache_layouts.Pages, cache_layouts.Pages]:
    """One token of each row through all layers, whose q, k and v of the first are given.

    x <- x + W_o attention(q, k, v);  x <- x + W_down activation(W_gate n, W_up n),  n = norm(x);
    q, k, v <- W_qkv norm(x), of the next layer

    qkv, x     float32 [rows, W], without bias, [rows, hidden]
    weights    of o, gate and up, down, and q, k and v: for each combination of formats that layers have its
               parts, rows below rows, of these a matrix or, for gate and up, two: stacks over layers
    where      int32 [4, L, 2]: of each product and layer the combination and the index in its stack
    formats_of  of the parts of each product
    bits       8 or 16, to which activations are rounded
    rounded    whether what o, gate and up, and down make is passed on as integers (`rounded_vectors`), where
               blocks make whole groups of 32
    tokens     neighbouring rows that are one sequence's, one token after another
    Returns x and the pages, updated in place.
    """
    rows, hidden = x.shape
    ffn = sum(fields["words"].shape[1] for fields, *_ in weights[GATE_UP][0]) * TILE_ROWS
    heads = query_width(qkv, inputs)
    columns = (heads, hidden, ffn, hidden)
    phases = [
        [Phase(parts, formats, k) for parts, formats in zip(*each, strict=True)]
        for *each, k in zip(weights, formats_of, columns, strict=True)
    ]
    attention = attention_of(inputs, heads, eps, interleaved, tokens)
    planned = plan(phases, rows, attention.scratch, bits, eps, activation)
    if planned is None:
        raise NotImplementedError(
            f"int_layers: {rows} rows of {bits} bits leave no room in {device.shared_bytes()} bytes of "
            "shared memory; split the rows"
        )
    widths = [qkv.shape[1], heads, hidden, 0, ffn, hidden]
    # Blocks may have other tiles than `rounded_vectors` knows (int_layers_plan.blocks_of_every_layer).
    in_groups = [
        all(part.tiles % 2 == 0 for p in planned.products[number] for part in p.plan.parts)
        for number in (OUT, GATE_UP, DOWN)
    ]
    rounded = tuple(map(operator.and_, rounded, in_groups))
    layer_type = functools.partial(Layer, rounded=rounded)
    return launched("int_layers", layer_type, planned, attention, widths, qkv, x, weights, where, inputs)


def query_width(qkv: jax.Array, inputs: StepInputs) -> int:
    """How wide the queries of all heads are."""
    kv_heads, head_dim = cache_layouts.shape(inputs.k_pages)[3:]
    return qkv.shape[1] - 2 * kv_heads * head_dim


def attention_of(inputs: StepInputs, width: int, eps: float, interleaved: bool, tokens: int = 1) -> Attention:
    """With queries of all heads so wide."""
    page_size, kv_heads, head_dim = cache_layouts.shape(inputs.k_pages)[2:]
    return Attention(
        rows=len(inputs.positions), kv_heads=kv_heads, group=width // (kv_heads * head_dim),
        head_dim=head_dim, page_size=page_size, pages=inputs.block_table.shape[1],
        most_blocks=device.multiprocessors(), normed=inputs.head_norms is not None, eps=eps,
        interleaved=interleaved, pairs=inputs.rotation[0].shape[-1], tokens=tokens,
    )  # fmt: skip


def launched(
    name: str, layer_type: "LayerType", planned: Planned, attention: Attention, widths: list[int], qkv, x,
    weights: Weights, where, inputs: StepInputs, more_smem: dict[str, int] | None = None, **more,
) -> tuple[jax.Array, cache_layouts.Pages, cache_layouts.Pages]:  # fmt: skip
    """The launch.

    widths     of a row of the vectors that go from block to block
    more_smem  32-bit words of shared memory that only this type of layers has, by name
    more       operands that only this type of layers has
    """
    first, rows = qkv if inputs.bias is None else qkv + inputs.bias[0], len(x)
    zeros = lambda count: jnp.zeros(count, jnp.int32)  # noqa: E731
    begun = [
        first_contents(first.reshape(-1), 0), zeros(rows * sum(widths[QKV + 1 : OUTPUT])),
        first_contents(x.reshape(-1), -1), zeros(attention.partials),
    ]  # fmt: skip
    workspace, x_ref = jax.new_ref(jnp.concatenate(begun)), jax.new_ref(x)
    pages = jax.tree.map(jax.new_ref, (inputs.k_pages, inputs.v_pages))
    layout = cache_layouts.recognize(inputs.k_pages)
    words = scratch_words(planned.products, attention.scratch) | (more_smem or {})
    rings = [
        WARPS * depth * size // 4 for depth, size in zip(planned.depths, planned.slot_bytes, strict=True)
    ]
    launch(
        lambda **refs: Layers(layer_type, planned, attention, layout, widths, **refs).run(),
        {
            "x": x_ref, "weights": weights, "where": where, "norms": (inputs.ffn_norm, inputs.attn_norm),
            "head_norms": inputs.head_norms, "bias": inputs.bias, "pages": pages,
            "table": inputs.block_table, "positions": inputs.positions, "rotation": inputs.rotation,
            "workspace": workspace, **more,
        },
        {},
        name=name,
        blocks=device.multiprocessors(),
        threads=32 * WARPS,
        scratch={
            **{f"ring_{i}_smem": plgpu.SMEM((size,), jnp.int32) for i, size in enumerate(rings)},
            **{
                key: plgpu.SMEM((size,), jnp.int32 if key == "chosen_smem" else jnp.float32)
                for key, size in words.items()
            },
        },
    )  # fmt: skip
    return jax.freeze(x_ref), *jax.tree.map(jax.freeze, pages)


class Layers:
    """The launch, as a lane of a block sees it; refs without a suffix are of global memory.

    more  what only the type of layers knows, and rings
    """

    def __init__(
        self, layer_type: "LayerType", planned: Planned, attention: Attention, layout, widths: list[int],
        *, x, weights, where, norms, head_norms, bias, pages, table, positions, rotation, workspace,
        q_smem, stats_smem, sums_smem, squares_smem, **more,
    ):  # fmt: skip
        self.layer_type, self.planned, self.attention, self.widths = layer_type, planned, attention, widths
        self.x, self.weights, self.where, self.norms = x, weights, where, norms
        self.bias, self.workspace, self.layers = bias, workspace, where.type.shape[1]
        self.attention_smem, self.more = q_smem, more
        self.block_smem = {
            "q_smem": q_smem, "stats_smem": stats_smem, "sums_smem": sums_smem, "squares_smem": squares_smem
        }  # fmt: skip
        self.cache = Cache(layout, pages, table, positions, rotation, head_norms)

    def run(self):
        self.bounds = self.attention.keep(self.cache)
        state = self.layer_type(self, index(0)).begun()
        lanes.loop(0, self.layers, 1, state, lambda layer, state: self.layer_type(self, layer).run(state))
        memory.wait_copies(0)


class Layer:
    """A layer of it. Types of layers override what differs.

    x_products  products that leave x in float32 where the launch returns it, and add to what they find there
    """

    def __init__(self, launch: Layers, layer, rounded: tuple[bool, bool, bool] = (False, False, False)):
        self.launch, self.layer, self.tag = launch, integer(layer), tag(integer(layer))
        self.planned, self.widths = launch.planned, launch.widths
        self.x_products: tuple[int, ...] = (OUT, DOWN)
        self.rounded = dict(zip((MIDDLE, HIDDEN, OUTPUT), rounded, strict=True))

    def begun(self) -> list:
        """The state of rings before the first layer."""
        return self.window(OUT).begun()

    def run(self, state: list) -> list:
        """All of it: the state of rings behind it."""
        state = self.window(OUT).moved_on(state)
        self.attend()
        for number in (OUT, GATE_UP, DOWN, NEXT_QKV):
            window = self.window(number)
            state = self.product(number, window, state if number == OUT else window.moved_on(state), 0)
        return state

    def window(self, number: int) -> Window:
        """The ring for a product and the next one. It is built where it is used, so that registers need not
        keep what it is built from."""
        following = self.layer + 1
        layers = {NEXT_QKV: following} if number != NEXT_QKV else {NEXT_QKV: following, OUT: following}
        return Window(*self.ring_of([number, (number + 1) % 4], 0, layers))

    def ring_of(self, products: Sequence[int], ring: int, layers: dict[int, Any]) -> tuple:
        """A ring's arguments; layers: of products that are not this layer's."""
        phases = [self.streams(product, layers.get(product, self.layer)) for product in products]
        smem = self.launch.more[f"ring_{ring}_smem"]
        return phases, smem, self.planned.depths[ring], self.planned.slot_bytes[ring]

    def streams(self, number: int, layer, block=None) -> list[Stream]:
        """Of all combinations of formats, of which the layer has one, and all their parts."""
        at = self.clamped(layer)
        combination, place = (memory.load(self.launch.where, number, at, i) for i in (0, 1))
        several, streams = len(self.planned.products[number]) > 1, []
        for i, product in enumerate(self.planned.products[number]):
            has = layer < self.launch.layers
            if several:
                has = has & (combination == i)
            for part, weights in zip(product.plan.parts, self.launch.weights[number][i], strict=True):
                share = Share.for_block(part, product.steps, WARPS, block, product.tiles_of_item)
                if several or layer is not self.layer:
                    has_tiles = share.has_tiles & has
                    share = share._replace(has_tiles=has_tiles, tiles=select(has, share.tiles, 0))
                streams.append(Stream(share, weights, place))
        return streams

    def product(self, number: int, ring: Ring, state: list, in_ring: int) -> list:
        """The parts of a product that this block has: the state of the ring behind them."""
        streams = ring.phases[in_ring]
        parts = [p for product in self.planned.products[number] for p in [product] * len(product.plan.parts)]
        for product, stream in zip(parts, streams, strict=True):
            block = self.block(number, product, stream.share)
            run = lambda block=block, state=state: block.run(block.load(), ring, state, in_ring)  # noqa: E731
            state = lanes.choose(stream.share.has_tiles, run, state)
        return state

    def block(self, number: int, product: IntegerProduct, share: Share, begin=0) -> Block:
        """begin  of what it makes, among hidden values"""
        gamma, norm_layer = self.norm_before(number)
        vector, rounds = self.made_by(number), self.rounded.get(self.made_by(number), False)

        def store(y, row, n, rounding):
            row = self.row_of(number, row)
            if number in self.x_products:
                memory.store(y, self.launch.x, row, n)
            n = n + begin if number == GATE_UP else n
            if rounds:
                self.send_rounded(vector, row, n, y, *rounding)
            else:
                self.send(vector, row, n, y)

        return Block(
            product, share, store, self.residual(number), functools.partial(self.load, number),
            gamma_gmem=gamma, norm_layer=norm_layer,
            prefetch=self.rounding_for(number + 1) if rounds else None,
            rounded=self.rounded.get(self.read_by(number), False), in_groups=rounds,
            **self.launch.block_smem,
        )  # fmt: skip

    def row_of(self, number: int, row):
        """Which row of x a row of a product's activations is."""
        return row

    def residual(self, number: int) -> Callable | None:
        """(row, n) -> what is added to number n of a row of a product; None: nothing."""
        x, bias = self.launch.x, self.launch.bias
        if number in self.x_products:  # of this block's own threads, past a cache that is not kept up to date
            return lambda row, n: memory.load_written_by_others(x, row * self.widths[OUTPUT] + n)
        if number == NEXT_QKV and bias is not None:
            return lambda row, n: memory.load(bias, self.layer + 1, n)
        return None

    def rounding_for(self, reader: int) -> Callable:
        """(row, n) -> what is needed to round number n for a product: the gamma of the norm that follows, or
        None; how many columns share a scale, and whether half as many do in this layer, or None."""
        gamma, layer = self.norm_before(reader)
        layer, groups = self.clamped(layer), [p.activation_group for p in self.planned.products[reader]]

        def loaded(row, n):
            is_halved = None
            if len(set(groups)) > 1:
                combination = memory.load(self.launch.where, reader, layer, 0)
                halved = [combination == i for i, group in enumerate(groups) if group < max(groups)]
                is_halved = functools.reduce(operator.or_, halved)
            return None if gamma is None else memory.load(gamma, layer, n), max(groups), is_halved

        return loaded

    def norm_before(self, number: int) -> tuple[Any, Any]:
        """Gammas of the norm of what a product reads, or None, and the layer that has it."""
        ffn_norm, attn_norm = self.launch.norms
        gamma = {GATE_UP: ffn_norm, NEXT_QKV: attn_norm}.get(number)
        return gamma, self.layer + 1 if number == NEXT_QKV else self.layer

    def clamped(self, layer):
        """A layer, or the last in place of one behind it."""
        return minimum(layer, self.launch.layers - 1)

    def load(self, number: int, places: list) -> list[list]:
        """What a product is multiplied by: from each (row, column) on 8 float32, or words of 8 integers."""
        vector = self.read_by(number)
        places = [(self.row_of(number, row), at) for row, at in places]
        if self.rounded.get(vector):
            starts = [self.place(vector, row, at) // 2 for row, at in places]
            return self.exchange(vector).receive_fours(starts)
        return self.receive(vector, places)

    @staticmethod
    def read_by(number: int) -> int:
        return (ATTENDED, MIDDLE, HIDDEN, OUTPUT)[number]

    @staticmethod
    def made_by(number: int) -> int:
        return (MIDDLE, HIDDEN, OUTPUT, QKV)[number]

    def exchange(self, vector: int) -> Exchange:
        tag_of_layer = tag(self.layer + 1) if vector == QKV else self.tag
        begin = self.launch.attention.rows * sum(self.widths[:vector])
        return Exchange(self.launch.workspace, begin, tag_of_layer)

    def place(self, vector: int, row, n):
        """Of a row's number n in a vector."""
        return row * self.widths[vector] + n

    def send(self, vector: int, row, n, y):
        self.exchange(vector).send(self.place(vector, row, n), [y])

    def send_rounded(self, vector: int, row, n, y, gamma, group: int, is_halved):
        """By all lanes of a warp: 8 neighbouring lanes' numbers, rounded for the product that reads them."""
        *words, squares = rounded_words(y, gamma, group, is_halved)
        with lanes.when(lanes.thread() % 8 == 0):
            exchange = self.exchange(vector)
            at = self.place(vector, row, n) // 2
            exchange.send_four(at, [*words, memory.tagged(squares, exchange.tag)])

    def receive(self, vector: int, places: list) -> list[list]:
        """Wait for 8 float32 from each (row, column) of a vector on."""
        width, starts = self.widths[vector], []
        for row, at in places:  # what is known is a part of the instruction
            starts.append((at, row * width) if isinstance(row, int) else (at + row * width, 0))
        return self.exchange(vector).receive_eights(starts)

    def attend(self):
        """Attention, in those blocks that have a share of it."""
        launched, attention = self.launch, self.launch.attention
        exchange = Exchange(launched.workspace, attention.rows * sum(self.widths), self.tag)

        def load_qkv(row, columns):
            begin = row * self.widths[QKV]
            places = [((begin + first, more), 4) for first, more in columns]
            return Exchange(launched.workspace, 0, self.tag).receive(places)

        with lanes.when(lanes.block() < attention.blocks):
            attention.run(
                launched.cache, launched.bounds, index(self.layer), launched.attention_smem, load_qkv,
                lambda y, row, n: self.send(ATTENDED, row, n, y), exchange,
                next_layer=index(self.clamped(self.layer + 1)),
            )  # fmt: skip
            lanes.block_barrier()
