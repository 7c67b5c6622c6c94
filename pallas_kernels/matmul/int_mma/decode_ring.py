"""The weights of a warp of int_decode on their way through shared memory, of one product or of several that
follow each other in a launch.

    an item    256 columns of a tile, of each matrix, or of two neighbouring tiles of one matrix; the items of
               a warp are in the order tile, step
    the ring   slots of an item each; a slot that was multiplied is at once asked for the item `depth` further

A lane reads from a slot what it copied there itself, so nobody waits for another warp. Copies run on from a
product to the next, whose first weights are there before its activations.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import ceil_divided, integer, larger_signed, minimum, select, smaller_signed
from pallas_kernels.matmul.int_mma import decode_plan as int_decode_plan


class Share(NamedTuple):
    """What a warp has of a part of a product; what is Any is an MLIR value.

    part        of the plan
    steps       of 256 columns, of all warps
    has_tiles   whether the block has tiles of this part
    first_tile, count       of the block
    first_step, own_steps   of the warp
    tiles       of which the warp has steps, or pairs of tiles
    tiles_of_item  tiles of an item
    """

    part: int_decode_plan.Part
    steps: int
    has_tiles: Any
    first_tile: Any
    count: Any
    first_step: Any
    own_steps: Any
    tiles: Any
    tiles_of_item: int = 1

    @classmethod
    def for_block(
        cls, part: int_decode_plan.Part, steps: int, warps: int, block=None, tiles_of_item: int = 1
    ) -> "Share":
        """block  of the product; None: this one"""
        from_part = (integer(lanes.block()) if block is None else block) - part.first_block
        # Blocks of other parts are below 0, which is large without a sign, or behind the last.
        has_tiles = from_part < part.blocks
        first_tile = from_part * part.tiles
        count = minimum(part.n_tiles - first_tile, part.tiles)
        per_warp = -(-steps // warps)
        first_step = integer(lanes.thread()) // 32 * per_warp
        own_steps = smaller_signed(integer(per_warp), steps - first_step)  # below 0 behind the last
        own_steps = larger_signed(integer(0), own_steps)
        items = count if tiles_of_item == 1 else ceil_divided(count, tiles_of_item)
        tiles = select(has_tiles & (own_steps != 0), items, 0)
        return cls(part, steps, has_tiles, first_tile, count, first_step, own_steps, tiles, tiles_of_item)


class Stream(NamedTuple):
    """A share, and where its weights are: fields by name of each matrix, refs of stacks, and the layer."""

    share: Share
    weight_gmem: Sequence[dict[str, Any]]
    layer: Any

    def item(self, tile, step):
        """The number in the stack of a tile's step of 256 columns, both counted from the warp's first."""
        share = self.share
        row = self.layer * share.part.n_tiles + share.first_tile + tile
        return row * share.steps + share.first_step + step


class Field(NamedTuple):
    """A field in a slot of the ring, from byte `at` on: of each lane `vectors` times `size` bytes, each one
    of so many different `pieces`. is_vectors: whether kernels want a list of vectors of it.

    Vectors of 16 bytes lie beside those of other lanes, so that no bank is met twice. Where a lane's vectors
    are 16 bytes together, they lie beside each other, and are loaded at once.
    """

    at: int
    vectors: int
    pieces: int
    size: int
    is_vectors: bool

    @property
    def at_once(self) -> int:
        """Vectors of a load."""
        return self.vectors if self.vectors * self.size <= 16 else 1


class Ring:
    """phases   of each product its parts (Stream, or what is like one), of which a block has one at most
    smem     of the block: depth slots of so many bytes for each warp

    What changes from item to item is a list `state`: of the item to copy next the product's number, tile and
    step in it, of how many tiles and steps, and the slot of the item to multiply.
    """

    def __init__(self, phases: Sequence[Sequence[Any]], smem, depth: int, slot_bytes: int):
        self.phases, self.depth, self.slot_bytes = phases, depth, slot_bytes
        thread = integer(lanes.thread())
        self.lane = thread % 32
        self.address = memory.shared_address(smem) + thread // 32 * (depth * slot_bytes)

    def filled(self) -> list:
        """Begin to copy what there is room for: the first state."""
        phase, tiles, steps = self._from(0)
        state = [phase, integer(0), integer(0), tiles, steps, integer(0)]
        if len(self.phases) > 1:  # a loop, since the code for several products is long
            return lanes.loop(0, self.depth, 1, state, lambda _, state: self.refilled(state))
        for _ in range(self.depth):
            state = self.refilled(state)
        return [*state[:-1], integer(0)]

    def refilled(self, state: list, number: int = 0) -> list:
        """Begin to copy the next item, of product `number` or later, into the slot that was multiplied: the
        state behind it."""
        phase, tile, step, tiles, steps, slot = state
        several = len(self.phases) > 1
        self._copy(number, (phase == number) if several else None, tile, step, slot)
        if number + 1 < len(self.phases):
            with lanes.when(phase > number):
                for later in range(number + 1, len(self.phases)):
                    self._copy(later, phase == later, tile, step, slot)
        memory.commit_copies()  # a group of its own even if there was nothing
        step = step + 1
        last_step = step >= steps
        tile, step = select(last_step, tile + 1, tile), select(last_step, 0, step)
        if number + 1 < len(self.phases):
            last = tile >= tiles
            tile = select(last, 0, tile)
            phase, tiles, steps = lanes.choose(
                last, lambda: self._from(number + 1, phase + 1), [phase, tiles, steps]
            )
        slot = slot + 1
        return [phase, tile, step, tiles, steps, select(slot == self.depth, 0, slot)]

    def arrived(self, state: list):
        """Where the slot to multiply begins, when it is there."""
        memory.wait_copies(self.depth - 1)
        return self.address + state[-1] * self.slot_bytes

    def words(self, part: int_decode_plan.Part, unit: int, at_slot) -> dict:
        """A lane's words of a unit of an item by name, or vectors of four."""
        words = {}
        for name, field in _fields(part, unit).items():
            size = field.size * field.at_once
            at = at_slot + self.lane * size
            loaded = [
                memory.load_shared(size // 4, at, field.at + 32 * size * v)
                for v in range(field.vectors // field.at_once)
            ]
            words[name] = loaded if field.is_vectors else loaded[0]
        return words

    def _copy(self, number: int, condition, tile, step, slot):
        """Of product `number`, if the condition holds (None: it does) and there is such a tile."""
        for stream in self.phases[number]:
            share, part = stream.share, stream.share.part
            exists = tile < share.tiles
            with lanes.when(exists if condition is None else condition & exists):
                target = self.address + slot * self.slot_bytes
                for u in range(share.tiles_of_item):
                    # In place of a second tile that there is not, the first: nobody reads that product.
                    at = tile * share.tiles_of_item + u
                    item = stream.item(minimum(at, share.count - 1) if u else at, step)
                    for m, fields in enumerate(stream.weight_gmem):
                        self._copy_tile(part, u + m, fields, item, target)

    def _copy_tile(self, part: int_decode_plan.Part, unit: int, fields: dict[str, Any], item, target):
        """256 columns of a tile, as the slot's unit of this number."""
        for name, field in _fields(part, unit).items():
            piece = self.lane if field.pieces == 32 else self.lane // (32 // field.pieces)
            start, piece_bytes = memory.address(fields[name]), field.pieces * field.size
            source = memory.at_byte(start, item, field.vectors * piece_bytes, piece * field.size)
            to = target + field.at + self.lane * (field.size * field.at_once)
            between = field.size if field.at_once > 1 else 32 * field.size
            for v in range(field.vectors):
                memory.copy_async(to, source, field.size, v * between, v * piece_bytes)

    def _from(self, number: int, phase=None) -> list:
        """The first product from `phase` on, one of `number` and later, of which this warp has something: its
        number, tiles and steps."""
        first = [integer(len(self.phases)), integer(0), integer(0)]
        for at in reversed(range(number, len(self.phases))):
            tiles, steps = integer(0), integer(0)
            for share, *_ in self.phases[at]:
                tiles, steps = tiles + share.tiles, share.own_steps
            is_later = (tiles != 0) if phase is None else (tiles != 0) & (phase <= at)
            new = (integer(at), tiles, steps)
            first = [select(is_later, a, b) for a, b in zip(new, first, strict=True)]
        return first


class Window(Ring):
    """A ring for a launch that goes from product to product, layer after layer. It knows the product that is
    multiplied and the next one. The first number of its state counts empty slots: all items of both products
    were on their way when these slots came free."""

    def begun(self) -> list:
        """The state before the first product, for which `moved_on` is to be called."""
        return [integer(self.depth), integer(1), *[integer(0)] * 5]

    def moved_on(self, state: list) -> list:
        """The state for this window, whose first product was the second of the one before: what was missing
        is asked for."""
        missing, phase, tile, step, tiles, steps, slot = state
        phase = phase - 1
        phase, tiles, steps = lanes.choose(tiles == 0, lambda: self._from(0, phase), [phase, tiles, steps])

        def one(_, state):
            missing, *item = state
            at = select(slot < missing, slot + self.depth, slot) - missing
            filled = select(item[0] == len(self.phases), 0, integer(1))
            *item, _ = super(Window, self).refilled([*item, at])
            return [missing - filled, *item]

        return [*lanes.loop(0, missing, 1, [missing, phase, tile, step, tiles, steps], one), slot]

    def refilled(self, state: list, number: int = 0) -> list:
        missing, *item = state
        lacks = select(item[0] == len(self.phases), integer(1), 0)
        return [missing + lacks, *super().refilled(item, number)]


def _fields(part: int_decode_plan.Part, unit: int) -> dict[str, Field]:
    """Of a unit of a slot: one of several matrices' tiles, or of several tiles."""
    fields, at = {}, unit * part.item_bytes(1)
    for name, shape in zip(part.names, part.shapes, strict=True):
        vectors, pieces, words = int_decode_plan.lane_shape(shape)
        fields[name] = Field(at, vectors, pieces, 4 * words, len(shape) == 3)
        at += 32 * int_decode_plan.lane_bytes(shape)
    return fields
