"""Registers kernels with XLA before they are compiled: LLVM compiles a kernel in a thread of its own, while
jax traces and XLA compiles the program that calls it.

    a handler of this file    takes the code's address from a table, or from `_wait` if it is 0, and calls it
    _wait(i)                  a Python function: the address of code i, once it is compiled; 0 after an error.
                              How long that took is an event of jax.monitoring

So Python runs only until the address is known. Code from the cache is registered directly.
"""

import ctypes
import functools
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
from llvmlite import ir

from pallas_kernels.cpu import compiled, ffi
from pallas_kernels.cpu.values import ADDRESS, I64, Value, Variable, constant, function, when

WAITED = "/pallas_kernels/wait_for_kernel_duration"  # the event
HANDLERS = 16  # compiled at a time, which takes less time than one kernel
_error = ctypes.create_string_buffer(1000)  # the message of the last compilation that failed

_REGISTERING = threading.Lock()
_kernels: dict[str, tuple[Any, Callable]] = {}  # those registered, by name: arguments of `target`
_codes: list[Future[int]] = []
_handlers: list[int] = []  # their addresses
_tables: list[ctypes.Array] = []  # for each HANDLERS of them, the addresses of their codes, or 0


def target(kernel: Any, module: Callable[[Any, str], ir.Module]) -> str:
    """The name by which jax.ffi.ffi_call finds a kernel's handler on CPUs. The kernel is registered on first
    use; if its code is not in the cache, a thread of its own compiles it.

    kernel  hashable: everything that the code depends on
    module  (kernel, name) -> a module with the kernel's handler, which has this name
    """
    with _REGISTERING:
        return _target(kernel, module)


def called_by(program: bytes) -> list[tuple[Any, Callable]]:
    """Arguments of `target` for each kernel whose name is in a compiled program."""
    names = {name.decode() for name in re.findall(rb"bonsai_[0-9a-f]{16}", program)}
    return [_kernels[name] for name in sorted(names)]


@functools.cache
def _target(kernel: Any, module: Callable[[Any, str], ir.Module]) -> str:
    what = repr(kernel)
    name = f"bonsai_{hashlib.sha256(f'{type(kernel).__module__}.{what}'.encode()).hexdigest()[:16]}"
    path = compiled.cache_path(name, what)
    address = compiled.load(name, path)
    if address is None:
        code = functools.partial(module, kernel, name)
        address = handler(lambda: compiled.compile([name], code, path)[0])
    pointer = ctypes.cast(address, ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p))
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(pointer), platform="cpu")
    _kernels[name] = kernel, module
    return name


def handler(compile: Callable[[], int]) -> int:
    """The address of a handler that calls the handler whose address compile() returns. Not thread-safe."""
    i, code = len(_codes), Future()
    if i == len(_handlers):
        _more()
    _codes.append(code)

    def work() -> None:
        try:
            code.set_result(compile())
        except Exception as error:
            code.set_exception(error)

    threading.Thread(target=work, name="bonsai-jax kernel").start()
    return _handlers[i]


def _finish() -> None:
    """Before a fork, wait for compilations: the child process has no threads that would finish them."""
    for code in list(_codes):
        code.exception()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_finish)


@ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
def _wait(i: int) -> int:
    began = time.perf_counter()
    try:
        _tables[i // HANDLERS][i % HANDLERS] = address = _codes[i].result()
        return address
    except Exception as error:
        _error.value = f"a kernel could not be compiled: {error!r}".encode()[:999]
        return 0
    finally:
        jax.monitoring.record_event_duration_secs(WAITED, time.perf_counter() - began)


def _more() -> None:
    table = (ctypes.c_int64 * HANDLERS)()
    _tables.append(table)
    module, names = ir.Module("later"), []
    execute = function(module, "execute", I64, [ADDRESS, I64, I64], _execute)
    for i in range(len(_handlers), len(_handlers) + HANDLERS):
        names.append(f"bonsai_later_{i}")
        slot = ctypes.addressof(table) + 8 * (i % HANDLERS)
        ffi.entry(
            module,
            names[-1],
            lambda frame, i=i, slot=slot: Value(
                frame.b, frame.b.call(execute, [frame.ir, I64(slot), I64(i)])
            ),
        )
    _handlers.extend(compiled.compile(names, lambda: module))


def _execute(frame: Value, slot: Value, i: Value) -> Value:
    """Run handler i, whose code's address is in this slot."""
    b = frame.b
    code = Variable(Value(b, b.inttoptr(slot.ir, ADDRESS)).load(I64))
    with when(code.value.compared("==", 0), likely=False):
        code.value = _called(constant(b, I64, ctypes.cast(_wait, ctypes.c_void_p).value), i)
    result = Variable(constant(b, I64, 0))
    with b.if_else(code.value.compared("!=", 0).ir, likely=True) as (yes, no):
        with yes:
            result.value = _called(code.value, frame)
        with no:
            result.value = ffi.failed(frame, constant(b, I64, ctypes.addressof(_error)))
    return result.value


def _called(address: Value, argument: Value) -> Value:
    b = address.b
    kind = ir.FunctionType(I64, [argument.type])
    return Value(b, b.call(b.inttoptr(address.ir, kind.as_pointer()), [argument.ir]))
