"""Index atoms, the building blocks of axes.

An axis is a concatenation of segments, a segment a product of atoms (row-major, the first varies slowest). Removing an
index of an atom removes all positions with that index from every axis that holds the atom. Atoms that must lose the
same indices are united. An atom that turns out to be a product (12 heads x 64 channels) or a concatenation (gate | up)
is refined, in every axis that holds it. An atom that may not lose an index is frozen, with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

UNKNOWN = -1  # a size that depends on the data


@dataclass(frozen=True)
class Reason:
    """Why an atom is frozen, and the graph node that says so."""

    text: str
    node: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.node})" if self.node else self.text


_INNER_CONCAT = Reason("is a concatenation inside a product of axes")


@dataclass(eq=False)
class Atom:
    """One factor of an axis. Mutable: the tracker unites, refines and freezes atoms as it learns."""

    size: int
    frozen: Reason | None = None
    parts: tuple[Atom, ...] = ()
    join: Literal["product", "concat"] = "product"
    head: bool = False  # an index over which attention runs in parallel
    stream: bool = False  # an axis on which the outputs of different producers are added
    _parent: Atom | None = field(default=None, repr=False)

    def root(self) -> Atom:
        """The representative of all atoms that were united with this one."""
        atom = self
        while atom._parent is not None:
            atom = atom._parent
        if self._parent is not None:
            self._parent = atom
        return atom


Segment = tuple[Atom, ...]
Axis = tuple[Segment, ...]


def new_axis(size: int, reason: Reason | None = None) -> Axis:
    """An axis of one fresh atom, frozen if a reason is given; size 1 needs no atom, size 0 no segment."""
    if size == 0:
        return ()
    return ((),) if size == 1 else ((Atom(size, reason),),)


def freeze_atom(atom: Atom, reason: Reason) -> None:
    """Freeze an atom with all its parts; the first reason stays."""
    atom = atom.root()
    if atom.frozen is None:
        atom.frozen = reason
    for part in atom.parts:
        freeze_atom(part, reason)


def freeze(axis: Axis, reason: Reason) -> Axis:
    """Freeze every atom of an axis; returns the axis."""
    for segment in axis:
        for atom in segment:
            freeze_atom(atom, reason)
    return axis


def mark(*axes: Axis, head: bool = False, stream: bool = False) -> None:
    """Mark all atoms of axes as counting heads, or as lying on a residual stream."""
    for atom in (atom for axis in axes for atom in atoms_of(axis)):
        atom.head |= head
        atom.stream |= stream


def resolve(axis: Axis) -> list[list[Atom]]:
    """The axis in atoms that are neither united nor refined: segments as lists, without atoms of size 1."""
    return [found for segment in axis for found in _resolve_segment(list(segment))]


def atoms_of(axis: Axis) -> list[Atom]:
    """All atoms of a resolved axis, in order."""
    return [atom for segment in resolve(axis) for atom in segment]


def _resolve_segment(segment: list[Atom]) -> list[list[Atom]]:
    while segment:
        first = segment[0].root()
        if first.parts and first.join == "product":
            segment = [*first.parts, *segment[1:]]
        elif first.size == 1:
            segment = segment[1:]
        elif first.parts:
            return [found for part in first.parts for found in _resolve_segment([part, *segment[1:]])]
        else:
            return [[first, *_resolve_minor(segment[1:])]]
    return [[]]


def _resolve_minor(atoms: Iterable[Atom]) -> list[Atom]:
    """The atoms behind the slowest one; a concatenation among them cannot be written as segments and is frozen."""
    found: list[Atom] = []
    for atom in (a.root() for a in atoms):
        if atom.parts and atom.join == "product":
            found += _resolve_minor(atom.parts)
        elif atom.size != 1:
            if atom.parts:
                freeze_atom(atom, _INNER_CONCAT)
            found.append(atom)
    return found


def size_of(segment: Sequence[Atom]) -> int:
    """Number of positions of a segment."""
    return UNKNOWN if any(a.size == UNKNOWN for a in segment) else math.prod(a.size for a in segment)


def length(axis: Axis) -> int:
    """Number of positions of an axis."""
    sizes = [size_of(segment) for segment in axis]
    return UNKNOWN if UNKNOWN in sizes else sum(sizes)


def is_frozen(axis: Axis) -> bool:
    """Whether no atom of the axis can lose an index."""
    return all(atom.frozen is not None for atom in atoms_of(axis))


def reason_of(axis: Axis) -> Reason:
    """The first reason found on a frozen axis."""
    return next((a.frozen for a in atoms_of(axis) if a.frozen is not None), Reason("has one position only"))


def live_atoms(axis: Axis) -> set[Atom]:
    """Atoms of the axis that are not frozen."""
    return {atom for atom in atoms_of(axis) if atom.frozen is None}


def _refine(atom: Atom, sizes: Sequence[int], join: Literal["product", "concat"]) -> tuple[Atom, ...]:
    atom.parts = tuple(Atom(size, atom.frozen, head=atom.head, stream=atom.stream) for size in sizes)
    atom.join = join
    return atom.parts


def unite(x: Axis, y: Axis, reason: Reason) -> Axis:
    """Make two axes of equal length lose the same positions; returns one of them.

    Where they do not fit together, both are frozen for the given reason.
    """
    if x is y or length(x) == 1:
        return y
    for one, other in ((x, y), (y, x)):
        if UNKNOWN in (length(one), length(other)) or is_frozen(one):
            freeze(other, reason_of(one) if is_frozen(one) else reason)
            freeze(one, reason)
            return other if length(other) != UNKNOWN else one
    while True:
        X, Y = resolve(x), resolve(y)
        mismatch = next(((p, q) for p, q in zip(X, Y, strict=False) if size_of(p) != size_of(q)), None)
        if mismatch is None:
            break
        small, large = sorted(mismatch, key=size_of)
        if not _cut_leading(large, size_of(small)):
            freeze(x, reason)
            freeze(y, reason)
            return x
    for p, q in zip(X, Y, strict=True):
        _unite_products(p, q, reason)
    return x


def _cut_leading(segment: Sequence[Atom], at: int) -> bool:
    """Cut a product in two by refining its slowest atom into a concatenation."""
    inner = size_of(segment[1:])
    if at % inner or segment[0].parts:
        return False
    rows = at // inner
    _refine(segment[0], (rows, segment[0].size - rows), "concat")
    return True


def _unite_products(p: list[Atom], q: list[Atom], reason: Reason) -> None:
    while p and q:
        small, large = (p, q) if p[-1].size <= q[-1].size else (q, p)
        a, b = small[-1], large[-1]
        if a.size == b.size:
            _unite_atoms(a, b, reason)
            p.pop()
            q.pop()
        elif b.size % a.size == 0 and not b.parts:
            large[-1:] = _refine(b, (b.size // a.size, a.size), "product")
        else:
            break
    for atom in (*p, *q):
        freeze_atom(atom, reason)


def _unite_atoms(a: Atom, b: Atom, reason: Reason) -> None:
    a, b = a.root(), b.root()
    if a is b:
        return
    if a.parts and b.parts:
        unite(((a,),), ((b,),), reason)
        return
    if b.parts:
        a, b = b, a  # b has no parts now
    if b.frozen:
        freeze_atom(a, b.frozen)
    b._parent = a
    mark(((a,),), head=b.head or a.head, stream=b.stream or a.stream)


def cut(axis: Axis, start: int, stop: int, reason: Reason) -> Axis:
    """Positions start..stop of an axis; an atom that is cut becomes a concatenation."""
    if (start, stop) == (0, length(axis)):
        return axis
    if start == stop:
        return ()
    for at in (start, stop):
        offset = 0
        for segment in resolve(axis):
            end = offset + size_of(segment)
            if offset < at < end:
                if all(a.frozen for a in segment) or not _cut_leading(segment, at - offset):
                    return new_axis(stop - start, reason_of(freeze((tuple(segment),), reason)))
                break
            offset = end
    found, offset = [], 0
    for segment in resolve(axis):
        if start <= offset and offset + size_of(segment) <= stop:
            found.append(tuple(segment))
        offset += size_of(segment)
    return tuple(found) if stop - start > 1 else ((),)


def flatten(axes: Sequence[Axis]) -> Axis:
    """The product of axes, the first varying slowest."""
    product: Axis = ((),)
    for axis in axes:
        segments = resolve(axis)
        if len(segments) != 1 and product == ((),):
            product = tuple(map(tuple, segments))
            continue
        if len(segments) != 1:
            freeze(axis, _INNER_CONCAT)
            segments = [[Atom(length(axis), _INNER_CONCAT)]]
        product = tuple((*segment, *segments[0]) for segment in product)
    return product


def split(axis: Axis, sizes: Sequence[int], reason: Reason) -> list[Axis]:
    """The axis as a product of axes of these sizes: the inverse of `flatten`."""
    if len(sizes) == 1:
        return [axis]
    if sizes[0] == 1:
        return [((),), *split(axis, sizes[1:], reason)]
    segments = resolve(axis)
    found = _split_concat(axis, sizes, reason) if len(segments) > 1 else _split_product(segments[0], sizes)
    if found is None:
        freeze(axis, reason)
        return [new_axis(n, reason) for n in sizes]
    return found


def _split_product(atoms: list[Atom], sizes: Sequence[int]) -> list[Axis] | None:
    """Give each size its atoms, from the fastest on; None where a size cuts an atom across."""
    found: list[Axis] = []
    for size in reversed(sizes):
        taken: list[Atom] = []
        need = size
        while need > 1 and atoms:
            atom = atoms.pop()
            if need % atom.size == 0:
                taken.insert(0, atom)
                need //= atom.size
            elif atom.size % need == 0 and not atom.parts:
                outer, inner = _refine(atom, (atom.size // need, need), "product")
                atoms.append(outer)
                taken.insert(0, inner)
                need = 1
            else:
                return None
        found.insert(0, (tuple(taken),))
    return found


def _split_concat(axis: Axis, sizes: Sequence[int], reason: Reason) -> list[Axis] | None:
    """q | k | v seen as 3 x width: the parts must lose the same positions, and none of them can go as a whole."""
    count, step = sizes[0], length(axis) // sizes[0]
    if count > 64:
        return None
    blocks = [cut(axis, i * step, (i + 1) * step, reason) for i in range(count)]
    for block in blocks[1:]:
        unite(blocks[0], block, reason)
    counter = new_axis(count, Reason("counts the parts of a concatenation", reason.node))
    return [counter, *split(blocks[0], sizes[1:], reason)]
