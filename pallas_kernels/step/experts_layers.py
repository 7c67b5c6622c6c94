"""All layers of a decode step of up to 8 rows whose channels are mixed by experts, in one launch, a block on
each multiprocessor, for weights of 2 to 8 bits.

    q, k, v -> [attention] -> [o, + x] -> x -> [norm, router, top-k] -> [norm, gate, up, activation]
            -> [down of the chosen, their sum, + x] -> x -> [norm, next layer's q, k, v]

It is the launch of int_layers.py. What experts add:

    a row     has as many blocks as any other row, from the router on to down
    router    each makes some logits of its row, reads all of them, and takes the largest itself
    gate, up  a chosen expert has blocks of its own, among its row's
    down      the chosen experts' matrices side by side are one matrix, of as many columns as they have in
              all; what it is multiplied by are their hidden vectors times the router's weights. Its outputs
              are shared out among the row's blocks

    blocks      0   1   2 | 3   4   5 | 6     of two rows with three of five experts each
    o, q, k, v  each has some outputs of both rows
    router      0,3 1,4 2 | 0,3 1,4 2 | .     experts whose logits a block makes
    gate, up    3   0   1 | 1   2   0 | .     those that the row has chosen

An expert that several rows have chosen is read by the blocks of each, at about the same time: once out of
memory and then out of the L2 cache.

Two rings bring weights: one those that are known ahead (o, next q, k, v), one those of experts, from the
moment that they are chosen. All blocks must run at once.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from pallas_kernels import cache_layouts, device
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.attention.decode_plan import WARPS
from pallas_kernels.experts import router
from pallas_kernels.experts.router import Experts
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.exchange import tag
from pallas_kernels.gpu.values import as_real, index, integer, minimum, real, select, sum_of_squares, total
from pallas_kernels.matmul.epilogue import inverse_rms, over_warps
from pallas_kernels.matmul.int_mma.activations_shared import WarpActivations
from pallas_kernels.matmul.int_mma.decode_block import Block
from pallas_kernels.matmul.int_mma.decode_ring import Ring, Share
from pallas_kernels.qtensor import LayerStack, QTensor
from pallas_kernels.step.experts_plan import MOST_LOGITS, blocks_of_row, plan, scratch_words
from pallas_kernels.step.inputs import StepInputs
from pallas_kernels.step.int_layers import (
    HIDDEN,
    LOGITS,
    MIDDLE,
    OUTPUT,
    Layer,
    Weights,
    attention_of,
    launched,
    query_width,
    stacked,
)
from pallas_kernels.step.int_layers_plan import DOWN, GATE_UP, NEXT_QKV, OUT
from pallas_kernels.step.layer_products_plan import Phase
from pallas_kernels.tiles import TILE_COLUMNS

KNOWN, CHOSEN = range(2)  # rings


def run(
    qkv: jax.Array, x: jax.Array, stacks: Sequence[LayerStack], router_stack: LayerStack,
    inputs: StepInputs, *, experts: Experts, eps: float, interleaved: bool, activation: Activation = SILU,
    tokens: int = 1,
) -> tuple[jax.Array, cache_layouts.Pages, cache_layouts.Pages]:  # fmt: skip
    """`experts_layers` of a model's stacks: of q, k and v, of o, gate, up and down."""
    weights, where, settings = stacked(stacks, by_expert=(GATE_UP, DOWN))
    (w_router,) = router_stack.parts
    assert isinstance(w_router, QTensor)
    kernel = functools.partial(
        experts_layers, experts=experts, eps=eps, interleaved=interleaved, activation=activation,
        tokens=tokens, **settings,
    )  # fmt: skip
    return jax.custom_batching.sequential_vmap(kernel)(
        qkv, x, weights, where, w_router.fields["w"].reshape(-1, *w_router.shape), inputs
    )


@functools.partial(
    jax.jit, static_argnames=("formats_of", "experts", "eps", "interleaved", "bits", "activation", "tokens")
)
def experts_layers(
    qkv: jax.Array,
    x: jax.Array,
    weights: Weights,
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
    tokens: int = 1,
) -> tuple[jax.Array, cache_layouts.Pages, cache_layouts.Pages]:
    """One token of each row through all layers, whose q, k and v of the first are given.

    x <- x + W_o attention(q, k, v);  x <- x + sum_e w_e W_down,e activation(W_gate,e n, W_up,e n),
    n = norm(x);  q, k, v <- W_qkv norm(x), of the next layer

    weights    as `int_layers` has them, of experts over layers times experts
    router     float32, float16 or bfloat16 [L, count, hidden]
    The rest as for `int_layers`. Which experts a token has is decided on logits of 22 bits of mantissa; of
    equal ones the lower index comes first.
    """
    (rows, hidden), q = x.shape, query_width(qkv, inputs)
    phases = [
        [
            Phase(parts, formats, parts[0][0]["words"].shape[2] * TILE_COLUMNS)
            for parts, formats in zip(*each, strict=True)
        ]
        for each in zip(weights, formats_of, strict=True)
    ]
    attention = attention_of(inputs, q, eps, interleaved, tokens)
    planned = plan(phases, rows, experts, attention.scratch, bits, eps, activation)
    if planned is None:
        raise NotImplementedError(
            f"experts_layers: {rows} rows of {bits} bits leave no room in {device.shared_bytes()} bytes of "
            "shared memory, or no block for each of their experts; split the rows"
        )
    widths = [qkv.shape[1], q, hidden, experts.logits, experts.used * phases[DOWN][0].columns, hidden]
    return launched(
        "experts_layers", functools.partial(_Layer, experts), planned, attention, widths, qkv, x, weights,
        where, inputs, scratch_words(experts), router=router,
    )  # fmt: skip


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


class _Layer(Layer):
    """A layer of it.

    row     whose experts this block has
    inside  its number among the row's blocks; large where there is no such row
    row_blocks, own_logits  blocks of a row, and logits that each of them makes at most
    """

    def __init__(self, experts: Experts, launch, layer):
        super().__init__(launch, layer)
        self.experts, self.router, self.rows = experts, launch.more["router"], launch.attention.rows
        if self.rows > 1:
            self.x_products = (DOWN,)  # x behind o is made by other blocks than x behind down
        self.dots_smem, self.chosen_smem = launch.more["dots_smem"], launch.more["chosen_smem"]
        self.row_blocks = blocks_of_row(self.rows)
        self.own_logits = -(-experts.count // self.row_blocks)
        row = integer(lanes.block()) // self.row_blocks
        self.inside = select(row < self.rows, integer(lanes.block()) - row * self.row_blocks, 2**30)
        self.row = 0 if self.rows == 1 else index(minimum(row, self.rows - 1))

    def begun(self) -> list:
        return []

    def run(self, state: list) -> list:
        ring = self._known().filled()
        self.attend()
        ring = self.product(OUT, self._known(), ring, 0)
        self._mix()
        self.product(NEXT_QKV, self._known(), ring, 1)
        memory.wait_copies(0)
        return state

    def _known(self) -> Ring:
        """The ring of o and the next q, k and v. It is built where it is used, as a window is."""
        return Ring(*self.ring_of((OUT, NEXT_QKV), KNOWN, {NEXT_QKV: self.layer + 1}))

    def _mix(self):
        """Router and experts."""
        expert_blocks = self.planned.blocks(GATE_UP)
        number = self.inside // expert_blocks
        inside = select(number < self.experts.used, self.inside - number * expert_blocks, 2**30)
        choosing = self.inside < max(expert_blocks * self.experts.used, self.planned.blocks(DOWN))
        expert = lambda: memory.load(self.chosen_smem, minimum(number, self.experts.used - 1))  # noqa: E731
        gate_up = self.streams(GATE_UP, self.layer, inside)
        (product,) = self.planned.products[GATE_UP]
        begin = index(number) * (self.widths[HIDDEN] // self.experts.used)
        block = self.block(GATE_UP, product, gate_up[0].share, begin)
        at_once = min(self.own_logits, max(1, MOST_LOGITS // product.per_warp))

        def mixed():
            rows = self._router_rows(block, 0, at_once)  # on their way before x is there
            loaded = block.load()
            self._send_logits(block, loaded, rows)
            self._choose(block)
            streams = [s._replace(layer=s.layer * self.experts.count + expert()) for s in gate_up]
            phases = [streams, self._chosen_streams()]
            smem = self.launch.more[f"ring_{CHOSEN}_smem"]
            ring = Ring(phases, smem, self.planned.depths[CHOSEN], self.planned.slot_bytes[CHOSEN])
            state = ring.filled()
            run = lambda: block.run(loaded, ring, state, 0)  # noqa: E731
            self.product(DOWN, ring, lanes.choose(gate_up[0].share.has_tiles, run, state), 1)

        # Blocks that have logits and nothing else: who waits for others' words must make some later.
        with lanes.when(~choosing & (self.inside < min(self.row_blocks, self.experts.count))):
            rows = self._router_rows(block, 0, at_once)
            self._send_logits(block, block.load(), rows)
        with lanes.when(choosing):
            mixed()

    def _chosen_streams(self) -> list[_ChosenStream]:
        load = functools.partial(memory.load, self.chosen_smem)
        expert_steps = self.planned.products[DOWN][0].steps // self.experts.used
        return [
            _ChosenStream(s.share, s.weight_gmem, s.layer * self.experts.count, load, expert_steps)
            for s in self.streams(DOWN, self.layer, self.inside)
        ]

    def row_of(self, number: int, row):
        """A product of experts has one row, this block's."""
        return self.row if number in (GATE_UP, DOWN) else row

    def residual(self, number: int) -> Callable | None:
        """With several rows o and down add to x as other blocks have sent it, with 22 bits of mantissa."""
        if self.rows == 1 or number not in (OUT, DOWN):
            return super().residual(number)
        exchange = self.exchange(MIDDLE)
        if number == OUT:
            exchange = self.exchange(OUTPUT)
            exchange = dataclasses.replace(exchange, tag=tag(self.layer + 2))  # as the layer before has it

        def received(row, n):
            vector = MIDDLE if number == DOWN else OUTPUT
            (x,) = exchange.receive_each([(index(self.place(vector, self.row_of(number, row), n)), 0)])
            return x

        return received

    def load(self, number: int, places: list) -> list[list]:
        """What is multiplied by down: hidden values times their experts' weights."""
        if number != DOWN:
            return super().load(number, places)
        ffn, used = self.widths[HIDDEN] // self.experts.used, self.experts.used
        weights = [as_real(memory.load(self.chosen_smem, at // ffn + used)) for _, at in places]
        received = super().load(number, places)
        return [[v * w for v in values] for values, w in zip(received, weights, strict=True)]

    def _router_rows(self, block: Block, first: int, count: int) -> list[list[list]]:
        """The router's weights for `count` of the logits that this block computes, from its number `first`
        on: by step, expert and column, as this lane has the columns of x. Two neighbouring logits of a block
        are those of experts that are row_blocks apart."""
        activations = block.activations
        assert isinstance(activations, WarpActivations)  # nothing is rotated: see problems.Step
        columns = activations.columns(activations.steps_at(0))

        def row(number: int, column):
            expert = minimum(self.inside + number * self.row_blocks, self.experts.count - 1)
            halves = [memory.load_reals(4, self.router, [self.layer, expert, column + at]) for at in (0, 4)]
            return [v for half in halves for v in half]

        return [[row(number, column) for number in range(first, first + count)] for column in columns]

    def _send_logits(self, block: Block, loaded, router_rows: list[list[list]]):
        """Send the logits of this block's experts for its row. The row's first block also sends those of the
        places behind the last expert, which nobody may choose."""
        for first in range(0, self.own_logits, len(router_rows[0])):
            if first:
                lanes.block_barrier()  # the sums before were read
                count = min(len(router_rows[0]), self.own_logits - first)
                router_rows = self._router_rows(block, first, count)
            for at, value in enumerate(self._dots_and_squares(block, loaded, router_rows)):
                value = lanes.warp_sum_real(value)
                with lanes.when(block.lane == 0):
                    memory.store(value, self.dots_smem, block.warp + at * WARPS)
            lanes.block_barrier()
            number = integer(lanes.thread())
            expert = self.inside + (number + first) * self.row_blocks
            with lanes.when((number < len(router_rows[0])) & (expert < self.experts.count)):
                dot, squares = (
                    over_warps(lambda w, at=at: memory.load(self.dots_smem, at * WARPS + w), WARPS)
                    for at in (index(number) + 1, 0)
                )
                logit = dot * inverse_rms(squares, block.sizes.columns, block.sizes.eps)
                self.send(LOGITS, self.row, index(expert), logit)
        missing = lanes.thread() + self.experts.count
        with lanes.when((self.inside == 0) & (missing < self.experts.logits)):
            self.send(LOGITS, self.row, missing, real(router.NONE))

    def _dots_and_squares(self, block: Block, loaded, router_rows: list[list[list]]) -> list:
        """This lane's part of the sum of x^2, and for each expert's weights w of the sum of x gamma w."""
        _, x, gammas = loaded
        squares, dots = real(0), [real(0)] * len(router_rows[0])
        for u, (rows, gamma) in enumerate(zip(router_rows, gammas, strict=True)):
            counts = integer(u) < block.share.own_steps
            v = [select(counts, value, 0.0) for value in x[u, 0]]
            squares = sum_of_squares(v, squares)
            v = [a * g for a, g in zip(v, gamma, strict=True)]
            for i, row in enumerate(rows):
                dots[i] = total([dots[i], *(a * w for a, w in zip(v, row, strict=True))])
        return [squares, *dots]

    def _choose(self, block: Block):
        """The chosen experts and the bits of their weights into shared memory."""
        with lanes.when(block.warp == 0):
            each = self.experts.logits // router.LANES
            begin = self.place(LOGITS, self.row, index(block.lane * each))
            places = [((begin, more), 4) for more in range(0, each, 4)]
            logits = self.exchange(LOGITS).receive(places)
            router.choose(logits, block.lane, self.experts, self.chosen_smem)
        lanes.block_barrier()
