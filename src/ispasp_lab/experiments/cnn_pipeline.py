"""Table "ImageNet" (Section 6.3, Appendix A.3): prune block by block, train for an epoch after each, then for 90.

Interrupted runs go on: the network is saved after every block, and training keeps checkpoints of its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ispasp._finetune import finetune
from ispasp._keep import recipes
from ispasp._options import Compensate
from ispasp._prune import prune_
from ispasp._store import load, save
from ispasp._survey import Survey, survey
from ispasp.errors import InputError
from ispasp.select import ISpaSP, Selector
from ispasp.train import Sgd
from ispasp.types.plan import Plan
from ispasp_lab.accuracy import accuracy
from ispasp_lab.data import batches
from ispasp_lab.experiments.cnn import DENSE, Settings, cross_entropy
from ispasp_lab.experiments.cnn_augment import training_loader
from ispasp_lab.experiments.cnn_setup import Images, load_images, load_network
from ispasp_lab.experiments.records import append_row, read_rows, rewrite

FINAL = "fine-tuned"


@dataclass(frozen=True)
class Training:
    """Amount of training: epochs after each block with a fixed learning rate, and epochs at the end with cosine.

    `precision` "bf16" trains in mixed precision, which processors with bfloat16 do faster.

    >>> print(Training(between=0.5, final=4, precision="bf16"))
    epochs=0.5+4 lr=0.01 batch=256 precision=bf16
    """

    between: float = 1.0
    final: float = 90.0
    lr: float = 0.01
    batch: int = 256
    workers: int = 0
    precision: str = "no"

    def __str__(self) -> str:
        """One line, by which rows of the same settings are found again."""
        text = f"epochs={self.between:g}+{self.final:g} lr={self.lr:g} batch={self.batch}"
        return text if self.precision == "no" else f"{text} precision={self.precision}"

    def fit(self, model: nn.Module, images: Images, epochs: float, seed: int, **options: Any) -> None:
        """Train on augmented images, with options of `ispasp.finetune`. The model ends in eval mode."""
        to: Any = model.to  # its types do not know memory_format alone
        to(memory_format=torch.channels_last)  # up to a fifth faster on CPUs
        finetune(
            model,
            training_loader(images.x, images.y, self.batch, seed, self.workers),
            epochs=epochs,
            mixed_precision=None if self.precision == "no" else self.precision,
            checkpoint_every=200,
            seed=seed,
            **options,
        )
        to(memory_format=torch.contiguous_format)
        model.eval()


@dataclass(frozen=True)
class Stage:
    """The network after one step: a block pruned and trained, or the last training. Accuracies: top-1 in percent."""

    model: str
    data: str
    target: str
    settings: str
    stage: int
    block: str
    kept: int
    units: int
    accuracy: float | None
    trained_accuracy: float | None
    macs: float
    params: float


def blocks(found: Survey, keep: Mapping[str, float]) -> dict[str, int]:
    """The hidden dimensions that lose units, in order, and the number that stays in each."""
    return {name: len(kept) for name, kept in found.plan(keep).kept.items()}


def target(model: str, recipe: str | None, keep: float | None) -> tuple[str, Mapping[str, float]]:
    """`keep` and its label: a recipe of the paper by name, or one fraction for all blocks.

    >>> target("mobilenet_v2", "mobilenet_v2-260M", None)[1]["features.6.conv.0.0"]
    0.4
    >>> target("cifar_resnet56", None, 0.5)
    ('keep-0.5', {'*': 0.5})
    """
    mine = [name for name, known in recipes.items() if known.model == f"torchvision:{model}"]
    if (recipe is None) == (keep is None):
        raise InputError(f"pass either a recipe (for {model}: {', '.join(mine) or 'none'}) or keep, such as 0.5")
    if recipe is None:
        return f"keep-{keep:g}", {"*": float(keep or 0)}
    if recipe not in mine:
        raise InputError(f"recipe {recipe!r} is not one of {model}'s: choose from {', '.join(mine) or 'none'}")
    return recipe, recipes[recipe].keep


def run(
    settings: Settings,
    training: Training,
    folder: Path,
    recipe: str | None = None,
    keep: float | None = None,
    *,
    compensate: Compensate = None,
    method: Selector | None = None,
    tested_between: bool = True,
    progress: bool = True,
) -> Iterator[Stage]:
    """Do the steps that are not done yet, each with its row in the CSV file; the pruned network ends in `model/`.

    In the paper, `compensate` is None and `method` is i-SpaSP with 20 iterations, which it also is by default.
    `tested_between=False` tests the network before and after the last training only.
    """
    name, wanted = target(settings.model, recipe, keep)
    run_ = _Run(settings, training, place_of(settings, folder, name), name, compensate, progress)
    run_.tested_between = tested_between
    if method is not None:
        run_.method = method
    yield from run_.stages(wanted)


def place_of(settings: Settings, folder: Path, name: str) -> Path:
    """The folder of one pipeline, with stages.csv and the network."""
    return folder / f"cnn-pipeline-{settings.model}-{Path(settings.data).name}-{name}"


class _Run:
    """One pipeline, step by step."""

    def __init__(
        self, settings: Settings, training: Training, place: Path, name: str, compensate: Compensate, progress: bool
    ) -> None:
        self._settings = settings
        self._training = training
        self._place = place
        self._compensate = compensate
        self._progress = progress
        self.method: Selector = ISpaSP(iterations=20)
        self.tested_between = True
        self._images = load_images(settings.data)
        self._some = self._images.some(settings.examples, settings.tested, settings.seed)
        self._model = load_network(settings.model, settings.weights)
        self._survey = survey(self._model, self._some.x[:2])
        self._plan = Plan({}, self._survey.structure)
        cost = self._survey.cost()
        s = settings
        how = f"examples={s.examples} tested={s.tested} seed={s.seed} compensate={compensate}"
        how = f"{how} {training}"
        self._blank = Stage(s.model, Path(s.data).name, name, how, 0, DENSE, 0, 0, None, None,
                            cost.dense_macs, cost.dense_params)  # fmt: skip

    def stages(self, wanted: Mapping[str, float]) -> Iterator[Stage]:
        """Dense network, blocks, last training."""
        todo = blocks(self._survey, wanted)
        done = self._resumed()
        if not done:
            row = replace(self._blank, accuracy=self._top1_between())
            append_row(self._place / "stages.csv", row)
            yield row
        for number, (name, kept) in enumerate(todo.items(), start=1):
            if name not in self._plan.kept:
                yield self._block(number, name, kept)
        if not any(row.block == FINAL for row in done):
            yield self._final(len(todo) + 1)

    def _resumed(self) -> list[Stage]:
        """The finished steps; rows that were recorded but not saved are dropped."""
        path = self._place / "stages.csv"
        rows = read_rows(path, Stage)
        for row in rows:
            if row.settings != self._blank.settings:
                raise InputError(
                    f"{path} was made with {row.settings}, not {self._blank.settings}: choose another folder"
                )
        state = self._place / "model"
        if (state / "plan.json").exists():
            self._plan = Plan.from_json((state / "plan.json").read_text(encoding="utf-8"))
            load(state, self._model)
        good = [row for row in rows if row.block in (DENSE, FINAL, *self._plan.kept)]
        if rows:
            rewrite(path, good)
        return good

    def _block(self, number: int, name: str, kept: int) -> Stage:
        """As the paper: 20 iterations on 1,280 images of the training data. Labels are for a loss only."""
        units = self._survey.structure.units[name]
        result = prune_(
            self._model,
            list(batches(self._some.x, self._settings.batch, self._some.y)),
            keep={name: kept},
            method=self.method,
            compensate=self._compensate,
            loss=cross_entropy if {"sensitivity", "task"} & set(self.method.needs) else None,
            memory=self._settings.memory,
            examples=None,
            progress=self._progress,
        )
        self._plan = _both(self._plan, result.plan)
        before = self._top1_between()
        self._train(number, self._training.between, "constant")
        cost = self._survey.cost(self._plan)
        row = replace(self._blank, stage=number, block=name, kept=kept, units=units, accuracy=before,
                      trained_accuracy=self._top1_between(), macs=cost.macs, params=cost.params)  # fmt: skip
        append_row(self._place / "stages.csv", row)  # before the network: a row too many is dropped, none is missing
        self._save()
        self._forget(number)
        return row

    def _final(self, number: int) -> Stage:
        before = self._top1()
        self._train(number, self._training.final, "cosine")
        cost = self._survey.cost(self._plan)
        row = replace(self._blank, stage=number, block=FINAL, accuracy=before, trained_accuracy=self._top1(),
                      macs=cost.macs, params=cost.params)  # fmt: skip
        self._save()  # before the row: with the checkpoint of a finished training it is not trained again
        append_row(self._place / "stages.csv", row)
        self._forget(number)
        return row

    def _train(self, number: int, epochs: float, schedule: str) -> None:
        if not epochs:
            return
        self._training.fit(
            self._model,
            self._images,
            epochs,
            self._settings.seed + number,
            recipe=Sgd(lr=self._training.lr, schedule=schedule),
            checkpoint=self._place / f"training-{number}",
            progress=self._progress,
        )

    def _save(self) -> None:
        save(self._model, self._place / "model", plan=self._plan)

    def _forget(self, number: int) -> None:
        shutil.rmtree(self._place / f"training-{number}", ignore_errors=True)

    def _top1_between(self) -> float | None:
        return self._top1() if self.tested_between else None

    def _top1(self) -> float:
        some: Images = self._some
        model: nn.Module = self._model
        return accuracy(model, some.x_test, some.y_test, self._settings.batch, progress=self._progress)


def _both(plan: Plan, new: Plan) -> Plan:
    """The plan from the dense network after one more block; biases that compensation added stay in it."""
    known = plan.structure
    gained = {f"{path}.bias": new.structure.tensors[f"{path}.bias"] for path in new.structure.biases}
    biases = tuple(dict.fromkeys((*known.biases, *new.structure.biases)))
    structure = replace(known, tensors={**known.tensors, **gained}, biases=biases)
    return Plan({**plan.kept, **new.kept}, structure)


def summary(rows: list[Stage], training: Training, command: str) -> str:
    """The stages as Markdown.

    >>> row = Stage("resnet34", "imagenet", "resnet34-2.69G", "", 1, "layer1.1.conv1", 26, 64, 70.0, 72.0, 3.5e9, 2.1e7)
    >>> print(summary([row], Training(), "ispasp reproduce cnn --pipeline").splitlines()[-1])
    | 1 | layer1.1.conv1 | 26 of 64 | 70.00 | 72.00 | 3,500.0 | 21.000 |
    """
    t, mixed = training, " in bfloat16" if training.precision == "bf16" else ""
    lines = [
        f"# {rows[0].model} on {rows[0].data}: {rows[0].target}",
        "",
        f"Made by `{command}`: block by block with i-SpaSP (T = 20), SGD with momentum and learning rate {t.lr:g} in"
        f" batches of {t.batch}{mixed}, {t.between:g} epochs after each block at a fixed rate and {t.final:g} epochs"
        " with cosine decay at the end, random crops and flips. Top-1 accuracy in percent.",
        "",
        "| stage | block | filters | pruned | trained | MACs, M | parameters, M |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        filters = f"{r.kept} of {r.units}" if r.units else "-"
        right = " | ".join("-" if value is None else f"{value:.2f}" for value in (r.accuracy, r.trained_accuracy))
        lines.append(f"| {r.stage} | {r.block} | {filters} | {right} | {r.macs / 1e6:,.1f} | {r.params / 1e6:,.3f} |")
    return "\n".join([*lines, ""])


def write(settings: Settings, training: Training, folder: Path, name: str, command: str) -> list[Path]:
    """Describe the stages so far; returns the paths of stages.csv and stages.md."""
    place = place_of(settings, folder, name)
    paths = [place / "stages.csv", place / "stages.md"]
    paths[1].write_text(summary(read_rows(paths[0], Stage), training, command), encoding="utf-8")
    return paths
