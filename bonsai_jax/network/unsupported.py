"""Architectures that do not run: models that have them, the nearest that runs, and what it lacks.

unsupported.txt has a line for each.
"""

import dataclasses
import functools
from importlib import resources


@dataclasses.dataclass(frozen=True)
class Missing:
    """An architecture that does not run.

    names    in GGUF files and in config.json
    models   that have it
    nearest  the architecture that runs and is most like it
    lacks    what `nearest` would need to run it
    """

    names: tuple[str, ...]
    models: str
    nearest: str
    lacks: tuple[str, ...]


class UnsupportedArchitecture(NotImplementedError):
    """There is no file for an architecture. `missing` is what is known of it, or None."""

    def __init__(self, message: str, missing: Missing | None):
        super().__init__(message)
        self.missing = missing


@functools.cache
def table() -> tuple[Missing, ...]:
    """The lines of unsupported.txt."""
    lines = resources.files(__package__).joinpath("unsupported.txt").read_text("utf-8").splitlines()
    cells = [[cell.strip() for cell in line.split("|")] for line in lines if not line.startswith("#")]
    return tuple(
        Missing(tuple(names.split()), models, nearest, tuple(lack.strip() for lack in lacks.split(";")))
        for names, models, nearest, lacks in cells
    )


def find(name: str) -> Missing | None:
    """The entry of an architecture by any of its names."""
    return next((missing for missing in table() if name in missing.names), None)
