"""`ispasp.survey`: the hidden dimensions of a model, and what is frozen and why."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

from torch import nn

from ispasp._keep import Keep, widths
from ispasp.engine.batches import count_examples, one_batch
from ispasp.errors import InputError, NothingToPruneError
from ispasp.graph.analyse import Analysis, CostModel, Found, analyse, cost_model
from ispasp.graph.state import one_at_a_time, plain
from ispasp.graph.trace import Batch, check_model
from ispasp.report import Column, Printed, Sheet, told
from ispasp.surgery.fold import Folding, folding, to_fold
from ispasp.surgery.trial import Trial, structure_of
from ispasp.surgery.verify import zeros_replaced
from ispasp.types.dimension import Cost, FrozenAxis, HiddenDimension, Structure, full_length, names_in
from ispasp.types.plan import Plan

Kind: TypeAlias = Literal["neuron", "filter", "head"]
Kinds: TypeAlias = Kind | Sequence[Kind] | Set[Kind]  # mypy takes ("head",) for no Collection[Kind]
Scope: TypeAlias = Literal["blocks", "all"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, eq=False)
class Survey(Printed):
    """What can be removed from a model. Print it, or ask it for a plan."""

    dimensions: tuple[HiddenDimension, ...]
    frozen: tuple[FrozenAxis, ...]
    structure: Structure = field(repr=False)
    costs: CostModel = field(repr=False)
    analysis: Analysis = field(repr=False)

    def plan(self, keep: Keep) -> Plan:
        """Make a plan that keeps the given units, or the first ones if `keep` is a fraction or number.

        `keep` is as in `prune`, budgets apart: one value for all, a recipe, a plan, or a mapping from name or glob to a
        fraction, a number or the kept units. The first pattern that fits a name counts. Dimensions that no pattern fits
        stay whole.

        >>> import torch
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
        >>> survey(net, torch.ones(1, 4)).plan({"0": [1, 7], "*": 0.5}).kept
        {'0': (1, 7), '2': (0, 1, 2)}
        """
        chosen = widths(self.dimensions, keep)
        kept = {name: chosen.given.get(name, tuple(range(count))) for name, count in chosen.counts.items()}
        return Plan(kept, self.structure.folding(kept))

    def cost(self, plan: Plan | None = None) -> Cost:
        """Count parameters and MACs before and after a plan, without applying it.

        >>> import torch
        >>> found = survey(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(1, 4))
        >>> print(found.cost(found.plan(0.5)))
        parameters 58 -> 30 (51.7%), MACs 48 -> 24 (50.0%)
        """
        return self.costs.cost({} if plan is None else plan.kept)

    def rows(self) -> list[dict[str, Any]]:
        """One record of plain values for each hidden dimension: `pandas.DataFrame(survey.rows())`.

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

    def _sheet(self) -> Sheet:
        rows, cost = self.rows(), self.cost()
        columns = [
            Column("name", "hidden dimension", shorten=True),
            Column("kind", "kind"),
            Column("units", "units", "{:,}".format),
            *([] if all(row["channels"] == 1 for row in rows) else [Column("channels", "channels", drop=3)]),
            Column("producers", "made by", _short, drop=4),
            Column("consumers", "read by", _short, drop=2),
            Column("parameters", "params/unit", "{:,}".format),
            Column("macs", "MACs/unit", "{:,}".format),
        ]
        facts = [
            ("parameters", f"{cost.dense_params:,}"),
            ("MACs", f"{cost.dense_macs:,} for one example"),
            ("can shrink", f"{len(rows):,} hidden dimensions of {sum(d.units for d in self.dimensions):,} units"),
        ]
        frozen = told(((row.name, row.reason) for row in self.frozen), {row.name: row.node for row in self.frozen})
        return Sheet(self.structure.model, facts, columns, rows, [("frozen", frozen)])


def _short(names: str) -> str:
    first, *others = names.split(", ")
    return first + (f" +{len(others)}" if others else "")


def survey(
    model: nn.Module, batch: Batch, *, scope: Scope = "blocks", kinds: Kinds = KINDS, check: bool = True
) -> Survey:
    """Find every hidden dimension of a model, and what is frozen and why.

    `batch` is one batch as for `prune`: a Tensor for model(x), a tuple for model(*x), a dict for model(**x), or one of
    these with labels, which are left out. Of a DataLoader or list of batches the first one is used. `scope="blocks"`
    leaves out residual streams (axes on which several producers are added), `"all"` includes them. With `check` about
    half of all units are removed on trial, compared with masking, and put back; dimensions that fail are frozen.

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
    """Survey a model on several kinds of batches. Layers that only some of them reach are frozen.

    Layers that compute their weight are folded into plain ones for the survey, and with `folds` stay so.
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


def check_scope(scope: object) -> None:
    """Check the option `scope`."""
    if scope not in get_args(Scope):
        raise InputError(f"scope={scope!r}: choose 'blocks' (as the paper) or 'all' (residual streams too)")


def kinds_of(kinds: Any) -> tuple[Kind, ...]:
    """Check the option `kinds`: one kind, or several."""
    listed = (kinds,) if isinstance(kinds, str) else kinds
    if not isinstance(listed, Collection) or not listed:
        raise InputError(f"kinds={kinds!r}: pass some of {list(KINDS)}")
    if unknown := [kind for kind in listed if kind not in KINDS]:
        raise InputError(f"kinds has {unknown}: choose from {list(KINDS)}")
    return tuple(kind for kind in KINDS if kind in listed)


def _survey(
    model: nn.Module, batch: Batch, also: Sequence[Batch], scope: str, kinds: Collection[str], *, check: bool
) -> Survey:
    analysis = analyse(model, batch, also)
    reasons = {found.name: _left_out(found, scope, kinds) for found in analysis.found}
    chosen = [found for found in analysis.found if not reasons[found.name]]
    analysis = analysis.naming(chosen)
    structure = structure_of(model, analysis)
    if check:
        trial = Trial(model, batch, analysis, structure)
        with zeros_replaced(model):
            trial.run()
        reasons |= trial.refused
        chosen = [found for found in chosen if found.name not in trial.refused]
        analysis = analysis.naming(chosen)
        structure = structure_of(model, analysis, trial.structure.attributes)
    frozen = [FrozenAxis(name, reason.text, reason.node) for name, reason in analysis.frozen]
    frozen += [FrozenAxis(name, why) for name, why in reasons.items() if why]
    if not chosen:
        shown = "; ".join(map(str, frozen[:6])) or "no parameter reads an axis that another one makes"
        more = "; ..." if len(frozen) > 6 else ""
        raise NothingToPruneError(f"nothing can be removed from {type(model).__name__}: {shown}{more}")
    costs = cost_model(analysis, model, batch)
    dimensions = tuple(_dimension(found, analysis, structure, costs) for found in chosen)
    return Survey(dimensions, tuple(frozen), structure, costs, analysis)


def _left_out(found: Found, scope: str, kinds: Collection[str]) -> str:
    if found.kind not in kinds:
        return f"its kind {found.kind!r} was not asked for"
    if found.atom.stream and not found.atom.head and scope == "blocks":
        return "is a residual stream: several producers are added on it (scope='all' takes it in)"
    return "has one unit only" if found.atom.size < 2 else ""


def _read_or_made(structure: Structure, path: str) -> frozenset[str]:
    layouts = [structure.tensors[n] for leaf in ("weight", "bias") if (n := f"{path}.{leaf}") in structure.tensors]
    return frozenset(name for layout in layouts for extent in layout.axes.values() for name in names_in(extent))


def _dimension(found: Found, analysis: Analysis, structure: Structure, costs: CostModel) -> HiddenDimension:
    one = costs.cost({found.name: range(structure.units[found.name] - 1)})  # one unit less
    facts = found.producers, found.consumers, one.dense_params - one.params, one.dense_macs - one.macs
    read = (analysis.extent(axis) for contraction in analysis.tracker.contractions for axis in contraction.contracted)
    inside = (tuple(part for part in extent if any(name == found.name for name, _ in part)) for extent in read)
    channels = next((full_length(each) // found.atom.size for each in inside if each), 1)  # where it is read first
    return HiddenDimension(found.name, found.kind, found.atom.size, channels, *facts, found.atom.stream)
