"""Discrimination-aware channel pruning: units that rebuild a layer's output and help intermediate classifiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ispasp._keep import widths
from ispasp._survey import Survey, survey
from ispasp.engine.sites import units_along
from ispasp.errors import InputError
from ispasp.graph.state import copied, random_numbers_kept
from ispasp.graph.trace import evaluating, run
from ispasp.select import sum_by_unit
from ispasp.select.evidence import descending
from ispasp.train.objective import inputs_of, labels_of, logits_of
from ispasp.types.dimension import HiddenDimension
from ispasp.types.plan import Plan

_HEAD_LR = 1e-2
Probe = Callable[[Any], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Growth:
    """How units are added. `heads`: intermediate classifiers; `balance`: weight of their loss; `updates`: after each.

    `at_once` units come in together. `head_steps`: of training for each classifier.
    """

    heads: int = 2
    balance: float = 1.0
    at_once: int = 1
    updates: int = 2
    lr: float = 1e-2
    head_steps: int = 100


_GROWTH = Growth()


def discrimination_aware(
    model: nn.Module, batches: Sequence[Any], keep: float, growth: Growth = _GROWTH, *, seed: int = 0
) -> Plan:
    """Add, one after the other, the units whose reading weights W_k have the largest gradient ||dL/dW_k||_F.

    Zhuang, Tan, Zhuang, Liu, Guo, Wu, Huang, Zhu (2018), Discrimination-aware Channel Pruning for Deep Neural Networks.
    L is the squared distance to the dense output of the layer, plus `balance` times the cross entropy of a classifier
    (BatchNorm, ReLU, mean over positions, linear) on the output of the last layer of the stage. The classifiers cut the
    network into `heads + 1` stages; the last uses the network's own output. Layers are pruned from first to last. A
    step adds the unit of largest gradient, W_k being zero for all that are out, and then trains the W_k that are in.
    Needs labels; costs two passes, one of them backward, for each unit that stays and each of its `updates`.

    Where we leave the paper: it fine-tunes the network with the additional losses before each stage, here only the
    classifiers are trained, since a plan takes no weights along. A new unit starts at its dense weights, not at zero,
    so that few updates do. Each step takes one batch. It may also stop at a tolerance, here `keep` says how many.

    >>> torch.manual_seed(0); net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))   # doctest: +ELLIPSIS
    <...>
    >>> len(discrimination_aware(net, [(torch.randn(8, 4), torch.arange(8) % 2)], 0.5).kept["0"])
    3
    """
    found = survey(model, inputs_of(batches[0]))
    counts = widths(found.dimensions, keep).counts
    pruned = [d for d in found.dimensions if d.name in counts]
    for d in pruned:
        _layers(model, d)  # raises before any work is done
    work, kept = copied(model).requires_grad_(False), dict[str, tuple[int, ...]]()
    with evaluating(model), evaluating(work), random_numbers_kept(), torch.enable_grad():
        torch.manual_seed(seed)
        for stage in _stages(pruned, growth.heads):
            end = "" if stage[-1] is pruned[-1] else stage[-1].consumers[-1]
            head = _trained_head(work, end, batches, growth.head_steps)
            for d in stage:
                kept[d.name] = _grown(found, d, counts[d.name], (model, work), head, batches, growth)
    return found.plan(kept)


@dataclass(frozen=True, eq=False)
class Head:
    """The classifier at the end of a stage: on a layer's output, or (`layer` empty) the network's own output."""

    layer: str
    classify: Callable[[Tensor], Tensor]

    def loss(self, outputs: Mapping[str, Tensor], labels: Tensor) -> Tensor:
        """Cross entropy."""
        return functional.cross_entropy(self.classify(outputs[self.layer]), labels)


class Classifier(nn.Module):
    """BatchNorm, ReLU, mean over positions, linear. (examples, channels, ...) or (examples, ..., features) -> classes

    >>> Classifier(3, 2, axis=1)(torch.randn(4, 3, 5, 5)).shape, Classifier(3, 2, axis=-1)(torch.randn(4, 3)).shape
    (torch.Size([4, 2]), torch.Size([4, 2]))
    """

    def __init__(self, features: int, classes: int, axis: int) -> None:
        """`axis` holds the features."""
        super().__init__()
        self.norm, self.linear, self.axis = nn.BatchNorm1d(features), nn.Linear(features, classes), axis

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        rows = x.movedim(self.axis, -1).reshape(len(x), -1, self.norm.num_features)
        active = torch.relu(self.norm(rows.flatten(0, 1))).reshape(rows.shape)
        scores: Tensor = self.linear(active.mean(1))
        return scores


def _stages(pruned: Sequence[HiddenDimension], heads: int) -> Iterator[Sequence[HiddenDimension]]:
    """Parts of nearly equal length, none empty."""
    parts = max(1, min(heads + 1, len(pruned)))
    edges = [round(i * len(pruned) / parts) for i in range(parts + 1)]
    return (pruned[a:b] for a, b in pairwise(edges) if b > a)


def _layers(model: nn.Module, d: HiddenDimension) -> list[nn.Module]:
    """The layers that read a hidden dimension."""
    named = dict(model.named_modules())
    layers = [named.get(path) for path in d.consumers]
    found = [layer for layer in layers if isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d))]
    if len(found) < len(layers):
        raise InputError(
            f"{d.name!r} is read by {', '.join(d.consumers)}: discrimination-aware pruning is for units that Linear, "
            "Conv1d or Conv2d layers read"
        )
    return [*found]


@contextmanager
def _watched(model: nn.Module, paths: Sequence[str]) -> Iterator[Probe]:
    """A function that runs the model on a batch and returns the outputs of layers; "" is the model's own."""
    outputs: dict[str, Tensor] = {}

    def note(path: str) -> Callable[..., None]:
        return lambda _, __, y: outputs.__setitem__(path, y.clone())  # what follows may work in place

    hooks = [model.get_submodule(path).register_forward_hook(note(path)) for path in paths if path]

    def probe(batch: Any) -> Mapping[str, Tensor]:
        outputs[""] = logits_of(run(model, inputs_of(batch)))
        return outputs

    try:
        yield probe
    finally:
        for hook in hooks:
            hook.remove()


def _trained_head(work: nn.Module, end: str, batches: Sequence[Any], steps: int) -> Head:
    """The classifier of a stage, trained on what the layer gives so far."""
    if not end:
        return Head("", lambda logits: logits)
    with _watched(work, [end]) as probe, torch.no_grad():
        seen = [(probe(batch)[end].clone(), labels_of(batch)) for batch in batches]
    layer = work.get_submodule(end)
    axis = 1 if isinstance(layer, (nn.Conv1d, nn.Conv2d)) else -1
    classes = 1 + max(int(labels.max()) for _, labels in seen)
    head = Classifier(seen[0][0].shape[axis], classes, axis).to(seen[0][0])
    adam = torch.optim.Adam(head.parameters(), _HEAD_LR)
    for _, (features, labels) in zip(range(steps), cycle(seen), strict=False):
        adam.zero_grad()
        functional.cross_entropy(head(features), labels).backward()  # type: ignore[no-untyped-call]
        adam.step()
    return Head(end, head.eval().requires_grad_(False))


def _grown(
    found: Survey,
    d: HiddenDimension,
    count: int,
    models: tuple[nn.Module, nn.Module],
    head: Head,
    batches: Sequence[Any],
    growth: Growth,
) -> tuple[int, ...]:
    """The units of one hidden dimension. The layers of `work` that read it end with the trained weights of these."""
    model, work = models
    weights = [layer.get_parameter("weight").requires_grad_(True) for layer in _layers(work, d)]
    dense = [W.detach().clone() for W in weights]
    units = [_units_of_inputs(found, d, path) for path in d.consumers]
    stays = torch.zeros(d.units, dtype=torch.bool)
    data = cycle(batches)
    with _watched(model, d.consumers) as wanted, _watched(work, [*d.consumers, head.layer]) as given:

        def gradients() -> tuple[Tensor, ...]:
            batch = next(data)
            with torch.no_grad():
                target = dict(wanted(batch))
            now = given(batch)
            rebuilt = torch.stack([(now[p] - target[p]).square().mean() for p in d.consumers]).sum() / 2
            return torch.autograd.grad(rebuilt + growth.balance * head.loss(now, labels_of(batch)), weights)

        _write(weights, dense, [torch.zeros(len(u), dtype=torch.bool) for u in units])
        while int(stays.sum()) < count:
            score = _by_unit(gradients(), units, d.units).masked_fill(stays, -torch.inf)
            new = torch.zeros_like(stays)
            new[descending(score)[: min(growth.at_once, count - int(stays.sum()))]] = True
            _write(weights, dense, [new[u] for u in units], stays=[stays[u] for u in units])
            stays |= new
            for _ in range(growth.updates):
                for W, G, u in zip(weights, gradients(), units, strict=True):
                    W.data -= growth.lr * G * _along_inputs(stays[u], W)
    for W in weights:
        W.requires_grad_(False)
    return tuple(torch.nonzero(stays).flatten().tolist())


def _units_of_inputs(found: Survey, d: HiddenDimension, path: str) -> Tensor:
    """The unit of each input of a layer; positions of no unit count as their own, the last. (inputs,)"""
    axes = found.structure.tensors[f"{path}.weight"].axes
    if 1 not in axes:
        raise InputError(f"{path!r} is a grouped convolution: discrimination-aware pruning has no units of its inputs")
    index = units_along(axes[1], d.name)
    if bool((index < 0).any()):
        raise InputError(f"{path!r} reads more than {d.name!r}: discrimination-aware pruning needs layers of their own")
    return index


def _by_unit(gradients: Sequence[Tensor], units: Sequence[Tensor], n: int) -> Tensor:
    """||dL/dW_k||_F^2, the sum over layers. (units,)"""
    squares = [g.double().square().movedim(1, 0).flatten(1).sum(1) for g in gradients]
    return torch.stack([sum_by_unit(s.cpu(), u, n) for s, u in zip(squares, units, strict=True)]).sum(0)


def _along_inputs(mask: Tensor, W: Tensor) -> Tensor:
    return mask.to(W).reshape(1, -1, *(1,) * (W.ndim - 2))


def _write(
    weights: Sequence[Tensor], dense: Sequence[Tensor], new: Sequence[Tensor], stays: Sequence[Tensor] | None = None
) -> None:
    """Units that come in get their dense weights, units that are in keep theirs, all others get zero."""
    for k, (W, D) in enumerate(zip(weights, dense, strict=True)):
        old = _along_inputs(stays[k], W) * W.data if stays is not None else torch.zeros_like(W.data)
        W.data = old + _along_inputs(new[k], W) * D
