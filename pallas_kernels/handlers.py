"""What a process needs before it can run a compiled program that another process has made: the functions in
this process that the program calls by name (XLA's foreign functions), and the same processor.

    called_by(program) -> recipes    in the process that has compiled it
    register(recipes)                in the one that is about to load it

Kernels for CPUs are such functions, made by LLVM in this process; others are jax's own, of LAPACK. A program
for a GPU contains its kernels; the library that starts them is found by an import.
"""

import importlib.util
import sys
from typing import Any

from pallas_kernels import device

LAPACK = "lapack"  # a recipe


def called_by(program: bytes) -> list[Any]:
    """Picklable recipes of the functions that a compiled program calls. program: XLA's serialization of it,
    which has their names as they are."""
    later = sys.modules.get("pallas_kernels.cpu.later")  # no other file makes kernels for CPUs
    recipes = [] if later is None else later.called_by(program)
    return [*recipes, LAPACK] if b"lapack_" in program else recipes


def register(recipes: list[Any]) -> None:
    """Make the functions known to XLA. Code that is not in the cache is compiled in threads."""
    if device.platform().startswith("sm_"):
        # Tells the library of Pallas kernels where its runtime is.
        importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    if LAPACK in recipes:
        # jax finds LAPACK's functions when it lowers a program that calls one. Without them such a program
        # ends the process.
        importlib.import_module("jaxlib.lapack").prepare_lapack_call("trsm", "float32")
    if kernels := [recipe for recipe in recipes if recipe != LAPACK]:
        from pallas_kernels.cpu import later

        for kernel, module in kernels:
            later.target(kernel, module)


def processor() -> tuple[str, ...] | None:
    """What XLA's code for the device in use depends on, beyond jax's version; None: it is not known (a CPU
    without llvmlite, which reads the CPU's features)."""
    if device.platform() != "cpu":
        return device.identity()
    if importlib.util.find_spec("llvmlite") is None:
        return None
    from pallas_kernels.cpu import compiled

    return *device.identity(), *compiled.processor()
