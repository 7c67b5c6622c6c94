"""The folder of models from the Hub, which huggingface_hub and other programs share.

models--user--repo/refs/main                    the commit that was the newest when last asked
models--user--repo/snapshots/<commit>/<name> -> ../../blobs/<digest>
models--user--repo/blobs/<digest>               named by its hash: sha256, or git's sha1 of a small file
models--user--repo/blobs/<digest>.incomplete    the first bytes of a file whose rest is still to come
blobs/<xx>/<hash>                               huggingface_hub's own: a blob that is a link leads here
"""

import dataclasses
import os
import shutil
from pathlib import Path

from ..checkpoint import CheckpointError
from . import names


@dataclasses.dataclass(frozen=True)
class CachedModel:
    """A model in the cache.

    name    the name that opens it: "user/repo:Q8_0", or "user/repo" for a folder of safetensors
    files   their names in the repository; empty: a download that stopped
    nbytes  bytes on disk, in all its versions
    """

    name: str
    files: tuple[str, ...]
    nbytes: int


def folder() -> Path:
    """The cache: $HF_HUB_CACHE, or hub in $HF_HOME, by default in ~/.cache/huggingface. Read at each call."""
    get = os.environ.get
    home = get("HF_HOME") or os.path.join(get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    path = get("HF_HUB_CACHE") or get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(path)).expanduser()


def repo_folder(repo: str) -> Path:
    return folder() / f"models--{repo.replace('/', '--')}"


def lock_path(repo: str, digest: str) -> Path:
    return folder() / ".locks" / repo_folder(repo).name / f"{digest}.lock"


def snapshots(repo: str) -> list[Path]:
    """The folders of a repository's versions: first the main branch's, then the newest."""
    root = repo_folder(repo)
    ref = root / "refs" / "main"
    main = ref.read_text().strip() if ref.is_file() else None
    versions = [path for path in root.glob("snapshots/*") if path.is_dir()]
    return sorted(versions, key=lambda path: (path.name != main, -path.stat().st_mtime))


def file_names(snapshot: Path) -> list[str]:
    """Names of the complete files in a version."""
    return sorted(p.relative_to(snapshot).as_posix() for p in snapshot.rglob("*") if p.is_file())


def link(blob: Path, pointer: Path) -> None:
    """Give a blob its name in a version."""
    pointer.parent.mkdir(parents=True, exist_ok=True)
    try:
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    except FileExistsError:  # another process was first
        pass
    except OSError:  # a file system without links holds the file itself
        os.replace(blob, pointer)


def set_main(repo: str, commit: str) -> None:
    ref = repo_folder(repo) / "refs" / "main"
    if ref.is_file() and ref.read_text() == commit:  # so that a read-only cache works
        return
    ref.parent.mkdir(parents=True, exist_ok=True)
    draft = ref.with_name(f"main.{os.getpid()}.tmp")  # so that no reader sees half of it
    draft.write_text(commit)
    os.replace(draft, ref)


def models() -> list[CachedModel]:
    """The models in the cache, by name, and downloads that stopped."""
    cached = []
    for root in sorted(folder().glob("models--*--*"), key=lambda path: path.name.lower()):
        repo = root.name.removeprefix("models--").replace("--", "/")
        pointers = _pointers(repo)
        for label, files in names.models(pointers).items():
            cached.append(CachedModel(f"{repo}:{label}", tuple(files), _nbytes(pointers, files)))
        if "config.json" in pointers and any(name.endswith(".safetensors") for name in pointers):
            files = names.folder_files(pointers)
            cached.append(CachedModel(repo, tuple(files), _nbytes(pointers, files)))
        if partial := sum(path.stat().st_size for path in root.glob("blobs/*.incomplete")):
            cached.append(CachedModel(repo, (), partial))
    return cached


def find(source: str) -> list[CachedModel]:
    """The models in the cache that "user/repo" or "user/repo:quant" names. CheckpointError if there is
    none."""
    repo, quant = names.parse(source)
    matches = [model for model in models() if names.parse(model.name)[0] == repo]
    if not matches:
        raise CheckpointError(f"{source}: not in the cache, {folder()}; `bonsai-jax list` shows what is")
    if quant is None:
        return matches
    sizes = {name: _nbytes(pointers, [name]) for pointers in [_pointers(repo)] for name in pointers}
    files = tuple(names.choose(source, sizes))
    return [model for model in matches if model.files == files]


def remove(source: str) -> None:
    """Delete everything of "user/repo" from the cache, or the one model "user/repo:quant"."""
    repo, quant = names.parse(source)
    doomed = {name for model in find(source) for name in model.files}
    gone, remaining = [], []
    for name, paths in _pointers(repo).items():
        (gone if quant is None or name in doomed else remaining).extend(paths)
    blobs = {_blob(path) for path in gone} - {_blob(path) for path in remaining}
    shared = {blob.resolve() for blob in blobs if blob.is_symlink()}
    for path in (*gone, *blobs):
        path.unlink(missing_ok=True)
    if not remaining:
        shutil.rmtree(repo_folder(repo))
        shutil.rmtree(lock_path(repo, "").parent, ignore_errors=True)
    in_use = {blob.resolve() for blob in folder().glob("*/blobs/*") if blob.is_symlink()}
    for path in shared - in_use:
        path.unlink(missing_ok=True)
        path.with_name(f"{path.name}.refs").unlink(missing_ok=True)  # its list of repositories


def _pointers(repo: str) -> dict[str, list[Path]]:
    """Files of a repository: name -> its paths, one in each version that has it."""
    pointers: dict[str, list[Path]] = {}
    for snapshot in snapshots(repo):
        for name in file_names(snapshot):
            pointers.setdefault(name, []).append(snapshot / name)
    return pointers


def _blob(pointer: Path) -> Path:
    """The blob of a file in its repository's folder. It follows one link only: a blob may be a link
    itself."""
    return Path(os.path.normpath(pointer.parent / os.readlink(pointer))) if pointer.is_symlink() else pointer


def _nbytes(pointers: dict[str, list[Path]], files: list[str]) -> int:
    blobs = {path.resolve() for name in files for path in pointers[name]}
    return sum(blob.stat().st_size for blob in blobs)
