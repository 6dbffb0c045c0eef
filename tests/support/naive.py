"""The naive procedure: for every hidden dimension run the real module again, pruned as far as decided.

It shares nothing with `ispasp.prune` but the statistics of one batch, the selectors and (with `surgery`) `apply_`: the
hidden dimensions, their consumers and the BatchNorms after those are written down by hand for each network.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import ispasp
from ispasp.engine import measure
from ispasp.select import selector
from ispasp.types import Consumer, ConvConsumer, LinearConsumer, Statistics
from ispasp.types.consumer import Geometry

Channel = tuple[str, int] | None  # hidden dimension and unit
Kept = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Reads:
    """A consumer in the order of the forward: its module, what each input channel is, and the BatchNorm after it."""

    module: str
    channels: tuple[Channel, ...]
    norm: str = ""
    call: int = 0


@dataclass(frozen=True, eq=False)
class Written:
    """A network with all that the naive procedure has to know of it."""

    build: Callable[[], nn.Module]
    batches: Callable[[], list[Tensor]]
    reads: tuple[Reads, ...]
    made_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # where it is not the module of that name
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Hidden dimensions in the order of their first consumer."""
        return list(dict.fromkeys(c[0] for r in self.reads for c in r.channels if c is not None))

    def units(self, name: str) -> int:
        return 1 + max(c[1] for r in self.reads for c in r.channels if c is not None and c[0] == name)


def whole(*parts: tuple[str, int], size: int = 1) -> tuple[Channel, ...]:
    """Channels of hidden dimensions side by side, each unit of `size` channels."""
    return tuple((name, unit) for name, units in parts for unit in range(units) for _ in range(size))


def naive(net: Written, method: str, keep: float, how: str) -> Kept:
    """Decide one hidden dimension after the other, each in a network that is run anew.

    What is decided is removed from a copy (`how="surgery"`), or zero where it is read (`"masking"`).
    """
    model, kept = net.build(), {}
    found = _survey(net) if how == "surgery" else None
    for name in net.names:
        count = max(1, int(keep * net.units(name) + 0.5))
        if method in ("l1", "l2"):
            kept[name] = _by_weight(model, net.made_by.get(name, (name,)), net.units(name), count, int(method[1]))
            continue
        chooser = selector(method)
        small = copy.deepcopy(model)
        if found is not None:
            ispasp.apply_(small, found.plan(kept))
        total = None
        for batch in net.batches():
            with torch.no_grad(), _recording(small, net, {} if how == "surgery" else kept) as seen:
                small(batch)
            readings = tuple(
                measure(_consumer(small, r, name, kept, how), seen[r.module][r.call], chooser.needs)
                for r in net.reads
                if any(c is not None and c[0] == name for c in r.channels)
            )
            part = Statistics(net.units(name), readings)
            total = part if total is None else total + part
        kept[name] = chooser.select(total, count).kept
    return kept


@cache
def _survey(net: Written) -> ispasp.Survey:
    return ispasp.survey(net.build(), net.batches()[0], scope="all", check=False)


def _by_weight(model: nn.Module, paths: Sequence[str], units: int, count: int, power: int) -> tuple[int, ...]:
    rows = [model.get_submodule(path).weight.detach().flatten(1).abs().pow(power).sum(1) for path in paths]
    score = sum(row.reshape(units, -1).sum(1) for row in rows)
    return tuple(sorted(sorted(range(units), key=lambda unit: (-float(score[unit]), unit))[:count]))


def _stays(channel: Channel, kept: Kept) -> bool:
    return channel is None or channel[0] not in kept or channel[1] in kept[channel[0]]


def _consumer(model: nn.Module, reads: Reads, name: str, kept: Kept, how: str) -> Consumer:
    layer = model.get_submodule(reads.module)
    channels = [c for c in reads.channels if how == "masking" or _stays(c, kept)]
    units = torch.tensor([c[1] if c is not None and c[0] == name else -1 for c in channels])
    scale = None
    if reads.norm:
        norm = model.get_submodule(reads.norm)
        scale = (norm.weight / torch.sqrt(norm.running_var + norm.eps)).detach()
    if isinstance(layer, nn.Linear):
        return LinearConsumer(layer.weight, units, scale)
    geometry = Geometry(layer.stride, layer.padding, layer.dilation, layer.groups)
    return ConvConsumer(layer.weight, units, scale, geometry)


@contextmanager
def _recording(model: nn.Module, net: Written, kept: Kept) -> Iterator[dict[str, list[Tensor]]]:
    """Inputs of all consumers, call by call; removed units are zero from there on."""
    seen: dict[str, list[Tensor]] = {}

    def watch(reads: Reads) -> Any:
        stays = torch.tensor([_stays(c, kept) for c in reads.channels])

        def hook(layer: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            x = args[0].clone()
            seen.setdefault(reads.module, []).append(x)
            if not kept:
                return args
            mask = stays if isinstance(layer, nn.Linear) else stays.reshape(-1, *(1,) * (x.ndim - 2))
            return (x * mask,)

        return hook

    first_calls = {r.module: r for r in reversed(net.reads)}
    handles = [model.get_submodule(r.module).register_forward_pre_hook(watch(r)) for r in first_calls.values()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
