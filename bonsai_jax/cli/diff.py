"""bonsai-jax diff: what two files of a model differ in, weights and predictions."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bonsai_jax.cli import options, text
from bonsai_jax.cli.perplexity import DEFAULT_CHUNK
from bonsai_jax.cli.spread import spread
from bonsai_jax.progress import bar

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int

    from bonsai_jax.measure.differences import Difference
    from checkpoints import Checkpoint


@spread
def command(
    *,
    a: Annotated[
        str,
        typer.Argument(
            metavar="A", help="The original: a GGUF file, a Hugging Face folder, user/repo:quant."
        ),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="The other file of the same model.")],
    file: Annotated[
        Path | None,
        typer.Option(
            "-f",
            "--file",
            metavar="FILE",
            help="A text, UTF-8, on which predictions are compared too; -: standard input.",
        ),
    ] = None,
    context: Annotated[
        int,
        typer.Option(
            "-c",
            "--ctx",
            min=0,
            metavar="N",
            help="Tokens of a chunk of the text; 0: 512, or the models' context if that is shorter.",
        ),
    ] = 0,
    most: Annotated[
        int | None,
        typer.Option("--chunks", min=1, metavar="N", help="Compare only the first N chunks."),
    ] = None,
    offline: Annotated[
        bool,
        typer.Option("--offline", help="Do not use the network: load user/repo from the cache on this disk."),
    ] = False,
    as_json: options.Json = False,
    run: options.RunOptions,
) -> None:
    """Compare two files of a model: the format, bits a weight and relative error of each tensor.

    With -f, also run both on a text, in chunks as the perplexity command does, and print the KL divergence of
    B's predictions from A's, the share of tokens for which both agree on the most likely one, and both
    perplexities.
    """
    words = None if file is None else text.read(file)
    from bonsai_jax.measure.differences import compare_tensors
    from checkpoints import open_checkpoint

    opened = [open_checkpoint(name, offline=offline) for name in (a, b)]
    chunks = None if words is None else _chunks(words, opened, context, most)
    with bar("comparing") as update:
        compared = compare_tensors(*opened, progress=update)
    if not as_json:
        print(_table(compared))
    predictions = {} if chunks is None else _predictions(opened, chunks, run)
    if as_json:
        print(text.json_line({"a": a, "b": b, **_figures(compared), **predictions}))
    elif predictions:
        print(_prediction_lines(predictions))


def _chunks(
    words: str, opened: "list[Checkpoint]", context: int, most: int | None
) -> "Int[np.ndarray, 'chunks context']":
    """The text for both models. Its errors are raised before any weight is read."""
    from bonsai_jax.measure import divergence, evaluate
    from bonsai_jax.network import architectures

    tokenizer = divergence.shared_tokenizer(*opened)
    ids = tokenizer.encode(words, parse_special=False)
    longest = min(architectures.config_of(checkpoint).context_length for checkpoint in opened)
    context = context or min(DEFAULT_CHUNK, longest)
    chunks = evaluate.chunks(ids, context, tokenizer.bos_id if tokenizer.add_bos else None)[:most]
    print(f"{len(ids)} tokens, {len(chunks)} chunks of {context}", file=sys.stderr)
    return chunks


def _predictions(
    opened: "list[Checkpoint]", chunks: "Int[np.ndarray, 'chunks context']", run: options.RunOptions
) -> dict[str, Any]:
    from bonsai_jax.measure import divergence, evaluate

    config = run.config(context=chunks.shape[1])
    try:
        models = [options.LoadOptions().load(config, checkpoint=checkpoint) for checkpoint in opened]
    except MemoryError as error:
        raise MemoryError(
            f"{error}; or run one model after the other: bonsai-jax perplexity -m A -f FILE --kl-base "
            "base.npz, then the same with -m B"
        ) from error
    with bar("scoring") as update:
        result = divergence.compare_predictions(models[0], models[1], chunks, progress=update)
    figures: dict[str, Any] = {"chunks": chunks.shape[0], "context": chunks.shape[1]}
    for name, nll in (("a", result.nll_a), ("b", result.nll_b)):
        figures[f"ppl_{name}"], figures[f"ppl_{name}_error"] = evaluate.perplexity(nll)
    kl, same = result.divergence.kl, result.divergence.same_top
    figures |= {"kl": kl.mean, "kl_error": kl.error, "kl_p99": result.divergence.kl_percentile(99)}
    return figures | {"kl_largest": kl.largest, "same_top": same.mean, "same_top_error": same.error}


def _prediction_lines(figures: dict[str, Any]) -> str:
    return (
        "\nKL(A || B) = {kl:.3e} +/- {kl_error:.1e}, 99th percentile {kl_p99:.3e}, largest {kl_largest:.3e}\n"
        "same top token = {same:.2f} +/- {same_error:.2f} %\n"
        "PPL = {ppl_a:.4f} +/- {ppl_a_error:.4f} (A), {ppl_b:.4f} +/- {ppl_b_error:.4f} (B)"
    ).format(**figures, same=100 * figures["same_top"], same_error=100 * figures["same_top_error"])


def _table(compared: "list[Difference]") -> str:
    rows: list[tuple[Any, ...]] = [("tensor", "shape", "A", "B", "bits A", "bits B", "error")]
    for d in compared:
        shapes = list(dict.fromkeys("x".join(map(str, side.shape)) for side in (d.a, d.b) if side))
        rows.append(
            (
                d.name,
                " / ".join(shapes),
                *(side.format if side else "-" for side in (d.a, d.b)),
                *(f"{side.bits:.2f}" if side else "-" for side in (d.a, d.b)),
                f"{d.error:.2e}" if d.error is not None else str(d.reason),
            )
        )
    total = _figures(compared)
    return (
        f"{text.table(rows)}\n"
        f"{total['compared']} of {len(compared)} tensors compared, "
        f"{total['bytes_a'] / 1e6:,.1f} MB -> {total['bytes_b'] / 1e6:,.1f} MB, "
        f"{total['bits_a']:.2f} -> {total['bits_b']:.2f} bits a weight, error {total['error']:.2e}"
    )


def _figures(compared: "list[Difference]") -> dict[str, Any]:
    import math

    from bonsai_jax.measure.differences import relative_error

    figures: dict[str, Any] = {"compared": sum(d.reason is None for d in compared)}
    for name in ("a", "b"):
        sides = [side for d in compared if (side := getattr(d, name)) is not None]
        figures[f"bytes_{name}"] = nbytes = sum(side.nbytes for side in sides)
        figures[f"bits_{name}"] = 8 * nbytes / sum(math.prod(side.shape) for side in sides)
    tensors = [
        {
            "name": d.name,
            **{
                f"{key}_{name}": getattr(side, key) if (side := getattr(d, name)) else None
                for key in ("format", "shape", "bits")
                for name in ("a", "b")
            },
            "error": d.error,
            "reason": d.reason,
        }
        for d in compared
    ]
    return {**figures, "error": relative_error(compared), "tensors": tensors}
