"""What the default device is, and what a kernel has of it. The only place that looks at it."""

import dataclasses

import jax

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


def default() -> Device:
    """Where jax puts arrays by default. What is planned where there is no GPU is as for an H200.

    Tests that act as on another device replace this function.
    """
    backend = jax.default_backend()
    if backend != "gpu":
        return dataclasses.replace(GPUS["sm_90"], platform=backend)
    gpu = jax.devices()[0]
    platform = "sm_" + gpu.compute_capability.replace(".", "")
    return _usable(gpu, platform)


def _usable(gpu, platform: str) -> Device:
    """Its share of a GPU: under MPS the driver may give a process a part of the multiprocessors."""
    share = driver.multiprocessors(gpu.local_hardware_id) or gpu.core_count
    whole = gpu.core_count if share < gpu.core_count else None
    return Device(platform, min(share, gpu.core_count), gpu.shared_memory_per_block_optin, whole)


def platform() -> str:
    return default().platform


def multiprocessors() -> int:
    return default().multiprocessors


def shared_bytes() -> int:
    return default().shared_bytes


def gpu_name() -> str | None:
    """The default device's: "NVIDIA H200"; None where it is no GPU."""
    return jax.devices()[0].device_kind if jax.default_backend() == "gpu" else None
