"""`ispasp.survey`: every hidden dimension of a model, and everything frozen with the reason."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

from torch import nn

from ispasp.api.widths import Keep, widths
from ispasp.calibrate.batches import one_batch
from ispasp.calibrate.rows import count_examples
from ispasp.errors import InputError, NothingToPruneError
from ispasp.graph.analyse import Analysis, Found, analyse, owner
from ispasp.graph.atoms import resolve
from ispasp.graph.cost import CostModel, cost_model, unit_cost
from ispasp.graph.process import one_at_a_time
from ispasp.graph.trace import Batch, check_model
from ispasp.graph.wrappers import plain
from ispasp.report import Column, Sheet, told
from ispasp.surgery import attributes
from ispasp.surgery.attention import SlimMultiheadAttention
from ispasp.surgery.fold import Folding, folding, to_fold
from ispasp.surgery.stir import telling
from ispasp.surgery.trial import Trial
from ispasp.types.dimension import Cost, FrozenAxis, HiddenDimension
from ispasp.types.layout import Extent, full_length, names_in, without
from ispasp.types.plan import Attribute, Plan, Structure, TensorLayout, WeightNorm

Kind: TypeAlias = Literal["neuron", "filter", "head"]
Kinds: TypeAlias = Kind | Sequence[Kind] | Set[Kind]  # mypy takes ("head",) for no Collection[Kind]
Scope: TypeAlias = Literal["blocks", "all"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, eq=False)
class Survey:
    """What can be removed from a model. Print it, or ask it for a plan."""

    dimensions: tuple[HiddenDimension, ...]
    frozen: tuple[FrozenAxis, ...]
    structure: Structure = field(repr=False)
    costs: CostModel = field(repr=False)
    analysis: Analysis = field(repr=False)

    def plan(self, keep: Keep) -> Plan:
        """A plan that keeps the given units, or the first ones where only a fraction or number is given.

        `keep` as in `prune`, but for budgets: one value for all, a recipe, a plan, or a mapping from name or glob to a
        fraction, a number or the kept units. The first pattern that fits a name counts, and dimensions that no pattern
        fits stay whole.

        >>> import torch
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
        >>> survey(net, torch.ones(1, 4)).plan({"0": [1, 7], "*": 0.5}).kept
        {'0': (1, 7), '2': (0, 1, 2)}
        """
        chosen = widths(self.dimensions, keep)
        kept = {name: chosen.given.get(name, tuple(range(count))) for name, count in chosen.counts.items()}
        return Plan(kept, self.structure.folding(kept))

    def cost(self, plan: Plan | None = None) -> Cost:
        """Parameters and MACs before and after a plan, without applying it.

        >>> import torch
        >>> found = survey(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(1, 4))
        >>> print(found.cost(found.plan(0.5)))
        parameters 58 -> 30 (51.7%), MACs 48 -> 24 (50.0%)
        """
        return self.costs.cost({} if plan is None else plan.kept)

    def rows(self) -> list[dict[str, Any]]:
        """One record of plain values for every hidden dimension: `pandas.DataFrame(survey.rows())`.

        >>> import torch
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> survey(net, torch.ones(1, 4)).rows()
        [{'name': '0', 'kind': 'neuron', 'units': 8, 'channels': 1, 'producers': '0', 'consumers': '2',
          'parameters': 7, 'macs': 6, 'stream': False}]
        """
        return [
            {**asdict(d), "producers": ", ".join(d.producers), "consumers": ", ".join(d.consumers)}
            for d in self.dimensions
        ]

    def __str__(self) -> str:
        """A table of hidden dimensions, then what is frozen and why."""
        return str(self._sheet())

    def _repr_html_(self) -> str:
        """The same for notebooks."""
        return self._sheet().html()

    def _sheet(self) -> Sheet:
        rows, cost = self.rows(), self.cost()
        columns = [
            Column("name", "hidden dimension", shorten=True),
            Column("kind", "kind"),
            Column("units", "units", "{:,}".format),
            Column("channels", "channels", drop=3),
            Column("producers", "made by", _short, drop=4),
            Column("consumers", "read by", _short, drop=2),
            Column("parameters", "params/unit", "{:,}".format),
            Column("macs", "MACs/unit", "{:,}".format),
        ]
        if all(row["channels"] == 1 for row in rows):
            columns = [column for column in columns if column.key != "channels"]
        facts = [
            ("parameters", f"{cost.dense_params:,}"),
            ("MACs", f"{cost.dense_macs:,} for one example"),
            ("can shrink", f"{len(rows):,} hidden dimensions of {sum(d.units for d in self.dimensions):,} units"),
        ]
        frozen = told(((row.name, row.reason) for row in self.frozen), {row.name: row.node for row in self.frozen})
        return Sheet(self.structure.model, facts, columns, rows, [("frozen", frozen)] if frozen else ())


def _short(names: str) -> str:
    first, *others = names.split(", ")
    return first + (f" +{len(others)}" if others else "")


def survey(
    model: nn.Module,
    batch: Batch,
    *,
    scope: Scope = "blocks",
    kinds: Kinds = KINDS,
    check: bool = True,
) -> Survey:
    """Every hidden dimension of a model, and everything frozen with the reason.

    `batch` is one batch as for `prune`: a Tensor for model(x), a tuple for model(*x), a dict for model(**x), or one of
    these with labels, which are left out; of a DataLoader or list of batches the first one is taken. `scope="blocks"`
    leaves out residual streams (axes on which several producers are added), `"all"` takes them in. With `check` (the
    default) half of all units are removed on trial, compared with masking, and put back: what does not run or does not
    agree is reported as frozen.

    >>> import torch
    >>> found = survey(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(1, 4))
    >>> [(d.name, d.kind, d.units, d.consumers) for d in found.dimensions]
    [('0', 'neuron', 8, ('2',))]
    >>> [str(row) for row in found.frozen]
    ['2: reaches the model output']
    """
    check_model(model)
    with one_at_a_time(), plain(model) as inner:
        return survey_kinds(inner, one_batch(inner, batch), (), scope=scope, kinds=kinds, check=check)


def survey_kinds(
    model: nn.Module,
    batch: Batch,
    also: Sequence[Batch],
    *,
    scope: Scope = "blocks",
    kinds: Kinds = KINDS,
    check: bool = True,
    folds: Folding | None = None,
) -> Survey:
    """`survey` of a model that gets several kinds of batches: what only some of them reach is frozen.

    Layers that compute their weight are replaced by plain ones for the survey, and with `folds` stay so.
    """
    check_scope(scope)
    chosen = kinds_of(kinds)
    check_model(model)
    if any(count_examples(each) == 0 for each in (batch, *also)):
        raise InputError("the batch holds no examples: pass at least one")
    with one_at_a_time(), folding(model, folds) as layers:
        folded = to_fold(model, batch, also)
        layers.fold(folded)
        found = _survey(model, batch, also, scope, chosen, check=check)
        structure = replace(found.structure, folded=folded)
        costs = replace(found.costs, folded=tuple((layers.lost(p), _read_or_made(structure, p)) for p in folded))
        if folds is None:
            layers.restore()
        return replace(found, structure=structure, costs=costs)


def _read_or_made(structure: Structure, path: str) -> frozenset[str]:
    """Hidden dimensions that a layer reads or makes."""
    layouts = [structure.tensors[n] for leaf in ("weight", "bias") if (n := f"{path}.{leaf}") in structure.tensors]
    return frozenset(name for layout in layouts for extent in layout.axes.values() for name in names_in(extent))


def check_scope(scope: object) -> None:
    """Refuse what is no scope."""
    if scope not in get_args(Scope):
        raise InputError(f"scope={scope!r}: choose 'blocks' (as the paper) or 'all' (residual streams too)")


def kinds_of(kinds: Any) -> tuple[Kind, ...]:
    """The kinds of units to look for; one may stand alone.

    >>> kinds_of("head")
    ('head',)
    """
    listed = (kinds,) if isinstance(kinds, str) else kinds
    if not isinstance(listed, Collection) or not listed:
        raise InputError(f"kinds={kinds!r}: pass some of {list(KINDS)}")
    unknown = [kind for kind in listed if kind not in KINDS]
    if unknown:
        raise InputError(f"kinds has {unknown}: choose from {list(KINDS)}")
    return tuple(kind for kind in KINDS if kind in listed)


def _survey(
    model: nn.Module, batch: Batch, also: Sequence[Batch], scope: str, kinds: Collection[str], *, check: bool
) -> Survey:
    analysis = analyse(model, batch, also)
    frozen = [FrozenAxis(name, reason.text, reason.node) for name, reason in analysis.frozen]
    reasons = {found.name: _left_out(found, scope, kinds) for found in analysis.found}
    frozen += [FrozenAxis(name, why) for name, why in reasons.items() if why]
    chosen = [found for found in analysis.found if not reasons[found.name]]
    analysis = analysis.naming(chosen)
    structure = _structure(model, analysis, chosen)
    if check:
        trial = Trial(model, batch, analysis, structure)
        with telling(model):
            trial.run()
        frozen += [FrozenAxis(name, why) for name, why in trial.refused.items()]
        chosen = [found for found in chosen if found.name not in trial.refused]
        analysis = analysis.naming(chosen)
        structure = _with_corrections(
            _structure(model, analysis, chosen), trial.structure.attributes, set(trial.refused)
        )
    if not chosen:
        raise NothingToPruneError(_nothing(model, frozen))
    costs = cost_model(analysis, model, batch)
    dimensions = tuple(_dimension(found, analysis, structure, costs) for found in chosen)
    return Survey(dimensions, tuple(frozen), structure, costs, analysis)


def _left_out(found: Found, scope: str, kinds: Collection[str]) -> str:
    if found.kind not in kinds:
        return f"its kind {found.kind!r} was not asked for"
    if found.atom.stream and not found.atom.head and scope == "blocks":
        return "is a residual stream: several producers are added on it (scope='all' takes it in)"
    if found.atom.size < 2:
        return "has one unit only"
    return ""


def _nothing(model: nn.Module, frozen: Sequence[FrozenAxis]) -> str:
    shown = "; ".join(str(row) for row in frozen[:6]) or "no parameter reads an axis that another one makes"
    return f"nothing can be removed from {type(model).__name__}: {shown}{'; ...' if len(frozen) > 6 else ''}"


def _structure(model: nn.Module, analysis: Analysis, chosen: Sequence[Found]) -> Structure:
    tensors = {}
    for name, value in analysis.tensors.items():
        axes = {k: extent for k, axis in enumerate(value.axes) if names_in(extent := analysis.extent(axis))}
        if axes:
            tensors[name] = TensorLayout(tuple(full_length(analysis.extent(a)) for a in value.axes), axes)
    found = {}
    for parameter, name, axis in (size for walk in analysis.walks for size in walk.sizes):
        module, extent = owner(parameter), analysis.extent(axis)
        if names_in(extent) and attributes.read(model.get_submodule(module), name) == full_length(extent):
            found[module, name] = Attribute(module, name, extent)
    for item in _attention_heads(model, analysis, chosen):
        found[item.module, item.name] = item
    weight_norms = dict.fromkeys(row for walk in analysis.walks for row in walk.weight_norms)
    norms = tuple(WeightNorm(v, g, dim) for v, g, dim in weight_norms)
    units = {item.name: item.atom.size for item in chosen}
    return Structure(type(model).__name__, units, tensors, tuple(found.values()), norms)


def _attention_heads(model: nn.Module, analysis: Analysis, chosen: Sequence[Found]) -> list[Attribute]:
    """nn.MultiheadAttention is swapped when its heads change; what it was swapped for changes its number."""
    found = []
    kinds = (nn.MultiheadAttention, SlimMultiheadAttention)
    modules = {path: m for path, m in model.named_modules() if isinstance(m, kinds)}
    for path, module in modules.items():
        value = analysis.tensors.get(f"{path}.out_proj.weight")
        if value is None:
            continue
        for segment in resolve(value.axes[1]):
            for atom in segment:
                if atom in analysis.names and atom.size == module.num_heads:
                    found.append(Attribute(path, "num_heads", (((analysis.names[atom], atom.size),),)))
    return found


def _with_corrections(structure: Structure, found: Sequence[Attribute], refused: set[str]) -> Structure:
    """Add what the trial found; in it, dimensions that were refused in the end count as whole."""
    known = {(a.module, a.name) for a in structure.attributes}
    more = [
        replace(a, extent=extent)
        for a in found
        if (a.module, a.name) not in known and names_in(extent := without(a.extent, refused))
    ]
    return replace(structure, attributes=(*structure.attributes, *more))


def _dimension(found: Found, analysis: Analysis, structure: Structure, costs: CostModel) -> HiddenDimension:
    parameters, macs = unit_cost(costs, structure.units, found.name)
    return HiddenDimension(
        found.name,
        found.kind,
        found.atom.size,
        _channels(found, analysis),
        found.producers,
        found.consumers,
        parameters,
        macs,
        found.atom.stream,
    )


def _channels(found: Found, analysis: Analysis) -> int:
    for contraction in analysis.tracker.contractions:
        for axis in contraction.contracted:
            extent: Extent = analysis.extent(axis)
            if found.name in names_in(extent):
                inside = tuple(segment for segment in extent if any(n == found.name for n, _ in segment))
                return full_length(inside) // found.atom.size
    return 1
