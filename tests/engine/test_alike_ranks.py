"""Three real processes, of which rank 1 differs: refused on all of them, with the name of what differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.alike_ranks import SIZE
from ispasp.engine.team import digest, plain, tensor_facts
from ispasp.errors import InputError
from ispasp.select import ISpaSP

PROGRAM = str(Path(__file__).with_name("alike_ranks.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not hasattr(os, "fork"):
        pytest.skip("the ranks are forked, which this system cannot do")
    folder = tmp_path_factory.mktemp("alike")
    subprocess.run([sys.executable, PROGRAM, str(folder)], check=True, timeout=300)  # noqa: S603
    return folder


def seen(folder: Path, case: str) -> list[dict[str, Any]]:
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(SIZE)]
    for what in found:
        assert "crash" not in what, what["crash"]
    return [what[case] for what in found if case in what]


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("seed", "tensor 'a.weight' is float32 [8, 4] sha256:"),
        ("one bit", "tensor 'b.weight' is float32 [6, 8] sha256:"),
        ("buffer", "tensor 'norm.running_mean' is"),
        ("dtype", "tensor 'norm.weight' is float32 [8]"),
        ("class", "module 'c' is Linear on rank 0 and Sequential on rank 1: build the same model"),
        ("function", "the graph of the model must be the same on every rank, but node"),
        ("tied", "and the same tensor as 'a.weight' on rank 1"),
        ("keep", "keep is 0.5 on rank 0 and 0.25 on rank 1: pass the same options on every rank"),
        ("keep of one", "keep is [['a', 0.5], ['b', 2]] on rank 0 and [['a', 0.5], ['b', 3]] on rank 1"),
        ("units", "keep is [['a', [0, 1]]] on rank 0 and [['a', [0, 2]]] on rank 1"),
        ("method", "method is {'class': 'ISpaSP', 'iterations': 20"),
        ("option of the method", "and {'class': 'ISpaSP', 'iterations': 19"),
        ("compensate", "compensate is dense on rank 0 and None on rank 1"),
        ("order", "order is sequential on rank 0 and oneshot on rank 1"),
        ("skip", "skip is [] on rank 0 and ['a'] on rank 1"),
        ("recalibrate", "recalibrate is False on rank 0 and True on rank 1"),
        ("loss", "loss is None on rank 0 and a function on rank 1"),
        ("finetune_between", "finetune_between is None on rank 0 and a function on rank 1"),
        ("trained apart", "tensor 'c.bias' is float32 [2]"),
        ("tuned seed", "tensor 'a.weight' is float32 [8, 4]"),
        ("tuned buffer", "tensor 'scale' is float32 [6]"),
        ("tuned epochs", "epochs is 1.0 on rank 0 and 2.0 on rank 1: pass the same options on every rank"),
        ("tuned recipe", "recipe is Sgd(lr=0.01"),
        ("tuned evaluate", "evaluate is None on rank 0 and a function on rank 1"),
        ("tuned frozen", "trainable parameters is ['a.weight', 'a.bias', 'norm.weight'"),
        ("tuned teacher", "tensor 'a.weight' of the teacher is float32 [8, 4]"),
    ],
)
def test_what_differs_is_named_on_every_rank(folder: Path, case: str, text: str) -> None:
    outcomes = seen(folder, case)
    assert len(outcomes) == SIZE
    for outcome in outcomes:
        assert outcome["error"] == "InputError", outcome
        assert text in outcome["text"]
        assert outcome["text"] == outcomes[0]["text"]


@pytest.mark.long
def test_other_weights_come_with_a_remedy(folder: Path) -> None:
    for outcome in seen(folder, "seed"):
        assert "torch.distributed.broadcast(t.data, 0)" in outcome["text"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "own", "text"),
    [
        ("wrong option", "InputError", "ridge=-1.0: pass a positive number"),
        ("unknown option", "OptionError", "sparsity"),
        ("no model", "InputError", "model is a int: pass a torch.nn.Module"),
        ("failed between", "ValueError", "no money left for training"),
        ("no batches", "InputError", "no calibration batches"),
        ("forward raises", "InputError", "the model does not run on the first batch: ZeroDivisionError"),
        ("iterator raises", "OSError", "the disk is gone"),
        ("second batch", "InputError", "does not run on batch 2, float32 (2, 5)"),
        ("tuned wrong", "InputError", "epochs=-1: pass a number above 0"),
    ],
)
def test_a_failure_of_one_rank_is_heard_by_two_others(folder: Path, case: str, own: str, text: str) -> None:
    first, odd, other = seen(folder, case)
    assert odd["error"] == own
    assert text in odd["text"]
    for outcome in (first, other):
        assert outcome["error"] == "DistributedError"
        assert f"rank 1 failed: {own}: " in outcome["text"]
        assert text in outcome["text"]


@pytest.mark.long
@pytest.mark.parametrize("case", ["well", "well between", "well tied", "tuned well"])
def test_what_need_not_be_the_same_may_differ(folder: Path, case: str) -> None:
    outcomes = seen(folder, case)
    assert [outcome["error"] for outcome in outcomes] == [None] * SIZE
    assert all(outcome["facts"] == outcomes[0]["facts"] for outcome in outcomes)


@pytest.mark.long
def test_a_killed_rank_is_noticed_by_two_others(folder: Path) -> None:
    outcomes = seen(folder, "killed")
    assert len(outcomes) == SIZE - 1
    for outcome in outcomes:
        assert outcome["error"] == "DistributedError"
        assert "another rank died" in outcome["text"]
        assert outcome["as before"]
        assert outcome["seconds"] < 30


class Strange(nn.Module):
    """One tensor of every sort, all told apart by one changed value."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        for name in ("bfloat16", "float8_e4m3fn", "bool", "complex64", "int8"):
            value = torch.tensor([0.0, 1.0 if f"of_{name}" == change else 0.0]).to(getattr(torch, name))
            self.register_buffer(f"of_{name}", value)
        sparse = torch.eye(3) * (2 if change == "sparse" else 1)
        self.register_buffer("sparse", sparse.to_sparse())
        self.register_buffer("csr", (torch.eye(3) * (2 if change == "csr" else 1)).to_sparse_csr())
        value = torch.full((2,), 2.0 if change == "quantised" else 1.0)
        self.register_buffer("quantised", torch.quantize_per_tensor(value, 0.1, 3, torch.quint8))
        self.register_buffer("nothing", torch.empty(0, 3 if change == "nothing" else 2))
        self.register_buffer("number", torch.tensor(1.5 if change == "number" else 1.0))
        flipped = torch.arange(6.0).reshape(2, 3).t() + (1 if change == "strided" else 0)
        self.register_buffer("strided", flipped)
        self.register_buffer("meta", torch.empty(4 if change == "meta" else 3, device="meta"))
        self.register_parameter("lazy", nn.UninitializedParameter())


SORTS = ("of_bfloat16", "of_float8_e4m3fn", "of_bool", "of_complex64", "of_int8", "sparse", "csr", "quantised")


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", [*SORTS, "nothing", "number", "strided", "meta"])
def test_every_sort_of_tensor_has_a_digest(name: str) -> None:
    usual, other = tensor_facts(Strange()), tensor_facts(Strange(name))
    assert usual == tensor_facts(Strange())
    assert [key for key in usual if usual[key] != other[key]] == [name]


def test_strides_do_not_count() -> None:
    model, other = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
    other.load_state_dict(model.state_dict())
    assert tensor_facts(model) == tensor_facts(other.to(memory_format=torch.channels_last))


def test_a_tensor_without_bytes_is_refused() -> None:
    class Sharded(torch.Tensor):
        def full_tensor(self) -> torch.Tensor:
            raise AssertionError

    model = nn.Module()
    model.register_buffer("part", torch.ones(2).as_subclass(Sharded))
    with pytest.raises(InputError, match="'part' is sharded over processes"):
        tensor_facts(model)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"a": [1, 2]}, {"a": torch.tensor([1, 2])}, True),
        ({"a": [1, 2]}, {"a": (1, 2)}, True),
        ({"a*": 0.5, "b": 1}, {"b": 1, "a*": 0.5}, False),  # the first pattern that fits counts
        (1, 1.0, False),  # one unit, or all of them
        (list(range(5000)), [*range(4999), 9999], False),
        ({"x", "y"}, {"y", "x"}, True),
        (ISpaSP(), ISpaSP(rank="magnitude"), False),
        (None, len, False),
    ],
)
def test_settings_are_compared_by_what_they_mean(one: Any, other: Any, same: bool) -> None:
    assert (digest(plain(one)) == digest(plain(other))) is same
