"""Which kernel runs an op: chosen once, at load, from the problem's sizes alone, and explained.

    op         weights or cache    rows                        GPU        kernel
    Matmul     q1 (1 bit)          1 to 3                      from 8.0   q1_decode_b1
                                   4 to 8                                 q1_decode_s8, or q1_decode_b1
                                   from 9                      9.0        q1_prefill_sm90
               kq (2 to 8 bits)    1 to 8, 1 to 16             from 8.0   kq_decode
                                   from 9 (16 bits: from 17)   9.0        kq_prefill_sm90
               not float32         other, from 9               any        cublas
               CPU, not float32    any                         none       cpu
               any                 other                       or none    reference
    Attention  any                 1 query of each sequence    from 8.0   decode
               8 or 16 bits        more                        9.0        prefill_sm90
               8 or 16, to 128     more                        from 8.0   prefill_sm80
               any                 1 query of each sequence    none       cpu
               any                 other                       or none    reference
    Step       q1                  1 to 16, if they have room  from 9.0   one_launch
               kq, with experts    1, if it has room           from 8.0   one_launch
               kq                  as many as have room        from 8.0   layer_products
               q1, kq              9 to 256                    9.0        layer_gemms
               any                 other                       any        launches
    DeltaNet   float32             1 token of each sequence    from 8.0   delta_step
               float32             more                        from 8.0   delta_chunks
               float32             any                         or none    reference
    Sampling   any                 any                         from 8.0   two_launches
               any                 any                         or none    reference

A family is what a format's file says its tiles are for (pallas_kernels/formats). Candidates are asked in the
order of the table; each says why it cannot, or takes the problem.
"""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Literal

from pallas_kernels import cache_layouts, device, formats
from pallas_kernels.qtensor import Products, QTensor, tile
from pallas_kernels.tiles import COLUMNS, ROWS


@dataclasses.dataclass(frozen=True)
class Matmul:
    """A product of activations with one matrix, or with two of the same shape (SwiGLU).

    platform  "cpu", "tpu", or "sm_90" for a GPU of compute capability 9.0
    format    in which the matrix is stored
    n, k      outputs and inputs
    matrices  2 for SwiGLU's gate and up
    bits      to which kernels may round activations
    mixed     whether other layers of its stack, or what it is joined with, have other formats
    """

    platform: str
    format: str
    n: int
    k: int
    matrices: int = 1
    bits: int = 8
    mixed: bool = False

    def __str__(self):
        where = "in a mixed stack " * self.mixed
        return f"matmul {self.format} {self.n} x {self.k} {where}on {self.platform}"


@dataclasses.dataclass(frozen=True)
class Attention:
    """Attention of one query a row ("decode") or of many ("prefill") against a paged cache.

    window  keys that a query sees, itself among them; None: all before it
    scale   of scores; None: 1 / sqrt(head_dim)
    rotated  values of a head that rope turns; None: all
    """

    platform: str
    phase: Literal["decode", "prefill"]
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    cache_dtype: str
    window: int | None = None
    scale: float | None = None
    rotated: int | None = None

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
    plain       whether all layers mix tokens by attention without gates
    folded      whether weights are folded (rotation.py)
    attention   of one query a row
    activation  of the feed-forward's gate
    split       whether layers are split over devices, which add their parts within each
    experts     how many have a layer's gate, up and down, and how many of them a token uses; None: there is
                one of each
    """

    platform: str
    rows: int
    hidden: int
    ffn: int
    layers: tuple[tuple[Parts, ...], ...] | None
    attention: Attention
    bits: int = 8
    activation: str = "silu"
    split: bool = False
    widths: tuple[int, ...] = ()
    plain: bool = True
    folded: bool = False
    experts: tuple[int, int] | None = None

    def __str__(self):
        sizes = f"{self.hidden} wide, feed-forward {self.ffn}"
        return f"decode step, rows: {self.rows}, {sizes} on {self.platform}"

    @property
    def inputs_of_o(self) -> tuple[int, ...]:
        """Of each layer."""
        return self.widths or (self.attention.heads * self.attention.head_dim,) * len(self.layers or ())


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The draw of each row's next token from logits over a vocabulary."""

    platform: str
    vocabulary: int

    def __str__(self):
        return f"sampling of {self.vocabulary} tokens on {self.platform}"


@dataclasses.dataclass(frozen=True)
class DeltaNet:
    """A gated delta net of one token a row ("decode") or of many ("prefill").

    conv  tokens that its convolution sees
    """

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


Problem = Matmul | Attention | Step | Sampling | DeltaNet


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One candidate: its name, whether it was taken, and why or why not."""

    kernel: str
    taken: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A kernel that may run an op.

    refuses      why it cannot run a problem; None: it can
    first, last  rows of activations that it is for; None: any number from the first on
    range_of     of a problem, in place of the two
    pallas       whether it is a Pallas kernel; else XLA's own code
    """

    refuses: Callable[..., str | None]
    first: int = 1
    last: int | None = None
    range_of: Callable[..., tuple[int, int | None]] | None = None
    pallas: bool = True

    def rows(self, problem: "Problem") -> tuple[int, int | None]:
        """The first and the last number of rows that it is for."""
        return self.range_of(problem) if self.range_of else (self.first, self.last)


FIRST = "the first that can run it"
STEP_ROWS = 256  # of a decode step, at most
NEEDS_LLVM = "needs the package llvmlite: install the extra `cpu`"
NEEDS_HOPPER = "needs Hopper's tensor core instructions (compute capability 9.0)"
NEEDS_AMPERE = "needs an NVIDIA GPU of compute capability 8.0 or newer"


def _older_than(platform: str, capability: int) -> bool:
    return not platform.startswith("sm_") or int(platform[3:]) < capability


def _of_family(family: str, problem: Matmul) -> str | None:
    if _older_than(problem.platform, 80):
        return NEEDS_AMPERE
    if (own := formats.family(problem.format)) is None:
        return f"no kernel for matmul of {problem.format} in this version"
    return None if own == family else f"is for tiles of {family}; those of {problem.format} are {own}"


def _q1_decode_s8(problem: Matmul) -> str | None:
    if reason := _of_family("q1", problem):
        return reason
    from pallas_kernels.matmul import q1_decode_s8  # only GPUs need it

    n_tiles, steps = -(-problem.n // ROWS), -(-problem.k // COLUMNS)
    room = q1_decode_s8.plan(n_tiles, steps, problem.matrices, problem.bits, device.shared_bytes())
    return None if room else f"integers of {problem.k} activations a row leave no room for weights"


def _q1_decode_ring(problem: Matmul) -> str | None:
    if reason := _on_hopper("q1", problem):
        return reason
    from pallas_kernels.matmul import q1_decode_ring  # only GPUs need it

    return q1_decode_ring.refuses(problem.n, problem.k, problem.matrices, problem.bits)


def _on_hopper(family: str, problem: Matmul) -> str | None:
    if problem.platform != "sm_90":
        return NEEDS_HOPPER
    if reason := _of_family(family, problem):
        return reason
    if family == "q1" and -(-problem.n // 16) % 4:
        return "its tiles are 64 outputs"
    return None


def _rows_of_kq_prefill(problem: Matmul) -> tuple[int, int | None]:
    """It rounds activations to float16: to more bits than 8, but to fewer than 16. In a loop of layers, as
    prefill's, XLA branches by the format that a layer has, and the GPU waits for the host."""
    return 9 if problem.bits == 8 else 17, STEP_ROWS if problem.mixed else None


def _cublas(problem: Matmul) -> str | None:
    if not problem.platform.startswith("sm_"):
        return "needs an NVIDIA GPU: elsewhere float16 is no faster than the reference"
    return "float32 weights were asked for, and it rounds them" if problem.format == "f32" else None


def _cpu(problem: Matmul) -> str | None:
    if problem.platform != "cpu":
        return "is for CPUs"
    if not hasattr(formats.get(problem.format), "CPU"):
        if problem.format == "f32":
            return "float32 weights are multiplied as fast by the reference"
        return f"no kernel for matmul of {problem.format} on CPUs in this version"
    if importlib.util.find_spec("llvmlite") is None:
        return NEEDS_LLVM
    return None


def _attention(problem: Attention) -> str | None:
    if _older_than(problem.platform, 80):
        return NEEDS_AMPERE
    if problem.window is not None:
        return f"a query sees {problem.window} keys; the kernel knows no window"
    if problem.scale is not None:
        return f"scores are scaled by {problem.scale}; the kernel has 1 / sqrt(head_dim)"
    if problem.head_dim not in (64, 128, 256):
        return f"head_dim is {problem.head_dim}; the kernel has 64, 128 and 256"
    return None


def _cpu_attention(problem: Attention) -> str | None:
    if problem.platform != "cpu":
        return "is for CPUs"
    if problem.cache_dtype not in ("float32", "float16", "bfloat16", "int8"):
        return f"the cache is {problem.cache_dtype}; the kernel reads float32, float16, bfloat16 and int8"
    if problem.head_dim % 16:
        return f"head_dim is {problem.head_dim}; the kernel has multiples of 16"
    return NEEDS_LLVM if importlib.util.find_spec("llvmlite") is None else None


def _phase(phase: str) -> Callable[[Attention], str | None]:
    def refuses(problem: Attention) -> str | None:
        return None if problem.phase == phase else f"is for {phase}"

    return refuses


def _prefill_sm80(problem: Attention) -> str | None:
    if problem.phase == "prefill" and problem.head_dim > 128:
        return f"head_dim is {problem.head_dim}; the kernel has 64 and 128"
    return _many_queries(problem)


def _many_queries(problem: Attention) -> str | None:
    if reason := _phase("prefill")(problem) or _attention(problem):
        return reason
    if cache_layouts.get(problem.cache_dtype).PREFILL is None:
        return f"the cache is {problem.cache_dtype}, which tensor cores do not multiply as it lies"
    return None


def _prefill_sm90(problem: Attention) -> str | None:
    if problem.phase == "prefill" and problem.platform != "sm_90":
        return NEEDS_HOPPER
    if reason := _many_queries(problem):
        return reason
    return f"pages of {problem.page_size} are no multiple of 64" if problem.page_size % 64 else None


def _one_launch(problem: Step) -> str | None:
    if problem.experts is not None:
        return _experts_layers(problem)
    if _older_than(problem.platform, 90):
        return "needs bulk copies to shared memory: an NVIDIA GPU of compute capability 9.0 or newer"
    if reason := _several_phases(problem):
        return reason
    if problem.layers is None:
        return "not all layers' weights are Q1_0, joined by layer"
    if others := _not_of_family("q1", problem.layers):
        return f"not all layers' weights are Q1_0, joined by layer: {others}"
    if reason := _attention(problem.attention):
        return reason
    if reason := _plain(problem):
        return reason
    if problem.attention.rotated is not None:
        return f"rope turns {problem.attention.rotated} values of a head; the kernel turns all"
    from pallas_kernels.step.decode_layers import Shapes  # only GPUs need it

    a = problem.attention
    sizes = (problem.rows, problem.hidden, problem.ffn, a.heads, a.kv_heads, a.head_dim)
    return Shapes(*sizes, blocks=device.multiprocessors(), bits=problem.bits).refuses()


def _layer_products(problem: Step) -> str | None:
    if _older_than(problem.platform, 80):
        return NEEDS_AMPERE
    if problem.experts is not None:
        return "is for layers without experts"
    if reason := _several_phases(problem) or _in_tiles(problem):
        return reason
    assert problem.layers is not None
    from pallas_kernels.step import layer_products  # only GPUs need it

    rest = {"bits": problem.bits, "rotated": problem.folded}
    alike = dict.fromkeys(zip(problem.inputs_of_o, problem.layers, (*problem.layers[1:], None), strict=True))
    reasons = (
        layer_products.refuses(problem.rows, width, problem.hidden, problem.ffn, layer, behind, **rest)
        for width, layer, behind in alike
    )
    return next(filter(None, reasons), None)


def _experts_layers(problem: Step) -> str | None:
    if _older_than(problem.platform, 80):
        return NEEDS_AMPERE
    if reason := _several_phases(problem) or _in_tiles(problem) or _attention(problem.attention):
        return reason
    if reason := _plain(problem):
        return reason
    if problem.rows > 1:
        return f"with experts it is for one row: {problem.rows} have experts of their own"
    from pallas_kernels.step import experts_plan  # only GPUs need it

    assert problem.layers is not None and problem.experts is not None
    a, (count, used) = problem.attention, problem.experts
    return experts_plan.refuses(
        problem.hidden, problem.ffn, (a.heads, a.kv_heads, a.head_dim),
        experts_plan.Experts(count, used, True), problem.bits, problem.layers,
    )  # fmt: skip


def _layer_gemms(problem: Step) -> str | None:
    if problem.platform != "sm_90":
        return NEEDS_HOPPER
    if problem.experts is not None:
        return "is for layers without experts"
    if reason := _several_phases(problem) or _plain(problem):
        return reason
    if not 9 <= problem.rows <= STEP_ROWS:
        return f"is for 9 to {STEP_ROWS} rows"
    if problem.layers is None:
        return "q, k and v of a layer are not joined, or a matrix is not stored in a kernel's tiles"
    if problem.bits != 8:
        return f"activations are rounded to 8 bits, or to float16; {problem.bits} bits were asked for"
    for _, o, gate, up, down in problem.layers:
        if gate != up:
            return "gate and up have different formats"
        if max(map(len, (o, gate, down))) > 1:
            return "a matrix is of several formats"
    pieces = {piece for layer in problem.layers for parts in layer for piece in parts}
    if any(formats.family(format) == "q1" and n % 64 for format, n in pieces):
        return "its tiles are 64 outputs"
    if reason := _attention(problem.attention):
        return reason
    if problem.attention.rotated is not None:
        return f"rope turns {problem.attention.rotated} values of a head; the kernel turns all"
    return None


def _several_phases(problem: Step) -> str | None:
    """Why not even two phases of a layer can be one launch, or None."""
    if problem.split:
        return "between a layer's phases devices that share weights must add their parts"
    if problem.activation != "silu":
        return f"the feed-forward's activation is {problem.activation}; the kernel has silu"
    return None


def _plain(problem: Step) -> str | None:
    """Why a kernel of all layers does not have their kind, or None."""
    if not problem.plain or problem.folded:
        return "the kernel has attention without gates, and weights that are not folded"
    return None


def _in_tiles(problem: Step) -> str | None:
    """Why not all products are kq_decode's, or None."""
    if problem.layers is None:
        return "q, k and v of a layer are not joined, or a matrix is not stored in a kernel's tiles"
    if others := _not_of_family("kq", problem.layers):
        return f"not all layers' weights have 2 to 8 bits: {others}"
    sizes = [("hidden", problem.hidden), ("feed-forward", problem.ffn)]
    for what, size in (*sizes, *(("q", width) for width in problem.inputs_of_o)):
        if size % COLUMNS:
            return f"{what} is {size} wide, no multiple of {COLUMNS}"
    return None


def _not_of_family(family: str, layers: tuple[tuple[Parts, ...], ...]) -> str:
    found = {format for layer in layers for parts in layer for format, _ in parts}
    return ", ".join(sorted(format for format in found if formats.family(format) != family))


def _delta_chunks(problem: DeltaNet) -> str | None:
    if reason := _delta(problem, "prefill"):
        return reason
    from pallas_kernels.delta import chunks  # only GPUs need it

    room, needed = device.shared_bytes(), chunks.shared_bytes(problem.k_dim)
    return f"a block needs {needed} bytes of shared memory, of {room}" if needed > room else None


def _delta(problem: DeltaNet, phase: str) -> str | None:
    if problem.phase != phase:
        return f"is for {phase}"
    if _older_than(problem.platform, 80):
        return NEEDS_AMPERE
    if not {problem.k_dim, problem.v_dim} <= {64, 128}:
        return f"heads are {problem.k_dim} and {problem.v_dim} wide; the kernel has 64 and 128"
    return f"the convolution sees {problem.conv} tokens; the kernel has 4" if problem.conv != 4 else None


def _two_launches(problem: Sampling) -> str | None:
    return NEEDS_AMPERE if _older_than(problem.platform, 80) else None


def _never(problem: Problem) -> None:
    return None


# In order of preference.
CANDIDATES: dict[type, dict[str, Candidate]] = {
    Matmul: {
        "q1_decode_ring": Candidate(_q1_decode_ring, 1, 8),
        "q1_decode_s8": Candidate(_q1_decode_s8, 4, 8),
        "q1_decode_b1": Candidate(lambda problem: _of_family("q1", problem), 1, 8),
        "kq_prefill_sm90": Candidate(lambda problem: _on_hopper("kq", problem), range_of=_rows_of_kq_prefill),
        "kq_decode": Candidate(lambda problem: _of_family("kq", problem), 1, 16),
        "q1_prefill_sm90": Candidate(lambda problem: _on_hopper("q1", problem), 9),
        "cublas": Candidate(_cublas, 9, pallas=False),
        "cpu": Candidate(_cpu, pallas=False),
        "reference": Candidate(_never, pallas=False),
    },
    Attention: {
        "decode": Candidate(lambda problem: _phase("decode")(problem) or _attention(problem)),
        "prefill_sm90": Candidate(_prefill_sm90),
        "prefill_sm80": Candidate(_prefill_sm80),
        "cpu": Candidate(lambda problem: _phase("decode")(problem) or _cpu_attention(problem), pallas=False),
        "reference": Candidate(_never, pallas=False),
    },
    Step: {
        "one_launch": Candidate(_one_launch),
        "layer_products": Candidate(_layer_products),
        "layer_gemms": Candidate(_layer_gemms),
        "launches": Candidate(_never),
    },
    DeltaNet: {
        "delta_step": Candidate(lambda problem: _delta(problem, "decode")),
        "delta_chunks": Candidate(_delta_chunks),
        "reference": Candidate(_never, pallas=False),
    },
    Sampling: {
        "two_launches": Candidate(_two_launches),
        "reference": Candidate(_never, pallas=False),
    },
}


def explain(problem: Problem, rows: int = 1, impl: str = "auto") -> list[Verdict]:
    """Every candidate in order of preference, with the reason that it was or was not taken.

    rows  of activations, for Matmul
    impl  "auto"; "reference"; or "pallas": only Pallas kernels (a GEMM may be cuBLAS's); for Step the name
          of a candidate
    """
    verdicts, taken = [], False
    for name, candidate in CANDIDATES[type(problem)].items():
        reason = candidate.refuses(problem)
        first, last = candidate.rows(problem)
        if not first <= rows <= (last or rows):
            to = f" to {last}" if last else " on"
            reason = reason or f"is for {first}{to} rows"
        if reason is None and not _admits(impl, name, candidate, rows):
            reason = f"{impl} was asked for"
        if reason is None and taken:
            reason = "comes later"
        if reason is None:
            taken = True
            verdicts.append(Verdict(name, True, FIRST + _how(problem, name)))
        else:
            verdicts.append(Verdict(name, False, reason))
    return verdicts


def choose(problem: Problem, rows: int = 1, impl: str = "auto") -> str:
    """Name of the kernel that runs it; arguments as for `explain`. Raises NotImplementedError, with the
    reasons, where none of those that were asked for can."""
    verdicts = explain(problem, rows, impl)
    for verdict in verdicts:
        if verdict.taken:
            return verdict.kernel
    candidates = CANDIDATES[type(problem)]
    reasons = {v.reason for v in verdicts if _admits(impl, v.kernel, candidates[v.kernel], rows)}
    asked = "schedule" if isinstance(problem, Step) else "impl"
    able = next(verdict.kernel for verdict in explain(problem, rows) if verdict.taken)
    raise NotImplementedError(
        f"{asked}={impl!r} cannot run {problem}: {'; '.join(sorted(reasons))}. What can: {able}"
    )


def products(problem: Matmul, impl: str = "auto") -> Products:
    """The kernel for every number of rows. Errors as for `choose`."""
    candidates = CANDIDATES[Matmul].values()
    ranges = [c.rows(problem) for c in candidates]
    firsts = sorted({first for first, _ in ranges} | {last + 1 for _, last in ranges if last})
    chosen = [choose(problem, rows, impl) for rows in firsts]
    changes = [i for i in range(len(firsts)) if i + 1 == len(firsts) or chosen[i] != chosen[i + 1]]
    lasts = [firsts[i + 1] - 1 if i + 1 < len(firsts) else None for i in changes]
    return Products(tuple((last, chosen[i]) for last, i in zip(lasts, changes, strict=True)), problem.bits)


def for_device(w: QTensor, *, matrices: int = 1, bits: int = 8, impl: str = "auto") -> QTensor:
    """A matrix, or a stack of them, in the layout and with the kernels that it would be loaded with on the
    default device (`products`)."""
    problem = Matmul(device.platform(), w.format, *w.shape, matrices=matrices, bits=bits)
    chosen = products(problem, impl)
    return (tile(w) if chosen.tiled else w).replace(products=chosen)


def _admits(impl: str, name: str, candidate: Candidate, rows: int) -> bool:
    """Whether `impl` allows a candidate."""
    if impl == "pallas":
        return candidate.pallas or (name == "cublas" and rows > 1)
    return impl in ("auto", name)


def _how(problem: Problem, name: str) -> str:
    """How cuBLAS gets at the weights, and a kernel of prefill at keys and values."""
    if isinstance(problem, Attention) and name.startswith("prefill"):
        operand = cache_layouts.get(problem.cache_dtype).PREFILL
        return f": keys and values dequantized to {operand}" * (operand != problem.cache_dtype)
    if name != "cublas" or not isinstance(problem, Matmul):
        return ""
    if problem.format == "f16":
        return ": float16 weights as they are"
    by = "a kernel" if formats.family(problem.format) == "kq" else "XLA"
    return f": {by} dequantizes a layer's matrix to float16"
