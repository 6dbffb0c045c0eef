"""SNIP and GraSP: units by the gradients of all weights at once, meant for networks before training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ispasp._survey import Survey, survey
from ispasp.graph.trace import run
from ispasp.train.objective import inputs_of, labels_of, logits_of
from ispasp.types.plan import Plan
from ispasp_lab.procedures.scores import plan_by, sum_over_makers

Loss = Callable[[Tensor, Any], Tensor]


def snip(
    model: nn.Module,
    batches: Sequence[Any],
    keep: float,
    loss: Loss = functional.cross_entropy,
    *,
    together: bool = True,
) -> Plan:
    """Keep the units whose weights w have the largest sum of |w dL/dw|.

    Lee, Ajanthan, Torr (2019), SNIP: Single-shot Network Pruning based on Connection Sensitivity. Needs labels and one
    backward pass of each batch (inputs, labels); the gradient is that of the mean loss. The paper removes single
    weights, all layers in one ranking; here a unit has the sum of those that make it. `together=False` keeps the same
    fraction of every hidden dimension.

    >>> torch.manual_seed(0); net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))   # doctest: +ELLIPSIS
    <...>
    >>> len(snip(net, [(torch.randn(8, 4), torch.arange(8) % 2)], 0.5).kept["0"])
    3
    """
    found, weights, g = _gradient(model, batches, loss, 1.0, graph=False)
    values = {name: (w * dw).abs() for (name, w), dw in zip(weights.items(), g, strict=True)}
    return plan_by(found, sum_over_makers(found, values), keep, together=together)


def grasp(
    model: nn.Module,
    batches: Sequence[Any],
    keep: float,
    loss: Loss = functional.cross_entropy,
    *,
    temperature: float = 200.0,
    together: bool = True,
) -> Plan:
    """Keep the units whose removal would lower the norm of the gradient most: the largest sum of w (H g).

    Wang, Zhang, Grosse (2020), Picking Winning Tickets Before Training by Preserving Gradient Flow. g is the gradient
    of the loss by all weights, H its second derivative: ||g||^2 changes by -2 w H g when the weights w go. Needs labels
    and a second backward pass. Logits are divided by the temperature, as there. The paper removes single weights.

    >>> torch.manual_seed(0); net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))   # doctest: +ELLIPSIS
    <...>
    >>> len(grasp(net, [(torch.randn(8, 4), torch.arange(8) % 2)], 0.5).kept["0"])
    3
    """
    found, weights, g = _gradient(model, batches, loss, temperature, graph=True)
    flow = torch.stack([(dw.detach() * dw).sum() for dw in g]).sum()
    Hg = torch.autograd.grad(flow, list(weights.values()), allow_unused=True)
    values = {
        name: torch.zeros_like(w) if hw is None else w.detach() * hw
        for (name, w), hw in zip(weights.items(), Hg, strict=True)
    }
    return plan_by(found, sum_over_makers(found, values), keep, together=together)


def _gradient(
    model: nn.Module, batches: Sequence[Any], loss: Loss, temperature: float, *, graph: bool
) -> tuple[Survey, dict[str, Tensor], tuple[Tensor, ...]]:
    """The survey, the parameters by name, and the gradient of the mean loss over the batches."""
    found = survey(model, inputs_of(batches[0]))
    weights: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        losses = [loss(logits_of(run(model, inputs_of(b))) / temperature, labels_of(b)) for b in batches]
        total = torch.stack(losses).mean()
        g = torch.autograd.grad(total, list(weights.values()), create_graph=graph, allow_unused=True)
    pairs = zip(g, weights.values(), strict=True)
    return found, weights, tuple(torch.zeros_like(w) if dw is None else dw for dw, w in pairs)
