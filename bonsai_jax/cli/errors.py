"""Errors for users of the command line: one line, with flags in place of the library's argument names."""

import dataclasses
import os
import re
import sys
from collections.abc import Iterable
from typing import Any

from typer.core import TyperOption


def one_line(error: BaseException, parameters: Iterable[Any]) -> str:
    """The message, with flags in place of the library's argument names.

    parameters  those of the command that ran; they have the library's names
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = " ".join(str(error).split()) or type(error).__name__
    for name, flag in _flags(parameters).items():
        text = re.sub(rf"\b{name}=(['\"]?)([\w.]+)\1", rf"{flag} \2", text)  # schedule='launches'
        text = re.sub(rf"^(?:RunConfig: |SamplingParams: )?{name}(?= is |: )", flag, text)
        text = re.sub(rf"\b(lower|larger|smaller) {name}\b", rf"\1 {flag}", text)
        if "_" in name:  # not an English word
            text = re.sub(rf"(?<![\w/.-]){name}(?![\w/-])", flag, text)
    return text


def _flags(parameters: Iterable[Any]) -> dict[str, str]:
    from bonsai_jax.config import RunConfig
    from bonsai_jax.sampling_params import SamplingParams

    names = {field.name for config in (RunConfig, SamplingParams) for field in dataclasses.fields(config)}
    names |= {"max_new_tokens", "stop"}
    options = [p for p in parameters if isinstance(p, TyperOption)]
    return {p.name: max(p.opts, key=len) for p in options if p.name in names}


def no_devices() -> str | None:
    """Why jax has no device; None if it has one or was not imported."""
    if "jax" not in sys.modules:
        return None
    import jax

    platforms = os.environ.get("JAX_PLATFORMS", "")
    try:
        jax.devices()
    except AssertionError:  # jax does not say why it skips CUDA on a machine without an NVIDIA GPU
        return f"JAX_PLATFORMS is {platforms!r}, and there is no such device; unset it, or set it to cpu"
    except RuntimeError as error:
        return " ".join(str(error).split())
    return None
