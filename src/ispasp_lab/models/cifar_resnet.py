"""The residual networks for CIFAR-10 (He et al. 2016, Section 4.2), whose shortcuts have no parameters."""

from __future__ import annotations

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from ispasp.errors import InputError
from ispasp_lab.data.folder import find


class Block(nn.Module):
    """Two 3 x 3 convolutions around a shortcut; where the map shrinks, the shortcut drops pixels and adds zeros.

    >>> Block(16, 32, stride=2)(torch.ones(1, 16, 8, 8)).shape
    torch.Size([1, 32, 4, 4])
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        """Convolutions of `inputs` -> `width` -> `width` channels."""
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.stride, self.zeros = stride, (width - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, h, w) -> (batch, width, h / stride, w / stride)."""
        y = torch.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return torch.relu(y + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        if not self.zeros:
            return x
        return functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.zeros, self.zeros))


class CifarResNet(nn.Module):
    """Three stages of 16, 32 and 64 channels, `(depth - 2) / 6` blocks each: (batch, 3, 32, 32) -> (batch, 10).

    >>> CifarResNet(8)(torch.ones(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, depth: int) -> None:
        """A network of `depth` layers: 20, 32, 44, 56, 110."""
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise InputError(f"a CIFAR ResNet of {depth} layers: pass a depth of 6 n + 2, such as 20 or 56")
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks)
        self.layer2 = _stage(16, 32, blocks)
        self.layer3 = _stage(32, 64, blocks)
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, 32, 32) -> (batch, 10)."""
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


def _stage(inputs: int, width: int, blocks: int) -> nn.Sequential:
    first = Block(inputs, width, stride=width // inputs)
    return nn.Sequential(first, *(Block(width, width, stride=1) for _ in range(blocks - 1)))


def resnet20(*, pretrained: bool = True) -> CifarResNet:
    """ResNet20 in eval mode, with the weights of cifar10-resnet20.safetensors."""
    return _built(20, pretrained)


def resnet56(*, pretrained: bool = True) -> CifarResNet:
    """ResNet56 in eval mode, with the weights of cifar10-resnet56.safetensors.

    >>> resnet56(pretrained=False)(torch.ones(1, 3, 32, 32)).shape
    torch.Size([1, 10])
    """
    return _built(56, pretrained)


def _built(depth: int, pretrained: bool) -> CifarResNet:
    model = CifarResNet(depth)
    if pretrained:
        weights = load_file(find(f"cifar10-resnet{depth}.safetensors"))
        # The files lack BatchNorm's counters of training steps, which nothing reads in eval mode.
        counters = {name: t for name, t in model.state_dict().items() if name.endswith("num_batches_tracked")}
        model.load_state_dict({**counters, **weights})
    return model.eval()
