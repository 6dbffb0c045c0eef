"""`keep`: the fraction or number of units that stay."""

from __future__ import annotations

from numbers import Real

from ispasp.errors import InputError
from ispasp.types.checks import is_integer


def units_to_keep(keep: float | int, units: int, name: str = "the hidden dimension") -> int:
    """Number of units that stay: s = floor(keep * units + 1/2) for a float, keep itself for an int.

    Numpy's numbers count as Python's. A positive fraction keeps at least one unit, so that no hidden dimension
    vanishes by rounding.

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
    if isinstance(keep, bool) or not isinstance(keep, Real):
        raise InputError(
            f"keep={keep!r} is a {type(keep).__name__}: pass a float in (0, 1] (a fraction) or an int >= 1 (a number)"
        )
    if not 0.0 < keep <= 1.0:
        raise InputError(
            f"keep={keep} is not a fraction of units that stay: pass a float in (0, 1], or an int for a number"
        )
    return max(1, int(float(keep) * units + 0.5))
