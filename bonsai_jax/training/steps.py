"""Steps of training, for any optimizer that has optax's two functions."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bonsai_jax.choices import Remat
from bonsai_jax.config import ModelConfig
from bonsai_jax.decoding.steps import forward
from bonsai_jax.network.params import Params
from bonsai_jax.training.losses import distillation_loss
from bonsai_jax.training.plans import TrainingPlan, Weights


class Optimizer(Protocol):
    """optax.GradientTransformation."""

    @property
    def init(self) -> Callable[..., Any]: ...
    @property
    def update(self) -> Callable[..., Any]: ...


# (weights, moments, teacher's params, tokens [B, T], lengths [B]) -> weights, moments, loss
Step = Callable[
    [Weights, Any, Params, Int[Array, "B T"], Int[Array, "B"]], tuple[Weights, Any, Float[Array, ""]]
]


def distillation_step(
    plan: TrainingPlan,
    optimizer: Optimizer,
    teacher: ModelConfig,
    *,
    temperature: float = 1.0,
    clip: float | None = None,
    remat: Remat = False,
) -> Step:
    """One step that trains a whole model on another model's predictions, jitted.

    loss = distillation_loss(forward(plan.rounded(weights)), forward(teacher)) at every token of a batch

    optimizer  one of optax's; its state starts as optimizer.init(weights)
    teacher    the config of a model with the same vocabulary; its params are an argument of the step
    clip       as for `pallas_kernels.straight_through`
    remat      as for `bj.forward`: True or "offload" for less memory, up to a third more arithmetic
    The step is (weights, moments, teacher_params, tokens, lengths) -> (weights, moments, loss), with tokens
    int32 [B, T], padded at the end. It donates weights and moments. Raises ValueError for another vocabulary.
    """
    if teacher.vocab_size != plan.config.vocab_size:
        raise ValueError(
            f"teacher has a vocabulary of {teacher.vocab_size} tokens, the model {plan.config.vocab_size}; "
            "distillation compares the probabilities of the same tokens"
        )

    def step(weights, moments, teacher_params, tokens, lengths):
        mask = jnp.arange(tokens.shape[1]) < lengths[:, None]
        goal, _ = forward(teacher_params, tokens, lengths, teacher)

        def loss(weights):
            params = plan.rounded(weights, clip=clip)
            logits, _ = forward(params, tokens, lengths, plan.config, remat=remat)
            return distillation_loss(logits, goal, mask, temperature)

        value, slope = jax.value_and_grad(loss)(weights)
        changes, moments = optimizer.update(slope, moments, weights)
        return jax.tree.map(jnp.add, weights, changes), moments, value

    return jax.jit(step, donate_argnums=(0, 1))
