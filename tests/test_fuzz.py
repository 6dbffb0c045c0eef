"""Removal equals masking on random networks, checked by means of the tests' own."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings, strategies as st

import ispasp
from support.masking import distance, masked, output, trains
from support.networks import LEAVES, NESTED, Network, networks

EXAMPLES = int(os.environ.get("ISPASP_EXAMPLES", "10"))
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
    except ispasp.errors.NothingToPruneError as nothing:
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


@fuzz
@given(network=networks(), data=st.data())
def test_removal_equals_masking(network: Network, data: st.DataObject) -> None:
    check_removal(network, data)


@pytest.mark.long
@settings(fuzz, max_examples=10 * EXAMPLES)
@given(network=networks(), data=st.data())
def test_removal_equals_masking_on_many_networks(network: Network, data: st.DataObject) -> None:
    check_removal(network, data)


def check_removal(network: Network, data: st.DataObject) -> None:
    model, batch = network.model, network.batch
    before = copy.deepcopy(model.state_dict())
    dense_output = output(model, batch)
    survey = surveyed(network, data.draw(st.sampled_from(["blocks", "all"])))
    assert_no_mismatch(network, "\n".join(map(str, survey.frozen)))
    plan = random_plan(data, survey)
    pruned = ispasp.apply_(copy.deepcopy(model), ispasp.Plan.from_json(plan.to_json()), batch=batch)

    assert distance(output(pruned, batch), output(masked(model, pruned), batch)) <= TOLERANCE
    if not plan.structure.folded:  # a layer that is folded has a plain weight instead
        assert list(pruned.state_dict()) == list(before)
        assert trains(pruned, batch) == trains(copy.deepcopy(model), batch)
    assert sum(p.numel() for p in pruned.parameters()) == survey.cost(plan).params
    assert ispasp.Plan.from_json(plan.to_json()) == plan
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(map(torch.equal, output(model, batch), dense_output))


@fuzz
@given(network=networks())
def test_network_is_well_made(network: Network) -> None:
    found = output(network.model, network.batch)
    assert all(t.isfinite().all() for t in found)
    assert all(map(torch.equal, found, output(network.model, network.batch)))


@pytest.mark.parametrize("kind", ["image", "tokens"])
def test_the_table_is_large(kind: str) -> None:
    assert len(LEAVES[kind]) + len(NESTED[kind]) > 15
