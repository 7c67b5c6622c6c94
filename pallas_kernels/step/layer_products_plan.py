"""How blocks and warps share the products of layer_products.py, and what has room in shared memory."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import device, formats
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.gpu import shared_memory
from pallas_kernels.matmul import rotated_columns
from pallas_kernels.matmul.int_mma import decode as int_decode
from pallas_kernels.matmul.int_mma import decode_plan as int_decode_plan
from pallas_kernels.matmul.int_mma.activations_summed import MOST_STEPS
from pallas_kernels.matmul.int_mma.decode_plan import IntegerProduct
from pallas_kernels.qtensor import from_blocks, tile
from pallas_kernels.tiles import TILE_COLUMNS, TILE_ROWS

# Slots of a warp's ring at most: what is on its way keeps activations waiting (LOG.md). 1-bit weights have
# small slots, so more of them: as many bytes as two of Q3_K. No GPU has chosen that number yet.
DEPTH, DEPTH_OF_1_BIT = 2, 5
Fields = dict[str, Any]  # of one matrix, as its format's `tile` makes them: stacks of one layer


class Phase(NamedTuple):
    """A product's weights: rows below rows (two matrices each for SwiGLU), the format of each part, and how
    many columns they have; and the bits to which activations are rounded."""

    parts: tuple[tuple[Fields, ...], ...]
    formats: tuple[str, ...]
    columns: int
    bits: int = 8

    @property
    def steps(self) -> int:
        """Of 256 columns, the last of which may go on behind them."""
        return -(-self.columns // TILE_COLUMNS)


class Planned(NamedTuple):
    """The products of a launch, and what a warp's ring has: slots, and bytes of each."""

    products: tuple[IntegerProduct, ...]
    depth: int
    slot_bytes: int


def plan(
    phases: Sequence[Phase], rows: int, eps: float, rotated: bool = False,
    activation: Activation = SILU, post_norms: bool = False,
) -> Planned | None:  # fmt: skip
    """For the default device; None where so many rows leave no room for weights on their way. rotated: blocks
    rotate activations. post_norms: norms follow o and down, and each block has the residual stream.

    Of the numbers of warps that leave room for two items or more to each, the one with the fewest idle over
    the columns, weighted by bytes; of equals the largest."""
    padded = int_decode_plan.columns_of_rows(rows)[1]
    placed = [
        int_decode_plan.share_out(phase.parts, phase.formats, device.multiprocessors()) for phase in phases
    ]
    slot_bytes = max(
        part.item_bytes(len(phase.parts[0]))
        for phase, parts in zip(phases, placed, strict=True)
        for part in parts
    )
    families = {formats.family(format) for phase in phases for format in phase.formats}
    most_slots = DEPTH_OF_1_BIT if families == {"bit"} else DEPTH
    best = None
    for warps in (16, 12, 8):
        plans = [
            int_decode_plan.Plan(warps, int_decode_plan.together(parts, padded), parts) for parts in placed
        ]
        sizes = [
            int_decode_plan.scratch_bytes(plan, len(phase.parts[0]), phase.steps, padded, phase.bits)
            for phase, plan in zip(phases, plans, strict=True)
        ]
        taken = [*map(max, zip(*sizes, strict=True)), *[4 * rotated_words(phases, rows, warps)] * rotated]
        if post_norms:
            hidden = phases[1].columns
            if rows * -(-hidden // TILE_COLUMNS // warps) > MOST_STEPS:
                continue
            taken += [4 * rows * hidden, 4 * rows * warps]
        left = device.shared_bytes() - shared_memory.bytes_taken(*taken)
        left -= left % shared_memory.ALIGNMENT
        depth = min(most_slots, left // (warps * slot_bytes))
        idle = 0
        for phase, parts in zip(phases, placed, strict=True):
            tiles = sum(part.n_tiles * part.item_bytes(len(phase.parts[0])) for part in parts)
            idle += tiles * -(-phase.steps // warps) * warps
        if depth >= 2 and (best is None or idle < best[0]):
            best = idle, plans, depth
    if best is None:
        return None
    _, plans, depth = best
    products = tuple(
        IntegerProduct(plan, rows, phase.columns, len(phase.parts[0]), eps, phase.bits, activation)
        for phase, plan in zip(phases, plans, strict=True)
    )
    return Planned(products, depth, slot_bytes)


def phases_of(weights, formats_of, width: int, hidden: int, bits: Sequence[int]) -> list[Phase]:
    """Of a launch's weights, whose o has so many columns and whose other products that read x `hidden`."""
    gate_up = weights[1]
    ffn = sum(fields["words"].shape[1] for fields, *_ in gate_up) * TILE_ROWS
    columns = (width, hidden, ffn, hidden)
    return [Phase(*phase) for phase in zip(weights, formats_of, columns, bits, strict=False)]


def rotated_words(phases: Sequence[Phase], rows: int, warps: int) -> int:
    """Of shared memory, in which activations are rotated."""
    return max(rotated_columns.words(rows, phase.columns, warps) for phase in phases)


def refuses(
    rows: int, width: int, hidden: int, ffn: int, layer, following, *, bits: tuple[int, ...],
    rotated: bool = False, post_norms: bool = False,
) -> str | None:  # fmt: skip
    """Why a layer's products cannot be one launch on the default device, or None.

    width             inputs of o
    bits              of what each product reads
    layer, following  (format, rows) of the parts of q, k and v, of o, gate, up and down, of a layer and of
                      the next, or None
    rotated           whether weights are folded
    post_norms        whether norms follow o and down
    """
    if rotated and post_norms:
        return "norms follow a layer's halves, which blocks that rotate activations do not have"
    parts = [(layer[1], width), (layer[2], hidden, 2), (layer[4], ffn)]
    if following is not None:
        parts.append((following[0], hidden))
    phases = [phase_of(*part)._replace(bits=n) for part, n in zip(parts, bits, strict=False)]
    if layer[2] != layer[3]:
        return "gate and up have different formats"
    for phase in phases if rotated else ():
        for format in phase.formats:
            if not int_decode.blocks_rotate(format, phase.columns, rows):
                return f"blocks do not rotate {phase.columns} inputs of {format}, rows: {rows}"
    if plan(phases, rows, 0.0, rotated, post_norms=post_norms) is None:
        stream = f" and {rows} of the residual stream" * post_norms
        return f"integers of {rows} rows of {ffn} activations{stream} leave no room for weights on their way"
    return None


def phase_of(parts, columns: int, matrices: int = 1) -> Phase:
    """Shapes of weights: (format, rows) of their parts."""
    return Phase(
        tuple((tiles_of(format, n, columns),) * matrices for format, n in parts),
        tuple(format for format, _ in parts),
        columns,
    )


@functools.cache
def tiles_of(format: str, n: int, columns: int) -> Fields:
    """Shapes of what the format's `tile` makes of a stack of one matrix."""
    module = formats.get(format)
    blocks = (1, n, columns // module.WEIGHTS * module.BLOCK.itemsize)
    raw = jax.ShapeDtypeStruct(blocks, jnp.uint8)
    return jax.eval_shape(lambda raw: tile(from_blocks(raw, format)).fields, raw)
