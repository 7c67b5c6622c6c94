"""What one lane of a warp does, as MLIR and PTX: the few instructions that Pallas does not offer.

Functions take and return values.py's values and are called while a kernel is traced, inside
`plgpu.inline_mgpu`. A warp is 32 lanes; u32 and s32 are both i32 here.
"""

from typing import Any

import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, gpu, llvm, scf, vector
from jax.experimental.mosaic.gpu import utils as mosaic

from pallas_kernels.gpu.values import (
    as_real,
    as_value,
    f32,
    fma,
    i32,
    index,
    integer,
    maximum,
    real,
    select,
    shifted_signed,
)

# Threads, and control flow


def thread(reuse: bool = False):
    """Number of this thread in its block. Without `reuse` each call reads it again, so that
    values computed from it do not stay in registers from one phase of a kernel to the next."""
    return _special("%tid.x", reuse)


def block():
    """Number of this block. Each call reads it again."""
    return _special("%ctaid.x")


def _special(name: str, reuse: bool = False):
    word = ptx(i32(), [], f"mov.u32 $0, {name};", "=r", effects=not reuse)
    return as_value(arith.index_castui(ir.IndexType.get(), word))


def opaque(word):
    """The same i32, opaque to the compiler: what is computed from it is computed after this point, and not
    held in registers from before a loop."""
    return ptx(i32(), [word], "mov.b32 $0, $1;", "=r,r", effects=True)


def block_barrier():
    gpu.barrier()


def warpgroup_barrier():
    """What the lanes of this warpgroup wrote to shared memory is seen by its others. Mosaic's number for it,
    which the same threads wait at."""
    number = integer(thread()) // 128 + 1
    ptx(None, [number], "bar.sync $0, 128;", "r,~{memory}", effects=True)


def first_threads_barrier(count: int):
    """What the first `count` threads of the block wrote to shared memory is seen by these. Only they wait, at
    a number that Mosaic does not use."""
    ptx(None, [], f"bar.sync 15, {count};", "~{memory}", effects=True)


def warp_barrier():
    """What lanes of this warp wrote to shared memory is seen by its others."""
    ptx(None, [], "bar.warp.sync 0xffffffff;", "~{memory}", effects=True)


when = mosaic.when


def clock():
    """The multiprocessor's clock now: the low 32 bits of a count."""
    return ptx(i32(), [], "mov.u32 $0, %clock;", "=r,~{memory}", effects=True)


def wait_until(since, clocks):
    """Wait until `clocks` clocks (i32, below 2^31) have passed since `since`, which `clock` gave."""
    text = """{
        .reg .pred p;
        .reg .u32 t;
        again_${:uid}:
        mov.u32 t, %clock;
        sub.u32 t, t, $0;
        setp.lt.u32 p, t, $1;
        @p bra again_${:uid};
        }"""
    ptx(None, [since, integer(clocks)], text, "r,r,~{memory}", effects=True)


def choose(condition, chosen, otherwise) -> list:
    """chosen() where the condition holds for a whole warp, which alone runs it, else the list `otherwise`."""
    if_op = scf.IfOp(condition, results_=[v.type for v in otherwise], has_else=True)
    with ir.InsertionPoint(if_op.then_block):
        scf.yield_(chosen())
    assert if_op.else_block is not None
    with ir.InsertionPoint(if_op.else_block):
        scf.yield_(otherwise)
    return list(map(as_value, if_op.results))


def loop(start, stop, step, carry, body):
    """for i in range(start, stop, step): carry = body(i, carry). Indices or numbers; a list of values in, a
    list out."""
    for_op = scf.ForOp(index(start), index(stop), index(step), carry)
    with ir.InsertionPoint(for_op.body):
        inner = map(as_value, for_op.inner_iter_args)
        scf.yield_(body(as_value(for_op.induction_variable), list(inner)))
    return list(map(as_value, for_op.results))


def repeated(attempt, types) -> list:
    """again, values = attempt(), until `again` does not hold: the values, of these types."""
    loop_ = scf.WhileOp(types, [])
    loop_.before.blocks.append()
    with ir.InsertionPoint(loop_.before.blocks[0]):
        again, results = attempt()
        scf.ConditionOp(again, results)
    loop_.after.blocks.append(*types)
    with ir.InsertionPoint(loop_.after.blocks[0]):
        scf.YieldOp([])
    return list(map(as_value, loop_.results))


def ptx(result, operands, text: str, constraints: str, effects: bool = False) -> Any:
    """Inline PTX: a value of type `result`, a list of them for a list of types, or None. Without `effects`
    the compiler may leave it out, move it, or do it once for several."""
    types = result if isinstance(result, list) else [result]
    struct = llvm.StructType.get_literal(types) if len(types) > 1 else types[0]
    results = llvm.inline_asm(struct, operands, text, constraints, has_side_effects=effects)
    if result is None:
        return None
    if len(types) == 1:
        return [as_value(results)] if isinstance(result, list) else as_value(results)
    # pyrefly: ignore[bad-argument-type]
    return [as_value(llvm.extractvalue(kind, results, [i])) for i, kind in enumerate(types)]


# Other lanes of the warp


def any_lane(word):
    """Whether the word of any lane is not 0."""
    chosen = "vote.sync.any.pred q, p, 0xffffffff; selp.u32 $0, 1, 0, q;"
    text = f"{{ .reg .pred p, q; setp.ne.u32 p, $1, 0; {chosen} }}"
    return ptx(i32(), [word], text, "=r,r", effects=True) != 0


def ballot(condition):
    """A bit for every lane of the warp whose condition holds."""
    text = "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
    return ptx(i32(), [select(condition, 1, 0)], text, "=r,r", effects=True)


def ones(word):
    """How many bits of a word are 1."""
    return ptx(i32(), [word], "popc.b32 $0, $1;", "=r,r")


def from_lane(word, lane):
    """The word of another lane; `lane` is an i32 of this lane's choice."""
    text = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"
    return ptx(i32(), [word, lane], text, "=r,r,r", effects=True)


def from_quad(word, lane, i: int):
    """The word of lane i of this lane's four neighbours 4 g .. 4 g + 3."""
    return from_lane(word, (as_value(lane) & 0xFFFFFFFC) + i)


def from_quad_lane(word, i: int):
    """`from_quad` where i is the same for all lanes: no address is computed."""
    return ptx(i32(), [word], f"shfl.sync.idx.b32 $0, $1, {i}, 0x1c1f, 0xffffffff;", "=r,r", effects=True)


def swapped(x, distance: int):
    """The value of the lane whose number differs in the bit `distance`."""
    return as_value(mosaic.shfl_bfly(x, distance))


def warp_max(word):
    """Largest u32 of the warp, in every lane."""
    return ptx(i32(), [word], "redux.sync.max.u32 $0, $1, 0xffffffff;", "=r,r", effects=True)


def warp_sum(word):
    """Sum of the warp's s32, in every lane."""
    return ptx(i32(), [word], "redux.sync.add.s32 $0, $1, 0xffffffff;", "=r,r", effects=True)


def warp_sum_real(x, lanes: int = 32, first: int = 1):
    """Sum of float32 or s32 over groups of neighbouring lanes (a power of two), in every lane of them; over
    each `first`th of them."""
    return _over_lanes(lambda a, b: as_value(a) + b, x, lanes, first)


def largest_of_warp(x, lanes: int = 32, first: int = 1):
    """Largest float32 over groups of neighbouring lanes, in every lane of the group; of each `first`th."""
    return _over_lanes(maximum, x, lanes, first)


def _over_lanes(combined, x, lanes: int, distance: int):
    while distance < lanes:
        x = combined(x, swapped(x, distance))
        distance *= 2
    return x


def transposed_pairs(word):
    """Of 8 x 8 numbers of 16 bits, of which lane 4 g + t has [row g, columns 2 t and 2 t + 1]: the same of
    their transpose."""
    return ptx(i32(), [word], "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", effects=True)


def transposed_bits(word, lane):
    """Lane j's word gets bit i from bit j of lane i: a 32 x 32 bit transpose in five exchanges (Warren 2012,
    7-3)."""
    for distance, keep_lower, take_lower, take_upper in (
        (16, None, 0x5410, 0x3276),
        (8, None, 0x6240, 0x3715),
        (4, 0x0F0F0F0F, 4, 28),
        (2, 0x33333333, 2, 30),
        (1, 0x55555555, 1, 31),
    ):
        other = swapped(word, distance)
        upper = (integer(lane) & distance) == distance
        take = select(upper, take_upper, take_lower)
        if keep_lower is None:  # whole bytes
            word = chosen_bytes(word, other, take)
        else:  # a lower lane's halves move up, an upper one's down: a rotation, of which half is taken
            keep = select(upper, keep_lower << distance, keep_lower)
            other = ptx(i32(), [other, take], "shf.l.wrap.b32 $0, $1, $1, $2;", "=r,r,r")
            word = chosen_bits(other, word, keep)
    return word


# Numbers


def exp2(x):
    """2^x, to about two units in the last place; 0 far below 0."""
    return ptx(f32(), [x], "ex2.approx.ftz.f32 $0, $1;", "=f,f")


def log2(x):
    """log2 of a positive number, to about 2^-22."""
    return ptx(f32(), [x], "lg2.approx.ftz.f32 $0, $1;", "=f,f")


def reciprocal(x):
    """1 / x, to an ulp."""
    return ptx(f32(), [x], "rcp.approx.ftz.f32 $0, $1;", "=f,f")


def ratio(numerator: float, x):
    """numerator / x, to nearest: what `reciprocal` gives, and once what is left (Markstein 1990)."""
    inverse = reciprocal(x)
    first = real(numerator) * inverse
    left = fma(-as_value(x), first, numerator)
    return fma(left, inverse, first)


def round_to_integer(x):
    """Nearest integer, ties to even."""
    return ptx(i32(), [x], "cvt.rni.s32.f32 $0, $1;", "=r,f")


def small_integer(word, at: int, bits: int, less: int = 0):
    """Unsigned bits at .. at + bits - 1 of a word (at most 22), less a number, as float32: 2^23 + n is a
    float with n as its last bits, so that no conversion is needed, which would run at a quarter of the
    speed."""
    field = (as_value(word) >> at if at else as_value(word)) & 2**bits - 1
    return as_real(field | 0x4B000000) - (2.0**23 + less)


def signed_byte(word, i: int):
    """Byte i of a word as float32."""
    return real(shifted_signed(as_value(word) << 24 - 8 * i if i < 3 else word, 24))


def bytes_as_reals(word, signed: bool = False, less: int = 0) -> list:
    """The four bytes of a word, less a number, as float32, lowest first, without a conversion (as
    `small_integer`): signed ones have 128 added for the time."""
    if signed:
        word = as_value(word) ^ 0x80808080
    base, one = real(2.0**23 + 128 * signed + less), integer(0x4B000000)  # 2^23: its last byte is the number
    return [as_real(bytes_of(word, one, 0x7440 + i)) - base for i in range(4)]


def signed_byte_word(word, i: int):
    """Byte i of a word as s32."""
    return bytes_of(word, word, i | 0x1110 * (8 + i))  # 8 + i: its sign, eight times


def dot_of_halves(halves, bytes_, first: int):
    """Two s16 times two neighbouring s8 of a word, `first` (0 or 2) and the next: s32."""
    kind = "lo" if first == 0 else "hi"
    text = f"dp2a.{kind}.s32.s32 $0, $1, $2, $3;"
    return ptx(i32(), [halves, bytes_, integer(0)], text, "=r,r,r,r")


def sum_of_bytes(word, total):
    """total + the four signed bytes of a word."""
    ones = integer(0x01010101)
    return ptx(i32(), [word, ones, total], "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r")


# Words of bytes, and of other pieces


def bytes_of(low, high, selector: int):
    """Any four of eight bytes: nibble i of the selector names byte i of the result; `low` has 0..3, `high`
    4..7."""
    return ptx(i32(), [low, high], f"prmt.b32 $0, $1, $2, {selector:#x};", "=r,r,r")


def chosen_bytes(low, high, selector):
    """As `bytes_of`, with a selector that is known when it runs."""
    return ptx(i32(), [low, high, selector], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r")


def chosen_bits(word, other, mask):
    """The bits of `other` where the mask has ones, else those of `word`."""
    if isinstance(mask, int):
        mask = integer(mask)
    return ptx(i32(), [other, word, mask], "lop3.b32 $0, $1, $2, $3, 0xe4;", "=r,r,r,r")


def in_register(number: int):
    """A constant in a register. Adding 1 >> 1, computed at run time, hides its value from the compiler: ptxas
    copies a constant that it knows for every `prmt`."""
    one = "mov.u32 r, %lanemask_eq; popc.b32 r, r;"
    return ptx(i32(), [], f"{{.reg .u32 r; {one} shr.u32 r, r, 1; add.u32 $0, r, {number};}}", "=r")


def packed_bytes(words, byte: int):
    """Byte `byte` of each of four words, as one word."""
    which = byte | (4 + byte) << 4
    a, b, c, d = words
    return bytes_of(bytes_of(a, b, which), bytes_of(c, d, which), 0x5410)


def merged(word, other, mask: int):
    """The bits of `word` where the mask has ones, else those of `other`."""
    return as_value(word) & mask | as_value(other) & (mask ^ 0xFFFFFFFF)


# Pairs of float16


def halves(word):
    """The two float16 of a word, as float32: (low half, high half)."""
    pair = as_half_vector(word)
    return [as_value(arith.extf(f32(), element(pair, i))) for i in range(2)]


def as_half_vector(word):
    """The two float16 of a word as a vector."""
    return llvm.bitcast(ir.VectorType.get((2,), ir.F16Type.get()), word)


def low_half(word):
    """The float16 in the low half of a word, as float32."""
    return halves(word)[0]


def half_pair(low, high, saturated: bool = False):
    """Two float32 as a pair of float16, to nearest; what is beyond the largest as that, if so asked."""
    finite = ".satfinite" * saturated
    return ptx(i32(), [high, low], f"cvt.rn{finite}.f16x2.f32 $0, $1, $2;", "=r,f,f")


def halves_of_code(word, mask: int, flipped: int = 0):
    """Bits of a word, all within the low 10 of each half, as a pair of float16: 1024 + code, because 2^10 + n
    is a float16 with n as its last bits. Bits of the mask may be flipped."""
    text = "lop3.b32 $0, $1, $2, $3, 0x6a;"  # (word & mask) ^ bits
    return ptx(i32(), [word, integer(mask), integer(0x64006400 | flipped)], text, "=r,r,r,r")


def half_twice(x: float):
    """A number as a pair of float16, both the same."""
    return integer(int(np.float16(x).view(np.uint16)) * 0x10001)


def low_twice(word):
    """The low half of a word in both."""
    text = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; mov.b32 $0, {low, low}; }"
    return ptx(i32(), [word], text, "=r,r")


def half_less(a, b):
    """a - b, pairs of float16."""
    return ptx(i32(), [a, b], "sub.rn.f16x2 $0, $1, $2;", "=r,r,r")


def half_times(a, b):
    """a b, pairs of float16."""
    return ptx(i32(), [a, b], "mul.rn.f16x2 $0, $1, $2;", "=r,r,r")


def half_fma(a, b, c):
    """a b + c, pairs of float16, rounded once."""
    return ptx(i32(), [a, b, c], "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r")


# Vectors, as memory has them


def element(v, i: int):
    """Element i of a vector."""
    at = ir.DenseI64ArrayAttr.get([i])
    return as_value(vector.extract(v, dynamic_position=[], static_position=at))


def reals(x) -> list:
    """A vector of float32 or bfloat16 as a list of float32."""
    kind = ir.VectorType(x.type)
    if kind.element_type != f32():
        x = arith.extf(ir.VectorType.get(kind.shape, f32()), x)
    return [element(x, i) for i in range(kind.shape[0])]


def words(x) -> list:
    """A vector as i32, however wide its numbers are."""
    kind = ir.VectorType(x.type)
    count = kind.shape[0] * mosaic.bitwidth(kind.element_type) // 32
    as_words = vector.bitcast(ir.VectorType.get((count,), i32()), x)
    return [element(as_words, i) for i in range(count)]


def vector_like(x, words):
    """Words as a vector of the type of another."""
    kind = ir.VectorType(x.type)
    return vector_of(words, kind.element_type, kind.shape[0] // len(words))


def bits_of(element_type) -> int:
    return mosaic.bitwidth(element_type)


def real_vector(numbers):
    """A list of float32 as a vector."""
    return vector.from_elements(ir.VectorType.get((len(numbers),), f32()), numbers)


def half_vector(words):
    """Pairs of float16 as one vector of float16."""
    return vector_of(words, ir.F16Type.get(), 2)


def byte_vector(words):
    """Words of four bytes as one vector of bytes."""
    return vector_of(words, ir.IntegerType.get_signless(8), 4)


def vector_of(words, element_type, each: int):
    """Words of so many numbers each as one vector of them."""
    packed = vector.from_elements(ir.VectorType.get((len(words),), i32()), words)
    return vector.bitcast(ir.VectorType.get((each * len(words),), element_type), packed)
