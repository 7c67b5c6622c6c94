"""Which kernel runs an op: chosen once, at load, from the problem's sizes alone, and explained.

docs/kernels.md has the table of what runs where.
A family is what a format's file says its tiles are for (pallas_kernels/formats). Problems are in problems.py,
and why a kernel cannot run one in refusals.py. A candidate is one object: its refusal, its rows and its call.
They are asked in order of preference: the first that can takes the problem. `register` adds one of your own.
"""

import bisect
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, get_args

from pallas_kernels import cache_layouts, device, formats, refusals
from pallas_kernels.precision import FEW_ROWS
from pallas_kernels.problems import (
    Attention,
    DeltaNet,
    Experts,
    Matmul,
    Problem,
    Route,
    RouterLogits,
    Sampling,
    Step,
)
from pallas_kernels.qtensor import Products, QTensor, tile

FIRST = "the first that can run it"
STEP_ROWS = 256  # the most rows of a decode step that a schedule is for
Range = tuple[int, int | None]  # the first and the last number of rows; None: any number from the first on


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One candidate: its name, whether it was taken, and why or why not."""

    kernel: str
    taken: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A kernel that may run an op.

    name     unique within its op; plans, `inspect` and errors show it
    op       the dataclass of its problems (problems.py), which says how `run` is called
    refuses  problem -> why the kernel cannot run it; None: it can
    run      the function, or its place as "package.module:function", which is imported at the first call:
             kernels take a while to import, and only GPUs need them. None: the op's own code does the work
             (a schedule of a step is in bonsai_jax)
    rows     the rows of activations (Matmul, Experts) or sequences (Step) that it is for, or a function that
             returns them for a problem
    pallas   whether impl="pallas" admits it: a Pallas kernel, or cuBLAS for a GEMM
    tiled    whether it reads a matrix in its format's tiles; others take any layout that they find
    fused    whether `run` includes what precedes the op in a layer, with arguments of its own
    offers   further functions of its module, which the op's code calls where a candidate has them
    detail   problem -> what `explain` adds to the verdict of the candidate that was taken
    """

    name: str
    op: type[Any]
    refuses: Callable[[Any], str | None]
    run: Callable[..., Any] | str | None
    rows: Range | Callable[[Any], Range] = (1, None)
    pallas: bool = True
    tiled: bool = False
    fused: bool = False
    offers: tuple[str, ...] = ()
    detail: Callable[[Any], str] = lambda problem: ""

    def range(self, problem: Problem) -> Range:
        """`rows` for a problem."""
        return self.rows(problem) if callable(self.rows) else self.rows

    @property
    def module(self) -> ModuleType:
        """The module of `run`, where that is a place."""
        return importlib.import_module(str(self.run).partition(":")[0])

    def __call__(self, *arguments, **keywords):
        run = getattr(self.module, self.run.partition(":")[2]) if isinstance(self.run, str) else self.run
        assert run is not None, self.name
        return run(*arguments, **keywords)


def _bit_prefill_rows(problem: Matmul) -> Range:
    """Ternary weights in a mixed stack as for `_int_prefill_rows`."""
    return 9, STEP_ROWS if problem.mixed and formats.is_ternary(problem.format) else None


def _int_prefill_rows(problem: Matmul) -> Range:
    """Activations become float16, which is more precise than 8 bits and less than 16. In a loop over layers
    with mixed formats, which prefill has, XLA branches on the format, and the GPU waits for the host."""
    return 9 if problem.bits == 8 else 17, STEP_ROWS if problem.mixed else None


def _layer_products_rows(problem: Step) -> Range:
    """One row of 1-bit weights is no faster so: a layer of the 27B takes 30.8 us in one launch and 29.4 in
    four, two rows 41 and 59 (H200; LOG.md)."""
    return (2 if "bit" in _formats(problem) else 1), 2


def _layer_gemms_rows(problem: Step) -> Range:
    """From 3 rows on for 1-bit weights where not all layers have plain attention: their delta nets round what
    the next product reads."""
    return (9 if problem.plain or _formats(problem) != {"bit"} else 3), STEP_ROWS


def _formats(problem: Step) -> set[str | None]:
    """Families of the weights' formats."""
    return {
        formats.family(format) for layer in problem.layers or () for parts in layer for format, _ in parts
    }


def _dequantized_by(problem: Matmul) -> str:
    if problem.format == "f16":
        return ": float16 weights as they are"
    by = "a kernel" if formats.family(problem.format) == "int" else "XLA"
    return f": {by} dequantizes a layer's matrix to float16"


def _prefill_operand(problem: Attention) -> str:
    operand = cache_layouts.get(problem.cache_dtype).PREFILL
    return f": keys and values dequantized to {operand}" * (operand != problem.cache_dtype)


def _our_own() -> Iterator[Candidate]:
    """Ops in any order, an op's candidates in order of preference."""
    rules, xla = refusals, functools.partial(Candidate, pallas=False)

    bit, ints = "pallas_kernels.matmul.bit_mma", "pallas_kernels.matmul.int_mma"
    tiled = functools.partial(Candidate, tiled=True)
    yield tiled("bit_decode_ring", Matmul, rules.bit_decode_ring, f"{bit}.decode_ring:run", (1, 8))
    yield tiled("bit_decode_s8", Matmul, rules.bit_decode_s8, f"{bit}.decode_s8:run", (3, 8))
    yield tiled("bit_decode_b1", Matmul, rules.bit_decode_b1, f"{bit}.decode_b1:run", (1, 8))
    bit_prefill = f"{bit}.prefill_sm90:run", _bit_prefill_rows
    yield tiled("bit_prefill_sm90", Matmul, rules.bit_prefill_sm90, *bit_prefill, offers=("rotates",))
    int_prefill = f"{ints}.prefill_sm90:run", _int_prefill_rows
    yield tiled("int_prefill_sm90", Matmul, rules.int_prefill_sm90, *int_prefill, offers=("rotates",))
    offers = ("rotates", "run_below", "run_and_send")
    yield tiled("int_decode", Matmul, rules.int_decode, f"{ints}.decode:run", (1, 16), offers=offers)
    cublas = "pallas_kernels.matmul.cublas:run", (9, None)
    yield Candidate("cublas", Matmul, rules.cublas, *cublas, offers=("run_stacks",), detail=_dequantized_by)
    yield xla("cpu", Matmul, rules.cpu_matmul, "pallas_kernels.matmul.cpu:run")
    yield xla("reference", Matmul, rules.no_reason, "pallas_kernels.matmul.reference:run")

    few = "pallas_kernels.experts.grouped_decode:feed_forward", (17, 64)
    yield Candidate("grouped_decode", Experts, rules.grouped_decode, *few, fused=True)
    grouped = "pallas_kernels.experts.grouped:feed_forward", (17, None)
    yield Candidate("grouped", Experts, rules.grouped, *grouped, fused=True)
    one_launch = "pallas_kernels.experts.int_experts:run"
    yield Candidate("int_experts", Experts, rules.int_experts, one_launch, offers=("most_rows",))
    yield xla("tiles", Experts, rules.no_reason, None)

    logits = "pallas_kernels.experts.router_logits:run", (1, 64)
    yield Candidate("router_logits", RouterLogits, rules.router_logits, *logits)
    yield xla("reference", RouterLogits, rules.no_reason, None)

    yield Candidate("route", Route, rules.route, "pallas_kernels.experts.choice:run")
    yield xla("reference", Route, rules.no_reason, None)

    decode, prefill = (f"pallas_kernels.attention.{phase}" for phase in ("decode", "prefill"))
    yield Candidate("decode", Attention, rules.decode_attention, f"{decode}:decode_attention", fused=True)
    reads = functools.partial(Candidate, fused=True, offers=("run_stored",), detail=_prefill_operand)
    yield reads("prefill_sm90", Attention, rules.prefill_attention_sm90, f"{prefill}_sm90:run")
    yield reads("prefill_sm80", Attention, rules.prefill_attention_sm80, f"{prefill}_sm80:run")
    latent = "pallas_kernels.latent"
    yield Candidate("latent_prefill", Attention, rules.latent_prefill, f"{latent}.prefill:run", fused=True)
    yield Candidate("latent_decode", Attention, rules.latent_decode, f"{latent}.decode:run", fused=True)
    yield xla("latent_gemms", Attention, rules.latent_gemms, f"{latent}.gemms:run")
    yield xla("triton", Attention, rules.triton_attention, "pallas_kernels.attention.triton:run")
    yield xla("cpu", Attention, rules.cpu_attention, "pallas_kernels.attention.cpu:run")
    yield xla("reference", Attention, rules.no_reason, "pallas_kernels.attention.reference:attention")

    # One launch has three times the columns of a tensor core; more rows of layer_products are not measured
    # (LOG.md); fewer than 9 have matrix products of their own, and more than 8 no room for their integers.
    yield Candidate("one_launch", Step, rules.one_launch, None, rows=(1, 24))
    yield Candidate("layer_products", Step, rules.layer_products, None, rows=_layer_products_rows)
    yield Candidate("int_launches", Step, rules.int_launches, None, rows=(5, 8))
    yield Candidate("layer_gemms", Step, rules.layer_gemms, None, rows=_layer_gemms_rows)
    yield Candidate("launches", Step, rules.no_reason, None)

    delta = "pallas_kernels.delta"
    yield Candidate("delta_step", DeltaNet, rules.delta_step, f"{delta}.step:run")
    yield Candidate("delta_chunks", DeltaNet, rules.delta_chunks, f"{delta}.chunks:run")
    yield xla("reference", DeltaNet, rules.no_reason, f"{delta}.reference:run")

    sampling = "pallas_kernels.sampling"
    yield Candidate("two_launches", Sampling, rules.two_launches, f"{sampling}.kernel:run")
    yield xla("cpu", Sampling, rules.cpu_sampling, f"{sampling}.cpu:run")
    yield xla("reference", Sampling, rules.no_reason, f"{sampling}.reference:draw")


_OUR_OWN = tuple(_our_own())
# In order of preference. Changed by `register` and `unregister` alone.
_CANDIDATES: list[Candidate] = list(_OUR_OWN)


def candidates(op: type[Problem]) -> tuple[Candidate, ...]:
    """The candidates of an op, in order of preference."""
    return tuple(candidate for candidate in _CANDIDATES if candidate.op is op)


def get(op: type[Problem], name: str) -> Candidate:
    """A candidate by its name. Raises ValueError, with the names that the op has."""
    for candidate in candidates(op):
        if candidate.name == name:
            return candidate
    names = ", ".join(candidate.name for candidate in candidates(op))
    raise ValueError(
        f"{op.__name__} has no candidate {name!r}; it has {names}. Your own come with `selection.register`"
    )


def register(candidate: Candidate, before: str = "reference") -> None:
    """Make a kernel of yours a candidate, in order of preference before the one named.

    For Matmul, Attention, DeltaNet and Sampling. `run` is called with the arguments that the op's problem
    lists (problems.py), while JAX traces. Register before a model is loaded: the choice is made at load, and
    functions that are already compiled do not change. Raises ValueError for another op, a name that the op
    has already, an unknown `before`, and for rows or functions that the op cannot use.
    """
    op, error = candidate.op, f"register: candidate {candidate.name!r}"
    able = [problem for problem in get_args(Problem) if problem.CALL]
    if op not in able:
        names = ", ".join(problem.__name__ for problem in able)
        raise ValueError(f"{error}: op is {op!r}; it must be one of {names} of problems.py")
    if candidate.fused or candidate.offers:
        raise ValueError(f"{error}: fused and offers are for our own candidates; leave them out")
    if any(other.name == candidate.name for other in candidates(op)):
        raise ValueError(f"{error}: {op.__name__} has one of that name; `unregister` it, or choose another")
    if not callable(candidate.rows):
        first, last = candidate.rows
        if first < 1 or (last is not None and last < first):
            raise ValueError(f"{error}: rows are {candidate.rows}; give (first, last), or (first, None)")
    _check_call(error, "refuses", candidate.refuses, "problem")
    if not isinstance(candidate.run, str):
        _check_call(error, "run", candidate.run, op.CALL)
    _CANDIDATES.insert(_CANDIDATES.index(get(op, before)), candidate)


def unregister(candidate: Candidate) -> None:
    """Undo `register`. Raises ValueError for a candidate that is not registered."""
    if candidate not in _CANDIDATES:
        raise ValueError(f"unregister: candidate {candidate.name!r} is not registered")
    _CANDIDATES.remove(candidate)


def only_ours() -> bool:
    """Whether nobody has registered a candidate, whose code may change without this package's."""
    return all(candidate in _OUR_OWN for candidate in _CANDIDATES)


def _check_call(error: str, what: str, function, arguments: str) -> None:
    """Raise ValueError where a function cannot be called with arguments of these names."""
    positional, _, keywords = (part.strip(", ") for part in arguments.partition("*"))
    names = [[name.strip() for name in part.split(",") if name] for part in (positional, keywords)]
    try:
        inspect.signature(function).bind(*names[0], **dict.fromkeys(names[1]))
    except TypeError as reason:
        raise ValueError(f"{error}: {what} must be a function of ({arguments}): {reason}") from None


def explain(problem: Problem, rows: int = 1, impl: str = "auto") -> list[Verdict]:
    """Every candidate in order of preference, with the reason that it was or was not taken.

    rows  of activations, for Matmul and Experts
    impl  "auto"; "reference"; or "pallas": only Pallas kernels (a GEMM may be cuBLAS's); for Step the name
          of a candidate
    """
    verdicts, taken = [], False
    rows = problem.rows if isinstance(problem, Step) else rows
    problem = problem.for_rows(rows) if isinstance(problem, Matmul) else problem
    for candidate in candidates(type(problem)):
        reason = candidate.refuses(problem)
        first, last = candidate.range(problem)
        if not first <= rows <= (last or rows):
            to = f" to {last}" if last else " on"
            reason = reason or f"is for {first}{to} rows"
        if reason is None and not _admits(impl, candidate):
            reason = f"{impl} was asked for"
        if reason is None and taken:
            reason = "comes later"
        taken = taken or reason is None
        why = FIRST + candidate.detail(problem) if reason is None else reason
        verdicts.append(Verdict(candidate.name, reason is None, why))
    return verdicts


def choose(problem: Problem, rows: int = 1, impl: str = "auto") -> str:
    """Name of the kernel that runs it; arguments as for `explain`. Raises NotImplementedError, with the
    reasons, where none of those that were asked for can."""
    verdicts = explain(problem, rows, impl)
    for verdict in verdicts:
        if verdict.taken:
            return verdict.kernel
    asked = zip(verdicts, candidates(type(problem)), strict=True)
    reasons = {verdict.reason for verdict, candidate in asked if _admits(impl, candidate)}
    option = "schedule" if isinstance(problem, Step) else "impl"
    able = next(verdict.kernel for verdict in explain(problem, rows) if verdict.taken)
    able += "" if option == "schedule" else ', by impl="auto"'  # names of kernels are no values of impl
    raise NotImplementedError(
        f"{option}={impl!r} cannot run {problem}: {'; '.join(sorted(reasons))}. What can: {able}"
    )


def products(problem: Matmul, impl: str = "auto") -> Products:
    """The kernel for every number of rows. Errors as for `choose`."""
    ranges = [(1, FEW_ROWS), *(candidate.range(problem) for candidate in candidates(Matmul))]
    firsts = sorted({first for first, _ in ranges} | {last + 1 for _, last in ranges if last})
    chosen = [choose(problem, rows, impl) for rows in firsts]
    changes = [i for i in range(len(firsts)) if i + 1 == len(firsts) or chosen[i] != chosen[i + 1]]
    lasts = [firsts[i + 1] - 1 if i + 1 < len(firsts) else None for i in changes]
    kernels = tuple((last, chosen[i]) for last, i in zip(lasts, changes, strict=True))
    tiled = any(get(Matmul, kernel).tiled for _, kernel in kernels)
    return Products(kernels, problem.bits, tiled, problem.few_rows_bits)


def schedules(problem: Step, impl: str = "auto") -> tuple[tuple[int, str], ...]:
    """The schedule for every number of rows: (most rows, schedule), ascending; more rows have "launches".

    problem  of any number of rows
    impl     "auto", or the name of a schedule. Raises NotImplementedError, with the reasons, where that can
             run no number of rows
    """
    chosen: list[tuple[int, str]] = []
    rows = 0  # what has a schedule already

    def refused(rows: int, name: str) -> bool:
        verdicts = explain(dataclasses.replace(problem, rows=rows), impl=impl)
        return not any(verdict.taken and verdict.kernel == name for verdict in verdicts)

    for candidate in candidates(Step):
        first, last = candidate.range(problem)
        if last is None:
            continue  # "launches"
        first = max(first, rows + 1)
        end = bisect.bisect_left(
            range(last + 1), True, lo=first, key=functools.partial(refused, name=candidate.name)
        )
        if end > first:
            chosen += [(first - 1, "launches")] * (first > rows + 1) + [(end - 1, candidate.name)]
            rows = end - 1
    if not chosen and impl != "auto":
        first, _ = get(Step, impl).range(problem)
        choose(dataclasses.replace(problem, rows=first), impl=impl)
    return tuple(chosen)


def for_device(w: QTensor, *, matrices: int = 1, bits: int = 8, impl: str = "auto") -> QTensor:
    """A matrix, or a stack of them, in the layout and with the kernels that it would be loaded with on the
    default device (`products`).

    matrices  how many of this shape are multiplied with one input (gate and up: 2)
    bits      8 or 16, to which kernels may round activations
    impl      "auto", "reference", "pallas", or the name of a candidate
    Raises ValueError for a name that no candidate has.
    """
    folded = w.rotation is not None
    problem = Matmul(device.platform(), w.format, *w.shape, matrices=matrices, bits=bits, folded=folded)
    chosen = products(problem, impl)
    return (tile(w) if chosen.tiled else w).replace(products=chosen)


def _admits(impl: str, candidate: Candidate) -> bool:
    """Whether `impl` allows a candidate."""
    return candidate.pallas if impl == "pallas" else impl in ("auto", candidate.name)
