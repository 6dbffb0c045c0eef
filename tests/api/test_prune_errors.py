"""What cannot be done is told: what was given, where, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ispasp
from support.nets import ResNet, alive, mlp

X = torch.randn(20, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def net() -> nn.Module:
    return alive(mlp(6, 10, 8, 3))


def told(batches: Any, model: nn.Module | None = None, **options: Any) -> str:
    model = net() if model is None else model
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ispasp.IspaspError) as raised:
        ispasp.prune_(model, batches, **{"progress": False, **options})
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    return f"{type(raised.value).__name__}: {raised.value}"


class OnlyOnce:
    """An iterable that has nothing left when it is gone through a second time."""

    def __init__(self) -> None:
        self.left = [X]

    def __iter__(self) -> Iterator[Tensor]:
        while self.left:
            yield self.left.pop()


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "InputError: no calibration batches: pass at least one"),
        (iter(()), "InputError: no calibration batches: pass at least one; an exhausted iterator counts as none"),
        (DataLoader(TensorDataset(X[:0])), "InputError: no calibration batches"),
        (OnlyOnce(), "InputError: no calibration batches"),
        (3, "InputError: batches is a int: pass a DataLoader, a list of batches, or one: a Tensor, a"),
        ("data", "InputError: batches is a str: pass a DataLoader"),
        (
            TensorDataset(X),
            "InputError: batches is a TensorDataset, which yields single examples: pass torch.utils.data.DataLoader",
        ),
        ([3], "InputError: batch 0 is a int, without a tensor: pass a Tensor, a tuple, list or dict of tensors"),
        (
            [X, (X, X[:, 0].long())],
            "InputError: batch 1 is a tuple of float64 (20, 6) and int64 (20,), of another form",
        ),
        ([(X, X[:, 0].long()), X], "InputError: batch 1 is float64 (20, 6), of another form than those before"),
        ([X[:0]], "InputError: batch 0 holds no examples: leave empty batches out"),
        ([X, X[:0]], "InputError: batch 1 holds no examples: leave empty batches out"),
        ([X[:, :5]], "InputError: the model does not run on the first batch: RuntimeError: mat1 and mat2 shapes"),
        (
            DataLoader(TensorDataset(X, X), batch_size=10),
            "; it is a list of float64 (10, 6) and float64 (10, 6), pass input_of=lambda batch: ... if needed",
        ),
        (
            [[X[0], X[1], X[2]]],
            "; it is a list of float64 (6,) and float64 (6,) and float64 (6,), pass input_of=lambda batch",
        ),
        ([X.float()], "InputError: the model does not run on the first batch: RuntimeError"),
    ],
)
def test_batches_that_cannot_be_used(batches: Any, message: str) -> None:
    assert message in told(batches)


def test_no_hint_where_the_input_was_chosen() -> None:
    text = told(DataLoader(TensorDataset(X, X)), input_of=tuple)
    assert "does not run on the first batch" in text
    assert "input_of" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "magic"}, "unknown method 'magic': choose from ispasp, coreset"),
        ({"method": 3}, "unknown method 3"),
        ({"compensate": "all"}, "compensate='all': choose None, 'local' or 'dense'"),
        ({"compensate": True}, "compensate=True: choose None, 'local' or 'dense'"),
        ({"refit": "some"}, "refit='some': choose 'consumers', or 'all' with compensate='dense'"),
        ({"refit": "all", "compensate": "local"}, "refit='all': choose 'consumers', or 'all' with compensate='dense'"),
        ({"order": "backwards"}, "order='backwards': choose 'sequential'"),
        ({"examples": 0}, "examples=0: pass a number of examples, None for all, or 'auto'"),
        ({"examples": "many"}, "examples='many': pass a number of examples"),
        ({"examples": 2.5}, "examples=2.5: pass a number of examples"),
        ({"round_to": 0}, "round_to=0: pass a whole number such as 8, or None"),
        ({"round_to": 2.5}, "round_to=2.5: pass a whole number"),
        ({"ridge": 0.0}, "ridge=0.0: pass a positive number"),
        ({"ridge": "small"}, "ridge='small': pass a positive number such as 0.0001, or 'auto'"),
        ({"ridge": float("inf")}, "ridge=inf: pass a positive number"),
        ({"memory": 0}, "memory=0: pass a number of bytes, or None"),
        ({"memory": "1G"}, "memory='1G': pass a number of bytes, or None"),
        ({"timeout": "soon"}, "timeout='soon': pass seconds, such as 600"),
        ({"loss": 3}, "loss=3: pass a function"),
        ({"order": "global", "round_to": 4}, "it cannot promise widths: leave out round_to, uniform and budgets"),
        ({"uniform": True, "keep": ispasp.Latency(0.5)}, "uniform=True: Latency chooses widths by what is fast"),
        ({"bias": "none"}, "bias='none': choose 'add', 'keep' or 'auto'"),
        ({"order": "global", "keep": ispasp.Macs(0.5)}, "it cannot promise widths"),
        ({"scope": "most"}, "scope='most': choose 'blocks'"),
        ({"kinds": ("layer",)}, "kinds has ['layer']: choose from"),
        ({"skip": None}, "skip=None: pass a list of names or globs, such as ['layer1.*']"),
        ({"skip": [0]}, "0 is not the name of a hidden dimension: pass a name or glob, such as '0'"),
        ({"keep": {0: 0.5}}, "0 is not the name of a hidden dimension"),
        ({"input_of": 0}, "input_of=0: pass a function, such as lambda batch: batch[0]"),
        ({"skip": ["layer9.*"]}, "no hidden dimension fits 'layer9.*': the model has 0, 2"),
        ({"keep": {"fc9": 0.5}}, "no hidden dimension fits 'fc9'"),
        ({"keep": 0.0}, "keep=0.0 is not a fraction of units that stay"),
        ({"keep": 1.5}, "keep=1.5 is not a fraction of units that stay"),
        ({"keep": 9}, "hidden dimension '2' has 8 units; keep=9 asks for more: pass keep <= 8"),
        ({"keep": "half"}, "keep='half' is a str"),
        ({"keep": {"0": True}}, "keep=True is a bool"),
        (
            {"keep": {"0": [0, 0, 1]}},
            "hidden dimension '0' has units 0..9; keep=[0, 0, 1] does not name different ones",
        ),
        ({"keep": {"0": [0] * 10}}, "pass at least one unit, each once"),
        ({"keep": {"0": [3, 10]}}, "hidden dimension '0' has units 0..9; keep=[3, 10]"),
        ({"keep": {"0": [-1, 3]}}, "keep=[-1, 3] does not name"),
        ({"keep": {"0": []}}, "pass at least one unit"),
        ({"keep": {"0": [0.5, 1]}}, "keep=[0.5, 1] does not name"),
        (
            {"keep": ispasp.Params(10)},
            "Params(10) is out of reach: with every hidden dimension as narrow",
        ),
        ({"timeout": 0}, "timeout=0: pass seconds"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], message: str) -> None:
    assert message in told([X], **options)


def test_options_are_checked_before_the_model_is_touched() -> None:
    class Uncopyable(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("the model was copied")

    with pytest.raises(ispasp.errors.InputError, match="compensate"):
        ispasp.prune(Uncopyable(2, 2), [], compensate="no")
    with pytest.raises(TypeError, match="sparsity"):
        ispasp.prune(Uncopyable(2, 2), [], sparsity=0.5)  # type: ignore[call-arg]


@pytest.mark.parametrize("verb", [ispasp.prune, ispasp.prune_])
def test_what_is_no_model(verb: Any) -> None:
    with pytest.raises(ispasp.errors.InputError, match="model is a function: pass a torch.nn.Module"):
        verb(lambda x: x, [X])


@pytest.mark.parametrize(
    ("method", "compensate", "order", "bad"),
    [
        ("ispasp", None, "sequential", numpy.nan),
        ("ispasp", "dense", "sequential", -numpy.inf),
        ("topk", None, "oneshot", numpy.nan),
        ("l1", "local", "sequential", numpy.nan),
        ("l1", "dense", "sequential", numpy.nan),
        ("l1", "dense", "sequential", numpy.inf),
        ("l1", "local", "oneshot", -numpy.inf),
        ("obs", "dense", "oneshot", numpy.inf),
    ],
)
def test_nan_and_inf_name_the_place_and_the_batch(method: str, compensate: str | None, order: str, bad: float) -> None:
    batches = [X.clone() for _ in range(3)]
    batches[2][4, 1] = bad
    text = told(batches, method=method, compensate=compensate, order=order)
    assert "hidden dimension '0', read by 2, batch 2: the sum of the activations has" in text
    assert "check the calibration data" in text


def test_nan_that_a_layer_makes_names_that_layer() -> None:
    model = alive(ResNet())
    model.layer1[1].bn1.running_var[3] = -1.0  # its root is NaN
    batches = [torch.randn(4, 3, 9, 9, dtype=torch.float64)]
    text = told(batches, model)
    assert "hidden dimension 'layer1.1.conv1', read by layer1.1.conv2, batch 0" in text


def test_a_batch_that_takes_another_way_is_told() -> None:
    class Deeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.a(x))
            if x.shape[1] > 3:
                x = torch.relu(self.b(x))
            return self.c(x)

    batches = [torch.randn(4, 2, 6), torch.randn(4, 5, 6)]
    assert "a: is read by b for some kinds of batches only" in told(batches, Deeper().eval())


def test_a_model_without_values() -> None:
    model = nn.Sequential(nn.Linear(6, 10, device="meta"), nn.ReLU(), nn.Linear(10, 3, device="meta"))
    with pytest.raises(ispasp.errors.InputError, match="'0.weight' is on the meta device and has no values: load the"):
        ispasp.prune(model, [X.float()], progress=False)


def test_a_model_that_cannot_be_copied() -> None:
    model = net()
    model.graph = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)  # torch does not copy such parameters
    with pytest.raises(ispasp.errors.InputError, match=r"Sequential cannot be copied \(.*\): prune_ works"):
        ispasp.prune(model, [X], progress=False)


def test_a_function_that_holds_the_model_cannot_be_copied() -> None:
    model = net()
    model.activation = lambda x: x  # harmless
    ispasp.prune(model, [X], progress=False)
    model.first = lambda x: model[0](x).relu()
    with pytest.raises(ispasp.errors.InputError, match=r"a function that refers to it.*: prune_ works in place"):
        ispasp.prune(model, [X], progress=False)
    assert ispasp.prune_(model, [X], progress=False).layers


def test_a_function_whose_closure_is_empty_is_copied() -> None:
    factor = 2.0

    def scaled(x: Tensor) -> Tensor:
        return factor * x

    assert scaled.__closure__
    del scaled.__closure__[0].cell_contents
    model = net()
    model.activation = scaled
    assert ispasp.prune(model, [X], progress=False).layers


class Sign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.a(x) if x.sum() > 0 else self.b(x)))


def test_a_batch_that_decides_otherwise_is_told() -> None:
    text = told([X.abs(), -X.abs()], alive(Sign()), hold_out=False)
    assert "InputError: a batch takes another path through the model than the first one" in text


def test_batches_of_other_shapes_may_decide_otherwise() -> None:
    model = ispasp.prune(alive(Sign()), [X.abs(), -X.abs()[1:]], hold_out=False, progress=False).model
    assert model.a.out_features == model.b.out_features == model.c.in_features == 4
    assert model(X.abs()).shape == model(-X.abs()).shape == (20, 3)


def test_what_a_complex_weight_reads_stays() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(4, 8), nn.Linear(8, 3)
            self.w = nn.Parameter(torch.randn(8, 4, dtype=torch.cdouble))

        def forward(self, x: Tensor) -> Tensor:
            return self.c(torch.relu(self.b((torch.relu(self.a(x)).to(self.w.dtype) @ self.w).abs())))

    result = ispasp.prune(Complex().double(), [X], progress=False)
    assert "a" not in result.plan.kept
    assert "b" in result.plan.kept
    assert any(row.name == "a" and "calibration cannot follow" in row.reason for row in result.frozen)


def test_widths_that_a_kernel_refuses_are_told() -> None:
    class Even(nn.Module):
        """Like torch's product of experts, which wants strides of 16 bytes."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 32), nn.Linear(32, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.a(x))
            if h.shape[-1] % 4:
                raise RuntimeError("strides should be multiple of 16 bytes")
            return self.b(h)

    with pytest.raises(
        ispasp.errors.SurgeryError, match=r"multiple of 16 bytes.*: the model is as it was; pass round_to"
    ):
        ispasp.prune(alive(Even()), [X], 9, progress=False)
    assert len(ispasp.prune(alive(Even()), [X], 9, round_to=8, progress=False).plan.kept["a"]) == 8


def test_a_branch_on_data_that_a_whole_batch_decides_otherwise_is_told() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.a(x))
            return self.b(h) if x.sum() > 0 else self.c(h)

    rows = torch.ones(64, 6, dtype=torch.float64)
    rows[56:] = -20  # only the whole batch has a sum below zero: these are held out, and not the first two
    text = told([rows], alive(Either()))
    assert "its size or its values take another path than a part of it; the model is as it was" in text
    assert "a: is read by b for some kinds of batches only" in told([rows], alive(Either()), hold_out=False)


@pytest.mark.parametrize("before", [1, 2])
@pytest.mark.parametrize("rows", [16, 64])
def test_a_batch_that_the_model_does_not_run_on_is_named(before: int, rows: int) -> None:
    batches = [torch.randn(rows, 6, dtype=torch.float64) for _ in range(before)]
    text = told([*batches, torch.randn(rows, 9, dtype=torch.float64)])
    assert f"InputError: the model does not run on batch {before}, float64 ({rows}, 9) (RuntimeError: mat1" in text


def test_batches_of_different_numbers_of_axes_are_told() -> None:
    text = told([torch.randn(4, 16, 6, dtype=torch.float64), X], alive(mlp(6, 10, 3)))
    assert "is read by 2 in batches of different numbers of axes: pass one kind" in text
    image = torch.randn(4, 3, 9, 9, dtype=torch.float64)
    model = alive(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)))
    assert "is read by 2 in batches of different numbers of axes: pass one kind" in told([image, image[0]], model)


@pytest.mark.parametrize("option", ["recalibrate", "curves", "progress", "uniform", "hold_out"])
def test_switches_are_true_or_false(option: str) -> None:
    assert f"InputError: {option}='x': pass True or False" in told([X], **{option: "x"})


def test_options_that_do_not_fit_healing() -> None:
    assert "hold_out=False: held-out examples judge healing, pass True" in told([X], heal=True, hold_out=False)
    with pytest.raises(ispasp.errors.InputError, match="pass its path"):
        ispasp.Heal(checkpoint=3)  # type: ignore[arg-type]


def test_an_unknown_search_without_any_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ispasp.budget.search.SEARCHES", {})
    assert "search='zz': no search is registered under a name; pass a number of candidates" in told([X], search="zz")
