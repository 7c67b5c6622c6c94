"""Zeros that take no memory until they are written.

XLA gets memory for a large array from the operating system, which gives it page by page as it is written;
whoever fills it with zeros takes all of it at once. Linux's madvise(MADV_DONTNEED) gives the pages back, and
they read as zeros from then on (man 2 madvise: private anonymous memory).
"""

import dataclasses
import functools
import mmap

import jax
from llvmlite import ir

from pallas_kernels.cpu import ffi, later
from pallas_kernels.cpu.values import ADDRESS, I32, I64, Value, constant, intrinsic, when

DONTNEED = 4  # MADV_DONTNEED of Linux


@dataclasses.dataclass(frozen=True)
class Kernel:
    """rank  of the array
    item  bytes of a number
    page  bytes of a page of memory
    """

    rank: int
    item: int
    page: int = mmap.PAGESIZE


def zeros(shape: tuple[int, ...], dtype) -> jax.Array:
    """As jnp.zeros, on a CPU with Linux."""
    return _made(shape, jax.numpy.dtype(dtype))()


@functools.cache
def _made(shape: tuple[int, ...], dtype):
    target = later.target(Kernel(len(shape), dtype.itemsize), _module)
    return jax.jit(jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(shape, dtype)))


def _module(kernel: Kernel, name: str) -> ir.Module:
    module = ir.Module(name)
    ffi.entry(module, name, functools.partial(_execute, kernel))
    return module


def _execute(kernel: Kernel, frame: Value) -> Value:
    """Forget whole pages of the result, and fill what is before and behind them."""
    b = frame.b
    count = constant(b, I64, kernel.item)
    for axis in range(kernel.rank):
        count = count * ffi.result_size(frame, 0, axis)
    memory = ffi.result(frame, 0)
    begin = Value(b, b.ptrtoint(memory.ir, I64))
    end = begin + count
    first, last = (begin + kernel.page - 1) & -kernel.page, end & -kernel.page
    none = last.compared("<", first)  # it lies within one page
    first, last = none.select(end, first), none.select(end, last)
    _fill(memory, first - begin)
    _fill(memory.at(last - begin), end - last)
    pages = memory.at(first - begin)
    failed = intrinsic("madvise", I32, pages, last - first, constant(b, I32, DONTNEED))
    with when(failed.compared("!=", 0), likely=False):  # such as memory that is locked
        _fill(pages, last - first)
    return constant(b, I64, 0)


def _fill(memory: Value, count: Value) -> None:
    intrinsic("memset", ADDRESS, memory, constant(memory.b, I32, 0), count)
