"""Blocks of threads in lockstep: masks of active threads, shared and global memory, copies on their way.

What a GPU leaves open is resolved to a kernel's disadvantage: shared memory begins as NaN, a bulk copy spoils
its destination at once and lands when somebody waits for it, and an access that no barrier orders is an error
(races.py). It knows nothing of time.
"""

import contextlib

import numpy as np

from pallas_kernels.gpu.values import index
from tests.pallas_kernels.lockstep.races import Clocks, Words
from tests.pallas_kernels.lockstep.values import NUMPY, Type, Value

FAR = 40  # an address in global memory: the number of its buffer above so many bits, bytes below
ELEMENTS = {
    "uint32": "i32", "int32": "i32", "int8": "i8", "float32": "f32", "bfloat16": "bf16", "float16": "f16",
    "bool": "i1",
}  # fmt: skip


class Ref:
    """A kernel's argument or scratch memory: cells [blocks or 1, elements] and how they are indexed."""

    def __init__(self, cells: np.ndarray, shape: tuple, element: str, address: int, words: Words | None):
        self.cells, self.address, self.words = cells, address, words
        self.type = Type(element, tuple(shape))
        self.shared = address < 1 << FAR


class Turns:
    """An mbarrier of each block: completed turns, bytes announced, and copies that are on their way."""

    def __init__(self, blocks: int):
        self.completed = np.zeros(blocks, int)
        self.announced = np.zeros(blocks, int)
        self.arrived = np.zeros(blocks, bool)
        self.copies: list[list] = [[] for _ in range(blocks)]
        self.snapshot: dict = {}


class Machine:
    def __init__(self, numbers, threads: int, scratch):
        """numbers: of the blocks of the grid that run; scratch: (shape, dtype) of shared memory."""
        self.numbers, self.threads, self.blocks = np.asarray(numbers), threads, len(numbers)
        total = threads * self.blocks
        self.all, self.active = np.arange(total), np.ones(total, bool)
        self.warp, self.block = self.all // 32, self.all // threads
        self.clocks = Clocks(self.blocks, threads // 32)
        sizes = [-(-int(np.prod(shape)) * 4 // 1024) * 1024 for shape, _ in scratch]
        self.shared = np.full((self.blocks, sum(sizes)), 0xFF, np.uint8)
        self.shared_words = Words("shared memory", sum(sizes) // 4, self.clocks, shared=True)
        self.scratch, at = [], 0
        for (shape, dtype), size in zip(scratch, sizes, strict=True):
            element = ELEMENTS[np.dtype(dtype).name]
            cells = self.shared[:, at : at + int(np.prod(shape)) * 4].view(NUMPY[element])
            self.scratch.append(Ref(cells, shape, element, at, self.shared_words))
            at += size
        self.globals: list[Ref] = []
        self.turns: dict[int, Turns] = {}
        self.messages: list[np.ndarray] = []
        self.message_of: dict = {}
        self.group, self.groups = [], []

    def ref(self, a: np.ndarray, name: str = "", tracked: bool = False) -> Ref:
        """An array in global memory, changed in place."""
        element = ELEMENTS[a.dtype.name]
        lenient = element != "i32"
        words = Words(name, a.size, self.clocks, lenient=lenient) if tracked else None
        cells = a.view(NUMPY[element]).reshape(1, -1)
        out = Ref(cells, a.shape, element, (len(self.globals) + 1) << FAR, words)
        self.globals.append(out)
        return out

    # Control flow

    @contextlib.contextmanager
    def masked(self, mask: np.ndarray):
        before = self.active
        self.active = before & mask
        yield
        self.active = before

    def when(self, condition: Value):
        return self.masked(condition.of_threads(len(self.all)))

    def picked(self, mask, new: Value, old: Value) -> Value:
        assert new.type == old.type
        return Value(np.where(mask[:, None] if new.type.shape else mask, new.a, old.a), new.type)

    def loop(self, start, stop, step, carry, body):
        start, stop, step = map(index, (start, stop, step))
        i, stop, step = (v.of_threads(len(self.all)) for v in (start, stop, step))
        while (going := self.active & (i < stop)).any():
            with self.masked(going):
                new = body(Value(i, start.type), list(carry))
            carry = [self.picked(going, n, c) for n, c in zip(new, carry, strict=True)]
            i = i + step
        return carry

    def choose(self, condition, values, otherwise):
        chosen = condition.of_threads(len(self.all))
        with self.masked(chosen):
            self.whole_warps()
            new = values()
        return [self.picked(chosen, n, o) for n, o in zip(new, otherwise, strict=True)]

    def repeated(self, attempt, types):
        """In step with all that write what is waited for, a second attempt would find what the first did."""
        again, values = attempt()
        assert not again.of_threads(len(self.all))[self.active].any(), "waits for ever"
        return values

    def whole_warps(self):
        """For instructions that a warp does together."""
        warps = self.active.reshape(-1, 32)
        assert (warps.any(axis=1) == warps.all(axis=1)).all(), "some lanes of a warp are elsewhere"

    def barrier(self, threads: int | None = None):
        """Of a block's threads, or of each so many of them."""
        threads = threads or self.threads
        groups = self.active.reshape(-1, threads)
        there = groups.any(axis=1)
        assert (there == groups.all(axis=1)).all(), "some threads of a block never reach its barrier"
        self.clocks.barrier(np.flatnonzero(there), threads // 32)

    # Memory

    def of_active(self, v: Value) -> np.ndarray:
        return v.of_threads(len(self.all))[self.active]

    def flat(self, ref: Ref, indices) -> np.ndarray:
        at = np.zeros(self.active.sum(), np.int64)
        for i, size in zip(indices, ref.type.shape, strict=True):
            i = self.of_active(i) if i.a.ndim else i.a
            assert ((i >= 0) & (i < size)).all(), f"index {i.min()}..{i.max()} of {size}"
            at = at * size + i
        return at

    def _words(self, ref: Ref, at: np.ndarray):
        """For races: flat words and warps, of elements at [active, n]."""
        assert ref.words is not None
        blocks, warps = (np.broadcast_to(v[self.active][:, None], at.shape) for v in (self.block, self.warp))
        words = blocks * ref.words.count + ref.address // 4 + at if ref.shared else at
        return words.ravel(), warps.ravel()

    def load_cells(self, ref: Ref, at: np.ndarray, count: int) -> np.ndarray:
        """[active, count] elements."""
        at = at[:, None] + np.arange(count)
        assert at.size == 0 or (at.min() >= 0 and at.max() < ref.cells.shape[1])
        values = ref.cells[self.block[self.active][:, None] if ref.shared else 0, at]
        if ref.words is not None:
            late = ref.words.read(*self._words(ref, at))
            values[late.reshape(at.shape)] = -1 if values.dtype.kind == "i" else np.nan
        return values

    def store_cells(self, ref: Ref, at: np.ndarray, values: np.ndarray):
        """values [active, n] into neighbouring elements."""
        at = at[:, None] + np.arange(values.shape[1])
        assert at.size == 0 or (at.min() >= 0 and at.max() < ref.cells.shape[1])
        place = (self.block[self.active][:, None] if ref.shared else 0, at)
        if ref.words is not None:
            bits = {1: np.int8, 2: np.int16, 4: np.int32}[values.itemsize]
            same = ref.cells[place].view(bits) == np.ascontiguousarray(values).view(bits)
            tagged = id(ref) in self.message_of
            ref.words.write(*self._words(ref, at), None if tagged else same.ravel())
        ref.cells[place] = values
        same = np.ascontiguousarray(ref.cells[place]).view(np.uint8)
        assert (same == np.ascontiguousarray(values).view(np.uint8)).all(), "lanes store different values"

    def spread(self, values: np.ndarray, type: Type) -> Value:
        """Of active threads, to all; the others' are not to be used."""
        out = np.zeros((len(self.all), *type.shape), NUMPY[type.element])
        out[self.active] = values if type.shape else values[:, 0]
        return Value(out, type)

    def load(self, ref, indices):
        return self.spread(self.load_cells(ref, self.flat(ref, indices), 1), ref.type.element_type)

    def store(self, value: Value, ref, indices):
        assert value.type == ref.type.element_type
        self.store_cells(ref, self.flat(ref, indices), self.of_active(value)[:, None])

    def _aligned(self, at, ref, type):
        size = min(16, type.shape[0] * ref.cells.itemsize)
        assert (at * ref.cells.itemsize % size == 0).all(), "not aligned"

    def load_vector(self, type: Type, ref, indices):
        assert type.element_type == ref.type.element_type
        at = self.flat(ref, indices)
        self._aligned(at, ref, type)
        return self.spread(self.load_cells(ref, at, type.shape[0]), type)

    def store_vector(self, value: Value, ref, indices):
        assert value.type.element_type == ref.type.element_type
        at = self.flat(ref, indices)
        self._aligned(at, ref, value.type)
        self.store_cells(ref, at, self.of_active(value))

    def address(self, ref) -> Value:
        return Value(ref.address, Type("i64"))

    def pointed(self, pointer: Value, behind: int = 0):
        """(mask of active threads, ref, elements) for each of the refs that pointers point into."""
        there = self.of_active(pointer) + behind
        for number in np.unique(there >> FAR):
            assert number > 0
            ref = self.globals[number - 1]
            selected = there >> FAR == number
            byte = there[selected] & (1 << FAR) - 1
            assert (byte % ref.cells.itemsize == 0).all()
            everywhere = np.zeros(len(self.all), bool)
            everywhere[np.flatnonzero(self.active)[selected]] = True
            yield everywhere, ref, byte // ref.cells.itemsize

    def load_pointed(self, pointer: Value, behind: int, count: int, type: Type, relaxed=False) -> list:
        out = np.zeros((len(self.all), count), NUMPY[type.element])
        for mask, ref, at in self.pointed(pointer, behind):
            elements = count * out.itemsize // ref.cells.itemsize
            assert (at % elements == 0).all(), "not aligned"
            with self.masked(mask):
                if relaxed:
                    self._receive(ref, at[:, None] + np.arange(count))
                out[mask] = self.load_cells(ref, at, elements).view(NUMPY[type.element])
        return [Value(out[:, i], type) for i in range(count)]

    # Words that say themselves when they are there: who reads one learns what its writer knew.

    def send(self, pointer: Value, *words: Value):
        for mask, ref, at in self.pointed(pointer):
            message_of = self.message_of.setdefault(id(ref), np.full(ref.cells.size, -1))
            with self.masked(mask):
                assert (at % len(words) == 0).all(), "not aligned"
                self.store_cells(ref, at, np.stack([self.of_active(word) for word in words], axis=-1))
                message_of[at[:, None] + np.arange(len(words))] = len(self.messages)
                self.messages.append(self.clocks.snapshot())

    def _receive(self, ref: Ref, at: np.ndarray):
        if id(ref) not in self.message_of:
            return
        words, warps = self._words(ref, at)
        message = self.message_of[id(ref)][words]
        senders, n = ref.words.writer[words], len(self.clocks.known)
        keys = np.unique(((warps * len(self.messages) + message) * n + senders)[message >= 0])
        warps, message, senders = keys // n // len(self.messages), keys // n % len(self.messages), keys % n
        for m in np.unique(message):
            of = message == m
            self.clocks.learn(warps[of], self.messages[m][senders[of]])

    # Shared memory by address

    def load_shared(self, address: Value, behind: int, count: int) -> list:
        at = self.of_active(address).astype(np.int64) + behind
        assert (at % (4 * count) == 0).all(), "not aligned"
        whole = Ref(self.shared.view(np.int32), (), "i32", 0, self.shared_words)
        words = self.load_cells(whole, at // 4, count)
        return [self.spread(words[:, k : k + 1], Type("i32")) for k in range(count)]

    def store_shared(self, address: Value, behind: int, words: list):
        at = self.of_active(address).astype(np.int64) + behind
        assert (at % (4 * len(words)) == 0).all(), "not aligned"
        whole = Ref(self.shared.view(np.int32), (), "i32", 0, self.shared_words)
        self.store_cells(whole, at // 4, np.stack([self.of_active(word) for word in words], axis=1))

    def copy_async(self, to: Value, to_behind: int, source: Value, behind: int, size: int):
        whole = Ref(self.shared.view(np.int32), (), "i32", 0, self.shared_words)
        for mask, ref, at in self.pointed(source, behind):
            with self.masked(mask):
                to_word = (self.of_active(to).astype(np.int64) + to_behind) // 4
                count = size // ref.cells.itemsize
                assert (at % count == 0).all() and (to_word % (size // 4) == 0).all(), "not aligned"
                data = self.load_cells(ref, at, count).view(np.int32)
                self.store_cells(whole, to_word, np.full_like(data, -1))
                place = (self.block[mask][:, None], to_word[:, None] + np.arange(size // 4))
                self.group.append((whole.cells, place, data))

    def commit(self):
        self.groups.append(self.group)
        self.group = []

    def wait_copies(self, pending: int):
        while len(self.groups) > pending:
            for cells, place, data in self.groups.pop(0):
                cells[place] = data

    # Bulk copies

    def at_blocks(self, *values: Value):
        """(thread, block, scalars) of each active thread."""
        values = [self.of_active(v) for v in values]
        for k, thread in enumerate(np.flatnonzero(self.active)):
            yield thread, self.block[thread], [int(v[k]) for v in values]

    def mbarrier_init(self, address: Value):
        for _, block, (at,) in self.at_blocks(address):
            assert any(ref.address <= at < ref.address + 4 * ref.cells.shape[1] for ref in self.scratch)
            assert at % 8 == 0
            self.turns.setdefault(at, Turns(self.blocks)).snapshot[block] = 0

    def mbarrier_expect(self, address: Value, count: Value):
        for thread, block, (at, size) in self.at_blocks(address, count):
            turns = self.turns[at]
            assert not turns.arrived[block], "announced before the last turn was over"
            turns.arrived[block], turns.announced[block] = True, size
            turns.snapshot[block] = self.clocks.snapshot(self.warp[thread])
            self.clocks.now += 1

    def copy_bulk(self, to: Value, source: Value, count: Value, address: Value):
        for thread, block, (to_byte, pointer, size, at) in self.at_blocks(to, source, count, address):
            turns, ref = self.turns[at], self.globals[(pointer >> FAR) - 1]
            first = pointer & (1 << FAR) - 1
            assert size > 0 and size % 16 == first % 16 == to_byte % 16 == 0, "not aligned"
            data = ref.cells.reshape(-1).view(np.uint8)[first : first + size]
            assert len(data) == size and turns.arrived[block]
            within = [r for r in self.scratch if r.address <= to_byte < r.address + 4 * r.cells.shape[1]]
            assert to_byte + size <= within[0].address + 4 * within[0].cells.shape[1]
            words = block * self.shared_words.count + to_byte // 4 + np.arange(size // 4)
            self.shared_words.write(words, np.full(len(words), self.warp[thread]))
            self.shared[block, to_byte : to_byte + size] = 0xFF
            turns.copies[block].append((to_byte, data.copy()))
            turns.snapshot[block] = np.maximum(self.clocks.snapshot(self.warp[thread]), turns.snapshot[block])
            self.clocks.now += 1

    def mbarrier_wait(self, address: Value, parity: Value):
        addresses, parities = (v.of_threads(len(self.all)) for v in (address, parity))
        for block in np.unique(self.block[self.active]):
            selected = self.active & (self.block == block)
            (at,), (p,) = np.unique(addresses[selected]), np.unique(parities[selected])
            turns = self.turns[at]
            if turns.arrived[block]:
                sent = sum(len(data) for _, data in turns.copies[block])
                assert sent <= turns.announced[block]
                if sent == turns.announced[block]:
                    for to, data in turns.copies[block]:
                        self.shared[block, to : to + len(data)] = data
                    turns.completed[block] += 1
                    turns.arrived[block], turns.copies[block] = False, []
            assert turns.completed[block] % 2 != p, "waits for a copy that nobody asked for"
            warps = np.unique(self.warp[selected])
            self.clocks.learn(
                warps, np.broadcast_to(turns.snapshot[block], (len(warps), len(self.clocks.known)))
            )
