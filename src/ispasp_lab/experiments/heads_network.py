"""Transformers for the experiment on heads: loaded, trained on a task, tested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader

from ispasp._finetune import finetune
from ispasp.errors import InputError, MissingExtraError
from ispasp.integrations.torchvision import import_torchvision
from ispasp.train import AdamW
from ispasp_lab.data.folder import available, find
from ispasp_lab.data.text import Batch, Texts, load_texts, token_batches

_GROUP = 32  # batches that are sorted by length together


@dataclass(frozen=True)
class Settings:
    """Model and data of a run. `train` and `tested`: sentences, 0 for all; `examples`: sentences for pruning.

    `epochs` of training before pruning and `again` epochs after it, with AdamW and linear decay from `lr`. The paper:
    two epochs, then half a one.
    """

    model: str = "all-MiniLM-L6-v2"
    data: str = "sst2"
    language: str | None = None
    train: int = 6000
    tested: int = 2000
    examples: int = 1280
    epochs: float = 2.0
    again: float = 0.5
    lr: float = 5e-5
    batch: int = 32
    length: int = 64
    seed: int = 0

    def __str__(self) -> str:
        """One line that tells it from other settings, without paths."""
        language = f"-{self.language}" if self.language else ""
        return (
            f"{Path(self.model).name} {Path(self.data).name}{language} train={self.train} tested={self.tested} "
            f"examples={self.examples} epochs={self.epochs:g}+{self.again:g} lr={self.lr:g} batch={self.batch} "
            f"length={self.length} seed={self.seed}"
        )


@dataclass(frozen=True, eq=False)
class Task:
    """Sentences and the tokenizer that turns them into batches."""

    settings: Settings
    texts: Texts
    tokenizer: Any

    def loader(self, seed: int) -> DataLoader[Batch]:
        """Training batches in an order that depends on the seed."""
        s = self.settings
        shuffled = self.texts.some(len(self.texts.train), 1, seed)
        made = token_batches(shuffled.train, shuffled.labels, self.tokenizer, s.batch, s.length, group=_GROUP * s.batch)
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(made, batch_size=None, shuffle=True, generator=generator)  # type: ignore[arg-type]

    def calibration(self, seed: int) -> list[Batch]:
        """Batches for pruning, drawn from the training data."""
        some = self.texts.some(self.settings.examples, 1, seed)
        return token_batches(some.train, some.labels, self.tokenizer, 2 * self.settings.batch, self.settings.length)

    def test(self) -> list[Batch]:
        """Batches for testing."""
        s = self.settings
        return token_batches(self.texts.test, self.texts.labels, self.tokenizer, 2 * s.batch, s.length)


def task(settings: Settings) -> Task:
    """Read the sentences and the tokenizer."""
    texts = load_texts(settings.data, settings.language).some(settings.train, settings.tested)
    tokenizer = import_transformers().AutoTokenizer.from_pretrained(
        pretrained_folder(settings.model), local_files_only=True
    )
    return Task(settings, texts, tokenizer)


def dense(task: Task, folder: Path, *, progress: bool = True) -> nn.Module:
    """The network trained on the task, in eval mode; kept in the folder, so that it is trained once."""
    s = task.settings
    language = f"-{s.language}" if s.language else ""
    name = f"{Path(s.model).name}-{Path(s.data).name}{language}"
    made = f"{s} labels={','.join(task.texts.labels)}"
    path = folder / "networks" / f"{name}.safetensors"
    model = untrained(s.model, len(task.texts.labels), s.seed)
    if path.exists():
        if _made(path) != made:
            raise InputError(f"{path} was made with {_made(path)}, not {made}: choose another folder")
        model.load_state_dict(load_file(path))
        return model.eval()
    train(model, task, s.epochs, s.seed, path.with_suffix(".training"), progress=progress)
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {key: value.detach().clone().contiguous() for key, value in model.state_dict().items()}
    save_file(state, path, {"made": made})
    return model.eval()


def untrained(model: str, classes: int, seed: int = 0) -> nn.Module:
    """The pretrained network of a folder with a new classifier on top, in eval mode."""
    auto = import_transformers().AutoModelForSequenceClassification
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built: nn.Module = auto.from_pretrained(pretrained_folder(model), num_labels=classes, local_files_only=True)
    return built.eval()


def train(
    model: nn.Module, task: Task, epochs: float, seed: int, checkpoint: Path | None = None, *, progress: bool = True
) -> None:
    """AdamW with linear decay; changes the model, which ends in eval mode."""
    recipe = AdamW(lr=task.settings.lr)
    finetune(
        model, task.loader(seed), epochs=epochs, recipe=recipe, seed=seed, checkpoint=checkpoint, progress=progress
    )
    model.eval()


def top1(model: nn.Module, batches: Sequence[Batch]) -> float:
    """Percent of the sentences whose largest logit is that of their label."""
    right = total = 0
    with torch.no_grad():
        for batch in batches:
            logits = model(**inputs_of(batch)).logits
            right += int((logits.argmax(1) == batch["labels"]).sum())
            total += len(batch["labels"])
    return 100 * right / total


def inputs_of(batch: Batch) -> Batch:
    """All but the labels.

    >>> list(inputs_of({"input_ids": torch.ones(1), "labels": torch.ones(1)}))
    ['input_ids']
    """
    return {key: value for key, value in batch.items() if key != "labels"}


def _made(path: Path) -> str:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return str((file.metadata() or {}).get("made"))


def pretrained_folder(model: str) -> Path:
    """The folder of a pretrained Hugging Face model, by its name in the data folder or its path."""
    folder = find(model) if available(model) else Path(model)
    if not (folder / "config.json").is_file():
        raise InputError(
            f"model {model!r} is not a folder with config.json: pass the folder of a pretrained Hugging Face model"
        )
    return folder


def import_transformers() -> Any:
    """The package transformers, without its warnings and progress bars."""
    if find_spec("torchvision") is not None:
        import_torchvision()  # transformers imports it
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("this experiment needs transformers: pip install 'ispasp[transformers]'") from error
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return transformers
