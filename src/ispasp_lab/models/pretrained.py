"""Pretrained networks of torchvision."""

from __future__ import annotations

import torch
from torch import nn

from ispasp.integrations.torchvision import import_torchvision
from ispasp_lab.data.folder import find


def mobilenet_v2(*, pretrained: bool = True) -> nn.Module:
    """MobileNetV2 in eval mode, with the ImageNet weights of mobilenet_v2.pth.

    (batch, 3, 224, 224) -> (batch, 1000).
    """
    model: nn.Module = import_torchvision().models.mobilenet_v2()
    if pretrained:
        model.load_state_dict(torch.load(find("mobilenet_v2.pth"), map_location="cpu", weights_only=True))
    return model.eval()
