"""Compiled programs in files, so that the next process neither traces nor compiles them.

    <folder of jax's compile cache>/programs/<key>    MAGIC, SHA-256 of the rest, the rest: a pickle

The key is a digest of everything that the program depends on. A file of another key, a damaged one and one
that XLA cannot load count as missing, and the program is compiled and stored again. Loading a program runs
code from its file, so a file is read only if it belongs to this user and only this user may write it.

XLA cannot write a program for a CPU that it has itself read from a file: functions would be missing. So jax's
compile cache does not get these programs, and one that it has from elsewhere is not stored.
"""

import contextlib
import functools
import hashlib
import os
import pickle
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable

from bonsai_jax.compile_cache import programs_folder
from pallas_kernels import handlers, selection
from pallas_kernels.gpu import kernels_first

MAGIC = b"bonsai-jax program 1\n"
DIGEST_BYTES = 32
MOST_BYTES = 2**30  # of all files; the least recently used are deleted
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
PACKAGES = ("bonsai_jax", "pallas_kernels")  # whose sources programs are traced from
LOADED = "/bonsai_jax/load_program_duration"  # an event of jax.monitoring
LEAST = "jax_persistent_cache_min_compile_time_secs"  # to compile a program that jax's cache gets
CACHES = ("jax_compilation_cache", "jax_persistent_cache")  # settings on which no program depends

_LOCK = threading.Lock()
_here = threading.local()  # .read: whether jax's cache had the program that this thread compiles
_compiling = 0  # threads that compile a program which jax's cache must not get
_least = 0.0  # the user's setting of LEAST


def settings() -> tuple[tuple[str, Any], ...]:
    """jax's settings on which programs may depend, with the contexts of this thread."""
    values = jax.config.values
    return tuple((name, values[name]) for name in _names(len(values)))


@functools.lru_cache(1)
def _names(count: int) -> list[str]:
    """The names of jax's settings on which programs may depend. count: of all its settings."""
    return sorted(name for name in jax.config.values if not name.startswith(CACHES))


def key(*parts: Any) -> str | None:
    """The name of a program's file. None: it is not stored, because it depends on more than can be written
    down.

    parts   what the program was made from, whose repr must be the same in every process
    """
    processor = handlers.processor()
    if programs_folder() is None or processor is None or not selection.only_ours() or not _only_ours():
        return None
    environment = {name: value for name, value in os.environ.items() if name.startswith(("XLA_", "NPROC"))}
    text = repr((versions(), processor, sorted(environment.items()), settings(), parts))
    if " at 0x" in text:  # a function or an object without a repr of its own
        return None
    return hashlib.sha256(text.encode()).hexdigest()


def has(key: str) -> bool:
    """Whether there is a file of this key. It may be one that cannot be used."""
    folder = programs_folder()
    return folder is not None and (folder / key).exists()


def load(key: str, arguments: Any, devices: list[jax.Device]) -> jax.stages.Compiled | None:
    """The program of this key for these devices, to be called with a tuple of arrays like `arguments`; None:
    there is no file of it that can be used."""
    folder = programs_folder()
    content = None if folder is None else _read(folder / key)
    if folder is None or content is None:
        return None
    try:
        recipes, program, returns = pickle.loads(content)
        handlers.register(recipes)
        takes = jax.tree.structure((arguments, {}))
        return serialize_executable.deserialize_and_load(program, takes, returns, execution_devices=devices)
    except (pickle.UnpicklingError, ImportError, AttributeError, ValueError, RuntimeError) as error:
        path = folder / key
        print(f"bonsai-jax: {path} cannot be loaded and is made again: {error}", file=sys.stderr, flush=True)
        return None


def compile(key: str, lowered: jax.stages.Lowered, flags: dict[str, Any]) -> jax.stages.Compiled:
    """Compile a program with these options of XLA, and store it."""
    _here.read = False
    with _without_jaxs_cache():
        compiled = kernels_first.compile(lowered, flags)
    if not _here.read:
        _store(key, compiled)
    return compiled


@contextlib.contextmanager
def _without_jaxs_cache() -> Iterator[None]:
    """Whatever is compiled meanwhile, jax does not write to its cache. Another thread's program that jax
    would have written is compiled once more by a later process."""
    global _compiling, _least
    with _LOCK:
        _least = _least if _compiling else jax.config.values[LEAST]
        _compiling += 1
        jax.config.update(LEAST, float("inf"))
    try:
        yield
    finally:
        with _LOCK:
            _compiling -= 1
            if not _compiling:
                jax.config.update(LEAST, _least)


def _note_read(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _here.read = True


jax.monitoring.register_event_listener(_note_read)


def _store(key: str, compiled: jax.stages.Compiled) -> None:
    """Write a program's file, unless the folder cannot be written or the program cannot be pickled."""
    folder = programs_folder()
    try:
        program, _, returns = serialize_executable.serialize(compiled)
        content = pickle.dumps((handlers.called_by(program), program, returns))
    except (pickle.PicklingError, AttributeError, TypeError, ValueError, NotImplementedError, RuntimeError):
        return  # it has functions of the user or constants, or XLA cannot write it (a CPU's that has run)
    if folder is None:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _written(folder / key) as file:
            file.write(MAGIC + hashlib.sha256(key.encode() + content).digest() + content)
        _shrink(folder)


def _read(path: Path) -> bytes | None:
    """What follows the digest in a file that is whole, has this name, and is the user's own."""
    try:
        file = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0))
    except OSError:
        return None
    with open(file, "rb") as opened:
        status = os.fstat(opened.fileno())
        if os.name == "posix" and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        content = opened.read()
    start = len(MAGIC) + DIGEST_BYTES
    digest, rest = content[len(MAGIC) : start], content[start:]
    if not content.startswith(MAGIC) or digest != hashlib.sha256(path.name.encode() + rest).digest():
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # it was used now
    return rest


@contextlib.contextmanager
def _written(path: Path) -> Iterator[Any]:
    """A file that only this user may read and write, which gets its name when it is whole."""
    handle, name = tempfile.mkstemp(prefix="part-", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            yield file
        os.replace(name, path)
    finally:
        with contextlib.suppress(FileNotFoundError):  # it has its name
            os.unlink(name)


def _shrink(folder: Path) -> None:
    """Delete the files that were not used for longest, until the others have at most MOST_BYTES."""
    files = [(status.st_mtime, status.st_size, path) for path in folder.iterdir() if (status := path.stat())]
    total = 0
    for _, size, path in sorted(files, reverse=True):
        total += size
        if total > MOST_BYTES:
            path.unlink(missing_ok=True)


@functools.cache
def versions() -> tuple[str, ...]:
    """Of Python, jax and its plugins, and of our own sources."""
    packages = Path(jaxlib.__file__).parents[1].glob("jax*.dist-info")
    sources = hashlib.sha256()
    for path in sorted(_sources()):
        with open(path, "rb") as file:
            content = file.read()
        sources.update(f"{os.path.relpath(path, ROOT)} {len(content)}\n".encode() + content)
    installed = sorted(path.name for path in packages)
    return sys.version, jax.__version__, jaxlib.__version__, *installed, sources.hexdigest()


def _sources() -> Iterator[str]:
    for package in PACKAGES:
        for folder, _, names in os.walk(os.path.join(ROOT, package)):
            yield from (os.path.join(folder, name) for name in names if name.endswith(".py"))


def _only_ours() -> bool:
    """Whether all modules of our packages come from their own folders: else their sources are unknown."""
    folders = tuple(os.path.join(ROOT, name, "") for name in PACKAGES)
    starts = tuple(f"{name}." for name in PACKAGES)
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(starts)]
    files = [module.__file__ for module in modules if module is not None]
    return all(file is None or file.startswith(folders) for file in files)
