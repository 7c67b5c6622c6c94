"""A row of logits as kernels of the draw read it: after penalties and biases, with noise.

A warp reads a group, GROUP neighbouring tokens, four of each lane: those at lane + 32 i, so that loads are of
whole lines whatever the row's alignment.
"""

from typing import Any

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import (
    as_real,
    as_word,
    exp,
    index,
    integer,
    log,
    minimum,
    ordered,
    real,
    select,
)

GROUP = 128
EACH = GROUP // 32  # tokens of a lane


class Row:
    """A row of the batch, as lanes of whole warps read it."""

    def __init__(self, logits, rules: Any, keys, positions, row):
        self.logits, self.rules, self.row = logits, rules, index(row)
        self.vocabulary = logits.type.shape[1]
        at = lambda ref: memory.load(ref, self.row)  # noqa: E731
        self.temperature, self.top_k = at(rules.temperature), at(rules.top_k)
        self.top_p, self.min_p = at(rules.top_p), at(rules.min_p)
        self.penalties = [
            at(ref) for ref in (rules.repetition_penalty, rules.presence_penalty, rules.frequency_penalty)
        ]
        self.key = [memory.load(keys, self.row, i) for i in (0, 1)]
        self.position = at(positions)
        tables, number = rules.seen.type.shape[0], at(rules.table)
        self.counted, self.table = number < tables, index(minimum(number, tables - 1))
        self.first_biases = self._biases(0)
        self.greedy = self.temperature == 0
        no_top_k = (self.top_k == 0) | (self.top_k >= self.vocabulary)
        self.truncates_nothing = ~self.greedy & no_top_k & (self.top_p >= 1) & (self.min_p <= 0)
        # To be greedy is to draw the likeliest one without noise.
        self.k = select(self.greedy, 1, select(no_top_k, self.vocabulary, self.top_k))
        self.top_p = select(self.greedy, 1.0, self.top_p)
        self.min_p = select(self.greedy, 0.0, self.min_p)
        self.divisor = select(self.greedy, 1.0, self.temperature)
        self.scale = select(at(rules.temperature_first), 1 / self.divisor, 1.0)

    def at_its_position(self):
        """The key of the row's noise at its position, for `score`."""
        return lanes.choose(~self.greedy, lambda: _threefry(self.key, integer(0), self.position), self.key)

    def ids(self, group) -> list:
        """The tokens of a group that this lane has, as i32."""
        first = integer(group) * GROUP + integer(lanes.thread() % 32)
        return [first + 32 * i for i in range(EACH)]

    def read(self, group) -> list:
        """Logits of this lane's tokens of a group, as the model made them."""
        last = self.vocabulary - 1
        return [memory.load(self.logits, self.row, minimum(i, last)) for i in self.ids(group)]

    def changed(self, group, logits: list) -> list:
        """What `read` read after penalties and biases; -inf of what may not be drawn."""
        ids, (repetition, presence, frequency) = self.ids(group), self.penalties

        def penalized():
            out = []
            for token, x in zip(ids, logits, strict=True):
                at = self.table, minimum(token, self.vocabulary - 1)
                seen, count = memory.load(self.rules.seen, *at), memory.load(self.rules.counts, *at)
                x = select(seen, select(x > 0, x / repetition, x * repetition), x)
                out.append(x - (frequency * real(count) + select(count != 0, presence, 0.0)))
            return out

        any_penalty = (repetition != 1) | (presence != 0) | (frequency != 0)
        values = self._biased(group, lanes.choose(any_penalty, penalized, logits), self.first_biases)
        width = self.rules.bias.type.shape[1]
        values = lanes.loop(
            32, width, 32, values, lambda i, values: self._biased(group, values, self._biases(i))
        )
        may = [token < self.vocabulary for token in ids]
        if (allowed := self.rules.allowed) is not None:
            last = allowed.type.shape[1] - 1
            words = [memory.load(allowed, self.row, minimum(token // 32, last)) for token in ids]
            may = [
                ok & (word >> token % 32 & 1 != 0) for ok, word, token in zip(may, words, ids, strict=True)
            ]
        return [select(ok, x, -float("inf")) for ok, x in zip(may, values, strict=True)]

    def _biases(self, first):
        """Of 32 biases, this lane's: its token, or one beyond the vocabulary, and what it adds, as words."""
        width = self.rules.bias.type.shape[1]
        entry = integer(first) + integer(lanes.thread() % 32)
        at = self.row, minimum(entry, width - 1)
        token = select(entry < width, memory.load(self.rules.bias_ids, *at), self.vocabulary)
        return [token, as_word(memory.load(self.rules.bias, *at))]

    def _biased(self, group, values: list, biases: list) -> list:
        """The values of a group's tokens, with 32 biases."""
        lane = integer(lanes.thread() % 32)
        token = biases[0] - integer(group) * GROUP  # from 0 to GROUP - 1: of this group

        def one(bias, values):
            place, added = (lanes.from_lane(word, integer(bias)) for word in (token, biases[1]))
            return [select(place == lane + 32 * i, x + as_real(added), x) for i, x in enumerate(values)]

        some = lanes.any_lane(select((token < GROUP) & (biases[0] < self.vocabulary), 1, 0))
        count = lanes.opaque(integer(32))  # not unrolled
        return lanes.choose(some, lambda: lanes.loop(0, count, 1, values, one), values)

    def weight(self, x, peak):
        """How likely a token of this logit is for the truncations, over one of the logit `peak`."""
        return exp((x - peak) * self.scale)

    def score(self, value, token, key: list):
        """Of a token in the draw, as a word that `sortable` makes."""
        noisy = lambda: [value / self.divisor + _gumbel(key, token)]  # noqa: E731
        return sortable(lanes.choose(~self.greedy, noisy, [value])[0])


def sortable(x):
    """A float32 as a word in the same order, 0 below all (pallas_kernels.sampling.reference.sortable)."""
    return ordered(select(x == 0, 0.0, x))  # -0 becomes +0


def _gumbel(key: list, token):
    """Noise of a token (pallas_kernels.sampling.reference.gumbel)."""
    bits = _threefry(key, token, integer(0))[0]
    u = (real(bits >> 9) + 0.5) * 2.0**-23
    return -log(-log(u))


def _threefry(key: list, x, y) -> list:
    """Threefry-2x32 of two words, 20 rounds (Salmon et al. 2011)."""
    keys = [*key, key[0] ^ key[1] ^ 0x1BD11BDA]
    x, y = x + keys[0], y + keys[1]
    for i in range(5):
        for by in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x = x + y
            y = x ^ (y << by | y >> 32 - by)
        x, y = x + keys[(i + 1) % 3], y + keys[(i + 2) % 3] + (i + 1)
    return [x, y]
