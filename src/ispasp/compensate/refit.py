"""Compensate one consumer: gather sums over all batches, solve, and put the new weight among the edits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ispasp.calibrate.circuit import Edits
from ispasp.calibrate.passage import Passage
from ispasp.calibrate.readers import Reader
from ispasp.compensate.slots import Slot
from ispasp.compensate.solve import RIDGE, Fit, held_out, solve, squared_error
from ispasp.compensate.sums import Halves, Sums, no_sums, sums_of
from ispasp.errors import InputError
from ispasp.graph.ops import Arguments, Form, along, bias_of, output_channels
from ispasp.graph.tails import scale
from ispasp.types import Consumer, ConvConsumer
from ispasp.types.patches import patches

_ENTRIES = 2**25  # of the patches that are laid out at once
_ENOUGH = 10  # rows for every column
_FAR = 1.25**2  # times the squared error on its own examples: fewer than about six rows for every column
_SMALL = 0.01  # squared: a layer that is 10 % off on new examples does not need advice
_ROUNDING = 1e-12  # of a difference of sums
_FAINT = 1e-6  # an output that the BatchNorm all but switches off cannot make good for a skip connection


@dataclass(frozen=True)
class Refit:
    """What happened at one consumer: squared errors before and after compensation, what they relate to, a remark.

    `held_out` is the squared error, on one half of the examples, of a fit to the other half, and what it relates to.
    `wanted` is the number of examples that would do, where the ones given are too few for the fit. `rows` is how many
    equations the examples make up: one for every token, or for every position of a convolution.
    """

    before: float
    after: float
    size: float
    note: str = ""
    held_out: tuple[float, float] | None = None
    wanted: int = 0
    examples: int = 0
    rows: int = 0

    @property
    def errors(self) -> tuple[float, float] | None:
        """Squared relative errors on the examples of the fit and on held-out ones, where both are known."""
        if not self.held_out or not self.held_out[1] > 0 or not self.size > 0:
            return None
        return self.after / self.size, self.held_out[0] / self.held_out[1]

    @property
    def steady(self) -> int:
        """How many examples would do, where the error on held-out ones is far above that on the others; else 0.

        A least-squares fit of p columns to n independent rows has 1 - p/n of the noise on these rows, and a fit to half
        of them 1 + 2p/n on the other half. The ratio of both tells n/p, whatever the noise; rows that resemble each
        other count as fewer. Ten rows for every column would do.

        >>> Refit(1.0, 0.16, 1.0, held_out=(0.4356, 1.0), examples=100).steady
        365
        >>> Refit(1.0, 0.16, 1.0, held_out=(0.17, 1.0), examples=100).steady
        0
        """
        if self.errors is None or self.errors[1] <= max(_SMALL, _FAR * self.errors[0]):
            return 0
        inside, outside = self.errors
        return math.ceil(self.examples * _ENOUGH * (outside - inside) / (outside + 2 * inside))


@dataclass(frozen=True, eq=False)
class Gathered:
    """Sums of the batches at one consumer, with what is needed of the consumer itself to solve for it."""

    sums: Halves
    examples: int
    form: Form
    bias: Tensor  # (groups, O)
    named: Callable[[str], Tensor]

    def __add__(self, other: Gathered) -> Gathered:
        """Merge two parts of the data."""
        return replace(other, sums=self.sums + other.sums, examples=self.examples + other.examples)


def gather(reader: Reader, passages: Iterable[Passage], edits: Edits, *, dense: bool, first: int = 0) -> Gathered:
    """Sums of inputs (the kept units) and targets over all batches, the number of the first one being `first`.

    The target is what the consumer gives with all units (`dense=False`), or what it gives in the dense twin plus what
    the skip connection it is added to lacks (`dense=True`).
    """
    found: Gathered | None = None
    for number, passage in enumerate(passages, first):
        arguments = passage.arguments(reader.number)
        (form,) = reader.forms(arguments)
        sums = _gather(reader, passage, form, arguments, edits, dense=dense)
        _check(sums, reader, number)
        examples = len(reader.activations(arguments))
        part = Gathered(sums, examples, form, _bias(arguments, reader, form.consumer), passage.named)
        found = part if found is None else found + part
    assert found is not None  # noqa: S101  # there is at least one batch
    return found


def _check(halves: Halves, reader: Reader, batch: int) -> None:
    # One NaN or Inf in inputs or targets shows in these.
    sums = halves.whole
    if not all(bool(torch.isfinite(total).all()) for total in (sums.x, sums.tt, sums.xx)):
        names = ", ".join(map(repr, sorted(reader.names)))
        raise InputError(
            f"hidden dimension {names}, read by {reader.path}, batch {batch}: activations hold NaN or Inf: "
            "check the calibration data and the layers before, or run them in float32"
        )


def refit(reader: Reader, data: Gathered, edits: Edits, where: Slot, *, ridge: float | None = None) -> Refit:
    """Fit the consumer's weight on the kept units to its target, and edit the network accordingly.

    Without a `ridge` the one is taken that does best on held-out examples, and a fit that is worse there than none is
    left alone.
    """
    s, b0 = data.sums.whole, data.bias
    W0 = _matrix(_narrow(data.form.consumer, _kept(reader, edits, data.form.consumer)))
    tried = held_out(data.sums, W0, b0, intercept=bool(where.into), ridge=ridge)
    chosen = ridge if ridge is not None else tried.ridge if tried else RIDGE
    fit = _stored(solve(s, W0, b0, intercept=bool(where.into), ridge=chosen), data, where)
    if ridge is None and tried and tried.after >= tried.before:
        fit = replace(fit, weight=W0.double(), bias=b0, after=fit.before, used=False)
    if fit.used:
        _write(reader, data, fit, where, edits)
    unseen = None
    if tried:
        error = tried.after if fit.used else tried.before
        unseen = error, sum(_size(half, b0) for half in tried.examined)
    wanted = _wanted(data, W0.shape[-1])
    return Refit(fit.before, fit.after, _size(s, b0), _note(fit, where), unseen, wanted, data.examples, int(s.n))


def _size(s: Sums, b0: Tensor) -> float:
    """Squared norm of the targets without the bias, zero where they are nothing but a bias."""
    size = float((s.tt - 2 * b0 * s.t + s.n * b0.square()).sum())
    return size if size > _ROUNDING * float(s.tt.sum()) else 0.0


def _wanted(data: Gathered, columns: int) -> int:
    """How many examples would give ten rows for every column of the fit, where there are fewer than one.

    Rows of one image or text resemble each other, so that two for each column are not enough.
    """
    rows = float(data.sums.whole.n)
    return math.ceil(data.examples * _ENOUGH * columns / rows) if 0 < rows < columns else 0


def _stored(fit: Fit, data: Gathered, where: Slot) -> Fit:
    """The fit as the network can hold it: half precision may lose by rounding what was won."""
    if not fit.used:
        return fit
    dtype = data.form.consumer.weight.dtype
    W, b = fit.weight.to(dtype).double(), fit.bias
    if where.into == "norm":
        mean = data.named(where.shift)
        taken = mean.double() - (mean.double() - (b - data.bias).flatten()).to(mean.dtype).double()
        b = data.bias + taken.reshape(b.shape)
    elif where.into:
        b = b.to(dtype).double()
    after = squared_error(data.sums.whole, W, b)
    return replace(fit, weight=W, bias=b, after=after if (used := after < fit.before) else fit.before, used=used)


def _note(fit: Fit, where: Slot) -> str:
    if not fit.used:
        return "not compensated: no better fit"
    return {"new bias": "gained a bias", "": f"no shift: {where.why_not}"}.get(where.into, "")


def _kept(reader: Reader, edits: Edits, consumer: Consumer) -> Tensor:
    """Channels of the consumer that stay."""
    if reader.number not in edits.cuts:
        return torch.arange(consumer.channels, device="cpu")
    (only,) = edits.cuts[reader.number]
    return torch.nonzero(only.stays).flatten()


def _narrow(consumer: Consumer, kept: Tensor) -> Consumer:
    """The consumer of the kept channels only."""
    kept = kept.to(consumer.weight.device)
    if not isinstance(consumer, ConvConsumer):
        return replace(consumer, weight=consumer.weight[:, kept])
    if consumer.geometry.transposed:
        return replace(consumer, weight=consumer.weight[kept])
    inner = kept[kept < consumer.weight.shape[1]]  # every group loses the same
    return replace(consumer, weight=consumer.weight[:, inner])


def _matrix(consumer: Consumer) -> Tensor:
    """Its weight as (groups, O, K)."""
    if isinstance(consumer, ConvConsumer):
        return consumer.grouped_weight().flatten(2)
    return consumer.weight[None]


def _bias(arguments: Arguments, reader: Reader, consumer: Consumer) -> Tensor:
    groups = consumer.geometry.groups if isinstance(consumer, ConvConsumer) else 1
    given: Tensor | None = bias_of(reader.contraction.node, arguments)
    if given is None:
        given = consumer.weight.new_zeros(consumer.outputs)
    return given.detach().double().reshape(groups, -1)


def _gather(reader: Reader, passage: Passage, form: Form, arguments: Arguments, edits: Edits, *, dense: bool) -> Halves:
    """Sums of the first and of the second half of one batch.

    Every batch is halved, since batches come one after another and any of them may be the last. Which examples share a
    half, and so the ridge that is chosen by them, depends a little on how the data are split into batches.
    """
    node = passage.circuit.contractions[reader.number]
    kept = _kept(reader, edits, form.consumer)
    small = _narrow(form.consumer, kept)
    H = form.arrange(reader.activations(arguments))
    T = passage.value(node, dense=dense, cut=False)
    T = form.output(_with_skip(T, passage, reader.number) if dense else T)
    if not isinstance(small, ConvConsumer):
        H, T = H.reshape(-1, H.shape[-1]), T.reshape(-1, T.shape[-1])
    H = H.index_select(1, kept.to(H.device))
    half = (len(H) + 1) // 2
    return Halves(_sums(small, H[:half], T[:half]), _sums(small, H[half:], T[half:]))


def _sums(small: Consumer, H: Tensor, T: Tensor) -> Sums:
    """Sums of some rows, a part of them laid out at a time."""
    groups, out, columns = _matrix(small).shape
    rows = max(1, _ENTRIES // max(1, columns * math.prod(T.shape[2:]) * groups))
    total = no_sums(groups, columns, out, H.device)
    for h, t in zip(torch.split(H, rows), torch.split(T, rows), strict=True):
        if len(h):
            total = total + sums_of(patches(small, h), _target(t, small))
    return total


def _target(t: Tensor, consumer: Consumer) -> Tensor:
    """Outputs as (groups, O, N), N in the order of patches."""
    if not isinstance(consumer, ConvConsumer):
        return t.T[None]
    g = consumer.geometry.groups
    return t.reshape(t.shape[0], g, t.shape[1] // g, -1).permute(1, 2, 0, 3).flatten(2)


def _with_skip(T: Tensor, passage: Passage, number: int) -> Tensor:
    """Add what the skip connection has lost, as seen through the BatchNorm in between."""
    tail = passage.circuit.tails[number]
    if tail.other is None:
        return T
    lost: Tensor = passage.value(tail.other, dense=True) - passage.value(tail.other)
    factor = scale(tail, passage.fixed)
    if factor is not None:
        channel = output_channels(passage.circuit.contractions[number]) or 0
        inverse = torch.where(factor.abs() > _FAINT * factor.abs().max(), 1 / factor, 0.0)
        lost = lost * along(inverse.to(lost.dtype), channel, lost.ndim)
    return T + lost


def _write(reader: Reader, data: Gathered, fit: Fit, where: Slot, edits: Edits) -> None:
    form, consumer = data.form, data.form.consumer
    kept = _kept(reader, edits, consumer)
    assert form.restore is not None  # noqa: S101  # a slot was found
    kept = kept.to(consumer.weight.device)
    dtype = consumer.weight.dtype
    if isinstance(consumer, ConvConsumer):
        whole = consumer.grouped_weight().clone()  # (g, O/g, C/g, *kernel)
        inner = kept[kept < whole.shape[2]]
        whole[:, :, inner] = fit.weight.to(dtype).reshape(*whole.shape[:2], len(inner), *whole.shape[3:])
        whole = whole.transpose(1, 2) if consumer.geometry.transposed else whole
        weight = whole.reshape(consumer.weight.shape)
    else:
        weight = consumer.weight.clone()
        weight[:, kept] = fit.weight[0].to(dtype)
    edits.tensors[where.weight] = form.restore(weight).contiguous()
    shift = (fit.bias - data.bias).flatten()
    if where.into == "bias":
        edits.tensors[where.shift] = fit.bias.to(dtype).reshape(data.named(where.shift).shape)
    elif where.into == "norm":
        mean = data.named(where.shift)
        edits.tensors[where.shift] = (mean.double() - shift).to(mean.dtype)
    elif where.into == "new bias":
        edits.biases[reader.number] = fit.bias.flatten().to(dtype)
