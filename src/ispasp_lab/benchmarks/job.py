"""The job that `prune` and `paper` time: ResNet34 by the paper's 2.69 G recipe.

Images are noise, and weights are random unless the data folder holds `resnet34.pth`: neither changes the work to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ispasp._keep import recipes
from ispasp._options import Compensate
from ispasp._prune import prune as library_prune
from ispasp.errors import InputError
from ispasp.integrations.torchvision import import_torchvision
from ispasp.result import Result
from ispasp.select import ISpaSP
from ispasp_lab.data import available, find

RECIPE = recipes["resnet34-2.69G"]
WEIGHTS = "resnet34.pth"


def weights() -> str:
    """A description of the network's weights."""
    return f"the weights of {WEIGHTS}" if available(WEIGHTS) else "random weights"


def network(seed: int = 0) -> Any:
    """Torchvision's ResNet34 in eval mode. (batch, 3, h, w) -> (batch, 1000)"""
    torch.manual_seed(seed)
    model = import_torchvision().models.resnet34()
    if available(WEIGHTS):
        model.load_state_dict(torch.load(find(WEIGHTS), map_location="cpu", weights_only=True))
    return model.eval()


def images(count: int, batch: int, size: int = 224, seed: int = 0) -> list[Tensor]:
    """Batches of normalised noise, (batch, 3, size, size) each; the last one may be shorter.

    >>> [tuple(x.shape) for x in images(5, 2, 8)]
    [(2, 3, 8, 8), (2, 3, 8, 8), (1, 3, 8, 8)]
    """
    if count < 1 or batch < 1:
        raise InputError(f"{count} images in batches of {batch}: pass 1 or more of both")
    generator = torch.Generator().manual_seed(seed)
    return list(torch.split(torch.randn(count, 3, size, size, generator=generator), batch))


def forward(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """One pass of the network as it is."""
    with torch.no_grad():
        for batch in batches:
            model(batch)


def prune(model: nn.Module, batches: list[Tensor], T: int, compensate: Compensate = None) -> Result:
    """The library's way: sequential, i-SpaSP of at most T iterations."""
    return library_prune(
        model,
        batches,
        RECIPE,
        method=ISpaSP(iterations=T),
        compensate=compensate,
        refit="consumers",  # as the pages were measured
        order="sequential",
        examples=None,
        progress=False,
    )


def warm_up() -> None:
    """Prune a tiny network: the first export of a process imports for seconds."""
    tiny = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.BatchNorm2d(2)).eval()
    library_prune(tiny, [torch.randn(2, 3, 8, 8)], 0.5, compensate="dense", progress=False)
