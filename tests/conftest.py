"""Settings shared by all tests."""

from __future__ import annotations

import gc
import os

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


def pytest_collection_finish(session: pytest.Session) -> None:
    """Hundreds of thousands of objects of imported packages need not be looked through again and again."""
    gc.collect()
    gc.freeze()
