"""A block's share of a layer's weights in shared memory, as a lane sees it: bulk copies bring them while
earlier phases run.

    [phase][matrix][words of the block's tiles, then their scales]        an mbarrier for each phase
"""

from pallas_kernels.attention.decode_plan import THREADS, WARPS
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import index, integer, minimum
from pallas_kernels.matmul.bit_mma.product import PAIR_BYTES, SCALE_BYTES
from pallas_kernels.step.shapes import Phase, Shapes

# `request_evenly`: bytes of a piece, clocks from one to the next (together two thirds of what an H200's
# memory gives each multiprocessor), and the most clocks for all, which must be there when attention ends.
PIECE, PIECE_CLOCKS, MOST_CLOCKS = 4096, 350, 5000


class SharedWeights:
    def __init__(self, shapes: Shapes, layers: int, weights, weights_smem, mbarriers):
        """weights: refs of (words, scales) of qkv, o, gate, up and down, stacked by layer."""
        qkv, o, gate, up, down = weights
        self.gmem = {Phase.QKV: [qkv], Phase.O: [o], Phase.GATE_UP: [gate, up], Phase.DOWN: [down]}
        self.products, self.layers, self.smem = shapes.products(), layers, weights_smem
        self.address, self.mbarriers = memory.shared_address(weights_smem), mbarriers
        self.begin = shapes.begins
        self.sums_among = shapes.sums_among_weights

    def first_tile(self, phase: Phase):
        p = self.products[phase]
        return lanes.block() // p.splits * p.tiles

    def split(self, phase: Phase):
        """This block's part of the columns."""
        return lanes.block() % self.products[phase].splits

    def takes_part(self, phase: Phase):
        """Whether this block has tiles of a phase."""
        p = self.products[phase]
        return lanes.block() < -(-p.n_tiles // p.tiles) * p.splits

    def prepare(self):
        """Before the first layer: ask for all of it but down, where keys may be."""
        with lanes.when(lanes.thread() == 0):
            for phase in self.products:
                memory.mbarrier_init(self._mbarrier(phase))
        lanes.block_barrier()
        for phase in (Phase.QKV, Phase.O, Phase.GATE_UP):
            with lanes.when(self.takes_part(phase)):
                self._request(phase, index(0))

    def request_during(self, phase: Phase, layer, attends=None):
        """By all threads, when the activations of a phase are there: what can be asked for, in parts that are
        there before the next phase waits for activations. A wait during a copy takes three times as long.
        Blocks without a share of attention ask for its part of down when they ask for that of QKV.

        attends  whether the block has a share; if not, it does not ask for down, as `request_evenly` does.
                 None: all blocks ask
        """
        most = -(-2 * self.products[Phase.GATE_UP].tiles // 3)
        half = -(-self.products[Phase.DOWN].tiles // 2)
        parts: dict[Phase, list[tuple[Phase, int, int | None]]] = {
            Phase.QKV: [(Phase.GATE_UP, most, None)],
            Phase.ATTENTION: [(Phase.DOWN, 0, half)],
            Phase.O: [(Phase.DOWN, half, None)],
            Phase.GATE_UP: [(Phase.QKV, 0, None), (Phase.O, 0, None)],
            Phase.DOWN: [(Phase.GATE_UP, 0, most)],
        }
        if self.sums_among:  # where these go
            parts[Phase.DOWN], parts[Phase.GATE_UP] = [*parts[Phase.GATE_UP], *parts[Phase.DOWN]], []
        # What phases before have read is asked for of the next layer; the first layer was asked for at once.
        following = phase in (Phase.GATE_UP, Phase.DOWN)
        for later, first, end in parts[phase]:
            asks = self.takes_part(later)
            if following:
                asks = asks & (layer < self.layers - 1)
            elif later != Phase.DOWN:
                asks = asks & ~(layer == 0)
            elif attends is not None:
                asks = asks & attends
            with lanes.when(asks):
                self._request(later, layer + int(following), first, end)

    def request_evenly(self, layer):
        """Ask for down, in a block that has no share of attention, while others attend. Attention is a chain
        of short waits for memory, and each takes longer while many bytes are on their way. So one thread asks
        for small pieces, one after another, at two thirds of memory's rate."""
        p, phase = self.products[Phase.DOWN], Phase.DOWN
        pieces = -(-p.pairs * PAIR_BYTES // PIECE) + -(-p.pairs * SCALE_BYTES // PIECE)  # of a tile
        clocks = min(PIECE_CLOCKS, MOST_CLOCKS // (pieces * p.tiles))
        with lanes.when((lanes.thread() == THREADS - 32) & self.takes_part(phase)):
            count = self._tiles(phase)
            self._announce(phase, count)
            memory.fence_of_copies()
            began, to = lanes.clock(), self.address + self.begin[phase, 0]

            def copy_tile(tile, carry):
                source, number = self._source(phase, layer, tile), integer(tile * pieces)
                for address, ref, at, size in p.parts_of_tiles(self.gmem[phase][0], source, to, tile):
                    for done in range(0, size, PIECE):
                        lanes.wait_until(began, number * clocks)
                        piece = min(PIECE, size - done)
                        memory.copy_to_shared(
                            address + done, ref, at + done // 4, piece, self._mbarrier(phase)
                        )
                        number = number + 1
                return carry

            lanes.loop(0, count, 1, [], copy_tile)

    def wait(self, phase: Phase, layer):
        memory.mbarrier_wait(self._mbarrier(phase), integer(layer % 2))

    def _mbarrier(self, phase: Phase):
        return self.mbarriers + 8 * phase

    def _request(self, phase: Phase, layer, first: int = 0, end: int | None = None):
        """By all threads: a layer's weights of a phase, or some of the block's tiles; with the first tile
        the bytes of all are announced. One thread asks for all tiles; of a split, where another's pairs lie
        between those of two tiles, each warp for a tile. (One copy takes a thread 150 clocks.)"""
        p = self.products[phase]
        end = p.tiles if end is None else end
        if first == end:
            return
        count = self._tiles(phase)
        thread, tiles = lanes.thread(), minimum(count, end)
        if first == 0:
            with lanes.when(thread == THREADS - 32):
                self._announce(phase, count)
        if p.splits == 1:
            for m in range(p.matrices):
                with lanes.when((thread == THREADS - 32 * (m + 1)) & (index(first) < count)):
                    self._copy(phase, m, layer, first, tiles - first)
            return
        for begin in range(first, end, WARPS):
            tile = thread // 32 + begin
            with lanes.when((thread % 32 == 0) & (tile < tiles)):
                self._copy(phase, 0, layer, tile, 1)

    def _tiles(self, phase: Phase):
        """How many tiles this block has."""
        p = self.products[phase]
        return minimum(p.n_tiles - self.first_tile(phase), p.tiles) if p.n_tiles % p.tiles else index(p.tiles)

    def _announce(self, phase: Phase, count):
        """By one thread: tell the mbarrier how many bytes this many tiles have."""
        p = self.products[phase]
        size = integer(count * (p.pairs * p.matrices * (PAIR_BYTES + SCALE_BYTES)))
        memory.mbarrier_expect(self._mbarrier(phase), size)

    def _source(self, phase: Phase, layer, tile):
        """Where one of the block's tiles lies in the stack of all layers."""
        p = self.products[phase]
        return (self.first_tile(phase) + layer * p.n_tiles + tile) * p.splits + self.split(phase)

    def _copy(self, phase: Phase, m: int, layer, first, tiles):
        """So many of the block's tiles of a matrix, from one on."""
        p = self.products[phase]
        # Where keys and values may have been, or sums.
        if phase in (Phase.QKV, Phase.DOWN) or (self.sums_among and phase == Phase.O):
            memory.fence_of_copies()
        source, to = self._source(phase, layer, first), self.address + self.begin[phase, m]
        p.copy_to_shared(self.gmem[phase][m], source, tiles, to, first, self._mbarrier(phase))
