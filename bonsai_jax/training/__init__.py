"""Training of models whose weights are packed: float weights by tensor name, rounded in the forward pass
(plans), losses, and steps. The rounding is pallas_kernels.straight_through."""

from bonsai_jax.training.losses import cross_entropy, distillation_loss, token_logprobs
from bonsai_jax.training.plans import TrainingPlan, Weights, plan
from bonsai_jax.training.rollouts import rollout_logprobs, with_values
from bonsai_jax.training.steps import distillation_step

__all__ = [
    "TrainingPlan",
    "Weights",
    "cross_entropy",
    "distillation_loss",
    "distillation_step",
    "plan",
    "rollout_logprobs",
    "token_logprobs",
    "with_values",
]
