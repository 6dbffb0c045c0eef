"""Two real processes prune as one with all the data: the same plan, the same weights, and no rank left waiting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

from engine.prune_ranks import CASES, SIZE, batches, of_one_process, pruned, told

PROGRAM = str(Path(__file__).with_name("prune_ranks.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not hasattr(os, "fork"):
        pytest.skip("the ranks are forked, which this system cannot do")
    folder = tmp_path_factory.mktemp("pruned")
    subprocess.run([sys.executable, PROGRAM, str(folder)], check=True, timeout=300)  # noqa: S603
    return folder


def seen(folder: Path, case: str) -> list[dict[str, Any]]:
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(SIZE)]
    for what in found:
        assert "crash" not in what, what["crash"]
    return [what[case] for what in found]


def weights(folder: Path, case: str) -> list[dict[str, Tensor]]:
    return [load_file(folder / f"{case}-{rank}.safetensors") for rank in range(SIZE)]


def check_equal_to_one_process(folder: Path, case: str) -> None:
    first, second = seen(folder, case)
    assert first == second
    alone = pruned(case, of_one_process(case))
    assert first["kept"] == told(alone)["kept"]
    one, other = weights(folder, case)
    assert one.keys() == other.keys() == alone.model.state_dict().keys()
    for key, value in alone.model.state_dict().items():
        assert one[key].equal(other[key]), key  # to the last bit
        assert_close(one[key], value, rtol=1e-5, atol=1e-5, msg=key)
    if CASES[case][1]["compensate"]:
        for name, (error, before) in told(alone)["errors"].items():
            assert first["errors"][name] == pytest.approx([error, before], rel=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_process(folder: Path, case: str) -> None:
    check_equal_to_one_process(folder, case)


def test_the_shards_alone_would_decide_otherwise(folder: Path) -> None:
    """Else the comparison is blind."""
    network = CASES["obs dense"][0]
    (kept, _) = (what["kept"] for what in seen(folder, "obs dense"))
    assert any(told(pruned("obs dense", [batch]))["kept"] != kept for batch in batches(network))


@pytest.mark.parametrize(
    ("case", "own", "text"),
    [
        ("nan", "InputError", "'conv1', read by layer1.0.conv1, batch 0: the sum of the activations has"),
        ("empty", "InputError", "no calibration batches"),
        ("other shape", "InputError", "the model does not run on the first batch"),
    ],
)
def test_a_rank_with_bad_data_is_an_error_on_both(folder: Path, case: str, own: str, text: str) -> None:
    well, bad = seen(folder, case)
    assert bad["error"] == own
    assert text in bad["text"]
    assert well["error"] == "DistributedError"
    assert f"rank 1 failed: {own}: " in well["text"]
    assert text in well["text"]
    assert well["as before"]
    assert bad["as before"]


def test_surgery_that_went_wrong_on_one_rank_is_taken_back_on_both(folder: Path) -> None:
    bad, well = seen(folder, "broken")
    assert (bad["error"], well["error"]) == ("SurgeryError", "DistributedError")
    assert "rank 0 failed: SurgeryError" in well["text"]
    assert bad["as before"]
    assert well["as before"]


def test_after_a_failure_the_ranks_can_go_on(folder: Path) -> None:
    assert seen(folder, "well again")[0]["kept"] == seen(folder, "ispasp")[0]["kept"]


@pytest.mark.long
def test_under_torchrun(tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(SIZE), PROGRAM, str(tmp_path)]
    subprocess.run([sys.executable, *command], check=True, timeout=300)  # noqa: S603
    check_equal_to_one_process(tmp_path, "ispasp dense")
