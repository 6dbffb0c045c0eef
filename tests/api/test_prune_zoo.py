"""Networks of the zoo through `prune`: removal equals masking, and compensation never makes a layer worse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ispasp
from ispasp_lab import zoo
from ispasp_lab.zoo.coverage import count_params
from support.zoo import case

NOTHING = ("plain/maxout", "plain/lstm", "plain/gru")  # nothing can go there
PLAIN = [case.name for case in zoo.cases("plain") if case.name not in NOTHING and "activation" not in case.name]
SOME = {  # of many layers
    "torchvision/densenet121": {"features.denseblock1.*": 0.5},
    "torchvision/resnet18": {"layer[12].*": 0.5},
}
QUICK = PLAIN[::3]  # test_zoo.py removes units of every one in PLAIN
LARGE = [
    *("torchvision/resnet18", "torchvision/mobilenet_v2", "torchvision/densenet121", "transformers/vit"),
    *("transformers/bert", "transformers/llama", "transformers/gpt2", "transformers/t5", "transformers/mixtral"),
]
LONG = [*(name for name in PLAIN if name not in QUICK), *LARGE]


def check(name: str, **options: Any) -> ispasp.Result:
    found = case(name)
    model, batch = found.build(), found.batch()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    result = ispasp.prune(model, [batch], SOME.get(name, 0.5), progress=False, **options)
    assert result.layers
    assert result.verified < 1e-4
    for layer in result.layers:
        assert layer.certificate < 1e-4, layer
        assert 1 <= layer.kept < layer.units
        if layer.relative_error is not None:
            assert layer.relative_error <= layer.uncompensated_error * (1 + 1e-6) + 1e-7, layer
    assert result.cost.params == count_params(result.model) < result.cost.dense_params
    assert result.cost.macs < result.cost.dense_macs
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    return result


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_sequential_with_the_dense_target(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", PLAIN[1::6])
def test_oneshot_with_residual_streams(name: str) -> None:
    check(name, order="oneshot", compensate="local", scope="all", method="l1")
