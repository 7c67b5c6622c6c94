"""Shared memory that a kernel takes, as Pallas lays it out: what a plan may count on."""

ALIGNMENT = (
    1024  # each scratch buffer begins at a multiple of it (SMEM_ALIGNMENT in jax's mosaic_gpu/core.py)
)
BARRIER_BYTES = 8
OWN_BYTES = 16  # a static byte of Mosaic's, and what aligns the rest behind it


CUDA_BYTES = 1024  # that CUDA takes of a multiprocessor for each block on it


def bytes_of_block(most: int, at_once: int) -> int:
    """What each block may have where `at_once` of them share a multiprocessor. most: what a block may have
    that is alone on it (device.shared_bytes)."""
    return (most + CUDA_BYTES) // at_once - CUDA_BYTES


def bytes_taken(*buffers: int, barriers: int = 0) -> int:
    """Of a block of threads, with scratch buffers of so many bytes and so many of Pallas's barriers; to be
    compared with what a device has (device.shared_bytes)."""
    aligned = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in buffers)
    return aligned + BARRIER_BYTES * barriers + OWN_BYTES
