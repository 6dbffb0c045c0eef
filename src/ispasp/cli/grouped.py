"""Commands that take their options in groups: a parameter that is a dataclass stands for its fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer reads it, with every field of its dataclasses as a parameter of its own.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Size:
    ...     width: int
    ...     height: int = 2
    >>> def area(size: Size, unit: str = "cm2") -> None:
    ...     print(size.width * size.height, unit)
    >>> area.__annotations__["size"] = Size
    >>> inspect.signature(grouped(area))
    <Signature (*, width: int, height: int = 2, unit: str = 'cm2') -> None>
    >>> grouped(area)(width=3, height=4, unit="m2")
    12 m2
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hints[name] for name in inspect.signature(command).parameters if is_dataclass(hints[name])}

    @wraps(command)
    def call(**given: Any) -> None:
        made = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**given, **made)

    parameters = list(_parameters(command, hints, groups))
    call.__dict__.pop("__wrapped__")
    call.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _parameters(
    command: Callable[..., None], hints: dict[str, Any], groups: dict[str, Any]
) -> Iterator[inspect.Parameter]:
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
            continue
        kinds = get_type_hints(groups[name], include_extras=True)
        for field in fields(groups[name]):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            yield inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kinds[field.name]
            )
