"""bonsai-jax imatrix: the importance matrices of a model on a text, for quantize --imatrix."""

import dataclasses
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from bonsai_jax.cli import options, text
from bonsai_jax.cli.spread import spread
from bonsai_jax.progress import bar

DEFAULT_CHUNK = 512  # llama.cpp's


@spread
def command(
    *,
    file: Annotated[
        Path, typer.Option("-f", "--file", metavar="FILE", help="The text, UTF-8; -: standard input.")
    ],
    model: options.LoadOptions,
    path: Annotated[Path, typer.Option("-o", "--output", metavar="OUT", help="The new file, GGUF.")] = Path(
        "imatrix.gguf"
    ),
    context: Annotated[
        int,
        typer.Option(
            "-c",
            "--ctx",
            min=0,
            metavar="N",
            help="Tokens of a chunk; 0: 512, or the model's context if that is shorter.",
        ),
    ] = 0,
    most: Annotated[
        int | None,
        typer.Option("--chunks", min=1, metavar="N", help="Read only the first N chunks."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is there.")] = False,
    as_json: options.Json = False,
    run: options.RunOptions,
) -> None:
    """Importance matrices, for quantize --imatrix: for each column of each matrix the mean square of the
    activations that it is multiplied with on a text, in llama.cpp's format."""
    from bonsai_jax.making import check_new

    check_new(path, overwrite)
    words = text.read(file)
    loaded = model.load(run.config(context=context))

    from bonsai_jax.measure import evaluate
    from bonsai_jax.research.importance import importance

    tokenizer = loaded.tokenizer
    ids = tokenizer.encode(words, parse_special=False)
    context = context or min(DEFAULT_CHUNK, loaded.config.context_length)
    chunks = evaluate.chunks(ids, context, tokenizer.bos_id if tokenizer.add_bos else None)[:most]
    print(f"{len(ids)} tokens, {len(chunks)} chunks of {context}", file=sys.stderr)
    began = time.perf_counter()
    with bar("reading") as update:
        made = importance(loaded, [list(map(int, chunk)) for chunk in chunks], progress=update)
    dataclasses.replace(made, datasets=(str(file),)).write(path)
    seconds, experts = time.perf_counter() - began, sum(int((c == 0).sum()) for c in made.counts.values())
    if as_json:
        figures = {"path": str(path), "seconds": seconds, "tokens": len(chunks) * context}
        figures |= {"chunks": len(chunks), "matrices": len(made.columns), "unused_experts": experts}
        print(text.json_line(figures))
        return
    unused = f"; {experts} matrices of experts got no token, give more text" if experts else ""
    print(f"{path}: {len(made.columns)} matrices, {len(chunks) * context} tokens in {seconds:.1f} s{unused}")
