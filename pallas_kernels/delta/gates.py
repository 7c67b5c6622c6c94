"""What a layer's gates are made of."""

from typing import NamedTuple

from jaxtyping import Array, Float


class Gates(NamedTuple):
    """Gates that are still to be made: alpha, beta = rms_norm(x; gamma) weights^T. The kernel of one token
    makes them on its way.

    x        of the layer, not normed
    gamma    of each layer
    weights  float32, float16 or bfloat16: rows of alpha, then of beta
    """

    x: Float[Array, "B T H"]
    gamma: Float[Array, "L H"]
    weights: Float[Array, "L 2*Hv H"]
