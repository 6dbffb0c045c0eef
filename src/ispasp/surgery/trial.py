"""Try it out: which hidden dimensions can go on this model, and what has to be corrected for it.

The graph says what may be removed; whether the model's own forward code runs with less of it, and gives what masking
gives, is tried on the example batch, on the model itself, with everything put back afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ispasp.errors import IspaspError
from ispasp.graph.analyse import Analysis
from ispasp.graph.trace import Batch
from ispasp.surgery.attempt import Failure, Shape, attempt, shapes_of
from ispasp.surgery.corrections import alike, search
from ispasp.surgery.masking import masked_output
from ispasp.surgery.remove import Undo, remove_
from ispasp.surgery.verify import relative_error, tolerance
from ispasp.types.layout import Kept, names_in
from ispasp.types.plan import Attribute, Plan, Structure

_MOST_ROUNDS = 60


@dataclass
class Trial:
    """The state of trying: corrections found so far, and dimensions that had to be given up, with the reason."""

    model: nn.Module
    batch: Batch
    analysis: Analysis
    structure: Structure
    refused: dict[str, str] = field(default_factory=dict)
    _dense: dict[str, list[list[Shape]]] = field(default_factory=dict)

    def run(self) -> None:
        """Try all dimensions together until the model runs and equals masking."""
        for _ in range(_MOST_ROUNDS):
            kept = self._half(name for name in self.structure.units if name not in self.refused)
            if not kept:
                return
            outcome = self._pruned(kept, self._search)
            if outcome is None:
                continue
            error, limit = self._error(outcome, kept)
            if error <= limit:
                return
            self._find_guilty(list(kept), error)

    def _half(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """A random half of the units of each dimension; one more here and there, so that sizes differ."""
        generator = torch.Generator().manual_seed(0)
        kept = {}
        for number, name in enumerate(names):
            units = self.structure.units[name]
            count = max(1, min(units - 1, units // 2 + number % 2))
            kept[name] = tuple(sorted(torch.randperm(units, generator=generator)[:count].tolist()))
        return kept

    def _pruned(self, kept: Kept, on_failure) -> list[Tensor] | None:  # type: ignore[no-untyped-def]
        undo = Undo()
        try:
            remove_(self.model, Plan(dict(kept), self.structure), undo)  # type: ignore[arg-type]
            outcome = attempt(self.model, self.batch)
            found = on_failure(outcome, kept) if isinstance(outcome, Failure) else None
        finally:
            undo.run()
        if not isinstance(outcome, Failure):
            return outcome
        self._learn(outcome, found, kept)
        return None

    def _search(self, failure: Failure, kept: Kept) -> tuple[Attribute, ...]:
        return search(failure, self.structure, kept, self._shapes())

    def _shapes(self) -> dict[str, list[list[Shape]]]:
        return self._dense

    def _learn(self, failure: Failure, found: tuple[Attribute, ...], kept: Kept) -> None:
        if not self._dense:  # the first failure: look at the dense model, then try again
            self._dense = shapes_of(self.model, self.batch)
            return
        known = {(a.module, a.name) for a in self.structure.attributes}
        new = [a for a in (*found, *alike(self.model, found, self.structure, kept)) if (a.module, a.name) not in known]
        if new:
            unique = {(a.module, a.name): a for a in reversed(new)}
            self.structure = replace(self.structure, attributes=(*self.structure.attributes, *unique.values()))
        else:
            self._give_up(failure, list(kept))

    def _give_up(self, failure: Failure, names: Sequence[str]) -> None:
        """Refuse the dimensions of the innermost module that has any, and of all modules of its class."""
        for frame in reversed(failure.stack):
            inside = [name for name in names if self._is_inside(name, frame.path)]
            guilty = [name for name in inside if isinstance(self._alone(name), Failure)] if len(inside) > 1 else inside
            if not guilty and inside:
                guilty = inside
            if guilty:
                cls = type(frame.module)
                paths = [p for p, m in self.model.named_modules() if type(m) is cls] if frame.path else [""]
                like = [n for n in names if n not in guilty and any(self._is_inside(n, p) for p in paths)]
                guilty += [n for n in like if len(inside) == len(guilty)]
                text = str(failure.error).strip().splitlines()
                why = f"the forward of {frame.path or 'the model'} ({cls.__name__}) fails with fewer units: {text[0] if text else ''}"
                self.refused.update(dict.fromkeys(guilty, why[:300]))
                return
        self.refused.update(dict.fromkeys(names, f"the model fails with fewer units: {failure.error}"[:300]))

    def _alone(self, name: str) -> list[Tensor] | Failure:
        undo = Undo()
        try:
            remove_(self.model, Plan(self._half([name]), self.structure), undo)
            return attempt(self.model, self.batch)
        finally:
            undo.run()

    def _is_inside(self, name: str, path: str) -> bool:
        prefix = f"{path}." if path else ""
        return any(
            tensor.startswith(prefix) and any(name in names_in(extent) for extent in layout.axes.values())
            for tensor, layout in self.structure.tensors.items()
        )

    def _error(self, outcome: Sequence[Tensor], kept: Kept) -> tuple[float, float]:
        expected = masked_output(self.analysis, self.model, self.batch, kept)
        return relative_error(outcome, expected), tolerance(expected)

    def _find_guilty(self, names: list[str], error: float) -> None:
        """Bisect for the dimensions whose removal does not equal masking."""
        why = f"removing its units does not equal masking them (relative error {error:.1e})"
        guilty = self._bisect(names)
        self.refused.update(dict.fromkeys(guilty or names, why))

    def _bisect(self, names: list[str]) -> list[str]:
        if not self._is_wrong(names):
            return []
        if len(names) == 1:
            return names
        half = len(names) // 2
        return [*self._bisect(names[:half]), *self._bisect(names[half:])]

    def _is_wrong(self, names: list[str]) -> bool:
        kept = self._half(names)
        undo = Undo()
        try:
            remove_(self.model, Plan(kept, self.structure), undo)
            outcome = attempt(self.model, self.batch)
        except IspaspError:
            return True
        finally:
            undo.run()
        if isinstance(outcome, Failure):
            return True
        error, limit = self._error(outcome, kept)
        return error > limit
