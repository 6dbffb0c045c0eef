"""Trials: how many passes they take, on what, and with which units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ispasp
from ispasp.surgery import trial
from ispasp.surgery.trial import short_example, two_choices


class Counting(nn.Module):
    """A model that notes the shapes it is run on, traces apart."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        if type(x) is Tensor:
            SEEN.append(tuple(x.shape))
        return self.body(x) if mask is None else self.body(x, mask)


SEEN: list[tuple[int, ...]] = []


class Tokens(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(50, 8), nn.Linear(8, width), nn.Linear(width, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.down(self.up(self.table(ids)).relu())


class ByLength(Tokens):
    """Takes another way for long sequences."""

    def forward(self, ids: Tensor) -> Tensor:
        h = self.up(self.table(ids))
        return self.down(h.tanh() if ids.shape[1] > 40 else h.relu())


class Squeezing(nn.Module):
    """Loses the axis of examples where there is one only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up, self.down = nn.Conv2d(3, 8, 3), nn.Linear(8, 12), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.conv(x).mean((2, 3)).squeeze()).relu())


class FixedSize(Tokens):
    """Runs on batches of one shape only."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids.view(6, 90))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3))


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, tuple[int, ...]]] = {
    "one row of 32 tokens": (Tokens, torch.randint(50, (6, 90)), (1, 32)),
    "one image": (convolutions, torch.randn(5, 3, 8, 8), (1, 3, 8, 8)),
    "two where one is squeezed": (Squeezing, torch.randn(5, 3, 8, 8), (2, 3, 8, 8)),
    "all where length decides": (ByLength, torch.randint(50, (6, 90)), (6, 90)),
    "all where the shape is fixed": (FixedSize, torch.randint(50, (6, 90)), (6, 90)),
    "all where there is little to save": (Tokens, torch.randint(50, (1, 40)), (1, 40)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_survey_runs_the_model_twice_on_a_short_example(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, batch, expected = CASES[name]
    torch.manual_seed(0)
    masked: list[tuple[int, ...]] = []
    original = trial.masked_output

    def counting(analysis: Any, model: Any, example: Any, *rest: Any) -> list[Tensor]:
        masked.append(tuple(example.shape))
        return original(analysis, model, example, *rest)

    monkeypatch.setattr(trial, "masked_output", counting)
    monkeypatch.setattr(trial, "_CHEAP", 0)
    SEEN.clear()
    found = ispasp.survey(Counting(build()), batch)
    assert [expected] * 2 == SEEN
    assert masked == [expected] * 2
    assert found.dimensions


def test_a_small_model_is_tried_on_the_batch_itself() -> None:
    SEEN.clear()
    ispasp.survey(Counting(Tokens()), torch.randint(50, (6, 90)))
    assert SEEN == [(6, 90)] * 3  # cheap, so a third choice of units is tried


def test_a_short_example_makes_the_same_survey(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Tokens(), torch.randint(50, (6, 90))
    found = ispasp.survey(model, batch)
    monkeypatch.setattr(trial, "_CHEAP", 0)
    assert ispasp.survey(model, batch).rows() == found.rows()


def test_the_end_with_less_padding_is_taken() -> None:
    ids, mask = torch.ones(3, 100).long(), torch.ones(3, 100).long()
    mask[:, :60] = 0
    ids[:, 99] = 7
    left = short_example({"input_ids": ids, "attention_mask": mask, "x": torch.ones(3, 7)}, 1)
    assert left["attention_mask"].all()
    assert left["input_ids"][0, -1] == 7
    assert left["x"].shape == (1, 7)
    assert (
        short_example({"input_ids": ids, "attention_mask": mask.flip(1)}, 2)["attention_mask"].tolist()
        == [[1] * 32] * 2
    )


@pytest.mark.parametrize("size", [2, 3, 12, 64, 1536])
def test_choices_tell_dimensions_of_equal_size_apart(size: int) -> None:
    units = {f"d{k}": size for k in range(5)}
    first, second = two_choices(units)
    assert set(first) == set(units)
    kept = {name: (len(first[name]), len(second.get(name, range(size)))) for name in units}
    assert all(0 < n < size for n, _ in kept.values())
    assert len(set(kept.values())) == (2 if size == 2 else 5)
    if size >= 12:
        assert [len(set(numbers)) for numbers in zip(*kept.values(), strict=True)] == [5, 5]
        assert all(a != b for a, b in kept.values())


def test_choices_are_not_in_proportion() -> None:
    units = {"a": 64, "b": 128, "c": 256, "d": 512}
    for choice in two_choices(units):
        assert len({len(choice[name]) / units[name] for name in units}) == 4
