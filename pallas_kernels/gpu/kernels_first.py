"""Compile a program whose Pallas kernels take most of the time: the kernels first, side by side in threads.

    lowered program --its kernels, each once--> a program of one kernel each --threads--> compiled
                    --XLA, which waits for each kernel that is being compiled--> the program

XLA compiles the kernels of a program one after the other, in one thread. Mosaic keeps every kernel that a
process has compiled or begun to, by the digest of its code, so the program itself takes only what XLA's own
part takes: prefill of an 8B model has eleven kernels, which are three quarters of its time (LOG.md).
"""

import concurrent.futures
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import device

TARGET = "mosaic_gpu_v2"  # the foreign function that runs a Pallas kernel on a GPU
DTYPES = {
    "i1": jnp.bool_, "i8": jnp.int8, "i16": jnp.int16, "i32": jnp.int32, "i64": jnp.int64,
    "ui8": jnp.uint8, "ui16": jnp.uint16, "ui32": jnp.uint32, "ui64": jnp.uint64,
    "bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32, "f64": jnp.float64,
}  # fmt: skip

# XLA tries variants of its own matrix products on the GPU. In a program that has none this still takes half
# of XLA's own time (1.1 of 2.4 s for prefill of an 8B model, LOG.md).
PRODUCTS = ("stablehlo.dot_general", "stablehlo.convolution")
UNTUNED = {"xla_gpu_autotune_level": 0}
# XLA counts donated memory twice. So it would find that a large pool does not fit, try in vain to keep less,
# and print warnings of that.
NOT_KEPT_LESS = {"xla_disable_hlo_passes": "rematerialization"}

_LOCK = threading.Lock()
_begun: dict[bytes, concurrent.futures.Future[Any]] = {}  # by the digest of a kernel


def compile(lowered: jax.stages.Lowered, flags: dict[str, Any]) -> jax.stages.Compiled:
    """lowered.compile with these options of XLA, for the device of the calling thread."""
    operations = list(_operations(lowered.compiler_ir("stablehlo")))
    each = _kernels(operations)
    if device.platform() != "cpu":
        multiplies = any(op.operation.name in PRODUCTS for op in operations)
        flags = NOT_KEPT_LESS | ({} if multiplies else UNTUNED) | flags
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with concurrent.futures.ThreadPoolExecutor(processors, "bonsai-jax kernel") as threads:
        if len(each) > 1:  # a single one would not be compiled any sooner
            begun = _started(threads, each)
            if len(each) >= processors:  # else XLA's own passes go on beside them
                concurrent.futures.wait(begun)
        return lowered.compile(compiler_options=flags or None)  # raises what a kernel's compilation raised


def _operations(module: Any) -> Iterator[Any]:
    """Every operation within a module or an operation."""
    for region in module.operation.regions:
        for block in region:
            for op in block.operations:
                yield op
                yield from _operations(op)


def _kernels(operations: Iterable[Any]) -> list[Any]:
    """Those that call a kernel, one of each."""
    calls = (op for op in operations if op.operation.name == "stablehlo.custom_call")
    kernels = (op for op in calls if op.attributes["call_target_name"].value == TARGET)
    return list({_attributes(op)["kernel_hash"]: op for op in kernels}.values())


def _attributes(op: Any) -> dict[str, Any]:
    """What a call passes to the foreign function besides arrays: the kernel's code, its digest, switches."""
    config = op.attributes["mhlo.backend_config"]
    return {each.name: getattr(each.attr, "value_bytes", None) or each.attr.value for each in config}


def _started(
    threads: concurrent.futures.Executor, kernels: Sequence[Any]
) -> list[concurrent.futures.Future[Any]]:
    """The compilations of kernels, in other threads, where no other program has begun them. All are lowered
    before the first is compiled, and the largest goes first: LLVM's options are global, so XLA compiles
    kernels in groups, and one that comes late waits until a whole group is done."""
    by_digest = {_attributes(op)["kernel_hash"]: op for op in kernels}
    with _LOCK:
        new = {digest: op for digest, op in by_digest.items() if digest not in _begun}
        lowered = {digest: _program(op)() for digest, op in new.items()}
        for digest in sorted(new, key=lambda own: len(_attributes(new[own])["module"]), reverse=True):
            _begun[digest] = threads.submit(lowered[digest].compile)
        return [_begun[digest] for digest in by_digest]


def _program(op: Any, sharding: Any = None) -> Callable[[], jax.stages.Lowered]:
    """A function that lowers a program which is only this call, for the default device or one by its
    sharding."""
    attributes, operation = _attributes(op), op.operation
    takes, returns = ([_shape(v.type, sharding) for v in x] for x in (operation.operands, operation.results))
    call = jax.ffi.ffi_call(TARGET, returns)
    return lambda: jax.jit(lambda *arrays: call(*arrays, **attributes)).lower(*takes)


def _shape(type: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(type.shape), DTYPES[str(type.element_type)], sharding=sharding)
