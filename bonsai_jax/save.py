"""Generation states and caches in files: saved, and read again by another process."""

import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import jax
import safetensors
from flax import serialization
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import save_file

from bonsai_jax import arguments
from bonsai_jax.config import ModelConfig, RunConfig
from bonsai_jax.decoding.chain import Chain
from bonsai_jax.decoding.dry import Dry
from bonsai_jax.decoding.sampling import Sampler, kernel
from bonsai_jax.decoding.state import Speculation, State
from bonsai_jax.model import Model, check_model
from bonsai_jax.network import cache as kv
from bonsai_jax.network import kinds, parallel
from bonsai_jax.network.cache import KVCache
from bonsai_jax.network.draft import DraftState, with_kernels
from bonsai_jax.network.draft_model import DraftModelState
from bonsai_jax.network.kinds.state import Room
from bonsai_jax.weights import placement

KINDS = ("State", "KVCache")
FORMAT = "bonsai-jax state 3"


def save_state(path: str | os.PathLike[str], state: State | KVCache) -> None:
    """Write a generation state, or a cache alone (a prefix that many will share), as a safetensors file.
    Raises TypeError for anything else, and OSError where the file cannot be written.

    Every array has the name of its field, "cache.states.attention.0.k" or "sampler.counts"; random keys are
    saved as their words. Metadata says what the file is, for `load_state`. The file appears, or is replaced,
    only when all is written.
    """
    arguments.kind("path", path, (str, os.PathLike), "a file's path")
    path = Path(path)
    if not isinstance(state, State | KVCache):
        raise TypeError(f"save_state: a {type(state).__name__} was given; State and KVCache can be saved")
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))
    cache = state.cache if isinstance(state, State) else state
    fields: dict[str, Any] = flatten_dict(serialization.to_state_dict(state), sep=".")
    arrays = {name: array for name, array in fields.items() if array is not None}
    metadata = {
        "format": FORMAT,
        "kind": type(state).__name__,
        "cache_dtype": kv.dtype_name(cache),
        "chunk": str(cache.chunk or ""),
        "page_size": str(cache.page_size),
    }
    if isinstance(state, State):
        metadata["random_keys"] = str(jax.random.key_impl(state.sampler.keys))
        if state.speculation is not None:
            metadata["proposer"] = state.speculation.proposer
            metadata["speculation_width"] = str(state.speculation.width)
            if isinstance(state.speculation.draft, DraftModelState):
                metadata["draft_chunk"] = str(state.speculation.draft.chunk or "")
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        save_file({name: parallel.fetch(a) for name, a in arrays.items()}, unfinished, metadata)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def load_state(path: str | os.PathLike[str], model: Model) -> State | KVCache:
    """What `save_state` wrote, on this model's devices: generation goes on as if it had never stopped.

    A state that speculates with a draft model has that model's keys and values too, but not its weights: it
    needs a model that was loaded with a draft model of the same shape. Kernels of attention and of the draw
    are those that this process chooses for the model, whatever wrote the file.
    Raises ValueError for another file, and for a state that does not fit the model: layers, KV heads,
    head_dim, dtype of the cache or vocabulary. Weights are not compared: the cache of another model of the
    same shape loads, and means nothing.
    """
    arguments.kind("path", path, (str, os.PathLike), "a file's path")
    check_model(model)
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    try:
        with safetensors.safe_open(path, framework="flax") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: no state that bj.save_state wrote: {error}") from error
    if metadata.get("format") != FORMAT or metadata.get("kind") not in KINDS:
        raise ValueError(f"{path}: no state that bj.save_state wrote: its metadata does not say so")
    fields = unflatten_dict(arrays, sep=".")
    try:
        cache_fields = fields if metadata["kind"] == "KVCache" else fields.pop("cache")
        cache = _cache(cache_fields, metadata, model.config)
        _check_cache(path, cache, model)
        cache = cache.replace(states=kv.with_kernels(cache.states, model.config, model.run))
        if metadata["kind"] == "KVCache":
            return parallel.place_state(cache, model.mesh)
        sampler = fields.pop("sampler")
        keys = jax.random.wrap_key_data(sampler.pop("keys"), impl=metadata["random_keys"])
        sampler = Sampler(keys=keys, impl=kernel(model.config.vocab_size, model.run.impl), **sampler)
        if "speculation" in fields:
            how = {"proposer": metadata["proposer"], "width": int(metadata["speculation_width"])}
            chunk = metadata.get("draft_chunk")
            fields["speculation"] = _speculation(path, fields["speculation"], how, chunk, model)
        if "chain" in fields:
            own = fields["chain"]
            fields["chain"] = Chain(**own | {"dry": Dry(**own["dry"])})
        state = State(cache=cache, sampler=sampler, **fields)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: this state lacks a field, or has one too many: {error}") from error
    _check(path, "vocabulary", state.sampler.seen.shape[1], model.config.vocab_size)
    return parallel.place_state(state, model.mesh)


def _cache(fields: dict[str, Any], metadata: dict[str, str], config: ModelConfig) -> KVCache:
    """The cache of a file: states by kind, and within a kind by the number of their group. The file has
    nothing of layers that read another layer's keys."""
    states = _states(fields.pop("states"), config)
    return KVCache(**fields, states=states, chunk=int(metadata["chunk"]) if metadata["chunk"] else None)


def _states(stored: dict[str, Any], config: ModelConfig) -> dict[str, tuple[Any, ...]]:
    """KVCache.states of a file's arrays."""
    states = {}
    for number, group in enumerate(config.groups("attention")):
        if group.settings.reads is not None:
            stored["attention"].setdefault(str(number), {})
    for kind, groups in stored.items():
        in_order = sorted(groups.items(), key=lambda item: int(item[0]))
        states[kind] = tuple(kinds.get(kind).State(**state) for _, state in in_order)
    return states


def _speculation(
    path, fields: dict[str, Any], how: dict[str, Any], chunk: str | None, model: Model
) -> Speculation:
    """What a file's state speculates with; chunk: of its draft model. Raises ValueError where only one of it
    and the model has a draft layer, or a draft model."""
    draft, stored = None, fields.pop("draft", None)
    if chunk is not None and stored is not None:
        config: Any = model.config.draft_model
        _check(path, "a draft model", True, config is not None)
        states = _states(stored["states"], config)
        _check_states(path, states, config, model.run, fields["ids"].shape)
        draft = DraftModelState(kv.with_kernels(states, config, model.run), int(chunk) if chunk else None)
    elif stored is not None:
        _check(path, "a draft layer", True, model.config.draft is not None)
        state = kinds.get("attention").State(**stored.pop("attention"))
        draft = with_kernels(DraftState(state, **stored), model.config, model.run)
    return Speculation(**fields, **how, draft=draft)


def _check_cache(path, cache: KVCache, model: Model) -> None:
    """Raise ValueError for a cache that is not of this model's shape."""
    run = dataclasses.replace(model.run, page_size=cache.page_size)
    if (dtype := kv.dtype_name(cache)) != run.cache_dtype:
        raise ValueError(
            f"{path}: the cache is {dtype}, but this model runs with {run.cache_dtype}; load it with "
            f'RunConfig(cache_dtype="{dtype}")'
        )
    for state in cache.states.get("delta_net", ()):
        if (dtype := state.s.dtype.name) != run.state_dtype:
            raise ValueError(
                f"{path}: the states of its delta nets are {dtype}, but this model runs with "
                f'{run.state_dtype}; load it with RunConfig(state_dtype="{dtype}")'
            )
    # Devices that share fewer KV heads than they are have copies of them.
    whole = parallel.with_copied_heads(model.config, placement.size(model.mesh, placement.MODEL))
    _check_states(path, cache.states, whole, run, (len(cache.lengths), cache.capacity))


def _check_states(
    path, states: dict[str, tuple[Any, ...]], config: ModelConfig, run: RunConfig, size: tuple[int, int]
) -> None:
    """Raise ValueError for states that are not of this config's shapes. size: rows, and tokens of each."""
    expected = jax.eval_shape(lambda: kv.empty_states(config, run, Room(*size)))
    for kind in expected | states:
        own, others = states.get(kind, ()), expected.get(kind, ())
        _check(path, f"groups of layers with {kind}", len(own), len(others))
        for state, other in zip(own, others, strict=True):
            for name, expected_size in other.sizes().items():
                _check(path, name, state.sizes()[name], expected_size)


def _check(path, what: str, stored: Any, expected: Any) -> None:
    if stored != expected:
        raise ValueError(
            f"{path}: this state has {what} {stored}, but the model {expected}; load the model that it was "
            "made with"
        )
