"""bonsai-jax perplexity: how well a model predicts a text, and how far it is from another run."""

import contextlib
import sys
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
        typer.Option("--chunks", min=1, metavar="N", help="Score only the first N chunks."),
    ] = None,
    kl_base: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="An .npz file of log-probabilities: compared with if it exists, written if it does not.",
        ),
    ] = None,
    as_json: options.Json = False,
    run: options.RunOptions,
    devices: options.DeviceOptions,
    processes: options.ProcessOptions,
) -> None:
    """Perplexity of a text by llama.cpp's method: cut it into chunks of --ctx tokens and score the second
    half of each.

    With --kl-base, also print the mean and the largest KL divergence from the run that wrote the file, and
    the share of tokens for which both runs agree on the most likely one.
    """
    words = text.read(file)
    config = run.config(context=context, all_reduce=devices.all_reduce)
    processes.join()
    loaded = model.load(config, devices.mesh())

    from bonsai_jax.measure import evaluate

    tokenizer, vocab_size = loaded.tokenizer, loaded.config.vocab_size
    ids = tokenizer.encode(words, parse_special=False)
    context = context or min(DEFAULT_CHUNK, loaded.config.context_length)
    chunks = evaluate.chunks(ids, context, tokenizer.bos_id if tokenizer.add_bos else None)[:most]
    print(f"{len(ids)} tokens, {len(chunks)} chunks of {context}", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        write = compare = None
        if kl_base is not None and kl_base.exists():
            compare = stack.enter_context(evaluate.BaseReader(kl_base, chunks, vocab_size))
        elif kl_base is not None:
            write = stack.enter_context(evaluate.BaseWriter(kl_base, chunks, vocab_size))
        update = stack.enter_context(bar("scoring"))
        result = evaluate.evaluate(loaded, chunks, write=write, compare=compare, progress=update)
    ppl, error = evaluate.perplexity(result.nll)
    kl, same = result.divergence.kl, result.divergence.same_top
    if as_json:
        out = {"tokens": len(ids), "chunks": len(chunks), "context": context, "ppl": ppl, "ppl_error": error}
        if compare is not None:
            out |= {"kl": kl.mean, "kl_error": kl.error, "kl_largest": kl.largest}
            out |= {"same_top": same.mean, "same_top_error": same.error}
        print(text.json_line(out))
        return
    if compare is not None:
        print(f"KL = {kl.mean:.3e} +/- {kl.error:.1e}, largest {kl.largest:.3e}")
        print(f"same top token = {100 * same.mean:.2f} +/- {100 * same.error:.2f} %")
    print(f"PPL = {ppl:.4f} +/- {error:.4f}")
