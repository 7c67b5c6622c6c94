"""bonsai-jax convert: a Hugging Face folder as a GGUF file, or a GGUF file as a folder."""

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bonsai_jax.cli import options, text
from bonsai_jax.progress import bar

if TYPE_CHECKING:
    from bonsai_jax.making import Converted


def command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="IN",
            help="A folder with config.json, *.safetensors and tokenizer.json, a GGUF file, or user/repo.",
        ),
    ],
    path: Annotated[Path, typer.Argument(metavar="OUT", help="The new GGUF file, or the new folder.")],
    format: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="Of matrices: f16, bf16, f32, in a GGUF file also q8_0. auto: as IN has them, and f16 in "
            "place of quantized ones in a folder.",
        ),
    ] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is there.")] = False,
    as_json: options.Json = False,
) -> None:
    """Write a Hugging Face folder as a GGUF file, or a GGUF file as a Hugging Face folder. Tensors are read
    and written one by one, and OUT appears when all is written."""
    from bonsai_jax.making import convert

    began = time.perf_counter()
    with bar("converting") as show:

        def progress(done: int, total: int) -> None:
            show(done, total, f"{done / (time.perf_counter() - began) / 1e6:.0f} million weights/s")

        made = convert(source, path, format=format.lower(), overwrite=overwrite, progress=progress)
    seconds = time.perf_counter() - began
    counts = dict(Counter(change.after for change in made.changes).most_common())
    nbytes = sum(change.nbytes_after for change in made.changes)
    if as_json:
        figures = {
            "path": str(path), "seconds": seconds, "naming": made.naming, "architecture": made.architecture,
            "bytes": nbytes, "tensors_by_format": counts, "skipped": made.skipped, "notes": made.notes,
        }  # fmt: skip
        print(text.json_line(figures))
        return
    formats = ", ".join(f"{count} {name}" for name, count in counts.items())
    kind = (
        f"a GGUF file of {made.architecture}" if made.naming == "gguf" else f"a folder of {made.architecture}"
    )
    print(
        f"{path}: {kind}, {len(made.changes)} tensors ({formats}), {nbytes / 1e6:,.1f} MB in {seconds:.1f} s"
    )
    for line in _left_out(made):
        print(line)


def _left_out(made: "Converted") -> list[str]:
    """What the new file lacks, a line each."""
    names = ", ".join(made.skipped[:3]) + (", ..." if len(made.skipped) > 3 else "")
    skipped = [f"left out, because they are not needed for text: {names}*"] if made.skipped else []
    return [*skipped, *made.notes]
