"""Table "ImageNet" (Section 6.3) after fine-tuning, on a smaller data set: many methods by the paper's pipeline.

Every network is trained for as many epochs: those after each block and those at the end. Soft filter pruning trains
the dense network for all of them, with a cut after each epoch. `scratch-e` and `scratch-b` (Rethinking) train the
pruned architecture from new weights, for as many epochs or for as much compute. Where we leave Liu et al. (2019): their
budget is that of training the dense network, which is far larger, so theirs says more about the architecture.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from torch import nn

from ispasp._apply import apply_
from ispasp._reset import reset_
from ispasp._survey import survey
from ispasp.errors import InputError
from ispasp.select import GFS, Random, Selector, selector
from ispasp.train import Sgd, Soft
from ispasp_lab.accuracy import accuracy
from ispasp_lab.experiments import cnn_pipeline
from ispasp_lab.experiments.cnn import Settings
from ispasp_lab.experiments.cnn_pipeline import FINAL, Stage, Training, blocks, target
from ispasp_lab.experiments.cnn_setup import load_images, load_network
from ispasp_lab.experiments.records import append_row, read_rows

KEEPS = (0.5, 0.25)
SELECTORS: dict[str, Callable[[int], Selector]] = {
    "ispasp": lambda _: selector("ispasp"),
    "gfs": lambda seed: GFS(candidates=50, seed=seed),  # the stochastic variant, as the paper
    **{name: (lambda _, name=name: selector(name)) for name in ("gfs-local", "l1", "fpgm", "taylor", "obs")},  # type: ignore[misc]
    "random": lambda seed: Random(seed=seed),
    "auto": lambda _: selector("obs"),
}
TRAINED = ("sfp", "scratch-e", "scratch-b")
METHODS = (*SELECTORS, *TRAINED)
_SCRATCH_LR = 0.1  # as networks for CIFAR-10 are trained from the start


@dataclass(frozen=True)
class Row:
    """One network. `pruned`: percent right before the training at the end.

    `cpu_s`: processor time of everything, all threads; of a run that was interrupted, since it went on.
    """

    model: str
    data: str
    settings: str
    method: str
    keep: float
    seed: int
    pruned: float
    accuracy: float
    epochs: float
    macs: float
    params: float
    cpu_s: float

    @property
    def key(self) -> tuple[str, str, str, str, float, int]:
        """What was asked for."""
        return self.model, self.data, self.settings, self.method, self.keep, self.seed


def run(
    settings: Settings,
    training: Training,
    folder: Path,
    methods: Sequence[str] = (),
    keeps: Sequence[float] = (),
    seeds: int = 2,
    *,
    progress: bool = True,
) -> Iterator[Row]:
    """Make the rows that the CSV file in the folder does not have yet, and yield each when it is there.

    A network that was interrupted goes on at its last block or checkpoint.
    """
    unknown = [name for name in methods if name not in METHODS]
    if unknown:
        raise InputError(f"methods {unknown}: choose from {', '.join(METHODS)}")
    path = folder / file_name(settings)
    done = {row.key for row in read_rows(path, Row)}
    for seed in range(settings.seed, settings.seed + seeds):
        for keep in keeps or KEEPS:
            for method in methods or METHODS:
                one = _One(replace(settings, seed=seed), training, method, keep, folder, progress)
                if one.blank.key not in done:
                    row = one.trained()
                    append_row(path, row)
                    shutil.rmtree(one.place, ignore_errors=True)
                    yield row


def file_name(settings: Settings) -> str:
    """Such as cnn-finetune-cifar10.csv: several models stand in one file."""
    return f"cnn-finetune-{Path(settings.data).name}.csv"


@dataclass(frozen=True, eq=False)
class _One:
    """One network to prune and train."""

    settings: Settings
    training: Training
    method: str
    keep: float
    folder: Path
    progress: bool

    @property
    def place(self) -> Path:
        return self.folder / "cnn-finetune" / f"{self.settings.model}-{self.method}-{self.keep:g}-{self.settings.seed}"

    @property
    def blank(self) -> Row:
        s, t = self.settings, self.training
        how, name = f"examples={s.examples} tested={s.tested} {t}", Path(s.data).name
        return Row(s.model, name, how, self.method, self.keep, s.seed, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    def trained(self) -> Row:
        started = time.process_time()
        row = self._pipeline() if self.method in SELECTORS else self._at_once()
        return replace(row, cpu_s=time.process_time() - started)

    def _pipeline(self) -> Row:
        """Block by block, an epoch after each, then to the end."""
        chosen = SELECTORS[self.method](self.settings.seed)
        how = "dense" if self.method == "auto" else None
        named = {"compensate": how, "method": chosen, "tested_between": False, "progress": self.progress}
        for _ in cnn_pipeline.run(self.settings, self.training, self.place, keep=self.keep, **named):  # type: ignore[arg-type]
            pass
        name, _ = target(self.settings.model, None, self.keep)
        rows = read_rows(cnn_pipeline.place_of(self.settings, self.place, name) / "stages.csv", Stage)
        last = next(row for row in rows if row.block == FINAL)
        epochs = self.training.final + self.training.between * sum(row.units > 0 for row in rows)
        return replace(
            self.blank, pruned=last.accuracy or 0.0, accuracy=last.trained_accuracy or 0.0, epochs=epochs,
            macs=last.macs, params=last.params,
        )  # fmt: skip

    def _at_once(self) -> Row:
        """One training, of the dense network or of the pruned architecture with new weights."""
        images, model = load_images(self.settings.data), load_network(self.settings.model, self.settings.weights)
        some = images.some(self.settings.examples, self.settings.tested, self.settings.seed)
        found = survey(model, some.x[:2])
        plan = found.plan({"*": self.keep})
        cost = found.cost(plan)
        epochs = self.training.final + self.training.between * len(blocks(found, {"*": self.keep}))
        soft, lr = None, self.training.lr
        if self.method == "sfp":
            soft = Soft(self.keep)
        else:
            reset_(apply_(model, plan, some.x[:2]), seed=self.settings.seed)
            epochs, lr = epochs * (cost.dense_macs / cost.macs if self.method == "scratch-b" else 1.0), _SCRATCH_LR

        def right(network: nn.Module) -> float:
            return accuracy(network, some.x_test, some.y_test, self.settings.batch, progress=False)

        before = right(model)
        self.training.fit(
            model, images, epochs, self.settings.seed, recipe=Sgd(lr=lr), soft=soft,
            checkpoint=self.place / "training", progress=self.progress,
        )  # fmt: skip
        return replace(
            self.blank, pruned=before, accuracy=right(model), epochs=epochs, macs=cost.macs, params=cost.params
        )


def write(settings: Settings, folder: Path, command: str) -> Path:
    """Describe all rows that the CSV file in the folder has."""
    path = folder / file_name(settings)
    page = path.with_suffix(".md")
    page.write_text(summary(read_rows(path, Row), command), encoding="utf-8")
    return page


def summary(rows: Sequence[Row], command: str) -> str:
    """One table for each network, its settings and size: mean and range over the seeds, best first.

    >>> row = Row("net", "cifar10", "", "l1", 0.5, 0, 60.0, 91.0, 39, 2e7, 1e5, 60.0)
    >>> print(summary([row, replace(row, seed=1, accuracy=92.0)], "ispasp reproduce cnn --finetune").splitlines()[-1])
    | l1 | 60.00 | **91.50** | 1.00 | 2 | 39 | 1 |
    """
    lines = [
        "# Pruned networks after fine-tuning",
        "",
        f"Made by `{command}`. Block by block, with training after each block and at the end, as the paper's Table 1."
        " All methods keep the same fraction of every block, so the networks have the same size. Accuracy in percent,"
        " the mean over the seeds; range: largest minus smallest. `pruned`: before the training at the end."
        " `auto` is `obs` with compensation towards the dense network. `sfp` is soft filter pruning, which starts at"
        " the dense network: its `pruned` is the dense accuracy. It needs many epochs (He et al. take 200): filters set"
        " to zero grow back behind a BatchNorm within one. `scratch-e` and `scratch-b` are the same architecture"
        " trained from new weights, for as many epochs or as much compute as the others; Liu et al. (2019) give it that"
        " of training the dense network, which is far more.",
        "",
    ]
    groups = {(row.model, row.settings, row.keep) for row in rows}
    for model, how, keep in sorted(groups, key=lambda each: (each[0], each[1], -each[2])):
        here = [row for row in rows if (row.model, row.settings, row.keep) == (model, how, keep)]
        lines += [f"## {model} at keep {keep:g}: {here[0].macs / 1e6:,.1f} M MACs", "", f"Settings: `{how}`.", ""]
        lines += [
            "| method | pruned | trained | range | seeds | epochs | CPU min |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        methods = {name: [row for row in here if row.method == name] for name in {row.method for row in here}}
        best = max(mean(row.accuracy for row in group) for group in methods.values())
        for name, group in sorted(methods.items(), key=lambda each: -mean(row.accuracy for row in each[1])):
            right = [row.accuracy for row in group]
            shown = f"**{mean(right):.2f}**" if mean(right) == best else f"{mean(right):.2f}"
            cells = [
                f"{mean(row.pruned for row in group):.2f}",
                shown,
                f"{max(right) - min(right):.2f}",
                str(len(group)),
            ]
            cells += [f"{group[0].epochs:g}", f"{mean(row.cpu_s for row in group) / 60:,.0f}"]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)
