"""Ranks that must agree: what they start from and what they decide is compared before anything is changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ispasp.calibrate.digest import digest, module_facts, plain, tensor_facts
from ispasp.calibrate.team import Team
from ispasp.errors import InputError
from ispasp.graph.trace import Trace

Facts = Mapping[str, Any]  # name -> anything JSON can hold
_LONGEST = 200
_ABSENT = "nothing"
BROADCAST = (
    "start every rank with the same weights, e.g. `for t in (*model.parameters(), *model.buffers()): "
    "torch.distributed.broadcast(t.data, 0)` (after DistributedDataParallel the buffers of ranks differ as well)"
)
SAME_OPTIONS = "pass the same options on every rank"


def alike(team: Team, what: str, facts: Callable[[], Facts], remedy: str) -> None:
    """Raise `InputError` on every rank, naming the first fact that differs, unless all ranks have the same facts.

    Ranks exchange digests first, and the facts themselves only where those differ.
    """
    if team.size == 1:
        return
    with team.together(f"the comparison of {what}"):
        mine = {name: plain(value) for name, value in facts().items()}
    if len(set(team.gather(f"the comparison of {what}", digest(sorted(mine.items()))))) == 1:
        return
    told = team.gather(f"the comparison of {what}", [[name, digest(value)] for name, value in mine.items()])
    name = _first_difference([dict(each) for each in told])
    values = team.gather(f"the comparison of {what}", _shown(mine.get(name, _ABSENT)))
    other = next(rank for rank, each in enumerate(told) if dict(each).get(name) != dict(told[0]).get(name))
    raise InputError(
        f"{what} must be the same on every rank, but {name} is {values[0]} on rank 0 and {values[other]} on rank "
        f"{other}: {remedy}"
    )


def weights_alike(team: Team, model: nn.Module, of: str = "the model") -> None:
    """Compare the classes of all modules, then all parameters and buffers."""
    where = "" if of == "the model" else f" of {of}"

    def named(facts: Mapping[str, str], kind: str) -> dict[str, str]:
        return {f"{kind} {name!r}{where}" if name else of: fact for name, fact in facts.items()}

    alike(team, "the modules", lambda: named(module_facts(model), "module"), "build the same model on every rank")
    alike(team, "the weights", lambda: named(tensor_facts(model), "tensor"), BROADCAST)


def graphs_alike(team: Team, trace: Trace, inputs: tuple[Any, ...]) -> None:
    """Compare the traced graphs node by node. Ranks that see inputs of other shapes may well have other graphs."""
    if team.size > 1 and len({str(each) for each in team.gather("the inputs", plain(list(map(str, inputs))))}) == 1:
        alike(team, "the graph of the model", lambda: _nodes(trace), "run the same code on every rank")


def _nodes(trace: Trace) -> dict[str, str]:
    def text(value: Any) -> str:
        return re.sub(r"(cuda|xpu|hpu|npu):\d+", r"\1", str(value))  # ranks have devices of their own

    return {
        f"node {node.name!r}": text((node.op, str(node.target), node.args, node.kwargs)) for node in trace.graph.nodes
    }


def _first_difference(told: list[dict[str, str]]) -> str:
    """The first name, in the order of rank 0 and then of the others, whose digests differ."""
    names = dict.fromkeys(name for each in told for name in each)
    return next(name for name in names if len({each.get(name) for each in told}) > 1)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... (digest {digest(value)[:16]})"
