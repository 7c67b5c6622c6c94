"""Per-layer embeddings: the vector that each token has for each layer (Gemma 4 E2B and E4B).

    e = (norm(W x / sqrt(H)) + sqrt(P) table[token]) / sqrt(2),   x: the token's scaled embedding

for all layers at once, with a norm over the P numbers of each layer. kinds/layer_output.py adds it to the
stream. The table is a matrix on the device like the embedding; each token reads one row.
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from bonsai_jax.config import ModelConfig
from bonsai_jax.weights.specs import Spec
from pallas_kernels import QTensor, matmul, rms_norm, serializable

SPECS = (
    Spec(
        "vector_table",
        "per_layer_token_embd.weight",
        "model.embed_tokens_per_layer.weight",
        ("vocab_size", "layer_vectors"),
    ),
    Spec(
        "vector_proj",
        "per_layer_model_proj.weight",
        "model.per_layer_model_projection.weight",
        ("layer_vectors", "hidden"),
    ),
    Spec(
        "vector_norm",
        "per_layer_proj_norm.weight",
        "model.per_layer_projection_norm.weight",
        ("layer_vector",),
    ),
)


@serializable
class LayerVectors(struct.PyTreeNode):
    """Weights of the tokens' vectors.

    table  a row for each token: its vectors for all layers side by side
    proj   of the scaled embedding, to as many
    norm   of each of these
    """

    table: QTensor
    proj: QTensor
    norm: Float[Array, "P"]


def layer_vectors(
    weights: LayerVectors, tokens: Int[Array, "B T"], x: Float[Array, "B T H"], config: ModelConfig
) -> Float[Array, "B T layers P"]:
    """The vectors of these tokens; x: their scaled embeddings. Errors as for `refuse_vectors`."""
    if jnp.issubdtype(tokens.dtype, jnp.floating):
        refuse_vectors(config)
    sizes = (*tokens.shape, config.num_layers, config.layer_vector)
    made = matmul(x, weights.proj).reshape(sizes) * config.hidden**-0.5
    looked_up = weights.table.rows(tokens).reshape(sizes) * config.layer_vector**0.5
    return (rms_norm(made, weights.norm, config.rms_norm_eps) + looked_up) * 2**-0.5


def refuse_vectors(config: ModelConfig) -> None:
    """Raises NotImplementedError, for vectors in place of tokens, where the model looks up token ids."""
    if config.layer_vector:
        raise NotImplementedError(
            f"vectors in place of tokens: {config.architecture} with per-layer embeddings looks tokens up by "
            "their ids in every layer; give token ids"
        )
