"""Settings shared by all tests."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ispasp",
    deadline=None,  # the machines are shared and noisy
    derandomize=True,  # CI must not depend on luck; raise max_examples by hand to search further
    max_examples=int(os.environ.get("ISPASP_EXAMPLES", "60")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ispasp")
torch.set_num_threads(1)
