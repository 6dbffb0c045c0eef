"""Try it out: which hidden dimensions can go on this model, and what has to be corrected for it.

The graph says what may be removed; whether the model's own forward code runs with less of it, and gives what masking
gives, is tried on the example batch, on the model itself, with everything put back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ispasp.graph.analyse import Analysis
from ispasp.graph.trace import Batch
from ispasp.surgery.attempt import Failure, Frame, Shape, attempt, shapes_of, trains
from ispasp.surgery.corrections import alike, candidates, common_path, is_builtin, search
from ispasp.surgery.masking import masked_output
from ispasp.surgery.remove import Undo, remove_
from ispasp.surgery.verify import relative_error, tolerance
from ispasp.types.layout import Kept, names_in
from ispasp.types.plan import Attribute, Plan, Structure

_MOST_ROUNDS = 60
_MOST_CORRECTED = 3  # each costs many forward passes
_FRACTIONS = (0.5, 0.4, 0.6, 0.45, 0.55)
OnFailure = Callable[[Failure, Sequence[str]], Callable[[], None]]


@dataclass
class Trial:
    """The state of trying: corrections found so far, and dimensions that had to be given up, with the reason."""

    model: nn.Module
    batch: Batch
    analysis: Analysis
    structure: Structure
    refused: dict[str, str] = field(default_factory=dict)
    _dense: dict[str, list[list[Shape]]] = field(default_factory=dict)
    _searched: set[tuple[str, str]] = field(default_factory=set)  # corrections found by trial, not told by the graph
    _by_analogy: set[tuple[str, str]] = field(default_factory=set)  # corrections taken over from another module
    _dropped: set[tuple[str, str]] = field(default_factory=set)  # of those, the ones that did harm

    def run(self) -> None:
        """Try all dimensions together, then every other one, until the model runs and equals masking.

        Each dimension is so tried twice, with other numbers around it: a correction that fits by chance is found out.
        """
        for _ in range(_MOST_ROUNDS):
            names = [name for name in self.structure.units if name not in self.refused]
            if all(self._passes(part) for part in (names, names[::2], names[1::2]) if part):
                self._try_training(names)
                return
        left = [name for name in self.structure.units if name not in self.refused]
        self.refused.update(dict.fromkeys(left, f"no way to remove it was found in {_MOST_ROUNDS} trials"))

    def _passes(self, names: list[str]) -> bool:
        """Whether these dimensions can go; if not, something has been learnt from it."""
        outcome = self._try(names, self._correct_failure)
        if isinstance(outcome, Failure):
            return False
        error, limit = self._error(outcome, self._half(names))
        if error > limit:
            self._correct_difference(names, error)
        return error <= limit

    def _try_training(self, names: list[str]) -> None:
        """Where training takes another way, refuse the dimensions with which the dense model's training would end."""
        if not self.analysis.by_mode or not trains(self.model, self.batch):
            return
        guilty = self._bisect(names, self._fails_in_training)
        self.refused.update(dict.fromkeys(guilty, "the forward in training mode fails with fewer units"))

    def _fails_in_training(self, names: list[str]) -> bool:
        undo = Undo()
        try:
            remove_(self.model, Plan(self._half(names), self.structure), undo)
            return not trains(self.model, self.batch)
        finally:
            undo.run()

    def _half(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """About half of the units of each dimension, at random.

        Dimensions of equal size keep different numbers, and none in proportion to another, so that a forward that
        reads the size of one for another is found out. Larger ones stay multiples of four: some kernels want that.
        """
        generator = torch.Generator("cpu").manual_seed(0)
        kept: dict[str, tuple[int, ...]] = {}
        used: dict[int, set[int]] = {}
        for number, name in enumerate(names):
            units = self.structure.units[name]
            step = 4 if units >= 16 else 1
            wish = units * _FRACTIONS[number % len(_FRACTIONS)]
            counts, taken = range(step, units, step), used.setdefault(units, set())
            count = min(counts, key=lambda n: (n in taken, abs(n - wish)))
            taken.add(count)
            kept[name] = tuple(sorted(torch.randperm(units, generator=generator, device="cpu")[:count].tolist()))
        return kept

    def _try(self, names: Sequence[str], on_failure: OnFailure | None = None) -> list[Tensor] | Failure:
        """Remove half of these dimensions, run, put everything back; a failure is looked at before that."""
        undo = Undo()
        try:
            remove_(self.model, Plan(self._half(names), self.structure), undo)
            outcome = attempt(self.model, self.batch)
            if isinstance(outcome, Failure) and on_failure is not None and self._dense:
                learn = on_failure(outcome, names)
            else:
                learn = None
        finally:
            undo.run()
        if isinstance(outcome, Failure) and on_failure is not None:
            if learn is not None:
                learn()
            else:  # the first failure: look at the shapes in the dense model, and try again
                self._dense = shapes_of(self.model, self.batch)
        return outcome

    # The forward fails ------------------------------------------------------------------------------------------

    def _correct_failure(self, failure: Failure, names: Sequence[str]) -> Callable[[], None]:
        found = search(failure, self.structure, self._half(names), self._dense)

        def learn() -> None:
            if not self._adopt(found, names) and not self._drop(failure):
                self._give_up(failure, names)

        return learn

    def _adopt(self, found: Sequence[Attribute], names: Sequence[str]) -> bool:
        """Take corrections over, for all modules of the same class; says whether any was new."""
        known = {(a.module, a.name) for a in self.structure.attributes}
        more = [
            a
            for a in alike(self.model, found, self.structure, self._half(names))
            if (a.module, a.name) not in self._dropped
        ]
        new = {(a.module, a.name): a for a in (*more, *found) if (a.module, a.name) not in known}
        self._by_analogy |= {key for key in new if key not in {(a.module, a.name) for a in found}}
        self._searched |= set(new)
        self.structure = replace(self.structure, attributes=(*self.structure.attributes, *new.values()))
        return bool(new)

    def _drop(self, failure: Failure) -> bool:
        """Take back corrections by analogy in the modules that fail now; says whether there were any."""
        paths = {frame.path for frame in failure.stack}
        harmful = {key for key in self._by_analogy if key[0] in paths}
        keep = tuple(a for a in self.structure.attributes if (a.module, a.name) not in harmful)
        self.structure = replace(self.structure, attributes=keep)
        self._by_analogy -= harmful
        self._dropped |= harmful
        return bool(harmful)

    def _give_up(self, failure: Failure, names: Sequence[str]) -> None:
        """Refuse the dimensions of the innermost module that has any and fails with them alone, and of its class.

        A dimension that only waits for a correction, which could not be found as long as another one fails, gets it.
        """
        for frame in reversed(failure.stack):
            if is_builtin(frame.module):
                continue
            inside = [name for name in names if self._is_inside(name, frame.path)]
            known = len(self.structure.attributes)
            alone = {name: failure if len(inside) < 2 else self._fails_alone(name) for name in inside}
            guilty = {name: f"fails with fewer units: {_text(found)}" for name, found in alone.items() if found}
            if guilty:
                self._refuse(guilty, names, frame)
            if guilty or len(self.structure.attributes) > known:
                return
        text = f"the model fails with fewer units: {_text(failure)}"[:300]
        self.refused.update(dict.fromkeys(names, text))

    def _refuse(self, guilty: dict[str, str], names: Sequence[str], frame: Frame) -> None:
        """Refuse dimensions, and those at the same place in other modules of the same class: they run the same code."""
        cls = type(frame.module)
        where = f"the forward of {frame.path or 'the model'} ({cls.__name__})"
        same = () if cls.__module__.startswith("torch.nn") else self.model.named_modules()
        for path, module in same:
            if type(module) is cls:
                more = {path + name.removeprefix(frame.path): why for name, why in guilty.items()}
                guilty = {**{name: why for name, why in more.items() if name in names}, **guilty}
        self.refused.update({name: f"{where} {why}"[:300] for name, why in guilty.items()})

    def _fails_alone(self, name: str) -> Failure | None:
        """How the forward fails without units of this dimension alone; a correction that helps is taken over."""
        found: list[Attribute] = []

        def look(failure: Failure, names: Sequence[str]) -> Callable[[], None]:
            found.extend(search(failure, self.structure, self._half(names), self._dense))
            return lambda: None

        outcome = self._try([name], look)
        return outcome if isinstance(outcome, Failure) and not self._adopt(found, [name]) else None

    def _is_inside(self, name: str, path: str) -> bool:
        prefix = f"{path}." if path else ""
        return any(
            tensor.startswith(prefix) and any(name in names_in(extent) for extent in layout.axes.values())
            for tensor, layout in self.structure.tensors.items()
        )

    # The forward runs, but gives something else -------------------------------------------------------------------

    def _error(self, outcome: Sequence[Tensor], kept: Kept) -> tuple[float, float]:
        expected = masked_output(self.analysis, self.model, self.batch, kept)
        return relative_error(outcome, expected), tolerance(self.analysis.trace)

    def _correct_difference(self, names: list[str], error: float) -> None:
        """Find the guilty dimensions; a number that the forward reads may be wrong without making it fail."""
        guilty = self._bisect(names, self._is_wrong) or [self._last_straw(names)]
        for name in guilty[:_MOST_CORRECTED]:
            if self._corrected(name, names):
                return
        why = f"removing its units does not equal masking them (relative error {error:.1e})"
        self.refused.update(dict.fromkeys(guilty, why))

    def _bisect(self, names: list[str], wrong: Callable[[list[str]], bool]) -> list[str]:
        if not names or not wrong(names):
            return []
        if len(names) == 1:
            return names
        half = len(names) // 2
        return [*self._bisect(names[:half], wrong), *self._bisect(names[half:], wrong)]

    def _last_straw(self, names: list[str]) -> str:
        """Where only a combination is wrong: the dimension with which it becomes so, taking one after the other."""
        low, high = 0, len(names)  # names[:low] is right, names[:high] wrong
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._is_wrong(names[:middle]) else (middle, high)
        return names[high - 1]

    def _is_wrong(self, names: list[str]) -> bool:
        outcome = self._try(names)
        if isinstance(outcome, Failure):
            return True
        error, limit = self._error(outcome, self._half(names))
        return error > limit

    def _corrected(self, name: str, names: Sequence[str]) -> bool:
        """Look for corrections around a dimension with which its removal equals masking, and take them over."""
        layouts = self.structure.tensors.items()
        path = common_path([t for t, layout in layouts if any(name in names_in(e) for e in layout.axes.values())])
        before = self.structure
        told = tuple(
            a for a in before.attributes if (a.module, a.name) not in self._searched or not _within(a.module, path)
        )
        for chosen in candidates(path, self.model, replace(before, attributes=told), self._half([name])):
            self.structure = replace(before, attributes=(*told, *chosen))
            if not self._is_wrong([name]):
                new = {(a.module, a.name) for a in chosen}
                if new <= {(a.module, a.name) for a in before.attributes}:
                    break  # nothing that was not there before
                self._searched |= new
                self._adopt(chosen, names)
                return True
        self.structure = before
        return False


def _text(failure: Failure) -> str:
    return (str(failure.error).strip().splitlines() or [type(failure.error).__name__])[0]


def _within(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")
