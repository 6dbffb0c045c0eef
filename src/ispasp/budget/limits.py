"""Budgets: what the whole network may cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

from ispasp.errors import InputError
from ispasp.graph.analyse import CostModel
from ispasp.types.dimension import Cost, is_integer


@dataclass(frozen=True)
class Budget:
    """An upper limit: a float in (0, 1] is a fraction of the dense network's count, an int the count itself."""

    amount: float | int
    what: ClassVar[str]  # "macs" or "params"

    def __post_init__(self) -> None:
        kind, amount = type(self).__name__, self.amount
        remedy = "pass a float in (0, 1] (a fraction of the dense count) or an int >= 1 (the count itself)"
        if is_integer(amount):
            if amount < 1:
                raise InputError(f"{kind}({amount}) leaves nothing of the network: {remedy}")
        elif isinstance(amount, bool) or not isinstance(amount, Real):
            raise InputError(f"{kind}({amount!r}) is given a {type(amount).__name__}: {remedy}")
        elif not 0.0 < amount <= 1.0:
            instead = f"{kind}({int(amount)}) for a count" if 1.0 < amount < math.inf else f"{kind}(0.5) for one half"
            raise InputError(f"{kind}({amount}) is not a fraction: a float must be in (0, 1]; pass {instead}")

    def limit(self, cost: Cost) -> int:
        """The limit as a count.

        >>> cost = Cost(params=0, macs=0, dense_params=200, dense_macs=10_000)
        >>> Macs(0.5).limit(cost), Params(0.29).limit(cost), Params(30).limit(cost)
        (5000, 58, 30)
        """
        if is_integer(self.amount):
            return int(self.amount)
        return math.floor(self.amount * self._dense(cost) + 1e-6)  # 0.29 * 200 is a little less than 58 in binary

    def check(self, cost: Cost, least: int) -> None:
        """Raise if the limit is out of reach: `least` is the count of the narrowest network.

        >>> Macs(50).check(Cost(params=0, macs=0, dense_params=200, dense_macs=10_000), least=600)
        Traceback (most recent call last):
        ...
        ispasp.errors.InputError: Macs(50) is out of reach: with every hidden dimension as narrow as allowed the network
        has 600 of 10,000; pass a larger count; for 50 % of the dense one pass Macs(0.5)
        """
        if least <= self.limit(cost):
            return
        kind, amount = type(self).__name__, self.amount
        percent = is_integer(amount) and 1 < amount < 100
        hint = f"; for {amount} % of the dense one pass {kind}({amount / 100:g})" if percent else ""
        why = f"with every hidden dimension as narrow as allowed the network has {least:,} of {self._dense(cost):,}"
        remedy = f"pass a larger {'count' if is_integer(amount) else 'fraction'}{hint}"
        raise InputError(f"{kind}({amount}) is out of reach: {why}; {remedy}")

    def count(self, costs: CostModel, widths: Mapping[str, int]) -> int:
        """Count of the network with these widths; dimensions that are not named are dense."""
        return int(getattr(costs, self.what)({name: range(width) for name, width in widths.items()}))

    def choices(self, name: str, units: int, step: int | None) -> Sequence[int] | None:
        """The widths that a hidden dimension may have, ascending to all units; None for any."""
        return None

    def _dense(self, cost: Cost) -> int:
        return int(getattr(cost, f"dense_{self.what}"))


@dataclass(frozen=True)
class Macs(Budget):
    """A limit on multiply-accumulates for one example.

    >>> Macs(0.5), Macs(2_690_000_000)
    (Macs(amount=0.5), Macs(amount=2690000000))
    """

    what: ClassVar[str] = "macs"


@dataclass(frozen=True)
class Params(Budget):
    """A limit on parameters.

    >>> Params(0.25)
    Params(amount=0.25)
    """

    what: ClassVar[str] = "params"
