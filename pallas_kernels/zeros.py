"""Arrays of zeros, as states begin: the way to make them that costs least on each device."""

import importlib.util
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import device

LARGE = 1 << 24  # bytes


def zeros(shape: tuple[int, ...], dtype) -> jax.Array:
    """As jnp.zeros, to be donated. On a CPU with Linux and the extra `cpu` they take memory as they are
    written. On a GPU large ones are made at the speed of memory, and others copied from the host, which
    compiles nothing."""
    dtype, platform = jnp.dtype(dtype), device.in_use().platform
    if device.traced():  # jax.export refuses a CPU's handlers
        return jnp.zeros(shape, dtype)
    one = jax.device_count() == 1  # of several, XLA makes each one's part
    if platform == "cpu" and one and sys.platform == "linux" and importlib.util.find_spec("llvmlite"):
        from pallas_kernels.cpu import zeros as cpu_kernel

        return cpu_kernel.zeros(shape, dtype)
    if platform == "gpu":
        from pallas_kernels.gpu import zeros as gpu_kernel  # only GPUs need it

        if math.prod(shape) * dtype.itemsize < LARGE:
            return jax.device_put(np.zeros(shape, dtype), may_alias=False)
        if gpu_kernel.fits(shape, dtype):
            return gpu_kernel.zeros(shape, dtype)
    return jnp.zeros(shape, dtype)
