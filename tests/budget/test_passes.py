"""What a budget costs in forward passes of the calibration data: examples times nodes, by what the engine runs."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

import ispasp
from ispasp._prune import _widths
from ispasp.engine.batches import count_examples
from ispasp.engine.runner import Runner
from ispasp.integrations.torchvision import import_torchvision
from ispasp_lab.models import CifarResNet


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Passes that choosing the widths takes; filled in when a model is pruned."""
    counted: dict[str, float] = {"work": 0.0}
    examples: dict[int, int] = {}
    start, run, widths = Runner.__init__, Runner._run, _widths

    def started(self: Runner, graph: Any, batch: Any, *args: Any, **options: Any) -> None:
        start(self, graph, batch, *args, **options)
        examples[id(graph)] = count_examples(batch)

    def ran(self: Runner, *args: Any, **options: Any) -> Any:
        counted["work"] += examples[id(self.graph)] / len(self.graph.nodes)
        return run(self, *args, **options)

    def measured(work: Any, clock: Any) -> Any:
        counted["work"] = 0.0
        found = widths(work, clock)
        counted["passes"] = counted["work"] / work.inputs.examples
        return found

    monkeypatch.setattr(Runner, "__init__", started)
    monkeypatch.setattr(Runner, "_run", ran)
    monkeypatch.setattr("ispasp._prune._widths", measured)
    return counted


def llama(layers: int) -> nn.Module:
    pytest.importorskip("transformers", reason="needs pip install 'ispasp[transformers]'")
    import_torchvision()
    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def prune(net: nn.Module, data: list[Any], **options: Any) -> ispasp.Result:
    return ispasp.prune(net, data, ispasp.Macs(0.7), method="l1", progress=False, **options)


@pytest.mark.parametrize("least", [1, 0])
def test_a_small_resnet(passes: dict[str, float], least: int) -> None:
    torch.manual_seed(0)
    images = [torch.randn(64, 3, 8, 8) for _ in range(8)]
    prune(CifarResNet(8).eval(), images, least=least)
    assert 0.5 < passes["passes"] < 5


def test_a_small_llama(passes: dict[str, float]) -> None:
    prune(llama(2), [{"input_ids": torch.randint(0, 40, (8, 128))} for _ in range(8)])
    assert 0.3 < passes["passes"] < 3


@pytest.mark.long
@pytest.mark.parametrize(("least", "most"), [(1, 10), (0, 12)])  # width zero is measured too
def test_resnet56_takes_under_30_and_a_llama_of_30_layers_under_10(
    passes: dict[str, float], least: int, most: int
) -> None:
    torch.manual_seed(0)
    prune(CifarResNet(56).eval(), [torch.randn(128, 3, 4, 4) for _ in range(9)], least=least)
    assert passes["passes"] < 30
    prune(llama(30), [{"input_ids": torch.randint(0, 40, (8, 256))} for _ in range(4)], least=least)
    assert passes["passes"] < most
