"""How a decode step's latent attention is shared out to blocks: sizes that are known before a kernel is
traced."""

import dataclasses

from pallas_kernels import device
from pallas_kernels.gpu import shared_memory

WARPS = 8
KEYS = 16  # of a tile: the rows of a tensor core
UNIT = 32  # dimensions of a row that a warp multiplies at a time
CHUNK = 64  # dimensions of a value that a warp sums up
LANE_KEYS = 4  # neighbouring keys of a lane, whose softmax weights it computes
MOST_HEADS = 32  # of a block: each warp has sums for all of them in registers
MOST_TILES = 4  # of a visit
SLOTS = 2  # visits whose rows are in shared memory


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Where things lie in a block's shared memory beside the rows, in words.

    columns    eights of heads
    keys       of a visit
    row_words  of a row
    """

    columns: int
    keys: int
    row_words: int

    @property
    def heads(self) -> int:
        return 8 * self.columns

    @property
    def scores_pitch(self) -> int:
        """Of scores [warp, head, key]: where a head's begin, so that lanes do not meet."""
        return self.keys + 4

    @property
    def weights_at(self) -> int:
        """Softmax weights [high or low, head, pair of keys]."""
        return WARPS * self.heads * self.scores_pitch

    @property
    def weights_pitch(self) -> int:
        """Where a head's begin."""
        return self.keys // 2 | 8

    @property
    def keeps_at(self) -> int:
        """What sums are to be multiplied by [head]; behind it totals, and maxima, after the last visit."""
        return self.weights_at + 2 * self.heads * self.weights_pitch

    @property
    def row_at(self) -> int:
        """The new row."""
        return self.keeps_at + 3 * self.heads

    @property
    def words(self) -> int:
        return self.row_at + self.row_words


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of a launch.

    rows, heads  of the batch; all query heads
    rank, turned numbers of a row: those that are its value, and those that rope has turned
    still        numbers of a query before those that rope turns
    pages        of a row, of page_size
    most_blocks  that run at once: a multiprocessor's each
    """

    rows: int
    heads: int
    rank: int
    turned: int
    still: int
    page_size: int
    pages: int
    most_blocks: int

    @property
    def group(self) -> int:
        """Query heads of a block."""
        return next(n for n in range(min(MOST_HEADS, self.heads), 0, -1) if self.heads % n == 0)

    @property
    def columns(self) -> int:
        """Eights of heads, the columns of a tensor core."""
        return -(-self.group // 8)

    @property
    def groups(self) -> int:
        return self.heads // self.group

    @property
    def splits(self) -> int:
        """The most splits of a row's keys."""
        tiles = -(-self.pages * self.page_size // KEYS)
        return max(1, min(tiles, self.most_blocks // (self.rows * self.groups)))

    @property
    def blocks(self) -> int:
        return self.rows * self.groups * self.splits

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return self.rank + self.turned

    @property
    def row_bytes(self) -> int:
        return 2 * self.width

    @property
    def pitch(self) -> int:
        """Where a row begins in shared memory: whole eights of pieces of 16 bytes."""
        return -(-self.row_bytes // 128) * 128

    @property
    def tile_bytes(self) -> int:
        return KEYS * self.pitch

    @property
    def partial(self) -> int:
        """Words that a split sends: weighted sums [group, rank], and logarithms of totals [group]."""
        return -(-self.group * (self.rank + 1) // 4) * 4

    @property
    def exchanged(self) -> int:
        """Words of the workspace."""
        return self.blocks * self.partial if self.splits > 1 else 0

    @property
    def scratch(self) -> Scratch:
        return self._scratch(self.tiles)

    @property
    def tiles(self) -> int:
        """Of a visit: as many as shared memory has room for while the next are on their way; 0: none."""
        sizes = (MOST_TILES >> i for i in range(MOST_TILES.bit_length()))
        return next((n for n in sizes if self._bytes_taken(n) <= device.shared_bytes()), 0)

    def _scratch(self, tiles: int) -> Scratch:
        return Scratch(self.columns, tiles * KEYS, self.row_bytes // 4)

    def _bytes_taken(self, tiles: int) -> int:
        return shared_memory.bytes_taken(SLOTS * tiles * self.tile_bytes, 4 * self._scratch(tiles).words)


def refuses(rank: int, turned: int, heads: int) -> str | None:
    """Why there is no kernel for rows of such numbers, or None."""
    if rank not in (256, 512) or turned not in (32, 64):
        return f"rows have {rank} and {turned} numbers; the kernel has 256 and 512, with 32 and 64 that turn"
    plan = Plan(1, heads, rank, turned, 0, KEYS, 1, 1)
    return None if plan.tiles else "two tiles of 16 rows do not fit a block's shared memory"
