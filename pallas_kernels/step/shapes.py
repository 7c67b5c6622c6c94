"""Sizes of a decode step in one launch (decode_layers.py), known before it is traced, and whether a GPU has
room for it."""

import dataclasses
import enum
import functools

from pallas_kernels import device
from pallas_kernels.attention.decode import Attention
from pallas_kernels.attention.decode_plan import WARPS
from pallas_kernels.gpu import shared_memory
from pallas_kernels.matmul.q1_decode_b1 import GROUP, BitProduct
from pallas_kernels.step import rows_of_planes
from pallas_kernels.step.rows_of_bytes import RowsOfBytes
from pallas_kernels.step.rows_of_planes import RowsOfPlanes
from pallas_kernels.step.rows_product import MOST_ROWS, RowsProduct

PAIR_BYTES = 2 * GROUP * 16 // 8  # of the words of a tile and a pair of groups
SCALE_BYTES = 2 * 16 * 2
Product = BitProduct | RowsProduct


class Phase(enum.IntEnum):
    """Of a layer, in order."""

    QKV = 0
    ATTENTION = 1
    O = 2  # noqa: E741
    GATE_UP = 3
    DOWN = 4


class Vector(enum.IntEnum):
    """What phases read and write, a row of x each."""

    X = 0  # the residual stream
    QKV = 1
    ATTENDED = 2
    HIDDEN = 3


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Static sizes of a step; `blocks` is the number of multiprocessors."""

    rows: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    blocks: int
    bits: int = 8
    eps: float = 0.0

    def refuses(self) -> str | None:
        """Why this step cannot run, or None."""
        if self.rows > MOST_ROWS:
            return f"{self.rows} rows are more than the {MOST_ROWS} that two products of a tensor core have"
        if self.rows > 1 and self.bits != 8:
            return f"activations of {self.rows} rows are passed on as 8 bits; {self.bits} were asked for"
        taken, most = shared_memory.bytes_taken(*self.buffers), device.shared_bytes()
        if taken > most:
            return f"a block's share of a layer takes {taken} bytes of shared memory; there are {most}"
        if (owners := self.attention(1, 1, False, False).owners) > self.blocks:
            return f"{owners} blocks for attention are more than {self.blocks} multiprocessors"
        return None

    @property
    def passes_on(self) -> bool:
        """Whether activations are quantized once and passed on (rows_product.py); of one row, each block
        quantizes what it multiplies."""
        return self.rows > 1

    def products(self) -> dict[Phase, Product]:
        """The products by phase."""
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim

        def product(n, k, **rest):
            n_tiles = -(-n // 16)
            kind = RowsOfBytes if self.rows > rows_of_planes.MOST_ROWS else RowsOfPlanes
            if not self.passes_on:
                kind = functools.partial(BitProduct, bits=self.bits)
            return kind(
                rows=self.rows, columns=k, n_tiles=n_tiles, pairs=-(-k // (2 * GROUP)), warps=WARPS,
                tiles=-(-n_tiles // self.blocks), eps=self.eps, **rest,
            )  # fmt: skip

        return {
            Phase.QKV: product(width + 2 * kv_width, self.hidden, normed=True),
            Phase.O: product(self.hidden, width),
            Phase.GATE_UP: product(self.ffn, self.hidden, normed=True, matrices=2),
            Phase.DOWN: product(self.hidden, self.ffn),
        }

    def attention(self, page_size: int, pages: int, normed: bool, interleaved: bool) -> Attention:
        return Attention(
            rows=self.rows, kv_heads=self.kv_heads, group=self.heads // self.kv_heads,
            head_dim=self.head_dim, page_size=page_size, pages=pages, most_blocks=self.blocks,
            normed=normed, eps=self.eps, interleaved=interleaved,
        )  # fmt: skip

    @property
    def weight_bytes(self) -> int:
        """Of shared memory, for a block's share of a layer."""
        return sum(share_bytes(p) * p.matrices for p in self.products().values())

    @property
    def scratch(self) -> int:
        """float32 of shared memory for the phases, in turn."""
        return max(phase.scratch for phase in (self.attention(1, 1, False, False), *self.products().values()))

    @property
    def buffers(self) -> tuple[int, int, int]:
        """Bytes of shared memory for a layer's weights, the phases' scratch and their mbarriers."""
        return self.weight_bytes, 4 * self.scratch, 8 * len(Phase)

    def width(self, vector: Vector) -> int:
        """Of a row of it, in the workspace."""
        p = self.products()
        return {
            Vector.X: p[Phase.DOWN].n_tiles * 16,
            Vector.QKV: p[Phase.QKV].n_tiles * 16,
            Vector.ATTENDED: p[Phase.O].columns,
            Vector.HIDDEN: p[Phase.GATE_UP].n_tiles * 16,
        }[vector]


def share_bytes(p: Product) -> int:
    """Of a block's tiles of one matrix."""
    return p.tiles * p.pairs * (PAIR_BYTES + SCALE_BYTES)
