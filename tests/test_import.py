"""Importing the package is inert."""

from __future__ import annotations

import subprocess
import sys

HEAVY = (
    "matplotlib",
    "accelerate",
    "sklearn",
    "torchvision",
    "timm",
    "transformers",
    "onnx",
    "onnxruntime",
    "gguf",
    "typer",
)


def test_a_fresh_process_loads_little_and_finds_every_name() -> None:
    """No optional package, no CUDA, no random numbers; about twenty names at the top, the rest one step below."""
    code = (
        "import sys, torch; before = set(sys.modules); state = torch.get_rng_state(); import ispasp;"
        "assert torch.equal(state, torch.get_rng_state()); assert not torch.cuda.is_initialized();"
        "print(*{m.split('.')[0] for m in set(sys.modules) - before});"
        "print(len(ispasp.__all__), set(vars(ispasp)) >= set(ispasp.__all__));"
        "ispasp.select.L1, ispasp.select.Selector, ispasp.select.LinearConsumer, ispasp.select.Statistics;"
        "ispasp.train.Sgd, ispasp.train.AdamW, ispasp.train.Teacher, ispasp.errors.InputError"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    modules, names = done.stdout.splitlines()
    loaded = set(modules.split())
    assert "ispasp" in loaded
    assert not loaded & set(HEAVY)
    count, there = names.split()
    assert 15 <= int(count) <= 30
    assert there == "True"
