"""Where hidden dimensions are read and made: consumer sites with the statistics taken there, and producers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ispasp.engine.batches import Limit, real_rows, tensors_of
from ispasp.engine.runner import Cut, Runner
from ispasp.errors import InputError, IspaspError
from ispasp.graph.analyse import Analysis, owner, paths_of
from ispasp.graph.atoms import atoms_of
from ispasp.graph.ops import Arguments, Form, along, forms, given_to, scale
from ispasp.graph.track import Contraction, Value
from ispasp.types import Consumer, ConvConsumer, Producer, Reading, Statistics
from ispasp.types.consumer import output_size
from ispasp.types.dimension import CHECK_DATA, Extent, Factor, Kept, check_finite, checked_tensor, kept_mask, names_in
from ispasp.types.statistics import STATISTICS, measurable

T = TypeVar("T")
Rows = tuple[Reading, ...]
_ROWS, _LEAST_ROWS = 200, 16_384  # rows of second moments: for every column, and at least
_WIDE, _FEW = 256, 0.25  # a layer is wide from so many columns on, and rows are few up to this part of them
_MOST = 0.7  # positions are left out if no more than this part of them is needed


@dataclass(frozen=True, eq=False)
class Site:
    """One contraction: its number in the analysis, its module path, and the axes of activations it sums over."""

    number: int
    path: str
    contraction: Contraction
    extents: tuple[tuple[int, Extent], ...]
    _cache: dict[str, tuple[Sequence[Any], Any]] = field(default_factory=dict)  # results that depend on weights only

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(name for _, extent in self.extents for name in names_in(extent))

    def cuts(self, kept: Kept) -> list[Cut]:
        """Positions of its input that hold kept units, axis by axis."""
        shrinking = ((dim, extent) for dim, extent in self.extents if names_in(extent) & set(kept))
        return [Cut(self.contraction.data, dim, kept_mask(extent, kept)) for dim, extent in shrinking]

    def activations(self, arguments: Arguments) -> Tensor:
        found: Tensor = self.contraction.data.get(arguments)
        return found

    def unpadded(self, runner: Runner) -> Arguments:
        """Its arguments with zeros for padding tokens, so that sums do not count them."""
        arguments = runner.arguments(self.number)
        x = self.activations(arguments)
        real = real_rows(x, runner.padding)
        if real is None:
            return arguments
        kept = real.reshape(*real.shape, *(1,) * (x.ndim - real.ndim))
        return self.contraction.data.put(arguments, x.masked_fill(~kept, 0))

    def forms(self, arguments: Arguments) -> Sequence[Form]:
        """Its products in linear form; cached by weight, except for mixtures of experts."""
        x = self.activations(arguments)
        weights = [each for each in tensors_of(arguments) if each is not x]
        make = partial(forms, self.contraction.node, arguments, self.contraction.data)
        found: Sequence[Form] = self._cached("forms", weights, make)
        if len(found) > 1:
            del self._cache["forms"]
        return found

    def _cached(self, key: str, given: Sequence[Any], make: Callable[[], T]) -> T:
        """Call `make`, unless it was called before for the same objects or tensors of the same values."""
        known = self._cache.get(key)
        if known is None or len(known[0]) != len(given) or not all(map(_same, known[0], given)):
            known = self._cache[key] = (given, make())
        found: T = known[1]
        return found

    def units_of(self, name: str, x: Tensor) -> Tensor:
        """The unit that each entry of the activations belongs to, -1 for none."""
        found = torch.full((1,) * x.ndim, -1, device="cpu")
        for dim, extent in self.extents:
            if name in names_in(extent):
                found = torch.maximum(found, along(units_along(extent, name), dim, x.ndim))
        return found.to(x.device).expand(x.shape)

    def products(
        self, names: Sequence[str], arguments: Arguments, outputs: Tensor | None
    ) -> Iterator[tuple[Tensor, dict[str, Consumer]]]:
        """Yield the input H of each product, and its consumer with the units of each hidden dimension.

        `outputs` are factors on the outputs, such as those of a BatchNorm right after.
        """
        x = self.activations(arguments)
        found = self.forms(arguments)
        if not found:
            raise InputError(f"{self.path} reads it by {self.contraction.node.target}, which has no linear form")
        for product in found:
            H = product.arrange(x)
            if not H.numel():  # an expert that got no token
                H = H.new_zeros(1, *H.shape[1:])
            consumer = product.consumer
            if outputs is not None and len(outputs) == consumer.outputs:
                scaled = partial(replace, consumer, scale=outputs)
                consumer = self._cached("scaled", [consumer.weight, outputs], scaled)
            yield H, {name: self._for_units(name, product, consumer, x) for name in names}

    def _for_units(self, name: str, product: Form, consumer: Consumer, x: Tensor) -> Consumer:
        def make() -> Consumer:
            units = product.arrange(self.units_of(name, x))
            if not units.numel():  # no row to look at: the contracted dimension is the last
                ((_, extent),) = self.extents
                return replace(consumer, units=units_along(extent, name).to(x.device))
            units = units[0] if units.ndim > 1 else units
            while units.ndim > 1:
                units = units[:, 0] if isinstance(consumer, ConvConsumer) else units[0]
            return replace(consumer, units=units.contiguous())

        return self._cached(f"units of {name}", [consumer], make)


def _same(a: Any, b: Any) -> bool:
    if a is b or not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device) and torch.equal(a, b)


def sites(analysis: Analysis, wanted: Collection[str], *, others: bool = False) -> list[Site]:
    """The contractions that read one of these hidden dimensions (with `others`: all), in graph order."""
    found = []
    order = {node: k for k, node in enumerate(analysis.trace.graph.nodes)}
    for number, contraction in enumerate(analysis.tracker.contractions):
        path, extents = ", ".join(paths_of(contraction)), _extents(analysis, contraction, wanted)
        site = Site(number, path, contraction, extents)
        if site.names or others:
            found.append(site)
    return sorted(found, key=lambda site: order[site.contraction.node])


def _extents(analysis: Analysis, contraction: Contraction, wanted: Collection[str]) -> tuple[tuple[int, Extent], ...]:
    value = analysis.tracker.values[contraction.data.get(given_to(contraction.node))]
    assert isinstance(value, Value)  # noqa: S101  # the rule put it there
    read = {analysis.names.get(atom) for axis in contraction.contracted for atom in atoms_of(axis)}

    def only(factor: Factor) -> Factor:
        return factor if factor[0] in read and factor[0] in wanted else (None, factor[1])

    axes = ((dim, analysis.extent(value.axes[dim])) for dim in contraction.dims)
    return tuple((dim, tuple(tuple(map(only, segment)) for segment in extent)) for dim, extent in axes)


def units_along(extent: Extent, name: str) -> Tensor:
    """Unit of each position of an axis, -1 outside: 0 0 1 1 for units of two channels. (full length,)"""
    parts = []
    for segment in extent:
        inside = any(n == name for n, _ in segment)
        index = torch.full((1,), 0 if inside else -1, device="cpu")
        for n, size in segment:
            step = torch.arange(size, device="cpu") if n == name else torch.zeros(size, dtype=torch.long, device="cpu")
            index = (index[:, None] + step[None, :]).flatten()
        parts.append(index)
    return torch.cat(parts)


# Statistics -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Positions:
    """The output positions that second moments are taken at: enough for a steady fit, where maps are large.

    `limit` is their number in each example, None for all; "auto" takes 200 rows for every column over all `examples`.
    """

    limit: Limit
    examples: int
    alone: bool = False  # no other rank has examples, and all batches are gathered at once

    def few(self, consumer: Consumer, H: Tensor, columns: int) -> bool:
        """Whether all examples together give far fewer rows than there are columns."""
        at = self.of(consumer, H, 0)
        each = math.prod(output_size(consumer, H)) if at is None else len(at)
        return self.alone and columns > _WIDE and self.examples * each < _FEW * columns

    def of(self, consumer: Consumer, H: Tensor, *seed: int) -> Tensor | None:
        """Some positions, drawn evenly; None for all. They are the same for all examples of a batch.

        >>> A, H = ConvConsumer(torch.ones(1, 1, 1, 1)), torch.ones(8, 1, 32, 32)
        >>> len(Positions("auto", 1024).of(A, H, 0)), Positions("auto", 8).of(A, H, 0)
        (16, None)
        """
        size, columns = math.prod(output_size(consumer, H)), consumer.grouped_weight()[0, 0].numel()
        enough = math.ceil(max(_ROWS * columns, _LEAST_ROWS) / self.examples)
        wanted = enough if self.limit == "auto" else self.limit
        if wanted is None or wanted > _MOST * size:
            return None
        draw = torch.Generator("cpu").manual_seed(sum(number << 24 * k for k, number in enumerate(seed)))
        # One draw from each of `wanted` equal stretches.
        inside = torch.rand(int(wanted), generator=draw, dtype=torch.float64, device="cpu")
        at: Tensor = (torch.arange(int(wanted), device="cpu") + inside) * (size / wanted)
        return at.long().clamp(max=size - 1).to(H.device)


def read(
    site: Site,
    names: Sequence[str],
    runner: Runner,
    needs: Collection[str],
    batch: int,
    outputs: Tensor | None = None,
    positions: Positions | None = None,
) -> dict[str, Rows]:
    """Take statistics of one batch in front of a site, for several of the hidden dimensions it reads.

    The sums are the same for all of them and taken once. `outputs` are more factors on the outputs.
    """
    factor = scale(runner.graph.tails[site.number], runner.fixed)
    if outputs is not None:
        factor = outputs if factor is None else factor * outputs
    found: dict[str, list[Reading]] = {name: [] for name in names}
    try:
        for H, consumers in site.products(names, site.unpadded(runner), factor):
            one = next(iter(consumers.values()))
            reading = measure(one, H, needs, positions.of(one, H, site.number, batch) if positions else None)
            for name, consumer in consumers.items():
                found[name].append(Reading(consumer, *reading.statistics.values()))
    except IspaspError as error:
        where = ", ".join(map(repr, names))
        raise type(error)(f"hidden dimension {where}, read by {site.path}, batch {batch}: {error}") from error
    return {name: tuple(rows) for name, rows in found.items()}


def measure(consumer: Consumer, H: Tensor, needs: Collection[str] = ("moment",), at: Tensor | None = None) -> Reading:
    """Take statistics of a batch: sums in float64, whatever the dtype of H.

    H is the input of the consumer: (..., channels) for a linear one, (batch, channels, *size) for a convolution.
    `needs` names the statistics: "moment" sum of H over the data (positions too where the consumer treats them
    alike), "magnitude" sum of |H|, "gram" sum of X X^T over the patches X that meet the weight, and those added with
    `register_statistic`. `at` are the output positions to look at, for statistics that take some of them.

    >>> from ispasp.types import LinearConsumer
    >>> r = measure(LinearConsumer(torch.ones(1, 2)), torch.tensor([[1.0, -2.0], [3.0, -4.0]]), ["moment", "gram"])
    >>> r.moment.maps[()], r.gram.total
    (tensor([ 4., -6.], dtype=torch.float64),
     tensor([[[ 10., -14.], [-14.,  20.]]], dtype=torch.float64))
    """
    _check(consumer, H, needs)
    H = H.detach() if H.is_floating_point() else H.double()  # autograd would keep all activations; |-128| is no int8
    H = H if H.ndim > 1 else H[None]  # one example
    wanted = [kind for name, kind in STATISTICS.items() if name in needs]
    taken = [kind.measure(consumer, H, *([at] if kind.samples else [])) for kind in wanted]
    for total in (total for statistic in taken for total in statistic.tensors().values()):
        check_finite("the sum of the activations", total, CHECK_DATA)  # one NaN or Inf in the data shows in the sum
    return Reading(consumer, *taken)


def _check(consumer: Consumer, H: Tensor, needs: Collection[str]) -> None:
    if not isinstance(consumer, Consumer):
        raise InputError(f"the consumer is a {type(consumer).__name__}: pass a LinearConsumer or a ConvConsumer")
    checked_tensor("H", H)
    if isinstance(needs, str) or not isinstance(needs, Collection):
        raise InputError(f"needs={needs!r}: pass a list of statistics, such as ['moment']")
    unknown = set(needs) - set(measurable())
    if unknown:
        raise InputError(f"unknown statistic {sorted(unknown)}: choose from {measurable()}")
    conv, shape = isinstance(consumer, ConvConsumer), tuple(H.shape)
    axes = consumer.weight.ndim if conv else max(H.ndim, 1)
    if H.ndim != axes or H.shape[1 if conv else -1] != consumer.channels:
        expected = f"(batch, {consumer.channels}, *size)" if conv else f"(..., {consumer.channels})"
        raise InputError(f"activations of shape {shape} do not fit a consumer of {expected}: pass the layer's input")
    if H.numel() == 0:
        raise InputError(f"activations of shape {shape} hold no data: pass at least one example")


class Tally:
    """Sums of readings under keys. With `parts` > 0, that many mini-batches are also summed apart.

    Batch k goes to part k mod `parts`, so memory does not grow with the number of batches. Ranks count their batches
    round robin, as a distributed sampler deals them out: batch k of rank r of m is number k m + r.
    """

    def __init__(self, parts: int = 0, rank: int = 0, ranks: int = 1) -> None:
        self._parts = parts
        self._rank, self._ranks = rank, ranks
        self._sums: dict[tuple[int | None, Hashable], Rows] = {}

    def add(self, key: Hashable, rows: Rows, batch: int) -> None:
        parts = [(batch * self._ranks + self._rank) % self._parts] if self._parts else []
        for at in ((part, key) for part in (None, *parts)):
            known = self._sums.get(at)
            self._sums[at] = rows if known is None else tuple(a + b for a, b in zip(known, rows, strict=True))

    def statistics(self, units: int, keys: Sequence[Hashable]) -> Statistics:
        """The sums under these keys. Parts that got no batch of this rank hold no data."""
        empty = {key: tuple(Reading(row.consumer) for row in self._sums[None, key]) for key in keys}

        def rows(part: int | None) -> Rows:
            return tuple(reading for key in keys for reading in self._sums.get((part, key), empty[key]))

        return Statistics(units, rows(None), parts=tuple(Statistics(units, rows(part)) for part in range(self._parts)))


# Producers ------------------------------------------------------------------------------------------------------
def producers(analysis: Analysis, name: str, runner: Runner) -> tuple[Producer, ...]:
    """The layers or embeddings that make a hidden dimension: one row of weights per channel, as a runner has them."""
    found = []
    for number, contraction in enumerate(analysis.tracker.contractions):
        if any(name in names_in(analysis.extent(axis)) for axis in contraction.made):
            norm = runner.graph.tails[number].norm
            gamma = None if norm is None else runner.fixed.get(norm.args[1])  # type: ignore[arg-type]
            found += list(_layers(analysis, contraction, name, runner, gamma))[:1]
    if found:
        return tuple(found)
    (paths,) = (item.producers for item in analysis.found if item.name == name)
    in_products = {parameter for contraction in analysis.tracker.contractions for parameter in contraction.parameters}
    for parameter, value in analysis.tensors.items():
        if parameter not in in_products and (owner(parameter) or parameter) in paths:
            for dim, units in _made_along(analysis, value, name):
                rows = runner.named(parameter).detach().movedim(dim, 0).flatten(1)
                found.append(Producer(rows, units.to(rows.device)))
    return tuple(found)


def _made_along(analysis: Analysis, value: Value, name: str) -> Iterator[tuple[int, Tensor]]:
    """The axes of a matrix that hold a hidden dimension, and the unit of each of their positions."""
    for dim, axis in enumerate(value.axes if len(value.axes) > 1 else ()):
        extent = analysis.extent(axis)
        if name in names_in(extent):
            yield dim, units_along(extent, name)


def _layers(
    analysis: Analysis, contraction: Contraction, name: str, runner: Runner, gamma: Tensor | None
) -> Iterator[Producer]:
    """The layers of a contraction; `gamma` is the weight of a BatchNorm right after it."""
    for node in contraction.node.all_input_nodes:
        value = analysis.tracker.values.get(node)
        if isinstance(value, Value) and value.parameters == contraction.parameters:
            for dim, units in _made_along(analysis, value, name):
                weight = runner.fixed[node] if node in runner.fixed else runner.value(node)  # it may be normalised
                rows = weight.detach().movedim(dim, 0).flatten(1)
                fits = gamma is not None and len(gamma) == len(rows)
                yield Producer(rows, units.to(rows.device), gamma if fits else None)
