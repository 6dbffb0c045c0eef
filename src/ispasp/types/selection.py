"""What a selector returns: the kept units and the evidence of how it came to them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """The state after one iteration.

    `moment_residual` is ||mu(V)||_2, V the dense minus the pruned output of the consumers and mu its sum over the
    data. `residual` is ||V||_F where data or a Gram matrix were at hand, else None: first moments cannot give it.

    >>> Step((0, 2), moment_residual=0.5).residual is None
    True
    """

    kept: tuple[int, ...]
    moment_residual: float | None = None
    residual: float | None = None


@dataclass(frozen=True)
class Selection:
    """The units to keep (sorted), with one `Step` per iteration.

    `start` is the state before the first iteration, when nothing is kept: its residuals are the norms of the dense
    output, so that `step.residual / start.residual` is a relative error. `converged` says that a further
    iteration would return the same set. `scores`: of every unit, where the method gives each a number of its own.

    >>> Selection(kept=(0, 2), start=Step((), 2.0), steps=(Step((0, 2), 0.5),), converged=True)
    Selection(kept 2 units [0, 2], iterations=1, converged=True, moment residual 2 -> 0.5)
    """

    kept: tuple[int, ...]
    start: Step = Step(())
    steps: tuple[Step, ...] = ()
    converged: bool = True
    scores: tuple[float, ...] = ()

    @property
    def iterations(self) -> int:
        """Iterations that were run."""
        return len(self.steps)

    @property
    def residuals(self) -> tuple[float | None, ...]:
        """||V||_F after each iteration (None where it could not be known)."""
        return tuple(step.residual for step in self.steps)

    @property
    def moment_residuals(self) -> tuple[float | None, ...]:
        """||mu(V)||_2 after each iteration."""
        return tuple(step.moment_residual for step in self.steps)

    def __repr__(self) -> str:
        """One line a person can read."""
        shown = ", ".join(map(str, self.kept[:8])) + (", ..." if len(self.kept) > 8 else "")
        parts = [
            f"kept {len(self.kept)} units [{shown}]",
            f"iterations={self.iterations}",
            f"converged={self.converged}",
        ]
        last = self.steps[-1] if self.steps else self.start
        for label, first, final in (
            ("moment residual", self.start.moment_residual, last.moment_residual),
            ("residual", self.start.residual, last.residual),
        ):
            if first is not None and final is not None:
                parts.append(f"{label} {first:.4g} -> {final:.4g}")
        return f"Selection({', '.join(parts)})"
