"""Find the numbers that a forward reads and that must shrink with the units.

A forward that says `x.view(B, N, self.num_heads, -1)` fails once heads are gone, unless `num_heads` is corrected. Which
attributes those are is found by trial: in the module that fails, every whole number that equals a dense size of one of
its hidden dimensions is a candidate; the smallest set of corrections with which the module runs is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, islice, takewhile
from typing import Any

from torch import nn

from ispasp.graph.interrupts import uninterrupted
from ispasp.surgery import attributes
from ispasp.surgery.attempt import Failure, Shape, call
from ispasp.types.layout import Extent, Kept, full_length, kept_length, names_in
from ispasp.types.plan import Attribute, Structure

_TRIES = (200, 50, 15)  # in the module that fails, in the one around it, further out: these take ever longer
_MOST_FRAMES = 6
_MOST_PASSES = 60
_LIKELY = re.compile("head|group|split|kv")  # only the order of trials depends on names, never their verdict


def search(
    failure: Failure, structure: Structure, kept: Kept, dense: Mapping[str, list[list[Shape]]]
) -> tuple[Attribute, ...]:
    """Corrections with which the failing module runs, looking outwards from where it failed; empty if none is found."""
    frames = list(reversed(failure.stack))
    allowed = _allowed(structure, kept)
    for depth, frame in enumerate(frames[:_MOST_FRAMES]):
        inner = [f for f in frames[: depth + 1] if not is_builtin(f.module)]
        if is_builtin(frame.module):
            continue
        options = [o for f in reversed(inner) for o in _options(frame.path, f.path, f.module, structure, kept)]
        modules = {f.path: f.module for f in inner}
        for chosen in islice(_subsets(options), _TRIES[min(len(inner), len(_TRIES)) - 1]):
            before = {path: dict(vars(module)) for path, module in modules.items()}
            try:
                for correction in chosen:
                    attributes.write(modules[correction.module], correction.name, kept_length(correction.extent, kept))
                found = call(frame)
            finally:  # also on Ctrl-C
                _put_back(modules, before)
            if found is not None and _fits(found, dense.get(frame.path, []), allowed):
                return tuple(chosen)
    return ()


def _put_back(modules: Mapping[str, nn.Module], before: Mapping[str, dict[str, Any]]) -> None:
    with uninterrupted():
        for path, values in before.items():
            vars(modules[path]).clear()
            vars(modules[path]).update(values)


def alike(model: nn.Module, found: Iterable[Attribute], structure: Structure, kept: Kept) -> list[Attribute]:
    """The same corrections for every other module of the same class."""
    corrections: list[Attribute] = []
    for correction in found:
        cls = type(model.get_submodule(correction.module))
        for path, module in model.named_modules():
            if type(module) is cls:
                options = _options(path, path, module, structure, kept)
                same = [o for o in options if o.name == correction.name and _pattern(o) == _pattern(correction)]
                corrections += same[:1]
    return corrections


def candidates(path: str, model: nn.Module, structure: Structure, kept: Kept) -> Iterator[tuple[Attribute, ...]]:
    """Sets of corrections that could be tried in and below a module, the smallest first; each costs a forward pass."""
    known = {(a.module, a.name) for a in structure.attributes}
    options = []
    for inside, module in model.get_submodule(path).named_modules():
        where = ".".join(filter(None, (path, inside)))
        if not is_builtin(module):
            options += [o for o in _options(path, where, module, structure, kept) if (o.module, o.name) not in known]
    return islice(_subsets(options), _MOST_PASSES)


def common_path(names: Sequence[str]) -> str:
    """The innermost module that holds all these tensors.

    >>> common_path(["a.b.q.weight", "a.b.k.weight"]), common_path(["a.weight"])
    ('a.b', 'a')
    """
    steps = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return ".".join(step[0] for step in takewhile(lambda step: len(set(step)) == 1, steps))


def _pattern(correction: Attribute) -> tuple[tuple[bool, ...], ...]:
    return tuple(tuple(name is not None for name, _ in segment) for segment in correction.extent)


def is_builtin(module: nn.Module) -> bool:
    """Whether this is a layer of torch.nn, which takes its sizes from its tensors."""
    return type(module).__module__.startswith("torch.nn") and not list(module.children())


def _options(around: str, path: str, module: nn.Module, structure: Structure, kept: Kept) -> list[Attribute]:
    """Numbers of a module that equal a dense size involving a hidden dimension of the tensors around it."""
    sizes: dict[int, list[Extent]] = {}
    for extent in _extents(around, structure, kept):
        known = sizes.setdefault(full_length(extent), [])
        if all(kept_length(extent, kept) != kept_length(other, kept) for other in known):
            known.append(extent)
    found = [Attribute(path, name, e) for name, value in attributes.numbers(module) for e in sizes.get(value, ())]
    return sorted(found, key=lambda option: (not _LIKELY.search(option.name), "." in option.name))


def _extents(path: str, structure: Structure, kept: Kept) -> Iterator[Extent]:
    """Whole axes, their segments, and products of the leading factors of these."""
    prefix = f"{path}." if path else ""
    for name, layout in structure.tensors.items():
        if not name.startswith(prefix):
            continue
        for extent in layout.axes.values():
            parts: list[Extent] = [extent, *((segment,) for segment in extent)]
            parts += [(segment[:k],) for segment in extent for k in range(1, len(segment))]
            parts += [(segment[k:],) for segment in extent for k in range(1, len(segment))]
            parts += [(segment[k : k + 1],) for segment in extent for k in range(len(segment))]
            yield from (part for part in parts if names_in(part) & set(kept))


def _subsets(options: Sequence[Attribute]) -> Iterator[tuple[Attribute, ...]]:
    """Sets of corrections of different attributes, the smallest first."""
    for size in range(1, len(options) + 1):
        for chosen in combinations(options, size):
            if len({(correction.module, correction.name) for correction in chosen}) == size:
                yield chosen


def _allowed(structure: Structure, kept: Kept) -> set[tuple[int, int]]:
    pairs = set()
    for layout in structure.tensors.values():
        for extent in layout.axes.values():
            pairs.add((full_length(extent), kept_length(extent, kept)))
            pairs |= {(full_length((seg[:1],)), kept_length((seg[:1],), kept)) for seg in extent}
    return pairs


def _fits(found: list[Shape], calls: list[list[Shape]], allowed: set[tuple[int, int]]) -> bool:
    """Shapes are those of the dense model, but for axes that have lost units."""
    return any(
        len(found) == len(dense)
        and all(
            len(a) == len(b) and all(x == y or (y, x) in allowed for x, y in zip(a, b, strict=True))
            for a, b in zip(found, dense, strict=True)
        )
        for dense in calls
    )
