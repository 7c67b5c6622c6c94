"""The budget of rendering a chat template, and the filters, methods and operators that can produce large
results from small inputs.

Every value that a template produces is charged to the budget (`charged`). Operations whose result may be too
large to produce at all are estimated first (`Budget.afford`). Everything else is jinja2's: nothing in this
file changes the text of a template.
"""

import contextvars
import dataclasses
import datetime
import functools
import itertools
import json
import re
import string
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinMethodType
from typing import Any

MAX_STEPS = 500_000  # loop passes, calls and values in lists; 4 more for every character of the variables
MAX_CHARACTERS = 32 * 1024 * 1024  # produced on the way; 16 more for every character of the variables
MAX_SECONDS = 10.0
MAX_INTEGER_BITS = 1024
ESCAPED = 6  # HTML's escape turns one character into at most 6


class ChatTemplateError(ValueError):
    """There is no chat template, or it is broken, refuses the messages, or exceeds its budget."""


@dataclasses.dataclass
class Budget:
    """The steps, characters and seconds that one rendering has left. Exceeding them raises
    ChatTemplateError."""

    steps: int = MAX_STEPS
    characters: int = MAX_CHARACTERS
    deadline_s: float = dataclasses.field(default_factory=lambda: time.monotonic() + MAX_SECONDS)

    def afford(self, *, steps: int = 0, characters: int = 0) -> None:
        """Raise unless this much is left."""
        if steps > self.steps:
            raise ChatTemplateError(
                f"chat template: more than {MAX_STEPS} loop passes, calls and list entries"
            )
        if characters > self.characters:
            raise ChatTemplateError(f"chat template: more than {MAX_CHARACTERS} characters")
        if time.monotonic() > self.deadline_s:
            raise ChatTemplateError(f"chat template: more than {MAX_SECONDS} seconds")

    def pay(self, *, steps: int = 0, characters: int = 0) -> None:
        """Subtract this much, or raise."""
        self.afford(steps=steps, characters=characters)
        self.steps -= steps
        self.characters -= characters

    def start(self, variables: Mapping[str, Any]) -> None:
        """Enlarge the budget in proportion to the variables; raise if they are too large themselves."""
        self.pay_for(variables)
        size = MAX_CHARACTERS - self.characters
        self.steps += 4 * size
        self.characters = MAX_CHARACTERS + 16 * size

    def pay_for(self, value: Any) -> None:
        """Pay for everything in a value as if written out: a list that contains a list twice pays twice."""
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
    """The value; raises if it is one of jinja2's own objects, whose content cannot be counted."""
    if type(value).__module__.startswith("jinja2.") and not isinstance(value, tuple):  # groupby's
        from jinja2 import Undefined

        if not isinstance(value, Undefined):
            name = type(value).__name__
            raise ChatTemplateError(f"chat template: a {name} can neither be written nor be in a list")
    return value


def charged(value: Any) -> Any:
    """The value, once it is paid for."""
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise ChatTemplateError(
            f"chat template: an integer of {value.bit_length()} bits; the limit is {MAX_INTEGER_BITS}"
        )
    BUDGET.get().pay_for(value)
    return value


def sliced(value: Any) -> Any:
    """The value of a slice, once it is paid for; slicing a list copies references, not its items."""
    if isinstance(value, str):
        BUDGET.get().pay(characters=len(value))
    elif isinstance(value, list | tuple):
        BUDGET.get().pay(steps=1 + len(value) // 64)
    return value


def text(value: Any) -> str:
    """str(value), once it is paid for."""
    from jinja2 import Undefined

    if not isinstance(value, str | int | float | list | tuple | dict | range | Undefined | None):
        raise ChatTemplateError(f"chat template: a {type(value).__name__} cannot be written")
    charged(value)
    return value if isinstance(value, str) else str(value)


def concatenated(values: list[Any]) -> str:
    return charged("".join([text(value) for value in values]))


def passes(values: Any) -> Iterator[Any]:
    """Iterate over values and pay for each pass."""
    return _Passes(iter(values))


class _Passes(Iterator[Any]):
    def __init__(self, values: Iterator[Any], charged: Callable[[Any], Any] = lambda value: value):
        self._values, self._charged = values, charged

    def __next__(self) -> Any:
        BUDGET.get().pay(steps=1)
        return self._charged(next(self._values))


# ---- Methods and operators: the size of their results is estimated ----

# The methods that templates may call. Others can produce large results or take long over small inputs (bytes
# and integers of any size, translate, Markup.striptags), and no known template needs them.
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
    times = value.count(old) if count is None or count < 0 else min(count, value.count(old))
    BUDGET.get().afford(characters=len(value) + times * len(new) * ESCAPED)


def _afford_join(separator: str, values: list[Any]) -> None:
    size = sum(len(text(value)) for value in values) + len(values) * len(separator)
    BUDGET.get().afford(characters=size * ESCAPED)


def _afford_pieces(pattern: str) -> Callable[..., None]:
    """An estimate for what cuts a text at each match of a pattern: a step for each piece. Short pieces take
    50 times the memory of their characters."""
    matches = re.compile(pattern).finditer

    def afford(value: Any, *arguments: Any, **named: Any) -> None:
        budget = BUDGET.get()
        pieces = itertools.islice(matches(value if isinstance(value, str) else text(value)), budget.steps + 1)
        budget.afford(steps=sum(1 for _ in pieces))

    return afford


_afford_words = _afford_pieces(r"\S+")


def _afford_split(value: str, sep: str | None = None, maxsplit: int = -1) -> None:
    if maxsplit < 0 and sep is None:
        _afford_words(value)
    elif maxsplit < 0 and sep:
        BUDGET.get().afford(steps=value.count(sep))
    else:
        BUDGET.get().afford(steps=min(max(0, maxsplit), len(value)))


def _afford_entries(value: Any, *arguments: Any, **named: Any) -> None:
    """An estimate for a list of a value's entries, such as the characters of a text."""
    if isinstance(value, str | list | tuple | dict | range):
        BUDGET.get().afford(steps=len(value))


def _afford_percent(template: str, *values: Any, **named: Any) -> None:
    """Estimate `template % values`: every field may write all values, as wide as the largest number says."""
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
    "rsplit": _afford_split,
    "split": _afford_split,
    "splitlines": _afford_pieces(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]"),
    "zfill": _afford_width,
}


def method_arguments(called: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments for calling a method, once it is allowed and its result affordable. Calls of other
    functions than methods of Python's own types pass unchanged."""
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
        # jinja2 adds variables of loops and blocks, with names that begin with "_".
        given = {key: value for key, value in named.items() if not key.startswith("_")}
        _METHOD_ESTIMATES[name](owner, *arguments, **given)
    return arguments


def only_looks_up(called: Any) -> bool:
    """Whether a call produces nothing new: dict.get."""
    return isinstance(getattr(called, "__self__", None), dict) and called.__name__ == "get"


def afford_operator(operator: str, left: Any, right: Any) -> None:
    """Raise if the result of `left operator right` may be too large to produce."""
    budget = BUDGET.get()
    integers = isinstance(left, int) and isinstance(right, int)
    if operator == "**" and integers and left.bit_length() * abs(right) > MAX_INTEGER_BITS:
        raise ChatTemplateError(f"chat template: {left} ** {right}; the limit is {MAX_INTEGER_BITS} bits")
    if operator == "%" and isinstance(left, str):
        _afford_percent(left, *(right if isinstance(right, tuple) else (right,)))
    if operator == "*" and not integers:
        times, value = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(times, int) and isinstance(value, str):
            budget.afford(characters=len(value) * times)
        elif isinstance(times, int) and isinstance(value, Sequence):
            budget.afford(steps=len(value) * times)


class ChargedFields(string.Formatter):
    """Charges fields; the base class of a formatter, before one of jinja2's sandboxed formatters, which look
    up attributes as the sandbox allows."""

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
    """Add with the template's operator, so that lists of lists are charged at every step."""
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
        raise ChatTemplateError(f"chat template: tojson(indent={indent}); the limit is 16")
    out = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:  # not the two noncharacters between which the tokenizer puts names of control tokens
        out = re.sub("[^\\x00-\\x7f\ufdd0\ufdd1]", lambda match: json.dumps(match[0])[1:-1], out)
    return charged(out)


def _afford_indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> None:
    lines = len(text(value).splitlines()) + 1
    BUDGET.get().afford(characters=lines * (len(width) if isinstance(width, str) else width))


def _afford_escape(value: Any) -> None:
    BUDGET.get().afford(characters=len(text(value)) * ESCAPED)


def _afford_groups(
    value: Any, attribute: str | int, default: Any = None, case_sensitive: bool = False
) -> None:
    if default is not None:  # jinja2 would lower its case for each value without the attribute
        raise ChatTemplateError("chat template: groupby with a default is not supported")


def _afford_precision(value: Any, precision: int = 0, method: str = "common") -> None:
    BUDGET.get().afford(steps=abs(precision))


# jinja2's own filters, with an estimate where the result can be larger than the input.
_FILTERS: dict[str, Callable[..., Any] | None] = {
    **dict.fromkeys(("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "first", "float")),
    **dict.fromkeys(("int", "items", "last", "length", "lower", "map", "max", "min")),
    **dict.fromkeys(("reject", "rejectattr", "reverse", "select", "selectattr", "trim")),
    **dict.fromkeys(("truncate", "unique", "upper")),
    "center": _afford_width,
    "e": _afford_escape,
    "escape": _afford_escape,
    "format": _afford_percent,
    "groupby": _afford_groups,
    "indent": _afford_indent,
    "list": _afford_entries,
    "replace": _afford_replace,
    "round": _afford_precision,
    "safe": text,
    "sort": _afford_entries,
    "title": _afford_pieces(r"[-\s({\[<]+"),
    "wordcount": _afford_pieces(r"\w+"),
}
_TAKE_ANY_OBJECT = frozenset(("attr", "d", "default"))  # jinja2's own objects too
_ITERATE = frozenset(("map", "reject", "rejectattr", "select", "selectattr"))


def filters(defaults: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """The filters that templates may use, and those that the compiler inserts (chat_template._environment).

    defaults  jinja2's own filters
    """
    from jinja2 import pass_context, pass_environment

    return {name: _paid(name, defaults[name]) for name in _FILTERS} | {
        "join": pass_environment(_join),
        "string": text,
        "sum": pass_environment(_sum),
        "tojson": _to_json,
        "charged": charged,
        "concatenated": concatenated,
        "passes": passes,
        "sliced": sliced,
        # The compiler has no budget; it does not compute filters that take the context.
        "written": pass_context(lambda context, value: text(value)),
    }


def _paid(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passed = int(getattr(function, "jinja_pass_arg", None) is not None)  # arguments that jinja2 puts first

    @functools.wraps(function)  # copies jinja_pass_arg
    def paid(*arguments: Any, **named: Any) -> Any:
        BUDGET.get().pay(steps=1)
        before, own = arguments[:passed], arguments[passed:]
        if name not in _TAKE_ANY_OBJECT:
            for value in (*own, *named.values()):
                _plain(value)
        if name in _ITERATE and own[0]:
            own = (passes(own[0]), *own[1:])
        if estimate := _FILTERS[name]:
            estimate(*own, **named)
        result = function(*before, *own, **named)
        return _Passes(result, charged) if isinstance(result, Iterator) else charged(result)

    return paid


def raise_exception(message: Any) -> None:
    raise ChatTemplateError(f"the chat template refuses these messages: {text(message)}")


def strftime_now(pattern: str) -> str:
    if len(pattern) > 200 or re.search(r"%[^a-zA-Z%]*\d", pattern):  # glibc pads to any width
        raise ChatTemplateError(f"chat template: strftime_now({pattern[:80]!r})")
    return datetime.datetime.now().strftime(pattern)
