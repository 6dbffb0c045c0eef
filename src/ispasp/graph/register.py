"""Rules for users' own ops: what a custom op does to axes, and whether it is a linear layer."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket

from ispasp.errors import InputError
from ispasp.graph.ops import OPS, Arguments, Form, Op, Operand
from ispasp.graph.rules.contraction import linear_product
from ispasp.graph.rules.pointwise import pointwise
from ispasp.graph.track import RULES, Rule, Tracker
from ispasp.graph.values import Value
from ispasp.types import LinearConsumer

_ADDED: set[Any] = set()


def register_op(target: Any, rule: Rule, contraction: Op | None = None) -> None:
    """Say what a custom op does to axes, so that units before and after it can be removed.

    `target` is an op of `torch.library.custom_op`, one of `torch.ops`, or a name such as "mylib.swish.default". The
    rule is called as rule(tracker, node, **arguments), see `elementwise` and CONTRIBUTING. An op that sums over an
    axis with a parameter also needs its `contraction`; `linear_like` gives both.

        register_op(torch.ops.mylib.swish, elementwise)
        register_op(torch.ops.mylib.matvec, *linear_like(data="x", weight="weight"))

    A rule that does not fit is found out: pruning compares every network with the masked one.
    """
    ops = _overloads(target)
    if not callable(rule):
        raise InputError(
            f"the rule for {target} is {rule!r}, which cannot be called: pass a function such as "
            "ispasp.graph.elementwise"
        )
    if contraction is not None and not isinstance(contraction, Op):
        raise InputError(f"the contraction of {target} is a {type(contraction).__name__}: pass an ispasp.graph.Op")
    for op in ops:
        if op in RULES or str(op) in RULES:
            raise InputError(f"{op} has a rule already: call ispasp.graph.unregister_op first, if it is yours")
    for op in ops:
        RULES[op] = rule
        if contraction is not None:
            OPS[op] = contraction
        _ADDED.add(op)


def unregister_op(target: Any) -> None:
    """Take back what `register_op` added: the op freezes what it touches again."""
    ops = _overloads(target)
    unknown = [str(op) for op in ops if op not in _ADDED]
    if unknown:
        raise InputError(f"{unknown[0]} was not added by register_op: only such ops can be taken back")
    for op in ops:
        del RULES[op]
        OPS.pop(op, None)
        _ADDED.remove(op)


def elementwise(t: Tracker, node: fx.Node, **arguments: Any) -> Any:
    """The rule of an op that works on each position alone; several tensors are broadcast as in `torch.add`."""
    value = pointwise(t, node, **arguments)
    example = node.meta["val"]
    return [value[0]] * len(example) if isinstance(value, list) else value


def linear_like(data: str = "x", weight: str = "weight", bias: str = "") -> tuple[Rule, Op]:
    """The rule and the contraction of an op that computes x W^T + b, W (outputs, channels).

    `data`, `weight` and `bias` are the names of its arguments.
    """

    def rule(t: Tracker, node: fx.Node, **arguments: Any) -> Value:
        x, W = _argument(node, data, arguments), _argument(node, weight, arguments)
        return linear_product(t, node, (data, x), (weight, W), _argument(node, bias, arguments) if bias else None)

    def form(given: Arguments, at: Operand) -> list[Form]:
        W = given[weight]
        return [Form(LinearConsumer(W), _same, _same)] if at.name == data and W.ndim == 2 else []

    return rule, Op(form, weight=weight, bias=bias, channels=-1)


def _argument(node: fx.Node, name: str, arguments: Arguments) -> Any:
    called = "x" if name in ("self", "input") else name  # as the tracker hands them over
    if called not in arguments:
        raise InputError(f"{node.target} has no argument {name!r}: pass linear_like some of {', '.join(arguments)}")
    return arguments[called]


def _same(x: Tensor) -> Tensor:
    return x


def _overloads(target: Any) -> list[Any]:
    target = getattr(target, "_opoverload", target)  # what torch.library.custom_op returns
    if isinstance(target, OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads()]  # type: ignore[no-untyped-call]
    if isinstance(target, OpOverload) or (isinstance(target, str) and re.fullmatch(r"\w+\.\w+\.\w+", target)):
        return [target]
    raise InputError(
        f"{target!r} is no op: pass one such as torch.ops.mylib.swish, what torch.library.custom_op returned, or a "
        "name such as 'mylib.swish.default'"
    )
