"""How consumers couple units: everything i-SpaSP needs of weights and first moments.

The importance of channel i is the sum over data and positions of (A^T A (H - H_S))_i. A is linear, so with M the
data-sum of H this is <P_i, sum of Q_j over channels j outside S>, where P_i = A(ones on channel i) and
Q_j = A(M on channel j).

Neither is ever laid out over the output map. P_i takes only a few different values there: it depends on the output
position merely through the taps that fall inside the input (nine classes for a padded 3 x 3 kernel: corners, edges,
interior). So output positions are summed class by class, which leaves vectors of outputs x classes entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.types import Consumer, ConvConsumer, Moment, Statistics
from ispasp.types.checks import check_sum
from ispasp.types.geometry import Geometry

_IN, _TAP, _CLASS = "xyz", "uvw", "abd"


@dataclass(frozen=True, eq=False)
class Coupling:
    """One consumer at one input size: P, Q (groups, channels / groups, K), channel weights and units.

    K = outputs / groups x classes of output positions. For a linear consumer P = Q = A^T and the weights are h.
    """

    P: Tensor
    Q: Tensor
    weights: Tensor  # (channels,): factor of each channel's Q
    unit_of: Tensor  # (channels,)

    def importance(self, removed: Tensor, *, magnitude: bool = False) -> Tensor:
        """y_i = <P_i, sum of Q_j over removed units j>, summed over the channels of a unit. (units,) -> (units,)

        `removed` is 1.0 for units outside S, 0.0 for those in S. `magnitude` adds up |y_i| of a unit's channels, which
        do not cancel each other.

        >>> A, h = torch.tensor([[1.0, 1.0], [0.0, 2.0]]).double(), torch.tensor([3.0, 1.0]).double()
        >>> c = Coupling(A.T[None], A.T[None], weights=h, unit_of=torch.arange(2))
        >>> c.importance(torch.ones(2).double()), c.importance(torch.tensor([1.0, 0.0]).double())   # A^T A (h - h|_S)
        (tensor([4., 8.], dtype=torch.float64), tensor([3., 3.], dtype=torch.float64))
        """
        mine = self.unit_of >= 0
        r = torch.where(mine, removed[self.unit_of.clamp(min=0)], 0.0) * self.weights  # (channels,)
        g, c, _ = self.P.shape
        v = torch.bmm(r.reshape(g, 1, c), self.Q)  # (g, 1, K)
        y = torch.bmm(self.P, v.mT).reshape(-1)  # (channels,)
        y = y.abs() if magnitude else y
        return torch.zeros_like(removed).index_add(0, self.unit_of[mine], y[mine])


def couplings(statistics: Statistics) -> list[Coupling]:
    """One coupling for every consumer and every input size it was called with.

    >>> from ispasp.calibrate import measure
    >>> from ispasp.types.geometry import Geometry
    >>> A = ConvConsumer(torch.ones(2, 3, 3, 3), geometry=Geometry(padding=(1, 1)))
    >>> (c,) = couplings(Statistics(3, (measure(A, torch.ones(1, 3, 8, 8)),)))
    >>> c.P.shape   # nine classes of positions for each of two outputs
    torch.Size([1, 3, 18])
    """
    return [
        _coupling(reading.consumer, total)
        for number, reading in enumerate(statistics.readings)
        for total in checked(reading.moment, reading.consumer, number).maps.values()
    ]


def activation(statistics: Statistics, *, magnitude: bool = False) -> Tensor:
    """h = mu(H): summed activation of every unit, over data, positions, channels and consumers. (units,)

    `magnitude` adds up |h| of a unit's channels, which do not cancel each other.

    >>> from ispasp.calibrate import measure
    >>> from ispasp.types import LinearConsumer
    >>> A = LinearConsumer(torch.ones(1, 4), units=torch.tensor([0, 0, 1, 1]))
    >>> activation(Statistics(2, (measure(A, torch.tensor([[1.0, 2.0, 3.0, 4.0]])),)))
    tensor([3., 7.], dtype=torch.float64)
    """
    h = torch.zeros(statistics.units, dtype=torch.float64, device=statistics.readings[0].consumer.weight.device)
    for number, reading in enumerate(statistics.readings):
        unit_of = reading.consumer.unit_of()
        for total in checked(reading.moment, reading.consumer, number).maps.values():
            per_channel = total.double().flatten(1).sum(1) if total.ndim > 1 else total.double()
            per_channel = per_channel.abs() if magnitude else per_channel
            h = h.index_add(0, unit_of[unit_of >= 0], per_channel[unit_of >= 0])
    return h


def checked(moment: Moment | None, consumer: Consumer, number: int) -> Moment:
    """The moment if it is there, fits the consumer and is finite; `number` names the consumer in errors.

    >>> from ispasp.types import LinearConsumer
    >>> checked(Moment({(): torch.ones(3)}, examples=2), LinearConsumer(torch.eye(2)), number=0)
    Traceback (most recent call last):
    ...
    ispasp.errors.InputError: the first moment of consumer 0 has shape (3,), its consumer needs (2,): ...
    """
    if moment is None:
        raise InputError(f"consumer {number} has no first moments: take them with measure(consumer, H, ['moment'])")
    if not moment.maps:
        raise InputError(f"the first moment of consumer {number} holds no data: calibrate on at least one example")
    axes = len(consumer.kernel) if isinstance(consumer, ConvConsumer) else 0
    for size, total in moment.maps.items():
        if len(size) != axes:
            raise InputError(
                f"the first moment of consumer {number} is kept for maps of size {size}, the consumer reads maps with "
                f"{axes} axes: take it with measure(consumer, H)"
            )
        check_sum(f"the first moment of consumer {number}", total, moment.examples, (consumer.channels, *size))
    return moment


def _coupling(consumer: Consumer, total: Tensor) -> Coupling:
    total, scale = total.double(), consumer.scale
    if not isinstance(consumer, ConvConsumer):
        W = consumer.weight.double()
        A = W if scale is None else W * scale.double()[:, None]
        return Coupling(A.T[None], A.T[None], total, consumer.unit_of())  # P_i = A_i and Q_j = A_j h_j
    W = consumer.grouped_weight().double()  # (g, O/g, C/g, *kernel)
    g = W.shape[0]
    if scale is not None:
        W = W * scale.double().reshape(g, -1, *(1,) * (W.ndim - 2))
    n = W.ndim - 3
    inside, folds = zip(*(_classes(consumer.geometry, k, total, W) for k in range(n)), strict=True)
    taps, classes = _TAP[:n], _CLASS[:n]
    M = _einsum(f"gc{_IN[:n]}", folds, "{tap}{cls}{pos}", f"gc{taps}{classes}", total.reshape(g, -1, *total.shape[1:]))
    P = _einsum(f"goc{taps}", inside, "{tap}{cls}", f"gco{classes}", W)
    Q = torch.einsum(f"goc{taps},gc{taps}{classes}->gco{classes}", W, M)
    return Coupling(P.flatten(2), Q.flatten(2), total.new_ones(total.shape[0]), consumer.unit_of())


def _einsum(first: str, others: tuple[Tensor, ...], pattern: str, out: str, value: Tensor) -> Tensor:
    names = [pattern.format(tap=_TAP[k], cls=_CLASS[k], pos=_IN[k]) for k in range(len(others))]
    return torch.einsum(f"{','.join([first, *names])}->{out}", value, *others)


def _classes(geometry: Geometry, axis: int, total: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
    """Classes of output positions along one axis.

    Returns which taps lie inside the input for each class (kernel, classes), and how often tap u of class a reads
    input position x (kernel, classes, size).
    """
    size, kernel = total.shape[1 + axis], W.shape[3 + axis]
    source = geometry.sources(axis, size, kernel)  # (kernel, out)
    inside, class_of = torch.unique(source >= 0, dim=1, return_inverse=True)
    u, r = torch.nonzero(source >= 0, as_tuple=True)
    fold = torch.zeros(kernel, inside.shape[1], size, dtype=torch.float64, device=source.device)
    fold.index_put_((u, class_of[r], source[u, r]), fold.new_ones(len(u)), accumulate=True)
    return inside.double().to(total.device), fold.to(total.device)
