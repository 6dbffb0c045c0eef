"""Plans: which units stay, and where the others lie in the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ispasp.errors import PlanError
from ispasp.files import parsed
from ispasp.report import Column, Printed, Sheet, change
from ispasp.types.compose import compose
from ispasp.types.dimension import Attribute, Extent, Structure, TensorLayout, WeightNorm, full_length

FORMAT, VERSION = "ispasp-plan", 1
_LARGEST = 2**63 - 1  # largest size
_FACTORS = 64  # most factors of one product; no tensor has more axes


@dataclass(frozen=True)
class Plan(Printed):
    """Hidden dimension name -> kept unit indices, with the structure of the model it was made for.

    Decided first, applied later: `ispasp.apply_(model, plan)`. Dimensions that are not named stay whole. One without
    kept units is removed entirely: its consumers return their bias, or zeros.
    """

    kept: Mapping[str, tuple[int, ...]]
    structure: Structure = field(repr=False)

    def __post_init__(self) -> None:
        for name, kept in self.kept.items():
            units = self.structure.units.get(name)
            if units is None:
                known = ", ".join([*self.structure.units][:5])
                raise PlanError(f"no hidden dimension {name!r}: the model has {known}, ...; print its survey")
            if list(kept) != sorted(set(kept)) or (kept and (kept[0] < 0 or kept[-1] >= units)):
                raise PlanError(
                    f"kept units of {name!r} must be ascending and in 0..{units - 1}, not {[*kept][:8]}: sort them"
                )

    def then(self, second: Plan) -> Plan:
        """This plan followed by one for the model it leaves, as one plan for the dense model.

        Kept units are indices of the dense model. Layouts decide, not names: a hidden dimension that the second survey
        names differently is still cut where it lies. Raises if the plans do not fit each other.

        >>> one = Plan({"fc": (0, 2, 3)}, Structure("Net", {"fc": 4}, {"w": TensorLayout((4,), {0: ((("fc", 4),),)})}))
        >>> two = Plan({"fc": (1, 2)}, Structure("Net", {"fc": 3}, {"w": TensorLayout((3,), {0: ((("fc", 3),),)})}))
        >>> one.then(two).kept
        {'fc': (2, 3)}
        """
        return Plan(*compose(self.kept, self.structure, second.kept, second.structure))

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        """Itself: a plan does not change."""
        return self

    def rows(self) -> list[dict[str, Any]]:
        """One record for every hidden dimension: its name, its units, and how many of them stay.

        >>> Plan({"fc": (0, 2)}, Structure("Net", {"fc": 3, "head": 4}, {})).rows()
        [{'name': 'fc', 'units': 3, 'kept': 2}, {'name': 'head', 'units': 4, 'kept': 4}]
        """
        units = self.structure.units.items()
        return [{"name": name, "units": n, "kept": len(self.kept.get(name, range(n)))} for name, n in units]

    def _sheet(self) -> Sheet:
        rows = [{**row, "which": _spans(self.kept.get(row["name"]))} for row in self.rows()]
        units, kept = (sum(row[key] for row in rows) for key in ("units", "kept"))
        columns = [
            Column("name", "hidden dimension", shorten=True),
            Column("units", "units", "{:,}".format),
            Column("kept", "kept", "{:,}".format),
            Column("which", "units that stay"),
        ]
        shrunk = f"{len(self.kept):,} of {len(rows):,} hidden dimensions lose units"
        facts = [("units", change(units, kept)), ("changes", shrunk)]
        return Sheet(f"Plan for {self.structure.model}", facts, columns, rows)

    def to_json(self) -> str:
        """The plan as JSON text.

        >>> import json
        >>> weight = TensorLayout((3,), {0: ((("fc", 3),),)})
        >>> plan = Plan({"fc": (0, 2)}, Structure("Net", {"fc": 3}, {"fc.weight": weight}))
        >>> json.loads(plan.to_json())["dimensions"]
        {'fc': {'units': 3, 'kept': [0, 2]}}
        """
        s = self.structure
        return json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "model": s.model,
                "dimensions": {name: {"units": n, "kept": self.kept.get(name)} for name, n in s.units.items()},
                "tensors": {name: {"shape": t.shape, "axes": dict(t.axes)} for name, t in s.tensors.items()},
                "attributes": [[a.module, a.name, a.extent] for a in s.attributes],
                "weight_norms": [[w.v, w.g, w.dim] for w in s.weight_norms],
                "biases": s.biases,
                "folded": s.folded,
            }
        )

    @staticmethod
    def from_json(text: str | bytes) -> Plan:
        """Read a plan, checking everything it says.

        >>> Plan.from_json('{"format": "ispasp-plan", "version": 2}')
        Traceback (most recent call last):
        ...
        ispasp.errors.PlanError: plan version 2; this ispasp reads version 1: update ispasp
        """
        if not isinstance(text, (str, bytes)):
            raise PlanError(f"a plan as a {type(text).__name__}: pass the text of a plan.json")
        try:
            data = parsed(text)
        except ValueError as error:
            raise PlanError(f"this is not a plan ({error}): pass the text of a plan.json") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise PlanError(f'this is not a plan: it has no "format": "{FORMAT}"; pass the text of a plan.json')
        version = data.get("version")
        if type(version) is not int or version != VERSION:
            raise PlanError(f"plan version {repr(version)[:80]}; this ispasp reads version {VERSION}: update ispasp")
        try:
            return _plan(data)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            if isinstance(error, PlanError):
                raise
            raise _damaged(f"is damaged ({type(error).__name__}: {str(error)[:80]})") from None


def _spans(units: Sequence[int] | None, most: int = 24) -> str:
    """Ascending indices with neighbours joined, cut after `most` characters.

    >>> _spans((0, 1, 2, 5, 7, 8)), _spans(None), _spans(()), _spans(range(0, 99, 2))
    ('0-2 5 7-8', 'all', 'none', '0 2 4 6 8 10 12 14 16...')
    """
    if not units:
        return "all" if units is None else "none"
    runs = ([unit for _, unit in run] for _, run in groupby(enumerate(units), lambda pair: pair[1] - pair[0]))
    text = " ".join("-".join(map(str, sorted({run[0], run[-1]}))) for run in runs)
    return text if len(text) <= most else text[: most + 1].rsplit(" ", 1)[0] + "..."


# Reading JSON: everything is checked before surgery relies on it.


def _plan(data: dict[str, Any]) -> Plan:
    dimensions = data["dimensions"].items()
    units = {name: _count(d["units"]) for name, d in dimensions}
    kept = {name: tuple(_count(i, 0) for i in d["kept"]) for name, d in dimensions if d["kept"] is not None}
    tensors = {name: _layout(name, layout, units) for name, layout in data["tensors"].items()}
    attributes = tuple(Attribute(_name(m), _name(n), _extent(e, units)) for m, n, e in data["attributes"])
    norms = tuple(WeightNorm(_name(v), _name(g), _count(dim, 0)) for v, g, dim in data["weight_norms"])
    biases, folded = (tuple(_name(name) for name in data.get(key, ())) for key in ("biases", "folded"))
    for name in biases:
        if f"{name}.bias" not in tensors or len(tensors[f"{name}.bias"].shape) != 1:
            raise _damaged(f"adds a bias to {name!r} without its layout")
    for norm in norms:
        if norm.v in tensors and norm.dim >= len(tensors[norm.v].shape):
            raise _damaged(f"has a weight norm of {norm.v!r} that does not fit its shape")
    return Plan(kept, Structure(_name(data["model"]), units, tensors, attributes, norms, biases, folded))


def _layout(name: str, data: Any, units: Mapping[str, int]) -> TensorLayout:
    shape = tuple(_count(size, 0) for size in data["shape"])
    places = {str(axis): axis for axis in range(len(shape))}
    axes = {places.get(axis, -1): _extent(extent, units) for axis, extent in data["axes"].items()}
    for axis, extent in axes.items():
        if axis < 0 or full_length(extent) != shape[axis]:
            raise _damaged(f"has a layout of {name!r} that does not fit its shape {shape[:8]}")
    return TensorLayout(shape, axes)


def _extent(data: Any, units: Mapping[str, int]) -> Extent:
    extent = tuple(tuple((None if n is None else _name(n), _count(size)) for n, size in segment) for segment in data)
    for segment in extent:
        if len(segment) > _FACTORS:
            raise _damaged(f"has a layout that multiplies {len(segment)} factors")
        for name, size in segment:
            if name is not None and units.get(name) != size:
                raise _damaged(f"has a layout of {name!r} with {size} units, its dimensions say {units.get(name)}")
    return extent


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise _damaged(f"holds {repr(value)[:80]} where a name is needed")
    return value


def _count(value: Any, least: int = 1) -> int:
    if type(value) is not int or not least <= value <= _LARGEST:
        raise _damaged(f"holds {repr(value)[:80]} where a whole number >= {least} is needed")
    return value


def _damaged(reason: str) -> PlanError:
    return PlanError(f"the plan {reason}: write it again with to_json")
