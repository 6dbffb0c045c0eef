"""Rows in a CSV file that grows while an experiment runs, so that a run that was cut off goes on where it was."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, TypeVar

from ispasp.errors import InputError

Row = TypeVar("Row")
_READ: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "float | None": lambda text: float(text) if text else None,
}


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """The rows of a file that `append_row` wrote, as dataclass objects; none if there is no such file.

    A last line that was cut off is left out.

    >>> read_rows(Path("no-such-folder/rows.csv"), Field)
    []
    """
    if not path.exists():
        return []
    columns = _columns(kind)
    names = [column.name for column in columns]
    with path.open(newline="", encoding="utf-8") as file:
        lines = csv.reader(file)
        found = next(lines, None)
        if found is not None and found != names:
            raise InputError(f"{path} has the columns {found}, not {names}: choose another folder")
        rows = [line for line in lines if len(line) == len(names)]
    try:
        return [kind(*(_READ[str(c.type)](text) for c, text in zip(columns, line, strict=True))) for line in rows]
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}): choose another folder, or delete it") from error


def append_row(path: Path, row: Any) -> None:
    """Add one dataclass object at the end; a new file begins with the names of its fields.

    >>> from dataclasses import dataclass
    >>> from tempfile import TemporaryDirectory
    >>> @dataclass
    ... class Point:
    ...     name: str
    ...     error: float | None
    >>> with TemporaryDirectory() as folder:
    ...     append_row(Path(folder) / "points.csv", Point("a", None)); read_rows(Path(folder) / "points.csv", Point)
    [Point(name='a', error=None)]
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        if fresh:
            lines.writerow(column.name for column in _columns(type(row)))
        lines.writerow(_written(getattr(row, column.name)) for column in _columns(type(row)))


def rewrite(path: Path, rows: Iterable[Any]) -> None:
    """Write the file anew with these rows, all or nothing; without rows it is removed."""
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    for row in rows:
        append_row(part, row)
    if part.exists():
        part.replace(path)
    else:
        path.unlink(missing_ok=True)


def _columns(kind: Any) -> tuple[Field[Any], ...]:
    return fields(kind)


def _written(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.10g}" if isinstance(value, float) else str(value)
