"""The ranks that calibrate together: each has its own shard of the data, all decide alike."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import TracebackType
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from ispasp.calibrate.team_statistics import agreed, blank, outline, rebuilt, sums
from ispasp.calibrate.team_wire import Wire
from ispasp.errors import DistributedError, InputError
from ispasp.types import Statistics

N = TypeVar("N", int, float)
_LONGEST = 2000  # characters of an error message that travel


class Team(ABC):
    """All ranks that calibrate together. Every rank makes the same calls in the same order.

    Use it as a context manager, or `close` it, to give its connections back.
    """

    rank: int
    size: int

    @abstractmethod
    def sum(self, statistics: Statistics) -> Statistics:
        """The statistics of the data of all ranks, in float64, the same bits on every rank.

        Ranks may have seen different spatial sizes; a rank may have seen no data at all.
        """

    @abstractmethod
    def sum_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sum of every tensor over ranks, in float64, the same bits on every rank. Names and shapes must agree."""

    @abstractmethod
    def same(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of rank 0, bit for bit: their names, shapes, dtypes and values, so that all ranks act alike."""

    @abstractmethod
    def total(self, n: N) -> N:
        """The sum of a number over ranks."""

    @abstractmethod
    def gather(self, what: str, message: Any) -> list[Any]:
        """The messages of all ranks, in order of rank. A message is anything JSON can hold; errors name it `what`."""

    @abstractmethod
    def agree(self, error: str | None) -> None:
        """Raise `DistributedError` on every rank if one rank has an error; return on every rank if none has."""

    @abstractmethod
    def together(self, what: str) -> AbstractContextManager[None]:
        """A block that succeeds on all ranks or on none.

        An exception inside it is raised on its own rank as it is, and as `DistributedError` on the others, where they
        next meet: inside the block or at its end. `what` says in errors where that was.
        """

    def close(self) -> None:  # noqa: B027  # a team of one has nothing to give back
        """Give the connections back."""

    def __enter__(self) -> Team:
        """The team itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Give the connections back."""
        self.close()


@final
class Alone(Team):
    """One process with all the data: everything is returned as it is.

    >>> Alone().total(3), Alone().size
    (3, 1)
    """

    rank = 0
    size = 1

    def sum(self, statistics: Statistics) -> Statistics:
        """The statistics themselves."""
        return statistics

    def sum_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors themselves."""
        return dict(tensors)

    def same(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors themselves."""
        return dict(tensors)

    def total(self, n: N) -> N:
        """The number itself."""
        return n

    def gather(self, what: str, message: Any) -> list[Any]:
        """The message itself."""
        return [message]

    def agree(self, error: str | None) -> None:
        """Raise if there is an error."""
        if error is not None:
            raise DistributedError(f"rank 0 failed: {error}")

    def together(self, what: str) -> AbstractContextManager[None]:
        """A plain block."""
        return nullcontext()


@final
class Ranks(Team):
    """The processes of torch.distributed, connected over its default group. Making one is a collective.

    Before anything is added or sent the ranks tell each other where they are, so a rank that failed, or that went
    another way, is named on all others instead of leaving them waiting.
    """

    def __init__(self, timeout_seconds: float) -> None:
        """Connect; `timeout_seconds` is how long a rank waits for the others at any one point."""
        self._wire = Wire(timeout_seconds)
        self.rank, self.size = self._wire.rank, self._wire.size
        self._places: list[str] = []
        self._told: BaseException | None = None

    def sum(self, statistics: Statistics) -> Statistics:
        """Agree on the sums that any rank has, and add them."""
        what = self._at("the sum of statistics")
        agreement = agreed(self._meet(what, outline(statistics)))
        own = sums(statistics)
        totals = {
            key: self._wire.add(what, own[key] if key in own else blank(statistics, key, shape))
            for key, shape in agreement.shapes.items()
        }
        return rebuilt(statistics, agreement, totals)

    def sum_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add tensors that every rank has."""
        what = self._at("the sum of tensors")
        shapes = self._meet(what, {name: list(x.shape) for name, x in tensors.items()})
        for rank, given in enumerate(shapes):
            if given != shapes[0]:
                raise InputError(
                    f"rank {rank} has tensors {given}, rank 0 has {shapes[0]}: give all ranks the same names and shapes"
                )
        return {name: self._wire.add(what, tensors[name]) for name in shapes[0]}

    def same(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take over what rank 0 has."""
        what = self._at("the copy of rank 0")
        named = {name: [str(x.dtype).removeprefix("torch."), list(x.shape)] for name, x in tensors.items()}
        found = {}
        for name, (dtype, shape) in self._meet(what, named)[0].items():
            device = tensors[name].device if name in tensors else torch.device("cpu")
            empty = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            found[name] = self._wire.first(what, tensors[name] if self.rank == 0 else empty)
        return found

    def total(self, n: N) -> N:
        """Add the numbers in order of rank."""
        added: N = sum(self._meet(self._at("the total of a number"), n))
        return added

    def gather(self, what: str, message: Any) -> list[Any]:
        """Hear all ranks."""
        return self._meet(self._at(what), message)

    def agree(self, error: str | None) -> None:
        """Tell the others, and hear them."""
        self._meet(self._at("the agreement"), None, error)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Run a block, and tell the others how it ended."""
        self._places.append(what)
        try:
            yield
            self._meet(self._at("the end"), None)
        except Exception as error:
            if not self._known(error):
                self._told = error
                with suppress(DistributedError):  # this rank has an error of its own to raise
                    self._meet(self._at("the failure"), None, f"{type(error).__name__}: {error}")
            raise
        except BaseException:
            self._wire.broken = self._wire.broken or "it was interrupted"  # do not wait for anyone now
            raise
        finally:
            self._places.pop()
            if not self._places:
                self._told = None  # an exception keeps the frames it came through, and their tensors

    def close(self) -> None:
        """Give the group back."""
        self._wire.close()

    def _at(self, what: str) -> str:
        return " in ".join((what, *reversed(self._places)))

    def _meet(self, at: str, body: Any, error: str | None = None) -> list[Any]:
        """What each rank brings to this point, once all are here and well."""
        error = None if error is None else error[:_LONGEST]
        messages = self._wire.exchange(at, {"at": at, "error": error, "body": body})
        failed = [f"rank {r} failed: {m['error']}" for r, m in enumerate(messages) if m["error"] is not None]
        if failed:
            raise DistributedError(f"{'; '.join(failed)} (rank {self.rank} was at {at})")
        places = [m["at"] for m in messages]
        if len(set(places)) > 1:
            shown = "; ".join(f"rank {r} is at {place}" for r, place in enumerate(places))
            raise DistributedError(
                f"ranks are out of step: {shown}. Make the same calls in the same order on every rank"
            )
        return [m["body"] for m in messages]

    def _known(self, error: BaseException | None) -> bool:
        """Whether the other ranks know this failure, or what it came from, already."""
        seen: set[int] = set()
        while error is not None and id(error) not in seen:
            if isinstance(error, DistributedError) or error is self._told:
                return True
            seen.add(id(error))
            error = error.__cause__ or error.__context__
        return False


def team(timeout_seconds: float = 600.0) -> Team:
    """The ranks of torch.distributed if it is initialised with more than one, otherwise this process alone.

    With several ranks this is a collective: each must call it. `timeout_seconds` is how long a rank waits for the
    others at any one point before it raises `DistributedError`.

    >>> team()
    <ispasp.calibrate.team.Alone object at ...>
    """
    if not timeout_seconds > 0:
        raise InputError(f"timeout_seconds={timeout_seconds}: pass how long to wait for other ranks, such as 600")
    if _joined():
        return Ranks(timeout_seconds)
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_available() and dist.is_torchelastic_launched() and started > 1 and not dist.is_initialized():
        warnings.warn(
            f"{started} processes were started, but torch.distributed is not initialised: each works alone. "
            "Call torch.distributed.init_process_group() or make an accelerate.Accelerator() first",
            stacklevel=2,
        )
    return Alone()


def joined_team(timeout_seconds: float = 600.0) -> Team:
    """`team` where torch.distributed may be initialised later: this process alone until then, without a warning.

    >>> joined_team().size
    1
    """
    return Ranks(timeout_seconds) if _joined() else Alone()


def _joined() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
