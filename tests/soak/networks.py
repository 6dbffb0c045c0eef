"""Random networks and random options: removal equals masking, and all else that `prune` promises."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import ispasp
from ispasp.graph.state import copied
from soak.case import Case, check
from soak.options import SCALING, random_keep, random_options, random_units
from soak.state import check_same, process_unchanged, unchanged, weights
from support.masking import called, distance, embedded, left, output, plain, trains
from support.networks import Network, again, batch_for, random_network

TOLERANCE = 1e-9
DTYPES = (torch.float64, torch.float64, torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Subject:
    """A network to prune: as it was built in float64, and in the dtype of the case with its batches."""

    network: Network
    model: nn.Module
    batches: list[Any]
    dtype: torch.dtype

    def fresh(self) -> nn.Module:
        return again(self.network).to(self.dtype).eval()


def run(case: Case) -> None:
    subject = draw(case)
    options = random_options(case)
    verb = case.chosen("verb", "prune", "prune", "prune_", "apply_")
    with case.may_refuse("survey"), unchanged(subject.model, "survey"):
        kinds = options.get("kinds", ("neuron", "filter", "head"))
        survey = ispasp.survey(subject.model, subject.batches[0], scope=options["scope"], kinds=kinds)
    if verb == "apply_":
        applied(case, subject, survey)
        return
    keep = random_keep(case, survey, options)
    result = pruned(case, subject, keep, options, verb)
    check_result(case, subject, result, options)
    check_cost(subject, result)
    check_saved(case, subject, result)
    if case.chance(0.3):
        with process_unchanged("prune again"):
            second = ispasp.prune(subject.fresh(), subject.batches, keep, **options)
        check(second.plan == result.plan, "the same call gives another plan")
        check_same(weights(result.model), weights(second.model), "the same call, its weights")
        case.facts["same twice"] = True
    if case.chance(0.3):
        again_pruned(case, subject, result, options)


def draw(case: Case) -> Subject:
    """A random network and batches of several sizes that it runs on."""
    network = random_network(case.rng.randrange(10**6), case.pick)
    case.options["network"] = repr(network)
    dtype = case.pick(*DTYPES)
    sizes = [case.rng.choice((1, 2, 3, 4, 5, 8)) for _ in range(case.rng.randint(1, 4))]
    batches = [cast(batch_for(network, case.rng.randrange(10**6), n), dtype) for n in sizes]
    model = copied(network.model).to(dtype)
    batches = [batch for batch in batches if runs(model, batch)]
    if not batches:  # an op that this dtype lacks, or a forward that takes two examples only
        model, dtype, batches = copied(network.model), torch.float64, [network.batch]
    case.options |= {"dtype": str(dtype), "sizes": [len(pytree.tree_leaves(b)[0]) for b in batches]}
    return Subject(network, model, batches, dtype)


def cast(batch: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, batch)


def runs(model: nn.Module, batch: Any) -> bool:
    try:
        return all(bool(t.isfinite().all()) for t in output(model, batch))
    except (RuntimeError, ValueError, NotImplementedError, IndexError):
        return False


def pruned(case: Case, subject: Subject, keep: Any, options: dict[str, Any], verb: str) -> ispasp.Result:
    if verb == "prune":
        with case.may_refuse("prune"), unchanged(subject.model, "prune"):
            return ispasp.prune(subject.model, subject.batches, keep, **options)
    model = subject.fresh()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) if case.chance(0.5) else None
    try:
        with process_unchanged("prune_"):
            result = ispasp.prune_(model, subject.batches, keep, optimizer=optimizer, **options)
    except ispasp.IspaspError:
        check_same(weights(subject.model), weights(model), "a refused prune_, its weights")
        with case.may_refuse("prune_"):
            raise
    check(result.model is model, "prune_ returns another model")
    return result


def check_result(case: Case, subject: Subject, result: ispasp.Result, options: dict[str, Any]) -> None:
    """The pruned model is the dense one with the removed units masked, run by means of the tests' own."""
    for batch in subject.batches:
        found, dense = output(result.model, batch), output(subject.model, batch)
        check([t.shape for t in found] == [t.shape for t in dense], "outputs have other shapes")
        check([t.dtype for t in found] == [t.dtype for t in dense], "outputs have other dtypes")
        check(all(bool(t.isfinite().all()) for t in found), "outputs are not finite, those of the dense model are")
    exact = options["compensate"] is None and options["method"] not in SCALING and not options.get("recalibrate")
    worst = check_masking(subject, result.model, result.plan, exact)
    if worst is not None:
        case.facts |= {
            "worst difference to masking": worst,
            "equals masking" if exact else "equals masking, refitted": True,
        }
    check(list(result.model.state_dict()) == list(subject.model.state_dict()) or not exact, "names of tensors changed")
    check(ispasp.Plan.from_json(result.plan.to_json()) == result.plan, "the plan changes by way of JSON")
    if exact:
        dense_trains = trains(subject.fresh(), subject.batches[0])
        check(trains(copied(result.model), subject.batches[0]) == dense_trains, "other parameters get gradients")


def check_masking(subject: Subject, model: nn.Module, plan: ispasp.Plan, exact: bool) -> float | None:
    """The largest relative difference to masking, in float64 whatever the dtype. None: statistics of norms are new."""
    twin = ispasp.apply_(copied(subject.network.model), plan)
    check_units(subject.network.model, twin, plan)
    small = copied(model).double()  # before weights are folded: a spectral norm rounds
    masked = embedded(copied(subject.model).double(), small, (subject.network.model, twin))
    if exact:
        check_kept_values(subject, model, masked)
    elif any(name.endswith("running_mean") for name, _ in model.named_buffers()):
        return None
    worst = 0.0
    for batch in subject.batches:
        one, other = output(small, cast(batch, torch.float64)), output(masked, cast(batch, torch.float64))
        worst = max(worst, distance(one, other))
    check(worst <= TOLERANCE, f"removal does not equal masking: relative difference {worst:.1e}")
    return worst


def check_units(dense: nn.Module, small: nn.Module, plan: ispasp.Plan) -> None:
    """The units that are left, told by the values of a layer's weight, are those that the plan names."""
    for name, kept in plan.kept.items():
        layer = dict(dense.named_modules()).get(name)
        if isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d)) and len(layer.weight) == plan.structure.units[name]:
            found = left(dict(plain(small).named_parameters())[f"{name}.weight"], layer.weight)[0].tolist()
            check(found == list(kept), f"{name} keeps units {found}, the plan says {list(kept)}")


def check_kept_values(subject: Subject, model: nn.Module, masked: nn.Module) -> None:
    """What the pruned model holds are entries of the dense one: where nothing is masked both agree to the bit."""
    dense = dict(subject.model.named_parameters())
    for name, value in masked.named_parameters():
        if name in dense:
            given = dense[name].double()
            check(bool(((value == given) | (value == 0)).all()), f"{name} has other values than the dense model")


def check_cost(subject: Subject, result: ispasp.Result) -> None:
    count = sum(p.numel() for p in result.model.parameters())
    check(result.cost.params == count, f"cost says {result.cost.params} parameters, the model has {count}")
    dense = sum(p.numel() for p in subject.model.parameters())
    check(result.cost.dense_params == dense, f"cost says {result.cost.dense_params} dense parameters, not {dense}")
    for layer in result.layers:
        check(layer.kept == len(result.plan.kept[layer.name]), f"{layer.name}: layers and plan differ")
        check(0 < layer.kept <= layer.units, f"{layer.name}: {layer.kept} of {layer.units} kept")
        check(
            layer.certificate is None or math.isfinite(layer.certificate),
            f"{layer.name}: certificate {layer.certificate}",
        )
    str(result), result.to_json()


def check_saved(case: Case, subject: Subject, result: ispasp.Result) -> None:
    folder = case.folder / "saved"
    with process_unchanged("save"):
        ispasp.save(result, folder)
    model = subject.fresh()
    with process_unchanged("load"):
        loaded = ispasp.load(folder, model)
    check_same(weights(result.model), weights(loaded), "saved and loaded weights")
    for batch in subject.batches:
        same = all(map(torch.equal, output(result.model, batch), output(loaded, batch)))
        check(same, "the loaded model gives other outputs")


def again_pruned(case: Case, subject: Subject, result: ispasp.Result, options: dict[str, Any]) -> None:
    """A pruned model is a model like any other."""
    try:
        with unchanged(result.model, "a second prune"):
            second = ispasp.prune(result.model, subject.batches, 0.5, **options)
    except ispasp.IspaspError as error:
        case.facts["second prune refused"] = type(error).__name__
        return
    for batch in subject.batches:
        check(all(bool(t.isfinite().all()) for t in output(second.model, batch)), "pruned twice, not finite")
    case.facts["pruned twice"] = True


def applied(case: Case, subject: Subject, survey: ispasp.Survey) -> None:
    """Surgery alone, with random units, and with the state of an optimizer."""
    model = subject.fresh()
    optimizer = stepped(model, subject.batches[0]) if case.chance(0.5) else None
    before = copied(model)
    kept = {d.name: random_units(case, d.units) for d in survey.dimensions if case.chance(0.8)}
    case.options["kept"] = kept
    plan = survey.plan(kept)
    batch = case.pick(None, *subject.batches)
    with case.may_refuse("apply_"), process_unchanged("apply_"):
        small = ispasp.apply_(model, plan, batch, optimizer=optimizer)
    moved = Subject(subject.network, before, subject.batches, subject.dtype)
    case.facts |= {"worst difference to masking": check_masking(moved, small, plan, exact=True), "equals masking": True}
    count = sum(p.numel() for p in small.parameters())
    check(survey.cost(plan).params == count, f"cost says {survey.cost(plan).params} parameters, the model has {count}")
    if optimizer is not None:
        for parameter, state in optimizer.state.items():
            momentum = state.get("momentum_buffer")
            check(momentum is None or momentum.shape == parameter.shape, "the optimizer's state has another shape")


def stepped(model: nn.Module, batch: Any) -> torch.optim.Optimizer:
    """An optimizer that has a state, after a step too small to move outputs far."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-6, momentum=0.9)
    leaves = [t for t in pytree.tree_leaves(called(model, batch)) if isinstance(t, Tensor)]
    sum(leaf.square().sum() for leaf in leaves).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()
    return optimizer
