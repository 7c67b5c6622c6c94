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

from bonsai_jax.decoding.sampling import Sampler, kernel
from bonsai_jax.decoding.state import Speculation, State
from bonsai_jax.model import Model
from bonsai_jax.network import cache as kv
from bonsai_jax.network import parallel
from bonsai_jax.network.cache import DeltaState, DraftState, KVCache
from bonsai_jax.weights import placement
from pallas_kernels import cache_layouts

KINDS = ("State", "KVCache")


def save_state(path: str | os.PathLike[str], state: State | KVCache) -> None:
    """Write a generation state, or a cache alone (a prefix that many will share), as a safetensors file.

    Every array by the name of its field, "cache.k" or "sampler.counts"; random keys as their words. Metadata
    says what it is, for `load_state`. The file appears, or is replaced, only when all is written.
    """
    path = Path(path)
    if not isinstance(state, State | KVCache):
        raise TypeError(f"save_state: a {type(state).__name__} was given; State and KVCache can be saved")
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))
    cache = state.cache if isinstance(state, State) else state
    fields: dict[str, Any] = flatten_dict(serialization.to_state_dict(state), sep=".")
    arrays = {name: array for name, array in fields.items() if array is not None}
    metadata = {
        "format": "bonsai-jax state 1",
        "kind": type(state).__name__,
        "cache_dtype": cache_layouts.name_of(cache.k),
        "page_size": str(cache.page_size),
    }
    if isinstance(state, State):
        metadata["random_keys"] = str(jax.random.key_impl(state.sampler.keys))
        if state.speculation is not None:
            metadata["proposer"] = state.speculation.proposer
            metadata["speculation_width"] = str(state.speculation.width)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        save_file({name: parallel.fetch(a) for name, a in arrays.items()}, unfinished, metadata)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def load_state(path: str | os.PathLike[str], model: Model) -> State | KVCache:
    """What `save_state` wrote, on this model's devices: generation goes on as if it had never stopped.

    Kernels of attention and of the draw are those that this process chooses for the model, whatever wrote the
    file.
    Raises ValueError for another file, and for a state that does not fit the model: layers, KV heads,
    head_dim, dtype of the cache or vocabulary. Weights are not compared: the cache of another model of the
    same shape loads, and means nothing.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    try:
        with safetensors.safe_open(path, framework="flax") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: no state that bj.save_state wrote: {error}") from error
    if metadata.get("format") != "bonsai-jax state 1" or metadata.get("kind") not in KINDS:
        raise ValueError(f"{path}: no state that bj.save_state wrote: its metadata does not say so")
    fields = unflatten_dict(arrays, sep=".")
    try:
        of_cache = fields if metadata["kind"] == "KVCache" else fields.pop("cache")
        if "delta" in of_cache:
            of_cache["delta"] = DeltaState(**of_cache["delta"])
        if "draft" in of_cache:
            of_cache["draft"] = DraftState(**of_cache["draft"])
        cache = KVCache(**of_cache)
        _check_cache(path, cache, model)
        run = dataclasses.replace(model.run, page_size=cache.page_size)
        cache = kv.with_kernels(cache, model.config, run)
        if metadata["kind"] == "KVCache":
            return parallel.place_state(cache, model.mesh)
        sampler = fields.pop("sampler")
        keys = jax.random.wrap_key_data(sampler.pop("keys"), impl=metadata["random_keys"])
        sampler = Sampler(keys=keys, impl=kernel(model.config.vocab_size, model.run.impl), **sampler)
        if "speculation" in fields:
            how = {"proposer": metadata["proposer"], "width": int(metadata["speculation_width"])}
            fields["speculation"] = Speculation(**fields["speculation"], **how)
        state = State(cache=cache, sampler=sampler, **fields)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: this state lacks a field, or has one too many: {error}") from error
    _check(path, "vocabulary", state.sampler.seen.shape[1], model.config.vocab_size)
    return parallel.place_state(state, model.mesh)


def _check_cache(path, cache: KVCache, model: Model) -> None:
    layers, _, _, heads, head_dim = cache_layouts.shape(cache.k)
    config = model.config
    # Devices that share fewer KV heads than they are have copies of them.
    parts = placement.size(model.mesh, placement.MODEL)
    of_model = parts * max(1, model.config.num_kv_heads // parts)
    _check(path, "layers", layers, len(config.layers_of("attention")))
    _check(path, "KV heads", heads, of_model)
    _check(path, "head_dim", head_dim, config.head_dim)
    states = None if cache.delta is None else (cache.delta.s.shape, cache.delta.tail.shape)
    wanted = jax.eval_shape(lambda: kv.empty_states(config, cache.lengths.shape[0]))
    wanted = None if wanted is None else (wanted.s.shape, wanted.tail.shape)
    _check(path, "recurrent states", states, wanted)
    drafts = "no draft layer" if cache.draft is None else "a draft layer"
    _check(path, drafts, cache.draft is not None, config.draft is not None)
    if (dtype := cache_layouts.name_of(cache.k)) != model.run.cache_dtype:
        raise ValueError(
            f"{path}: the cache is {dtype}, but this model runs with {model.run.cache_dtype}; load it with "
            f'RunConfig(cache_dtype="{dtype}")'
        )


def _check(path, what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise ValueError(
            f"{path}: this state has {what} {found}, but the model {wanted}; load the model that it was made "
            "with"
        )
