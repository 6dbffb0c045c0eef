"""The runtime experiment on a few examples: what it times and how it scales, not how fast anything is."""

from __future__ import annotations

import csv
import importlib.util
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ispasp.cli.app import app
from ispasp.errors import InputError
from ispasp_lab.experiments import runtime, runtime_report
from ispasp_lab.experiments.runtime import Block, Row, Settings, evaluations

requires_vision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None,
    reason="the experiment runs torchvision's ResNet34: pip install 'ispasp[vision]'",
)
TINY = Settings(
    examples=2, batch=4, iterations=2, candidates=5, reference_examples=1, gram_examples=1, gfs_examples=1,
    gfs_evaluations=2,
)  # fmt: skip


@requires_vision
@pytest.mark.parametrize("number", [2, 15])
def test_logits_are_those_of_the_rest_of_the_network(number: int) -> None:
    block = Block.build(number, 2, seed=0)
    group, index, _ = runtime.BLOCKS[number]
    seen = {}
    with torch.no_grad():
        hook = block.block.register_forward_hook(lambda module, args, output: seen.update(block=output))
        other = block.model.fc.register_forward_hook(lambda module, args, output: seen.update(logits=output))
        swap = block.block.register_forward_pre_hook(lambda module, args: (block.x,))
        block.model(torch.zeros(2, 3, 224, 224))  # the block gets our input, the rest of the network its output
        for handle in (hook, other, swap):
            handle.remove()
        found = block.logits(torch.ones(block.H.shape[1]), 2)
    assert getattr(block.model, group)[index] is block.block
    torch.testing.assert_close(found, seen["logits"], rtol=1e-4, atol=1e-4)


@requires_vision
def test_a_mask_silences_units() -> None:
    block = Block.build(15, 1, seed=0)
    mask = torch.ones(512)
    mask[[3, 200]] = 0.0
    with torch.no_grad():
        masked = block.logits(mask, 1)
        assert not torch.allclose(masked, block.logits(torch.ones(512), 1))
        block.block.conv2.weight[:, [3, 200]] = 0.0
        torch.testing.assert_close(masked, block.logits(torch.ones(512), 1), rtol=1e-4, atol=1e-4)


@requires_vision
def test_times_are_scaled_to_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(runtime.time, "perf_counter", lambda: float(next(clock)))  # everything takes one second
    rows = {(row.method, row.keep): row for row in runtime.run(TINY, blocks=(2,), progress=False)}
    assert set(rows) == set(itertools.product(runtime.METHODS, runtime.KEEPS))
    assert {row.kept for row in rows.values()} == {13, 26}
    assert rows["ispasp", 0.2].seconds == 1.0
    assert rows["reference", 0.2].seconds == 2.0  # one of two examples
    assert rows["gfs-local", 0.4].seconds == 2.0 + 1.0  # the Gram matrix grows with the examples, the choice does not
    assert rows["gfs-stochastic", 0.2].seconds == 13 * 5 / 2 * 4
    assert rows["gfs", 0.2].seconds == sum(64 - k for k in range(13)) / 2 * 4
    assert rows["gfs", 0.4].scaling == "1 of 4 examples, 2 of 1339 evaluations"
    assert rows["ispasp", 0.4].scaling == "all"


@pytest.mark.parametrize("candidates", [None, 1, 3, 50])
def test_evaluations_are_those_of_the_search(candidates: int | None) -> None:
    from ispasp.select.gfs import grow

    count = 0

    def loss(kept: torch.Tensor, tried: torch.Tensor, step: int) -> torch.Tensor:
        nonlocal count
        count += len(tried)
        return torch.zeros(len(tried))

    grow(11, 7, loss, candidates)
    assert evaluations(11, 7, candidates) == count


def made_up() -> list[Row]:
    seconds = {"ispasp": 0.5, "reference": 50.0, "gfs-local": 20.0, "gfs-stochastic": 5e3, "gfs": 5e4}
    return [
        Row(
            block, units, keep, int(units * keep), method, s * (1 + (keep == 0.4) * method.startswith("gfs")), 1.0, 9, 3
        )
        for block, units in ((2, 64), (15, 512))
        for keep in (0.2, 0.4)
        for method, s in seconds.items()
    ]


def test_writes_csv_figure_and_text(tmp_path: Path) -> None:
    table, figure, text = runtime_report.write(made_up(), Settings(), tmp_path / "new", "ispasp reproduce runtime")
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 20
    assert rows[0]["scaling"] == "3 of 9 examples"
    assert figure.read_bytes().startswith(b"\x89PNG")
    written = text.read_text(encoding="utf-8")
    assert "| 15 | 0.4 | GFS, vanilla | 100,000 | 200,000x | 3 of 9 examples |" in written
    assert "at least 100x faster than stochastic GFS" in written
    assert "2.0x and 2.0x for vanilla GFS and 1.0x and 1.0x" in written


@pytest.mark.long
@requires_vision
def test_the_command_line_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ispasp_lab.benchmarks import selection

    assert selection.BLOCKS == runtime.BLOCKS
    quick, whole = runtime.run, runtime.QUICK
    monkeypatch.setattr(runtime, "run", lambda settings: quick(replace(TINY, seed=settings.seed), blocks=(2,)))
    done = CliRunner().invoke(app, ["reproduce", "runtime", "--quick", "--seed", "1", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert whole.examples < Settings().examples
    assert {path.name for path in tmp_path.iterdir()} == {"runtime.csv", "runtime.png", "runtime.md"}
    assert "`ispasp reproduce runtime --quick --seed 1`" in done.output


@pytest.mark.parametrize(
    "changes",
    [{"reference_examples": 0}, {"reference_examples": 1281}, {"gfs_examples": 257}, {"gfs_evaluations": 51}],
)
def test_a_part_larger_than_the_whole_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(InputError, match="scaled up to"):
        Settings(**changes)  # type: ignore[arg-type]
