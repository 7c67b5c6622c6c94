"""Grouped-query attention over a paged cache of keys and values, with its projections.

    x + norm(W_o norm(attention(rope(norm(q)), rope(norm(k)), v))),   q, k, v = W_qkv norm(x)

with the norms, biases, gates and limits that an architecture sets.
"""

import dataclasses
import math
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from bonsai_jax.config import ModelConfig, RunConfig
from bonsai_jax.network.kinds import state as states
from bonsai_jax.network.kinds.phases import Mixing, Product, output_product
from bonsai_jax.network.kinds.place import Place, add_product, check_taps, joined_product, temperatures
from bonsai_jax.network.kinds.state import Room
from bonsai_jax.network.rope import Rope
from bonsai_jax.weights.placement import Runs, even_runs
from bonsai_jax.weights.specs import Spec
from pallas_kernels import LayerStack, attend, cache_layouts, device, problems, selection, serializable
from pallas_kernels.attention import EXACT, apply_rope, attend_stored
from pallas_kernels.cache_layouts import Pages

PRODUCTS = ("qkv", "o")  # arrays that fused launches multiply with (network/fused.py)
FUSED = (
    "num_heads", "num_kv_heads", "head_dim", "rope", "window", "scale", "softcap", "gated", "temperature",
    "norms_after_rope", "sinks", "norm", "qkv_bias", "q_norm", "k_norm", "post_norm",
)  # fmt: skip
# What `attend` does ahead of its kernel, or leaves to the reference.
MIXED = ("v_norm", "keys_as_values", "q_row_norm", "k_row_norm", "q_head_norms", "k_head_norms")
SITES = ("q", "k", "v", "rot_q", "rot_k", "scores", "pattern", "z")
ADAPTED = ("q", "k", "v", "o")  # matrices that adapters change (network/adapter.py)


@dataclasses.dataclass(frozen=True)
class Attention:
    """How a layer's tokens attend to each other.

    num_heads, num_kv_heads, head_dim   query heads, heads of keys and values, the width of each
    rope     how queries and keys are rotated; None: they are not (NoPE)
    window   keys that a query sees, its own among them; None: all before it
    scale    factor on scores; None: 1 / sqrt(head_dim)
    softcap  scores become c tanh(scores / c); None: they stay as they are
    gated    outputs are multiplied by the sigmoid of a gate as wide, which W_q makes too: for each head its
             query, then its gate
    sinks    whether each query head has a learnt score that joins the softmax (gpt-oss)
    temperature  (f, L): queries are multiplied by 1 + f ln(floor(position / L) + 1) after the rope, as in
             Llama 4; None: they are not
    norms_after_rope  whether QK-norm comes after the rope, not before it
    v_norm   whether values are normed, each head, by an RMSNorm without weights
    keys_as_values  whether the layer has no W_v: values are its keys as projected, before QK-norm and rope
    reads    number of the layer whose keys and values it reads; it has none of its own. None: its own
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    gated: bool = False
    sinks: bool = False
    temperature: tuple[float, int] | None = None
    norms_after_rope: bool = False
    v_norm: bool = False
    keys_as_values: bool = False
    reads: int | None = None

    kind = "attention"

    def __post_init__(self):
        if min(self.num_heads, self.num_kv_heads, self.head_dim) <= 0:
            raise ValueError(
                f"model config: {self.num_heads} query heads, {self.num_kv_heads} KV heads of "
                f"{self.head_dim}; each must be positive"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model config: {self.num_heads} query heads do not divide into {self.num_kv_heads} KV heads"
            )
        if self.rope is not None and self.rope.dim > self.head_dim:
            raise ValueError(
                f"model config: rope turns {self.rope.dim} values of a head of {self.head_dim}; at most all "
                "of them are expected"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"model config: a query sees {self.window} keys; at least its own is expected")

    @property
    def plain(self) -> bool:
        """Whether it has no settings but those that launches of all layers know (`problems`)."""
        known = (self.num_heads, self.num_kv_heads, self.head_dim, self.rope)
        rope = self.rope
        in_lanes = rope is None or not rope.interleaved or rope.dim == self.head_dim
        return in_lanes and self == Attention(*known, self.window, self.scale, self.softcap, sinks=self.sinks)

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def q_rows(self) -> int:
        """Outputs of W_q: queries, and their gates where they have some."""
        return self.q_width * (1 + self.gated)

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def k_rows(self) -> int:
        """Outputs of W_k; 0 where it reads another layer's keys."""
        return self.kv_width if self.reads is None else 0

    @property
    def v_rows(self) -> int:
        """Outputs of W_v."""
        return 0 if self.keys_as_values else self.k_rows

    @property
    def k_norm_width(self) -> int:
        return self.head_dim if self.reads is None else 0

    @property
    def output_width(self) -> int:
        """Inputs of W_o."""
        return self.q_width

    def for_device(self, parts: int) -> "Attention":
        """With the heads that each of `parts` devices has; KV heads are one at least."""
        kv_heads = max(1, self.num_kv_heads // parts)
        return dataclasses.replace(self, num_heads=self.num_heads // parts, num_kv_heads=kv_heads)

    def runs(self, axis: str, parts: int) -> Runs:
        """Which part of a logical axis of its arrays each device has."""
        if axis == "heads":
            return even_runs(self.q_rows, parts)
        if axis == "head inputs":
            return even_runs(self.q_width, parts)
        if axis in ("q head norms", "sinks"):
            return even_runs(self.num_heads, parts)
        # Where there are fewer KV heads than devices, several devices have the same one.
        width = 1 if axis == "k head norms" else self.head_dim  # else "kv heads", values of all
        starts = tuple((d * self.num_kv_heads // parts * width,) for d in range(parts))
        return starts, (max(1, self.num_kv_heads // parts) * width,)

    def refuses_split(self, parts: int) -> str | None:
        """Why `parts` devices cannot share its heads, or None."""
        if self.num_heads % parts or (self.num_kv_heads % parts and parts % self.num_kv_heads):
            return f"{self.num_heads} query heads and {self.num_kv_heads} KV heads do not split evenly"
        return None

    def problems(self, run: RunConfig) -> tuple[problems.Attention, problems.Attention]:
        """What the choice of kernels depends on: for one token of each sequence, and for many. `run` must be
        resolved."""
        sizes = (self.num_heads, self.num_kv_heads, self.head_dim, run.page_size, str(run.cache_dtype))
        turned = 0 if self.rope is None else self.rope.dim
        rotated = None if turned == self.head_dim else turned
        rest = {
            "window": self.window, "scale": self.scale, "softcap": self.softcap, "rotated": rotated,
            "sinks": self.sinks, "stored": self.reads is not None,
        }  # fmt: skip
        return (
            problems.Attention(device.platform(), "decode", *sizes, **rest),
            problems.Attention(device.platform(), "prefill", *sizes, **rest),
        )

    def impls(self, run: RunConfig) -> tuple[str, str]:
        """The implementations that `run` asks for. Naming one names that of a decode step; only "reference"
        asks for it everywhere."""
        return run.impl, "reference" if run.impl == "reference" else "auto"

    def kernels(self, run: RunConfig) -> tuple[str, str]:
        """The kernels chosen for these problems."""
        return selection.choose(self.problems(run)[0], impl=self.impls(run)[0]), self.prefill_kernel(run)

    def prefill_kernel(self, run: RunConfig) -> str:
        """The kernel chosen for many tokens of each sequence."""
        return selection.choose(self.problems(run)[1], impl=self.impls(run)[1])

    def pages(self, context: int, page_size: int, chunk: int | None) -> int:
        """Pages of a sequence of so many tokens, of which at most `chunk` are read at once. With a window
        they are a ring, as many as the window and a chunk touch. None: all keys stay."""
        every = -(-context // page_size)
        if self.window is None or chunk is None:
            return every
        return min(every, -(-(self.window - 1 + chunk) // page_size) + 1)

    def bytes_per_token(self, run: RunConfig) -> int:
        """Cache bytes of one more token; 0 where a window bounds them (`bytes_per_row`), or where they are
        another layer's."""
        return 0 if self._ring(run) or self.reads is not None else self._token_bytes(run)

    def bytes_per_row(self, run: RunConfig) -> int:
        """Cache bytes of a sequence whatever its length."""
        return 0 if self.reads is not None else self._ring(run) * run.page_size * self._token_bytes(run)

    def bytes_read(self, run: RunConfig, depth: int) -> int:
        """Bytes of keys and values that a decode step after `depth` tokens reads."""
        return min(depth, self.window or depth) * self._token_bytes(run)

    def operations(self, depth: int, tokens: int) -> int:
        """The number of operations for `tokens` tokens after the first `depth`, without the projections: two
        for each element of a query with each key and each value that it sees."""
        seen = range(depth + 1, depth + tokens + 1)
        return 4 * self.q_width * sum(min(keys, self.window or keys) for keys in seen)

    def scratch_bytes(self, run: RunConfig) -> int:
        """Bytes of a sequence's keys and values in float16, which prefill makes for a kernel that does not
        read them as they are stored (pallas_kernels/attention/prefill_pages.py); else 0."""
        stored = str(run.cache_dtype)
        as_stored = cache_layouts.get(stored).PREFILL in (stored, None)
        if as_stored or self.prefill_kernel(run) in EXACT:
            return 0
        tokens = -(-run.context // run.page_size) * run.page_size
        return tokens * 2 * self.num_kv_heads * cache_layouts.bytes_per_head("float16", self.head_dim)

    def copied_bytes(self, run: RunConfig) -> int:
        """Pages stay where they are."""
        return 0

    def _ring(self, run: RunConfig) -> int:
        """Pages of the ring; 0 where all keys stay."""
        every = self.pages(run.context, run.page_size, None)
        ring = self.pages(run.context, run.page_size, read_size(self.prefill_kernel(run)))
        return ring if ring < every else 0

    def _token_bytes(self, run: RunConfig) -> int:
        return 2 * self.num_kv_heads * cache_layouts.bytes_per_head(str(run.cache_dtype), self.head_dim)


def read_size(prefill_impl: str, rows: int = 1) -> int:
    """Tokens of each sequence that prefill takes through the layers at a time, of so many sequences: enough
    to fill a GPU's tensor cores, and few enough to bound the memory of activations."""
    return PREFILL_CHUNK if prefill_impl in EXACT else max(PREFILL_CHUNK, PREFILL_BATCH // rows)


PREFILL_CHUNK = 512  # tokens of a sequence
PREFILL_BATCH = 2048  # tokens of all sequences


TENSORS = {
    spec.field: spec
    for spec in (
        Spec("norm", "attn_norm.weight", "input_layernorm.weight", ("hidden",)),
        Spec("q", "attn_q.weight", "self_attn.q_proj.weight", ("q_rows", "hidden"), ("heads", None),
             joined="qkv"),
        Spec("k", "attn_k.weight", "self_attn.k_proj.weight", ("k_rows", "hidden"), ("kv heads", None),
             joined="qkv"),
        Spec("v", "attn_v.weight", "self_attn.v_proj.weight", ("v_rows", "hidden"), ("kv heads", None),
             joined="qkv"),
        Spec("q_bias", "attn_q.bias", "self_attn.q_proj.bias", ("q_rows",), ("heads",), joined="qkv_bias"),
        Spec("k_bias", "attn_k.bias", "self_attn.k_proj.bias", ("kv_width",), ("kv heads",),
             joined="qkv_bias"),
        Spec("v_bias", "attn_v.bias", "self_attn.v_proj.bias", ("kv_width",), ("kv heads",),
             joined="qkv_bias"),
        Spec("q_norm", "attn_q_norm.weight", "self_attn.q_norm.weight", ("head_dim",)),
        Spec("k_norm", "attn_k_norm.weight", "self_attn.k_norm.weight", ("k_norm_width",)),
        Spec("q_row_norm", "attn_q_norm.weight", "self_attn.q_norm.weight", ("q_width",), ("head inputs",)),
        Spec("k_row_norm", "attn_k_norm.weight", "self_attn.k_norm.weight", ("kv_width",), ("kv heads",)),
        Spec("q_head_norms", "attn_q_norm.weight", "self_attn.q_norm.weight", ("num_heads", "head_dim"),
             ("q head norms", None), plain=True),
        Spec("k_head_norms", "attn_k_norm.weight", "self_attn.k_norm.weight", ("num_kv_heads", "head_dim"),
             ("k head norms", None), plain=True),
        Spec("sinks", "attn_sinks.weight", "self_attn.sinks", ("num_heads",), ("sinks",)),
        Spec("o", "attn_output.weight", "self_attn.o_proj.weight", ("hidden", "q_width"),
             (None, "head inputs")),
        Spec("o_bias", "attn_output.bias", "self_attn.o_proj.bias", ("hidden",)),
        Spec("sub_norm", "attn_sub_norm.weight", "self_attn.attn_sub_norm.weight", ("q_width",),
             ("head inputs",)),
        Spec("post_norm", "post_attention_norm.weight", "post_attention_layernorm.weight", ("hidden",)),
    )
}  # fmt: skip


def in_order(settings: Attention, like: Attention) -> Attention:
    """The same attention with rotated pairs in the order of another's."""
    if settings.rope is None or like.rope is None:
        return settings
    rope = dataclasses.replace(settings.rope, interleaved=like.rope.interleaved)
    return dataclasses.replace(settings, rope=rope)


def order(field: str, before: ModelConfig, after: ModelConfig, layer: int) -> tuple[int, np.ndarray] | None:
    """Which rows (axis 0) of a tensor for `before` those of one for `after` are, where rotated pairs are
    halves in one and neighbours in the other. None: they are the same. Layers without a rope follow the
    others, as in llama.cpp's converter."""
    own = next(half for half in before.layers[layer].mixers if half.kind == "attention")
    rope, new = (
        next((a.settings.rope for a in config.groups("attention") if a.settings.rope is not None), None)
        for config in (before, after)
    )
    heads = {"q": own.num_heads, "k": own.num_kv_heads, "q_norm": 1, "k_norm": 1}.get(
        field.removesuffix("_bias")
    )
    if rope is None or new is None or heads is None or rope.interleaved == new.interleaved:
        return None
    dim = rope.dim
    shape = (dim // 2, 2) if rope.interleaved else (2, dim // 2)
    head = np.concatenate([np.arange(dim).reshape(shape).T.reshape(-1), np.arange(dim, own.head_dim)])
    return 0, (np.arange(heads)[:, None] * own.head_dim + head).reshape(-1)


@serializable
class Weights(struct.PyTreeNode):
    """Weights of the layers of a group. Matrices are outputs x inputs.

    qkv        queries, keys and values, as far as the layer makes them; one matrix where their formats agree
    norm       of the input; None: it is not normed
    qkv_bias   added to queries, keys and values
    q_norm, k_norm   of each head of queries and of keys, before the rope or after it
    q_row_norm, k_row_norm      the same of all heads of a token together
    q_head_norms, k_head_norms  the same of each head, by weights of its own
    sub_norm   of attention's output, before W_o
    o_bias     added to the output
    sinks      a score of each query head, which joins its softmax
    post_norm  of what the layer adds to x
    """

    qkv: tuple[LayerStack, ...]
    o: LayerStack
    norm: Float[Array, "L H"] | None = None
    qkv_bias: Float[Array, "L Q+2KV"] | None = None
    q_norm: Float[Array, "L D"] | None = None
    k_norm: Float[Array, "L D"] | None = None
    q_row_norm: Float[Array, "L Q"] | None = None
    k_row_norm: Float[Array, "L KV"] | None = None
    q_head_norms: Float[Array, "L Hq D"] | None = None
    k_head_norms: Float[Array, "L Hkv D"] | None = None
    sub_norm: Float[Array, "L Q"] | None = None
    o_bias: Float[Array, "L H"] | None = None
    sinks: Float[Array, "L heads"] | None = None
    post_norm: Float[Array, "L H"] | None = None

    @property
    def head_norms(self) -> tuple[jax.Array | None, jax.Array | None]:
        return self.q_norm, self.k_norm


@serializable
class State(states.State, struct.PyTreeNode):
    """Keys and values of the layers of a group.

    k, v    [layers, pages, page_size, kv heads, head_dim], as a layout stores it (pallas_kernels.
            cache_layouts); keys are rotated. None, as is ring, where those of another layer are read
    ring    int32 [rows, pages per row]: the page of tokens [i * page_size, (i + 1) * page_size) of a sequence
            whose window's pages are written over, so that entries repeat; None: KVCache.block_table says so
    impl, prefill_impl  the kernels chosen for one token of each sequence and for more
    """

    k: Pages | None = None
    v: Pages | None = None
    ring: Int[Array, "B pages_per_row"] | None = None
    impl: str = struct.field(pytree_node=False, default="reference")
    prefill_impl: str = struct.field(pytree_node=False, default="reference")
    recurrent: ClassVar[bool] = False

    @property
    def num_pages(self) -> int:
        return jax.tree.leaves(self.k)[0].shape[1]

    @property
    def page_size(self) -> int:
        return jax.tree.leaves(self.k)[0].shape[2]

    def copies(self, rows: Int[Array, "R"], pages: Int[Array, "R pages_per_row"]) -> Self:
        if self.ring is None:
            return self._with_pages(lambda array: array[:, pages.reshape(-1)])
        size = self.num_pages // len(self.ring)
        first = self.ring[rows, :size].reshape(-1)
        ring = jnp.asarray(ring_table(len(rows), self.ring.shape[1], size))
        return self._with_pages(lambda array: array[:, first]).replace(ring=ring)

    def taken(self, rows: Int[Array, "R"], begins: Int[Array, "R"] | None = None) -> Self:
        if self.ring is None:
            return self
        state = self if begins is None else self._with_ring_copies(begins, rows)
        return state.replace(ring=self.ring.at[rows].get(mode="clip", wrap_negative_indices=False))

    def put(self, new: Self, rows: Int[Array, "R"], saves: Int[Array, "R"] | None = None) -> Self:
        state = self.replace(k=new.k, v=new.v)
        return state if self.ring is None or saves is None else state._with_ring_copies(rows, saves)

    def with_row_copies(self, source: Int[Array, "R"], to: Int[Array, "R"]) -> Self:
        return self if self.ring is None else self._with_ring_copies(source, to)

    def with_page_copies(self, source: Int[Array, "R"], to: Int[Array, "R"]) -> Self:
        return self if self.ring is not None else self._with_copies(source, to)

    def page_content(self, pages: Int[Array, "R"]) -> Any:
        return None if self.ring is not None else self._content(pages)

    def with_page_content(self, content: Any, pages: Int[Array, "R"]) -> Self:
        return self if self.ring is not None else self._with_content(content, pages)

    def row_content(self, rows: Int[Array, "R"]) -> Any:
        return None if self.ring is None else self._content(self._ring_pages(rows))

    def with_row_content(self, content: Any, rows: Int[Array, "R"]) -> Self:
        if self.ring is None:
            return self
        own = jnp.where((rows < len(self.ring))[:, None], self._ring_pages(rows), self.num_pages)
        return self._with_content(content, own)

    def with_page_offset(self, device: Int[Array, ""]) -> Self:
        return self if self.ring is None else self.replace(ring=self.ring + device * self.num_pages)

    def sizes(self) -> dict[str, Any]:
        if self.k is None:
            return {"layers": 0}
        layers, _, _, heads, head_dim = cache_layouts.shape(self.k)
        return {"layers": layers, "KV heads": heads, "head_dim": head_dim}

    def _with_pages(self, change: Any) -> Self:
        return self.replace(k=jax.tree.map(change, self.k), v=jax.tree.map(change, self.v))

    def _content(self, pages: Int[Array, "..."]) -> Any:
        return jax.tree.map(lambda x: x[:, pages], (self.k, self.v))

    def _with_content(self, content: Any, pages: Int[Array, "..."]) -> Self:
        def put(own, new):
            return own.at[:, pages].set(new, mode="drop", wrap_negative_indices=False)

        k, v = jax.tree.map(put, (self.k, self.v), content)
        return self.replace(k=k, v=v)

    def _ring_pages(self, rows: Int[Array, "R"]) -> Int[Array, "R pages"]:
        """The pages of these rows' rings."""
        assert self.ring is not None
        size = self.num_pages // len(self.ring)
        return self.ring.at[rows, :size].get(mode="clip", wrap_negative_indices=False)

    def _with_copies(self, source: Int[Array, "P"], to: Int[Array, "P"]) -> Self:
        """With pages `to` as copies of pages `source`; those beyond the last are none. XLA reads and writes
        in one loop: every prefill copies so, and mostly nothing."""
        return self._with_content(self._content(source), to)

    def _with_ring_copies(self, source: Int[Array, "R"], to: Int[Array, "R"]) -> Self:
        """With rings of rows `to` as copies of those of `source`; those beyond the last are none. Mostly
        there are none, and nothing is read. Without the barrier XLA could read and write in one loop, for
        which it copies the whole array in a program of its own."""
        assert self.ring is not None
        moves = (source != to) & (to < len(self.ring))

        def copied(state: Self) -> Self:
            pages, own = state._ring_pages(source), state._ring_pages(to)
            targets = jnp.where(moves[:, None], own, state.num_pages)
            content = jax.lax.optimization_barrier(state._content(pages.reshape(-1)))
            return state._with_content(content, targets.reshape(-1))

        return jax.lax.cond(jnp.any(moves), copied, lambda state: state, self)


AXES = {
    "k": ("layers", "rows", None, "heads"),  # the pages of a sequence lie where its row does
    "v": ("layers", "rows", None, "heads"),
    "ring": ("rows",),
}


def empty(settings: Attention, layers: int, run: RunConfig, room: Room) -> State:
    """A state without tokens; a ring of pages where there is a window, and room.chunk says how far tokens
    read at once reach. Without arrays where another layer's are read."""
    every = settings.pages(room.context, run.page_size, None)
    ring = settings.pages(room.context, run.page_size, room.chunk)
    if settings.reads is not None:
        return State()
    total = room.rows * ring if ring < every or room.pages is None else room.pages
    shape = (layers, total, run.page_size, settings.num_kv_heads, settings.head_dim)
    k, v = (cache_layouts.empty(str(run.cache_dtype), shape) for _ in range(2))
    table = ring_table(room.rows, every, ring) if ring < every else None
    return State(k, v, None if table is None else jax.device_put(table, may_alias=False))


def ring_table(rows: int, every: int, ring: int) -> np.ndarray:
    """The block table of rows that own `ring` pages each, in order, and write them over and over."""
    return (np.arange(rows)[:, None] * ring + np.arange(every) % ring).astype(np.int32)


def block(x: Float[Array, "B T H"], place: Place, state: State, workspace):
    """Self-attention of one layer and its residual: x, the state and the workspace (`attend`)."""
    if place.taps:
        check_taps(place, state.impl if x.shape[-2] == 1 else state.prefill_impl)
    w = place.weights
    qkv = joined_product(place.read(x), w.qkv, place, w.norm)
    out, state, workspace = mix(qkv, x, place, state, workspace)
    return add_product(x, out, w.o, place, "attention", w.post_norm, w.sub_norm, w.o_bias), state, workspace


def mix(qkv: jax.Array, x: jax.Array, place: Place, state: State, workspace):
    """Attention's output before its projection, [B, T, Q], the state and the workspace; qkv has no bias yet,
    and x, the layer's input, is not needed."""
    w, settings, rope = place.weights, place.settings, place.settings.rope
    if settings.reads is not None:
        return _mix_stored(qkv, place, state), state, workspace
    k, v = state.k, state.v
    assert k is not None and v is not None
    qkv = qkv if w.qkv_bias is None else qkv + w.qkv_bias[place.index]
    if settings.keys_as_values:
        width = math.prod(cache_layouts.shape(k)[3:])  # of the KV heads that this device has
        qkv = jnp.concatenate([qkv, qkv[..., -width:]], axis=-1)
    table = place.block_table if state.ring is None else state.ring
    assert table is not None
    out, k_pages, v_pages, workspace = attend(
        qkv, k, v, table, place.positions, place.index,
        rotation=None if rope is None else place.rotations[rope],
        interleaved=rope is not None and rope.interleaved, norms=_qk_norms(place), eps=place.eps,
        num_keys=place.num_keys, impl=state.impl, prefill_impl=state.prefill_impl, window=settings.window,
        scale=settings.scale, softcap=settings.softcap, gated=settings.gated,
        norms_after_rope=settings.norms_after_rope, temperature=temperatures(place),
        workspace=workspace, taps=place.taps, sinks=w.sinks, v_norm=settings.v_norm, tokens=place.tokens,
    )  # fmt: skip
    return out, state.replace(k=k_pages, v=v_pages), workspace


def _mix_stored(q: Float[Array, "B T Q"], place: Place, state: State) -> Float[Array, "B T Q"]:
    """The same of queries alone, with the keys and values of the layer that `settings.reads` names, which has
    stored those of the same tokens."""
    w, settings = place.weights, place.settings
    source, layer = place.source
    table = place.block_table if source.ring is None else source.ring
    assert table is not None and place.num_keys is not None
    q = place.tapped("q", q.reshape(*q.shape[:2], -1, settings.head_dim))
    q = q if w.q_norm is None else place.norm(q, w.q_norm)
    if settings.rope is not None:
        q = apply_rope(q, *place.rotations[settings.rope], settings.rope.interleaved)
    return attend_stored(
        place.tapped("rot_q", q), source.k, source.v, table, place.positions, layer,
        num_keys=place.num_keys, impl=state.impl if q.shape[1] == 1 else state.prefill_impl,
        window=settings.window, scale=settings.scale, softcap=settings.softcap, taps=place.taps,
    )  # fmt: skip


def _qk_norms(place: Place) -> Any:
    """QK-norm for `attend`: weights of the norm that kernels have, or a function where it is another."""
    w = place.weights
    if w.q_row_norm is not None:

        def rows(x: jax.Array, norms: Float[Array, "L D"]) -> jax.Array:
            return place.norm(x.reshape(*x.shape[:2], -1), norms, split=True).reshape(x.shape)

        return lambda q, k: (rows(q, w.q_row_norm), rows(k, w.k_row_norm))
    q_norms, k_norms = w.head_norms if w.q_head_norms is None else (w.q_head_norms, w.k_head_norms)
    if w.q_head_norms is not None or (place.layer_norm and q_norms is not None):
        return lambda q, k: (place.norm(q, q_norms), place.norm(k, k_norms))
    return w.head_norms


def phases(settings: Attention) -> tuple[Product, Mixing, Product]:
    """The parts of `block` that measure/profile.py times."""

    def projections(place: Place, x: jax.Array) -> jax.Array:
        return joined_product(x, place.weights.qkv, place, place.weights.norm)

    return (
        Product("qkv", ("qkv",), projections),
        Mixing(
            "attention",
            settings.q_rows + settings.k_rows + settings.v_rows,
            lambda qkv, place, state, workspace: mix(qkv, qkv, place, state, workspace),
        ),
        output_product("attention output", "o", settings.q_width),
    )
