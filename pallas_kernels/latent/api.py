"""Multi-head latent attention (DeepSeek-AI 2024, 2.1): keys and values of all heads are made of one row of
each token, which is all that the cache has."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import cache_layouts, device, selection
from pallas_kernels.attention.api import EXACT, TAPS
from pallas_kernels.attention.reference import NO_TAPS, apply_rope, attention, write_pages
from pallas_kernels.cache_layouts import Pages
from pallas_kernels.experts import each_matmul
from pallas_kernels.latent.plan import Plan
from pallas_kernels.norm import rms_norm
from pallas_kernels.problems import Attention
from pallas_kernels.qtensor import LayerStack, QTensor

EXPANDED_TOKENS = 64  # the fewest queries of a sequence that are worth making keys and values of all rows


def attend_latent(
    q: Float[Array, "B T H D"],
    latents: Float[Array, "B T W"],
    k_b: QTensor | LayerStack,
    v_b: QTensor | LayerStack,
    pages: Pages,
    block_table: Int[Array, "B pages_per_row"],
    positions: Int[Array, "B T"],
    layer: int | Int[Array, ""],
    *,
    rotation: tuple[Float[Array, "B T R/2"], Float[Array, "B T R/2"]],
    interleaved: bool,
    norm: Float[Array, "L C"],
    eps: float,
    scale: float,
    num_keys: int | Int[Array, ""],
    impl: str = "reference",
    prefill_impl: str = "reference",
    workspace: Int[Array, "words"] | None = None,
    taps: Mapping[str, Callable[[Array], Array]] = NO_TAPS,
) -> tuple[Float[Array, "B T H V"], Pages, Array | None]:
    """What latent attention does between its projections: norm, rope, cache write, attention.

    row = [rms_norm(c; norm[layer], eps), rope(k)],  c, k = the last C + R numbers of a token's latents
    q_h = [n_h, r_h];  keys of head h are [K_h^T row[:C], row[C:]], values V_h row[:C]
    out_h = softmax(scale [n_h, rope(r_h)] keys_h^T, over rows at positions <= the query's) values_h

    q          as projected: n and r of every head, side by side
    latents    as projected
    k_b, v_b   K [C x (D - R)] and V [V x C], a matrix for each head: stacks with two leading axes, layers and
               heads
    pages      the cache, [L, pages, page_size, 1, C + R]; block_table, positions, layer, num_keys as for
               `attention`; layer is also the index into k_b, v_b and norm
    rotation   cos and sin of the new tokens' angles, for rope (`apply_rope`)
    impl, prefill_impl  the candidates for one token a row and for more (selection.py)
    workspace  as for `attend`, made by `empty_latent_workspace`
    taps       {name: x -> x} on "scores" and "pattern", in the reference alone
    Returns float32 [B, T, H, V], the pages with the rows stored (in place, where they are donated) and the
    workspace as it is left.
    Raises ValueError where sizes do not fit each other, and NotImplementedError for taps with a kernel.

    All kernels but "latent_prefill" have the absorbed form: K_h multiplies the query and V_h the weighted sum
    of rows, so that no keys and values of heads are made.
    """
    D, (C, nope), T = cache_layouts.shape(pages)[-1], k_b.shape, q.shape[1]
    if q.ndim != 4 or q.shape[3] - nope != D - C or latents.shape[:2] != q.shape[:2] or latents.shape[2] < D:
        raise ValueError(
            f"attend_latent: q is {list(q.shape)}, latents are {list(latents.shape)}; with rows of {D} in "
            f"the cache and K of {C} x {nope} give q as [B, T, H, {nope + D - C}], latents as [B, T, {D} or "
            "more]"
        )
    name = impl if T == 1 else prefill_impl
    inner = {site: tap for site, tap in taps.items() if site in TAPS}
    if inner and name not in EXACT:
        raise NotImplementedError(
            f"attend_latent: taps on {', '.join(inner)} with the kernel {name!r}, which keeps them to "
            "itself; they need 'reference'"
        )
    if name == "latent_prefill" and T < EXPANDED_TOKENS:
        name = "latent_gemms"
    kernel, layout = selection.get(Attention, name), cache_layouts.recognize(pages)
    where = block_table, positions, layer

    def turned(x: Float[Array, "B T heads R"]) -> Float[Array, "B T heads R"]:
        return apply_rope(x, *rotation, interleaved)

    if kernel.fused and T == 1:
        absorbed = each_matmul(q, k_b, layer)
        out, pages, used = kernel(
            absorbed, q, latents, pages, *where, rotation, norm, workspace,
            interleaved=interleaved, eps=eps, scale=scale,
        )  # fmt: skip
        return each_matmul(out, v_b, layer), pages, None if workspace is None else used
    c, k = jnp.split(latents[..., -D:], (C,), axis=-1)
    rows = jnp.concatenate([rms_norm(c, norm[layer], eps), turned(k[..., None, :])[..., 0, :]], axis=-1)
    pages = write_pages(pages, layout.rotate(rows)[:, :, None], *where)
    turning = turned(q[..., nope:])
    if kernel.fused:
        q = jnp.concatenate([q[..., :nope], turning], axis=-1)
        out = kernel(q, k_b, v_b, pages, *where, scale=scale, num_keys=num_keys)
        return out, pages, workspace
    q = layout.rotate(jnp.concatenate([each_matmul(q, k_b, layer), turning], axis=-1))
    rest: dict[str, Any] = {"num_keys": num_keys, "window": None, "scale": scale}
    rest |= {"softcap": None, "sinks": None}
    if inner:
        out = attention(q, pages, pages, *where, **rest, taps=inner)
    else:
        out = kernel(q, pages, pages, *where, **rest)
    return each_matmul(layout.rotate(out)[..., :C], v_b, layer), pages, workspace


def empty_latent_workspace(
    rows: int, heads: int, pages: Pages, block_table: Int[Array, "B pages_per_row"]
) -> Int[Array, "words"]:
    """Zeros in which the kernel of one token a row, of so many query heads, exchanges partial results for one
    step through all layers of a cache."""
    *_, page_size, _, width = cache_layouts.shape(pages)
    plan = Plan(rows, heads, width, 0, 0, page_size, block_table.shape[1], device.multiprocessors())
    return jnp.zeros(plan.exchanged, jnp.int32)
