"""What one lane of a warp does, as MLIR and PTX: the few instructions that Pallas does not offer.

Functions take and return MLIR values and are called while a kernel is traced, inside `plgpu.inline_mgpu`. A
warp is 32 lanes; u32 and s32 are both i32 here.
"""

from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, gpu, llvm, memref, scf, vector
from jax.experimental.mosaic.gpu import utils as mosaic


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def f32() -> ir.Type:
    return ir.F32Type.get()


def index(value: int):
    return arith.constant(ir.IndexType.get(), value)


def integer(value: int):
    return arith.constant(i32(), value - 2**32 if value >= 2**31 else value)


def real(value: float):
    return arith.constant(f32(), float(value))


def to_integer(value):
    return arith.index_cast(i32(), value)


def to_index(value):
    return arith.index_cast(ir.IndexType.get(), value)


def thread() -> ir.Value:
    return gpu.thread_id(gpu.Dimension.x)


def block() -> ir.Value:
    return gpu.block_id(gpu.Dimension.x)


def is_equal(a, b):
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


def is_below(a, b):
    return arith.cmpi(arith.CmpIPredicate.ult, a, b)


def is_above_zero(x):
    return arith.cmpf(arith.CmpFPredicate.OGT, x, real(0))


def true():
    return arith.constant(ir.IntegerType.get_signless(1), 1)


def element(v, i: int):
    """Element i of a vector."""
    return vector.extract(v, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))


def load_vector(count: int, ref, indices):
    """`count` neighbouring 32-bit words of a ref of i32: one 16-byte load where count is 4."""
    return vector.load(ir.VectorType.get((count,), i32()), ref, indices)


def halves(word):
    """The two float16 of a word, as float32: (low half, high half)."""
    pair = llvm.bitcast(ir.VectorType.get((2,), ir.F16Type.get()), word)
    return [arith.extf(f32(), element(pair, i)) for i in range(2)]


def ptx(result: ir.Type, operands, text: str, constraints: str):
    """Inline PTX without side effects."""
    return llvm.inline_asm(result, operands, text, constraints, has_side_effects=False)


def round_to_integer(x):
    """Nearest integer, ties to even."""
    return ptx(i32(), [x], "cvt.rni.s32.f32 $0, $1;", "=r,f")


def warp_max(word):
    """Largest u32 of the warp, in every lane."""
    return llvm.inline_asm(
        i32(), [word], "redux.sync.max.u32 $0, $1, 0xffffffff;", "=r,r", has_side_effects=True
    )


def warp_sum(word):
    """Sum of the warp's s32, in every lane."""
    return llvm.inline_asm(
        i32(), [word], "redux.sync.add.s32 $0, $1, 0xffffffff;", "=r,r", has_side_effects=True
    )


def warp_sum_real(x, lanes: int = 32):
    """Sum over groups of neighbouring lanes (a power of two), in every lane of the group."""
    distance = 1
    while distance < lanes:
        x = arith.addf(x, mosaic.shfl_bfly(x, distance))
        distance *= 2
    return x


def transposed_bits(word, lane):
    """Lane j's word gets bit i from bit j of lane i: a 32 x 32 bit transpose in five exchanges (Warren 2012,
    7-3)."""
    for distance, low in (
        (16, 0x0000FFFF),
        (8, 0x00FF00FF),
        (4, 0x0F0F0F0F),
        (2, 0x33333333),
        (1, 0x55555555),
    ):
        other = mosaic.shfl_bfly(word, distance)
        shift = integer(distance)
        upper = is_equal(arith.andi(to_integer(lane), shift), shift)
        kept = arith.andi(word, arith.select(upper, integer(low << distance), integer(low)))
        got = arith.select(
            upper,
            arith.andi(arith.shrui(other, shift), integer(low)),
            arith.andi(arith.shli(other, shift), integer(low << distance)),
        )
        word = arith.ori(kept, got)
    return word


def from_lane(word, lane):
    """The word of another lane; `lane` is an i32 of this lane's choice."""
    return llvm.inline_asm(
        i32(),
        [word, lane],
        "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;",
        "=r,r,r",
        has_side_effects=True,
    )


def as_stored(values, ref):
    """A list of float32 rounded to what a ref of float32 or bfloat16 can hold."""
    if ref.type.element_type == f32():
        return values
    packed = vector.from_elements(ir.VectorType.get((len(values),), f32()), values)
    packed = arith.truncf(ir.VectorType.get((len(values),), ref.type.element_type), packed)
    packed = arith.extf(ir.VectorType.get((len(values),), f32()), packed)
    return [element(packed, i) for i in range(len(values))]


def count_common_bits(a0, a1, b):
    """Binary tensor cores: popcounts of a & b over 128 bits, for 16 rows of `a` and 8 columns of `b`.

    mma.m16n8k128 .b1 and.popc. With lane = 4 g + t: a0 and a1 hold word t of rows g and g + 8, b word t of
    column g. Returns for this lane [row g, column 2 t], [g, 2 t + 1], [g + 8, 2 t], [g + 8, 2 t + 1].
    """
    zero = integer(0)
    result = llvm.inline_asm(
        llvm.StructType.get_literal([i32()] * 4),
        [a0, a1, b, zero],
        "mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {$0,$1,$2,$3},{$4,$5},{$6},{$7,$7,$7,$7};",
        "=r,=r,=r,=r,r,r,r,r",
        has_side_effects=False,
    )
    return [llvm.extractvalue(i32(), result, [i]) for i in range(4)]


def load(ref, *indices):
    return memref.load(ref, [index(i) if isinstance(i, int) else i for i in indices])


def store(value, ref, *indices):
    memref.store(value, ref, [index(i) if isinstance(i, int) else i for i in indices])


def block_barrier():
    gpu.barrier()


when = mosaic.when


def load_stored(count: int, ref, indices):
    """`count` neighbouring float32 or bfloat16 of a ref, as a vector of what they are."""
    return vector.load(ir.VectorType.get((count,), ref.type.element_type), ref, indices)


def reals(stored) -> list:
    """A vector of float32 or bfloat16 as a list of float32."""
    kind = ir.VectorType(stored.type)
    if kind.element_type != f32():
        stored = arith.extf(ir.VectorType.get(kind.shape, f32()), stored)
    return [element(stored, i) for i in range(kind.shape[0])]


def load_reals(count: int, ref, indices):
    """`count` neighbouring float32 or bfloat16 of a ref, as a list of float32."""
    return reals(load_stored(count, ref, indices))


def store_reals(values, ref, indices):
    """A list of float32 into neighbouring float32 or bfloat16 of a ref."""
    packed = vector.from_elements(ir.VectorType.get((len(values),), f32()), values)
    if ref.type.element_type != f32():
        packed = arith.truncf(ir.VectorType.get((len(values),), ref.type.element_type), packed)
    vector.store(packed, ref, indices)


def largest_of_warp(x, lanes: int = 32):
    """Largest float32 over groups of neighbouring lanes, in every lane of the group."""
    distance = 1
    while distance < lanes:
        x = arith.maximumf(x, mosaic.shfl_bfly(x, distance))
        distance *= 2
    return x


def swapped(x, distance: int):
    """The value of the lane whose number differs in the bit `distance`."""
    return mosaic.shfl_bfly(x, distance)


def add_to_counter(ref, at):
    """Atomically add 1 to an i32 of global memory, ordered with all that the block wrote before a barrier;
    the old value."""
    return llvm.inline_asm(
        i32(),
        [_pointer(ref, at)],
        "atom.acq_rel.gpu.global.add.u32 $0, [$1], 1;",
        "=r,l,~{memory}",
        has_side_effects=True,
    )


def load_written_by_others(ref, at):
    """A float32 of global memory that another block of the same launch wrote; `at` counts elements. Past the
    multiprocessor's own cache, which may hold what was there before."""
    return llvm.inline_asm(
        f32(),
        [_pointer(ref, at, f32())],
        "ld.relaxed.gpu.global.f32 $0, [$1];",
        "=f,l,~{memory}",
        has_side_effects=True,
    )


def load_reals_written_by_others(count: int, ref, at) -> list:
    """`count` (a multiple of 4) neighbouring float32, as above."""
    out = []
    for first in range(0, count, 4):
        loaded = llvm.inline_asm(
            llvm.StructType.get_literal([f32()] * 4),
            [_pointer(ref, arith.addi(at, index(first)), f32())],
            "ld.relaxed.gpu.global.v4.f32 {$0,$1,$2,$3}, [$4];",
            "=f,=f,=f,=f,l,~{memory}",
            has_side_effects=True,
        )
        out += [llvm.extractvalue(f32(), loaded, [i]) for i in range(4)]
    return out


def arrive(ref, at):
    """Count this block at a grid barrier. Behind a block barrier: what the block wrote is seen by who waits."""
    llvm.inline_asm(
        _void(),
        [_pointer(ref, at)],
        "red.release.gpu.global.add.u32 [$0], 1;",
        "l,~{memory}",
        has_side_effects=True,
    )


def wait_for(ref, at, blocks):
    """Wait until `blocks` (an i32) blocks have arrived. Before a block barrier, by one thread."""
    llvm.inline_asm(
        _void(),
        [_pointer(ref, at), blocks],
        """{
        .reg .pred p;
        .reg .u32 v;
        again_${:uid}:
        ld.acquire.gpu.global.u32 v, [$0];
        setp.lt.u32 p, v, $1;
        @p bra again_${:uid};
        }""",
        "l,r,~{memory}",
        has_side_effects=True,
    )


def shared_address(ref):
    """Address of a ref in shared memory, as i32."""
    return llvm.ptrtoint(i32(), mosaic.memref_ptr(ref))


def mbarrier_init(address):
    """One arrival, and the bytes it announces, complete a turn."""
    llvm.inline_asm(
        _void(),
        [address],
        "mbarrier.init.shared::cta.b64 [$0], 1; fence.mbarrier_init.release.cluster;",
        "r,~{memory}",
        has_side_effects=True,
    )


def mbarrier_expect(address, byte_count):
    llvm.inline_asm(
        _void(),
        [address, byte_count],
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
        "r,r,~{memory}",
        has_side_effects=True,
    )


def mbarrier_wait(address, parity):
    """Wait until the turn of this parity (an i32) has completed."""
    llvm.inline_asm(
        _void(),
        [address, parity],
        """{
        .reg .pred p;
        again_${:uid}:
        mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;
        @!p bra again_${:uid};
        }""",
        "r,r,~{memory}",
        has_side_effects=True,
    )


def copy_to_shared(destination, ref, at, byte_count, mbarrier):
    """Bulk copy of global memory from element `at` of a ref of i32; its bytes are counted at the mbarrier."""
    llvm.inline_asm(
        _void(),
        [destination, _pointer(ref, at), byte_count, mbarrier],
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        "r,l,r,r,~{memory}",
        has_side_effects=True,
    )


def _void():
    return ir.Type.parse("!llvm.void")


def _pointer(ref, at, element_type=None):
    base, wide = mosaic.memref_ptr(ref), ir.IntegerType.get_signless(64)
    offset = arith.index_cast(wide, at)
    return llvm.getelementptr(
        base.type, base, [offset], [-(2**31)], element_type or i32(), llvm.GEPNoWrapFlags.none
    )


def loop(start, stop, step, carry, body):
    """for i in range(start, stop, step): carry = body(i, carry). A list of values in, a list out."""
    for_op = scf.ForOp(start, stop, step, carry)
    with ir.InsertionPoint(for_op.body):
        scf.yield_(body(for_op.induction_variable, list(for_op.inner_iter_args)))
    return list(for_op.results)
