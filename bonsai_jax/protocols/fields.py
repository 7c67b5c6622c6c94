"""Checks of the fields of a body. Each returns the value as a Request has it, or raises FieldError.

A field that is null counts as missing.
"""

from collections.abc import Callable, Mapping
from typing import Any

from bonsai_jax.protocols.errors import FieldError
from bonsai_jax.sampling_params import SamplingParams

MOST_NEW, MOST_ANSWERS, MOST_LOGPROBS, MOST_BIASES = 2**31 - 1, 4096, 20, 1024
MOST_TEMPERATURE, REPETITIONS, MOST_BIAS = 1000.0, (0.001, 1000.0), 1e6
MOST_STOPS, LONGEST_STOP = 32, 256  # each piece of text is compared with all of them
MOST_BREAKERS = 32

Check = Callable[[str, Any], Any]


def read(body: Mapping[str, Any], known: Mapping[str, Check], *, strict: bool, path: str) -> dict[str, Any]:
    """Values of the fields of a body that its protocol knows.

    strict  raise FieldError for another field
    """
    given = {}
    for name, value in body.items():
        if name not in known:
            if strict:
                names = ", ".join(sorted(known))
                raise FieldError(name, f"not a field that {path} takes; it takes {names}")
        elif value is not None:
            given[name] = known[name](name, value)
    return given


def sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """`sampling` and `sampling_names` of a Request with these values. Raises FieldError for one out of its
    range."""
    own = {name: given[name] for name in (*OTHER_NAMES, *SAMPLING, *SAMPLERS) if name in given}
    fields = {OTHER_NAMES.get(name, name): value for name, value in own.items()}
    try:
        SamplingParams(**fields)
    except ValueError:
        for name, value in own.items():
            field = OTHER_NAMES.get(name, name)
            try:
                SamplingParams(**{field: value})
            except ValueError as error:
                raise FieldError(name, str(error).removeprefix(f"SamplingParams: {field} ")) from None
        raise
    names = {field: name for name, field in OTHER_NAMES.items() if name in own and field not in own}
    return {"sampling": fields, "sampling_names": names}


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise FieldError(name, f"{shown(value)} is not a text")
    return value


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FieldError(name, f"{shown(value)} is not a number")
    return value


def whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise FieldError(name, f"{shown(value)} is not a whole number")
    return value


def top_k(name: str, value: Any) -> int:
    """-1 is 0 in other servers: all tokens."""
    return max(0, value) if whole(name, value) == -1 else value


def seed(name: str, value: Any) -> int | None:
    """-1 is None, as for llama.cpp: a new one for each request, whatever the server's is."""
    return None if whole(name, value) == -1 else value


def new_tokens(least: int) -> Callable[[str, Any], int | None]:
    """The check of a number of new tokens. -1 is None, as for llama.cpp: the request sets no limit."""
    in_range = between(least, MOST_NEW)
    return lambda name, value: None if value == -1 and whole(name, value) else in_range(name, value)


def between(low: int, high: int) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        if not low <= whole(name, value) <= high:
            raise FieldError(name, f"{value} does not lie in {low} to {high}")
        return value

    return check


def within(low: float, high: float) -> Check:
    """Numbers beyond any use, which float32 would make infinite or 0, are errors."""

    def check(name: str, value: Any) -> float:
        if number(name, value) > high or value < low:
            raise FieldError(name, f"is {shown(value)}; it must lie in {low:g} to {high:g}")
        return value

    return check


def truth(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise FieldError(name, f"{shown(value)} is neither true nor false")
    return value


def stop(name: str, value: Any) -> list[str]:
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) and text for text in texts):
        raise FieldError(name, f"{shown(value)} is neither a text nor a list of texts, none of them empty")
    if len(texts) > MOST_STOPS or any(len(text) > LONGEST_STOP for text in texts):
        raise FieldError(name, f"at most {MOST_STOPS} texts of {LONGEST_STOP} characters each are taken")
    return texts


def bias(name: str, value: Any) -> dict[int, float]:
    ids = isinstance(value, dict) and all(token.isdecimal() and len(token) < 11 for token in value)
    if not ids:
        raise FieldError(name, f'{shown(value)} is not an object such as {{"50256": -100}}')
    if len(value) > MOST_BIASES:
        raise FieldError(name, f"names {len(value)} tokens, and may name {MOST_BIASES}")
    in_range = within(-MOST_BIAS, MOST_BIAS)
    return {int(token): in_range(f"{name}.{token}", bias) for token, bias in value.items()}


def breakers(name: str, value: Any) -> list[str]:
    if not isinstance(value, list) or len(value) > MOST_BREAKERS:
        raise FieldError(name, f"{shown(value)} is not a list of at most {MOST_BREAKERS} texts")
    return value


def json_object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FieldError(name, f"{shown(value)} is not an object")
    return value


def only(*allowed: Any, instead: str = "leave it out") -> Callable[[str, Any], Any]:
    """instead: what a client can do in place of asking for another value."""

    def check(name: str, value: Any) -> Any:
        if value not in allowed:
            raise FieldError(name, f"{shown(value)} is not supported; {instead}")
        return value

    return check


def one_of(*texts: str) -> Check:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in texts:
            raise FieldError(name, f"{shown(value)} is none of {', '.join(texts)}")
        return value

    return check


def ids(name: str, value: Any) -> list[int]:
    if value != [] and not _are_ids(value):
        raise FieldError(name, f"{shown(value)} is not a list of token ids")
    return value


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


def prompt(name: str, value: Any) -> list[Any]:
    """A text, a list of texts, token ids, or a list of such lists."""
    if isinstance(value, str) or _are_ids(value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(one, str) or _are_ids(one) for one in value):
        return value
    raise FieldError(name, f"{shown(value)} is not a text, a list of token ids, or a list of these")


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


SAMPLING: dict[str, Check] = {
    **dict.fromkeys(("top_p", "min_p", "frequency_penalty", "presence_penalty"), number),
    **dict.fromkeys(("repetition_penalty", "repeat_penalty"), within(*REPETITIONS)),
    **{"temperature": within(0, MOST_TEMPERATURE), "top_k": top_k, "seed": seed, "logit_bias": bias},
}
# The samplers of decoding/chain.py, as llama.cpp's server names them.
SAMPLERS: dict[str, Check] = {
    **dict.fromkeys(("typical_p", "typ_p", "top_n_sigma", "xtc_probability", "xtc_threshold"), number),
    **dict.fromkeys(("dry_multiplier", "dry_base", "mirostat_tau", "mirostat_eta"), number),
    **dict.fromkeys(("dynatemp_range", "dynatemp_exponent"), number),
    **dict.fromkeys(("dry_allowed_length", "dry_penalty_last_n", "mirostat", "min_tokens"), whole),
    "dry_sequence_breakers": breakers,
}
# By which other programs know fields of SamplingParams. If a body has both, ours counts.
OTHER_NAMES = {"typ_p": "typical_p", "repeat_penalty": "repetition_penalty"}
