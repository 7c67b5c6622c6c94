"""Load a model, and make states for it. What it writes and scores: text.py."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from bonsai_jax import arguments, forks
from bonsai_jax.adapters import targets
from bonsai_jax.adapters.files import load_scaled
from bonsai_jax.adapters.making import added
from bonsai_jax.config import ModelConfig, RunConfig
from bonsai_jax.decoding import chain, proposers, speculation
from bonsai_jax.decoding import sampling as sampling_arrays
from bonsai_jax.decoding import steps as core
from bonsai_jax.network import architectures, draft, draft_model, parallel
from bonsai_jax.network import cache as kv
from bonsai_jax.network import params as network_params
from bonsai_jax.network.adapter import Adapter, refuse_split
from bonsai_jax.network.params import Params
from bonsai_jax.sampling_params import SamplingParams
from bonsai_jax.starting import start_device
from bonsai_jax.tokens.tokenizer import Tokenizer
from bonsai_jax.tokens.vocabulary import differ_at
from bonsai_jax.weights import memory, placement
from bonsai_jax.weights.plan import plan
from checkpoints import Checkpoint, CheckpointError, open_checkpoint
from pallas_kernels import device

STACKS_AT_ONCE = 8  # that a GPU loads; a CPU copies what a file has as it is


@dataclasses.dataclass(frozen=True)
class Model:
    """A loaded model; that which `load` gives to `on_shapes` has shapes in place of weights.

    params     the weights, on the device
    config     what the file says
    run        how this process runs it, with every default resolved
    tokenizer  .encode(text) -> list[int], .decode(ids) -> str
    source     what was asked for
    """

    params: Params
    config: ModelConfig
    run: RunConfig
    tokenizer: Tokenizer
    source: str

    @property
    def name(self) -> str:
        """The source; of a GGUF file its name without folder and suffix."""
        return Path(self.source).stem if self.source.endswith(".gguf") else self.source

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """The devices that it lies on (placement.make_mesh); None: the default device."""
        return self.params.mesh

    @property
    def loaded(self) -> bool:
        """Whether it has weights, and not only their shapes."""
        return isinstance(self.params.final_norm, jax.Array)

    def shapes(self) -> "Model":
        """The same with shapes in place of weights; over a mesh, which says where weights lie, as it is."""
        if self.mesh is not None:
            return self
        return dataclasses.replace(self, params=jax.eval_shape(lambda: self.params))

    def with_adapter(self, *adapters: Adapter) -> "Model":
        """The same model, whose weights it shares, with an adapter beside them, or with the sum of several;
        with none without any. Everything that takes a model or its params then uses it.
        Raises ValueError for an adapter of another model, and NotImplementedError where devices share
        matrices."""
        for adapter in adapters:
            arguments.kind("adapter", adapter, Adapter, "what bj.lora or bj.load_adapter returns")
            targets.check(adapter, self.config)
        if adapters:
            refuse_split(self.params.axis)
        adapter = parallel.copied(added(adapters), self.mesh) if adapters else None
        return dataclasses.replace(self, params=self.params.replace(adapter=adapter))

    def without_draft_model(self) -> "Model":
        """The same model, whose weights it shares, without its draft model (RunConfig.draft_model): it
        decodes plainly, or with another proposer."""
        return dataclasses.replace(
            self,
            params=self.params.replace(draft_model=None),
            config=dataclasses.replace(self.config, draft_model=None),
            run=dataclasses.replace(self.run, draft_model=None),
        )

    def __repr__(self) -> str:
        stored = sum(leaf.nbytes for leaf in jax.tree.leaves(self.params))
        c = self.config
        where = "" if self.mesh is None else f", mesh {dict(self.mesh.shape)}"
        return (
            f"<Model {self.source!r}: {c.architecture}, {c.num_layers} layers of {c.hidden}, "
            f"{stored / 1e9:.2f} GB {self.run.weights}, context {self.run.context}{where}>"
        )


def check_model(model: Any) -> None:
    """Raise TypeError for what is no Model, and RuntimeError in a process that was forked after it was
    loaded."""
    forks.check()
    arguments.kind("model", model, Model, "what bj.load returns")


def load(
    source: str | os.PathLike[str],
    run: RunConfig = RunConfig(),
    *,
    mesh: jax.sharding.Mesh | None = None,
    lora: str | Sequence[str] = (),
    offline: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    on_shapes: Callable[[Model], None] | None = None,
) -> Model:
    """Load a model onto the default device, or over many.

    source    "model.gguf", a Hugging Face folder, "user/repo:Q1_0", "demo" (SmolLM2, from its package),
              "stories" (7 MB, in this package), or "synth:bonsai-8b:q1_0" (random weights)
    run       how to run it; rows are those of each device along the mesh axis "data"
    mesh      make_mesh(data, model): rows are split over "data", weights and KV heads over "model"
    lora      files of adapters, "FILE" or "FILE:SCALE", each a folder of PEFT or llama.cpp's .gguf, whose sum
              is put beside the weights (`load_adapter` has their errors)
    offline   never ask the network for "user/repo"
    progress  called with weight bytes read so far and in all
    on_shapes on one device, called before weights are read with a Model that has their shapes only, such as
              `compile_ahead`: a first start is two seconds shorter on a GPU, and half a second on a CPU
    Compiled programs are kept in the user's cache folder (compile_cache.py).
    Raises checkpoints.CheckpointError for a file that is broken or does not fit its architecture,
    NotImplementedError for an architecture, a format or an implementation that is not supported,
    MemoryError when weights and cache do not fit the device, and ValueError for weights that do not split
    over the mesh, and for a draft model (RunConfig.draft_model) with another vocabulary.
    """
    arguments.kind("source", source, (str, os.PathLike), "a path, or a name such as 'user/repo:Q8_0'")
    _check_load(run, mesh, progress, on_shapes)
    offline = arguments.flag("offline", offline)
    start_device()
    checkpoint = open_checkpoint(source, offline=offline)
    more = {"offline": offline, "progress": progress, "on_shapes": on_shapes}
    return from_checkpoint(checkpoint, run, mesh=mesh, lora=lora, **more)


def from_checkpoint(
    checkpoint: Checkpoint,
    run: RunConfig = RunConfig(),
    *,
    mesh: jax.sharding.Mesh | None = None,
    lora: str | Sequence[str] = (),
    offline: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    on_shapes: Callable[[Model], None] | None = None,
) -> Model:
    """`load` for a checkpoint that is open already; `offline` concerns its draft model."""
    if not isinstance(checkpoint, Checkpoint):
        name = type(checkpoint).__name__
        raise TypeError(f"checkpoint is a {name}; give what checkpoints.open_checkpoint returns")
    _check_load(run, mesh, progress, on_shapes)
    start_device()
    draft_checkpoint = opened_draft_model(run, offline=offline)
    description = architectures.describe(checkpoint, draft=run.draft, draft_model=draft_checkpoint)
    tokenizer = _tokenizer(checkpoint)  # before the plan, which needs the device
    if draft_checkpoint is not None:
        draft_tokens = _tokenizer(draft_checkpoint)
        _check_vocabulary(checkpoint.source, tokenizer, draft_checkpoint.source, draft_tokens)
    mesh = None if mesh is None else placement.usable(mesh)
    where = placement.Placement(mesh, run.all_reduce)
    load_plan = plan(description, run, where)
    model = lambda params: Model(  # noqa: E731
        params.replace(adapter=adapter), load_plan.config, load_plan.run, tokenizer, checkpoint.source
    )
    files = [lora] if isinstance(lora, str) else list(lora)
    adapter = None
    if files:
        refuse_split(where.axis)
        adapter = added([load_scaled(file, load_plan.config) for file in files])
        adapter = parallel.copied(adapter, mesh)
    on_one_gpu = mesh is None and device.platform() != "cpu"
    devices = [device.in_use()] if mesh is None else mesh.local_devices
    rows = run.batch_size or 1  # as many as were asked for
    memory.reserve(description, dataclasses.replace(load_plan.run, batch_size=rows), where.parts, devices)
    if on_shapes is not None and mesh is None:
        on_shapes(model(jax.eval_shape(lambda: network_params.load(load_plan))))
    return model(network_params.load(load_plan, progress, STACKS_AT_ONCE if on_one_gpu else 1))


def opened_draft_model(run: RunConfig, *, offline: bool = False) -> Checkpoint | None:
    """The checkpoint of RunConfig.draft_model; None: there is none."""
    return None if run.draft_model is None else open_checkpoint(run.draft_model, offline=offline)


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    try:
        return Tokenizer.from_checkpoint(checkpoint)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.source}: its tokenizer cannot be read: {error}") from error


def _check_vocabulary(source: str, tokens: Tokenizer, draft_source: str, draft_tokens: Tokenizer) -> None:
    """Raise ValueError for a draft model with another vocabulary than the model."""
    if (at := differ_at(tokens, draft_tokens)) is None:
        return
    own, other = (repr(t.texts[at]) if at < len(t.texts) else "missing" for t in (tokens, draft_tokens))
    raise ValueError(
        f"draft_model: {draft_source} has another vocabulary than {source}: token {at} is {other}, not "
        f"{own}; give a smaller model of the same family"
    )


def _check_load(run: Any, mesh: Any, progress: Any, on_shapes: Any) -> None:
    forks.check()
    arguments.kind("run", run, RunConfig, "bj.RunConfig, such as bj.RunConfig(context=8192)")
    if mesh is not None:
        placement.usable(mesh)
    if mesh is not None and run.draft_model is not None:
        raise NotImplementedError(
            "draft_model over a mesh: a draft model runs on one device, beside its model; leave out "
            "draft_model, or the mesh (--tensor-parallel, --data-parallel)"
        )
    arguments.function("progress", progress)
    if on_shapes is not None:
        arguments.function("on_shapes", on_shapes)


def new_cache(model: Model, batch_size: int, context: int, *, rewinds: bool = False) -> kv.KVCache:
    """An empty cache for batch_size sequences of up to `context` tokens each, for `extend`.

    rewinds   layers with a window keep all keys, so that `KVCache.rewind` can take tokens back; else they
              keep a ring of pages
    Raises ValueError for a batch_size or context below 1, MemoryError for a cache that no device holds.
    """
    check_model(model)
    batch_size = arguments.whole("batch_size", batch_size, 1)
    context = arguments.whole("context", context, 1)
    rewinds = arguments.flag("rewinds", rewinds)
    asked = f"batch_size={batch_size} and context={context}"
    rows = -(-batch_size // placement.size(model.mesh, placement.DATA))
    memory.check_room(memory.pool_bytes(model.config, model.run, rows, rows * context), asked)
    return parallel.empty_cache(model.config, model.run, batch_size, context, model.mesh, rewinds=rewinds)


def new_state(
    model: Model,
    batch_size: int,
    context: int,
    params: SamplingParams | Sequence[SamplingParams],
    max_new_tokens: int | Sequence[int],
    *,
    ignore_eos: bool = False,
    speculate: str | None = None,
) -> core.State:
    """A generation state for batch_size sequences of up to `context` tokens each, all empty.
    Raises ValueError for a batch_size or context below 1, for another number of params than sequences, and
    where "mtp" lacks its draft layer.

    speculate   "ngram" or, with a draft layer, "mtp": `decode` draws the same tokens in fewer steps, where it
                can (speculation.py). A model with a draft model has "draft_model", and no other
    Raises ValueError for values that are out of range or more or fewer than the sequences, MemoryError for a
    cache that no device holds.
    """
    options = {"ignore_eos": ignore_eos, "speculate": speculate}
    return start_state(model, new_cache(model, batch_size, context), params, max_new_tokens, **options)


def start_state(
    model: Model,
    cache: kv.KVCache,
    params: SamplingParams | Sequence[SamplingParams],
    max_new_tokens: int | Sequence[int],
    *,
    ignore_eos: bool = False,
    speculate: str | None = None,
    checkpoints: int = 0,
) -> core.State:
    """A fresh generation state over a cache, which may hold tokens already: prefill reads behind them.

    checkpoints  those of the cache (cache.empty)
    A draft layer or a draft model does not know what the cache holds, and proposes worse after it.
    """
    rows, speculate = cache.lengths.shape[0], chosen_proposer(model, speculate)
    ignore_eos = arguments.flag("ignore_eos", ignore_eos)
    stop_ids = [] if ignore_eos else sorted(model.tokenizer.eos_ids)
    state = core.start(
        cache,
        sampling_arrays.sampler(params, rows, model.config.vocab_size, model.run.impl),
        jax.device_put(np.array([stop_ids or [core.NO_TOKEN]] * rows, np.int32), may_alias=False),
        jax.device_put(_new_tokens(max_new_tokens, rows), may_alias=False),
    )
    if any(one.chained for one in ([params] if isinstance(params, SamplingParams) else params)):
        check_chained(speculate)
        state = state.replace(chain=_chain(model, cache, params))
    if speculate is not None:
        device_rows = rows // placement.size(model.mesh, placement.DATA)
        new = speculation.start(rows, cache.capacity, speculate, device_rows)
        loads = proposers.get(speculate).LOADS
        if loads == "draft":
            whole = parallel.with_copied_heads(model.config, placement.size(model.mesh, placement.MODEL))
            new = new.replace(draft=draft.empty(whole, model.run, rows, cache.num_pages))
        elif loads == "draft_model":
            draft_config: Any = model.config.draft_model
            new = new.replace(draft=draft_model.empty(draft_config, model.run, cache, checkpoints))
        state = state.replace(speculation=new)
    return parallel.place_state(state, model.mesh)


NEEDS = {
    "draft": "the draft layer; load the model with RunConfig(draft=True)",
    "draft_model": 'a draft model; load the model with RunConfig(draft_model="small.gguf")',
}


def chosen_proposer(model: Model, speculate: str | None) -> str | None:
    """The proposer of this model's steps: the one that was asked for, else the draft model, where there is
    one. Raises NotImplementedError for no proposer's name, ValueError for one that this model cannot use."""
    implied = None if model.config.draft_model is None else "draft_model"
    if speculate is None:
        return implied
    loads = proposers.get(speculate).LOADS
    if implied not in (None, speculate):
        raise ValueError(
            f"speculate={speculate!r}, but this model has the draft model {model.run.draft_model!r}, which "
            "proposes its tokens; leave one of them out"
        )
    if loads is not None and getattr(model.params, loads) is None:
        raise ValueError(f"speculate={speculate!r} needs {NEEDS[loads]}")
    return speculate


def check_chained(speculate: str | None) -> None:
    """Raise NotImplementedError for SamplingParams.chained where steps speculate."""
    if speculate is not None:
        other = "the draft model" if speculate == "draft_model" else "speculate"
        raise NotImplementedError(
            f"SamplingParams: min_tokens, DRY, top_n_sigma, typical_p, XTC, dynatemp_range and mirostat with "
            f"speculate={speculate!r}; leave {other} or these out"
        )


def _chain(model: Model, cache: kv.KVCache, params: SamplingParams | Sequence[SamplingParams]) -> chain.Chain:
    """The chain of fresh rows over a cache."""
    rows, vocab_size = cache.lengths.shape[0], model.config.vocab_size
    per_row = [params] * rows if isinstance(params, SamplingParams) else params
    fields = chain.unpacked(np.stack([chain.columns(one, model.tokenizer, vocab_size) for one in per_row]))
    empty = chain.empty(rows, vocab_size, cache.capacity)
    return chain.with_rows(empty, jax.device_put(fields, may_alias=False))


def _new_tokens(max_new_tokens: Any, rows: int) -> Int[np.ndarray, "B"]:
    """max_new_tokens of each row, from one number for all or one each."""
    if np.ndim(max_new_tokens) == 0:
        max_new_tokens = [max_new_tokens] * rows
    if len(max_new_tokens) != rows:
        raise ValueError(f"max_new_tokens has {len(max_new_tokens)} numbers for {rows} sequences")
    return np.array([arguments.whole("max_new_tokens", n) for n in max_new_tokens], np.int32)
