"""`ispasp bench mobilenet`: MobileNetV2 with its ImageNet weights, by the paper's 260 M recipe, without fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence

from ispasp._keep import recipes
from ispasp._options import Compensate
from ispasp_lab.benchmarks import classify
from ispasp_lab.benchmarks.classify import COMPENSATIONS, METHODS, Row, Task, as_json, sample
from ispasp_lab.data import imagenet_mini
from ispasp_lab.models import mobilenet_v2

__all__ = ["RECIPE", "Row", "as_json", "as_table", "run"]

RECIPE = recipes["mobilenet_v2-260M"]


def run(
    images: int = 1000,
    test: int = 1000,
    methods: Sequence[str] = METHODS,
    compensations: Sequence[Compensate] = COMPENSATIONS,
    *,
    batch: int = 50,
    seed: int = 0,
    progress: bool = True,
) -> list[Row]:
    """Calibrate with `images` of the 1,000 calibration images; top-1 on `test` of the 1,000 validation images."""
    model = mobilenet_v2()
    calibration, _ = sample(*imagenet_mini("calibration"), images, seed)
    tested = sample(*imagenet_mini("val"), test, seed)
    task = Task(model, calibration, *tested, batch)
    return classify.run(task, RECIPE, methods, compensations, progress=progress)


def as_table(rows: Sequence[Row], images: int = 1000, test: int = 1000) -> str:
    """Rows as a table.

    >>> "mobilenet_v2-260M" in as_table([Row("dense", "", 70.6, None, 3_500_000, 300_000_000)])
    True
    """
    note = (
        f"Recipe {RECIPE.name}, {images:,} unlabelled images, sequential order, no fine-tuning; top-1 on {test:,} "
        "validation images, one of each class."
    )
    return classify.as_table("MobileNetV2 on ImageNet", rows, note)
