"""Gated delta net (Yang et al. 2024), which mixes tokens through a state of fixed size
(pallas_kernels/delta).

x + W_out delta_net(W_qkv n, W_z n, W_alpha n, W_beta n),  n = norm(x)
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

from bonsai_jax.config import ModelConfig, RunConfig
from bonsai_jax.network.kinds import state as states
from bonsai_jax.network.kinds.phases import Mixing, Product, output_product
from bonsai_jax.network.kinds.place import Place, add_product, joined_product
from bonsai_jax.network.kinds.state import Room
from bonsai_jax.weights.placement import Runs
from bonsai_jax.weights.specs import Spec
from pallas_kernels import LayerStack, QTensor, delta, device, problems, selection, serializable
from pallas_kernels.delta import STEP_TOKENS, Gates
from pallas_kernels.zeros import zeros

PRODUCTS = ("inputs", "out")  # arrays that fused launches multiply with (network/fused.py)
FUSED = (
    "k_heads", "v_heads", "k_dim", "v_dim", "conv", "grouped",
    "norm", "gates", "conv_weights", "dt", "decay", "head_norm",
)  # fmt: skip
MIXED = ()
SITES = ()  # only what it adds to x, "attention"
ADAPTED = ("qkv", "z", "alpha", "beta", "out")  # matrices that adapters change (network/adapter.py)


@dataclasses.dataclass(frozen=True)
class DeltaNet:
    """Sizes of a layer's gated delta net.

    k_heads, v_heads  heads of queries and keys, and of values; a k head serves v_heads / k_heads of them
    k_dim, v_dim      their widths
    conv              tokens that the convolution before it sees, the newest among them
    grouped           v head h uses k head h // (v_heads / k_heads), as in Hugging Face files; else, as in
                      GGUF files, h % k_heads
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv: int
    grouped: bool = False

    kind = "delta_net"

    def __post_init__(self):
        if self.v_heads % self.k_heads:
            raise ValueError(
                f"model config: {self.v_heads} v heads do not divide into {self.k_heads} k heads"
            )
        if self.conv < 2:
            raise ValueError(f"model config: the convolution sees {self.conv} tokens; supported: from 2 on")

    @property
    def v_width(self) -> int:
        return self.v_heads * self.v_dim

    @property
    def qkv_width(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.k_heads * self.k_dim + self.v_width

    @property
    def v_heads_tiled(self) -> tuple[int, int] | None:
        """(v heads of a k head, k heads) where v heads lie in tiled order; None: they are grouped."""
        return None if self.grouped else (self.v_heads // self.k_heads, self.k_heads)

    @property
    def output_width(self) -> int:
        """Inputs of W_out."""
        return self.v_width

    def for_device(self, parts: int) -> "DeltaNet":
        k_heads, v_heads = self.k_heads // parts, self.v_heads // parts
        return dataclasses.replace(self, k_heads=k_heads, v_heads=v_heads)

    def runs(self, axis: str, parts: int) -> Runs:
        """Which part of a logical axis each device has: some k heads, and the v heads that use them, which
        are neighbours where v heads are grouped, else some in each repetition.

        axis  "v heads": one number for each; "v width": v_dim of them; "qkv width": queries and keys before
              them
        """
        width = 1 if axis == "v heads" else self.v_dim
        repeats = 1 if self.grouped else self.v_heads // self.k_heads
        run = self.v_heads // repeats // parts * width  # of v heads that lie side by side
        counts = [run] * repeats
        starts = [[(r * parts + i) * run for r in range(repeats)] for i in range(parts)]
        if axis == "qkv width":
            k_run = self.k_heads // parts * self.k_dim
            first = 2 * parts * k_run  # of the values
            counts = [k_run, k_run, *counts]
            starts = [
                [i * k_run, (parts + i) * k_run, *(first + start for start in v_starts)]
                for i, v_starts in enumerate(starts)
            ]
        return tuple(map(tuple, starts)), tuple(counts)

    def refuses_split(self, parts: int) -> str | None:
        """Why `parts` devices cannot share its heads, or None."""
        if self.k_heads % parts:
            return f"{self.k_heads} k heads of the delta net do not split evenly"
        return None

    def problems(self, run: RunConfig) -> tuple[problems.DeltaNet, problems.DeltaNet]:
        """What the choice of kernels depends on: for one token of each sequence, and for many."""
        sizes = (self.k_heads, self.v_heads, self.k_dim, self.v_dim, self.conv)
        platform = device.platform()
        return problems.DeltaNet(platform, "decode", *sizes), problems.DeltaNet(platform, "prefill", *sizes)

    def impls(self, run: RunConfig) -> tuple[str, str]:
        """The implementations that `run` asks for; naming one names that of attention."""
        impl = "reference" if run.impl == "reference" else "auto"
        return impl, impl

    def kernels(self, run: RunConfig) -> tuple[str, str]:
        """The kernels chosen for these problems."""
        (decode, prefill), (impl, _) = self.problems(run), self.impls(run)
        return selection.choose(decode, impl=impl), selection.choose(prefill, impl=impl)

    def bytes_per_token(self, run: RunConfig) -> int:
        return 0

    def bytes_per_row(self, run: RunConfig) -> int:
        """Bytes of one sequence's state, whatever it has read."""
        each = jnp.dtype(run.state_dtype).itemsize
        return each * self.v_heads * self.k_dim * self.v_dim + 4 * self.conv * self.qkv_width

    def bytes_read(self, run: RunConfig, depth: int) -> int:
        """Bytes that a decode step reads and writes."""
        return 2 * self.bytes_per_row(run)

    def operations(self, depth: int, tokens: int) -> int:
        """The number of operations for `tokens` tokens, without the projections."""
        return 8 * tokens * self.v_width * self.k_dim

    def scratch_bytes(self, run: RunConfig) -> int:
        return 0

    def copied_bytes(self, run: RunConfig) -> int:
        """Bytes of one sequence that steps work on in a copy (State.taken)."""
        return self.bytes_per_row(run)


TENSORS = {
    spec.field: spec
    for spec in (
        Spec("norm", "attn_norm.weight", "input_layernorm.weight", ("hidden",)),
        Spec("qkv", "attn_qkv.weight", "linear_attn.in_proj_qkv.weight", ("qkv_width", "hidden"),
             ("qkv width", None), joined="inputs"),
        Spec("z", "attn_gate.weight", "linear_attn.in_proj_z.weight", ("v_width", "hidden"),
             ("v width", None), joined="inputs"),
        Spec("alpha", "ssm_alpha.weight", "linear_attn.in_proj_a.weight", ("v_heads", "hidden"),
             ("v heads", None), joined="gates"),
        Spec("beta", "ssm_beta.weight", "linear_attn.in_proj_b.weight", ("v_heads", "hidden"),
             ("v heads", None), joined="gates"),
        Spec("dt", "ssm_dt.bias", "linear_attn.dt_bias", ("v_heads",), ("v heads",)),
        Spec("decay", "ssm_a", "linear_attn.A_log", ("v_heads",), ("v heads",)),
        Spec("head_norm", "ssm_norm.weight", "linear_attn.norm.weight", ("v_dim",)),
        Spec("out", "ssm_out.weight", "linear_attn.out_proj.weight", ("hidden", "v_width"),
             (None, "v width")),
        Spec("conv_weights", "ssm_conv1d.weight", "linear_attn.conv1d.weight", ("qkv_width", "conv"),
             ("qkv width", None), plain=True, huggingface_shape=("qkv_width", 1, "conv")),
    )
}  # fmt: skip


def in_order(settings: DeltaNet, like: DeltaNet) -> DeltaNet:
    """The same delta net with its v heads in the order of another's."""
    return dataclasses.replace(settings, grouped=like.grouped)


def order(field: str, before: ModelConfig, after: ModelConfig, layer: int) -> tuple[int, np.ndarray] | None:
    """Which rows (axis 0) or columns (axis 1) of a tensor for `before` those of one for `after` are, where v
    heads lie grouped in one and tiled in the other. None: they are the same."""
    own, new = before.layers[layer].mixer, after.layers[layer].mixer
    if own.grouped == new.grouped or field in ("norm", "head_norm"):
        return None
    shape = (own.k_heads, own.v_heads // own.k_heads)
    heads = np.arange(own.v_heads).reshape(shape if own.grouped else shape[::-1]).T.reshape(-1)
    width = 1 if field in ("alpha", "beta", "dt", "decay") else own.v_dim
    values = (heads[:, None] * width + np.arange(width)).reshape(-1)
    if field in ("qkv", "conv_weights"):
        first = own.qkv_width - own.v_width  # queries and keys before them
        values = np.concatenate([np.arange(first), first + values])
    return int(field == "out"), values


@serializable
class Weights(struct.PyTreeNode):
    """Weights of the layers of a group.

    inputs  queries, keys, values and the output's gate z, one matrix where their formats agree
    gates   alpha and beta, of which the decay and the strength of each update are made
    conv_weights, dt, decay, head_norm   as `pallas_kernels.delta_net` takes them
    """

    norm: Float[Array, "L H"]
    inputs: tuple[LayerStack, ...]
    gates: tuple[LayerStack, ...]
    conv_weights: Float[Array, "L C W"]
    dt: Float[Array, "L Hv"]
    decay: Float[Array, "L Hv"]
    head_norm: Float[Array, "L V"]
    out: LayerStack


@serializable
class State(states.State, struct.PyTreeNode):
    """What the layers of a group remember of each sequence. A sequence that reads its token at position 0
    starts from nothing, whatever is stored.

    s      float32 or float16 [layers, rows, v heads, k_dim, v_dim] (RunConfig.state_dtype)
    tail   float32 [layers, rows, conv, channels]: what the convolution sees, that at position p in slot
           p % conv
    impl, prefill_impl  the kernels chosen for one token of each sequence and for more
    """

    s: Float[Array, "L B Hv K V"]
    tail: Float[Array, "L B W C"]
    impl: str = struct.field(pytree_node=False, default="reference")
    prefill_impl: str = struct.field(pytree_node=False, default="reference")


AXES = {"s": ("layers", "rows", "v heads"), "tail": ("layers", "rows", None, "qkv width")}


def empty(settings: DeltaNet, layers: int, run: RunConfig, room: Room) -> State:
    """The state of sequences that have read nothing."""
    shape = layers, room.rows, settings.v_heads, settings.k_dim, settings.v_dim
    return State(
        zeros(shape, run.state_dtype),
        zeros((layers, room.rows, settings.conv, settings.qkv_width), jnp.float32),
    )


def block(x: Float[Array, "B T H"], place: Place, state: State, workspace):
    """A gated delta net and its residual: x, the state and the workspace, which is attention's."""
    w = place.weights
    made = joined_product(place.read(x), w.inputs, place, w.norm)
    y, state, workspace = mix(made, place.read(x), place, state, workspace)
    return add_product(x, y, w.out, place, "attention", None), state, workspace


def rounds(place: Place, state: State) -> bool:
    """Whether `mix` can leave its output as integers, of groups of 128 in whole fours, and finish gates that
    were begun."""
    fours = place.settings.v_dim == 128 and place.settings.v_heads % 4 == 0
    return fours and state.impl == "delta_step"


def mix(
    qkv_z: jax.Array, x: jax.Array, place: Place, state: State, workspace,
    gates: Any = None, integers: str | None = None,
):  # fmt: skip
    """What a delta net gives before its output projection, [B, T, V], the state and the workspace; x is the
    layer's input, of which gates are made. `gates`, where others have begun them, and `integers`, as the
    output is to be rounded (pallas_kernels/delta), are for steps of rows of one token, where it `rounds`."""
    w, shape = place.weights, x.shape[:-1]
    if place.tokens > 1:  # of a sequence, which are rows elsewhere
        together = lambda a: a.reshape(-1, place.tokens, *a.shape[2:])  # noqa: E731
        qkv_z, x, positions = map(together, (qkv_z, x, place.positions))
        place = dataclasses.replace(place, positions=positions, tokens=1)
    few = x.shape[-2] <= STEP_TOKENS and state.impl != "reference"
    dense = dense_gates(w.gates) if few else None
    if gates is None:
        gates = joined_product(x, w.gates, place, w.norm) if dense is None else Gates(x, w.norm, dense)
    y, state = _mixed(qkv_z, gates, place, state, integers)
    if place.updates is not None:
        place.updates["qkv_z"] = qkv_z
        place.updates.update({"gates": gates} if dense is None else {"x": x})
    return y.reshape(*shape, -1) if integers is None else y, state, workspace


def replay(updates: Mapping[str, jax.Array], place: Place, state: State) -> State:
    """The state after tokens whose updates of each layer `mix` has put into place.updates."""
    w = place.weights
    gates = updates.get("gates")
    if gates is None:
        dense = dense_gates(w.gates)
        assert dense is not None
        gates = Gates(updates["x"], w.norm, dense)
    s, tail = delta.replay(
        updates["qkv_z"], gates, state.s, state.tail, place.positions, **_rest(place, state)
    )
    return state.replace(s=s, tail=tail)


def phases(settings: DeltaNet) -> tuple[Product, Mixing, Product]:
    """The parts of `block` that measure/profile.py times; numbers of the projections stand for gates."""

    def projections(place: Place, x: jax.Array) -> jax.Array:
        w = place.weights
        return joined_product(x, (*w.inputs, *w.gates), place, w.norm)

    def mixed(made: jax.Array, place: Place, state: State, workspace):
        y, state = _mixed(made, made[..., : 2 * settings.v_heads], place, state)
        return y, state, workspace

    return (
        Product("delta inputs", ("inputs", "gates"), projections),
        Mixing("delta net", settings.qkv_width + settings.v_width, mixed),
        output_product("delta output", "out", settings.v_width),
    )


def _mixed(
    qkv_z: jax.Array, gates: Any, place: Place, state: State, integers: str | None = None
) -> tuple[Any, State]:
    """What a delta net gives of its projections, and its state after these tokens; as it came where it waits
    for `replay`."""
    y, s, tail = delta.delta_net(
        qkv_z, gates, state.s, state.tail, place.positions, place.index,
        stores=place.updates is None, integers=integers, **_rest(place, state),
    )  # fmt: skip
    return y, state.replace(s=s, tail=tail)


def _rest(place: Place, state: State) -> dict[str, Any]:
    """Keyword arguments of pallas_kernels.delta's functions."""
    w = place.weights
    return {
        "conv": w.conv_weights, "decay": w.decay, "dt": w.dt, "norm": w.head_norm, "eps": place.eps,
        "grouped": place.settings.grouped, "impl": state.impl, "prefill_impl": state.prefill_impl,
    }  # fmt: skip


def dense_gates(weights: tuple[LayerStack, ...]) -> jax.Array | None:
    """[layers, N, K] of a matrix that every layer has as plain numbers; None where it is quantized, or has an
    adapter beside it."""
    if not all(isinstance(stack, LayerStack) for stack in weights):
        return None
    (first, *more), *rest = (stack.parts for stack in weights)
    if more or rest or not isinstance(first, QTensor) or first.format not in ("f32", "f16", "bf16"):
        return None
    return None if first.rotation is not None else first.fields["w"].reshape(-1, *first.shape)
