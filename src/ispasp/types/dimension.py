"""Hidden dimensions: their description, the place of their units in tensors, the number of units that stay.

An extent describes one axis of a tensor as a concatenation of products of factors, slowest first. ("fc1", 64) is the
index of a hidden dimension, (None, 49) an index that stays whole. `((("attn", 12), (None, 64)),)` is an axis of 12
heads of 64 channels.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from numbers import Integral, Real

import torch
from torch import Tensor

from ispasp.errors import InputError
from ispasp.report import change

CHECK_DATA = "check the calibration data and the layers before, or run them in float32"
Factor = tuple[str | None, int]
Extent = tuple[tuple[Factor, ...], ...]
Kept = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class HiddenDimension:
    """An axis of units inside the network, made by producers and read by consumers (module paths).

    `channels` is the number of positions one unit takes at the input of its first consumer. `parameters` and `macs` are
    the cost of one unit while everything else is dense.
    """

    name: str
    kind: str  # "neuron" | "filter" | "head"
    units: int
    channels: int
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    parameters: int
    macs: int
    stream: bool = False  # part of a residual stream: the outputs of several producers are added on it


@dataclass(frozen=True)
class FrozenAxis:
    """An axis that cannot be pruned: the module that makes it, the reason, and the graph node that gives the reason."""

    name: str
    reason: str
    node: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}" + (f" ({self.node})" if self.node else "")


@dataclass(frozen=True)
class Cost:
    """Parameters and multiply-accumulates (for one example), before and after pruning."""

    params: int
    macs: int
    dense_params: int
    dense_macs: int

    def __str__(self) -> str:
        params, macs = change(self.dense_params, self.params), change(self.dense_macs, self.macs)
        return f"parameters {params}, MACs {macs}"


def full_length(extent: Extent) -> int:
    """Positions of the axis in the dense model."""
    return kept_length(extent, {})


def kept_length(extent: Extent, kept: Kept) -> int:
    """Positions of the axis that stay."""
    return sum(
        math.prod(len(kept[name]) if name is not None and name in kept else size for name, size in segment)
        for segment in extent
    )


def kept_mask(extent: Extent, kept: Kept) -> Tensor:
    """True at the positions that stay. (full length,)"""
    parts = []
    for segment in extent:
        mask = torch.ones(1, dtype=torch.bool, device="cpu")
        for name, size in segment:
            factor = torch.ones(size, dtype=torch.bool, device="cpu")
            if name is not None and name in kept:
                factor[:] = False
                factor[list(kept[name])] = True
            mask = (mask[:, None] & factor).flatten()
        parts.append(mask)
    return torch.cat(parts)


def names_in(extent: Extent) -> set[str]:
    """Hidden dimensions of an axis."""
    return {name for segment in extent for name, _ in segment if name is not None}


def without(extent: Extent, names: Collection[str]) -> Extent:
    """The same extent with these hidden dimensions left whole."""
    return tuple(tuple((None if name in names else name, size) for name, size in segment) for segment in extent)


@dataclass(frozen=True)
class TensorLayout:
    """A parameter or buffer: its dense shape, and the extents of the axes that hold units."""

    shape: tuple[int, ...]
    axes: Mapping[int, Extent]


@dataclass(frozen=True)
class Attribute:
    """A number that a module's forward reads, such as `groups`, `num_heads` or one entry of `split_sizes`.

    `name` may reach into a config ("config.num_heads") or a list ("split_sizes[1]").
    """

    module: str
    name: str
    extent: Extent

    def without(self, names: Collection[str]) -> Attribute:
        """The same attribute with these hidden dimensions left whole."""
        return replace(self, extent=without(self.extent, names))


@dataclass(frozen=True)
class WeightNorm:
    """weight = g v / ||v||. When v loses inputs, g is rescaled so that the rest of the weight stays."""

    v: str
    g: str
    dim: int


@dataclass(frozen=True)
class Structure:
    """Layout of a model's units in its tensors and attributes."""

    model: str
    units: Mapping[str, int]
    tensors: Mapping[str, TensorLayout]
    attributes: tuple[Attribute, ...] = ()
    weight_norms: tuple[WeightNorm, ...] = ()
    biases: tuple[str, ...] = ()  # modules built without a bias that gain one
    folded: tuple[str, ...] = ()  # layers that compute their weight, and become plain ones

    def folding(self, kept: Collection[str], also: Collection[str] = ()) -> Structure:
        """The same structure, folding only layers that hold one of these dimensions or one of the tensors `also`."""
        used = {name for name, t in self.tensors.items() if any(names_in(e) & {*kept} for e in t.axes.values())}
        folded = tuple(path for path in self.folded if {f"{path}.weight", f"{path}.bias"} & {*used, *also})
        return replace(self, folded=folded)


def units_to_keep(keep: float | int, units: int, name: str = "the hidden dimension") -> int:
    """Number of units that stay: floor(keep * units + 1/2) but at least 1 for a float, `keep` itself for an int.

    >>> units_to_keep(0.4, 12), units_to_keep(3, 12), units_to_keep(1.0, 12), units_to_keep(0.01, 12)
    (5, 3, 12, 1)
    >>> units_to_keep(80, 64, "fc1")
    Traceback (most recent call last):
    ...
    ispasp.errors.InputError: fc1 has 64 units; keep=80 asks for more: pass keep <= 64
    """
    if units < 1:
        raise InputError(f"{name} has {units} units: there is nothing to select from; check the layer's weight")
    if is_integer(keep):
        if keep < 1:
            raise InputError(f"keep={keep} would leave {name} without units: pass keep >= 1, or skip this dimension")
        if keep > units:
            raise InputError(f"{name} has {units} units; keep={keep} asks for more: pass keep <= {units}")
        return int(keep)
    remedy = "pass a float in (0, 1] (a fraction) or an int >= 1 (a number)"
    if isinstance(keep, bool) or not isinstance(keep, Real):
        raise InputError(f"keep={keep!r} is a {type(keep).__name__}: {remedy}")
    if not 0.0 < keep <= 1.0:
        raise InputError(f"keep={keep} is not a fraction of units that stay: {remedy}")
    return max(1, int(float(keep) * units + 0.5))


def distinct(wish: str, taken: Container[str], numbered: str) -> str:
    """A name that is not taken: the wish, or the wish with a number.

    >>> distinct("fc", {"fc", "fc#2"}, "{}#{}")
    'fc#3'
    """
    names = chain([wish], (numbered.format(wish, number) for number in count(2)))
    return next(name for name in names if name not in taken)


def is_integer(value: object) -> bool:
    """Whether the value is an integer of Python or numpy, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def checked_tensor(what: str, given: object) -> Tensor:
    """Return `given` if it is a dense real tensor that has values."""
    if not isinstance(given, Tensor):
        raise InputError(f"{what} is a {type(given).__name__}: pass a torch.Tensor")
    described = f"{what} of shape {tuple(given.shape)}"
    if given.is_meta:
        raise InputError(f"{described} is on the meta device and has no values: load the model's weights first")
    if given.layout != torch.strided:
        raise InputError(f"{described} has the layout {given.layout}: pass its .to_dense()")
    if given.is_quantized:
        raise InputError(f"{described} is quantized ({given.dtype}): pass its .dequantize()")
    if given.is_complex():
        raise InputError(f"{described} is complex ({given.dtype}): pass real numbers")
    return given


def check_finite(what: str, values: Tensor, remedy: str) -> None:
    """Raise if any value is NaN or Inf."""
    wide = values if values.dtype.itemsize > 1 else values.float()  # torch has no isfinite for 8-bit floats
    bad = int((~torch.isfinite(wide)).sum())
    if bad:
        raise InputError(f"{what} has {bad} NaN or Inf of {values.numel()} values: {remedy}")


def check_sum(what: str, total: object, examples: int, shape: tuple[int, ...]) -> None:
    """Raise if a sum over data is empty, has another shape than its consumer needs, or is not finite."""
    total = checked_tensor(what, total)
    if examples < 1:
        raise InputError(f"{what} holds no data (examples={examples}): calibrate on at least one example")
    if tuple(total.shape) != shape:
        raise InputError(f"{what} has shape {tuple(total.shape)}, expected {shape}: take it with measure(consumer, H)")
    check_finite(what, total, CHECK_DATA)
