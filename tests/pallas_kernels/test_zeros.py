"""Zeros that take no memory until they are written (cpu/zeros.py), which is so on Linux; and the kernel that
makes those of a GPU (gpu/zeros.py), in lockstep."""

import ctypes
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cache_layouts
from pallas_kernels.cpu.zeros import zeros
from pallas_kernels.gpu import zeros as gpu_kernel
from tests.pallas_kernels.aot import as_on_a_gpu
from tests.pallas_kernels.lockstep import lockstep


def resident() -> int:
    """Bytes of memory that this process has."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_large_pages_take_memory_when_they_are_written():
    """256 MB, of which one is written."""
    shape = 16, 64, 64, 8, 128
    jax.block_until_ready(cache_layouts.empty("float32", shape))  # compiles
    before = resident()
    pages = jax.block_until_ready(cache_layouts.empty("float32", shape))
    assert pages.nbytes == 2**28 and resident() - before < 2**24
    ctypes.memset(pages.unsafe_buffer_pointer() + 5 * 2**20, 1, 2**20)
    assert 2**20 <= resident() - before < 2**25
    assert np.count_nonzero(np.asarray(pages)) == 2**18


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32"])
def test_zeros_are_zeros_in_memory_that_was_used_before(dtype):
    """Sizes below a page, of several, and that no page divides."""
    rng = np.random.default_rng(0)
    for size in (1, 63, 4096, *rng.integers(1, 100_000, 30)):
        used = [jax.block_until_ready(jnp.full(int(size), 7, dtype)) for _ in range(3)]
        del used
        made = np.asarray(zeros((int(size), 1), dtype))
        assert made.shape == (size, 1) and made.dtype == dtype and not made.any(), size


def test_a_function_that_makes_pages_can_be_exported():
    """XLA's handlers could not be."""
    make = jax.jit(lambda: cache_layouts.empty("float16", (2, 3, 16, 2, 64)))
    assert not np.asarray(jax.export.export(make)().call()).any()


@pytest.mark.parametrize("shape", [(4, 8), (2, 5, 7, 16), (1, 4096 * 3)], ids=str)
@pytest.mark.parametrize("dtype", [np.int8, np.float16, np.int32], ids=lambda dtype: dtype.__name__)
def test_a_kernel_writes_all_of_an_array(shape, dtype, monkeypatch):
    """Fewer pieces than one block writes in a turn, and more than all blocks do."""
    monkeypatch.setattr(gpu_kernel, "BLOCKS", 1)
    monkeypatch.setattr(gpu_kernel, "THREADS", 128)
    monkeypatch.setattr(gpu_kernel, "STORES", 2)
    with as_on_a_gpu((9, 0)):
        assert not gpu_kernel.fits((3, 5), np.dtype(np.int8)) and not gpu_kernel.fits((16,), np.dtype(bool))
        assert gpu_kernel.fits(shape, np.dtype(dtype))
        with lockstep(), jax.disable_jit():
            made = np.asarray(gpu_kernel.zeros(shape, np.dtype(dtype)))
    assert made.shape == shape and made.dtype == dtype and not made.any()
