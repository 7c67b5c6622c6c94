"""Compiled programs are stored in the user's cache folder, so that the next process need not compile them."""

import os
from pathlib import Path


def folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bonsai-jax" / "xla"


_stores_programs = False  # see use_programs


def use_programs() -> None:
    """Store whole programs of engines too (engine/stored.py), so that the next process traces nothing.

    The command line calls this. Call it in a process in which nobody replaces functions or constants of this
    package: a stored program is found by the package's sources, so it would be taken for the original's.
    """
    global _stores_programs
    _stores_programs = True


def programs_folder() -> Path | None:
    """Where engine/stored.py keeps programs: in the folder of jax's cache, which the user can choose; None:
    this process does not use them, or the cache is off, or not in a file system."""
    import jax

    cache = jax.config.jax_compilation_cache_dir
    if not _stores_programs or not cache or not jax.config.jax_enable_compilation_cache or "://" in cache:
        return None
    return Path(cache) / "programs"


def use() -> None:
    """Make jax store every program in `folder()`, unless the user has set another folder
    (jax_compilation_cache_dir, JAX_COMPILATION_CACHE_DIR) or turned the cache off
    (jax_enable_compilation_cache, JAX_ENABLE_COMPILATION_CACHE=false). Does nothing if the folder cannot be
    written.
    """
    import jax  # not above: the command line's help does not need jax

    if jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:
        return
    try:
        folder().mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if not os.access(folder(), os.W_OK):
        return
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_compilation_cache_dir", str(folder()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # jax decides at its first program whether it has a cache
