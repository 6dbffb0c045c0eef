"""Plans: which units stay, and all that surgery needs to know to remove the others."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ispasp.errors import PlanError
from ispasp.files.text import parsed
from ispasp.report import Column, Sheet, change
from ispasp.types.compose import Composition, Pair
from ispasp.types.layout import Extent, full_length, kept_length, names_in

FORMAT, VERSION = "ispasp-plan", 1
_LARGEST = 2**63 - 1  # of sizes
_FACTORS = 64  # of one product; a tensor has no more axes than that


@dataclass(frozen=True)
class TensorLayout:
    """A parameter or buffer: its dense shape, and the extents of those axes that hold units."""

    shape: tuple[int, ...]
    axes: Mapping[int, Extent]


@dataclass(frozen=True)
class Attribute:
    """A number that a module's forward reads, such as `groups`, `num_heads` or one entry of `split_sizes`.

    `name` may reach into a config ("config.num_heads") or a list ("split_sizes[1]").
    """

    module: str
    name: str
    extent: Extent


@dataclass(frozen=True)
class WeightNorm:
    """weight = g v / ||v||: when v loses inputs, g is rescaled so that the rest of the weight stays."""

    v: str
    g: str
    dim: int


@dataclass(frozen=True)
class Structure:
    """How the units of a model's hidden dimensions lie in its tensors and attributes."""

    model: str
    units: Mapping[str, int]
    tensors: Mapping[str, TensorLayout]
    attributes: tuple[Attribute, ...] = ()
    weight_norms: tuple[WeightNorm, ...] = ()
    biases: tuple[str, ...] = ()  # modules built without a bias that gain one
    folded: tuple[str, ...] = ()  # layers that compute their weight, and become plain ones

    def folding(self, kept: Collection[str], also: Collection[str] = ()) -> Structure:
        """The same structure in which only layers fold that these dimensions, or the tensors `also`, lie in."""
        used = {name for name, t in self.tensors.items() if any(names_in(e) & {*kept} for e in t.axes.values())}
        folded = tuple(path for path in self.folded if {f"{path}.weight", f"{path}.bias"} & {*used, *also})
        return replace(self, folded=folded)


@dataclass(frozen=True)
class Plan:
    """Hidden dimension name -> kept unit indices, with the structure of the model it was made for.

    Decided first, applied later: `ispasp.apply_(model, plan)`. Dimensions that are not named stay whole.
    """

    kept: Mapping[str, tuple[int, ...]]
    structure: Structure = field(repr=False)

    def __post_init__(self) -> None:
        """Refuse what cannot be applied."""
        for name, kept in self.kept.items():
            units = self.structure.units.get(name)
            if units is None:
                known = ", ".join([*self.structure.units][:5])
                raise PlanError(f"no hidden dimension {name!r}: the model has {known}, ...; print its survey")
            if not kept:
                raise PlanError(
                    f"hidden dimension {name!r} would keep no unit: keep at least 1 of {units}, or leave it out"
                )
            if list(kept) != sorted(set(kept)) or kept[0] < 0 or kept[-1] >= units:
                raise PlanError(
                    f"kept units of {name!r} must be different, ascending and in 0..{units - 1}, not {list(kept)[:8]}: "
                    "sort them"
                )

    def then(self, second: Plan) -> Plan:
        """This plan and one for the model that it leaves, as one plan for the dense model.

        Kept units are in indices of the dense model. Layouts decide, not names: a hidden dimension that the second
        survey calls otherwise is still cut where it lies. Plans that do not fit each other are refused.

        >>> one = Plan({"fc": (0, 2, 3)}, Structure("Net", {"fc": 4}, {"w": TensorLayout((4,), {0: ((("fc", 4),),)})}))
        >>> two = Plan({"fc": (1, 2)}, Structure("Net", {"fc": 3}, {"w": TensorLayout((3,), {0: ((("fc", 3),),)})}))
        >>> one.then(two).kept
        {'fc': (2, 3)}
        """
        return _composed(self, second)

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        """Itself: a plan does not change."""
        return self

    def rows(self) -> list[dict[str, Any]]:
        """One record for every hidden dimension: its name, its units, and how many of them stay.

        >>> Plan({"fc": (0, 2)}, Structure("Net", {"fc": 3, "head": 4}, {})).rows()
        [{'name': 'fc', 'units': 3, 'kept': 2}, {'name': 'head', 'units': 4, 'kept': 4}]
        """
        return [
            {"name": name, "units": units, "kept": len(self.kept.get(name, range(units)))}
            for name, units in self.structure.units.items()
        ]

    def __str__(self) -> str:
        """A table of how many units stay, and which."""
        return str(self._sheet())

    def _repr_html_(self) -> str:
        """The same for notebooks."""
        return self._sheet().html()

    def _sheet(self) -> Sheet:
        rows = [{**row, "which": spans(self.kept.get(row["name"], ()))} for row in self.rows()]
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
                "dimensions": {
                    name: {"units": units, "kept": list(self.kept[name]) if name in self.kept else None}
                    for name, units in s.units.items()
                },
                "tensors": {
                    name: {"shape": list(t.shape), "axes": {str(axis): extent for axis, extent in t.axes.items()}}
                    for name, t in s.tensors.items()
                },
                "attributes": [[a.module, a.name, a.extent] for a in s.attributes],
                "weight_norms": [[w.v, w.g, w.dim] for w in s.weight_norms],
                "biases": list(s.biases),
                "folded": list(s.folded),
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
            raise PlanError(f"this is no plan ({error}): pass the text of a plan.json") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise PlanError(f'this is no plan: it has no "format": "{FORMAT}"; pass the text of a plan.json')
        version = data.get("version")
        if type(version) is not int or version != VERSION:
            raise PlanError(f"plan version {_short(version)}; this ispasp reads version {VERSION}: update ispasp")
        try:
            return _plan(data)
        except PlanError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            reason = f"{type(error).__name__}: {str(error)[:80]}"
            raise PlanError(f"the plan is damaged ({reason}): write it again with to_json") from None


Axes = dict[int, list[list[Pair]]]


def _composed(first: Plan, second: Plan) -> Plan:
    one, two = first.structure, second.structure
    if one.model != two.model:
        raise PlanError(
            f"plans of a {one.model} and a {two.model} do not follow each other: compose plans of one model"
        )
    both = Composition(first.kept, second.kept)
    tensors = {name: _axes(both, name, one, two) for name in dict.fromkeys((*one.tensors, *two.tensors))}
    attributes = {}
    for row in dict.fromkeys((a.module, a.name) for a in (*one.attributes, *two.attributes)):
        dense, pruned = (next((a.extent for a in s.attributes if (a.module, a.name) == row), None) for s in (one, two))
        dense = dense or (((None, full_length(pruned or ())),),)
        pruned = pruned or (((None, kept_length(dense, first.kept)),),)
        attributes[row] = both.pairs(".".join(row), dense, pruned)
    names = both.names()

    def extent(segments: list[list[Pair]]) -> Extent:
        return tuple(tuple((names.get(pair), full_length(pair[0])) for pair in pairs) for pairs in segments)

    layouts = {}
    for name, (shape, axes) in tensors.items():
        extents = {axis: extent(segments) for axis, segments in axes.items()}
        layouts[name] = TensorLayout(shape, {axis: e for axis, e in extents.items() if names_in(e)})
    structure = Structure(
        one.model,
        {name: full_length(pair[0]) for pair, name in names.items()},
        layouts,
        tuple(Attribute(*row, extent(segments)) for row, segments in attributes.items()),
        tuple(dict.fromkeys((*one.weight_norms, *two.weight_norms))),
        tuple(dict.fromkeys((*one.biases, *two.biases))),
        tuple(dict.fromkeys((*one.folded, *two.folded))),
    )
    return Plan({name: both.kept(pair) for pair, name in names.items()}, structure)


def _axes(both: Composition, name: str, one: Structure, two: Structure) -> tuple[tuple[int, ...], Axes]:
    """The dense shape of a tensor, and both plans' cuts of its axes."""
    pruned = two.tensors.get(name)
    dense = one.tensors.get(name) or _before_first(both, name, one, two)
    if pruned is not None and len(pruned.shape) != len(dense.shape):
        raise PlanError(f"{name!r} has {len(dense.shape)} axes in the first plan, {len(pruned.shape)} in the second: "
                        "compose plans of one model that was not changed in between")  # fmt: skip
    axes: Axes = {}
    for axis, size in enumerate(dense.shape):
        before = dense.axes.get(axis, (((None, size),),))
        left = kept_length(before, both.first)
        after = (((None, left),),) if pruned is None else pruned.axes.get(axis, (((None, pruned.shape[axis]),),))
        axes[axis] = both.pairs(f"axis {axis} of {name!r}", before, after)
    return dense.shape, axes


def _before_first(both: Composition, name: str, one: Structure, two: Structure) -> TensorLayout:
    """The dense layout of a tensor that only the second plan names: it lost nothing, or is a bias that is new there."""
    found = two.tensors[name]
    path = name.removesuffix(".bias")
    weight = one.tensors.get(f"{path}.weight")
    if path not in two.biases or weight is None:
        return TensorLayout(found.shape, {})
    after = two.tensors.get(f"{path}.weight")
    for axis, size in enumerate(weight.shape[:2]):  # the outputs: axis 0, or 1 where the layer is transposed
        extent = weight.axes.get(axis, (((None, size),),))
        alike = after is None or after.axes.get(axis) == found.axes.get(0)
        if alike and (kept_length(extent, both.first),) == found.shape:
            return TensorLayout((size,), {0: extent})
    return TensorLayout(found.shape, {})


def spans(units: Sequence[int], most: int = 24) -> str:
    """Ascending numbers, neighbours together, the beginning of many.

    >>> spans((0, 1, 2, 5, 7, 8)), spans(()), spans(range(0, 99, 2))
    ('0-2 5 7-8', 'all', '0 2 4 6 8 10 12 14 16...')
    """
    if not units:
        return "all"
    parts: list[list[int]] = []
    for unit in units:
        if parts and parts[-1][-1] == unit - 1:
            parts[-1] = [parts[-1][0], unit]
        else:
            parts.append([unit])
    text = " ".join("-".join(map(str, part)) for part in parts)
    return text if len(text) <= most else text[: most + 1].rsplit(" ", 1)[0] + "..."


def _plan(data: dict[str, Any]) -> Plan:
    units = {name: _count(d["units"]) for name, d in data["dimensions"].items()}
    kept = {
        name: tuple(_count(i, 0) for i in d["kept"]) for name, d in data["dimensions"].items() if d["kept"] is not None
    }
    tensors = {name: _layout(name, layout, units) for name, layout in data["tensors"].items()}
    attributes = tuple(Attribute(_name(m), _name(n), _extent(e, units)) for m, n, e in data["attributes"])
    norms = tuple(WeightNorm(_name(v), _name(g), _count(dim, 0)) for v, g, dim in data["weight_norms"])
    biases = tuple(_name(name) for name in data.get("biases", ()))
    for name in biases:
        if f"{name}.bias" not in tensors or len(tensors[f"{name}.bias"].shape) != 1:
            raise PlanError(f"the plan adds a bias to {name!r} without its layout: write it again with to_json")
    for norm in norms:
        if norm.v in tensors and norm.dim >= len(tensors[norm.v].shape):
            raise PlanError(f"the plan's weight norm of {norm.v!r} does not fit its shape: write it again with to_json")
    folded = tuple(_name(name) for name in data.get("folded", ()))
    return Plan(kept, Structure(_name(data["model"]), units, tensors, attributes, norms, biases, folded))


def _layout(name: str, data: Any, units: Mapping[str, int]) -> TensorLayout:
    shape = tuple(_count(size, 0) for size in data["shape"])
    places = {str(axis): axis for axis in range(len(shape))}
    axes = {places.get(axis, -1): _extent(extent, units) for axis, extent in data["axes"].items()}
    for axis, extent in axes.items():
        if axis < 0 or full_length(extent) != shape[axis]:
            raise PlanError(f"the plan's layout of {name!r} does not fit its shape {shape[:8]}: write it again")
    return TensorLayout(shape, axes)


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise PlanError(f"the plan holds {_short(value)} where a name is needed: write it again with to_json")
    return value


def _count(value: Any, least: int = 1) -> int:
    if type(value) is not int or not least <= value <= _LARGEST:
        raise PlanError(f"the plan holds {_short(value)} where a whole number >= {least} is needed: write it again")
    return value


def _extent(data: Any, units: Mapping[str, int]) -> Extent:
    extent = tuple(
        tuple((None if name is None else _name(name), _count(size)) for name, size in segment) for segment in data
    )
    for segment in extent:
        if len(segment) > _FACTORS:
            raise PlanError(f"the plan's layout multiplies {len(segment)} factors: write it again with to_json")
        for name, size in segment:
            if name is not None and units.get(name) != size:
                raise PlanError(
                    f"the plan's layout names {name!r} with {size} units, its dimensions say {units.get(name)}: write "
                    "it again with to_json"
                )
    return extent


def _short(value: Any) -> str:
    return repr(value)[:80]
