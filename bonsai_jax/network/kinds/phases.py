"""Parts of a kind's block that can run alone, so that measure/profile.py can time each over all layers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from bonsai_jax.network.kinds.place import Place
from pallas_kernels import matmul


@dataclasses.dataclass(frozen=True)
class Product:
    """Products with a layer's weights.

    weights     names of the fields of the kind's Weights that it multiplies with
    run         (place, x) -> y, or (place, (h, x)) -> x + y where `inputs` is set
    inputs      width of h; None: `run` takes x alone, the stream
    share_read  tokens of a step -> the share of the weights' bytes that it reads
    each        products of a token with such a matrix
    """

    name: str
    weights: tuple[str, ...]
    run: Callable[[Place, Any], jax.Array]
    inputs: int | None = None
    share_read: Callable[[int], float] = lambda tokens: 1.0
    each: int = 1


@dataclasses.dataclass(frozen=True)
class Mixing:
    """What a mixer does between its projections; its settings give the bytes (`bytes_read`) and the
    arithmetic (`operations`).

    width  of what its first projections make of a token
    run    (projections, place, state, workspace) -> (output, state, workspace)
    """

    name: str
    width: int
    run: Callable[..., tuple[jax.Array, Any, Any]]


def output_product(name: str, weight: str, inputs: int) -> Product:
    """A block's last product, to which x is added."""

    def run(place: Place, both: tuple[jax.Array, jax.Array]) -> jax.Array:
        return matmul(both[0], getattr(place.weights, weight), place.index, residual=both[1])

    return Product(name, (weight,), run, inputs)
