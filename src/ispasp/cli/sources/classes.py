"""Classes: what the labels of a folder or a table stand for, and which outputs of the model they are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import Tensor

from ispasp.cli.sources.examples import Examples
from ispasp.errors import InputError

_SPLITS = {"train", "training", "calibration", "val", "valid", "validation", "dev", "test", "testing", "eval"}
_SYNSET = re.compile(r"n\d{8}")


def numbered(names: Sequence[str], among: Sequence[str] = ()) -> tuple[Tensor, tuple[str, ...]]:
    """The label of every example, and the names that the labels stand for.

    Names that are all numbers are the labels themselves. Others are counted in the order of the alphabet, with those
    of classes without an example (`among`).

    >>> numbered(["7", "10"]), numbered(["dog", "cat"])
    ((tensor([ 7, 10]), ()), (tensor([1, 0]), ('cat', 'dog')))
    """
    classes = sorted({*names, *among})
    if all(name.isdecimal() for name in classes):
        return torch.tensor([int(name) for name in names]), ()
    index = {name: i for i, name in enumerate(classes)}
    return torch.tensor([index[name] for name in names]), tuple(classes)


def check_no_splits(folder: object, names: Sequence[str]) -> None:
    """Refuse a folder whose sub-folders are parts of a data set, not classes.

    >>> check_no_splits("photos", ["train", "val"])
    Traceback (most recent call last):
    ispasp.errors.InputError: photos has the parts train, val of a data set, no classes: pass photos/train
    """
    parts = [name for name in names if name.lower() in _SPLITS]
    train = [name for name in parts if name.lower().startswith("train")]
    if parts and (len(parts) == len(names) or 0 < len(train) < len(parts)):
        raise InputError(
            f"{folder} has the parts {', '.join(parts)} of a data set, no classes: pass {folder}/{[*train, *parts][0]}"
        )


def matched(examples: Examples, outputs: int, names: Sequence[str] = ()) -> Examples:
    """The examples with labels that are outputs of the model; `names` are what the outputs stand for, where known.

    >>> data = Examples(2, list, "2 images", labels=torch.tensor([0, 1]), classes=("cat", "dog"))
    >>> matched(data, 3, ("dog", "eel", "cat")).labels
    tensor([2, 0])
    >>> matched(data, 3)
    Traceback (most recent call last):
    ispasp.errors.InputError: 2 images have 2 classes, such as 'cat', the model has 3 outputs: name the classes by ...
    """
    labels = examples.needed_labels()
    if examples.classes:
        index = _index(examples.classes, outputs, names)
        if index is None:
            raise InputError(
                f"{examples.text} have {len(examples.classes)} classes, such as {examples.classes[0]!r}, the model has "
                f"{outputs:,} outputs: name the classes by output, from 0 to {outputs - 1}, or as the model does"
            )
        labels = torch.tensor(index)[labels]
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= outputs:
        wrong = f"up to {highest}" if highest >= outputs else f"from {lowest} on"
        raise InputError(
            f"{examples.text} have labels {wrong}, the model has {outputs:,} outputs: pass data of its classes"
        )
    return replace(examples, labels=labels)


def _index(classes: Sequence[str], outputs: int, names: Sequence[str]) -> list[int] | None:
    """The output of every class: by its name, or in the order of the alphabet where there are as many of both."""
    for known in (names, _synsets(classes, outputs)):
        plain = [_plain(name) for name in known]
        once = {name for name, times in Counter(plain).items() if times == 1}
        if len(known) == outputs and all(_plain(name) in once for name in classes):
            return [plain.index(_plain(name)) for name in classes]
    return list(range(outputs)) if len(classes) == outputs else None


def _synsets(classes: Sequence[str], outputs: int) -> Sequence[str]:
    """ImageNet's own names of its 1,000 classes, such as n01440764, which timm knows."""
    if outputs != 1000 or not all(_SYNSET.fullmatch(name) for name in classes) or find_spec("timm") is None:
        return ()
    from ispasp.integrations.torchvision import import_torchvision

    import_torchvision()  # timm imports it
    from timm.data.imagenet_info import ImageNetInfo

    return [str(name) for name in ImageNetInfo().label_names()]  # type: ignore[no-untyped-call]


def _plain(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").replace("-", " ").split())
