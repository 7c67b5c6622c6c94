"""The device that JAX uses now, and what it offers kernels. The only file that asks JAX for it.

It is the device of `jax.default_device`, else the first of the default backend. Nothing is cached, because
the answer may differ from call to call and from thread to thread. JAX traces a jitted function again under
another default device.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.gpu import driver


@dataclasses.dataclass(frozen=True)
class Device:
    """What kernels are chosen and planned for.

    platform         "sm_90" for a GPU of compute capability 9.0, else "cpu" or "tpu"
    multiprocessors  that this process may use: each runs a block of threads at a time, or several small ones.
                     No persistent launch has more blocks, so that all of them run at once
    shared_bytes     the most shared memory that a block may ask for
    whole            the multiprocessors that the GPU has; None: this process may use all
    """

    platform: str
    multiprocessors: int
    shared_bytes: int
    whole: int | None = None


# A GPU of each compute capability, to compile for without having one. Shared memory: CUDA C++ Programming
# Guide, technical specifications per compute capability.
GPUS = {
    gpu.platform: gpu
    for gpu in (
        Device("sm_80", 108, 163 * 1024),  # A100
        Device("sm_86", 84, 99 * 1024),  # RTX 3090 Ti, RTX A6000
        Device("sm_89", 128, 99 * 1024),  # RTX 4090
        Device("sm_90", 132, 227 * 1024),  # H200
        Device("sm_100", 148, 227 * 1024),  # B200
        Device("sm_120", 170, 99 * 1024),  # RTX 5090
    )
}


def traced() -> bool:
    """Whether a function is being traced by this thread, so that what it makes has shapes and no values."""
    return isinstance(jax.device_put(0), jax.core.Tracer)  # compiles nothing


def default() -> Device:
    """The device that JAX uses now. A device that is not a GPU gets the multiprocessors and shared memory of
    an H200, so that plans can be made and shown.

    Tests that act as on another device replace this function.
    """
    used = in_use()
    if used.platform != "gpu":
        return dataclasses.replace(GPUS["sm_90"], platform=used.platform)
    platform = "sm_" + used.compute_capability.replace(".", "")
    return _usable(used, platform)


def _usable(gpu, platform: str) -> Device:
    """This process's share of a GPU: under MPS the driver may give it a part of the multiprocessors."""
    share = min(driver.multiprocessors(gpu.local_hardware_id) or gpu.core_count, gpu.core_count)
    whole = gpu.core_count if share < gpu.core_count else None
    return Device(platform, share, gpu.shared_memory_per_block_optin, whole)


def in_use() -> jax.Device:
    """The device that JAX uses now."""
    chosen = jax.config.jax_default_device  # None, a device, or a platform's name
    return jax.local_devices(backend=chosen)[0] if chosen is None or isinstance(chosen, str) else chosen


def wake() -> None:
    """Let the device initialize itself in another thread. A GPU's driver, context and memory take over a
    second."""

    def work() -> None:
        # An error comes again in the thread that uses the device. A program without arguments, because jax
        # keeps the GIL while it copies an array to the device, even where that initializes it.
        with contextlib.suppress(RuntimeError):
            if in_use().platform == "gpu":
                jax.block_until_ready(jax.jit(lambda: jnp.zeros(1))())

    threading.Thread(target=for_threads(work), name="bonsai-jax wakes the device", daemon=True).start()


def for_threads[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """The same function, to be called in other threads under the default device of this one."""
    chosen = jax.config.jax_default_device

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.default_device(chosen):
            return function(*args, **kwargs)

    return call


def identity() -> tuple[str, ...]:
    """What code that is compiled for the device depends on: its kind and number, the share of it that this
    process has, and the driver's or runtime's version."""
    used = in_use()
    return used.platform, used.device_kind, str(used.id), repr(default()), used.client.platform_version


def platform() -> str:
    return default().platform


def multiprocessors() -> int:
    return default().multiprocessors


def shared_bytes() -> int:
    return default().shared_bytes
