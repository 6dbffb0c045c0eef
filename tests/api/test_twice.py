"""A model that is pruned several times is saved with one plan, and loads on the dense model in one step."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import ispasp
from ispasp.surgery.remove import plans_of
from ispasp.types.dimension import Attribute, Structure, TensorLayout, full_length, kept_length, kept_mask
from ispasp.types.plan import Plan
from support.masking import distance, output
from support.networks import Network, again, networks
from test_fuzz import EXAMPLES, fuzz, random_plan, surveyed


class Net(nn.Module):
    """A depthwise convolution, an attention with heads, layers without biases, normalised weights."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.depthwise = nn.Conv1d(4, 12, 1, bias=False), nn.Conv1d(12, 12, 3, padding=1, groups=12)
        self.project = nn.Conv1d(12, 16, 1, bias=False)
        self.attend = nn.MultiheadAttention(16, 8, batch_first=True)
        self.up, self.down = weight_norm(nn.Linear(16, 24)), weight_norm(nn.Linear(24, 16, bias=False))
        self.wide, self.head = nn.Linear(16, 16, bias=False), nn.Linear(16, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.depthwise(self.expand(x).relu()).relu()).mT
        y = y + self.attend(y, y, y, need_weights=False)[0]
        y = y + self.down(self.up(y).relu())
        return self.head(self.wide(y).relu().mean(1))


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().eval()


X = torch.randn(16, 4, 6, generator=torch.Generator().manual_seed(0))
OPTIONS: dict[str, Any] = {"progress": False, "hold_out": False}


def assert_same(found: nn.Module, expected: nn.Module, batch: Any) -> None:
    assert all(map(torch.equal, output(found, batch), output(expected, batch)))
    assert found.state_dict().keys() == expected.state_dict().keys()


def test_prune_three_times(tmp_path: Path) -> None:
    dense = seeded(Net)
    first = ispasp.prune(dense, [X], keep=0.75, **OPTIONS)
    ispasp.finetune(first.model, [(X, torch.zeros(16).long())], progress=False)
    second = ispasp.prune(copy.deepcopy(first.model), [X], keep={"attend": 5, "*": 0.8}, **OPTIONS)
    loaded = ispasp.load(ispasp.save(second, tmp_path / "two"), seeded(Net, 1))
    assert_same(loaded, second.model, X)
    assert plans_of(dense) == ()
    assert second.plan_from_dense.structure.biases, "compensation gives layers a bias"

    third = ispasp.prune_(loaded, [X], keep=0.7, **OPTIONS)
    again = ispasp.load(ispasp.save(third, tmp_path / "three"), seeded(Net, 2))
    assert_same(again, third.model, X)
    assert third.plan.structure.units["attend"] == 5
    assert third.plan_from_dense.structure.units["attend"] == 8
    assert sum(p.numel() for p in again.parameters()) < sum(p.numel() for p in second.model.parameters())


def test_applied_plans_compose_with_the_last_one_given(tmp_path: Path) -> None:
    model = seeded(Net)
    first = ispasp.survey(model, X).plan({"up": range(4, 24), "expand": [0, 3, 5, 7, 11]})
    ispasp.apply_(model, first)
    second = ispasp.survey(model, X).plan({"up": [0, 19], "attend": [2, 4]})
    ispasp.apply_(model, Plan.from_json(second.to_json()), X)
    whole = first.then(second)
    assert {name: whole.kept[name] for name in ("up", "expand", "attend")} == {
        "up": (4, 23),
        "expand": (0, 3, 5, 7, 11),
        "attend": (2, 4),
    }
    assert Plan.from_json(whole.to_json()) == whole
    for plan in (second, whole):
        assert_same(ispasp.load(ispasp.save(model, tmp_path, plan=plan), seeded(Net, 1)), model, X)
    applied = ispasp.apply_(seeded(Net), whole, X)
    assert distance(output(applied, X), output(model, X)) < 1e-6


@pytest.mark.long
@settings(fuzz, max_examples=max(EXAMPLES // 5, 1))
@given(network=networks(), data=st.data())
def test_random_networks(network: Network, data: st.DataObject) -> None:
    model, plans = again(network), []
    for _ in range(2):
        now = Network(network.seed, network.choices, model, network.batch)
        plans.append(random_plan(data, surveyed(now, data.draw(st.sampled_from(["blocks", "all"])))))
        ispasp.apply_(model, plans[-1])
    whole = Plan.from_json(plans[0].then(plans[1]).to_json())
    once = ispasp.apply_(again(network), whole)
    assert [t.shape for t in once.state_dict().values()] == [t.shape for t in model.state_dict().values()]
    assert all(map(torch.allclose, once.state_dict().values(), model.state_dict().values()))
    assert distance(output(once, network.batch), output(model, network.batch)) <= 1e-9


def huggingface(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs pip install 'ispasp[transformers]'")
    from ispasp.integrations.torchvision import import_torchvision
    from ispasp_lab.zoo.tiny import DECODER, ENCODER

    with contextlib.suppress(ImportError):
        import_torchvision()

    cls = getattr(transformers, name)
    return cls(cls.config_class(**(ENCODER if name.startswith("Bert") else DECODER)))


@pytest.mark.long
@pytest.mark.parametrize("name", ["BertForSequenceClassification", "LlamaForCausalLM"])
def test_hugging_face_folders_build_the_model(name: str, tmp_path: Path) -> None:
    batch = {"input_ids": torch.arange(16).view(2, 8), **({"use_cache": False} if "Llama" in name else {})}
    model = seeded(lambda: huggingface(name))
    for share in (4, 3):
        found = ispasp.survey(model, batch)
        plan = found.plan({d.name: range(d.units // share, d.units) for d in found.dimensions})
        ispasp.apply_(model, plan)
        folder = ispasp.save(model, tmp_path / str(share), plan=plan)
        model = ispasp.load(folder)
    assert_same(ispasp.load(folder, seeded(lambda: huggingface(name), 1)), model, batch)
    assert_same(ispasp.load(folder), model, batch)
    assert len(plans_of(model)) == 1


def test_training_between_layers_composes(tmp_path: Path) -> None:
    model = ispasp.prune(seeded(Net), [X], keep=0.75, **OPTIONS).model
    result = ispasp.prune_(model, [X], keep={"up": 9, "wide": 6}, finetune_between=lambda _: None, **OPTIONS)
    assert len(plans_of(model)) == 2
    assert_same(ispasp.load(ispasp.save(result, tmp_path), seeded(Net, 1)), model, X)


def test_a_model_changed_in_between_is_refused_unless_asked_for(tmp_path: Path) -> None:
    model = ispasp.prune(seeded(Net), [X], keep=0.75, **OPTIONS).model
    model.head = nn.Linear(12, 5)
    given = copy.deepcopy(model)
    result = ispasp.prune(model, [X], keep=0.75, **OPTIONS)
    with pytest.raises(ispasp.errors.PlanError, match=r"leaves 3 of axis 0 of 'head.weight'.*from_dense=False"):
        ispasp.save(result, tmp_path)
    assert not list(tmp_path.iterdir())
    assert_same(ispasp.load(ispasp.save(result, tmp_path, from_dense=False), given), result.model, X)


def test_an_attribute_changed_by_hand_is_refused(tmp_path: Path) -> None:
    model = ispasp.prune(seeded(Net), [X], keep=0.75, compensate=None, **OPTIONS).model
    result = ispasp.prune(model, [X], keep=0.75, compensate=None, **OPTIONS)
    result.model.get_submodule("depthwise").groups = 1
    with pytest.raises(ispasp.errors.PlanError, match="'depthwise' has groups=1, the plans leave 7"):
        ispasp.save(result, tmp_path)


def test_the_record_is_invisible_and_is_taken_back() -> None:
    model = seeded(Net)
    before, keys = repr(model), set(vars(model))
    plan = ispasp.survey(model, X).plan({"up": [1]})
    with pytest.raises(ispasp.errors.PlanError):
        ispasp.apply_(model, Plan(plan.kept, Structure("Net", plan.structure.units, plan.structure.tensors,
                                                       (Attribute("", "none", ((("up", 24),),)),))))  # fmt: skip
    assert (repr(model), set(vars(model))) == (before, keys)
    ispasp.apply_(model, plan)
    assert plans_of(copy.deepcopy(model)) == (plan,)
    assert "Plan" not in repr(model)
    assert not [name for name in model.state_dict() if "ispasp" in name]
    assert not [c for c in torch.export.export(model, (X,)).constants if "ispasp" in c]


def structure(units: dict[str, int], extent: Any, length: int) -> Structure:
    return Structure("Net", units, {"w": TensorLayout((length,), {0: extent})}, (Attribute("m", "n", extent),))


@pytest.mark.parametrize(
    ("dense", "first", "pruned", "second", "expected"),
    [
        ([[("a", 4)]], {"a": [0, 2, 3]}, [[("b", 3)]], {"b": [1]}, [2]),
        ([[(None, 6)]], {}, [[("h", 2), (None, 3)]], {"h": [1]}, [3, 4, 5]),
        ([[("h", 3), (None, 2)]], {"h": [0, 2]}, [[("fine", 4)]], {"fine": [1, 2]}, [1, 4]),
        ([[("fine", 6)]], {"fine": [0, 1, 4, 5]}, [[("h", 2), (None, 2)]], {"h": [1]}, [4, 5]),
        ([[("h", 3), (None, 2)]], {"h": [1]}, [[("c", 2)]], {"c": [1]}, [3]),
        ([[(None, 5)]], {}, [[("a", 2)], [("b", 3)]], {"a": [1], "b": [0, 2]}, [1, 2, 4]),
        ([[("a", 2)], [("b", 4)]], {"b": [1, 2]}, [[("c", 4)]], {"c": [1, 3]}, [1, 4]),
        ([[(None, 3), ("a", 4)]], {"a": [0, 1, 3]}, [[("b", 3)]] * 3, {"b": [2]}, [3, 7, 11]),
        ([[("a", 3)], [("a", 3)]], {"a": [0, 2]}, [[(None, 4)]], {}, [0, 2, 3, 5]),
        ([[("a", 2), ("b", 3)]], {"a": [1], "b": [0, 2]}, [[("b", 2)]], {"b": [1]}, [5]),
    ],
)
def test_positions_compose(dense: Any, first: Any, pruned: Any, second: Any, expected: list[int]) -> None:
    made = []
    for rows, kept in ((dense, first), (pruned, second)):
        extent = tuple(map(tuple, rows))
        length = full_length(extent)
        units = {name: size for row in extent for name, size in row if name}
        made.append(Plan({name: tuple(units) for name, units in kept.items()}, structure(units, extent, length)))
    whole = Plan.from_json(made[0].then(made[1]).to_json())
    layout = whole.structure.tensors["w"]
    mask = kept_mask(layout.axes[0], whole.kept)
    assert mask.nonzero().flatten().tolist() == expected
    (number,) = whole.structure.attributes
    assert kept_length(number.extent, whole.kept) == len(expected)


def test_plans_that_do_not_follow_each_other() -> None:
    plan = Plan({"a": (0, 1)}, structure({"a": 4}, ((("a", 4),),), 4))
    with pytest.raises(ispasp.errors.PlanError, match="leaves 2 of axis 0 of 'w', the second was made for 4"):
        plan.then(plan)
    other = Plan({}, Structure("Other", {}, {}))
    with pytest.raises(ispasp.errors.PlanError, match="Net and Other do not follow"):
        plan.then(other)


def test_then_knows_every_field_of_a_structure() -> None:
    known = {"model", "units", "tensors", "attributes", "weight_norms", "biases", "folded"}
    assert {f.name for f in fields(Structure)} == known, "compose the new field in Plan.then"
