"""What methods that look at the task get to see: sensitivities, and the loss of any choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ispasp.api.job import Job
from ispasp.calibrate.circuit import Edits
from ispasp.calibrate.gradients import Loss, checked_loss, output_of, sensitivities
from ispasp.calibrate.passage import Passage
from ispasp.errors import InputError
from ispasp.select import Selector
from ispasp.surgery.masking import tensors_in
from ispasp.types import Reading, Sensitivity, Statistics


def check_loss(selector: Selector, loss: Loss | None) -> None:
    """A method that needs gradients needs a loss."""
    if "sensitivity" in selector.needs and loss is None:
        raise InputError(
            f"method {selector.name!r} needs a loss: pass loss=nn.CrossEntropyLoss() with batches of "
            "(inputs, labels), or any loss=lambda output, batch: ..."
        )


def with_sensitivities(job: Job, found: Mapping[str, Statistics], edits: Edits) -> dict[str, Statistics]:
    """The statistics with sensitivities in the network with these edits, if the selector wants them."""
    if "sensitivity" not in job.selector.needs:
        return dict(found)
    assert job.loss is not None  # noqa: S101  # `check_loss` has seen to it
    readers = [reader for reader in job.readers if reader.names & set(found)]
    totals: dict[tuple[int, str], Sensitivity] = {}
    for pair in job.pairs():
        parts = sensitivities(readers, job.units, job.circuits, job.tensors, edits, pair, job.loss)
        totals = {key: totals[key] + part if key in totals else part for key, part in parts.items()}
    return {name: _attached(job, name, statistics, totals) for name, statistics in found.items()}


def _attached(job: Job, name: str, statistics: Statistics, totals: Mapping[tuple[int, str], Sensitivity]) -> Statistics:
    """One reader may be several products, of experts: its sensitivity goes with the first."""
    rows, at = list(statistics.readings), 0
    each = len(rows) // len(job.readers_of[name])
    for reader in job.readers_of[name]:
        total = totals[reader.number, name]
        nothing = Sensitivity(torch.zeros_like(total.total), total.examples)
        for k in range(each):
            row = rows[at + k]
            rows[at + k] = Reading(row.consumer, *row.statistics.values(), nothing if k else total)
        at += each
    return replace(statistics, readings=tuple(rows))


def with_task(job: Job, name: str, statistics: Statistics, edits: Edits) -> Statistics:
    """The statistics with the task loss of every choice of units, if the selector wants it."""
    return replace(statistics, task=_TaskLoss(job, name, edits)) if "task" in job.selector.needs else statistics


class _TaskLoss:
    """Runs the network from the first consumer on, once for every mask; without a loss it is the distance to dense."""

    def __init__(self, job: Job, name: str, edits: Edits) -> None:
        self._job = job
        self._name = name
        self._edits = edits
        self._pairs = list(job.pairs())
        self._starts: dict[int, Passage] = {}
        self._dense: dict[int, list[Tensor]] = {}

    def __call__(self, masks: Tensor, step: int) -> Tensor:
        """Loss of each mask (m, units) on the mini-batch of the step, the mean over machines. (m,)"""
        number = step % len(self._pairs)
        losses = torch.stack([self._loss(mask, number) for mask in masks.bool()])
        total: Tensor = self._job.team.sum_tensors({"loss": losses.double()})["loss"]
        return total / self._job.team.size

    def _loss(self, mask: Tensor, number: int) -> Tensor:
        job = self._job
        kept = {**job.kept, self._name: torch.nonzero(mask).flatten().tolist()}
        cuts = {reader.number: reader.cuts(kept) for reader in job.readers_of[self._name]}
        edits = replace(self._edits, cuts={**self._edits.cuts, **cuts})
        output = output_of(self._start(number).branch(edits))
        if job.loss is not None:
            return checked_loss(job.loss(output, self._pairs[number][1])).detach().reshape(())
        found, dense = tensors_in(output), self._dense_output(number)
        terms = [(a.double() - b.double()).square().sum() for a, b in zip(found, dense, strict=True)]
        return torch.stack([t for t, a in zip(terms, found, strict=True) if a.is_floating_point()]).sum()

    def _start(self, number: int) -> Passage:
        """The batch in front of the first consumer."""
        if number not in self._starts:
            batch: Any = self._pairs[number][0]
            passage = Passage(self._job.circuits.of(batch), batch, self._job.tensors, self._edits)
            passage.advance(passage.circuit.contractions[self._job.readers_of[self._name][0].number])
            self._starts[number] = passage
        return self._starts[number]

    def _dense_output(self, number: int) -> list[Tensor]:
        if number not in self._dense:
            batch = self._pairs[number][0]
            passage = Passage(self._job.circuits.of(batch), batch, self._job.tensors, Edits())
            self._dense[number] = tensors_in(passage.advance())
        return self._dense[number]
