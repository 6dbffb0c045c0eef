"""NISP: importance propagated back from the last features through absolute weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ispasp._survey import Survey, survey
from ispasp.engine.batches import tensors_of
from ispasp.engine.graphs import TracedGraphs
from ispasp.engine.runner import Edits, Runner
from ispasp.engine.sites import Site, sites
from ispasp.errors import InputError
from ispasp.graph.trace import evaluating, named_tensors
from ispasp.types.plan import Plan
from ispasp_lab.procedures.scores import plan_by

_ALPHA, _PART = 0.5, 0.9  # of Inf-FS: weight of the spread, and of the spectral radius


def nisp(model: nn.Module, batches: Sequence[Tensor], keep: float) -> Plan:
    """Keep the units of largest importance for the features in front of the classifier.

    Yu, Li, Chen, Lai, Morariu, Han, Gao, Lin, Davis (2018), NISP: Pruning Networks using Neuron Importance Score
    Propagation. Features are ranked by Inf-FS, and their scores s go back layer by layer: s_(k) = |W_(k+1)|^T s_(k+1).
    Needs no labels; costs a pass over the batches and one backward pass.

    The propagation is the gradient of s^T f, f the network with |W| for W, |gamma| for gamma and no biases: on an input
    of ones everything stays positive, so a ReLU is the identity there. A selector cannot do this, since it sees one
    hidden dimension at a time. The importance of a filter is the sum over the positions of its map, as in the paper.

    Where we leave the paper: it prunes layer by layer with one fraction for each; `keep` is that fraction. Through a
    max pooling the score goes to one of the equal inputs. Networks that are not positively homogeneous (GELU, softmax,
    LayerNorm, ReLU6) are refused.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> {name: len(kept) for name, kept in nisp(net, [torch.rand(16, 3)], 0.5).kept.items()}
    {'0': 2, '2': 2}
    """
    found = survey(model, batches[0][:2])
    with evaluating(model), torch.no_grad():
        last = sites(found.analysis, [d.name for d in found.dimensions], others=True)[-1]
        scores = infinite_feature_selection(_features(model, last, batches))
        return plan_by(found, importances(model, found, batches[0][:1], scores), keep)


def importances(model: nn.Module, found: Survey, example: Tensor, scores: Tensor) -> dict[str, Tensor]:
    """Propagate the scores of the last features to every hidden dimension. (features,) -> (units,) each"""
    every = sites(found.analysis, [d.name for d in found.dimensions], others=True)
    tensors, read = _absolute(model), [site for site in every if site.names]
    head = _weight_of(every[-1])
    tensors[head] = torch.zeros_like(tensors[head])
    tensors[head][0] = scores.to(tensors[head])
    graphs, ones = TracedGraphs(model, found.analysis, example[:1]), torch.ones_like(example[:1])

    def output(x: Tensor, probed: Sequence[Site]) -> tuple[Tensor, Runner]:
        probes = {site.number: site.contraction.data for site in probed}
        runner = Runner(graphs.of(x), x, tensors, Edits(), precise=True, probed=probes)
        return tensors_of(runner.output())[0].sum(), runner

    once, twice = output(ones, ())[0], output(2 * ones, ())[0]
    if not torch.isclose(2 * once, twice, rtol=1e-6):
        raise InputError(
            f"{type(model).__name__} with absolute weights is not positively homogeneous: NISP is for networks of "
            "convolutions, linear layers, BatchNorm, ReLU and pooling"
        )
    with torch.enable_grad():
        value, runner = output(ones, read)
        zeros = [runner.probes[site.number].zero for site in read]
        gradients = torch.autograd.grad(value, zeros, allow_unused=True)
    total = {d.name: torch.zeros(d.units, dtype=torch.float64) for d in found.dimensions}
    for site, g in zip(read, gradients, strict=True):
        for name in site.names if g is not None else ():
            unit = site.units_of(name, g).flatten()
            total[name].index_add_(0, unit[unit >= 0], g.double().flatten()[unit >= 0])
    return total


def infinite_feature_selection(X: Tensor, alpha: float = _ALPHA) -> Tensor:
    """Inf-FS (Roffo, Melzi, Cristani 2015): energy of all paths between features. (examples, n) -> (n,)

    A_ij = alpha max(sd_i, sd_j) + (1 - alpha) (1 - |correlation_ij|), and the scores are the row sums of
    (I - r A)^-1 - I with r = 0.9 / (spectral radius of A).

    >>> x = torch.tensor([[0.0, 0.0, 5.0], [1.0, 1.0, -5.0], [2.0, 2.0, 5.0], [3.0, 3.0, -5.0]])   # twins, and another
    >>> int(infinite_feature_selection(x).argmax())
    2
    """
    X = X.double()
    sd = X.std(0)
    centred = (X - X.mean(0)) / sd.clamp_min(torch.finfo(torch.float64).tiny)
    correlation = (centred.T @ centred / (len(X) - 1)).clamp(-1, 1)
    sd = sd / sd.max().clamp_min(torch.finfo(torch.float64).tiny)
    A = alpha * torch.maximum(sd[:, None], sd) + (1 - alpha) * (1 - correlation.abs())
    r = _PART / torch.linalg.eigvalsh(A).abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    eye = torch.eye(len(A), dtype=torch.float64)
    paths: Tensor = torch.linalg.inv(eye - r * A) - eye
    return paths.sum(1)


def _features(model: nn.Module, last: Site, batches: Sequence[Tensor]) -> Tensor:
    """What the last layer reads. (examples, features)"""
    seen: list[Tensor] = []
    layer = model.get_submodule(last.path)
    hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(1)))
    try:
        for batch in batches:
            model(batch)
    finally:
        hook.remove()
    return torch.cat(seen)


def _weight_of(last: Site) -> str:
    weights = [name for name in last.contraction.parameters if name.endswith("weight")]
    if len(weights) != 1:
        raise InputError(
            f"the last layer {last.path!r} is no linear layer: NISP starts at the features in front of one"
        )
    return weights[0]


def _absolute(model: nn.Module) -> dict[str, Tensor]:
    """|W|, no biases, and BatchNorm as the factor |gamma| / sigma."""
    plain = {name: tensor.detach().abs() for name, tensor in named_tensors(model).items() if tensor.is_floating_point()}
    for path, module in model.named_modules():
        zero = ["bias", "running_mean"] if isinstance(module, _BatchNorm) else ["bias"]
        for name in (f"{path}.{leaf}" if path else leaf for leaf in zero):
            if name in plain:
                plain[name] = torch.zeros_like(plain[name])
    return {**named_tensors(model), **plain}
