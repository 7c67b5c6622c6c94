"""Load a model, and make states for it. What it writes and scores: text.py."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from bonsai_jax import compile_cache, threads
from bonsai_jax.config import ModelConfig, RunConfig, SamplingParams
from bonsai_jax.decoding import proposers, speculation
from bonsai_jax.decoding import sampling as sampling_arrays
from bonsai_jax.decoding import steps as core
from bonsai_jax.network import architectures, parallel
from bonsai_jax.network import cache as kv
from bonsai_jax.network import params as network_params
from bonsai_jax.network.params import Params
from bonsai_jax.tokens.tokenizer import Tokenizer
from bonsai_jax.weights import placement
from bonsai_jax.weights.plan import plan
from checkpoints import Checkpoint, open_checkpoint


@dataclasses.dataclass(frozen=True)
class Model:
    """A loaded model.

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

    def __repr__(self) -> str:
        stored = sum(leaf.nbytes for leaf in jax.tree.leaves(self.params))
        c = self.config
        where = "" if self.mesh is None else f", mesh {dict(self.mesh.shape)}"
        return (
            f"<Model {self.source!r}: {c.architecture}, {c.num_layers} layers of {c.hidden}, "
            f"{stored / 1e9:.2f} GB {self.run.weights}, context {self.run.context}{where}>"
        )


def load(
    source: str,
    run: RunConfig = RunConfig(),
    *,
    mesh: jax.sharding.Mesh | None = None,
    offline: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Model:
    """Load a model onto the default device, or over many.

    source    "model.gguf", a Hugging Face folder, "user/repo:Q1_0", "demo" (SmolLM2, from its package), or
              "synth:bonsai-8b:q1_0" (random weights)
    run       how to run it; rows are those of each device along the mesh axis "data"
    mesh      make_mesh(data, model): rows are split over "data", weights and KV heads over "model"
    offline   never ask the network for "user/repo"
    progress  called with weight bytes read so far and in all
    Compiled programs are kept in the user's cache folder (compile_cache.py).
    Raises checkpoints.CheckpointError for a file that is broken or does not fit its architecture,
    NotImplementedError for an architecture, a format or an implementation that is not supported,
    MemoryError when weights and cache do not fit the device, and ValueError for weights that do not split
    over the mesh.
    """
    return from_checkpoint(open_checkpoint(source, offline=offline), run, mesh=mesh, progress=progress)


def from_checkpoint(
    checkpoint: Checkpoint,
    run: RunConfig = RunConfig(),
    *,
    mesh: jax.sharding.Mesh | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Model:
    """`load` for a checkpoint that is open already."""
    if not isinstance(run, RunConfig):
        raise TypeError(
            f"run is a {type(run).__name__}; give bj.RunConfig, such as bj.RunConfig(context=8192)"
        )
    compile_cache.use()
    threads.use()
    description = architectures.describe(checkpoint, draft=run.draft)
    where = None
    if mesh is not None:
        where = placement.Placement(placement.usable(mesh), description.config, run.all_reduce)
    load_plan = plan(description, run, where)
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    params = network_params.load(load_plan, progress)
    return Model(params, load_plan.config, load_plan.run, tokenizer, checkpoint.source)


def new_cache(model: Model, batch_size: int, context: int, *, rewinds: bool = False) -> kv.KVCache:
    """An empty cache for batch_size sequences of up to `context` tokens each, for `extend`.

    rewinds   layers with a window keep all keys, so that `KVCache.rewind` can take tokens back; else they
              keep a ring of pages
    Raises ValueError for a batch_size or context below 1.
    """
    for name, value in {"batch_size": batch_size, "context": context}.items():
        if not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be a whole number, 1 or more")
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
                can (speculation.py)
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
) -> core.State:
    """A fresh generation state over a cache, which may hold tokens already: prefill reads behind them."""
    rows = cache.lengths.shape[0]
    stop_ids = [] if ignore_eos else sorted(model.tokenizer.eos_ids)
    state = core.start(
        cache,
        sampling_arrays.sampler(params, rows, model.config.vocab_size, model.run.impl),
        jax.device_put(np.array([stop_ids or [core.NO_TOKEN]] * rows, np.int32), may_alias=False),
        jax.device_put(np.array(np.broadcast_to(max_new_tokens, rows), np.int32), may_alias=False),
    )
    if speculate is not None:
        if proposers.get(speculate).DRAFTS and model.params.draft is None:
            raise ValueError(
                f"speculate={speculate!r} needs the draft layer; load the model with RunConfig(draft=True)"
            )
        device_rows = rows // placement.size(model.mesh, placement.DATA)
        new = speculation.start(rows, cache.capacity, speculate, device_rows)
        state = state.replace(speculation=new)
    return parallel.place_state(state, model.mesh)
