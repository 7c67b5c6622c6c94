"""Grammars for constrained calls, in llguidance's dialect of Lark.

A format describes its calls by a `Grammar`; `tool_grammar` (calls/__init__.py) writes it out for the tools of
a request. Control tokens of the vocabulary stand in a grammar by their ids, everything else as text.

Source: llguidance, docs/syntax.md.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from bonsai_jax.tokens.calls.parameters import Style
from bonsai_jax.tokens.calls.values import types

SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
TEXT = "TEXT: /(.|\\n)*/"
OPEN, CLOSE = "<think>", "</think>"
LINES = "/[\\r\\n]{0,4}/"  # after a thought; where more may come, small models write nothing else

# Before an answer: nothing, perhaps a thought, the rest of one, or in harmony a header alone.
Thought = Literal["none", "possible", "begun", "header"]


class Rules:
    """The rules of a grammar that is being written.

    ids  the control tokens of the vocabulary, {name: id}
    """

    def __init__(self, ids: Mapping[str, int]):
        self.ids, self.lines = ids, [TEXT]
        longest_first = sorted(ids, key=len, reverse=True)
        self._controls = re.compile(f"({'|'.join(map(re.escape, longest_first))})" if ids else "((?!))")

    def add(self, name: str, expression: str) -> str:
        """A new rule; returns its name, which has a number behind it."""
        name, _, attribute = name.partition("[")
        name = f"{name}_{len(self.lines)}"
        self.lines.append(f"{name}{'[' + attribute if attribute else ''}: {expression}")
        return name

    def text(self, text: str) -> str:
        """An expression for a text."""
        parts = [
            f"<[{self.ids[part]}]>" if i % 2 else json.dumps(part, ensure_ascii=False)
            for i, part in enumerate(self._controls.split(text))
            if part
        ]
        return " ".join(parts)

    def until(self, mark: str) -> str:
        """An expression for any text up to a mark, and the mark."""
        if mark in self.ids:
            return f"TEXT {self.text(mark)}"
        return self.add("until[lazy]", f"/(.|\\n)*/ {self.text(mark)}")

    def thought(self, thought: Thought) -> str:
        """An expression for a thought between tags."""
        if thought == "begun":
            return f"{self.until(CLOSE)} {LINES}"
        whole = (
            f"({self.text(OPEN)} {self.until(CLOSE)} {LINES})?"  # no line before it: that begins answers, too
        )
        return whole if thought == "possible" else ""

    def json(self, schema: Any) -> str:
        """An expression for JSON of a schema, on one line, with spaces as templates write them."""
        own = schema if isinstance(schema, Mapping) else {}
        return f"%json {json.dumps({**own, 'x-guidance': SPACES})}"

    def written(self, start: str) -> str:
        """The grammar, with this expression for the whole text."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self.lines]) + "\n"


Call = Callable[[Rules, str, Any], str]


@dataclasses.dataclass(frozen=True)
class Grammar:
    """What calls look like.

        opening first CALL (between CALL)* closing

    opening       the text by which calls are known; free text may come before it
    first         what stands behind it
    call          (rules, function's name, schema of its arguments) -> expression for one call
    whole_answer  text before calls is not possible, since they have no mark
    """

    opening: str
    first: str
    call: Call
    between: str
    closing: str
    whole_answer: bool = False

    def calls(self, rules: Rules, tools: Mapping[str, Any], parallel: bool) -> str:
        """An expression for what comes behind the opening."""
        options = [rules.add("call", self.call(rules, name, schema)) for name, schema in tools.items()]
        call = rules.add("one", " | ".join(options))
        more = f"({rules.text(self.between)} {call})*" if parallel else ""
        return f"{rules.text(self.first)} {call} {more} {rules.text(self.closing)}"


def json_object(before: str, key: str, after: str) -> Call:
    """Calls that are an object with the name and, under a key, the arguments."""

    def call(rules: Rules, name: str, schema: Any) -> str:
        begin = f'{before}"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
        return f"{rules.text(begin)} {rules.json(schema)} {rules.text(after)}"

    return call


def command_object(rules: Rules, name: str, schema: Any) -> str:
    """Calls of Command R7B, which have numbers."""
    begin = f'", "tool_name": {json.dumps(name, ensure_ascii=False)}, "parameters": '
    id = rules.text('{"tool_call_id": "')
    return f"{id} /[0-9]{{1,3}}/ {rules.text(begin)} {rules.json(schema)} {rules.text('}')}"


def python_call(rules: Rules, name: str, schema: Any) -> str:
    """Python calls with keywords, in the order of the schema; values as in JSON, which _Named reads too."""
    properties, required = schema.get("properties") or {}, set(schema.get("required", ()))
    need, more = [], []
    for key, own in properties.items():
        value = f"{rules.text(key + '=')} {rules.json(with_definitions(own, schema))}"
        (need if key in required else more).append(value)
    return f"{rules.text(name + '(')} {_joined(rules, need, more)} {rules.text(')')}"


def _joined(rules: Rules, need: list[str], more: list[str]) -> str:
    """Members with commas between: all that must be there first, then any of the others."""
    comma = ' "," " "? '
    if need:
        return " ".join([comma.join(need), *(f"({comma}{member})?" for member in more)])
    names = [rules.add("member", member) for member in more]
    tails = [" ".join(f"({comma}{name})?" for name in names[i + 1 :]) for i in range(len(names))]
    options = " | ".join(f"{name} {tail}" for name, tail in zip(names, tails, strict=True))
    return f"({options})?" if names else ""


def name_and_json(before: str, between: str, after: str) -> Call:
    """Calls that are the name and then the arguments."""

    def call(rules: Rules, name: str, schema: Any) -> str:
        return f"{rules.text(before + name + between)} {rules.json(schema)} {rules.text(after)}"

    return call


def tagged(before: str, middle: str, style: Style, after: str) -> Call:
    """Calls with a tag for each parameter, in the order of the schema. A string ends at the first end tag; of
    its schema only "enum" and "const" are kept to, not "pattern" or lengths."""

    def call(rules: Rules, name: str, schema: Any) -> str:
        parts = [rules.text(before + name + middle)]
        properties = schema.get("properties") or {}
        for key, own in properties.items():
            part = _parameter(rules, style, key, own, schema)
            parts.append(part if key in schema.get("required", ()) else f"({part})?")
        return " ".join([*parts, rules.text(style.end + after)])

    return call


def _parameter(rules: Rules, style: Style, key: str, schema: Any, root: Any) -> str:
    line = "\n" if style.lines else ""
    kinds = types(schema, root)
    is_string = kinds == {"string"}
    attributes = ""
    if style.attributes is not None:
        attributes = f' string="{"true" if is_string else "false"}"'
        key = f'name="{key}"'
    begin = f"{style.key[0]}{key}{attributes}{style.key[1]}"
    begin += f"\n{style.value[0]}" if style.value[0] else line
    end = f"{line}{style.value[1]}"
    options = None
    if isinstance(schema, Mapping):
        options = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if options is not None and all(isinstance(option, str) for option in options):
        value = f"({' | '.join(rules.text(option) for option in options)}) {rules.text(end)}"
    elif is_string:
        value = rules.until(style.value[1])  # as it is read; models write the line break before it anyway
    else:
        value = f"{rules.json(with_definitions(schema, root))} {rules.text(end)}"
    return f"{rules.text(begin)} {value} {rules.text(chr(10))}"


def with_definitions(schema: Any, root: Any) -> Any:
    """A schema within another, with what its references point to."""
    if not isinstance(schema, Mapping):
        return {}
    named = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**named, **schema}


def gemma_object(quote: str) -> Call:
    """Calls in Gemma's notation. Keys of objects are in alphabetical order, as the template writes them."""

    def value(rules: Rules, schema: Any, root: Any) -> str:
        kinds, options = types(schema, root), []
        schema = schema if isinstance(schema, Mapping) else {}
        if isinstance(schema.get("enum"), list):
            plain = [one for one in schema["enum"] if isinstance(one, str | int | float | None)]
            return rules.add("enum", " | ".join(rules.text(written(one)) for one in plain))
        if "string" in kinds:
            options.append(f"{rules.text(quote)} {rules.until(quote)}")
        if kinds & {"integer", "number"}:
            options.append("/-?[0-9]+/" if "number" not in kinds else "/-?[0-9]+(\\.[0-9]+)?/")
        if "boolean" in kinds:
            options.append('"true" | "false"')
        if "null" in kinds:
            options.append('"null"')
        if "array" in kinds and "items" in schema:
            item = value(rules, schema["items"], root)
            options.append(f'"[" ({item} ("," {item})*)? "]"')
        if "object" in kinds and schema.get("properties"):
            options.append(entries(rules, schema, root))
        return rules.add("value", " | ".join(options) or '"{}"')

    def written(one: Any) -> str:
        return f"{quote}{one}{quote}" if isinstance(one, str) else json.dumps(one)

    def entries(rules: Rules, schema: Any, root: Any) -> str:
        """An object. Required members first decide where commas stand."""
        properties, required = schema.get("properties") or {}, set(schema.get("required", ()))
        parts, need = [], [key for key in sorted(properties) if key in required]
        more = [key for key in sorted(properties) if key not in required]
        for i, key in enumerate(need):
            begin = rules.text(f"{',' if i else ''}{key}:")
            parts.append(f"{begin} {value(rules, properties[key], root)}")
        members = [f"{rules.text(key + ':')} {value(rules, properties[key], root)}" for key in more]
        if need:
            parts += [f'("," {member})?' for member in members]
        elif members:
            names = [rules.add("member", member) for member in members]
            tails = [" ".join(f'("," {name})?' for name in names[i + 1 :]) for i in range(len(names))]
            parts.append("(" + " | ".join(f"{n} {t}" for n, t in zip(names, tails, strict=True)) + ")?")
        return " ".join(['"{"', *parts, '"}"'])

    def call(rules: Rules, name: str, schema: Any) -> str:
        return f"{rules.text(name)} {entries(rules, schema, schema)}"

    return call
