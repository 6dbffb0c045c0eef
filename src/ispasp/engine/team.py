"""The ranks that calibrate together: each has its own data, and all start and decide alike."""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import fields, is_dataclass
from numbers import Real
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ispasp.engine.wire import Wire, added, outline
from ispasp.errors import DistributedError, InputError, failing_as
from ispasp.files import digest as tensor_digest
from ispasp.graph.trace import Trace, named_tensors
from ispasp.types import Statistics

N = TypeVar("N", int, float)
BROADCAST = (
    "start every rank with the same weights, e.g. `for t in (*model.parameters(), *model.buffers()): "
    "torch.distributed.broadcast(t.data, 0)` (after DistributedDataParallel the buffers of ranks differ as well)"
)
SAME_OPTIONS = "pass the same options on every rank"
_LONGEST, _SHOWN = 2000, 200  # most characters of an error sent to other ranks, and of a value in an error
_DEEPEST = 8  # nested values that are compared


def team(timeout_seconds: float = 600.0) -> Team:
    """The ranks of torch.distributed if it is initialised with more than one, otherwise this process alone.

    With several ranks this is a collective: each must call it. `timeout_seconds` is how long a rank waits for the
    others at any one point before it raises `DistributedError`.
    """
    if not timeout_seconds > 0:
        raise InputError(f"timeout_seconds={timeout_seconds}: pass how long to wait for other ranks, such as 600")
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_available() and dist.is_torchelastic_launched() and started > 1 and not dist.is_initialized():
        warnings.warn(
            f"{started} processes were started, but torch.distributed is not initialised: each works alone. "
            "Call torch.distributed.init_process_group() or make an accelerate.Accelerator() first",
            stacklevel=2,
        )
    return joined_team(timeout_seconds)


def joined_team(timeout_seconds: float = 600.0) -> Team:
    """`team` without its warning, where torch.distributed may be initialised later."""
    joined = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return Team(Wire(timeout_seconds) if joined else None)


@final
class Team(AbstractContextManager["Team"]):
    """All ranks that calibrate together, or this process alone. Every rank makes the same calls in the same order.

    Before they add or send anything, ranks tell each other where they are, so a rank that failed or is out of step is
    named on all others instead of leaving them waiting. Use it as a context manager, or `close` it.
    """

    def __init__(self, wire: Wire | None = None) -> None:
        self._wire = wire
        self.rank, self.size = (0, 1) if wire is None else (wire.rank, wire.size)
        self._places: list[str] = []
        self._told: BaseException | None = None

    def sum(self, statistics: Statistics) -> Statistics:
        """The statistics of the data of all ranks, in float64, the same bits on every rank.

        Ranks may have seen different spatial sizes; a rank may have seen no data at all.
        """
        if (wire := self._wire) is None:
            return statistics
        what = self._at("the sum of statistics")
        outlines = self._meet(wire, what, outline(statistics))
        return added(statistics, outlines, lambda _, own: wire.add(what, own))

    def sum_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sum of every tensor over ranks, in float64, the same bits on every rank. Names and shapes must agree."""
        if self._wire is None:
            return dict(tensors)
        what = self._at("the sum of tensors")
        shapes = self._meet(self._wire, what, {name: list(x.shape) for name, x in tensors.items()})
        for rank, given in enumerate(shapes):
            if given != shapes[0]:
                raise InputError(f"rank {rank} gives {given}, rank 0 gives {shapes[0]}: names and shapes must agree")
        return {name: self._wire.add(what, tensors[name]) for name in shapes[0]}

    def same(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of rank 0, bit for bit: names, shapes, dtypes and values."""
        if self._wire is None:
            return dict(tensors)
        what = self._at("the copy of rank 0")
        named = {name: [str(x.dtype).removeprefix("torch."), list(x.shape)] for name, x in tensors.items()}
        found = {}
        for name, (dtype, shape) in self._meet(self._wire, what, named)[0].items():
            device = tensors[name].device if name in tensors else torch.device("cpu")
            empty = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            found[name] = self._wire.first(what, tensors[name] if self.rank == 0 else empty)
        return found

    def total(self, n: N) -> N:
        """The sum of a number over ranks, in order of rank."""
        added_up: N = sum(self.gather("the total of a number", n))
        return added_up

    def gather(self, what: str, message: Any) -> list[Any]:
        """The messages of all ranks, in order of rank. A message is anything JSON can hold; errors name it `what`."""
        return [message] if self._wire is None else self._meet(self._wire, self._at(what), message)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A block that succeeds on all ranks or on none.

        An exception in it is raised unchanged on its own rank, and as `DistributedError` on the others where they meet
        next. Errors name the block `what`.
        """
        if (wire := self._wire) is None:
            yield
            return
        self._places.append(what)
        try:
            yield
            self._meet(wire, self._at("the end"), None)
        except Exception as error:
            if not self._known(error):
                self._told = error
                with suppress(DistributedError):  # this rank has an error of its own to raise
                    self._meet(wire, self._at("the failure"), None, f"{type(error).__name__}: {error}"[:_LONGEST])
            raise
        except BaseException:
            wire.broken = wire.broken or "it was interrupted"  # do not wait for anyone now
            raise
        finally:
            self._places.pop()
            if not self._places:
                self._told = None  # an exception keeps the frames it came through, and their tensors

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _at(self, what: str) -> str:
        return " in ".join((what, *reversed(self._places)))

    def _meet(self, wire: Wire, at: str, body: Any, error: str | None = None) -> list[Any]:
        """The bodies of all ranks, once all are here and none has failed."""
        messages = wire.exchange(at, {"at": at, "error": error, "body": body})
        failed = [f"rank {r} failed: {m['error']}" for r, m in enumerate(messages) if m["error"] is not None]
        if failed:
            raise DistributedError(f"{'; '.join(failed)} (rank {self.rank} was at {at})")
        if any(m["at"] != at for m in messages):
            shown = "; ".join(f"rank {r} is at {m['at']}" for r, m in enumerate(messages))
            raise DistributedError(f"ranks are out of step: {shown}. Make the same calls in the same order on all")
        return [m["body"] for m in messages]

    def _known(self, error: BaseException | None) -> bool:
        """Whether the other ranks already know of this failure or of its cause."""
        seen: set[int] = set()
        while error is not None and id(error) not in seen:
            if isinstance(error, DistributedError) or error is self._told:
                return True
            seen.add(id(error))
            error = error.__cause__ or error.__context__
        return False


# Ranks must start alike: tensors and settings are compared by digests ----------------------------------------------
def alike(team: Team, what: str, facts: Callable[[], Mapping[str, Any]], remedy: str) -> None:
    """Raise `InputError` on every rank, naming the first fact that differs, unless all ranks have the same facts.

    Facts are values that `plain` understands. Ranks exchange their digests.
    """
    if team.size == 1:
        return
    what_for = f"the comparison of {what}"
    with team.together(what_for):
        mine = {name: plain(value) for name, value in facts().items()}
    told = team.gather(what_for, {name: digest(value) for name, value in mine.items()})
    names = dict.fromkeys(name for each in told for name in each)  # in the order of rank 0, then of the others
    name = next((name for name in names if len({each.get(name) for each in told}) > 1), None)
    if name is None:
        return
    values = team.gather(what_for, _shown(mine.get(name, "nothing")))
    other = next(rank for rank, each in enumerate(told) if each.get(name) != told[0].get(name))
    raise InputError(
        f"{what} must be the same on every rank, but {name} is {values[0]} on rank 0 and {values[other]} on rank "
        f"{other}: {remedy}"
    )


def weights_alike(team: Team, model: nn.Module, of: str = "the model") -> None:
    """Compare the classes of all modules, then all parameters and buffers."""
    where = "" if of == "the model" else f" of {of}"

    def named(facts: Mapping[str, str], kind: str) -> dict[str, str]:
        return {f"{kind} {name!r}{where}" if name else of: fact for name, fact in facts.items()}

    def classes() -> dict[str, str]:
        return {path: type(module).__qualname__ for path, module in model.named_modules(remove_duplicate=False)}

    alike(team, "the modules", lambda: named(classes(), "module"), "build the same model on every rank")
    alike(team, "the weights", lambda: named(tensor_facts(model), "tensor"), BROADCAST)


def graphs_alike(team: Team, trace: Trace, inputs: tuple[Any, ...]) -> None:
    """Compare the traced graphs node by node, if all ranks have inputs of the same shapes."""

    def text(value: Any) -> str:
        return re.sub(r"(cuda|xpu|hpu|npu):\d+", r"\1", str(value))  # ranks have devices of their own

    def nodes() -> dict[str, str]:
        return {f"node {n.name!r}": text((n.op, str(n.target), n.args, n.kwargs)) for n in trace.graph.nodes}

    if team.size > 1 and len({str(each) for each in team.gather("the inputs", list(map(str, inputs)))}) == 1:
        alike(team, "the graph of the model", nodes, "run the same code on every rank")


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... (digest {digest(value)[:16]})"


def digest(value: Any) -> str:
    """The digest of anything JSON can hold."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def plain(value: Any, depth: int = 0) -> Any:
    """Convert a value to JSON types, so that equal settings compare equal.

    Arrays become lists and objects their attributes. Functions are all alike: each process has its own.
    """
    if hasattr(value, "tolist") and not isinstance(value, type):
        value = value.tolist()
    if value is None or isinstance(value, (str, Real)):
        return value if value is None or isinstance(value, (str, int)) else float(value)
    if depth > _DEEPEST or isinstance(value, (nn.Module, torch.optim.Optimizer)):
        return f"a {type(value).__qualname__}"
    if isinstance(value, Mapping):
        return [[plain(key, depth + 1), plain(item, depth + 1)] for key, item in value.items()]
    if isinstance(value, Collection) and not isinstance(value, (bytes, bytearray)):
        items = [plain(item, depth + 1) for item in value]
        return sorted(items, key=repr) if isinstance(value, (set, frozenset)) else items
    if is_dataclass(value) and not isinstance(value, type):
        attributes = {f.name: getattr(value, f.name, None) for f in fields(value)}
    elif callable(value):
        return "a function"
    else:
        attributes = getattr(value, "__dict__", {})
    return {"class": type(value).__qualname__, **{name: plain(item, depth + 1) for name, item in attributes.items()}}


def tensor_facts(model: nn.Module) -> dict[str, str]:
    """Name of every parameter and buffer -> its dtype, shape and a digest of its bytes.

    Devices do not count. A tensor with several names is read once; the other names refer to the first.
    """
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, tensor in named_tensors(model).items():
        known = first.setdefault(id(tensor), name)
        found[name] = _tensor_fact(name, tensor) if known == name else f"the same tensor as {known!r}"
    return found


def _tensor_fact(name: str, tensor: Tensor) -> str:
    if is_lazy(tensor):
        return "not initialised"
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if tensor.is_meta:
        return f"{kind} on the meta device"
    if hasattr(tensor, "full_tensor"):
        raise InputError(
            f"{name!r} is sharded over processes (a {type(tensor).__name__}): gather the whole model on every rank "
            "before, e.g. with torch.distributed.checkpoint.state_dict.get_model_state_dict(full_state_dict=True)"
        )
    what = f"the values of {name!r}, a {type(tensor).__name__}, cannot be compared between ranks"
    with failing_as(InputError, what, "prune in one process, or before the model is quantised or wrapped"):
        dense = tensor.detach().dequantize() if tensor.is_quantized else tensor.detach().to_dense()
        seen = tensor_digest({name: dense.cpu().resolve_conj().resolve_neg().contiguous()}, kind)
    return f"{kind} sha256:{seen[:16]}"
