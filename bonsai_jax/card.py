"""A model's static figures: bytes, bits per weight, cache per token, and the speeds that memory allows."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from bonsai_jax.config import ModelConfig, RunConfig
from bonsai_jax.network import architectures
from bonsai_jax.network import cache as kv
from bonsai_jax.weights.params import Params
from bonsai_jax.weights.plan import attention_kernels
from bonsai_jax.weights.specs import match
from checkpoints import Checkpoint
from pallas_kernels import QTensor, cache_layouts, device
from pallas_kernels.problems import Matmul
from pallas_kernels.qtensor import leaves, tiled_nbytes
from pallas_kernels.refusals import NEEDS_LLVM
from pallas_kernels.selection import Verdict, choose, explain, products

# Bytes per second of a large device-to-device copy, read plus written, as measured (benchmarks/LOG.md).
MEASURED_COPY = {"NVIDIA H200": 4.3e12}

# Operations per second, a multiplication and an addition counted as two, as measured: the largest GEMM of an
# 8B model in bfloat16, and int8 and binary `mma` in a loop (8 bit planes for an activation of 8 bits).
MEASURED_ARITHMETIC = {"NVIDIA H200": {"half": 808e12, "int8": 1280e12, "planes": 925e12}}


def held_bytes(checkpoint: Checkpoint, config: ModelConfig, run: RunConfig) -> int:
    """Bytes of the weights on the device, but for what is left aside: 4 each where they are decoded at load,
    else as in the file or in its format's tiles, which hold base 3 as 2 bits."""
    used = [t for name, t in checkpoint.tensors.items() if not name.startswith(config.aside)]
    kinds = collections.Counter((t.format, t.shape, t.nbytes) for t in used)
    return sum(count * _held_bytes(*kind, run) for kind, count in kinds.items())


def _held_bytes(format: str, shape: tuple[int, ...], of_file: int, run: RunConfig) -> int:
    if run.weights == "decoded":
        return 4 * math.prod(shape)
    if len(shape) < 2:
        return of_file
    *experts, n, k = shape
    problem = Matmul(device.platform(), format, n, k, bits=run.activation_bits)
    tiled = products(problem, run.impl).tiled
    return math.prod(experts) * tiled_nbytes(format, (n, k)) if tiled else of_file


def cache_bytes(config: ModelConfig, run: RunConfig) -> int:
    """Bytes of a cache with every row full. `run` must be resolved (model.resolve)."""
    tokens = run.batch_size * kv.page_count(run.context, run.page_size) * run.page_size
    return tokens * kv.bytes_per_token(config, run.cache_dtype) + run.batch_size * kv.bytes_per_row(config)


def scratch_bytes(config: ModelConfig, run: RunConfig) -> int:
    """Bytes of one layer's keys and values in float16, with every row full: what prefill needs beside a cache
    that its kernel does not read as it lies (attention/prefill_pages.py); else 0. `run` must be resolved."""
    stored = str(run.cache_dtype)
    as_it_lies = cache_layouts.get(stored).PREFILL in (stored, None)
    if as_it_lies or attention_kernels(config, run)[1] == "reference":
        return 0
    tokens = run.batch_size * kv.page_count(run.context, run.page_size) * run.page_size
    return tokens * 2 * config.num_kv_heads * cache_layouts.bytes_per_head("float16", config.head_dim)


def explain_weights(
    checkpoint: Checkpoint, config: ModelConfig, run: RunConfig, parts: int = 1
) -> list[Verdict]:
    """Both ways to hold the weights, which one `run` gets, and why. All of `run` but its weights must be
    resolved; `parts` as for `check_memory`.

    "auto" is packed where kernels read packed weights. On a CPU without one for every matrix it is decoded,
    which measured faster than the reference on packed ones (benchmarks/LOG.md), where that and a full cache
    leave a tenth of the free memory to the rest of the process; else it is packed.
    """
    if run.weights != "auto":
        asked = f"{run.weights} was asked for"
        return [
            Verdict(way, way == run.weights, "asked for" if way == run.weights else asked)
            for way in ("decoded", "packed")
        ]
    weights, cache, _ = _share(checkpoint, config, dataclasses.replace(run, weights="decoded"), parts)
    sizes = f"weights of {weights / 1e9:.2f} GB and a cache of {cache / 1e9:.2f} GB"
    free = free_memory() if jax.process_count() == 1 else device_memory()  # all must choose the same
    on_cpu = jax.default_backend() == "cpu"
    without = _without_kernel(checkpoint, run) if on_cpu else None
    if not on_cpu:
        decoded, reason = False, "is faster on a CPU only"
    elif without is None:
        decoded, reason = False, "is slower than the kernels that read packed weights"
    elif weights + cache > 0.9 * free:
        decoded, reason = False, f"{sizes} exceed nine tenths of the {free / 1e9:.2f} GB that are free"
    else:
        decoded, reason = True, f"{sizes} fit into nine tenths of the {free / 1e9:.2f} GB that are free"
    if decoded and without == NEEDS_LLVM:
        packed = held_bytes(checkpoint, config, dataclasses.replace(run, weights="packed")) / parts
        without = f"{without}, with which weights are {packed / 1e9:.2f} GB, as in the file"
    later = f"comes later: {without}" if decoded else "as they lie in the file"
    return [Verdict("decoded", decoded, reason), Verdict("packed", not decoded, later)]


def missing_extra(checkpoint: Checkpoint, config: ModelConfig, run: RunConfig) -> str | None:
    """In a line what the extra `cpu` would give, on a CPU where it is missing; None elsewhere. `run` must be
    resolved."""
    if jax.default_backend() != "cpu" or _without_kernel(checkpoint, run) != NEEDS_LLVM:
        return None
    stored, packed = (
        held_bytes(checkpoint, config, dataclasses.replace(run, weights=way)) / 1e9
        for way in (run.weights, "packed")
    )
    return (
        f"no kernels: weights are {stored:.2f} GB where {packed:.2f} would do, and read more slowly; "
        "pip install 'bonsai-jax[cpu]' brings the package llvmlite, which they need"
    )


def _without_kernel(checkpoint: Checkpoint, run: RunConfig) -> str | None:
    """Why some of the file's matrices would be multiplied packed by the reference; None: none would."""
    shapes = {(t.format, *t.shape[-2:]) for t in checkpoint.tensors.values() if len(t.shape) > 1}
    for format, n, k in sorted(shapes):
        problem = Matmul(device.platform(), format, n, k, bits=run.activation_bits)
        if format != "f32" and choose(problem, impl=run.impl) == "reference":
            return next(v.reason for v in explain(problem, impl=run.impl) if v.kernel == "cpu")
    return None


def check_memory(checkpoint: Checkpoint, config: ModelConfig, run: RunConfig, parts: int = 1) -> None:
    """Raise MemoryError, with sums and the remedies that help, when a device's share of the weights, one in
    `parts`, and of a full cache and prefill's scratch, split by KV head, exceed its memory."""
    limit = device_memory()

    def fits(**changes) -> bool:
        return sum(_share(checkpoint, config, dataclasses.replace(run, **changes), parts)) <= limit

    if fits():
        return
    remedies = {
        "keep the weights packed (weights='packed')": ("weights", "packed"),
        "keep keys and values in 8 bits (cache_dtype='int8')": ("cache_dtype", "int8"),
        "lower batch_size": ("batch_size", 1),
        "lower context": ("context", 1),
    }
    works = [
        some
        for count in range(1, len(remedies) + 1)
        for some in itertools.combinations(remedies, count)
        if fits(**dict(remedies[text] for text in some))
    ]
    fewest = [" and ".join(some) for some in works if len(some) == len(works[0])]
    remedy = " or ".join(fewest) or "use a smaller quantization of this model, or a smaller model"
    weights, cache, scratch = _share(checkpoint, config, run, parts)
    beside = f", and {scratch / 1e9:.2f} GB in which prefill reads it as float16," * (scratch > 0)
    raise MemoryError(
        f"{checkpoint.source}: weights of {weights / 1e9:.2f} GB and a cache of {cache / 1e9:.2f} GB "
        f"({run.batch_size} sequences of {run.context} tokens){beside} exceed the {limit / 1e9:.2f} GB of "
        f"{device_name()}; {remedy}"
    )


def _share(
    checkpoint: Checkpoint, config: ModelConfig, run: RunConfig, parts: int
) -> tuple[float, float, float]:
    """Bytes of weights, of a full cache and of prefill's scratch on each of `parts` devices."""
    heads = min(parts, config.num_kv_heads)
    weights = held_bytes(checkpoint, config, run) / parts
    return weights, cache_bytes(config, run) / heads, scratch_bytes(config, run) / heads


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
    return moved / min(_times(move, x, 10))


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
    x = jnp.ones((n, n), dtype)
    return 2 * n**3 / min(_times(jax.jit(lambda x: x @ x), x, 5))


def _times(call: Callable[[jax.Array], jax.Array], x: jax.Array, repetitions: int) -> list[float]:
    """Seconds of each of `repetitions` calls, behind one that compiles."""
    times = []
    for _ in range(repetitions + 1):
        began = time.perf_counter()
        jax.block_until_ready(call(x))
        times.append(time.perf_counter() - began)
    return times[1:]


def kernel_names(weights, rows: int) -> str:
    """The kernels that multiply these weights with so many rows of activations: "int_decode",
    "int_decode+reference" where they differ, "int_decode:16" with 16 bits of activations and not 8."""
    names = {_kernel_name(w, rows) for w in leaves(weights) if isinstance(w, QTensor)}
    return "+".join(sorted(names))


def step_names(params: Params, rows: int = 1) -> str:
    """The same of a decode step for so many rows: its schedule where that is not "launches"."""
    schedule = params.step.schedule(rows)
    if schedule == "launches":
        return kernel_names(params, rows)
    (bits,) = {w.products.activation_bits for w in leaves(params.layers.wo)}
    return schedule if bits == 8 else f"{schedule}:{bits}"


def _kernel_name(w: QTensor, rows: int) -> str:
    kernel, bits = w.products.of(rows), w.products.activation_bits
    return kernel if bits == 8 or kernel in ("reference", "cublas") else f"{kernel}:{bits}"


def step_bytes(checkpoint: Checkpoint, run: RunConfig) -> int:
    """Weight bytes that one decode step of a row reads, of a model that is not loaded: all but the
    embedding's, where a matrix of its own gives the logits, and those of experts that it does not use."""
    config = architectures.config_of(checkpoint)
    specs = architectures.get(config.architecture).TENSORS
    names = {spec.field: spec.name(checkpoint.naming) for spec in specs}
    held = lambda t: _held_bytes(t.format, t.shape, t.nbytes, run)  # noqa: E731
    read = held_bytes(checkpoint, config, run)
    if names["head"] in checkpoint.tensors:
        read -= held(checkpoint.tensors[names["embed"]])
    if config.experts is not None:
        unread = 1 - config.experts.share_read(1)
        tensors = match(checkpoint, specs, config)
        read -= round(unread * sum(held(t) for s, of in tensors.items() if len(s.shape) == 3 for t in of))
    return read


def decode_bytes(weight_bytes: int, config: ModelConfig, run: RunConfig, depths: Sequence[int]) -> int:
    """Bytes that one decode step must move for rows at these depths: weights once, each row's keys and values
    once, its recurrent states there and back."""
    states = 2 * len(depths) * kv.bytes_per_row(config)
    return weight_bytes + sum(depths) * kv.bytes_per_token(config, run.cache_dtype) + states
