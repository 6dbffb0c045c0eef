"""OBS by the Fisher information: an error counts by what it does to the model's predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ispasp.select.base import Found, register
from ispasp.select.evidence import Evidence, required
from ispasp.select.obs import OBS
from ispasp.types import Fisher, Reading


@register
@dataclass(frozen=True)
class FisherOBS(OBS):
    """`OBS`, where the squared error of each output counts by the Fisher information of the model's predictions.

    Singh, Alistarh (2020), WoodFisher, for the Fisher information in optimal brain surgeon; Martens, Grosse (2015),
    K-FAC, for its factors, inputs and gradients of a layer, of which we take the Gram matrix of the inputs and the
    diagonal of the gradients. A step removes the unit with the least increase of

        sum over outputs o of f_o ||((W - W') X)_o||^2,   f_o = mean over the data of (dL/dy_o)^2,

    y the consumer's outputs and L = -log p(c) with c drawn from the model's own prediction p. To second order this is
    the divergence of the predictions, if outputs and positions are independent. The least squares of an output do not
    depend on f_o: W' is that of `OBS`, and so is compensation. Only the choice of units changes.

    An output of the model without classes is taken for the mean of a normal distribution. Where f is zero everywhere,
    all outputs count as in `OBS`. f is taken in the dense network, once for all layers.

    Needs Gram matrices, and one pass forward and back over the data. Costs what `OBS` does; `ridge` and `swaps` are its
    options.

    >>> import torch
    >>> from ispasp.select import LinearConsumer, Statistics, measure
    >>> A = LinearConsumer(torch.eye(2))                        # unit 0 is larger, but only output 1 matters
    >>> reading = measure(A, torch.tensor([[3.0, 1.0], [3.0, -1.0]]), ["gram"])
    >>> felt = Reading(A, *reading.statistics.values(), Fisher(torch.tensor([0.01, 1.0]), examples=2))
    >>> OBS().select(Statistics(2, (felt,)), 1).kept, FisherOBS().select(Statistics(2, (felt,)), 1).kept
    ((0,), (1,))
    """

    name = "obs-fisher"
    needs = ("gram", "fisher")

    def search(self, evidence: Evidence, widths: Sequence[int]) -> list[Found]:
        """The search of `OBS` for consumers whose outputs are scaled by the roots of f."""
        statistics = evidence.statistics
        f = [
            required(reading, Fisher, number, (reading.consumer.outputs,)).total.double()
            for number, reading in enumerate(statistics.readings)
        ]
        largest = max(float(each.max()) for each in f)
        if largest > 0:
            pairs = zip(statistics.readings, f, strict=True)
            readings = tuple(_weighed(reading, each / largest) for reading, each in pairs)
            evidence = Evidence(replace(statistics, readings=readings))
        return super().search(evidence, widths)


def _weighed(reading: Reading, f: Tensor) -> Reading:
    """Gradients are those before a BatchNorm, so they replace its factors; an output of factor 0 is gone."""
    scale = f.sqrt() if reading.consumer.scale is None else f.sqrt() * (reading.consumer.scale != 0)
    return Reading(replace(reading.consumer, scale=scale), *reading.statistics.values())
