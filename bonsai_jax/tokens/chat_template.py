"""Chat templates: jinja2 source that comes with a model, rendered so that it can do no harm.

Templates come from strangers. jinja2's immutable sandbox keeps them away from Python's internals and from
changing the caller's messages. In addition every loop pass, every call and every character that a template
produces is charged to a budget (chat_budget.py), so that a template can neither hang nor fill the memory: at
worst it takes ten seconds and a few hundred MB. A single operation that reads without producing anything
(`x in y`) is not charged and cannot be interrupted.
"""

import functools
from collections.abc import Mapping
from typing import Any

from bonsai_jax.tokens import chat_budget
from bonsai_jax.tokens.chat_budget import BUDGET, Budget, ChatTemplateError, charged

__all__ = ["ChatTemplateError", "render"]

MAX_TEMPLATE = 128 * 1024  # characters of source; real templates have up to 40,000


def render(source: str, variables: Mapping[str, Any]) -> str:
    """The text of a chat template for its variables (messages, add_generation_prompt, bos_token ...).

    Whitespace rules, `raise_exception`, `strftime_now`, `tojson`, `break` and `continue`, `{% generation %}`
    are those of Hugging Face's transformers. Every failure is a ChatTemplateError with the reason.
    """
    from jinja2 import TemplateError, TemplateSyntaxError

    budget = Budget()
    token = BUDGET.set(budget)
    try:
        budget.start(variables)
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
        BUDGET.reset(token)


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    if len(source) > MAX_TEMPLATE:
        raise ChatTemplateError(f"chat template: {len(source)} characters, the limit is {MAX_TEMPLATE}")
    return _environment().from_string(source)


@functools.cache
def _environment() -> Any:
    """The sandbox. Its parser sends everything that must be charged through one of our filters:

    {% for x in VALUES %} -> VALUES|passes     {{ A }} -> A|written     A ~ B -> [A, B]|concatenated
    [A, B], {A: B} -> ...|charged              A[i:j] -> ...|sliced
    """
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import (
        ImmutableSandboxedEnvironment,
        SandboxedEscapeFormatter,
        SandboxedFormatter,
    )
    from jinja2.visitor import NodeTransformer
    from markupsafe import Markup

    def through(filter_name: str, node: Any) -> Any:
        return nodes.Filter(node, filter_name, [], [], None, None, lineno=node.lineno)

    class Charging(NodeTransformer):
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
            return through("sliced", node) if isinstance(node.arg, nodes.Slice) else node

        def visit_List(self, node: Any) -> Any:
            self.generic_visit(node)
            return through("charged", node) if getattr(node, "ctx", "load") == "load" else node

        def visit_Tuple(self, node: Any) -> Any:
            self.generic_visit(node)
            return through("charged", node) if node.ctx == "load" else node

        visit_Dict = visit_List

    class Generation(Extension):
        """{% generation %} marks the assistant's words for training; rendering leaves them as they are. As in
        transformers the block has a scope of its own."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("content"), [], [], body).set_lineno(line)

        def content(self, caller: Any) -> Any:
            return caller()

    class Format(chat_budget.ChargedFields, SandboxedFormatter):
        pass

    class EscapeFormat(chat_budget.ChargedFields, SandboxedEscapeFormatter):
        pass

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("+", "*", "**", "%"))

        def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
            return Charging().visit(super()._parse(source, name, filename))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            BUDGET.get().pay(steps=1)
            chat_budget.afford_operator(operator, left, right)
            return charged(super().call_binop(context, operator, left, right))

        def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
            BUDGET.get().pay(steps=1)
            args = chat_budget.method_arguments(called, args, kwargs)
            result = super().call(context, called, *args, **kwargs)
            return result if chat_budget.only_looks_up(called) else charged(result)

        def wrap_str_format(self, value: Any) -> Any:
            """str.format and str.format_map as jinja2 wraps them, with charged fields."""
            owner, name = getattr(value, "__self__", None), getattr(value, "__name__", "")
            if not isinstance(owner, str) or name not in ("format", "format_map"):
                return None
            kind = type(owner)
            fields = EscapeFormat(self, escape=owner.escape) if isinstance(owner, Markup) else Format(self)
            if name == "format":
                return lambda *args, **kwargs: kind(fields.vformat(owner, args, kwargs))
            return lambda mapping: kind(fields.vformat(owner, (), mapping))

        def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
            raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is not allowed")

    # jinja2's optimizer would compute constants at compile time, where there is no budget to charge.
    environment = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        extensions=[loopcontrols, Generation],
        cache_size=0,
    )
    environment.filters = chat_budget.filters(environment.filters)
    del environment.globals["lipsum"]
    environment.globals |= {  # pyrefly: ignore[bad-assignment]
        "raise_exception": chat_budget.raise_exception,
        "strftime_now": chat_budget.strftime_now,
    }
    return environment
