"""llama.cpp's greedy answers for tiny synthetic models, with the top 20 tokens of each step, stored in
data/tiny_oracle.json because GPU machines have no llama.cpp.

    python -m tests.bonsai_jax.tiny_answers      writes the file
"""

import json
import tempfile
from pathlib import Path

import numpy as np

FILE = Path(__file__).parents[1] / "data" / "tiny_oracle.json"
SOURCES = [
    f"synth:{name}:{format}"
    for name in ("tiny-qwen3", "tiny-llama", "tiny-qwen2")
    for format in ("q8_0", "q1_0")
]


def stored(source: str) -> list[dict]:
    """The answers in the file."""
    return json.loads(FILE.read_text())[source]


def make() -> dict[str, list[dict]]:
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
            for i, source in enumerate(SOURCES)
        }


if __name__ == "__main__":
    FILE.write_text(json.dumps(make(), separators=(",", ":")) + "\n")
