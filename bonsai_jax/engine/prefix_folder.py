"""Beginnings of prompts in files: the keys and values of pages, and states, for the next process.

    DIR / identity / <key>.page                        a full page
                   / <key>-<count>-<digest>.state      a state `count` tokens after the page of the key

A file is a magic line, a SHA-256 of its name and content, and the content, which this module does not look
into. A key is a SHA-256 over the owner and all tokens up to the end of its page, in a chain, so a prompt
finds its pages without an index, and nobody reads an API key or a prompt's tokens in a name. The identity
names all on which the content depends: model, layout, version.

Several processes may share a folder: files appear by renaming, and one that is gone, or damaged, counts as
missing. When all files together exceed the bound, those that were not used for the longest time go.
"""

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

MAGIC = b"bonsai-jax prefix 1\n"
DIGEST_BYTES = 32
SUFFIXES = (".page", ".state", ".unfinished")
ABANDONED_S = 3600  # after which an unfinished file is nobody's
ROOM = 0.9  # of the bound is left, so that not every write looks at all files

log = logging.getLogger(__name__)


class PrefixFolder:
    """Files of one model in a folder. For several threads.

    most_bytes   bound of all files in the folder, also those of other models
    Raises OSError where the folder cannot be made or read.
    """

    def __init__(self, path: str | os.PathLike[str], identity: str, most_bytes: int):
        self.path, self.most_bytes = Path(path), most_bytes
        self._own = self.path / identity
        self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._bytes = sum(entry.stat().st_size for entry in self._files())
        self._written = 0  # files, for names of unfinished ones
        self._listed: tuple[float, dict[str, list[tuple[int, str]]]] = (-1.0, {})

    @staticmethod
    def root(owner: str) -> str:
        """The key before the first page, of an owner."""
        return hashlib.sha256(b"owner " + owner.encode(errors="surrogateescape")).hexdigest()

    @staticmethod
    def next(key: str, tokens: Sequence[int]) -> str:
        """The key of the page with these tokens after that of `key`."""
        return hashlib.sha256(key.encode() + np.asarray(tokens, "<i4").tobytes()).hexdigest()

    def page(self, key: str) -> str:
        """The name of a page's file."""
        return f"{key}.page"

    def state(self, key: str, tokens: Sequence[int]) -> str:
        """The name of the file with the state some tokens, less than a page, after the page of a key."""
        return f"{key}-{len(tokens)}-{self.next(key, tokens)[:32]}.state"

    def states(self, key: str) -> list[tuple[int, str]]:
        """(tokens after the page of this key, name) of each state, the most tokens first."""
        changed = self._own.stat().st_mtime
        if changed != self._listed[0]:
            listed: dict[str, list[tuple[int, str]]] = {}
            for name in os.listdir(self._own):
                if name.endswith(".state") and len(parts := name.split("-")) == 3 and parts[1].isdigit():
                    listed.setdefault(parts[0], []).append((int(parts[1]), name))
            self._listed = changed, listed
        return sorted(self._listed[1].get(key, ()), reverse=True)

    def has(self, name: str) -> bool:
        return (self._own / name).exists()

    def read(self, name: str, nbytes: int) -> memoryview | None:
        """The content of a file, of this size; None: it is missing. A damaged one is removed."""
        path = self._own / name
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("prefix cache: %s cannot be read: %s", path, error.strerror)
            return None
        start = len(MAGIC) + DIGEST_BYTES
        payload = memoryview(content)[start:]
        whole = content.startswith(MAGIC) and len(payload) == nbytes
        if whole and content[len(MAGIC) : start] == _digest(name, payload):
            return payload
        log.warning("prefix cache: %s is damaged and was removed", path)
        self._remove(path)
        return None

    def write(self, name: str, payload: bytes | memoryview) -> None:
        """Write a file. Raises OSError, as where the disk is full."""
        self._written += 1
        unfinished = self._own / f"{os.getpid()}-{time.monotonic_ns()}-{self._written}.unfinished"
        try:
            with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(MAGIC + _digest(name, payload))
                file.write(payload)
            os.replace(unfinished, self._own / name)
        finally:
            unfinished.unlink(missing_ok=True)
        self._listed = (-1.0, {})  # time stamps may be too coarse to tell
        self._bytes += len(MAGIC) + DIGEST_BYTES + len(payload)
        if self._bytes > self.most_bytes:
            self._make_room()

    def used(self, names: Iterable[str]) -> None:
        """These files were used now; the first of them a little later than the others, so that the beginning
        of a prompt goes last."""
        now = time.time_ns()
        for before, name in enumerate(names):
            with contextlib.suppress(OSError):  # another process has removed it
                os.utime(self._own / name, ns=(now - 1000 * before, now - 1000 * before))

    def _files(self) -> Iterator[os.DirEntry[str]]:
        """Our files in the whole folder."""
        for folder in os.scandir(self.path):
            if folder.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    yield from (entry for entry in os.scandir(folder) if entry.name.endswith(SUFFIXES))

    def _make_room(self) -> None:
        known = []
        for entry in self._files():
            with contextlib.suppress(OSError):
                stat = entry.stat()
                known.append((stat.st_mtime, stat.st_size, entry))
        known.sort(key=lambda one: one[0])
        self._bytes, oldest = sum(size for _, size, _ in known), time.time() - ABANDONED_S
        for used, size, entry in known:
            if entry.name.endswith(".unfinished"):
                if used < oldest:
                    self._remove(entry)
            elif self._bytes > ROOM * self.most_bytes:
                self._remove(entry)
                self._bytes -= size

    def _remove(self, path: os.PathLike[str]) -> None:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _digest(name: str, payload: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(name.encode())
    digest.update(payload)
    return digest.digest()
