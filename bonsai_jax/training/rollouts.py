"""Log-probabilities of sampled tokens as the programs that sampled them have them, for training."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bonsai_jax.config import ModelConfig, RunConfig
from bonsai_jax.decoding import sampling, steps
from bonsai_jax.network import cache as kv
from bonsai_jax.network.params import Params


def rollout_logprobs(
    params: Params, tokens: Int[Array, "B T"], lengths: Int[Array, "B"], config: ModelConfig, run: RunConfig
) -> Float[Array, "B T-1"]:
    """log p of each token but the first, given those before it, by the kernels of `bj.generate` and engines.

    `bj.forward` runs the reference attention, whose rounding is another; 8-bit activations amplify that. On a
    CPU with the extra `cpu` and packed weights, these have the bits of Logprobs.token, whatever the rows
    and chunks of the engine (docs/training.md). This is a prefill, without derivatives: `with_values` takes
    those of `forward`.

    params, config, run   the model's, as the engine has it: model.params, model.config, model.run
    tokens, lengths       whole texts, prompt and answer, padded at the end; values of padding mean nothing
    """
    cache = kv.empty(config, run, *tokens.shape, rewinds=True)
    logits, _ = steps.extend(params, cache, tokens, lengths, config)
    scores = sampling.log_softmax(logits[:, :-1])
    return jax.lax.stop_gradient(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0])


@jax.custom_jvp
def with_values(x: Float[Array, "..."], values: Float[Array, "..."]) -> Float[Array, "..."]:
    """values, to the bit, with the derivatives of x.

    With x = token_logprobs of `bj.forward` and values = rollout_logprobs, the ratio of these probabilities to
    those that an engine returned is exactly 1 while the weights are the same.
    """
    return values


@with_values.defjvp
def _with_values_derivative(primals, tangents):
    return with_values(*primals), tangents[0]
