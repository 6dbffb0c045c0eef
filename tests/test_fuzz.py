"""Removal equals masking on random networks, checked by means of the tests' own.

The entries of a random weight are all different, so the pruned model's tensors tell by value which positions of each
axis are left. In a copy of the dense model the weights that read a removed position are set to zero; nothing of the
library's graph, layouts or masks takes part.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.weight_norm import WeightNorm

import ispasp
from support.networks import LEAVES, NESTED, Network, networks

EXAMPLES = int(os.environ.get("ISPASP_EXAMPLES", "40"))
TOLERANCE = 1e-9
fuzz = settings(
    max_examples=EXAMPLES,
    phases=[Phase.explicit, Phase.generate],  # shrinking takes minutes; set ISPASP_SHRINK, or call `build` as printed
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
if "ISPASP_SHRINK" in os.environ:
    fuzz = settings(fuzz, phases=list(Phase))


def surveyed(network: Network, scope: str) -> ispasp.Survey:
    try:
        return ispasp.survey(network.model, network.batch, scope=scope)
    except ispasp.NothingToPruneError as nothing:
        assert_no_mismatch(network, str(nothing))
        assume(False)
        raise


def assert_no_mismatch(network: Network, reasons: str) -> None:
    """The survey tries its dimensions; one it has to take back is a mistake, of the rules or of the corrections."""
    assert network.stubborn or "does not equal masking" not in reasons, reasons


def random_plan(data: st.DataObject, survey: ispasp.Survey) -> ispasp.Plan:
    """Each dimension keeps a random non-empty set of its units."""
    kept = {d.name: sorted(data.draw(st.sets(st.integers(0, d.units - 1), min_size=1))) for d in survey.dimensions}
    return survey.plan(kept)


def output(model: nn.Module, batch: Any) -> list[Tensor]:
    with torch.no_grad():
        returned = (
            model(**batch) if isinstance(batch, dict) else model(*batch) if isinstance(batch, tuple) else model(batch)
        )
    return [leaf for leaf in torch.utils._pytree.tree_leaves(returned) if isinstance(leaf, Tensor)]


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    assert [t.shape for t in found] == [t.shape for t in expected]
    return max(float((a - b).norm() / (b.norm() + 1e-12)) for a, b in zip(found, expected, strict=True))


# Masking by our own means -----------------------------------------------------------------------------------------


def plain(model: nn.Module) -> nn.Module:
    """A copy whose weights are tensors of their own: weight_norm and parametrizations are folded in."""
    model = copy.deepcopy(model)
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
        along = where[axis].movedim(axis, 0).flatten(1)
        assert (along == along[:, :1]).all(), "surgery must take whole slices"
        positions.append(along[:, 0])
    return positions


def masked(model: nn.Module, pruned: nn.Module) -> nn.Module:
    """The dense model with zeros in the weights that read what the pruned model has lost."""
    dense, small = plain(model), dict(plain(pruned).named_parameters(remove_duplicate=False))
    tensors = dict(dense.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        for name, axes in reading_axes(dense):
            if name in tensors and small[name].shape != tensors[name].shape:
                positions = left(small[name], before[name])
                for axis in axes:
                    gone = torch.ones(before[name].shape[axis], dtype=torch.bool)
                    gone[positions[axis]] = False
                    tensors[name].movedim(axis, 0)[gone] = 0
    return dense


# Properties -------------------------------------------------------------------------------------------------------


@fuzz
@given(network=networks(), data=st.data())
def test_removal_equals_masking(network: Network, data: st.DataObject) -> None:
    model, batch = network.model, network.batch
    before = copy.deepcopy(model.state_dict())
    dense_output = output(model, batch)
    survey = surveyed(network, data.draw(st.sampled_from(["blocks", "all"])))
    assert_no_mismatch(network, "\n".join(map(str, survey.frozen)))
    plan = random_plan(data, survey)
    pruned = ispasp.apply_(copy.deepcopy(model), ispasp.Plan.from_json(plan.to_json()), batch=batch)

    assert distance(output(pruned, batch), output(masked(model, pruned), batch)) <= TOLERANCE
    assert list(pruned.state_dict()) == list(before)
    assert sum(p.numel() for p in pruned.parameters()) == survey.cost(plan).params
    assert ispasp.Plan.from_json(plan.to_json()) == plan
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(map(torch.equal, output(model, batch), dense_output))
    assert trains(pruned, batch) == trains(copy.deepcopy(model), batch)


def trains(model: nn.Module, batch: Any) -> set[str] | str:
    """Names of the parameters that get gradients in train mode, or the error's type."""
    model.train()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            returned = (
                model(**batch)
                if isinstance(batch, dict)
                else model(*batch)
                if isinstance(batch, tuple)
                else model(batch)
            )
        except ValueError:  # instance norm refuses a single spatial element
            return "ValueError"
        leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(returned) if isinstance(leaf, Tensor)]
        sum(leaf.square().sum() for leaf in leaves).backward()
    assert all(p.grad is None or p.grad.shape == p.shape for p in model.parameters())
    return {name for name, p in model.named_parameters() if p.grad is not None}


@fuzz
@given(network=networks())
def test_network_is_well_made(network: Network) -> None:
    found = output(network.model, network.batch)
    assert all(t.isfinite().all() for t in found)
    assert all(map(torch.equal, found, output(network.model, network.batch)))


@pytest.mark.parametrize("kind", ["image", "tokens"])
def test_the_table_is_large(kind: str) -> None:
    assert len(LEAVES[kind]) + len(NESTED[kind]) > 15
