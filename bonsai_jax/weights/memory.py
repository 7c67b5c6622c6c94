"""What a model takes of a device's memory, and in which form its weights fit."""

import bisect
import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

import jax

from bonsai_jax import machine
from bonsai_jax.config import ModelConfig, RunConfig
from bonsai_jax.weights.specs import Description
from pallas_kernels import device
from pallas_kernels.problems import Matmul
from pallas_kernels.qtensor import tiled_nbytes
from pallas_kernels.refusals import NEEDS_LLVM
from pallas_kernels.selection import Verdict, explain, products


def weight_bytes(description: Description, run: RunConfig) -> int:
    """Bytes of the loaded weights on the device: 4 for each where they are decoded at load, else as in the
    file or in the format's tiles, which store base 3 as 2 bits."""
    tensors = [t for model in description.models for _, t in model.sources]
    kinds = collections.Counter((t.format, t.shape, t.nbytes) for t in tensors)
    return sum(count * tensor_bytes(*kind, run) for kind, count in kinds.items())


def tensor_bytes(format: str, shape: tuple[int, ...], file_bytes: int, run: RunConfig) -> int:
    """Bytes of one tensor on the device."""
    if run.weights == "decoded":
        return 4 * math.prod(shape)
    if len(shape) < 2:
        return file_bytes
    *experts, n, k = shape
    tiled, _ = _kernels(format, n, k, run)
    return math.prod(experts) * tiled_nbytes(format, (n, k)) if tiled else file_bytes


def _kernels(format: str, n: int, k: int, run: RunConfig) -> tuple[bool, str | None]:
    """(Whether kernels read such a matrix in tiles, why on a CPU only the reference could multiply it packed;
    None: a kernel can.)"""
    problem = Matmul(device.platform(), format, n, k, bits=run.activation_bits)
    chosen = products(problem, run.impl)
    if jax.default_backend() != "cpu" or format == "f32" or chosen.kernel(1) != "reference":
        return chosen.tiled, None
    return chosen.tiled, next(v.reason for v in explain(problem, impl=run.impl) if v.kernel == "cpu")


def bytes_per_token(config: ModelConfig, run: RunConfig) -> int:
    """Cache bytes for one more token of a sequence: keys and values of every layer that keeps them all, and
    of the draft layer or the draft model where one is loaded. `run` must be resolved (plan.resolve)."""
    draft = config.attention.bytes_per_token(run) if config.draft else 0
    return draft + sum(n * mixer.bytes_per_token(run) for mixer, n in _mixers(config).items())


def bytes_per_row(config: ModelConfig, run: RunConfig) -> int:
    """Cache bytes of one sequence whatever its length: recurrent states, and keys and values of windows, when
    they are full."""
    return sum(n * mixer.bytes_per_row(run) for mixer, n in _mixers(config).items())


def copied_bytes(config: ModelConfig, run: RunConfig) -> int:
    """Bytes of one sequence that a step works on in a copy, beside the cache: recurrent states."""
    return sum(n * mixer.copied_bytes(run) for mixer, n in _mixers(config).items())


def _mixers(config: ModelConfig) -> collections.Counter:
    """How many layers, those of the draft model too, have each mixer: most are alike, and each asks which
    kernels would run it."""
    own = collections.Counter(mixer for layer in config.layers for mixer in layer.mixers)
    return own if config.draft_model is None else own + _mixers(config.draft_model)


def score_bytes(config: ModelConfig) -> int:
    """Bytes in which a step makes scores of one sequence, float32, and draws from them: 9.2 for each token of
    the vocabulary, as XLA's plans for steps of 32 and 256 rows have it."""
    return 10 * config.vocab_size


def cache_bytes(config: ModelConfig, run: RunConfig) -> int:
    """Bytes of a cache with every sequence full. `run` must be resolved."""
    tokens = -(-run.context // run.page_size) * run.page_size
    return run.batch_size * (tokens * bytes_per_token(config, run) + bytes_per_row(config, run))


def scratch_bytes(config: ModelConfig, run: RunConfig) -> int:
    """Bytes beside the cache: the states that a step works on, or one layer's keys and values, which prefill
    puts there for a kernel that does not read them as they are stored; with every sequence full. `run` must
    be resolved."""
    one = (mixer.scratch_bytes(run) for mixer in _mixers(config))
    return run.batch_size * (copied_bytes(config, run) + max(one, default=0))


MOST_ROWS = 64  # by default; on an H200 the 8B makes 22,000 tok/s with 64 and 32,000 with 256
MOST_ROWS_CPU = 32
FEW_ROWS = 8  # that fit beside decoded weights, where those are chosen
ROWS_SHARE = 0.5  # of the memory that weights leave free


def batch_size(description: Description, run: RunConfig, parts: int = 1) -> int:
    """The largest power of two, up to 64 or on a CPU 32, with which a full cache and scratch take half of the
    memory that weights leave free; at least 1. All of `run` but its batch_size must be resolved; `parts` as
    for `check`."""
    rows = MOST_ROWS_CPU if jax.default_backend() == "cpu" else MOST_ROWS
    weights, *each = _share(description, dataclasses.replace(run, batch_size=1), parts)
    room = ROWS_SHARE * (_known_free() - weights)
    while rows > 1 and rows * sum(each) > room:
        rows //= 2
    return rows


CONTEXT_SHARE = 0.25  # of the memory that weights leave free; a CPU may have to write zeros into all of it


def longest_context(description: Description, run: RunConfig, parts: int = 1) -> int:
    """The model's own context, or the largest one, in whole pages, whose cache and scratch take a quarter of
    the memory that is free beside the weights. `run` must be resolved; `parts` as for `check`."""
    most, page = description.config.context_length, run.page_size
    free = machine.free_memory() - weight_bytes(description, run) / parts

    def exceeds(pages: int) -> bool:
        longer = dataclasses.replace(run, context=pages * page)
        return sum(_share(description, longer, parts)[1:]) > CONTEXT_SHARE * free

    pages = bisect.bisect_left(range(1, -(-most // page) + 1), True, key=exceeds)
    return min(most, max(pages, 1) * page)


def explain_weights(description: Description, run: RunConfig, parts: int = 1) -> list[Verdict]:
    """Both ways to store the weights, which one `run` gets, and why. All of `run` but its weights must be
    resolved; `parts` as for `check`.

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
    without = _without_kernel(description, run)
    weights, cache, _ = _share(description, dataclasses.replace(run, weights="decoded"), parts)
    sizes = f"weights of {weights / 1e9:.2f} GB and a cache of {cache / 1e9:.2f} GB"
    free = _known_free()
    if jax.default_backend() != "cpu":
        decoded, reason = False, "is faster on a CPU only"
    elif without is None:
        decoded, reason = False, "is slower than the kernels that read packed weights"
    elif weights + cache > 0.9 * free:
        decoded, reason = False, f"{sizes} exceed nine tenths of the {free / 1e9:.2f} GB that are free"
    else:
        decoded, reason = True, f"{sizes} fit into nine tenths of the {free / 1e9:.2f} GB that are free"
    if decoded and without == NEEDS_LLVM:
        packed = weight_bytes(description, dataclasses.replace(run, weights="packed")) / parts
        without = f"{without}, with which weights are {packed / 1e9:.2f} GB, as in the file"
    later = f"comes later: {without}" if decoded else "as they lie in the file"
    return [Verdict("decoded", decoded, reason), Verdict("packed", not decoded, later)]


def missing_extra(description: Description, run: RunConfig) -> str | None:
    """In a line what the extra `cpu` would give, on a CPU where it is missing; None elsewhere. `run` must be
    resolved."""
    if _without_kernel(description, run) != NEEDS_LLVM:
        return None
    stored, packed = (
        weight_bytes(description, dataclasses.replace(run, weights=way)) / 1e9
        for way in (run.weights, "packed")
    )
    return (
        f"no kernels: weights are {stored:.2f} GB where {packed:.2f} would do, and read more slowly; "
        "pip install 'bonsai-jax[cpu]' brings the package llvmlite, which they need"
    )


def _without_kernel(description: Description, run: RunConfig) -> str | None:
    """Why on a CPU the reference would multiply some of the file's matrices packed; None: it would none."""
    shapes = {(t.format, *t.shape[-2:]) for _, t in description.sources if len(t.shape) > 1}
    reasons = (_kernels(format, n, k, run)[1] for format, n, k in sorted(shapes))
    return next(filter(None, reasons), None)


def check(description: Description, run: RunConfig, parts: int = 1) -> None:
    """Raise MemoryError, with sums and the remedies that help, when a device's share of the weights, one in
    `parts`, and of a full cache and prefill's scratch, split by KV head, exceed its memory."""
    limit, alone = machine.device_memory(), without_draft_model(description)

    def fits(**changes: Any) -> bool:
        own = description if changes.pop("with_draft_model", True) else alone
        return sum(_share(own, dataclasses.replace(run, **changes), parts)) <= limit

    if fits():
        return
    remedies = {
        "keep the weights packed (weights='packed')": ("weights", "packed"),
        "keep keys and values in 8 bits (cache_dtype='int8')": ("cache_dtype", "int8"),
        "keep the states of delta nets in 16 bits (state_dtype='float16')": ("state_dtype", "float16"),
        "lower batch_size": ("batch_size", 1),
        "lower context": ("context", 1),
        **({"leave the draft model out": ("with_draft_model", False)} if description.draft_model else {}),
    }
    works = [
        some
        for count in range(1, len(remedies) + 1)
        for some in itertools.combinations(remedies, count)
        if fits(**dict(remedies[text] for text in some))
    ]
    fewest = [" and ".join(some) for some in works if len(some) == len(works[0])]
    remedy = " or ".join(fewest) or "use a smaller quantization of this model, or a smaller model"
    weights, cache, scratch = _share(description, run, parts)
    beside = f", and {scratch / 1e9:.2f} GB in which prefill reads it as float16," * (scratch > 0)
    more = f" and its draft model {description.draft_model.source}" if description.draft_model else ""
    raise MemoryError(
        f"{description.source}{more}: weights of {weights / 1e9:.2f} GB and a cache of {cache / 1e9:.2f} GB "
        f"({run.batch_size} sequences of {run.context} tokens){beside} exceed the {limit / 1e9:.2f} GB of "
        f"{machine.device_name()}; {remedy}"
    )


def without_draft_model(description: Description) -> Description:
    """The same model, for which no other one proposes tokens."""
    config = dataclasses.replace(description.config, draft_model=None)
    return dataclasses.replace(description, config=config, draft_model=None)


BESIDE = 2**30  # bytes for what programs need beside weights and cache


def reserve(description: Description, run: RunConfig, parts: int, devices: Iterable[jax.Device]) -> None:
    """Take the memory for weights, cache and scratch in one piece (machine.reserve). Arguments as for
    `check`."""
    machine.reserve(sum(_share(description, run, parts)) + BESIDE, devices)


def pool_bytes(
    config: ModelConfig, run: RunConfig, rows: int, tokens: int, *, checkpoints: int = 0, beside: int = 0
) -> int:
    """Bytes of a cache for these rows and, in all, this many tokens, with the rows' tables for penalties and
    the states and scores that a step of all rows works on.

    checkpoints  rows that only states have
    beside       bytes of each row that are not of the model (decoding/chain.py)
    """
    pages = -(-tokens // run.page_size) * run.page_size
    states = (rows + checkpoints) * bytes_per_row(config, run)
    # Each row has a table of what penalties need, a byte and an int32 for each token of the vocabulary.
    each = 5 * config.vocab_size + beside + copied_bytes(config, run) + score_bytes(config)
    return pages * bytes_per_token(config, run) + states + rows * each


def check_room(nbytes: int, asked: str) -> None:
    """Raise MemoryError when so many bytes exceed a device's memory, before they are allocated. asked: what
    the user gave, for the message."""
    limit, left = room(), "" if device.platform() == "cpu" else " left"
    if nbytes > limit:
        raise MemoryError(
            f"{asked} take {nbytes / 1e9:,.2f} GB; {machine.device_name()} has {limit / 1e9:,.2f} GB{left}"
        )


def room() -> int:
    """Bytes of a GPU's memory that nobody uses; all of a CPU's, whose free bytes change all the time."""
    return _known_free() if device.platform() != "cpu" else machine.device_memory()


def _known_free() -> int:
    """Free bytes of a device. Several processes must decide alike, so they take all of its memory."""
    return machine.free_memory() if jax.process_count() == 1 else machine.device_memory()


def _share(description: Description, run: RunConfig, parts: int) -> tuple[float, float, float]:
    """Bytes of weights, of a full cache and of prefill's scratch on each of `parts` devices."""
    config, weights = description.config, weight_bytes(description, run) / parts
    heads = min(parts, config.attention.num_kv_heads)
    return weights, cache_bytes(config, run) / heads, scratch_bytes(config, run) / heads
