"""bonsai-jax quantize: a GGUF file in another format."""

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bonsai_jax.cli import options, text
from bonsai_jax.progress import bar

if TYPE_CHECKING:
    from bonsai_jax.making import Change


def command(
    source: Annotated[
        str, typer.Argument(metavar="IN", help="A GGUF file in F32, F16 or BF16, or user/repo:quant.")
    ],
    path: Annotated[Path, typer.Argument(metavar="OUT", help="The new file.")],
    format: Annotated[
        str,
        typer.Argument(
            metavar="FORMAT",
            help="q4_k_m, q5_k_m, q6_k, q8_0, iq4_xs, iq3_m, q2_k, mxfp4, tq2_0, q1_0 and more, in any case.",
        ),
    ],
    tensor_type: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REGEX=FORMAT",
            help="Another format for tensors whose name has a match, as attn_v=q8_0. May be given several "
            "times; the first that matches counts.",
        ),
    ] = None,
    pure: Annotated[
        bool, typer.Option("--pure", help="Every matrix in FORMAT itself, none in a better one.")
    ] = False,
    requantize: Annotated[
        bool, typer.Option("--allow-requantize", help="Take weights that are quantized already.")
    ] = False,
    imatrix: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Importance matrices, as llama.cpp writes them: errors in columns that matter weigh more.",
        ),
    ] = None,
    fold: Annotated[
        int | None,
        typer.Option(
            metavar="BLOCK",
            help="Store matrices rotated (Hadamard), in blocks of so many inputs, as Bonsai 2 does. Not for "
            "llama.cpp.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is there.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print each tensor's format and size, and write nothing.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Write a model's weights in another format, by llama.cpp's mixes. Tensors are read and written one by
    one, and OUT appears when all is written."""
    from bonsai_jax.making import planned, quantize_file, read_importance
    from checkpoints import open_checkpoint

    how: dict[str, Any] = {
        "pure": pure,
        "tensor_formats": [_rule(rule) for rule in tensor_type or ()],
        "requantize": requantize,
        "importance": None if imatrix is None else read_importance(imatrix),
        "fold": fold,
    }
    checkpoint = open_checkpoint(source)
    if dry_run:
        changes = planned(checkpoint, format, **how)
        if as_json:
            print(text.json_line(_figures(changes, each=True)))
        else:
            print("\n".join([_table(changes), *_unnamed(imatrix, changes)]))
        return
    began = time.perf_counter()
    with bar("quantizing") as show:

        def progress(done: int, total: int) -> None:
            show(done, total, f"{done / (time.perf_counter() - began) / 1e6:.0f} million weights/s")

        changes = quantize_file(checkpoint, path, format, overwrite=overwrite, progress=progress, **how)
    seconds = time.perf_counter() - began
    if as_json:
        print(text.json_line({"path": str(path), "seconds": seconds, **_figures(changes)}))
    else:
        print("\n".join([f"{path}: {_summary(changes)} in {seconds:.1f} s", *_unnamed(imatrix, changes)]))


def _rule(rule: str) -> tuple[str, str]:
    pattern, equals, format = rule.rpartition("=")
    if not (pattern and equals and format):
        raise typer.BadParameter(f"--tensor-type {rule!r}: REGEX=FORMAT is expected, such as attn_v=q8_0")
    return pattern, format


def _unnamed(imatrix: Path | None, changes: "list[Change]") -> list[str]:
    """A line where the file of importance matrices lacks some."""
    searched = [change for change in changes if change.searched]
    lacking = [change.name for change in searched if not change.weighted]
    if imatrix is None or not lacking:
        return []
    some = ", ".join(lacking[:3]) + (", ..." if len(lacking) > 3 else "")
    return [f"{imatrix} does not name {len(lacking)} of {len(searched)} matrices, made without: {some}"]


def _summary(changes: "list[Change]") -> str:
    counts = Counter(change.after for change in changes)
    formats = ", ".join(f"{count} {format}" for format, count in counts.most_common())
    before, after = (sum(getattr(c, f"nbytes_{when}") for c in changes) for when in ("before", "after"))
    weights, count = sum(c.weights for c in changes), sum(c.rotated for c in changes)
    rotated = f"; {count} rotated" if count else ""
    return (
        f"{len(changes)} tensors ({formats}{rotated}), {before / 1e6:,.1f} MB -> {after / 1e6:,.1f} MB, "
        f"{8 * after / weights:.2f} bits a weight"
    )


def _table(changes: "list[Change]") -> str:
    rows = [
        (c.name, "x".join(map(str, c.shape)), c.before, "->" if c.before != c.after else "=", c.after)
        for c in changes
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join([*lines, _summary(changes)])


def _figures(changes: "list[Change]", *, each: bool = False) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "bytes_before": sum(c.nbytes_before for c in changes),
        "bytes_after": sum(c.nbytes_after for c in changes),
        "tensors_by_format": dict(Counter(c.after for c in changes)),
        "tensors_weighted": sum(c.weighted for c in changes),
        "tensors_rotated": sum(c.rotated for c in changes),
    }
    if each:
        figures["tensors"] = [
            {"name": c.name, "shape": c.shape, "before": c.before, "after": c.after, "bytes": c.nbytes_after}
            for c in changes
        ]
    return figures
