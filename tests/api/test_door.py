"""The front door: options by name and type, and what users mean by them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ispasp
from ispasp._options import Options
from ispasp.integrations.torchvision import import_torchvision
from ispasp.select import ByScore, Scored, Selection, Selector, Statistics, sum_by_unit
from support.nets import Encoder, alive, mlp

X = torch.randn(30, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(30) % 3


def net() -> nn.Sequential:
    return alive(mlp(6, 10, 8, 3))


@cache
def surveyed() -> ispasp.Survey:
    return ispasp.survey(net(), X[:2])


def pruned(keep: Any = 0.5, batches: Any = None, **options: Any) -> ispasp.Result:
    return ispasp.prune(net(), [X] if batches is None else batches, keep, progress=False, **options)


class Untraced(nn.Linear):
    """What is refused at once runs no forward and copies nothing."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("the model was run")

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("the model was copied")


def refused(**options: Any) -> str:
    """What is told before the model is run or copied."""
    with pytest.raises(ispasp.errors.InputError) as raised:
        ispasp.prune(Untraced(), [X], **options)
    return str(raised.value)


# Names and types ----------------------------------------------------------------------------------------------------


def test_every_option_is_an_explicit_keyword_with_type_and_default() -> None:
    known = {f.name: f.default for f in fields(Options)}
    for verb, also in ((ispasp.prune, set()), (ispasp.prune_, {"optimizer"})):
        signature = inspect.signature(verb)
        options = dict([*signature.parameters.items()][2:])
        assert {name: p.default for name, p in options.items()} == {
            name: default for name, default in known.items() if name != "optimizer" or name in also
        }
        assert all(p.kind is p.KEYWORD_ONLY for name, p in options.items() if name != "keep")
        assert all(p.annotation is not p.empty for p in signature.parameters.values())
        assert verb.__doc__


def test_each_option_is_explained() -> None:
    for name in [*inspect.signature(ispasp.prune).parameters][1:]:
        assert f"      {name}" in str(ispasp.prune.__doc__) or name in ("batches", "keep", "scope", "input_of")


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("methd", "l1", "did you mean 'method'?"),
        ("compensation", "dense", "did you mean 'compensate'?"),
        ("sparsity", 0.3, "keep= says what stays; pass keep=0.7"),
        ("pruning_ratio", 0.5, "keep= says what stays; pass keep=0.5"),
        ("ignored_layers", [], "did you mean 'skip'?"),
        ("importance", "l1", "did you mean 'method'?"),
        ("optimizer", None, "use prune_(model, ..., optimizer=optimizer)"),
        ("zzz", 1, "choose from model, batches, keep, method"),
    ],
)
def test_an_unknown_option_is_told_with_the_right_one(name: str, value: Any, remedy: str) -> None:
    with pytest.raises(ispasp.errors.OptionError) as raised:
        ispasp.prune(Untraced(), [X], **{name: value})
    assert isinstance(raised.value, TypeError)
    assert f"prune has no option {name!r}" in str(raised.value)
    assert remedy in str(raised.value)


# What is refused at once --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 1}, "pass keep=1.0 to keep all units, or keep={'*': 1} to keep one"),
        ({"keep": numpy.int64(1)}, "keep=1 would leave one unit in every hidden dimension"),
        ({"keep": torch.tensor(1)}, "keep=1 would leave one unit in every hidden dimension"),
        ({"keep": "half"}, "keep='half' is a str"),
        ({"keep": "resnet34-2.69G"}, "pass keep=ispasp.recipes['resnet34-2.69G']"),
        ({"keep": None}, "keep=None is a NoneType"),
        ({"keep": 50.0}, "keep=50.0 is not a fraction"),
        ({"keep": {"*": 0}}, "keep=0 would leave every hidden dimension without units"),
        ({"keep": {3: 0.5}}, "3 is not the name of a hidden dimension"),
        ({"kinds": "heads"}, "kinds has ['heads']: choose from ['neuron', 'filter', 'head']"),
        ({"kinds": ()}, "kinds=(): pass some of"),
        ({"scope": "most"}, "scope='most': choose"),
        ({"skip": nn.Linear(2, 2)}, "skip holds a Linear that is not a layer of the model"),
        ({"skip": 3}, "skip=3: pass a list of names or globs"),
        ({"method": "ispas"}, "did you mean 'ispasp'?"),
        ({"method": 3}, "unknown method 3"),
        ({"keep": ispasp.recipes["resnet34-2.69G"]}, "is for torchvision:resnet34: this Untraced has no 3x3 conv"),
    ],
)
def test_refused_before_the_model_is_run(options: dict[str, Any], message: str) -> None:
    assert message in refused(**options)


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "mobilenet_v2"])
def test_a_recipe_of_another_network_is_refused(name: str) -> None:
    model = getattr(import_torchvision().models, name)(num_classes=3)
    with pytest.raises(ispasp.errors.InputError, match="the recipe 'resnet34-2.69G' is for torchvision:resnet34"):
        ispasp.prune(model, [], ispasp.recipes["resnet34-2.69G"])


def test_a_budget_out_of_reach_is_refused_before_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    def calibrate(*_: Any) -> None:
        raise AssertionError("calibration began")

    monkeypatch.setattr("ispasp._prune.error_curves", calibrate)
    with pytest.raises(ispasp.errors.InputError, match=r"Macs\(5\) is out of reach.*for 5 % .* pass Macs\(0.05\)"):
        pruned(ispasp.Macs(5))
    with pytest.raises(ispasp.errors.InputError, match=r"Macs\(0.01\) is out of reach.*pass a larger fraction"):
        pruned(ispasp.Macs(0.01))


def test_a_pruning_recipe_trains_nothing() -> None:
    with pytest.raises(
        ispasp.errors.InputError, match="'resnet34-2.69G' is for keep= of ispasp.prune: pass ispasp.train.Sgd"
    ):
        ispasp.finetune(net(), [(X, Y)], recipe=ispasp.recipes["resnet34-2.69G"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "verb", [ispasp.prune_, lambda m, b, **o: ispasp.apply_(m, ispasp.survey(m, X).plan(0.5), **o)]
)
def test_an_optimizer_of_another_model_is_refused(verb: Any) -> None:
    model = net()
    with pytest.raises(ispasp.errors.InputError, match="the optimizer holds no parameter of this Sequential: pass the"):
        verb(model, [X], optimizer=torch.optim.SGD(net().parameters(), lr=0.1))
    with pytest.raises(ispasp.errors.InputError, match="optimizer is a int: pass a torch.optim.Optimizer"):
        verb(model, [X], optimizer=3)
    assert model[0].out_features == 10
    verb(model, [X], optimizer=torch.optim.SGD(model[0].parameters(), lr=0.1))  # some of its parameters will do
    assert model[0].out_features == 5


# What is meant ------------------------------------------------------------------------------------------------------


KEEPS = {
    "fraction": (0.5, (5, 4)),
    "number": (3, (3, 3)),
    "numpy fraction": (numpy.float32(0.5), (5, 4)),
    "numpy number": (numpy.int64(3), (3, 3)),
    "tensor": (torch.tensor(0.5), (5, 4)),
    "one unit": ({"*": 1}, (1, 1)),
    "all": (1.0, (10, 8)),
    "list": ({"0": [7, 1]}, ((1, 7), 8)),
    "tuple": ({"0": (numpy.int64(7), 1)}, ((1, 7), 8)),
    "set": ({"0": {7, 1}}, ((1, 7), 8)),
    "range": ({"0": range(1, 8, 3)}, ((1, 4, 7), 8)),
    "tensor of units": ({"0": torch.tensor([7, 1]), "*": 0.5}, ((1, 7), 4)),
    "array of units": ({"0": numpy.array([7, 1]), "2": numpy.float64(0.25)}, ((1, 7), 2)),
}


@pytest.mark.parametrize(("keep", "expected"), KEEPS.values(), ids=KEEPS)
def test_one_resolver_of_keep(keep: Any, expected: tuple[Any, ...], request: pytest.FixtureRequest) -> None:
    plan = ispasp.Plan.from_json(surveyed().plan(keep).to_json())
    trained: list[nn.Module] = []
    ways = [plan, pruned(keep).plan]
    if request.node.callspec.id in ("fraction", "list", "array of units"):  # by number, by unit, and some of each
        ways += [pruned(keep, finetune_between=trained.append).plan, pruned(plan).plan]
        assert ways[3].kept == plan.kept
    for name, want, units in zip(("0", "2"), expected, (10, 8), strict=True):
        for way in ways:
            kept = way.kept.get(name, tuple(range(units)))
            assert kept == want if isinstance(want, tuple) else len(kept) == want


@pytest.mark.parametrize(
    "keep", [1, "half", {"9": 0.5}, {"0": [0, 0]}, {"0": torch.tensor([10])}, {"0": 11}, 1.5, True]
)
def test_one_resolver_refuses_alike(keep: Any) -> None:
    texts = []
    for call in (lambda: surveyed().plan(keep), lambda: pruned(keep)):
        with pytest.raises(ispasp.errors.InputError) as raised:
            call()
        texts.append(str(raised.value))
    assert texts[0] == texts[1]


def test_a_plan_of_another_model_is_refused() -> None:
    plan = ispasp.survey(alive(mlp(6, 12, 8, 3)), X[:2]).plan(0.5)
    with pytest.raises(ispasp.errors.InputError, match="the plan is of a model with 12 units in '0', this one has 10"):
        pruned(plan)


def test_a_budget_needs_more_than_a_survey() -> None:
    with pytest.raises(
        ispasp.errors.InputError, match=r"Macs\(amount=0.5\) needs calibration: pass it to ispasp.prune"
    ):
        ispasp.survey(net(), X[:2]).plan(ispasp.Macs(0.5))


def test_a_kind_may_stand_alone() -> None:
    tokens = torch.randn(4, 6, 12, dtype=torch.float64)
    assert {d.kind for d in ispasp.survey(alive(Encoder()), tokens, kinds="head").dimensions} == {"head"}
    result = ispasp.prune(alive(Encoder()), [tokens], kinds="head", progress=False)
    assert {layer.kind for layer in result.layers} == {"head"}


def test_modules_may_be_skipped() -> None:
    model = alive(Encoder())
    tokens = torch.randn(4, 6, 12, dtype=torch.float64)
    names = {d.name for d in ispasp.survey(model, tokens).dimensions}
    result = ispasp.prune(model, [tokens], skip=[model.attention], progress=False)
    assert {layer.name for layer in result.layers} == {name for name in names if not name.startswith("attention.")}
    value = ispasp.prune(model, [tokens], skip=model.attention[0].v, progress=False)  # a producer of attention.0
    assert {layer.name for layer in value.layers} == names - {"attention.0"}
    dense = net()
    assert [layer.name for layer in ispasp.prune(dense, [X], skip=[dense[0]], progress=False).layers] == ["2"]
    assert [layer.name for layer in pruned(skip="0").layers] == ["2"]
    with pytest.raises(ispasp.errors.InputError, match="no hidden dimension fits '4'"):
        ispasp.prune(dense, [X], skip=[dense[4]], progress=False)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), functional.cross_entropy], ids=["module", "function"])
def test_a_loss_of_output_and_labels(loss: Any) -> None:
    data = [(X, Y)]
    options: dict[str, Any] = {"method": "taylor", "input_of": lambda batch: batch[0], "batches": data}
    expected = pruned(loss=lambda output, batch: functional.cross_entropy(output, batch[1]), **options)
    assert pruned(loss=loss, **options).plan.kept == expected.plan.kept
    with pytest.raises(ispasp.errors.InputError, match="takes labels, and a .* has none: yield \\(inputs, labels"):
        pruned(loss=loss, method="taylor")


def test_a_loss_of_output_and_labels_trains_too() -> None:
    one, two = net(), net()
    ispasp.finetune(one, [(X, Y)], loss=nn.CrossEntropyLoss(), progress=False)
    ispasp.finetune(two, [(X, Y)], progress=False)
    assert torch.equal(one[0].weight, two[0].weight)
    assert not torch.equal(one[0].weight, net()[0].weight)


# Methods ------------------------------------------------------------------------------------------------------------


def by_weight(statistics: Statistics) -> Tensor:
    each = [sum_by_unit(p.weight.abs().sum(1), p.unit_of(), statistics.units) for p in statistics.producers]
    return torch.stack(each).sum(0)


@pytest.mark.parametrize("order", ["sequential", "oneshot", "global"])
def test_a_function_is_a_method(order: str) -> None:
    result, known = pruned(method=by_weight, order=order), pruned(method="l1", order=order)
    assert result.plan.kept == known.plan.kept
    assert result.settings["method"] == "by_weight"
    assert [layer.scores for layer in result.layers] == [layer.scores for layer in known.layers]


def test_scores_are_on_the_result_where_the_method_has_them() -> None:
    model = net()
    result = ispasp.prune(model, [X], method="l1", compensate=None, progress=False)
    for layer in result.layers:
        weights = model.get_submodule(layer.name).weight.abs().sum(1)
        assert layer.scores == pytest.approx(weights.tolist())
        best = sorted(sorted(range(layer.units), key=lambda unit: -layer.scores[unit])[: layer.kept])
        assert best == list(result.plan.kept[layer.name])
    assert [layer.scores for layer in pruned(method="ispasp").layers] == [None, None]
    assert pruned({"0": [1, 2]}, method="l1").layers[0].scores is None


def test_a_function_sees_what_it_needs() -> None:
    def energy(statistics: Statistics) -> Tensor:
        return statistics.readings[0].gram.total[0].diagonal()

    assert len(pruned(method=ByScore(energy, needs=("gram",))).plan.kept["0"]) == 5


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda s: torch.ones(3), "returned a tensor of shape (3,), the hidden dimension has 10 units"),
        (
            lambda s: None,
            "<lambda> returned a NoneType (RuntimeError: Could not infer dtype of NoneType): return a tensor of scores",
        ),
        (lambda s: torch.full((s.units,), torch.nan), "the scores of <lambda> has 10 NaN"),
        (ByScore(by_weight, needs="gram"), "ByScore.needs is 'gram': pass a tuple of some of moment"),
        (ByScore(by_weight, needs=("grams",)), "ByScore.needs is ('grams',): pass a tuple of some of moment"),
    ],
)
def test_a_function_that_does_not_score(function: Any, message: str) -> None:
    with pytest.raises(ispasp.errors.InputError) as raised:
        pruned(method=function)
    assert message in str(raised.value)


@dataclass(frozen=True)
class Needless(Scored):
    name = "needless"

    def score(self, statistics: Statistics) -> Tensor:
        return torch.arange(statistics.units).double()


class Duck:
    def select(self, statistics: Statistics, keep: float) -> Selection:
        return Selection((0,))


@dataclass(frozen=True)
class Optioned(Needless):
    needs = ("producers",)
    option: int


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Needless(), "Needless has no `needs`: give the class name = 'needless' and, say, needs = ('magnitude',)"),
        (Duck(), "method is a Duck with `select`: derive it from ispasp.select.Selector"),
        (Optioned, "the class Optioned needs options"),
    ],
)
def test_selectors_that_are_none(method: Any, message: str) -> None:
    assert message in refused(method=method)


def test_the_class_of_a_selector_stands_for_its_defaults() -> None:
    kind: type[Selector] = ispasp.select.L1
    assert pruned(method=kind).plan.kept == pruned(method="l1").plan.kept
