"""What the block of a kind is given beside its input: where it runs, and the products that blocks share."""

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bonsai_jax.network.rope import Rope
from pallas_kernels import LayerStack, layer_norm, matmul, rms_norm
from pallas_kernels.attention import EXACT
from pallas_kernels.attention import TAPS as KERNEL_TAPS
from pallas_kernels.matmul import sent_product
from pallas_kernels.qtensor import leaves

type Tap = Callable[[jax.Array], jax.Array]

PREFILL_SUMS = jnp.bfloat16  # between GPUs, after GEMMs that round anyway: half of what they exchange
STEP_TOKENS = 8  # most tokens of a sequence in a decode step (decoding/speculation.py): more are prefill
NO_TAPS: Mapping[str, Tap] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a block runs.

    settings   of the kind, in this layer
    weights    of its group (the kind's Weights)
    group      number of its group (ModelConfig.groups)
    index      of the layer in the group's stacks; may be traced
    eps        of norms
    positions  int32 [B, T], of each token in its sequence; -1 for padding
    rotations  cosine and sine of the angles at these positions, for each Rope of the model
    num_keys   keys that attention visits: 1 + the largest position, or a bound known while tracing; None:
               those of the tokens at hand, and none are stored
    block_table  int32 [B, pages per row], the pages of each sequence (KVCache); None for what has none
    axis       the mesh axis over which matrices are split; None: they are whole
    peers      where devices write into each other's memory (Params.peers)
    taps       what reads or edits values on their way (network/taps.py)
    residual_scale  what a block adds to its input is multiplied by it
    updates    where given, recurrent state is left as it is, and what would change it is put here, for
               the kind's `replay`, in arrays [sequences, their tokens, ...]
    layer_norm  norms subtract the mean first (ModelConfig.layer_norm)
    start      what a half reads where that is not x: the layer's input, which several halves read (Layer)
    source     the state, and the index in it, of the layer whose keys and values a mixer reads in place of
               its own; None: it has its own
    layer_vectors  of each token for each layer (network/layer_vectors.py); None: there are none
    tokens     so many neighbouring rows of one token each are one sequence's (decoder.py): of the same pages,
               at positions one after another, -1 behind them
    """

    settings: Any
    weights: Any
    group: int
    index: int | Int[Array, ""]
    eps: float
    positions: Int[Array, "B T"]
    rotations: Mapping[Rope, tuple[Float[Array, "B T R"], Float[Array, "B T R"]]]
    num_keys: int | Int[Array, ""] | None
    block_table: Int[Array, "B pages_per_row"] | None = None
    axis: str | None = None
    peers: jax.Array | None = None
    taps: Mapping[str, Tap] = NO_TAPS
    residual_scale: float = 1.0
    updates: dict[str, Any] | None = None
    layer_norm: bool = False
    start: jax.Array | None = None
    source: Any = None
    layer_vectors: Float[Array, "B T layers P"] | None = None
    tokens: int = 1

    def tapped(self, name: str, x: jax.Array) -> jax.Array:
        """x, through the tap of this name if there is one."""
        return self.taps[name](x) if name in self.taps else x

    def gamma(self, norms: Float[Array, "L H"] | None) -> dict[str, Any]:
        """The norm of a product's input, as arguments of `matmul`; none for None."""
        return {} if norms is None else {"gamma": norms, "eps": self.eps, "layer_norm": self.layer_norm}

    def read(self, x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        """What a half of a layer computes from, where its result is added to x."""
        return x if self.start is None else self.start

    def norm(
        self, x: Float[Array, "*batch D"], norms: Float[Array, "L *heads D"], *, split: bool = False
    ) -> Float[Array, "*batch D"]:
        """norm(x) along the last axis, by the layer's weights; split: each device has a part of that axis."""
        gamma = norms[self.index]
        if not split or self.axis is None:
            return (layer_norm if self.layer_norm else rms_norm)(x, gamma, self.eps)

        def mean(x: jax.Array) -> jax.Array:
            return jax.lax.pmean(jnp.mean(x, axis=-1, keepdims=True), self.axis)

        x = x - mean(x) if self.layer_norm else x
        return gamma * (x * jax.lax.rsqrt(mean(jnp.square(x)) + self.eps))


def each_layer(
    replay: Callable[[dict[str, jax.Array], Place, Any], Any],
    updates: Mapping[str, Float[Array, "L B T ..."]],
    place: Place,
    state: Any,
) -> Any:
    """A kind's state after replay(updates, place, state) of one layer after the other."""

    def layer(state, each):
        index, own = each
        return replay(own, dataclasses.replace(place, index=index), state), None

    count = len(next(iter(updates.values())))
    return jax.lax.scan(layer, state, (jnp.arange(count), dict(updates)))[0]


def joined_product(
    x: jax.Array, weights: tuple[LayerStack, ...], place: Place, norms: Float[Array, "L H"] | None
) -> jax.Array:
    """Products of the same normed input, side by side."""
    y = [matmul(x, weight, place.index, **place.gamma(norms)) for weight in weights]
    return y[0] if len(y) == 1 else jnp.concatenate(y, axis=-1)


def add_product(
    x: jax.Array,
    h: jax.Array,
    weight: LayerStack,
    place: Place,
    tap: str,
    post_norm: Float[Array, "L H"] | None,
    sub_norm: Float[Array, "L K"] | None = None,
    bias: Float[Array, "L H"] | None = None,
) -> jax.Array:
    """x + tap(residual_scale post_norm(sub_norm(h) W.T + bias)), with the norms and the bias that there are.
    Where inputs of W are split over devices, each has a part of the product, and x and the bias are added to
    their sum once."""
    edits = post_norm is not None or bias is not None or place.residual_scale != 1 or tap in place.taps
    if sub_norm is not None and place.axis is not None:
        h, sub_norm = place.norm(h, sub_norm, split=True), None
    if place.axis is None and not edits:
        return matmul(h, weight, place.index, residual=x, **place.gamma(sub_norm))
    if place.peers is not None and not edits and x.shape[-2] == 1:  # a decode step: latency is all
        from pallas_kernels import all_reduce  # only GPUs need it

        if all_reduce.refuses(x.size) is None:
            peers = place.peers[0, 0]
            return all_reduce.receive(x, sent_product(h, weight, place.index, peers), peers)
    y = matmul(h, weight, place.index, **place.gamma(sub_norm))
    return add(x, y, rounds(x, weight), place, tap, post_norm, bias)


def rounds(x: jax.Array, weight: LayerStack) -> bool:
    """Whether these are many tokens whose product with a weight was rounded anyway."""
    return x.shape[-2] > STEP_TOKENS and all(
        w.products.kernel(x.size // x.shape[-1]) not in ("reference", "cpu") for w in leaves(weight)
    )


def add(
    x: jax.Array,
    y: jax.Array,
    rounded: bool,
    place: Place,
    tap: str,
    post_norm: Float[Array, "L H"] | None = None,
    bias: Float[Array, "L H"] | None = None,
) -> jax.Array:
    """x + tap(residual_scale norm(y + bias)); where each device has a part of y, after the sum of the
    parts."""
    return add_whole(x, summed(y, rounded, place), place, tap, post_norm, bias)


def summed(y: jax.Array, rounded: bool, place: Place) -> jax.Array:
    """y, or the sum of the parts that devices have of it."""
    if place.axis is None:
        return y
    return jax.lax.psum(y.astype(PREFILL_SUMS) if rounded else y, place.axis).astype(jnp.float32)


def add_whole(
    x: jax.Array,
    y: jax.Array,
    place: Place,
    tap: str,
    post_norm: Float[Array, "L H"] | None = None,
    bias: Float[Array, "L H"] | None = None,
) -> jax.Array:
    """`add` of a y that every device has whole."""
    y = y if bias is None else y + bias[place.index]
    y = y if post_norm is None else place.norm(y, post_norm)
    x = x + place.tapped(tap, y if place.residual_scale == 1 else y * place.residual_scale)
    # Without the barrier, XLA adds all layers' sums anew in every layer.
    return x if place.axis is None else jax.lax.optimization_barrier(x)


def temperatures(place: Place) -> Float[Array, "B T"] | None:
    """What queries are multiplied by: 1 + f ln(floor(position / L) + 1), where settings.temperature is
    (f, L); None where that is None."""
    if place.settings.temperature is None:
        return None
    factor, length = place.settings.temperature
    return 1 + factor * jnp.log((jnp.maximum(place.positions, 0) // length + 1).astype(jnp.float32))


def check_taps(place: Place, kernel: str) -> None:
    """Raise NotImplementedError for what cannot be tapped where `kernel` computes attention."""
    if kernel not in EXACT and (inner := [name for name in place.taps if name in KERNEL_TAPS]):
        raise NotImplementedError(
            f"Taps: {', '.join(inner)}: here the kernel {kernel} computes attention and keeps them to "
            f"itself; with it all but {', '.join(KERNEL_TAPS)} can be tapped. bj.forward has all, as has a "
            'model loaded with RunConfig(impl="reference")'
        )
