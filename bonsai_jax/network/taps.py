"""Where activations can be read and edited on their way through a layer."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax

from bonsai_jax import arguments
from bonsai_jax.network import kinds
from bonsai_jax.network.kinds.place import Tap

STREAM = ("input", "attention", "middle", "mlp", "output")
_INNER = dict.fromkeys(site for name in kinds.NAMES for site in kinds.get(name).SITES if site not in STREAM)
SITES = (*STREAM, *_INNER)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Taps:
    """Reads or edits activations on their way through each layer, by the names of `SITES`:

             input                     middle                output
        x -----+------------------ + ----+------------- + -----+----- x of the next layer
               '-> mixer           |     '-> channels   |
                     "attention" --'          "mlp" ----'

    float32, of B rows of T tokens each:

    input, middle, output   the residual stream [B, T, H]
    attention, mlp          what is added to it [B, T, H]
    q, k, v                 as projected, with bias, before QK-norm and rope [B, T, heads, D], where the heads
                            of k and v are the KV heads
    rot_q, rot_k            after QK-norm and rope [B, T, heads, D]; rot_k is what the cache holds
    scores                  of each query and key, scaled, -inf where masked [B, heads, T, keys]
    pattern                 attention weights, softmax(scores) [B, heads, T, keys]
    z                       pattern @ v, by head, before W_o [B, T, heads, D]
    hidden                  act(W_gate n) * (W_up n), without a gate act(W_up n), before W_down [B, T, F]; of
                            layers of experts that of each chosen one [B, T, used, F]
    router                  of layers of experts: probabilities of all [B, T, experts], before some are chosen
    experts                 the chosen ones, int32 [B, T, used], the likeliest first
    expert_weights          what each one's output is multiplied with [B, T, used]

    Layers whose tokens a gated delta net mixes have no q, k, v, rot_q, rot_k, scores, pattern and z; their
    "attention" is what the delta net adds. Latent attention has q, scores, pattern and z.

    Layers that read another layer's keys and values (Gemma 4 E2B and E4B) have no k, v and rot_k. In Gemma 4
    "output" is what comes after the layer's factor, and not "middle" plus "mlp".

    read   names whose values are returned (edited ones), stacked over the layers that have them; ValueError
           where these have them in different shapes, as Gemma 4's heads are
    edit   (name, layer, x) -> x, called while the layers are traced; `layer` may be traced
    at     names that `edit` is called for; those of the residual stream and what is added to it, unless given
    layers  number of the layer, or of the layers, that are read and edited; None: all
    inputs  whether sums of squares of the matrices' inputs are returned too (network/inputs.py), of which
            `bj.importance` makes importance matrices

    Nothing is done or kept where there are no taps. rot_q, rot_k, scores and pattern are what a kernel of
    attention keeps to itself: they exist where attention is the reference, as in `bj.forward` everywhere.
    Scores and pattern are of all keys at once, memory that attention otherwise does without.
    Raises ValueError for a name that is not a site.
    """

    read: frozenset[str] = frozenset()
    edit: Callable[[str, int | jax.Array, jax.Array], jax.Array] | None = None
    at: frozenset[str] = frozenset(STREAM)
    layers: frozenset[int] | None = None
    inputs: bool = False

    def __post_init__(self):
        for field in ("read", "at"):
            names = getattr(self, field)
            names = (names,) if isinstance(names, str) else names
            if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
                raise TypeError(f"Taps: {field} is {arguments.shown(names)}; give names of sites")
            names = frozenset(names)
            object.__setattr__(self, field, names)
            if unknown := sorted(names - set(SITES)):
                raise ValueError(f"Taps: {field} names {unknown[0]!r}; there are {', '.join(SITES)}")
        if self.edit is not None:
            arguments.function("Taps: edit", self.edit)
        if self.layers is not None:
            object.__setattr__(self, "layers", _layer_numbers(self.layers))

    @property
    def used(self) -> frozenset[str]:
        """Sites at which something is read or edited."""
        used = self.read if self.edit is None else self.read | self.at
        # A kernel of experts keeps to itself what "down" is multiplied with, unless that is tapped.
        return used | {"hidden"} if self.inputs else used

    def taps_layer(self, layer: int) -> bool:
        """Whether something is read or edited in this layer."""
        return bool(self.used) and (self.layers is None or layer in self.layers)

    def check_layers(self, count: int) -> None:
        """Raise ValueError where `layers` has numbers beyond the `count` layers that run."""
        if self.layers and max(self.layers) >= count:
            raise ValueError(f"Taps: layers has {max(self.layers)}; the layers that run are 0 to {count - 1}")

    def for_layer(self, layer: int | jax.Array, read: dict[str, jax.Array]) -> dict[str, Tap]:
        """For each site in use x -> x, as edited; what is read is noted in `read`."""

        def tap(name: str, x: jax.Array) -> jax.Array:
            if self.edit is not None and name in self.at:
                x = _like(x, self.edit(name, layer, x), name)
            if name in self.read:
                read[name] = x
            return x

        return {name: functools.partial(tap, name) for name in SITES if name in self.used}


def _layer_numbers(layers: Any) -> frozenset[int]:
    """`layers` as a set. Raises TypeError or ValueError for what are no numbers of layers."""
    try:
        numbers = frozenset(map(operator.index, layers if isinstance(layers, Iterable) else (layers,)))
    except TypeError:
        raise TypeError(f"Taps: layers is {layers!r}; give numbers of layers, such as [0, 5]") from None
    if not numbers or min(numbers) < 0:
        raise ValueError(f"Taps: layers is {layers!r}; give one number or more, counted from 0")
    return numbers


def _like(x: jax.Array, edited: Any, name: str) -> jax.Array:
    """What `edit` returned, which must be an array like the one it was given."""
    if not isinstance(edited, jax.Array) or (edited.shape, edited.dtype) != (x.shape, x.dtype):
        got = f"{edited.dtype} {edited.shape}" if isinstance(edited, jax.Array) else repr(edited)
        raise ValueError(
            f"Taps: edit returned {got} for {name!r}; expected {x.dtype} {x.shape}, as it was given"
        )
    return edited
