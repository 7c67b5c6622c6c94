"""This machine: the device's name, its memory and the speeds that bound what runs on it."""

import contextlib
import ctypes
import functools
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

GIB = 2**30

# Bytes per second of a large device-to-device copy, read plus written, as measured (benchmarks/LOG.md).
MEASURED_COPY = {"NVIDIA H200": 4.3e12}

# Operations per second, a multiplication and an addition counted as two, as measured: the largest GEMM of an
# 8B model in bfloat16, and int8 and binary `mma` in a loop (8 bit planes for an activation of 8 bits).
MEASURED_ARITHMETIC = {"NVIDIA H200": {"half": 808e12, "int8": 1280e12, "planes": 925e12}}


def device_name() -> str:
    """The default device's name: "NVIDIA H200", or the processor's on CPU."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            models = [line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")]
    except OSError:
        models = []
    return models[0] if models else "CPU"


def device_memory() -> int:
    """Bytes the default device can hold: what XLA may allocate on a GPU, physical memory on CPU."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory() -> int:
    """Bytes of `device_memory` that nobody uses; on CPU those that Linux can give without swapping, elsewhere
    all."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    try:
        with open("/proc/meminfo") as meminfo:
            kib = dict(line.split()[:2] for line in meminfo)
        return 1024 * int(kib["MemAvailable:"])
    except (OSError, KeyError):
        return device_memory()


def reserve(nbytes: float, devices: Iterable[jax.Device]) -> None:
    """Have XLA take so much memory of each GPU in one piece, where it takes memory only as it needs it
    (XLA_PYTHON_CLIENT_PREALLOCATE=false) and does not have that much. Piece by piece it would leave holes, in
    which a large cache finds no room. Asks for no more than the GPU has."""
    for device in devices:
        stats = device.memory_stats() or {}
        grows_by = stats.get("bytes_limit", 0) - stats.get("pool_bytes", 0)
        asked = min(math.ceil(nbytes / GIB), grows_by // GIB)  # whole, so that few sizes are compiled
        if stats.get("largest_free_block_bytes", nbytes) < nbytes and asked > 0:
            with jax.default_device(device), contextlib.suppress(jax.errors.JaxRuntimeError):
                piece = jax.jit(lambda: jnp.zeros((asked, GIB), jnp.uint8))()  # noqa: B023 (called at once)
                jax.block_until_ready(piece).delete()


def release_memory() -> None:
    """Give freed memory back to the operating system, where malloc is glibc's. It keeps hundreds of megabytes
    that compilers have used."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def peak_memory() -> int:
    """Most bytes held so far: by XLA on the device, or on CPU by this process (its largest resident set)."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    # On Linux ru_maxrss holds what the parent had when this process was started, too.
    with contextlib.suppress(OSError, KeyError), open("/proc/self/status") as status:
        return 1024 * int(dict(line.split()[:2] for line in status if line.startswith("VmHWM"))["VmHWM:"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


@functools.cache
def driver() -> str | None:
    """Version of the NVIDIA driver; None without one."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        lines = subprocess.run(query, capture_output=True, text=True, timeout=10).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return lines[0] if lines else None


@functools.cache
def bandwidth() -> float:
    """Bytes per second that the default device's memory moves, the denominator of every ceiling share.

    Known devices: their measured copy rate. Others are timed here, the best of ten runs in a third of a
    second: a GPU by copying 256 MiB (read plus written), a CPU by reading 128 MiB, because there a copy into
    new memory is mostly page faults, and decoding only reads.
    """
    if device_name() in MEASURED_COPY:
        return MEASURED_COPY[device_name()]
    on_cpu = jax.default_backend() == "cpu"
    x = jnp.ones((2**13 if on_cpu else 2**14, 2**12), jnp.float32)
    move = jax.jit(lambda x: x.max(axis=0) if on_cpu else x + 1)
    moved = jax.eval_shape(move, x).size * x.dtype.itemsize + x.nbytes
    return moved / _seconds(move, x, 10)


@functools.cache
def arithmetic(kind: str = "half") -> float:
    """Operations per second of the default device's matrix units, the ceiling where memory is none.

    kind  what is multiplied: "half" (16-bit floating point), "int8", or "planes" (1-bit weights with the bit
          planes of 8-bit activations)
    Known devices: as measured, by kind. Others are timed here, the best of five products of 4,096 x 4,096 in
    float16 on a GPU, of 1,024 x 1,024 in float32 on a CPU, whatever the kind.
    """
    if device_name() in MEASURED_ARITHMETIC:
        return MEASURED_ARITHMETIC[device_name()][kind]
    n, dtype = (1024, jnp.float32) if jax.default_backend() == "cpu" else (4096, jnp.float16)
    x = jax.random.normal(jax.random.key(0), (n, n), dtype)  # ones would cost a GPU less power, and time
    return 2 * n**3 / _seconds(jax.jit(lambda x: x @ x), x, 5)


def _seconds(call: Callable[[jax.Array], jax.Array], x: jax.Array, repetitions: int) -> float:
    """How long one call takes, the shortest of so many. On a GPU, starting a call and waiting for its result
    takes about as long as the call itself. So nine calls are queued, one alone is timed too, and the
    difference is divided by eight."""
    queued = (1,) if jax.default_backend() == "cpu" else (1, 9)
    least = dict.fromkeys(queued, math.inf)
    jax.block_until_ready(call(x))  # compiled
    for _ in range(repetitions):
        for count in queued:
            began = time.perf_counter()
            for _ in range(count):
                y = call(x)
            jax.block_until_ready(y)
            least[count] = min(least[count], time.perf_counter() - began)
    return least[1] if len(queued) == 1 else (least[9] - least[1]) / 8
