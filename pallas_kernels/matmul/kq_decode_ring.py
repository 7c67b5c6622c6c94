"""The weights of a warp of kq_decode on their way through shared memory, of one product or of several that
follow each other in a launch.

    an item    a tile's 256 columns of one matrix; the items of a warp are in the order tile, matrix, step
    the ring   slots of an item each; a slot that was multiplied is at once asked for the item `depth` further

A lane reads from a slot what it copied there itself, so nobody waits for another warp. Copies run on from a
product to the next, whose first weights are there before its activations.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import integer, minimum, of, select
from pallas_kernels.matmul import kq_decode_plan


class Share(NamedTuple):
    """What a warp has of a part of a product; what is Any is an MLIR value.

    part        of the plan
    matrices    2 for SwiGLU
    steps       of 256 columns, of all warps
    here        whether the block has tiles of this part
    first_tile, count   of the block
    first_step, mine    of the warp's steps
    units       tiles times matrices of which the warp has steps
    """

    part: kq_decode_plan.Part
    matrices: int
    steps: int
    here: Any
    first_tile: Any
    count: Any
    first_step: Any
    mine: Any
    units: Any

    @classmethod
    def of(cls, part: kq_decode_plan.Part, matrices: int, steps: int, warps: int) -> "Share":
        from_part = integer(lanes.block()) - part.first_block
        # Blocks of other parts are below 0, which is large here, or behind the last.
        here = from_part < part.blocks
        first_tile = from_part * part.tiles
        count = minimum(part.n_tiles - first_tile, part.tiles)
        per_warp = -(-steps // warps)
        first_step = integer(lanes.thread()) // 32 * per_warp
        mine = arith.minsi(integer(per_warp), steps - first_step)  # signed: below 0 behind the last
        mine = of(arith.maxsi(integer(0), mine))
        units = select(here & (mine != 0), count * matrices, 0)
        return cls(part, matrices, steps, here, first_tile, count, first_step, mine, units)


class Stream(NamedTuple):
    """A share, and where its weights are: fields by name of each matrix, refs of stacks, and the layer."""

    share: Share
    weight_gmem: Sequence[dict[str, Any]]
    layer: Any


class Field(NamedTuple):
    """A field in a slot of the ring: from byte `at` on `vectors` times 32 lanes' pieces of `size` bytes.
    shape: what a tile has of it."""

    at: int
    size: int
    vectors: int
    shape: tuple[int, ...]


class Ring:
    """phases   of each product its parts, of which a block has one at most
    smem     of the block: depth slots of so many bytes for each warp

    What changes from item to item is a list `state`: of the item to copy next the product's number, unit and
    step in it, of how many units and steps, and the slot of the item to multiply.
    """

    def __init__(self, phases: Sequence[Sequence[Stream]], smem, depth: int, slot_bytes: int):
        self.phases, self.depth, self.slot_bytes = phases, depth, slot_bytes
        thread = integer(lanes.thread())
        self.lane = thread % 32
        self.address = memory.shared_address(smem) + thread // 32 * (depth * slot_bytes)

    def filled(self) -> list:
        """Begin to copy what there is room for: the first state."""
        phase, units, mine = self._from(0)
        state = [phase, integer(0), integer(0), units, mine, integer(0)]
        return lanes.loop(0, self.depth, 1, state, lambda _, state: self.refilled(state))

    def refilled(self, state: list, number: int = 0) -> list:
        """Begin to copy the next item, of product `number` or later, into the slot that was multiplied: the
        state behind it."""
        phase, unit, step, units, mine, slot = state
        several = number + 1 < len(self.phases)
        for at, streams in enumerate(self.phases[number:], number):
            for stream in streams:
                wanted = unit < stream.share.units
                if len(self.phases) > 1:
                    wanted = wanted & (phase == at)
                with lanes.when(wanted):
                    self._copy(stream, unit, step, slot)
        memory.commit_copies()  # a group of its own even if there was nothing
        step = step + 1
        last_step = step >= mine
        unit, step = select(last_step, unit + 1, unit), select(last_step, 0, step)
        if several:
            last = unit >= units
            unit = select(last, 0, unit)
            phase, units, mine = lanes.choose(
                last, lambda: self._from(number + 1, phase + 1), [phase, units, mine]
            )
        slot = slot + 1
        return [phase, unit, step, units, mine, select(slot == self.depth, 0, slot)]

    def arrived(self, state: list):
        """Where the slot to multiply begins, when it is there."""
        memory.wait_copies(self.depth - 1)
        return self.address + state[-1] * self.slot_bytes

    def words(self, part: kq_decode_plan.Part, at_slot) -> dict:
        """A lane's words of an item by name, or vectors of four."""
        words = {}
        for name, field in _fields(part).items():
            at = at_slot + self.lane * field.size
            loaded = [
                memory.load_shared(field.size // 4, at, field.at + 512 * v) for v in range(field.vectors)
            ]
            words[name] = loaded if len(field.shape) == 3 else loaded[0]
        return words

    def _copy(self, stream: Stream, unit, step, slot):
        share, part = stream.share, stream.share.part
        tile = stream.layer * part.n_tiles + share.first_tile + unit // share.matrices
        item = tile * share.steps + share.first_step + step
        for name, field in _fields(part).items():
            start = memory.address(stream.weight_gmem[0][name])
            if share.matrices == 2:
                start = select(unit % 2 == 0, start, memory.address(stream.weight_gmem[1][name]))
            piece = self.lane // (32 // field.shape[0]) if len(field.shape) < 3 else self.lane
            source = memory.at_byte(start, item, 4 * math.prod(field.shape), piece * field.size)
            target = self.address + slot * self.slot_bytes + field.at + self.lane * field.size
            for v in range(field.vectors):
                memory.copy_async(target, source, field.size, at=512 * v)

    def _from(self, number: int, phase=None) -> list:
        """The first product from `phase` on, one of `number` and later, of which this warp has something: its
        number, units and steps."""
        found = [integer(len(self.phases)), integer(0), integer(0)]
        for at in reversed(range(number, len(self.phases))):
            units, mine = integer(0), integer(0)
            for share, *_ in self.phases[at]:
                units, mine = units + share.units, share.mine
            it = (units != 0) if phase is None else (units != 0) & (phase <= at)
            of_it = (integer(at), units, mine)
            found = [select(it, new, old) for new, old in zip(of_it, found, strict=True)]
        return found


def _fields(part: kq_decode_plan.Part) -> dict[str, Field]:
    fields, at = {}, 0
    for name, shape in zip(part.names, part.shapes, strict=True):
        size = kq_decode_plan.lane_bytes(shape)
        fields[name] = Field(at, min(size, 16), max(1, size // 16), shape)
        at += 32 * size
    return fields
