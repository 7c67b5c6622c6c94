"""A block of threads in numpy, in lockstep: what pallas_kernels.mosaic.lanes and the MLIR dialects do to one
thread, done to an array of all threads. Runs int_gemv on a machine without a GPU, slowly; it knows nothing
of timing or races.
"""

import contextlib
import types
from unittest import mock

import numpy as np

from pallas_kernels.mosaic import int_gemv, lanes, memory, tensor_cores


class Block:
    """One block: shared memory as bytes, a stack of masks of threads that are active."""

    def __init__(self, threads: int, number: int, shared: list[np.ndarray]):
        self.threads, self.number = threads, number
        self.active = np.ones(threads, bool)
        self.views, at = {}, 0
        self.memory = np.zeros(sum(-(-a.nbytes // 1024) * 1024 for a in shared), np.uint8)
        for a in shared:
            view = self.memory[at : at + a.nbytes].view(a.dtype).reshape(a.shape)
            self.views[id(a)] = view, at
            at += -(-a.nbytes // 1024) * 1024
        self.globals: list[np.ndarray] = []

    def full(self, v, dtype=None):
        return np.broadcast_to(np.asarray(v, dtype), (self.threads,))

    def warps(self, v):
        return self.full(v).reshape(-1, 32)

    @contextlib.contextmanager
    def when(self, condition):
        before = self.active
        self.active = before & self.full(condition)
        yield
        self.active = before

    def loop(self, start, stop, step, carry, body):
        i, stop, step = (np.array(self.full(v, np.int64)) for v in (start, stop, step))
        carry = [np.array(self.full(v)) for v in carry]
        while (going := self.active & (i < stop)).any():
            with self.when(going):
                new = body(np.minimum(i, np.maximum(stop - 1, 0)), list(carry))
            carry = [np.where(going, n, c).astype(c.dtype) for n, c in zip(new, carry, strict=True)]
            i = i + step
        return carry

    def array(self, ref):
        return self.views[id(ref)][0] if id(ref) in self.views else ref

    def load(self, ref, *indices):
        a = self.array(ref)
        return a[tuple(np.where(self.active, self.full(i, np.int64), 0) for i in indices)]

    def load_reals(self, count, ref, indices):
        *before, last = indices
        return [self.load(ref, *before, last + k) for k in range(count)]

    def store(self, value, ref, *indices):
        on = self.active
        self.array(ref)[tuple(self.full(i, np.int64)[on] for i in indices)] = self.full(value)[on]

    def address(self, ref):
        self.globals.append(ref.reshape(-1).view(np.uint8))
        return np.int64(len(self.globals) - 1) << np.int64(40)

    def copy_async(self, shared, source, count, at=0):
        source, shared = self.full(source, np.int64), self.full(shared, np.int64)
        for thread in np.flatnonzero(self.active):
            buffer, first = self.globals[source[thread] >> 40], (source[thread] & (2**40 - 1)) + at
            assert first % count == 0 and shared[thread] % count == 0 and first + count <= len(buffer)
            self.memory[shared[thread] + at : shared[thread] + at + count] = buffer[first : first + count]

    def load_shared(self, count, address, at=0):
        address = np.where(self.active, self.full(address, np.int64), 0) + np.where(self.active, at, 0)
        words = self.memory[address[:, None] + np.arange(4 * count)].copy().view(np.uint32)
        return [words[:, k].view(np.int32) for k in range(count)]

    def store_shared(self, words, address, at=0):
        for k, word in enumerate(words):
            data = np.ascontiguousarray(self.full(word, np.int32)).view(np.uint8).reshape(-1, 4)[self.active]
            where = self.full(address, np.int64)[self.active] + at + 4 * k
            self.memory[where[:, None] + np.arange(4)] = data

    def multiply_bytes(self, a, b, c, signed):
        groups, half = len(a) // 2, lambda v: np.ascontiguousarray(self.full(v, np.int32)).view(np.int8)
        warps = self.threads // 32
        left = np.zeros((warps, 2, 8, groups, 4, 4), np.int64)  # row half, row, k half, t, byte
        right = np.zeros((warps, 8, groups, 4, 4), np.int64)
        for n, word in enumerate(a):
            v = half(word) if signed else half(word).view(np.uint8)
            left[:, n % 2, :, n // 2] = v.reshape(warps, 8, 4, 4)
        for n, word in enumerate(b):
            right[:, :, n] = half(word).reshape(warps, 8, 4, 4)
        product = np.einsum("wrghtb,wnhtb->wrgn", left, right).reshape(warps, 2, 8, 4, 2)
        added = [product[:, r, :, :, h].reshape(-1) for r in (0, 1) for h in (0, 1)]
        return [(self.full(x, np.int64) + y).astype(np.int32) for x, y in zip(c, added, strict=True)]

    def from_lane(self, word, lane):
        warps = self.warps(word)
        return np.take_along_axis(warps, self.warps(lane).astype(np.int64) % 32, axis=1).reshape(-1)

    def swapped(self, x, distance):
        return self.warps(x)[:, np.arange(32) ^ distance].reshape(-1)

    def over(self, x, lanes_, reduce):
        return np.repeat(reduce(self.full(x).reshape(-1, lanes_), axis=1), lanes_)


def i32(v):
    return (
        np.asarray(v).astype(np.int64).astype(np.uint32).view(np.int32)
        if np.ndim(v)
        else np.int32((int(v) + 2**31) % 2**32 - 2**31)
    )


def u32(v):
    return np.asarray(v).astype(np.int64) & 0xFFFFFFFF


def bits(v, dtype):
    return np.ascontiguousarray(v).view(dtype)


def halves(v):
    words = np.ascontiguousarray(np.atleast_1d(v)).view(np.float16).reshape(-1, 2).astype(np.float32)
    return [words[:, 0], words[:, 1]]


def f32(v):
    return np.asarray(v, np.float32)


def fakes(block: Block) -> dict:
    def bytes_of(low, high, selector):
        low, high = u32(block.full(low)), u32(block.full(high))
        picked = [
            ((low, high)[n >> 2] >> 8 * (n & 3)) & 255 for n in (selector >> 4 * k & 15 for k in range(4))
        ]
        return i32(sum(byte << 8 * k for k, byte in enumerate(picked)))

    def plus(*terms):
        return i32(sum(np.asarray(term, np.int64) for term in terms))

    def sum_of_bytes(word, total):
        parts = bits(block.full(word, np.int32), np.int8).reshape(-1, 4).sum(axis=1, dtype=np.int64)
        return i32(parts + block.full(total))

    return {
        **{name: getattr(block, name) for name in (
            "when", "loop", "load", "load_reals", "store", "address", "copy_async", "load_shared",
            "store_shared", "multiply_bytes", "from_lane", "swapped",
        )},
        **{name: lambda *_: None for name in ("commit_copies",
        "wait_copies", "warp_barrier", "block_barrier")},
        **{name: lambda v: v for name in ("to_integer", "to_index")},
        "integer": i32, "index": np.int64, "real": np.float32, "f32": lambda: None,
        "thread": lambda: np.arange(block.threads, dtype=np.int32), "block": lambda: np.int32(block.number),
        "plus": plus, "scaled": lambda v, k: i32(np.asarray(v, np.int64) * k),
        "quotient": lambda v, k: i32(u32(v) // k), "remainder": lambda v, k: i32(u32(v) % k),
        "is_below": lambda a, b: u32(a) < u32(b), "is_equal": lambda a, b: np.equal(a, b),
        "masked": lambda w, m: i32(u32(w) & m), "shifted": lambda w, k: i32(u32(w) << k),
        "shifted_right": lambda w, k: i32(u32(w) >> k),
        "merged": lambda w, o, m: i32((u32(w) & m) | (u32(o) & (m ^ 0xFFFFFFFF))),
        "nibbles": lambda vs: [[i32(u32(w) & m) for w in v] for v in vs for m in (0x0F0F0F0F, 0xF0F0F0F0)],
        "times": lambda first, *rest: f32(np.prod([block.full(f) for f in (first, *rest)], axis=0)),
        "negative": lambda x: -x, "halves": halves, "low_half": lambda w: halves(w)[0],
        "small_integer": lambda w, at, n: f32(u32(w) >> at & (2**n - 1)),
        "signed_byte": lambda w, k: f32(((u32(w) >> 8 * k) & 255).astype(np.uint8).view(np.int8)),
        "from_quad": lambda w, lane, k: block.from_lane(w, (np.asarray(lane) & ~3) + k),
        "bytes_of": bytes_of, "sum_of_bytes": sum_of_bytes, "reciprocal": lambda x: f32(1) / x,
        "as_word": lambda x: bits(block.full(x, np.float32), np.int32),
        "as_real": lambda w: bits(block.full(w, np.int32), np.float32),
        "warp_sum_real": lambda x, lanes=32: f32(block.over(x, lanes, np.sum)),
        "largest_of_warp": lambda x, lanes=32: block.over(x, lanes, np.max),
        "shared_address": lambda ref: np.int32(block.views[id(ref)][1]),
        "at_byte": lambda base, item, size, offset: base + u32(item) * size + u32(offset),
    }  # fmt: skip


@contextlib.contextmanager
def faked(block: Block):
    """Each fake in place of the function of its name, in whichever file that is."""
    with contextlib.ExitStack() as stack:
        for name, fake in fakes(block).items():
            (home,) = (module for module in (lanes, memory, tensor_cores) if hasattr(module, name))
            stack.enter_context(mock.patch.object(home, name, fake))
        yield


ARITH = types.SimpleNamespace(
    CmpIPredicate=types.SimpleNamespace(uge="uge"), cmpi=lambda _, a, b: u32(a) >= u32(b),
    addi=lambda a, b: np.logical_and(a, b) if np.asarray(a).dtype == bool else np.asarray(a) + b,
    subi=lambda a, b: i32(np.asarray(a, np.int64) - b), muli=lambda a, b: np.asarray(a, np.int64) * b,
    andi=lambda a, b: np.logical_and(a, b) if np.asarray(a).dtype == bool else i32(u32(a) & u32(b)),
    minui=lambda a, b: np.minimum(u32(a), u32(b)).astype(np.int32), minsi=np.minimum, maxsi=np.maximum,
    remui=lambda a, b: np.asarray(a) % b, divui=lambda a, b: np.asarray(a) // b,
    select=lambda c, a, b: np.where(c, a, b), sitofp=lambda _, v: f32(v), negf=lambda v: -v,
    addf=lambda a, b: f32(a) + b, mulf=lambda a, b: f32(a) * b, divf=lambda a, b: f32(a) / b,
    maximumf=np.maximum,
)  # fmt: skip
MATH = types.SimpleNamespace(
    fma=lambda a, b, c: f32(np.asarray(a, np.float64) * b + c), absf=np.abs, exp=np.exp,
    rsqrt=lambda v: f32(1) / np.sqrt(v),
)  # fmt: skip


def int_gemv_on_cpu(
    x, weights, layers, formats_of, gamma=None, eps=0.0, residual=None, bits=8, shared=220 * 1024
):
    """`int_gemv.int_gemv` for numpy arguments of whole tiles, block by block."""
    rows, columns = x.shape
    plan = int_gemv.plan(weights, rows, formats_of, bits, shared)
    width, padded = int_gemv.columns_of_rows(rows)
    steps, matrices = weights[0][0]["words"].shape[2], len(weights[0])
    n_tiles = sum(part.n_tiles for part in plan.parts)
    out = np.full((rows, n_tiles * 16), np.nan, np.float32)
    with np.errstate(all="ignore"):
        for part, of in zip(plan.parts, weights, strict=True):
            for number in range(part.blocks):
                smem = [
                    np.zeros(plan.warps * part.depth * part.item_bytes(matrices) // 4, np.int32),
                    np.zeros(bits // 8 * padded * int_gemv._row_bytes(steps) // 4, np.int32),
                    np.zeros(int_gemv._stats_bytes(part.format, steps, padded) // 4, np.float32),
                    np.zeros((plan.together * matrices, padded, plan.warps, 16), np.float32),
                    np.zeros((padded, plan.warps), np.float32),
                ]
                block = Block(32 * plan.warps, number, smem)
                fields = [{name: np.ascontiguousarray(w[name]) for name in part.names} for w in of]
                with faked(block), mock.patch.multiple(int_gemv, arith=ARITH, mlir_math=MATH):
                    int_gemv._phase(
                        part, fields, np.int32(number), x, layers, gamma, residual, out, *smem,
                        warps=plan.warps, together=plan.together, matrices=matrices, rows=rows, width=width,
                        padded=padded, columns=columns, n_tiles=n_tiles, steps=steps, eps=eps, bits=bits,
                        row_bytes=int_gemv._row_bytes(steps),
                    )  # fmt: skip
    return out
