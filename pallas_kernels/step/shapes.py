"""Sizes of a decode step in one launch (decode_layers.py), known before it is traced, and whether a GPU has
room for it."""

import dataclasses
import enum

from pallas_kernels import device
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.attention.decode import Attention
from pallas_kernels.attention.decode_plan import KEYS, WARPS
from pallas_kernels.gpu import shared_memory
from pallas_kernels.matmul.bit_mma.byte_product import ByteProduct
from pallas_kernels.matmul.bit_mma.plane_product import MOST_PLANE_ROWS, PlaneProduct
from pallas_kernels.matmul.bit_mma.product import (
    GROUP,
    MMA_COLUMNS,
    MOST_ROWS,
    Product,
)
from pallas_kernels.step.low_rank_plan import NO_CHANGES, Beside, Changes, beside

MOST_SPLITS = 4
MOST_SLOTS = 2 * WARPS


class Phase(enum.IntEnum):
    """Of a layer, in order."""

    QKV = 0
    ATTENTION = 1
    O = 2  # noqa: E741
    GATE_UP = 3
    DOWN = 4


class Vector(enum.IntEnum):
    """What phases read and write, a row of x each."""

    X = 0  # the residual stream, of one row
    QKV = 1
    ATTENDED = 2
    HIDDEN = 3
    O_SUMS = 4  # what is to be added to the residual stream, of more rows: sums of each split
    DOWN_SUMS = 5


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Static sizes of a step.

    blocks     the number of multiprocessors
    bits       8 or 16, to which activations are rounded; down_bits: those that down reads
    changes    an adapter's
    tokens     so many neighbouring rows are one sequence's (attention/decode_plan.py)
    cache_bits of a number that is stored of a key or a value: 8, 16 or 32
    """

    rows: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    blocks: int
    bits: int = 8
    down_bits: int = 8
    eps: float = 0.0
    activation: Activation = SILU
    changes: Changes = NO_CHANGES
    tokens: int = 1
    cache_bits: int = 16

    def refuses(self) -> str | None:
        """Why this step cannot run, or None."""
        bits = max(self.bits, self.down_bits)
        if self.rows * self._digits(bits) > MOST_ROWS:
            most = f"{MOST_ROWS // self._digits(bits)}, whose activations of {bits} bits"
            return f"{self.rows} rows are more than {most} a warp has registers for"
        if reason := self.changes.refuses(self.rows):
            return reason
        taken, most = shared_memory.bytes_taken(*self.buffers), device.shared_bytes()
        if taken > most:
            return f"a block's share of a layer takes {taken} bytes of shared memory; there are {most}"
        a = self.attention(1, 1, False, False)
        if self.changes and a.teams > 1:
            return f"with an adapter each team for attention has a block; {a.owners} share {self.blocks}"
        if a.owners > a.teams * self.blocks:
            return f"{a.owners} teams for attention are more than {self.blocks} multiprocessors have"
        return None

    @property
    def passes_on(self) -> bool:
        """Whether activations are quantized once and passed on (product.py). With one row, each block
        quantizes what it multiplies."""
        return self.rows > 1

    @property
    def warps(self) -> int:
        """Of a block: 16 for one row of a model that has more than 8 pairs of groups, else 8. With one row a
        warp mostly waits, for memory or for its own last instruction, and 16 wait side by side. Several rows
        were slower with 16 (LOG.md). Keys of 8 or 32 bits would spill, since a lane of 16 warps has 128
        registers. low_rank.py, for adapters, counts on 8."""
        sixteen = self.rows == 1 and self.hidden > WARPS * 2 * GROUP
        return 2 * WARPS if sixteen and self.cache_bits == 16 and not self.changes else WARPS

    def _digits(self, bits: int) -> int:
        """How many digits of 8 bits an activation is passed on in."""
        return bits // 8 if self.passes_on else 1

    def products(self) -> dict[Phase, Product]:
        """The products by phase."""
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim

        def product(n, k, added=False, bits=self.bits, **rest):
            digits = self._digits(bits)
            rows, n_tiles = self.rows * digits, -(-n // 16)
            kind = ByteProduct if rows > MOST_PLANE_ROWS else PlaneProduct
            p = kind(
                rows=rows, columns=k, n_tiles=n_tiles, pairs=-(-k // (2 * GROUP)), warps=self.warps,
                tiles=-(-n_tiles // self.blocks), eps=self.eps, bits=bits // digits, digits=digits,
                activation=self.activation, **rest,
            )  # fmt: skip
            return _split(p, self.blocks) if added and self.passes_on else p

        return {
            Phase.QKV: product(width + 2 * kv_width, self.hidden, normed=True),
            Phase.O: product(self.hidden, width, added=True),
            Phase.GATE_UP: product(self.ffn, self.hidden, normed=True, matrices=2),
            Phase.DOWN: product(self.hidden, self.ffn, added=True, bits=self.down_bits),
        }

    def attention(self, page_size: int, pages: int, normed: bool, interleaved: bool) -> Attention:
        return Attention(
            rows=self.rows, kv_heads=self.kv_heads, group=self.heads // self.kv_heads,
            head_dim=self.head_dim, page_size=page_size, pages=pages, most_blocks=self.blocks,
            normed=normed, eps=self.eps, interleaved=interleaved, one_launch=True, tokens=self.tokens,
            other_warps=self.warps > WARPS, all_splits=bool(self.changes), apart=self.passes_on,
        )  # fmt: skip

    def beside(self, phase: Phase) -> Beside:
        """The changes beside a product."""
        qkv, o, *gate_up, down = self.changes.matrices
        matrices = {Phase.QKV: [qkv], Phase.O: [o], Phase.GATE_UP: gate_up, Phase.DOWN: [down]}
        return beside(matrices[phase], 16 * self.products()[phase].n_tiles)

    @property
    def begins(self) -> dict[tuple[Phase, int], int]:
        """The first byte of each phase's matrices in the shared memory for weights."""
        out, at = {}, 0
        for phase, p in self.products().items():
            for m in range(p.matrices):
                out[phase, m] = at
                at += p.shared_bytes
        return out

    @property
    def weight_bytes(self) -> int:
        """Shared memory for a block's share of a layer's weights."""
        return sum(p.shared_bytes * p.matrices for p in self.products().values())

    @property
    def slots(self) -> list[int]:
        """The first byte of each slot for keys and values of attention's warps. Slots lie in the shared
        memory for weights: in place of the weights of down and of q, k and v, which are requested later, and
        after all weights. Empty if there is no room; with more room, the first warps have a second slot (from
        9 rows on there are no registers for it)."""
        size, products = self.slot_bytes, self.products()
        within = lambda phase: [  # noqa: E731
            self.begins[phase, 0] + at for at in range(0, products[phase].shared_bytes - size + 1, size)
        ]
        down, qkv = within(Phase.DOWN), within(Phase.QKV)
        most = MOST_SLOTS if self.rows * self._digits(self.bits) <= MMA_COLUMNS else WARPS
        for count in range(most, WARPS - 1, -1):
            beyond = [self.weight_bytes + i * size for i in range(count - len(down) - len(qkv))]
            places = [*down, *beyond, *qkv][:count]
            end = max(self.weight_bytes, max(places) + size)
            if shared_memory.bytes_taken(end, self._scratch_bytes) <= device.shared_bytes():
                return places
        return []

    @property
    def early_slots(self) -> int:
        """Warps whose first slot is not in place of the weights of q, k and v."""
        return sum(place >= self.begins[Phase.O, 0] for place in self.slots[:WARPS])

    @property
    def slot_bytes(self) -> int:
        """Bytes of 16 keys and values of 16 bits each."""
        return 2 * KEYS * self.head_dim * 2

    @property
    def sums_among_weights(self) -> bool:
        """Whether the sums of gate and up lie in place of the weights of q, k, v and o, which have been read
        and are requested again later. They do with more than 16 rows; else they lie in the scratch, as others
        do."""
        products = self.products()
        p, room = products[Phase.GATE_UP], products[Phase.QKV].shared_bytes + products[Phase.O].shared_bytes
        return p.rows > 2 * MMA_COLUMNS and 4 * p.scratch <= room

    @property
    def scratch(self) -> int:
        """float32 of shared memory, an even number: for the phases, in turn; and for changes, what a block
        makes of a vector, and t (low_rank.py), which may lie where attention's output has been."""
        if self.changes:
            a, ranks = self.attention(1, 1, False, False), [self.beside(p).ranks for p in self.products()]
            return max(self.made_at + a.heads * a.head_dim, self.inner_at + max(ranks))
        return self._scratch_of_phases + self._scratch_of_phases % 2

    @property
    def _scratch_of_phases(self) -> int:
        elsewhere = Phase.GATE_UP if self.sums_among_weights else None
        others = [p for phase, p in self.products().items() if phase != elsewhere]
        return max(phase.scratch for phase in (self.attention(1, 1, False, False), *others))

    @property
    def made_at(self) -> int:
        """Where in the scratch memory is what a block makes of a vector."""
        return -(-self._scratch_of_phases // 4) * 4

    @property
    def inner_at(self) -> int:
        """Where in the scratch memory is t."""
        return self.made_at + max(16 * p.tiles for p in self.products().values())

    @property
    def buffers(self) -> tuple[int, int]:
        """Bytes of shared memory for a layer's weights and keys among them, and for the phases' scratch with
        their mbarriers behind it: a buffer of their own would take 1,024 bytes."""
        ends = [place + self.slot_bytes for place in self.slots]
        return max(self.weight_bytes, *ends, 0), self._scratch_bytes

    @property
    def _scratch_bytes(self) -> int:
        return 4 * self.scratch + 8 * len(Phase)

    def width(self, vector: Vector) -> int:
        """Columns of a row of a vector in the workspace."""
        if vector == Vector.ATTENDED:
            return self.heads * self.head_dim
        maker = {Vector.QKV: Phase.QKV, Vector.HIDDEN: Phase.GATE_UP}.get(vector, Phase.DOWN)
        return self.products()[maker].n_tiles * 16

    def copies(self, vector: Vector) -> int:
        """Copies of a vector in the workspace."""
        if vector in (Vector.O_SUMS, Vector.DOWN_SUMS):
            phase = Phase.O if vector == Vector.O_SUMS else Phase.DOWN
            return self.products()[phase].splits if self.passes_on else 0
        return int(vector != Vector.X or not self.passes_on)


def _split(p: Product, blocks: int) -> Product:
    """The same with its columns split as often as gives no warp more work. With up to eight rows a block must
    still do its tiles in one round; with more rows, reading less of what is passed on is worth rounds."""
    for splits in range(MOST_SPLITS, 1, -1):
        if p.columns % (2 * GROUP * splits) or blocks < splits:
            continue
        q = dataclasses.replace(
            p, splits=splits, columns=p.columns // splits, pairs=p.pairs // splits,
            tiles=-(-p.n_tiles // (blocks // splits)),
        )  # fmt: skip
        if q.tiles * q.per_warp <= p.tiles * p.per_warp and (q.together == q.tiles or p.rows > MMA_COLUMNS):
            return q
    return p
