"""Methods that look at the task: sensitivities by definition, budgets and curves with them, order="global"."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ispasp


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)).double().eval()


def loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch[1])


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(9, 6).double(), torch.randint(0, 3, (9,))) for _ in range(2)]


OPTIONS = {"input_of": lambda batch: batch[0], "progress": False, "compensate": None}


def by_definition(model: nn.Sequential, layer: int) -> torch.Tensor:
    """Sum over examples of |h dL/dh| with a loss of its own for every example."""
    total = torch.zeros(model[layer].in_features, dtype=torch.float64)
    for x, y in data():
        for example, label in zip(x, y, strict=True):
            h = model[:layer](example[None]).detach().requires_grad_()
            (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(model[layer:](h), label[None]), h)
            total += (h.detach() * gradient)[0].abs()
    return total


def test_one_shot_taylor_keeps_what_the_definition_ranks_first() -> None:
    model = net()
    result = ispasp.prune(model, data(), 4, method="taylor", order="oneshot", loss=loss, **OPTIONS)
    for name, layer in (("0", 2), ("2", 4)):
        expected = by_definition(model, layer).topk(4).indices.sort().values
        assert result.plan.kept[name] == tuple(expected.tolist())


def test_sequential_taylor_sees_the_pruned_layers() -> None:
    model = net()
    result = ispasp.prune(model, data(), 4, method="taylor", loss=loss, **OPTIONS)
    masked = net()
    gone = [unit for unit in range(12) if unit not in result.plan.kept["0"]]
    masked[2].weight.data[:, gone] = 0
    assert result.plan.kept["2"] == tuple(by_definition(masked, 4).topk(4).indices.sort().values.tolist())


def test_global_order_ranks_units_of_all_layers_together() -> None:
    model = net()
    result = ispasp.prune(model, data(), 0.5, method="taylor", order="global", loss=loss, **OPTIONS)
    scores = {name: by_definition(model, layer) for name, layer in (("0", 2), ("2", 4))}
    ranked = sorted(((float(v / s.norm()), n, i) for n, s in scores.items() for i, v in enumerate(s)), reverse=True)
    expected = {name: tuple(sorted(i for _, n, i in ranked[:10] if n == name)) for name in scores}
    assert dict(result.plan.kept) == expected  # 6 + 4 units in all, wherever they are


def test_units_given_by_the_user_take_no_part_in_the_global_ranking() -> None:
    keep = {"0": [1, 2], "2": 0.5}
    result = ispasp.prune(net(), data(), keep, method="taylor", order="global", loss=loss, **OPTIONS)
    assert {name: len(kept) for name, kept in result.plan.kept.items()} == {"0": 2, "2": 4}
    assert result.plan.kept["0"] == (1, 2)


@pytest.mark.parametrize("method", ["taylor", "gfs"])
def test_budgets_and_curves_work_with_methods_that_look_at_the_task(method: str) -> None:
    result = ispasp.prune(net(), data(), ispasp.Params(0.6), method=method, loss=loss, **OPTIONS)
    assert result.cost.params <= 0.6 * result.cost.dense_params
    assert all(kept[-1] and error[-1] == 0 for kept, error in result.curves.values())


def test_gfs_takes_the_best_first_unit_for_the_loss() -> None:
    model, batches = net(), data()
    result = ispasp.prune(model, batches, {"0": 1}, method="gfs", loss=loss, **OPTIONS)
    losses = []
    for unit in range(12):
        h = model[:2](batches[0][0])
        alone = torch.zeros_like(h)
        alone[:, unit] = h[:, unit]
        losses.append(loss(model[2:](alone), batches[0]).item())
    assert result.plan.kept["0"] == (min(range(12), key=losses.__getitem__),)


def test_a_method_without_scores_cannot_be_ranked_globally() -> None:
    with pytest.raises(ispasp.errors.InputError, match="does not score units one by one"):
        ispasp.prune(net(), data(), 0.5, method="obs", order="global", **OPTIONS)


def test_without_a_loss_labels_are_drawn_from_the_model() -> None:
    """The Fisher information of its own predictions: the same choice every time, and not a random one."""
    first, second = (ispasp.prune(net(), data(), 0.5, method="taylor", **OPTIONS) for _ in range(2))
    assert first.plan.kept == second.plan.kept
    model = net()
    with torch.no_grad():
        model[2].weight[:, :6] = 0.0  # the first six units reach nothing
    kept = ispasp.prune(model, data(), 0.5, method="taylor", **OPTIONS).plan.kept["0"]
    assert min(kept) >= 6


def test_training_between_layers_sees_each_layer_pruned_and_saves(tmp_path) -> None:  # type: ignore[no-untyped-def]
    seen = []

    def train(model: nn.Module) -> None:
        seen.append(tuple(layer.weight.shape for layer in model if isinstance(layer, nn.Linear)))
        with torch.no_grad():
            model[4].bias += 1

    result = ispasp.prune(net(), data(), 0.5, finetune_between=train, **OPTIONS)
    assert seen == [((6, 6), (8, 6), (3, 8)), ((6, 6), (4, 6), (3, 4))]
    ispasp.save(result, tmp_path)
    again = ispasp.load(tmp_path, net())
    x = data()[0][0]
    assert torch.equal(again(x), result.model(x))
    assert sum(p.numel() for p in result.model.parameters()) == result.cost.params
