"""Latency as a budget: a limit on the time of one call, spent by a table of measured times."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from numbers import Real
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ispasp.budget.limits import Budget
from ispasp.errors import InputError, MissingExtraError
from ispasp.graph.analyse import CostModel
from ispasp.types.dimension import Cost, Extent, is_integer, kept_length, names_in

Runtime = Literal["eager", "compile", "onnx"] | Callable[[Any, Any], Any]
Term = tuple[tuple[Extent, NDArray[np.float64]], ...]  # seconds are a product: of each axis by its length
RUNTIMES = ("eager", "compile", "onnx")
_NOISE = 0.05  # a width that is slower than its neighbours by less is not punished
_SLOWEST = 64.0  # times that a width may be slower than a round one


def name_of(runtime: Runtime) -> str:
    """The name of a runtime, or of the function."""
    return runtime if isinstance(runtime, str) else getattr(runtime, "__name__", "custom")


@dataclass(frozen=True, eq=False)
class LatencyModel:
    """Seconds of a call by widths: `fixed`, and `factor` times the sum of the terms. `dense` seconds were measured."""

    terms: tuple[Term, ...]
    fixed: float
    factor: float
    dense: float

    def seconds(self, widths: Mapping[str, int]) -> float:
        """Predicted seconds of one call; dimensions that are not named are dense."""
        return self.fixed + self.factor * total(self.terms, widths)

    def liked(self, name: str, units: int, step: int = 1) -> list[int]:
        """The widths that are faster than every wider one, while all other dimensions are dense; all units last.

        >>> slow = np.array([0.0, 3.0, 2.0, 9.0, 4.0])  # three units are slower than four
        >>> LatencyModel((((((("fc", 4),),), slow),),), 0.0, 1.0, 4.0).liked("fc", 4)
        [0, 2, 4]
        """
        mine = [term for term in self.terms if any(name in names_in(extent) for extent, _ in term)]
        found, best = [units], total(mine, {})
        for width in range((units - 1) // step * step, -1, -step):
            if (seconds := total(mine, {name: width})) < best:
                found, best = [width, *found], seconds
        return found

    def punished(self, widths: Mapping[str, int], seconds: float, low: int, high: int) -> LatencyModel:
        """Raise the times of lengths that `low` divides and `high` does not, until `widths` take so many seconds."""

        def raised(factor: float) -> LatencyModel:
            terms = (tuple((e, _slowed(times, factor, low, high)) for e, times in term) for term in self.terms)
            return replace(self, terms=tuple(terms))

        factors = [1.0, _SLOWEST]
        if raised(_SLOWEST).seconds(widths) < seconds:
            return self  # these lengths are not what takes the time
        for _ in range(20):
            middle = math.sqrt(factors[0] * factors[1])
            factors[raised(middle).seconds(widths) >= seconds] = middle
        return raised(factors[1])


def total(terms: Sequence[Term], widths: Mapping[str, int]) -> float:
    """Sum of the terms at these widths."""
    kept = {name: range(width) for name, width in widths.items()}
    return sum(math.prod(float(times[kept_length(extent, kept)]) for extent, times in term) for term in terms)


def fitted(terms: Sequence[Term], dense: float, narrow: float, widths: Mapping[str, int]) -> LatencyModel:
    """Terms scaled to two whole runs: `dense` seconds with all units, `narrow` seconds with these widths.

    Where narrowing does not pay, all of the time is taken to be theirs.
    """
    whole, part = total(terms, {}), total(terms, widths)
    factor = (dense - narrow) / (whole - part) if whole > part else 0.0
    if factor <= 0.0:
        factor = dense / whole if whole > 0.0 else 0.0
    return LatencyModel(tuple(terms), dense - factor * whole, factor, dense)


def interpolated(grid: Mapping[int, float], probes: Mapping[int, float], length: int) -> NDArray[np.float64]:
    """Seconds at every length from 0 to `length`, from those measured at round lengths and, as `probes`, at odd ones.

    Between round lengths time is linear, and never falls: a longer axis that was faster counts for the shorter ones.
    A probe tells what lengths cost that are divisible by no higher power of two than the probe's.

    >>> interpolated({4: 4.0, 8: 8.0}, {3: 6.0}, 8).round(1).tolist()
    [0.0, 2.0, 2.0, 6.0, 4.0, 10.0, 6.0, 14.0, 8.0]
    """
    lengths = sorted(grid)
    times = np.minimum.accumulate([grid[n] for n in reversed(lengths)])[::-1]
    seconds = np.interp(np.arange(length + 1), [0, *lengths], [0.0, *times])
    slower: dict[int, float] = {}
    for n in sorted(probes, key=_power, reverse=True):
        ratio = probes[n] / max(float(seconds[n]), 1e-12)
        slower[_power(n)] = max([ratio if ratio > 1.0 + _NOISE else 1.0, *slower.values()])
    for power in sorted(slower, reverse=True):
        next_power = min((p for p in slower if p > power), default=max(slower) + 1)
        seconds = _slowed(seconds, slower[power], power, next_power)
    return np.asarray(seconds, dtype=np.float64)


def _slowed(times: NDArray[np.float64], factor: float, low: int, high: int) -> NDArray[np.float64]:
    """The times by length, multiplied where the power of two that divides the length is in low..high - 1."""
    power = _power(np.arange(len(times)))
    return np.where((power >= low) & (power < high), factor * times, times)


def _power(n: Any) -> Any:
    """The largest power of two that divides n, or each of an array."""
    return n & -n


@dataclass(frozen=True)
class Latency(Budget):
    """A limit on the time of one call: a fraction of the dense model's, or `milliseconds`, measured on this machine.

    `batch` is how many examples a call has, one by default. They are taken from the first calibration batch.
    `runtime` is "eager", "compile" (torch.compile), "onnx" (ONNX Runtime) or a function of a model and a batch that
    returns a function to time, or seconds. `repeats` are the rounds of interleaved runs that medians are taken of.

    >>> print(Latency(0.5), Latency(milliseconds=12, runtime="onnx"))
    Latency(0.5, batch=1, runtime=eager) Latency(milliseconds=12, batch=1, runtime=onnx)
    """

    amount: Any = None
    milliseconds: float | None = None
    batch: int = 1
    runtime: Runtime = "eager"
    repeats: int = 7
    model: LatencyModel | None = field(default=None, repr=False, compare=False)  # `prune` measures it

    def __post_init__(self) -> None:
        both = "pass a fraction of the dense time such as Latency(0.5), or Latency(milliseconds=12)"
        given = self.amount if self.milliseconds is None else self.milliseconds
        if (self.amount is None) == (self.milliseconds is None):
            raise InputError(f"amount={self.amount!r} and milliseconds={self.milliseconds!r}: {both}")
        number = isinstance(given, Real) and not isinstance(given, bool)
        if not number or not 0 < float(given) < math.inf or (self.amount is not None and float(given) > 1):
            hint = f"; for {given} milliseconds pass Latency(milliseconds={given})" if number and given > 1 else ""
            raise InputError(f"Latency of {given!r} is not a time: {both}{hint}")
        if not (callable(self.runtime) or self.runtime in RUNTIMES):
            raise InputError(f"runtime={self.runtime!r}: choose {', '.join(RUNTIMES)}, or pass a function")
        for name, least in (("batch", 1), ("repeats", 3)):
            if not is_integer(getattr(self, name)) or getattr(self, name) < least:
                raise InputError(f"{name}={getattr(self, name)!r}: pass a whole number >= {least}")
        missing = [p for p in ("onnx", "onnxscript", "onnxruntime") if find_spec(p) is None]
        if self.runtime == "onnx" and missing:
            raise MissingExtraError(f"runtime='onnx' needs {missing[0]}: pip install 'ispasp[onnx]'")

    def __str__(self) -> str:
        how = f"milliseconds={self.milliseconds:g}" if self.milliseconds is not None else f"{self.amount:g}"
        return f"Latency({how}, batch={self.batch}, runtime={name_of(self.runtime)})"

    def seconds(self, dense: float) -> float:
        """The limit in seconds, for a dense model that takes so many."""
        return 1e-3 * self.milliseconds if self.milliseconds is not None else float(self.amount) * dense

    def limit(self, cost: Cost) -> int:
        return round(1e9 * self.seconds(self._measured.dense))

    def check(self, cost: Cost, least: int) -> None:
        """Raise if the limit is out of reach: `least` are the nanoseconds of the narrowest network."""
        if least > self.limit(cost):
            dense, fixed = 1e3 * self._measured.dense, 1e3 * self._measured.fixed
            narrow = f"a call is predicted to take {least / 1e6:.3g} of {dense:.3g} ms"
            why = f"with every hidden dimension as narrow as allowed {narrow}"
            remedy = "pass a larger limit, least=0, scope='all', or a larger batch="
            outside = f"{fixed:.3g} ms of them outside of what can be pruned"
            raise InputError(f"{self} is out of reach: {why}, {outside}; {remedy}")

    def count(self, costs: CostModel, widths: Mapping[str, int]) -> int:
        return round(1e9 * self._measured.seconds(widths))

    def choices(self, name: str, units: int, step: int | None) -> Sequence[int]:
        """The widths that the runtime likes."""
        return self._measured.liked(name, units, step or 1)

    @property
    def _measured(self) -> LatencyModel:
        if self.model is None:
            raise InputError(f"{self} takes measuring: pass it to ispasp.prune")
        return self.model
