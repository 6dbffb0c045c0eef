"""`accelerate launch`, as torchrun: every rank calibrates on its own shard, and all get the same plan and weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine import accelerate_launch, prune_ranks
from engine.test_prune_ranks import check_equal_to_one_process


@pytest.mark.long
def test_two_ranks_under_accelerate_launch_equal_one_process(tmp_path: Path) -> None:
    command = [accelerate_launch.__file__, *accelerate_launch.TWO, "--mixed_precision", "no"]
    subprocess.run([sys.executable, *command, prune_ranks.__file__, str(tmp_path)], check=True, timeout=300)  # noqa: S603
    check_equal_to_one_process(tmp_path, "ispasp dense")
