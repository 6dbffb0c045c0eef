"""`ispasp bench bounds --zoo`: how small a bound on the change of the output could be, on any traced network.

Units of one hidden dimension after the other are removed. Take any bound of the form sum over k of L_k ||d_k||, d_k the
error at the outputs of the k-th consumers and L_k a Lipschitz constant behind them. L_k is at least ||J_k||, the norm
of the Jacobian at the data. So the sum over k of ||J_k|| ||d_k|| is the least that such a bound can be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ispasp import survey
from ispasp.engine.batches import tensors_of
from ispasp.engine.graphs import TracedGraph
from ispasp.engine.runner import Edits, Runner
from ispasp.engine.sites import sites
from ispasp.errors import IspaspError
from ispasp.graph.state import seeded
from ispasp.graph.trace import evaluating, named_tensors
from ispasp.report import Column, render
from ispasp.surgery.fold import folding
from ispasp_lab import zoo
from ispasp_lab.zoo.coverage import random_units

_ROUNDS = 8  # of power iteration, from below


@dataclass(frozen=True)
class Row:
    """All relative to the norm of the dense output, over the whole batch.

    `measured`: the change of the output. `telescoped`: the sum of the changes by one hidden dimension at a time, which
    is a bound. `least`: what a bound by layer errors and Lipschitz constants is at least; None where an op of the graph
    has no second derivative.
    """

    network: str
    dimensions: int
    keep: float
    measured: float
    telescoped: float
    least: float | None


def run(groups: Sequence[str], keep: float) -> Iterator[Row]:
    """One row for each network of the groups that can be pruned."""
    for case in zoo.cases(*groups):
        try:
            row = measured(case, keep)
        except IspaspError:
            continue  # docs/coverage.md says why
        yield row


def measured(case: zoo.Case, keep: float) -> Row:
    """Remove random units of one hidden dimension after the other."""
    model, batch = case.build(), case.batch()
    found = survey(model, batch)
    kept = random_units(found, keep)
    with folding(model) as layers, evaluating(model), seeded(), sdpa_kernel(SDPBackend.MATH):
        layers.fold(found.structure.folded)  # as it was analysed
        network = _Network(TracedGraph.of(found.analysis), found.analysis, batch, _plain(named_tensors(model)))
        dense, _ = network.output({}, ())
        size = float(dense.norm()) or 1.0
        outputs, now, least = [dense], dict[str, Sequence[int]](), list[float | None]()
        for name, units in kept.items():
            before, now = network.output(now, [name])[1], {**now, name: units}
            after, probes = network.output(now, [name])
            d = torch.stack([(probes[n].value - before[n].value).square().sum() for n in probes]).sum().sqrt()
            norm = network.jacobian_norm(name)
            least.append(None if norm is None else float(d) * norm / size)
            outputs.append(after)
        layers.restore()
    steps = sum(float((b - a).norm()) for a, b in pairwise(outputs))
    change = float((outputs[-1] - dense).norm())
    whole = None if None in least else sum(each for each in least if each is not None)
    return Row(case.name, len(kept), keep, change / size, steps / size, whole)


@dataclass(frozen=True, eq=False)
class _Network:
    """The traced graph in float64, with units removed at their consumers."""

    graph: TracedGraph
    analysis: Any
    batch: Any
    tensors: dict[str, Tensor]

    def output(self, kept: dict[str, Sequence[int]], probed: Sequence[str]) -> tuple[Tensor, Any]:
        """All floating-point outputs as one vector, and the outputs of the consumers of some hidden dimensions."""
        edits = Edits({site.number: site.cuts(kept) for site in sites(self.analysis, list(kept))})
        at = {site.number: None for site in sites(self.analysis, list(probed))} if probed else {}
        runner = Runner(self.graph, self.batch, self.tensors, edits, slicing=False, precise=True, probed=at)
        parts = [t.flatten() for t in tensors_of(runner.advance()) if t.is_floating_point()]
        return torch.cat(parts), runner.probes

    def jacobian_norm(self, name: str) -> float | None:
        """The spectral norm of d output / d (outputs of the consumers), from below by power iteration."""
        try:
            with torch.enable_grad():
                return self._norm(*self.output({}, [name]))
        except RuntimeError:  # torch has no other exception for ops without derivatives
            return None

    def _norm(self, f: Tensor, probes: Any) -> float:
        if not f.requires_grad:
            return 0.0
        zeros = [probe.zero for probe in probes.values()]
        u = torch.randn(f.shape, dtype=f.dtype, generator=torch.Generator().manual_seed(0)).requires_grad_()
        g = torch.autograd.grad(f, zeros, u, create_graph=True, allow_unused=True)
        used = [(z, each) for z, each in zip(zeros, g, strict=True) if each is not None]
        norm = 0.0
        for _ in range(_ROUNDS if used else 0):
            direction = u.detach() / u.detach().norm().clamp_min(torch.finfo(u.dtype).tiny)
            v = torch.autograd.grad(f, [z for z, _ in used], direction, retain_graph=True)
            norm = float(torch.stack([each.square().sum() for each in v]).sum().sqrt())
            (back,) = torch.autograd.grad([each for _, each in used], u, list(v), retain_graph=True)
            u.data.copy_(back)
        return norm


def _plain(tensors: Any) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in tensors.items()}


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as plain values."""
    return [asdict(row) for row in rows]


def as_table(rows: Sequence[Row]) -> str:
    """Medians by number of hidden dimensions.

    >>> text = as_table([Row("a/b", 1, 0.75, 0.5, 0.5, 0.5), Row("a/c", 9, 0.75, 0.5, 1.0, 20.0)])
    >>> [line.split()[1:-1:2] for line in text.splitlines() if "5 to 19" in line]
    [['5', '19', '1', '0.5', '2', '40', '1']]
    """
    edges = ((1, 1), (2, 4), (5, 19), (20, 10**6))
    table = []
    for low, high in edges:
        some = [row for row in rows if low <= row.dimensions <= high and row.measured > 0]
        if some:
            table.append({
                "dimensions": f"{low}" if low == high else f"{low} to {high}" if high < 10**6 else f"{low} and more",
                "networks": len(some),
                "measured": median(row.measured for row in some),
                "telescoped": median(row.telescoped / row.measured for row in some),
                "least": median(row.least / row.measured for row in some if row.least is not None),
                "vacuous": sum(row.least >= 1 for row in some if row.least is not None),
            })  # fmt: skip
    number = "{:.2g}".format
    columns = [Column("dimensions", "hidden dimensions"), Column("networks", "networks")]
    columns += [Column("measured", "change", number), Column("telescoped", "telescoped / change", number)]
    columns += [Column("least", "least / change", number), Column("vacuous", "least >= 1")]
    return render("Bounds on the change of the output, medians", columns, table)
