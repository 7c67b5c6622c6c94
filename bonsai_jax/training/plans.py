"""A model whose weights are trained in float32 and run in another format.

    weights, float32 by tensor name --rounded--> Params of float32, with the values of the formats: the loss
                                    --packed---> Params of packed blocks: rollouts, by the kernels of a load
                                    --save-----> a GGUF file with these blocks

All three have the same values, to the bit where a format has one rule. Formats are those that
`bj.quantize_file` would give.
"""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from bonsai_jax.config import ModelConfig, RunConfig
from bonsai_jax.making import check_new, recipes
from bonsai_jax.making.quantizing import quantized_metadata
from bonsai_jax.model import Model
from bonsai_jax.network import architectures
from bonsai_jax.network.params import Params, assembled
from bonsai_jax.network.schedules import StepPlan
from bonsai_jax.tokens.tokenizer import Tokenizer
from bonsai_jax.training import building
from bonsai_jax.weights import plan as load_plans
from bonsai_jax.weights.drawing import Drawn
from bonsai_jax.weights.records import LoadPlan
from bonsai_jax.weights.specs import Description
from checkpoints import Checkpoint, RandomTensor, Tensor, open_checkpoint, write_gguf
from checkpoints.checkpoint import Stored
from checkpoints.geometry import tensor_nbytes
from pallas_kernels import absmean, formats, packed

# float32 arrays, in names and shapes those of a GGUF file; NAME + ".scale": the learnt scales of a matrix.
Weights = dict[str, Float[Array, "..."]]
SCALE = building.SCALE
CONSTANT = ("rope_divisors", "rope_long", "rope_short")  # vectors that are no weights


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity: a static argument of jitted functions
class TrainingPlan:
    """How a model's weights are trained, and in which formats it runs them. `plan` makes it.

    checkpoint   the file that training starts from
    format       what `plan` was asked for
    formats      the format of each tensor that is trained, by its name
    load_plan    of a file in these formats
    constants    vectors of the file that are not trained
    """

    checkpoint: Checkpoint
    format: str
    formats: Mapping[str, str]
    load_plan: LoadPlan
    constants: Mapping[str, np.ndarray]

    @property
    def config(self) -> ModelConfig:
        """What `bj.forward` and its like take."""
        return self.load_plan.config

    def weights(self, *, scales: bool = False) -> Weights:
        """The weights of the file, dequantized to float32.

        scales   with scales to be learnt, for matrices in binary and ternary formats: mean |w| of each group
        """
        weights: Weights = {}
        for name, format in self.formats.items():
            weights[name] = jnp.array(_values(self.checkpoint, name))  # a copy, which may be donated
            module = formats.get(format)
            if scales and hasattr(module, "LEVELS"):
                weights[name + SCALE] = absmean(weights[name], module.WEIGHTS)
        return weights

    def rounded(self, weights: Weights, *, clip: float | None = None) -> Params:
        """Float params that have the values of the packed ones, for `bj.forward`: differentiable in weights.

        y = straight_through(w, format, scale, clip=clip) of each matrix; vectors are as they are

        clip   for matrices in binary and ternary formats; others have none
        """
        return self._params(weights, building.rounded(clip)).replace(step=StepPlan())

    def packed(self, weights: Weights) -> Params:
        """Packed params, as loading the file of `save` gives them; also inside jit."""
        return self._params(weights, building.packed_for_kernels)

    def model(self, weights: Weights) -> Model:
        """The packed model, for `bj.generate` and `bj.Engine`; Engine.update_params takes `packed` of later
        weights."""
        params = jax.jit(self.packed)(weights)
        tokenizer = Tokenizer.from_checkpoint(self.checkpoint)
        return Model(params, self.config, self.load_plan.run, tokenizer, self.checkpoint.source)

    def save(self, path: str | os.PathLike[str], weights: Weights, *, overwrite: bool = False) -> None:
        """Write a GGUF file of the packed model: metadata and tokenizer are those of the file that training
        started from. Raises FileExistsError and other OSErrors for a path that cannot be written."""
        path = Path(path)
        check_new(path, overwrite)
        self._check(weights)
        metadata = quantized_metadata(self.checkpoint, self.format)
        write_gguf(path, metadata, (self._stored(name, weights) for name in self.checkpoint.tensors))

    def _stored(self, name: str, weights: Weights) -> Tensor:
        """A tensor as a file has it."""
        if name not in self.formats:  # a constant, or what the model skips
            tensor = _source(self.checkpoint, name)
            return Tensor(name, tensor.format, tensor.shape, tensor.data)
        format, w = self.formats[name], weights[name]
        if w.ndim == 1 or format == "f32":
            data = np.asarray(w, np.float32)
            return Tensor(name, "f32", w.shape, data.view(np.uint8).reshape(*w.shape[:-1], -1))
        blocks = jax.jit(packed, static_argnums=1)(w, format, weights.get(name + SCALE))
        return Tensor(name, format, w.shape, np.asarray(formats.pack(format, blocks.fields)))

    def _params(self, weights: Weights, matrix: building.MakeMatrix) -> Params:
        self._check(weights)
        fields = building.fields(self.load_plan, {**self.constants, **weights}, matrix)
        return assembled(self.load_plan, [fields])

    def _check(self, weights: Any) -> None:
        """Raise ValueError, with the name, for weights that are not this plan's."""
        for name, tensor in building.sources(self.load_plan).items():
            if name not in self.formats:
                continue
            if name not in weights:
                raise ValueError(f"weights: {name} is missing; start from plan.weights()")
            if jnp.shape(weights[name]) != tensor.shape:
                raise ValueError(
                    f"weights: {name} is {list(jnp.shape(weights[name]))}; expected {list(tensor.shape)}"
                )


def plan(
    source: str | os.PathLike[str] | Checkpoint,
    format: str,
    run: RunConfig = RunConfig(),
    *,
    pure: bool = False,
    tensor_formats: Iterable[tuple[str, str]] = (),
) -> TrainingPlan:
    """Plan the training of a model for a format, on one device.

    source          a GGUF file, a name that `bj.load` takes and that is one, or an open checkpoint
    format, pure, tensor_formats  as for `bj.quantize_file`, which gives matrices the same formats
    run             how the packed model runs (TrainingPlan.model)
    Raises ValueError for a format that is not known, and NotImplementedError for a Hugging Face folder, for
    Hadamard-folded weights, for a format without an encoder, and for tensors in which several matrices lie.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    if checkpoint.naming != "gguf":
        raise NotImplementedError(
            f"{checkpoint.source} is a Hugging Face folder; training starts from GGUF files. Make one of it: "
            f"bonsai-jax convert {checkpoint.source} model.gguf"
        )
    run = dataclasses.replace(run, weights="packed", draft=False, draft_model=None)
    recipe = recipes.recipe(format)
    tensors = [_source(checkpoint, name) for name in checkpoint.tensors]
    chosen = recipes.formats_of(tensors, checkpoint.metadata, recipe, pure=pure, chosen=tensor_formats)
    description = architectures.describe(_in_formats(checkpoint, chosen))
    _check_trainable(description, chosen)
    load_plan = load_plans.plan(description, run)
    trained, constants = {}, {}
    for spec, t in description.sources:
        if spec.field in CONSTANT:
            constants[t.name] = _values(checkpoint, t.name)
        else:
            trained[t.name] = chosen[t.name]
    return TrainingPlan(checkpoint, format, MappingProxyType(trained), load_plan, MappingProxyType(constants))


def _source(checkpoint: Checkpoint, name: str) -> Stored:
    """A tensor of the file, or one that is drawn."""
    tensor = checkpoint.tensors[name]
    return Drawn(tensor) if isinstance(tensor, RandomTensor) else tensor


def _values(checkpoint: Checkpoint, name: str) -> Float[np.ndarray, "..."]:
    """Its weights, dequantized."""
    tensor = _source(checkpoint, name)
    return formats.values(tensor.format, tensor.data).reshape(tensor.shape)


def _in_formats(checkpoint: Checkpoint, chosen: Mapping[str, str]) -> Checkpoint:
    """The checkpoint as if its tensors had these formats: names and shapes, no weights."""
    tensors = {
        t.name: RandomTensor(
            t.name, chosen[t.name], t.shape, 0, 0.0, 0.0, tensor_nbytes(chosen[t.name], t.shape)
        )
        for t in checkpoint.tensors.values()
    }
    return dataclasses.replace(checkpoint, tensors=tensors)


def _check_trainable(description: Description, chosen: Mapping[str, str]) -> None:
    """Raise NotImplementedError for what cannot be trained and written again."""
    if description.folding is not None:
        raise NotImplementedError(
            f"{description.source}: its weights are stored rotated (Hadamard-folded), which training does "
            "not support; start from the file before it was folded"
        )
    for _, t in description.sources:
        if not isinstance(t, Drawn):
            raise NotImplementedError(
                f"{description.source}: {t.name} is a part of another tensor of the file, which training "
                "does not support; supported are files with a tensor for each matrix"
            )
        if not hasattr(formats.get(chosen[t.name]), "quantize"):
            raise NotImplementedError(
                f"{description.source}: {t.name} is {chosen[t.name]}, which has no encoder, or none without "
                'an importance matrix; give another by tensor_formats, such as [("' + t.name + '", "q8_0")]'
            )
