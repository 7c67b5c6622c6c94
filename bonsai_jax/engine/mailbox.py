"""Where the loop of an engine leaves masks for draws that are on the device already (host_masks.py)."""

import weakref

import jax
import numpy as np
from jaxtyping import Int, UInt32

from pallas_kernels import host_masks
from pallas_kernels.device import in_use


class Mailbox:
    """A mailbox with a place for each row of an engine, in memory of the host that the device reads, too.

    address   for host_masks.receive
    """

    def __init__(self, rows: int, words: int):
        self._words = words
        empty = np.zeros(host_masks.mailbox_words(rows, words), np.int32)
        if in_use().platform == "cpu":
            self._owner, pointer = empty, empty.ctypes.data
        else:
            pinned = jax.sharding.SingleDeviceSharding(in_use(), memory_kind="pinned_host")
            self._owner = jax.block_until_ready(jax.device_put(empty, pinned))
            pointer = self._owner.unsafe_buffer_pointer()
        self.address = host_masks.address_words(pointer)
        self._memory = host_masks.in_memory(pointer, len(empty))
        # Also when Python ends: jax waits then for what the device does, which may wait for a letter.
        self.close = weakref.finalize(self, _close, self._owner, self._memory)

    def allow(self, row: int, mask: UInt32[np.ndarray, "words"]) -> None:
        """The row's next draw takes one of these tokens."""
        place = self._place(row)
        place[host_masks.MASK : host_masks.MASK + self._words] = mask.view(np.int32)
        place[0] = host_masks.DRAW  # last: the device takes the mask when it sees the letter

    def hold(self, row: int) -> None:
        """The row's next draw takes no token."""
        self._place(row)[0] = host_masks.HOLD

    def _place(self, row: int) -> Int[np.ndarray, "words"]:
        size = host_masks.place_words(self._words)
        return self._memory[host_masks.HEAD + row * size :][:size]


def _close(owner: object, memory: Int[np.ndarray, "words"]) -> None:
    """Nobody waits any more. The owner of the memory lives until then."""
    memory[0] = 1
