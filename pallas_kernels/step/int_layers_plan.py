"""How blocks and warps share the products of int_layers.py, and what has room in shared memory."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pallas_kernels import device
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.attention import decode_plan
from pallas_kernels.attention.decode_plan import WARPS
from pallas_kernels.gpu import shared_memory
from pallas_kernels.matmul.int_mma import decode_plan as int_decode_plan
from pallas_kernels.matmul.int_mma.decode_block import scratch
from pallas_kernels.matmul.int_mma.decode_plan import IntegerProduct
from pallas_kernels.step.layer_products_plan import Phase, phase_of

OUT, GATE_UP, DOWN, NEXT_QKV = range(4)  # products
MOST_ROWS = 4  # with 8 the products of 8 warps take longer than launches of 16 (LOG.md)
# Of a warp's ring: the more is on its way, the longer activations wait (LOG.md). So it is at most a part of
# what a block has of a layer, but for small layers.
LEAST_DEPTH, MOST_DEPTH = 2, 4
PART_OF_LAYER, SMALL_LAYER = 4.5, 48 * 1024
# An item of a product with one matrix is of two tiles, if so it takes at most so much of a slot that has gate
# and up: what is on its way while attention runs counts (LOG.md).
MOST_OF_SLOT = 1.25

# Of each product, and of each combination of formats that layers have, how it is shared out.
Products = tuple[tuple[IntegerProduct, ...], ...]


class Planned(NamedTuple):
    """products  of o, gate and up, down, next q, k, v: one for each combination of formats that layers have
    depths, slot_bytes  of a warp in each ring
    """

    products: Products
    depths: tuple[int, ...]
    slot_bytes: tuple[int, ...]

    def blocks(self, number: int) -> int:
        """The first so many have a part of a product."""
        return max(sum(part.blocks for part in product.plan.parts) for product in self.products[number])


def plan(
    phases: Sequence[Sequence[Phase]], rows: int, attention_words: int, bits: int, eps: float,
    activation: Activation = SILU,
) -> Planned | None:  # fmt: skip
    """For the default device, with one ring for all products; None where it has no room for two items of
    each warp.

    phases  of each product, as Planned has them
    """
    sizes = phases, lambda _: rows, bits, eps, activation
    most = blocks_of_every_layer(shared_out(*sizes))
    products = in_pairs(shared_out(*sizes, most=lambda _: most))
    slot_bytes, layer = slots_of(products), layer_bytes(products)

    def on_its_way(depth: int) -> int:
        return min(WARPS * depth * slot_bytes, layer)

    for depth in range(MOST_DEPTH, LEAST_DEPTH - 1, -1):
        few = on_its_way(depth) <= max(layer / PART_OF_LAYER, SMALL_LAYER)
        if (few or depth == LEAST_DEPTH) and fits(products, attention_words, WARPS * depth * slot_bytes):
            return Planned(products, (depth,), (slot_bytes,))
    return None


def blocks_of_every_layer(products: Products) -> int:
    """The first so many have something to do in every layer, whatever its formats. No others may have
    something to do in some: they would run ahead, and take what a layer leaves for what the third behind it
    does, which has the same tag (gpu/exchange.py)."""

    def fewest(each: Sequence[IntegerProduct]) -> int:
        return min(sum(part.blocks for part in p.plan.parts) for p in each)

    return max(map(fewest, products))


def layer_bytes(products: Products) -> int:
    """Bytes of a layer's weights that one block multiplies, at most."""
    return sum(
        max(part.tiles * part.item_bytes(p.matrices) * p.steps for p in each for part in p.plan.parts)
        for each in products
    )


def shared_out(
    phases: Sequence[Sequence[Phase]], rows: Callable[[int], int], bits: int, eps: float,
    activation: Activation, most: Callable[[int], int] = lambda _: device.multiprocessors(),
    wide: Callable[[int], int] = lambda _: 1,
) -> Products:  # fmt: skip
    """The products among blocks of 8 warps.

    rows  number of a product -> rows of its activations
    most  number of a product -> blocks that may share it
    wide  number of a product -> matrices that are multiplied side by side, as one of as many columns
    """

    def product(number: int, phase: Phase) -> IntegerProduct:
        parts = int_decode_plan.share_out(phase.parts, phase.formats, most(number))
        padded = int_decode_plan.columns_of_rows(rows(number))[1]
        plan = int_decode_plan.Plan(WARPS, int_decode_plan.together(parts, padded), parts)
        columns = phase.columns * wide(number)
        return IntegerProduct(plan, rows(number), columns, len(phase.parts[0]), eps, bits, activation)

    return tuple(tuple(product(number, phase) for phase in each) for number, each in enumerate(phases))


def in_pairs(products: Products, numbers: Sequence[int] = (OUT, DOWN, NEXT_QKV)) -> Products:
    """The same, with items of two tiles, of products with these numbers, where these are no larger than
    MOST_OF_SLOT allows."""
    most = MOST_OF_SLOT * slots_of(products[GATE_UP : GATE_UP + 1])

    def paired(p: IntegerProduct) -> IntegerProduct:
        parts = p.plan.parts
        several = p.matrices == 1 and max(part.tiles for part in parts) > 1
        fit = several and max(part.item_bytes(2) for part in parts) <= most
        return dataclasses.replace(p, tiles_of_item=2) if fit else p

    return tuple(
        tuple(map(paired, each)) if number in numbers else each for number, each in enumerate(products)
    )


def slots_of(products: Sequence[Sequence[IntegerProduct]]) -> int:
    """Bytes of a ring's slot, which may have an item of any of these."""
    return max(part.item_bytes(p.units) for each in products for p in each for part in p.plan.parts)


def fits(products: Products, attention_words: int, *others: int) -> bool:
    """Whether shared memory has room for buffers of so many bytes beside scratch_words."""
    words = scratch_words(products, attention_words)
    taken = shared_memory.bytes_taken(*(4 * count for count in words.values()), *others)
    return taken <= device.shared_bytes()


def scratch_words(products: Products, attention_words: int) -> dict[str, int]:
    """Shared memory besides the rings. Attention has that of a product's integers."""
    own = {name: ref.shape[0] for name, ref in scratch([p for each in products for p in each]).items()}
    return {**own, "q_smem": max(own["q_smem"], attention_words)}


def refuses(rows: int, hidden: int, ffn: int, heads: tuple[int, int, int], bits: int, layers) -> str | None:
    """Why layers without experts cannot be one launch on the default device, or None.

    heads   of queries, of keys, and their width
    layers  of each, (format, rows) of the parts of q, k and v, of o, gate, up and down
    """
    if rows > MOST_ROWS:
        return f"with weights of 2 to 8 bits it is for {MOST_ROWS} rows at most; {rows} were asked for"
    if any(gate != up for _, _, gate, up, _ in layers):
        return "gate and up have different formats"
    attention = attention_of(rows, *heads)
    if attention.team != WARPS:
        return f"{heads[0]} query heads, rows: {rows}, are more than blocks of attention"
    if plan(phases_of(hidden, ffn, heads, layers), rows, attention.scratch, bits, 0.0) is None:
        return f"integers of {ffn} activations, rows: {rows}, leave no room for weights on their way"
    return None


def attention_of(rows: int, query_heads: int, kv_heads: int, head_dim: int) -> decode_plan.Plan:
    """As far as its shared memory depends on it, of rows of one sequence, which need most."""
    group, blocks = query_heads // kv_heads, device.multiprocessors()
    return decode_plan.Plan(rows, kv_heads, group, head_dim, 1, 1, blocks, True, 0.0, False, tokens=rows)


def phases_of(hidden: int, ffn: int, heads: tuple[int, int, int], layers) -> list[list[Phase]]:
    """Shapes of each product's weights, as `plan` takes them; arguments as in `refuses`."""
    query_heads, _, head_dim = heads
    sizes = ((1, query_heads * head_dim, 1), (2, hidden, 2), (4, ffn, 1), (0, hidden, 1))
    return [
        [phase_of(parts, columns, matrices) for parts in dict.fromkeys(layer[i] for layer in layers)]
        for i, columns, matrices in sizes
    ]
