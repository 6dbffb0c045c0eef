"""The user's batches, and the survey of the model on a few examples of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch import nn

from ispasp.api.options import Options
from ispasp.api.survey import Survey, survey_kinds
from ispasp.calibrate.batches import first_examples, prepared, signature
from ispasp.calibrate.circuit import named_tensors
from ispasp.errors import InputError, TraceError
from ispasp.graph.trace import Batch, run


class Inputs:
    """The user's batches, as often as they are needed; an iterator can be gone through once, so it is kept."""

    def __init__(self, model: nn.Module, batches: Iterable[Any], options: Options) -> None:
        """Look at the first batch, and see that the model runs on it."""
        empty = next((name for name, value in named_tensors(model).items() if value.is_meta), None)
        if empty is not None:
            raise InputError(f"{empty!r} is on the meta device and has no values: load the model's weights first")
        self._given = list(batches) if isinstance(batches, Iterator) else batches
        self._model = model
        self._input_of = options.input_of
        self._list: list[Batch] | None = None
        self.first: Batch = next(self.again())
        try:
            self.example = _try(model, self.first)
        except Exception as error:
            hint = (
                "" if self._input_of else "; a loader that yields (input, label) needs input_of=lambda batch: batch[0]"
            )
            raise InputError(
                f"the model does not run on the first batch: {type(error).__name__}: {error}{hint}"
            ) from error

    def again(self) -> Iterator[Batch]:
        """From the first batch on."""
        return iter(self._list) if self._list is not None else (batch for batch, _ in self.pairs())

    def pairs(self) -> Iterator[tuple[Batch, Any]]:
        """Each batch as the model takes it, and as it was given."""
        pair = None
        for pair in prepared(self._given, self._model, self._input_of):
            yield pair
        if pair is None:
            raise InputError("no calibration batches: pass at least one; an exhausted iterator counts as none")

    def listed(self) -> Sequence[Batch]:
        """All of them in memory: inputs only, not activations."""
        if self._list is None:
            self._list = list(self.again())
        return self._list

    def other_kinds(self, example: Batch, *, listed: bool) -> list[Batch]:
        """The first batch of every kind (shapes, dtypes, other values) but the example's; `listed` keeps them all."""
        found = {signature(example): example}
        for batch in self.listed() if listed else self.again():
            found.setdefault(signature(batch), batch)
        return list(found.values())[1:]


def _try(model: nn.Module, batch: Batch) -> Batch:
    """Run the model on two examples, or on all where it does not take so few; returns what it ran on."""
    small = first_examples(batch)
    if small is not None:
        with suppress(Exception):
            run(model, small)
            return small
    run(model, batch)
    return batch


def surveyed(model: nn.Module, batches: Inputs, options: Options) -> tuple[Survey, Batch, list[Batch]]:
    """Survey on two examples where the model takes them, and on one batch of every other kind.

    Two examples are enough to try things out; which way whole batches take is looked up in traces of their own.
    """
    walks = options.order == "sequential" or options.compensate == "dense"

    def survey_on(example: Batch) -> tuple[Survey, Batch, list[Batch]]:
        also = batches.other_kinds(example, listed=walks)
        return survey_kinds(model, example, also, scope=options.scope, kinds=options.kinds), example, also

    if batches.example is not batches.first:
        with suppress(TraceError):
            return survey_on(batches.example)
    return survey_on(batches.first)
