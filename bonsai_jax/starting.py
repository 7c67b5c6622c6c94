"""What comes before a process's first program. It imports little, so that a GPU can initialize itself while
the rest is imported."""

from bonsai_jax import compile_cache, threads
from pallas_kernels import device


def start_device() -> None:
    """Choose where compiled programs are kept and how many threads a CPU uses, and let the device initialize
    itself in another thread."""
    compile_cache.use()
    threads.use()
    device.wake()
