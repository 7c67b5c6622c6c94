"""How blocks and warps share the products of experts_layers.py, and what has room in shared memory."""

from collections.abc import Sequence

from pallas_kernels import device
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.attention.decode_plan import WARPS
from pallas_kernels.experts.router import Experts
from pallas_kernels.step import int_layers_plan
from pallas_kernels.step.int_layers_plan import DOWN, GATE_UP, NEXT_QKV, OUT, Planned
from pallas_kernels.step.layer_products_plan import Phase
from pallas_kernels.tiles import TILE_COLUMNS

MOST_ROWS = 8
MOST_LOGITS = 8  # that a block of a hidden size of 2048 makes at once: each takes 8 registers


def blocks_of_row(rows: int) -> int:
    """How many blocks each of a step's rows has for its router and experts."""
    return device.multiprocessors() // rows


def plan(
    phases: Sequence[Sequence[Phase]], rows: int, experts: Experts, attention_words: int, bits: int,
    eps: float, activation: Activation = SILU,
) -> Planned | None:  # fmt: skip
    """For the default device, with a ring for o and next q, k and v and one for experts; None where there is
    no room for two items of a warp in each ring, or a row's expert has less than a block.

    phases  of each product, as Planned has them. Of experts they are of one row
    """
    blocks, row_blocks = device.multiprocessors(), blocks_of_row(rows)
    if row_blocks < experts.used:
        return None

    def shared_out(most: int) -> int_layers_plan.Products:
        limits = {GATE_UP: row_blocks // experts.used, DOWN: min(row_blocks, most)}
        return int_layers_plan.shared_out(
            phases, lambda number: 1 if number in limits else rows, bits, eps, activation,
            most=lambda number: limits.get(number, most),
            wide=lambda number: experts.used if number == DOWN else 1,
        )  # fmt: skip

    # A block that makes logits has that to do in every layer.
    with_logits = rows * row_blocks if experts.count >= row_blocks else experts.count
    every_layer = int_layers_plan.blocks_of_every_layer(shared_out(blocks))
    products = int_layers_plan.in_pairs(shared_out(max(every_layer, with_logits)), (DOWN,))
    rings = [products[OUT] + products[NEXT_QKV], products[GATE_UP] + products[DOWN]]
    slots = [int_layers_plan.slots_of([ring]) for ring in rings]
    # All of a product's items at once, if there is room.
    depths = [max(2, *(part.tiles * p.per_warp for p in ring for part in p.plan.parts)) for ring in rings]
    own = [4 * words for words in scratch_words(experts).values()]
    while True:
        taken = [WARPS * depth * size for depth, size in zip(depths, slots, strict=True)]
        if int_layers_plan.fits(products, attention_words, *own, *taken):
            return Planned(products, tuple(depths), tuple(slots))
        if max(depths) == 2:
            return None
        depths[max((0, 1), key=lambda i: (depths[i] > 2, taken[i]))] -= 1


def scratch_words(experts: Experts) -> dict[str, int]:
    """Shared memory besides what layers without experts have."""
    return {"dots_smem": (1 + MOST_LOGITS) * WARPS, "chosen_smem": 2 * experts.used}


def refuses(
    rows: int, hidden: int, ffn: int, heads: tuple[int, int, int], experts: Experts, bits: int, layers
) -> str | None:
    """Why layers cannot be one launch on the default device, or None.

    ffn     of an expert
    heads   of queries, of keys, and their width
    layers  of each, (format, rows) of the parts of q, k and v, of o, gate, up and down
    """
    if rows > MOST_ROWS:
        return f"with experts it is for {MOST_ROWS} rows at most; {rows} were asked for"
    if blocks_of_row(rows) < experts.used:
        return f"rows: {rows}, with {experts.used} experts each, need more than {blocks_of_row(1)} blocks"
    if len({parts for layer in layers for parts in layer[2:4]}) > 1:
        return "gate and up, or those of different layers, have different formats"
    if hidden > 4 * WARPS * TILE_COLUMNS:
        return f"hidden is {hidden} wide; the router has room for {4 * WARPS * TILE_COLUMNS}"
    attention = int_layers_plan.attention_of(rows, *heads)
    if attention.team != WARPS:
        return f"{heads[0]} query heads, rows: {rows}, are more than blocks of attention"
    phases = int_layers_plan.phases_of(hidden, ffn, heads, layers)
    if plan(phases, rows, experts, attention.scratch, bits, 0.0) is None:
        room = f"rows: {rows}, leave no room for weights on their way"
        return f"{experts.used} experts of {ffn} activations, {room}"
    return None
