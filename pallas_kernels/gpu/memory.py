"""How one lane reads and writes memory: global and shared, by words and vectors, in bulk, and between blocks
of the same launch. Called while a kernel is traced, as lanes.py is. An index of a ref is a number, an index
or an i32."""

import operator
from typing import Any, NamedTuple

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, memref, vector
from jax.experimental.mosaic.gpu import utils as mosaic

from pallas_kernels.gpu import lanes, values
from pallas_kernels.gpu.values import (
    as_real,
    as_value,
    as_word,
    f32,
    i32,
    i64,
    index,
    integer,
    long,
    smaller_signed,
)


class Reals(NamedTuple):
    """float32 in a ref of i32, for `load` and `store`."""

    ref: Any


class Either(NamedTuple):
    """The first of two refs where the condition holds, else the second, for `address`."""

    condition: Any
    first: Any
    second: Any


def load(ref, *indices):
    if isinstance(ref, Reals):
        return as_real(load(ref.ref, *indices))
    return as_value(memref.load(ref, list(map(index, indices))))


def load_each(ref, places: list) -> list:
    """Elements of a ref, of each its indices."""
    return [load(ref, *indices) for indices in places]


def store(value, ref, *indices):
    if isinstance(ref, Reals):
        return store(as_word(value), ref.ref, *indices)
    memref.store(value, ref, list(map(index, indices)))


def load_vector(count: int, ref, indices):
    """`count` neighbouring 32-bit words of a ref of i32: one 16-byte load where count is 4."""
    return vector.load(ir.VectorType.get((count,), i32()), ref, list(map(index, indices)))


def load_words(count: int, ref, indices) -> list:
    """`count` neighbouring 32-bit words of a ref of i32."""
    loaded = load_vector(count, ref, indices)
    return [lanes.element(loaded, i) for i in range(count)]


def load_stored(count: int, ref, indices):
    """`count` neighbouring numbers of a ref, as a vector of what they are."""
    return vector.load(ir.VectorType.get((count,), ref.type.element_type), ref, list(map(index, indices)))


def load_reals(count: int, ref, indices):
    """`count` neighbouring float32 or bfloat16 of a ref, as a list of float32."""
    return lanes.reals(load_stored(count, ref, indices))


def load_either(count: int, condition, refs, at) -> list:
    """`count` (a multiple of 4) neighbouring float32 from element `at` of the first ref where the condition
    holds, else of the second: refs that nobody writes."""
    pointer = arith.select(condition, *(_pointer(ref, at, f32()) for ref in refs))
    out = []
    for first in range(0, count, 4):
        text = f"ld.global.nc.v4.f32 {{$0,$1,$2,$3}}, [$4+{4 * first}];"
        out += lanes.ptx([f32()] * 4, [pointer], text, "=f,=f,=f,=f,l")
    return out


def load_unchanging(count: int, address, at: int = 0) -> list:
    """1, 2 or 4 words of global memory that nobody writes, at an address (`address_of`) plus `at` bytes. They
    are asked for at this point of the code, wherever they are used."""
    width, names = _several(0, count)
    text, constraints = f"ld.global.nc{width}.u32 {names}, [${count}+{at}];", "=r," * count + "l,~{memory}"
    return lanes.ptx([i32()] * count, [address], text, constraints, effects=True)


def store_stored(x, ref, indices):
    """A vector of what a ref holds into neighbouring elements of it."""
    vector.store(x, ref, list(map(index, indices)))


def store_reals(values, ref, indices):
    """A list of float32 into neighbouring elements of a ref of float32."""
    store_stored(lanes.real_vector(values), ref, indices)


def store_rounded(value, ref, indices):
    """A float32 into an element of a ref of float32 or float16: to nearest, what is beyond the largest as
    that."""
    if ref.type.element_type != f32():
        value = lanes.element(lanes.as_half_vector(lanes.half_pair(value, value, saturated=True)), 0)
    store(value, ref, *indices)


def store_halves(pairs, ref, indices):
    """Pairs of float16, each a word, into neighbouring elements of a ref of float16."""
    store_stored(lanes.half_vector(pairs), ref, indices)


def store_words(words, ref, indices):
    """A list of 32-bit words into neighbouring elements of a ref of i32."""
    store_stored(lanes.vector_of(words, i32(), 1), ref, indices)


def store_bytes(words, ref, indices):
    """Words of four bytes into neighbouring elements of a ref of int8."""
    store_stored(lanes.byte_vector(words), ref, indices)


def _several(first: int, count: int) -> tuple[str, str]:
    """How PTX says that 1, 2 or 4 words are loaded or stored, and their names, from operand `first` on."""
    names = ",".join(f"${first + i}" for i in range(count))
    return (f".v{count}", f"{{{names}}}") if count > 1 else ("", names)


def load_shared(count: int, address, at: int = 0):
    """1, 2 or 4 words of shared memory at an address (`shared_address`) plus `at` bytes."""
    width, names = _several(0, count)
    text, constraints = f"ld.shared{width}.u32 {names}, [${count}+{at}];", "=r," * count + "r,~{memory}"
    return lanes.ptx([i32()] * count, [address], text, constraints, effects=True)


def load_transposed(count: int, address):
    """2 or 4 matrices of 8 x 8 numbers of 16 bits in shared memory, transposed: lane 8 n + r has the address
    of row r of matrix n, 16 bytes; lane 4 g + t gets a word of each, rows 2 t and 2 t + 1 of column g."""
    names = ",".join(f"${i}" for i in range(count))
    text = f"ldmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 {{{names}}}, [${count}];"
    return lanes.ptx([i32()] * count, [address], text, "=r," * count + "r,~{memory}", effects=True)


def store_shared(words, address, at: int = 0):
    """1, 2 or 4 words into shared memory."""
    width, names = _several(1, len(words))
    text, constraints = f"st.shared{width}.u32 [$0+{at}], {names};", "r,r" + ",r" * (len(words) - 1)
    lanes.ptx(None, [address, *words], text, constraints + ",~{memory}", effects=True)


def shared_address(ref):
    """Where a ref of shared memory begins, as i32."""
    return as_value(llvm.ptrtoint(i32(), mosaic.memref_ptr(ref)))


def address(ref):
    """Where a ref of global memory begins, or the chosen one of `Either`, as i64."""
    if isinstance(ref, Either):
        return values.select(ref.condition, address(ref.first), address(ref.second))
    return as_value(llvm.ptrtoint(i64(), mosaic.memref_ptr(ref)))


def address_of(ref, indices):
    """Where an element of a ref of global memory begins, as i64."""
    return as_value(llvm.ptrtoint(i64(), _element(ref, indices)))


def at_byte(base, item, item_bytes: int, offset):
    """base + item * item_bytes + offset: i64 from an i64 and two i32."""
    return base + long(item) * item_bytes + long(offset)


def copy_async(shared, source, count: int, at: int = 0, source_at: int | None = None):
    """Begin to copy `count` bytes (4, 8 or 16) from global to shared memory, both addresses plus `at`, or the
    source plus `source_at`; 16 go past the multiprocessor's own cache, which has room for few lines on their
    way."""
    cache, source_at = "cg" if count == 16 else "ca", at if source_at is None else source_at
    text = f"cp.async.{cache}.shared.global [$0+{at}], [$1+{source_at}], {count};"
    lanes.ptx(None, [shared, source], text, "r,l,~{memory}", effects=True)


def commit_copies():
    """Close a group of copies."""
    lanes.ptx(None, [], "cp.async.commit_group;", "~{memory}", effects=True)


def wait_copies(pending: int):
    """Wait until at most so many of this lane's groups are still under way."""
    lanes.ptx(None, [], f"cp.async.wait_group {pending};", "~{memory}", effects=True)


def prefetch(ref, indices):
    """Ask for the cache line of an element of a ref, into the L2 cache."""
    lanes.ptx(None, [_element(ref, indices)], "prefetch.global.L2 [$0];", "l,~{memory}", effects=True)


def fence_of_copies():
    """Bulk copies that follow come behind what was read and written before."""
    lanes.ptx(None, [], "fence.proxy.async.shared::cta;", "~{memory}", effects=True)


def mbarrier_init(address):
    """One arrival, and the bytes it announces, complete a turn."""
    text = "mbarrier.init.shared::cta.b64 [$0], 1; fence.mbarrier_init.release.cluster;"
    lanes.ptx(None, [address], text, "r,~{memory}", effects=True)


def mbarrier_expect(address, byte_count):
    text = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
    lanes.ptx(None, [address, integer(byte_count)], text, "r,r,~{memory}", effects=True)


def mbarrier_wait(address, parity):
    """Wait until the turn of this parity (an i32) has completed."""
    text = """{
        .reg .pred p;
        again_${:uid}:
        mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;
        @!p bra again_${:uid};
        }"""
    lanes.ptx(None, [address, parity], text, "r,r,~{memory}", effects=True)


def copy_to_shared(destination, ref, at, byte_count, mbarrier):
    """Bulk copy of global memory from element `at` of a ref of i32; its bytes are counted at the mbarrier."""
    kind = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    operands = [destination, _pointer(ref, at), integer(byte_count), mbarrier]
    lanes.ptx(None, operands, f"{kind} [$0], [$1], $2, [$3];", "r,l,r,r,~{memory}", effects=True)


def load_written_by_others(ref, at):
    """A float32 of global memory that another block of the same launch wrote; `at` counts elements. Past the
    multiprocessor's own cache, which may hold what was there before."""
    text = "ld.relaxed.gpu.global.f32 $0, [$1];"
    return lanes.ptx(f32(), [_pointer(ref, at, f32())], text, "=f,l,~{memory}", effects=True)


def tagged(value, tag):
    """A float32, rounded to 22 bits of mantissa, with a tag of 2 bits in place of the lowest: one word, so
    that whoever reads the tag has the value. NaN stays NaN: a GPU's has all bits but the sign set, and 2 more
    would be -0."""
    return smaller_signed(as_word(value), 0x7FFFFFFC) + 2 & 0xFFFFFFFC | tag


def untagged(word):
    """The float32 of a word with a tag: left in the value it would be a bias, at most 2^-21 of it."""
    return as_real(as_value(word) & 0xFFFFFFFC)


def store_for_others(words: list, ref, at):
    """1, 2 or 4 words, from a multiple of as many on, to global memory, for other blocks of the launch."""
    width, names = _several(1, len(words))
    text, constraints = f"st.relaxed.gpu.global{width}.u32 [$0], {names};", "l" + ",r" * len(words)
    lanes.ptx(None, [_pointer(ref, at), *words], text, constraints + ",~{memory}", effects=True)


def store_four_for_others(words: list, ref, at):
    """Four words, from a multiple of four on, as one: who reads one of them as they are now has all."""
    text = """{
        .reg .b128 all;
        .reg .b64 low, high;
        mov.b64 low, {$1, $2};
        mov.b64 high, {$3, $4};
        mov.b128 all, {low, high};
        st.relaxed.gpu.global.b128 [$0], all;
        }"""
    lanes.ptx(None, [_pointer(ref, at), *words], text, "l,r,r,r,r,~{memory}", effects=True)


def load_fours(ref, starts, tag) -> list[list]:
    """Wait until the last of each of the four words from `starts` on has this tag: all of them, as stored by
    `store_four_for_others`. The last four are asked for again and again, and then the others, as in
    `load_tagged_words`."""
    text = """{
        .reg .b128 all;
        .reg .b64 low, high;
        ld.relaxed.gpu.global.b128 all, [$4];
        mov.b128 {low, high}, all;
        mov.b64 {$0, $1}, low;
        mov.b64 {$2, $3}, high;
        }"""
    pointers = [_pointer(ref, at) for at in starts]

    def attempt(pointers):
        words, wrong = [], integer(0)
        for pointer in pointers:
            words += lanes.ptx([i32()] * 4, [pointer], text, "=r,=r,=r,=r,l,~{memory}", effects=True)
            wrong = wrong | words[-1] ^ tag
        return lanes.any_lane(wrong & 3), words

    *others, last = pointers
    words = lanes.repeated(lambda: attempt([last]), [i32()] * 4)
    if others:
        words = lanes.repeated(lambda: attempt(others), [i32()] * (4 * len(others))) + words
    return [words[k : k + 4] for k in range(0, len(words), 4)]


def load_tagged(ref, reads, tag, at_once: bool = False) -> list:
    """`load_tagged_words`, as float32."""
    return [untagged(word) for word in load_tagged_words(ref, reads, tag, at_once)]


def load_tagged_words(ref, reads, tag, at_once: bool = False) -> list:
    """Wait until each of the words of `reads` has this tag: list of i32, the tags in them.

    reads  ((at, constant), count) pairs: count, 1, 2 or 4, neighbours from element at + constant of a ref of
            i32. The last is asked for again and again, and then all of them: to ask for all would be most of
            what the L2 cache can give, and keep back who writes them.
    at_once all are asked for again and again: where few blocks wait, or warps for few words, it saves them a
            way to memory
    """
    pointers = [_pointer(ref, at) for (at, _), _ in reads]

    def attempt(reads, pointers):
        words = _load_relaxed(reads, pointers)
        wrong = values.in_pairs(operator.or_, [word ^ tag for word in words])
        return lanes.any_lane(wrong & 3), words  # all lanes alike, or each shuffle would be guarded

    def until_written(reads, pointers):
        count = sum(n for _, n in reads)
        return lanes.repeated(lambda: attempt(reads, pointers), [i32()] * count)

    if not at_once:
        until_written(reads[-1:], pointers[-1:])
    return until_written(reads, pointers)


def load_early(ref, reads) -> list:
    """The words of `reads` (as for `load_tagged_words`) as they are now, written or not, for `settled`."""
    return _load_relaxed(reads, [_pointer(ref, at) for (at, _), _ in reads])


def settled(ref, reads, early: list, tag) -> list:
    """What `load_tagged_words` gives, at once if all words of `load_early` had this tag."""
    wrong = values.in_pairs(operator.or_, [word ^ tag for word in early])
    late = lanes.any_lane(wrong & 3)
    return lanes.choose(late, lambda: load_tagged_words(ref, reads, tag, at_once=True), early)


def _load_relaxed(reads, pointers) -> list:
    words = []
    for pointer, ((_, constant), count) in zip(pointers, reads, strict=True):
        width, names = _several(0, count)
        text = f"ld.relaxed.gpu.global{width}.u32 {names}, [${count}+{4 * constant}];"
        constraints = "=r," * count + "l,~{memory}"
        words += lanes.ptx([i32()] * count, [pointer], text, constraints, effects=True)
    return words


def _element(ref, indices):
    at = index(0)
    for i, size in zip(indices, ref.type.shape, strict=True):
        at = at * size + index(i)
    return _pointer(ref, at, ref.type.element_type)


def _pointer(ref, at, element_type=None):
    base = mosaic.memref_ptr(ref)
    offset = arith.index_cast(i64(), index(at))
    return llvm.getelementptr(
        base.type, base, [offset], [-(2**31)], element_type or i32(), llvm.GEPNoWrapFlags.none
    )
