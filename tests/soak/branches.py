"""Networks that branch, count and gate: what comes out runs wherever the dense one ran, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import ispasp
from soak.branching import BODY, GATES, HOOKS, INPUTS, RETURNS, STATE, Branching, add_hooks
from soak.case import Case, check
from soak.options import random_options
from soak.state import unchanged
from support.masking import called, embedded

TOLERANCE = 1e-8


def run(case: Case) -> None:
    seen: list[str] = []
    model, twin, dtype = draw(case, seen)
    batches = [batch(case, dtype) for _ in range(case.rng.randint(1, 4))]
    case.options["shapes"] = [tuple(b.shape) for b in batches]
    options = random_options(case, plain=0.6)
    keep = case.chosen("keep", 0.5, 0.3, 0.75, 2, {"*": 0.5})
    if case.chance(0.3):
        model.train()
    before = {mode: [answer(model, b, mode) for b in batches] for mode in (False, True)}
    try:
        with case.may_refuse("prune"), unchanged(model, "prune"):
            result = ispasp.prune(model, batches, keep, **options)
    finally:
        check(set(seen) <= {"Tensor"}, f"a hook of the user was given {sorted(set(seen))}")
    small = ispasp.apply_(copy.deepcopy(twin), result.plan)
    masked = embedded(model, result.model, (twin, small))
    if options.get("recalibrate"):
        copy_statistics(result.model, masked, result.plan.kept.get("body"))
    for mode in (False, True):
        for number, given in enumerate(batches):
            check_answer(case, result.model, masked, given, mode, before[mode][number])
    case.facts["equals masking in both modes"] = True


def draw(case: Case, seen: list[str]) -> tuple[Branching, Branching, torch.dtype]:
    """A network, and its twin whose weights are all different."""
    features = [case.pick(*kind) for kind in (BODY, BODY, GATES, STATE, HOOKS, RETURNS) if case.chance(0.45)]
    features = features or ["length"]
    case.options["features"] = features
    width, depth, seed = case.pick(6, 8), case.rng.randint(0, 3), case.rng.randrange(10**6)
    torch.manual_seed(seed)
    model = Branching(features, width, depth).double().eval()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.normal_()
    add_hooks(model, features, seen)
    dtype = torch.float32 if "double" in features else torch.float64
    return model.to(dtype), twin, dtype


def batch(case: Case, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(case.rng.randrange(10**6))
    shape = (case.pick(2, 3, 4, 6), case.pick(1, 3, 4, 7), INPUTS)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) + case.pick(-0.5, 0.5)


def answer(model: nn.Module, given: Tensor, training: bool) -> Any:
    """What a copy of the model returns, or the error's type; a copy, since forwards have a memory."""
    model = copy.deepcopy(model).train(training)
    try:
        with torch.no_grad():
            return called(model, given)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        return error


def check_answer(case: Case, pruned: nn.Module, masked: nn.Module, given: Tensor, mode: bool, dense: Any) -> None:
    where = f"in {'train' if mode else 'eval'} mode on a batch of {tuple(given.shape)}"
    found, expected = answer(pruned, given, mode), answer(masked, given, mode)
    if isinstance(dense, Exception):
        return
    if isinstance(found, Exception):
        raise found
    check(not isinstance(expected, Exception), f"the oracle fails {where}: {expected!r}")
    (ours, our_tree), (theirs, tree) = pytree.tree_flatten(found), pytree.tree_flatten(expected)
    check(our_tree == tree, f"another structure of outputs {where}")
    for one, other in zip(ours, theirs, strict=True):
        check(type(one) is type(other), f"another type of output {where}")
        same = close(one, other) if isinstance(one, Tensor) else one == other
        check(same, f"does not equal masking {where}: {str(one)[:300]} instead of {str(other)[:300]}")


def close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    tolerance = TOLERANCE if other.dtype in (torch.float64, torch.complex128) else 1e-4
    finite = other[other.isfinite()]
    size = float(finite.abs().max()) if finite.numel() else 1.0
    return torch.allclose(one, other, rtol=tolerance * 10, atol=max(size, 1e-6) * tolerance * 100, equal_nan=True)


def copy_statistics(pruned: nn.Module, masked: nn.Module, kept: Sequence[int] | None) -> None:
    """BatchNorm statistics that were estimated anew belong to the channels that stay, of the layer before."""
    for path, module in pruned.named_modules():
        if isinstance(module, nn.BatchNorm1d):
            norm = masked.get_submodule(path)
            channels = list(range(norm.num_features) if kept is None else kept)
            check(len(channels) == module.num_features, "a BatchNorm has other channels than the plan says")
            for leaf in ("running_mean", "running_var"):
                getattr(norm, leaf)[channels] = getattr(module, leaf)
