"""The synthetic figure on a smaller grid."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path

import pytest
import torch

from ispasp_lab.experiments import synthetic
from ispasp_lab.theory import row_compressibility


@pytest.fixture(scope="module")
def points() -> list[synthetic.Point]:
    return synthetic.run(widths=(40,), ps=(0.3, 0.5, 0.7, 0.9), matrices=3, B=50, progress=False)


@pytest.mark.parametrize("p", [0.3, 0.5, 0.7, 0.9])
def test_error_falls_with_size(points: list[synthetic.Point], p: float) -> None:
    curve = [value for _, value in synthetic.mean_curve(points, 40, p)]
    assert len(curve) == 40
    # The residual of a single matrix may rise by a hair from one s to the next; the mean over doublings of s may not.
    assert all(curve[2 * s - 1] < curve[s - 1] for s in range(1, 21))
    assert curve[-1] == 0.0


def test_error_falls_faster_for_smaller_p(points: list[synthetic.Point]) -> None:
    decays = {decay.p: decay.fitted for decay in synthetic.decays(points)}
    assert all(decays[a] < decays[b] for a, b in itertools.pairwise((0.3, 0.5, 0.7, 0.9)))
    for s in (4, 10, 20):
        relative = [
            synthetic.mean_curve(points, 40, p)[s - 1][1] / synthetic.mean_curve(points, 40, p)[0][1]
            for p in (0.3, 0.5, 0.7, 0.9)
        ]
        assert relative == sorted(relative)


@pytest.mark.parametrize("p", [0.3, 0.9])
def test_hidden_representations_are_row_compressible(p: float) -> None:
    H = synthetic.hidden_representation(60, 100, p, R=1.0, generator=torch.Generator().manual_seed(1))
    assert bool((H >= 0).all())
    assert row_compressibility(H, p=p).R <= 1.0 + 1e-12
    assert not torch.equal(H.sum(1), H.sum(1).sort(descending=True).values)


def test_writes_csv_figure_and_summary(points: list[synthetic.Point], tmp_path: Path) -> None:
    table, figure, text = synthetic.write(points, tmp_path / "new")
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == len(points) == 4 * 3 * 40
    assert float(rows[0]["residual_squared"]) == pytest.approx(points[0].residual_squared, rel=1e-5)
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "| 40 | 0.3 |" in text.read_text()


def test_the_same_seed_gives_the_same_points(points: list[synthetic.Point]) -> None:
    again = synthetic.run(widths=(40,), ps=(0.3, 0.5, 0.7, 0.9), matrices=3, B=50, progress=False)
    other = synthetic.run(widths=(40,), ps=(0.3,), matrices=1, B=50, seed=1, progress=False)
    assert again == points
    assert other != points[:40]
