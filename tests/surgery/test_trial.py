"""Trials: how many passes they take, on what, and with which units."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ispasp
from ispasp.engine.runner import Runner
from ispasp.integrations.torchvision import import_torchvision
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


@pytest.mark.parametrize("shape", [(8, 256), (40, 64)])
def test_a_llama_runs_four_times_on_32_tokens_whatever_the_batch(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="needs pip install 'ispasp[transformers]'")
    import_torchvision()  # transformers imports it where it is installed
    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(  # as SmolLM2: shared keys and values, tied embeddings
        vocab_size=50, hidden_size=72, intermediate_size=192, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    graphs: list[tuple[int, ...]] = []
    start = Runner.__init__

    def counting(self: Runner, graph: Any, batch: Any, *rest: Any, **options: Any) -> None:
        graphs.append(tuple(batch.shape))
        start(self, graph, batch, *rest, **options)

    monkeypatch.setattr(Runner, "__init__", counting)
    SEEN.clear()
    found = ispasp.survey(Counting(transformers.LlamaForCausalLM(config)), torch.randint(50, shape))
    assert SEEN == graphs == [(1, 32)] * 2
    assert [(d.kind, d.units) for d in found.dimensions] == [("head", 3), ("neuron", 192)] * 2


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


@pytest.mark.parametrize("size", [16, 64, 100])
def test_choices_of_many_units_are_multiples_of_four(size: int) -> None:
    for choice in two_choices({f"d{k}": size for k in range(3)}):
        assert all(len(kept) % 4 == 0 for kept in choice.values())


class ByWidth(nn.Module):
    """Computes something else with fewer units than the dense model, or fails with them in training."""

    def __init__(self, rule: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 12), nn.Linear(4, 12), nn.Linear(24, 2)
        self.gate = nn.Parameter(torch.ones(2))
        self.rule, self.literal = rule, rule is plain

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        if self.training and self.literal:
            a = 1.5 * a.view(-1, 12)
        return self.c(self.rule(a, self.b(x))) * self.gate


def plain(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b], 1)


def different(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a.relu() if a.shape[1] == 12 else a.tanh(), b.relu()], 1)


def together(a: Tensor, b: Tensor) -> Tensor:
    both = torch.cat([a, b], 1)
    return both.relu() if both.shape[1] >= 14 else both.tanh()


def noisy(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b], 1).relu() * torch.rand(len(a), 1)


RULES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float, list[str], str]] = {
    "one differs from masking": (different, 1.0, ["b"], "removing its units does not equal masking them"),
    "one differs behind a gate of zeros": (different, 0.0, ["b"], "removing its units does not equal masking them"),
    "only both differ": (together, 1.0, ["a"], "removing its units does not equal masking them"),
    "training fails": (plain, 1.0, ["b"], "the forward in training mode fails with fewer units"),
    "random numbers": (noisy, 1.0, ["a", "b"], ""),
}


@pytest.mark.parametrize("name", RULES)
def test_a_forward_that_depends_on_the_number_of_units_is_found_out(name: str) -> None:
    rule, gate, expected, why = RULES[name]
    model = ByWidth(rule)
    model.gate.data.fill_(gate)
    found = ispasp.survey(model, torch.randn(5, 4))
    assert [dimension.name for dimension in found.dimensions] == expected
    reasons = {row.name: row.reason for row in found.frozen if row.name in ("a", "b")}
    assert all(why in reason for reason in reasons.values())


class Literal(nn.Module):
    """Fails with fewer units."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).view(-1, 8))


def test_the_same_code_is_refused_everywhere_at_once() -> None:
    found = ispasp.survey(nn.Sequential(Literal(), Literal(), nn.Linear(4, 6), nn.Linear(6, 2)), torch.randn(3, 4))
    reasons = {row.reason for row in found.frozen if row.name.endswith("up")}
    assert len(reasons) == 1
    assert reasons.pop().startswith("the forward of 0 (Literal) fails with fewer units")


class Gated(nn.Module):
    """Needs its `inner` corrected, and no other number."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.inner = 8, 8
        self.up, self.down = nn.Linear(4, 16), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.up(x).split([self.inner, self.inner], -1)
        return self.down(value * gate.sigmoid())


def test_a_correction_is_searched_once_for_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    search = trial.search

    def noted(*given: Any) -> Any:
        found.append(search(*given))
        return found[-1]

    monkeypatch.setattr(trial, "search", noted)
    model = nn.Sequential(Gated(), Gated())
    ispasp.apply_(model, ispasp.survey(model, torch.randn(3, 4)).plan(0.5))
    assert [a.name for chosen in found for a in chosen] == ["inner"]
    assert [(block.other, block.inner) for block in model] == [(8, 4), (8, 4)]
