"""The draw of a token for every row."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.sampling import reference
from pallas_kernels.sampling.rules import Rules


def draw(
    logits: Float[Array, "B V"], rules: Rules, words: UInt32[Array, "B 2"], *, impl: str = "reference"
) -> Int[Array, "B"]:
    """The next token of each row.

    token = argmax over what truncation keeps of  x / temperature + noise,  x the logit after penalties and
    biases, in the order in which Rules has them: top-k, top-p of what that leaves, min-p

    logits  float32
    words   key of the row's noise at this position: a token's noise is -log(-log u), its u is made of these
            words and its id alone (Threefry-2x32 of the id), so a row is drawn the same in any batch
    impl    "two_launches" (kernel.py) or "reference"
    Returns int32. Of equal scores the lowest id wins. Under vmap kernels are launched once for each entry.

    A token stays if fewer than k are likelier, and if those that are have less than p of the sum: so ties
    stay or go together, and nothing needs to be sorted.
    """
    if impl == "reference":
        return reference.draw(logits, rules, words)
    from pallas_kernels.sampling.kernel import draw as kernel  # only GPUs need it

    return jax.custom_batching.sequential_vmap(kernel)(logits.astype(jnp.float32), rules, words)
