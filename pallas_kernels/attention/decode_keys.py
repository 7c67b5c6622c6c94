"""What a lane has of 16 keys and values (decode_warp.py has the picture): how it loads them from their pages,
and the new keys in their places among them."""

import dataclasses
from typing import Any

import jax

from pallas_kernels.attention.decode_cache import LayerShare, team_warp
from pallas_kernels.gpu import lanes
from pallas_kernels.gpu.values import index, integer, select


@dataclasses.dataclass(frozen=True)
class Warp(LayerShare):
    """A warp of a team, by its number, and a lane of it.

    key_part    first dimensions of this lane's parts of a key, 8 each; value_part: of a value
    """

    number: Any
    g: Any
    t: Any
    key_part: list
    value_part: list

    @classmethod
    def locate(cls, work: LayerShare, layer=None) -> "Warp":
        """This warp and lane, in the layer of `work` or in another."""
        plan, layer = work.plan, work.layer if layer is None else layer
        number, lane = integer(team_warp(plan)), integer(lanes.thread() % 32)
        g, t = lane // 4, lane % 4
        key_part = [t * 8 + c for c in range(0, plan.head_dim, 32)]
        value_part = [g * 8 + c for c in range(0, plan.head_dim, 64)]
        return cls(plan, work.cache, work.share, layer, number, g, t, key_part, value_part)

    @property
    def heads(self) -> list:
        """The heads of this lane's scores; there are more than a block has, which nobody reads."""
        columns = self.plan.columns
        return [index(self.t)] if columns == 2 else [index(self.t) * 2 + i for i in (0, 1)]

    @property
    def itemsize(self) -> int:
        return jax.tree.leaves(self.cache.layout.DTYPE)[0].itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of a head's key, or value."""
        return self.plan.head_dim * self.itemsize

    def keys_at(self, base):
        """The keys of this lane's scores, of 16 from `base` on."""
        return [base + self.g + u * 8 for u in (0, 1)]

    def values_at(self, base):
        return [base + self.t * 2 + i for i in (0, 1, 8, 9)]

    def sees(self, j):
        """Whether key j, not before the first of its 16 that is visible, has a score."""
        window, share = self.plan.scores.window, self.share
        inside = j < share.stop
        return inside if window is None else inside & (j + window > share.length)

    def fetch(self, base, page):
        """16 keys and values as they are stored, [key][part], and between them their scales; the last in
        place of those that are not stored yet."""
        return self.fetch_keys(base, page), self.fetch_scales(base, page), self.fetch_values(base, page)

    def fetch_keys(self, base, page):
        return self._load(self.cache.pages[0], self.keys_at(base), self.key_part, page)

    def fetch_values(self, base, page):
        return self._load(self.cache.pages[1], self.values_at(base), self.value_part, page)

    def fetch_scales(self, base, page):
        """The scales of this lane's keys and values, as they are stored: a lane that widens them waits for
        memory."""
        heads = [self.place(self.stored_key(j), 0, page)[:-1] for j in self.keys_at(base)]
        scale = self.cache.layout.load_scale
        return [[scale(refs, at) for at in heads] for refs in self.cache.pages]

    def with_new_scales(self, token, js, scales):
        """The new keys' scales in their places among those of js."""

        def scale(which, j, old):
            return None if old is None else select(token.is_new(j), token.scale(which, j), old)

        return [
            [scale(which, *each) for each in zip(js, olds, strict=True)] for which, olds in enumerate(scales)
        ]

    def with_new(self, token, which: int, js, parts, stored):
        """The new keys (0), or values (1), in their places among those of js."""

        def new(j):
            return [
                token.as_stored(which, j, index(part // 8), old)
                for part, old in zip(parts, stored[0], strict=True)
            ]

        each = [new(js[0])] * len(js) if self.plan.tokens == 1 else map(new, js)
        return [
            jax.tree.map(lambda v, old, j=j: select(token.is_new(j), v, old), own, key)
            for j, own, key in zip(js, each, stored, strict=True)
        ]

    def _load(self, refs, js, parts, page):
        place = lambda j, part: self.place(self.stored_key(j), part, page)  # noqa: E731
        return [[self.cache.layout.load(refs, place(j, part)) for part in parts] for j in js]
