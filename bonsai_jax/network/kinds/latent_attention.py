"""Multi-head latent attention (DeepSeek-AI 2024, 2.1), whose cache has one row for each token and all heads.

    c, k = W_kv norm(x);  row = [norm(c), rope(k)]                         kv_rank + rope numbers
    q_h = W_q norm(W_a norm(x)) = [n_h, r_h]                               or W_q norm(x)
    o_h = V_h softmax(scale [K_h n_h, rope(r_h)] rows^T) rows[:kv_rank]
    x + W_o o

This is the absorbed form: K_h, which makes a head's key of c, multiplies its query, and V_h, which makes its
value of c, multiplies the sum of the rows. Keys and values by head are many times as large. Only prefill on
Hopper makes them, for the time of a layer (pallas_kernels/latent/prefill.py). Over a mesh each device has
some of the heads, and all rows.
"""

import dataclasses
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from bonsai_jax.config import RunConfig
from bonsai_jax.network.kinds import state as states
from bonsai_jax.network.kinds.phases import Mixing, Product, output_product
from bonsai_jax.network.kinds.place import Place, add_product, check_taps, joined_product, temperatures
from bonsai_jax.network.kinds.state import Room
from bonsai_jax.network.rope import Rope
from bonsai_jax.weights.placement import Runs, even_runs
from bonsai_jax.weights.specs import Fused, Rows, Spec
from pallas_kernels import (
    LayerStack,
    attend_latent,
    cache_layouts,
    device,
    matmul,
    problems,
    selection,
    serializable,
)
from pallas_kernels.cache_layouts import Pages

PRODUCTS = None  # no fused launch computes it
SITES = ("q", "scores", "pattern", "z")
ADAPTED = ("q", "q_a", "q_b", "kv_a", "o")  # matrices that adapters change (network/adapter.py)


@dataclasses.dataclass(frozen=True)
class LatentAttention:
    """Sizes of a layer's latent attention.

    num_heads  query heads
    q_rank     width of the vector that queries are made of; 0: they are made of the input
    kv_rank    width of the vector c that keys and values are made of
    nope_dim   numbers of a head's query and key that do not turn; they are made of c
    value_dim  numbers of a head's value
    rope       turns the rest of a query, and of the key that all heads share
    scale      factor on scores
    temperature  as in Attention
    """

    num_heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    value_dim: int
    rope: Rope
    scale: float
    temperature: tuple[float, int] | None = None

    kind = "latent_attention"
    num_kv_heads = 1
    plain = False  # no launch of all layers computes it

    def __post_init__(self):
        sizes = (self.num_heads, self.kv_rank, self.nope_dim, self.value_dim)
        if min(sizes) <= 0 or self.q_rank < 0:
            raise ValueError(
                f"model config: latent attention of {self.num_heads} heads, ranks {self.q_rank} and "
                f"{self.kv_rank}, keys of {self.nope_dim}, values of {self.value_dim}; each must be positive"
            )

    @property
    def rope_dim(self) -> int:
        return self.rope.dim

    @property
    def head_dim(self) -> int:
        """Numbers of a row of the cache."""
        return self.kv_rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Numbers of a head's query as projected."""
        return self.nope_dim + self.rope_dim

    @property
    def q_width(self) -> int:
        return self.num_heads * self.query_dim

    @property
    def direct_q_width(self) -> int:
        """Queries that are made of the input."""
        return 0 if self.q_rank else self.q_width

    @property
    def output_width(self) -> int:
        """Inputs of W_o."""
        return self.num_heads * self.value_dim

    def for_device(self, parts: int) -> "LatentAttention":
        return dataclasses.replace(self, num_heads=self.num_heads // parts)

    def runs(self, axis: str, parts: int) -> Runs:
        """Which part of a logical axis of its arrays each device has."""
        sizes = {"heads": self.q_width, "head inputs": self.output_width, "head matrices": self.num_heads}
        return even_runs(sizes[axis], parts)

    def refuses_split(self, parts: int) -> str | None:
        """Why `parts` devices cannot share its heads, or None."""
        return f"{self.num_heads} heads do not split evenly" if self.num_heads % parts else None

    def problems(self, run: RunConfig) -> tuple[problems.Attention, problems.Attention]:
        """What the choice of kernels depends on: for one token of each sequence, and for many. `run` must be
        resolved."""
        sizes = (self.num_heads, 1, self.head_dim, run.page_size, str(run.cache_dtype))

        def problem(phase: Literal["decode", "prefill"]) -> problems.Attention:
            return problems.Attention(
                device.platform(), phase, *sizes, scale=self.scale, rotated=self.rope_dim,
                values=self.kv_rank, expanded=(self.query_dim, self.value_dim),
            )  # fmt: skip

        return problem("decode"), problem("prefill")

    def impls(self, run: RunConfig) -> tuple[str, str]:
        """As of Attention."""
        return run.impl, "reference" if run.impl == "reference" else "auto"

    def kernels(self, run: RunConfig) -> tuple[str, str]:
        """The kernels chosen for these problems."""
        return selection.choose(self.problems(run)[0], impl=self.impls(run)[0]), self.prefill_kernel(run)

    def prefill_kernel(self, run: RunConfig) -> str:
        """The kernel chosen for many tokens of each sequence."""
        return selection.choose(self.problems(run)[1], impl=self.impls(run)[1])

    def bytes_per_token(self, run: RunConfig) -> int:
        """Cache bytes of one more token."""
        return cache_layouts.bytes_per_head(str(run.cache_dtype), self.head_dim)

    def bytes_per_row(self, run: RunConfig) -> int:
        return 0

    def bytes_read(self, run: RunConfig, depth: int) -> int:
        """Bytes of rows that a decode step after `depth` tokens reads, each once."""
        return depth * self.bytes_per_token(run)

    def operations(self, depth: int, tokens: int) -> int:
        """The number of operations for `tokens` tokens after the first `depth`, without the projections: two
        for each number of a query with each row, and for each number of the row that is its value."""
        seen = sum(range(depth + 1, depth + tokens + 1))
        absorbed = 2 * tokens * self.num_heads * self.kv_rank * (self.nope_dim + self.value_dim)
        return absorbed + 2 * self.num_heads * (self.head_dim + self.kv_rank) * seen

    def scratch_bytes(self, run: RunConfig) -> int:
        return 0

    def copied_bytes(self, run: RunConfig) -> int:
        return 0


def _kv_b_rows(is_keys: bool) -> Fused:
    """Rows of kv_b_proj, in which those of a head's keys and of its values follow each other."""

    def rows(a: LatentAttention) -> Rows:
        size = a.nope_dim + a.value_dim
        return Rows(a.num_heads, size, ((0, a.nope_dim) if is_keys else (a.nope_dim, size),))

    return Fused(None, "self_attn.kv_b_proj.weight", rows, transposed=is_keys)


TENSORS = {
    spec.field: spec
    for spec in (
        Spec("norm", "attn_norm.weight", "input_layernorm.weight", ("hidden",)),
        Spec("q_a", "attn_q_a.weight", "self_attn.q_a_proj.weight", ("q_rank", "hidden"), joined="latents"),
        Spec("kv_a", "attn_kv_a_mqa.weight", "self_attn.kv_a_proj_with_mqa.weight", ("head_dim", "hidden"),
             joined="latents"),
        Spec("q_a_norm", "attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight", ("q_rank",)),
        Spec("kv_a_norm", "attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight", ("kv_rank",)),
        Spec("q", "attn_q.weight", "self_attn.q_proj.weight", ("direct_q_width", "hidden"),
             ("heads", None)),
        Spec("q_b", "attn_q_b.weight", "self_attn.q_b_proj.weight", ("q_width", "q_rank"), ("heads", None)),
        Spec("k_b", "attn_k_b.weight", "self_attn.k_b_proj.weight", ("num_heads", "kv_rank", "nope_dim"),
             ("head matrices", None, None), fused=_kv_b_rows(True)),
        Spec("v_b", "attn_v_b.weight", "self_attn.v_b_proj.weight", ("num_heads", "value_dim", "kv_rank"),
             ("head matrices", None, None), fused=_kv_b_rows(False)),
        Spec("o", "attn_output.weight", "self_attn.o_proj.weight", ("hidden", "output_width"),
             (None, "head inputs")),
    )
}  # fmt: skip


@serializable
class Weights(struct.PyTreeNode):
    """Weights of the layers of a group. Matrices are outputs x inputs.

    latents    W_a, where there is one, and W_kv, one matrix where their formats agree
    kv_a_norm  of c
    k_b, v_b   K and V, a matrix for each head
    q_a_norm, q_b  of W_a's output, and what makes queries of it; None: `q` makes them of the input
    """

    norm: Float[Array, "L H"]
    latents: tuple[LayerStack, ...]
    kv_a_norm: Float[Array, "L C"]
    k_b: LayerStack
    v_b: LayerStack
    o: LayerStack
    q_a_norm: Float[Array, "L R"] | None = None
    q_b: LayerStack | None = None
    q: LayerStack | None = None


@serializable
class State(states.State, struct.PyTreeNode):
    """Rows of the layers of a group.

    k     [layers, pages, page_size, 1, kv_rank + rope], as a layout stores it (pallas_kernels.cache_layouts):
          keys, whose first kv_rank numbers are values
    impl, prefill_impl  the kernels chosen for one token of each sequence and for more
    """

    k: Pages
    impl: str = struct.field(pytree_node=False, default="reference")
    prefill_impl: str = struct.field(pytree_node=False, default="reference")
    recurrent: ClassVar[bool] = False
    ring: ClassVar[None] = None  # there are no windows

    @property
    def num_pages(self) -> int:
        return jax.tree.leaves(self.k)[0].shape[1]

    @property
    def page_size(self) -> int:
        return jax.tree.leaves(self.k)[0].shape[2]

    def copies(self, rows: Int[Array, "R"], pages: Int[Array, "R pages_per_row"]) -> Self:
        return self.replace(k=jax.tree.map(lambda array: array[:, pages.reshape(-1)], self.k))

    def taken(self, rows: Int[Array, "R"], begins: Int[Array, "R"] | None = None) -> Self:
        return self

    def put(self, new: Self, rows: Int[Array, "R"], saves: Int[Array, "R"] | None = None) -> Self:
        return self.replace(k=new.k)

    def with_row_copies(self, source: Int[Array, "R"], to: Int[Array, "R"]) -> Self:
        return self

    def page_content(self, pages: Int[Array, "R"]) -> Any:
        return jax.tree.map(lambda x: x[:, pages], self.k)

    def with_page_content(self, content: Any, pages: Int[Array, "R"]) -> Self:
        def put(own, new):
            return own.at[:, pages].set(new, mode="drop", wrap_negative_indices=False)

        return self.replace(k=jax.tree.map(put, self.k, content))

    def row_content(self, rows: Int[Array, "R"]) -> Any:
        return None

    def with_row_content(self, content: Any, rows: Int[Array, "R"]) -> Self:
        return self

    def with_page_copies(self, source: Int[Array, "R"], to: Int[Array, "R"]) -> Self:
        def copied(x):
            return x.at[:, to].set(x[:, source], mode="drop", wrap_negative_indices=False)

        return self.replace(k=jax.tree.map(copied, self.k))

    def sizes(self) -> dict[str, Any]:
        layers, *_, width = cache_layouts.shape(self.k)
        return {"layers": layers, "numbers of a row": width}


AXES = {"k": ("layers", "rows")}  # every device has all of a row


def empty(settings: LatentAttention, layers: int, run: RunConfig, room: Room) -> State:
    """A state without rows."""
    total = room.rows * -(-room.context // run.page_size) if room.pages is None else room.pages
    shape = (layers, total, run.page_size, 1, settings.head_dim)
    return State(cache_layouts.empty(str(run.cache_dtype), shape))


def block(x: Float[Array, "B T H"], place: Place, state: State, workspace):
    """Latent attention of one layer and its residual: x, the state and the workspace (`attend_latent`)."""
    if place.taps:
        check_taps(place, state.impl if x.shape[-2] == 1 else state.prefill_impl)
    out, state, workspace = _mix(*_projections(place, place.read(x)), place, state, workspace)
    return add_product(x, out, place.weights.o, place, "attention", None), state, workspace


def _projections(
    place: Place, x: Float[Array, "B T H"]
) -> tuple[Float[Array, "B T Q"], Float[Array, "B T W"]]:
    """Queries of all heads, and what ends with c and the key that turns."""
    w, settings = place.weights, place.settings
    latents = joined_product(x, w.latents, place, w.norm)
    if w.q is not None:
        return matmul(x, w.q, place.index, **place.gamma(w.norm)), latents
    a = latents[..., : settings.q_rank]
    return matmul(a, w.q_b, place.index, **place.gamma(w.q_a_norm)), latents


def mix(made: Float[Array, "B T width"], place: Place, state: State, workspace):
    """`_mix` of projections side by side."""
    width = made.shape[-1] - place.settings.head_dim
    return _mix(made[..., :width], made[..., width:], place, state, workspace)


def _mix(q: Float[Array, "B T Q"], latents: Float[Array, "B T W"], place: Place, state: State, workspace):
    """Attention's output before its projection, [B, T, H V], the state and the workspace."""
    w, settings, lead = place.weights, place.settings, q.shape[:-1]
    q = place.tapped("q", q.reshape(*lead, -1, settings.query_dim))
    if (temperature := temperatures(place)) is not None:
        q = q * temperature[..., None, None]
    assert place.block_table is not None and place.num_keys is not None and not place.layer_norm
    out, pages, workspace = attend_latent(
        q, latents, w.k_b, w.v_b, state.k, place.block_table, place.positions, place.index,
        rotation=place.rotations[settings.rope], interleaved=settings.rope.interleaved, norm=w.kv_a_norm,
        eps=place.eps, scale=settings.scale, num_keys=place.num_keys, impl=state.impl,
        prefill_impl=state.prefill_impl, workspace=workspace, taps=place.taps,
    )  # fmt: skip
    return place.tapped("z", out).reshape(*lead, -1), state.replace(k=pages), workspace


def phases(settings: LatentAttention) -> tuple[Product, Mixing, Product]:
    """The parts of `block` that measure/profile.py times; K and V are multiplied within the second."""
    queries = ("q_b",) if settings.q_rank else ("q",)

    def side_by_side(place: Place, x: jax.Array) -> jax.Array:
        q, latents = _projections(place, x)
        return jnp.concatenate([q, latents[..., -settings.head_dim :]], axis=-1)

    return (
        Product("q and latents", (*queries, "latents"), side_by_side),
        Mixing("latent attention", settings.q_width + settings.head_dim, mix),
        output_product("attention output", "o", settings.output_width),
    )
