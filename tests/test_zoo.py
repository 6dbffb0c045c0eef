"""A representative part of the zoo: each network shrinks, and removal equals masking.

`make test-long` runs the large ones, `make zoo` all of it.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ispasp
from ispasp.surgery.fold import folding
from ispasp.surgery.verify import masked_output, output_of, relative_error
from ispasp_lab import zoo
from ispasp_lab.zoo.coverage import count_macs, count_params, random_units
from support.zoo import case

NOTHING = {  # networks in which nothing can go -> a part of the reason
    "plain/maxout": "shape '[2, 16, 2]' is invalid",
    "plain/lstm": "no rule for aten.lstm.input",
    "plain/gru": "no rule for aten.gru.input",
    "timm/convnextv2_atto": "global response normalisation averages over these channels",
    "transformers/convnextv2": "global response normalisation averages over these channels",
    "transformers/mamba2": "mean runs over this axis",
}
PLAIN = [case.name for case in zoo.cases("plain") if case.name not in NOTHING]
TORCHVISION = ["resnet18"]
TRANSFORMERS = [
    *("bert", "gpt2", "llama", "mixtral", "t5"),
]
# To `make test-long`: what is large, or much like one of the others.
LARGE_TORCHVISION = [
    *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "googlenet", "maxvit_t", "mnasnet0_5"),
    *("mobilenet_v2", "mobilenet_v3_small", "regnet_x_400mf", "regnet_y_400mf", "squeezenet1_1", "swin_t"),
    "shufflenet_v2_x0_5",
]
LARGE_TIMM = [
    *("beit_base_patch16_224", "cait_xxs24_224", "convnext_atto", "edgenext_xx_small", "eva02_tiny_patch14_224"),
    *("ghostnet_050", "mixer_s32_224", "nf_regnet_b0", "skresnet18", "swin_tiny_patch4_window7_224", "tinynet_e"),
    *("xcit_nano_12_p16_224", "mobilenetv2_050", "resnetv2_18", "seresnet18", "vit_tiny_patch16_224"),
]
MORE_TRANSFORMERS = [
    *("roberta", "distilbert", "albert", "electra", "deit", "beit", "dinov2", "convnext", "resnet", "segformer", "opt"),
    *("gpt_neox", "mistral", "qwen2", "qwen3", "bart", "clip_vision", "modernbert", "vit", "mobilenet_v2", "bloom"),
    *("gemma2", "mamba", "phi3", "whisper", "falcon_new", "clip", "deberta_v2", "swin", "wav2vec2"),
]
SMALLER = [
    *PLAIN,
    *(f"torchvision/{name}" for name in TORCHVISION),
    *(f"transformers/{name}" for name in TRANSFORMERS),
    *(pytest.param(f"torchvision/{name}", marks=pytest.mark.long) for name in LARGE_TORCHVISION),
    *(pytest.param(f"timm/{name}", marks=pytest.mark.long) for name in LARGE_TIMM),
    *(pytest.param(f"transformers/{name}", marks=pytest.mark.long) for name in MORE_TRANSFORMERS),
]


def build(name: str) -> tuple[nn.Module, object]:
    """The network with some of its parameters frozen, and its batch."""
    model = case(name).build()
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 3 != 0)
    return model, case(name).batch()


def same_state(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    now = model.state_dict()
    return list(now) == list(before) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(now.values(), before.values(), strict=True)
    )


@pytest.mark.parametrize("name", SMALLER)
def test_removal_equals_masking(name: str) -> None:
    model, batch = build(name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    flags = {key: (p.dtype, p.requires_grad, p.ndim) for key, p in model.named_parameters(remove_duplicate=False)}
    dense = output_of(model, batch)

    found = ispasp.survey(model, batch)
    plan = found.plan(random_units(found, 0.5))
    with folding(model) as layers:
        layers.fold(found.structure.folded)  # as it was analysed
        expected = masked_output(found.analysis, model, batch, plan.kept)
        layers.restore()
    assert same_state(model, before)  # surveys try things out: nothing of it stays
    assert all(torch.equal(a, b) for a, b in zip(output_of(model, batch), dense, strict=True))
    assert relative_error(dense, expected) > 1e-3  # else the comparison is blind

    assert ispasp.apply_(model, plan, batch, checked_by=found) is model
    assert relative_error(output_of(model, batch), expected) <= 1e-4
    now = {key: (p.dtype, p.requires_grad, p.ndim) for key, p in model.named_parameters(remove_duplicate=False)}
    if not plan.structure.folded:  # what is folded has a plain weight instead
        assert list(model.state_dict()) == list(before)
        assert now == flags

    cost = found.cost(plan)
    assert cost.params == count_params(model) < cost.dense_params
    assert cost.macs < cost.dense_macs
    assert cost.macs == count_macs(model, batch, found.costs.examples)


@pytest.mark.parametrize("name", NOTHING)
def test_where_nothing_can_go_the_reason_is_told(name: str) -> None:
    model, batch = build(name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(ispasp.errors.NothingToPruneError) as raised:
        ispasp.survey(model, batch)
    assert type(model).__name__ in str(raised.value)
    assert NOTHING[name] in str(raised.value)
    assert same_state(model, before)
