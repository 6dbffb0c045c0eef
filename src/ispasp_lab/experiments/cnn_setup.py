"""Convolutional networks and images by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ispasp.errors import InputError
from ispasp.integrations.torchvision import import_torchvision
from ispasp_lab.data import Files, Pixels, cifar10, find, image_folder, imagenet_mini
from ispasp_lab.models import CifarResNet

TORCHVISION = ("resnet34", "mobilenet_v2")
_CIFAR = "cifar_resnet"


@dataclass(frozen=True, eq=False)
class Images:
    """Images to calibrate and train on, and images to test on, with labels."""

    x: Pixels | Files
    y: Tensor
    x_test: Pixels | Files
    y_test: Tensor

    def some(self, examples: int, tested: int, seed: int) -> Images:
        """That many training images, drawn at random, and the first ones (0: all) of the test images.

        Where classes come one after the other, as in a folder, the test images are drawn at random too.
        """
        chosen = torch.randperm(len(self.y), generator=torch.Generator().manual_seed(seed))[:examples]
        test = torch.arange(len(self.y_test))
        if tested and bool((self.y_test.diff() >= 0).all()):
            test = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))
        test = test[: tested or None]
        return Images(self.x.subset(chosen), self.y[chosen], self.x_test.subset(test), self.y_test[test])


def load_images(name: str) -> Images:
    """Images by name: cifar10, imagenet-mini, or a folder with train/ and val/, each with one sub-folder per class.

    >>> load_images("no-such-folder")
    Traceback (most recent call last):
    ispasp.errors.InputError: data 'no-such-folder': choose cifar10 or imagenet-mini, or pass a folder with train/ and
    val/
    """
    if name == "cifar10":
        return Images(*cifar10("train"), *cifar10("test"))
    if name == "imagenet-mini":
        return Images(*imagenet_mini("calibration"), *imagenet_mini("val"))
    folder = Path(name)
    if not (folder / "train").is_dir() or not (folder / "val").is_dir():
        raise InputError(f"data {name!r}: choose cifar10 or imagenet-mini, or pass a folder with train/ and val/")
    return Images(*image_folder(folder / "train"), *image_folder(folder / "val"))


def load_network(name: str, weights: Path | None = None) -> nn.Module:
    """A network in eval mode: resnet34 or mobilenet_v2 for ImageNet, cifar_resnet20, cifar_resnet56, ... for CIFAR-10.

    `weights` is a state dict (.safetensors, or a file of torch.save with tensors only); without it the file of the
    network's name in the data folder is taken.

    >>> load_network("vgg")
    Traceback (most recent call last):
    ispasp.errors.InputError: model 'vgg': choose resnet34, mobilenet_v2 or cifar_resnet56 (any depth of 6 n + 2)
    """
    depth = name.removeprefix(_CIFAR)
    if name in TORCHVISION:
        model: nn.Module = getattr(import_torchvision().models, name)()
        path = weights or find(f"{name}.pth")
    elif name != depth and depth.isdecimal():
        model = CifarResNet(int(depth))
        path = weights or find(f"cifar10-resnet{depth}.safetensors")
    else:
        raise InputError(f"model {name!r}: choose resnet34, mobilenet_v2 or cifar_resnet56 (any depth of 6 n + 2)")
    missing, unexpected = model.load_state_dict(_state(path), strict=False)
    lacking = [key for key in missing if not key.endswith("num_batches_tracked")]  # nothing reads it in eval mode
    if lacking or unexpected:
        raise InputError(
            f"{path} does not fit {name}: {len(lacking)} tensors are missing and {len(unexpected)} unexpected "
            f"({', '.join([*lacking, *unexpected][:3])}): pass the state dict of a {name}"
        )
    return model.eval()


def _state(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise InputError(f"{path} is not a file: pass a state dict as .safetensors or .pth")
    if path.suffix == ".safetensors":
        return load_file(path)
    state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return state
