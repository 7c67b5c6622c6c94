"""Options of commands as dataclasses: a command takes a group of options as one argument, and typer sees the
group's fields."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """The command for typer: each parameter annotated with a dataclass is replaced by the dataclass's fields.

        @dataclass(frozen=True)
        class RunOptions:
            impl: Annotated[str, typer.Option(help="...")] = "auto"

        @spread
        def command(*, prompt: str, run: RunOptions): ...  # typer sees (*, prompt: str, impl: ... = "auto")

    Arguments are passed by name; fields that are left out have their defaults. Raises TypeError if two
    parameters have the same name.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            fields = get_type_hints(groups[name], include_extras=True)
            shown = [
                (field.name, field.default, fields[field.name]) for field in dataclasses.fields(groups[name])
            ]
        else:
            shown = [(name, parameter.default, hints[name])]
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
            for name, default, hint in shown
        ]
    names = [parameter.name for parameter in parameters]
    if len(set(names)) < len(names):
        raise TypeError(f"{command.__module__}: two options have the same name among {', '.join(names)}")

    def called(**arguments: Any) -> None:
        built = {
            name: group(**{
                field.name: arguments.pop(field.name)
                for field in dataclasses.fields(group)
                if field.name in arguments
            })
            for name, group in groups.items()
        }  # fmt: skip
        command(**arguments, **built)

    called.__doc__, called.__module__ = command.__doc__, command.__module__
    called.__signature__ = inspect.Signature(parameters)  # pyrefly: ignore
    return called
