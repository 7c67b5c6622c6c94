"""A router: which experts each token goes to, and what their outputs are multiplied with."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import device, selection
from pallas_kernels.matmul.api import matmul
from pallas_kernels.matmul.execute import differentiated
from pallas_kernels.norm import rms_norm
from pallas_kernels.problems import Route, RouterLogits
from pallas_kernels.qtensor import LayerStack, leaves


def route(
    probabilities: Float[Array, "*batch E"],
    used: int,
    *,
    normalized: bool,
    scale: float = 1.0,
    bias: Float[Array, "E"] | None = None,
    groups: int = 1,
    groups_used: int = 1,
) -> tuple[Float[Array, "*batch used"], Int[Array, "*batch used"]]:
    """The experts of each token, and what the output of each is multiplied with.

    weights, chosen = the `used` largest of p;  scale * weights / sum(weights) where `normalized`

    probabilities  floating point, of every expert: a softmax, or a sigmoid of each logit
    bias           added to them for the choice alone (DeepSeek-AI 2024, 2.1.2); None: nothing is
    groups         of neighbouring experts, as many in each: a token's experts are of its `groups_used` best
                   groups, by the sum of the two largest values of each
    Returns float32 weights and int32 indices of experts, in the order of the choice, the largest first. Of
    equal ones the lower index comes first. A sum below 2^-14 is taken for that, as in llama.cpp.
    """
    probabilities = probabilities.astype(jnp.float32)
    scores = probabilities if bias is None else probabilities + bias
    if groups > 1:
        scores = _in_best_groups(scores, groups, groups_used)
    weights, chosen = jax.lax.top_k(scores, used)
    if scores is not probabilities:
        weights = jnp.take_along_axis(probabilities, chosen, axis=-1)
    if normalized:
        weights = weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), 2.0**-14)
    return weights if scale == 1 else scale * weights, chosen.astype(jnp.int32)


def _in_best_groups(scores: Float[Array, "*batch E"], groups: int, used: int) -> Float[Array, "*batch E"]:
    """The same scores, -inf outside of the groups that are used."""
    by_group = scores.reshape(*scores.shape[:-1], groups, -1)
    best = jax.lax.top_k(by_group, min(2, by_group.shape[-1]))[0].sum(axis=-1)
    is_used = jax.nn.one_hot(jax.lax.top_k(best, used)[1], groups, dtype=bool).any(axis=-2)
    return jnp.where(is_used[..., None], by_group, -jnp.inf).reshape(scores.shape)


def route_logits(
    logits: Float[Array, "*batch E"],
    positions: Int[Array, "*batch"],
    used: int,
    *,
    kernel: str,
    gating: Literal["softmax", "sigmoid"] = "softmax",
    normalized: bool,
    scale: float = 1.0,
    bias: Float[Array, "E"] | None = None,
    groups: int = 1,
    groups_used: int = 1,
) -> tuple[Float[Array, "*batch used"], Int[Array, "*batch used"]]:
    """`route` from a router's logits, on a GPU in one launch.

    weights, chosen = route(p, used, ..),  p = softmax(logits), or the sigmoid of each

    logits     floating point, of every expert
    positions  int32, of the tokens in their sequences; one at a position below 0 is padding and chooses -1
    kernel     the name of that which multiplies one row with an expert's matrix (problems.Route)
    Other arguments and results as for `route`; differentiable in logits.
    """

    def exactly(logits, positions):
        p = jax.nn.sigmoid(logits) if gating == "sigmoid" else jax.nn.softmax(logits, axis=-1)
        by = {"bias": bias, "groups": groups, "groups_used": groups_used}
        weights, chosen = route(p, used, normalized=normalized, scale=scale, **by)
        return weights, jnp.where(positions[..., None] >= 0, chosen, -1)

    candidate = _candidate(logits.shape[-1], used, kernel, groups)
    if candidate.run is None:
        return exactly(logits, positions)
    rules = candidate.module.Rules(gating, scale, groups, groups_used)
    choice = candidate.module.Choice(candidate.module.Experts(logits.shape[-1], used, normalized), rules)

    @jax.custom_jvp
    def op(logits, positions):
        biased = {} if bias is None else {"bias": bias[None], "layer": jnp.zeros(1, jnp.int32)}
        return candidate(candidate.module.Logits(logits, positions, **biased), choice)

    @op.defjvp
    def derivative(primals, tangents):
        logits, positions = primals
        tangent = jax.jvp(lambda logits: exactly(logits, positions), (logits,), tangents[:1])[1]
        return op(logits, positions), tangent

    return op(logits.astype(jnp.float32), positions)


def kernel_routes(count: int, used: int, kernel: str, groups: int) -> bool:
    """Whether a kernel makes the choice of `route_logits`."""
    return _candidate(count, used, kernel, groups).run is not None


def _candidate(count: int, used: int, kernel: str, groups: int) -> selection.Candidate:
    return selection.get(Route, selection.choose(Route(device.platform(), count, used, kernel, groups)))


class Normed(NamedTuple):
    """normed  float32 [*batch, H], the norm of a router's input
    logits  float32 [*batch, E]
    row     float32 [*batch]; None: no row was given
    """

    normed: jax.Array
    logits: jax.Array
    row: jax.Array | None


def normed_logits(
    x: Float[Array, "*batch H"],
    norms: Float[Array, "L H"],
    w: LayerStack,
    layer: int | Int[Array, ""],
    *,
    eps: float,
    kernel: str,
    bias: Float[Array, "L E"] | None = None,
    row: Float[Array, "L H"] | None = None,
) -> Normed:
    """The norm of a layer's experts and the router's logits, in a decode step on a GPU in one launch.

    n = rms_norm(x, norms[layer], eps),  logits = W[layer] n + bias[layer],  row[layer] n

    x       floating point [..., H]
    w       the router, a stack of E x H
    kernel  as for `route_logits`
    bias    of the router's logits; None: there is none
    row     one more row, that of the shared expert; None: there is none
    Differentiable; vmap is a launch for each entry.
    """
    known = layer if isinstance(layer, int) else None

    def exactly(x, vectors, w, index):
        index = index if known is None else known
        norms, bias, row = vectors
        n = rms_norm(x.astype(jnp.float32), norms[index], eps)
        logits = matmul(n, w, index)
        logits = logits if bias is None else logits + bias[index]
        return Normed(n, logits, None if row is None else dot(n, row[index]))

    def by_kernel(x, vectors, w, index):
        index = index if known is None else known
        part, at = w.where[index] if isinstance(index, int) else (0, index)
        flat = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
        y = candidate(flat, vectors, w.parts[part], at, index, eps)
        return jax.tree.map(lambda y: y.reshape(*x.shape[:-1], *y.shape[1:]), Normed(*y))

    problem = RouterLogits(device.platform(), leaves(w)[0].format, *w.shape, kernel, len(w.parts) > 1)
    candidate = selection.get(RouterLogits, selection.choose(problem, x.size // x.shape[-1]))
    arguments = x, (norms, bias, row), w, None if known is not None else layer
    if candidate.run is None:
        return exactly(*arguments)
    return differentiated(jax.custom_batching.sequential_vmap(by_kernel), exactly)(*arguments)


def dot(n: Float[Array, "*batch H"], row: Float[Array, "H"]) -> Float[Array, "*batch"]:
    """The product with one row, in float32."""
    return jnp.einsum("...h,h->...", n, row, precision=jax.lax.Precision.HIGHEST)
