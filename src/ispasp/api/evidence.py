"""What was proved about a surgery, and what a proof is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ispasp.calibrate.circuit import Edits
from ispasp.calibrate.readers import Reader
from ispasp.calibrate.traces import Circuits
from ispasp.graph.analyse import Analysis
from ispasp.graph.ops import output_channels
from ispasp.types.layout import Kept, kept_mask

_PRECISE = 1e-6  # in float64: rounding amplified by a condition of up to 1e10


@dataclass(frozen=True)
class Evidence:
    """What was compared. `certificates[name]` is None where nothing could be, `unproved[name]` then says why."""

    error: float
    limit: float
    certificates: Mapping[str, float | None]
    unproved: Mapping[str, str]
    outputs: int  # entries of the model's outputs that were compared
    consumers: int  # consumers whose outputs were compared
    kinds: int  # kinds of batches that the pruned model was run on
    precise: float | None = None  # the error in float64, where the model's own precision could not tell

    def __str__(self) -> str:
        """One sentence."""
        parts = [f"{self.outputs:,} output values"] if self.outputs else []
        parts += [f"{self.consumers} consumers"] if self.consumers else []
        where = f" on {self.kinds} kinds of batches" if self.kinds > 1 else ""
        compared = " and ".join(parts) or "nothing"
        text = f"{compared} compared with the masked network{where}: relative difference {self.error:.0e}"
        return text if self.precise is None else f"{text}, in float64 {self.precise:.0e}"

    @property
    def holds(self) -> bool:
        """Whether removing equals masking, as far as it could be compared."""
        return self.precise <= _PRECISE if self.precise is not None else self.error <= self.limit


@dataclass(frozen=True, eq=False)
class Setting:
    """The network to prove something about: where it is read, its dense tensors, and how the pruned one differs."""

    model: nn.Module
    analysis: Analysis
    circuits: Circuits
    readers: Sequence[Reader]
    edits: Edits
    kept: Kept
    tensors: Mapping[str, Tensor]


def cuts_outputs(setting: Setting, number: int) -> bool:
    """Whether it is plain which outputs of a contraction stay."""
    contraction = setting.analysis.tracker.contractions[number]
    return output_channels(contraction.node) is not None and len(contraction.made) == 1


def kept_outputs(setting: Setting, number: int, y: Tensor) -> Tensor:
    """What stays of a contraction's outputs, where they are units themselves."""
    contraction = setting.analysis.tracker.contractions[number]
    channel = output_channels(contraction.node)
    if channel is None or not cuts_outputs(setting, number):
        return y
    mask = kept_mask(setting.analysis.extent(contraction.made[0]), setting.kept)
    return y.index_select(channel, torch.nonzero(mask).flatten().to(y.device))
