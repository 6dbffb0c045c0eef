"""The batch protocol: what users hand over, made ready for the model.

A batch is a Tensor for model(x), a tuple or list for model(*x), a mapping for model(**x), or one of these with labels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from ispasp.calibrate.labels import Labels, can_be_labels, find_labels, parameter_for, runs
from ispasp.calibrate.rows import count_examples, is_rows, tensors_of
from ispasp.errors import InputError
from ispasp.graph.trace import Batch

InputOf = Callable[[Any], Batch]
NO_BATCHES = "no calibration batches: pass at least one; an exhausted iterator counts as none"
FORMS = "a Tensor, a tuple, list or dict of tensors, or (inputs, labels)"


def batches_in(given: Any, model: nn.Module) -> Iterable[Any]:
    """The batches in what is given: all of a DataLoader or list, or the one batch that it is.

    An iterator can be gone through once only, so what has been read of it is kept.

    >>> net, x, y = nn.Linear(3, 2), torch.ones(4, 3), torch.zeros(4, dtype=torch.long)
    >>> len(batches_in(x, net)), len(batches_in((x, y), net)), len(batches_in([x, x], net))
    (1, 1, 2)
    """
    if isinstance(given, (Tensor, Mapping)):
        return [given]
    if isinstance(given, Dataset) or hasattr(given, "set_format"):
        raise InputError(
            f"batches is a {type(given).__name__}, which yields single examples: pass "
            "torch.utils.data.DataLoader(dataset, batch_size=32), with batch_size=None if it yields whole batches"
        )
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise InputError(
            f"batches is a {type(given).__name__}: pass a DataLoader, a list of batches, or one batch, which is {FORMS}"
        )
    if isinstance(given, (tuple, list)) and _is_one_batch(given, model):
        return [given]
    return Kept(given) if isinstance(given, Iterator) else given


def _is_one_batch(given: tuple[Any, ...] | list[Any], model: nn.Module) -> bool:
    """Whether this is a batch, rather than several: its parts differ in kind, or the model needs all of them at once.

    Batches of one kind have the same dtype and as many axes, as those of `x.split(32)`. A list that ends with floats is
    taken for batches.
    """
    if len(given) < 2 or not isinstance(given[-1], Tensor) or not is_rows(given, count_examples(given)):
        return False
    if not all(isinstance(part, Tensor) for part in given):
        return isinstance(given[0], Mapping) or (isinstance(given, tuple) and isinstance(given[0], (tuple, list)))
    second = parameter_for(model, 2)
    if second is not None and second.default is inspect.Parameter.empty and second.kind is not second.VAR_POSITIONAL:
        return True
    kinds = {(part.dtype, part.ndim) for part in given}
    if len(kinds) > 1 and (isinstance(given, tuple) or not given[-1].is_floating_point()):
        return True
    if not given[0].is_floating_point() and _is_mask(given[1]) and not _is_mask(given[0]):
        raise InputError("batches are tokens and what looks like a mask: pass one batch [(tokens, mask)] or a dict")
    return False


def _is_mask(tensor: Tensor) -> bool:
    return bool(((tensor == 0) | (tensor == 1)).all())


class Kept:
    """Batches that are read once, and can be gone through again; no more are read than asked for."""

    def __init__(self, batches: Iterable[Any]) -> None:
        """Nothing is read yet."""
        self._iterator = iter(batches)
        self._read: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        """From the first batch on."""
        number = 0
        while True:
            if number == len(self._read):
                try:
                    self._read.append(next(self._iterator))
                except StopIteration:
                    return
            yield self._read[number]
            number += 1


def one_batch(model: nn.Module, given: Any) -> Batch:
    """The inputs of one batch, of what is given or of the first batch in it, on the model's device.

    >>> x, y = torch.ones(4, 3), torch.zeros(4, dtype=torch.long)
    >>> one_batch(nn.Linear(3, 2), [(x, y), (x, y)]).shape
    torch.Size([4, 3])
    """
    single = isinstance(given, (tuple, list)) and not _are_several(model, given)
    batch = placed(given if single else first_in(batches_in(given, model)), model)
    return find_labels(model, batch).without(batch)


def _are_several(model: nn.Module, given: tuple[Any, ...] | list[Any]) -> bool:
    """Whether a tuple or list holds batches, rather than the arguments of one call."""
    if not given or any(type(part) is not type(given[0]) for part in given):
        return False
    if isinstance(given[0], (Mapping, tuple, list)):
        return not runs(model, given)
    return isinstance(given[0], Tensor) and parameter_for(model, len(given)) is None and not can_be_labels(given)


def first_in(batches: Iterable[Any]) -> Any:
    """The first batch.

    >>> first_in([])
    Traceback (most recent call last):
    ispasp.errors.InputError: no calibration batches: pass at least one; an exhausted iterator counts as none
    """
    for batch in batches:
        return batch
    raise InputError(NO_BATCHES)


def prepared(
    batches: Iterable[Any], model: nn.Module, labels: Labels, input_of: InputOf | None = None
) -> Iterator[tuple[Batch, Any]]:
    """Each batch as the model takes it, and as it was given, both on the model's device.

    >>> pairs = prepared([(torch.ones(2, 3), torch.zeros(2).long())], nn.Linear(3, 1), Labels(length=2))
    >>> [(x.shape, given[1]) for x, given in pairs]
    [(torch.Size([2, 3]), tensor([0, 0]))]
    """
    if input_of is not None and not callable(input_of):
        raise InputError(f"input_of={input_of!r}: pass a function, such as lambda batch: batch[0]")
    forms: set[tuple[bool, int]] = set()
    for number, batch in enumerate(batches):
        given = placed(batch, model)
        forms.add(_form(given))
        if input_of is None and len(forms) > 1:
            raise InputError(f"batch {number} is {described(given)}, of another form than those before: pass one form")
        chosen = labels.without(given) if input_of is None else placed(input_of(batch), model)
        _check(chosen, number)
        yield chosen, given


def _form(batch: Batch) -> tuple[bool, int]:
    return isinstance(batch, Mapping), len(batch) if isinstance(batch, (tuple, list)) else 1


def _check(batch: Batch, number: int) -> None:
    if not tensors_of(batch):
        raise InputError(
            f"batch {number} is {described(batch)}, without a tensor: pass {FORMS}, or input_of=lambda batch: ... that "
            "makes one"
        )
    if count_examples(batch) == 0:
        raise InputError(f"batch {number} holds no examples: leave empty batches out")


def placed(batch: Any, model: nn.Module) -> Batch:
    """On the model's device; mappings such as a tokenizer's BatchEncoding become dicts, which torch.export knows."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if isinstance(batch, Mapping):
        batch = dict(batch)
    elif isinstance(batch, (tuple, list)) and any(isinstance(part, Mapping) for part in batch):
        batch = tuple(dict(part) if isinstance(part, Mapping) else part for part in batch)
    if any(leaf.is_meta for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)):
        raise InputError("a batch is on the meta device and has no values: pass tensors that hold data")
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


def described(batch: Any) -> str:
    """A batch in a few words, for messages.

    >>> described((torch.ones(4, 3), torch.zeros(4).long())), described({"x": torch.ones(2)}), described(3)
    ('a tuple of float32 (4, 3) and int64 (4,)', 'a dict with x', 'a int')
    """
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
    name = f"a {type(batch).__name__}"
    if isinstance(batch, Mapping):
        return f"{name} with {', '.join(map(str, list(batch)[:8]))}"
    if isinstance(batch, (tuple, list)):
        parts = [described(part) for part in batch[:3]] + ([f"{len(batch) - 3} more"] if len(batch) > 3 else [])
        return f"{name} of {' and '.join(parts)}" if parts else f"an empty {type(batch).__name__}"
    return name


def signature(batch: Batch) -> tuple[Any, ...]:
    """What a traced graph depends on: shapes, dtypes, and everything that is not a tensor.

    >>> signature({"x": torch.ones(2, 3)}) == signature({"x": torch.zeros(2, 3)})
    True
    """
    leaves, tree = pytree.tree_flatten(batch)
    parts = [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves]
    return (str(tree), *parts)
