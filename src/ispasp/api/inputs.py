"""The user's batches, and the survey of the model on a few examples of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from torch import nn

from ispasp.api.options import Options
from ispasp.api.survey import Survey, survey_kinds
from ispasp.calibrate.batches import NO_BATCHES, batches_in, described, first_in, placed, prepared, signature
from ispasp.calibrate.circuit import named_tensors
from ispasp.calibrate.held_out import Pair, held_out
from ispasp.calibrate.labels import Labels, find_labels
from ispasp.calibrate.limit import first_pair, most_examples
from ispasp.calibrate.rows import count_examples, first_examples
from ispasp.calibrate.team import Team
from ispasp.errors import InputError, TraceError
from ispasp.graph.trace import Batch, run_and_restore
from ispasp.surgery.fold import Folding


class Inputs:
    """The user's batches, as often as they are needed, up to the number of examples that the options allow."""

    def __init__(self, model: nn.Module, batches: Iterable[Any], options: Options) -> None:
        """Look at the first batch, and see that the model runs on it."""
        empty = next((name for name, value in named_tensors(model).items() if value.is_meta), None)
        if empty is not None:
            raise InputError(f"{empty!r} is on the meta device and has no values: load the model's weights first")
        self._given = batches_in(batches, model)
        self._model = model
        self._options = options
        self._list: list[Pair] | None = None
        self._held: list[Pair] = []
        self._taken, self._more = 0, False  # examples of the last time, and whether some were left
        self.divided: Batch | None = None  # a batch of which some examples are held out
        first = first_in(self._given)
        self._labels = Labels() if options.input_of else find_labels(model, placed(first, model))
        ((self.first, _),) = self._within_limit([first])
        try:
            self.example = _try(model, self.first)
        except Exception as error:
            hint = "" if options.input_of else f"; it is {described(first)}, pass input_of=lambda batch: ... if needed"
            raise InputError(
                f"the model does not run on the first batch: {type(error).__name__}: {error}{hint}"
            ) from error
        if options.walks or isinstance(self._given, Sequence):
            self._divide()

    def _divide(self) -> None:
        """Keep all batches in memory (inputs only, not activations), some of them apart."""
        labelled = self._options.loss is not None
        pairs = [(batch, given if labelled else batch) for batch, given in self.pairs()]
        self._list, self._held = held_out(pairs) if self._options.hold_out else (pairs, [])
        if len(self._list) + len(self._held) > len(pairs):
            self.divided = pairs[len(self._list) - 1][0]
        if self.example is self.first:
            self.example = self._list[0][0]
        self.first = self._list[0][0]

    def again(self) -> Iterator[Batch]:
        """The batches to calibrate with, from the first one on."""
        return (batch for batch, _ in self.pairs())

    def pairs(self) -> Iterator[Pair]:
        """Each of them as the model takes it, and as it was given."""
        pair = None
        for pair in self._within_limit(self._given) if self._list is None else self._list:
            yield pair
        if pair is None:
            raise InputError(NO_BATCHES)

    def _within_limit(self, batches: Iterable[Any]) -> Iterator[Pair]:
        """Batches up to the limit. One that the user has set divides the last batch.

        Ours ends with a whole batch, since every new shape has to be traced, unless half of the examples are missing.
        """
        limit, most, taken, more = self._options.examples, None, 0, False
        for pair in prepared(batches, self._model, self._labels, self._options.input_of):
            most = most_examples(limit, pair[0]) if taken == 0 else most
            if most is not None and taken + count_examples(pair[0]) > most:
                more = True
                if taken >= most or (limit == "auto" and 2 * taken >= most):
                    break
                pair = first_pair(pair, most - taken)  # noqa: PLW2901
            taken += count_examples(pair[0])
            yield pair
        self._taken, self._more = taken, more

    def listed(self) -> Sequence[Batch]:
        """All of them in memory."""
        return list(self.again())

    def held_out(self) -> Sequence[Batch]:
        """Batches that are not calibrated with; none where there are few examples, or batches are not listed."""
        return [batch for batch, _ in self._held]

    def described(self, team: Team) -> dict[str, Any]:
        """The number of examples on all machines, those held out among them, whether some were left, and labels."""
        held = sum(count_examples(batch) for batch in self.held_out())
        counts = {"examples": team.total(self._taken), "held_out_examples": team.total(held)}
        labels = str(self._labels) if self._labels else None
        return {**counts, "all_examples": not team.total(int(self._more)), "labels": labels}

    def other_kinds(self, example: Batch) -> list[Batch]:
        """The first batch of every kind (shapes, dtypes, other values) but the example's, held-out ones among them.

        The rest of a divided batch stands for all of it: another size of it need not be traced.
        """
        found = {signature(example): example}
        for batch in chain(self.again(), () if self.divided is not None else self.held_out()):
            found.setdefault(signature(batch), batch)
        return list(found.values())[1:]


def _try(model: nn.Module, batch: Batch) -> Batch:
    """Run the model on two examples, or on all where it does not take so few; returns what it ran on."""
    small = first_examples(batch)
    if small is not None:
        with suppress(Exception):
            run_and_restore(model, small)
            return small
    run_and_restore(model, batch)
    return batch


def surveyed(model: nn.Module, batches: Inputs, options: Options, folds: Folding) -> tuple[Survey, Batch, list[Batch]]:
    """Survey on two examples where the model takes them, and on one batch of every other kind.

    Two examples are enough to try things out; which way whole batches take is looked up in traces of their own.
    """

    def survey_on(example: Batch) -> tuple[Survey, Batch, list[Batch]]:
        also = batches.other_kinds(example)
        found = survey_kinds(model, example, also, scope=options.scope, kinds=options.kinds, folds=folds)
        return found, example, also

    if batches.example is not batches.first:
        with suppress(TraceError):
            return survey_on(batches.example)
    return survey_on(batches.first)
