"""Ridge least squares for any layer, solved on stacked data: no Gram matrices, no patches.

A layer's output is linear in its weight, so the column of the design matrix that belongs to an entry of the weight is
the output of the layer whose weight is one there and zero elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Solution:
    weight: Tensor
    bias: Tensor  # the shift of each output, where one was allowed
    size: float  # norm of the outputs without their old bias
    error: float  # relative to that


def design(layer: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    """(rows, entries of the weight): rows are all outputs of all batches."""
    blank = copy.deepcopy(layer)
    blank.bias = None
    columns = []
    with torch.no_grad():
        for entry in range(layer.weight.numel()):
            blank.weight.zero_()
            blank.weight.view(-1)[entry] = 1.0
            columns.append(torch.cat([blank(x).flatten() for x in inputs]))
    return torch.stack(columns, 1)


def channels(outputs: Sequence[Tensor], dim: int) -> Tensor:
    """The output channel of every row. (rows,)"""
    shapes = [[1] * y.ndim for y in outputs]
    for shape in shapes:
        shape[dim] = -1
    return torch.cat(
        [torch.arange(y.shape[dim]).reshape(s).expand(y.shape).flatten() for y, s in zip(outputs, shapes, strict=True)]
    )


def fitted(
    layer: nn.Module,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    *,
    ridge: float,
    groups: int = 1,
    intercept: bool = True,
) -> Solution:
    """Minimise ||T - W X - b||^2 + lambda ||W - W0||^2, lambda = ridge x mean sum of squares of a group's inputs."""
    dim = -1 if isinstance(layer, nn.Linear) else 1
    D, at = design(layer, inputs), channels(targets, dim)
    T = torch.cat([t.detach().flatten() for t in targets])
    outputs = int(at.max()) + 1
    old = layer.bias.detach() if layer.bias is not None else torch.zeros(outputs, dtype=T.dtype)
    B = torch.nn.functional.one_hot(at, outputs).to(T.dtype)
    w0 = layer.weight.detach().flatten()
    # The column of an entry is not zero in the rows of one output channel only, and holds one input there.
    rows = B.sum(0)[0]
    mine = ((D != 0).to(T.dtype).T @ B).argmax(1)  # output channel of each entry
    squares = D.square().sum(0) - (D.sum(0).square() / rows if intercept else 0)
    group = mine // (outputs // groups)
    strength = torch.stack([squares[group == g].mean() for g in range(groups)])[group] * ridge
    columns = torch.cat([D, B], 1) if intercept else D
    penalty = torch.zeros(len(w0), columns.shape[1], dtype=T.dtype)
    penalty[:, : len(w0)] = torch.diag(strength.sqrt())
    goal = T if intercept else T - B @ old
    stacked = torch.cat([columns, penalty]), torch.cat([goal, strength.sqrt() * w0])
    solution = torch.linalg.lstsq(stacked[0], stacked[1][:, None], driver="gelsd").solution[:, 0]
    bias = solution[len(w0) :] if intercept else old
    size, left = (T - B @ old).norm(), (T - D @ solution[: len(w0)] - B @ bias).norm()
    return Solution(solution[: len(w0)].reshape(layer.weight.shape), bias, float(size), float(left / size))


def seen_by(model: nn.Module, path: str, batches: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and outputs of a module."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def hook(_module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        inputs.append(args[0].clone())
        outputs.append(output.clone())

    handle = model.get_submodule(path).register_forward_hook(hook)
    with torch.no_grad():
        for batch in batches:
            model(batch)
    handle.remove()
    return inputs, outputs
