"""Perplexity of SmolLM2 in a format: as `quantize_file` writes it, and with ggml's blocks.

    uv run python -m tests.bonsai_jax.quantized_perplexity [FORMAT ...]

llama.cpp's quantize program is not in xllamacpp; its encoder is (ggml_quantize_chunk), which makes each
tensor of the second file, with the same importance matrix. The text is Moby-Dick (tests/data): its first
chunks make the importance matrix, its last ones are scored.
"""

import dataclasses
import functools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import bonsai_jax as bj
from bonsai_jax.making import Importance, planned, quantize_file
from bonsai_jax.making.quantizing import quantized_metadata
from bonsai_jax.measure import evaluate
from checkpoints import Checkpoint, Tensor, open_checkpoint, write_gguf
from checkpoints.demo import demo_path
from pallas_kernels import formats
from tests.bonsai_jax.llama_cpp import write_float32
from tests.pallas_kernels import ggml_quantize

TEXT = Path(__file__).parent.parent / "data" / "moby_dick.txt"
CONTEXT, CALIBRATION, SCORED = 512, 12, 12  # tokens of a chunk; chunks
PLAIN = ("q2_k", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k", "iq4_nl", "iq4_xs")
WITH_IMPORTANCE = (
    "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq2_m", "iq3_xxs", "iq3_xs", "iq3_s", "iq3_m",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Result:
    """Perplexities with our blocks and with ggml's, bits a weight, and the share of quantized bytes that are
    the same."""

    ours: float
    ggml: float
    bits: float
    same: float


class Comparison:
    """SmolLM2 in F32, in a folder, and what its formats lose."""

    def __init__(self, folder: Path):
        self.folder, self.original = folder, folder / "f32.gguf"
        write_float32(open_checkpoint(demo_path()), self.original)
        ids = bj.Tokenizer.from_checkpoint(open_checkpoint(demo_path())).encode(TEXT.read_text())
        self.chunks = evaluate.chunks(ids, CONTEXT, None)

    @functools.cached_property
    def importance(self) -> Importance:
        model = bj.load(str(demo_path()), bj.RunConfig(context=CONTEXT))
        return bj.importance(model, [chunk.tolist() for chunk in self.chunks[:CALIBRATION]])

    def perplexity(self, path: Path) -> float:
        model = bj.load(str(path), bj.RunConfig(context=CONTEXT, batch_size=1))
        return evaluate.perplexity(evaluate.evaluate(model, self.chunks[-SCORED:]).nll)[0]

    def compare(self, format: str) -> Result:
        importance = self.importance if format in WITH_IMPORTANCE else None
        ours, ggml = (self.folder / f"{format}-{name}.gguf" for name in ("ours", "ggml"))
        checkpoint = open_checkpoint(self.original)
        changes = quantize_file(checkpoint, ours, format, importance=importance)
        metadata = quantized_metadata(checkpoint, format)
        write_gguf(ggml, metadata, ggml_tensors(checkpoint, format, importance))
        before, after = open_checkpoint(ours), open_checkpoint(ggml)
        equal = [
            np.asarray(before.tensors[c.name].data).ravel() == np.asarray(after.tensors[c.name].data).ravel()
            for c in changes
            if c.before != c.after
        ]
        weights = sum(c.weights for c in changes)
        bits = 8 * sum(c.nbytes_after for c in changes) / weights
        result = Result(
            self.perplexity(ours), self.perplexity(ggml), bits, float(np.concatenate(equal).mean())
        )
        ours.unlink()
        ggml.unlink()
        return result


def ggml_tensors(checkpoint: Checkpoint, format: str, importance: Importance | None) -> Iterator[Tensor]:
    """The tensors of the file that llama.cpp would write."""
    for change in planned(checkpoint, format, importance=importance):
        tensor = checkpoint.tensors[change.name]
        assert isinstance(tensor, Tensor)
        if change.before == change.after:
            yield tensor
            continue
        columns = importance.matrix(change.name, change.shape)[0] if importance and change.weighted else None
        rows = formats.values(tensor.format, np.asarray(tensor.data)).reshape(-1, change.shape[-1])
        blocks = ggml_quantize.quantize(rows, change.after, columns)
        yield Tensor(change.name, change.after, change.shape, blocks.reshape(*change.shape[:-1], -1))


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(Path(folder))
        print(f"F32: {comparison.perplexity(comparison.original):.3f}", flush=True)
        print("| format | bits a weight | perplexity | with ggml's blocks | ratio | same bytes |")
        print("|---|---|---|---|---|---|")
        for name in names or (*PLAIN, *WITH_IMPORTANCE):
            r = comparison.compare(name)
            ratio, same = r.ours / r.ggml, f"{r.same:.1%}"
            print(
                f"| {name} | {r.bits:.2f} | {r.ours:.3f} | {r.ggml:.3f} | {ratio:.4f} | {same} |", flush=True
            )


if __name__ == "__main__":
    main(sys.argv[1:])
