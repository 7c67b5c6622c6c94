"""How blocks and warps share the products of experts_layers.py, and what has room in shared memory."""

from collections.abc import Sequence
from typing import NamedTuple

from pallas_kernels import device
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.attention import decode_plan
from pallas_kernels.attention.decode_plan import WARPS
from pallas_kernels.experts.router import Experts
from pallas_kernels.gpu import shared_memory
from pallas_kernels.matmul.int_mma import decode_plan as int_decode_plan
from pallas_kernels.matmul.int_mma.decode_block import scratch
from pallas_kernels.matmul.int_mma.decode_plan import IntegerProduct
from pallas_kernels.step.layer_products_plan import Phase, phase_of
from pallas_kernels.tiles import TILE_COLUMNS

OUT, GATE_UP, DOWN, NEXT_QKV = range(4)  # products


class Planned(NamedTuple):
    """products  of o, gate and up, down, next q, k, v: one for each combination of formats that layers have
    depths, slot_bytes  of a warp in the ring of o and next q, k, v; in that of experts
    """

    products: tuple[tuple[IntegerProduct, ...], ...]
    depths: tuple[int, int]
    slot_bytes: tuple[int, int]

    def blocks(self, number: int) -> int:
        """The first so many have a part of a product."""
        return max(sum(part.blocks for part in product.plan.parts) for product in self.products[number])


def plan(
    phases: Sequence[Sequence[Phase]], experts: Experts, attention_words: int, bits: int, eps: float,
    activation: Activation = SILU,
) -> Planned | None:  # fmt: skip
    """Of one row for the default device; None where there is no room for two items of a warp in each ring, or
    an expert has less than a block.

    phases  of each product, as Planned has them
    """
    blocks = device.multiprocessors()
    if blocks < experts.used:
        return None
    products = []
    for number, each in enumerate(phases):
        wide, most = experts.used if number == DOWN else 1, blocks
        if number == GATE_UP:
            most = blocks // experts.used
        placed = [int_decode_plan.share_out(phase.parts, phase.formats, most) for phase in each]
        products.append(
            tuple(
                IntegerProduct(
                    int_decode_plan.Plan(WARPS, int_decode_plan.together(parts, 1), parts), 1,
                    phase.columns * wide, len(phase.parts[0]), eps, bits, activation,
                )
                for phase, parts in zip(each, placed, strict=True)
            )
        )  # fmt: skip
    rings = [products[OUT] + products[NEXT_QKV], products[GATE_UP] + products[DOWN]]
    items = [[(part, p) for p in ring for part in p.plan.parts] for ring in rings]
    slots = [max(part.item_bytes(p.matrices) for part, p in ring) for ring in items]
    # All of a product's items at once, if there is room.
    depths = [max(2, *(part.tiles * p.per_warp for part, p in ring)) for ring in items]
    rest = [size * 4 for size in scratch_words(products, experts, attention_words).values()]
    while True:
        taken = [WARPS * depth * size for depth, size in zip(depths, slots, strict=True)]
        if shared_memory.bytes_taken(*rest, *taken) <= device.shared_bytes():
            return Planned(tuple(products), (depths[0], depths[1]), (slots[0], slots[1]))
        if max(depths) == 2:
            return None
        depths[max((0, 1), key=lambda i: (depths[i] > 2, taken[i]))] -= 1


def scratch_words(products, experts: Experts, attention_words: int) -> dict[str, int]:
    """Shared memory besides the rings."""
    own = {name: ref.shape[0] for name, ref in scratch([p for each in products for p in each]).items()}
    return {**own, "attention_smem": attention_words, "dots_smem": 2 * WARPS, "chosen_smem": 2 * experts.used}


def refuses(
    hidden: int, ffn: int, heads: tuple[int, int, int], experts: Experts, bits: int, layers
) -> str | None:
    """Why layers cannot be one launch on the default device, or None.

    ffn     of an expert
    heads   of queries, of keys, and their width
    layers  of each, (format, rows) of the parts of q, k and v, of o, gate, up and down
    """
    if len({parts for layer in layers for parts in layer[2:4]}) > 1:
        return "gate and up, or those of different layers, have different formats"
    if hidden > 4 * WARPS * TILE_COLUMNS:
        return f"hidden is {hidden} wide; the router has room for {4 * WARPS * TILE_COLUMNS}"
    query_heads, kv_heads, head_dim = heads
    attention = decode_plan.Plan(
        1, kv_heads, query_heads // kv_heads, head_dim, 1, 1, device.multiprocessors(), True, 0.0, False
    )
    if attention.team != WARPS:
        return f"{query_heads} query heads are more than blocks of attention"
    sizes = ((1, query_heads * head_dim, 1), (2, hidden, 2), (4, ffn, 1), (0, hidden, 1))
    phases = [
        [phase_of(parts, columns, matrices) for parts in dict.fromkeys(layer[i] for layer in layers)]
        for i, columns, matrices in sizes
    ]
    if plan(phases, experts, attention.scratch, bits, 0.0) is None:
        return f"{experts.used} experts of {ffn} activations leave no room for weights on their way"
    return None
