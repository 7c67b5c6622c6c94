"""How the blocks of an integer product (decode.py) share its tiles, and what of it lies where in shared
memory. Tiles of 1 bit are shared alike (decode_planes.py)."""

import dataclasses
import math
from typing import NamedTuple

from pallas_kernels import device, formats
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.gpu import shared_memory
from pallas_kernels.matmul import rotated_columns
from pallas_kernels.tiles import TILE_COLUMNS, Lanes

BLOCK_WARPS = (16, 12, 8, 4)
MOST_DEPTH = 24  # items in a warp's ring
ROWS_TOGETHER = 16  # of all tiles between two barriers
SMALLEST_AT_ONCE = 4  # blocks of 4 warps that share a multiprocessor, if each gets 4 tiles or more
SMALL_BLOCK_COLUMNS = 8 * TILE_COLUMNS  # the most with which they are faster for one of several products
PLANE_STATS = 64  # bytes of shared memory for 256 columns of a row that is planes


class Part(NamedTuple):
    """One weight of a product: rows of the output that are of one format, and the blocks that have them.

    format, names, shapes   of the weight: its fields by name, what each has for a tile of 16 rows x 256
                            columns
    n_tiles, above          tiles of 16 rows that it has, and that the parts above it have
    first_block, blocks     blocks of threads that share it
    tiles                   of each of them
    depth                   items (256 columns of a tile, or of neighbours, of each matrix) that a warp has
                            in its ring
    """

    format: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    n_tiles: int
    above: int
    first_block: int
    blocks: int
    tiles: int
    depth: int

    def item_bytes(self, units: int) -> int:
        """Bytes of an item that has 256 columns of `units` tiles."""
        return 32 * units * sum(map(lane_bytes, self.shapes))


class Plan(NamedTuple):
    """How the blocks of a product work: warps of each, tiles between two barriers, and the parts."""

    warps: int
    together: int
    parts: tuple[Part, ...]


def columns_of_rows(rows: int) -> tuple[int, int]:
    """(rows a set of columns holds: 1, 2, 4 or 8; rows in all, padded to that)."""
    width = min(8, 2 ** math.ceil(math.log2(rows)))
    return width, -(-rows // width) * width


def share_out(parts, formats_of, blocks: int) -> tuple[Part, ...]:
    """The parts of a product with the blocks that have them, at most so many in all: so that the one with
    most bytes has as few as can be. Rings have no depth yet."""
    drafts, above = [], 0
    for format, (fields, *_) in zip(formats_of, parts, strict=True):
        names = tuple(sorted(fields))
        n_tiles = fields["words"].shape[1]
        shapes = tuple(_tile_shape(fields[name].shape, fields["words"].shape[2]) for name in names)
        drafts.append(Part(format, names, shapes, n_tiles, above, 0, 0, 0, 0))
        above += n_tiles
    sizes = [draft.item_bytes(1) for draft in drafts]
    largest = -(-above // blocks) + 1  # tiles of a block, were all as small as the smallest
    for most in sorted({tiles * size for size in sizes for tiles in range(1, len(parts) * largest + 1)}):
        tiles = [min(most // size, draft.n_tiles) for size, draft in zip(sizes, drafts, strict=True)]
        needed = [-(-draft.n_tiles // max(1, t)) for draft, t in zip(drafts, tiles, strict=True)]
        if min(tiles) and sum(needed) <= blocks:
            break
    else:
        raise AssertionError("no share of the blocks fits")
    first, placed = 0, []
    for draft, t, count in zip(drafts, tiles, needed, strict=True):
        placed.append(draft._replace(first_block=first, blocks=count, tiles=t))
        first += count
    return tuple(placed)


def _tile_shape(shape: tuple[int, ...], steps: int) -> tuple[int, ...]:
    """The shape that a tile of 256 columns has of a field of a stack. steps: the stack's columns by 256. A
    field with several entries for 256 columns has a first axis for them."""
    each = shape[2] // steps
    return shape[3:] if each == 1 else (each, *shape[3:], 1)


def together(placed: tuple[Part, ...], padded: int, most: int = ROWS_TOGETHER) -> int:
    """Tiles between two barriers: at least one. padded: rows of each; most: rows of all of them."""
    return max(1, min(max(part.tiles for part in placed), most // padded))


def makes_groups(plan: Plan) -> bool:
    """Whether warps have 32 neighbours of one row when they store what was multiplied (Block's in_groups):
    where each block has an even number of tiles of 16, and computes as many at once."""
    return plan.together % 2 == 0 and all(p.tiles % 2 == 0 and p.n_tiles % 2 == 0 for p in plan.parts)


def scratch_bytes(
    plan: Plan, matrices: int, steps: int, padded: int, bits: int, tiles_of_item: int = 1
) -> tuple[int, ...]:
    """Shared memory of a block besides its ring: q, stats, sums and squares (decode.py)."""
    sums = -(-plan.together // tiles_of_item) * tiles_of_item * matrices
    return (
        bits // 8 * padded * row_bytes(steps),
        max(stats_bytes(part.format, steps, padded, bits) for part in plan.parts),
        sums * 16 * padded * plan.warps * 4,
        padded * plan.warps * 4,
    )


def plan(
    parts, rows: int, formats_of, activation_bits: int, blocks: int | None = None, rotated: bool = False
) -> Plan | None:
    """The Plan for a product, or None where activations of so many rows leave no room for the weights.

    blocks: the most that this product may have in a launch that computes several, if each is alone on its
    multiprocessor; None: the launch computes this product only. rotated: blocks rotate activations.

    Of the numbers of warps that leave room for two items or more to each, the one with the fewest idle over
    the columns and room for 96 KiB on their way, if there is one; of equals the largest. A matrix of few
    columns and many outputs, as output matrices of small models are, has four blocks on a multiprocessor. So
    has a launch of several products whose columns keep 8 warps busy at most, with fewer tiles between
    barriers where there is no room for more. With 12 busy warps a large block is faster (LOG.md).
    """
    matrices, steps = len(parts[0]), parts[0][0]["words"].shape[2]
    padded = columns_of_rows(rows)[1]
    n_tiles, most = sum(fields["words"].shape[1] for fields, *_ in parts), blocks or device.multiprocessors()
    sizes_of_blocks = [(w, 1, ROWS_TOGETHER) for w in BLOCK_WARPS]
    if n_tiles >= SMALLEST_AT_ONCE**2 * most and (not blocks or steps * TILE_COLUMNS <= SMALL_BLOCK_COLUMNS):
        small = [(BLOCK_WARPS[-1], SMALLEST_AT_ONCE, r) for r in (ROWS_TOGETHER, ROWS_TOGETHER // 2)]
        sizes_of_blocks = [*small, *sizes_of_blocks] if blocks else [*sizes_of_blocks, small[0]]
    best = None
    for w, at_once, rows_together in sizes_of_blocks:
        placed = share_out(parts, formats_of, most * at_once)
        sizes = [part.item_bytes(matrices) for part in placed]
        draft = Plan(w, together(placed, padded, rows_together), placed)
        # The last is for the mailboxes of all_reduce.Sender, which most products do not have.
        taken = *scratch_bytes(draft, matrices, steps, padded, activation_bits), 1
        taken += (4 * rotated_columns.words(rows, steps * TILE_COLUMNS, w),) if rotated else ()
        room = shared_memory.bytes_of_block(device.shared_bytes(), at_once)
        left = room - shared_memory.bytes_taken(*taken)
        left -= left % shared_memory.ALIGNMENT
        depths = [min(MOST_DEPTH, left // (w * size)) for size in sizes]
        in_flight = min(at_once * w * depth * size for depth, size in zip(depths, sizes, strict=True))
        alone = at_once == 1 and w == 4
        cost = -(-steps // w) * w * (1 + (in_flight < 96 * 1024) + alone)
        if min(depths) >= 2 and (best is None or cost < best[0]):
            # No more slots than a warp has items: before its first product it visits all of them.
            items = [part.tiles * -(-steps // w) for part in placed]
            planned_parts = tuple(
                part._replace(depth=max(2, min(slots, most)))
                for part, slots, most in zip(placed, depths, items, strict=True)
            )
            best = cost, draft._replace(parts=planned_parts)
    return best and best[1]


@dataclasses.dataclass(frozen=True)
class IntegerProduct:
    """Static sizes: rows and columns of the activations, matrices of a part, and how blocks share them.

    tiles_of_item  neighbouring tiles whose 256 columns are one item of a warp's ring
    """

    plan: Plan
    rows: int
    columns: int
    matrices: int
    eps: float
    bits: int
    activation: Activation = SILU
    tiles_of_item: int = 1

    @property
    def units(self) -> int:
        """Tiles in an item, of all matrices."""
        return self.matrices * self.tiles_of_item

    @property
    def n_tiles(self) -> int:
        """Of 16 rows, of all parts."""
        return sum(part.n_tiles for part in self.plan.parts)

    @property
    def steps(self) -> int:
        """Of 256 columns."""
        return -(-self.columns // TILE_COLUMNS)

    @property
    def width(self) -> int:
        """Rows that a set of columns of the tensor core holds."""
        return columns_of_rows(self.rows)[0]

    @property
    def padded(self) -> int:
        """Rows, and what fills the last set."""
        return columns_of_rows(self.rows)[1]

    @property
    def chunks(self) -> int:
        return self.padded // self.width

    @property
    def slots(self) -> int:
        """Groups that are side by side in the columns of the tensor core."""
        return 8 // self.width

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.steps)

    @property
    def activation_group(self) -> int:
        """Columns of activations that share a scale, of the first part."""
        return formats.get(self.plan.parts[0].format).LANES.activation_group

    @property
    def per_warp(self) -> int:
        """Steps of a warp, at most."""
        return -(-self.steps // self.plan.warps)


def stat_words(format_lanes: Lanes, activation_bits: int) -> int:
    """What a lane needs to know of a group of activations, in words: their scale, and where something is
    subtracted their sum; whole numbers (activations_shared.py) are two to a word for each digit."""
    if not format_lanes.minimums:
        return 1
    return activation_bits // 4 if format_lanes.whole_scales else 2


def stats_bytes(format: str, steps: int, padded: int, activation_bits: int) -> int:
    """Shared memory for `stat_words` of each group of each row of activations."""
    if formats.family(format) == "bit":
        return steps * padded * PLANE_STATS
    format_lanes = formats.get(format).LANES
    return (
        steps
        * TILE_COLUMNS
        // format_lanes.activation_group
        * padded
        * 4
        * stat_words(format_lanes, activation_bits)
    )


def row_bytes(steps: int) -> int:
    return steps * TILE_COLUMNS + 32  # 32: neighbouring rows lie in other banks


def lane_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """What lanes have of a field of one tile: (V, 32 / n, w) for V vectors of w words that n neighbouring
    lanes share. [32 / n, w] is one vector, [32 / n] one word."""
    vectors, pieces, words = {3: shape, 2: (1, *shape), 1: (1, *shape, 1)}[len(shape)]
    return vectors, pieces, words


def lane_bytes(shape: tuple[int, ...]) -> int:
    """Shared memory that a lane needs for a field of one tile."""
    vectors, _, words = lane_shape(shape)
    return 4 * vectors * words
