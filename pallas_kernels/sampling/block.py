"""What the threads of a row's block find together: sums, the best, thresholds, lists."""

import operator
from collections.abc import Callable
from typing import Any

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import as_real, as_word, in_pairs, index, integer, minimum, select, total

THREADS = 512
WARPS = THREADS // 32


class Block:
    """Sums and maxima over a block of threads, through shared memory. Every use has places of its own, and
    one in a loop two in turn, so that a barrier each is enough."""

    SLOTS = 16

    def __init__(self, partial_smem):
        self.smem, self.used = partial_smem, 0

    def place(self, count: int = 1):
        self.used += count
        assert self.used <= self.SLOTS
        return index((self.used - count) * WARPS)

    def gathered(self, words: list, place) -> list:
        """A word or more of each warp (the same in its lanes) -> of every warp, as lists in the order of
        warps."""
        warp = lanes.thread() // 32
        with lanes.when(lanes.thread() % 32 == 0):
            for i, word in enumerate(words):
                memory.store(word, self.smem, place + WARPS * i + warp)
        lanes.block_barrier()
        return [
            [
                w
                for j in range(0, WARPS, 4)
                for w in memory.load_words(4, self.smem, [place + (WARPS * i + j)])
            ]
            for i in range(len(words))
        ]

    def sum(self, count, place=None):
        """Of s32."""
        place = self.place() if place is None else place
        return in_pairs(operator.add, self.gathered([lanes.warp_sum(count)], place)[0])

    def sums(self, numbers: list, place=None) -> list:
        """Of float32, always in the same order."""
        place = self.place(len(numbers)) if place is None else place
        words = [as_word(lanes.warp_sum_real(x)) for x in numbers]
        return [
            in_pairs(operator.add, list(map(as_real, per_warp))) for per_warp in self.gathered(words, place)
        ]

    def best(self, score, token):
        """(score, token) of the largest score; of several the lowest token."""
        scores, tokens = self.gathered(list(best_of_warp(score, token)), self.place(2))
        return best_of_lane(list(zip(scores, tokens, strict=True)))

    def threshold(self, amount: Callable[[Any, Any], Any], least, most):
        """A word t for which amount(t, place), which falls as t grows, is `least` or more, and the largest
        one unless a smaller has no more than `most`; 0 if there is none. From the highest bit down."""
        first = self.place(2)

        def one(bit, carry):
            t, looking = carry

            def tried():
                candidate = t | integer(1) << 31 - integer(bit)
                value = amount(candidate, first + bit % 2 * WARPS)
                reached = value >= least
                return [select(reached, candidate, t), select(reached & (value <= most), 0, 1)]

            return lanes.choose(looking != 0, tried, carry)

        return lanes.loop(0, lanes.opaque(integer(32)), 1, [integer(0), integer(1)], one)[0]


def listed(rounds: list[list], counts_smem, store, begin: Any = 0, limit: Any = 2**31):
    """Number what meets its condition, round by round, in a round warp by warp, in a warp condition by
    condition, and lane by lane, from `begin` on: store(round, condition's number, place) where it does and
    the place is below the limit. Returns how many they are; a barrier must follow."""
    ballots = [[lanes.ballot(condition) for condition in conditions] for conditions in rounds]
    warp = integer(lanes.thread() // 32)
    with lanes.when(lanes.thread() % 32 == 0):
        for r, some in enumerate(ballots):
            memory.store(total([lanes.ones(ballot) for ballot in some]), counts_smem, warp + WARPS * r)
    lanes.block_barrier()
    firsts, count = before_this_warp(counts_smem, len(rounds))
    for r, (conditions, some) in enumerate(zip(rounds, ballots, strict=True)):
        at = firsts[r] + begin
        for i, (condition, ballot) in enumerate(zip(conditions, some, strict=True)):
            place = at + lanes.ones(ballot & lower_lanes())
            with lanes.when(condition & (place < limit)):
                store(r, i, place)
            at = at + lanes.ones(ballot)
    return count


def before_this_warp(counts_smem, rounds: int):
    """Counts of warps in so many rounds -> for each round what comes before this warp's; and their sum."""
    lane, warp = lanes.thread() % 32, integer(lanes.thread() // 32)
    places = [integer(lane) + 32 * i for i in range(-(-rounds * WARPS // 32))]
    last = rounds * WARPS - 1
    counts = [select(place <= last, memory.load(counts_smem, minimum(place, last)), 0) for place in places]
    before = [
        lanes.warp_sum(
            total([select(p < warp + WARPS * r, c, 0) for p, c in zip(places, counts, strict=True)])
        )
        for r in range(rounds)
    ]
    return before, lanes.warp_sum(total(counts))


def best_of_lane(pairs: list):
    """(score, token) of the largest score; of several the lowest token."""
    score, token = pairs[0]
    for other, other_token in pairs[1:]:
        better = (other > score) | (other == score) & (other_token < token)
        score, token = select(better, other, score), select(better, other_token, token)
    return score, token


def best_of_warp(score, token):
    """As `best_of_lane`, over the lanes of a warp, in each of them."""
    best = lanes.warp_max(score)
    return best, ~lanes.warp_max(select(score == best, ~token, 0))


def lower_lanes():
    """A bit for every lane before this one."""
    return (integer(1) << integer(lanes.thread() % 32)) - 1
