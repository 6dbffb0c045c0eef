"""Other token blocks: weights that no nn.Linear holds, experts, shared weights, recurrent cells."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.networks.table import WIDTHS, Pick, Shape, block


@block("tokens")
class TokenMixing(nn.Module):
    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.norm, hidden = nn.LayerNorm(shape[1]), pick(4, 6)
        self.fc1, self.fc2 = nn.Linear(shape[0], hidden), nn.Linear(hidden, shape[0])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(self.norm(x).transpose(1, 2)))).transpose(1, 2)


@block("tokens")
class RawProducts(nn.Module):
    """Weights that no nn.Linear holds: GPT-2's Conv1D, `weight.t()`, `@`, views and concatenations of weights."""

    reads: ClassVar = {"w1": (0,), "w3": (0,), "w2": (0,), "a": (0,)}

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.style = pick("addmm", "matmul", "einsum", "linear_t", "flat", "cat", "lora", "scaled", "stacked")
        C, self.nf = shape[1], pick(6, 8)
        self.w1, self.b1 = nn.Parameter(torch.randn(C, self.nf) / 2), nn.Parameter(torch.randn(self.nf))
        self.w2, self.b2 = nn.Parameter(torch.randn(self.nf, C) / 2), nn.Parameter(torch.randn(C))
        if self.style == "cat":
            self.w3 = nn.Parameter(torch.randn(C, 4))
            self.a = nn.Parameter(torch.randn(4, C))
        elif self.style == "lora":
            self.down, self.up = nn.Linear(C, 4, bias=False), nn.Linear(4, self.nf, bias=False)
        elif self.style == "scaled":
            self.s = nn.Parameter(torch.rand(self.nf))

    def forward(self, x: Tensor) -> Tensor:  # noqa: PLR0911
        b, n, c = x.shape
        if self.style == "addmm":
            h = torch.addmm(self.b1, x.reshape(-1, x.size(-1)), self.w1).view(b, n, self.nf)
            return torch.addmm(self.b2, F.gelu(h).view(-1, self.nf), self.w2).view(*x.shape[:-1], c)
        if self.style == "matmul":
            return (x @ self.w1 + self.b1).relu() @ self.w2 + self.b2
        if self.style == "einsum":
            h = torch.einsum("bnc,ch->bnh", x, self.w1).sigmoid()
            return torch.einsum("bnh,hc->bnc", h, self.w2)
        if self.style == "linear_t":
            return F.linear(F.linear(x, self.w1.t(), self.b1).tanh(), self.w2.transpose(0, 1), self.b2)
        if self.style == "flat":
            w = self.w1.view(c, 2, self.nf // 2)
            h = torch.einsum("bnc,cgh->bngh", x, w).relu()
            return torch.einsum("bngh,ghc->bnc", h, self.w2.view(2, -1, c))
        if self.style == "cat":
            h = F.relu(x @ torch.cat([self.w1, self.w3], 1))
            return h @ torch.cat([self.w2, self.a], 0)
        if self.style == "lora":
            return F.silu(x @ self.w1 + self.up(self.down(x))) @ self.w2
        if self.style == "scaled":
            return F.relu(x @ (self.w1 * self.s)) @ (self.w2 * self.s[:, None].exp())
        h = torch.stack([x @ self.w1, x @ self.w1.flip(0)])
        return h.amax(0) @ self.w2


@block("tokens")
class Experts(nn.Module):
    """A mixture of experts: all computed, gated by softmax or by the best two."""

    reads: ClassVar = {"w1": (1,), "w2": (1,)}

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        C, self.experts, hidden = shape[1], pick(3, 4), pick(4, 6)
        self.router, self.style = nn.Linear(C, self.experts), pick("softmax", "topk", "loop")
        self.w1 = nn.Parameter(torch.randn(self.experts, C, hidden) / 2)
        self.w2 = nn.Parameter(torch.randn(self.experts, hidden, C) / 2)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.router(x).softmax(-1)
        if self.style == "topk":
            best, index = gate.topk(2, dim=-1)
            gate = torch.zeros_like(gate).scatter(-1, index, best)
        if self.style == "loop":
            ys = [F.silu(x @ self.w1[e]) @ self.w2[e] * gate[..., e : e + 1] for e in range(self.experts)]
            return x + sum(ys)
        h = torch.einsum("bnc,ech->bneh", x, self.w1).relu()
        return x + torch.einsum("bneh,ehc,bne->bnc", h, self.w2, gate)


@block("tokens")
class Grouped(nn.Module):
    """A block-diagonal linear layer: groups as an axis."""

    reads: ClassVar = {"weight": (1,)}

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.groups, per = pick(2, 3), pick(2, 4)
        self.first = nn.Linear(shape[1], self.groups * per)
        self.weight = nn.Parameter(torch.randn(self.groups, per, 4))
        self.last = nn.Linear(self.groups * 4, shape[1])
        self.bmm = pick(False, True)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        y = self.first(x).unflatten(-1, (self.groups, -1))
        if self.bmm:
            y = torch.bmm(y.permute(2, 0, 1, 3).reshape(self.groups, b * n, -1), self.weight)
            y = y.view(self.groups, b, n, -1).permute(1, 2, 0, 3)
        else:
            y = torch.einsum("bngi,gio->bngo", y, self.weight)
        return self.last(F.relu(y.reshape(b, n, -1)))


@block("tokens")
class ConvOverTokens(nn.Module):
    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        hidden = pick(6, 8)
        self.fc1, self.fc2 = nn.Linear(shape[1], hidden), nn.Linear(hidden, shape[1])
        self.conv = nn.Conv1d(hidden, hidden, 3, padding=1, groups=pick(hidden, 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.conv(self.fc1(x).transpose(1, 2))).transpose(1, 2))


@block("tokens")
class OverWidth(nn.Module):
    """Ops over the hidden channels of an MLP."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        hidden = pick(6, 8)
        functions = {
            "softmax": lambda h: h.softmax(-1),
            "mean": lambda h: h - h.mean(-1, keepdim=True),
            "norm": lambda h: F.layer_norm(h, h.shape[-1:]),
            "sum_gate": lambda h: h * h.sum(-1, keepdim=True).sigmoid(),
            "tokens": lambda h: h * h.softmax(1) - h.mean(1, keepdim=True),
            "max": lambda h: h * h.max(dim=-1, keepdim=True)[0],
            "cumsum": lambda h: h.cumsum(1) / 4,
            "flip": lambda h: h.flip(-1),
            "halves": lambda h: torch.cat([-h[..., h.shape[-1] // 2 :], h[..., : h.shape[-1] // 2]], -1),
            "self_product": lambda h: torch.einsum("bnc,bmc->bnm", h, h).softmax(-1) @ h,
            "outer": lambda h: (h.unsqueeze(-1) * h.unsqueeze(-2)).sum(-1),
        }
        self.fc1, self.fc2 = nn.Linear(shape[1], hidden), nn.Linear(hidden, pick(*WIDTHS))
        self.function = functions[pick(*functions)]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.function(self.fc1(x)))


@block("tokens")
class Positions(nn.Module):
    """A class token and position embeddings."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        n, C = shape
        self.token = nn.Parameter(torch.randn(1, 1, C)) if pick(True, False) else None
        n += self.token is not None
        self.table = nn.Embedding(n + 2, C) if pick(False, True) else None
        self.position = nn.Parameter(torch.randn(1, n, C)) if self.table is None else None

    def forward(self, x: Tensor) -> Tensor:
        if self.token is not None:
            x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        return x + (self.position if self.table is None else self.table(torch.arange(x.shape[1])))


@block("tokens")
class Shared(nn.Module):
    """Two layers with one weight; a module called twice; the transposed weight as a decoder."""

    reads: ClassVar = {"a.weight": (0,)}

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        C, hidden = shape[1], pick(6, 8)
        self.style = pick("autoencoder", "tied", "twice", "square")
        self.a, self.b = nn.Linear(C, hidden), nn.Linear(C, hidden)
        self.out = nn.Linear(hidden, C)
        if self.style == "tied":
            self.b.weight = self.a.weight
        if self.style == "square":
            self.square = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        if self.style == "autoencoder":
            return F.linear(self.a(x).relu(), self.a.weight.t())
        if self.style == "twice":
            return self.out(F.gelu(self.a(self.out(F.gelu(self.a(x))))))
        if self.style == "square":
            return self.out(self.square(self.square(self.a(x)).tanh()).tanh())
        return self.out(F.relu(self.a(x)) * torch.sigmoid(self.b(x.flip(1))))


@block("tokens")
class Recurrent(nn.Module):
    """LSTM and GRU: frozen, but the layers around them need not be."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.cell = pick(nn.GRU, nn.LSTM)(shape[1], 5, batch_first=True, bidirectional=pick(False, True))
        self.fc1, self.fc2 = nn.Linear(5 * (1 + self.cell.bidirectional), 6), nn.Linear(6, pick(*WIDTHS))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(self.cell(x)[0])))
