"""Readers: the places of a graph where hidden dimensions are read, and statistics of what they read there."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ispasp.calibrate.circuit import Cut
from ispasp.calibrate.measure import measure
from ispasp.errors import InputError
from ispasp.graph.analyse import Analysis, owner
from ispasp.graph.atoms import resolve
from ispasp.graph.ops import Arguments, Form, along, forms, given_to
from ispasp.graph.values import Contraction, Value
from ispasp.types import Consumer, Reading
from ispasp.types.layout import Extent, Factor, Kept, kept_mask, names_in


@dataclass(frozen=True, eq=False)
class Reader:
    """One contraction: its number in the analysis, module path, and the dimensions of activations it sums over."""

    number: int
    path: str
    contraction: Contraction
    extents: tuple[tuple[int, Extent], ...]
    _known: dict[str, tuple[Sequence[Tensor], Any]] = field(default_factory=dict)  # what depends on the weight only

    @property
    def names(self) -> set[str]:
        """Hidden dimensions that are read here."""
        return {name for _, extent in self.extents for name in names_in(extent)}

    def cuts(self, kept: Kept) -> list[Cut]:
        """What it reads of the kept units."""
        return [
            Cut(self.contraction.data, dim, kept_mask(extent, kept))
            for dim, extent in self.extents
            if names_in(extent) & set(kept)
        ]

    def forms(self, arguments: Arguments) -> Sequence[Form]:
        """Its products in normal form; made once for a weight, unless rows are divided among experts."""
        weights = [v for v in pytree.tree_leaves(arguments) if isinstance(v, Tensor)]
        weights = [v for v in weights if v is not self.activations(arguments)]
        known = self._known.get("forms")
        if known is not None and len(weights) == len(known[0]) and all(map(operator.is_, weights, known[0])):
            found: Sequence[Form] = known[1]
            return found
        found = forms(self.contraction.node, arguments, self.contraction.data)
        if len(found) == 1:
            self._known["forms"] = (weights, found)
        return found

    def activations(self, arguments: Arguments) -> Tensor:
        """The argument that holds activations."""
        found: Tensor = self.contraction.data.get(arguments)
        return found

    def labels(self, name: str, x: Tensor) -> Tensor:
        """Which unit of a hidden dimension each entry of the activations belongs to, -1 for none; shaped as x."""
        found = torch.full((1,) * x.ndim, -1, device="cpu")
        for dim, extent in self.extents:
            if name in names_in(extent):
                found = torch.maximum(found, along(units_along(extent, name), dim, x.ndim))
        return found.to(x.device).expand(x.shape)


def units_along(extent: Extent, name: str) -> Tensor:
    """Unit of each position of an axis, -1 outside. (full length,)

    >>> units_along(((("a", 2), (None, 2)), (("b", 3),)), "a").tolist()
    [0, 0, 1, 1, -1, -1, -1]
    """
    parts = []
    for segment in extent:
        inside = any(n == name for n, _ in segment)
        index = torch.full((1,), 0 if inside else -1, device="cpu")
        for n, size in segment:
            step = torch.arange(size, device="cpu") if n == name else torch.zeros(size, dtype=torch.long, device="cpu")
            index = (index[:, None] + step[None, :]).flatten()
        parts.append(index)
    return torch.cat(parts)


def readers(analysis: Analysis, wanted: Collection[str], *, others: bool = False) -> list[Reader]:
    """Every contraction that reads one of these hidden dimensions, in the order of the graph; with `others` all."""
    found = []
    order = {node: k for k, node in enumerate(analysis.trace.graph.nodes)}
    for number, contraction in enumerate(analysis.tracker.contractions):
        reader = Reader(number, _path(contraction), contraction, _extents(analysis, contraction, wanted))
        if reader.names or others:
            found.append(reader)
    return sorted(found, key=lambda reader: order[reader.contraction.node])


def _path(contraction: Contraction) -> str:
    return ", ".join(sorted({owner(name) or name for name in contraction.parameters}))


def _extents(analysis: Analysis, contraction: Contraction, wanted: Collection[str]) -> tuple[tuple[int, Extent], ...]:
    value = analysis.tracker.values[contraction.data.get(given_to(contraction.node))]
    assert isinstance(value, Value)  # noqa: S101  # the rule put it there
    read = {analysis.names.get(atom) for axis in contraction.contracted for s in resolve(axis) for atom in s}

    def only(factor: Factor) -> Factor:
        return factor if factor[0] in read and factor[0] in wanted else (None, factor[1])

    return tuple(
        (dim, tuple(tuple(map(only, segment)) for segment in analysis.extent(value.axes[dim])))
        for dim in contraction.dims
    )


def products(
    reader: Reader, names: Sequence[str], arguments: Arguments, outputs: Tensor | None
) -> Iterator[tuple[Tensor, dict[str, Consumer]]]:
    """Each product of a reader: its input H, and the consumer as seen from each of the hidden dimensions.

    `outputs` are factors on the outputs, of a BatchNorm right after.
    """
    x = reader.activations(arguments)
    found = reader.forms(arguments)
    if not found:
        raise InputError(f"{reader.path} reads it by {reader.contraction.node.target}, which has no normal form")
    for product in found:
        H = product.arrange(x)
        if not H.numel():  # an expert that got no token
            H = H.new_zeros(1, *H.shape[1:])
        consumer = _scaled(reader, product, outputs)
        yield H, {name: _for_units(reader, name, product, consumer, x) for name in names}


def read(
    reader: Reader, names: Sequence[str], arguments: Arguments, outputs: Tensor | None, needs: Collection[str]
) -> dict[str, tuple[Reading, ...]]:
    """Statistics of one batch at a reader, for each of several hidden dimensions that it reads.

    The sums are the same for all of them and taken once; only what belongs to which unit differs.
    """
    found: dict[str, list[Reading]] = {name: [] for name in names}
    for H, consumers in products(reader, names, arguments, outputs):
        reading = measure(next(iter(consumers.values())), H, needs)
        for name, consumer in consumers.items():
            found[name].append(Reading(consumer, *reading.statistics.values()))
    return {name: tuple(rows) for name, rows in found.items()}


def _scaled(reader: Reader, product: Form, factor: Tensor | None) -> Consumer:
    consumer = product.consumer
    if factor is None or len(factor) != consumer.outputs:
        return consumer
    known = reader._known.get("scaled")
    if known is not None and known[0][0] is consumer.weight and torch.equal(known[0][1], factor):
        found: Consumer = known[1]
        return found
    found = replace(consumer, scale=factor)
    reader._known["scaled"] = ([consumer.weight, factor], found)
    return found


def _for_units(reader: Reader, name: str, product: Form, consumer: Consumer, x: Tensor) -> Consumer:
    """The consumer that knows which of its channels belong to which unit."""
    known = reader._known.get(f"units:{name}")
    if known is not None and known[0][0] is consumer.weight:
        found: Consumer = known[1]
        return found
    units = _channel_units(consumer, product.arrange(reader.labels(name, x)), reader, name, x)
    found = replace(consumer, units=units)
    reader._known[f"units:{name}"] = ([consumer.weight], found)
    return found


def _channel_units(consumer: Consumer, labels: Tensor, reader: Reader, name: str, x: Tensor) -> Tensor:
    """Unit of every channel of the consumer, from arranged labels."""
    if not labels.numel():  # no row to look at: the contracted dimension is the last
        ((_, extent),) = reader.extents
        return units_along(extent, name).to(x.device)
    first = labels[0] if labels.ndim > 1 else labels
    while first.ndim > 1:
        first = first[:, 0] if hasattr(consumer, "geometry") else first[0]
    return first.contiguous()
