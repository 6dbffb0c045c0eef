"""Accuracy of a classifier."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ispasp.errors import InputError
from ispasp.report import track
from ispasp_lab.data.images import Examples, batches


def accuracy(model: nn.Module, x: Examples, y: Tensor, batch_size: int = 256, *, progress: bool = True) -> float:
    """Percent of the examples whose largest output is that of their label (top-1).

    x (n, ...) is a tensor, or anything read in slices; y (n,). The model runs in eval mode, without gradients, on the
    device of its parameters, and is then left as it was.

    >>> accuracy(nn.Identity(), torch.eye(2), torch.tensor([0, 0]))
    50.0
    """
    if len(x) != len(y) or not len(y):
        raise InputError(f"{len(x)} examples and {len(y)} labels: pass as many labels as examples, at least one")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    right = 0
    try:
        with torch.no_grad():
            total = -(-len(x) // batch_size)
            for part, labels in track(batches(x, batch_size, y), "accuracy", total, show=progress):
                right += int((model(part.to(device)).argmax(1).cpu() == labels.cpu()).sum())
    finally:
        for module, training in modes:
            module.training = training
    return 100 * right / len(y)
