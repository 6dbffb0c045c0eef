"""One batch protocol: every form that users have their data in, for every verb."""

from __future__ import annotations

import copy
import json
import logging
from collections import UserDict
from collections.abc import Callable, Iterator
from functools import cache
from itertools import repeat
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ispasp
from ispasp.engine.batches import Labels, find_labels, held_out
from support.nets import alive, mlp

G = torch.Generator().manual_seed(0)
X = torch.randn(20, 6, generator=G, dtype=torch.float64)
Y = torch.randint(0, 3, (20,), generator=G)
SCALE = torch.ones(20, 1, dtype=torch.float64)


class Named(nn.Module):
    """Takes its input by name as well, and labels as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = alive(mlp(6, 10, 8, 3))

    def forward(self, x: Tensor, scale: Tensor | None = None, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.body(x if scale is None else x * scale)
        return {"logits": logits} if labels is None else {"loss": logits.sum(), "logits": logits}


def plain() -> nn.Module:
    return Named().body


Form = tuple[Callable[[], nn.Module], Callable[[], Any]]
FORMS: dict[str, Form] = {
    "a tensor": (plain, lambda: X),
    "tensors": (plain, lambda: [X]),
    "a split tensor": (plain, lambda: X.split(20)),
    "(x, y)": (plain, lambda: (X, Y)),
    "[x, y]": (plain, lambda: [X, Y]),
    "pairs": (plain, lambda: [(X, Y)]),
    "lists": (plain, lambda: [[X, Y]]),
    "regression": (plain, lambda: [(X, X[:, 0])]),
    "probabilities": (plain, lambda: [(X, X[:, :3].softmax(1))]),
    "several targets": (plain, lambda: [(X, {"a": Y, "b": Y})]),
    "a loader": (plain, lambda: DataLoader(TensorDataset(X), batch_size=20)),
    "a labelled loader": (plain, lambda: DataLoader(TensorDataset(X, Y), batch_size=20)),
    "a generator": (plain, lambda: (pair for pair in [(X, Y)])),
    "a dict": (Named, lambda: {"x": X}),
    "a labelled dict": (Named, lambda: {"x": X, "labels": Y}),
    "label": (Named, lambda: [{"x": X, "label": Y}]),
    "an encoding": (Named, lambda: UserDict(x=X, labels=Y)),
    "encodings": (Named, lambda: [UserDict(x=X)]),
    "a dict and labels": (Named, lambda: [({"x": X}, Y)]),
    "an encoding and labels": (Named, lambda: (UserDict(x=X), Y)),
    "two inputs": (Named, lambda: [(X, SCALE)]),
    "two inputs and labels": (Named, lambda: [(X, SCALE, Y)]),
}


def on_prune(model: nn.Module, data: Any) -> ispasp.Plan:
    return ispasp.prune(model, data, ridge=1e-3, progress=False).plan


def on_oneshot(model: nn.Module, data: Any) -> ispasp.Plan:
    return ispasp.prune(model, data, order="oneshot", ridge=1e-3, curves=True, progress=False).plan


def on_survey(model: nn.Module, data: Any) -> ispasp.Plan:
    return ispasp.survey(model, data).plan(0.5)


def on_apply(model: nn.Module, data: Any) -> ispasp.Plan:
    body = next((name for name, _ in model.named_children() if name == "body"), "")
    example = {"x": X} if body else X
    plan = ispasp.survey(model, example).plan(0.5)
    ispasp.apply_(model, plan, data)
    assert sum(p.numel() for p in model.parameters()) == 6 * 5 + 5 + 5 * 4 + 4 + 4 * 3 + 3
    return plan


def on_mask(model: nn.Module, data: Any) -> ispasp.Plan:
    plan = ispasp.survey(model, {"x": X} if isinstance(model, Named) else X).plan(0.5)
    with ispasp.mask(model, plan, data) as masked:
        assert sum(int((p == 0).sum()) for p in masked.parameters()) == 8 * 5 + 3 * 4
    return plan


VERBS = {"prune": on_prune, "oneshot": on_oneshot, "survey": on_survey, "apply_": on_apply, "mask": on_mask}
SOME = ("a tensor", "(x, y)", "a labelled loader", "a generator", "an encoding", "two inputs and labels")
EVERY = [(form, verb) for verb in ("prune", "survey") for form in FORMS]  # calls on batches, and calls on one batch


@cache
def wanted(verb: str) -> ispasp.Plan:
    return VERBS[verb](plain(), X)


@pytest.mark.parametrize(("form", "verb"), [*EVERY, *((f, v) for v in ("oneshot", "apply_", "mask") for f in SOME)])
def test_every_form_for_every_verb(form: str, verb: str) -> None:
    build, data = FORMS[form]
    found = VERBS[verb](build(), data())
    assert {name.removeprefix("body."): kept for name, kept in found.kept.items()} == wanted(verb).kept


LABELLED = ["(x, y)", "[x, y]", "pairs", "lists", "a labelled loader", "a labelled dict", "label", "a dict and labels",
            "two inputs and labels"]  # fmt: skip


@pytest.mark.parametrize("form", LABELLED)
def test_finetune_takes_the_same_forms(form: str) -> None:
    build, data = FORMS[form]
    torch.manual_seed(0)
    body, model = plain(), build()
    ispasp.finetune(body, [(X, Y)], epochs=2, progress=False)
    ispasp.finetune(model, data(), epochs=2, loss=_cross_entropy, progress=False)
    found = {name.removeprefix("body."): value for name, value in model.state_dict().items()}
    for name, value in body.state_dict().items():
        torch.testing.assert_close(found[name], value)


def _cross_entropy(output: Any, batch: Any) -> Tensor:
    logits = output["logits"] if isinstance(output, dict) else output
    return nn.functional.cross_entropy(logits, Y)


def test_finetune_refuses_a_dataset() -> None:
    with pytest.raises(ispasp.errors.InputError, match="a TensorDataset, which yields single examples: pass"):
        ispasp.finetune(plain(), TensorDataset(X, Y))


def test_what_was_recognised_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ispasp"):
        result = ispasp.prune(plain(), [(x, y) for x, y in zip(X.split(10), Y.split(10), strict=True)], progress=False)
    told = "batches are (inputs, labels): the model gets the inputs only"
    assert [r.message for r in caplog.records if r.name == "ispasp"].count(told) == 1
    assert json.loads(result.to_json())["settings"]["labels"] == told


def test_a_loss_sees_the_labels() -> None:
    seen: list[Tensor] = []

    def loss(output: Tensor, batch: Any) -> Tensor:
        seen.append(batch[1])
        return nn.functional.cross_entropy(output, batch[1])

    ispasp.prune(plain(), (X, Y), method="taylor", loss=loss, progress=False)
    assert seen and all(torch.equal(y, Y) for y in seen)


class Optional(nn.Module):
    """A second argument that some callers leave out."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        if other is not None and other.ndim != self.axes:
            raise ValueError("a mask has two axes")
        return x


class Broadcast(nn.Module):
    """Runs with labels by chance, where there are as many examples as tokens."""

    def forward(self, ids: Tensor, types: Tensor | None = None) -> Tensor:
        return ids if types is None else ids + types


IDS = torch.randint(5, 50, (6, 6), generator=G)


@pytest.mark.parametrize(
    ("model", "batch", "found"),
    [
        (Optional(1), (X, Y), 0),  # takes it: may be lengths
        (Optional(2), (X, Y), 2),  # fails with it, runs without
        (Optional(2), (IDS, torch.ones_like(IDS)), 0),
        (Optional(1), (IDS, torch.ones_like(IDS)), 0),  # fails with it, but it may be a mask: the failure is told
        (Optional(1), (X, Y > 0), 0),
        (Broadcast(), (IDS, IDS[:, 0]), 2),
        (Named(), (X, SCALE, Y), 3),  # goes to `labels`
        (nn.Bilinear(6, 6, 2), (X, X), 0),
        (nn.Linear(6, 2), (X, X), 0),  # one more input like the first: the failure is told
        (nn.Linear(6, 2), (X, Y[:10]), 0),
        (nn.Linear(6, 2).double(), (X, X[:, :3]), 2),
    ],
)
def test_nothing_is_left_out_that_the_model_may_need(model: nn.Module, batch: Any, found: int) -> None:
    assert find_labels(model, batch) == Labels(length=found)


def test_labels_that_a_model_needs_stay() -> None:
    """T5 makes the inputs of its decoder of them."""

    class Needs(Named):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:  # type: ignore[override]
            assert labels is not None
            return self.body(x * labels[:, None])

    assert find_labels(Needs(), {"x": X, "labels": Y}) == Labels()
    assert find_labels(Named(), {"x": X, "labels": Y}) == Labels(names=("labels",))


def test_tokens_and_a_mask_are_no_two_batches() -> None:
    class Tokens(nn.Module):
        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            return ids

    with pytest.raises(ispasp.errors.InputError, match="tokens and what looks like a mask: pass one batch"):
        ispasp.prune(Tokens(), (IDS, torch.ones_like(IDS)))


@pytest.mark.parametrize(
    ("order", "given"),
    [*(("sequential", g) for g in ("list", "generator", "endless", "loader")), ("oneshot", "endless")],
)
def test_examples_are_limited(order: Any, given: str) -> None:
    dense, some = plain(), X.split(8)
    data: dict[str, Any] = {
        "list": list(some),
        "generator": iter(some),
        "endless": (x for _ in repeat(0) for x in some),
        "loader": DataLoader(TensorDataset(X, Y), batch_size=8),
    }
    result = ispasp.prune(dense, data[given], examples=11, order=order, ridge=1e-3, progress=False)
    want = ispasp.prune(dense, [X[:8], X[8:11]], order=order, ridge=1e-3, progress=False)
    assert result.plan.kept == want.plan.kept
    for name, value in want.model.state_dict().items():
        torch.testing.assert_close(result.model.state_dict()[name], value)
    assert (result.settings["examples"], result.settings["all_examples"]) == (11, False)
    assert "11 examples (examples=None takes all)" in str(result)
    assert (want.settings["examples"], want.settings["all_examples"]) == (11, True)
    assert "11 examples\n" in str(want)


def test_the_default_limit_takes_whole_batches_and_all_is_all() -> None:
    read: list[int] = []

    def batches() -> Iterator[Tensor]:
        for number in range(20):
            read.append(number)
            yield X.repeat(15, 1)  # 300 examples

    dense = plain()
    result = ispasp.prune(dense, batches(), progress=False)
    assert result.settings["examples"] == 900
    assert len(read) == 4
    assert result.settings["held_out_examples"] == 112  # an eighth, of the last batch
    assert "900 examples, 112 of them held out (examples=None takes all)" in str(result)
    assert ispasp.prune(dense, [X.repeat(60, 1)], progress=False).settings["examples"] == 1024
    assert ispasp.prune(dense, [X.repeat(60, 1)], examples=None, progress=False).settings["examples"] == 1200


def test_a_survey_takes_the_first_of_several_batches() -> None:
    for data in ([X, X], [(X, Y), (X, Y)], DataLoader(TensorDataset(X, Y), batch_size=7), iter([X])):
        assert ispasp.survey(plain(), data).plan(0.5).kept == wanted("survey").kept
    named = copy.deepcopy(Named())
    assert len(ispasp.survey(named, [{"x": X}, {"x": X}]).dimensions) == 2
    with pytest.raises(ispasp.errors.InputError, match="no calibration batches: pass at least one"):
        ispasp.survey(plain(), iter(()))


@pytest.mark.parametrize(("sizes", "last"), [((31,), 0), ((32,), 4), ((64,), 8), ((28, 28, 8), 8), ((31, 1), 4)])
def test_the_last_eighth_of_enough_examples_is_held_out(sizes: tuple[int, ...], last: int) -> None:
    rows = torch.arange(sum(sizes))
    rest, held = held_out([(part, part) for part in rows.split(sizes)])
    assert torch.equal(torch.cat([batch for batch, _ in (*rest, *held)]), rows)
    assert sum(len(batch) for batch, _ in held) == last
