"""A model's static figures: bytes, bits per weight, cache per token, and the speeds that memory allows."""

import functools
import math
import os
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from bonsai_jax import cache as kv
from bonsai_jax.config import ModelConfig, RunConfig
from checkpoints import Checkpoint

# Bytes per second of a large device-to-device copy, read plus written, as measured (benchmarks/LOG.md).
MEASURED_COPY = {"NVIDIA H200": 4.3e12}


def held_bytes(checkpoint: Checkpoint, run: RunConfig) -> int:
    """Bytes of the weights on the device: as in the file, or 4 each where they are decoded at load."""
    if run.weights == "decoded":
        return sum(4 * math.prod(t.shape) for t in checkpoint.tensors.values())
    return sum(t.nbytes for t in checkpoint.tensors.values())


def cache_bytes(config: ModelConfig, run: RunConfig) -> int:
    """Bytes of a cache with every row full. `run` must be resolved (model.resolve)."""
    tokens = run.rows * kv.page_count(run.context, run.page_size) * run.page_size
    return tokens * kv.bytes_per_token(config, run.cache_dtype)


def check_memory(checkpoint: Checkpoint, config: ModelConfig, run: RunConfig) -> None:
    """Raise MemoryError, with the sums and the remedy, when weights and a full cache exceed the device's memory."""
    weights, cache, limit = held_bytes(checkpoint, run), cache_bytes(config, run), device_memory()
    if weights + cache > limit:
        raise MemoryError(
            f"{checkpoint.source}: weights of {weights / 1e9:.2f} GB and a cache of {cache / 1e9:.2f} GB ({run.rows} rows of "
            f"{run.context} tokens) exceed the {limit / 1e9:.2f} GB of {device_name()}; lower rows or context"
        )


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
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@functools.cache
def bandwidth() -> float:
    """Bytes per second that the default device's memory moves, the denominator of every ceiling share.

    Known devices: their measured copy rate. Others: the best of a few copies of 256 MiB, timed here (about 0.3 s).
    """
    if device_name() in MEASURED_COPY:
        return MEASURED_COPY[device_name()]
    x = jnp.ones(2**26, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    jax.block_until_ready(copy(x))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(copy(x))
        times.append(time.perf_counter() - began)
    return 2 * x.nbytes / min(times)


def decode_bytes(weight_bytes: int, config: ModelConfig, run: RunConfig, depths: Sequence[int]) -> int:
    """Bytes that one decode step must move for rows at these depths: weights once, each row's cache once."""
    return weight_bytes + sum(depths) * kv.bytes_per_token(config, run.cache_dtype)
