"""Downloads files from the Hub into the cache. Interrupted downloads continue; sizes and hashes are checked.

The session, the token and the lock are huggingface_hub's. Its own download starts over after an interruption
and checks no hash, so this file has its own transfer: plain HTTP, even if the Hub offers its Xet protocol.
"""

import contextlib
import dataclasses
import hashlib
import io
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..checkpoint import CheckpointError
from . import cache
from .names import readable

TIMEOUT_S = 10.0  # to connect, and without a byte
WAITS_S = (1.0, 2.0, 4.0, 8.0, 8.0)  # before the next try, where none since the last brought a byte
LONGEST_WAIT_S = 60.0  # that a server may ask for
LARGEST_BYTES = 50_000_000_000  # of a file that the Hub gives over HTTP
PASSING = {408, 429, 500, 502, 503, 504}  # HTTP statuses that may be gone at the next try


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a repository. digest: sha256, or git's sha1 of a small file; the name of its blob."""

    name: str
    size: int
    digest: str


class Stopped(ConnectionError):
    """The connection ended before the file did."""


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def listing(repo: str) -> tuple[str, list[File]]:
    """The newest commit of a repository and its files. HTTP errors are huggingface_hub's."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    response = get_session().get(
        f"{endpoint()}/api/models/{repo}", params={"blobs": "true"}, headers=_headers(), timeout=TIMEOUT_S
    )
    hf_raise_for_status(response)
    try:
        content = response.json()
        commit, files = content["sha"], [_file(sibling) for sibling in content["siblings"]]
        if not re.fullmatch(r"[0-9a-f]{40}", commit):
            raise ValueError("no commit")
    except (ValueError, LookupError, TypeError) as e:
        raise CheckpointError(
            f"{repo}: the answer of {endpoint()} is not a list of files with sizes and hashes; "
            "look at HF_ENDPOINT, and whether the network asks for a login"
        ) from e
    return commit, files


def download(repo: str, commit: str, files: list[File], *, check: bool = False) -> list[Path]:
    """The paths of files of one version. Files that are not in the cache in full size are fetched.

    `check` also reads the cached files and fetches those with a wrong hash again. One bar on stderr shows
    all. Raises CheckpointError for a wrong size or hash, and Stopped or huggingface_hub's errors if the
    transfer fails for good. The bytes received stay, and the next call continues after them.
    """
    root = cache.repo_folder(repo)
    pointers = [root / "snapshots" / commit / file.name for file in files]
    (root / "blobs").mkdir(parents=True, exist_ok=True)
    _check_room(repo, files, pointers)
    with bar(sum(file.size for file in files)) as begin:
        for file, pointer in zip(files, pointers, strict=True):
            show = begin(file)
            if check or _size(pointer) != file.size:
                _place(repo, commit, file, pointer, check, show)
    cache.set_main(repo, commit)
    return pointers


def _check_room(repo: str, files: list[File], pointers: list[Path]) -> None:
    blobs, missing = cache.repo_folder(repo) / "blobs", 0
    for file, pointer in zip(files, pointers, strict=True):
        if file.size not in (_size(pointer), _size(blobs / file.digest)):
            missing += file.size - min(max(_size(_partial(blobs / file.digest)), 0), file.size)
    free = shutil.disk_usage(blobs).free
    if missing > free:
        raise CheckpointError(
            f"{repo}: {readable(missing)} are to come, {readable(free)} are free in {cache.folder()}; "
            "make room, or set HF_HOME to another folder"
        )


def _place(
    repo: str, commit: str, file: File, pointer: Path, check: bool, show: Callable[[int], None]
) -> None:
    """Make `pointer` lead to the file, from the cache or the Hub."""
    from huggingface_hub.utils import WeakFileLock

    blob = cache.repo_folder(repo) / "blobs" / file.digest
    lock = cache.lock_path(repo, file.digest)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):  # a second process finds the file
        path = pointer if pointer.exists() else blob
        if _size(path) != file.size or (check and not _is_sound(path, file, show)):
            if file.size > LARGEST_BYTES:
                raise CheckpointError(
                    f"{file.name}: {readable(file.size)}, the Hub gives {readable(LARGEST_BYTES)} at most "
                    f"over HTTP; `hf download {repo} {file.name}`, then run it again"
                )
            if path.exists():  # with a wrong size or hash
                pointer.unlink(missing_ok=True)
                blob.unlink(missing_ok=True)
            _fetch(f"{endpoint()}/{repo}/resolve/{commit}/{quote(file.name)}", file, blob, show)
        if not pointer.exists():
            pointer.unlink(missing_ok=True)  # a link to what is gone
            cache.link(blob, pointer)


def _fetch(url: str, file: File, blob: Path, show: Callable[[int], None]) -> None:
    """Download a blob, continuing after the bytes that are in the cache.

    Some file systems ignore locks. Two processes then write the same bytes to the same places.
    """
    partial = _partial(blob)
    if _size(partial) > file.size:
        partial.unlink()
    partial.touch()
    try:
        with open(partial, "r+b") as out:
            digest = _receive_patiently(url, file, out, show)
        if digest != file.digest:
            raise CheckpointError(
                f"{file.name}: its hash is {digest}, expected {file.digest}; it was deleted, fetch it again"
            )
    except CheckpointError:
        partial.unlink(missing_ok=True)
        raise
    if partial.exists() or not blob.exists():
        os.replace(partial, blob)


def _receive_patiently(url: str, file: File, out: io.BufferedRandom, show: Callable[[int], None]) -> str:
    """`_receive`, repeated as long as bytes arrive or the fault may pass."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HTTPError,
    )

    waits = iter(WAITS_S)
    had = out.seek(0, os.SEEK_END)
    while True:
        try:
            return _receive(url, file, out, show)
        except (HTTPError, Stopped) as e:
            have = out.seek(0, os.SEEK_END)
            if have > had:
                waits, had = iter(WAITS_S), have
            wait = next(waits, None)
            if isinstance(e, HfHubHTTPError):
                asked = retry_after(e)
                if wait is None or e.response.status_code not in PASSING or asked > LONGEST_WAIT_S:
                    raise
                wait = max(wait, asked)
            elif wait is None:
                raise Stopped(
                    f"{file.name} stopped at {readable(have)} of {readable(file.size)}: {reason(e)}"
                ) from e
            time.sleep(wait)


def _receive(url: str, file: File, out: io.BufferedRandom, show: Callable[[int], None]) -> str:
    """Append the missing bytes of the file to `out`. Returns the hash of the whole file."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    digest = _hash(out, file, show)
    have = out.tell()
    if have == file.size:
        return digest.hexdigest()
    headers = {**_headers(), "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
        if response.status_code != 416:  # which says the size, as others do
            hf_raise_for_status(response)
        size = _announced(response.headers)
        if size not in (None, file.size):
            raise _wrong_size(file, f"{size}")
        if have and response.status_code != 206:  # all of it, in place of the rest
            out.seek(0)
            digest, have = _hasher(file), 0
        for chunk in response.iter_bytes():
            have += len(chunk)
            if have > file.size:
                raise _wrong_size(file, f"{have} or more")
            out.write(chunk)
            digest.update(chunk)
            show(have)
    if have < file.size:
        raise Stopped("the connection ended")
    return digest.hexdigest()


def _announced(headers: Any) -> int | None:
    """The size of the whole file, from the headers of an answer; None if they do not have it."""
    size = headers.get("Content-Range", "").rpartition("/")[2]
    if not size and "Content-Encoding" not in headers:
        size = headers.get("Content-Length", "")
    return int(size) if size.isdecimal() else None


def _wrong_size(file: File, size: str) -> CheckpointError:
    return CheckpointError(
        f"{file.name}: the server sends {size} bytes, expected {file.size}; it was deleted, fetch it again"
    )


def _headers() -> dict[str, str]:
    from huggingface_hub import get_token

    token = get_token()  # HF_TOKEN, or of `hf auth login`
    return {"User-Agent": "bonsai-jax"} | ({"Authorization": f"Bearer {token}"} if token else {})


def _file(sibling: dict[str, Any]) -> File:
    name = sibling["rfilename"]
    large = sibling.get("lfs")
    digest = large["sha256"] if large else sibling["blobId"]
    if any(part in ("", ".", "..") for part in name.split("/")) or "\\" in name:
        raise ValueError("a name that leads out of the cache")
    if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", digest):
        raise ValueError("no hash")
    return File(name, int(sibling["size"]), digest)


def _hasher(file: File) -> Any:
    if len(file.digest) == 64:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)


def _hash(content: io.BufferedRandom | io.BufferedReader, file: File, show: Callable[[int], None]) -> Any:
    """The hash of all bytes of `content`, which it leaves at its end."""
    content.seek(0)
    digest = _hasher(file)
    show(0)
    while chunk := content.read(1 << 20):
        digest.update(chunk)
        show(content.tell())
    return digest


def _is_sound(path: Path, file: File, show: Callable[[int], None]) -> bool:
    with open(path, "rb") as content:
        return _hash(content, file, show).hexdigest() == file.digest


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _size(path: Path) -> int:
    """Bytes of a file; -1 if there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def retry_after(error: Any) -> float:
    """Seconds that the server asks to wait, 0 if it does not say."""
    seconds = error.response.headers.get("Retry-After", "").strip()
    return float(seconds) if seconds.isdecimal() else 0.0


def reason(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0].strip() or type(error).__name__


@contextlib.contextmanager
def bar(total: int) -> Iterator[Callable[[File], Callable[[int], None]]]:
    """One bar for all files, on a terminal's stderr or in a notebook, from the first byte on.

    Yields begin(file), to be called for each in order, which gives show(bytes of it that are there).
    """
    if not sys.stderr.isatty() and "ipykernel" not in sys.modules:
        yield lambda file: lambda have: None
        return
    from rich import progress
    from rich.console import Console

    display = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    before = 0

    def begin(file: File) -> Callable[[int], None]:
        nonlocal before
        offset, before = before, before + file.size

        def show(have: int) -> None:
            if not display.tasks:
                display.add_task(file.name, total=total, completed=offset + have)
                display.start()
            display.update(display.tasks[0].id, description=file.name, completed=offset + have)

        return show

    try:
        yield begin
    finally:
        display.stop()
