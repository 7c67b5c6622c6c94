"""The PTX of the kernels, an instruction for an array of all threads (PTX ISA 9, sections by name
of the instruction)."""

import functools
import re

import ml_dtypes
import numpy as np

from tests.pallas_kernels.lockstep.machine import Machine
from tests.pallas_kernels.lockstep.values import NUMPY, Type, Value, f32, i32, unsigned

INSTRUCTIONS: list = []


def instruction(pattern: str):
    def add(f):
        INSTRUCTIONS.append((re.compile(pattern), f))
        return f

    return add


@functools.cache
def _found(text: str):
    """The instruction that a text has, and its parts."""
    text = " ".join(text.split())
    (found,) = [(m, f) for pattern, f in INSTRUCTIONS if (m := pattern.search(text))]
    return found


def inline_asm(machine: Machine, result, operands, text: str, constraints, has_side_effects=False):
    """llvm.inline_asm: a Value, a list of them for a struct, or None."""
    match, f = _found(text)
    out = f(machine, match, *operands)
    types = result if isinstance(result, list) else [result]
    for v, type in zip(out if isinstance(out, list) else [out], types, strict=True):
        assert (v is None) == (type is None) and (v is None or v.type == type), text
    return out if isinstance(result, list) else out[0] if isinstance(out, list) else out


def _lanes(machine: Machine, v: Value) -> np.ndarray:
    return v.of_threads(len(machine.all)).reshape(-1, 32)


def _fragment(machine: Machine, words: list, dtype) -> np.ndarray:
    """Words of a lane as numbers: [warps, g, t, word, number]."""
    a = np.stack([v.of_threads(len(machine.all)) for v in words], axis=-1)
    return np.ascontiguousarray(a).view(dtype).reshape(-1, 8, 4, len(words), 4 // np.dtype(dtype).itemsize)


def _results(product: np.ndarray) -> list:
    """[warps, 16, 8] -> what a lane holds of it: [g, 2 t], [g, 2 t + 1], [g + 8, ..], [g + 8, ..]."""
    parts = product.reshape(-1, 2, 8, 4, 2)
    return [parts[:, r, :, :, h].reshape(-1) for r in (0, 1) for h in (0, 1)]


@instruction(r"mov\.u32 \$0, %(tid|ctaid)\.x")
def _special(machine, match):
    return i32(machine.all % machine.threads if match[1] == "tid" else machine.numbers[machine.block])


@instruction(r"mov\.b32 \$0, \$1")
def _move(machine, match, word):
    return word


@instruction(r"lanemask_eq; popc\.b32 r, r; shr\.u32 r, r, 1; add\.u32 \$0, r, (\d+)")
def _kept(machine, match):
    return i32(np.array(int(match[1])))


@instruction(r"prmt\.b32 \$0, \$1, \$2, (\w+|\$3)")
def _permute(machine, match, low, high, selector=None):
    selector = np.int64(int(match[1], 0)) if selector is None else unsigned(selector).astype(np.int64)
    both = unsigned(low).astype(np.uint64) | unsigned(high).astype(np.uint64) << np.uint64(32)
    out = 0
    for k in range(4):
        n = (selector >> 4 * k) & 15
        byte = (both >> (8 * (n & 7)).astype(np.uint64) & np.uint64(255)).astype(np.int64)
        byte = np.where(n < 8, byte, (byte >> 7) * 255)  # bit 3: the byte's top bit, eight times
        out = out + (byte << 8 * k)
    return i32(out)


@instruction(r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16")
def _transpose_pairs(machine, match, word):
    rows = _fragment(machine, [word], np.int16).reshape(-1, 8, 8)
    columns = np.ascontiguousarray(rows.swapaxes(1, 2)).view(np.uint32)
    return i32(columns.reshape(-1).astype(np.int64))


@instruction(r"shf\.l\.wrap\.b32 \$0, \$1, \$1, \$2")
def _rotate(machine, match, word, by):
    by = (unsigned(by) & 31).astype(np.int64)
    twice = unsigned(word).astype(np.int64)
    return i32(twice << by & 0xFFFFFFFF | twice >> (32 - by))


@instruction(r"lop3\.b32 \$0, \$1, \$2, (0x\w+), (\w+)")
def _logic_with_constant(machine, match, a, b):
    return _logic(machine, (match[0], match[2]), a, b, i32(int(match[1], 0)))


@instruction(r"mov\.b32 \$0, \{low, low\}")
def _low_twice(machine, match, word):
    return i32((unsigned(word).astype(np.int64) & 0xFFFF) * 0x10001)


@instruction(r"(sub|mul|fma)\.rn\.f16x2")
def _halves(machine, match, *operands):
    """The low halves and the high ones; products are exact in float64, and are rounded once."""
    words = np.stack([np.broadcast_to(unsigned(v), machine.all.shape) for v in operands])
    a, b, *c = words.astype(np.uint32).view(np.float16).reshape(*words.shape, 2).astype(np.float64)
    y = a - b if match[1] == "sub" else sum(c, a * b)
    return i32(np.ascontiguousarray(y.astype(np.float16)).view(np.uint32)[..., 0].astype(np.int64))


@instruction(r"lop3\.b32 \$0, \$1, \$2, \$3, (\w+)")
def _logic(machine, match, a, b, c):
    table, out = int(match[1], 0), 0
    for k in range(8):
        if table >> k & 1:
            parts = [v.a if k >> n & 1 else ~v.a for v, n in ((a, 2), (b, 1), (c, 0))]
            out = out | (parts[0] & parts[1] & parts[2])
    return i32(out)


@instruction(r"cvt\.rni\.s32\.f32")
def _round(machine, match, x):
    return i32(np.rint(np.nan_to_num(x.a)))


@instruction(r"cvt\.rn(\.satfinite)?\.(bf16|f16)x2\.f32 \$0, \$1, \$2")
def _narrow(machine, match, high, low):
    kind = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}[match[2]]
    most = float(ml_dtypes.finfo(kind).max) if match[1] else np.inf
    high, low = (
        np.asarray(np.clip(v.a, -most, most).astype(kind)).view(np.uint16).astype(np.int64)
        for v in (high, low)
    )
    return i32(high << 16 | low)


@instruction(r"ex2\.approx(\.ftz)?\.f32")
def _exp2(machine, match, x):
    return f32(np.exp2(x.a))


@instruction(r"lg2\.approx(\.ftz)?\.f32")
def _log2(machine, match, x):
    return f32(np.log2(x.a))


@instruction(r"rcp\.approx(\.ftz)?\.f32")
def _reciprocal(machine, match, x):
    return f32(np.float32(1) / x.a)


@instruction(r"dp4a\.s32\.s32")
def _dot(machine, match, a, b, c):
    a, b = (_fragment(machine, [v], np.int8).reshape(-1, 4).astype(np.int64) for v in (a, b))
    return i32((a * b).sum(axis=1) + c.a)


@instruction(r"dp2a\.(lo|hi)\.s32\.s32")
def _dot_of_halves(machine, match, a, b, c):
    a, b = (_fragment(machine, [v], kind).astype(np.int64) for v, kind in ((a, np.int16), (b, np.int8)))
    first = {"lo": 0, "hi": 2}[match[1]]
    return i32((a.reshape(-1, 2) * b.reshape(-1, 4)[:, first : first + 2]).sum(axis=1) + c.a)


@instruction(r"vote\.sync\.any\.pred q, p, 0xffffffff; selp\.u32 \$0, 1, 0, q;")
def _any(machine, match, word):
    machine.whole_warps()
    return i32(np.repeat((_lanes(machine, word) != 0).any(axis=1), 32))


@instruction(r"vote\.sync\.ballot\.b32 \$0, p, 0xffffffff")
def _ballot(machine, match, word):
    machine.whole_warps()
    bits = (_lanes(machine, word) != 0).astype(np.int64) << np.arange(32)
    return i32(np.repeat(bits.sum(axis=1), 32))


@instruction(r"popc\.b32 \$0, \$1")
def _ones(machine, match, word):
    return i32(np.bitwise_count(unsigned(word)))


@instruction(r"redux\.sync\.(max\.u32|add\.s32) \$0, \$1, 0xffffffff")
def _reduce(machine, match, word):
    machine.whole_warps()
    words = _lanes(machine, word)
    words = words.view(np.uint32).max(axis=1) if match[1] == "max.u32" else words.sum(axis=1, dtype=np.int64)
    return i32(np.repeat(words, 32))


@instruction(r"shfl\.sync\.idx\.b32 \$0, \$1, (\d), 0x1c1f, 0xffffffff")
def _of_quad(machine, match, word):
    machine.whole_warps()
    words = _lanes(machine, word)
    return i32(words[:, (np.arange(32) & 28) + int(match[1])].reshape(-1))


@instruction(r"shfl\.sync\.idx\.b32 \$0, \$1, \$2, 31, 0xffffffff")
def _from_lane(machine, match, word, lane):
    machine.whole_warps()
    return i32(np.take_along_axis(_lanes(machine, word), _lanes(machine, lane) & 31, axis=1).reshape(-1))


def butterfly(machine: Machine, x: Value, distance: int) -> Value:
    machine.whole_warps()
    return Value(_lanes(machine, x)[:, np.arange(32) ^ distance].reshape(-1), x.type)


@instruction(r"^bar\.warp\.sync 0xffffffff")
def _warp_barrier(machine, match):
    machine.whole_warps()


@instruction(r"^bar\.sync \$0, 128")
def _warpgroup_barrier(machine, match, number):
    machine.barrier(128)


@instruction(r"mov\.u32 \$0, %clock;")
def _clock(machine, match):
    return i32(np.zeros(len(machine.all), np.int32))


@instruction(r"mov\.u32 t, %clock; sub\.u32 t, t, \$0; setp\.lt\.u32 p, t, \$1; @p bra")
def _wait_until(machine, match, since, clocks):
    """In lockstep no clock runs."""


@instruction(r"bar\.sync 15, (\d+);")
def _first_threads_barrier(machine, match):
    count = int(match[1])
    others = machine.active.reshape(-1, machine.threads)[:, count:]
    assert not others.any(), f"threads beyond the first {count} are at a barrier of these"
    machine.barrier(count)


@instruction(r"ld\.global\.nc\.v4\.f32 \{\$0,\$1,\$2,\$3\}, \[\$4\+(\d+)\]")
def _load_constants(machine, match, pointer):
    return machine.load_pointed(pointer, int(match[1]), 4, Type("f32"))


@instruction(r"ld\.global\.nc(?:\.v(\d))?\.u32 \S+ \[\$\d\+(\d+)\]")
def _load_unchanging(machine, match, pointer):
    return machine.load_pointed(pointer, int(match[2]), int(match[1] or 1), Type("i32"))


@instruction(r"ld\.relaxed\.gpu\.global(?:\.v(\d))?\.(u32|f32) \S+ \[\$\d(?:\+(\d+))?\]")
def _load_relaxed(machine, match, pointer):
    type = Type({"u32": "i32", "f32": "f32"}[match[2]])
    return machine.load_pointed(pointer, int(match[3] or 0), int(match[1] or 1), type, relaxed=True)


@instruction(r"ld\.relaxed\.gpu\.global\.b128 all, \[\$4\]")
def _load_four(machine, match, pointer):
    return machine.load_pointed(pointer, 0, 4, Type("i32"), relaxed=True)


@instruction(r"st\.relaxed\.gpu\.global\.b128 \[\$0\], all")
def _store_four(machine, match, pointer, *words):
    machine.send(pointer, *words)


@instruction(r"st\.relaxed\.gpu\.global(?:\.v\d)?\.u32 \[\$0\], ")
def _store_relaxed(machine, match, pointer, *words):
    machine.send(pointer, *words)


@instruction(r"prefetch\.global\.L2 \[\$0\]")
def _prefetch(machine, match, pointer):
    for _, ref, at in machine.pointed(pointer):
        assert (at < ref.cells.size).all()


@instruction(r"ld\.shared(?:\.v(\d))?\.u32 .*\+(\d+)\]")
def _load_shared(machine, match, address):
    return machine.load_shared(address, int(match[2]), int(match[1] or 1))


@instruction(r"ldmatrix\.sync\.aligned\.m8n8\.x([24])\.trans\.shared\.b16")
def _load_transposed(machine, match, address):
    machine.whole_warps()
    count = int(match[1])
    with machine.masked(machine.all % 32 < 8 * count):  # the others' addresses are not used
        rows = [v.of_threads(len(machine.all)) for v in machine.load_shared(address, 0, 4)]
    rows = np.stack(rows, axis=-1).astype(np.int32).view(np.int16).reshape(-1, 4, 8, 8)  # [warp, matrix, ..]
    columns = np.ascontiguousarray(rows.swapaxes(2, 3)).view(np.uint32)  # [warp, matrix, g, t]
    return [i32(columns[:, n].reshape(-1).astype(np.int64)) for n in range(count)]


@instruction(r"st\.shared(?:\.v\d)?\.u32 \[\$0\+(\d+)\]")
def _store_shared(machine, match, address, *words):
    machine.store_shared(address, int(match[1]), words)


@instruction(r"cp\.async\.c[ag]\.shared\.global \[\$0\+(\d+)\], \[\$1\+(\d+)\], (\d+)")
def _copy_async(machine, match, to, source):
    machine.copy_async(to, int(match[1]), source, int(match[2]), int(match[3]))


@instruction(r"cp\.async\.commit_group")
def _commit(machine, match):
    machine.commit()


@instruction(r"cp\.async\.wait_group (\d+)")
def _wait_copies(machine, match):
    machine.wait_copies(int(match[1]))


@instruction(r"^fence\.proxy\.async\.shared::cta")
def _fence(machine, match):
    pass


@instruction(r"mbarrier\.init\.shared::cta\.b64 \[\$0\], 1")
def _init(machine, match, address):
    machine.mbarrier_init(address)


@instruction(r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _, \[\$0\], \$1")
def _expect(machine, match, address, count):
    machine.mbarrier_expect(address, count)


@instruction(r"mbarrier\.try_wait\.parity\.shared::cta\.b64 p, \[\$0\], \$1")
def _wait(machine, match, address, parity):
    machine.mbarrier_wait(address, parity)


@instruction(r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes \[\$0\], \[\$1\], \$2")
def _copy_bulk(machine, match, to, source, count, mbarrier):
    machine.copy_bulk(to, source, count, mbarrier)


@instruction(r"mma\.sync\.aligned\.m16n8k128\.row\.col\.s32\.b1\.b1\.s32\.and\.popc")
def _count_common_bits(machine, match, a0, a1, b, c):
    machine.whole_warps()
    a = _fragment(machine, [a0, a1], np.uint32)[..., 0]  # [warps, g, t, row half]
    b = _fragment(machine, [b], np.uint32)[..., 0, 0]
    a = a.transpose(0, 3, 1, 2).reshape(-1, 16, 1, 4)
    counts = np.bitwise_count(a & b[:, None]).sum(axis=-1, dtype=np.int64)
    return [i32(v + c.a) for v in _results(counts)]


@instruction(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\1\.f32")
def _add_product(machine, match, *operands):
    machine.whole_warps()
    a = _fragment(machine, operands[:4], NUMPY[match[1]]).astype(np.float32)  # [warps, g, t, word, 2]
    b = _fragment(machine, operands[4:6], NUMPY[match[1]]).astype(np.float32)
    a = a.reshape(-1, 8, 4, 2, 2, 2).transpose(0, 4, 1, 3, 2, 5).reshape(-1, 16, 16)
    b = b.transpose(0, 3, 2, 4, 1).reshape(-1, 16, 8)
    return [f32(v + c.a) for v, c in zip(_results(a @ b), operands[6:], strict=True)]


@instruction(r"cvt\.rna\.tf32\.f32 \$0, \$1")
def _tf32(machine, match, x):
    """To nearest, away from 0 in the middle."""
    return i32(np.ascontiguousarray(x.a).view(np.uint32).astype(np.int64) + 0x1000 & 0xFFFFE000)


@instruction(r"mma\.sync\.aligned\.m16n8k8\.row\.col\.f32\.tf32\.tf32\.f32")
def _add_product_tf32(machine, match, *operands):
    machine.whole_warps()
    words = [i32(v.a.astype(np.int64) & 0xFFFFE000) for v in operands[:6]]
    a = _fragment(machine, words[:4], np.float32)  # [warps, g, t, word, 1]
    b = _fragment(machine, words[4:], np.float32)
    a = a.reshape(-1, 8, 4, 2, 2).transpose(0, 4, 1, 3, 2).reshape(-1, 16, 8)
    b = b.reshape(-1, 8, 4, 2).transpose(0, 3, 2, 1).reshape(-1, 8, 8)
    return [f32(v + c.a) for v, c in zip(_results(a @ b), operands[6:], strict=True)]


@instruction(r"mma\.sync\.aligned\.m16n8k(16|32)\.row\.col\.s32\.(s8|u8)\.(s8|u8)\.s32")
def _multiply_bytes(machine, match, *operands):
    machine.whole_warps()
    halves = int(match[1]) // 16
    a = _fragment(machine, operands[: 2 * halves], np.int8 if match[2] == "s8" else np.uint8)
    b = _fragment(machine, operands[2 * halves : 3 * halves], np.int8 if match[3] == "s8" else np.uint8)
    a = a.reshape(-1, 8, 4, halves, 2, 4).transpose(0, 4, 1, 3, 2, 5).reshape(-1, 16, 16 * halves)
    b = b.transpose(0, 3, 2, 4, 1).reshape(-1, 16 * halves, 8)
    product = a.astype(np.float64) @ b.astype(np.float64)
    return [i32(v + c.a) for v, c in zip(_results(product), operands[3 * halves :], strict=True)]
