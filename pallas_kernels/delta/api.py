"""What a layer with a gated delta net does between its projections."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import selection
from pallas_kernels.delta.reference import Gates, GateSums
from pallas_kernels.problems import DeltaNet

STEP_TOKENS = 8  # most tokens of a row in a decode step: more are prefill


def delta_net(
    qkv_z: Float[Array, "B T C+Hv*V"],
    gates: Float[Array, "B T 2*Hv"] | Gates | GateSums,
    states: Float[Array, "L B Hv K V"],
    tails: Float[Array, "L B W C"],
    positions: Int[Array, "B T"],
    layer: int | Int[Array, ""],
    *,
    conv: Float[Array, "L C W"],
    decay: Float[Array, "L Hv"],
    dt: Float[Array, "L Hv"],
    norm: Float[Array, "L V"],
    eps: float,
    grouped: bool,
    stores: bool = True,
    impl: str = "reference",
    prefill_impl: str = "reference",
    integers: str | None = None,
) -> tuple[Any, Float[Array, "L B Hv K V"], Float[Array, "L B W C"]]:
    """What a layer does between its projections: convolution, norms, the recurrence, the gated norm.

    q, k, v = silu(causal depthwise convolution over W tokens of qkv);   q, k <- x / max(|x|, eps) per head
    g = decay softplus(alpha + dt);   b = sigmoid(beta)
    S <- exp(g) S;   d = b (v - S^T k);   S <- S + k d^T;   o = S^T q / sqrt(K)
    y = rms_norm(o; norm) silu(z)

    qkv_z      as projected: Hk heads of K queries, as many of keys, Hv heads of V values (C = 2 Hk K + Hv V),
               then z
    gates      as projected, alpha and then beta; or what makes them, or finishes them
    states     S of every layer and row, float32; or float16, to which each new S is rounded: |error| of y
               0.1 to 0.3 % of |y|, even behind 32,768 tokens (docs/accuracy.md)
    tails      the last tokens of qkv of every layer and row, float32: that at position p in slot p % W
    positions  int32, of each token within its row; -1 for padding, behind a row's tokens: nothing of it is
               kept. A row whose first token is at 0 begins with zeros, whatever the state held
    layer      picks the layer of states, tails and weights
    decay      -exp(A_log): below 0
    grouped    v head h uses k head h // (Hv / Hk); else h % Hk
    stores     else states and tails are returned as they came; `replay` makes up for it
    impl       the candidate for up to 8 tokens a row (selection.py): "delta_step", "reference"
    prefill_impl  the candidate for more: "delta_chunks", "reference"
    integers   y is returned as "delta_step" rounds it for a product of 1-bit weights (step.py); None: float32
    Returns y, and states and tails with the layer's own replaced (in place, where they are donated).

    One token a row is the recurrence as it is written, and so are a few by "delta_step"; more go in chunks of
    64, by products of matrices and a triangular solve (the WY form), at HIGHEST: the same numbers but for
    rounding.
    """
    weights = {"conv": conv, "decay": decay, "dt": dt, "norm": norm}
    run = selection.get(DeltaNet, impl if qkv_z.shape[1] <= STEP_TOKENS else prefill_impl)
    rest = {} if integers is None else {"integers": integers}
    return run(qkv_z, gates, states, tails, positions, layer, weights, eps, grouped, stores, **rest)


def replay(
    qkv_z: Float[Array, "L B T C+Hv*V"],
    gates: Float[Array, "L B T 2*Hv"] | Gates,
    states: Float[Array, "L B Hv K V"],
    tails: Float[Array, "L B W C"],
    positions: Int[Array, "B T"],
    *,
    impl: str = "reference",
    **rest: Any,
) -> tuple[Float[Array, "L B Hv K V"], Float[Array, "L B W C"]]:
    """States and tails of all layers after tokens that `delta_net` has read without storing them: its
    arguments, of every layer."""
    if impl == "delta_step" and qkv_z.shape[2] <= STEP_TOKENS:
        from pallas_kernels.delta import step  # only GPUs need it

        eps, grouped, _ = rest.pop("eps"), rest.pop("grouped"), rest.pop("prefill_impl", None)
        return step.replay(qkv_z, gates, states, tails, positions, rest, eps, grouped)

    def layer(stored, each):
        (states, tails), (index, qkv_z, own) = stored, each
        own = gates._replace(x=own) if isinstance(gates, Gates) else own
        return delta_net(qkv_z, own, states, tails, positions, index, impl=impl, **rest)[1:], None

    inputs = jnp.arange(len(qkv_z)), qkv_z, gates.x if isinstance(gates, Gates) else gates
    return jax.lax.scan(layer, (states, tails), inputs)[0]
