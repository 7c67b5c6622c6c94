"""Which kernel runs an op: chosen once, at load, from the problem's sizes alone, and explained.

    op         weights or cache    rows                        GPU        kernel
    Matmul     1 bit, large        1 to 8                      9.0        bit_decode_ring
               bit (1 bit)          1 to 3                      from 8.0   bit_decode_b1
                                   4 to 8                                 bit_decode_s8, or bit_decode_b1
                                   from 9                      9.0        bit_prefill_sm90
               int (2 to 8 bits)   1 to 8, 1 to 16             from 8.0   int_decode
                                   from 9 (16 bits: from 17)   9.0        int_prefill_sm90
               not float32         other, from 9               any        cublas
               CPU, not float32    any                         none       cpu
               any                 other                       or none    reference
    Experts    int                 from 17                     9.0        grouped
               int                 any                         from 8.0   int_experts
               any                 any                         any        tiles, each by a kernel of Matmul
    Attention  any                 1 query of each sequence    from 8.0   decode
               8 or 16 bits        more                        9.0        prefill_sm90
               8 or 16, to 128     more                        from 8.0   prefill_sm80
               any                 1 query of each sequence    none       cpu
               any                 other                       or none    reference
    Step       bit                 1 to 24, if they have room  from 9.0   one_launch
               int, with experts   1, if it has room           from 8.0   one_launch
               int                 as many as have room        from 8.0   layer_products
               bit, int             9 to 256                    9.0        layer_gemms
               any                 other                       any        launches
    DeltaNet   float32             1 token of each sequence    from 8.0   delta_step
               float32             more                        from 8.0   delta_chunks
               float32             any                         or none    reference
    Sampling   any                 any                         from 8.0   two_launches
               any                 any                         or none    reference

A family is what a format's file says its tiles are for (pallas_kernels/formats). Problems are in problems.py,
and why a kernel cannot run one in refusals.py. CANDIDATES are asked in their order: the first that can takes
the problem.
"""

import dataclasses
from collections.abc import Callable

from pallas_kernels import cache_layouts, device, formats, refusals
from pallas_kernels.problems import Attention, DeltaNet, Experts, Matmul, Problem, Sampling, Step
from pallas_kernels.qtensor import Products, QTensor, tile

FIRST = "the first that can run it"


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

    def rows(self, problem: Problem) -> tuple[int, int | None]:
        """The first and the last number of rows that it is for."""
        return self.range_of(problem) if self.range_of else (self.first, self.last)


def _rows_of_kq_prefill(problem: Matmul) -> tuple[int, int | None]:
    """It rounds activations to float16: to more bits than 8, but to fewer than 16. In a loop of layers, as
    prefill's, XLA branches by the format that a layer has, and the GPU waits for the host."""
    return 9 if problem.bits == 8 else 17, refusals.STEP_ROWS if problem.mixed else None


# In order of preference.
CANDIDATES: dict[type, dict[str, Candidate]] = {
    Matmul: {
        "bit_decode_ring": Candidate(refusals.bit_decode_ring, 1, 8),
        "bit_decode_s8": Candidate(refusals.bit_decode_s8, 4, 8),
        "bit_decode_b1": Candidate(refusals.bit_decode_b1, 1, 8),
        "int_prefill_sm90": Candidate(refusals.int_prefill_sm90, range_of=_rows_of_kq_prefill),
        "int_decode": Candidate(refusals.int_decode, 1, 16),
        "bit_prefill_sm90": Candidate(refusals.bit_prefill_sm90, 9),
        "cublas": Candidate(refusals.cublas, 9, pallas=False),
        "cpu": Candidate(refusals.cpu_matmul, pallas=False),
        "reference": Candidate(refusals.never, pallas=False),
    },
    Experts: {
        "grouped": Candidate(refusals.grouped, 17),
        "int_experts": Candidate(refusals.int_experts),
        "tiles": Candidate(refusals.never, pallas=False),
    },
    Attention: {
        "decode": Candidate(refusals.decode_attention),
        "prefill_sm90": Candidate(refusals.prefill_attention_sm90),
        "prefill_sm80": Candidate(refusals.prefill_attention_sm80),
        "cpu": Candidate(refusals.cpu_attention, pallas=False),
        "reference": Candidate(refusals.never, pallas=False),
    },
    Step: {
        "one_launch": Candidate(refusals.one_launch),
        "layer_products": Candidate(refusals.layer_products),
        "layer_gemms": Candidate(refusals.layer_gemms),
        "launches": Candidate(refusals.never),
    },
    DeltaNet: {
        "delta_step": Candidate(refusals.delta_step),
        "delta_chunks": Candidate(refusals.delta_chunks),
        "reference": Candidate(refusals.never, pallas=False),
    },
    Sampling: {
        "two_launches": Candidate(refusals.two_launches),
        "reference": Candidate(refusals.never, pallas=False),
    },
}


def explain(problem: Problem, rows: int = 1, impl: str = "auto") -> list[Verdict]:
    """Every candidate in order of preference, with the reason that it was or was not taken.

    rows  of activations, for Matmul and Experts
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
    able += "" if asked == "schedule" else ', by impl="auto"'  # names of kernels are no values of impl
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
    by = "a kernel" if formats.family(problem.format) == "int" else "XLA"
    return f": {by} dequantizes a layer's matrix to float16"
