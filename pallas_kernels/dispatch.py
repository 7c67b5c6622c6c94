"""Which implementation runs an op: chosen once, at load, and explained. The only place that looks at the
device."""

import dataclasses
from collections.abc import Callable

import jax


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a choice depends on: the op ("matmul", "attention"), the platform ("cpu", or "sm_90" for a GPU of
    compute capability 9.0), the
    weight's format and its shape, or (query heads, KV heads, head_dim)."""

    op: str
    platform: str
    format: str = ""
    shape: tuple[int, ...] = ()

    def __str__(self):
        return " ".join(
            [self.op, self.format, " x ".join(map(str, self.shape)), f"on {self.platform}"]
        ).replace("  ", " ")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One candidate: its name, whether it was taken, and why or why not."""

    impl: str
    taken: bool
    reason: str


# Formats with a matrix-vector kernel: format -> module of pallas_kernels.mosaic, which their files serve.
KERNELS = {
    "q1_0": "bit_gemv",
    "q4_0": "int_gemv",
    "q4_1": "int_gemv",
    "q4_k": "int_gemv",
    "q5_k": "int_gemv",
    "q6_k": "int_gemv",
    "q8_0": "int_gemv",
}
MOST_ROWS = {"bit_gemv": 8, "int_gemv": 16}  # that they take; more go through the definition


def _mosaic(problem: Problem) -> str | None:
    if not problem.platform.startswith("sm_") or int(problem.platform[3:]) < 80:
        return "needs an NVIDIA GPU of compute capability 8.0 or newer"
    if problem.op == "attention":
        heads, kv_heads, head_dim = problem.shape
        if head_dim not in (64, 128):
            return f"head_dim is {head_dim}; the kernel has 64 and 128"
        if heads // kv_heads * (head_dim // 8 + 2) > 170 or heads // kv_heads > 8:
            return f"{heads // kv_heads} query heads of {head_dim} a KV head do not fit a lane's registers"
        return None
    return None if problem.op == "matmul" and problem.format in KERNELS else _no_kernel(problem)


def _no_kernel(problem: Problem) -> str:
    return f"no kernel for {problem.op}{' of ' + problem.format if problem.format else ''} in this version"


# In order of preference. A candidate answers None when it can run the problem, else the reason why not.
CANDIDATES: dict[str, Callable[[Problem], str | None]] = {
    "mosaic": _mosaic,
    "triton": _no_kernel,
    "xla": lambda problem: None,
}


def explain(problem: Problem, impl: str = "auto") -> list[Verdict]:
    """Every candidate in order of preference, with the reason it was or was not taken."""
    verdicts, taken = [], False
    for name, refuses in CANDIDATES.items():
        reason = refuses(problem)
        if reason is None and not taken and impl in ("auto", name):
            taken = True
            verdicts.append(Verdict(name, True, "asked for" if impl == name else "the first that can run it"))
        else:
            verdicts.append(
                Verdict(name, False, reason or (f"{impl} was asked for" if impl != "auto" else "comes later"))
            )
    return verdicts


def choose(problem: Problem, impl: str = "auto") -> str:
    """Name of the implementation to run. Raises NotImplementedError, with the reason, for a named one that
    cannot."""
    verdicts = explain(problem, impl)
    for verdict in verdicts:
        if verdict.taken:
            return verdict.impl
    reasons = {verdict.impl: verdict.reason for verdict in verdicts}
    able = [name for name, refuses in CANDIDATES.items() if refuses(problem) is None]
    raise NotImplementedError(
        f"impl={impl!r} cannot run {problem}: {reasons[impl]}; what can: {', '.join(able)}"
    )


def platform() -> str:
    """Where jax puts arrays by default: "sm_90" for a GPU of compute capability 9.0, else "cpu" or "tpu"."""
    if jax.default_backend() != "gpu":
        return jax.default_backend()
    return "sm_" + jax.devices()[0].compute_capability.replace(".", "")
