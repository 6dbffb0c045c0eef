"""Refit one consumer: sums over all batches, a ridge fit, and the edits that store it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, fx, nn

from ispasp.compensate.solve import (
    RIDGE,
    Fit,
    Halves,
    Sums,
    held_out,
    no_sums,
    solve,
    squared_error,
    sums_of,
    target_size,
)
from ispasp.engine.batches import real_rows
from ispasp.engine.graphs import TracedGraph, TracedGraphs, caller
from ispasp.engine.runner import Cut, Edits, Runner
from ispasp.engine.sites import Positions, Site
from ispasp.graph.analyse import owner
from ispasp.graph.ops import (
    Form,
    along,
    bias_of,
    given_to,
    op_of,
    output_channels,
    scale,
    some_of,
    weight_operand,
    without_bias,
)
from ispasp.types import Consumer
from ispasp.types.consumer import patches
from ispasp.types.dimension import CHECK_DATA, Kept, check_finite

_ENTRIES = 2**25  # values that are unfolded at once
_ENOUGH = 10  # rows per column that make a steady fit
_FAR = 1.25**2  # held-out by in-sample squared error: more means below about six rows per column
_SMALL = 0.01  # squared: a layer that is 10 % off on new examples does not need advice
_FAINT = 1e-6  # an output that the BatchNorm all but switches off cannot correct a skip connection


# Where a consumer's new weight and shift are stored ------------------------------------------------------------------
@dataclass(frozen=True)
class Slot:
    """Names of the tensors that take the weight and the shift; `why_not` says why there is none.

    The shift goes into the layer's bias, else the mean of a BatchNorm after it, else a bias that the module gains.
    """

    weight: str = ""
    shift: str = ""
    into: Literal["bias", "norm", "new bias", ""] = ""
    why_not: str = ""


def slot(site: Site, graphs: TracedGraphs, model: nn.Module, tensors: Mapping[str, Tensor]) -> Slot:
    """Find the slot of a site, if it is the same for all kinds of batches."""
    found = {_slot(site, graph, model, tensors) for graph in graphs.every}
    return found.pop() if len(found) == 1 else Slot(why_not="not all kinds of batches use it alike")


def _slot(site: Site, graph: TracedGraph, model: nn.Module, tensors: Mapping[str, Tensor]) -> Slot:
    node = graph.contractions[site.number]
    given, operand, op = given_to(node), weight_operand(node, site.contraction.data), op_of(node)
    name = _own(operand.get(given) if operand else None, graph, tensors)
    if not name:
        return Slot(why_not="its weight is shared or computed, not a parameter of its own")
    if tensors[name].ndim != 2 and not (op is not None and op.channels == "conv"):
        return Slot(why_not=f"its weight has {tensors[name].ndim} axes, not the two of a matrix")
    bias, norm = bias_of(node, given), graph.tails[site.number].norm
    if bias is not None:
        shape = tuple(bias.meta["val"].shape) if isinstance(bias, fx.Node) else ()
        usual = shape[-1:] == (math.prod(shape),) == tuple(node.meta["val"].shape[-1:])
        if str(node.target) == "aten.addmm.default" and not usual:  # addmm takes all shapes that broadcast
            return Slot(why_not="its bias is not one number for each output")
        own = _own(bias, graph, tensors)
        return Slot(name, own, "bias") if own else Slot(name, why_not="its bias is shared, and stays")
    mean = _own(norm.args[3], graph, tensors) if norm is not None else ""
    if mean:
        return Slot(name, mean, "norm")
    nowhere = Slot(name, why_not="its module has no place for a bias")
    return Slot(name, f"{owner(name)}.bias", "new bias") if _can_hold(model, name, node) else nowhere


def _own(node: object, graph: TracedGraph, tensors: Mapping[str, Tensor]) -> str:
    """The tensor's name, if this is its only use under any name."""
    if not isinstance(node, fx.Node) or node.op != "placeholder" or len(node.users) != 1:
        return ""
    source = graph.trace.sources[node.name]
    if source.kind not in ("parameter", "buffer"):
        return ""
    mine = tensors[source.name]
    for other in graph.trace.graph.find_nodes(op="placeholder"):
        at = graph.trace.sources[other.name]
        if other is not node and at.kind == source.kind and tensors[at.name] is mine and other.users:
            return ""
    return source.name


def _can_hold(model: nn.Module, weight: str, node: fx.Node) -> bool:
    """Whether the module is a plain linear or convolution layer without a bias that runs its own forward."""
    module = model.get_submodule(owner(weight))
    by = caller(node, model)
    if by is not module and not isinstance(by, nn.MultiheadAttention):  # that one reads its layer's bias itself
        return False
    plain = isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d))
    own_code = type(module).forward.__module__.startswith("torch.")
    return plain and own_code and "bias" in module._parameters and module.bias is None


# The refit -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Refit:
    """The refit of one consumer: squared errors before and after, the squared size of the target, and edits.

    `held_out` is the squared error on one half of the examples of a fit to the other half, and the squared size there.
    `wanted` is the number of examples needed, if there are too few. `rows` counts the equations: one for every token,
    or position of a convolution. `gained` is the module that gains a bias.
    """

    before: float
    after: float
    size: float
    note: str = ""
    held_out: tuple[float, float] | None = None
    wanted: int = 0
    examples: int = 0
    rows: int = 0
    edits: Edits = field(default_factory=Edits)
    gained: str = ""

    @property
    def errors(self) -> tuple[float, float] | None:
        """Squared relative errors on the fitted and on the held-out examples; None unless both are known."""
        if not self.held_out or not self.held_out[1] > 0 or not self.size > 0:
            return None
        return self.after / self.size, self.held_out[0] / self.held_out[1]

    @property
    def steady(self) -> int:
        """Number of examples needed, if the held-out error is far above the other; else 0.

        A least-squares fit of p columns to n independent rows has 1 - p/n of the noise on these rows, and a fit to half
        of them 1 + 2p/n on the other half. The ratio gives n/p, whatever the noise; ten rows per column are enough.

        >>> Refit(1.0, 0.16, 1.0, held_out=(0.4356, 1.0), examples=100).steady
        365
        """
        if self.errors is None or self.errors[1] <= max(_SMALL, _FAR * self.errors[0]):
            return 0
        inside, outside = self.errors
        return math.ceil(self.examples * _ENOUGH * (outside - inside) / (outside + 2 * inside))


@dataclass(frozen=True, eq=False)
class Gathered:
    """Sums of the batches at one consumer, and the consumer they are solved for.

    With a `basis` Q (groups, K, N) the inputs X of the sums are Q^T X: few rows span few directions, and a fit changes
    the weight in these only.
    """

    sums: Halves
    examples: int
    form: Form
    bias: Tensor  # (groups, O)
    named: Callable[[str], Tensor]
    basis: Tensor | None = None

    def into_basis(self, W: Tensor) -> Tensor:
        """A weight (groups, O, K) for the inputs of the sums."""
        return W if self.basis is None else W.double() @ self.basis

    def __add__(self, other: Gathered) -> Gathered:
        return replace(other, sums=self.sums + other.sums, examples=self.examples + other.examples)


def gather(
    site: Site, runners: Iterable[Runner], cuts: Sequence[Cut], positions: Positions, *, dense: bool, first: int = 0
) -> Gathered:
    """Sum inputs (the kept units) and targets over all batches, the number of the first one being `first`.

    The target is the consumer's output with all units (`dense=False`), or its output in the dense twin plus the error
    of the skip connection that it is added to (`dense=True`).
    """
    examples, few, sums, pieces = 0, False, list[Halves](), list[Sequence[_Rows]]()
    for number, runner in enumerate(runners, first):
        arguments = runner.arguments(site.number)
        (form,) = site.forms(arguments)
        consumer, H = form.consumer, form.arrange(site.activations(arguments))
        at = positions.of(consumer, H, site.number, number)
        W, halves = _halves(site, runner, form, cuts, at, dense=dense)
        where = f"hidden dimension {', '.join(map(repr, sorted(site.names)))}, read by {site.path}, batch {number}"
        few = few or (number == first and positions.few(consumer, H, W[0, 0].numel()))
        if few:
            pieces.append([_matrices(consumer, W, *half) for half in halves])
            totals = [values.double().square().sum() for piece in pieces[-1] for values in piece]
        else:
            parts = Halves(*(_sums(consumer, W, *half) for half in halves))
            sums = [sums[0] + parts] if sums else [parts]
            totals = [parts.whole.x, parts.whole.tt, parts.whole.xx]
        for total in totals:
            check_finite(f"{where}: the sum of the activations", total, CHECK_DATA)
        examples += len(site.activations(arguments))
    given: Tensor | None = bias_of(site.contraction.node, arguments)
    bias = (consumer.weight.new_zeros(consumer.outputs) if given is None else given.detach()).double()
    bias = bias.reshape(len(consumer.grouped_weight()), -1)
    basis, halved = _few_directions(pieces) if pieces else (None, sums[0])
    return Gathered(halved, examples, form, bias, runner.named, basis)


_Rows = tuple[Tensor, Tensor]  # inputs (groups, K, N) and targets (groups, O, N) of one half of a batch


def _few_directions(pieces: Sequence[Sequence[_Rows]]) -> tuple[Tensor, Halves]:
    """A basis of what the inputs of all batches span, and sums of the inputs in it."""
    inputs, targets = (
        [torch.cat([half[k] for half in each], -1).double() for each in zip(*pieces, strict=True)] for k in (0, 1)
    )
    Q, R = torch.linalg.qr(torch.cat(inputs, -1))
    inside = torch.split(R, [X.shape[-1] for X in inputs], -1)
    return Q, Halves(*map(sums_of, inside, targets))


def refit(site: Site, data: Gathered, cuts: Sequence[Cut], where: Slot, *, ridge: float | str = "auto") -> Refit:
    """Fit the consumer's weight on the kept units to its target.

    `ridge="auto"` takes the best one on held-out examples, and no fit at all if that is better there.
    """
    given = None if isinstance(ridge, str) else float(ridge)
    s, b0 = data.sums.whole, data.bias
    whole = _narrow(data.form.consumer, cuts)[0].flatten(2).double()
    W0 = data.into_basis(whole)
    scale = W0.shape[-1] / max(1, whole.shape[-1])  # a ridge is relative to the mean over all columns
    tried = held_out(data.sums, W0, b0, intercept=bool(where.into), ridge=given, scale=scale)
    chosen = given if given is not None else tried.ridge if tried else RIDGE
    fit = solve(s, W0, b0, intercept=bool(where.into), ridge=chosen * scale)
    if data.basis is not None:
        fit = replace(fit, weight=whole + (fit.weight - W0) @ data.basis.mT)
    fit = _stored(fit, data, where)
    if given is None and tried and tried.after >= tried.before:
        fit = replace(fit, weight=whole, bias=b0, after=fit.before, used=False)
    unseen = None
    if tried:
        unseen = tried.after if fit.used else tried.before, tried.size
    rows, columns = int(s.n), whole.shape[-1]
    # ten rows per column, if there is less than one: rows of one image or text resemble each other
    wanted = math.ceil(data.examples * _ENOUGH * columns / rows) if 0 < rows < columns else 0
    note = {"new bias": "gained a bias", "": f"no shift: {where.why_not}"}.get(where.into, "")
    found = Refit(fit.before, fit.after, target_size(s, b0), note, unseen, wanted, data.examples, rows)
    if not fit.used:
        return replace(found, note="not compensated: no better fit")
    gained = owner(where.weight) if where.into == "new bias" else ""
    return replace(found, edits=_edits(site.number, data, fit, cuts, where), gained=gained)


def _shifted_mean(fit: Fit, data: Gathered, where: Slot) -> Tensor:
    """The mean of the BatchNorm that takes the shift."""
    mean = data.named(where.shift)
    return (mean.double() - (fit.bias - data.bias).flatten()).to(mean.dtype)


def _stored(fit: Fit, data: Gathered, where: Slot) -> Fit:
    """Round the fit to the network's dtype; half precision may lose the gain."""
    if not fit.used:
        return fit
    dtype = data.form.consumer.weight.dtype
    W, b = fit.weight.to(dtype).double(), fit.bias
    if where.into == "norm":
        taken = data.named(where.shift).double() - _shifted_mean(fit, data, where).double()
        b = data.bias + taken.reshape(b.shape)
    elif where.into:
        b = b.to(dtype).double()
    after = squared_error(data.sums.whole, data.into_basis(W), b)
    used = after < fit.before
    return replace(fit, weight=W, bias=b, after=after if used else fit.before, used=used)


def _narrow(consumer: Consumer, cuts: Sequence[Cut]) -> tuple[Tensor, Tensor]:
    """The grouped weight on the channels that stay, and these channels. Every group loses the same."""
    whole = consumer.grouped_weight()
    if not cuts:
        return whole, torch.arange(consumer.channels, device=consumer.weight.device)
    (only,) = cuts
    kept = torch.nonzero(only.stays).flatten().to(consumer.weight.device)
    return whole[:, :, kept[kept < whole.shape[2]]], kept


def _halves(
    site: Site, runner: Runner, form: Form, cuts: Sequence[Cut], at: Tensor | None, *, dense: bool
) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor | None]]]:
    """The weight on the kept channels, and (H, T, positions) of the first and of the second half of one batch.

    Every batch is halved, since any of them may be the last. So the chosen ridge depends a little on the batch size.
    """
    W, kept = _narrow(form.consumer, cuts)
    x = site.activations(runner.arguments(site.number))
    H = form.arrange(x)
    T = runner.value(runner.graph.contractions[site.number], dense=dense, cut=False)
    T = form.output(_with_skip(T, runner, site.number) if dense else T)
    if form.consumer.kernel:
        T = T if at is None else T.flatten(2)[..., at]
    else:
        each, H, T = math.prod(H.shape[1:-1]), H.reshape(-1, H.shape[-1]), T.reshape(-1, T.shape[-1])
        real = real_rows(x, runner.padding)
        if real is not None and real.numel() == len(H) and bool(real.any()):  # padding tokens do not count
            H, T = H[real.flatten()], T[real.flatten()]
        elif at is not None:
            rows = (torch.arange(0, len(H), each, device=at.device)[:, None] + at).flatten()
            H, T = H[rows], T[rows]
        at = None
    H = some_of(H, 1, kept.to(H.device))
    half = (len(H) + 1) // 2
    return W, [(H[rows], T[rows], at) for rows in (slice(half), slice(half, None))]


def _matrices(consumer: Consumer, W: Tensor, H: Tensor, T: Tensor, at: Tensor | None) -> _Rows:
    """Inputs (groups, K, N) and targets (groups, O, N). T has only the positions `at`."""
    groups, out, columns = W.flatten(2).shape
    targets = T.reshape(len(T), groups, out, math.prod(T.shape[2:])).permute(1, 2, 0, 3).flatten(2)  # as patches
    if not columns or not len(H):
        return targets.new_zeros(groups, columns, targets.shape[-1]), targets
    return patches(replace(consumer, weight=consumer.ungrouped(W)), H, at), targets


def _sums(consumer: Consumer, W: Tensor, H: Tensor, T: Tensor, at: Tensor | None) -> Sums:
    """Sums over some rows, unfolding a part of them at a time."""
    groups, out, columns = W.flatten(2).shape
    rows = max(1, _ENTRIES // max(1, columns * math.prod(T.shape[2:]) * groups))
    total = no_sums(groups, columns, out, H.device)
    for h, t in zip(torch.split(H, rows), torch.split(T, rows), strict=True):
        if len(h):
            total = total + sums_of(*_matrices(consumer, W, h, t, at))
    return total


def _with_skip(T: Tensor, runner: Runner, number: int) -> Tensor:
    """Add the error of the skip connection, divided by the BatchNorm's factor in between."""
    tail = runner.graph.tails[number]
    if tail.other is None:
        return T
    lost: Tensor = runner.value(tail.other, dense=True) - runner.value(tail.other)
    factor = scale(tail, runner.fixed)
    if factor is not None:
        channel = output_channels(runner.graph.contractions[number]) or 0
        inverse = torch.where(factor.abs() > _FAINT * factor.abs().max(), 1 / factor, 0.0)
        lost = lost * along(inverse.to(lost.dtype), channel, lost.ndim)
    return T + lost


def _edits(number: int, data: Gathered, fit: Fit, cuts: Sequence[Cut], where: Slot) -> Edits:
    consumer, dtype = data.form.consumer, data.form.consumer.weight.dtype
    whole = consumer.grouped_weight().clone()  # (g, O/g, C/g, *kernel)
    _, kept = _narrow(consumer, cuts)
    inner = kept[kept < whole.shape[2]]
    whole[:, :, inner] = fit.weight.to(dtype).reshape(whole[:, :, inner].shape)
    tensors = {where.weight: _restored(data.form, whole)}
    if where.into == "bias":
        tensors[where.shift] = fit.bias.to(dtype).reshape(data.named(where.shift).shape)
    elif where.into == "norm":
        tensors[where.shift] = _shifted_mean(fit, data, where)
    biases = {number: fit.bias.flatten().to(dtype)} if where.into == "new bias" else {}
    return Edits(tensors=tensors, biases=biases)


def _restored(form: Form, weight: Tensor) -> Tensor:
    assert form.restore is not None  # noqa: S101  # a slot was found
    return form.restore(form.consumer.ungrouped(weight)).contiguous()


# Without a refit -------------------------------------------------------------------------------------------------
def unfitted(site: Site, runner: Runner, factors: Mapping[str, Sequence[float]], kept: Kept, where: Slot) -> Refit:
    """The error of a consumer on one batch without a refit, before and after the method's own factors."""
    node, edits, note = runner.graph.contractions[site.number], Edits(), ""
    whole, cut = runner.value(node, cut=False), runner.value(node)
    linear = without_bias(node, whole, runner.arguments(site.number))
    before = after = _squared(whole - cut)
    if factors and where.weight:
        edits = Edits(tensors={where.weight: _rescaled(site, runner, factors, kept)})
        after = _squared(whole - runner.branch(runner.edits | edits).value(node))
    elif factors:
        note = f"not rescaled: {where.why_not}"
    return Refit(before, after, _squared(linear), note, edits=edits)


def _rescaled(site: Site, runner: Runner, factors: Mapping[str, Sequence[float]], kept: Kept) -> Tensor:
    """The weight in which each kept unit is multiplied by the factor that the method gave it."""
    arguments = runner.arguments(site.number)
    (form,) = site.forms(arguments)
    ((_, seen),) = site.products(list(factors), arguments, None)
    whole = form.consumer.grouped_weight()  # (g, O/g, C/g, *kernel)
    by_channel = torch.ones(form.consumer.channels, dtype=torch.float64, device=whole.device)
    for name, values in factors.items():
        unit_of = seen[name].unit_of()
        by_unit = torch.ones(int(unit_of.max()) + 1, dtype=torch.float64, device=unit_of.device)
        by_unit[list(kept[name])] = by_unit.new_tensor(values)
        by_channel *= torch.where(unit_of >= 0, by_unit[unit_of.clamp(min=0)], 1.0)
    return _restored(form, whole * by_channel.to(whole.dtype).reshape(len(whole), 1, -1, *(1,) * (whole.ndim - 3)))


def _squared(x: Tensor) -> float:
    return float(x.double().square().sum())
