"""What rendering a chat template may use up, and the filters, methods and operators that make much of little.

All that a template makes is paid for as it is made (`charged`). What may be too large to be made is estimated
first (`Budget.afford`). The rest is jinja2's own: nothing here changes what a template renders to.
"""

import contextvars
import dataclasses
import datetime
import functools
import json
import re
import string
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinMethodType
from typing import Any

MAX_STEPS = 500_000  # loop passes, calls, and values in lists, besides 4 for every character of the variables
MAX_CHARACTERS = 32 * 1024 * 1024  # made on the way, besides as many as the variables hold 16 times over
MAX_SECONDS = 10.0
MAX_INTEGER_BITS = 1024
ESCAPED = 6  # most characters that HTML's escape makes of one


class ChatTemplateError(ValueError):
    """There is no chat template, or it is broken, refuses the messages, or asks for too much."""


@dataclasses.dataclass
class Budget:
    """What is left to one rendering. Asking for more than is left raises."""

    steps: int = MAX_STEPS
    characters: int = MAX_CHARACTERS
    deadline_s: float = dataclasses.field(default_factory=lambda: time.monotonic() + MAX_SECONDS)

    def afford(self, *, steps: int = 0, characters: int = 0) -> None:
        """Raises if so much is not left."""
        if steps > self.steps:
            raise ChatTemplateError(
                f"chat template: more than {MAX_STEPS} loop passes, calls and list entries"
            )
        if characters > self.characters:
            raise ChatTemplateError(f"chat template: more than {MAX_CHARACTERS} characters made")
        if time.monotonic() > self.deadline_s:
            raise ChatTemplateError(f"chat template: more than {MAX_SECONDS} seconds")

    def pay(self, *, steps: int = 0, characters: int = 0) -> None:
        self.afford(steps=steps, characters=characters)
        self.steps -= steps
        self.characters -= characters

    def start(self, variables: Mapping[str, Any]) -> None:
        """Makes room for what may be done with the variables, unless they are too large themselves."""
        self.pay_for(variables)
        held = MAX_CHARACTERS - self.characters
        self.steps += 4 * held
        self.characters = MAX_CHARACTERS + 16 * held

    def pay_for(self, value: Any) -> None:
        """Pays for all that a value holds, written out: a list that holds a list twice costs it twice."""
        todo = [value]
        while todo:
            value = todo.pop()
            if isinstance(value, str):
                self.pay(steps=1, characters=len(value))
            elif isinstance(value, Mapping):
                self.pay(steps=1 + len(value))
                todo += map(_plain, [*value.keys(), *value.values()])
            elif isinstance(value, list | tuple | set | frozenset):
                self.pay(steps=1 + len(value))
                todo += map(_plain, value)


BUDGET: contextvars.ContextVar[Budget] = contextvars.ContextVar("budget")


def _plain(value: Any) -> Any:
    """The value, unless it is one of jinja2's own objects: what they hold is not counted."""
    if type(value).__module__.startswith("jinja2.") and not isinstance(value, tuple):  # groupby's
        from jinja2 import Undefined

        if not isinstance(value, Undefined):
            name = type(value).__name__
            raise ChatTemplateError(f"chat template: a {name} can neither be written nor stand in a list")
    return value


def charged(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise ChatTemplateError(
            f"chat template: an integer of {value.bit_length()} bits, the limit is {MAX_INTEGER_BITS}"
        )
    BUDGET.get().pay_for(value)
    return value


def sliced(value: Any) -> Any:
    """Pays for a slice: of a list it copies words, not what is in it."""
    if isinstance(value, str):
        BUDGET.get().pay(characters=len(value))
    elif isinstance(value, list | tuple):
        BUDGET.get().pay(steps=1 + len(value) // 64)
    return value


def text(value: Any) -> str:
    """str(value), once what it holds is paid for."""
    from jinja2 import Undefined

    if not isinstance(value, str | int | float | list | tuple | dict | range | Undefined | None):
        raise ChatTemplateError(f"chat template: a {type(value).__name__} cannot be written")
    charged(value)
    return value if isinstance(value, str) else str(value)


def concatenated(values: list[Any]) -> str:
    return charged("".join([text(value) for value in values]))


def passes(values: Any) -> Iterator[Any]:
    """Iterates over `values`, paying for each pass."""
    return _Passes(iter(values))


class _Passes(Iterator[Any]):
    def __init__(self, values: Iterator[Any], charged: Callable[[Any], Any] = lambda value: value):
        self._values, self._charged = values, charged

    def __next__(self) -> Any:
        BUDGET.get().pay(steps=1)
        return self._charged(next(self._values))


# ---- Methods and operators: what they would make is estimated ----

# The methods that templates may call. Others can make much, or take long over little (bytes and integers of
# any size, translate, Markup.striptags), and no template is known that needs them.
_METHODS = {
    str: "capitalize|casefold|center|count|endswith|expandtabs|find|index|is[a-z]+|join|ljust|lower|lstrip|"
    "partition|removeprefix|removesuffix|replace|rfind|rindex|rjust|rpartition|rsplit|rstrip|split|splitlines|"
    "startswith|strip|swapcase|title|upper|zfill",
    dict: "copy|get|items|keys|values",
    list: "copy|count|index",
    range: "count|index",
    tuple: "count|index",
}


def _afford_width(value: Any, width: int = 80, fill: str = " ") -> None:
    BUDGET.get().afford(characters=width)


def _afford_tabs(value: str, tabsize: int = 8) -> None:
    BUDGET.get().afford(characters=len(value) + value.count("\t") * tabsize)


def _afford_replace(value: Any, old: Any, new: Any, count: int | None = None) -> None:
    value, old, new = text(value), text(old), text(new)
    found = value.count(old) if count is None or count < 0 else min(count, value.count(old))
    BUDGET.get().afford(characters=len(value) + found * len(new) * ESCAPED)


def _afford_join(separator: str, values: list[Any]) -> None:
    size = sum(len(text(value)) for value in values) + len(values) * len(separator)
    BUDGET.get().afford(characters=size * ESCAPED)


def _afford_percent(template: str, *values: Any, **named: Any) -> None:
    """Of `template % values`: every field may write all values, as wide as any number that is there."""
    budget = BUDGET.get()
    steps, characters = budget.steps, budget.characters
    budget.pay_for([values, named])
    size = characters - budget.characters + (steps - budget.steps) * MAX_INTEGER_BITS // 3
    widths = [abs(value) for value in values if isinstance(value, int)] if "*" in template else []
    budget.afford(characters=template.count("%") * size + _widths(template) + sum(widths))


def _widths(specification: str) -> int:
    return sum(map(int, re.findall(r"\d+", specification)))


_METHOD_ESTIMATES: dict[str, Callable[..., None]] = {
    "center": _afford_width,
    "expandtabs": _afford_tabs,
    "join": _afford_join,
    "ljust": _afford_width,
    "replace": _afford_replace,
    "rjust": _afford_width,
    "zfill": _afford_width,
}


def method_arguments(called: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments to call a method with, once it is known to be allowed, and affordable. What is no method
    of Python's own types passes."""
    owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
    kind = next((kind for kind in _METHODS if isinstance(owner, kind)), None)
    if kind is None and not isinstance(called, BuiltinMethodType):
        return arguments
    if kind is None or not re.fullmatch(_METHODS[kind], name):
        raise ChatTemplateError(
            f"chat template: the method {name} of a {type(owner).__name__} is not supported"
        )
    if kind is str and name == "join":
        arguments = tuple(list(passes(values)) for values in arguments)
    if kind is str and name in _METHOD_ESTIMATES:
        # jinja2 passes variables of loops and blocks along
        given = {key: value for key, value in named.items() if not key.startswith("_")}
        _METHOD_ESTIMATES[name](owner, *arguments, **given)
    return arguments


def makes_nothing(called: Any) -> bool:
    return isinstance(getattr(called, "__self__", None), dict) and called.__name__ == "get"


def afford_operator(operator: str, left: Any, right: Any) -> None:
    """Raises where the result of `left operator right` may be too large to be made."""
    budget = BUDGET.get()
    integers = isinstance(left, int) and isinstance(right, int)
    if operator == "**" and integers and left.bit_length() * abs(right) > MAX_INTEGER_BITS:
        raise ChatTemplateError(f"chat template: {left} ** {right}, the limit is {MAX_INTEGER_BITS} bits")
    if operator == "%" and isinstance(left, str):
        _afford_percent(left, *(right if isinstance(right, tuple) else (right,)))
    if operator == "*" and not integers:
        times, value = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(times, int) and isinstance(value, str):
            budget.afford(characters=len(value) * times)
        elif isinstance(times, int) and isinstance(value, Sequence):
            budget.afford(steps=len(value) * times)


class PaidFields(string.Formatter):
    """Goes before one of jinja2's sandboxed formatters, which look attributes up as the sandbox allows."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        text(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        BUDGET.get().afford(characters=_widths(format_spec))
        field = super().format_field(value, format_spec)
        BUDGET.get().pay(characters=len(field))
        return field


# ---- Filters and functions ----


def _join(environment: Any, values: Any, d: str = "", attribute: str | int | None = None) -> str:
    from jinja2.filters import make_attrgetter

    values = list(passes(values))
    if attribute is not None:
        values = [*map(make_attrgetter(environment, attribute), values)]
    values, separator = [text(value) for value in values], text(d)
    _afford_join(separator, values)
    return charged(separator.join(values))


def _sum(environment: Any, values: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    """Adds as the operator does: lists of lists are paid for at every step."""
    from jinja2.filters import make_attrgetter

    values = values if attribute is None else map(make_attrgetter(environment, attribute), values)
    return functools.reduce(lambda a, b: environment.call_binop(None, "+", a, b), passes(values), start)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    charged(value)
    if (len(indent) if isinstance(indent, str) else indent or 0) > 16:
        raise ChatTemplateError(f"chat template: tojson(indent={indent}), the limit is 16")
    return charged(
        json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
    )


def _afford_indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> None:
    lines = len(text(value).splitlines()) + 1
    BUDGET.get().afford(characters=lines * (len(width) if isinstance(width, str) else width))


def _afford_escape(value: Any) -> None:
    BUDGET.get().afford(characters=len(text(value)) * ESCAPED)


def _afford_groups(
    value: Any, attribute: str | int, default: Any = None, case_sensitive: bool = False
) -> None:
    if default is not None:  # it would be made lower case for each value that lacks the attribute
        raise ChatTemplateError("chat template: groupby with a default is not supported")


def _afford_precision(value: Any, precision: int = 0, method: str = "common") -> None:
    BUDGET.get().afford(steps=abs(precision))


# jinja2's own filters, with what they would make where that is more than they are given.
_FILTERS: dict[str, Callable[..., Any] | None] = {
    **dict.fromkeys(("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "first", "float")),
    **dict.fromkeys(("int", "items", "last", "length", "list", "lower", "map", "max", "min")),
    **dict.fromkeys(("reject", "rejectattr", "reverse", "select", "selectattr", "sort", "title", "trim")),
    **dict.fromkeys(("truncate", "unique", "upper", "wordcount")),
    "center": _afford_width,
    "e": _afford_escape,
    "escape": _afford_escape,
    "format": _afford_percent,
    "groupby": _afford_groups,
    "indent": _afford_indent,
    "replace": _afford_replace,
    "round": _afford_precision,
    "safe": text,
}
_OF_ANYTHING = frozenset(("attr", "d", "default"))  # jinja2's own objects too
_OF_EACH = frozenset(("map", "reject", "rejectattr", "select", "selectattr"))


def filters(of_jinja2: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """What templates may use, and what the compiler puts into them (chat_template._environment)."""
    from jinja2 import pass_context, pass_environment

    return {name: _paid(name, of_jinja2[name]) for name in _FILTERS} | {
        "join": pass_environment(_join),
        "string": text,
        "sum": pass_environment(_sum),
        "tojson": _to_json,
        "charged": charged,
        "concatenated": concatenated,
        "passes": passes,
        "sliced": sliced,
        # A filter that takes the context is never computed by the compiler, where there is no budget.
        "written": pass_context(lambda context, value: text(value)),
    }


def _paid(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    given = int(getattr(function, "jinja_pass_arg", None) is not None)  # arguments before the template's own

    @functools.wraps(function)  # keeps jinja2's mark of what it passes
    def paid(*arguments: Any, **named: Any) -> Any:
        BUDGET.get().pay(steps=1)
        before, own = arguments[:given], arguments[given:]
        if name not in _OF_ANYTHING:
            for value in (*own, *named.values()):
                _plain(value)
        if name in _OF_EACH and own[0]:
            own = (passes(own[0]), *own[1:])
        if estimate := _FILTERS[name]:
            estimate(*own, **named)
        made = function(*before, *own, **named)
        return _Passes(made, charged) if isinstance(made, Iterator) else charged(made)

    return paid


def raise_exception(message: Any) -> None:
    raise ChatTemplateError(f"the chat template refuses these messages: {text(message)}")


def strftime_now(pattern: str) -> str:
    if len(pattern) > 200 or re.search(r"%[^a-zA-Z%]*\d", pattern):  # glibc pads to any width
        raise ChatTemplateError(f"chat template: strftime_now({pattern[:80]!r})")
    return datetime.datetime.now().strftime(pattern)
