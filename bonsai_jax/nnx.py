"""A loaded model as a Flax NNX module, for those whose adapters, optimizers and checkpoints are NNX's.

    from flax import nnx
    from bonsai_jax.nnx import LanguageModel

    module = LanguageModel(bj.load("model.gguf"))
    graphdef, state = nnx.split(module)    # state["weights"]["layers"]["mlp"]["0"]["up"]["parts"]["0"] ...
    logits, _ = nnx.jit(lambda module, tokens: module(tokens), graph_updates=False)(module, tokens)

It is a view: its variables are the arrays of `Model.params`, without a copy. Their type is `Weight` rather
than nnx.Param, because bits cannot be trained: nnx.grad and nnx.Optimizer with wrt=nnx.Param see only the
parameters that a module around this one adds.

graph_updates=False (flax 0.12) does not change the result. But by default nnx.jit returns every variable of
its arguments, changed or not, and so copies all weights on the device at each call.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import DictKey, GetAttrKey, SequenceKey
from jaxtyping import Array, Float, Int

from bonsai_jax.decoding import steps as core
from bonsai_jax.model import Model
from bonsai_jax.network.params import Params
from bonsai_jax.network.taps import Taps


class Weight(nnx.Variable):
    """One array of a frozen model: integers or scales of a quantized matrix, or the weights of a norm."""


class LanguageModel(nnx.Module):
    """The weights of a model as nnx variables, nested as `Params` is.

    weights  nnx.Dict, ["layers"]["mlp"]["0"]["up"]["parts"]["0"]["fields"]["qs"] and so on: Params' fields by
             name, tuples by number
    config   ModelConfig
    """

    def __init__(self, model: Model):
        self.config = model.config
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(model.params)
        self._paths = tuple(tuple(map(_name, path)) for path, _ in leaves)
        self.weights = nnx.Dict()
        for path, (_, array) in zip(self._paths, leaves, strict=True):
            self._folder(path)[path[-1]] = Weight(array)

    @property
    def params(self) -> Params:
        """The same arrays as Params, which `bj.prefill`, `bj.step`, `bj.decode` and `bj.embed` take."""
        arrays = [self._folder(path)[path[-1]].get_value() for path in self._paths]
        return jax.tree.unflatten(self._tree, arrays)

    def __call__(
        self,
        tokens: Int[Array, "B T"] | Float[Array, "B T H"],
        lengths: Int[Array, "B"] | None = None,
        *,
        taps: Taps | None = None,
    ) -> tuple[Float[Array, "B T V"], dict[str, Float[Array, "L B ..."]]]:
        """Logits after every token, and the activations that taps read: steps.forward. lengths: None: whole
        rows."""
        lengths = jnp.full(tokens.shape[0], tokens.shape[1]) if lengths is None else lengths
        return core.forward(self.params, tokens, lengths, self.config, taps=taps)

    def _folder(self, path: tuple[str, ...]) -> Any:
        """The nnx.Dict that holds the last name of a path, made if it does not exist."""
        folder = self.weights
        for name in path[:-1]:
            if name not in folder:
                folder[name] = nnx.Dict()
            folder = folder[name]
        return folder


def _name(key: Any) -> str:
    match key:
        case GetAttrKey(name=name):
            return name
        case DictKey(key=name) | SequenceKey(idx=name):
            return str(name)
    raise TypeError(f"Params holds a {type(key).__name__}; this view knows attributes, dicts and tuples")
