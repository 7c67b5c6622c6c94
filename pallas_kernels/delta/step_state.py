"""A thread's part of S in the kernel of few tokens (step.py): rows of 4 neighbouring columns, of float32 or
of float16, in registers or in shared memory."""

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import as_real, as_word, f32, integer

THREADS = 256  # of a block, which has a head's S


def words(row: list, states) -> list:
    """4 neighbouring numbers of S as they are stored, to nearest; what is beyond the largest float16 as
    that."""
    if states.type.element_type == f32():
        return [as_word(v) for v in row]
    return [lanes.half_pair(*row[at : at + 2], saturated=True) for at in (0, 2)]


def numbers(words: list) -> list:
    """4 numbers of S, of four words or of two."""
    return list(map(as_real, words)) if len(words) == 4 else [v for word in words for v in lanes.halves(word)]


class InRegisters:
    """A thread's part of S, rows of 4 neighbouring columns, in the words that are stored: what is converted
    is waited for."""

    def ask(self, states, places: list, condition):
        """Ask for the rows at these places, or have zeros where the condition does not hold."""
        each = lanes.bits_of(states.type.element_type) // 8
        flat = lanes.choose(
            condition,
            lambda: [w for place in places for w in lanes.words(memory.load_stored(4, states, place))],
            [integer(0)] * (each * len(places)),
        )
        self.rows = [flat[at : at + each] for at in range(0, len(flat), each)]

    def wait(self):
        """Until they are there."""

    def load(self, i: int) -> list:
        """Row i."""
        return numbers(self.rows[i])


class InSharedMemory:
    """The same; nobody else reads a thread's part, so no barrier is needed."""

    def __init__(self, smem, thread, count: int):
        """count: rows of a thread."""
        self.smem, self.thread = smem, thread
        self.each = smem.type.shape[0] // (THREADS * count)  # words of a row

    def _place(self, i: int) -> list:
        return [self.thread * self.each + i * (self.each * THREADS)]

    def ask(self, states, places: list, condition):
        size = 4 * self.each
        with lanes.when(condition):
            target = memory.shared_address(self.smem) + integer(self.thread) * size
            for i, place in enumerate(places):
                source = memory.address_of(states, place)
                memory.copy_async(target, source, size, i * size * THREADS, source_at=0)
        with lanes.when(~condition):
            for i in range(len(places)):
                memory.store_words([integer(0)] * self.each, self.smem, self._place(i))
        memory.commit_copies()

    def wait(self):
        memory.wait_copies(0)

    def load(self, i: int) -> list:
        return numbers(memory.load_words(self.each, self.smem, self._place(i)))
