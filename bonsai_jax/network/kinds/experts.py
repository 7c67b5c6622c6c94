"""Mixture of experts (Shazeer et al. 2017), which mixes the channels of each token (pallas_kernels/experts).

    x + sum of w_e W_down,e act(W_gate,e n, W_up,e n) over the chosen experts e,  n = norm(x)
    w, chosen = route(softmax(W_router n))

An architecture may set a sigmoid in place of the softmax, biases, and a shared expert that every token uses:

    + s W_down act(W_gate n, W_up n),  s = 1 or sigmoid(r n)

or norms that make of the shared expert a feed-forward beside the experts (Gemma 4):

    x + norm(norm(chosen experts of norm(x)) + norm(shared expert of norm(x))),  p = softmax(W_router norm(x))

Experts without a gate (the shared one too) compute W_down act(W_up n), as in kinds/plain_mlp.py.

Over a mesh each device has some of the experts and a part of the shared one, whose part of the sum it adds.
Padding chooses none.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from bonsai_jax.network.kinds.phases import Product
from bonsai_jax.network.kinds.place import Place, add, add_whole, rounds, summed
from bonsai_jax.weights.placement import Runs, even_runs
from bonsai_jax.weights.specs import Fused, Rows, Spec
from pallas_kernels import (
    LayerStack,
    experts_ffn,
    experts_gated,
    experts_matmul,
    gated,
    matmul,
    route,
    serializable,
)
from pallas_kernels.activations import SILU, Activation
from pallas_kernels.experts import (
    Normed,
    can_route,
    normed_logits,
    route_logits,
    routed_ffn,
)
from pallas_kernels.experts.routing import dot
from pallas_kernels.qtensor import leaves

PRODUCTS = ("gate", "up", "down")  # arrays that fused launches multiply with (network/fused.py)
FUSED = ("count", "used", "ffn", "normalized", "activation", "norm", "router")
SITES = ("router", "experts", "expert_weights", "hidden", "mlp")


@dataclasses.dataclass(frozen=True)
class Experts:
    """A layer's experts.

    count       how many there are
    used        how many each token uses, the likeliest
    ffn         width of the hidden vector of each
    normalized  whether the weights of those used are divided by their sum
    activation  of gate and up (pallas_kernels/activations.py)
    gating      what makes probabilities of the router's logits: a softmax over all experts, or a sigmoid of
                each. A softmax over those used alone is that over all, normalized
    scale       factor on weights
    groups, groups_used  a token's experts are of so many of so many groups (`route`)
    shared      width of the hidden vector of the shared expert; 0: there is none
    """

    count: int
    used: int
    ffn: int
    normalized: bool = True
    activation: Activation = SILU
    gating: Literal["softmax", "sigmoid"] = "softmax"
    scale: float = 1.0
    groups: int = 1
    groups_used: int = 1
    shared: int = 0

    kind = "experts"

    def __post_init__(self):
        if not 1 <= self.used <= self.count:
            raise ValueError(f"model config: {self.used} of {self.count} experts are used for a token")
        if self.count % self.groups or not 1 <= self.groups_used <= self.groups:
            raise ValueError(
                f"model config: {self.groups_used} of {self.groups} groups of {self.count} experts are used; "
                "groups must be of one size"
            )
        if self.used > (room := self.count // self.groups * self.groups_used):
            raise ValueError(f"model config: {self.used} experts are used, of groups that have {room}")

    def for_device(self, parts: int) -> "Experts":
        return self  # a token chooses among all of them

    def runs(self, axis: str, parts: int) -> Runs:
        """Which experts each device has, or which part of the shared one's hidden vector."""
        return even_runs(self.shared if axis == "shared" else self.count, parts)

    def refuses_split(self, parts: int) -> str | None:
        """Why `parts` devices cannot share its experts, or None."""
        if self.shared % parts:
            return f"a shared expert of {self.shared} does not split evenly"
        return f"{self.count} experts do not split evenly" if self.count % parts else None

    def share_read(self, tokens: int) -> float:
        """The share of a layer's experts that so many tokens use, were all equally likely."""
        return 1 - (1 - self.used / self.count) ** tokens


def _gate_up(index: int) -> Fused:
    """Gate and up of all experts in one tensor, gate first."""

    def rows(e: Experts) -> Rows:
        return Rows(1, 2 * e.ffn, ((index * e.ffn, (index + 1) * e.ffn),))

    return Fused("ffn_gate_up_exps.weight", "mlp.experts.gate_up_proj", rows)


TENSORS = {
    spec.field: spec
    for spec in (
        Spec("norm", "ffn_norm.weight", "post_attention_layernorm.weight", ("hidden",)),
        Spec("router", "ffn_gate_inp.weight", "mlp.gate.weight", ("count", "hidden")),
        Spec("gate", "ffn_gate_exps.weight", "mlp.experts.{}.gate_proj.weight", ("count", "ffn", "hidden"),
             ("experts", None, None), half_of="up", fused=_gate_up(0)),
        Spec("up", "ffn_up_exps.weight", "mlp.experts.{}.up_proj.weight", ("count", "ffn", "hidden"),
             ("experts", None, None), half_of="gate", fused=_gate_up(1)),
        Spec("down", "ffn_down_exps.weight", "mlp.experts.{}.down_proj.weight", ("count", "hidden", "ffn"),
             ("experts", None, None), fused=Fused(None, "mlp.experts.down_proj")),
        Spec("router_bias", "ffn_gate_inp.bias", "mlp.gate.bias", ("count",)),
        Spec("choice_bias", "exp_probs_b.bias", "mlp.gate.e_score_correction_bias", ("count",),
             plain=True),
        Spec("gate_bias", "ffn_gate_exps.bias", "mlp.experts.{}.gate_proj.bias", ("count", "ffn"),
             ("experts", None), plain=True),
        Spec("up_bias", "ffn_up_exps.bias", "mlp.experts.{}.up_proj.bias", ("count", "ffn"),
             ("experts", None), plain=True),
        Spec("down_bias", "ffn_down_exps.bias", "mlp.experts.{}.down_proj.bias", ("count", "hidden"),
             ("experts", None), plain=True),
        Spec("shared_gate", "ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight",
             ("shared", "hidden"), ("shared", None), half_of="shared_up"),
        Spec("shared_up", "ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight", ("shared", "hidden"),
             ("shared", None), half_of="shared_gate"),
        Spec("shared_down", "ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight",
             ("hidden", "shared"), (None, "shared")),
        Spec("router_norm", "ffn_gate_inp.scale", "router.scale", ("hidden",)),
        Spec("down_scale", "ffn_down_exps.scale", "router.per_expert_scale", ("count",)),
        Spec("shared_norm", "ffn_norm.weight", "pre_feedforward_layernorm.weight", ("hidden",)),
        Spec("shared_post_norm", "post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight",
             ("hidden",)),
        Spec("chosen_post_norm", "post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight",
             ("hidden",)),
        Spec("post_norm", "post_ffw_norm.weight", "post_feedforward_layernorm.weight", ("hidden",)),
        Spec("shared_router", "ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", ("hidden",),
             plain=True, huggingface_shape=(1, "hidden")),
    )
}  # fmt: skip


@serializable
class Weights(struct.PyTreeNode):
    """Weights of the layers of a group; gate, up and down are stacked over experts too.

    gate        None: experts have no gate, nor has the shared one
    router_bias  added to the router's logits
    choice_bias  added to probabilities for the choice alone
    gate_bias, up_bias, down_bias   of each expert's products; all three or none
    shared_gate, shared_up, shared_down   the shared expert, which every token uses
    shared_router  of the sigmoid by which its output is multiplied; None: it is added as it is
    router_norm  of the router's input, which is x then, divided by sqrt(H); None: it is that of the experts
    down_scale  of each expert: a factor on its output
    shared_norm, shared_post_norm, chosen_post_norm, post_norm  of the shared expert's input and output, of
                the chosen experts' output, and of the sum of both outputs; all four or none
    """

    norm: Float[Array, "L H"]
    router: LayerStack
    up: LayerStack
    down: LayerStack
    gate: LayerStack | None = None
    router_bias: Float[Array, "L E"] | None = None
    choice_bias: Float[Array, "L E"] | None = None
    gate_bias: Float[Array, "L E F"] | None = None
    up_bias: Float[Array, "L E F"] | None = None
    down_bias: Float[Array, "L E H"] | None = None
    shared_gate: LayerStack | None = None
    shared_up: LayerStack | None = None
    shared_down: LayerStack | None = None
    shared_router: Float[Array, "L H"] | None = None
    router_norm: Float[Array, "L H"] | None = None
    down_scale: Float[Array, "L E"] | None = None
    shared_norm: Float[Array, "L H"] | None = None
    shared_post_norm: Float[Array, "L H"] | None = None
    chosen_post_norm: Float[Array, "L H"] | None = None
    post_norm: Float[Array, "L H"] | None = None


def block(x: Float[Array, "B T H"], place: Place, state: None, workspace):
    """A mixture of experts and its residual: x; no state, and the workspace as it is."""
    w, read, rounded = place.weights, place.read(x), rounds(x, place.weights.down)
    made = _normed(place, read)
    if _in_two_launches(place, x):
        return add(x, _routed(place, made), rounded, place, "mlp"), state, workspace
    y = _chosen_experts(place, made)
    if w.shared_norm is not None:
        beside = _shared_expert(place, place.norm(read, w.shared_norm), made.row, jnp.zeros_like(y))
        y = place.norm(summed(y, rounded, place), w.chosen_post_norm)
        y = y + place.norm(summed(beside, rounded, place), w.shared_post_norm)
        return add_whole(x, y, place, "mlp", w.post_norm), state, workspace
    if w.shared_up is not None:
        y = _shared_expert(place, made.normed, made.row, y)
    return add(x, y, rounded, place, "mlp"), state, workspace


def _normed(place: Place, read: Float[Array, "B T H"]) -> Normed:
    """The norm of the experts' input, the router's logits, and that of the shared expert's sigmoid."""
    w, layer, eps = place.weights, place.index, place.eps
    if w.router_norm is None and not place.layer_norm:
        rows = {"bias": w.router_bias, "row": w.shared_router}
        return normed_logits(read, w.norm, w.router, layer, eps=eps, kernel=_kernel(w), **rows)
    n = place.norm(read, w.norm)
    routed = n if w.router_norm is None else place.norm(read, w.router_norm) * read.shape[-1] ** -0.5
    logits = matmul(routed, w.router, layer)
    logits = logits if w.router_bias is None else logits + w.router_bias[layer]
    return Normed(n, logits, None if w.shared_router is None else dot(n, w.shared_router[layer]))


def _kernel(w: Weights) -> str:
    """That which multiplies one row with an expert's matrix."""
    return leaves(w.down)[0].products.kernel(1)


def _rules(sizes: Experts) -> dict[str, Any]:
    """Of `route`."""
    names = "normalized", "scale", "groups", "groups_used"
    return {name: getattr(sizes, name) for name in names}


def _shared(w: Weights) -> tuple[LayerStack | None, ...] | None:
    return None if w.shared_up is None else (w.shared_gate, w.shared_up, w.shared_down)


def _in_two_launches(place: Place, x: Float[Array, "B T H"]) -> bool:
    """Whether few tokens' experts, with the shared one, run by `routed_ffn`."""
    w, sizes = place.weights, place.settings
    apart = (w.shared_norm, w.gate_bias, w.down_scale, place.axis)
    if any(part is not None for part in apart) or not place.taps.keys() <= {"mlp"}:
        return False
    tokens = x.size // x.shape[-1]
    return can_route((w.gate, w.up, w.down), _shared(w), place.index, tokens, sizes.used, sizes.groups)


def _routed(place: Place, made: Normed) -> Float[Array, "B T H"]:
    w, sizes = place.weights, place.settings
    stacks = w.gate, w.up, w.down
    return routed_ffn(
        made, place.positions, stacks, _shared(w), place.index, sizes.used, biases=w.choice_bias,
        activation=sizes.activation, gating=sizes.gating, **_rules(sizes),
    )  # fmt: skip


def _chosen_experts(place: Place, made: Normed) -> Float[Array, "B T H"]:
    """What each token's experts make of it, those that this device has."""
    w, sizes, layer, n = place.weights, place.settings, place.index, made.normed
    rules = _rules(sizes) | {"bias": None if w.choice_bias is None else w.choice_bias[layer]}
    if not place.taps.keys().isdisjoint(("router", "experts", "expert_weights")):
        softmax = functools.partial(jax.nn.softmax, axis=-1)
        probabilities = (jax.nn.sigmoid if sizes.gating == "sigmoid" else softmax)(made.logits)
        weights, chosen = route(place.tapped("router", probabilities), sizes.used, **rules)
        chosen = place.tapped("experts", chosen)
        chosen = jnp.where(place.positions[..., None] >= 0, chosen, -1)
    else:
        rules |= {"gating": sizes.gating, "kernel": _kernel(w)}
        weights, chosen = route_logits(made.logits, place.positions, sizes.used, **rules)
    weights = weights if w.down_scale is None else weights * w.down_scale[layer][chosen]
    weights = place.tapped("expert_weights", weights)
    if place.axis is not None:
        count = sizes.count // jax.lax.axis_size(place.axis)
        first = jax.lax.axis_index(place.axis) * count
        chosen = jnp.where((chosen >= first) & (chosen < first + count), chosen - first, -1)
    biases = None
    if w.gate_bias is not None:
        biases = w.gate_bias[layer], w.up_bias[layer], w.down_bias[layer]
    how = {"activation": sizes.activation}
    if "hidden" not in place.taps:
        return experts_ffn(n, w.gate, w.up, w.down, chosen, weights, layer, biases=biases, **how)
    hidden = experts_gated(n, w.gate, w.up, chosen, layer, biases=biases and biases[:2], **how)
    hidden = place.tapped("hidden", hidden)
    return experts_matmul(hidden, w.down, chosen, weights, layer, biases and biases[2])


def _shared_expert(
    place: Place, n: Float[Array, "B T H"], logit: Float[Array, "B T"] | None, y: Float[Array, "B T H"]
) -> Float[Array, "B T H"]:
    """y plus what the shared expert makes of each token, or this device's part of that; logit: of the sigmoid
    by which it is multiplied."""
    w, layer = place.weights, place.index
    activation = place.settings.activation
    if w.shared_gate is None:
        hidden = activation(matmul(n, w.shared_up, layer), 1.0)
    else:
        hidden = gated(n, w.shared_gate, w.shared_up, layer, activation=activation)
    if logit is not None:
        hidden = jax.nn.sigmoid(logit)[..., None] * hidden
    return matmul(hidden, w.shared_down, layer, residual=y)


def phases(settings: Experts) -> tuple[Product, ...]:
    """The parts of `block` that measure/profile.py times."""

    def products(place: Place, x: Float[Array, "B T H"]):
        """Each token's experts are others than its neighbours', and than the layer's before."""
        token = jnp.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], 1)
        stride = max(1, settings.count // settings.used)
        chosen = (place.index + token + stride * jnp.arange(settings.used)) % settings.count
        weights = jnp.full(chosen.shape, 1 / settings.used)
        own, gate = place.weights, {"activation": settings.activation}
        hidden = experts_gated(x, own.gate, own.up, chosen, place.index, **gate)
        return experts_matmul(hidden, own.down, chosen, weights, place.index)

    shared = ("shared_gate", "shared_up", "shared_down")

    def shared_expert(place: Place, x: Float[Array, "B T H"]):
        logit = None if place.weights.shared_router is None else x[..., 0]
        return _shared_expert(place, x, logit, jnp.zeros_like(x))

    return (
        Product("router", ("router",), lambda place, x: matmul(x, place.weights.router, place.index)),
        Product(
            "experts", ("gate", "up", "down"), products, share_read=settings.share_read, each=settings.used
        ),
        *((Product("shared expert", shared, shared_expert),) if settings.shared else ()),
    )
