"""Checks of the arguments that users pass. A number may come from Python, numpy or jax; the checks return
Python numbers. Their errors begin with the argument's name."""

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

MOST = 2**31 - 1  # what an int32 holds
_NO_DEFAULT = object()


def whole(name: str, value: Any, least: int = 0, most: int = MOST) -> int:
    """The value as an int. Raises ValueError unless it is a whole number from `least` to `most`; True and
    1.0 are none."""
    try:
        number = None if _is_truth(value) else operator.index(value)
    except (TypeError, ValueError):
        number = None
    if number is None or not least <= number <= most:
        bounds = f"{least:,} or more" if number is None or number < least else f"{least:,} to {most:,}"
        raise ValueError(f"{name} is {shown(value)}; it must be a whole number, {bounds}")
    return number


def any_whole(name: str, value: Any) -> int:
    """The value as an int of any size."""
    try:
        if not _is_truth(value):
            return operator.index(value)
    except (TypeError, ValueError):
        pass
    raise ValueError(f"{name} is {shown(value)}; it must be a whole number")


def number(name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> float:
    """The value as a float. Raises ValueError unless it is a number from `least` to `most`; NaN, True and
    "1" are none."""
    try:
        real = math.nan if _is_truth(value) or isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        real = math.nan
    if math.isnan(real):
        raise ValueError(f"{name} is {shown(value)}; it must be a number")
    if not least <= real <= most:
        raise ValueError(f"{name} is {shown(value)}; it must lie in {least:,} to {most:,}")
    return real


def flag(name: str, value: Any) -> bool:
    """The value as a bool. Raises ValueError unless it is True or False."""
    if not _is_truth(value):
        raise ValueError(f"{name} is {shown(value)}; it must be True or False")
    return bool(value)


def one_of[T](name: str, value: Any, choices: Iterable[T]) -> T:
    """The one of these texts and whole numbers that the value is. Raises ValueError if it is none."""
    choices = tuple(choices)
    for choice in choices:
        if isinstance(choice, int) and not _is_truth(value) and hasattr(value, "__index__"):
            same = getattr(value, "ndim", 0) == 0 and bool(value == choice)
        else:
            same = isinstance(value, str | None) and value == choice
        if same:
            return choice
    listed = ", ".join(map(repr, choices))
    raise ValueError(f"{name} is {shown(value)}; it must be one of {listed}")


def kind(name: str, value: Any, expected: type | tuple[type, ...], remedy: str) -> None:
    """Raise TypeError, which says what to give, unless the value is of an expected type."""
    if not isinstance(value, expected):
        raise TypeError(f"{name} is a {type(value).__name__}; give {remedy}")


def function(name: str, value: Any) -> None:
    """Raise TypeError unless the value can be called."""
    if not callable(value):
        raise TypeError(f"{name} is {shown(value)}; give a function")


def array(name: str, value: Any) -> Any:
    """The value as an array of jax. Raises TypeError for what is none."""
    import jax.numpy as jnp  # here: the command line's help needs no jax

    try:
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{name}: {shown(value)} is no array: {error}") from None


def integers(name: str, value: Any) -> Any:
    """The value as an array of integers. Raises TypeError for what is none."""
    out = array(name, value)
    if out.dtype.kind not in "iu":
        raise TypeError(f"{name} are {out.dtype}; expected whole numbers")
    return out


def set_field(config: Any, name: str, check: Callable[..., Any], *bounds: Any) -> None:
    """Set a field of a frozen config to what one of these checks makes of it. The default of its class, which
    most fields have, passes as it is."""
    value = getattr(config, name)
    if value is not getattr(type(config), name, _NO_DEFAULT):
        object.__setattr__(config, name, check(f"{type(config).__name__}: {name}", value, *bounds))


def shown(value: Any) -> str:
    """The value for a message, cut to 60 characters. Python refuses to write very long integers."""
    try:
        text = repr(value)
    except Exception:  # a user's own class may raise anything, and the message is about another error
        text = f"a {type(value).__name__} that cannot be written"
    return text if len(text) <= 60 else f"{text[:60]}..."


def _is_truth(value: Any) -> bool:
    """Whether it is True or False, of Python, numpy or jax."""
    dtype = getattr(value, "dtype", None)
    return isinstance(value, bool) or (str(dtype) == "bool" and getattr(value, "ndim", None) == 0)
