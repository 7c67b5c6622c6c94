"""Compiles LLVM modules for this processor and caches the code in the folder of XLA's compile cache."""

import contextlib
import ctypes
import functools
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import llvmlite
from llvmlite import binding as llvm
from llvmlite import ir

_LOCK = threading.RLock()  # a process has one LLVM compiler


def cache_path(name: str, what: str) -> Path | None:
    """The file that caches a function's code for later processes; None: the cache is off.

    what  everything that the code depends on, except for this package's sources
    """
    folder = jax.config.jax_compilation_cache_dir
    enabled = jax.config.jax_enable_compilation_cache
    if not folder or not enabled or "://" in folder:
        return None
    parts = name, what, *_sources(), *processor(), str(second_cache())
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return Path(folder) / f"cpu-{key}.o"


def load(name: str, path: Path | None) -> int | None:
    """The address of a function whose code is in the cache; None if it is not."""
    try:
        code = path.read_bytes() if path else None
    except OSError:
        return None
    return _link(code, [name])[0] if code else None


def compile(names: Sequence[str], module: Callable[[], ir.Module], path: Path | None = None) -> list[int]:
    """Compile a module and write its code to the cache: the addresses of its functions. One module at a
    time."""
    with _LOCK:
        code = _code(str(module()))
        if path:
            _store(path, code)
        return _link(code, names)


def _link(code: bytes, names: Sequence[str]) -> list[int]:
    with _LOCK:
        engine = _engine()
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        return [engine.get_function_address(name) for name in names]


@functools.cache
def _sources() -> tuple[str, ...]:
    """LLVM's version, and a digest of the source files that write kernels."""
    folder = Path(__file__).parent
    files = sorted(
        [*folder.glob("*.py"), *folder.parent.glob("formats/*.py"), folder.parent / "activations.py"]
    )
    return llvmlite.__version__, hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@functools.cache
def processor() -> tuple[str, str]:
    """LLVM's name of this processor, and its features, without those that the system withholds."""
    features = llvm.get_host_cpu_features().flatten()
    if "+amx-int8" in features and not _tiles_permitted():
        features = features.replace("+amx", "-amx")
    return llvm.get_host_cpu_name(), features


@functools.cache
def second_cache() -> int:
    """Bytes of a core's second cache, as Linux has it ("2048K"); 1 MiB where the system does not say."""
    try:
        size = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        return int(size.removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 2**20


def _tiles_permitted() -> bool:
    """Ask Linux for the registers of x86's matrix unit (AMX), which a process must do before it uses them."""
    if not sys.platform.startswith("linux"):
        return False
    arch_prctl, request, tile_data = 158, 0x1023, 18  # ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0


def has(feature: str) -> bool:
    return f"+{feature}" in processor()[1].split(",")


def _code(text: str) -> bytes:
    """Machine code of a module. LLVM only simplifies each function: kernels are written as vectors and loops
    that are unrolled, so vectorizers and passes over the whole module take time and change no speed.
    """
    module = llvm.parse_assembly(text)
    module.verify()
    machine = _machine()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=1))
    simplify = builder.getFunctionPassManager()
    for function in module.functions:
        if not function.is_declaration:
            simplify.run(function, builder)
    return machine.emit_object(module)


@functools.cache
def _machine() -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    name, features = processor()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=name, features=features, opt=3, jit=True
    )


@functools.cache
def _engine() -> llvm.ExecutionEngine:
    """The owner of the code, for as long as the process lives."""
    _machine()
    library = ctypes.CDLL(None) if os.name == "posix" else ctypes.CDLL("msvcrt")
    for name in ("malloc", "free", "memcpy"):
        llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    pause = library.sched_yield if os.name == "posix" else ctypes.WinDLL("kernel32").SwitchToThread
    llvm.add_symbol("other_threads_first", ctypes.cast(pause, ctypes.c_void_p).value)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
    return engine


def _store(path: Path, code: bytes) -> None:
    """Readers see the whole file or none. If the folder is not writable, nothing is cached."""
    part = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(code)
        part.replace(path)
