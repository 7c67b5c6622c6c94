"""bonsai-jax generate: answer one prompt, or a file of them."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bonsai_jax.cli import options, thoughts
from bonsai_jax.cli.figures import CompileClock, Figures, line_of

if TYPE_CHECKING:
    from bonsai_jax import Model


def command(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt. Left out, or -: what is piped in.")
    ] = None,
    model: options.ModelName = None,
    max_new_tokens: options.NewTokens = 128,
    prompt_option: Annotated[
        str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="The prompt, as an option.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "-f", "--file", metavar="FILE", help="A text file with the prompt; -: what is piped in."
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")
    ] = False,
    lines: Annotated[
        bool,
        typer.Option(
            "--lines", help="A prompt on each line, many answered at once: a JSON object for each, in order."
        ),
    ] = False,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size", min=1, metavar="N", help="With --lines: most prompts answered at once; 8."
        ),
    ] = None,
    system: options.System = None,
    think: options.Think = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    as_json: options.Json = False,
    temperature: options.Temperature = 0.8,
    top_k: options.TopK = 40,
    top_p: options.TopP = 0.95,
    min_p: options.MinP = 0.05,
    temperature_first: options.TemperatureFirst = False,
    repetition_penalty: options.RepeatPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    seed: options.Seed = -1,
    speculate: options.Speculate = None,
    context: options.Context = 0,
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
    offline: options.Offline = False,
    no_compile_cache: options.NoCompileCache = False,
) -> None:
    """Answer one prompt: text to stdout as it comes, then a line of figures to stderr. With --lines, one on
    each line.

    With --json, stdout holds one JSON object and nothing else: prompt_tokens, tokens, text, finish_reason,
    timings (load_s, ttft_s, prefill_tok_s, decode_tok_s), device, impl; with --speculate tokens_per_step.
    """
    if len([x for x in (prompt, prompt_option, file) if x is not None]) > 1:
        raise typer.BadParameter("give one prompt: as the argument, with -p, or with -f")
    if system is not None and not chat:
        raise typer.BadParameter("--system needs --chat")
    if batch_size is not None and not lines:
        raise typer.BadParameter("--batch-size needs --lines")
    if think is not None and not chat:
        raise typer.BadParameter("--think and --no-think need --chat")
    text = prompt_option if prompt in (None, "-") else prompt
    if text is None and prompt is None and file is None and sys.stdin.isatty():
        raise typer.BadParameter("no prompt: give one as the argument, with -f, or piped")
    if text is None:
        text = options.read_text(file or options.STDIN)
    prompts = [line for line in text.split("\n") if line.strip()] if lines else [text]
    if not prompts:
        raise ValueError(f"{file or 'the text'}: no line of it has a prompt")
    params = options.sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        temperature_first=temperature_first,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
    )

    began = time.perf_counter()
    run = options.run_config(
        impl=impl,
        schedule=schedule,
        context=context,
        weights=weights,
        cache_dtype=cache_dtype,
        activation_bits=activation_bits,
        all_reduce=all_reduce,
        batch_size=(batch_size or 8) if lines else 1,
        speculate=speculate,
    )
    options.join_processes(coordinator, num_processes, process_id)
    mesh = options.mesh(tensor=tensor_parallel)
    loaded = options.load(model, run, on=mesh, offline=offline, no_compile_cache=no_compile_cache)
    load_s = time.perf_counter() - began

    import bonsai_jax as bj
    from bonsai_jax import card, machine

    clock = CompileClock()
    encode = _chat(loaded, system, think) if chat else loaded.tokenizer.encode
    every = [encode(prompt) for prompt in prompts]
    if max_new_tokens < 0:
        max_new_tokens = max(1, loaded.run.context - max(map(len, every)))
    how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": params, "stop": stop or []}
    how |= {"ignore_eos": ignore_eos, "speculate": speculate}
    if lines:
        for output in bj.generate(loaded, every, **how, progress=True):
            answer = {name: getattr(output, name) for name in ("prompt_tokens", "tokens", "text")}
            print(options.to_json(answer | {"finish_reason": output.finish_reason}))
        return
    (ids,) = every
    seen = Figures(len(ids), clock, speculates=speculate is not None)
    pieces, shown = bj.stream(loaded, ids, **how), thoughts.Shown(thoughts.begun(loaded.tokenizer, ids))
    for piece in seen.watch(pieces):
        if not as_json:
            print(shown.next(piece.text), end="", flush=True)
    if not as_json:
        print(shown.end(), flush=True)
    print(line_of(loaded, seen), file=sys.stderr)
    if as_json:
        timings = {
            "load_s": load_s,
            "ttft_s": seen.ttft_s,
            "prefill_tok_s": seen.prefill_tok_s,
            "decode_tok_s": seen.decode_tok_s,
        }
        answer: dict[str, Any] = {
            "prompt_tokens": len(ids),
            "tokens": seen.tokens,
            "text": seen.text,
            "finish_reason": seen.finish_reason,
            "timings": timings,
            "device": machine.device_name(),
            "impl": card.step_names(loaded.params),
        }
        if speculate is not None:
            answer["tokens_per_step"] = seen.tokens_per_step
        print(options.to_json(answer))


def _chat(model: "Model", system: str | None, think: bool | None) -> Callable[[str], list[int]]:
    """A prompt as the first message of a chat."""
    before = [{"role": "system", "content": system}] if system is not None else []
    thinking = {} if think is None else {"enable_thinking": think}
    return lambda text: model.tokenizer.encode_chat([*before, {"role": "user", "content": text}], **thinking)
