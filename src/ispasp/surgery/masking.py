"""The dense network with units masked where they are read: what surgery has to equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ispasp.calibrate.circuit import Circuit, Edits, named_tensors
from ispasp.calibrate.passage import Passage
from ispasp.calibrate.readers import readers
from ispasp.graph.analyse import Analysis
from ispasp.graph.trace import Batch, evaluating
from ispasp.types.layout import Kept


def masked_output(analysis: Analysis, model: nn.Module, batch: Batch, kept: Kept) -> list[Tensor]:
    """Tensors that the dense model returns when removed units are zero at the input of every consumer."""
    cuts = {reader.number: reader.cuts(kept) for reader in readers(analysis, kept)}
    with evaluating(model), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        passage = Passage(Circuit.of(analysis), batch, named_tensors(model), Edits(cuts), slicing=False)
        return tensors_in(passage.advance())


def tensors_in(output: Any) -> list[Tensor]:
    """All tensors of a nested output, in order."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
