"""What CUDA's driver says of this process's share of a GPU.

In a persistent launch blocks wait for each other, so all of them must run at once: one on each multiprocessor
that the process may use. Under MPS a process can have fewer than the GPU (an active thread percentage), and
the driver tells how many: the execution affinity of the context, which is the one that XLA computes in.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

SM_COUNT = 0  # CU_EXEC_AFFINITY_TYPE_SM_COUNT


class ExecAffinity(ctypes.Structure):
    """CUexecAffinityParam of SM_COUNT."""

    _fields_ = (("type", ctypes.c_uint), ("multiprocessors", ctypes.c_uint))


def load() -> Any:
    """The driver's library; raises OSError on a machine without it. Tests replace this function."""
    return ctypes.CDLL("libcuda.so.1")


@functools.cache  # a percentage is fixed before a process makes its context
def multiprocessors(ordinal: int) -> int | None:
    """How many multiprocessors this process may use on a GPU, the `ordinal`-th that CUDA shows it; None where
    the driver does not say: it is older than CUDA 11.4, or the GPU cannot be shared out like this."""
    try:
        driver = load()
        calls = [
            getattr(driver, name)
            for name in (
                "cuDeviceGet",
                "cuDevicePrimaryCtxRetain",
                "cuCtxPushCurrent_v2",
                "cuCtxGetExecAffinity",
                "cuCtxPopCurrent_v2",
                "cuDevicePrimaryCtxRelease_v2",
            )
        ]
    except (OSError, AttributeError):
        return None
    return _asked(ordinal, *calls)


def _asked(ordinal: int, get: Callable[..., int], retain, push, affinity, pop, release) -> int | None:
    """By these functions of the driver, which return 0 for success."""
    gpu, context, other = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    answer = ExecAffinity()
    if get(ctypes.byref(gpu), ordinal) or retain(ctypes.byref(context), gpu):
        return None
    try:
        if push(context):
            return None
        failed = affinity(ctypes.byref(answer), SM_COUNT)
        pop(ctypes.byref(other))
        return None if failed else answer.multiprocessors or None
    finally:
        release(gpu)
