"""Who may read and write a word of memory: happens-before, by vector clocks of warps.

In lockstep a kernel that lacks a barrier computes what it should. So each word remembers who wrote it last
and who has read it since, each warp what of the others' past it knows (by barriers and by words that it
received), and an access whose order is left to chance is an error here. Only of numbers in global memory a
lane may read what it then does not use: such a read gives NaN.
"""

import numpy as np

OWN = np.iinfo(np.int32).max


class Clocks:
    """known[w, v]: the time until which warp w knows what warp v did."""

    def __init__(self, blocks: int, warps: int):
        self.blocks, self.warps, self.now = blocks, warps, 1
        self.known = np.zeros((blocks * warps,) * 2, np.int32)
        self._own()

    def _own(self):
        np.fill_diagonal(self.known, OWN)

    def snapshot(self, warp=slice(None)) -> np.ndarray:
        """What one learns of warps by a message that they send now."""
        return np.minimum(self.known[warp], self.now)

    def learn(self, warps, snapshot):
        np.maximum.at(self.known, warps, snapshot)
        self._own()

    def barrier(self, groups, warps: int):
        """Of groups of so many neighbouring warps, by their numbers."""
        for group in groups:
            group_warps = slice(group * warps, (group + 1) * warps)
            self.known[group_warps] = self.snapshot(group_warps).max(axis=0)
        self._own()
        self.now += 1


class Words:
    """Accesses of some words. Of shared memory each block has its own: readers are its warps.

    lenient  reads are not remembered, and those that are left to chance are reported, not refused
    """

    def __init__(self, name: str, count: int, clocks: Clocks, shared: bool = False, lenient: bool = False):
        self.name, self.clocks, self.shared, self.count = name, clocks, shared, count
        self.lenient = lenient
        total = count * (clocks.blocks if shared else 1)
        self.writer = np.full(total, -1, np.int32)
        self.written = np.zeros(total, np.int32)
        self.readers = None
        self.same = np.zeros(total, np.uint32)  # bits of the block's warps that wrote what is there

    def _read(self):
        if self.readers is None:
            readers = self.clocks.warps if self.shared else len(self.clocks.known)
            self.readers = np.zeros((len(self.writer), readers), np.int32)
        return self.readers

    def _known(self, warps, others):
        return self.clocks.known[warps, others]

    def _late(self, words, warps):
        writer = self.writer[words]
        return (writer >= 0) & (self.written[words] > self._known(warps, writer))

    def read(self, words, warps):
        """Words (flat, of the block where they are shared) by one warp each: which are left to chance."""
        late = self._late(words, warps)
        if self.lenient:
            return late
        if self.shared and late.any():
            late &= self.same[words] >> warps % self.clocks.warps & 1 == 0
        assert not late.any(), f"{self.name}: word {words[late][0]} is read while it may be written"
        self._read()[words, warps % self._read().shape[1]] = self.clocks.now
        self.clocks.now += 1
        return late

    def write(self, words, warps, same=None):
        """`same`: where those bits are there already. To write them again is no race, but of tagged words."""
        own = np.uint32(1) << (warps % self.clocks.warps).astype(np.uint32)
        if same is None:
            self.same[words] = own_number = np.arange(len(words), dtype=np.uint32)
            assert (self.same[words] == own_number).all(), f"{self.name}: a word has two writers"
        elif (same := same & (self.writer[words] >= 0)).any():
            np.bitwise_or.at(self.same, words[same], own[same])
            words, warps, own = (v[~same] for v in (words, warps, own))
        late = self._late(words, warps)
        assert not late.any(), f"{self.name}: word {words[late][0]} has two writers"
        if self.readers is not None:
            n = self.readers.shape[1]
            first = warps - warps % n
            known = self.clocks.known[warps[:, None], first[:, None] + np.arange(n)]
            late = (self.readers[words] > known).any(axis=1)
            assert not late.any(), f"{self.name}: word {words[late][0]} is written while it may be read"
        self.writer[words], self.written[words], self.same[words] = warps, self.clocks.now, 0
        np.bitwise_or.at(self.same, words, own)
        self.clocks.now += 1
