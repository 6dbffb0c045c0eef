"""A literal in a forward freezes what it stands for, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ispasp

INNER, RANK, STATE = 8, 2, 3  # RANK + 2 * STATE is INNER: sizes of different dimensions coincide


class Mamba(nn.Module):
    """A selective scan; `literal` writes the sizes of the second split into the code."""

    def __init__(self, literal: bool) -> None:
        super().__init__()
        self.literal = literal
        self.d_inner, self.dt_rank, self.d_state = INNER, RANK, STATE
        self.in_proj = nn.Linear(6, 2 * INNER)
        self.x_proj = nn.Linear(INNER, RANK + 2 * STATE, bias=False)
        self.dt_proj, self.out_proj = nn.Linear(RANK, INNER), nn.Linear(INNER, 6)
        self.A_log = nn.Parameter(torch.randn(INNER, STATE))

    def forward(self, u: Tensor) -> Tensor:
        x, z = self.in_proj(u).split([self.d_inner, self.d_inner], -1)
        x = functional.silu(x)
        sizes = [2, 3, 3] if self.literal else [self.dt_rank, self.d_state, self.d_state]
        dt, B, C = self.x_proj(x).split(sizes, -1)
        dt = functional.softplus(self.dt_proj(dt))
        h = u.new_zeros(len(u), self.d_inner, self.d_state)
        outputs = []
        for t in range(u.shape[1]):
            h = torch.exp(-dt[:, t, :, None] * self.A_log.exp()) * h + (dt * x)[:, t, :, None] * B[:, t, None]
            outputs.append((h * C[:, t, None]).sum(-1))
        return self.out_proj(torch.stack(outputs, 1) * functional.silu(z))


def stack(literal: bool, blocks: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Mamba(literal) for _ in range(blocks))).double()


@pytest.mark.parametrize("blocks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_literal_split_freezes_its_own_dimension_only(blocks: int) -> None:
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    free = {d.name for d in ispasp.survey(stack(False, blocks), x).dimensions}
    model = stack(True, blocks)
    found = ispasp.survey(model, x)
    assert {f"{k}.in_proj" for k in range(blocks)} <= {d.name for d in found.dimensions}
    assert free - {d.name for d in found.dimensions} == {f"{k}.x_proj" for k in range(blocks)}
    why = {row.name: row.reason for row in found.frozen}
    assert all("split_sizes=[2, 3, 3]" in why[f"{k}.x_proj"] for k in range(blocks))
    result = ispasp.prune(model, [x], keep=0.5, progress=False)
    assert result.model[0].d_inner == INNER // 2
    assert result.verified < 1e-9
