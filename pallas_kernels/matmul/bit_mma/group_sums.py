"""What prefill_sm90.py makes of four groups of 128 columns: products of bytes by wgmma, and their sums.

weight_bytes.py makes bytes of weights. Besides multiplications a product is mostly scales, once for a group,
output and token. They take instructions, loads from shared memory and power, which limits long prompts
(benchmarks/LOG.md, 2026-11-29). There are two ways, for weights +-d[n] and activations s[m] q[m]:

`add_groups`: exact but for the order of sums. Weights are +-64, and each group has a sum of its own. Only for
weights of 1 bit.

    S = sum(+-64 q);  M + S as float32  <-  S + 0x4B400000, the bits of M = 1.5 * 2^23
    y  <-  y + s / 64 (d (M + S) - d M)     an addition and two fma; d has 11 bits, so d M is exact

A conversion would take four times as long as this addition.

`add_groups_together`: one fma for a group. d, rounded to 7 bits of the largest of the row's four groups, is
multiplied by the tensor core, as the size of the weights. Its sums go on from group to group, so that nothing
is cleared, and what a group adds to them is found by summation by parts:

    b = round(d (127 / D)), D the largest |d| of the row's four groups;  d is taken as b D / 127
    F_0 = 2^23,  F_g = F_(g-1) + sum(+-b q);  sum over g of s_g (F_g - F_(g-1))
                                           = sum over g of (s_g - s_(g+1)) F_g - 2^23 s_1,  s_5 = 0

Four groups are at most 4 * 128 * 128 * 127 < 2^23 in size, so 0 < F < 2^24, and the bits of such an integer
are a float32: F 2^-149, a subnormal number, which an fma takes as fast as others. y is kept in units of the
last D and 2^23 s_1 is taken off when it changes: y <- y D'/D - 2^23 s_1.
"""

import itertools

from jax.experimental.mosaic.gpu import mma_utils
from jax.experimental.mosaic.gpu import utils as mosaic

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.values import (
    as_real,
    as_word,
    fma,
    greatest,
    i32,
    index,
    integer,
    maximum,
    real,
    select,
)
from pallas_kernels.gpu.wgmma import lane
from pallas_kernels.matmul.bit_mma.product import GROUP
from pallas_kernels.matmul.bit_mma.weight_bytes import Encoding
from pallas_kernels.matmul.quantize_activations import MAGIC, MAGIC_WORD

TOP = 127  # b of the largest scale
FIRST = 2**23  # F_0
UNIT = -149  # a bit of a float32 without exponent is 2^UNIT
# Coefficients of F have the factor 2^COEFFICIENT, so that neither they nor what is summed leave the range of
# float32: exact for groups of activations whose largest is between 2^-50 and 2^60.
COEFFICIENT = 80
SMALLEST = 2.0**-60  # in place of D where all scales are 0: the smallest float16 is 2^-24
COEFFICIENTS = 5  # for each token and four groups: of F_1 .. F_4, and what takes off F_0
MOST_EXACT = 32  # tokens of a tile


def together(tokens: int, planes: int, ternary: bool) -> bool:
    """Whether tiles of this many tokens use `add_groups_together`, as those of ternary weights always do.
    16-bit activations need exact scales, and with few tokens scaling takes little time."""
    return ternary or (planes == 1 and tokens > MOST_EXACT)


class Slot:
    """A step's weights and activations in shared memory, as a lane finds them.

    words   ref of uint32 [matrices, tiles, pairs, words of a pair of groups] and
    d       ref of uint32 [matrices, tiles, pairs, scales]: the weights of all warpgroups
    scales  ref of float32 [groups, planes, tokens], s / 64 in the order of activations_int8
    q       refs of int8 [tokens, 128], swizzled: of the first group each plane, of the second each plane, ..
    """

    def __init__(self, encoding: Encoding, words, d, scales, q):
        self.encoding, self.words, self.d, self.scales, self.q = encoding, words, d, scales, q
        self.matrices, _, self.pairs, size = words.type.shape
        self.vectors = [128 * i for i in range(size // 128)]
        _, self.planes, self.tokens = scales.type.shape
        warp, self.number, self.g, self.t = map(integer, lane())
        warpgroup = integer(lanes.thread()) // 128
        self.tile = index(warpgroup * (4 // self.matrices) + warp // self.matrices)
        self.half = warp % 2  # of two matrices: whether rows g + 8

    def weights(self, pair: int) -> list[tuple[list, list]]:
        """Of each of a pair of groups the words and the float32 d of this lane's rows: g and g + 8 of a tile,
        or one of them of both matrices. A row may have several of each (`Encoding`)."""
        at = [(w, self.tile, pair) for w in range(self.matrices)]
        vectors = [
            [memory.load_words(4, self.words, [*place, self.number * 4 + v]) for v in self.vectors]
            for place in at
        ]
        return [(self._words(vectors, group), self._d(at, group)) for group in (0, 1)]

    def _words(self, vectors: list, group: int) -> list[list]:
        rows = [[self.encoding.row_words(v, group, row) for row in (0, 1)] for v in vectors]
        if self.matrices == 1:
            return rows[0]
        return [[select(self.half == 1, *both) for both in zip(*v[::-1], strict=True)] for v in rows]

    def _d(self, at: list, group: int) -> list[list]:
        places = self.encoding.scale_places(index(self.g), group)
        words = [[memory.load(self.d, *place, i) for i in places] for place in at]
        if self.matrices == 2:
            halves = self.half * 0x2222 + 0x5410
            # pyrefly: ignore[bad-argument-count]
            words = [[lanes.chosen_bytes(*both, halves) for both in zip(*words, strict=True)]]
        return [list(d) for d in zip(*map(lanes.halves, words[0]), strict=True)]

    def by_token(self, ref, *at) -> list[list]:
        """Four numbers for each 16 tokens, those of this lane: `each_sum` says which is whose."""
        four_t = index(self.t * 4)
        return [memory.load_reals(4, ref, [*at, four_t + first]) for first in range(0, self.tokens, 16)]

    def each_sum(self):
        """(place among this lane's sums, row r, piece and place in `by_token`). Row by row, so that an
        instruction finds what belongs to the row where the one before had it."""
        for r, j, e in itertools.product((0, 1), range(self.tokens // 8), (0, 1)):
            yield 4 * j + 2 * r + e, r, j // 2, 2 * (j % 2) + e


def add_groups(slot: Slot, sums: list) -> list:
    """This lane's sums, float32, and a step's products."""
    tables, y = slot.encoding.tables([lanes.in_register(64)]), list(sums)

    def scale(i, d, product):
        less, s = [x * -MAGIC for x in d], slot.by_token(slot.scales, *divmod(i, slot.planes))
        for at, r, piece, place in slot.each_sum():
            whole = as_real(product[at] + MAGIC_WORD)
            y[at] = fma(fma(whole, d[r], less[r]), s[piece][place], y[at])

    pending = []  # products on their way: where registers have room, one is scaled while the next is made
    for i, q in enumerate(slot.q):
        group, plane = divmod(i, slot.planes)
        if i % (2 * slot.planes) == 0:
            weights = slot.weights(group // 2)
        if plane == 0:
            words, d = weights[group % 2]
            bytes_ = _weights_as_bytes(slot.encoding, words, [tables, tables])
        pending.append((i, [v for (v,) in d], multiply(bytes_, q, slot.tokens, unsigned=plane > 0)))
        if len(pending) > (slot.tokens <= MOST_EXACT):
            i, d_then, product = pending.pop(0)
            scale(i, d_then, arrived(product, len(pending)))
    for i, d_then, product in pending:
        scale(i, d_then, arrived(product, 0))
    return y


def add_groups_together(slot: Slot, coefficients, sums: list, largest: list) -> tuple[list, list]:
    """This lane's sums, float32 in units of the largest |d| that its two rows had, and a step's products;
    then the largest |d| of the step.

    coefficients  ref of float32 [COEFFICIENTS, tokens], what `store_coefficients` makes of the slot's scales
    """
    groups = [group for pair in range(slot.pairs) for group in slot.weights(pair)]
    now = [maximum(greatest([abs(v) for _, d in groups for v in d[r]]), SMALLEST) for r in (0, 1)]
    factor = [lanes.ratio(TOP, v) for v in now]

    def begun(group, running):
        words, d = groups[group]
        b = [[as_word(fma(v, factor[r], MAGIC)) for v in d[r]] for r in (0, 1)]
        weights = _weights_as_bytes(slot.encoding, words, list(map(slot.encoding.tables, b)))
        return multiply(weights, slot.q[group], slot.tokens, running)

    running = begun(0, [integer(FIRST)] * len(sums))
    ratio = [v * (w * (1 / TOP)) for v, w in zip(largest, factor, strict=True)]
    less, y = slot.by_token(coefficients, len(groups)), list(sums)
    for i, r, piece, place in slot.each_sum():
        y[i] = fma(y[i], ratio[r], less[piece][place])
    for group in range(len(groups)):
        c = slot.by_token(coefficients, group)
        running = arrived(running, 0)
        for i, _, piece, place in slot.each_sum():
            y[i] = fma(as_real(running[i]), c[piece][place], y[i])
        if group + 1 < len(groups):
            running = begun(group + 1, running)
    return y, now


def store_coefficients(scales, coefficients):
    """By a warpgroup, a thread a token: what `add_groups_together` multiplies sums with. Of the s_g / 64 of a
    step's groups, float32 [groups, 1, tokens], s_g - s_(g+1) for each, and what takes off F_0."""
    groups, _, tokens = scales.type.shape
    token = integer(lanes.thread()) % 128
    with lanes.when(token < tokens):
        s = [memory.load(scales, group, 0, token) for group in range(groups)]
        for group, after in enumerate([*s[1:], real(0)]):
            memory.store((s[group] - after) * 2.0**COEFFICIENT, coefficients, group, token)
        memory.store(s[0] * -(FIRST * 2.0 ** (UNIT + COEFFICIENT)), coefficients, groups, token)


def unit_of(largest):
    """What y of `add_groups_together` is counted in: s / 64, D / 127, a bit of F, and its coefficient."""
    return largest * (64 / TOP * 2.0 ** -(UNIT + COEFFICIENT))


def _weights_as_bytes(encoding: Encoding, words, tables) -> list:
    """This lane's words of rows g and g + 8 -> 16 registers of 4 weights, for 4 wgmma of 32 columns: register
    2 j + r is row r's register j."""
    rows = [encoding.registers(*row) for row in zip(words, tables, strict=True)]
    return [register for both in zip(*rows, strict=True) for register in both]


def multiply(weights, q, tokens: int, sums: list | None = None, *, unsigned: bool = False) -> list:
    """Begin int32 [64, tokens] = sums + weights * activations over 128 columns: the registers that `arrived`
    must see before anything reads them.

    Without sums the chain begins with scale-d = 0, which Mosaic's own wgmma does not offer: nothing has to be
    cleared.
    """
    (base, (_, (k_stride, *_))), _, _ = mma_utils.create_descriptor(
        mosaic.memref_transpose(q, (1, 0, 3, 2)),
        swizzle=GROUP,
        large_tile=(GROUP, GROUP),
        group_size=(GROUP, tokens),
        logical_k_major=True,
    )
    count = tokens // 2
    # Operands: outputs, the 16 weights, the descriptor, and sums. Each wgmma has 4 of the weights.
    accumulators = "{" + ",".join(f"${i}" for i in range(count)) + "}"
    kind = "u8" if unsigned else "s8"
    text = "{ .reg .pred p; .reg .b64 b; wgmma.fence.sync.aligned; "
    for k in range(4):
        a = "{" + ",".join(f"${count + 4 * k + i}" for i in range(4)) + "}"
        offset = k * k_stride >> 4
        text += f"setp.ne.b32 p, {int(k > 0 or sums is not None)}, 0; add.s64 b, ${count + 16}, {offset}; "
        text += f"wgmma.mma_async.sync.aligned.m64n{tokens}k32.s32.s8.{kind} {accumulators}, {a}, b, p; "
    text += "wgmma.commit_group.sync.aligned; }"
    constraints = ["=r"] * count + ["r"] * 16 + ["l"] + [str(i) for i in range(count)] * (sums is not None)
    operands = [*weights, base, *(sums or [])]
    return lanes.ptx([i32()] * count, operands, text, ",".join(constraints), effects=True)


def arrived(product: list, later: int) -> list:
    """Wait until all products but the last `later` ones are done. Returns the registers of this one: whoever
    uses them is computed after the wait."""
    lanes.ptx(None, [], f"wgmma.wait_group.sync.aligned {later};", "~{memory}", effects=True)
    count = len(product)
    constraints = ",".join(["=r"] * count + [str(i) for i in range(count)])
    return lanes.ptx([i32()] * count, product, "", constraints, effects=True)
