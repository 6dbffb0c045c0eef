"""Models that fill a cache: what is returned runs as the user calls it, with the cache on."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ispasp
from ispasp.errors import SurgeryError
from ispasp.integrations.torchvision import import_torchvision
from soak.state import model_unchanged

X = torch.randn(8, 5, 6, generator=torch.Generator().manual_seed(0))


class Cell(nn.Module):
    """Sums over time. With a cache it starts from a state of `width` channels, and returns its state."""

    def __init__(self, config: Any, width: int = 12) -> None:
        super().__init__()
        self.config, self.width, self.steps = config, width, 5
        self.up, self.down = nn.Linear(6, width), nn.Linear(width, 6)

    def channels(self) -> int:
        return self.width

    def forward(self, x: Tensor, use_cache: bool | None = None) -> Any:
        h = self.up(x).relu()
        if not (self.config.use_cache if use_cache is None else use_cache):
            return (self.down(h.cumsum(1)),)
        state = torch.zeros(len(x), 1, self.channels())
        h = (torch.cat([state, h], 1).cumsum(1))[:, 1:]
        return h[:, -1:], self.down(h)


class Literal(Cell):
    """No number of its own can correct the state: other layers could have the same config."""

    def channels(self) -> int:
        return 12


class Broken(Cell):
    """Never runs with its cache."""

    def channels(self) -> int:
        return 13


class Different(Cell):
    """Computes something else with its cache."""

    def forward(self, x: Tensor, use_cache: bool | None = None) -> Any:
        (y,) = super().forward(x, use_cache=False)
        return y + 1 if (self.config.use_cache if use_cache is None else use_cache) else y


class Heads(nn.Module):
    """Reads the number of its heads from the config."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(heads=4, use_cache=True)
        self.v, self.o = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.v(x).view(*x.shape[:2], self.config.heads, 3).relu().flatten(2))


def cell(cls: type[Cell], *, use_cache: bool = True) -> Cell:
    torch.manual_seed(0)
    return cls(SimpleNamespace(use_cache=use_cache)).eval()


def test_a_number_that_only_the_cache_needs_is_corrected() -> None:
    result = ispasp.prune(cell(Cell), [X], progress=False)
    assert (result.model.width, result.model.up.out_features) == (6, 6)
    assert [t.shape for t in result.model(X)] == [(8, 1, 6), (8, 5, 6)]
    assert result.model.config.use_cache


def test_a_dimension_whose_cache_cannot_shrink_is_frozen() -> None:
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6), cell(Literal))
    result = ispasp.prune(model, [X], progress=False)
    assert [*result.plan.kept] == ["0", "2"]
    (why,) = (row.reason for row in result.frozen if row.name == "3.up")
    assert why.startswith("the forward of 3 (Literal) fails with fewer units")
    assert why.endswith("(with use_cache=True)")
    assert result.model(X)[1].shape == (8, 5, 6)


@pytest.mark.parametrize("cls", [Broken, Different])
def test_a_dense_model_that_cannot_be_compared_with_its_cache_is_pruned_without(cls: type[Cell]) -> None:
    model = cell(cls)
    result = ispasp.prune(model, [X], progress=False)
    assert result.model.up.out_features == 6
    assert result.model(X, use_cache=False)[0].shape[-1] == 6


@pytest.mark.parametrize("batch", [{"x": X}, {"x": X, "use_cache": True}])
def test_a_batch_that_asks_for_the_cache(batch: dict[str, Any]) -> None:
    model = cell(Literal, use_cache="use_cache" not in batch)
    with pytest.raises(ispasp.errors.NothingToPruneError, match=r"with use_cache=True"):
        ispasp.prune(model, [batch], progress=False)


def test_the_verification_calls_the_model_with_its_cache() -> None:
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6), cell(Literal))
    plan = ispasp.survey(model, X, check=False).plan(0.5)
    assert "3.up" in plan.kept
    with model_unchanged(model, "apply_"), pytest.raises(SurgeryError, match=r"'3\.up'.*the model is as it was"):
        ispasp.apply_(model, plan, X)


def test_a_config_that_was_copied_for_a_correction_has_its_cache_on() -> None:
    model = Heads().eval()
    result = ispasp.prune(model, [X], progress=False)
    assert result.model.config.heads == 2
    assert (model.config.use_cache, result.model.config.use_cache) == (True, True)


def test_rwkv_generates() -> None:
    pytest.importorskip("transformers", reason="needs pip install 'ispasp[transformers]'")
    import_torchvision()  # transformers imports it where it is installed
    transformers: Any = importlib.import_module("transformers")
    config = transformers.RwkvConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32, intermediate_size=48
    )
    torch.manual_seed(0)
    model, ids = transformers.RwkvForCausalLM(config).eval(), torch.randint(5, 50, (4, 9))
    model(ids)  # it rescales its weights in the first call
    small = ispasp.prune(model, [{"input_ids": ids}], progress=False).model
    assert small(input_ids=ids).state is not None
    assert small.rwkv.blocks[0].feed_forward.key.out_features == 24
    assert small.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0).shape == (4, 13)
