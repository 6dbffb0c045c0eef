"""Bad input raises an error that names the values and says what to do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import ispasp
from ispasp import IspaspError
from ispasp.engine import measure
from ispasp.errors import InputError
from ispasp.select import Evidence, ISpaSP, Random, ThiNet, TopK, energy, i_spasp, select_units
from ispasp.types import ConvConsumer, Gram, LinearConsumer, Magnitude, Moment, Reading, Statistics
from ispasp.types.consumer import Geometry

W, H = torch.eye(4), torch.rand(3, 4)
A = LinearConsumer(W)
FILTERS, MAPS = torch.rand(2, 4, 3, 3), torch.rand(2, 4, 6, 6)


def statistics(total: object, examples: int = 3) -> Statistics:
    return Statistics(4, (Reading(A, Moment({(): total}, examples)),))


def magnitudes(total: torch.Tensor, examples: int = 3) -> Statistics:
    return Statistics(4, (Reading(A, Magnitude(total, examples)),))


def convolve(**geometry: object) -> object:
    return select_units(ConvConsumer(FILTERS, geometry=Geometry(**geometry)), MAPS, keep=2)


def transposed(**geometry: object) -> object:
    A = ConvConsumer(torch.rand(4, 2, 3, 3), geometry=Geometry(transposed=True, **geometry))
    return select_units(A, torch.rand(1, 4, 2, 2), keep=2)


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
    "inf in a moment": (lambda: i_spasp(statistics(NAN), 1), "moment of consumer 0 has 1 NaN or Inf of 4.*float32"),
    "nan in a Gram matrix": (
        lambda: ispasp.select.energy(A, Gram(torch.full((1, 4, 4), torch.nan), 1), 4),
        "Gram matrix has 16 NaN or Inf of 16.*check",
    ),
    "no data": (lambda: select_units(W, H[:0], keep=1), r"\(0, 4\) hold no data"),
    "a moment without examples": (lambda: i_spasp(statistics(torch.ones(4), 0), 1), "no data.*one example"),
    "no statistics": (lambda: i_spasp([], 1), "no statistics"),
    "no moment": (lambda: i_spasp(Statistics(4, (Reading(A),)), 1), "no moment: take it"),
    "no magnitude": (
        lambda: ispasp.select.TopK().select(Statistics(4, (Reading(A),)), 1),
        "no magnitude: take it",
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
        r"moment of consumer 0 has shape \(5,\), expected \(4,\): take it",
    ),
    "a Gram matrix of another size": (
        lambda: ispasp.select.energy(A, Gram(torch.ones(1, 5, 5), 1), 4),
        r"\(1, 5, 5\), expected \(1, 4, 4\): take it",
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
        "4 channels do not divide into 3 groups",
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
    "keep numpy integer too large": (lambda: select_units(W, H, keep=np.int64(9)), "4 units; keep=9.*keep <= 4"),
    "keep numpy bool": (lambda: select_units(W, H, keep=np.True_), "keep=.*True.*: pass a float"),
    "keep tensor": (lambda: select_units(W, H, keep=torch.tensor(2)), "is a Tensor: pass a float"),
    "a weight that is a list": (lambda: select_units([[1.0, 2.0]], H, keep=1), "is a list: pass a torch.Tensor"),
    "a module for a weight": (lambda: select_units(torch.nn.Linear(4, 4), H, 1), "consumers is a Linear: pass"),
    "a numpy weight": (lambda: LinearConsumer(np.eye(4)), "weight is a ndarray: pass a torch.Tensor"),
    "numpy activations": (lambda: select_units(W, H.numpy(), keep=1), "H is a ndarray: pass a torch.Tensor"),
    "activations that are lists": (lambda: select_units(W, [H.tolist()], 1), "H is a list: pass a torch"),
    "no activations": (lambda: select_units(W, None, keep=1), "H is a NoneType"),
    "an empty list of consumers": (lambda: select_units([], H, keep=1), "0 consumers and 0 activations: pass one"),
    "an empty weight": (lambda: LinearConsumer(torch.ones(0, 4)), r"\(0, 4\) is empty"),
    "a complex weight": (lambda: LinearConsumer(W.cfloat()), "complex64.*real"),
    "complex activations": (lambda: measure(A, H.cfloat()), "complex64.*real"),
    "a meta weight": (lambda: LinearConsumer(W.to("meta")), r"\(4, 4\) is on the meta device.*load the model"),
    "meta activations": (lambda: measure(A, H.to("meta")), r"\(3, 4\) is on the meta device"),
    "a sparse weight": (lambda: LinearConsumer(W.to_sparse()), "sparse_coo: pass its .to_dense"),
    "float units": (lambda: LinearConsumer(W, units=torch.arange(4.0)), "units is torch.float32.*int64"),
    "units as a mask": (lambda: LinearConsumer(W, units=torch.ones(4).bool()), "units is torch.bool.*int64"),
    "units as a list": (lambda: LinearConsumer(W, units=[0, 1, 2, 3]), "units is a list: pass a torch.Tensor"),
    "units below -1": (lambda: LinearConsumer(W, units=torch.arange(4) - 2), "units goes from -2 to 1.*-1 for"),
    "units all outside": (lambda: LinearConsumer(W, units=torch.full((4,), -1)), "units goes from -1 to -1"),
    "units with a gap": (
        lambda: Statistics(3, (Reading(LinearConsumer(W, units=torch.tensor([0, 1, 3, 3]))),)),
        r"reads 3 different units, the hidden dimension has 3: its `units` must name each of 0..2",
    ),
    "a scale that is a number": (lambda: LinearConsumer(W, scale=2.0), "scale is a float: pass a torch.Tensor"),
    "a scale per input of a convolution": (
        lambda: ConvConsumer(FILTERS, scale=torch.ones(4)),
        r"scale has shape \(4,\), the consumer 2 outputs: pass a factor each",
    ),
    "a reading for statistics": (lambda: i_spasp(measure(A, H), 1), "statistics is a Reading: pass a Statistics"),
    "consumers for readings": (lambda: Statistics(4, (A,)), "readings is a tuple: pass a tuple of Reading"),
    "mini-batches of two dimensions": (
        lambda: i_spasp([statistics(torch.ones(4)), Statistics(1, (measure(LinearConsumer(W[:, :1]), H[:, :1]),))], 1),
        r"with \[1, 4\] units",
    ),
    "a moment that is a list": (lambda: i_spasp(statistics([1.0] * 4), 1), "is a list: pass a torch.Tensor"),
    "a moment without sizes": (lambda: Moment(torch.ones(4), 3), "a Moment's maps are a Tensor: pass {size: sum}"),
    "a moment with no map": (lambda: i_spasp(Statistics(4, (Reading(A, Moment({}, 3)),)), 1), "no data: calibrate"),
    "a moment of maps for a linear": (
        lambda: i_spasp(Statistics(4, (Reading(A, Moment({(3,): torch.ones(4, 3)}, 3)),)), 1),
        r"size \(3,\), the consumer reads maps with 0 axes: take it",
    ),
    "a moment that is a number": (lambda: i_spasp(statistics(torch.tensor(1.0)), 1), r"shape \(\), expected"),
    "a magnitude of another width": (lambda: TopK().select(magnitudes(torch.ones(5)), 1), r"\(5,\), expected \(4,\)"),
    "nan in a magnitude": (lambda: TopK().select(magnitudes(NAN), 1), "magnitude of consumer 0 has 1 NaN"),
    "a magnitude without examples": (lambda: TopK().select(magnitudes(torch.ones(4), 0), 1), "no data .examples=0"),
    "a Gram matrix without examples": (lambda: energy(A, Gram(torch.ones(1, 4, 4), 0), 4), "no data .examples=0"),
    "an energy of fewer units": (lambda: energy(A, Gram(torch.ones(1, 4, 4), 1), 2), "units=2.*reads 4"),
    "nan in a moment that only the evidence needs": (
        lambda: Random().select(statistics(NAN), 1),
        "moment of consumer 0 has 1 NaN",
    ),
    "a kept unit out of range": (lambda: Evidence(statistics(torch.ones(4))).step((-1,)), r"\(-1,\).*0 to 3"),
    "evidence of no set": (
        lambda: Evidence(statistics(torch.ones(4))).selection([], converged=True),
        "no sets.*at least one",
    ),
    "importance beyond float64": (lambda: select_units(W.double() * 1e200, H, 1), "overflows float64.*rescale"),
    "stride as a number": (lambda: convolve(stride=2), "stride=2: pass a tuple of integers >= 1"),
    "stride zero": (lambda: convolve(stride=(0, 0)), r"stride=\(0, 0\): pass a tuple"),
    "stride of one axis": (lambda: convolve(stride=(2,)), r"stride=\(2,\) has 1 values.*2 spatial axes"),
    "padding of three axes": (lambda: convolve(padding=(1, 1, 1)), "has 3 values.*2 spatial axes"),
    "negative padding": (lambda: convolve(padding=(-1, 0)), r"padding=\(-1, 0\).*'same' or 'valid'"),
    "unknown padding": (lambda: convolve(padding="full"), "padding='full'.*'same' or 'valid'"),
    "same padding with a stride": (lambda: convolve(padding="same", stride=(2, 2)), "'same' with stride"),
    "dilation zero": (lambda: convolve(dilation=(0, 1)), r"dilation=\(0, 1\)"),
    "output padding of a plain convolution": (lambda: convolve(output_padding=(1, 1)), "only a transposed"),
    "more padding than transposed output": (lambda: transposed(padding=(5, 5)), "size 2 is too small"),
    "output padding as large as the stride": (lambda: transposed(output_padding=(1, 1)), "less than the stride"),
    "fractional groups": (lambda: Geometry(groups=2.0), "groups=2.0.*integer"),
    "negative iterations": (lambda: ISpaSP(iterations=-3), "iterations=-3: pass an integer >= 1"),
    "fractional iterations": (lambda: ISpaSP(iterations=2.5), "iterations=2.5: pass an integer"),
    "iterations as text": (lambda: ISpaSP(iterations="3"), "iterations='3': pass an integer"),
    "a seed that is text": (lambda: Random(seed="a"), "seed='a': pass an integer"),
    "a seed that is too large": (lambda: Random(seed=2**70), "pass an integer from 0"),
    "a list of methods": (lambda: select_units(W, H, 1, ["ispasp"]), "choose from ispasp"),
    "a statistic instead of a list": (lambda: measure(A, H, "moment"), r"needs='moment': pass a list.*\['moment'\]"),
    "a weight instead of a consumer": (lambda: measure(W, H), "consumer is a Tensor: pass a LinearConsumer"),
    "moments of different width": (
        lambda: Moment({(): torch.ones(4)}, 1) + Moment({(): torch.ones(3)}, 1),
        r"moments of shapes \(4,\) and \(3,\) cannot be added: take one",
    ),
    "mini-batches that nobody kept apart": (
        lambda: ISpaSP(minibatches=True).select(statistics(torch.ones(4)), 1),
        r"minibatches=True needs mini-batches: use it in ispasp.prune.*parts=\.\.\.",
    ),
    "mini-batches in the data path": (
        lambda: select_units(W, H, 1, ISpaSP(minibatches=True)),
        "minibatches=True needs",
    ),
    "a number of mini-batches": (lambda: ISpaSP(minibatches=3), "minibatches=3: pass True .* or False"),
    "a scale that is a factor": (lambda: ThiNet(rescale=2.0), "rescale=2.0: pass True .* or False"),
    "unknown rank": (lambda: ISpaSP(rank="best"), "rank='best': pass 'value'"),
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
