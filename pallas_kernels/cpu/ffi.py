"""Handlers for XLA's foreign function interface, which XLA calls inside of a jitted function. A handler
spreads its work over XLA's threads.

XLA passes a handler an XLA_FFI_CallFrame (xla/ffi/api/c_api.h in jax.ffi.include_dir(), a stable C
interface): the buffers of arguments and results, and functions of XLA, one of which schedules work on its
threads. So no second pool of threads competes with XLA's, and limits of XLA's threads hold here too. No
Python runs.

    handler        runs parts 0 .. n - 1 of each phase, part(frame, i, n), and returns
    its thread     queues a job for each other thread, takes parts until none is left, and waits for the parts
                   that other threads have taken
    other threads  take parts until none is left. A thread may start after the handler has returned: then only
                   the job's memory still exists, and the last thread to leave the job frees it
"""

import dataclasses
import functools
from collections.abc import Callable

from llvmlite import ir

from pallas_kernels.cpu.values import (
    ADDRESS,
    I32,
    I64,
    Value,
    Variable,
    constant,
    function,
    intrinsic,
    loop,
    when,
)

VERSION = 0, 4  # XLA_FFI_API_MAJOR, _MINOR: the version that has the offsets below
METADATA, EXECUTE = 1, 3
INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL

# Offsets in bytes.
FRAME = {"extension": 8, "api": 16, "context": 24, "stage": 32, "arguments": 72, "results": 112}
BUFFER = {"data": 24, "sizes": 40}
API = {"error": 40 + 8, "schedule": 40 + 8 + 8 * 11, "num_threads": 40 + 8 + 8 * 12}
JOB = {"next": 0, "unfinished": 8, "holders": 16, "parts": 24, "frame": 32}
JOB_BYTES = 40

Part = Callable[[Value, Value, Value], None]


@dataclasses.dataclass(frozen=True)
class Phase:
    """Work that all threads finish before the next phase starts.

    parts  (frame, number of threads) -> the number of parts, int64
    part   (frame, i, n) writes the code for part i of n, both int64
    """

    parts: Callable[[Value, Value], Value]
    part: Part


def handler(name: str, *phases: Phase) -> ir.Module:
    """A module with a handler of this name, which runs these phases."""
    module = ir.Module(name)
    functions = []
    for i, phase in enumerate(phases):
        one = function(module, f"part_{i}", ir.VoidType(), [ADDRESS, I64, I64], phase.part)
        take = functools.partial(_take_parts, one)
        functions.append((one, function(module, f"thread_{i}", ir.VoidType(), [ADDRESS], take)))

    def execute(frame: Value) -> Value:
        b, threads = frame.b, _threads(frame)
        for phase, (one, many) in zip(phases, functions, strict=True):
            n = phase.parts(frame, threads)
            alone = n.compared("<", 2) | threads.compared("<", 2)
            with b.if_else(alone.ir) as (yes, no):
                with yes:
                    b.call(one, [frame.ir, I64(0), I64(1)])
                with no:
                    _spread(frame, n, threads, many)
        return constant(b, I64, 0)

    entry(module, name, execute)
    return module


def entry(module: ir.Module, name: str, execute: Callable[[Value], Value]) -> None:
    """A function of this name that XLA can call. execute(frame) writes its code and returns the address of an
    error, or 0."""

    def body(frame: Value) -> Value:
        result = Variable(constant(frame.b, I64, 0))
        extension = frame.at(FRAME["extension"]).load(I64)
        stage = frame.at(FRAME["stage"]).load(I32)
        with when(extension.compared("!=", 0), likely=False):
            _metadata(frame.at(FRAME["extension"]).load(ADDRESS))
        with when(extension.compared("==", 0) & stage.compared("==", EXECUTE), likely=True):
            result.value = execute(frame)
        return result.value

    function(module, name, I64, [ADDRESS], body, internal=False)


def argument(frame: Value, i: int) -> Value:
    """The address of the data of argument i."""
    return _buffer(frame, "arguments", i).at(BUFFER["data"]).load(ADDRESS)


def result(frame: Value, i: int) -> Value:
    return _buffer(frame, "results", i).at(BUFFER["data"]).load(ADDRESS)


def size(frame: Value, i: int, axis: int) -> Value:
    """The size of argument i along an axis, int64."""
    return _buffer(frame, "arguments", i).at(BUFFER["sizes"]).load(ADDRESS).at(8 * axis).load(I64)


def result_size(frame: Value, i: int, axis: int) -> Value:
    return _buffer(frame, "results", i).at(BUFFER["sizes"]).load(ADDRESS).at(8 * axis).load(I64)


def _buffer(frame: Value, kind: str, i: int) -> Value:
    return frame.at(FRAME[kind]).load(ADDRESS).at(8 * i).load(ADDRESS)


def _metadata(extension: Value) -> None:
    """When a handler is registered, XLA asks for the version of the interface."""
    with when(extension.at(8).load(I32).compared("==", METADATA)):
        version = extension.at(24).load(ADDRESS).at(24)
        for i, number in enumerate(VERSION):
            version.at(4 * i).store(constant(extension.b, I32, number))


def _threads(frame: Value) -> Value:
    """The number of threads in XLA's pool, int64; 1 without a pool."""
    b = frame.b
    count = Variable(constant(b, I64, 1))
    arguments = _in_context(frame, [Value(b, b.ptrtoint(count.place, I64))])
    _api(frame, "num_threads", arguments)
    return count.value


def _api(frame: Value, name: str, arguments: Value) -> Value:
    called = frame.at(FRAME["api"]).load(ADDRESS).at(API[name]).load(I64)
    kind = ir.FunctionType(I64, [ADDRESS])
    b = frame.b
    typed = b.inttoptr(called.ir, kind.as_pointer())
    return Value(b, b.call(typed, [arguments.ir]))


def failed(frame: Value, message: Value) -> Value:
    """The address of an error with the message at this address, which XLA raises."""
    arguments = _struct([message, constant(frame.b, I64, INTERNAL)])
    return _api(frame, "error", arguments)


def _in_context(frame: Value, rest: list[Value]) -> Value:
    return _struct([frame.at(FRAME["context"]).load(I64), *rest])


def _struct(rest: list[Value]) -> Value:
    """The argument struct of a function of the interface: its size, no extension, and the rest."""
    b = rest[0].b
    words = [constant(b, I64, 16 + 8 * len(rest)), constant(b, I64, 0), *rest]
    with b.goto_entry_block():
        place = b.alloca(ir.ArrayType(I64, len(words)))
    for i, word in enumerate(words):
        b.store(word.ir, b.gep(place, [I32(0), I32(i)]))
    return Value(b, place)


def _spread(frame: Value, parts: Value, threads: Value, many: ir.Function) -> None:
    b = frame.b
    others = Variable(threads - 1)
    others.value = others.value.compared("<", parts).select(others.value, parts - 1)
    job = intrinsic("malloc", ADDRESS, constant(b, I64, JOB_BYTES))
    job.at(JOB["next"]).store(constant(b, I64, 0))
    job.at(JOB["unfinished"]).store(parts)
    job.at(JOB["holders"]).store(others.value + 2)  # this thread takes parts, and then waits
    job.at(JOB["parts"]).store(parts)
    job.at(JOB["frame"]).store(frame)
    arguments = _in_context(frame, [Value(b, b.ptrtoint(many, I64)), Value(b, b.ptrtoint(job.ir, I64))])
    with loop(constant(b, I64, 0), others.value):
        error = _api(frame, "schedule", arguments)
        with when(error.compared("!=", 0), likely=False):  # XLA has no threads after all
            _leave(job)
    b.call(many, [job.ir])
    waiting, done = b.append_basic_block("waiting"), b.append_basic_block("done")
    b.branch(waiting)
    b.position_at_end(waiting)
    left = Value(b, b.load_atomic(job.at(JOB["unfinished"]).ir, "acquire", 8, typ=I64))
    pause = "other_threads_first"  # compiled._engine
    b.call(b.module.globals.get(pause) or ir.Function(b.module, ir.FunctionType(I32, []), pause), [])
    b.cbranch(left.compared("==", 0).ir, done, waiting)
    b.position_at_end(done)
    _leave(job)


def allocated(size: Value) -> tuple[Value, Value]:
    """`size` bytes of memory, aligned to 64, and the address that `freed` takes."""
    b = size.b
    memory = intrinsic("malloc", ADDRESS, size + 64)
    misaligned = Value(b, b.ptrtoint(memory.ir, I64)) & 63
    return memory.at(constant(b, I64, 64) - misaligned), memory


def freed(memory: Value) -> None:
    intrinsic("free", ir.VoidType(), memory)


def _take_parts(one: ir.Function, job: Value) -> None:
    """Run parts until none is left, in any order: the thread that runs a part does not change its result."""
    b = job.b
    parts = job.at(JOB["parts"]).load(I64)
    take, work, done = (b.append_basic_block(name) for name in ("take", "work", "done"))
    b.branch(take)
    b.position_at_end(take)
    i = Value(b, b.atomic_rmw("add", job.at(JOB["next"]).ir, I64(1), "acq_rel"))
    b.cbranch(i.compared("<", parts).ir, work, done)
    b.position_at_end(work)
    b.call(one, [job.at(JOB["frame"]).load(ADDRESS).ir, i.ir, parts.ir])
    b.atomic_rmw("sub", job.at(JOB["unfinished"]).ir, I64(1), "acq_rel")
    b.branch(take)
    b.position_at_end(done)
    _leave(job)


def _leave(job: Value) -> None:
    b = job.b
    before = Value(b, b.atomic_rmw("sub", job.at(JOB["holders"]).ir, I64(1), "acq_rel"))
    with when(before.compared("==", 1)):
        freed(job)
