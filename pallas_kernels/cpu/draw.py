"""The CPU kernel that draws tokens: the formula is in sampling/api.py. A thread draws a whole row.

    logits -> x          penalties, biases and allowed tokens; the largest
    x -> levels          how many tokens are within 1, 2, 3, ... 16 of the largest, and their weights' sum
    levels -> candidates tokens of the narrowest level that has all that truncation keeps, else all tokens
    candidates -> kept   thresholds of top-k and top-p, bit by bit, then min-p
    kept -> token        the largest x / temperature + noise

Tables of tokens seen are read for rows with penalties only. Sums are made in another order than the
reference's, and exp and log may differ in the last place: a token at a boundary of top-p may fall on its
other side, by parts in a million.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
from llvmlite import ir

from pallas_kernels.cpu import ffi, later
from pallas_kernels.cpu.values import (
    F32,
    I8,
    I32,
    I64,
    Type,
    Value,
    Variable,
    constant,
    exp,
    log,
    loop,
    vector,
    when,
)
from pallas_kernels.sampling.rules import NO_TOKEN

LANES = 16
LEVELS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)  # below the largest logit
ARRAYS = ("x", "values", "weights", "ids")  # of a row, in the workspace; the last three of candidates
FIELDS = (
    "logits", "temperature", "top_k", "top_p", "min_p", "temperature_first", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "bias_ids", "bias", "seen", "counts", "keys", "positions",
    "table", "allowed",
)  # fmt: skip
RESULTS = ("tokens", "seen", "counts", "workspace")
BYTES = {"temperature_first": 1, "seen": 1}  # of an element, where it is not 4
LOWEST = -3.4e38  # below it is -inf
TURNS = (13, 15, 26, 6), (17, 29, 16, 24)  # Threefry's rotations


@dataclasses.dataclass(frozen=True)
class Kernel:
    """allowed: whether there are bits of the tokens that may be drawn"""

    allowed: bool

    def target(self) -> str:
        return later.target(self, _module)


def workspace(vocabulary: int) -> tuple[int, int]:
    """The shape of a row's workspace, of 4-byte words. Candidates end with a whole vector."""
    return len(ARRAYS), (vocabulary // LANES + 2) * LANES


def _module(kernel: Kernel, name: str) -> ir.Module:
    def part(frame: Value, i: Value, n: Value) -> None:
        rows = ffi.size(frame, 0, 0)
        with loop(rows * i / n, rows * (i + 1) / n) as row:
            _Row(frame, row, kernel.allowed).draw()

    return ffi.handler(name, ffi.Phase(lambda frame, threads: ffi.size(frame, 0, 0), part))


class _Row:
    """The code that draws one row."""

    def __init__(self, frame: Value, row: Value, allowed: bool):
        self.frame, self.row, self.b, self.allowed = frame, row, frame.b, allowed
        self.vocabulary = ffi.size(frame, 0, 1)
        self.padded = (self.vocabulary + (LANES - 1)) / LANES * LANES
        stride = ffi.result_size(frame, RESULTS.index("workspace"), 2) * 4
        start = ffi.result(frame, RESULTS.index("workspace")).at(row * len(ARRAYS) * stride)
        self.arrays = {name: start.at(stride * i) for i, name in enumerate(ARRAYS)}
        tables, number = ffi.size(frame, FIELDS.index("seen"), 0), self.number("table", I32).unsigned(I64)
        self.counted = number.compared("<", tables)
        self.table = self.counted.select(number, 0)
        self.temperature, self.top_p, self.min_p = map(self.number, ("temperature", "top_p", "min_p"))
        self.zero = constant(self.b, I64, 0)

    def field(self, name: str) -> Value:
        """The address of this row's part of an argument."""
        i = FIELDS.index(name)
        part = (self.table if name in ("seen", "counts") else self.row) * BYTES.get(name, 4)
        if name in ("logits", "bias_ids", "bias", "seen", "counts", "keys", "allowed"):
            part = part * ffi.size(self.frame, i, 1)
        return ffi.argument(self.frame, i).at(part)

    def number(self, name: str, kind: Type = F32) -> Value:
        return self.field(name).load(kind)

    def real(self, value: float) -> Value:
        return constant(self.b, F32, value)

    def whole(self, value: int, kind: Type = I64) -> Value:
        return constant(self.b, kind, value)

    def lanes(self, value: float | np.ndarray, kind: Type = F32) -> Value:
        return constant(self.b, vector(kind, LANES), value)

    def draw(self) -> None:
        """Write the token, and count it in the tables."""
        self.change()
        peak = Variable(self.largest())
        token = Variable(self.whole(NO_TOKEN, I32))
        with when(peak.value.compared("<", float("inf")) & peak.value.compared(">", -float("inf"))):
            token.value = self.first(peak.value)
            with when(self.temperature.compared(">", 0.0)):
                token.value = self.drawn(peak.value, token.value)
            with when(self.counted):
                self.remember(token.value)
        ffi.result(self.frame, RESULTS.index("tokens")).at(self.row * 4).store(token.value)

    def remember(self, token: Value) -> None:
        at = self.table * self.vocabulary + token.unsigned(I64)
        ffi.result(self.frame, RESULTS.index("seen")).at(at).store(self.whole(1, I8))
        count = ffi.result(self.frame, RESULTS.index("counts")).at(at * 4)
        count.store(count.load(I32) + 1)

    # Logits

    def change(self) -> None:
        """Write x: logits after penalties and biases; -inf where not allowed, and up to whole vectors."""
        penalties = [self.number(f"{name}_penalty") for name in ("repetition", "presence", "frequency")]
        neutral = penalties[0].compared("==", 1.0)
        for penalty in penalties[1:]:
            neutral = neutral & penalty.compared("==", 0.0)
        with self.b.if_else(neutral.ir) as (yes, no):
            with yes:
                self.write(lambda at, x, count: x)
            with no:
                self.write(functools.partial(self.penalized, penalties))
        ids, biases = self.field("bias_ids"), self.field("bias")
        with loop(self.zero, ffi.size(self.frame, FIELDS.index("bias"), 1)) as i:
            token = ids.at(i * 4).load(I32).signed(I64)
            inside = token.compared(">=", 0) & token.compared("<", self.vocabulary)
            with when(inside):
                x = self.arrays["x"].at(token * 4)
                x.store(x.load(F32) + biases.at(i * 4).load(F32))

    def write(self, changed: Callable[[Value, Value, Value | None], Value]) -> None:
        """x = changed(first token, logits, count) for each vector of logits.

        count   of its tokens, for the last vector if it is not a whole one; else None
        """
        whole = self.vocabulary / LANES * LANES
        logits, x = self.field("logits"), self.arrays["x"]

        def one(at: Value, count: Value | None) -> None:
            values = changed(at, logits.at(at * 4).load(vector(F32, LANES), count), count)
            if self.allowed:
                values = self.bits(at).select(values, -float("inf"))
            if count is not None:
                beyond = self.lanes(np.arange(LANES), I32).compared(">=", count.splat(LANES))
                values = beyond.select(self.lanes(-float("inf")), values)
            x.at(at * 4).store(values)

        with loop(self.zero, whole, LANES) as at:
            one(at, None)
        with when(whole.compared("<", self.vocabulary)):
            one(whole, (self.vocabulary - whole).narrow(I32))

    def penalized(self, penalties: list[Value], at: Value, x: Value, count: Value | None) -> Value:
        repetition, presence, frequency = (penalty.splat(LANES) for penalty in penalties)
        seen = self.field("seen").at(at).load(vector(I8, LANES), count).compared("!=", 0)
        counts = self.field("counts").at(at * 4).load(vector(I32, LANES), count)
        x = seen.select(x.compared(">", 0.0).select(x / repetition, x * repetition), x)
        present = counts.compared(">", 0).select(presence, 0.0)
        return x - (frequency * counts.float() + present)

    def bits(self, at: Value) -> Value:
        """Which of 16 tokens are allowed: half a word."""
        return self.field("allowed").at(at / 8).load(vector(I8, 2)).bits()

    def vectors(self, stop: Value):
        """A loop over whole vectors: the place of each."""
        return loop(self.zero, stop, LANES)

    def read(self, array: str, at: Value, kind: Type = F32) -> Value:
        return self.arrays[array].at(at * 4).load(vector(kind, LANES))

    def largest(self) -> Value:
        """The largest x; +inf where one is NaN."""
        most = Variable(self.lanes(-float("inf")))
        with self.vectors(self.padded) as at:
            x = self.read("x", at)
            x = x.compared("<", float("inf")).select(x, float("inf"))
            most.value = most.value.at_least(x)
        best = most.value
        return functools.reduce(lambda a, i: a.at_least(best[i]), range(1, LANES), best[0])

    def first(self, peak: Value) -> Value:
        """The first token whose x is the largest."""
        ids = Variable(self.lanes(2**31 - 1, I32))
        with self.vectors(self.padded) as at:
            ids_here = at.narrow(I32).splat(LANES) + self.lanes(np.arange(LANES), I32)
            same = self.read("x", at).compared("==", peak.splat(LANES))
            ids.value = (same & ids_here.compared("<", ids.value)).select(ids_here, ids.value)
        return ids.value.called("llvm.vector.reduce.smin", result=I32)

    # Truncation

    def drawn(self, peak: Value, likeliest: Value) -> Value:
        """The token that a temperature above 0 draws."""
        first = self.number("temperature_first", I8).compared("!=", 0)
        scale = first.select(self.real(1.0) / self.temperature, 1.0)
        asked = self.number("top_k", I32).signed(I64)
        cuts = asked.compared(">", 0) & asked.compared("<", self.vocabulary)
        k = Variable(cuts.select(asked, self.vocabulary))
        cut, total = self.level(peak, scale, cuts, k.value)
        count = self.listed(cut, peak, scale)
        threshold = Variable(self.whole(0, I32))
        with when(cuts):
            threshold.value = self.threshold(count, None, k.value.narrow(I32).float())
            total.value = self.sum(count, threshold.value, "weights")
        nucleus = Variable(threshold.value)
        with when(self.top_p.compared("<", 1.0)):
            least = (self.top_p * total.value).at_least(1e-30)  # the likeliest stays, whatever top_p
            largest = self.threshold(count, threshold.value, least)
            nucleus.value = _above(threshold.value, largest).select(threshold.value, largest)
        return self.race(count, nucleus.value, likeliest)

    def weight(self, x: Value, peak: Value, scale: Value) -> Value:
        finite = x.compared(">", LOWEST)
        return finite.select(exp((x - peak.splat(x.count)) * scale.splat(x.count)), 0.0)

    def level(self, peak: Value, scale: Value, cuts: Value, k: Value) -> tuple[Value, Variable]:
        """The x from which tokens are candidates, and the sum of all weights.

        With top-k the candidates are at least k. Else they have top_p of all weights (and a little more, for
        rounding), or all that min-p keeps.
        """
        counts = [Variable(self.lanes(0, I32)) for _ in LEVELS]
        masses = [Variable(self.lanes(0.0)) for _ in LEVELS]
        everything = Variable(self.lanes(0.0))
        with self.vectors(self.padded) as at:
            x = self.read("x", at)
            weight = self.weight(x, peak, scale)
            everything.value = everything.value + weight
            for level, count, mass in zip(LEVELS, counts, masses, strict=True):
                inside = x.compared(">=", (peak - level).splat(LANES))
                count.value = count.value + inside.unsigned(I32)
                mass.value = mass.value + inside.select(weight, 0.0)
        total = everything.value.sum()
        cut = Variable(self.real(LOWEST))  # all that may be drawn; a mask may leave fewer than k
        for level, count, mass in reversed(list(zip(LEVELS, counts, masses, strict=True))):
            has_k = count.value.sum().unsigned(I64).compared(">=", k)
            target = total * self.top_p * 1.0001
            has_p = self.top_p.compared("<", 1.0) & mass.value.sum().compared(">=", target)
            beyond = exp((scale * -level).splat(LANES))[0]
            has_min_p = beyond.compared("<", self.min_p * 0.999)
            enough = cuts.select(has_k, has_p | has_min_p)
            cut.value = enough.select(peak - level, cut.value)
        return cut.value, Variable(total)

    def listed(self, cut: Value, peak: Value, scale: Value) -> Value:
        """Write the candidates, by id. Returns their number, up to whole vectors; padding is never drawn."""
        count = Variable(self.zero)
        values, ids = self.arrays["values"], self.arrays["ids"]
        with self.vectors(self.padded) as at:
            x = self.read("x", at)
            reaches = x.compared(">=", cut.splat(LANES))
            some = reaches.as_type(ir.IntType(LANES)).compared("!=", 0)
            with when(some):
                for lane in range(LANES):
                    values.at(count.value * 4).store(x[lane])
                    ids.at(count.value * 4).store((at + lane).narrow(I32))
                    count.value = count.value + reaches[lane].unsigned(I64)
        values.at(count.value * 4).store(self.lanes(-float("inf")))
        ids.at(count.value * 4).store(self.lanes(0, I32))
        stop = (count.value + (LANES - 1)) / LANES * LANES
        with self.vectors(stop) as at:
            weight = self.weight(self.read("values", at), peak, scale)
            self.arrays["weights"].at(at * 4).store(weight)
        return stop

    def sum(self, count: Value, threshold: Value, array: str | None) -> Value:
        """The sum of candidates' weights, or their number, from a threshold on."""
        total = Variable(self.lanes(0.0))
        with self.vectors(count) as at:
            reaches = _reaches(self.read("values", at), threshold)
            one = self.lanes(1.0) if array is None else self.read(array, at)
            total.value = total.value + reaches.select(one, 0.0)
        return total.value.sum()

    def threshold(self, count: Value, floor: Value | None, target: Value) -> Value:
        """int32: the largest word t (`_ordered`) such that candidates from t on are `target` or more; or,
        with a floor, that those from t and from the floor on weigh so much. 0 if there is none.

        Found from the highest bit down, in 32 passes over the candidates.
        """
        largest = Variable(self.whole(0, I32))
        with loop(self.zero, self.whole(32)) as i:
            bit = self.whole(1, I32) << (self.whole(31) - i).narrow(I32)
            candidate = largest.value | bit
            within = candidate
            if floor is not None:
                within = _above(floor, candidate).select(floor, candidate)
            reached = self.sum(count, within, None if floor is None else "weights")
            largest.value = reached.compared(">=", target).select(candidate, largest.value)
        return largest.value

    # Noise

    def race(self, count: Value, threshold: Value, likeliest: Value) -> Value:
        """The candidate with the largest score of those that are kept; of equal ones the lowest id."""
        keys = self.field("keys")
        position = self.number("positions", I32)
        # As jax.random.fold_in makes it.
        key = _threefry((keys.load(I32), keys.at(4).load(I32)), (self.whole(0, I32), position))
        key = tuple(word.splat(LANES) for word in key)
        best, winners = Variable(self.lanes(-float("inf"))), Variable(self.lanes(2**31 - 1, I32))
        with self.vectors(count) as at:
            x, ids = self.read("values", at), self.read("ids", at, I32)
            keep = _reaches(x, threshold) & self.read("weights", at).compared(">=", self.min_p.splat(LANES))
            some = keep.as_type(ir.IntType(LANES)).compared("!=", 0)
            with when(some):
                bits, _ = _threefry(key, (ids, self.lanes(0, I32)))
                u = ((bits >> 9).float() + 0.5) * 2.0**-23  # neither 0 nor 1
                score = x / self.temperature.splat(LANES) - log(-log(u))
                better = keep & score.compared(">", best.value)
                best.value = better.select(score, best.value)
                winners.value = better.select(ids, winners.value)
        scores, ids = best.value, winners.value
        most = functools.reduce(lambda a, i: a.at_least(scores[i]), range(1, LANES), scores[0])
        ids = scores.compared("==", most.splat(LANES)).select(ids, 2**31 - 1)
        token = ids.called("llvm.vector.reduce.smin", result=I32)
        # Where no score is above -inf (temperatures near 0): the likeliest.
        return most.compared(">", -float("inf")).select(token, likeliest)


def _ordered(x: Value) -> Value:
    """Words, as unsigned integers in the order of float32: reference.sortable."""
    x = x.compared("==", 0.0).select(constant(x.b, x.type, 0.0), x)  # -0 becomes +0
    bits = x.as_type(x.shaped(I32))
    return bits ^ (bits.shifted(31) | (1 << 31))


def _above(a: Value, b: Value) -> Value:
    """a > b, of words without sign."""
    return (a ^ (1 << 31)).compared(">", b ^ (1 << 31))


def _reaches(x: Value, threshold: Value) -> Value:
    return (_ordered(x) ^ (1 << 31)).compared(">=", (threshold ^ (1 << 31)).splat(x.count))


def _threefry(key: tuple[Value, ...], count: tuple[Value, Value]) -> tuple[Value, Value]:
    """Threefry-2x32 of 20 rounds (Salmon et al., 2011), as jax.random has it."""
    words = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = count[0] + words[0], count[1] + words[1]
    for i in range(5):
        for turn in TURNS[i % 2]:
            x = x + y
            y = ((y << turn) | (y >> (32 - turn))) ^ x
        x, y = x + words[(i + 1) % 3], y + words[(i + 2) % 3] + (i + 1)
    return x, y
