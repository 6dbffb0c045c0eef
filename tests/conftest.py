"""Settings shared by all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ispasp",
    deadline=None,  # the machines are shared and noisy
    derandomize=True,  # CI must not depend on luck; raise max_examples by hand to search further
    max_examples=int(os.environ.get("ISPASP_EXAMPLES", "20")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ispasp")
torch.set_num_threads(1)
gc.set_threshold(10_000, 20, 20)  # traces are many small objects: by default a seventh of the time goes here
_SEED = 31_415  # not one that tests set: what they draw before and after would be the same


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test draws the same random numbers, whichever ran before it."""
    torch.manual_seed(_SEED)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    """So do shared fixtures, whichever test needs them first."""
    if fixturedef.scope == "function":
        return (yield)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return (yield)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Hundreds of thousands of objects of imported packages need not be looked through again and again."""
    gc.collect()
    gc.freeze()
