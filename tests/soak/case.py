"""One case: what it may use, what it notes, and how it ends."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ispasp import IspaspError

OK, REFUSED, FAILED = "ok", "refused", "failed"


class Wrong(AssertionError):  # noqa: N818
    """A promise of the library that did not hold."""


class Refused(Exception):  # noqa: N818
    """The library said no where it may: an IspaspError."""

    def __init__(self, error: IspaspError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass
class Case:
    """What a category gets: its own random numbers, an empty folder, and a place to note what it chose."""

    category: str
    seed: int
    folder: Path
    rng: random.Random = field(init=False)
    options: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.category}:{self.seed}")  # noqa: S311

    def pick(self, *options: Any) -> Any:
        return self.rng.choice(options)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def chosen(self, name: str, *options: Any) -> Any:
        """Pick, and note it."""
        self.options[name] = value = self.pick(*options)
        return value

    @contextmanager
    def may_refuse(self, step: str = "") -> Iterator[None]:
        """A block in which an IspaspError ends the case well."""
        try:
            yield
        except IspaspError as error:
            if step:
                self.facts["refused in"] = step
            raise Refused(error) from error


Category = Callable[[Case], None]


def check(holds: bool, what: str) -> None:
    """Raise where a promise does not hold; `assert` would vanish with -O."""
    if not holds:
        raise Wrong(what)


def attempt(run: Category, case: Case) -> dict[str, Any]:
    """Run a case to its end and say how it ended."""
    ended: dict[str, Any] = {"outcome": OK}
    try:
        run(case)
    except Refused as refused:
        ended = {"outcome": REFUSED, "error": type(refused.error).__name__, "message": str(refused)}
    except BaseException as error:
        ended = {
            "outcome": FAILED,
            "error": type(error).__name__,
            "message": str(error)[:2000],
            "traceback": traceback.format_exc()[-8000:],
        }
    return {**ended, "options": described(case.options), "facts": described(case.facts)}


def described(value: Any) -> Any:
    """What JSON can hold of it."""
    if isinstance(value, dict):
        return {str(key): described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [described(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
