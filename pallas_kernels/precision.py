"""How exactly references multiply float32."""

import jax

EXACT = jax.lax.Precision.HIGHEST


def multiply_precision() -> jax.lax.Precision | None:
    """The `precision` of a reference's products: HIGHEST, or what the caller has set for all of JAX.

    HIGHEST, because a GPU's default for float32 is TF32 with 10 bits of mantissa. Training sets another:

        with jax.default_matmul_precision("BF16_BF16_F32"):      # bfloat16 on tensor cores, float32 sums
            weights, moments, loss = step(weights, moments, batch)

    The gradients of a product have its precision. None leaves the choice to JAX's setting. CPUs multiply
    float32 whatever it says.
    """
    return EXACT if jax.config.jax_default_matmul_precision is None else None
