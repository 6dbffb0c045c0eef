"""What the whole network may cost."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real

from ispasp.errors import InputError
from ispasp.graph.cost import CostModel
from ispasp.types.checks import is_integer
from ispasp.types.dimension import Cost


@dataclass(frozen=True)
class Budget(ABC):
    """At most this much: a float in (0, 1] is a fraction of the dense network's count, an int the number itself."""

    amount: float | int

    def __post_init__(self) -> None:
        """Refuse what is neither a fraction nor a number."""
        kind, amount = type(self).__name__, self.amount
        if is_integer(amount):
            if amount < 1:
                raise InputError(
                    f"{kind}({amount}) leaves nothing of the network: pass an int >= 1 or a float in (0, 1]"
                )
            return
        if isinstance(amount, bool) or not isinstance(amount, Real):
            raise InputError(
                f"{kind}({amount!r}) is given a {type(amount).__name__}: pass a float in (0, 1] (a fraction of the "
                "dense count) or an int (the count itself)"
            )
        if not 0.0 < amount <= 1.0:
            remedy = f"{kind}({int(amount)}) for a count" if 1.0 < amount < math.inf else f"{kind}(0.5) for one half"
            raise InputError(f"{kind}({amount}) is not a fraction: a float must be in (0, 1]; pass {remedy}")

    def limit(self, cost: Cost) -> int:
        """The most that may stay, as a count.

        >>> cost = Cost(params=0, macs=0, dense_params=200, dense_macs=10_000)
        >>> Macs(0.5).limit(cost), Params(0.29).limit(cost), Params(30).limit(cost)
        (5000, 58, 30)
        """
        if is_integer(self.amount):
            return int(self.amount)
        return math.floor(self.amount * self._dense(cost) + 1e-6)  # 0.29 * 200 is a little less than 58 in binary

    def check(self, cost: Cost, least: int) -> None:
        """Refuse a limit that is out of reach: `least` is what stays of the narrowest network.

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
        raise InputError(
            f"{kind}({amount}) is out of reach: with every hidden dimension as narrow as allowed the network has "
            f"{least:,} of {self._dense(cost):,}; pass a larger {'count' if is_integer(amount) else 'fraction'}{hint}"
        )

    @abstractmethod
    def count(self, costs: CostModel, widths: Mapping[str, int]) -> int:
        """What a network costs whose hidden dimensions have these widths; those not named are dense."""

    @abstractmethod
    def _dense(self, cost: Cost) -> int:
        """The dense network's count."""


@dataclass(frozen=True)
class Macs(Budget):
    """A limit on multiply-accumulates for one example.

    >>> Macs(0.5), Macs(2_690_000_000)
    (Macs(amount=0.5), Macs(amount=2690000000))
    >>> Macs(2.69e9)
    Traceback (most recent call last):
    ...
    ispasp.errors.InputError: Macs(2690000000.0) is not a fraction: ... pass Macs(2690000000) for a count
    """

    def count(self, costs: CostModel, widths: Mapping[str, int]) -> int:
        """Multiply-accumulates for one example.

        >>> costs = CostModel((), ((10, (((("fc", 8),),),)),), examples=1)
        >>> Macs(0.5).count(costs, {"fc": 3})
        30
        """
        return costs.macs({name: range(width) for name, width in widths.items()})

    def _dense(self, cost: Cost) -> int:
        return cost.dense_macs


@dataclass(frozen=True)
class Params(Budget):
    """A limit on parameters.

    >>> Params(0.0)
    Traceback (most recent call last):
    ...
    ispasp.errors.InputError: Params(0.0) is not a fraction: a float must be in (0, 1]; pass Params(0.5) for one half
    """

    def count(self, costs: CostModel, widths: Mapping[str, int]) -> int:
        """Parameters that stay.

        >>> costs = CostModel(((10, (((("fc", 8),),),)),), (), examples=1)
        >>> Params(0.5).count(costs, {"fc": 3})
        30
        """
        return costs.params({name: range(width) for name, width in widths.items()})

    def _dense(self, cost: Cost) -> int:
        return cost.dense_params
