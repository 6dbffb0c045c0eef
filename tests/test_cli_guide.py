"""What docs/guide.md says about the command line."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from ispasp.cli import main
from ispasp.cli.app import app


def guide(block: int) -> list[list[str]]:
    """The commands of one block of the guide's section."""
    page = (Path(__file__).parents[1] / "docs" / "guide.md").read_text(encoding="utf-8")
    section = page.split("## From the command line")[1].split("\n## ")[0]
    lines = section.split("```bash\n")[block].split("```")[0].splitlines()
    return [shlex.split(line)[1:] for line in lines]


@pytest.mark.skipif(find_spec("timm") is None or find_spec("onnxruntime") is None, reason="needs ispasp[vision,onnx]")
@pytest.mark.parametrize(
    "network",
    [
        pytest.param("torchvision:resnet18", marks=pytest.mark.long),
        "timm:vit_tiny_patch16_224:depth=1,embed_dim=24,mlp_ratio=24,num_heads=2,img_size=64",
    ],
)
def test_the_first_examples_run(network: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand among the long tests, here with a smaller network."""
    monkeypatch.chdir(tmp_path)
    commands = [[word.replace("torchvision:resnet18", network) for word in command] for command in guide(1)]
    assert [command[0] for command in commands] == ["survey", "prune", "export"]
    for command in commands:
        monkeypatch.setattr(sys, "argv", ["ispasp", *command])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == 0
    assert Path("small.onnx").is_file()
    assert Path("small/report.html").is_file()


def test_the_others_are_spelt_rightly() -> None:
    known: Any = get_command(app)
    commands = guide(2)
    assert len(commands) == 6
    for name, *arguments in commands:
        known.commands[name].make_context(name, arguments)  # parses, does not run
