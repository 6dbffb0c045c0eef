"""Bad input raises an error that names the values and says what to do."""

from __future__ import annotations

import pytest
import torch

import ispasp
from ispasp import InputError, ISpaSP, IspaspError, i_spasp, select_units
from ispasp.calibrate import measure
from ispasp.types import ConvConsumer, Gram, LinearConsumer, Moment, Reading, Statistics
from ispasp.types.geometry import Geometry

W, H = torch.eye(4), torch.rand(3, 4)
A = LinearConsumer(W)


def statistics(total: torch.Tensor, examples: int = 3) -> Statistics:
    return Statistics(4, (Reading(A, Moment({(): total}, examples)),))


NAN = torch.tensor([1.0, float("nan"), 1.0, 1.0])
CASES = {
    "keep larger than the dimension": (lambda: select_units(W, H, keep=5), "4 units; keep=5.*keep <= 4"),
    "keep zero": (lambda: select_units(W, H, keep=0), "keep=0.*keep >= 1"),
    "keep negative": (lambda: select_units(W, H, keep=-2), "keep=-2"),
    "keep fraction zero": (lambda: select_units(W, H, keep=0.0), r"keep=0.0.*\(0, 1\]"),
    "keep fraction above one": (lambda: select_units(W, H, keep=1.5), r"keep=1.5.*\(0, 1\]"),
    "keep nan": (lambda: select_units(W, H, keep=float("nan")), "keep=nan"),
    "keep bool": (lambda: select_units(W, H, keep=True), "keep=True is a bool"),
    "keep text": (lambda: select_units(W, H, keep="half"), "'half' is a str"),
    "nan in weights": (lambda: LinearConsumer(W * float("nan")), "weight has 16 NaN or Inf of 16"),
    "inf in a scale": (lambda: LinearConsumer(W, scale=torch.full((4,), torch.inf)), "scale has 4 NaN"),
    "nan in activations": (lambda: select_units(W, H * float("nan"), keep=1), "NaN or Inf.*float32"),
    "inf in a moment": (lambda: i_spasp(statistics(NAN), 1), "consumer 0 hold 1 NaN or Inf"),
    "nan in a Gram matrix": (
        lambda: ispasp.select.energy(A, Gram(torch.full((1, 4, 4), torch.nan), 1), 4),
        "Gram matrix holds NaN",
    ),
    "no data": (lambda: select_units(W, H[:0], keep=1), r"\(0, 4\) hold no data"),
    "a moment without examples": (lambda: i_spasp(statistics(torch.ones(4), 0), 1), "no data.*one example"),
    "no statistics": (lambda: i_spasp([], 1), "no statistics"),
    "no moment": (lambda: i_spasp(Statistics(4, (Reading(A),)), 1), "no first moments: take them"),
    "no magnitude": (
        lambda: ispasp.TopK().select(Statistics(4, (Reading(A),)), 1),
        "no magnitudes: take them",
    ),
    "no consumer": (lambda: Statistics(4, ()), "at least one consumer"),
    "activations of another width": (
        lambda: select_units(W, torch.rand(3, 5), keep=1),
        r"\(3, 5\) do not fit.*4",
    ),
    "images for a linear": (lambda: select_units(W, torch.rand(2, 4, 3, 3), keep=1), "do not fit"),
    "rows for a convolution": (lambda: select_units(torch.rand(2, 4, 3, 3), H, keep=1), "do not fit"),
    "a map smaller than the kernel": (
        lambda: select_units(torch.rand(2, 4, 3, 3), torch.rand(1, 4, 2, 2), keep=1),
        "size 2 is too small for a kernel of 3",
    ),
    "a moment of another width": (
        lambda: i_spasp(statistics(torch.ones(5)), 1),
        r"\(5,\) do not fit consumer 0",
    ),
    "a Gram matrix of another size": (
        lambda: ispasp.select.energy(A, Gram(torch.ones(1, 5, 5), 1), 4),
        "does not fit a consumer that needs",
    ),
    "units of another length": (lambda: LinearConsumer(W, units=torch.arange(3)), r"units has shape \(3,\)"),
    "a unit nobody reads": (
        lambda: Statistics(5, (Reading(LinearConsumer(W)),)),
        "reads 4 different units, the hidden dimension has 5",
    ),
    "a weight with one axis": (lambda: LinearConsumer(torch.ones(3)), r"\(outputs, channels\)"),
    "a convolution with two axes": (lambda: ConvConsumer(torch.ones(3, 3)), "3 to 5 axes"),
    "groups that do not divide": (
        lambda: ConvConsumer(torch.ones(4, 1, 3), geometry=Geometry(groups=3)),
        "4 channels cannot be divided into 3 groups",
    ),
    "no groups": (lambda: Geometry(groups=0), "groups=0"),
    "transposed with same padding": (lambda: Geometry(padding="same", transposed=True), "numeric padding"),
    "statistics of different dimensions": (
        lambda: statistics(torch.ones(4)) + Statistics(3, (Reading(LinearConsumer(torch.eye(3))),)),
        "4 units and 1 consumers cannot be added",
    ),
    "different statistics on two parts": (
        lambda: statistics(torch.ones(4)) + Statistics(4, (Reading(A),)),
        "on every part",
    ),
    "two consumers, three activations": (
        lambda: select_units([A, A], [H, H, H], keep=1),
        "2 consumers and 3",
    ),
    "no iterations": (lambda: ISpaSP(iterations=0), "iterations=0"),
    "no iterations in the function": (
        lambda: i_spasp(statistics(torch.ones(4)), 1, iterations=0),
        "iterations=0",
    ),
    "unknown rank": (lambda: ISpaSP(rank="best"), "rank='best': choose"),
    "unknown method": (lambda: select_units(W, H, keep=1, method="magic"), "'magic': choose from ispasp"),
    "unknown statistic": (lambda: measure(A, H, ["median"]), r"\['median'\]: choose from"),
}


@pytest.mark.parametrize("name", CASES)
def test_error_names_value_and_remedy(name: str) -> None:
    call, message = CASES[name]
    with pytest.raises(InputError, match=f"(?s){message}") as caught:
        call()
    assert isinstance(caught.value, IspaspError)
    assert isinstance(caught.value, ValueError)
