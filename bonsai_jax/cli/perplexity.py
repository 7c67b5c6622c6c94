"""bonsai-jax perplexity: how well a model predicts a text, and how far from another run it is."""

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from bonsai_jax.cli import options
from bonsai_jax.progress import bar

DEFAULT_CHUNK = 512  # llama.cpp's


def command(
    file: Annotated[
        Path, typer.Option("-f", "--file", metavar="FILE", help="The text, UTF-8; -: what is piped in.")
    ],
    model: options.ModelName = None,
    context: Annotated[
        int,
        typer.Option(
            "-c",
            "--ctx",
            min=0,
            metavar="N",
            help="Tokens of a chunk; 0: 512, or the model's context if less.",
        ),
    ] = 0,
    most: Annotated[
        int | None,
        typer.Option("--chunks", min=1, metavar="N", help="Score no more than the first so many chunks."),
    ] = None,
    kl_base: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="An .npz file of log-probabilities: compared with if it exists, written if it does not.",
        ),
    ] = None,
    impl: options.Impl = "auto",
    schedule: options.Schedule = "auto",
    weights: options.Weights = "auto",
    cache_dtype: options.CacheType = None,
    activation_bits: options.ActivationBits = "8",
    tensor_parallel: options.TensorParallel = 1,
    all_reduce: options.AllReduce = "auto",
    coordinator: options.Coordinator = None,
    num_processes: options.NumProcesses = None,
    process_id: options.ProcessId = None,
    as_json: options.Json = False,
    offline: options.Offline = False,
    no_compile_cache: options.NoCompileCache = False,
) -> None:
    """Perplexity of a text by llama.cpp's method: chunks of --ctx tokens, of which the second half is scored.

    With --kl-base also the mean KL divergence from the run that wrote the file, the share of tokens that both
    find most likely, and the largest divergence.
    """
    text = options.read_text(file)
    run = options.run_config(
        impl=impl,
        schedule=schedule,
        context=context,
        weights=weights,
        cache_dtype=cache_dtype,
        activation_bits=activation_bits,
        all_reduce=all_reduce,
    )
    options.join_processes(coordinator, num_processes, process_id)
    mesh = options.mesh(tensor=tensor_parallel)
    loaded = options.load(model, run, on=mesh, offline=offline, no_compile_cache=no_compile_cache)

    from bonsai_jax.measure import evaluate

    tokenizer, vocab_size = loaded.tokenizer, loaded.config.vocab_size
    ids = tokenizer.encode(text, parse_special=False)
    context = context or min(DEFAULT_CHUNK, loaded.config.context_length)
    cut = evaluate.chunks(ids, context, tokenizer.bos_id if tokenizer.add_bos else None)[:most]
    print(f"{len(ids)} tokens, {len(cut)} chunks of {context}", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        write = compare = None
        if kl_base is not None and kl_base.exists():
            compare = stack.enter_context(evaluate.BaseReader(kl_base, cut, vocab_size))
        elif kl_base is not None:
            write = stack.enter_context(evaluate.BaseWriter(kl_base, cut, vocab_size))
        update = stack.enter_context(bar("scoring"))
        result = evaluate.evaluate(loaded, cut, write=write, compare=compare, progress=update)
    ppl, error = evaluate.perplexity(result.nll)
    kl, same = result.divergence.kl, result.divergence.same_top
    if as_json:
        out = {"tokens": len(ids), "chunks": len(cut), "context": context, "ppl": ppl, "ppl_error": error}
        if compare is not None:
            out |= {"kl": kl.mean, "kl_error": kl.error, "kl_largest": kl.largest}
            out |= {"same_top": same.mean, "same_top_error": same.error}
        print(options.to_json(out))
        return
    if compare is not None:
        print(f"KL = {kl.mean:.3e} +/- {kl.error:.1e}, largest {kl.largest:.3e}")
        print(f"same top token = {100 * same.mean:.2f} +/- {100 * same.error:.2f} %")
    print(f"PPL = {ppl:.4f} +/- {error:.4f}")
