"""QK-norm and rope of heads that lie in lanes: a lane has 8 neighbouring numbers of a head, so that
head_dim / 8 neighbouring lanes have all of it. Called while a kernel is traced."""

import dataclasses
from typing import Any

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import as_real, as_word, integer, rsqrt, select, sum_of_squares

PART = 8  # numbers of a lane


@dataclasses.dataclass(frozen=True)
class LaneHeads:
    """Heads of `head_dim` numbers, a power of two from 64 to 256.

    pairs        that rope turns in a head; None: all; 0: none
    interleaved  whether pairs are (0, 1), (2, 3), ..; else (i, i + pairs), for which a lane needs those that
                 it turns to be all of its numbers, or none of them
    """

    head_dim: int
    pairs: int | None
    interleaved: bool

    @property
    def parts(self) -> int:
        """Lanes of a head."""
        return self.head_dim // PART

    @property
    def distances(self) -> tuple[int, ...]:
        """Between lanes of a head (xor)."""
        return tuple(2**i for i in range(self.parts.bit_length() - 1))

    @property
    def _half(self) -> int:
        """Parts of the first of each pair that is turned."""
        pairs = self.head_dim // 2 if self.pairs is None else self.pairs
        return pairs // PART

    def normed(self, x: list, gamma: list, eps: float) -> list:
        """rms_norm of each head."""
        mean = lanes.warp_sum_real(sum_of_squares(x), self.parts) * (1 / self.head_dim)
        norm = rsqrt(mean + eps)
        return [v * norm * w for v, w in zip(x, gamma, strict=True)]

    def angles(self, rotation: Any, at: list, part) -> tuple[list, list] | None:
        """cos and sin at a token's position, for the pairs of dimensions that this lane turns; None where no
        pairs are turned.

        rotation  refs of cos and sin, [.., pairs]
        at        indices of the token
        part      of this lane
        """
        if self.pairs == 0:
            return None
        cos_ref, sin_ref = rotation
        if self.interleaved:
            at, count = [*at, part * (PART // 2)], PART // 2
            return memory.load_reals(count, cos_ref, at), memory.load_reals(count, sin_ref, at)
        half = self._half
        at = [*at, part % half * PART]
        cos, sin = memory.load_reals(PART, cos_ref, at), memory.load_reals(PART, sin_ref, at)
        sin = [select(part < half, -v, v) for v in sin]
        if 2 * half < self.parts:  # only a part of a head is turned
            turns = part < 2 * half
            cos, sin = [select(turns, v, 1.0) for v in cos], [select(turns, v, 0.0) for v in sin]
        return cos, sin

    def rotated(self, x: list, part, cos: list, sin: list) -> list:
        """Rope of a whole head, if pairs are neighbours; else of its first dimensions, and other lanes have
        the other number of each pair."""
        if self.interleaved:
            out = []
            for i, (m, n) in enumerate(zip(cos, sin, strict=True)):
                a, b = x[2 * i : 2 * i + 2]
                out += [a * m - b * n, b * m + a * n]
            return out
        lane = lanes.thread() % 32
        half = self._half
        source = integer(select(part < half, lane + half, lane + (32 - half)) % 32)
        other = [as_real(lanes.from_lane(as_word(v), source)) for v in x]
        return [v * m + w * n for v, w, m, n in zip(x, other, cos, sin, strict=True)]
