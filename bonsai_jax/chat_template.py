"""Chat templates: jinja2 source that comes with a model, rendered so that it can do no harm.

Templates come from strangers. jinja2's immutable sandbox keeps them from Python's internals and from the
caller's messages; on top of it every loop pass, every call and every character made is paid from a budget, so
that a template can neither hang nor fill the memory. At worst one takes ten seconds and some hundred MB. What
is outside the budget: a single operation that reads without making anything (`x in y`) is not interrupted.
"""

import contextvars
import dataclasses
import datetime
import functools
import html
import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

MAX_TEMPLATE = 512 * 1024  # characters of source; real ones have up to 20 thousand
MAX_STEPS = 500_000  # loop passes, calls, and values in lists
MAX_CHARACTERS = 32 * 1024 * 1024  # made on the way, besides as many as the variables hold 16 times over
MAX_SECONDS = 10.0
MAX_INTEGER_BITS = 1024


class ChatTemplateError(ValueError):
    """There is no chat template, or it is broken, refuses the messages, or asks for too much."""


def render(source: str, variables: Mapping[str, Any]) -> str:
    """The text that a chat template makes of its variables (messages, add_generation_prompt, bos_token ...).

    Whitespace rules, `raise_exception`, `strftime_now`, `tojson`, `break` and `continue`, `{% generation %}`
    are those of Hugging Face's transformers. ChatTemplateError with the reason for all that goes wrong.
    """
    from jinja2 import TemplateError, TemplateSyntaxError

    budget = _Budget()
    token = _BUDGET.set(budget)
    try:
        budget.pay_for(variables)
        budget.characters = MAX_CHARACTERS + 16 * (MAX_CHARACTERS - budget.characters)
        return "".join(_compiled(source).generate(**variables))
    except ChatTemplateError:
        raise
    except (RecursionError, MemoryError, AssertionError, SyntaxError) as error:
        raise ChatTemplateError(f"chat template: too deeply nested ({type(error).__name__})") from None
    except TemplateSyntaxError as error:
        raise ChatTemplateError(f"chat template, line {error.lineno}: {error.message}") from None
    except (
        TemplateError,
        ArithmeticError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
    ) as error:
        raise ChatTemplateError(f"chat template: {error}") from None
    finally:
        _BUDGET.reset(token)


@dataclasses.dataclass
class _Budget:
    """What is left to one rendering. Paying more than is left raises."""

    steps: int = MAX_STEPS
    characters: int = MAX_CHARACTERS
    deadline_s: float = dataclasses.field(default_factory=lambda: time.monotonic() + MAX_SECONDS)

    def pay(self, *, steps: int = 0, characters: int = 0) -> None:
        self.steps -= steps
        self.characters -= characters
        if self.steps < 0:
            raise ChatTemplateError(
                f"chat template: more than {MAX_STEPS} loop passes, calls and list entries"
            )
        if self.characters < 0:
            raise ChatTemplateError(f"chat template: more than {MAX_CHARACTERS} characters made")
        if time.monotonic() > self.deadline_s:
            raise ChatTemplateError(f"chat template: more than {MAX_SECONDS} seconds")

    def pay_for(self, value: Any) -> Any:
        """Pays for all that a value holds, written out: a list that holds a list twice costs it twice."""
        todo = [value]
        while todo:
            value = todo.pop()
            if isinstance(value, str):
                self.pay(steps=1, characters=len(value))
            elif isinstance(value, Mapping):
                self.pay(steps=1 + len(value))
                todo += [*value.keys(), *value.values()]
            elif isinstance(value, list | tuple | set | frozenset):
                self.pay(steps=1 + len(value))
                todo += value
        return value


_BUDGET: contextvars.ContextVar[_Budget] = contextvars.ContextVar("budget")


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    if len(source) > MAX_TEMPLATE:
        raise ChatTemplateError(f"chat template: {len(source)} characters, the limit is {MAX_TEMPLATE}")
    return _environment().from_string(source)


# ---- What templates may call. Whatever a value is made into text by has been paid for first. ----


def _charged(value: Any) -> Any:
    _BUDGET.get().pay_for(value)
    return value


def _text(value: Any) -> str:
    """str(value), once what it holds is paid for."""
    from jinja2 import Undefined

    if not isinstance(value, str | int | float | list | tuple | dict | Undefined | None):
        raise ChatTemplateError(f"chat template: a {type(value).__name__} cannot be written")
    _charged(value)
    return str(value)


def _concatenated(values: list[Any]) -> str:
    return _charged("".join([_text(value) for value in values]))


def _passes(values: Any) -> "_Passes":
    return _Passes(values)


class _Passes:
    """Iterates over `values`, paying for each pass."""

    def __init__(self, values: Any):
        self._values = iter(values)

    def __iter__(self) -> "_Passes":
        return self

    def __next__(self) -> Any:
        _BUDGET.get().pay(steps=1)
        return next(self._values)


def _join(values: Any, separator: str = "", attribute: str | None = None) -> str:
    values = list(_passes(values))
    if attribute is not None:
        values = [value[attribute] for value in values]
    values, separator = [_text(value) for value in values], _text(separator)
    _BUDGET.get().pay(characters=sum(map(len, values)) + len(values) * len(separator))
    return separator.join(values)


def _replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    text = _text(text)
    found = text.count(old) if count is None or count < 0 else min(count, text.count(old))
    _BUDGET.get().pay(characters=len(text) + found * len(new))
    return text.replace(old, new, found)


def _indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    margin = width if isinstance(width, str) else " " * min(int(width), 1000)
    lines = _text(text).split("\n")
    _BUDGET.get().pay(characters=len(lines) * len(margin))
    indented = [margin + line if line or blank else line for line in lines]
    return "\n".join(indented if first else [lines[0], *indented[1:]])


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    _charged(value)
    if indent is not None and not 0 <= int(indent) <= 16:
        raise ChatTemplateError(f"chat template: tojson(indent={indent}), the limit is 16")
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return _charged(text)


def _escape(text: Any) -> str:
    return _charged(html.escape(_text(text)))


def _raise_exception(message: Any) -> None:
    raise ChatTemplateError(f"the chat template refuses these messages: {message}")


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 200 or re.search(r"%[^a-zA-Z%]*\d", pattern):  # glibc pads to any width
        raise ChatTemplateError(f"chat template: strftime_now({pattern[:80]!r})")
    return datetime.datetime.now().strftime(pattern)


# jinja2's own filters that stay: each makes at most about what it is given, and is charged for it.
_FILTERS = (
    *(
        "abs",
        "attr",
        "capitalize",
        "count",
        "d",
        "default",
        "dictsort",
        "first",
        "float",
        "groupby",
        "int",
        "items",
    ),
    *("last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "select"),
    *("selectattr", "sort", "sum", "title", "trim", "truncate", "unique", "upper", "wordcount"),
)
_OWN_FILTERS: dict[str, Callable[..., Any]] = {
    "e": _escape,
    "escape": _escape,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "safe": _text,
    "string": _text,
    "tojson": _to_json,
    # for the compiler's own use, see _environment
    "charged": _charged,
    "concatenated": _concatenated,
    "passes": _passes,
}
# Methods of str that can make much of little: widths in arguments or in format strings.
_REFUSED_METHODS = frozenset(
    ("center", "expandtabs", "format", "format_map", "ljust", "rjust", "translate", "zfill")
)


def _charging(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # keeps jinja2's marks of the arguments it passes
    def charged(*args: Any, **kwargs: Any) -> Any:
        _BUDGET.get().pay(steps=1)
        return _charged(function(*args, **kwargs))

    return charged


@functools.cache
def _environment() -> Any:
    """The sandbox. Its parser puts what must be paid for through one of our filters:

    {% for x in VALUES %} -> VALUES|passes     {{ A }} -> A|written     A ~ B -> [A, B]|concatenated
    [A, B], {A: B}, A[i:j] -> ...|charged
    """
    from jinja2 import nodes, pass_context
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.visitor import NodeTransformer

    def through(filter_name: str, node: Any) -> Any:
        return nodes.Filter(node, filter_name, [], [], None, None, lineno=node.lineno)

    class Toll(NodeTransformer):
        def visit_For(self, node: Any) -> Any:
            self.generic_visit(node)
            node.iter = through("passes", node.iter)
            return node

        def visit_Output(self, node: Any) -> Any:
            self.generic_visit(node)
            node.nodes = [
                through(
                    "written",
                    nodes.Const(n.data, lineno=n.lineno) if isinstance(n, nodes.TemplateData) else n,
                )
                for n in node.nodes
            ]
            return node

        def visit_Concat(self, node: Any) -> Any:
            self.generic_visit(node)
            return through("concatenated", nodes.List(node.nodes, lineno=node.lineno))

        def visit_Getitem(self, node: Any) -> Any:
            self.generic_visit(node)
            return through("charged", node) if isinstance(node.arg, nodes.Slice) else node

        def visit_List(self, node: Any) -> Any:
            self.generic_visit(node)
            return through("charged", node) if getattr(node, "ctx", "load") == "load" else node

        def visit_Tuple(self, node: Any) -> Any:
            self.generic_visit(node)
            return through("charged", node) if node.ctx == "load" else node

        visit_Dict = visit_List

    class Generation(Extension):
        """{% generation %} marks the assistant's words for training; here it only holds them."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("+", "*", "**", "%"))

        def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
            return Toll().visit(super()._parse(source, name, filename))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            budget = _BUDGET.get()
            budget.pay(steps=1)
            numbers = isinstance(left, int | float) and isinstance(right, int | float)
            if operator == "**" or (operator == "%" and not numbers):
                bits = (
                    left.bit_length() * abs(right)
                    if isinstance(left, int) and isinstance(right, int)
                    else None
                )
                if bits is None or bits > MAX_INTEGER_BITS:
                    raise SecurityError(f"'{operator}' is limited to small numbers")
            if operator == "*" and not numbers:
                times, value = (left, right) if isinstance(left, int) else (right, left)
                if not isinstance(times, int) or not isinstance(value, str | list | tuple):
                    raise SecurityError(f"{type(left).__name__} * {type(right).__name__}")
                budget.pay(steps=len(value) * max(times, 0) // 64, characters=len(value) * max(times, 0))
            if operator == "+" and isinstance(left, str | list | tuple):
                budget.pay(
                    characters=len(left) + (len(right) if isinstance(right, str | list | tuple) else 0)
                )
            result = super().call_binop(context, operator, left, right)
            if isinstance(result, int) and result.bit_length() > MAX_INTEGER_BITS:
                raise SecurityError(f"an integer of {result.bit_length()} bits")
            return result if isinstance(result, str) else _charged(result)

        def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
            _BUDGET.get().pay(steps=1)
            owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
            if isinstance(owner, str) and name in _REFUSED_METHODS:
                raise SecurityError(f"the string method {name} is not supported")
            if isinstance(owner, str) and name in ("join", "replace"):
                return _join(args[0], owner) if name == "join" else _replace(owner, *args, **kwargs)
            return _charged(super().call(context, called, *args, **kwargs))

        def wrap_str_format(self, value: Any) -> None:
            """Leaves str.format to `call`, which refuses it."""

        def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
            raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is not allowed")

    # Without the optimizer, nothing is computed before there is a budget to pay it from.
    environment = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        extensions=[loopcontrols, Generation],
        cache_size=0,
    )
    environment.filters = {name: _charging(environment.filters[name]) for name in _FILTERS} | _OWN_FILTERS
    # A filter that takes the context is never computed by the compiler, which would let constants go unpaid.
    environment.filters["written"] = pass_context(lambda context, value: _text(value))
    for name in ("lipsum", "cycler", "joiner"):
        del environment.globals[name]
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment
