"""Importing the package is inert."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("matplotlib", "accelerate", "sklearn", "torchvision", "timm", "transformers", "onnx", "onnxruntime", "typer")


def test_import_loads_no_optional_package_no_cuda_and_no_random_numbers() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); state = torch.get_rng_state(); import ispasp;"
        "assert torch.equal(state, torch.get_rng_state()); assert not torch.cuda.is_initialized();"
        "print(*{m.split('.')[0] for m in set(sys.modules) - before})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    loaded = set(done.stdout.split())
    assert "ispasp" in loaded
    assert not loaded & set(HEAVY)


def test_about_twenty_names_stand_at_the_top_and_the_rest_one_step_below() -> None:
    code = (
        "import ispasp; print(len(ispasp.__all__), set(vars(ispasp)) >= set(ispasp.__all__));"
        "ispasp.select.L1, ispasp.select.Selector, ispasp.select.LinearConsumer, ispasp.select.Statistics;"
        "ispasp.train.Sgd, ispasp.train.AdamW, ispasp.train.Teacher, ispasp.errors.InputError"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    count, there = done.stdout.split()
    assert 15 <= int(count) <= 30
    assert there == "True"
