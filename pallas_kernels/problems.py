"""What is asked of a kernel: one dataclass for each op, with the sizes from which selection.py chooses.

CALL of a problem lists the arguments of a candidate's `run`, keywords after the star. "": `run` has arguments
of each candidate's own, and nobody can register more of them.
"""

import dataclasses
from typing import ClassVar, Literal

from pallas_kernels.precision import bits_for


@dataclasses.dataclass(frozen=True)
class Matmul:
    """A product of activations with one matrix, or with two of the same shape (SwiGLU).

    platform  "cpu", "tpu", or "sm_90" for a GPU of compute capability 9.0
    format    in which the matrix is stored
    n, k      outputs and inputs
    matrices  2 for SwiGLU's gate and up
    bits      to which kernels may round activations
    few_rows_bits  the same for up to FEW_ROWS rows (precision.py); None: bits
    mixed     whether other layers of its stack, or what it is joined with, have other formats
    folded    whether inputs must be rotated before (rotation.py)

    run(...) -> norm(x) W.T + residual for one matrix, activation(norm(x) G.T, norm(x) U.T) for two: float32
    [*batch, N], for x [*batch, K] and a tuple of QTensors. `part_layer` indexes their stacks and `layer`
    gamma: the two differ where a file mixes formats, and None means no stack. Without gamma there is no norm.
    """

    CALL: ClassVar[str] = "x, weights, part_layer, layer, gamma, eps, residual, activation"
    platform: str
    format: str
    n: int
    k: int
    matrices: int = 1
    bits: int = 8
    mixed: bool = False
    few_rows_bits: int | None = None
    folded: bool = False

    def for_rows(self, rows: int) -> "Matmul":
        """The same for this number of rows alone."""
        bits = bits_for(rows, self.bits, self.few_rows_bits)
        return dataclasses.replace(self, bits=bits, few_rows_bits=None)

    def __str__(self):
        where = "in a mixed stack " * self.mixed
        return f"matmul {self.format} {self.n} x {self.k} {where}on {self.platform}"


@dataclasses.dataclass(frozen=True)
class Experts:
    """Products of tokens, which are the rows, with the matrices of their experts.

    kernel  that multiplies one row with such a matrix (qtensor.Products)
    whole   whether that is the same of a layer's gate, up and down, and gate and up have the same format in
            each layer: a feed-forward then may be one
    folded  whether inputs must be rotated before
    columns  the most that a matrix of such a feed-forward has; 0 without one
    """

    CALL: ClassVar[str] = ""
    platform: str
    kernel: str
    whole: bool = False
    folded: bool = False
    columns: int = 0

    def __str__(self):
        return f"products by expert, each by {self.kernel}, on {self.platform}"


@dataclasses.dataclass(frozen=True)
class RouterLogits:
    """The norm of a router's input and its logits, of tokens, which are the rows.

    format, count, hidden  of the router's matrix
    kernel  that multiplies one row with an expert's matrix (qtensor.Products): with the reference's products
            goes the reference's router
    mixed   whether the routers of other layers have other formats
    """

    CALL: ClassVar[str] = ""
    platform: str
    format: str
    count: int
    hidden: int
    kernel: str
    mixed: bool = False

    def __str__(self):
        return f"router {self.format} {self.count} x {self.hidden} on {self.platform}"


@dataclasses.dataclass(frozen=True)
class Route:
    """The choice of each token's experts, from the logits of its router.

    count, used  experts of a layer, and of a token
    kernel  as of RouterLogits
    groups  of experts, of which a token uses some
    """

    CALL: ClassVar[str] = ""
    platform: str
    count: int
    used: int
    kernel: str
    groups: int = 1

    def __str__(self):
        return f"choice of {self.used} of {self.count} experts on {self.platform}"


@dataclasses.dataclass(frozen=True)
class Attention:
    """Attention of one query a row ("decode") or of many ("prefill") against a paged cache.

    window, scale, softcap  of scores (attention/scores.py)
    rotated  values of a head that rope turns; None: all; 0: none
    sinks    whether each query head has one (attention/reference.py)
    stored   whether the keys and values are another layer's, which has stored those of the same tokens
    values   numbers of a key, the first, that are its value (latent/api.py): `run` gets the same pages
             twice, and no more of its output than these is read; None: values have pages of their own
    expanded  widths of a head's key and value as they would be made of these numbers; None as for values

    run(...) -> float32 [B, T, H, D], as attention/reference.py describes. Queries are rotated, and the pages
    have the new keys and values already.
    """

    CALL: ClassVar[str] = (
        "q, k_pages, v_pages, block_table, positions, layer, *, num_keys, window, scale, softcap, sinks"
    )
    platform: str
    phase: Literal["decode", "prefill"]
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    cache_dtype: str
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    rotated: int | None = None
    sinks: bool = False
    stored: bool = False
    values: int | None = None
    expanded: tuple[int, int] | None = None

    def __str__(self):
        heads = f"{self.heads} x {self.kv_heads} x {self.head_dim}"
        return f"{self.phase} attention {heads}, {self.cache_dtype} cache on {self.platform}"


Parts = tuple[tuple[str, int], ...]  # of a product: (format, rows) that lie below each other


@dataclasses.dataclass(frozen=True)
class Step:
    """All layers of a decode step.

    rows        sequences
    layers      of each layer its five products (q, k and v joined, o, gate, up, down; a delta net's inputs
                and output in place of the first two), each as the (format, rows) that lie below each other;
                None where q, k and v are not joined or a matrix has no tiles
    widths      of each layer the inputs of o; (): as many as q is wide
    plain       whether all layers mix tokens by attention that has nothing but what `attention` says
    folded      whether weights are folded (rotation.py)
    post_norms  whether what each half of a layer adds to its input is normed first; then it may do without
                the norm before
    unknown     names of settings and arrays of the model that no kernel of several phases was written for
    attention   of one query a row
    bits        to which kernels may round activations; down_bits: those that down reads, with up to FEW_ROWS
                rows (precision.py); None: the same
    split       whether layers are split over devices, which add their parts within each
    experts     how many have a layer's gate, up and down, and how many of them a token uses; None: there is
                one of each
    """

    CALL: ClassVar[str] = ""
    platform: str
    rows: int
    hidden: int
    ffn: int
    layers: tuple[tuple[Parts, ...], ...] | None
    attention: Attention
    bits: int = 8
    split: bool = False
    widths: tuple[int, ...] = ()
    plain: bool = True
    folded: bool = False
    post_norms: bool = False
    unknown: tuple[str, ...] = ()
    experts: tuple[int, int] | None = None
    down_bits: int | None = None

    @property
    def bits_of_down(self) -> int:
        """To which kernels may round what down reads."""
        return bits_for(self.rows, self.bits, self.down_bits)

    def __str__(self):
        sizes = f"{self.hidden} wide, feed-forward {self.ffn}"
        return f"decode step, rows: {self.rows}, {sizes} on {self.platform}"

    @property
    def inputs_of_o(self) -> tuple[int, ...]:
        """Of each layer."""
        return self.widths or (self.attention.heads * self.attention.head_dim,) * len(self.layers or ())


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The draw of each row's next token from logits over a vocabulary.

    run(...) -> tokens, seen, counts, as sampling/api.py describes.
    """

    CALL: ClassVar[str] = "logits, rules, keys, positions"
    platform: str
    vocabulary: int

    def __str__(self):
        return f"sampling of {self.vocabulary} tokens on {self.platform}"


@dataclasses.dataclass(frozen=True)
class DeltaNet:
    """A gated delta net of a few tokens a row ("decode") or of many ("prefill").

    conv  tokens that its convolution sees

    run(...) -> y, states, tails, as delta/api.py describes; weights are conv, decay, dt and norm by name.
    """

    CALL: ClassVar[str] = "qkv_z, gates, states, tails, positions, layer, weights, eps, grouped, stores"
    platform: str
    phase: Literal["decode", "prefill"]
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv: int

    def __str__(self):
        heads = f"{self.k_heads} x {self.k_dim}, {self.v_heads} x {self.v_dim}"
        return f"{self.phase} delta net {heads} on {self.platform}"


Problem = Matmul | Experts | RouterLogits | Route | Attention | Step | Sampling | DeltaNet
