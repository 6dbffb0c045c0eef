"""`ispasp bench cifar`: CIFAR-10 ResNets pruned without labels and without fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence

from ispasp._options import Compensate
from ispasp.errors import InputError
from ispasp_lab.benchmarks import classify
from ispasp_lab.benchmarks.classify import COMPENSATIONS, METHODS, Row, Task, as_json, sample
from ispasp_lab.data import cifar10
from ispasp_lab.models import resnet20, resnet56

__all__ = ["NETWORKS", "Row", "as_json", "as_table", "run"]

NETWORKS = {"resnet20": resnet20, "resnet56": resnet56}


def run(
    images: int = 1280,
    test: int = 10_000,
    keep: float = 0.5,
    methods: Sequence[str] = METHODS,
    compensations: Sequence[Compensate] = COMPENSATIONS,
    *,
    network: str = "resnet56",
    batch: int = 128,
    seed: int = 0,
    progress: bool = True,
) -> list[Row]:
    """Every block at the same keep, calibrated with `images` training images; top-1 on `test` test images.

    >>> run(network="resnet18")
    Traceback (most recent call last):
    ...
    ispasp.errors.InputError: there is no network 'resnet18' here: choose from resnet20, resnet56
    """
    if network not in NETWORKS:
        raise InputError(f"there is no network {network!r} here: choose from {', '.join(NETWORKS)}")
    model = NETWORKS[network]()
    calibration, _ = sample(*cifar10("train"), images, seed)
    tested = sample(*cifar10("test"), test, seed)
    return classify.run(Task(model, calibration, *tested, batch), keep, methods, compensations, progress=progress)


def as_table(
    rows: Sequence[Row], images: int = 1280, test: int = 10_000, keep: float = 0.5, network: str = "resnet56"
) -> str:
    """Rows as a table.

    >>> "i-SpaSP is Top-K" in as_table([Row("dense", "", 93.4, None, 850_000, 125_000_000)])
    True
    """
    note = (
        f"Every block at keep {keep}, {images:,} unlabelled training images, sequential order, no fine-tuning; "
        f"top-1 on {test:,} test images."
    )
    if keep >= 0.5:
        note += " At keep >= 0.5 i-SpaSP is Top-K."
    return classify.as_table(f"CIFAR-10 {network}", rows, note)
