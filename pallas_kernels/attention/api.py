"""What a layer does between its projections: QK-norm, rope, cache write, attention."""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import cache_layouts, device, selection
from pallas_kernels.attention.reference import (
    NO_TAPS,
    apply_rope,
    attention,
    attention_within,
    check,
    write_pages,
)
from pallas_kernels.attention.scores import Scores
from pallas_kernels.cache_layouts import Pages
from pallas_kernels.norm import rms_norm
from pallas_kernels.problems import Attention

TAPS = ("rot_q", "rot_k", "scores", "pattern")  # what kernels keep to themselves
EXACT = ("reference", "cpu")  # the kernel of CPUs leaves what it cannot do to the reference


def attend(
    qkv: Float[Array, "B T width"],
    k_pages: Pages,
    v_pages: Pages,
    block_table: Int[Array, "B pages_per_row"],
    positions: Int[Array, "B T"],
    layer: int | Int[Array, ""],
    *,
    rotation: tuple[Float[Array, "B T D/2"], Float[Array, "B T D/2"]] | None,
    interleaved: bool,
    norms: tuple[Float[Array, "L D"] | None, Float[Array, "L D"] | None] | Callable,
    eps: float,
    num_keys: int | Int[Array, ""] | None,
    impl: str = "reference",
    prefill_impl: str = "reference",
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, "L H"] | None = None,
    gated: bool = False,
    norms_after_rope: bool = False,
    temperature: Float[Array, "B T"] | None = None,
    v_norm: bool = False,
    tokens: int = 1,
    workspace: Int[Array, "words"] | None = None,
    taps: Mapping[str, Callable[[Array], Array]] = NO_TAPS,
) -> tuple[Array, Pages, Pages, Array | None]:
    """What a layer does between its projections: QK-norm, rope, cache write, attention.

    qkv        as projected, [B, T, (H + 2 Hkv) D]: query heads, key heads, value heads
    norms      gamma of QK-norm for q and k, rms_norm per head; None for models without it; or another norm
               as a function, (q, k) -> (q, k) of heads [B, T, heads, D], which is applied before a kernel
    rotation   cos and sin of the new tokens' angles, for rope; None: nothing is rotated (NoPE)
    num_keys   as for `attention`. None: sequences begin and end with these tokens; attention is among them,
               by the reference (both impl are "reference"), and nothing is stored
    impl       the candidate for one token a row (selection.py): "decode", "cpu", "reference", or your own
    prefill_impl  the candidate for more: "prefill_sm90", "prefill_sm80", "cpu", "reference", or your own
    window, scale, softcap, sinks  as for `attention`
    gated      each query head in qkv, which is H D wider, is followed by its gate, as wide: outputs are
               multiplied by the sigmoid of the gate
    norms_after_rope  whether QK-norm comes after rope
    temperature  queries are multiplied by it after both; None: they are not
    v_norm     whether each value head is normed, by rms_norm without weights
    tokens     so many neighbouring rows of one token each are one sequence's: of the same pages, at positions
               one after another, -1 behind them. Each attends to the keys of those before it
    workspace  of the kernel of one token a row (`empty_workspace`), where its blocks meet. Handed from layer
               to layer, each once, it spares each launch a memset that it would wait for; None: its own
    taps       {name: x -> x}, what is done to a value on its way: "q", "k", "v" [B, T, heads, D] as
               projected, "z", the output [B, T, H, D], and in the reference alone those of `TAPS`: "rot_q",
               "rot_k", after QK-norm and rope, and those of `attention`
    The rest, and errors, as for `attention`. Returns the output, float32 [B, T, H D], the cache's pages with
    k and v stored (in place, where the pages are donated) and the workspace as it is left. Under vmap
    kernels are launched once for each entry: more rows of one cache are the way to have them in one launch.
    """
    if qkv.ndim != 3:
        raise ValueError(f"attend: qkv is {list(qkv.shape)}; give it as [B, T, (H + 2 Hkv) D]")
    inner = [name for name in taps if name in TAPS]
    if inner and (impl if qkv.shape[1] == 1 else prefill_impl) not in EXACT:
        raise NotImplementedError(
            f"attend: taps on {', '.join(inner)} with impl={impl!r}, prefill_impl={prefill_impl!r}: a kernel "
            "keeps them to itself; they need 'reference'"
        )
    *_, kv_heads, head_dim = check("attend", qkv, k_pages, v_pages, block_table, positions)
    B, T, width = qkv.shape
    per_kv_head = (1 + gated) * kv_heads * head_dim  # a query head and its gate, for each KV head
    if width <= 2 * kv_heads * head_dim or (width - 2 * kv_heads * head_dim) % per_kv_head:
        raise ValueError(
            f"attend: qkv is {width} wide; with {kv_heads} KV heads of {head_dim} in the cache it must be "
            f"{2 * kv_heads * head_dim} for them and a multiple of {per_kv_head} for "
            f"queries{' and gates' * gated}"
        )
    heads = (width // head_dim - 2 * kv_heads) // (1 + gated)
    kernel = selection.get(Attention, impl if T == 1 else prefill_impl)
    gate, within_lanes = None, True
    if rotation is not None:
        pairs = rotation[0].shape[-1]
        within_lanes = 2 * pairs == head_dim or not (interleaved or pairs % 32)  # as the kernel's lanes do
    within_lanes &= not callable(norms) and not norms_after_rope and temperature is None
    if gated and not (kernel.fused and within_lanes and not taps):
        qkv, gate = _ungated(qkv, heads, head_dim)
        width = qkv.shape[-1]
    split = functools.partial(jnp.split, indices_or_sections=(heads, heads + kv_heads), axis=2)
    if taps.keys() & {"q", "k", "v"}:
        parts = zip(("q", "k", "v"), split(qkv.reshape(B, T, -1, head_dim)), strict=True)
        parts = [taps[name](x) if name in taps else x for name, x in parts]
        qkv = jnp.concatenate(parts, axis=2).reshape(B, T, width)
    if v_norm:
        rest, v = jnp.split(qkv, (width - kv_heads * head_dim,), axis=-1)
        v = rms_norm(v.reshape(B, T, kv_heads, head_dim), jnp.ones(head_dim), eps).reshape(v.shape)
        qkv = jnp.concatenate([rest, v], axis=-1)

    def turned() -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v = split(qkv.reshape(B, T, -1, head_dim))

        def rotated(x):
            return x if rotation is None else apply_rope(x, *rotation, interleaved)

        def normed(q, k):
            if callable(norms):
                return norms(q, k)
            each = zip((q, k), norms, strict=True)
            return tuple(x if norm is None else rms_norm(x, norm[layer], eps) for x, norm in each)

        if norms_after_rope:
            q, k = normed(rotated(q), rotated(k))
        else:
            q, k = map(rotated, normed(q, k))
        return q if temperature is None else q * temperature[..., None, None], k, v

    if kernel.fused:
        gammas = None if callable(norms) or norms[0] is None else norms
        cos = sin = None
        if not within_lanes:  # before the kernel
            qkv, gammas = jnp.concatenate(turned(), axis=2).reshape(B, T, width), None
        elif rotation is not None:
            cos, sin = rotation
        gates_too = gated and gate is None
        if T == 1:
            qkv, positions = qkv[:, 0], positions[:, 0]
            cos, sin = (x if x is None else x[:, 0] for x in (cos, sin))

        def attends(sinks, *arrays):
            return kernel(
                *arrays, eps=eps, interleaved=interleaved, gated=gates_too, sinks=sinks,
                scores=Scores(window, scale, softcap), tokens=tokens,
            )  # fmt: skip

        out, k_pages, v_pages, used = jax.custom_batching.sequential_vmap(attends)(
            sinks, qkv, k_pages, v_pages, block_table, positions, layer, cos, sin, gammas, workspace
        )
        out = out.reshape(B, T, -1)
        return _output(out, heads, taps, gate), k_pages, v_pages, None if workspace is None else used
    q, k, v = turned()
    q = taps["rot_q"](q) if "rot_q" in taps else q
    k = taps["rot_k"](k) if "rot_k" in taps else k
    if num_keys is None:
        options = {"window": window, "scale": scale, "softcap": softcap, "sinks": sinks}
        out = attention_within(q, k, v, positions, layer, taps=taps, **options)
        return _output(out, heads, taps, gate), k_pages, v_pages, workspace
    q, k = map(cache_layouts.recognize(k_pages).rotate, (q, k))
    k_pages = write_pages(k_pages, k, block_table, positions, layer)
    v_pages = write_pages(v_pages, v, block_table, positions, layer)
    attends = functools.partial(attention, taps=taps) if inner else kernel
    out = attends(
        q, k_pages, v_pages, block_table, positions, layer,
        num_keys=num_keys, window=window, scale=scale, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    return _output(out, heads, taps, gate), k_pages, v_pages, workspace


def attend_stored(
    q: Float[Array, "B T H D"],
    k_pages: Pages,
    v_pages: Pages,
    block_table: Int[Array, "B pages_per_row"],
    positions: Int[Array, "B T"],
    layer: int | Int[Array, ""],
    *,
    num_keys: int | Int[Array, ""],
    impl: str = "reference",
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    taps: Mapping[str, Callable[[Array], Array]] = NO_TAPS,
) -> Float[Array, "B T width"]:
    """Attention of queries alone: the pages have the keys and values of their tokens already.

    q     after QK-norm and rope
    impl  the candidate for so many tokens a row, one that does not write them (problems.Attention.stored)
    taps  "z", and in the reference alone "scores" and "pattern", as for `attend`
    The rest, and errors, as for `attention`. Returns float32 [B, T, H D].
    """
    kernel, inner = selection.get(Attention, impl), taps.keys() & {"scores", "pattern"}
    writes = kernel.fused and "run_stored" not in kernel.offers
    if writes or (inner and impl not in EXACT):
        raise NotImplementedError(
            f"attend_stored: impl={impl!r} {'writes keys and values' if writes else 'has no taps'}; "
            "give 'reference'"
        )
    attends = kernel.module.run_stored if kernel.fused else kernel
    attends = functools.partial(attention, taps=taps) if inner else attends
    out = attends(
        cache_layouts.recognize(k_pages).rotate(q), k_pages, v_pages, block_table, positions, layer,
        num_keys=num_keys, window=window, scale=scale, softcap=softcap, sinks=None,
    )  # fmt: skip
    return _output(out, q.shape[2], taps, None)


def empty_workspace(rows: int, heads: int, k_pages: Pages) -> Int[Array, "words"]:
    """Zeros in which the kernel of one token a row, of so many query heads, exchanges partial results for one
    step through all layers of a cache."""
    kv_heads, head_dim = cache_layouts.shape(k_pages)[3:]
    heads_at_work = max(rows * heads, device.multiprocessors() * heads // kv_heads)
    return jnp.zeros(heads_at_work * (head_dim + 2), jnp.int32)


def _ungated(qkv: jax.Array, heads: int, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Queries, keys and values without gates; and the gates, [B, T, H D]."""
    query_heads, rest = jnp.split(qkv, (2 * heads * head_dim,), axis=-1)
    query_heads = query_heads.reshape(*query_heads.shape[:-1], heads, 2, head_dim)
    q, gate = (query_heads[..., i, :].reshape(*qkv.shape[:-1], -1) for i in range(2))
    return jnp.concatenate([q, rest], axis=-1), gate


def _output(
    out: jax.Array, heads: int, taps: Mapping[str, Callable[[Array], Array]], gate: jax.Array | None
) -> jax.Array:
    """[B, T, H D] of what attention computed."""
    B, T = out.shape[:2]
    out = taps["z"](out.reshape(B, T, heads, -1)) if "z" in taps else out
    out = out.reshape(B, T, -1)
    return out if gate is None else out * jax.nn.sigmoid(gate)
