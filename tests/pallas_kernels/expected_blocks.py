"""Blocks of each format with the weights that its oracle dequantizes them to, one file per format in
data/blocks. GPU machines read them: they have no gguf package.

    python -m tests.pallas_kernels.expected_blocks [FORMAT ...]

writes the files of these formats; without a name, of all formats.
"""

import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from pallas_kernels import formats

FOLDER = Path(__file__).parents[1] / "data" / "blocks"
ROWS, COLUMNS = 4, 512


class Expected(NamedTuple):
    """Random blocks of 4 rows and 512 columns."""

    raw: np.ndarray  # uint8 [4, bytes of a row]
    weights: np.ndarray  # float32 [4, 512]


def load(name: str) -> Expected:
    """The blocks stored for a format. Raises FileNotFoundError, with the command that writes them."""
    path = FOLDER / f"{name}.npz"
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist; `python -m tests.pallas_kernels.expected_blocks {name}` writes it"
        )
    with np.load(path) as arrays:
        return Expected(arrays["raw"], arrays["weights"])


def make(name: str) -> Expected:
    """The blocks that `write` stores; always the same ones."""
    from tests.pallas_kernels import oracles

    # Not under jit, which rounds the scales of some blocks differently from the stored ones.
    lead, key = (ROWS, COLUMNS // formats.get(name).WEIGHTS), jax.random.key(zlib.crc32(name.encode()))
    raw = np.asarray(formats.pack(name, formats.random_fields(name, key, lead, 0.0, 0.1)))
    return Expected(raw, oracles.dequantize(name, raw))


def write(name: str) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(FOLDER / f"{name}.npz", **make(name)._asdict())


if __name__ == "__main__":
    for name in sys.argv[1:] or formats.names():
        write(name)
