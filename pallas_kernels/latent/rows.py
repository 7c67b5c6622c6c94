"""How rows of the cache, and the new one, come to a block of decode.py: a visit's in a slot of shared
memory."""

import dataclasses
from typing import Any

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import integer
from pallas_kernels.latent.plan import KEYS, SLOTS


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of visits on their way to shared memory, in pieces of 16 bytes: of each tile a thread has a
    sixteenth of one row.

    address  of its first piece in the first slot
    source   of the cache, i64
    """

    step: Any
    share: Any
    thread: Any
    address: Any
    source: Any

    @classmethod
    def locate(cls, step, share) -> "Rows":
        thread = integer(lanes.thread())
        row, piece = thread // 16, thread % 16
        address = memory.shared_address(step.rows_smem) + row * step.plan.pitch
        return cls(step, share, thread, address + (piece ^ swizzle(row)) * 16, memory.address(step.pages))

    def first_key(self, visit):
        return self.share.first + visit * (self.step.plan.tiles * KEYS)

    def _slot(self, visit):
        return visit % SLOTS * (self.step.plan.tiles * self.step.plan.tile_bytes)

    def slot(self, visit):
        """Where the rows of a visit begin."""
        return memory.shared_address(self.step.rows_smem) + self._slot(visit)

    def _pieces(self, use):
        """use(bytes behind the first piece), for this thread's pieces of a row."""
        pieces = self.step.plan.row_bytes // 16
        for first in range(0, pieces, 16):
            if first + 16 <= pieces:
                use(16 * first)
                continue
            with lanes.when(self.thread % 16 < pieces - first):
                use(16 * first)

    def request(self, visit):
        """A visit's rows that are stored, if there is such a visit."""
        plan, share = self.step.plan, self.share
        for tile in range(plan.tiles):
            key = self.first_key(visit) + (self.thread // 16 + tile * KEYS)
            with lanes.when((key < share.stop) & (key < share.length)):
                page = memory.load(self.step.table, share.row, key // plan.page_size)
                page = share.layer * self.step.pages.type.shape[1] + page
                item = page * plan.page_size + key % plan.page_size
                source = memory.at_byte(self.source, item, plan.row_bytes, self.thread % 16 * 16)
                target = self.address + self._slot(visit) + tile * plan.tile_bytes
                self._pieces(lambda more, t=target, s=source: memory.copy_async(t, s, 16, more))
        memory.commit_copies()

    def place_new(self, visit):
        """The new row in its place, and in the places after it in its tile, whose weights are 0."""
        plan, share = self.step.plan, self.share
        new = memory.shared_address(self.step.scratch_smem) + (4 * plan.scratch.row_at)
        new = new + self.thread % 16 * 16
        place = share.length - self.first_key(visit)
        with lanes.when(self.thread // 16 >= place % KEYS):
            target = self.address + self._slot(visit) + place // KEYS * plan.tile_bytes
            self._pieces(lambda more: memory.store_shared(memory.load_shared(4, new, more), target, more))


def swizzle(row):
    """What numbers of a row's pieces are xored with, so that lanes that read at once do not meet: of scores 2
    neighbouring rows, 4 pieces of each; of sums 4 rows, 4 apart, 2 pieces of each."""
    return row // 4 % 4 * 2 ^ (row & 1) * 4
