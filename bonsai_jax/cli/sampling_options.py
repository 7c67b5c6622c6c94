"""Options for how tokens are drawn, under llama.cpp's names."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from bonsai_jax import SamplingParams


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn: the fields of SamplingParams."""

    temperature: Annotated[
        float,
        typer.Option("--temp", min=0, metavar="T", help="Temperature; 0: always the most likely token."),
    ] = 0.8
    top_k: Annotated[
        int, typer.Option("--top-k", min=0, metavar="K", help="Keep the k most likely tokens; 0: all.")
    ] = 40
    top_p: Annotated[
        float,
        typer.Option(
            "--top-p",
            min=0,
            max=1,
            metavar="P",
            help="Keep the most likely tokens until their probabilities sum to P; 1: all.",
        ),
    ] = 0.95
    min_p: Annotated[
        float,
        typer.Option(
            "--min-p",
            min=0,
            max=1,
            metavar="P",
            help="Keep tokens at least P times as likely as the most likely one; 0: all.",
        ),
    ] = 0.05
    temperature_first: Annotated[
        bool,
        typer.Option("--temperature-first", help="Apply --temp before --top-p and --min-p, not after them."),
    ] = False
    repetition_penalty: Annotated[
        float,
        typer.Option(
            "--repeat-penalty",
            metavar="X",
            help="Divides the logits of tokens in the prompt or the answer; 1: no penalty.",
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        typer.Option(
            "--presence-penalty",
            metavar="X",
            help="Subtracted from the logits of tokens in the answer; 0: no penalty.",
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        typer.Option(
            "--frequency-penalty",
            metavar="X",
            help="Subtracted once for each time that a token occurs in the answer; 0: no penalty.",
        ),
    ] = 0.0
    seed: Annotated[
        int,
        typer.Option(
            "-s", "--seed", min=-1, metavar="N", help="Seed of the random draws; -1: a new one every time."
        ),
    ] = -1
    min_tokens: Annotated[
        int,
        typer.Option("--min-tokens", min=0, metavar="N", help="Ban end tokens until an answer has N tokens."),
    ] = 0
    typical_p: Annotated[
        float,
        typer.Option(
            "--typical",
            min=0,
            max=1,
            metavar="P",
            help="Keep the tokens whose information is nearest to the entropy until their probabilities "
            "sum to more than P; 1: all.",
        ),
    ] = 1.0
    top_n_sigma: Annotated[
        float,
        typer.Option(
            "--top-nsigma",
            metavar="X",
            help="Keep tokens whose logits are within X standard deviations of the largest; 0 or less: all.",
        ),
    ] = 0.0
    xtc_probability: Annotated[
        float,
        typer.Option(
            "--xtc-probability",
            min=0,
            max=1,
            metavar="P",
            help="How often all likely tokens but the least likely are left out; 0: never.",
        ),
    ] = 0.0
    xtc_threshold: Annotated[
        float,
        typer.Option(
            "--xtc-threshold",
            min=0,
            max=1,
            metavar="P",
            help="The probability from which on a token is likely for --xtc-probability; above 0.5: none is.",
        ),
    ] = 0.1
    dry_multiplier: Annotated[
        float,
        typer.Option(
            "--dry-multiplier",
            min=0,
            metavar="X",
            help="Penalty of a token that would make a repetition longer than free; 0: none.",
        ),
    ] = 0.0
    dry_base: Annotated[
        float,
        typer.Option(
            "--dry-base",
            min=0,
            metavar="X",
            help="Factor of this penalty for each token by which the repetition is longer.",
        ),
    ] = 1.75
    dry_allowed_length: Annotated[
        int,
        typer.Option(
            "--dry-allowed-length", min=0, metavar="N", help="Repetitions of fewer tokens are free."
        ),
    ] = 2
    dry_penalty_last_n: Annotated[
        int,
        typer.Option(
            "--dry-penalty-last-n",
            min=-1,
            metavar="N",
            help="Look for repetitions in the newest N tokens; -1: in all.",
        ),
    ] = -1
    dry_sequence_breakers: Annotated[
        list[str] | None,
        typer.Option(
            "--dry-sequence-breaker",
            metavar="TEXT",
            help="A text across which no repetition goes, in place of the usual ones; may be given several "
            "times; none: no text.",
        ),
    ] = None
    dynatemp_range: Annotated[
        float,
        typer.Option(
            "--dynatemp-range",
            min=0,
            metavar="X",
            help="The temperature lies within --temp minus and plus X, by the entropy; 0: it is --temp.",
        ),
    ] = 0.0
    dynatemp_exponent: Annotated[
        float,
        typer.Option("--dynatemp-exp", min=0, metavar="X", help="Exponent of the entropy in this."),
    ] = 1.0
    mirostat: Annotated[
        Literal[0, 2],
        typer.Option(
            help="2: Mirostat 2.0 and the temperature, in place of penalties and other samplers; 0: "
            "without it."
        ),
    ] = 0
    mirostat_tau: Annotated[
        float,
        typer.Option("--mirostat-tau", min=0, metavar="X", help="Bits of information that Mirostat aims at."),
    ] = 5.0
    mirostat_eta: Annotated[
        float,
        typer.Option("--mirostat-eta", min=0, metavar="X", help="How fast Mirostat learns."),
    ] = 0.1

    def params(self) -> "SamplingParams":
        from bonsai_jax import SamplingParams
        from bonsai_jax.sampling_params import BREAKERS

        fields = dataclasses.asdict(self)
        texts = fields["dry_sequence_breakers"]
        fields["dry_sequence_breakers"] = BREAKERS if texts is None else [t for t in texts if t != "none"]
        params = SamplingParams(**fields)
        return dataclasses.replace(params, seed=None) if self.seed < 0 else params
