"""Every classification network of torchvision."""

from collections.abc import Callable
from typing import Any

from torch import nn

from ispasp.integrations.torchvision import import_torchvision

from .case import Case, case, image

_SIZE = 64
_SIZES = {"inception_v3": 80, "vit_b_16": 32, "vit_h_14": 28, "vit_l_16": 32}
_OPTIONS: dict[str, dict[str, Any]] = {
    "googlenet": {"init_weights": False},  # its own initialisation takes seconds
    "inception_v3": {"init_weights": False},
    "vit_b_16": {"image_size": 32},
    "vit_b_32": {"image_size": 64},
}


def _vit(patch: int) -> nn.Module:
    """Return the large and huge vision transformers with two layers of a quarter of the width."""
    from torchvision.models.vision_transformer import VisionTransformer

    shape = {"num_layers": 2, "num_heads": 16, "hidden_dim": 256, "mlp_dim": 1024}
    vit: nn.Module = VisionTransformer(2 * patch, patch, **shape, num_classes=10)
    return vit


def _regnet(depth: int, width: int, slope: float, step: float) -> nn.Module:
    """Return the two biggest RegNets with all widths divided by eight."""
    from torchvision.models.regnet import BlockParams, RegNet

    blocks = BlockParams.from_init_params(depth, width, slope, step, group_width=24, se_ratio=0.25)
    regnet: nn.Module = RegNet(blocks, num_classes=10)
    return regnet


def _convnext() -> nn.Module:
    """Return ConvNeXt large with a quarter of the width and a third of the depth."""
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    stages = [(48, 96, 1), (96, 192, 1), (192, 384, 9), (384, None, 1)]
    convnext: nn.Module = ConvNeXt([CNBlockConfig(*stage) for stage in stages], num_classes=10)
    return convnext


def _maxvit() -> nn.Module:
    """Return MaxViT with a quarter of the width; its windows tie it to 224 pixels otherwise."""
    from torchvision.models.maxvit import MaxVit

    shape = {"stem_channels": 16, "block_channels": [16, 32, 64, 128], "block_layers": [2, 2, 5, 2]}
    small = {"partition_size": 2, "head_dim": 8, "stochastic_depth_prob": 0.2, "num_classes": 10}
    maxvit: nn.Module = MaxVit((_SIZE, _SIZE), **shape, **small)
    return maxvit


_SMALLER: dict[str, Callable[[], nn.Module]] = {
    "vit_l_16": lambda: _vit(16),
    "vit_l_32": lambda: _vit(32),
    "vit_h_14": lambda: _vit(14),
    "regnet_y_32gf": lambda: _regnet(20, 32, 14.5, 2.53),
    "regnet_y_128gf": lambda: _regnet(27, 56, 20.1, 2.52),
    "convnext_large": _convnext,
    "maxvit_t": _maxvit,
}


def _builder(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        models = import_torchvision().models
        model: nn.Module = models.get_model(name, weights=None, num_classes=10, **_OPTIONS.get(name, {}))
        return model

    return build


def cases() -> list[Case]:
    """Return a case for every classification builder of the installed torchvision."""
    models = import_torchvision().models
    names = models.list_models(module=models)
    makers = {name: _SMALLER.get(name, _builder(name)) for name in names}
    return [case("torchvision", name, make, image(_SIZES.get(name, _SIZE))) for name, make in makers.items()]
