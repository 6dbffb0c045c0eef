"""Quality in the loop: the user's score before and after, and agreement with the dense model without labels."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ispasp
from ispasp._evaluate import Agreement, Judge
from ispasp._options import Inputs, Options
from ispasp.engine.batches import held_out
from ispasp.engine.team import Team
from support.nets import alive, mlp

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def sizes(batches: Any) -> list[int]:
    return [len(batch) for batch in batches]


@pytest.mark.parametrize(
    ("given", "rest", "held"),
    [
        ([64], [56], [8]),
        ([32] * 8, [32] * 7, [32]),
        ([32] * 8 + [1], [32] * 7, [32, 1]),
        ([16] * 20, [16] * 17, [16] * 3),
        ([16, 15], [16, 15], []),
        ([20, 20], [20, 15], [5]),
        ([1] * 40, [1] * 35, [1] * 5),
    ],
)
def test_the_last_eighth_is_held_out(given: list[int], rest: list[int], held: list[int]) -> None:
    pairs = [(x := torch.ones(n, 2), x) for n in given]
    kept, spared = held_out(pairs)
    assert sizes(b for b, _ in kept) == rest
    assert sizes(b for b, _ in spared) == held
    assert all(batch is label for batch, label in kept + spared)


def test_labels_are_divided_with_their_examples() -> None:
    x, y = torch.arange(40.0), torch.arange(40)
    ((rest, labels),), ((held, others),) = held_out([({"x": x[:, None]}, (x[:, None], y))])
    assert torch.equal(labels[1], y[:35])
    assert torch.equal(rest["x"][:, 0], x[:35])
    assert torch.equal(others[1], y[35:])
    assert torch.equal(held["x"][:, 0], x[35:])


def test_held_out_examples_do_not_decide() -> None:
    """What is held out may be anything: weights and plan are those of the rest alone."""
    dense = alive(mlp(6, 10, 3))
    other = torch.cat([X[:56], 100 + X[56:]])
    a, b = (ispasp.prune(dense, [x], 0.4, progress=False) for x in (X, other))
    rest = ispasp.prune(dense, [X[:56]], 0.4, hold_out=False, progress=False)
    assert a.plan.kept == b.plan.kept == rest.plan.kept
    for name, value in rest.model.state_dict().items():
        assert torch.equal(a.model.state_dict()[name], value)
        assert torch.equal(b.model.state_dict()[name], value)
    assert a.agreement is not None and a.agreement.held_out
    assert a.agreement.examples == 8
    assert rest.agreement is not None and not rest.agreement.held_out
    assert "in-sample" in str(rest)


@pytest.mark.parametrize("order", ["sequential", "oneshot"])
def test_a_stream_of_batches_is_held_out_where_it_is_kept_in_memory(order: str) -> None:
    class Stream:
        def __iter__(self) -> Any:
            return iter(X.split(8))

    inputs = Inputs(mlp(6, 10, 3).double(), Stream(), Options(order=order, compensate=None))  # type: ignore[arg-type]
    assert sizes(inputs.held_out()) == ([8] if order == "sequential" else [])


def test_agreement_is_the_share_of_equal_predictions() -> None:
    dense = alive(mlp(6, 10, 3))
    result = ispasp.prune(dense, [X], 0.2, compensate=None, progress=False)
    with torch.no_grad():
        want, found = dense(X[56:]), result.model(X[56:])
    assert result.agreement == Agreement(
        rate=float((want.argmax(1) == found.argmax(1)).double().mean()),
        difference=pytest.approx(float((want - found).norm() / want.norm()), rel=1e-6),
        predictions=8,
        examples=8,
        held_out=True,
    )
    assert f"{result.agreement.rate:.1%} of 8 predictions" in str(result)
    assert json.loads(result.to_json())["agreement"]["examples"] == 8


def test_at_most_256_examples_are_compared() -> None:
    dense = mlp(6, 10, 3).double()
    found = Judge(dense, [X, X, X, X, X], X).agreement(dense, Team())
    assert (found.rate, found.difference, found.examples) == (1.0, 0.0, 256)


class Tokens(nn.Module):
    """Logits for every token, as language models give them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.table(input_ids)), "mask": attention_mask}


def test_tokens_are_counted_without_padding() -> None:
    torch.manual_seed(0)
    model, worse = Tokens(), Tokens()
    batch = {"input_ids": torch.arange(20).reshape(2, 10), "attention_mask": torch.ones(2, 10, dtype=torch.long)}
    batch["attention_mask"][1, 4:] = 0
    found = Judge(model, [batch], batch).agreement(worse, Team())
    ours, theirs = (m(**batch)["logits"].argmax(-1)[batch["attention_mask"].bool()] for m in (model, worse))
    assert (found.predictions, found.rate) == (14, float((ours == theirs).double().mean()))
    ours, theirs = (m(**batch)["logits"].detach()[batch["attention_mask"].bool()] for m in (model, worse))
    assert found.difference == pytest.approx(float((ours - theirs).norm() / ours.norm()))


@pytest.mark.parametrize(
    ("output", "rate"),
    [
        (lambda x: x[:, :1], None),  # one number for each example
        (lambda x: 2 * x, None),  # a signal as large as the input
        (lambda x: x.argmax(1), 1.0),  # classes already
        (lambda x: x[:, :, None, None].expand(-1, -1, 2, 2), 1.0),  # an image of classes
        (lambda x: [x[:, :3], x], 1.0),
        (lambda x: {"none": None}, None),
        (lambda x: {"out": x[:, :3]}, 1.0),
        (lambda x: {"last_hidden_state": x[:, None, :3]}, None),  # features
    ],
)
def test_outputs_of_every_kind(output: Any, rate: float | None) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return output(x)

    found = Judge(Net(), [X], X).agreement(Net(), Team())
    assert found.rate == rate
    assert str(found)


def accuracy(model: nn.Module) -> float:
    assert not model.training
    assert not torch.is_grad_enabled()
    model.train()  # what some evaluation loops leave behind
    return float(model(X).argmax(1).eq(0).double().mean())


@pytest.mark.parametrize("order", ["sequential", "oneshot"])
def test_scores_before_and_after(order: str) -> None:
    dense = alive(mlp(6, 10, 3))
    result = ispasp.prune(dense, [X], 0.2, order=order, compensate=None, evaluate=accuracy, progress=False)
    with torch.no_grad():
        before, after = accuracy(dense.eval()), accuracy(result.model.eval())
    assert result.scores is not None
    assert (result.scores.before, result.scores.after) == ({"accuracy": before}, {"accuracy": after})
    assert f"accuracy {before:.4g} -> {after:.4g}" in str(result)
    assert json.loads(result.to_json())["scores"] == {"before": {"accuracy": before}, "after": {"accuracy": after}}
    assert ispasp.prune(dense, [X], progress=False).scores is None


def test_several_scores_and_training_in_between() -> None:
    seen: list[int] = []

    def both(model: nn.Module) -> dict[str, Any]:
        seen.append(model[0].out_features)  # type: ignore[index, arg-type]
        return {"width": torch.tensor(seen[-1]), "odd": float("nan")}

    result = ispasp.prune(alive(mlp(6, 10, 8, 3)), [X], 0.5, evaluate=both, finetune_between=lambda _: None,
                          progress=False)  # fmt: skip
    assert seen == [10, 5]
    assert result.scores is not None and result.agreement is not None
    assert (result.scores.before["width"], result.scores.after["width"]) == (10, 5)
    assert json.loads(result.to_json())["scores"]["after"] == {"width": 5, "odd": None}
    assert result.agreement.examples == 8


@pytest.mark.parametrize("wrong", ["good", None, {}, {"a": "b"}, torch.ones(3)])
def test_what_is_no_score_is_told_before_pruning(wrong: Any) -> None:
    dense = alive(mlp(6, 10, 3))
    with pytest.raises(ispasp.errors.InputError, match="evaluate\\(model\\) returned a .*: return a number"):
        ispasp.prune_(dense, [X], evaluate=lambda _: wrong, progress=False)
    assert dense[0].out_features == 10
    with pytest.raises(ispasp.errors.InputError, match="evaluate=3: pass a function"):
        ispasp.prune(dense, [X], evaluate=3, progress=False)


def test_an_evaluation_that_fails_afterwards_leaves_the_model_as_it_was() -> None:
    dense = alive(mlp(6, 10, 3))
    before = {name: value.clone() for name, value in dense.state_dict().items()}

    def fails_when_small(model: nn.Module) -> float:
        assert model[0].out_features == 10, "too small"  # type: ignore[index]
        return 1.0

    with pytest.raises(AssertionError, match="too small"):
        ispasp.prune_(dense, [X], evaluate=fails_when_small, progress=False)
    assert all(torch.equal(value, before[name]) for name, value in dense.state_dict().items())


class ByCount(nn.Module):
    """Takes another layer for many examples."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.few, self.many = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        return self.few(h) if x.shape[0] < 60 else self.many(h)


def test_a_batch_that_was_divided_still_runs() -> None:
    dense = ByCount().double()
    try:
        result = ispasp.prune(dense, [X], progress=False)
    except (ispasp.errors.SurgeryError, ispasp.errors.NothingToPruneError) as error:
        assert "pass hold_out=False" in str(error) or "many" in str(error)
    else:
        assert result.model(X).shape == (64, 3)
    kinds = Inputs(dense, list(X.split(20)), Options()).other_kinds(X[:2])  # 20, 20, 20, and 4 that are held out
    assert sorted(sizes(kinds)) == [4, 20]
