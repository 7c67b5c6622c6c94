"""Measured sizes of kernels' tiles: what `bonsai-jax bench --tune` found for a device, and who asks for it.

A kernel plans its own tiles. Where its plan has arguments "to measure with", it asks here first, while it is
traced: `settings(problem, plan)`. Two files may answer, entry by entry, the first before the second:

    <user's cache folder>/tuned/<device>.json    written by `bench --tune`, and by nothing else
    pallas_kernels/tuned/<device>.json           came with the package

Neither is read where there is no GPU. Settings change which thread does what and in which order sums are
made, never what is computed. Those of another version (`refused` says which) and those that leave a product
no room are not used: a slower kernel, and nothing worse.

A file: {"device": "NVIDIA H200", "entries": {problem: {"settings": {name: number}, ...}}}. What else stands
in an entry (times, versions) is for people. Empty settings: the kernel's own plan, whatever the second file
says.
"""

import contextlib
import contextvars
import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pallas_kernels import device

Settings = dict[str, int]

# By kernel: arguments of its plan, and the values that they may have; described in its file.
ALLOWED: dict[str, dict[str, tuple[int, ...]]] = {
    "bit_decode_b1": {"warps": (4, 8, 16), "tiles": tuple(range(1, 17))},
    "bit_decode_s8": {
        "warps": (4, 8, 12, 16),
        "tiles": tuple(range(1, 129)),
        "together": tuple(range(1, 9)),
    },
    "int_decode": {"warps": (4, 8, 12, 16), "blocks": tuple(range(8, 529)), "depth": tuple(range(2, 25))},
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """What tiles are tuned for; str() of it is its name in a file.

    kernel    module of pallas_kernels.matmul
    parts     rows below rows, of each the format and how many, padded to whole tiles
    columns   padded to whole tiles
    matrices  2 for SwiGLU, else 1
    rows      of activations
    bits      that they are rounded to
    """

    kernel: str
    parts: tuple[tuple[str, int], ...]
    columns: int
    matrices: int
    rows: int
    bits: int

    def __str__(self):
        parts = " + ".join(f"{format} {rows}" for format, rows in self.parts)
        twice = "2 of " if self.matrices == 2 else ""
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        return f"{self.kernel}: {twice}{parts} x {self.columns}, {rows}, {self.bits} bits"


def named(name: str) -> Problem | None:
    """The Problem of which this is str(); None where it is none's."""
    form = re.compile(r"(\w+): (2 of )?(\w+ \d+(?: \+ \w+ \d+)*) x (\d+), (\d+) rows?, (\d+) bits")
    if (found := form.fullmatch(name)) is None:
        return None
    kernel, twice, parts, columns, rows, bits = found.groups()
    pairs = [part.split() for part in parts.split(" + ")]
    of_parts = tuple((format, int(count)) for format, count in pairs)
    return Problem(kernel, of_parts, int(columns), 2 if twice else 1, int(rows), int(bits))


@dataclasses.dataclass
class Asked:
    """A problem that a kernel asked for: what it does with settings, and those that it got."""

    plan: Callable[..., Any]
    settings: Settings


class _Trial:
    def __init__(self, instead: Mapping[Problem, Settings]):
        self.instead, self.asked = instead, {}


_trial: contextvars.ContextVar[_Trial | None] = contextvars.ContextVar("trial", default=None)


@contextlib.contextmanager
def trial(instead: Mapping[Problem, Settings] | None = None) -> Iterator[dict[Problem, Asked]]:
    """Note what kernels that are traced inside ask for, and give them `instead` where it has an answer."""
    now = _Trial(instead or {})
    token = _trial.set(now)
    try:
        yield now.asked
    finally:
        _trial.reset(token)


def settings(problem: Problem, plan: Callable[..., Any]) -> Settings:
    """Arguments of plan(**settings) for this problem on the default device; {} where none were measured.

    plan  of the kernel: something hashable, or None where such sizes do not fit
    """
    now = _trial.get()
    if now is not None and problem in now.instead:
        found = dict(now.instead[problem])
    else:
        found, _ = entries().get(str(problem), ({}, None))
        if refused(problem.kernel, found) or (found and plan(**found) is None):
            found = {}
    if now is not None:
        now.asked[problem] = Asked(plan, found)
    return found


def refused(kernel: str, settings: Settings) -> str | None:
    """Why settings of a file are not used for any problem of a kernel; None where they are."""
    allowed = ALLOWED.get(kernel, {})
    for name, value in settings.items():
        if name not in allowed:
            return f"{kernel} has no {name!r} to tune; it has {', '.join(allowed) or 'nothing'}"
        if value not in allowed[name]:
            return f"{name} of {value} is none of {', '.join(map(str, _ends(allowed[name])))}"
    return None


def _ends(values: tuple[int, ...]) -> tuple:
    return values if len(values) < 5 else (*values[:2], "...", values[-1])


def entries() -> dict[str, tuple[Settings, Path]]:
    """What is known of the default device: problem -> settings, and the file that they are from.

    Raises ValueError, naming file and remedy, for a file that is broken or another device's.
    """
    gpu = device.gpu_name()
    return {} if gpu is None else _entries(gpu, package_file(gpu), user_file(gpu))


@functools.cache
def _entries(gpu: str, *files: Path) -> dict[str, tuple[Settings, Path]]:
    found = {}
    for path in files:
        found |= {problem: (settings, path) for problem, settings in read(path, gpu).items()}
    return found


def read(path: Path, gpu: str) -> dict[str, Settings]:
    """Entries of a file, {} without one; errors as for `entries`."""
    remedy = "delete it, or tune again: bonsai-jax bench --tune"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: no readable JSON ({error}); {remedy}") from None
    if not isinstance(content, dict) or not isinstance(content.get("entries"), dict):
        raise ValueError(f'{path}: has no object "entries" of tuned sizes; {remedy}')
    if content.get("device") != gpu:
        raise ValueError(f"{path}: is of {content.get('device')!r}, but this is {gpu!r}; {remedy}")
    found = {}
    for problem, entry in content["entries"].items():
        of_it = entry.get("settings") if isinstance(entry, dict) else None
        if not isinstance(of_it, dict) or not all(type(value) is int for value in of_it.values()):
            raise ValueError(f'{path}: {problem}: has no "settings" of whole numbers; {remedy}')
        found[problem] = of_it
    return found


def write(path: Path, gpu: str, new: Mapping[str, Mapping]) -> None:
    """Put entries into a file: {problem: {"settings": ..., ...}}; others that it has stay."""
    read(path, gpu)  # a broken file is an error, and not overwritten
    old = json.loads(path.read_text(encoding="utf-8"))["entries"] if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"device": gpu, "entries": dict(sorted((old | dict(new)).items()))}
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
    _entries.cache_clear()


def package_file(gpu: str) -> Path:
    return Path(__file__).parent / "tuned" / f"{_slug(gpu)}.json"


def user_file(gpu: str) -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return folder / "bonsai-jax" / "tuned" / f"{_slug(gpu)}.json"


def _slug(gpu: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in gpu.lower()).split())
