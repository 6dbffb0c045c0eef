"""The wheel alone, without extras and without the lab; `tests/wheel/run` runs it in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn

import ispasp

ABSENT = "ispasp_lab accelerate matplotlib sklearn torchvision timm transformers onnx onnxscript onnxruntime".split()
ABSENT += ["gguf", "PIL"]
FACTORY = """
from torch import nn

def tiny():
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
"""


def environment(wheel: str) -> None:
    """The library comes from the wheel, which holds nothing else; no extra is there."""
    names = zipfile.ZipFile(wheel).namelist()
    assert all(name.startswith(("ispasp/", f"ispasp-{ispasp.__version__}.dist-info/")) for name in names), names
    assert "ispasp/py.typed" in names
    assert Path(ispasp.__file__).is_relative_to(sys.prefix), ispasp.__file__
    assert [name for name in ABSENT if find_spec(name)] == []


def library() -> None:
    """Survey, prune, save, load; what needs an extra names it."""
    torch.manual_seed(0)
    make: Callable[[], nn.Module] = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)
    ).eval()
    model, x = make(), torch.randn(16, 3, 8, 8)
    assert [row["units"] for row in ispasp.survey(model, x).rows()] == [8]
    result = ispasp.prune(model, [x], keep=0.5, progress=False)
    assert result.layers[0].kept == 4
    ispasp.save(result, "conv")
    again = ispasp.load("conv", make())
    assert torch.equal(again(x), result.model(x))
    assert result.report("report.html").is_file()
    assert_needs("train", lambda: ispasp.finetune(again, [(x, torch.zeros(16, dtype=torch.long))]))
    assert_needs("plot", result.plot)
    assert_needs("onnx", lambda: ispasp.export_onnx(result.model, x, "model.onnx"))
    assert_needs("gguf", lambda: ispasp.export_gguf(result, "model.gguf"))


def assert_needs(extra: str, call: Callable[[], object]) -> None:
    """The call fails and names the extra."""
    try:
        call()
    except ispasp.errors.MissingExtraError as error:
        assert f"pip install 'ispasp[{extra}]'" in str(error), error
    else:
        raise AssertionError(f"no error without the extra {extra}")


def command_line() -> None:
    """Survey and prune from a factory file; what is not there is refused in one line that says how to get it."""
    Path("nets.py").write_text(FACTORY)
    x = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")
    np.savez("data.npz", x=x, y=(x[:, 0] > 0).astype(int))
    assert "12" in run("survey", "nets.py:tiny", "--data", "data.npz")
    run("prune", "nets.py:tiny", "--data", "data.npz", "--keep", "0.5", "--out", "pruned")
    assert ispasp.Plan.from_json(Path("pruned/plan.json").read_text()).kept.keys() == {"0"}
    assert Path("pruned/model.safetensors").is_file()
    assert not {"bench", "demo", "reproduce"} & set(run("--help").split())
    assert_refuses("pip install -e .", "bench", "surgery", "--json")
    assert_refuses("ispasp[train]", "finetune", "pruned", "--data", "data.npz")
    assert_refuses("ispasp[vision]", "survey", "torchvision:resnet18")


def run(*arguments: str, code: int = 0) -> str:
    """What `ispasp ARGUMENTS` prints: on standard output, or on standard error where it is to fail."""
    command = [str(Path(sys.executable).with_name("ispasp")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == code, (arguments, done)
    return done.stderr if code else done.stdout


def assert_refuses(text: str, *arguments: str) -> None:
    """The command ends with code 2 and one line that holds the text."""
    line = run(*arguments, code=2)
    assert text in line, line
    assert line.count("\n") == 1, line


if __name__ == "__main__":
    environment(sys.argv[1])
    library()
    command_line()
    print(f"the wheel works alone (Python {sys.version.split()[0]}, torch {torch.__version__}, numpy {np.__version__})")
