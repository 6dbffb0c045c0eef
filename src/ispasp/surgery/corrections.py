"""Find the attributes that a forward reads and that must shrink with the units.

A forward that says `x.view(B, N, self.num_heads, -1)` fails once heads are gone, unless `num_heads` is corrected. Such
attributes are found by trial: in the module that fails, every integer that equals a dense size of one of its hidden
dimensions is a candidate, and the smallest set of corrections with which the module runs is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, islice, takewhile

import torch
from torch import nn

from ispasp.graph.state import state_kept, succeeds
from ispasp.surgery.remove import numbers, put_back, undone, write_number
from ispasp.surgery.verify import Failure, Frame
from ispasp.types.dimension import Attribute, Extent, Kept, Structure, full_length, kept_length, names_in

_TRIES = (200, 50, 15)  # most trials in the failing module, in the one around it, further out (slower)
_MOST_FRAMES = 6
_MOST_PASSES = 60
_LIKELY = re.compile("head|group|split|kv")  # only the order of trials depends on names, never their verdict


def runs(frame: Frame) -> bool:
    """Whether a module runs if it is called again."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), state_kept(frame.module):
        return succeeds(lambda: frame.module(*frame.args, **frame.kwargs))


def search(failure: Failure, structure: Structure, kept: Kept) -> tuple[Attribute, ...]:
    """Find corrections that make the failing module run, or one around it; empty if there are none."""
    frames = list(reversed(failure.stack))
    for depth, frame in enumerate(frames[:_MOST_FRAMES]):
        if is_builtin(frame.module):
            continue
        inner = [f for f in frames[: depth + 1] if not is_builtin(f.module)]
        options = [o for f in reversed(inner) for o in _options(frame.path, f.path, f.module, structure, kept)]
        modules = {f.path: f.module for f in inner}
        for chosen in islice(_subsets(options), _TRIES[min(len(inner), len(_TRIES)) - 1]):
            with undone() as undo:
                for module in modules.values():
                    undo.callback(put_back, module, dict(vars(module)))
                for correction in chosen:
                    write_number(modules[correction.module], correction.name, kept_length(correction.extent, kept))
                found = runs(frame)
            if found:
                return tuple(chosen)
    return ()


def alike(model: nn.Module, found: Iterable[Attribute], structure: Structure, kept: Kept) -> Iterator[Attribute]:
    """Yield the same corrections for all modules of the same class."""

    def pattern(correction: Attribute) -> list[list[bool]]:
        return [[name is not None for name, _ in segment] for segment in correction.extent]

    for correction in found:
        cls = type(model.get_submodule(correction.module))
        for path, module in model.named_modules():
            if type(module) is cls:
                options = _options(path, path, module, structure, kept)
                same = (o for o in options if o.name == correction.name and pattern(o) == pattern(correction))
                yield from islice(same, 1)


def candidates(path: str, model: nn.Module, structure: Structure, kept: Kept) -> Iterator[tuple[Attribute, ...]]:
    """Yield sets of corrections to try in a module and its children, smallest first; each costs a forward pass."""
    known = {(a.module, a.name) for a in structure.attributes}
    options = []
    for inside, module in model.get_submodule(path).named_modules():
        where = ".".join(filter(None, (path, inside)))
        if not is_builtin(module):
            options += [o for o in _options(path, where, module, structure, kept) if (o.module, o.name) not in known]
    return islice(_subsets(options), _MOST_PASSES)


def common_path(names: Sequence[str]) -> str:
    """The innermost module that holds all these tensors."""
    steps = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return ".".join(step[0] for step in takewhile(lambda step: len(set(step)) == 1, steps))


def is_builtin(module: nn.Module) -> bool:
    """Whether this is a layer of torch.nn, which takes its sizes from its tensors."""
    return type(module).__module__.startswith("torch.nn") and not list(module.children())


def _options(around: str, path: str, module: nn.Module, structure: Structure, kept: Kept) -> list[Attribute]:
    """Integers of a module that equal the dense size of an axis with units in the tensors around it."""
    sizes: dict[int, list[Extent]] = {}
    for extent in parts_of(around, structure, kept):
        known = sizes.setdefault(full_length(extent), [])
        if all(kept_length(extent, kept) != kept_length(other, kept) for other in known):
            known.append(extent)
    found = [Attribute(path, name, e) for name, value in numbers(module) for e in sizes.get(value, ())]
    return sorted(found, key=lambda option: (not _LIKELY.search(option.name), "." in option.name))


def parts_of(path: str, structure: Structure, kept: Kept) -> Iterator[Extent]:
    """Yield axes with hidden dimensions, their segments, and the first, last and single factors of these."""
    prefix = f"{path}." if path else ""
    for name, layout in structure.tensors.items():
        for extent in layout.axes.values() if name.startswith(prefix) else ():
            parts: list[Extent] = [extent, *((segment,) for segment in extent)]
            parts += [(segment[:k],) for segment in extent for k in range(1, len(segment))]
            parts += [(segment[k:],) for segment in extent for k in range(1, len(segment))]
            parts += [(segment[k : k + 1],) for segment in extent for k in range(len(segment))]
            yield from (part for part in parts if names_in(part) & set(kept))


def _subsets(options: Sequence[Attribute]) -> Iterator[tuple[Attribute, ...]]:
    """Yield sets of corrections of different attributes, smallest first."""
    for size in range(1, len(options) + 1):
        for chosen in combinations(options, size):
            if len({(correction.module, correction.name) for correction in chosen}) == size:
                yield chosen
