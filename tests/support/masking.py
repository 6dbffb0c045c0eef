"""Masking by means of the tests' own: nothing of the library's graph, layouts or masks takes part.

The entries of a random weight are all different, so the pruned model's tensors tell by value which positions of each
axis are left. In a copy of the dense model the weights that read a removed position are set to zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.weight_norm import WeightNorm

from ispasp.graph.state import copied


def called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def output(model: nn.Module, batch: Any) -> list[Tensor]:
    with torch.no_grad():
        returned = called(model, batch)
    return [leaf for leaf in torch.utils._pytree.tree_leaves(returned) if isinstance(leaf, Tensor)]


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    assert [t.shape for t in found] == [t.shape for t in expected]
    return max(float((a - b).norm() / (b.norm() + 1e-12)) for a, b in zip(found, expected, strict=True))


def plain(model: nn.Module) -> nn.Module:
    """A copy whose weights are tensors of their own: weight_norm and parametrizations are folded in."""
    model = copied(model)
    for module in list(model.modules()):
        if parametrize.is_parametrized(module):  # by hand: torch's removal also changes the class of the original
            weights = {name: getattr(module, name).detach() for name in module.parametrizations}
            del module.parametrizations
            module.__class__ = type(module).__bases__[0]
            for name, weight in weights.items():
                setattr(module, name, nn.Parameter(weight))
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, WeightNorm):
                hook.remove(module)
                del module._forward_pre_hooks[key]
    return model


def reading_axes(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Axes of the parameters that are summed over with activations: the inputs of layers."""
    for path, module in model.named_modules():
        own: dict[str, tuple[int, ...]] = dict(getattr(module, "reads", {}))
        if isinstance(module, nn.modules.conv._ConvNd):
            own["weight"] = (0,) if module.transposed else (1,)
        elif isinstance(module, nn.Linear):
            own["weight"] = (1,)
        elif isinstance(module, nn.MultiheadAttention):
            own["in_proj_weight"] = (1,)
        elif isinstance(module, nn.RNNBase):
            own |= {name: (1,) for name, _ in module.named_parameters() if name.startswith("weight")}
        for name, axes in own.items():
            yield f"{path}.{name}".lstrip("."), axes


def left(small: Tensor, dense: Tensor) -> list[Tensor]:
    """The positions of each axis of `dense` that `small` consists of, found by value."""
    values, order = dense.flatten().sort()
    wanted = small.flatten().contiguous()
    at = torch.searchsorted((values[1:] + values[:-1]) / 2, wanted)  # the nearest: weight_norm is exact up to rounding
    assert torch.allclose(values[at], wanted, rtol=1e-12, atol=1e-14), "surgery must not change the values that stay"
    where = torch.stack(torch.unravel_index(order[at], dense.shape)).view(dense.dim(), *small.shape)
    positions = []
    for axis in range(dense.dim()):
        along = where[axis].movedim(axis, 0).reshape(small.shape[axis], -1)
        assert (along == along[:, :1]).all(), "surgery must take whole slices"
        positions.append(along[:, 0])
    return positions


def masked(model: nn.Module, pruned: nn.Module) -> nn.Module:
    """The dense model with zeros in the weights that read what the pruned model has lost."""
    return embedded(model, pruned, (model, pruned))


def embedded(model: nn.Module, pruned: nn.Module, twins: tuple[nn.Module, nn.Module]) -> nn.Module:
    """The dense model with the pruned one's values where it has any, and zeros where it reads what is lost.

    `twins`: a dense model whose weights tell positions by value, and what the same plan leaves of it. So the pruned
    model may have other weights (refitted ones, or of a dtype with few values).
    """
    dense, small = plain(model), dict(plain(pruned).named_parameters(remove_duplicate=False))
    tagged, left_of = (dict(plain(twin).named_parameters(remove_duplicate=False)) for twin in twins)
    reads: dict[str, tuple[int, ...]] = {}
    for name, axes in reading_axes(dense):  # one weight may be read in several ways
        reads[name] = (*reads.get(name, ()), *axes)
    with torch.no_grad():
        for name, tensor in dense.named_parameters(remove_duplicate=False):
            if small[name].shape == tensor.shape:
                tensor.copy_(small[name])
                continue
            where = left(left_of[name], tagged[name])
            assert small[name].shape == left_of[name].shape, f"{name} has another shape than the plan gives it"
            tensor[torch.meshgrid(*where, indexing="ij")] = small[name]
            for axis in reads.get(name, ()):
                gone = torch.ones(tensor.shape[axis], dtype=torch.bool)
                gone[where[axis]] = False
                tensor.movedim(axis, 0)[gone] = 0
        _gain_biases(dense, small, tagged, left_of)
    return dense


def _gain_biases(
    dense: nn.Module, small: dict[str, nn.Parameter], tagged: dict[str, Tensor], left_of: dict[str, Tensor]
) -> None:
    """Compensation may give a layer a bias that had none; outputs that the layer has lost get zeros in it."""
    known = dict(dense.named_parameters(remove_duplicate=False))
    for name, parameter in small.items():
        path, _, key = name.rpartition(".")
        if name not in known:
            assert key == "bias", f"pruning has added {name}"
            layer, weight = dense.get_submodule(path), f"{path}.weight"
            axis = 1 if getattr(layer, "transposed", False) else 0
            bias = torch.zeros(tagged[weight].shape[axis], dtype=parameter.dtype)
            bias[left(left_of[weight], tagged[weight])[axis]] = parameter
            layer.bias = nn.Parameter(bias)


def trains(model: nn.Module, batch: Any) -> set[str] | str:
    """Names of the parameters that get gradients in train mode, or the error's type."""
    model.train()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            returned = called(model, batch)
        except ValueError:  # instance norm refuses a single spatial element
            return "ValueError"
        leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(returned) if isinstance(leaf, Tensor)]
        sum(leaf.square().sum() for leaf in leaves).backward()
    assert all(p.grad is None or p.grad.shape == p.shape for p in model.parameters())
    return {name for name, p in model.named_parameters() if p.grad is not None}
