"""Pooling and interpolation: spatial axes are made anew, everything else passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ispasp.graph.rules.pointwise import overloads
from ispasp.graph.rules.shape import with_axes
from ispasp.graph.track import Tracker, rule
from ispasp.graph.values import Value

aten = torch.ops.aten

POOLS = """
max_pool avg_pool adaptive_avg_pool adaptive_max_pool lp_pool max_pool{}_with_indices
_adaptive_avg_pool
""".split()


def _names() -> list[str]:
    pools = [f"{name.format('')}{n}d" for name in POOLS if "{}" not in name for n in (1, 2, 3)]
    pools += [f"max_pool{n}d_with_indices" for n in (1, 2, 3)]
    upsample = ["linear1d", "nearest1d", "nearest2d", "nearest3d", "bilinear2d", "bicubic2d", "trilinear3d"]
    resized = [f"{prefix}{kind}" for kind in upsample for prefix in ("upsample_", "_upsample_")]
    aa = ["_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_nearest_exact2d", "_upsample_nearest_exact1d"]
    return [*pools, *resized, *aa, "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d"]


_SPATIAL = {name: next(int(c) for c in reversed(name) if c.isdigit()) for name in _names()}


@rule(*overloads(list(_SPATIAL)))
def resized(t: Tracker, node: fx.Node, **arguments: Any) -> Any:
    """The last one to three axes are spatial."""
    x = next(value for value in arguments.values() if isinstance(value, Value))
    example = node.meta["val"]
    first = example[0] if isinstance(example, (tuple, list)) else example
    count = _SPATIAL[str(node.target).split(".")[1]]
    t.freeze(node, x, range(-count, 0), "is spatial")
    made = [t.new(node, size, "is spatial") for size in first.shape[-count:]]
    value = with_axes(x, [*x.axes[:-count], *made])
    return [value] * len(example) if isinstance(example, (tuple, list)) else value


@rule(*overloads(["grid_sampler", "grid_sampler_2d"]))
def sampled(t: Tracker, node: fx.Node, x: Value, grid: Value, **_: Any) -> Value:
    """Sampling positions come from another tensor."""
    t.freeze(node, x, [2, 3], "is spatial")
    shape = t.shape(node)
    return with_axes(x, [*x.axes[:2], *(t.new(node, size, "is spatial") for size in shape[2:])])
