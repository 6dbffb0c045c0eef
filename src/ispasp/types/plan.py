"""Plans: which units stay, and all that surgery needs to know to remove the others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ispasp.errors import PlanError
from ispasp.types.layout import Extent, full_length, names_in

FORMAT, VERSION = "ispasp-plan", 1


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
                    f"kept units of {name!r} must be different, ascending and in 0..{units - 1}, not {list(kept)[:8]}"
                )

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
            }
        )

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan, checking everything it says.

        >>> Plan.from_json('{"format": "ispasp-plan", "version": 2}')
        Traceback (most recent call last):
        ...
        ispasp.errors.PlanError: plan version 2; this ispasp reads version 1: update ispasp
        """
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, TypeError, RecursionError) as error:
            raise PlanError(f"this is not JSON ({error}): pass the text of a plan.json") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise PlanError(f'this is not a plan: it has no "format": "{FORMAT}"')
        if data.get("version") != VERSION:
            raise PlanError(f"plan version {data.get('version')!r}; this ispasp reads version {VERSION}: update ispasp")
        try:
            return _plan(data)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(
                f"the plan is damaged ({type(error).__name__}: {error}): write it again with to_json"
            ) from error


def _plan(data: dict[str, Any]) -> Plan:
    units = {str(name): _count(d["units"]) for name, d in data["dimensions"].items()}
    kept = {
        name: tuple(_count(i, 0) for i in d["kept"]) for name, d in data["dimensions"].items() if d["kept"] is not None
    }
    tensors = {}
    for name, layout in data["tensors"].items():
        shape = tuple(_count(size, 0) for size in layout["shape"])
        axes = {int(axis): _extent(extent, units) for axis, extent in layout["axes"].items()}
        for axis, extent in axes.items():
            if not 0 <= axis < len(shape) or full_length(extent) != shape[axis]:
                raise PlanError(f"the plan's layout of {name!r} does not fit its shape {shape}")
        tensors[str(name)] = TensorLayout(shape, axes)
    attributes = tuple(Attribute(str(m), str(n), _extent(e, units)) for m, n, e in data["attributes"])
    norms = tuple(WeightNorm(str(v), str(g), int(dim)) for v, g, dim in data["weight_norms"])
    biases = tuple(str(name) for name in data.get("biases", ()))
    return Plan(kept, Structure(str(data["model"]), units, tensors, attributes, norms, biases))


def _count(value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PlanError(f"the plan holds {value!r} where a whole number >= {least} is needed")
    return value


def _extent(data: Any, units: Mapping[str, int]) -> Extent:
    extent = tuple(tuple((None if n is None else str(n), _count(size)) for n, size in segment) for segment in data)
    for segment in extent:
        for name, size in segment:
            if name is not None and units.get(name) != size:
                raise PlanError(
                    f"the plan's layout names {name!r} with {size} units, its dimensions say {units.get(name)}"
                )
    names_in(extent)
    return extent
