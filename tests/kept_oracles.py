"""Oracle values for machines without gguf and llama.cpp, such as one with a GPU: `python -m
tests.kept_oracles` makes them.

data/formats.npz        per format, random blocks (uint8 [4, bytes of 512 weights]) and what they decode to by
                        the gguf package, or by the scalar loops of test_formats.py (float32 [4, 512])
data/tiny_oracle.json   llama.cpp's greedy answers, with the top 20 behind each token, for tiny synthetic
                        models
"""

import json
import tempfile
import zlib
from pathlib import Path

import jax
import numpy as np

from pallas_kernels import formats

DATA = Path(__file__).parent / "data"
TINY = [
    f"synth:{name}:{format}"
    for name in ("tiny-qwen3", "tiny-llama", "tiny-qwen2")
    for format in ("q8_0", "q1_0")
]


def weights_of(name: str, raw: np.ndarray) -> np.ndarray:
    """What the oracle decodes blocks to, float32 [4, 512]."""
    import gguf

    from tests.pallas_kernels.test_formats import GGUF_TYPES, ORACLES, scalar_weights

    if name in ORACLES:
        return np.asarray([scalar_weights(name, row.tobytes()) for row in raw], np.float32).reshape(4, 512)
    return np.asarray(gguf.dequantize(raw, GGUF_TYPES[name]), np.float32).reshape(4, 512)


def make_formats() -> dict[str, np.ndarray]:
    kept = {}
    for name in formats.names():
        # Not under jit, which rounds some of a block's scales otherwise than when these values were kept.
        lead, key = (4, 512 // formats.get(name).WEIGHTS), jax.random.key(zlib.crc32(name.encode()))
        raw = np.asarray(formats.pack(name, formats.random_fields(name, key, lead, 0.0, 0.1)))
        kept[f"{name}.raw"], kept[f"{name}.weights"] = raw, weights_of(name, raw)
    return kept


def make_tiny() -> dict[str, list[dict]]:
    from bonsai_jax import Tokenizer
    from checkpoints import open_checkpoint
    from tests.bonsai_jax.test_oracle import answers, as_file

    ids = [np.random.default_rng(seed).integers(0, 256, 5 + 30 * seed).tolist() for seed in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        return {
            source: answers(
                as_file(source, Path(folder) / f"{i}.gguf"),
                Tokenizer.from_checkpoint(open_checkpoint(source)),
                ids,
                24,
            )
            for i, source in enumerate(TINY)
        }


if __name__ == "__main__":
    np.savez_compressed(DATA / "formats.npz", **make_formats())
    (DATA / "tiny_oracle.json").write_text(json.dumps(make_tiny(), separators=(",", ":")) + "\n")
