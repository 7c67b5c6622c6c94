"""How exactly products are made: by references, and by kernels that round activations to integers."""

import jax

from pallas_kernels import formats

EXACT = jax.lax.Precision.HIGHEST
FEW_ROWS = 8  # of activations, at most


def few_rows_bits(platform: str, format: str, bits: int) -> int:
    """To which kernels round what a feed-forward's down reads, for up to FEW_ROWS rows, where other
    activations are rounded to `bits`: 16 for weights of 1 bit on a GPU.

    128 columns share a scale there, and a gate leaves a few large numbers among many small ones. So rounding
    these inputs to 8 bits takes a model further from its exact weights than all other rounding together
    (docs/accuracy.md). 16 bits for them alone cost 1.5 % of a step with one row, 4 to 7 % with 4 to 8
    (LOG.md, 2026-11-30).
    """
    return 16 if platform.startswith("sm_") and formats.family(format) == "bit" else bits


def bits_for(rows: int, bits: int, few_rows_bits: int | None) -> int:
    """To which this number of rows of activations are rounded; few_rows_bits None: to `bits` in any case."""
    return few_rows_bits if few_rows_bits and rows <= FEW_ROWS else bits


def multiply_precision() -> jax.lax.Precision | None:
    """The `precision` of a reference's products: HIGHEST, or what the caller has set for all of JAX.

    HIGHEST, because a GPU's default for float32 is TF32 with 10 bits of mantissa. Training sets another:

        with jax.default_matmul_precision("BF16_BF16_F32"):      # bfloat16 on tensor cores, float32 sums
            weights, moments, loss = step(weights, moments, batch)

    The gradients of a product have its precision. None leaves the choice to JAX's setting. CPUs multiply
    float32 whatever it says.
    """
    return EXACT if jax.config.jax_default_matmul_precision is None else None
