"""The batch protocol: bring the user's batches into the form that the model takes, without labels.

A batch is a Tensor for model(x), a tuple or list for model(*x), a mapping for model(**x), or one of these with labels.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import tee
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from ispasp.errors import InputError
from ispasp.graph.state import succeeds, unwrapped
from ispasp.graph.trace import Batch, evaluating, run_and_restore

InputOf = Callable[[Any], Batch]
NO_BATCHES = "no calibration batches: pass at least one; an exhausted iterator counts as none"
FORMS = "a Tensor, a tuple, list or dict of tensors, or (inputs, labels)"
NAMES = ("labels", "label")  # keys of labels in a dict
_PARAMETERS = (*NAMES, "targets", "target", "y")  # arguments of a forward that are labels
_TRIALS = (2, 3)  # numbers of examples to try: a shape fits by chance for one of them at most
_LOG = logging.getLogger("ispasp")
Limit = int | Literal["auto"] | None
Pair = tuple[Batch, Any]  # the inputs of the model, and the batch as given
ENOUGH = 32  # with fewer examples none is held out
_MASKS = ("attention_mask", "decoder_attention_mask")
_DECODED = ("decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask")
_EXAMPLES, _TOKENS, _VALUES = 1024, 65_536, 256 * 3 * 224 * 224
_SHARE, _MOST = 1 / 8, 1 / 4  # share of the examples to hold out, and the most


def batches_in(given: Any, model: nn.Module) -> Iterable[Any]:
    """The batches of a DataLoader or list; a single batch becomes a list of one."""
    if isinstance(given, (Tensor, Mapping)):
        return [given]
    if isinstance(given, Dataset) or hasattr(given, "set_format"):
        raise InputError(
            f"batches is a {type(given).__name__}, which yields single examples: pass "
            "torch.utils.data.DataLoader(dataset, batch_size=32), with batch_size=None if it yields whole batches"
        )
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise InputError(f"batches is a {type(given).__name__}: pass a DataLoader, a list of batches, or one: {FORMS}")
    if isinstance(given, (tuple, list)) and _is_one_batch(given, model):
        return [given]
    return Replayed(given) if isinstance(given, Iterator) else given


def _is_one_batch(given: tuple[Any, ...] | list[Any], model: nn.Module) -> bool:
    """Whether this is one batch: its parts differ in kind, or the model takes all of them at once.

    Several batches have the same dtype and number of axes, such as those of `x.split(32)`. A list that ends with floats
    counts as batches.
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
    if given[0].is_floating_point() or any(part.is_meta for part in given[:2]):
        return False
    if [bool(((part == 0) | (part == 1)).all()) for part in given[:2]] == [False, True]:
        raise InputError("batches are tokens and what looks like a mask: pass one batch [(tokens, mask)] or a dict")
    return False


class Replayed:
    """Batches of an iterator, kept so that they can be iterated again; read on demand."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._all = iter(batches)

    def __iter__(self) -> Iterator[Any]:
        self._all, again = tee(self._all)
        return again


def one_batch(model: nn.Module, given: Any) -> Batch:
    """The inputs of one batch, or of the first of several, on the model's device."""
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
    """The first batch."""
    for batch in batches:
        return batch
    raise InputError(NO_BATCHES)


def prepared(
    batches: Iterable[Any], model: nn.Module, labels: Labels, input_of: InputOf | None = None
) -> Iterator[tuple[Batch, Any]]:
    """Yield the model's inputs and the batch as given, both on the model's device."""
    if input_of is not None and not callable(input_of):
        raise InputError(f"input_of={input_of!r}: pass a function, such as lambda batch: batch[0]")
    forms: set[tuple[bool, int]] = set()
    for number, batch in enumerate(batches):
        given = placed(batch, model)
        forms.add((isinstance(given, Mapping), len(given) if isinstance(given, (tuple, list)) else 1))
        if input_of is None and len(forms) > 1:
            raise InputError(f"batch {number} is {described(given)}, of another form than those before: pass one form")
        chosen = labels.without(given) if input_of is None else placed(input_of(batch), model)
        if not tensors_of(chosen):
            raise InputError(
                f"batch {number} is {described(chosen)}, without a tensor: pass {FORMS} or input_of=lambda batch: ..."
            )
        if count_examples(chosen) == 0:
            raise InputError(f"batch {number} holds no examples: leave empty batches out")
        yield chosen, given


def inputs_in(batches: Iterable[Any], model: nn.Module, input_of: InputOf | None = None) -> Iterator[Batch]:
    """Yield the inputs of the model, batch by batch, without labels."""
    given = batches_in(batches, model)
    labels = _NONE if input_of else find_labels(model, placed(first_in(given), model))
    return (batch for batch, _ in prepared(given, model, labels, input_of))


def placed(batch: Any, model: nn.Module) -> Batch:
    """Move a batch to the model's device. Mappings such as a BatchEncoding become dicts, which torch.export knows."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if isinstance(batch, Mapping):
        batch = dict(batch)
    elif isinstance(batch, (tuple, list)) and any(isinstance(part, Mapping) for part in batch):
        batch = tuple(dict(part) if isinstance(part, Mapping) else part for part in batch)
    if any(leaf.is_meta for leaf in tensors_of(batch)):
        raise InputError("a batch is on the meta device and has no values: pass tensors that hold data")
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


def described(batch: Any) -> str:
    """Describe a batch in a few words, for messages.

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
    """The kind of a batch, for which a trace is valid: shapes, dtypes, and all values that are not tensors."""
    leaves, tree = pytree.tree_flatten(batch)
    parts = [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves]
    return (str(tree), *parts)


# Labels ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Labels:
    """Place of the labels in every batch: the end of a tuple of that `length`, `names` of a dict, or none."""

    length: int = 0
    names: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.length or self.names)

    def __str__(self) -> str:
        if self.names:
            return f"batches have {' and '.join(map(repr, self.names))}: the model gets the rest only"
        what = "(inputs, labels)" if self.length == 2 else f"tuples of {self.length} that end with labels"
        return f"batches are {what}: the model gets the inputs only" if self.length else "batches have no labels"

    def without(self, batch: Batch) -> Batch:
        if self.names:
            return {name: value for name, value in batch.items() if name not in self.names}
        if self.length:
            return batch[0] if self.length == 2 else tuple(batch[:-1])
        return batch


_NONE = Labels()


def find_labels(model: nn.Module, batch: Batch) -> Labels:
    """Find the labels in a batch, by the arguments of the model. Nothing that it may need is left out.

    - `(inputs, labels)`: the last element is labels where the forward has no argument left for it. Where an optional
      argument is left, the model must fail with the last element and run without it.
    - A dict: `labels` or `label` are left out where the model runs without them.
    """
    found = Labels()
    if isinstance(batch, Mapping):
        found = Labels(names=tuple(name for name in NAMES if name in batch))
        if found and not runs(model, batch, found):
            found = Labels()
    elif isinstance(batch, (tuple, list)) and len(batch) > 1 and can_be_labels(batch):
        found = _at_the_end(model, batch)
    if found:
        _LOG.info("%s", found)
    return found


def can_be_labels(batch: tuple[Any, ...] | list[Any]) -> bool:
    """Whether the last element can be labels: one row per example, and not one more input like the first one."""
    first, last = batch[0], batch[-1]
    if not isinstance(last, Tensor):
        return isinstance(last, (tuple, list, Mapping))
    if last.ndim == 0 or not is_rows(batch, len(last)):
        return False
    return not isinstance(first, Tensor) or (first.dtype, first.shape) != (last.dtype, last.shape)


def _at_the_end(model: nn.Module, batch: tuple[Any, ...] | list[Any]) -> Labels:
    labels = Labels(length=len(batch))
    argument, is_target = parameter_for(model, len(batch)), _is_target(batch[0], batch[-1])
    if argument is None and (not isinstance(batch[-1], Tensor) or is_target):
        return labels
    if argument is not None:
        required = argument.default is argument.empty and argument.kind is not argument.VAR_POSITIONAL
        if required or not is_target or (argument.name not in _PARAMETERS and runs(model, batch)):
            return Labels()
    return labels if runs(model, batch, labels) else Labels()


def _is_target(inputs: Any, last: Any) -> bool:
    """Whether the last element is labels, not a mask: tokens and a mask look like tokens with labels."""
    if not isinstance(last, Tensor) or last.dtype == torch.bool:
        return False
    if not isinstance(inputs, Tensor):
        return True
    return last.ndim < inputs.ndim or (inputs.is_floating_point() and not last.is_floating_point())


def parameter_for(model: nn.Module, number: int) -> inspect.Parameter | None:
    """The parameter of the forward that takes positional argument `number`, if there is one."""
    try:
        parameters = list(inspect.signature(unwrapped(model).forward).parameters.values())
    except (TypeError, ValueError):  # no Python function: it may take anything
        return inspect.Parameter("inputs", inspect.Parameter.VAR_POSITIONAL)
    by_position = [p for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
    if by_position and by_position[-1].kind is inspect.Parameter.VAR_POSITIONAL and number >= len(by_position):
        return by_position[-1]
    return by_position[number - 1] if number <= len(by_position) else None


def runs(model: nn.Module, batch: Batch, labels: Labels = _NONE) -> bool:
    """Whether the model runs without the labels, on two and on three examples, or on the batch where it is small."""
    size = count_examples(batch)
    few = [first_of(batch, number) for number in _TRIALS if number < size and is_rows(batch, size)]
    with evaluating(model):  # the real run will show the error
        return succeeds(lambda: [run_and_restore(model, labels.without(part)) for part in few or [batch]])


# Examples, which are the rows of a batch ---------------------------------------------------------------------------
def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a batch or an output, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def count_examples(batch: Batch) -> int:
    """Number of examples, by the first tensor."""
    return next((leaf.shape[0] if leaf.ndim else 1 for leaf in tensors_of(batch)), 1)


def is_rows(value: Any, size: int) -> bool:
    """Whether all tensors have `size` rows."""
    return all(t.ndim > 0 and t.shape[0] == size for t in tensors_of(value))


def part(value: Any, rows: slice) -> Any:
    """Copy some rows of all tensors, each once."""
    leaves = {id(leaf): leaf[rows].clone() for leaf in tensors_of(value)}
    return pytree.tree_map_only(Tensor, lambda leaf: leaves[id(leaf)], value)


def padding_masks(batch: Batch) -> tuple[Tensor, ...]:
    """The attention masks of a batch that has padding, as booleans. (examples, tokens)

    Empty if a mask could be for the tokens of the encoder or the decoder, because their shapes are the same.
    """
    if not isinstance(batch, Mapping):
        return ()
    given = [batch[name] for name in _MASKS if isinstance(batch.get(name), Tensor) and batch[name].ndim == 2]
    tokens = {tuple(value.shape) for name in _DECODED if isinstance(value := batch.get(name), Tensor)}
    if given and "attention_mask" in batch and tuple(batch["attention_mask"].shape) in tokens:
        return ()
    masks = tuple(mask.bool() for mask in given)
    return masks if any(not bool(mask.all()) for mask in masks) else ()


def real_rows(x: Tensor, masks: Sequence[Tensor]) -> Tensor | None:
    """Mask of the rows of activations that are not padding; None if all count. (rows,) or (b, tokens)"""
    for mask in masks:
        if x.ndim > 2 and x.shape[:2] == mask.shape:
            return mask.to(x.device)
        if x.ndim == 2 and len(x) == mask.numel():
            return mask.flatten().to(x.device)
    return None


def first_of(batch: Batch, most: int) -> Batch:
    """At most `most` examples of a batch; all if its tensors have different numbers of rows."""
    size = count_examples(batch)
    return part(batch, slice(0, most)) if size > most and is_rows(batch, size) else batch


def most_examples(limit: Limit, batch: Batch) -> int | None:
    """The number of examples to use, None for all.

    "auto" takes 1,024, and fewer where examples are large: 65,536 tokens, or 256 images of 3 x 224 x 224.
    """
    if limit != "auto":
        return limit if limit is None else int(limit)

    def affordable(tensor: Tensor) -> int:
        each = max(1, tensor.numel() // max(1, len(tensor))) if tensor.ndim else 1
        return (_TOKENS if tensor.dtype in (torch.int32, torch.int64) else _VALUES) // each

    return max(1, min(_EXAMPLES, *map(affordable, tensors_of(batch))))


def held_out(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Split batches into calibration and held-out ones: about the last eighth of the examples.

    Whole batches are held out if that is at most a quarter of the examples, since every new shape must be traced. Else
    the last batch is divided. With fewer than 32 examples nothing is held out.
    """
    rest, held = list(pairs), list[Pair]()
    sizes = [count_examples(batch) for batch, _ in pairs]
    total, taken = sum(sizes), 0
    if total < ENOUGH:
        return rest, []
    while taken < _SHARE * total and len(rest) > 1 and taken + sizes[len(rest) - 1] <= _MOST * total:
        taken += sizes[len(rest) - 1]
        held.insert(0, rest.pop())
    pair, size, last = rest[-1], sizes[len(rest) - 1], round(_SHARE * total) - taken
    if taken < _SHARE * total / 2 and size >= last + 2 and is_rows(pair, size):
        rest[-1] = part(pair, slice(0, size - last))
        held.insert(0, part(pair, slice(size - last, size)))
    return rest, held
