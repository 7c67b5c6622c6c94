"""bonsai-jax generate: answer one prompt, or a file of them."""

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bonsai_jax.cli import options, streamed, text, thoughts
from bonsai_jax.cli.figures import CompileClock, Figures, summary
from bonsai_jax.cli.sampling_options import SamplingOptions
from bonsai_jax.cli.spread import spread

if TYPE_CHECKING:
    from bonsai_jax import Model


@spread
def command(
    *,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The prompt. Left out, or -: read from standard input."),
    ] = None,
    model: options.LoadOptions,
    prompt_option: Annotated[
        str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="The prompt, as an option.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("-f", "--file", metavar="FILE", help="A text file with the prompt; -: standard input."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")
    ] = False,
    lines: Annotated[
        bool,
        typer.Option(
            "--lines",
            help="Answer a prompt on each line, many at once; print a JSON object for each, in order.",
        ),
    ] = False,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "-b",
            "--batch-size",
            min=1,
            metavar="N",
            help="With --lines: most prompts answered at once; up to 64, on a CPU 32, as memory allows.",
        ),
    ] = None,
    max_new_tokens: options.NewTokens = 128,
    context: options.Context = 0,
    speculation: options.SpeculationOptions,
    as_json: options.Json = False,
    answers: options.AnswerOptions,
    constraints: options.ConstraintOptions,
    sampling: SamplingOptions,
    run: options.RunOptions,
    devices: options.DeviceOptions,
    processes: options.ProcessOptions,
) -> None:
    """Answer one prompt: the text goes to stdout as it is generated, then a line of figures to stderr. With
    --lines, answer the prompt on each line.

    With --json, stdout has one JSON object and nothing else: prompt_tokens, tokens, text, finish_reason,
    timings (load_s, ttft_s, prefill_tok_s, decode_tok_s), device, impl; with speculation tokens_per_step.
    """
    if len([x for x in (prompt, prompt_option, file) if x is not None]) > 1:
        raise typer.BadParameter("give one prompt: as the argument, with -p, or with -f")
    if answers.system is not None and not chat:
        raise typer.BadParameter("--system needs --chat")
    if batch_size is not None and not lines:
        raise typer.BadParameter("--batch-size needs --lines")
    if answers.think is not None and not chat:
        raise typer.BadParameter("--think and --no-think need --chat")
    prompts = _prompts(prompt, prompt_option, file, lines)
    params, constraint = sampling.params(), constraints.constraint()

    began = time.perf_counter()
    config = run.config(
        context=context,
        all_reduce=devices.all_reduce,
        batch_size=(batch_size or 0) if lines else 1,
        speculation=speculation,
    )
    processes.join()

    def asked(loaded: "Model") -> tuple[list[list[int]], dict[str, Any]]:
        """The prompts' tokens, and arguments of bj.compile_ahead."""
        from bonsai_jax.tokens.thoughts import first_thought

        encode = _chat(loaded, answers) if chat else loaded.tokenizer.encode
        encoded = [encode(prompt) for prompt in prompts]
        longest = max(1, loaded.run.context - max(map(len, encoded)))
        most = max_new_tokens if max_new_tokens >= 0 else longest
        how = {"max_new_tokens": most, "sampling": params, "speculate": speculation.proposer}
        if constraint is None or answers.think is not False:
            return encoded, how | {"constraint": constraint}
        thought = first_thought(loaded.tokenizer, encoded[0], thinks=False)  # all prompts end alike
        return encoded, how | {"constraint": dataclasses.replace(constraint, thought=thought)}

    def compile_for(shapes: "Model") -> None:
        from bonsai_jax import compile_ahead

        encoded, how = asked(shapes)
        compile_ahead(shapes, encoded, **how)

    loaded = model.load(config, devices.mesh(), on_shapes=compile_for)
    load_s = time.perf_counter() - began

    import bonsai_jax as bj
    from bonsai_jax.tokens.answer_parser import answer_parser

    clock = CompileClock()
    encoded, how = asked(loaded)
    how |= {"stop": answers.stop or [], "ignore_eos": answers.ignore_eos}
    if lines:
        for output in bj.generate(loaded, encoded, **how, progress=True):
            fields = ("prompt_tokens", "tokens", "text", "finish_reason")
            print(text.json_line({name: getattr(output, name) for name in fields}))
        return
    (ids,) = encoded
    figures = Figures(len(ids), clock, speculates=speculation.proposer is not None)
    pieces, shown = bj.stream(loaded, ids, **how), thoughts.Shown(answer_parser(loaded.tokenizer, ids))
    answer = streamed.Streamed()
    with answer.lines_between():
        for piece in figures.watch(pieces):
            if not as_json:
                answer.write(shown.next(piece.text))
        if not as_json:
            answer.write(f"{shown.end()}\n")
    print(summary(loaded, figures), file=sys.stderr)
    if as_json:
        print(text.json_line(_json(loaded, figures, load_s)))


def _prompts(prompt: str | None, prompt_option: str | None, file: Path | None, lines: bool) -> list[str]:
    """The prompts, from the argument, the option, a file or standard input."""
    source = prompt_option if prompt in (None, "-") else prompt
    if source is None and prompt is None and file is None and sys.stdin.isatty():
        raise typer.BadParameter("no prompt: give one as the argument, with -f, or piped")
    if source is None:
        source = text.read(file or text.STDIN)
    prompts = [line for line in source.split("\n") if line.strip()] if lines else [source]
    if not prompts:
        raise ValueError(f"{file or 'the text'}: no line of it has a prompt")
    return prompts


def _chat(model: "Model", answers: options.AnswerOptions) -> Callable[[str], list[int]]:
    """Encodes a prompt as the first message of a chat."""
    first = [{"role": "system", "content": answers.system}] if answers.system is not None else []
    variables = options.template_variables(answers.think)
    return lambda prompt: model.tokenizer.encode_chat(
        [*first, {"role": "user", "content": prompt}], **variables
    )


def _json(model: "Model", figures: Figures, load_s: float) -> dict[str, Any]:
    from bonsai_jax import card, machine

    answer: dict[str, Any] = {
        "prompt_tokens": figures.prompt_tokens,
        "tokens": figures.tokens,
        "text": figures.text,
        "finish_reason": figures.finish_reason,
        "timings": {
            "load_s": load_s,
            "ttft_s": figures.ttft_s,
            "prefill_tok_s": figures.prefill_tok_s,
            "decode_tok_s": figures.decode_tok_s,
        },
        "device": machine.device_name(),
        "impl": card.step_names(model.params, model.config),
    }
    if figures.speculates:
        answer["tokens_per_step"] = figures.tokens_per_step
    return answer
