"""Padding tokens do not count: not in statistics, refits, curves or divergences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import ispasp


class Tagger(nn.Module):
    """Reads every token by itself, so that what stands on padding cannot change a real one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up, self.down = nn.Embedding(50, 8), nn.Linear(8, 24), nn.Linear(24, 5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = self.embed(input_ids)
        if attention_mask is not None:
            hidden = hidden * attention_mask[..., None].sign().clamp(min=1)  # the mask is used, and changes nothing
        return self.down(torch.relu(self.up(hidden)))


def padded(filler: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(3):
        ids = torch.randint(1, 40, (16, 12), generator=generator)
        mask = (torch.arange(12)[None] < torch.randint(3, 12, (16, 1), generator=generator)).long()
        batches.append({"input_ids": torch.where(mask.bool(), ids, filler), "attention_mask": mask})
    return batches


@pytest.mark.parametrize(
    "options",
    [
        {"method": "ispasp", "compensate": "dense"},
        {"method": "obs", "compensate": "local"},
        {"method": "topk", "compensate": None, "order": "oneshot"},
        {"method": "obs", "keep": ispasp.Macs(0.5)},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_what_stands_on_padding_changes_nothing(options: dict[str, Any]) -> None:
    options = {"keep": 0.4, "ridge": 1e-3, "progress": False, **options}
    a, b = (ispasp.prune(Tagger(), padded(filler), **options) for filler in (0, 45))
    assert a.plan.kept == b.plan.kept
    for name, value in a.model.state_dict().items():
        assert_close(b.model.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)
    without = [{"input_ids": batch["input_ids"]} for batch in padded(45)]
    other = ispasp.prune(Tagger(), without, **options)
    differs = any(
        value.shape != b.model.state_dict()[name].shape or not torch.allclose(value, b.model.state_dict()[name])
        for name, value in other.model.state_dict().items()
    )
    assert differs  # without the mask padding counts
