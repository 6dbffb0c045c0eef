"""Networks whose forward is not one graph: it branches, counts, gates, and returns what is no float."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

INPUTS, OUTPUTS = 6, 4
BODY = ("length", "examples", "train path", "eval path", "values", "vmap", "checkpoint", "norm", "loop")
GATES = ("zero gate", "zero layer", "zero scale")
STATE = ("counter", "average", "last", "calls", "cache")
HOOKS = ("recording hook", "changing hook", "pre-hook")
RETURNS = (
    "aux",
    "argmax",
    "complex",
    "none",
    "nan",
    "minus inf",
    "bool",
    "text",
    "double",
    "dict",
    "only argmax",
    "empty",
)


class Branching(nn.Module):
    """One hidden layer after the other; each feature adds a twist to the forward."""

    def __init__(self, features: list[str], width: int, depth: int) -> None:
        super().__init__()
        self.features = frozenset(features)
        self.stem = nn.Linear(INPUTS, width)
        self.up = nn.ModuleList(nn.Linear(width, width + 2 + i) for i in range(depth))
        self.down = nn.ModuleList(nn.Linear(width + 2 + i, width) for i in range(depth))
        self.body = nn.Linear(width, 2 * width)
        self.norm = nn.BatchNorm1d(2 * width) if "norm" in features else nn.Identity()
        self.short, self.long = nn.Linear(2 * width, OUTPUTS), nn.Linear(2 * width, OUTPUTS)
        self.many = nn.Linear(2 * width, 2 * width)
        self.other = nn.Linear(2 * width, OUTPUTS)
        self.aux = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 3))
        self.gated = nn.Sequential(nn.Linear(width, 9), nn.ReLU(), nn.Linear(9, width))
        self.gate = nn.Parameter(torch.zeros(1))
        self.scale = nn.Parameter(torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.randn(2 * width))
        self.calls, self.last = 0, None
        self.cache: dict[tuple[int, ...], Tensor] = {}
        if "zero layer" in features:
            nn.init.zeros_(self.gated[2].weight)
            nn.init.zeros_(self.gated[2].bias)

    def forward(self, x: Tensor) -> Any:
        f = self.features
        self._remember(f, x)
        h = self._gates(f, self.stem(x))
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            if "loop" in f and number >= x.shape[1]:  # fewer layers for short sequences
                break
            h = h + down(torch.relu(up(h)))
        h = torch.relu(self._body(f, h))
        if "norm" in f:
            h = self.norm(h.transpose(1, 2)).transpose(1, 2)
        if "average" in f:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(h.detach().mean((0, 1)), alpha=0.1)
            h = h - self.mean
        if "last" in f:
            self.last = h.detach()
        if "cache" in f:
            self.cache[tuple(x.shape)] = h.detach().sum()
        return self._returned(f, x, h, self._head(f, x, h))

    def _remember(self, f: frozenset[str], x: Tensor) -> None:
        if "counter" in f:
            self.count += 1
        if "calls" in f:
            self.calls += 1

    def _gates(self, f: frozenset[str], h: Tensor) -> Tensor:
        if "zero gate" in f:
            return h + self.gate * self.gated(h)
        if "zero scale" in f:
            return h + self.scale * self.gated(h)
        return h + self.gated(h)

    def _body(self, f: frozenset[str], h: Tensor) -> Tensor:
        if "vmap" in f:
            return torch.vmap(self.body)(h)
        if "checkpoint" in f:
            return checkpoint(self.body, h, use_reentrant=False)
        return self.body(h)

    def _head(self, f: frozenset[str], x: Tensor, h: Tensor) -> Tensor:
        if "examples" in f and x.shape[0] > 3:
            h = h + self.many(h).tanh()
        out = self.long(h) if "length" in f and x.shape[1] >= 4 else self.short(h)
        if ("train path" in f and self.training) or ("eval path" in f and not self.training):
            out = out + self.other(h)
        if "values" in f and x.mean() > 0:
            out = out - self.other(h).tanh()
        return out.mean(1)

    def _returned(self, f: frozenset[str], x: Tensor, h: Tensor, out: Tensor) -> Any:
        if "aux" in f and self.training:
            return out, self.aux(h.mean(1))
        made: dict[str, Callable[[], Any]] = {
            "argmax": lambda: (out, out.argmax(-1)),
            "only argmax": lambda: out.argmax(-1),
            "complex": lambda: torch.complex(out, out.flip(-1)),
            "none": lambda: (None, out),
            "nan": lambda: out + torch.nan,
            "minus inf": lambda: torch.full_like(out, -torch.inf) + 0 * out,
            "bool": lambda: out > 0,
            "text": lambda: ("logits", out, x.shape[0], None),
            "double": out.double,
            "dict": lambda: {"out": out, "all": [out.exp(), {"deep": out.sum()}]},
            "empty": lambda: out[:, :0],
        }
        return next((make() for name, make in made.items() if name in f), out)


def add_hooks(model: Branching, features: list[str], seen: list[str]) -> None:
    """Hooks as users have them; `seen` gets the types of what they are given."""

    def record(module: nn.Module, args: Any, out: Any) -> None:
        seen.append(type(out).__name__)

    if "recording hook" in features:
        model.body.register_forward_hook(record)
    if "changing hook" in features:
        model.body.register_forward_hook(lambda module, args, out: out * 1.5)
    if "pre-hook" in features:
        model.short.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
